//! Names of files in checkpoints and exported folders, for those who write them and those who read them.

use std::path::{Path, PathBuf};

pub(crate) use moa_graphs::stem::{DECODER, ENCODER, MODEL};

/// The configuration of a checkpoint, and of a causal language model for Hugging Face's tools.
pub(crate) const CONFIG: &str = "config.json";

/// What Hugging Face's tools generate text with.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";

/// What onnxruntime-genai generates text with.
pub(crate) const GENAI_CONFIG: &str = "genai_config.json";

/// Follows the name of a model file in that of its weights, where they are not in it.
pub(crate) const DATA: &str = ".data";

/// The file beside the model file `model` that holds its weights, where it does not.
pub(crate) fn data_file(model: &Path) -> PathBuf {
    let mut data = model.as_os_str().to_owned();
    data.push(DATA);
    data.into()
}

/// The file of the graph `stem`.
pub(crate) fn graph_file(stem: &str) -> String {
    format!("{stem}.onnx")
}
