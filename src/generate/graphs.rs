//! The two graphs of an exported translation model, and what they must look like.

use std::path::{Path, PathBuf};

use moa_schema::interface::{ATTENTION_MASK, Cache, ENCODER_ATTENTION_MASK, INPUT_IDS, LOGITS};

use super::GenerateError;
use crate::{
    file_names::{Part, graph_file},
    metadata,
    onnx::{
        OnnxFile,
        proto::tensor_proto::DataType,
        read::{Dim, ValueInfo},
        read_model,
    },
    text::TRANSLATION_CONFIG,
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
        let paths = [Part::Encoder, Part::Decoder].map(|part| folder.join(graph_file(part)));
        for path in paths.iter().chain([&folder.join(TRANSLATION_CONFIG)]) {
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
        let of_layer = |layer| inputs.iter().find(|input| input.name == Cache::of_decoder(layer).past()[0]);
        while let Some(input) = of_layer(caches.len()) {
            caches.push(cache_sizes(input).map_err(at_decoder)?);
        }
        if caches.is_empty() {
            return Err(at_decoder(no_caches(&Cache::of_decoder(0).past()[0])));
        }
        let vocabulary = check_logits(&decoder, LOGITS).map_err(at_decoder)?;
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

const ENCODER_INPUTS: [&str; 2] = [INPUT_IDS, ATTENTION_MASK];
const DECODER_INPUTS: [&str; 3] = [INPUT_IDS, ATTENTION_MASK, ENCODER_ATTENTION_MASK];

/// Names of keys and values, layer by layer.
pub(super) fn names_of(caches: impl Iterator<Item = Cache>, names: fn(&Cache) -> [String; 2]) -> Vec<String> {
    caches.flat_map(|cache| names(&cache)).collect()
}

/// What is said of a graph without the input of the first layer's keys.
pub(super) fn no_caches(first: &str) -> String {
    format!("there is no input `{first}`: no decoder with caches")
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
        let caches = (0..layers).map(Cache::of_decoder).chain((0..layers).map(Cache::of_encoder));
        inputs.extend(names_of(caches, Cache::past));
        names_of((0..layers).map(Cache::of_decoder), Cache::present)
    } else {
        names_of((0..layers).map(Cache::of_encoder), Cache::present)
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
