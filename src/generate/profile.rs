//! Where the time of a translation goes.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use tempfile::TempDir;

use super::GenerateError;
use crate::backend::BackendError;

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

/// A folder for the runtime's records.
#[derive(Debug)]
pub(super) struct Recording(TempDir);

impl Recording {
    pub(super) fn begin() -> Result<Self, GenerateError> {
        let folder = tempfile::Builder::new().prefix(".moa-export-profile-").tempdir();
        folder.map(Self).map_err(|error| failed(&error.to_string()))
    }

    /// Start of the name of the file.
    pub(super) fn place(&self) -> PathBuf {
        self.0.path().join("decoder")
    }
}

fn failed(text: &str) -> GenerateError {
    BackendError::Failed { backend: "ort", stage: "record nodes", text: text.to_owned() }.into()
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    cat: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    dur: u64,
    #[serde(default)]
    args: BTreeMap<String, serde_json::Value>,
}

/// Sums up the nodes of a trace of ONNX Runtime.
pub(super) fn nodes(trace: &Path) -> Result<Vec<NodeTime>, GenerateError> {
    let text = fs::read_to_string(trace).map_err(|error| failed(&error.to_string()))?;
    let events: Vec<Event> = serde_json::from_str(&text).map_err(|error| failed(&error.to_string()))?;
    let mut nodes: BTreeMap<String, NodeTime> = BTreeMap::new();
    for event in events.into_iter().filter(|event| event.cat == "Node" && event.name.ends_with("kernel_time")) {
        let operator = event.args.get("op_name").and_then(|name| name.as_str()).unwrap_or_default().to_owned();
        let none = NodeTime { operator: operator.clone(), runs: 0, time: Duration::ZERO };
        let entry = nodes.entry(operator).or_insert(none);
        entry.runs += 1;
        entry.time += Duration::from_micros(event.dur);
    }
    let mut nodes: Vec<_> = nodes.into_values().collect();
    nodes.sort_by_key(|node| std::cmp::Reverse(node.time));
    Ok(nodes)
}
