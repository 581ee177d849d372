//! Outputs that would replace what an export is made from.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{ExportError, plan::Plan};
use crate::{
    checkpoint::Checkpoint,
    side_files::{SideFile, SideFileOptions, is_own_folder},
};

/// Refuses to write over an input, whatever may be replaced; graphs that lie beside a checkpoint are none, and
/// vocabularies and configurations are.
pub(super) fn keep_inputs(
    checkpoint: &Checkpoint,
    files: &SideFileOptions,
    plan: &Plan,
    side_files: &[SideFile],
) -> Result<(), ExportError> {
    let real = |path: &Path| fs::canonicalize(path).ok();
    let named = files.dictionaries.iter().flatten().chain(&files.bpe_codes).chain(&files.operator_library);
    let inputs: Vec<PathBuf> =
        checkpoint.files().into_iter().chain(named.map(PathBuf::as_path)).filter_map(real).collect();
    let beside = is_own_folder(&plan.folder, files);
    let graphs = plan.files.iter().flat_map(|file| file.data.iter().chain([&file.model]));
    let outputs = side_files.iter().map(|file| (&file.name, beside)).chain(graphs.map(|name| (name, false)));
    for (name, beside) in outputs {
        let path = plan.path(name);
        let what = match real(&path) {
            Some(place) if inputs.contains(&place) => "is read by this export",
            Some(_) if beside => "lies beside the checkpoint",
            _ => continue,
        };
        return Err(ExportError::Input { path, what });
    }
    Ok(())
}
