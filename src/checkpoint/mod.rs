//! Checkpoints: bytes that nobody vouches for, turned into described tensors that are read on demand.
//!
//! A checkpoint is one `.safetensors` file, or a Hugging Face folder with `model.safetensors` or
//! `model.safetensors.index.json` and its shards; a `config.json` belongs to it. Or it is one PyTorch file
//! that fairseq wrote, which holds its configuration itself. Which of them a file is, is decided by its
//! content. Symbolic links are followed.
//!
//! Opening reads headers and checks all of them: every byte of a file belongs to exactly one tensor, no key
//! is repeated, index and shards agree. Values are read by [`Weight`] when they are asked for, from a file
//! that must not have changed since.
//!
//! # PyTorch files
//!
//! A file written by `torch.save` since PyTorch 1.6: a zip archive of stored entries. Its pickle, protocol 2
//! to 5, is read into a description and never executed; a class or function in the state dictionary that no
//! tensor needs is refused by name. The headers of all entries are checked when the file is opened, the
//! checksum of an entry when its values are read. Values that are no numbers, texts, booleans or `None` in the
//! configuration cannot be used by any family.
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
//! tensors that are the same part of one storage the first by name is stored and the others are its aliases.
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
//! | elements that the tensors of a PyTorch file have beyond those of their storages | 2^28, or what all storages hold |
//! | pickle | 64 MiB, 4 000 000 values, 1 000 000 memorised ones, 10 000 on its stack |
//! | entries of a zip archive | 65 536, their directory 64 MiB |
//!
//! [`WeightError::ElementType`]: moa_graphs::WeightError::ElementType
//! [`WeightError::NonFinite`]: moa_graphs::WeightError::NonFinite

mod config;
mod dtype;
mod error;
mod file_kind;
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod input;
mod json;
mod limits;
mod shard_index;
mod source;
mod torch;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use moa_graphs::{TensorDirectory, Weight, families::Config};

pub use crate::files::ErrorKind;
pub use dtype::Dtype;
pub use error::CheckpointError;

use crate::file_names::CONFIG;
use error::{quoted, shown};
use header::{Header, TensorInfo};
use input::{InputFile, read_text};
use shard_index::ShardIndex;
use source::{Place, Stored};
use torch::{TorchFile, View};

/// Reads a `config.json` by itself.
///
/// # Errors
///
/// Where the file is missing or unreadable, is no JSON object, or exceeds a limit.
pub fn read_config(path: &Path) -> Result<Config, CheckpointError> {
    config::read(path)
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// What transformers wrote before there was safetensors.
const PICKLED: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
/// Names of the files of a folder, shards apart.
pub(crate) const NAMES: [&str; 5] = [CONFIG, SINGLE, INDEX, PICKLED[0], PICKLED[1]];

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
    /// Opens a `.safetensors` file, a Hugging Face folder or a PyTorch file of fairseq.
    ///
    /// The configuration is read from `config`; otherwise from the PyTorch file itself, or from the
    /// `config.json` beside the tensors.
    ///
    /// # Errors
    ///
    /// Where a file is missing or unreadable, breaks its format, exceeds a limit, or is of another kind.
    pub fn open(path: &Path, config: Option<&Path>) -> Result<Self, CheckpointError> {
        let origin = shown(path);
        let (folder, tensors) = match Location::of(path)? {
            Location::Single(file) if torch::is_archive(&file)? => return Self::open_torch(origin, &file, config),
            Location::Single(file) if torch::is_unknown(&file)? => {
                let problem = "neither a zip archive nor a pickle, as torch.save writes them".into();
                return Err(CheckpointError::Archive { file: origin, problem });
            }
            Location::Single(file) => (file.parent().map(Path::to_path_buf), Tensors::of_file(&file)?),
            Location::Sharded(folder) => (Some(folder.clone()), Tensors::of_folder(&folder)?),
        };
        let beside = folder.unwrap_or_default().join(CONFIG);
        let config_file = config.map_or(beside, Path::to_path_buf);
        let config = config::read(&config_file)?;
        Ok(Self { origin, config, config_file: Some(config_file), tensors })
    }

    fn open_torch(origin: String, path: &Path, config: Option<&Path>) -> Result<Self, CheckpointError> {
        let config_file = config.map(Path::to_path_buf);
        let TorchFile { tensors, aliases, config, warnings } = TorchFile::open(path, config)?;
        let tensors = Tensors { warnings, ..Tensors::of_torch(tensors, aliases) };
        Ok(Self { origin, config, config_file, tensors })
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
    /// In the shards of this folder.
    Sharded(PathBuf),
}

impl Location {
    fn of(path: &Path) -> Result<Self, CheckpointError> {
        let metadata = fs::metadata(path).map_err(|source| CheckpointError::Io { file: shown(path), source })?;
        if !metadata.is_dir() {
            if is_shard(path) && path.with_file_name(INDEX).exists() {
                return Err(CheckpointError::OneShard { file: shown(path), index: INDEX });
            }
            return Ok(Self::Single(path.into()));
        }
        let holds = |name: &str| match fs::symlink_metadata(path.join(name)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(CheckpointError::ClosedFolder { folder: shown(path), source }),
        };
        match (holds(SINGLE)?, holds(INDEX)?) {
            (true, false) => Ok(Self::Single(path.join(SINGLE))),
            (false, true) => Ok(Self::Sharded(path.into())),
            (true, true) => {
                let found = format!("{SINGLE}, {INDEX}");
                Err(CheckpointError::SeveralModels { folder: shown(path), found })
            }
            (false, false) => {
                let (folder, looked_for) = (shown(path), format!("{SINGLE}, {INDEX}"));
                Err(match PICKLED.into_iter().find(|name| holds(name).is_ok_and(|held| held)) {
                    Some(found) => CheckpointError::PickledModel { folder, found, supported: looked_for },
                    None => CheckpointError::NoModel { folder, looked_for },
                })
            }
        }
    }
}

/// Whether a file is named as transformers names shards: `NAME-00001-of-00008.safetensors`.
fn is_shard(path: &Path) -> bool {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let mut parts = stem.rsplitn(4, '-');
    let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<u32>().is_ok());
    let (count, of, index) = (parts.next(), parts.next(), parts.next());
    of == Some("of") && is_number(count) && is_number(index)
}

/// All tensors of a checkpoint.
#[derive(Debug, Default)]
struct Tensors {
    stored: BTreeMap<String, Stored>,
    /// Stored name of each alias.
    aliases: BTreeMap<String, String>,
    warnings: Vec<String>,
}

impl Tensors {
    fn of_file(path: &Path) -> Result<Self, CheckpointError> {
        let (file, header) = read_header(path)?;
        let mut tensors = Self::default();
        let metadata = tensors.add(Arc::clone(&file), header);
        tensors.add_aliases(file.shown(), metadata)?;
        Ok(tensors)
    }

    fn of_torch(views: BTreeMap<String, View>, aliases: BTreeMap<String, String>) -> Self {
        let stored = views.into_iter().map(|(name, view)| {
            let (dtype, shape) = (view.dtype(), view.shape().to_vec());
            (name, Stored { dtype, shape, place: Arc::new(Place::View(view)) })
        });
        Self { stored: stored.collect(), aliases, warnings: Vec::new() }
    }

    fn of_folder(folder: &Path) -> Result<Self, CheckpointError> {
        let (file, text) = read_text(&folder.join(INDEX), "the size of the shard index", limits::INDEX)?;
        let mut index = ShardIndex::parse(file.shown(), &text)?;
        drop(text);
        let mut tensors = Self::default();
        let mut metadata = vec![(file.shown().to_owned(), std::mem::take(&mut index.metadata))];
        let mut bytes = 0;
        for shard in index.shards.keys() {
            let (file, header) = read_header(&folder.join(&**shard)).map_err(CheckpointError::of_shard)?;
            index.check_shard(shard, file.shown(), &header)?;
            bytes += header.tensors.values().map(|info| info.bytes).sum::<u64>();
            let shown = file.shown().to_owned();
            let mut texts = tensors.add(file, header);
            texts.retain(|_, kept| index.tensors.contains_key(kept));
            metadata.push((shown, texts));
        }
        for (file, texts) in metadata {
            tensors.add_aliases(&file, texts)?;
        }
        tensors.warnings.extend(index.size_warning(file.shown(), bytes));
        Ok(tensors)
    }

    /// Adds the tensors of one file and gives back its metadata.
    fn add(&mut self, file: Arc<InputFile>, header: Header) -> BTreeMap<String, String> {
        let stored = |(name, info): (String, TensorInfo)| {
            let place = Place::Range { file: Arc::clone(&file), offset: info.offset, bytes: info.bytes };
            (name, Stored { dtype: info.dtype, shape: info.shape, place: Arc::new(place) })
        };
        self.stored.extend(header.tensors.into_iter().map(stored));
        header.metadata
    }

    /// Adds the entries of `metadata` that are aliases of stored tensors.
    fn add_aliases(&mut self, file: &str, metadata: BTreeMap<String, String>) -> Result<(), CheckpointError> {
        let reader = json::Reader::new(file, "its metadata");
        for (alias, kept) in metadata {
            if !self.stored.contains_key(&kept) || self.stored.contains_key(&alias) {
                continue;
            }
            reader.check_name(&alias)?;
            if let Some(other) = self.aliases.get(&alias).filter(|other| **other != kept) {
                let (alias, kept, other) = (quoted(&alias), quoted(&kept), quoted(other));
                return Err(reader.json(format!("name {alias} is an alias of {kept}, elsewhere of {other}")));
            }
            if self.aliases.len() >= limits::TENSORS {
                return Err(reader.limit("the number of aliases", limits::TENSORS));
            }
            self.aliases.insert(alias, kept);
        }
        Ok(())
    }
}

fn read_header(path: &Path) -> Result<(Arc<InputFile>, Header), CheckpointError> {
    let (input, file) = InputFile::open(path)?;
    let header = Header::read(input.shown(), input.size(), &file)?;
    input.check_unchanged(&file).map_err(|error| error.of(input.shown()))?;
    Ok((Arc::new(input), header))
}
