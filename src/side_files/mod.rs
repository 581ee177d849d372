//! The files beside the graphs: what `generate` and other programs need to turn text into text with them.

mod causal_lm;
mod translation;

use std::{
    fs,
    path::{Path, PathBuf},
};

use moa_schema::{ORT_LIBRARY, library_file};

pub(crate) use causal_lm::{CausalLmFiles, is_own_folder};
pub(crate) use translation::side_files;

pub use translation::VocabularyError;

use crate::{
    files::folder_of,
    text::{TextError, read_bytes},
};

/// Bytes that a file which is copied may have: a tokenizer, a dictionary or a library has fewer.
const LARGEST: u64 = 1 << 28;

/// Which files to put beside the graphs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SideFileOptions {
    /// fairseq dictionaries of the source and the target language; may be one file.
    pub dictionaries: Option<[PathBuf; 2]>,
    /// Codes of subword-nmt; where none are named, `bpe.codes` or `bpecodes` beside the source dictionary.
    pub bpe_codes: Option<PathBuf>,
    /// A checkpoint. For a translation model without a dictionary, the pair `dict.SOURCE.txt` and `dict.TARGET.txt`
    /// beside it is taken, for the languages that its configuration names, or else `dict.txt`. For a causal language
    /// model the tokenizer's files and `generation_config.json`.
    pub beside: Option<PathBuf>,
    /// The operator library, to be copied beside the graphs.
    pub operator_library: Option<PathBuf>,
}

impl SideFileOptions {
    /// Whether no vocabulary file is named.
    pub(crate) const fn names_no_vocabulary(&self) -> bool {
        self.dictionaries.is_none() && self.bpe_codes.is_none()
    }

    /// The folder of the checkpoint, where there is one.
    fn checkpoint_folder(&self) -> Option<&Path> {
        let checkpoint = self.beside.as_deref()?;
        Some(if checkpoint.is_dir() { checkpoint } else { folder_of(checkpoint) })
    }
}

/// Names of the files that may lie beside graphs, or beside a checkpoint to be put there; dictionaries of languages and
/// the operator library apart.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    causal_lm::NAMES.into_iter().chain(causal_lm::COPIED).chain(translation::NAMES)
}

/// The files of these names in `folder`, and the operator library, as far as an export may have written them.
pub(crate) fn files_in(folder: &Path) -> Vec<PathBuf> {
    let is_ours = |path: &PathBuf| fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() <= LARGEST);
    names()
        .map(str::to_owned)
        .chain([library_file(ORT_LIBRARY)])
        .map(|name| folder.join(name))
        .filter(is_ours)
        .collect()
}

/// A file to write: its name and its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SideFile {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

/// The file, or whatever else has its name: reading it tells what is wrong with it. A link that leads nowhere is a file
/// that is missing, not one that was left out.
fn file_in(folder: &Path, name: &str) -> Option<PathBuf> {
    Some(folder.join(name)).filter(|path| path.symlink_metadata().is_ok())
}

/// The operator library, where one is to be copied.
pub(crate) fn library(options: &SideFileOptions) -> Result<Option<SideFile>, TextError> {
    let Some(path) = &options.operator_library else { return Ok(None) };
    Ok(Some(SideFile { name: library_file(ORT_LIBRARY), bytes: read_bytes(path, LARGEST)? }))
}
