//! What a model holds and what it costs: parameters, multiply-accumulates, cache and weight bytes.
//!
//! The same rules count a checkpoint, a configuration without weights, an exported graph, and the rows of the
//! paper's tables.

mod component;
mod cost;
mod graph;
mod graph_cost;
mod model;
pub mod paper;
pub mod preset;
mod products;
mod sizes;

use std::collections::BTreeMap;

use moa_graphs::{Weight, model::Model};

use component::Component;
pub use cost::{Cost, Lengths};
pub use graph::{
    File, FunctionBody, GraphInspection, GraphPart, GraphWeights, ModelFiles, OperatorCount, Signature, inspect_graphs,
    model_files,
};
pub use sizes::{AttentionSizes, ModelSizes};

/// One part of a model.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Its cost for the lengths asked for.
    #[serde(flatten)]
    pub cost: Cost,
}

/// Stored weights of one element type.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct StoredWeights {
    /// Element type in the checkpoint.
    pub dtype: &'static str,
    /// Tensors.
    pub tensors: usize,
    /// Values.
    pub values: u64,
    /// Bytes of them in the checkpoint.
    pub bytes: u64,
}

/// A model in numbers.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Inspection {
    /// `model_type`.
    pub family: String,
    /// Sizes of the model.
    pub sizes: ModelSizes,
    /// Parts, in the order of the journey of a token.
    pub parts: Vec<Part>,
    /// All of them.
    pub total: Cost,
    /// Lengths for which multiply-accumulates were counted.
    pub lengths: Lengths,
    /// Bytes of keys and values that one more token of a row needs, at 4 bytes a value.
    pub cache_bytes_per_token: u64,
    /// Weights by stored type.
    pub weights: Vec<StoredWeights>,
}

/// Counts what `model` holds and costs.
pub fn inspect(family: &str, model: &Model, lengths: Lengths) -> Inspection {
    let part = |(component, cost): (Component, Cost)| Part { name: component.name(), cost };
    let parts: Vec<_> = model::parts(model, lengths).into_iter().map(part).collect();
    let total = parts.iter().map(|part| part.cost).sum();
    Inspection {
        family: family.into(),
        sizes: model::sizes(model),
        parts,
        total,
        lengths,
        cache_bytes_per_token: model::cache_values_per_token(model) * 4,
        weights: stored(model),
    }
}

fn stored(model: &Model) -> Vec<StoredWeights> {
    let mut distinct: BTreeMap<&str, &Weight> = BTreeMap::new();
    for weight in model.weights() {
        distinct.insert(weight.name(), weight);
    }
    let mut by_type: BTreeMap<&'static str, StoredWeights> = BTreeMap::new();
    for weight in distinct.values() {
        let dtype = weight.stored_type();
        let entry = by_type.entry(dtype).or_insert(StoredWeights { dtype, tensors: 0, values: 0, bytes: 0 });
        entry.tensors += 1;
        entry.values = entry.values.saturating_add(model::elements(weight));
        entry.bytes = entry.bytes.saturating_add(weight.stored_bytes());
    }
    by_type.into_values().collect()
}
