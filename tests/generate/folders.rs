//! What lies in an exported folder, and folders that are refused.

use std::{fs, path::Path};

use moa_export::{
    backend::{OrtOperators, OrtOptions},
    checkpoint::Checkpoint,
    export::{ExportError, ExportOptions, SideFileOptions, VocabularyError, export},
    generate::{GenerateError, Prompt, SearchOptions, Translator, TranslatorOptions},
    onnx::proto::{ModelProto, NodeProto, StringStringEntryProto, TensorProto, tensor_proto::DataType, type_proto},
    text::{Segmentation, TranslationConfig},
};
use moa_graphs::Form;
use prost::Message;
use serde_json::Value;
use tempfile::TempDir;

use crate::{Symbols, UNTIED, data, exported, language_models, options, out, translator, untied_dictionaries};

#[test]
fn the_vocabulary_is_copied_and_described() {
    let folder = exported(Form::Function);
    for name in ["dict.txt", "bpe.codes"] {
        assert_eq!(fs::read(out(&folder).join(name)).unwrap(), fs::read(data("nmt").join(name)).unwrap());
    }
    let text = fs::read_to_string(out(&folder).join("generation.json")).unwrap();
    let expected = serde_json::json!({
        "format": 1, "tokenizer": "bpe",
        "source_dictionary": "dict.txt", "target_dictionary": "dict.txt", "bpe_codes": "bpe.codes",
        "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "unk_token_id": 3, "decoder_start_token_id": 2,
        "left_pad_source": true, "max_source_positions": 1024, "max_target_positions": 1024,
    });
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
}

fn export_named(vocabulary: &SideFileOptions, model: &str, out: &Path) -> Result<usize, ExportError> {
    let checkpoint = Checkpoint::open(&data(model), None).unwrap();
    let options = ExportOptions { side_files: vocabulary.clone(), ..ExportOptions::default() };
    export(&checkpoint, out, &options).map(|report| report.files.len())
}

/// Exports [`UNTIED`] with dictionaries of these texts.
fn export_untied(texts: &[String; 2], folder: &TempDir) -> TranslationConfig {
    let dictionaries = ["dict.en.txt", "dict.de.txt"].map(|name| folder.path().join(name));
    for (path, text) in dictionaries.iter().zip(texts) {
        fs::write(path, text).unwrap();
    }
    let vocabulary = SideFileOptions { dictionaries: Some(dictionaries), ..SideFileOptions::default() };
    assert_eq!(export_named(&vocabulary, UNTIED, &out(folder)).unwrap(), 5);
    TranslationConfig::read(&out(folder)).unwrap()
}

#[test]
fn two_dictionaries_keep_their_sides() {
    let folder = tempfile::tempdir().unwrap();
    let texts = untied_dictionaries([&|id| format!("en{id}"), &|id| format!("de{id}")]);
    let config = export_untied(&texts, &folder);
    let written =
        ["dict.source.txt", "dict.target.txt"].map(|name| fs::read_to_string(out(&folder).join(name)).unwrap());
    assert!(written == texts);
    assert_eq!(config.segmentation, Segmentation::Words);
    assert_eq!([config.source_dictionary, config.target_dictionary], ["dict.source.txt", "dict.target.txt"]);
    assert_eq!(config.bpe_codes, None);
}

/// fairseq splits at whitespace, also where each symbol is a letter, as in `c a t`.
#[test]
fn characters_are_those_of_both_sides_with_a_space() {
    let letter = |id: u32| char::from_u32(u32::from(b'a') + id - 4).unwrap().to_string();
    let spaced = |id: u32| if id == 4 { "▁".to_owned() } else { letter(id) };
    let piece = |id: u32| if id == 9 { "▁the".to_owned() } else { spaced(id) };
    let cases: [(Symbols<'_>, Segmentation); 5] = [
        ([&spaced, &spaced], Segmentation::Characters),
        ([&spaced, &letter], Segmentation::Characters),
        ([&letter, &letter], Segmentation::Words),
        ([&letter, &spaced], Segmentation::Words),
        ([&spaced, &piece], Segmentation::Words),
    ];
    for (index, (symbols, expected)) in cases.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(export_untied(&untied_dictionaries(symbols), &folder).segmentation, expected, "{index}");
    }
}

#[test]
fn one_embedding_has_one_dictionary() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["dict.en.txt", "dict.de.txt"].map(|name| folder.path().join(name));
    let symbols = fs::read_to_string(data("nmt/dict.txt")).unwrap();
    let counted = |line: &str| format!("{} 1\n", line.rsplit_once(' ').unwrap().0);
    fs::write(&paths[0], &symbols).unwrap();
    fs::write(&paths[1], symbols.lines().map(counted).collect::<String>()).unwrap();
    let vocabulary = SideFileOptions { dictionaries: Some(paths.clone()), ..SideFileOptions::default() };
    assert_eq!(export_named(&vocabulary, "nmt", &out(&folder)).unwrap(), 5, "counts may differ");
    fs::write(&paths[1], symbols.lines().rev().map(counted).collect::<String>()).unwrap();
    let error = export_named(&vocabulary, "nmt", &folder.path().join("other")).unwrap_err();
    let ExportError::Vocabulary(VocabularyError::Shared { paths: found, id: 4, .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!(*found, paths);
    assert!(!folder.path().join("other").exists());
}

#[test]
fn dictionaries_are_found_by_language() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    fs::create_dir(&checkpoint).unwrap();
    fs::copy(data(UNTIED).join("model.safetensors"), checkpoint.join("model.safetensors")).unwrap();
    let config = fs::read_to_string(data(UNTIED).join("config.json")).unwrap();
    let named =
        |source: &str| config.replacen('{', &format!(r#"{{"source_lang": "{source}", "target_lang": "de","#), 1);
    fs::write(checkpoint.join("config.json"), named("en")).unwrap();
    let [english, german] = untied_dictionaries([&|id| format!("en{id}"), &|id| format!("de{id}")]);
    fs::write(checkpoint.join("dict.en.txt"), &english).unwrap();
    fs::write(checkpoint.join("dict.de.txt"), &german).unwrap();
    fs::copy(data("nmt/bpe.codes"), checkpoint.join("bpecodes")).unwrap();
    let files = |out: &Path| {
        let vocabulary = SideFileOptions { beside: Some(checkpoint.clone()), ..SideFileOptions::default() };
        export_named(&vocabulary, checkpoint.to_str().unwrap(), out).unwrap()
    };
    assert_eq!(files(&out(&folder)), 6);
    let generation = TranslationConfig::read(&out(&folder)).unwrap();
    assert_eq!([generation.source_dictionary, generation.target_dictionary], ["dict.source.txt", "dict.target.txt"]);
    assert_eq!(generation.bpe_codes.as_deref(), Some("bpe.codes"));
    for (name, symbols) in [("dict.source.txt", &english), ("dict.target.txt", &german)] {
        assert!(fs::read_to_string(out(&folder).join(name)).unwrap() == *symbols, "{name}");
    }
    for source in ["fr", "../checkpoint/dict.en"] {
        fs::write(checkpoint.join("config.json"), named(source)).unwrap();
        assert_eq!(files(&folder.path().join(source.replace('/', "_"))), 2, "{source}");
    }
}

#[test]
fn a_dictionary_of_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let with =
        |path: &str| SideFileOptions { dictionaries: Some([data(path), data(path)]), ..SideFileOptions::default() };
    let error = export_named(&with("mlm/dict.txt"), "nmt", &out(&folder)).unwrap_err();
    assert!(matches!(error, ExportError::Vocabulary(VocabularyError::Size { rows: 120, .. })), "{error}");
    let error = export_named(&with("nmt/config.json"), "nmt", &out(&folder)).unwrap_err();
    assert!(error.to_string().ends_with("config.json: line 1: expected a symbol and its count"), "{error}");
    let error = export_named(&with("mlm/dict.txt"), "mlm", &out(&folder)).unwrap_err();
    assert!(matches!(error, ExportError::NoVocabulary { .. }), "{error}");
    assert!(!out(&folder).exists());
}

#[test]
fn without_a_dictionary_there_are_only_graphs() {
    let folder = tempfile::tempdir().unwrap();
    let beside = SideFileOptions { beside: Some(data("variants/v_ffd_moe")), ..SideFileOptions::default() };
    assert_eq!(export_named(&beside, "variants/v_ffd_moe", &out(&folder)).unwrap(), 2);
    let error = Translator::open(&out(&folder), options(OrtOperators::Library, 1)).unwrap_err();
    assert!(matches!(&error, GenerateError::Missing { path } if path.ends_with("generation.json")), "{error}");
}

/// What opening says after `change`.
fn refused(change: impl FnOnce(&Path)) -> GenerateError {
    let folder = exported(Form::Function);
    change(&out(&folder));
    Translator::open(&out(&folder), options(OrtOperators::Library, 1)).unwrap_err()
}

fn edit(path: &Path, change: impl FnOnce(&mut ModelProto)) {
    let mut model = ModelProto::decode(fs::read(path).unwrap().as_slice()).unwrap();
    change(&mut model);
    fs::write(path, model.encode_to_vec()).unwrap();
}

/// Where the graph does not fix the number of tokens, and where its first weight is NaN.
#[test]
fn faults_behind_prompts_have_their_numbers() {
    let folder = language_models::exported("jetmoe/bf16", Form::Standard, false);
    edit(&out(&folder).join("model.onnx"), |model| {
        let graph = model.graph.as_mut().unwrap();
        let logits = graph.output.iter_mut().find(|output| output.name == "logits").unwrap();
        let Some(type_proto::Value::TensorType(logits)) = logits.r#type.as_mut().unwrap().value.as_mut() else {
            panic!()
        };
        logits.shape.as_mut().unwrap().dim.last_mut().unwrap().value = None;
        let is_float =
            |weight: &&mut TensorProto| weight.data_type == DataType::Float as i32 && weight.raw_data.is_some();
        let weight = graph.initializer.iter_mut().find(is_float).unwrap();
        weight.raw_data = Some(vec![0xff; weight.raw_data.as_ref().unwrap().len()].into());
    });
    let mut generator = language_models::generator(&folder, OrtOperators::Functions, 2);
    for (token, message) in [
        (-1, "prompt 2: token -1 is below 0, where ids begin"),
        (7, "prompt 1: the model computes NaN or infinite scores"),
    ] {
        let prompts = [7, token].map(|id| Prompt::Tokens(vec![id]));
        assert_eq!(generator.generate(&prompts, &language_models::GREEDY).unwrap_err().to_string(), message);
    }
}

/// Nothing but the operator may see how many rows a cache has; where something does, the caches grow step by step.
#[test]
fn caches_are_written_in_place_where_nothing_else_sees_them() {
    let texts = ["nine hundred", "one hundred and four"];
    let translate = |folder: &_, operators| {
        let mut translator = translator(folder, operators, 32);
        let found = translator.translate(&texts, &SearchOptions::default()).unwrap();
        let texts: Vec<_> = found.into_iter().map(|mut found| found.remove(0).text).collect();
        (translator.shares_caches(), texts)
    };
    let folder = exported(Form::Function);
    let (shared, expected) = translate(&folder, OrtOperators::Library);
    assert!(shared);
    assert_eq!(translate(&folder, OrtOperators::Functions), (false, expected.clone()));
    let seen = NodeProto {
        input: vec!["past_key_values.1.decoder.value".into()],
        output: vec!["rows".into()],
        op_type: "Shape".into(),
        ..NodeProto::default()
    };
    edit(&out(&folder).join("decoder_model.onnx"), |model| model.graph.as_mut().unwrap().node.push(seen));
    assert_eq!(translate(&folder, OrtOperators::Library), (false, expected.clone()));
    assert_eq!(translate(&exported(Form::Standard), OrtOperators::Library), (false, expected));
}

/// A copy that was cut off leaves an encoder of one export beside a decoder of another one.
#[test]
fn graphs_of_two_exports_are_refused() {
    for (key, value) in [("moa.source.sha256", "0"), ("moa.dtype", "fp16"), ("moa.gate_mode", "topk_softmax")] {
        let error = refused(|out| {
            edit(&out.join("encoder_model.onnx"), |model| {
                model.metadata_props.retain(|entry| entry.key != key);
                model.metadata_props.push(StringStringEntryProto { key: key.into(), value: value.into() });
            });
        });
        assert!(matches!(error, GenerateError::TwoExports { key: found, .. } if found == key), "{error}");
    }
    let folder = exported(Form::Function);
    let unsaid = |model: &mut ModelProto| model.metadata_props.clear();
    edit(&out(&folder).join("encoder_model.onnx"), unsaid);
    Translator::open(&out(&folder), options(OrtOperators::Library, 1)).unwrap();
}

#[test]
fn broken_folders_are_refused_by_name() {
    for name in ["encoder_model.onnx", "decoder_model.onnx", "dict.txt", "bpe.codes"] {
        let error = refused(|out| fs::remove_file(out.join(name)).unwrap()).to_string();
        assert!(error.contains(name), "{error}");
    }
    let error =
        refused(|out| fs::copy(out.join("encoder_model.onnx"), out.join("decoder_model.onnx")).map(drop).unwrap());
    assert!(error.to_string().ends_with("there is no input `past_key_values.0.decoder.key`: no decoder with caches"));
    let error = refused(|out| fs::write(out.join("decoder_model.onnx"), "no model").unwrap()).to_string();
    assert!(error.contains("a text, expected an ONNX model"), "{error}");
    let error = refused(|out| fs::copy(data("mlm/dict.txt"), out.join("dict.txt")).map(drop).unwrap()).to_string();
    let expected = "dict.txt: 66 symbols with the four special ones; the model chooses from 120";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn types_that_are_not_kept_are_refused_by_name() {
    for (name, expected) in [
        ("past_key_values.1.decoder.key", "is no float of 32 or 16 bits; only caches of these types are kept"),
        ("logits", "output `logits` is no 32-bit float, the only type that is read"),
    ] {
        let error = refused(|out| {
            edit(&out.join("decoder_model.onnx"), |model| {
                let graph = model.graph.as_mut().unwrap();
                let value = graph.input.iter_mut().chain(&mut graph.output).find(|value| value.name == name).unwrap();
                match value.r#type.as_mut().unwrap().value.as_mut() {
                    Some(type_proto::Value::TensorType(tensor)) => tensor.elem_type = DataType::Double as i32,
                    other => panic!("{other:?}"),
                }
            });
        });
        assert!(error.to_string().ends_with(expected), "{error}");
    }
}

#[test]
fn outputs_that_are_missing_are_named() {
    for (file, name) in
        [("encoder_model.onnx", "present.1.encoder.value"), ("decoder_model.onnx", "present.1.decoder.value")]
    {
        let error = refused(|out| {
            edit(&out.join(file), |model| model.graph.as_mut().unwrap().output.retain(|output| output.name != name));
        });
        assert!(error.to_string().ends_with(&format!("{file}: there is no output `{name}`")), "{error}");
    }
}

#[test]
fn another_version_of_the_operators_is_refused() {
    let error = refused(|out| {
        edit(&out.join("decoder_model.onnx"), |model| {
            for import in model.opset_import.iter_mut().filter(|import| import.domain == "ai.moa") {
                import.version = 2;
            }
        });
    });
    let expected = "version 2 of the operators ai.moa; this program and its library have version 1";
    assert!(error.to_string().ends_with(expected), "{error}");
}

#[test]
fn a_file_that_is_no_library_is_refused() {
    let folder = exported(Form::Function);
    let runtime =
        OrtOptions { threads: Some(1), operator_library: Some(data("nmt/dict.txt")), ..OrtOptions::default() };
    let options = TranslatorOptions { runtime, ..TranslatorOptions::default() };
    let error = Translator::open(&out(&folder), options).unwrap_err().to_string();
    let parts = ["the operator library libmoa_ort at ", "dict.txt cannot be loaded: "];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn options_and_lines_are_checked_before_anything_runs() {
    let folder = exported(Form::Function);
    let mut translator = translator(&folder, OrtOperators::Library, 4);
    let default = SearchOptions::default();
    for (options, word) in [
        (SearchOptions { beam: 0, ..default }, "beam 0"),
        (SearchOptions { nbest: 5, ..default }, "nbest 5"),
        (SearchOptions { nbest: 0, ..default }, "nbest 0"),
        (SearchOptions { length_penalty: f64::NAN, ..default }, "length penalty NaN: it must be from -10 to 10"),
        (SearchOptions { length_penalty: 1e30, ..default }, "length penalty 1000000000000000000000000000000: it must"),
        (SearchOptions { length_penalty: -10.1, ..default }, "length penalty -10.1: it must be from -10 to 10"),
        (SearchOptions { max_len_a: -1.0, ..default }, "max-len-a -1"),
        (SearchOptions { min_len: 10, max_len_b: 5, ..default }, "min-len 10: more than max-len-b, 5"),
        (
            SearchOptions { min_len: 10, max_len_a: 1.0, max_len_b: 5, ..default },
            "min-len 10: line 1 may have at most 7",
        ),
        (SearchOptions { min_len: 1024, max_len_b: 5000, ..default }, "min-len 1024: line 1 may have at most 1023"),
    ] {
        let error = translator.translate(&["one"], &options).unwrap_err().to_string();
        assert!(error.starts_with(word), "{error}");
    }
    let long = "one ".repeat(1024);
    let error = translator.translate(&["one", &long], &default).unwrap_err();
    assert!(matches!(error, GenerateError::TooLong { line: 2, tokens: 1025, limit: 1024 }), "{error}");
    let longest = "one ".repeat(1023);
    let greedy = SearchOptions { beam: 1, max_len_b: 5000, ..default };
    let found = translator.translate(&[&longest], &greedy).unwrap();
    assert!(found[0][0].tokens.len() <= 1024);
}

/// Upstream holds to what is configured, or to its default, where no table of positions ends.
#[test]
fn a_model_without_positions_has_the_limits_of_its_configuration() {
    let variant = data("variants/v_nopos_kE");
    let config: Value = serde_json::from_slice(&fs::read(variant.join("config.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (path, dictionary) = (folder.path().join("config.json"), folder.path().join("dict.txt"));
    let rows = config["src_vocab_size"].as_u64().or(config["vocab_size"].as_u64()).unwrap();
    fs::write(&dictionary, (4..rows).map(|id| format!("s{id} 1\n")).collect::<String>()).unwrap();
    for (limit, source) in [(Value::from(64), 64), (Value::Null, 1024)] {
        let mut changed = config.clone();
        changed["max_source_positions"] = limit;
        fs::write(&path, changed.to_string()).unwrap();
        let checkpoint = Checkpoint::open(&variant.join("model.safetensors"), Some(&path)).unwrap();
        let dictionaries = Some([dictionary.clone(), dictionary.clone()]);
        let side_files = SideFileOptions { dictionaries, ..SideFileOptions::default() };
        let options = ExportOptions { side_files, force: true, ..ExportOptions::default() };
        export(&checkpoint, &out(&folder), &options).unwrap();
        let written = TranslationConfig::read(&out(&folder)).unwrap();
        assert_eq!((written.max_source_positions, written.max_target_positions), (Some(source), Some(64)));
    }
}

#[test]
fn tables_of_positions_limit_what_generation_json_promises() {
    let folder = exported(Form::Function);
    let path = out(&folder).join("generation.json");
    let written = fs::read_to_string(&path).unwrap();
    for promised in ["5000", "null"] {
        fs::write(&path, written.replace("1024", promised)).unwrap();
        let mut translator = translator(&folder, OrtOperators::Library, 4);
        let default = SearchOptions::default();
        let error = translator.translate(&["one ".repeat(1024)], &default).unwrap_err();
        assert!(matches!(error, GenerateError::TooLong { line: 1, tokens: 1025, limit: 1024 }), "{error}");
        let error = translator.translate(&["one"], &SearchOptions { min_len: 1024, max_len_b: 5000, ..default });
        assert!(error.unwrap_err().to_string().contains("line 1 may have at most 1023"));
    }
}

#[test]
fn unknown_symbols_are_translated_as_unknown() {
    let folder = exported(Form::Function);
    let mut translator = translator(&folder, OrtOperators::Library, 4);
    let found = translator.translate(&["漢字 nine </s> <pad>", "\u{feff}\u{0301}"], &SearchOptions::default());
    assert!(found.unwrap().iter().all(|hypotheses| !hypotheses.is_empty()));
}
