//! Names of files in checkpoints and exported folders, for those who write them and those who read them.

use std::path::{Path, PathBuf};

pub(crate) use moa_graphs::Part;

/// The configuration of a checkpoint, and of a causal language model for Hugging Face's tools.
pub(crate) const CONFIG: &str = "config.json";

/// The key under which the configuration of an export keeps the sizes of which it says others, for its caches.
pub(crate) const REPLACED_SIZES: &str = "moa_export";

/// What Hugging Face's tools generate text with.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";

/// What onnxruntime-genai generates text with.
pub(crate) const GENAI_CONFIG: &str = "genai_config.json";

/// What names of models end in, behind a dot.
pub(crate) const MODEL_ENDINGS: &[&str] = &["onnx"];

/// What names of engines of TensorRT end in.
pub(crate) const PLAN_ENDINGS: &[&str] = &["engine", "plan"];

/// What names of checkpoints end in.
pub(crate) const CHECKPOINT_ENDINGS: &[&str] = &["safetensors", "bin", "pt", "pth"];

/// Follows the name of a model file in that of its weights, where they are not in it.
pub(crate) const DATA: &str = ".data";

/// The file beside the model file `model` that holds its weights, where it does not.
pub(crate) fn data_file(model: &Path) -> PathBuf {
    let mut data = model.as_os_str().to_owned();
    data.push(DATA);
    data.into()
}

/// The file of a graph in an exported folder.
pub(crate) fn graph_file(part: Part) -> String {
    format!("{}.onnx", part.as_str())
}

/// A folder that lacks a graph.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoGraph {
    /// It holds no graph of an export.
    #[error("{} holds no {}", folder.display(), any_graph())]
    Any {
        /// The folder.
        folder: PathBuf,
    },
    /// It holds one half of an encoder-decoder.
    #[error("{} holds {} and no {}", folder.display(), graph_file(*found), graph_file(*missing))]
    Half {
        /// The folder.
        folder: PathBuf,
        /// The graph that it has.
        found: Part,
        /// The other one.
        missing: Part,
    },
}

fn any_graph() -> String {
    let [model, encoder, decoder] = Part::ALL.map(graph_file);
    format!("{model}, {encoder} or {decoder}")
}

/// The graphs that an exported folder holds by the names of its files, in the order of [`Part::ALL`].
///
/// # Errors
///
/// Where there are none, and where there is an encoder without a decoder or the other way round.
pub(crate) fn graphs_in(folder: &Path) -> Result<Vec<(Part, PathBuf)>, NoGraph> {
    let graphs = Part::ALL.map(|part| (part, folder.join(graph_file(part))));
    let graphs: Vec<_> = graphs.into_iter().filter(|(_, file)| file.exists()).collect();
    if graphs.is_empty() {
        return Err(NoGraph::Any { folder: folder.into() });
    }
    for (found, missing) in [(Part::Encoder, Part::Decoder), (Part::Decoder, Part::Encoder)] {
        let has = |part| graphs.iter().any(|(known, _)| *known == part);
        if has(found) && !has(missing) {
            return Err(NoGraph::Half { folder: folder.into(), found, missing });
        }
    }
    Ok(graphs)
}
