//! Where ONNX Runtime's time goes: its own record of every node that ran.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs, io};

use serde::Deserialize;
use tempfile::TempDir;

use crate::backend::{BackendError, BackendKind};
use crate::scratch::scratch_folder;

/// A folder for the runtime's records, removed when dropped.
#[derive(Debug)]
pub struct OrtTrace(TempDir);

/// One node that ran once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRun {
    /// Name of the node, as the runtime's optimiser left it.
    pub node: String,
    /// Operator.
    pub operator: String,
    /// Time in the node.
    pub time: Duration,
}

impl OrtTrace {
    /// Makes the folder.
    ///
    /// # Errors
    ///
    /// Where the folder for temporary files cannot be written.
    pub fn begin() -> Result<Self, BackendError> {
        let folder = env::temp_dir();
        let no_folder = |error: io::Error| {
            failed(&format!("{}, the folder for temporary files: {}", folder.display(), error.kind()))
        };
        scratch_folder(&folder).map(Self).map_err(no_folder)
    }

    /// What [`super::OrtSession::load`] takes as its `profile`.
    pub fn place(&self) -> PathBuf {
        self.0.path().join("nodes")
    }

    /// Every node that ran, in the order of `trace`, which [`super::OrtSession::end_profiling`] returned.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read or is no trace.
    pub fn nodes(&self, trace: &Path) -> Result<Vec<NodeRun>, BackendError> {
        let text = fs::read_to_string(trace).map_err(|error| failed(&error.to_string()))?;
        let events: Vec<Event> = serde_json::from_str(&text).map_err(|error| failed(&error.to_string()))?;
        Ok(events.into_iter().filter_map(Event::node).collect())
    }
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

impl Event {
    fn node(self) -> Option<NodeRun> {
        let node = self.name.strip_suffix("_kernel_time").filter(|_| self.cat == "Node")?.to_owned();
        let operator = self.args.get("op_name").and_then(|name| name.as_str()).unwrap_or_default().to_owned();
        Some(NodeRun { node, operator, time: Duration::from_micros(self.dur) })
    }
}

fn failed(text: &str) -> BackendError {
    BackendError::Failed { backend: BackendKind::Ort.name(), stage: "record nodes", text: text.to_owned() }
}
