//! Weight audit: every constant of a file beside what the checkpoint would give today, bit for bit.
//!
//! Inputs exercise a few rows of an embedding and some experts; this check sees every value.

use std::collections::BTreeMap;

use moa_graphs::graph::Graph;

use crate::onnx::{OnnxFile, ReadError};

/// Outcome of the audit of one file.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct WeightAudit {
    /// Constants compared.
    pub tensors: usize,
    /// Constants that differ, are missing or are too many, each with what is wrong; at most ten.
    pub faults: Vec<String>,
    /// How many such constants.
    pub fault_count: usize,
}

/// Most faults that are named.
const NAMED_FAULTS: usize = 10;

/// Why a constant could not be compared.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AuditError {
    #[error(transparent)]
    Weight(#[from] moa_graphs::WeightError),
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl WeightAudit {
    /// Whether all constants are equal.
    pub const fn passed(&self) -> bool {
        self.fault_count == 0
    }

    fn fault(&mut self, text: String) {
        self.fault_count += 1;
        if self.faults.len() < NAMED_FAULTS {
            self.faults.push(text);
        }
    }

    /// Compares the constants of `file` with those of `expected`, the graph that the checkpoint gives.
    ///
    /// # Errors
    ///
    /// Where a constant of either side cannot be read.
    pub fn run(file: &OnnxFile, expected: &Graph) -> Result<Self, AuditError> {
        let mut audit = Self::default();
        let graph = file.model().graph.as_ref();
        let mut found: BTreeMap<&str, _> = graph
            .into_iter()
            .flat_map(|graph| &graph.initializer)
            .map(|tensor| (tensor.name.as_str(), tensor))
            .collect();
        for initializer in &expected.initializers {
            let name = initializer.name.as_str();
            audit.tensors += 1;
            let Some(tensor) = found.remove(name) else {
                audit.fault(format!("constant \"{name}\" is missing"));
                continue;
            };
            let shape: Vec<_> = initializer.shape.iter().map(|dim| i64::try_from(*dim).unwrap_or(i64::MAX)).collect();
            if tensor.dims != shape {
                audit.fault(format!("constant \"{name}\" has shape {:?}, the checkpoint gives {shape:?}", tensor.dims));
                continue;
            }
            let (stored, computed) = (file.values(tensor)?, initializer.data.to_bytes()?);
            if let Some(index) = first_difference(&stored, &computed) {
                audit.fault(format!("constant \"{name}\" differs from the checkpoint from byte {index} on"));
            }
        }
        for name in found.keys() {
            audit.fault(format!("constant \"{name}\" does not come from the checkpoint"));
        }
        Ok(audit)
    }
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b {
        return None;
    }
    Some(a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len())))
}
