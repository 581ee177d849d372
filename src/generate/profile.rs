//! Where the time of a translation goes.

use std::{collections::BTreeMap, time::Duration};

use crate::backend::NodeRun;

/// Time by place; what is not named is the search and the tokenizer.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Sentences that were translated.
    pub sentences: usize,
    /// Runs of the decoder.
    pub steps: usize,
    /// Rows of all of them.
    pub rows: usize,
    /// From the first line to the last.
    pub total: Duration,
    /// Of it, the encoder.
    pub encoder: Duration,
    /// Of it, the decoder: binding and running.
    pub decoder: Duration,
    /// Of it, reordering of caches.
    pub reorder: Duration,
    /// Nodes of the decoder by operator, the slowest first; only of a translator that records them.
    pub nodes: Vec<NodeTime>,
}

/// Time of all nodes of one operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTime {
    /// Operator.
    pub operator: String,
    /// How often a node of it ran.
    pub runs: usize,
    /// Time of all runs.
    pub time: Duration,
}

/// Sums up nodes by operator.
pub(super) fn by_operator(nodes: Vec<NodeRun>) -> Vec<NodeTime> {
    let mut sums: BTreeMap<String, NodeTime> = BTreeMap::new();
    for NodeRun { operator, time, .. } in nodes {
        let none = NodeTime { operator: operator.clone(), runs: 0, time: Duration::ZERO };
        let entry = sums.entry(operator).or_insert(none);
        entry.runs += 1;
        entry.time += time;
    }
    let mut sums: Vec<_> = sums.into_values().collect();
    sums.sort_by_key(|node| std::cmp::Reverse(node.time));
    sums
}
