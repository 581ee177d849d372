//! Checkpoints: bytes that nobody vouches for, turned into described tensors that are read on demand.
//!
//! A checkpoint is one file of tensors, or a Hugging Face folder with `model.safetensors` or
//! `model.safetensors.index.json` and its shards, or else with `pytorch_model.bin` or `pytorch_model.bin.index.json`; a
//! `config.json` belongs to it. Or it is one PyTorch file that fairseq wrote, which holds its configuration itself.
//! Which of them a file is, a shard too, is decided by its content. Symbolic links are followed. A folder with an
//! adapter of PEFT is refused: transformers applies it, and it is not read.
//!
//! Opening reads headers and checks all of them: every byte of a safetensors file belongs to exactly one tensor, no key
//! is repeated, index and shards agree. Values are read by [`Weight`] when they are asked for, from a file
//! that must not have changed since.
//!
//! # PyTorch files
//!
//! A file written by `torch.save` since PyTorch 1.6: a zip archive of stored entries. It holds a dictionary of
//! tensors, or one under `"model"`, beside which fairseq puts a configuration. Its pickle, protocol 2 to 5, is read
//! into a description and never executed; a class or function in the state dictionary that no tensor needs is refused
//! by name. The headers of all entries are checked when the file is opened, the checksum of an entry when its values
//! are read. Values that are no numbers, texts, booleans or `None` in fairseq's configuration cannot be used by any
//! family.
//!
//! # Element types
//!
//! F16, BF16, F32 and F64 are weights. Tensors of the other types of the format are described as any other,
//! so that a buffer nobody reads does no harm; reading their values fails with [`WeightError::ElementType`]. A NaN or
//! infinite value, or an F64 beyond the range of f32 where f32 is asked for, is [`WeightError::NonFinite`].
//!
//! # Aliases
//!
//! An entry of a header's `__metadata__`, or of an index's `metadata`, whose value is the name of a stored
//! tensor makes its key an alias of that tensor. A stored name wins over an alias. In a PyTorch file, of
//! tensors that are the same part of one storage one is stored and the others are its aliases: the first by name in a
//! checkpoint of fairseq, the first of its dictionary elsewhere.
//!
//! # Limits
//!
//! | what | largest |
//! |---|---|
//! | header | 16 MiB |
//! | tensors, entries of metadata, aliases | 200 000 |
//! | dimensions of a tensor | 8 |
//! | name of a tensor | 1024 bytes |
//! | shards | 4096 |
//! | shard index | 64 MiB |
//! | `config.json` | 4 MiB, nested 64 deep |
//! | elements that tensors of PyTorch files have beyond those of their storages | 2^28, or what all storages hold |
//! | pickle | 64 MiB, 4 000 000 values, 1 000 000 memorised ones, 10 000 on its stack |
//! | entries of a zip archive | 65 536, their directory 64 MiB |
//!
//! [`WeightError::ElementType`]: moa_graphs::WeightError::ElementType
//! [`WeightError::NonFinite`]: moa_graphs::WeightError::NonFinite

mod config;
mod dtype;
mod error;
mod file_help;
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod input;
mod json;
mod limits;
mod shard_index;
mod source;
mod tensors;
mod torch;

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use moa_graphs::{TensorDirectory, Weight, families::Config};

pub use crate::file_kind::FileKind;
pub use crate::files::ErrorKind;
pub use dtype::Dtype;
pub use error::CheckpointError;

use crate::{
    file_names::{CHECKPOINT_ENDINGS, CONFIG, Part, graph_file},
    files::{folder_of, has_ending},
};
use error::shown;
use tensors::Tensors;

/// Reads a `config.json` by itself.
///
/// # Errors
///
/// Where the file is missing or unreadable, is no JSON object, or exceeds a limit.
pub fn read_config(path: &Path) -> Result<Config, CheckpointError> {
    config::read(path)
}

/// How transformers names the only file of a folder, and the list of several: of safetensors, and of PyTorch, which are
/// looked for where there is none of the others.
const FORMATS: [[&str; 2]; 2] =
    [["model.safetensors", "model.safetensors.index.json"], ["pytorch_model.bin", "pytorch_model.bin.index.json"]];

/// What describes an adapter that PEFT has saved, which transformers applies where it lies in a folder of weights.
const ADAPTER: &str = "adapter_config.json";

/// Names of the files that make a folder a checkpoint.
pub(crate) fn models() -> impl Iterator<Item = &'static str> {
    FORMATS.into_iter().flatten()
}

/// Names of the files of a folder, shards apart.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    models().chain([CONFIG])
}

/// The tensors and the configuration of one trained model.
#[derive(Debug)]
pub struct Checkpoint {
    origin: String,
    config: Config,
    /// Where the configuration lies, if not in the file of the tensors.
    config_file: Option<PathBuf>,
    tensors: Tensors,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, a PyTorch file or a Hugging Face folder.
    ///
    /// The configuration is read from `config`; otherwise from the file itself, where fairseq wrote it, or from the
    /// `config.json` beside the tensors.
    ///
    /// # Errors
    ///
    /// Where a file is missing or unreadable, breaks its format, exceeds a limit, or is of another kind.
    pub fn open(path: &Path, config: Option<&Path>) -> Result<Self, CheckpointError> {
        let (folder, mut tensors, own) = match Location::of(path)? {
            Location::Single(file) => {
                let (tensors, own) = Tensors::of_file(&file, config.is_some())?;
                (file.parent().map(Path::to_path_buf).unwrap_or_default(), tensors, own)
            }
            Location::Sharded { folder, index } => {
                let tensors = Tensors::of_shards(&folder, index)?;
                (folder, tensors, None)
            }
        };
        let origin = shown(path);
        if let Some(config) = own {
            let beside = folder.join(CONFIG);
            if beside.exists() {
                let beside = shown(&beside);
                let warning =
                    format!("{beside} is not read: {origin} holds its own configuration; --config takes another");
                tensors.warnings.push(warning);
            }
            return Ok(Self { origin, config, config_file: None, tensors });
        }
        let config_file = config.map_or_else(|| folder.join(CONFIG), Path::to_path_buf);
        let config = config::read(&config_file)?;
        Ok(Self { origin, config, config_file: Some(config_file), tensors })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The files of tensors and configuration, each once.
    pub fn files(&self) -> BTreeSet<&Path> {
        let tensors = self.tensors.stored.values().map(|stored| stored.place.file().path());
        tensors.chain(self.config_file.as_deref()).collect()
    }

    /// Element type of the tensor stored under `name`.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.tensors.stored.get(name).map(|stored| stored.dtype)
    }

    /// What is odd about the checkpoint but does no harm, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.tensors.warnings
    }
}

impl TensorDirectory for Checkpoint {
    fn names(&self) -> Vec<&str> {
        self.tensors.stored.keys().map(String::as_str).collect()
    }

    fn aliases(&self) -> Vec<&str> {
        self.tensors.aliases.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<Weight> {
        let name = match self.tensors.aliases.get(name) {
            Some(kept) => kept,
            None => name,
        };
        self.tensors.stored.get(name).map(|stored| stored.weight(name))
    }

    fn origin(&self) -> &str {
        &self.origin
    }
}

/// Where the tensors are.
enum Location {
    /// In this file.
    Single(PathBuf),
    /// In the shards of a folder that a file there lists.
    Sharded { folder: PathBuf, index: &'static str },
}

impl Location {
    fn of(path: &Path) -> Result<Self, CheckpointError> {
        let metadata = fs::metadata(path).map_err(|source| CheckpointError::Io { file: shown(path), source })?;
        if !metadata.is_dir() {
            return match FORMATS.into_iter().find(|[_, index]| is_shard_of(path, index)) {
                Some([_, index]) if path.with_file_name(index).exists() => {
                    Err(CheckpointError::OneShard { file: shown(path), index })
                }
                Some([_, index]) => Err(CheckpointError::NoIndex {
                    folder: shown(folder_of(path)),
                    shard: shown(Path::new(path.file_name().unwrap_or_default())),
                    index,
                }),
                None => Ok(Self::Single(path.into())),
            };
        }
        let holds = |name: &str| match fs::symlink_metadata(path.join(name)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(CheckpointError::ClosedFolder { folder: shown(path), source }),
        };
        let is_adapted = holds(ADAPTER)?;
        let adapter = |base| CheckpointError::Adapter { folder: shown(path), description: ADAPTER, base };
        for [single, index] in FORMATS {
            match (holds(single)?, holds(index)?) {
                (true, false) if is_adapted => return Err(adapter(Some(single))),
                (false, true) if is_adapted => return Err(adapter(Some(index))),
                (true, false) => return Ok(Self::Single(path.join(single))),
                (false, true) => return Ok(Self::Sharded { folder: path.into(), index }),
                (true, true) => {
                    let found = format!("{single}, {index}");
                    return Err(CheckpointError::SeveralModels { folder: shown(path), found });
                }
                (false, false) => {}
            }
        }
        if is_adapted {
            return Err(adapter(None));
        }
        if let Some((shard, index)) = lone_shard(path) {
            return Err(CheckpointError::NoIndex { folder: shown(path), shard: shown(Path::new(&shard)), index });
        }
        let is_export = Part::ALL.into_iter().any(|part| path.join(graph_file(part)).is_file());
        let (folder, looked_for) = (shown(path), FORMATS.as_flattened().join(", "));
        Err(CheckpointError::NoModel { folder, looked_for, is_export, meant: meant(path).map(|path| shown(&path)) })
    }
}

/// Whether a file is named as transformers names one of several shards, `NAME-00001-of-00008.ENDING`, that this index
/// lists.
fn is_shard_of(path: &Path, index: &str) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    is_shard(path) && index.contains(&format!(".{ending}."))
}

/// The first shard of a folder by name, and the index that lists shards of its format.
fn lone_shard(folder: &Path) -> Option<(OsString, &'static str)> {
    let names = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name());
    let first = names.filter(|name| is_shard(Path::new(name))).min()?;
    let ending = Path::new(&first).extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let [_, index] = FORMATS.into_iter().find(|[_, index]| index.contains(&format!(".{ending}.")))?;
    Some((first, index))
}

/// What a Trainer of transformers calls its folders, before the number of the step.
const STEP: &str = "checkpoint-";

/// Ending of the files of PyTorch Lightning, which say how they become checkpoints when they are given.
const LIGHTNING: &str = "ckpt";

/// What a folder without a checkpoint holds in its place: the only snapshot, as the cache of the Hugging Face Hub has
/// them, the latest checkpoint of a Trainer, or the only file that may hold tensors.
fn meant(folder: &Path) -> Option<PathBuf> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let only = |mut found: Vec<PathBuf>| found.pop().filter(|_| found.is_empty());
    let snapshots = if folder.ends_with("snapshots") { folder.to_owned() } else { folder.join("snapshots") };
    let snapshot = only(entries(&snapshots).filter(|path| path.join(CONFIG).is_file()).collect());
    let step = |path: &PathBuf| path.file_name()?.to_str()?.strip_prefix(STEP)?.parse::<u64>().ok();
    let latest = || {
        entries(folder).filter(|path| path.join(CONFIG).is_file()).max_by_key(step).filter(|path| step(path).is_some())
    };
    let named = |endings: &[&str]| entries(folder).filter(|path| has_ending(path, endings)).collect::<Vec<_>>();
    snapshot.or_else(latest).or_else(|| {
        let known = named(CHECKPOINT_ENDINGS);
        only(if known.is_empty() { named(&[LIGHTNING]) } else { known })
    })
}

/// Whether a file is named as transformers names one of several shards: with numbers of five digits.
fn is_shard(path: &Path) -> bool {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let mut parts = stem.rsplitn(4, '-');
    let number = |part: Option<&str>| part.filter(|part| part.len() == 5).and_then(|part| part.parse::<u32>().ok());
    let (count, of, index) = (parts.next(), parts.next(), parts.next());
    of == Some("of") && number(count).is_some_and(|count| count > 1) && number(index).is_some()
}
