//! Vocabularies and tokenizers that `generate` does not follow in full, and what is said of that.

use std::{fs, path::Path, process::Command};

use moa_graphs::Form;
use serde_json::{Value, json};

use crate::{Symbols, UNTIED, data, language_models, out, untied_dictionaries};

/// stderr of the program, which succeeds.
fn notes(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{notes}");
    notes
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_moa-export"))
}

#[test]
fn pieces_of_sentencepiece_are_told() {
    let word = |id: u32| format!("w{id}");
    let piece = |id: u32| format!("{}w{id}", if id == 7 { "▁" } else { "" });
    let cases: [(Symbols<'_>, &str); 4] = [
        ([&piece, &piece], "takes lines that SentencePiece has split already, and prints pieces that it is to join"),
        ([&piece, &word], "takes lines that SentencePiece has split already"),
        ([&word, &piece], "prints pieces that SentencePiece is to join"),
        ([&word, &word], ""),
    ];
    for (symbols, what) in cases {
        let folder = tempfile::tempdir().unwrap();
        let mut export = program();
        export.arg(data(UNTIED)).arg("-o").arg(out(&folder));
        let names = [("--source-dict", "source.txt"), ("--target-dict", "target.txt")];
        for ((option, name), text) in names.into_iter().zip(untied_dictionaries(symbols)) {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            export.arg(option).arg(path);
        }
        let pieces =
            "note: the dictionary has pieces of SentencePiece (`▁the`), which is not applied here: `generate` ";
        let told = if what.is_empty() { String::new() } else { format!("{pieces}{what}\n") };
        assert_eq!(notes(&mut export), told);
    }
}

/// A tokenizer of the words `t0` to `t127` that begins a text with `t1`.
fn write_tokenizer(folder: &Path, config: &Value) {
    let vocabulary: serde_json::Map<_, _> = (0..128).map(|id| (format!("t{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "decoder": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "t1", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "t1": { "id": "t1", "ids": [1], "tokens": ["t1"] } },
        },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "t3" },
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

#[test]
fn a_tokenizer_that_does_not_as_its_configuration_says_is_told() {
    let checkpoint = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(data("jetmoe/bf16").join(name), checkpoint.path().join(name)).unwrap();
    }
    let exported = language_models::exported("jetmoe/bf16", Form::Function, false);
    for (config, what) in [
        (json!({ "add_bos_token": true, "add_eos_token": false }), None),
        (json!({ "add_bos_token": false }), Some("add_bos_token is false, and tokenizer.json puts t1 before a text")),
        (
            json!({ "add_eos_token": true }),
            Some("add_eos_token is true, and tokenizer.json puts no token behind a text"),
        ),
        (json!({ "add_bos_token": "no" }), Some("key \"add_bos_token\" must be true or false, found \"no\"")),
    ] {
        let told = |folder: &Path| {
            let path = folder.join("tokenizer_config.json");
            let end = "; `generate` goes by tokenizer.json alone\n";
            what.map_or_else(String::new, |what| format!("note: {}: {what}{end}", path.display()))
        };
        write_tokenizer(checkpoint.path(), &config);
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(notes(program().arg(checkpoint.path()).arg("-o").arg(out(&folder))), told(&out(&folder)));
        write_tokenizer(&out(&exported), &config);
        let generate = |input: &[&str]| notes(program().arg("generate").arg(out(&exported)).args(input));
        assert_eq!(generate(&["--max-new", "1", "--input", "t5"]), told(&out(&exported)));
        assert_eq!(generate(&["--max-new", "1", "--input", "5", "--token-ids"]), "");
    }
}

#[test]
fn a_tokenizer_of_another_size_is_told() {
    let exported = language_models::exported("jetmoe/bf16", Form::Function, false);
    write_tokenizer(&out(&exported), &json!({}));
    let path = out(&exported).join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (size, is_told) in [(64, false), (63, true), (128, false), (129, true)] {
        let vocabulary: serde_json::Map<_, _> = (0..size).map(|id| (format!("t{id}"), id.into())).collect();
        tokenizer["model"]["vocab"] = Value::Object(vocabulary);
        fs::write(&path, tokenizer.to_string()).unwrap();
        let found = notes(program().arg("generate").arg(out(&exported)).args(["--max-new", "1", "--input", "t5"]));
        let told =
            format!("note: tokenizer.json knows {size} tokens, and the model 128: it may be that of another model\n");
        assert_eq!(found, if is_told { told } else { String::new() });
    }
}

/// What generation settings of the folder say about lengths, where no option does.
#[test]
fn a_length_in_the_settings_is_told() {
    let exported = language_models::exported("jetmoe/bf16", Form::Function, false);
    let path = out(&exported).join("generation_config.json");
    for key in ["max_new_tokens", "max_length"] {
        fs::write(&path, json!({ key: 2 }).to_string()).unwrap();
        let run = |more: &[&str]| {
            notes(program().arg("generate").arg(out(&exported)).args(["--input", "5", "--token-ids"]).args(more))
        };
        let told = format!("sets {key}; here --max-new says how many tokens follow, 128 where it is absent\n");
        let found = run(&[]);
        assert!(found.starts_with("note: ") && found.ends_with(&told), "{found}");
        assert_eq!(run(&["--max-new", "3"]), "");
    }
}

#[test]
fn translations_that_are_cut_off_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    notes(program().arg(data("nmt")).arg("-o").arg(out(&folder)));
    let lines = folder.path().join("lines.txt");
    fs::write(&lines, "nine hundred\n\nnine\n").unwrap();
    let run = |most: &str| {
        notes(program().arg("generate").arg(out(&folder)).arg("--input").arg(&lines).args(["--max-len-b", most]))
    };
    let end = "ended at the most tokens that --max-len-a, --max-len-b and the positions of the model allow\n";
    assert_eq!(run("1"), format!("note: 2 translations were {end}"));
    assert_eq!(run("60"), "");
}
