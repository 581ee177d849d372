//! `moa-export baseline NAME -o OUT`.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use moa_graphs::{
    Form, Options, Precision, SyntheticTensors,
    families::{self, Config, ImportOptions, model_types},
    model::Model,
};
use serde_json::json;

use super::{
    Failure,
    apart::keep_apart,
    args::{DtypeArgument, ExternalDataArgument, FormArgument, within, written},
    document::{Kind, document},
    exported::{report_json, wrote},
    neighbours::Neighbours,
    notes::note_of_keys,
    presets::{FEWEST_SYMBOLS, preset, with_vocabulary},
    print_result,
    progress::Progress,
};
use crate::{
    checkpoint::read_config,
    export::{ExportOptions, export_model},
    file_names::{Part, data_file, graph_file},
    shell::path_word,
};

const DETAILS: &str = "\
`moa-export inspect --preset list` names every configuration. A standard Transformer has the forms standard (standard \
operators, the default) and fused (ONNX Runtime's own com.microsoft.MultiHeadAttention, for ONNX Runtime only); the \
others have the forms of an export. Inputs and outputs carry the names that every export carries. Experts have no \
biases.

Examples:
  moa-export baseline transformer-base -o base               the block that MoA replaces
  moa-export baseline transformer-base -o base --form fused  the same with ONNX Runtime's operator
  moa-export baseline moa-base -o moa                        MoA Base of the paper, random weights
  moa-export baseline transformer-big -o big --layers 2
";

#[derive(Debug, Args)]
#[command(after_help = DETAILS)]
pub(super) struct BaselineArguments {
    /// A known configuration, such as transformer-base or moa-base
    #[arg(required_unless_present = "config")]
    name: Option<String>,
    /// A configuration, in place of a known one
    #[arg(long, value_name = "FILE", conflicts_with = "name")]
    config: Option<PathBuf>,
    /// Model file (`model.onnx`) or folder to write; an encoder-decoder needs a folder
    #[arg(short, long, value_name = "OUT", value_parser = written())]
    output: PathBuf,
    /// How attention is written; see below [default: standard for a Transformer, else function]
    #[arg(long, value_enum, hide_possible_values = true, value_name = "function|fused|standard")]
    form: Option<FormArgument>,
    /// Type of weights and activations
    #[arg(long, value_enum, default_value_t = DtypeArgument::Fp32)]
    dtype: DtypeArgument,
    /// Layers, on each side of an encoder-decoder
    #[arg(long, value_name = "N", value_parser = within::<u64>(1..=1024))]
    layers: Option<u64>,
    /// Rows of the embeddings
    #[arg(long, value_name = "N", value_parser = within::<u64>(FEWEST_SYMBOLS..=1 << 20))]
    vocab: Option<u64>,
    /// Seed of the weights; the same seed gives the same bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Version of the ONNX operator set, 18 to 21 [default: 18, or 21 with --dtype int4 or int4-products]
    #[arg(long, value_name = "N")]
    opset: Option<i64>,
    /// Keep weights in NAME.onnx.data beside the model; `auto` does from 1.5 GB on
    #[arg(long, value_enum, default_value_t = ExternalDataArgument::Auto)]
    external_data: ExternalDataArgument,
    /// Add `router.{module}.indices` and `router.{module}.weights` as outputs
    #[arg(long)]
    router_outputs: bool,
    /// Replace existing files
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &BaselineArguments) -> Result<ExitCode, Failure> {
    let progress = Progress::of_export(&arguments.output)?;
    keep_configuration(arguments)?;
    let config = config(arguments)?;
    let tensors = SyntheticTensors::random(config.origin(), arguments.seed);
    let model = families::import(&config, &tensors, ImportOptions::default())?;
    note_of_keys(&config);
    let default = match model {
        Model::Transformer(_) | Model::TransformerMaskedLm(_) => Form::Standard,
        _ => Form::Function,
    };
    if arguments.router_outputs && default == Form::Standard {
        return Err(nothing("--router-outputs", "a standard Transformer routes nothing"));
    }
    let precision = Precision::from(arguments.dtype);
    if precision.integers().is_some() && default == Form::Standard {
        let dtype = precision.as_str();
        let message = format!("--dtype {dtype} is for matrices of experts, and a standard Transformer has none");
        return Err(Failure::dtype(message, "choose one of fp32, fp16, bf16".into()));
    }
    let options = ExportOptions {
        graph: Options {
            form: arguments.form.map_or(default, Form::from),
            precision,
            router_outputs: arguments.router_outputs,
            last_logits: false,
        },
        opset: arguments.opset,
        external_data: arguments.external_data.into(),
        force: arguments.force,
        ..ExportOptions::default()
    };
    let neighbours = Neighbours::before(&arguments.output, arguments.force);
    let exported = export_model(config.model_type(), &model, &arguments.output, &options, &progress);
    let ending = progress.finish();
    let report = exported?;
    ending.done();
    print_result(&match arguments.json {
        true => document(Kind::Baseline, report_json(&report, &options)),
        false => {
            let next = path_word(&arguments.output).map(|path| format!("next: moa-export inspect {path}\n"));
            wrote(&report) + &next.unwrap_or_default()
        }
    })?;
    neighbours.note_of(&report, &arguments.output, false);
    Ok(ExitCode::SUCCESS)
}

/// An option that changes nothing of this model.
fn nothing(option: &str, why: &str) -> Failure {
    Failure::usage(format!("{option} changes nothing here: {why}"), "leave it out")
}

/// Refuses to write over the configuration that is read.
fn keep_configuration(arguments: &BaselineArguments) -> Result<(), Failure> {
    let Some(config) = arguments.config.as_deref() else { return Ok(()) };
    let beside = Part::ALL.map(|part| arguments.output.join(graph_file(part)));
    for graph in beside.iter().chain([&arguments.output]) {
        keep_apart(&[Some(graph), Some(&data_file(graph))], [config].into_iter())?;
    }
    Ok(())
}

fn config(arguments: &BaselineArguments) -> Result<Config, Failure> {
    let config = match (&arguments.name, &arguments.config) {
        (_, Some(file)) => read_config(file)?,
        (name, None) => preset(name.as_deref().unwrap_or_default())?.config().with("expert_bias", json!(false)),
    };
    let config = with_vocabulary(config, arguments.vocab)?;
    let Some(layers) = arguments.layers else { return Ok(config) };
    let keys = match config.model_type() {
        model_types::MOA_LAYER => return Err(nothing("--layers", "a moa_layer is one layer without embeddings")),
        model_types::JETMOE => ["num_layers", "num_hidden_layers"],
        model_types::MOLM => ["n_layer", "num_hidden_layers"],
        _ => ["encoder_layers", "decoder_layers"],
    };
    Ok(keys.into_iter().fold(config, |config, key| config.with(key, json!(layers))))
}
