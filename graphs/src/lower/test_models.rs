//! Small models that tests lower.

use serde_json::{Value as Json, json};

use super::{LowerError, Options, lower};
use crate::{
    SyntheticTensors,
    families::{Config, ImportOptions, import},
    graph::Graph,
};

/// Stored transposed, gated, with experts in feed-forward blocks.
pub(super) fn jetmoe() -> Json {
    json!({
        "model_type": "jetmoe", "hidden_size": 16, "vocab_size": 30, "num_experts_per_tok": 2, "kv_channels": 8,
        "num_key_value_heads": 3, "num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 24,
    })
}

/// Stored as the operators take them, with cross-attention.
pub(super) fn translator() -> Json {
    json!({
        "model_type": "moa_transformer", "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "num_expert": 6,
        "encoder_attention_heads": 2, "decoder_attention_heads": 3, "head_dim": 8, "vocab_size": 30,
        "encoder_layers": 1, "decoder_layers": 1,
    })
}

/// The graphs of the model that `config` describes, of made-up weights.
pub(super) fn graphs(config: &Json, options: Options) -> Result<Vec<Graph>, LowerError> {
    let config = Config::new("config.json", config.as_object().unwrap().clone());
    let model = import(&config, &SyntheticTensors::random("memory", 1), ImportOptions::default()).unwrap();
    Ok(lower(&model, options)?.into_iter().map(|named| named.graph).collect())
}
