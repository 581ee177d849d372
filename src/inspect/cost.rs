//! Counting rules.
//!
//! Two conventions for multiply-accumulates:
//!
//! * `paper`: products with weights, router and output layer included, experts that are not chosen left out, no
//!   product of queries with keys or of probabilities with values; a bias of a dense layer counts its length once per
//!   call, one that follows the experts not. This is the convention behind the numbers printed in "Mixture of Attention
//!   Heads" (EMNLP 2022).
//! * `full`: products with weights and both attention products over all keys; no biases.
//!
//! Sums that no number of 64 bits holds stay at the largest one.
//!
//! Every part of a typed model and of a graph is a sum of the four kinds of cost below.

use std::{iter::Sum, ops::Add};

/// Tokens for which multiply-accumulates are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Lengths {
    /// Tokens of the source, or of the only side.
    pub source: u64,
    /// Tokens of the target.
    pub target: u64,
}

/// What a part holds and costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Cost {
    /// Distinct trained values.
    pub parameters: u64,
    /// Those that one token uses.
    pub active_parameters: u64,
    /// Multiply-accumulates by the paper's convention.
    pub paper_macs: u64,
    /// Multiply-accumulates with both attention products.
    pub full_macs: u64,
    /// The part of `full_macs` that is attention products.
    pub attention_macs: u64,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            parameters: self.parameters.saturating_add(other.parameters),
            active_parameters: self.active_parameters.saturating_add(other.active_parameters),
            paper_macs: self.paper_macs.saturating_add(other.paper_macs),
            full_macs: self.full_macs.saturating_add(other.full_macs),
            attention_macs: self.attention_macs.saturating_add(other.attention_macs),
        }
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), Add::add)
    }
}

impl Cost {
    /// `values` trained values, of which a token uses `top_k` of `experts` equal shares.
    pub(super) fn parameters(values: u64, top_k: u64, experts: u64) -> Self {
        let active_parameters = (values / experts.max(1)).saturating_mul(top_k);
        Self { parameters: values, active_parameters, ..Self::default() }
    }

    /// A product of `tokens` rows with a matrix of `values` values.
    pub(super) fn product(values: u64, tokens: u64) -> Self {
        let macs = values.saturating_mul(tokens);
        Self { paper_macs: macs, full_macs: macs, ..Self::default() }
    }

    /// A bias of `values` values.
    pub(super) fn bias(values: u64) -> Self {
        Self { paper_macs: values, ..Self::default() }
    }

    /// Queries with keys, and probabilities with values, where each query has `columns` channels in all heads.
    pub(super) fn attention(queries: u64, keys: u64, columns: u64) -> Self {
        let attention_macs = (2 * queries).saturating_mul(keys).saturating_mul(columns);
        Self { full_macs: attention_macs, attention_macs, ..Self::default() }
    }
}

/// Sizes of routed attention that its cost depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RoutedAttention {
    pub(super) width: u64,
    /// Width of what the router reads.
    pub(super) read: u64,
    pub(super) top_k: u64,
    pub(super) experts: u64,
    pub(super) kv_heads: u64,
    pub(super) head: u64,
}

impl RoutedAttention {
    pub(super) fn columns(&self) -> u64 {
        self.kv_heads * self.head
    }

    /// Routing, the chosen projections and the attention products; keys and values are given.
    pub(super) fn macs(&self, queries: u64, keys: u64) -> Cost {
        let chosen = self.top_k * self.columns();
        Cost::product(self.read * self.experts, queries)
            + Cost::product((2 * self.width).saturating_mul(chosen), queries)
            + Cost::attention(queries, keys, chosen)
    }
}

/// Sizes of a routed feed-forward block that its cost depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RoutedFeedForward {
    /// Width of what the router reads.
    pub(super) read: u64,
    pub(super) top_k: u64,
    pub(super) experts: u64,
    /// Values of the matrices of all experts.
    pub(super) matrices: u64,
}

impl RoutedFeedForward {
    pub(super) fn macs(&self, tokens: u64) -> Cost {
        let chosen = self.matrices / self.experts.max(1) * self.top_k;
        Cost::product(self.read * self.experts, tokens) + Cost::product(chosen, tokens)
    }
}
