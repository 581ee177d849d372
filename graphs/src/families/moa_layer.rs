//! `moa_layer`: one attention layer under upstream's tensor names.

use moa_schema::GateMode;

use super::{
    Config, ImportOptions,
    fairseq::{RoutedSizes, Widths, attention, is_buffer},
    importer::Importer,
    model_types,
};
use crate::{
    ImportError, TensorDirectory,
    model::{MoaLayer, Model},
};

pub(super) fn import(
    config: &Config,
    tensors: &dyn TensorDirectory,
    options: ImportOptions,
) -> Result<Model, ImportError> {
    check_keys(config)?;
    let width = config.size("embed_dim", "width of queries and output")?;
    let cross_attention = is_cross_attention(config)?;
    let causal = config.flag_or("causal", false)?;
    let source_width = config.optional_size("kdim")?.unwrap_or(width);
    if config.optional_size("vdim")?.is_some_and(|vdim| vdim != source_width) {
        return Err(config.invalid("vdim", format!("{source_width}, the width of keys")));
    }
    let num_experts = config.size("num_expert", "number of experts")?;
    let top_k = top_k(config)?;
    if top_k > num_experts {
        return Err(config.invalid("top_k", format!("at most num_expert = {num_experts}")));
    }
    if cross_attention && causal {
        return Err(config.invalid("causal", "false where \"cross_attention\" is true"));
    }
    if !cross_attention && source_width != width {
        return Err(config.invalid("kdim", format!("embed_dim = {width} where \"cross_attention\" is false")));
    }
    let head_size = config.size("head_dim", "width of one head")?;
    let gate_mode = options.gate_mode.unwrap_or(GateMode::SoftmaxTopk);
    let sizes = RoutedSizes { top_k, num_experts, head_size, gate_mode, biases: false };
    let widths = Widths { width, source: source_width };
    let mut importer = Importer::new(config, tensors);
    let attention = attention(&mut importer, "", sizes, widths, causal)?;
    importer.finish(model_types::MOA_LAYER, is_buffer)?;
    Ok(Model::Layer(MoaLayer { attention, cross_attention }))
}

/// What a layer is read from.
const KEYS: [&str; 12] = [
    "model_type",
    "embed_dim",
    "num_expert",
    "top_k",
    "num_heads",
    "head_dim",
    "kdim",
    "vdim",
    "causal",
    "cross_attention",
    "encoder_decoder_attention",
    "self_attention",
];

/// Upstream's arguments that change what is computed, and that no export has.
const REFUSED: [&str; 3] = ["add_zero_attn", "add_bias_kv", "bias"];

/// Upstream's arguments of training alone, and what Hugging Face's tools write into any configuration.
const INERT: [&str; 14] = [
    "dropout",
    "q_noise",
    "qn_block_size",
    "cvloss",
    "switchloss",
    "zloss",
    "sample_topk",
    "noisy_gating",
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
];

/// Refuses other keys: most settings have a default, and a misspelt one would be another layer.
fn check_keys(config: &Config) -> Result<(), ImportError> {
    for key in REFUSED {
        config.refuse_flag(key)?;
    }
    let known = |key: &str| [&KEYS[..], &REFUSED, &INERT].iter().any(|keys| keys.contains(&key));
    match config.keys().keys().find(|key| !known(key)) {
        Some(key) => Err(config.unknown(key, &KEYS)),
        None => Ok(()),
    }
}

/// Upstream calls cross-attention by two flags, of which one follows from the other.
fn is_cross_attention(config: &Config) -> Result<bool, ImportError> {
    let cross = config.flag_or("cross_attention", config.flag_or("encoder_decoder_attention", false)?)?;
    for (key, expected) in [("encoder_decoder_attention", cross), ("self_attention", !cross)] {
        if config.flag_or(key, expected)? != expected {
            let expected = format!("{expected} where \"cross_attention\" is {cross}");
            return Err(config.invalid(key, expected));
        }
    }
    Ok(cross)
}

/// Experts per token, which upstream's module calls its heads.
fn top_k(config: &Config) -> Result<usize, ImportError> {
    match config.agreed_size(["top_k", "num_heads"])? {
        Some((top_k, _)) => Ok(top_k),
        None => config.size("top_k", "experts per token; it is never stored in tensors"),
    }
}
