//! Attributes of our operators, as nodes hold them.

use std::collections::BTreeMap;

use moa_schema::{CrossAttentionAttributes, FeedForwardAttributes, SelfAttentionAttributes, attribute};

use crate::graph::Attribute;

fn attributes<const N: usize>(entries: [(&str, Attribute); N]) -> BTreeMap<String, Attribute> {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[allow(clippy::cast_possible_wrap)]
fn int(value: usize) -> Attribute {
    Attribute::Int(value as i64)
}

/// What scores are multiplied with: one over the root of a head's width.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
pub(super) fn scale(head_size: usize) -> f32 {
    (1.0 / (head_size as f64).sqrt()) as f32
}

pub(super) fn self_attributes(a: &SelfAttentionAttributes) -> BTreeMap<String, Attribute> {
    attributes([
        (attribute::TOP_K, int(a.top_k)),
        (attribute::KV_NUM_HEADS, int(a.kv_num_heads)),
        (attribute::CAUSAL, int(usize::from(a.causal))),
        (attribute::SCALE, Attribute::Float(a.scale)),
        (attribute::GATE_MODE, Attribute::Text(a.gate_mode.as_str().into())),
        (attribute::SKIP_PADDED_QUERIES, int(usize::from(a.skip_padded_queries))),
        (attribute::ATTENTION_MODE, Attribute::Text(a.attention_mode.as_str().into())),
    ])
}

pub(super) fn cross_attributes(a: &CrossAttentionAttributes) -> BTreeMap<String, Attribute> {
    attributes([
        (attribute::TOP_K, int(a.top_k)),
        (attribute::KV_NUM_HEADS, int(a.kv_num_heads)),
        (attribute::SCALE, Attribute::Float(a.scale)),
        (attribute::GATE_MODE, Attribute::Text(a.gate_mode.as_str().into())),
        (attribute::SKIP_PADDED_QUERIES, int(usize::from(a.skip_padded_queries))),
    ])
}

pub(super) fn feed_forward_attributes(a: &FeedForwardAttributes) -> BTreeMap<String, Attribute> {
    attributes([
        (attribute::TOP_K, int(a.top_k)),
        (attribute::GATE_MODE, Attribute::Text(a.gate_mode.as_str().into())),
        (attribute::ACTIVATION, Attribute::Text(a.activation.as_str().into())),
        (attribute::GATED, int(usize::from(a.gated))),
    ])
}

#[cfg(test)]
mod tests {
    use moa_schema::{Activation, AttentionMode, CROSS_ATTENTION, FEED_FORWARD, GateMode, SELF_ATTENTION};

    use super::*;

    #[test]
    fn attributes_are_those_of_the_schema() {
        let (top_k, kv_num_heads, scale, skip_padded_queries) = (1, 1, 1.0, true);
        let gate_mode = GateMode::SoftmaxTopk;
        let attention_mode = AttentionMode::Softmax;
        let attention = SelfAttentionAttributes {
            top_k,
            kv_num_heads,
            causal: true,
            scale,
            gate_mode,
            skip_padded_queries,
            attention_mode,
        };
        let cross = CrossAttentionAttributes { top_k, kv_num_heads, scale, gate_mode, skip_padded_queries };
        let feed_forward = FeedForwardAttributes { top_k, gate_mode, activation: Activation::Relu, gated: true };
        for (operator, written) in [
            (SELF_ATTENTION, self_attributes(&attention)),
            (CROSS_ATTENTION, cross_attributes(&cross)),
            (FEED_FORWARD, feed_forward_attributes(&feed_forward)),
        ] {
            let mut names: Vec<_> = operator.attributes.iter().map(|attribute| attribute.name).collect();
            names.sort_unstable();
            assert_eq!(written.keys().collect::<Vec<_>>(), names, "{}", operator.name);
        }
    }
}
