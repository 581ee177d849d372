//! The two graphs of an exported translation model, and what they must look like.

use std::path::{Path, PathBuf};

use super::GenerateError;
use crate::{
    file_names::{DECODER, ENCODER, graph_file},
    metadata,
    onnx::{
        OnnxFile,
        proto::tensor_proto::DataType,
        read::{Dim, ValueInfo},
        read_model,
    },
    text::CONFIG_FILE,
};

/// The graphs, checked against each other.
pub(super) struct Graphs {
    pub(super) encoder: OnnxFile,
    pub(super) decoder: OnnxFile,
    /// Decoder layers.
    pub(super) layers: usize,
    /// Key/value heads and their width, by layer.
    pub(super) caches: Vec<[usize; 2]>,
    /// Symbols that the decoder chooses from, where the graph fixes their number.
    pub(super) vocabulary: Option<usize>,
}

impl Graphs {
    pub(super) fn read(folder: &Path) -> Result<Self, GenerateError> {
        let paths = [ENCODER, DECODER].map(|stem| folder.join(graph_file(stem)));
        for path in paths.iter().chain([&folder.join(CONFIG_FILE)]) {
            if matches!(path.try_exists(), Ok(false)) {
                return Err(GenerateError::Missing { path: path.clone() });
            }
        }
        let [encoder, decoder] = paths;
        let (encoder, decoder) = (read_model(&encoder)?, read_model(&decoder)?);
        check_export(&encoder, &decoder)?;
        let graphs = Self::of(encoder, decoder);
        graphs.map_err(|(path, what)| GenerateError::Graph { path, what })
    }

    fn of(encoder: OnnxFile, decoder: OnnxFile) -> Result<Self, (PathBuf, String)> {
        let at_decoder = |what: String| (decoder.path().to_owned(), what);
        let mut caches = Vec::new();
        let inputs = decoder.inputs();
        let of_layer = |layer| inputs.iter().find(|input| input.name == format!("past_key_values.{layer}.decoder.key"));
        while let Some(input) = of_layer(caches.len()) {
            caches.push(cache_sizes(input).map_err(at_decoder)?);
        }
        if caches.is_empty() {
            return Err(at_decoder("there is no input `past_key_values.0.decoder.key`: no decoder with caches".into()));
        }
        let vocabulary = check_logits(&decoder, "logits").map_err(at_decoder)?;
        let layers = caches.len();
        check_names(&encoder, layers, &ENCODER_INPUTS, false).map_err(|what| (encoder.path().to_owned(), what))?;
        check_names(&decoder, layers, &DECODER_INPUTS, true).map_err(at_decoder)?;
        Ok(Self { encoder, decoder, layers, caches, vocabulary })
    }
}

/// Refuses two graphs that say that they compute with other numbers.
fn check_export(encoder: &OnnxFile, decoder: &OnnxFile) -> Result<(), GenerateError> {
    if [encoder, decoder].iter().any(|file| file.metadata(metadata::SOURCE).is_none()) {
        return Ok(());
    }
    match metadata::OF_NUMBERS.into_iter().find(|key| encoder.metadata(key) != decoder.metadata(key)) {
        Some(key) => {
            Err(GenerateError::TwoExports { first: encoder.path().into(), second: decoder.path().into(), key })
        }
        None => Ok(()),
    }
}

const ENCODER_INPUTS: [&str; 2] = ["input_ids", "attention_mask"];
const DECODER_INPUTS: [&str; 3] = ["input_ids", "attention_mask", "encoder_attention_mask"];

/// `{start}.{layer}.{side}.key` and `.value`, layer by layer.
pub(super) fn cache_names(start: &str, side: &str, layers: usize) -> Vec<String> {
    let names = |layer| ["key", "value"].map(|part| format!("{start}.{layer}.{side}.{part}"));
    (0..layers).flat_map(names).collect()
}

/// Heads and their width of an input that holds a cache.
pub(super) fn cache_sizes(input: &ValueInfo) -> Result<[usize; 2], String> {
    let Some([_, Dim::Fixed(heads), _, Dim::Fixed(width)]) = input.dims.as_deref() else {
        return Err(format!("input `{}` must be [batch, heads, past, width] with fixed sizes", input.name));
    };
    match input.data_type {
        DataType::Float | DataType::Float16 => Ok([*heads, *width]),
        _ => Err(format!("input `{}` is no float of 32 or 16 bits; only caches of these types are kept", input.name)),
    }
}

/// The vocabulary of the logits, where it is fixed.
pub(super) fn check_logits(graph: &OnnxFile, name: &str) -> Result<Option<usize>, String> {
    let logits = graph.outputs().into_iter().find(|output| output.name == name);
    let logits = logits.ok_or_else(|| format!("there is no output `{name}`"))?;
    if logits.data_type != DataType::Float {
        return Err(format!("output `{name}` is no 32-bit float, the only type that is read"));
    }
    match logits.dims.as_deref().and_then(<[Dim]>::last) {
        Some(Dim::Fixed(size)) => Ok(Some(*size)),
        _ => Ok(None),
    }
}

/// The inputs must be exactly those of this project's contract, the outputs at least.
fn check_names(file: &OnnxFile, layers: usize, own: &[&str], decoder: bool) -> Result<(), String> {
    let mut inputs: Vec<String> = own.iter().map(|name| (*name).to_owned()).collect();
    let outputs = if decoder {
        inputs.extend(["decoder", "encoder"].into_iter().flat_map(|side| cache_names("past_key_values", side, layers)));
        cache_names("present", "decoder", layers)
    } else {
        cache_names("present", "encoder", layers)
    };
    let found: Vec<_> = file.inputs().into_iter().map(|value| value.name).collect();
    if let Some(name) = inputs.iter().find(|name| !found.contains(name)) {
        return Err(format!("there is no input `{name}`"));
    }
    if let Some(name) = found.iter().find(|name| !inputs.contains(name)) {
        return Err(format!("input `{name}` is unknown"));
    }
    let found: Vec<_> = file.outputs().into_iter().map(|value| value.name).collect();
    match outputs.iter().find(|name| !found.contains(name)) {
        Some(name) => Err(format!("there is no output `{name}`")),
        None => Ok(()),
    }
}
