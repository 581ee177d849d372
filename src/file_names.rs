//! Names of files in checkpoints and exported folders, for those who write them and those who read them.

pub(crate) use moa_graphs::stem::{DECODER, ENCODER, MODEL};

/// The configuration of a checkpoint, and of a causal language model for Hugging Face's tools.
pub(crate) const CONFIG: &str = "config.json";

/// What Hugging Face's tools generate text with.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";

/// What onnxruntime-genai generates text with.
pub(crate) const GENAI_CONFIG: &str = "genai_config.json";

/// The file of the graph `stem`.
pub(crate) fn graph_file(stem: &str) -> String {
    format!("{stem}.onnx")
}
