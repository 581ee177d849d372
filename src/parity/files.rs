//! The files of an export as a verification reads them.

use std::path::{Path, PathBuf};

use moa_graphs::{Part, model::Model};

use super::{
    VerifyError,
    settings::{Settings, check_part},
};
use crate::{
    checkpoint::Checkpoint,
    file_names::{NoGraph, graph_file, graphs_in},
    metadata,
    onnx::{OnnxFile, read_model},
    source::source_sha256,
};

/// The files of one export.
pub(super) struct Files {
    /// Each graph with its part; the encoder before the decoder.
    pub(super) graphs: Vec<(Part, OnnxFile)>,
    pub(super) settings: Settings,
}

impl Files {
    pub(super) fn open(path: &Path, family: &str, model: &Model) -> Result<Self, VerifyError> {
        if matches!(path.try_exists(), Ok(false)) {
            return Err(VerifyError::MissingGraph { path: path.into() });
        }
        let is_folder = path.is_dir();
        if let (true, Err(error @ NoGraph::Any { .. })) = (is_folder, graphs_in(path)) {
            return Err(error.into());
        }
        if !is_folder && matches!(model, Model::EncoderDecoder(_)) {
            open_graph(path.into(), family)?;
            return Err(VerifyError::NeedsFolder { path: path.into(), family: family.into() });
        }
        let parts: &[Part] = match model {
            Model::EncoderDecoder(_) => &[Part::Encoder, Part::Decoder],
            _ => &[Part::Model],
        };
        let mut graphs = Vec::new();
        for part in parts.iter().copied() {
            let path = match is_folder {
                true => graph_in(path, part, family)?,
                false => path.to_path_buf(),
            };
            let file = open_graph(path, family)?;
            check_part(&file, part)?;
            graphs.push((part, file));
        }
        let settings = Settings::of(&graphs.iter().map(|(_, file)| file).collect::<Vec<_>>())?;
        Ok(Self { graphs, settings })
    }

    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.graphs.iter().flat_map(|(_, file)| file.files()).collect()
    }

    pub(super) fn graph_paths(&self) -> Vec<PathBuf> {
        self.graphs.iter().map(|(_, file)| file.path().to_path_buf()).collect()
    }

    /// Whether the files say that they come from other weights than those of `checkpoint`; nothing where they do not
    /// say where they come from.
    pub(super) fn is_of_other_weights(&self, checkpoint: &Checkpoint) -> Result<Option<bool>, VerifyError> {
        let stated: Vec<_> = self.graphs.iter().filter_map(|(_, file)| file.metadata(metadata::SOURCE)).collect();
        if stated.is_empty() {
            return Ok(None);
        }
        let weights = source_sha256(checkpoint)?;
        Ok(Some(stated.iter().any(|stated| *stated != weights)))
    }
}

/// A graph of a folder; where there is none, the graph of another family says so.
fn graph_in(folder: &Path, part: Part, family: &str) -> Result<PathBuf, VerifyError> {
    let path = folder.join(graph_file(part));
    let other =
        [Part::Encoder, Part::Model].map(|part| folder.join(graph_file(part))).into_iter().find(|path| path.exists());
    if let Some(other) = other.filter(|_| !path.exists()) {
        open_graph(other, family)?;
    }
    Ok(path)
}

fn open_graph(path: PathBuf, family: &str) -> Result<OnnxFile, VerifyError> {
    if matches!(path.try_exists(), Ok(false)) {
        return Err(VerifyError::MissingGraph { path });
    }
    let file = read_model(&path)?;
    match file.metadata(metadata::FAMILY).filter(|found| *found != family) {
        Some(found) => Err(VerifyError::WrongFamily { path, found: found.into(), expected: family.into() }),
        None => Ok(file),
    }
}
