//! `baseline`: models of random weights.

use crate::scene::{Entry, Scene};

const SMALL: &str = "--layers 1 --vocab 40";

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let scene = Scene::new();
    for (out, seed) in [("a", 3), ("b", 3), ("c", 4)] {
        let printed = scene.accepts(&format!("baseline transformer-base -o {out} {SMALL} --seed {seed}"));
        assert!(printed.ends_with(&format!("next: moa-export inspect {out}\n")), "{printed}");
    }
    for name in ["encoder_model.onnx", "decoder_model.onnx"] {
        let [a, b, c] = ["a", "b", "c"].map(|out| scene.read(&format!("{out}/{name}")));
        assert!(a == b && a != c && a.len() == c.len(), "{name}");
    }
    assert_eq!(scene.names("a"), ["decoder_model.onnx", "encoder_model.onnx"]);
}

#[test]
fn models_of_experts_are_built_too() {
    let scene = Scene::new();
    scene.accepts(&format!("baseline moa-c -o moa {SMALL} --router-outputs"));
    assert!(scene.accepts("inspect moa").contains("8 of 32 experts, heads of 64, width 512"));
    scene.accepts(&format!("baseline mlm-8k8e128d -o mlm.onnx {SMALL} --external-data always"));
    assert!(matches!(scene.snapshot()[std::path::Path::new("mlm.onnx.data")], Entry::File(_)));
    scene.write(
        "jetmoe.json",
        r#"{"model_type": "jetmoe", "hidden_size": 32, "intermediate_size": 24,
        "num_key_value_heads": 2, "kv_channels": 8, "num_experts_per_tok": 2, "num_local_experts": 4}"#,
    );
    for dtype in ["fp16", "bf16", "bf16-products", "int8", "int8-products", "int4", "int4-products"] {
        scene.accepts(&format!("baseline moa-c -o {dtype} {SMALL} --dtype {dtype}"));
        let inspected = scene.accepts(&format!("inspect {dtype}"));
        assert!(inspected.contains(&format!("moa.dtype = {dtype}")), "{inspected}");
    }
    let printed = scene.accepts(&format!("baseline --config jetmoe.json -o jetmoe {SMALL} --json"));
    assert!(printed.contains("\"family\": \"jetmoe\""), "{printed}");
    scene.write(
        "molm.json",
        r#"{"model_type": "moduleformer", "n_embd": 16, "att_hidden": 16, "n_head": 1, "ffd_hidden": 24, "k_att": 2, "k_mlp": 2,
        "n_att_experts": 4, "n_mlp_experts": 4, "gating_size": 9, "n_layer": 3, "num_hidden_layers": 3}"#,
    );
    scene.accepts(&format!("baseline --config molm.json -o molm {SMALL}"));
    let inspected = scene.accepts("inspect molm");
    assert!(
        inspected.contains("layers             1\n") && inspected.contains("2 of 4 experts, heads of 16"),
        "{inspected}"
    );
    let inspected = scene.accepts("inspect jetmoe");
    assert!(inspected.contains("2 of 4 experts, heads of 2 x 8, width 32"), "{inspected}");
}

#[test]
fn what_cannot_be_built_is_refused() {
    let scene = Scene::new();
    scene.refuses("baseline", 2, &["required", "help: "]);
    scene.refuses("baseline transformer-bse -o a", 2, &["there is no preset", "did you mean transformer-base?"]);
    scene.refuses("baseline transformer-base -o a.onnx", 2, &["encoder_model.onnx and decoder_model.onnx"]);
    scene.refuses("baseline transformer-base -o a --form function", 4, &["no form \"function\"", "--form standard"]);
    for dtype in ["int8", "int8-products", "int4", "int4-products"] {
        let line = format!("baseline transformer-base -o a --dtype {dtype}");
        let why = format!("--dtype {dtype} is for matrices of experts, and a standard Transformer has none");
        scene.refuses(&line, 4, &[&why, "fp32, fp16, bf16"]);
    }
    for form in ["standard", "fused"] {
        let line = format!("baseline transformer-base -o a --dtype bf16-products --form {form}");
        let why = "dtype \"bf16-products\" is for products of our operators, and a standard Transformer has none";
        scene.refuses(&line, 4, &[why, "help: export with --dtype bf16\n"]);
    }
    for stored in ["int8", "int4"] {
        let line = format!("baseline moa-c -o a --dtype {stored}-products --form standard");
        let why = "is for products of our operators, and the form \"standard\" has none";
        scene.refuses(&line, 4, &[why, &format!("help: export with --dtype {stored}\n")]);
    }
    scene.refuses("baseline transformer-base -o a --opset 22", 4, &["opset 22"]);
    scene.refuses("baseline moa-c -o a --dtype int4 --opset 20", 4, &["opset 20 has no int4, "]);
    scene.refuses("baseline transformer-base -o a --layers 0", 2, &["--layers"]);
    for line in ["baseline moa-base -o a --vocab 1", "inspect --preset moa-base --vocab 1"] {
        scene.refuses(line, 2, &["invalid value '1' for '--vocab <N>': 1 is not in 2 to"]);
    }
    scene.refuses("baseline transformer-base -o a --router-outputs", 2, &["--router-outputs changes nothing here"]);
    scene.write(
        "layer.json",
        r#"{"model_type": "moa_layer", "embed_dim": 8, "num_expert": 3, "top_k": 2, "head_dim": 4}"#,
    );
    for option in ["--layers 3", "--vocab 99"] {
        let line = format!("baseline --config layer.json -o a {option}");
        scene.refuses(&line, 2, &["changes nothing here: a moa_layer is one layer without embeddings"]);
    }
    scene.refuses("inspect --config layer.json --vocab 99", 2, &["--vocab changes nothing here"]);
    scene.write(
        "heads.json",
        r#"{"model_type": "transformer", "encoder_embed_dim": 32, "vocab_size": 9,
        "encoder_attention_heads": 5, "decoder_attention_heads": 4}"#,
    );
    scene.refuses("baseline --config heads.json -o a", 3, &["encoder_attention_heads", "a divisor of the width 32"]);
    scene.write(
        "biases.json",
        r#"{"model_type": "moa_roberta", "encoder_attention_heads": 2, "vocab_size": 9,
        "expert_bias": true, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16, "head_dim": 4}"#,
    );
    scene.refuses("baseline --config biases.json -o a", 4, &["expert biases", "\"expert_bias\" to false"]);
    scene.accepts("inspect --config biases.json");
    scene.accepts(&format!("baseline transformer-base -o a {SMALL}"));
    scene.refuses(&format!("baseline transformer-base -o a {SMALL}"), 2, &["exists already", "--force"]);
    scene.accepts(&format!("baseline transformer-base -o a {SMALL} --force"));
}

/// No checkpoint of a standard Transformer is read, whatever its configuration says.
#[test]
fn stored_transformers_are_no_family() {
    let scene = Scene::with_fixture("nmt");
    let config = String::from_utf8(scene.read("ck/config.json")).unwrap();
    scene.write("dense.json", config.replace("moa_transformer", "transformer"));
    scene.refuses("ck -o out --config dense.json", 4, &["model_type \"transformer\"", "moa_transformer"]);
    scene.write("biased.json", config.replacen('{', "{\"expert_bias\": true,", 1));
    scene.refuses("ck -o out --config biased.json", 4, &["\"expert_bias\": true"]);
}
