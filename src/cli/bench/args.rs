//! What may be typed after `moa-export bench`.

use std::path::{Path, PathBuf};

use clap::Args;

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

const NOTES: &str = "\
What is timed: the runtime's own call, inputs bound before it, outputs left where the runtime puts them. Models and \
backends of one point take turns (A B A B ...) in one process, and those on ONNX Runtime share its threads; a ratio is \
the median of the turns' ratios to the first model on the first backend, with a 95 % interval between order statistics. \
An interval is of the sessions of this run alone: copies of one model, loaded side by side, differed by up to \
0.5 % beyond it (18 pairs on one machine). \
With TensorRT, inputs and outputs stay on the device, and a call ends when the GPU has finished; its engine is built for the sizes of all points and tuned for the largest.

A turn is 1 to 5 timed calls, behind one that is not timed if others ran before.
Warm-up: until the medians of the last 8 calls and of the 8 before differ by at most 5 % for all.
Medians and percentiles are nearest ranks: measured times, never averages; of an even number the lower middle one is the \
median. The column p50 and tokens/s are of all samples; --compare, as ratios do, takes turns, each by \
the median of its calls. Percentiles need 10 samples beyond them: p90 from 100, p99 from 1,000, p99.9 from 10,000 samples; else there is a dash.

Before the steady state: the load of a graph and its first call. What a runtime does once in a process, such as \
starting its threads, is in neither: before anything is measured, every runtime but TensorRT loads and calls one graph \
and drops it. The memory is what both added to the process at its peak, after free memory went back to the system; \
between two copies of one model it differs by some hundred kB.

In place: with --in-place, past and present of each self-attention cache are one buffer with room for the new tokens, \
in graphs whose caches our library updates in place, on the backend ort; `generate` runs so. Every call writes the same \
rows. All others, such as ort-function, cannot and are timed as without the option, beside it; every output says which. \
Parity is of calls whose caches are not in place; `verify` checks both. The pass by node runs without it.

Routing: with `data` whole graphs run on their inputs. A whole graph cannot be rerouted faithfully, so \
`uniform`, `zipf:S`, `single` and `trace:FILE` time every MoA operator by itself, cut out of the model with its own \
weights, on hidden states for which its own router makes the asked choice, which is checked. FILE holds \
router.{module}.indices, as `moa-export run` writes them for a model exported with --router-outputs.

Parity: before anything is timed, all backends of a model that carries bodies must agree on the timed inputs with ONNX \
Runtime computing these, within what moving its f32 and f16 weights, up to 512 MiB of them, by one unit in the last \
place explains; with --checkpoint, `verify` runs before that, and both must pass.

Examples:
  moa-export bench OUT --seq 10,128                           with our library and without it
  moa-export bench a.onnx b.onnx --backends ort               two models
  moa-export bench OUT --batch 1,8 --seq 1 --past 0,128       decoding
  moa-export bench OUT --seq 1 --past 1000 --in-place         a step as `generate` does it
  moa-export bench OUT --routing zipf:1 --json - > zipf.json  a skewed router, by operator
  moa-export bench OUT --compare before.json                  exit code 1 where a row became slower";

#[derive(Debug, Args)]
#[command(after_long_help = NOTES, after_help = "`--help` says what is timed and how.")]
pub(in crate::cli) struct BenchArguments {
    /// Exported model files or folders; all of them are timed beside the first
    #[arg(required = true, value_name = "MODEL")]
    pub(super) models: Vec<PathBuf>,
    /// Backends; one that is named and missing is an error [default: ort,ort-function where present]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(super) backends: Vec<BackendKind>,
    /// Rows of a call [default: 1]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = positive)]
    batch: Vec<usize>,
    /// New tokens of a row [default: 32]
    #[arg(long, value_name = "T,…", value_delimiter = ',', value_parser = positive)]
    seq: Vec<usize>,
    /// Tokens of a row whose keys and values are cached [default: 0]
    #[arg(long, value_name = "P,…", value_delimiter = ',', value_parser = size)]
    past: Vec<usize>,
    /// Source tokens of a row, in graphs that read a source [default: cached and new tokens together; new ones where a
    /// graph has no others]
    #[arg(long, value_name = "S,…", value_delimiter = ',', value_parser = positive)]
    source: Vec<usize>,
    /// Size of another axis of the graph
    #[arg(long, value_name = "AXIS=N", value_parser = axis)]
    dim: Vec<(String, usize)>,
    /// Update caches in place, as `generate` does, where graph and backend can: past and present are one buffer
    #[arg(long)]
    pub(super) in_place: bool,
    /// Inputs by name, a `.safetensors` file, in place of random ones; empty caches and the positions of a mask may be
    /// left out
    #[arg(long, value_name = "FILE", conflicts_with_all = ["batch", "seq", "past", "source", "dim", "routing"])]
    pub(super) inputs: Option<PathBuf>,
    /// How experts are chosen: data, uniform, zipf:S, single or trace:FILE
    #[arg(long, value_name = "WHO", default_value = "data", value_parser = routing)]
    pub(super) routing: RoutingArgument,
    /// Stop a point after N samples [default: 1000, or 10 seconds]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) samples: Option<usize>,
    /// Stop a point after T seconds of timed calls; with --samples, at the first of both
    #[arg(long, value_name = "T", value_parser = seconds)]
    pub(super) seconds: Option<f64>,
    /// Most seconds of a warm-up
    #[arg(long, value_name = "T", default_value = "5", value_parser = seconds)]
    pub(super) warm_up: f64,
    /// Threads of ONNX Runtime, at most 4 for each processor [default: the processors that this process may use]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(super) threads: Option<usize>,
    /// Seed of random inputs, those of --checkpoint too [default: 0]
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<u64>,
    /// First verify every model against this checkpoint
    #[arg(long, value_name = "CHECKPOINT")]
    pub(super) checkpoint: Option<PathBuf>,
    /// Configuration of the checkpoint, where it is not config.json beside it
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    pub(super) config: Option<PathBuf>,
    /// Time a backend that computes something else; every output says so
    #[arg(long)]
    pub(super) allow_failed_parity: bool,
    /// Leave out the pass that says where the time goes
    #[arg(long)]
    pub(super) no_operators: bool,
    /// Write the result as JSON to FILE, with the median of every turn (`-` for stdout, in place of the table)
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Write the times as CSV to FILE (`-` for stdout, in place of the table)
    #[arg(long, value_name = "FILE")]
    pub(super) csv: Option<PathBuf>,
    /// Write the result as one HTML file with pictures
    #[arg(long, value_name = "FILE.html", value_parser = written())]
    pub(super) report: Option<PathBuf>,
    /// Compare with an older result of --json; exit code 1 where a row became slower
    #[arg(long, value_name = "OLD.json")]
    pub(super) compare: Option<PathBuf>,
    /// How much slower a row may become, beyond both intervals
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = percent)]
    #[arg(requires = "compare")]
    pub(super) threshold: f64,
    /// Operator library, where it is not beside this program
    #[arg(long, value_name = "FILE")]
    pub(super) library: Option<PathBuf>,
    /// Replace existing files
    #[arg(long)]
    pub(super) force: bool,
    #[command(flatten)]
    pub(super) tensorrt: TensorRtArguments,
}

impl BenchArguments {
    /// Seed of random inputs.
    pub(super) fn seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }

    /// Shapes of random inputs.
    pub(super) fn grid(&self) -> Result<Grid, Failure> {
        let Self { batch, seq, past, source, dim, .. } = self;
        grid([batch, seq, past, source].map(Clone::clone), dim)
    }

    /// What no output may replace.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &Path> {
        let Self { models, inputs, checkpoint, config, compare, library, tensorrt, routing, .. } = self;
        let trace = match routing {
            RoutingArgument::Trace(file) => Some(file),
            _ => None,
        };
        let named = [inputs, checkpoint, config, compare, library, &tensorrt.plan].into_iter().flatten();
        models.iter().chain(named).chain(trace).map(PathBuf::as_path)
    }
}

/// What `--routing` means, before a trace is read.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum RoutingArgument {
    Data,
    Uniform,
    Zipf(f64),
    Single,
    Trace(PathBuf),
}

fn number(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|number| number.is_finite()).ok_or_else(|| format!("{text:?} is no number"))
}

fn seconds(text: &str) -> Result<f64, String> {
    match number(text)? {
        seconds if seconds > 0.0 && seconds <= 86_400.0 => Ok(seconds),
        _ => Err("it must be more than 0 and at most a day".into()),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match number(text)? {
        percent if percent >= 0.0 => Ok(percent),
        _ => Err("it must be a number from 0".into()),
    }
}

fn routing(text: &str) -> Result<RoutingArgument, String> {
    match text.split_once(':') {
        None if text == "data" => Ok(RoutingArgument::Data),
        None if text == "uniform" => Ok(RoutingArgument::Uniform),
        None if text == "single" => Ok(RoutingArgument::Single),
        Some(("zipf", exponent)) => match number(exponent)? {
            exponent if (0.0..=20.0).contains(&exponent) => Ok(RoutingArgument::Zipf(exponent)),
            _ => Err("the exponent must be a number from 0 to 20".into()),
        },
        Some(("trace", file)) if !file.is_empty() => Ok(RoutingArgument::Trace(file.into())),
        _ => Err("give data, uniform, zipf:S, single or trace:FILE".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routings_are_understood() {
        assert_eq!(routing("zipf:1.5"), Ok(RoutingArgument::Zipf(1.5)));
        assert_eq!(routing("trace:a:b"), Ok(RoutingArgument::Trace("a:b".into())));
        for wrong in ["", "zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:NaN", "trace:", "trace", "Single", "uniform:2"] {
            assert!(routing(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_have_ranges() {
        for wrong in ["0", "-1", "NaN", "inf", "1e9", "x"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
