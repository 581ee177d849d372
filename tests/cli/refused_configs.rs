//! Configurations that the tensors or this program do not follow.

use serde_json::{Value, json};

use crate::{model::Model, scene::Scene};

/// The configuration of an encoder-decoder with one key changed.
fn refused(key: &str, value: &Value, code: u8, parts: &[&str]) {
    let mut model = Model::translator();
    match value {
        Value::Null => drop(model.config.remove(key)),
        value => model.set(key, value.clone()),
    }
    let scene = Scene::with(&model);
    let (before, what) = (scene.snapshot(), format!("{key}: {value}"));
    scene.moa("ck -o out").assert_refused(&what, code, parts);
    scene.assert_unchanged(&before, &what);
}

#[test]
fn impossible_values_name_the_key_the_range_and_the_value() {
    let range = "an integer from 1 to 1048576";
    let cases = [
        ("encoder_attention_heads", json!(5), "at most num_expert = 4"),
        ("decoder_attention_heads", json!(9), "at most num_expert = 4"),
        ("encoder_attention_heads", json!(0), range),
        ("encoder_layers", json!(0), range),
        ("encoder_layers", json!(-1), range),
        ("decoder_layers", json!(1.5), range),
        ("head_dim", json!("8"), range),
        ("head_dim", json!(1_048_577), range),
        ("num_expert", json!(u64::MAX), range),
        ("encoder_embed_dim", json!(9_223_372_036_854_775_808_u64), range),
        ("encoder_embed_dim", json!(1e300), range),
        ("max_source_positions", json!([64]), range),
        ("max_source_positions", json!(1), "at least 2"),
        ("max_target_positions", json!(1), "at least 2"),
        ("left_pad_source", json!("False"), "true or false"),
        ("eos_token_id", json!([2]), "an integer from 0 to 1048576"),
        ("tgt_vocab_size", json!(true), range),
        ("pad_token_id", json!(-1), "an integer from 0 to 1048576"),
        ("layer_norm_eps", json!(0), "a number between 0 and 1"),
        ("layer_norm_eps", json!("1e-5"), "a number between 0 and 1"),
        ("encoder_normalize_before", json!("false"), "true or false"),
        ("share_all_embeddings", json!(1), "true or false"),
        ("ffd_type", json!("dense"), "\"normal\" or \"moe\""),
        ("activation_fn", json!(3), "a text"),
        ("model_type", json!(["moa_transformer"]), "a text"),
    ];
    for (key, value, expected) in cases {
        let sentence = format!("ck/config.json: key \"{key}\" must be {expected}, found {value}");
        refused(key, &value, 3, &[&sentence, "--config FILE"]);
    }
}

#[test]
fn long_values_are_cut() {
    refused("encoder_layers", &json!("x".repeat(5000)), 3, &["encoder_layers", "xxx…"]);
}

#[test]
fn keys_without_a_default_must_be_there() {
    for (key, meaning) in [
        ("model_type", "the family of the model"),
        ("encoder_attention_heads", "top-k"),
        ("decoder_attention_heads", "top-k"),
    ] {
        refused(key, &Value::Null, 3, &[&format!("ck/config.json: key \"{key}\" is missing"), meaning]);
    }
    for key in ["embed_dim", "num_expert", "top_k", "head_dim"] {
        let mut model = Model::layer();
        model.config.remove(key);
        Scene::with(&model).refuses("ck -o m.onnx", 3, &[&format!("key \"{key}\" is missing")]);
    }
}

#[test]
fn switches_without_an_export_are_unsupported() {
    for model_type in ["bert", "gpt2", ""] {
        let known = "(supported: moa_transformer, moa_roberta, jetmoe, moduleformer, moa_layer)";
        refused("model_type", &json!(model_type), 4, &["not supported: model_type", known, "help: models with"]);
    }
    let cases = [
        ("adaptive_softmax_cutoff", json!("100,200"), "adaptive_softmax_cutoff"),
        ("cross_self_attention", json!(true), "cross_self_attention"),
        ("eos_token_id", json!(17), "\"eos_token_id\": 17"),
        ("decoder_start_token_id", json!(0), "\"decoder_start_token_id\": 0"),
        ("no_cross_attention", json!(true), "no_cross_attention"),
        ("scale_attn", json!(true), "scale_attn"),
        ("scale_fc", json!(true), "scale_fc"),
        ("scale_heads", json!(true), "scale_heads"),
        ("scale_resids", json!(true), "scale_resids"),
        ("encoder_layers_to_keep", json!("0"), "encoder_layers_to_keep"),
        ("decoder_layers_to_keep", json!("0,1"), "decoder_layers_to_keep"),
        ("quant_noise_scalar", json!(0.5), "\"quant_noise_scalar\": 0.5"),
        ("scalar", json!(0.5), "\"scalar\": 0.5"),
        ("encoder", json!({"attention_heads": 1}), "settings inside \"encoder\" in place of \"encoder_…\""),
        ("decoder", json!({"embed_dim": 24}), "settings inside \"decoder\""),
        ("quant_noise", json!({"scalar": 0.5}), "settings inside \"quant_noise\""),
        ("attention_heads", json!(1), "\"attention_heads\" in place of \"encoder_attention_heads\" and"),
        ("normalize_before", json!(true), "\"normalize_before\" in place of"),
        ("layers_to_keep", json!([0]), "\"layers_to_keep\" in place of"),
        ("input_dim", json!(24), "\"input_dim\" in place of"),
        ("activation_fn", json!("tanh"), "relu, gelu"),
        ("decoder_input_dim", json!(12), "decoder_input_dim"),
        ("decoder_output_dim", json!(12), "decoder_output_dim"),
        ("encoder_embed_dim", json!(3), "sinusoidal positions of width 3"),
    ];
    for (key, value, named) in cases {
        refused(key, &value, 4, &["ck/config.json: not supported", named, "help: where the weights"]);
    }
}

/// fairseq's RoBERTa reads its keys as the translation models do.
#[test]
fn masked_language_models_refuse_settings_that_upstream_reads_elsewhere() {
    let cases: [(&str, Value, u8, &[&str]); 3] = [
        ("encoder", json!({"attention_heads": 1}), 4, &["not supported: settings inside \"encoder\""]),
        ("attention_heads", json!(1), 4, &["not supported: \"attention_heads\" in place of"]),
        ("learned_pos", json!(false), 4, &["not supported: \"learned_pos\" in place of"]),
    ];
    refuses_each("mlm", &cases);
}

#[test]
fn configurations_of_another_model_name_a_tensor_and_both_shapes() {
    let cases: [(&str, Value, &[&str]); 11] = [
        ("encoder_layers", json!(3), &["encoder.layers.2.self_attn.q_proj.w_gate", "[24, 4]", "is missing"]),
        ("encoder_layers", json!(1), &["encoder.layers.1.", "belongs to no part"]),
        ("encoder_layers", json!(4096), &["encoder.layers.2.", "is missing"]),
        ("encoder_layers", json!(1_048_576), &["an integer from 1 to 4096, found 1048576"]),
        ("head_dim", json!(16), &["q_proj.experts.w", "[4, 24, 8]", "[4, 24, 16]"]),
        ("num_expert", json!(8), &["q_proj.w_gate", "[24, 4]", "[24, 8]"]),
        ("encoder_ffn_embed_dim", json!(64), &["fc1.weight", "[32, 24]", "[64, 24]"]),
        ("decoder_embed_dim", json!(48), &["48"]),
        ("encoder_learned_pos", json!(true), &["encoder.embed_positions.weight", "is missing"]),
        ("layernorm_embedding", json!(true), &["encoder.layernorm_embedding.weight", "is missing"]),
        ("src_vocab_size", json!(21), &["embed_tokens.weight", "[21, 24]", "[20, 24]", "src_vocab_size"]),
    ];
    for (key, value, parts) in cases {
        let code = if key == "decoder_embed_dim" { 4 } else { 3 };
        refused(key, &value, code, parts);
    }
}

/// Defaults of upstream's classes may be none of the checkpoint's.
#[test]
fn sizes_that_are_left_out_are_named_where_a_shape_differs() {
    let parts = ["[24, 12] with the default of \"num_expert\", 12, which ck/config.json does not give", "[24, 4]"];
    refused("num_expert", &Value::Null, 3, &parts);
    let mut model = Model::read("jetmoe/bf16");
    model.config.remove("kv_channels");
    Scene::with(&model).refuses("ck -o out", 3, &["default of \"kv_channels\", 128, which"]);
}

/// Ids that no token has would be padding that never occurs.
#[test]
fn padding_must_be_a_token() {
    refused("pad_token_id", &json!(20), 3, &["pad_token_id", "20"]);
}

#[test]
fn layers_that_contradict_themselves() {
    let cases = [
        ("top_k", json!(5), "at most num_expert = 4"),
        ("kdim", json!(16), "embed_dim = 8"),
        ("causal", json!("no"), "true or false"),
        ("vdim", json!(5), "8, the width of keys"),
    ];
    for (key, value, expected) in cases {
        let mut model = Model::layer();
        model.set(key, value);
        Scene::with(&model).refuses("ck -o m.onnx", 3, &[&format!("key \"{key}\" must be"), expected]);
    }
    for key in ["add_zero_attn", "add_bias_kv", "bias"] {
        let mut model = Model::layer();
        model.set(key, true);
        Scene::with(&model).refuses("ck -o m.onnx", 4, &[&format!("not supported: \"{key}\": true")]);
    }
    let mut model = Model::layer();
    model.set("casual", true);
    Scene::with(&model).refuses("ck -o m.onnx", 3, &["key \"casual\" is not known (known: ", "causal"]);
    let mut model = Model::layer();
    model.set("gate_mode", "softmax_topk_renorm");
    Scene::with(&model).refuses(
        "ck -o m.onnx",
        3,
        &["key \"gate_mode\" is not known", "help: leave it out; --gate-mode"],
    );
    let mut model = Model::layer();
    model.set("cross_attention", true);
    model.set("causal", true);
    Scene::with(&model).refuses("ck -o m.onnx", 3, &["key \"causal\" must be false"]);
}

/// What neither a shape nor a tensor can show must not be guessed.
#[test]
fn jetmoe_configurations_that_contradict_themselves() {
    let cases: [(&str, Value, u8, &[&str]); 15] = [
        ("num_local_experts", json!(8), 3, &["\"num_local_experts\" must be 4, the experts of", "found 8"]),
        ("num_local_experts", json!(1), 3, &["\"num_local_experts\" must be 4, the experts of", "found 1"]),
        ("num_experts_per_tok", json!(9), 3, &["\"num_experts_per_tok\" must be at most 4, \"num_local_experts\""]),
        ("pad_token_id", json!(128), 3, &["\"pad_token_id\" must be below 128", "model.embed_tokens.weight"]),
        ("rms_norm_eps", json!(-1e-6), 3, &["\"rms_norm_eps\" must be a number from 0", "found -1e-6"]),
        ("rms_norm_eps", json!(1e39), 3, &["\"rms_norm_eps\" must be a number that f32 holds", "found 1e+39"]),
        ("eos_token_id", json!([2, "a"]), 3, &["\"eos_token_id\" must be an integer from 0", "or a list of such"]),
        ("rope_scaling", json!({"rope_theta": 500.0}), 3, &["key \"rope_theta\" must be 500.0"]),
        ("moe_top_k", json!(1), 3, &["key \"moe_top_k\" must be 2, as \"num_experts_per_tok\" says"]),
        ("num_experts_per_tok", json!(1), 3, &["\"num_attention_heads\" must be 2", "(2) times", "(1), found 4"]),
        ("num_attention_heads", json!(8), 3, &["\"num_attention_heads\" must be 4", "found 8"]),
        ("head_dim", json!(32), 3, &["key \"kv_channels\" must be 32, as \"head_dim\" says"]),
        ("rope_parameters", json!({"rope_theta": 100.0}), 3, &["key \"rope_theta\" must be 100.0"]),
        ("rope_scaling", json!({"type": "linear", "factor": 4.0}), 4, &["\"rope_scaling\"", "\"type\": \"linear\""]),
        ("partial_rotary_factor", json!(0.5), 4, &["\"partial_rotary_factor\": 0.5"]),
    ];
    refuses_each("jetmoe/bf16", &cases);
}

/// Keys of MoLM with which it is another model than the released ones, and those that tensors do not show.
#[test]
fn molm_configurations_that_are_not_exported() {
    let cases: [(&str, Value, u8, &[&str]); 9] = [
        ("n_head", json!(2), 4, &["\"n_head\": 2 and \"att_hidden\": 16", "keys and values are the hidden states"]),
        ("att_hidden", json!(8), 4, &["\"n_head\": 1 and \"att_hidden\": 8"]),
        ("gate_type", json!("gmm"), 4, &["\"gate_type\": \"gmm\" (supported: mlp, linear)"]),
        ("activation_function", json!("mish"), 4, &["\"activation_function\": \"mish\" (supported: silu,"]),
        ("quantization_config", json!({}), 4, &["\"quantization_config\""]),
        ("k_att", json!(5), 3, &["\"k_att\" must be at most 4, \"n_att_experts\", found 5"]),
        ("k_mlp", Value::Null, 3, &["key \"k_mlp\" is missing (experts per token"]),
        ("hidden_size", json!(8), 3, &["\"n_embd\" must be 8, as \"hidden_size\" says"]),
        ("pad_token_id", json!(61), 3, &["\"pad_token_id\" must be below 61", "transformer.wte.weight"]),
    ];
    refuses_each("molm/mlp", &cases);
}

/// Changes one key of the fixture's configuration at a time.
fn refuses_each(fixture: &str, cases: &[(&str, Value, u8, &[&str])]) {
    let scene = Scene::with_fixture(fixture);
    let original: Value = serde_json::from_slice(&scene.read("ck/config.json")).unwrap();
    for (key, value, code, parts) in cases {
        let mut config = original.clone();
        config[*key] = value.clone();
        scene.write("ck/config.json", config.to_string());
        let before = scene.snapshot();
        scene.moa("ck -o out").assert_refused(key, *code, &[&["ck/config.json"], *parts].concat());
        scene.assert_unchanged(&before, key);
    }
}

#[test]
fn ids_of_generation_are_those_of_the_model() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    let told = "ck/generation_config.json: key \"pad_token_id\" must be below 128, the symbols of the model, found";
    scene.write("ck/generation_config.json", json!({ "pad_token_id": [1, 128] }).to_string());
    scene.refuses("ck -o out", 3, &[told]);
    scene.write("ck/generation_config.json", json!({ "pad_token_id": [1, 127] }).to_string());
    scene.accepts("ck -o out");
}
