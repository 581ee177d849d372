//! The scratch memory of one call at a time.

use crate::buffer::Buffer;
use crate::decode::DecodeScratch;
use crate::feed_forward::HiddenScratch;
use crate::few_tokens::FewScratch;
use crate::grid::Claims;
use crate::key_panels::{PanelScratch, Visible};
use crate::kv_cache::CacheBounds;
use crate::many_tokens::ManyScratch;
use crate::output_projection::OutputScratch;
use crate::prepared::OwnWeights;
use crate::query_projection::QueryScratch;
use crate::routing::RoutingScratch;
use crate::single_token::SingleScratch;

/// Memory of every stage; a call uses the parts that it needs.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) routing: RoutingScratch,
    pub(crate) weights: OwnWeights,
    pub(crate) cache: CacheScratch,
    pub(crate) layer: LayerScratch,
    pub(crate) hidden: HiddenScratch,
    pub(crate) output: OutputScratch,
    pub(crate) border: BorderScratch,
}

/// Activations that are not f32 outside, as f32, and hidden states, or inputs of routers, whose rows are moved apart.
#[derive(Debug, Default)]
pub(crate) struct BorderScratch {
    pub(crate) hidden_states: Buffer,
    pub(crate) router_input: Buffer,
    pub(crate) bias: Buffer,
    pub(crate) output: Buffer,
}

/// Keys and values that the caller does not want as f32.
#[derive(Debug, Default)]
pub(crate) struct CacheScratch {
    pub(crate) key: Buffer,
    pub(crate) value: Buffer,
    pub(crate) bounds: CacheBounds,
    pub(crate) claims: [[Claims; 2]; 2],
}

/// Queries, keys and results of an attention.
#[derive(Debug, Default)]
pub(crate) struct LayerScratch {
    pub(crate) visible: Visible,
    pub(crate) queries: QueryScratch,
    pub(crate) panels: PanelScratch,
    pub(crate) decode: DecodeScratch,
    pub(crate) single: SingleScratch,
    pub(crate) few: FewScratch,
    pub(crate) many: ManyScratch,
    pub(crate) wide: [Buffer; 2],
    pub(crate) attended: Buffer,
    pub(crate) bounds: Vec<usize>,
    pub(crate) claims: Claims,
}

impl Scratch {
    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let Self { routing, weights, cache, layer, hidden, output, border } = self;
        let stages = routing.bytes() + weights.bytes() + hidden.bytes() + output.bytes();
        stages + cache.bytes() + layer.bytes() + border.bytes()
    }
}

impl BorderScratch {
    fn bytes(&self) -> usize {
        let Self { hidden_states, router_input, bias, output } = self;
        [hidden_states, router_input, bias, output].iter().map(|buffer| buffer.bytes()).sum()
    }
}

impl CacheScratch {
    fn bytes(&self) -> usize {
        let Self { key, value, bounds, claims } = self;
        key.bytes() + value.bytes() + bounds.bytes() + Claims::bytes(claims.as_flattened())
    }
}

impl LayerScratch {
    fn bytes(&self) -> usize {
        let Self { visible, queries, panels, decode, single, few, many, wide, attended, bounds, claims } = self;
        visible.bytes()
            + queries.bytes()
            + panels.bytes()
            + decode.bytes()
            + single.bytes()
            + few.bytes()
            + many.bytes()
            + wide.iter().map(Buffer::bytes).sum::<usize>()
            + attended.bytes()
            + bounds.capacity() * size_of::<usize>()
            + Claims::bytes([claims])
    }
}
