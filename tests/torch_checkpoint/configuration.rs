//! The configuration inside a checkpoint.

use std::fs;

use moa_export::{
    checkpoint::{Checkpoint, ErrorKind},
    source,
};
use moa_graphs::families::Config;

use super::{
    NAME, assert_refused, opened, root,
    writer::{Py, dict, global, namespace, ordered_dict, text, whole},
    zip,
};

fn with_keys(keys: Py) -> Vec<u8> {
    zip(&root(dict([]), keys).pickle(), &[])
}

/// What an import says about a model with these keys and no tensors.
fn complaint(keys: Py) -> String {
    let (checkpoint, _folder) = opened(&with_keys(keys));
    source::import(&checkpoint, None).expect_err("there are no tensors").to_string()
}

fn keys_with(key: &str, value: Py) -> Py {
    let heads = || Py::Int(2);
    let keys =
        [("arch", text("moa_transformer")), ("encoder_attention_heads", heads()), ("decoder_attention_heads", heads())];
    let entries = keys.into_iter().chain([(key, value)]);
    namespace(Py::Dict(entries.map(|(key, value)| (text(key), value)).collect()))
}

#[test]
fn keys_come_from_cfg_or_args() {
    let keys = || dict([("arch", text("moa_transformer_base"))]);
    let cfg = |keys| dict([("model", dict([])), ("args", Py::None), ("cfg", dict([("model", keys)]))]);
    let args = |keys| dict([("model", dict([])), ("args", keys)]);
    let both = dict([("model", dict([])), ("args", keys()), ("cfg", dict([("model", Py::None)]))]);
    let ordered = ordered_dict(vec![(text("arch"), text("moa_transformer"))]);
    let name = namespace(dict([("_name", text("moa_transformer_big"))]));
    let roots =
        [cfg(namespace(keys())), cfg(keys()), cfg(ordered), args(namespace(keys())), args(keys()), both, cfg(name)];
    for root in roots {
        let (checkpoint, _folder) = opened(&zip(&root.pickle(), &[]));
        assert_eq!(checkpoint.config().model_type(), "moa_transformer");
        assert!(checkpoint.config().origin().ends_with(NAME));
    }
}

/// As fairseq does.
#[test]
fn args_are_taken_before_cfg() {
    let keys = |arch, layers| namespace(dict([("arch", text(arch)), ("encoder_layers", Py::Int(layers))]));
    let cfg = dict([("model", keys("transformer", 3))]);
    let root = dict([("model", dict([])), ("args", keys("moa_transformer", 5)), ("cfg", cfg)]);
    let (checkpoint, _folder) = opened(&zip(&root.pickle(), &[]));
    assert_eq!(checkpoint.config().keys()["encoder_layers"], 5);
}

#[test]
fn checkpoints_without_keys_are_unsupported() {
    let model = || ("model", dict([]));
    let roots = [
        (dict([model(), ("args", Py::None), ("cfg", dict([]))]), "\"cfg\" has no \"model\""),
        (dict([model(), ("cfg", Py::Int(1))]), "\"cfg\" is an integer"),
        (dict([model(), ("args", Py::List(vec![]))]), "its keys are a list"),
        (dict([model(), ("args", Py::Filled(Box::new(global("a", "B")), vec![]))]), "its keys are an object of a.B"),
    ];
    for (root, part) in roots {
        assert_refused(&zip(&root.pickle(), &[]), ErrorKind::Unsupported, &["no configuration", part]);
    }
}

#[test]
fn other_architectures_are_named() {
    let arch = |keys| assert_refused(&with_keys(keys), ErrorKind::Unsupported, &["the architecture \"bart_large\""]);
    arch(dict([("arch", text("bart_large"))]));
    arch(namespace(dict([("_name", text("bart_large"))])));
    assert_refused(&with_keys(dict([])), ErrorKind::Unsupported, &["names no architecture"]);
    let dense = root(dict([("encoder.sentence_encoder.q_proj.weight", whole("FloatStorage", "0", 1))]), dict([]));
    assert_refused(&zip(&dense.pickle(), &[("0", &[0; 4])]), ErrorKind::Unsupported, &["names no architecture"]);
}

#[test]
fn roberta_is_known_by_its_tensors() {
    let gate = "encoder.sentence_encoder.layers.0.self_attn.q_proj.w_gate";
    let keys = namespace(dict([("arch", text("roberta_base"))]));
    let file = zip(&root(dict([(gate, whole("FloatStorage", "0", 1))]), keys).pickle(), &[("0", &[0; 4])]);
    assert_eq!(opened(&file).0.config().model_type(), "moa_roberta");
}

#[test]
fn scalars_are_converted() {
    let absent = "tensor \"decoder.embed_tokens.weight\"";
    for (key, value) in [
        ("num_expert", Py::Int(4)),
        ("num_expert", Py::None),
        ("share_all_embeddings", Py::Bool(true)),
        ("layer_norm_eps", Py::Float(1e-6)),
        ("ffd_type", text("moe")),
        ("unread", Py::Float(f64::NAN)),
        ("unread", Py::Int(i64::MIN)),
        ("unread", Py::List(vec![Py::Call(Box::new(global("os", "system")), vec![])])),
        ("unread", Py::Raw(b"\x8a\x09\0\0\0\0\0\0\0\0\x01".to_vec())),
    ] {
        let text = complaint(keys_with(key, value));
        assert!(text.contains("embed_tokens.weight"), "{text}, not {absent}");
    }
}

/// `TransformerConfig` of fairseq is nested, and its reader takes both kinds of keys.
#[test]
fn nested_and_unprefixed_settings_are_refused() {
    let heads = || dict([("attention_heads", Py::Int(1))]);
    for (key, value, part) in [
        ("encoder", heads(), "settings inside \"encoder\""),
        ("decoder", namespace(heads()), "settings inside \"decoder\""),
        ("attention_heads", Py::Int(1), "\"attention_heads\" in place of \"encoder_attention_heads\""),
    ] {
        let text = complaint(keys_with(key, value));
        assert!(text.contains("not supported") && text.contains(part), "{text}");
    }
    let absent = complaint(keys_with("attention_heads", Py::None));
    assert!(absent.contains("embed_tokens.weight"), "{absent}");
}

#[test]
fn other_values_are_refused_where_a_family_reads_them() {
    let cases = [
        ("num_expert", Py::List(vec![]), "key \"num_expert\" must be an integer", "a list"),
        ("num_expert", Py::Float(f64::INFINITY), "key \"num_expert\" must be an integer", "a float"),
        ("num_expert", Py::Raw(b"\x8a\x09\0\0\0\0\0\0\0\0\x01".to_vec()), "key \"num_expert\"", "a long integer"),
        ("activation_fn", global("a", "B"), "key \"activation_fn\" must be a text", "a global"),
        ("ffd_type", Py::Filled(Box::new(global("a", "B")), vec![]), "key \"ffd_type\"", "an object of a.B"),
        ("adaptive_softmax_cutoff", Py::List(vec![Py::Int(5)]), "adaptive_softmax_cutoff", ""),
    ];
    for (key, value, part, found) in cases {
        let text = complaint(keys_with(key, value));
        assert!(text.contains(part) && text.contains(found), "{text}");
    }
}

/// The configuration of a file whose `cfg` has these two.
fn of_model_and_task(model: Py, task: Py) -> Config {
    let cfg = dict([("model", model), ("task", task)]);
    let (checkpoint, _folder) = opened(&zip(&dict([("model", dict([])), ("cfg", cfg)]).pickle(), &[]));
    checkpoint.config().clone()
}

#[test]
fn languages_come_from_the_model_or_the_task() {
    let languages_of = |model: Py, task: Py| {
        let config = of_model_and_task(model, task);
        ["source_lang", "target_lang"].map(|key| config.name(key).unwrap_or_default().to_owned())
    };
    let task = || dict([("source_lang", text("en")), ("target_lang", text("de"))]);
    let languages = |model: Py| languages_of(model, task());
    let arch = || ("arch", text("moa_transformer"));
    assert_eq!(languages_of(dict([arch()]), namespace(task())), ["en", "de"]);
    assert_eq!(languages_of(namespace(dict([arch()])), namespace(dict([("source_lang", Py::Int(1))]))), ["", ""]);
    assert_eq!(languages(dict([arch()])), ["en", "de"]);
    assert_eq!(languages(dict([arch(), ("source_lang", text("fr")), ("target_lang", Py::None)])), ["fr", "de"]);
}

#[test]
fn the_side_of_padding_comes_from_the_model_or_the_task() {
    let side_of = |model: Py, task: Py| of_model_and_task(model, task).keys().get("left_pad_source").cloned();
    let arch = || ("arch", text("moa_transformer"));
    let side = |left| dict([("left_pad_source", Py::Bool(left))]);
    assert_eq!(side_of(dict([arch()]), side(false)), Some(false.into()));
    assert_eq!(side_of(dict([arch(), ("left_pad_source", Py::Bool(true))]), side(false)), Some(true.into()));
    assert_eq!(side_of(dict([arch()]), dict([])), None);
}

#[test]
fn a_given_configuration_wins() {
    let folder = tempfile::tempdir().unwrap();
    let (path, config) = (folder.path().join(NAME), folder.path().join("other.json"));
    fs::write(&path, zip(&dict([("model", dict([])), ("cfg", Py::Int(1))]).pickle(), &[])).unwrap();
    fs::write(&config, r#"{"model_type": "moa_layer"}"#).unwrap();
    assert_eq!(Checkpoint::open(&path, Some(&config)).unwrap().config().model_type(), "moa_layer");
    fs::remove_file(&config).unwrap();
    assert_eq!(Checkpoint::open(&path, Some(&config)).unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn the_configuration_is_bounded() {
    let mut raw = b"}(X\x04\0\0\0archX\x0f\0\0\0moa_transformerX\x01\0\0\0aX\0\0\x10\0".to_vec();
    raw.extend(vec![b'a'; 1 << 20]);
    raw.extend(b"q\x00");
    for key in 'b'..'f' {
        raw.extend(b"X\x01\0\0\0");
        raw.extend([key as u8]);
        raw.extend(b"h\x00");
    }
    raw.push(b'u');
    assert_refused(&with_keys(Py::Raw(raw)), ErrorKind::Limit, &["size of its configuration", "4194304"]);
}
