//! What `moa-export verify` takes.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::{
    backend::BackendKind,
    cli::{
        args::{threads, written},
        tensorrt_args::TensorRtArguments,
    },
};

const EXAMPLES: &str = "\
Examples:
  moa-export verify OUT --checkpoint CHECKPOINT
  moa-export verify model.onnx --checkpoint CHECKPOINT --backends ort,tract --report page.html";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct VerifyArguments {
    /// Exported model file or folder
    pub(super) model: PathBuf,
    /// Checkpoint that it was exported from
    #[arg(long, value_name = "CHECKPOINT")]
    pub(super) checkpoint: PathBuf,
    /// Configuration, where it is not config.json beside the checkpoint
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Backends; one that is named and missing is an error [default: all that are present]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(super) backends: Vec<BackendKind>,
    /// Absolute tolerance: |found - expected| <= atol + rtol * |expected| [default: this model's rounding error, in the
    /// type of its activations and of what its operators multiply]
    #[arg(long, value_name = "X")]
    pub(super) atol: Option<f64>,
    /// Relative tolerance, added to the absolute one [default: 0]
    #[arg(long, value_name = "X")]
    pub(super) rtol: Option<f64>,
    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// Fail too where weights were not compared, or where a graph was changed and is proved for these inputs alone
    #[arg(long)]
    pub(super) strict: bool,
    /// Threads of ONNX Runtime, at most 4 for each processor [default: ONNX Runtime's choice]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(super) threads: Option<usize>,
    /// Write the result as JSON to FILE (`-` for stdout, in place of the table)
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Write the result as a page, readable without a network
    #[arg(long, value_name = "FILE.html", value_parser = written())]
    pub(super) report: Option<PathBuf>,
    /// Replace existing files of --json and --report
    #[arg(long)]
    pub(super) force: bool,
    /// Operator library, where it is not beside this program
    #[arg(long, value_name = "FILE")]
    pub(super) library: Option<PathBuf>,
    #[command(flatten)]
    pub(super) tensorrt: TensorRtArguments,
}

impl VerifyArguments {
    /// Of the export `model`, on all backends that are present; `json` is where the result goes as JSON.
    pub(in crate::cli) fn of_export(
        model: &Path,
        checkpoint: &Path,
        config: Option<&Path>,
        json: Option<&Path>,
    ) -> Self {
        Self {
            model: model.to_owned(),
            checkpoint: checkpoint.to_owned(),
            config: config.map(Path::to_owned),
            backends: Vec::new(),
            atol: None,
            rtol: None,
            seed: 0,
            strict: false,
            threads: None,
            json: json.map(Path::to_owned),
            report: None,
            force: false,
            library: None,
            tensorrt: TensorRtArguments::default(),
        }
    }

    /// What no output may replace.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &Path> {
        let Self { model, checkpoint, config, library, tensorrt, .. } = self;
        let named = [model, checkpoint].into_iter().chain(config).chain(library);
        named.chain(&tensorrt.plan).map(PathBuf::as_path)
    }
}
