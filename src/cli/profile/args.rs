//! What may be typed after `moa-export profile`.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::{
    backend::BackendKind,
    cli::{
        args::{threads, written},
        output_file::TENSORS,
        size_args::positive,
    },
    files::has_ending,
    profile::PmiOptions,
};

/// Most lines that run together where the user does not say.
pub(super) const DEFAULT_BATCH: usize = 32;

const EXAMPLES: &str = "\
Examples:
  moa-export profile OUT --inputs pairs.tsv --report routing.html   SOURCE, or SOURCE tab TARGET
  moa-export profile OUT --inputs text.txt --pmi                    text for a language model
  moa-export profile model.onnx --inputs batch.safetensors --json   tensors by name
  moa-export profile model.onnx --inputs lines.ids --dict dict.txt  token ids, one sequence a line

Load is an expert's share of all choices. Balance: max/mean (1 is equal, E is one expert for everything), \
CV (standard deviation by mean), entropy (1 is equal, 0 is one expert). A margin is the score of the k-th \
expert less that of the next. PMI is log2 (p(token, expert) / (p(token) p(expert))); tokens with more than 0 are \
listed. Padding does not count.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, override_usage = "moa-export profile <MODEL> --inputs <FILE>... [OPTIONS]")]
pub(in crate::cli) struct ProfileArguments {
    /// Exported model file or folder, in any form
    pub(super) model: PathBuf,
    /// What to run: a `.safetensors` file, lines of text for a folder with a vocabulary, or an `.ids` file
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    pub(super) inputs: Vec<PathBuf>,
    /// What the files hold
    #[arg(long, value_enum, default_value_t = InputFormat::Auto)]
    pub(super) format: InputFormat,
    #[arg(long, value_name = "N", value_parser = positive)]
    #[arg(help = format!("Lines to run together, at most; all have one length [default: {DEFAULT_BATCH}]"))]
    pub(super) batch: Option<usize>,
    /// Leave out lines that are longer than the model's positions, with a note
    #[arg(long)]
    pub(super) skip_long: bool,
    #[arg(long, value_name = "N")]
    #[arg(help = of_pmi("Leave tokens that were seen less often out of the PMI", |pmi| pmi.min_count))]
    pub(super) min_count: Option<u64>,
    #[arg(long, value_name = "N")]
    #[arg(help = of_pmi("Tokens that are listed for each expert", |pmi| pmi.top))]
    pub(super) top: Option<usize>,
    /// List the tokens of every expert in the table too; --json and --report always do
    #[arg(long)]
    pub(super) pmi: bool,
    /// fairseq dictionary that names token ids in the result, in place of the vocabulary in the model's folder; text is
    /// split by that vocabulary alone
    #[arg(long, value_name = "FILE")]
    pub(super) dict: Option<PathBuf>,
    /// What runs the model
    #[arg(long, value_enum, default_value_t = BackendKind::Ort)]
    pub(super) backend: BackendKind,
    /// Threads of ONNX Runtime, at most 4 for each processor [default: ONNX Runtime's choice]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(super) threads: Option<usize>,
    /// Operator library, where it is not beside this program
    #[arg(long, value_name = "FILE")]
    pub(super) library: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Write a page with plots, readable without a network
    #[arg(long, value_name = "FILE.html", value_parser = written())]
    pub(super) report: Option<PathBuf>,
    /// Replace an existing FILE of --report
    #[arg(long)]
    pub(super) force: bool,
}

impl ProfileArguments {
    /// Most lines that run together.
    pub(super) fn batch(&self) -> usize {
        self.batch.unwrap_or(DEFAULT_BATCH)
    }

    /// What an input holds.
    pub(super) fn format_of(&self, input: &Path) -> InputFormat {
        match self.format {
            InputFormat::Auto if has_ending(input, TENSORS) => InputFormat::Tensors,
            InputFormat::Auto if has_ending(input, &["ids"]) => InputFormat::Ids,
            InputFormat::Auto => InputFormat::Text,
            format => format,
        }
    }

    /// Whether an input holds text.
    pub(super) fn reads_text(&self) -> bool {
        self.inputs.iter().any(|input| self.format_of(input) == InputFormat::Text)
    }

    /// Which tokens are listed.
    pub(super) fn pmi_options(&self) -> PmiOptions {
        let default = PmiOptions::default();
        PmiOptions { min_count: self.min_count.unwrap_or(default.min_count), top: self.top.unwrap_or(default.top) }
    }

    /// What no output may replace.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &Path> {
        let Self { model, inputs, dict, library, .. } = self;
        [model].into_iter().chain(inputs).chain(dict).chain(library).map(PathBuf::as_path)
    }
}

/// The help of an option with what holds without it.
fn of_pmi<N: std::fmt::Display>(text: &str, default: impl Fn(PmiOptions) -> N) -> String {
    format!("{text} [default: {}]", default(PmiOptions::default()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum InputFormat {
    /// By the name: `.safetensors`, `.ids`, else text
    Auto,
    /// Named tensors; for an encoder-decoder `input_ids`, `decoder_input_ids` and their masks
    Tensors,
    /// SOURCE, or SOURCE tab TARGET a line; a source without target is translated greedily first. For a language model
    /// each line is a text
    Text,
    /// Token ids with spaces between, one sequence a line; SOURCE tab TARGET for an encoder-decoder
    Ids,
}
