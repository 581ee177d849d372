//! What may be typed.

use std::{error::Error, fmt::Display, num::IntErrorKind, ops::RangeInclusive, path::PathBuf};

use clap::{
    Args, Parser, Subcommand, ValueEnum,
    builder::{PathBufValueParser, TypedValueParser},
};
use moa_graphs::{Form, Precision};
use moa_schema::GateMode;

use super::{
    baseline::BaselineArguments, generate::GenerateArguments, inspect::InspectArguments, output_file::is_stdout,
    run::RunArguments,
};
use crate::{engine::Dtype, export::ExternalData};

const EXAMPLES: &str = "\
Examples:
  moa-export model.safetensors -o model.onnx      export (config.json beside the checkpoint)
  moa-export CHECKPOINT -o OUT --form standard    standard operators only
  moa-export verify OUT --checkpoint CHECKPOINT   prove it on every backend
  moa-export generate OUT --input 'nine hundred'  translate, or continue a prompt
  moa-export ops                                  where the operator library is

Exit codes: 0 ok, 1 a check failed, 2 usage, 3 malformed input, 4 unsupported, 5 I/O,
6 runtime missing or too old, 7 limit exceeded, 70 a bug of ours, 130 interrupted.";

/// Compile trained Mixture-of-Attention-heads (MoA) weights to verified ONNX.
#[derive(Debug, Parser)]
#[command(name = "moa-export", version, arg_required_else_help = true, args_conflicts_with_subcommands = true)]
#[command(after_help = EXAMPLES, override_usage = "moa-export CHECKPOINT -o OUT [OPTIONS]\n       moa-export COMMAND …")]
pub(super) struct Arguments {
    #[command(subcommand)]
    pub(super) command: Option<Command>,
    #[command(flatten)]
    pub(super) export: Option<ExportArguments>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Export a checkpoint (the default: `moa-export CHECKPOINT -o OUT`)
    Export(ExportArguments),
    /// Compare an export with its checkpoint, on every backend that is present
    Verify(super::verify::VerifyArguments),
    /// Run one graph on named tensors
    Run(RunArguments),
    /// Time models on backends, side by side
    Bench(Box<super::bench::BenchArguments>),
    /// Translate or continue text with an exported folder
    Generate(GenerateArguments),
    /// Count parameters, multiply-accumulates and bytes of a checkpoint, a configuration or ONNX files
    Inspect(InspectArguments),
    /// Build a model of a known configuration with random weights, to measure others against
    Baseline(BaselineArguments),
    /// Show which TensorRT, CUDA and dtypes fit which GPU, and why not
    Plan(super::plan::PlanArguments),
    /// Write an export for TensorRT's parser, with our operators as plugins
    Prepare(super::prepare::PrepareArguments),
    /// Build a TensorRT engine on this machine's GPU: a plan, and a lock that says what it fits
    Build(Box<super::build::BuildArguments>),
    /// Count which experts real inputs go to, and which tokens an expert prefers
    Profile(super::profile::ProfileArguments),
    /// Show the libraries that are found, and how to register ours
    Ops(OpsArguments),
}

#[derive(Debug, Args)]
pub(super) struct ExportArguments {
    /// A Hugging Face folder, or a `.safetensors`, `.pt` or `.bin` file
    pub(super) checkpoint: PathBuf,
    /// Model file (`model.onnx`) or folder to write; an encoder-decoder needs a folder
    #[arg(short, long, value_name = "OUT", value_parser = written())]
    pub(super) output: PathBuf,
    /// Configuration, where it is not config.json beside the checkpoint
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// How the MoA operators are written
    #[arg(long, value_enum, default_value_t = FormArgument::Function)]
    pub(super) form: FormArgument,
    /// Type of weights and activations
    #[arg(long, value_enum, default_value_t = DtypeArgument::Fp32)]
    pub(super) dtype: DtypeArgument,
    /// Gates to use instead of the family's, if the model was trained with others
    #[arg(long, value_enum)]
    pub(super) gate_mode: Option<GateModeArgument>,
    /// Version of the ONNX operator set, 18 to 21 [default: 18, or 21 with --dtype int4 or int4-products]
    #[arg(long, value_name = "N")]
    pub(super) opset: Option<i64>,
    /// Keep weights in NAME.onnx.data beside the model
    #[arg(long, value_enum, default_value_t = ExternalDataArgument::Auto)]
    pub(super) external_data: ExternalDataArgument,
    /// Add `router.{module}.indices` and `router.{module}.weights` as outputs
    #[arg(long)]
    pub(super) router_outputs: bool,
    /// Compute `logits` of the last position only, [batch, 1, vocabulary] (causal language models)
    #[arg(long)]
    pub(super) last_logits: bool,
    /// Copy the operator library beside the graphs, where onnxruntime-genai looks for it
    #[arg(long)]
    pub(super) with_library: bool,
    /// fairseq dictionary of both languages, for `generate` [default: beside the
    /// checkpoint, dict.SOURCE.txt and dict.TARGET.txt of its two languages, or dict.txt]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["source_dict", "target_dict"])]
    pub(super) dict: Option<PathBuf>,
    /// fairseq dictionary of the source language, with --target-dict
    #[arg(long, value_name = "FILE", requires = "target_dict")]
    pub(super) source_dict: Option<PathBuf>,
    /// fairseq dictionary of the target language, with --source-dict
    #[arg(long, value_name = "FILE", requires = "source_dict")]
    pub(super) target_dict: Option<PathBuf>,
    /// subword-nmt codes [default: bpe.codes or bpecodes beside the dictionary]
    #[arg(long, value_name = "FILE")]
    pub(super) bpe_codes: Option<PathBuf>,
    /// Replace existing files
    #[arg(long)]
    pub(super) force: bool,
    /// Verify the export on every backend that is present
    #[arg(long)]
    pub(super) verify: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum FormArgument {
    /// Our operators, each with a body of standard operators: runs everywhere, fast with the library
    Function,
    /// Our operators only: needs the library or the TensorRT plugin
    Fused,
    /// Standard operators only
    Standard,
}

impl From<FormArgument> for Form {
    fn from(argument: FormArgument) -> Self {
        match argument {
            FormArgument::Function => Self::Function,
            FormArgument::Fused => Self::Fused,
            FormArgument::Standard => Self::Standard,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DtypeArgument {
    /// 32-bit floats
    #[value(aliases = ["f32", "float32"])]
    Fp32,
    /// 16-bit floats: weights, activations, key/value caches; routers, norms and logits stay 32-bit
    #[value(aliases = ["f16", "float16"])]
    Fp16,
    /// Matrices stored as bfloat16; activations and caches stay 32-bit
    #[value(alias = "bfloat16")]
    Bf16,
    /// As bf16, and the library may round what our operators multiply to bfloat16 too, where that is faster
    Bf16Products,
    /// Matrices of experts, of the keys and values that they share, and of the head stored as 8-bit integers with a
    /// scale for each column; everything else stays 32-bit
    Int8,
    /// As int8, and the library may round what our operators multiply with these matrices to 8-bit integers with a
    /// scale for each 32 values, and what attention multiplies to bfloat16, where that is faster
    Int8Products,
    /// As int8, with 4-bit integers and a scale for each 32 rows of a column; the head keeps 8 bits
    Int4,
    /// As int4, and the library may round as for int8-products
    Int4Products,
}

impl From<DtypeArgument> for Precision {
    fn from(argument: DtypeArgument) -> Self {
        match argument {
            DtypeArgument::Fp32 => Self::Fp32,
            DtypeArgument::Fp16 => Self::Fp16,
            DtypeArgument::Bf16 => Self::Bf16,
            DtypeArgument::Bf16Products => Self::Bf16Products,
            DtypeArgument::Int8 => Self::Int8,
            DtypeArgument::Int8Products => Self::Int8Products,
            DtypeArgument::Int4 => Self::Int4,
            DtypeArgument::Int4Products => Self::Int4Products,
        }
    }
}

/// Types of engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PlanDtype {
    #[value(aliases = ["f32", "float32"])]
    Fp32,
    #[value(aliases = ["f16", "float16"])]
    Fp16,
    #[value(alias = "bfloat16")]
    Bf16,
}

impl PlanDtype {
    pub(super) const fn dtype(self) -> Dtype {
        match self {
            Self::Fp32 => Dtype::Fp32,
            Self::Fp16 => Dtype::Fp16,
            Self::Bf16 => Dtype::Bf16,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum GateModeArgument {
    /// Softmax over all experts, top-k kept as they are (released MoA code)
    SoftmaxTopk,
    /// As softmax_topk, divided by their sum (MoA paper)
    SoftmaxTopkRenorm,
    /// Softmax over the top-k logits (JetMoE)
    TopkSoftmax,
}

impl From<GateModeArgument> for GateMode {
    fn from(argument: GateModeArgument) -> Self {
        match argument {
            GateModeArgument::SoftmaxTopk => Self::SoftmaxTopk,
            GateModeArgument::SoftmaxTopkRenorm => Self::SoftmaxTopkRenorm,
            GateModeArgument::TopkSoftmax => Self::TopkSoftmax,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ExternalDataArgument {
    /// From 1.5 GB of weights on
    Auto,
    /// In every case
    Always,
    /// Never
    Never,
}

impl From<ExternalDataArgument> for ExternalData {
    fn from(argument: ExternalDataArgument) -> Self {
        match argument {
            ExternalDataArgument::Auto => Self::Auto,
            ExternalDataArgument::Always => Self::Always,
            ExternalDataArgument::Never => Self::Never,
        }
    }
}

/// ONNX Runtime's threads spin while they wait, so that many more than there are processors stop a machine, and make
/// nothing faster. Some more than that are the caller's to choose, and what one machine takes another one should.
const MOST_THREADS_A_PROCESSOR: usize = 4;

/// A number of threads that the processors which this process may use can serve.
pub(super) fn threads(text: &str) -> Result<usize, String> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    threads_on(processors, text)
}

fn threads_on(processors: usize, text: &str) -> Result<usize, String> {
    let most = processors.saturating_mul(MOST_THREADS_A_PROCESSOR);
    let own = if processors == 1 { "the processor".to_owned() } else { format!("each of the {processors} processors") };
    match text.trim().parse() {
        Ok(0) => Err("it must be at least 1".into()),
        Ok(threads) if threads <= most => Ok(threads),
        Err(error) if !matches!(error.kind(), IntErrorKind::PosOverflow) => {
            Err("it must be a whole number from 1".into())
        }
        _ => Err(format!("it may be at most {most}, {MOST_THREADS_A_PROCESSOR} for {own} that this process may use")),
    }
}

#[derive(Debug, Args)]
pub(super) struct OpsArguments {
    /// Print the result as JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// A whole number in `range`.
pub(super) fn within<T>(range: RangeInclusive<T>) -> impl TypedValueParser<Value = T>
where
    T: TryFrom<i128> + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text: &str| -> Result<T, Box<dyn Error + Send + Sync>> {
        let number: i128 = text.parse()?;
        let found = T::try_from(number).ok().filter(|found| range.contains(found));
        found.ok_or_else(|| format!("{number} is not in {} to {}", range.start(), range.end()).into())
    }
}

/// Takes the path of what is written to files alone.
pub(super) fn written() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match is_stdout(&path) {
        true => Err("it cannot go to the standard output; name a file or folder (`./-` is one of that name)"),
        false => Ok(path),
    })
}

#[cfg(test)]
mod tests {
    use super::threads_on;

    #[test]
    fn threads_are_limited_by_the_processors() {
        for (processors, text, expected) in [
            (1, "1", Ok(1)),
            (1, "4", Ok(4)),
            (1, "5", Err("it may be at most 4, 4 for the processor that this process may use")),
            (2, " 8 ", Ok(8)),
            (2, "9", Err("it may be at most 8, 4 for each of the 2 processors that this process may use")),
            (2, "99999999999999999999", Err("it may be at most 8, 4 for each of the 2 processors")),
            (64, "256", Ok(256)),
            (usize::MAX, "1000", Ok(1000)),
            (2, "0", Err("it must be at least 1")),
            (2, "-1", Err("it must be a whole number from 1")),
            (2, "two", Err("it must be a whole number from 1")),
            (2, "", Err("it must be a whole number from 1")),
        ] {
            match (threads_on(processors, text), expected) {
                (Err(found), Err(expected)) => assert!(found.starts_with(expected), "{text}: {found}"),
                (found, expected) => assert_eq!(found.ok(), expected.ok(), "{text} on {processors}"),
            }
        }
    }
}
