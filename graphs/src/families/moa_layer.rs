//! `moa_layer`: one attention layer under upstream's tensor names.

use moa_schema::GateMode;

use super::{
    Config, ImportOptions,
    fairseq::{RoutedSizes, Widths, attention, is_buffer},
    importer::Importer,
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
    for key in ["add_zero_attn", "add_bias_kv", "bias"] {
        config.refuse_flag(key)?;
    }
    let width = config.size("embed_dim", "width of queries and output")?;
    let cross_attention = config.flag_or("cross_attention", false)?;
    let causal = config.flag_or("causal", false)?;
    let source_width = config.optional_size("kdim")?.unwrap_or(width);
    if config.optional_size("vdim")?.is_some_and(|vdim| vdim != source_width) {
        return Err(config.invalid("vdim", format!("{source_width}, the width of keys")));
    }
    let num_experts = config.size("num_expert", "number of experts")?;
    let top_k = config.size("top_k", "experts per token; it is never stored in tensors")?;
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
    importer.finish("moa_layer", is_buffer)?;
    Ok(Model::Layer(MoaLayer { attention, cross_attention }))
}
