//! Weights that never change, packed when the kernel of a node is created.

use moa_kernels::{Prepared, ScratchPool, Weight, WeightData};
use moa_schema::{Attributes, cross_attention as cross, feed_forward as ffn, self_attention as own};

use crate::ffi::Shape;

/// A constant input.
pub(crate) struct Constant<'a> {
    pub(crate) shape: Shape,
    pub(crate) values: WeightData<'a>,
}

/// Packs what `constant` knows; an input that is not constant, or does not fit, is left to each call.
pub(crate) fn prepare<'a>(attributes: &Attributes, constant: &dyn Fn(usize) -> Option<Constant<'a>>) -> Prepared {
    let mut prepared = Prepared::default().with_pool(ScratchPool::of_process());
    let weights: Vec<(Weight, usize, usize)> = match attributes {
        Attributes::SelfAttention(attributes) => vec![
            (Weight::Router, own::ROUTER_WEIGHT, 1),
            (Weight::Query, own::QUERY_WEIGHT, attributes.kv_num_heads),
            (Weight::KeyValue, own::KV_WEIGHT, 2 * attributes.kv_num_heads),
            (Weight::Output, own::OUTPUT_WEIGHT, 1),
        ],
        Attributes::CrossAttention(attributes) => vec![
            (Weight::Router, cross::ROUTER_WEIGHT, 1),
            (Weight::Query, cross::QUERY_WEIGHT, attributes.kv_num_heads),
            (Weight::Output, cross::OUTPUT_WEIGHT, 1),
        ],
        Attributes::FeedForward(attributes) => vec![
            (Weight::Router, ffn::ROUTER_WEIGHT, 1),
            (Weight::Input, ffn::INPUT_WEIGHT, if attributes.gated { 2 } else { 1 }),
            (Weight::Output, ffn::OUTPUT_WEIGHT, 1),
        ],
    };
    for (weight, index, blocks) in weights {
        let Some(Constant { shape, values }) = constant(index) else { continue };
        let shape = match *shape.as_slice() {
            [inner, row] => [1, inner, row],
            [matrices, inner, row] => [matrices, inner, row],
            _ => continue,
        };
        // A refusal leaves the weight unpacked; a call then names what does not fit.
        let _ = prepared.pack(weight, shape, blocks, values);
    }
    prepared
}
