//! `moa-export inspect`.

mod graph;
mod paper;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use moa_graphs::{
    SyntheticTensors,
    families::{self, Config, ImportOptions},
};
use serde_json::json;

use super::{
    Failure,
    args::within,
    document::{Kind, document},
    interrupt::Ending,
    notes::note_of_keys,
    open_checkpoint,
    output_file::JSON,
    presets::{FEWEST_SYMBOLS, preset, with_vocabulary},
    print_result,
    table::{counted, noun, table},
};
use crate::{
    checkpoint::{self, read_config},
    file_names::CONFIG,
    files::{folder_of, has_ending},
    inspect::{Cost, Inspection, Lengths, inspect, preset::PRESETS},
    source::import,
};

const DETAILS: &str = "\
Units: parameters are values; MACs are multiply-accumulates, one product and one sum each, of one row of tokens; \
cache and weights are bytes.

MACs, paper: products with weights, router and output layer included, experts that are not chosen left out; a bias of a dense \
layer once per call.
MACs, full: the same without biases, and both attention products.

Examples:
  moa-export inspect model.safetensors                a checkpoint
  moa-export inspect model.onnx                       any ONNX file, or a folder of exports
  moa-export inspect OUT --seq 20 --target-seq 30     a translation export, other lengths
  moa-export inspect --config config.json             a configuration without weights
  moa-export inspect --preset list                    names of known configurations
  moa-export inspect --table 3                        the paper's Table 3 compared with ours
";

/// Longest sequence for which multiply-accumulates are counted.
const MAX_LENGTH: u64 = 1 << 20;

/// The length where none is given.
const DEFAULT_LENGTH: u64 = 10;

#[derive(Debug, Args)]
#[command(after_help = DETAILS)]
pub(super) struct InspectArguments {
    /// Checkpoint (`.safetensors` file, `.pt` or `.bin` file, or folder), ONNX file, or exported folder
    #[arg(required_unless_present_any = ["config", "preset", "table"])]
    path: Option<PathBuf>,
    /// Configuration, where it is not config.json beside the checkpoint; alone, it is counted without weights
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A known configuration, without weights; `list` names all
    #[arg(long, value_name = "NAME", conflicts_with_all = ["path", "config"])]
    preset: Option<String>,
    /// Print the parameters and MACs of the MoA paper's Table 1, 2 or 3 (all, if none is named) beside ours
    #[arg(long, value_name = "N", num_args = 0..=1, value_parser = within::<u8>(1..=3),
        conflicts_with_all = ["path", "config", "preset", "seq", "target_seq"])]
    table: Option<Option<u8>>,
    /// Rows of the embeddings, in place of what --config or --preset says
    #[arg(long, value_name = "N", conflicts_with_all = ["path", "table"],
        value_parser = within::<u64>(FEWEST_SYMBOLS..=MAX_LENGTH))]
    vocab: Option<u64>,
    /// Tokens of the source, or of the only side, for which MACs are counted [default: 10]
    #[arg(long, value_name = "T", visible_alias = "source",
        value_parser = within::<u64>(1..=MAX_LENGTH))]
    seq: Option<u64>,
    /// Tokens of the target [default: as many as of the source]
    #[arg(long, value_name = "T", visible_alias = "target",
        value_parser = within::<u64>(1..=MAX_LENGTH))]
    target_seq: Option<u64>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &InspectArguments) -> Result<ExitCode, Failure> {
    Ending::at_once([])?;
    let source = arguments.seq.unwrap_or(DEFAULT_LENGTH);
    let lengths = Lengths { source, target: arguments.target_seq.unwrap_or(source) };
    let printed = match (&arguments.path, &arguments.preset, arguments.table) {
        (Some(path), ..) if graph::is_exported(path) => {
            if arguments.config.is_some() {
                return Err(Failure::usage("--config belongs to a checkpoint", "leave out --config"));
            }
            graph::print(path, lengths, arguments)?
        }
        (Some(path), ..) => shown(arguments, &of_checkpoint(path, lengths, arguments)?),
        (None, Some(name), _) if name == "list" => list(arguments)?,
        (None, Some(name), _) => shown(arguments, &without_weights(preset(name)?.config(), lengths, arguments)?),
        (None, None, Some(table)) => paper::print(table, arguments.json)?,
        (None, None, None) => {
            let config = read_config(arguments.config.as_deref().unwrap_or(Path::new(CONFIG)))?;
            shown(arguments, &without_weights(config, lengths, arguments)?)
        }
    };
    print_result(&printed)?;
    Ok(ExitCode::SUCCESS)
}

fn of_checkpoint(path: &Path, lengths: Lengths, arguments: &InspectArguments) -> Result<Inspection, Failure> {
    if has_ending(path, JSON) {
        let help = match checkpoint::models().any(|name| path.ends_with(name)) {
            true => format!("give the folder that holds it: {}", folder_of(path).display()),
            false => format!("give it as `moa-export inspect --config {}`", path.display()),
        };
        return Err(Failure::usage(format!("{} is no checkpoint", path.display()), &help));
    }
    let checkpoint = open_checkpoint(path, arguments.config.as_deref())?;
    let model = import(&checkpoint, None)?;
    note_of_keys(checkpoint.config());
    let count = |lengths| inspect(checkpoint.config().model_type(), &model, lengths);
    lengths_count(arguments, |lengths| count(lengths).total)?;
    Ok(count(lengths))
}

/// Refuses a length where nothing that is counted depends on it.
fn lengths_count<T: PartialEq>(arguments: &InspectArguments, total: impl Fn(Lengths) -> T) -> Result<(), Failure> {
    let [one, source, target] = [(1, 1), (2, 1), (1, 2)].map(|(source, target)| Lengths { source, target });
    if arguments.seq.is_some() && total(one) == total(source) {
        let message = "--seq counts nothing here: no multiply-accumulates are told, or none of the source";
        return Err(Failure::usage(message, "leave out --seq, and --target-seq unless there is a target"));
    }
    if arguments.target_seq.is_some() && total(one) == total(target) {
        let message = "--target-seq counts nothing here: there is no target, or no multiply-accumulates are told";
        return Err(Failure::usage(message, "give --seq alone, which is the length of the only side"));
    }
    Ok(())
}

fn without_weights(config: Config, lengths: Lengths, arguments: &InspectArguments) -> Result<Inspection, Failure> {
    let config = with_vocabulary(config, arguments.vocab)?;
    let tensors = SyntheticTensors::shapes(config.origin());
    let model = families::import(&config, &tensors, ImportOptions::default())?;
    note_of_keys(&config);
    let count = |lengths| inspect(config.model_type(), &model, lengths);
    lengths_count(arguments, |lengths| count(lengths).total)?;
    Ok(Inspection { weights: Vec::new(), ..count(lengths) })
}

fn list(arguments: &InspectArguments) -> Result<String, Failure> {
    let InspectArguments { seq, target_seq, vocab, .. } = arguments;
    let ignored = [("--seq", seq.is_some()), ("--target-seq", target_seq.is_some()), ("--vocab", vocab.is_some())];
    if let Some((flag, _)) = ignored.into_iter().find(|(_, given)| *given) {
        let message = format!("{flag} counts nothing here: --preset list names configurations");
        return Err(Failure::usage(message, "give --preset NAME, such as moa-base"));
    }
    if arguments.json {
        let presets: Vec<_> =
            PRESETS.iter().map(|preset| json!({ "name": preset.name, "title": preset.title })).collect();
        return Ok(document(Kind::InspectPresets, json!({ "presets": presets })));
    }
    let rows: Vec<_> = PRESETS.iter().map(|preset| vec![preset.name.to_owned(), preset.title.to_owned()]).collect();
    Ok(table(&["preset", "model"], &rows))
}

fn shown(arguments: &InspectArguments, inspection: &Inspection) -> String {
    match arguments.json {
        true => document(Kind::InspectCheckpoint, inspection),
        false => text(inspection),
    }
}

fn text(inspection: &Inspection) -> String {
    let mut text = line("family", &inspection.family);
    for (name, value) in inspection.sizes.lines() {
        text.push_str(&line(name, &value));
    }
    for weights in &inspection.weights {
        let (values, tensors) = stored(weights.values, weights.tensors as u64);
        let bytes = grouped(weights.bytes);
        text.push_str(&line("stored", &format!("{values} in {tensors} of {}, {bytes} bytes", weights.dtype)));
    }
    if inspection.cache_bytes_per_token > 0 {
        let bytes = grouped(inspection.cache_bytes_per_token);
        text.push_str(&line("cache", &format!("{bytes} bytes per token (fp32)")));
    }
    let row = |name: &str, cost: &Cost| {
        let numbers = [cost.parameters, cost.active_parameters, cost.paper_macs, cost.full_macs];
        std::iter::once(name.to_owned()).chain(numbers.map(|number| right(&grouped(number)))).collect()
    };
    let mut rows: Vec<Vec<String>> = inspection.parts.iter().map(|part| row(part.name, &part.cost)).collect();
    rows.push(row("total", &inspection.total));
    text.push_str(&format!("\n{}\n{}", table(&PART_HEADER, &rows), conventions(inspection.lengths)));
    text
}

const PART_HEADER: [&str; 5] = ["part", "    parameters", "active / token", "   MACs, paper", "    MACs, full"];

/// A number as a column of [`PART_HEADER`] shows it.
fn right(number: &str) -> String {
    format!("{number:>14}")
}

fn line(name: &str, value: &str) -> String {
    format!("{name:18} {value}\n")
}

fn conventions(lengths: Lengths) -> String {
    let sides = if lengths.source == lengths.target {
        format!("{} tokens", lengths.source)
    } else {
        format!("{} source and {} target tokens", lengths.source, lengths.target)
    };
    format!(
        "multiply-accumulates for {sides}; paper: products with weights, biases of dense layers once; full: attention products too, no biases\n"
    )
}

/// Values and tensors, with what they are called.
fn stored(values: u64, tensors: u64) -> (String, String) {
    (format!("{} {}", grouped(values), noun(values, "value")), counted(tensors, "tensor"))
}

/// Digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
