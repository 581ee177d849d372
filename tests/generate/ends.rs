//! Where a continuation ends: at end tokens, as transformers finds them.

use std::fs;

use moa_export::{
    backend::OrtOperators,
    checkpoint::Checkpoint,
    export::{ExportOptions, SideFileOptions, export},
    generate::{Finish, Prompt, SamplingOptions},
};
use moa_graphs::Form;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::language_models::{GREEDY, command, exported, generator, goldens, read};
use crate::{data, out};

#[test]
fn an_end_token_ends_its_row_alone() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let (prompts, expected): (Vec<_>, Vec<_>) = goldens("jetmoe/bf16").into_iter().unzip();
    let options = SamplingOptions { ignore_eos: false, ..GREEDY };
    let found = generator(&folder, OrtOperators::Library, 32).generate(&prompts, &options).unwrap();
    let mut ended = 0;
    for (expected, found) in expected.iter().zip(&found) {
        match expected.iter().position(|id| *id == 2) {
            Some(end) => {
                ended += 1;
                assert_eq!((&found.tokens[..], found.finish), (&expected[..=end], Finish::Eos));
            }
            None => assert_eq!((&found.tokens, found.finish), (expected, Finish::Length)),
        }
    }
    assert!((1..expected.len()).contains(&ended), "{ended} rows ended");
}

/// A checkpoint of the fixture with these keys and no other end token, and perhaps a `generation_config.json`.
fn checkpoint_that_ends(keys: &Value, generation: Option<Value>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(data("jetmoe/bf16/model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut config = read(&data("jetmoe/bf16/config.json"));
    config.as_object_mut().unwrap().remove("eos_token_id");
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    if let Some(generation) = generation {
        fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    }
    folder
}

/// What transformers 4.57 takes for the end of a text in the same files.
#[test]
fn a_text_ends_where_transformers_ends_it() {
    let (prompts, expected): (Vec<_>, Vec<_>) = goldens("jetmoe/bf16").into_iter().unzip();
    let row = expected.iter().position(|tokens| tokens.contains(&2)).unwrap();
    let (prompt, tokens) = (&prompts[row], &expected[row]);
    let (first, end) = (tokens[0], tokens.iter().position(|id| *id == 2).unwrap());
    assert!(first != 2 && end + 1 < tokens.len() && !tokens[..end].contains(&0));
    let all = tokens.len();
    let from_config = |eos: Value| Some(json!({ "_from_model_config": true, "eos_token_id": eos }));
    type Case = (Value, Option<Value>, Value, usize);
    let cases: [Case; 16] = [
        (json!({}), None, json!(2), end + 1),
        (json!({ "eos_token_id": null }), None, json!([]), all),
        (json!({ "eos_token_id": [] }), None, json!([]), all),
        (json!({ "eos_token_id": [127, first] }), None, json!([127, first]), 1),
        (json!({ "eos_token_id": [2, -1] }), None, json!(2), end + 1),
        (json!({ "eos_token_id": [-1] }), None, json!([]), all),
        (json!({ "eos_token_id": 2 }), Some(json!({})), json!([]), all),
        (json!({ "eos_token_id": 2 }), Some(json!({ "eos_token_id": null })), json!([]), all),
        (json!({ "eos_token_id": null }), Some(json!({ "eos_token_id": first })), json!(first), 1),
        (json!({ "eos_token_id": first }), Some(json!({ "eos_token_id": [2] })), json!(2), end + 1),
        (json!({ "eos_token_id": first }), from_config(json!(2)), json!(2), end + 1),
        (json!({ "eos_token_id": first, "top_p": 0.9 }), Some(json!({ "eos_token_id": 2 })), json!(2), end + 1),
        (json!({ "eos_token_id": first, "top_p": 0.9 }), from_config(json!(2)), json!(first), 1),
        (json!({ "eos_token_id": first, "max_length": 50 }), from_config(Value::Null), json!(first), 1),
        (json!({ "eos_token_id": null, "top_p": 0.9 }), from_config(json!(first)), json!([]), all),
        (json!({ "do_sample": true }), from_config(json!(first)), json!(2), end + 1),
    ];
    for (keys, generation, named, length) in cases {
        let what = format!("{keys}, {generation:?}");
        let is_named = generation.as_ref().is_some_and(|generation| generation.get("_from_model_config").is_none())
            || keys.as_object().unwrap().contains_key("eos_token_id");
        let (checkpoint, folder) = (checkpoint_that_ends(&keys, generation), tempfile::tempdir().unwrap());
        let side_files = SideFileOptions { beside: Some(checkpoint.path().into()), ..SideFileOptions::default() };
        let opened = Checkpoint::open(checkpoint.path(), None).unwrap();
        export(&opened, &out(&folder), &ExportOptions { side_files, ..ExportOptions::default() }).unwrap();
        let genai = out(&folder).join("genai_config.json");
        assert_eq!(read(&genai)["model"]["eos_token_id"], named, "{what}");
        let options = SamplingOptions { max_new: all, ignore_eos: false, ..GREEDY };
        let generated = |folder| {
            let found = generator(folder, OrtOperators::Library, 1).generate(std::slice::from_ref(prompt), &options);
            found.unwrap().remove(0).tokens
        };
        assert_eq!(generated(&folder), tokens[..length], "{what}");
        // An absent key has a default that only the class of JetMoE knows.
        if is_named {
            fs::remove_file(genai).unwrap();
            assert_eq!(generated(&folder), tokens[..length], "{what}, without genai_config.json");
        }
    }
}

/// transformers would heed them, so that its tokens are others.
#[test]
fn settings_of_generation_are_no_silent_ones() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let notes = |settings: &Value, more: &[&str]| {
        fs::write(out(&folder).join("generation_config.json"), settings.to_string()).unwrap();
        let output = command(&out(&folder), &[&["--input", "5 6", "--token-ids", "--max-new", "1"], more].concat());
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let unheeded = json!({ "repetition_penalty": 1.2, "suppress_tokens": [7], "max_length": 99, "top_k": 50 });
    let told = "note: generation_config.json sets repetition_penalty, suppress_tokens, which nothing here heeds\n";
    assert_eq!(notes(&unheeded, &[]), told);
    let drawn = json!({ "do_sample": true, "temperature": 0.7 });
    let told =
        "note: generation_config.json asks for tokens that are drawn, as --temperature, --top-k and --top-p do\n";
    assert_eq!(notes(&drawn, &[]), told);
    assert_eq!(notes(&drawn, &["--temperature", "0.7"]), "");
    let further = json!({
        "min_new_tokens": 9, "stop_strings": ["t7"], "guidance_scale": 1.5, "sequence_bias": [[[7], -9]],
        "watermarking_config": { "bias": 2.0 }, "encoder_repetition_penalty": 2.0, "max_time": 0.5,
    });
    let told = "note: generation_config.json sets min_new_tokens, sequence_bias, guidance_scale, stop_strings, \
                watermarking_config, max_time, encoder_repetition_penalty, which nothing here heeds\n";
    assert_eq!(notes(&further, &[]), told);
    assert_eq!(notes(&json!({ "do_sample": false, "num_beams": 1, "suppress_tokens": null }), &[]), "");
    assert_eq!(notes(&json!({ "guidance_scale": 1.0, "min_new_tokens": null }), &[]), "");
}

/// Where transformers goes by `config.json`, its settings are told.
#[test]
fn settings_of_generation_may_be_those_of_the_model() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let (path, generation) = (out(&folder).join("config.json"), out(&folder).join("generation_config.json"));
    let plain = read(&path);
    let notes = |keys: &Value| {
        let mut config = plain.clone();
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        fs::write(&path, config.to_string()).unwrap();
        let output = command(&out(&folder), &["--input", "5 6", "--token-ids", "--max-new", "1"]);
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let keys = json!({ "repetition_penalty": 1.3, "do_sample": true, "min_new_tokens": 4 });
    let told = "note: config.json sets repetition_penalty, min_new_tokens, which nothing here heeds\n\
                note: config.json asks for tokens that are drawn, as --temperature, --top-k and --top-p do\n";
    for written in [None, Some(json!({ "_from_model_config": true, "num_beams": 4 }))] {
        match written {
            None => fs::remove_file(&generation).unwrap(),
            Some(written) => fs::write(&generation, written.to_string()).unwrap(),
        }
        assert_eq!(notes(&keys), told);
    }
    let told = "note: generation_config.json sets num_beams, which nothing here heeds\n";
    for keys in [json!({}), json!({ "min_new_tokens": 4 })] {
        assert_eq!(notes(&keys), told);
    }
    fs::write(&generation, "{}").unwrap();
    assert_eq!(notes(&keys), "");
}

/// The graph has as many positions as it has, whatever files say, and where none says anything.
#[test]
fn a_text_ends_with_the_positions_of_its_graph() {
    for form in [Form::Function, Form::Standard] {
        for (lies, says) in [(true, "1000"), (false, "")] {
            let folder = exported("jetmoe/bf16", form, false);
            for name in ["config.json", "genai_config.json", "generation_config.json"] {
                let path = out(&folder).join(name);
                let Ok(text) = fs::read_to_string(&path) else { continue };
                match lies {
                    true => fs::write(&path, text.replace("256", says)).unwrap(),
                    false => fs::remove_file(&path).unwrap(),
                }
            }
            let mut generator = generator(&folder, OrtOperators::Library, 32);
            assert_eq!(generator.context(), Some(256), "{form:?} {lies}");
            let options = SamplingOptions { max_new: 300, ignore_eos: true, ..GREEDY };
            let prompt = [Prompt::Tokens(vec![5; 250])];
            let found = generator.generate(&prompt, &options).unwrap();
            assert_eq!((found[0].tokens.len(), found[0].finish), (6, Finish::Length), "{form:?} {lies}");
        }
    }
}

/// A model without positions goes on behind the tokens that it was trained on at a time, 16 here.
#[test]
fn a_graph_without_positions_has_no_last_one() {
    let folder = exported("molm/mlp", Form::Function, false);
    let prompt = Prompt::Tokens((1..21).collect());
    let options = SamplingOptions { max_new: 30, ..GREEDY };
    let mut generator = generator(&folder, OrtOperators::Library, 1);
    assert_eq!(generator.context(), None);
    let found = generator.generate(&[prompt], &options).unwrap();
    assert_eq!((found[0].tokens.len(), found[0].finish), (30, Finish::Length));
}
