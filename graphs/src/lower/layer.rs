//! A single layer: `query` (and `memory`) → `output`, in one file.

use moa_schema::interface::{ATTENTION_MASK, MEMORY, OUTPUT, QUERY, QUERY_ATTENTION_MASK};

use super::{BATCH, LowerError, Lowering, NamedGraph, Options, SEQUENCE, SOURCE};
use crate::{graph::Dim, model::MoaLayer, part::Part};

pub(super) fn lower(layer: &MoaLayer, options: Options) -> Result<Vec<NamedGraph>, LowerError> {
    let mut l = Lowering::new(options, SEQUENCE);
    let attention = &layer.attention;
    let [batch, sequence, source] = [BATCH, SEQUENCE, SOURCE].map(Dim::from);
    let width = Dim::from(attention.width);
    let shape = [batch.clone(), sequence.clone(), width];
    let floats = l.b.activations();
    let query = l.b.input(QUERY, floats, &shape);
    let output = if layer.cross_attention {
        let memory_shape = [batch.clone(), source.clone(), Dim::from(attention.source_width)];
        let memory = l.b.input(MEMORY, floats, &memory_shape);
        let [_, key_mask] = l.mask_input(ATTENTION_MASK, &[batch.clone(), source]);
        let [_, query_mask] = l.mask_input(QUERY_ATTENTION_MASK, &[batch, sequence]);
        let [key, value] = l.cross_keys_and_values(attention, &memory);
        l.cross_attention(attention, &query, [&key, &value], [&key_mask, &query_mask])?
    } else {
        let [_, mask] = l.mask_input(ATTENTION_MASK, &[batch, sequence]);
        l.self_attention(attention, &query, &mask, None, None)?.output
    };
    l.b.output(&output, OUTPUT, floats, &shape);
    Ok(vec![l.finish(Part::Model)])
}
