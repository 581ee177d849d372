//! What `moa-export generate` takes.

use std::{num::IntErrorKind, path::PathBuf};

use clap::{Args, ValueEnum};

use crate::{backend::OrtOperators, cli::args::threads};

const EXAMPLES: &str = "\
Examples:
  moa-export generate OUT --input 'nine hundred'                  a text, or a prompt
  moa-export generate OUT --input lines.txt --beam 4 --nbest 2    the lines of a file
  moa-export generate OUT --input -                               lines of a pipe as they come
  moa-export generate OUT --input 'Once upon a time' --top-p 0.9 --seed 1";

/// Most lines that are decoded together, where nothing is said.
const BATCH: usize = 32;

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct GenerateArguments {
    /// Folder that `moa-export CHECKPOINT -o OUT` wrote, with the vocabulary or tokenizer beside the graphs
    pub(super) folder: PathBuf,
    /// What to translate or continue: the lines of a file, of stdin (`-`), or else the text itself; a blank line gives
    /// an empty one
    #[arg(long, value_name = "TEXT|FILE|-", allow_hyphen_values = true)]
    pub(super) input: String,
    /// Lines of stdin to read before they are answered; more is faster [default: 1 from a pipe or a terminal, or what
    /// --batch says; a file is read whole]
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "whole_input")]
    pub(super) buffer: Option<usize>,
    #[arg(long, value_name = "N", help = format!("Lines to decode together, at most [default: {BATCH}]"))]
    pub(super) batch: Option<usize>,
    /// What runs the graphs
    #[arg(long, value_enum, default_value_t = OrtOperators::Library)]
    pub(super) backend: OrtOperators,
    /// Threads of the runtime, at most 4 for each processor [default: the runtime's choice]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(super) threads: Option<usize>,
    /// Operator library, where it is not beside this program
    #[arg(long, value_name = "FILE")]
    pub(super) library: Option<PathBuf>,
    /// Print one JSON object a line
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) translation: TranslationArguments,
    #[command(flatten)]
    pub(super) text: TextArguments,
}

#[cfg(feature = "ort")]
impl GenerateArguments {
    /// Most lines that are decoded together.
    pub(super) fn batch(&self) -> usize {
        self.batch.unwrap_or(BATCH)
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(number) if number > 0 => Ok(number),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err("it is too large".into()),
        _ => Err("it must be a whole number from 1".into()),
    }
}

/// Flags for translation models alone.
#[derive(Debug, Args)]
#[command(next_help_heading = "Translation models")]
pub(super) struct TranslationArguments {
    /// Hypotheses that are followed side by side; 1 is greedy [default: 4]
    #[arg(long, value_name = "N")]
    pub(super) beam: Option<usize>,
    /// Length penalty, -10 to 10: a score is the sum of log-probabilities over length^X [default: 1]
    #[arg(long, value_name = "X")]
    pub(super) lenpen: Option<f64>,
    /// Translations of each line, best first; with more than 1, score and tab before each, and a blank line gives one
    /// empty line all the same; --json has the numbers of the lines [default: 1]
    #[arg(long, value_name = "N")]
    pub(super) nbest: Option<usize>,
    /// When a sentence is done [default: best]
    #[arg(long, value_enum)]
    pub(super) stop: Option<StopArgument>,
    /// Fewest tokens of a translation, without the end [default: 1]
    #[arg(long, value_name = "N")]
    pub(super) min_len: Option<usize>,
    /// Most tokens of a translation are A * source + B, without the end [default: 0]
    #[arg(long, value_name = "A")]
    pub(super) max_len_a: Option<f64>,
    /// See --max-len-a [default: 200]
    #[arg(long, value_name = "B")]
    pub(super) max_len_b: Option<usize>,
    /// Leave out a line that is longer than the model's positions, with a note and an empty line in its place; else it
    /// is an error, before anything read with it is translated
    #[arg(long)]
    pub(super) skip_long: bool,
    /// Say on stderr where the time goes; translates everything twice
    #[arg(long)]
    pub(super) profile: bool,
}

#[cfg(feature = "ort")]
impl TranslationArguments {
    /// The first flag that was given, if one was.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            ("--beam", self.beam.is_some()),
            ("--lenpen", self.lenpen.is_some()),
            ("--nbest", self.nbest.is_some()),
            ("--stop", self.stop.is_some()),
            ("--min-len", self.min_len.is_some()),
            ("--max-len-a", self.max_len_a.is_some()),
            ("--max-len-b", self.max_len_b.is_some()),
            ("--skip-long", self.skip_long),
            ("--profile", self.profile),
        ];
        given.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }
}

/// Flags for causal language models alone.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Causal language models (the input is continued as it is; chat templates are not applied)"
)]
pub(super) struct TextArguments {
    /// Most new tokens for a prompt [default: 128]
    #[arg(long, value_name = "N")]
    pub(super) max_new: Option<usize>,
    /// Draw tokens, logits divided by X; 0 takes the most probable one [default: 0, or 1 with --top-k or --top-p]
    #[arg(long, value_name = "X")]
    pub(super) temperature: Option<f64>,
    /// Draw from the K most probable tokens; 0 is all of them
    #[arg(long, value_name = "K")]
    pub(super) top_k: Option<usize>,
    /// Draw from as few of the most probable tokens as reach the probability P together
    #[arg(long, value_name = "P")]
    pub(super) top_p: Option<f64>,
    /// Seed of the random numbers (SplitMix64); the same seed gives the same text [default: 0]
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<u64>,
    /// Go on after an end token
    #[arg(long)]
    pub(super) ignore_eos: bool,
    /// Prompts and results are token ids, with spaces between
    #[arg(long)]
    pub(super) token_ids: bool,
    /// The whole input is one prompt, line ends included, and not one prompt a line
    #[arg(long, conflicts_with = "token_ids")]
    pub(super) whole_input: bool,
}

#[cfg(feature = "ort")]
impl TextArguments {
    /// The first flag that was given, if one was.
    pub(super) fn given(&self) -> Option<&'static str> {
        let given = [
            ("--max-new", self.max_new.is_some()),
            ("--temperature", self.temperature.is_some()),
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--seed", self.seed.is_some()),
            ("--ignore-eos", self.ignore_eos),
            ("--token-ids", self.token_ids),
            ("--whole-input", self.whole_input),
        ];
        given.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum StopArgument {
    /// When `beam` hypotheses have ended, as fairseq does
    Fairseq,
    /// When no live hypothesis can still win
    Best,
}

#[cfg(all(test, feature = "ort"))]
mod tests {
    use super::*;
    use crate::generate::{SamplingOptions, SearchOptions, TextGeneratorOptions, TranslatorOptions};

    /// Whether such an option was given matters, so that none has a default of the parser's.
    #[test]
    fn help_tells_the_defaults() {
        let command = GenerateArguments::augment_args(clap::Command::new("generate"));
        let (search, sampling) = (SearchOptions::default(), SamplingOptions::default());
        let batch = TranslatorOptions::default().batch;
        assert_eq!(TextGeneratorOptions::default().batch, batch);
        for (name, default) in [
            ("batch", batch.to_string()),
            ("beam", search.beam.to_string()),
            ("lenpen", search.length_penalty.to_string()),
            ("nbest", search.nbest.to_string()),
            ("stop", format!("{:?}", search.stop).to_lowercase()),
            ("min_len", search.min_len.to_string()),
            ("max_len_a", search.max_len_a.to_string()),
            ("max_len_b", search.max_len_b.to_string()),
            ("max_new", sampling.max_new.to_string()),
            ("seed", sampling.seed.to_string()),
        ] {
            let argument = command.get_arguments().find(|argument| argument.get_id() == name).unwrap();
            let help = argument.get_help().unwrap().to_string();
            assert!(help.contains(&format!("[default: {default}]")), "{name}: {help}");
        }
    }
}
