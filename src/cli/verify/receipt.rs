//! What a verification must carry so that somebody else can tell what was verified, and with what.

use std::{collections::BTreeSet, path::PathBuf};

use serde::Serialize;

use super::args::VerifyArguments;
use crate::{
    backend::{Backend, plan_for},
    checkpoint::Checkpoint,
    cli::{
        Failure,
        receipt::{instructions, libraries, packing},
    },
    files::name_of,
    parity::Verification,
    provenance::{Library, Machine, ModelFile, now},
    side_files,
    source::source_sha256,
};

/// Files by their hashes, libraries, machine and options of a verification.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Receipt {
    /// Version of this program.
    pub(super) program: &'static str,
    /// Seconds since 1970, UTC.
    pub(super) unix_time: u64,
    /// The export, as it was named.
    pub(super) model: String,
    /// The checkpoint, as it was named.
    pub(super) checkpoint: String,
    /// Name of the processor.
    pub(super) cpu: Option<String>,
    /// The widest instructions that the environment lets the operator library use.
    pub(super) instructions: Option<String>,
    /// How the environment lets the operator library pack large matrices of bf16.
    pub(super) packing: Option<String>,
    /// Threads that ONNX Runtime was given; as many as it chooses where absent.
    pub(super) threads: Option<usize>,
    /// Runtimes and libraries of the backends.
    pub(super) runtimes: Vec<Library>,
    /// Graphs and their weights, what lies beside them in a folder that was named, and plans where some were given.
    pub(super) files: Vec<ModelFile>,
    /// SHA-256 of the checkpoint's weights, as the metadata `moa.source.sha256` of an export have it.
    pub(super) checkpoint_sha256: String,
    /// Seed of the inputs.
    pub(super) seed: u64,
    /// Absolute tolerance that the user gave.
    pub(super) atol: Option<f64>,
    /// Relative tolerance that the user gave.
    pub(super) rtol: Option<f64>,
}

impl Receipt {
    /// Hashes what was verified.
    pub(super) fn new(
        arguments: &VerifyArguments,
        checkpoint: &Checkpoint,
        backends: &[Box<dyn Backend>],
        result: &Verification,
    ) -> Result<Self, Failure> {
        let plan = arguments.tensorrt.plan.iter();
        let graphs = result.graph_paths.iter();
        let plans: BTreeSet<PathBuf> =
            plan.flat_map(|plan| graphs.clone().filter_map(|graph| plan_for(plan, graph))).collect();
        let name = name_of(&arguments.model);
        let beside = side_files::files_in(&arguments.model);
        let files = result.files.iter().chain(&beside).chain(&plans);
        let files = files.map(|path| ModelFile::of(&name, path)).collect::<Result<_, _>>()?;
        Ok(Self {
            program: env!("CARGO_PKG_VERSION"),
            unix_time: now(),
            model: arguments.model.display().to_string(),
            checkpoint: arguments.checkpoint.display().to_string(),
            cpu: Machine::processor(),
            instructions: instructions(backends),
            packing: packing(backends),
            threads: arguments.threads,
            runtimes: libraries(backends, arguments.library.as_deref()),
            files,
            checkpoint_sha256: source_sha256(checkpoint)?,
            seed: arguments.seed,
            atol: arguments.atol,
            rtol: arguments.rtol,
        })
    }
}
