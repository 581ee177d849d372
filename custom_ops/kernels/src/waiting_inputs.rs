//! What the stages of a layer read that wait for each other in one run of the pool.

use crate::cached::KeysAndValues;
use crate::key_panels::Visible;
use crate::packed::Packed;
use crate::pool::Awaited;
use crate::query_projection::QueryInputs;
use crate::routing::Router;

/// Inputs of one batch row, and the stages that are waited for.
#[derive(Clone, Copy)]
pub(crate) struct WaitingInputs<'a> {
    pub(crate) queries: QueryInputs<'a>,
    pub(crate) router: &'a Awaited<Router<'a>>,
    /// `[rows, D]`, of which the first `keys` rows are keys.
    pub(crate) keys_and_values: &'a dyn KeysAndValues,
    pub(crate) tokens: usize,
    pub(crate) top_k: usize,
    pub(crate) keys: usize,
    /// Whether one token attends to f32 as it does to f16.
    pub(crate) as_stored: bool,
    pub(crate) visible: &'a Visible,
    /// `Some(P)`: query `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    /// `[E, D, C]`.
    pub(crate) output_weights: &'a Packed,
    /// `[C]`.
    pub(crate) bias: Option<&'a [f32]>,
}
