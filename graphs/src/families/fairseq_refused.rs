//! Settings of the fairseq families that have no export.

use serde_json::Value;

use super::Config;
use crate::ImportError;

/// Keys that upstream takes without the name of a side, for both of them; which of two then counts is a matter of their
/// container.
const UNPREFIXED: [&str; 9] = [
    "attention_heads",
    "layers",
    "embed_dim",
    "ffn_embed_dim",
    "normalize_before",
    "learned_pos",
    "layers_to_keep",
    "input_dim",
    "output_dim",
];

/// Refuses switches of upstream whose maths is not exported.
pub(super) fn refuse_unsupported(config: &Config) -> Result<(), ImportError> {
    for key in ["cross_self_attention", "no_cross_attention", "scale_attn", "scale_fc", "scale_heads", "scale_resids"] {
        config.refuse_flag(key)?;
    }
    for key in ["adaptive_softmax_cutoff", "encoder_layers_to_keep", "decoder_layers_to_keep"] {
        if config.has(key) {
            return Err(config.unsupported(format!("\"{key}\"")));
        }
    }
    for key in ["encoder", "decoder", "quant_noise"] {
        if config.keys().get(key).is_some_and(Value::is_object) {
            return Err(config.unsupported(format!("settings inside \"{key}\" in place of \"{key}_…\"")));
        }
    }
    if let Some(key) = UNPREFIXED.into_iter().find(|key| config.has(key)) {
        return Err(config.unsupported(format!("\"{key}\" in place of \"encoder_{key}\" and \"decoder_{key}\"")));
    }
    for key in ["quant_noise_scalar", "scalar"] {
        let share = config.non_negative_or(key, 0.0)?;
        if share != 0.0 {
            return Err(config.unsupported(format!("\"{key}\": {share}: weights in 8 bits")));
        }
    }
    Ok(())
}
