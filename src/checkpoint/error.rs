//! What can be wrong with a checkpoint.

use std::{io, path::Path};

use moa_graphs::WeightError;

use super::{
    dtype::Dtype,
    file_help::{NO_COMMAND, shell_word},
};
use crate::{
    file_kind::FileKind,
    file_names::CHECKPOINT_ENDINGS,
    files::{ErrorKind, has_ending, help_with},
};

/// Why a checkpoint cannot be opened.
///
/// Every message is one line that starts with the file; names from the file are escaped, and nothing else
/// of its content is shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("{file}: {source}")]
    Io {
        /// File or folder.
        file: String,
        /// What the operating system said.
        source: io::Error,
    },
    /// A pipe or device stands where a configuration was expected.
    #[error("{file}: expected a regular file, found {found}")]
    ConfigNotAFile {
        /// The path.
        file: String,
        /// What it is.
        found: &'static str,
    },
    /// A directory, pipe or device stands where a file was expected.
    #[error("{file}: expected a regular file, found {found}")]
    NotAFile {
        /// The path.
        file: String,
        /// What it is.
        found: &'static str,
    },
    /// The file was written to or replaced while it was read.
    #[error("{file}: changed while it was read")]
    Changed {
        /// The file.
        file: String,
    },
    /// The operating system does not say what a folder holds.
    #[error("{folder}: the folder cannot be read: {source}")]
    ClosedFolder {
        /// The folder.
        folder: String,
        /// What the operating system said.
        source: io::Error,
    },
    /// A folder holds no tensor file under a known name.
    #[error("{folder}: holds {} checkpoint; looked for {looked_for}", if *.is_export { "an export and no" } else { "no" })]
    NoModel {
        /// The folder.
        folder: String,
        /// File names that would do.
        looked_for: String,
        /// Whether there are graphs under the names that exports have.
        is_export: bool,
        /// What is in it that may be meant.
        meant: Option<String>,
    },
    /// A folder holds shards without the list of them.
    #[error("{folder}: holds {shard}, one of several shards, and no {index}, which lists them")]
    NoIndex {
        /// The folder.
        folder: String,
        /// Name of the first shard.
        shard: String,
        /// Name of the list.
        index: &'static str,
    },
    /// A folder holds an adapter of PEFT.
    #[error("{folder}: holds a PEFT adapter ({description}), which transformers applies and an export cannot")]
    Adapter {
        /// The folder.
        folder: String,
        /// Name of the file that says so.
        description: &'static str,
        /// Name of the weights beside it, or of their index.
        base: Option<&'static str>,
    },
    /// A file is one of several that are a checkpoint together.
    #[error("{file}: is one of the shards that {index} lists")]
    OneShard {
        /// The file.
        file: String,
        /// Name of the list beside it.
        index: &'static str,
    },
    /// A folder holds several checkpoints.
    #[error("{folder}: holds several checkpoints: {found}")]
    SeveralModels {
        /// The folder.
        folder: String,
        /// Their file names.
        found: String,
    },
    /// The configuration is not where it was looked for.
    #[error("{file}: no such configuration file")]
    NoConfig {
        /// The path.
        file: String,
    },
    /// A file of another kind than a checkpoint.
    #[error(
        "{file}: {found} is not supported (supported: a .safetensors file, a Hugging Face folder, a zip file of torch.save)"
    )]
    FileKind {
        /// The file.
        file: String,
        /// Its kind, by content.
        found: FileKind,
    },
    /// A tensor has an element type that the format does not know.
    #[error("{file}: tensor {tensor} has element type {found}, which is not supported (known: {})", Dtype::known())]
    UnknownDtype {
        /// The file.
        file: String,
        /// Name of the tensor, quoted and escaped.
        tensor: String,
        /// The element type, quoted and escaped.
        found: String,
    },
    /// A file is larger or smaller than its header says.
    #[error("{file}: expected {expected} bytes by its header, found {found}")]
    Size {
        /// The file.
        file: String,
        /// Bytes by the header.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A file is no safetensors file.
    #[error("{file}: {problem}")]
    Header {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// A text is not the JSON that it should be.
    #[error("{file}: {problem}")]
    Json {
        /// The file.
        file: String,
        /// What is wrong, and where.
        problem: String,
    },
    /// The description of a tensor contradicts itself.
    #[error("{file}: tensor {tensor}: {problem}")]
    Tensor {
        /// The file.
        file: String,
        /// Name of the tensor, quoted and escaped.
        tensor: String,
        /// Expected and found.
        problem: String,
    },
    /// A shard index and its shards contradict each other.
    #[error("{file}: {problem}")]
    Index {
        /// Index, or the shard that disagrees with it.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// A shard that the index names is not there.
    #[error("{file}: this shard of the index is not there")]
    NoShard {
        /// The path.
        file: String,
    },
    /// A PyTorch file is no sound zip archive.
    #[error("{file}: {problem}")]
    Archive {
        /// The file.
        file: String,
        /// What is wrong, and in which entry.
        problem: String,
    },
    /// Something follows the zip archive of a PyTorch file.
    #[error("{file}: its zip archive ends at byte {end}, and {count} more bytes follow it")]
    Behind {
        /// The file.
        file: String,
        /// Bytes of the archive.
        end: u64,
        /// Bytes behind it.
        count: u64,
    },
    /// The pickle of a PyTorch file does not describe what it should.
    #[error("{file}: {problem}")]
    Pickle {
        /// The file.
        file: String,
        /// What is wrong, and at which byte or in which tensor.
        problem: String,
    },
    /// A pickle names a class or function that no tensor needs.
    #[error("{file}: refused global {global} in {place}")]
    RefusedGlobal {
        /// The file.
        file: String,
        /// The tensor, quoted and escaped.
        place: String,
        /// Module and name, escaped.
        global: String,
    },
    /// A PyTorch file is well formed, but holds something that cannot be used.
    #[error("{file}: {what} is not supported")]
    Unsupported {
        /// The file.
        file: String,
        /// What it holds.
        what: String,
    },
    /// A PyTorch file is well formed, but holds no state dictionary where one is looked for.
    #[error(
        "{file}: a PyTorch file that is neither a checkpoint of fairseq nor a dictionary of tensors ({found}) is not supported"
    )]
    NoTensors {
        /// The file.
        file: String,
        /// What it holds.
        found: String,
        /// The key of a dictionary of tensors in it.
        part: Option<String>,
    },
    /// A shard holds a checkpoint of its own.
    #[error("{file}: is a checkpoint of fairseq, expected a dictionary of tensors, as shards are")]
    NoStateDict {
        /// The shard.
        file: String,
    },
    /// A configuration is that of an export.
    #[error("{file}: it is the configuration of an export, whose caches it describes, and of no checkpoint")]
    ConfigOfExport {
        /// The file.
        file: String,
    },
    /// A PyTorch file holds no configuration that can be read.
    #[error("{file}: holds no configuration that can be read: {found}")]
    NoModelKeys {
        /// The file.
        file: String,
        /// What is there instead.
        found: String,
    },
    /// The input is larger than a limit.
    #[error("{file}: {what} exceeds the limit of {limit}")]
    Limit {
        /// The file.
        file: String,
        /// What is too large.
        what: &'static str,
        /// The largest value that is read.
        limit: u64,
    },
}

impl CheckpointError {
    /// What the failure means for the caller.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { .. }
            | Self::ClosedFolder { .. }
            | Self::NotAFile { .. }
            | Self::ConfigNotAFile { .. }
            | Self::Changed { .. }
            | Self::NoModel { .. }
            | Self::NoIndex { .. }
            | Self::NoShard { .. }
            | Self::NoConfig { .. } => ErrorKind::Io,
            Self::OneShard { .. }
            | Self::Adapter { .. }
            | Self::FileKind { .. }
            | Self::UnknownDtype { .. }
            | Self::Unsupported { .. }
            | Self::NoTensors { .. }
            | Self::ConfigOfExport { .. }
            | Self::NoModelKeys { .. } => ErrorKind::Unsupported,
            Self::Limit { .. } => ErrorKind::Limit,
            Self::SeveralModels { .. }
            | Self::Size { .. }
            | Self::Header { .. }
            | Self::Json { .. }
            | Self::Tensor { .. }
            | Self::Index { .. }
            | Self::NoStateDict { .. }
            | Self::Archive { .. }
            | Self::Behind { .. }
            | Self::Pickle { .. }
            | Self::RefusedGlobal { .. } => ErrorKind::Malformed,
        }
    }

    /// The same, said of a shard that an index names.
    pub(super) fn of_shard(self) -> Self {
        match self {
            Self::Io { file, source } if source.kind() == io::ErrorKind::NotFound => Self::NoShard { file },
            error => error,
        }
    }

    /// How to put it right, in one line, where there is such a way.
    pub fn help(&self) -> Option<String> {
        let help = match self {
            Self::Adapter { description, base, .. } => return Some(help_with_adapter(description, *base)),
            Self::NoModel { is_export, meant, .. } => return Some(help_without_model(*is_export, meant.as_deref())),
            Self::NotAFile { found: "a folder", .. } => "give the file in it that is meant, such as FOLDER/config.json",
            Self::ConfigNotAFile { .. } => "give a file of JSON; what a pipe brings goes to a file first",
            Self::NotAFile { .. } => "give a .safetensors file, a PyTorch file or a Hugging Face folder",
            Self::ClosedFolder { .. } => "let your user read and enter the folder, or give a copy that it may read",
            Self::Changed { .. } => "wait until nothing writes to the checkpoint, then try again",
            Self::NoIndex { .. } => "copy or download the index beside the shards; rename what is a whole model",
            Self::OneShard { .. } => "give the folder that holds them all",
            Self::SeveralModels { .. } => "give the file itself, or keep only one of them in the folder",
            Self::NoConfig { .. } => {
                "check the path; config.json is looked for beside the checkpoint, and --config FILE names another"
            }
            Self::FileKind { file, found } => return super::file_help::help(*found, file),
            Self::Behind { file, end, .. } => {
                let again = "copy or download it again, or cut off what follows";
                return Some(match shell_word(file) {
                    Some(file) => format!("{again}: truncate -c -s {end} {file}"),
                    None => format!("{again} byte {end}; {NO_COMMAND}"),
                });
            }
            Self::UnknownDtype { .. } => "store the tensor as F32, F16 or BF16",
            Self::Size { expected, found, .. } if found < expected => {
                "the file is cut short; copy or download it again"
            }
            Self::Size { .. } => "remove what follows the tensors, or write the file again",
            Self::Header { .. } | Self::Tensor { .. } => {
                "the file is damaged or was written by a faulty program; write it again with the safetensors library"
            }
            Self::Archive { .. } => {
                "the file is damaged, cut short or saved without checksums; copy or download it again, or save it again with torch.save"
            }
            Self::Pickle { .. } => {
                "the file is damaged or was not written by torch.save; save it again with torch.save"
            }
            Self::RefusedGlobal { .. } => {
                "nothing was executed; do not load the file with PyTorch unless you trust where it comes from"
            }
            Self::Unsupported { .. } => {
                "give a checkpoint of an MoA model that was saved with the defaults of torch.save; where fairseq's \
                 architecture is your own name for upstream's model, name a configuration with --config FILE"
            }
            Self::NoTensors { file, part: Some(part), .. } => {
                return Some(super::file_help::help_with_part(file, part));
            }
            Self::NoTensors { .. } => {
                "give the checkpoint that fairseq wrote, or save the model's state_dict() alone, beside its config.json"
            }
            Self::ConfigOfExport { .. } | Self::NoModelKeys { .. } => "name the checkpoint's with --config FILE",
            Self::Index { .. } | Self::NoShard { .. } | Self::NoStateDict { .. } => {
                "copy or download the index and all its shards again"
            }
            Self::Limit { .. } => "no model of a supported family needs that much; check where the file comes from",
            Self::Io { file, source } => return help_with_file(file, source),
            Self::Json { file, .. } => help_with_json(file),
        };
        Some(help.into())
    }
}

impl From<&WeightError> for ErrorKind {
    fn from(error: &WeightError) -> Self {
        match error {
            WeightError::Io { .. } | WeightError::Changed { .. } => Self::Io,
            WeightError::ElementType { .. } | WeightError::NoValues { .. } | WeightError::OutOfRange { .. } => {
                Self::Unsupported
            }
            _ => Self::Malformed,
        }
    }
}

/// What to do about a file that is not the JSON that it should be.
fn help_with_json(file: &str) -> &'static str {
    match has_ending(file, &["yaml", "yml"]) {
        true => "a configuration is JSON: give the checkpoint's config.json, or save the same keys as JSON",
        false => "mend the file, or copy or download it again",
    }
}

/// What to do about a folder without a checkpoint, which holds `meant` in its place.
fn help_without_model(is_export: bool, meant: Option<&str>) -> String {
    match meant {
        _ if is_export => "an exported model is no checkpoint: give the folder or file that was trained".into(),
        Some(path) => format!("did you mean {path}?"),
        None => "give the file itself, as a `checkpoint_best.pt` of fairseq, or a folder that holds one of them".into(),
    }
}

/// What to do about an adapter beside the weights `base`, where there are such.
fn help_with_adapter(description: &str, base: Option<&str>) -> String {
    let merge = "merge it into its base model with PEFT's `merge_and_unload()`, save that";
    match base {
        None => format!("{merge}, and give its folder"),
        Some(index) if index.ends_with(".json") => {
            format!("{merge}, and give its folder; or move {description} away to export the base model")
        }
        Some(file) => format!("{merge}, and give its folder; or give {file} itself to export the base model"),
    }
}

/// As [`help_with`], for a path that may be a model of the Hugging Face Hub.
fn help_with_file(file: &str, source: &io::Error) -> Option<String> {
    match hub_name(file).filter(|_| source.kind() == io::ErrorKind::NotFound) {
        Some(name) => {
            Some(format!("models of the Hugging Face Hub are downloaded first: hf download {name} --local-dir FOLDER"))
        }
        None => help_with(source).map(str::to_owned),
    }
}

/// The name of a model on the Hugging Face Hub, `OWNER/MODEL`, where a path that is not there reads like one.
fn hub_name(file: &str) -> Option<&str> {
    let name = file.strip_prefix("https://huggingface.co/").unwrap_or(file);
    let (owner, model) = name.split_once('/')?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_part = |part: &str| part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(plain);
    let is_file = has_ending(model, CHECKPOINT_ENDINGS) || has_ending(model, &["json"]);
    (is_part(owner) && is_part(model) && !is_file && !Path::new(owner).exists()).then_some(name)
}

/// A path as messages show it: without control characters.
pub(super) fn shown(path: &Path) -> String {
    let mut text = String::new();
    for c in path.to_string_lossy().chars() {
        match c {
            '\\' | '"' | '\'' => text.push(c),
            _ => text.extend(c.escape_debug()),
        }
    }
    text
}

/// A name from a file as messages show it: quoted, escaped, cut where it is long.
pub(super) fn quoted(name: &str) -> String {
    const LONGEST: usize = 160;
    match name.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}…", &name[..end]),
        None => format!("{name:?}"),
    }
}

/// Up to ten names, and how many more there are.
pub(super) fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    const MOST: usize = 10;
    let more = names.len().saturating_sub(MOST);
    let text = names.take(MOST).map(quoted).collect::<Vec<_>>().join(", ");
    if more == 0 { text } else { format!("{text} and {more} more") }
}
