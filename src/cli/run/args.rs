//! Arguments of `moa-export run`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::expect::ExpectArguments;
use crate::{
    backend::BackendKind,
    cli::{
        Failure,
        args::{threads, written},
        size_args::{axis, grid, positive, size},
        tensorrt_args::TensorRtArguments,
    },
    latency::Grid,
};

const EXAMPLES: &str = "\
Examples:
  moa-export run model.onnx --random --seq 16
  moa-export run model.onnx --inputs in.safetensors --outputs out.safetensors
  moa-export run model.onnx --inputs in.safetensors --expect torch.safetensors
  moa-export run model.plan --inputs in.safetensors --outputs out.safetensors";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct RunArguments {
    /// Model file, a folder with one graph, or a plan of TensorRT
    pub(super) model: PathBuf,
    /// Inputs by name, a `.safetensors` file; empty caches and the positions of a mask may be left out, but for a plan
    /// without its model
    #[arg(long, value_name = "FILE", required_unless_present = "random")]
    pub(super) inputs: Option<PathBuf>,
    /// Where outputs go by name, a `.safetensors` file [default: they are shown and not kept]
    #[arg(long, value_name = "FILE", value_parser = written())]
    pub(super) outputs: Option<PathBuf>,
    /// What runs the model [default: ort; tensorrt for a plan]
    #[arg(long, value_enum)]
    pub(super) backend: Option<BackendKind>,
    /// Threads of ONNX Runtime, at most 4 for each processor [default: ONNX Runtime's choice]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(super) threads: Option<usize>,
    /// Operator library, where it is not beside this program
    #[arg(long, value_name = "FILE")]
    pub(super) library: Option<PathBuf>,
    /// Replace an existing output file
    #[arg(long)]
    pub(super) force: bool,
    /// Print what is shown of outputs as JSON
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) expect: ExpectArguments,
    #[command(flatten)]
    pub(super) random: RandomArguments,
    #[command(flatten)]
    pub(super) tensorrt: TensorRtArguments,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Random inputs")]
pub(super) struct RandomArguments {
    /// Make inputs: token ids of the model's table, masks of ones, positions that follow the past
    #[arg(long, conflicts_with = "inputs")]
    pub(super) random: bool,
    /// Rows [default: 1]
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with = "inputs")]
    batch: Option<usize>,
    /// New tokens of a row [default: 32]
    #[arg(long, value_name = "T", value_parser = positive, conflicts_with = "inputs")]
    seq: Option<usize>,
    /// Tokens of a row whose keys and values are cached [default: 0]
    #[arg(long, value_name = "P", value_parser = size, conflicts_with = "inputs")]
    past: Option<usize>,
    /// Source tokens of a row, in graphs that read a source [default: cached and new tokens together; new ones where a
    /// graph has no others]
    #[arg(long, value_name = "S", value_parser = positive, conflicts_with = "inputs")]
    source: Option<usize>,
    /// Size of another axis of the graph
    #[arg(long, value_name = "AXIS=N", value_parser = axis, conflicts_with = "inputs")]
    dim: Vec<(String, usize)>,
    /// Seed of the values
    #[arg(long, value_name = "N", default_value = "0", conflicts_with = "inputs")]
    pub(super) seed: u64,
    /// Where these inputs go by name, a `.safetensors` file that --inputs takes
    #[arg(long, value_name = "FILE", value_parser = written(), conflicts_with = "inputs")]
    pub(super) save_inputs: Option<PathBuf>,
}

impl RandomArguments {
    /// The only point at which inputs are made.
    pub(super) fn grid(&self) -> Result<Grid, Failure> {
        let typed = [self.batch, self.seq, self.past, self.source];
        grid(typed.map(|size| size.into_iter().collect()), &self.dim)
    }
}

impl RunArguments {
    /// What no output may replace.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &Path> {
        let Self { model, inputs, library, expect, tensorrt, .. } = self;
        let others = inputs.iter().chain(library).chain(&expect.expect).chain(&tensorrt.plan);
        [model].into_iter().chain(others).map(PathBuf::as_path)
    }
}
