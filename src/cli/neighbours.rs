//! What lay where an export was written: files that are read with it, and models that read what it has replaced.

use std::path::{Path, PathBuf};

use super::{
    apart::{files_of, is_data_of, place},
    note,
};
use crate::{
    export::ExportReport,
    file_names::{MODEL_ENDINGS, Part, data_file, graph_file},
    files::{folder_of, has_ending},
    metadata,
    onnx::read_model,
    side_files,
};

/// Models beside which an export is written.
pub(super) struct Neighbours(Vec<Neighbour>);

struct Neighbour {
    path: PathBuf,
    /// Files with its weights.
    data: Vec<PathBuf>,
    /// The hash of the weights that it was made from.
    source: Option<String>,
}

impl Neighbours {
    /// Those of what `output` will be; to be asked before something may be replaced. Without `force` nothing is.
    pub(super) fn before(output: &Path, force: bool) -> Self {
        let folder = if is_model(output) && !output.is_dir() { folder_of(output) } else { output };
        let mut files = if force { files_of(folder) } else { Vec::new() };
        files.retain(|path| is_read(path));
        files.sort();
        let neighbour = |path: PathBuf| {
            let model = read_model(&path).ok()?;
            let data = model.data_files().iter().map(|data| place(data)).collect();
            let source = model.metadata(metadata::SOURCE).map(str::to_owned);
            Some(Neighbour { path, data, source })
        };
        Self(files.into_iter().filter_map(neighbour).collect())
    }

    /// Says what was there before the export of `report` into `output`; in a folder `of_checkpoint`, other files than
    /// graphs are the checkpoint's.
    pub(super) fn note_of(&self, report: &ExportReport, output: &Path, of_checkpoint: bool) {
        let written: Vec<PathBuf> = report.files.iter().map(|file| place(&file.path)).collect();
        for neighbour in self.0.iter().filter(|neighbour| !written.contains(&place(&neighbour.path))) {
            neighbour.note(report, &written, output);
        }
        let models = report.files.iter().map(|file| &file.path).filter(|path| is_model(path));
        note_of_old_data(models.map(|model| data_file(model)), &written);
        if output.is_dir() && !of_checkpoint {
            note_of_old_files(output, &written);
        }
    }
}

impl Neighbour {
    fn note(&self, report: &ExportReport, written: &[PathBuf], output: &Path) {
        let path = self.path.display();
        if let Some(data) = self.data.iter().find(|data| written.contains(data)) {
            let name = data.file_name().unwrap_or_default().display();
            note(&format!("{path} reads {name}, which was written anew: make it again"));
        } else if output.is_dir()
            && !is_graph(&self.path)
            && self.source.as_ref().is_some_and(|source| *source != report.source_sha256)
        {
            note(&format!("{path} was made from other weights than this export"));
        }
    }
}

fn is_model(path: &Path) -> bool {
    has_ending(path, MODEL_ENDINGS)
}

/// Bytes of a model that is read for a note; one whose weights lie beside it has far fewer.
const LARGEST: u64 = 64 << 20;

fn is_read(path: &Path) -> bool {
    is_model(path) && path.metadata().is_ok_and(|metadata| metadata.len() <= LARGEST)
}

/// Whether a file has the name that a graph of a folder has.
fn is_graph(path: &Path) -> bool {
    Part::ALL.into_iter().any(|part| path.file_name() == Some(graph_file(part).as_ref()))
}

/// Names those of the files with weights which are of an export that was replaced by one without such a file.
fn note_of_old_data(files: impl Iterator<Item = PathBuf>, written: &[PathBuf]) {
    for data in files.filter(|data| data.is_file() && !written.contains(&place(data))) {
        let readers = files_of(folder_of(&data));
        let mut readers = readers.iter().filter(|model| is_read(model) && !written.contains(&place(model)));
        match readers.find(|model| is_data_of(&place(&data), model)) {
            None => note(&format!("{} is of an earlier export; nothing reads it now", data.display())),
            Some(model) => {
                note(&format!("{} is of an earlier export, and {} reads it", data.display(), model.display()))
            }
        }
    }
}

/// Names files of a folder that commands and other programs may read, and that were not written there.
fn note_of_old_files(folder: &Path, written: &[PathBuf]) {
    let is_left = |path: &PathBuf| path.is_file() && !written.contains(&place(path));
    let graphs = Part::ALL.map(|part| folder.join(graph_file(part)));
    let gone = graphs.iter().filter(|graph| !written.contains(&place(graph)));
    note_of_old_data(gone.map(|graph| data_file(graph)), written);
    for path in graphs.iter().filter(|graph| is_left(graph)) {
        note(&format!(
            "{} is of an earlier export, and commands may take it for this folder: remove it",
            path.display()
        ));
    }
    for path in side_files::names().map(|name| folder.join(name)).filter(is_left) {
        let text = "was there before, and programs may read it with this export: remove it if it is no part";
        note(&format!("{} {text}", path.display()));
    }
}
