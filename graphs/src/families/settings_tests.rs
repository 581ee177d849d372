//! Keys of configurations, each with what it makes of a model. Most of them have one value in all goldens.

use moa_schema::{Activation, AttentionMode, GateMode};
use serde_json::{Value, json};

use super::*;
use crate::{
    SyntheticTensors, Weight,
    model::{Attention, CausalLm, EncoderDecoder, FeedForward, KeyValueWeights, MaskedLm, Norm, Positions},
};

fn config(base: &Value, keys: &Value) -> Config {
    let all = [base, keys].into_iter().flat_map(|keys| keys.as_object().unwrap().clone());
    Config::new("config.json", all.collect())
}

fn imported(base: &Value, keys: &Value) -> Model {
    imported_with(base, keys, ImportOptions::default())
}

fn imported_with(base: &Value, keys: &Value, options: ImportOptions) -> Model {
    import(&config(base, keys), &SyntheticTensors::shapes("memory"), options).unwrap()
}

fn translator(keys: Value) -> EncoderDecoder {
    let base = json!({
        "model_type": "moa_transformer", "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "num_expert": 6,
        "encoder_attention_heads": 2, "decoder_attention_heads": 3, "head_dim": 8, "vocab_size": 30,
    });
    let Model::EncoderDecoder(model) = imported(&base, &keys) else { panic!("no translator") };
    model
}

fn masked(keys: Value) -> MaskedLm {
    let base = json!({
        "model_type": "moa_roberta", "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "num_expert": 6,
        "encoder_attention_heads": 2, "head_dim": 8, "vocab_size": 30,
    });
    let Model::MaskedLm(model) = imported(&base, &keys) else { panic!("no masked language model") };
    model
}

fn causal(keys: Value) -> CausalLm {
    let base = json!({
        "model_type": "jetmoe", "hidden_size": 16, "vocab_size": 30, "num_experts_per_tok": 2, "kv_channels": 8,
        "num_key_value_heads": 3,
    });
    let Model::CausalLm(model) = imported(&base, &keys) else { panic!("no causal language model") };
    model
}

fn activation(block: &FeedForward) -> Activation {
    match block {
        FeedForward::Dense(block) => block.activation,
        FeedForward::Experts(block) => block.activation,
    }
}

fn sizes(attention: &Attention) -> [usize; 5] {
    let Attention { width, source_width, top_k, num_experts, head_size, .. } = attention;
    [*width, *source_width, *top_k, *num_experts, *head_size]
}

#[test]
fn each_side_of_a_translator_has_its_own_settings() {
    let model = translator(
        json!({ "encoder_layers": 1, "decoder_layers": 2, "decoder_embed_dim": 12, "decoder_ffn_embed_dim": 20 }),
    );
    let (encoder, decoder) = (&model.encoder, &model.decoder);
    assert_eq!((encoder.layers.len(), decoder.layers.len()), (1, 2));
    assert_eq!(sizes(&encoder.layers[0].self_attention), [16, 16, 2, 6, 8]);
    assert_eq!(sizes(&decoder.layers[1].self_attention), [12, 12, 3, 6, 8]);
    assert_eq!(sizes(&decoder.layers[1].cross_attention), [12, 16, 3, 6, 8]);
    let causal =
        [&encoder.layers[0].self_attention, &decoder.layers[0].self_attention, &decoder.layers[0].cross_attention];
    assert_eq!(causal.map(|attention| attention.causal), [false, true, false]);
    let hidden = |block: &FeedForward| match block {
        FeedForward::Dense(block) => block.input.weight.shape().to_vec(),
        FeedForward::Experts(block) => block.input.shape().to_vec(),
    };
    assert_eq!(
        (hidden(&encoder.layers[0].feed_forward), hidden(&decoder.layers[0].feed_forward)),
        (vec![24, 16], vec![20, 12])
    );
    assert_eq!((encoder.embedding.zero_at_padding, decoder.embedding.zero_at_padding), (true, false));
    assert_eq!([encoder.embedding.scale, decoder.embedding.scale], [4.0, 12f32.sqrt()]);
    // fairseq's command line stores this size as a text.
    let none = translator(json!({ "decoder_output_dim": "16" }));
    assert_eq!((none.encoder.layers.len(), none.decoder.layers.len()), (6, 6));
}

#[test]
fn norms_stand_where_a_translator_says() {
    for (keys, before, stack) in [
        (json!({}), [false, false], [false, false]),
        (json!({ "encoder_normalize_before": true }), [true, false], [true, false]),
        (json!({ "decoder_normalize_before": true }), [false, true], [false, true]),
        (
            json!({ "encoder_normalize_before": true, "decoder_normalize_before": true, "no_encoder_final_norm": true }),
            [true, true],
            [false, true],
        ),
        (
            json!({ "encoder_normalize_before": true, "decoder_normalize_before": true, "no_decoder_final_norm": true }),
            [true, true],
            [true, false],
        ),
    ] {
        let EncoderDecoder { encoder, decoder } = translator(keys.clone());
        let found = [encoder.layers[0].normalize_before, decoder.layers[0].normalize_before];
        assert_eq!((found, [encoder.norm.is_some(), decoder.norm.is_some()]), (before, stack), "{keys}");
        assert!(encoder.embedding.norm.is_none() && decoder.embedding.norm.is_none());
    }
    let EncoderDecoder { encoder, decoder } =
        translator(json!({ "layernorm_embedding": true, "layer_norm_eps": 0.5, "encoder_normalize_before": true }));
    let (first, last) = (&encoder.layers[0], &decoder.layers[5]);
    let embeddings = [&encoder.embedding, &decoder.embedding].map(|embedding| embedding.norm.as_ref().unwrap());
    let layers = [&first.self_attention_norm, &first.final_norm, &last.cross_attention_norm, &last.self_attention_norm];
    let all = embeddings.into_iter().chain(layers).chain(&encoder.norm);
    assert!(all.map(|norm| norm.epsilon).eq([0.5; 7]));
    assert_eq!(translator(json!({})).encoder.layers[0].final_norm.epsilon, 1e-5);
}

#[test]
fn positions_and_scales_are_those_of_the_configuration() {
    let rows = |positions: &Positions| match positions {
        Positions::None => None,
        Positions::Sinusoidal { rows } => Some((false, *rows)),
        Positions::Learned(table) => Some((true, table.shape()[0])),
    };
    for (keys, expected, most) in [
        (json!({}), [Some((false, 1026)), Some((false, 1026))], [Some(1024), Some(1024)]),
        (
            json!({ "max_source_positions": 40, "max_target_positions": 50 }),
            [Some((false, 42)), Some((false, 52))],
            [Some(40), Some(50)],
        ),
        (
            json!({ "encoder_learned_pos": true, "max_source_positions": 40, "pad_token_id": 3 }),
            [Some((true, 44)), Some((false, 1028))],
            [Some(40), Some(1024)],
        ),
        (json!({ "decoder_learned_pos": true }), [Some((false, 1026)), Some((true, 1026))], [Some(1024), Some(1024)]),
        (json!({ "no_token_positional_embeddings": true }), [None, None], [None, None]),
    ] {
        let EncoderDecoder { encoder, decoder } = translator(keys.clone());
        let both = [&encoder.embedding, &decoder.embedding];
        assert_eq!(both.map(|embedding| rows(&embedding.positions)), expected, "{keys}");
        assert_eq!(both.map(crate::model::Embedding::max_tokens), most, "{keys}");
        let pad = keys["pad_token_id"].as_u64().unwrap_or(1);
        assert!(both.iter().all(|embedding| embedding.pad_token_id as u64 == pad), "{keys}");
    }
    let plain = translator(json!({ "no_scale_embedding": true }));
    assert_eq!([plain.encoder.embedding.scale, plain.decoder.embedding.scale], [1.0; 2]);
}

#[test]
fn blocks_and_gates_are_those_of_the_configuration() {
    for (name, kind) in [
        ("relu", Activation::Relu),
        ("gelu", Activation::Gelu),
        ("gelu_erf", Activation::Gelu),
        ("gelu_accurate", Activation::GeluTanh),
        ("gelu_fast", Activation::GeluTanh),
        ("swish", Activation::Silu),
    ] {
        let model = translator(json!({ "activation_fn": name }));
        assert_eq!(activation(&model.encoder.layers[0].feed_forward), kind);
        assert_eq!(activation(&model.decoder.layers[0].feed_forward), kind);
    }
    let routed = translator(json!({ "ffd_type": "moe", "activation_fn": "gelu" }));
    let FeedForward::Experts(block) = &routed.decoder.layers[0].feed_forward else { panic!("no experts") };
    assert_eq!((block.top_k, block.num_experts, block.hidden, block.gated), (4, 6, 16, false));
    assert_eq!((block.activation, block.gate_mode), (Activation::Gelu, GateMode::SoftmaxTopk));
    let base = json!({
        "model_type": "moa_transformer", "encoder_embed_dim": 16, "num_expert": 3, "encoder_attention_heads": 2,
        "decoder_attention_heads": 3, "vocab_size": 30, "ffd_type": "moe",
    });
    let options = ImportOptions { gate_mode: Some(GateMode::SoftmaxTopkRenorm) };
    let Model::EncoderDecoder(paper) = imported_with(&base, &json!({}), options) else { panic!("no translator") };
    let layer = &paper.decoder.layers[0];
    let FeedForward::Experts(block) = &layer.feed_forward else { panic!("no experts") };
    let modes = [layer.self_attention.gate_mode, layer.cross_attention.gate_mode, block.gate_mode];
    assert_eq!((modes, block.top_k), ([GateMode::SoftmaxTopkRenorm; 3], 3));
    assert!(layer.self_attention.skip_padded_queries && layer.self_attention.head_size == 256);
}

#[test]
fn vocabularies_are_shared_where_the_configuration_says() {
    let names = |keys: Value| {
        let EncoderDecoder { encoder, decoder } = translator(keys);
        [encoder.embedding.tokens, decoder.embedding.tokens, decoder.output].map(|weight| weight.name().to_owned())
    };
    let (encoder, decoder) = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight");
    assert_eq!(names(json!({})), [encoder, decoder, "decoder.output_projection.weight"]);
    assert_eq!(names(json!({ "share_decoder_input_output_embed": true })), [encoder, decoder, decoder]);
    assert_eq!(names(json!({ "share_all_embeddings": true })), [decoder; 3]);
    let sizes = translator(json!({ "src_vocab_size": 31, "tgt_vocab_size": 32 }));
    let rows = [&sizes.encoder.embedding.tokens, &sizes.decoder.embedding.tokens, &sizes.decoder.output];
    assert_eq!(rows.map(|weight| weight.shape()[0]), [31, 32, 32]);
}

#[test]
fn a_masked_language_model_has_the_defaults_of_its_own() {
    let MaskedLm { encoder, head } = masked(json!({}));
    assert!(matches!(&encoder.embedding.positions, Positions::Learned(table) if table.shape()[0] == 514));
    assert!(encoder.embedding.norm.is_some() && encoder.embedding.scale == 1.0 && encoder.norm.is_none());
    assert_eq!((head.activation, activation(&encoder.layers[0].feed_forward)), (Activation::Gelu, Activation::Gelu));
    assert_eq!(head.weight.name(), encoder.embedding.tokens.name());
    for key in ["max_positions", "tokens_per_sample", "max_source_positions"] {
        let mut keys = json!({});
        keys[key] = 40.into();
        assert_eq!(masked(keys).encoder.embedding.max_tokens(), Some(40), "{key}");
    }
    let other = masked(json!({
        "encoder_learned_pos": false, "layernorm_embedding": false, "no_scale_embedding": false, "activation_fn": "relu",
        "untie_weights_roberta": true, "layer_norm_eps": 0.5,
    }));
    assert!(matches!(other.encoder.embedding.positions, Positions::Sinusoidal { rows: 514 }));
    assert!(other.encoder.embedding.norm.is_none() && other.encoder.embedding.scale == 4.0);
    assert_eq!((other.head.activation, other.head.norm.epsilon), (Activation::Relu, 0.5));
    assert_eq!(other.head.weight.name(), "encoder.lm_head.weight");
}

#[test]
fn jetmoe_is_read_in_both_dialects() {
    for (keys, expected) in [
        (json!({}), (12, 5632, 8, 8)),
        (
            json!({ "num_hidden_layers": 2, "intermediate_size": 24, "num_local_experts": 5, "head_dim": 8 }),
            (2, 24, 5, 8),
        ),
        (json!({ "num_layers": 3, "ffn_hidden_size": 20, "moe_num_experts": 4 }), (3, 20, 4, 8)),
    ] {
        let model = causal(keys.clone());
        let (attention, block) = (&model.layers[0].attention, &model.layers[0].feed_forward);
        assert_eq!((model.layers.len(), block.hidden, block.num_experts, attention.head_size), expected, "{keys}");
        assert_eq!((attention.num_experts, attention.top_k, block.top_k), (expected.2, 2, 2), "{keys}");
        assert_eq!((attention.kv_num_heads, attention.causal, attention.skip_padded_queries), (3, true, false));
        assert_eq!((attention.gate_mode, block.gate_mode), (GateMode::TopkSoftmax, GateMode::TopkSoftmax));
        assert_eq!(model.max_positions(), Some(4096));
        assert_eq!(model.output.name(), model.tokens.name());
    }
}

#[test]
fn jetmoe_takes_what_its_configuration_says() {
    for (name, kind) in [
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("gelu", Activation::Gelu),
        ("gelu_new", Activation::GeluTanh),
        ("relu", Activation::Relu),
    ] {
        assert_eq!(causal(json!({ "activation_function": name })).layers[0].feed_forward.activation, kind);
    }
    let model = causal(json!({}));
    let layer = &model.layers[0];
    assert_eq!((layer.feed_forward.activation, layer.feed_forward.gated), (Activation::Silu, true));
    assert_eq!(layer.feed_forward.input.shape(), [8, 2 * 5632, 16]);
    assert!(layer.attention.output_bias.is_some() && layer.feed_forward.output_bias.is_some());
    assert_eq!((model.norm.epsilon(), model.pad_token_id), (1e-6, 0));
    let other = causal(json!({
        "glu": false, "bias": false, "tie_word_embeddings": false, "rope_theta": 50.0, "n_positions": 40,
        "pad_token_id": 7, "rms_norm_eps": 0.5,
    }));
    let layer = &other.layers[0];
    assert_eq!((layer.feed_forward.gated, layer.feed_forward.input.shape()), (false, &[8, 5632, 16][..]));
    assert!(layer.attention.output_bias.is_some() && layer.feed_forward.output_bias.is_none());
    assert_eq!(layer.attention.rotary.map(|rotary| (rotary.base, rotary.positions)), Some((50.0, 40)));
    assert_eq!((other.output.name(), other.pad_token_id), ("lm_head.weight", 7));
    let norms = [&other.norm, &layer.attention_norm, &layer.feed_forward_norm];
    assert_eq!(norms.map(Norm::epsilon), [0.5, 1e-6, 1e-6]);
    assert_eq!(causal(json!({ "max_position_embeddings": 41 })).max_positions(), Some(41));
    let stale = causal(json!({
        "num_hidden_layers": 1, "num_layers": 24, "intermediate_size": 20, "ffn_hidden_size": 24, "n_positions": 40,
        "max_position_embeddings": 41,
    }));
    assert_eq!((stale.layers.len(), stale.layers[0].feed_forward.hidden, stale.max_positions()), (1, 20, Some(41)));
}

/// Tensors of the layers of [`causal`], one layer with a width of 20 in its block, but for these.
struct Stored(SyntheticTensors, Vec<(&'static str, Vec<usize>)>);

impl TensorDirectory for Stored {
    fn names(&self) -> Vec<&str> {
        self.1.iter().map(|(name, _)| *name).collect()
    }

    fn tensor(&self, name: &str) -> Option<Weight> {
        let (_, shape) = self.1.iter().find(|(known, _)| *known == name)?;
        self.0.make(name, shape)
    }

    fn origin(&self) -> &str {
        self.0.origin()
    }

    fn make(&self, name: &str, shape: &[usize]) -> Option<Weight> {
        self.0.make(name, shape)
    }

    fn is_synthetic(&self) -> bool {
        true
    }
}

/// Where transformers and the code that JetMoE came from read a configuration differently, tensors tell who wrote it.
#[test]
fn jetmoe_follows_the_tensors_where_upstreams_differ() {
    let (input, output) = ("model.layers.0.mlp.input_linear.weight", "model.layers.0.mlp.output_linear.weight");
    let block = |keys: Value, stored: Vec<(&'static str, Vec<usize>)>| {
        let base = json!({
            "model_type": "jetmoe", "hidden_size": 16, "vocab_size": 30, "num_experts_per_tok": 2, "kv_channels": 8,
            "num_key_value_heads": 3, "num_hidden_layers": 1,
        });
        let tensors = Stored(SyntheticTensors::shapes("memory"), stored);
        let Ok(Model::CausalLm(mut model)) = import(&config(&base, &keys), &tensors, ImportOptions::default()) else {
            panic!("no causal language model: {keys}")
        };
        model.layers.remove(0).feed_forward
    };
    let both = json!({ "intermediate_size": 20, "ffn_hidden_size": 24 });
    assert_eq!(block(both.clone(), vec![(output, vec![8, 16, 20])]).hidden, 20);
    assert_eq!(block(both, vec![(output, vec![8, 16, 24])]).hidden, 24);
    let plain = json!({ "intermediate_size": 20, "glu": false, "bias": false });
    assert!(block(plain.clone(), vec![(input, vec![8, 40, 16])]).gated);
    assert!(!block(plain.clone(), vec![(input, vec![8, 20, 16])]).gated);
    assert!(block(plain.clone(), vec![("model.layers.0.mlp.bias", vec![16])]).output_bias.is_some());
    assert!(block(plain, vec![]).output_bias.is_none());
}

#[test]
fn jetmoe_sees_all_tokens_before_each() {
    for keys in [
        json!({ "is_causal": true, "sliding_window": null }),
        json!({ "sliding_window": 40, "max_position_embeddings": 40 }),
        json!({ "attention_chunk_size": 4096 }),
    ] {
        causal(keys);
    }
    let base = json!({ "model_type": "jetmoe", "num_experts_per_tok": 2 });
    for (keys, named) in [
        (json!({ "is_causal": false }), "\"is_causal\": false"),
        (json!({ "sliding_window": 39, "max_position_embeddings": 40 }), "\"sliding_window\": 39"),
        (json!({ "attention_chunk_size": 4095 }), "\"attention_chunk_size\": 4095"),
    ] {
        let tensors = SyntheticTensors::shapes("memory");
        let error = import(&config(&base, &keys), &tensors, ImportOptions::default()).unwrap_err();
        assert!(matches!(&error, ImportError::Unsupported { what, .. } if what.starts_with(named)), "{error}");
    }
}

fn molm(keys: &Value) -> Result<CausalLm, ImportError> {
    let base = json!({
        "model_type": "moduleformer", "n_embd": 16, "n_head": 1, "att_hidden": 16, "vocab_size": 30, "k_att": 3, "k_mlp": 2,
    });
    match import(&config(&base, keys), &SyntheticTensors::shapes("memory"), ImportOptions::default())? {
        Model::CausalLm(model) => Ok(model),
        _ => panic!("no causal language model"),
    }
}

#[test]
fn molm_takes_what_its_configuration_says() {
    let model = molm(&json!({})).unwrap();
    let (attention, block) = (&model.layers[0].attention, &model.layers[0].feed_forward);
    assert_eq!((model.layers.len(), attention.num_experts, block.num_experts, block.hidden), (24, 32, 32, 2048));
    assert_eq!((attention.top_k, block.top_k, attention.head_size, attention.kv_num_heads), (3, 2, 16, 1));
    assert_eq!((attention.attention_mode, attention.causal), (AttentionMode::StickBreaking, true));
    assert_eq!((attention.gate_mode, attention.skip_padded_queries), (GateMode::SoftmaxTopk, false));
    assert_eq!((block.activation, block.gated), (Activation::GeluTanh, false));
    assert!(matches!(attention.keys_values, KeyValueWeights::HiddenStates));
    let gate = &attention.router.input.as_ref().unwrap().0;
    assert_eq!(
        (gate.weight.shape(), gate.bias.shape(), attention.router.weight.shape()),
        (&[256, 16][..], &[256][..], &[32, 256][..])
    );
    assert_eq!((model.norm.epsilon(), model.max_positions(), model.pad_token_id), (1e-5, None, 0));
    assert_eq!((model.tokens.name(), model.output.name()), ("transformer.wte.weight", "lm_head.weight"));
    let other = molm(&json!({
        "n_layer": 2, "ffd_hidden": 20, "n_att_experts": 5, "n_mlp_experts": 6, "gate_type": "linear",
        "activation_function": "gelu", "tie_word_embeddings": true, "pad_token_id": 7, "layer_norm_epsilon": 0.5,
    }));
    let other = other.unwrap();
    let (attention, block) = (&other.layers[1].attention, &other.layers[1].feed_forward);
    assert_eq!(
        (other.layers.len(), attention.query.shape(), block.input.shape()),
        (2, &[5, 16, 16][..], &[6, 16, 20][..])
    );
    assert!(attention.router.input.is_none() && block.router.input.is_none());
    assert_eq!((attention.router.weight.shape(), block.activation), (&[5, 16][..], Activation::Gelu));
    assert_eq!((other.norm.epsilon(), other.output.name(), other.pad_token_id), (1e-5, other.tokens.name(), 7));
    assert_eq!(molm(&json!({ "gating_size": 9 })).unwrap().layers[0].feed_forward.router.weight.shape(), [32, 9]);
    assert_eq!([&model, &other].map(|model| model.context), [Some(1024); 2]);
    let contexts = [json!({ "history_length": 0, "block_size": 8 }), json!({ "history_length": 0, "block_size": 0 })];
    assert_eq!(contexts.map(|keys| molm(&keys).unwrap().context), [Some(8), None]);
    for keys in [json!({ "history_length": "8" }), json!({ "n_layer": 2, "num_hidden_layers": 1 })] {
        assert!(matches!(molm(&keys), Err(ImportError::InvalidKey { .. })), "{keys}");
    }
    for (name, kind) in
        [("gelu_pytorch_tanh", Activation::GeluTanh), ("silu", Activation::Silu), ("relu", Activation::Relu)]
    {
        let model = molm(&json!({ "activation_function": name })).unwrap();
        assert_eq!(model.layers[0].feed_forward.activation, kind);
    }
}

#[test]
fn a_layer_takes_what_its_configuration_says() {
    let base = json!({ "model_type": "moa_layer", "embed_dim": 16, "num_expert": 6, "top_k": 2, "head_dim": 8 });
    let layer = |keys: Value| {
        let Model::Layer(layer) = imported(&base, &keys) else { panic!("no layer") };
        layer
    };
    let own = layer(json!({ "causal": true }));
    assert_eq!((own.cross_attention, own.attention.causal, sizes(&own.attention)), (false, true, [16, 16, 2, 6, 8]));
    let cross = layer(json!({ "cross_attention": true, "kdim": 20 }));
    assert_eq!(
        (cross.cross_attention, cross.attention.causal, sizes(&cross.attention)),
        (true, false, [16, 20, 2, 6, 8])
    );
    let upstream = layer(json!({ "encoder_decoder_attention": true, "self_attention": false, "num_heads": 2 }));
    assert!(upstream.cross_attention && !layer(json!({ "self_attention": true, "dropout": 0.1 })).cross_attention);
    for keys in [
        json!({ "cross_attention": true, "causal": true }),
        json!({ "kdim": 20 }),
        json!({ "top_k": 7 }),
        json!({ "num_heads": 1 }),
        json!({ "self_attention": false }),
        json!({ "cross_attention": false, "encoder_decoder_attention": true }),
        json!({ "casual": true }),
    ] {
        let tensors = SyntheticTensors::shapes("memory");
        assert!(import(&config(&base, &keys), &tensors, ImportOptions::default()).is_err(), "{keys}");
    }
}
