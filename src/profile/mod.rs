//! Where the tokens of real inputs go: load and balance of the experts, margins of the router, and which tokens
//! an expert prefers.
//!
//! A [`Profiler`] runs an exported model with the routing of every module as extra outputs; [`Profiler::finish`]
//! sums up. Padded tokens do not count. Chosen experts are those that the runtime chose; the scores behind them
//! are the input of `TopK` where the graph holds it (standard form), and elsewhere the product of the operator's
//! input and router weight, added to the graph as standard nodes.

mod error;
mod instrument;
mod profiler;
mod statistics;

use crate::file_names::Part;

pub use error::ProfileError;
pub use profiler::Profiler;

/// What [`Profiler::finish`] may leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PmiOptions {
    /// Tokens that were seen less often are not ranked: their information is mostly chance.
    pub min_count: u64,
    /// Tokens that are listed for each expert at most.
    pub top: usize,
}

impl Default for PmiOptions {
    fn default() -> Self {
        Self { min_count: 5, top: 10 }
    }
}

/// The routing of every module.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Profile {
    /// Modules in the order of the graphs.
    pub modules: Vec<ModuleProfile>,
}

/// The routing of one module.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ModuleProfile {
    /// File name of the graph.
    pub graph: String,
    /// Which graph of the model it is.
    #[serde(skip)]
    pub part: Part,
    /// Module; empty for a single layer.
    pub module: String,
    /// Chosen experts per token, k.
    pub top_k: usize,
    /// Routed tokens, padding not counted.
    pub tokens: u64,
    /// Tokens that went to each expert; they sum to `tokens` × k.
    pub counts: Vec<u64>,
    /// Share of each expert in all choices, in per cent; 100 / E where all are equal.
    pub load_percent: Vec<f64>,
    /// How equal the experts' loads are.
    pub balance: Balance,
    /// How clearly the k-th expert was preferred to the next.
    pub margin: Margin,
    /// Tokens whose chosen experts are not the k best of the recomputed scores.
    pub tokens_apart_from_scores: u64,
    /// By how much the score of an expert that such a token did not choose exceeds one that it chose, at most: where
    /// rounding alone decided, next to nothing.
    pub largest_gap_apart: f64,
    /// Tokens that each expert prefers, by falling information; `None` where the graph takes no token ids.
    pub pmi: Option<Vec<Vec<TokenPmi>>>,
}

/// How equal the loads of E experts are, by their counts c.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Balance {
    /// max(c) / mean(c): 1 where equal, E where one expert does everything.
    pub max_over_mean: f64,
    /// Standard deviation of c (over all E, not E − 1) by mean(c): 0 where equal.
    pub coefficient_of_variation: f64,
    /// −Σ p ln p / ln E with p = c / Σ c: 1 where equal, 0 where one expert does everything; 1 for one expert.
    pub normalized_entropy: f64,
    /// Experts that no token chose.
    pub idle: usize,
}

/// What a router ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// Softmax over all experts.
    Probability,
    /// The router's product, before any softmax.
    Logit,
}

/// Score of the k-th expert less that of the next, over all tokens; nothing where every expert is chosen.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Margin {
    /// What was subtracted.
    #[serde(rename = "score_kind")]
    pub score: Score,
    /// Smallest margin, then the quantiles (nearest rank).
    pub min: Option<f64>,
    /// Tenth percentile.
    pub p10: Option<f64>,
    /// Median.
    pub p50: Option<f64>,
    /// Ninetieth percentile.
    pub p90: Option<f64>,
    /// Largest margin.
    pub max: Option<f64>,
    /// Every token's margin, rising.
    #[serde(skip)]
    pub samples: Vec<f64>,
}

/// A token and an expert that takes it more often than chance.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TokenPmi {
    /// Id.
    pub token: i64,
    /// How often the token was seen.
    pub count: u64,
    /// How often it went to this expert.
    pub with_expert: u64,
    /// log2 (p(token, expert) / (p(token) p(expert))) over all choices.
    pub pmi: f64,
}
