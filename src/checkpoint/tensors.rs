//! The tensors of all files of a checkpoint.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use moa_graphs::families::Config;

use super::{
    error::{CheckpointError, quoted, shown},
    header::{Header, TensorInfo},
    input::{InputFile, read_text},
    json, limits,
    shard_index::ShardIndex,
    source::{Place, Stored},
    torch::{self, Shared, TorchFile},
};

/// All tensors of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct Tensors {
    pub(super) stored: BTreeMap<String, Stored>,
    /// Stored name of each alias.
    pub(super) aliases: BTreeMap<String, String>,
    pub(super) warnings: Vec<String>,
}

impl Tensors {
    /// Those of one file, and the configuration that it holds itself, which is not looked for where it `is_configured`.
    pub(super) fn of_file(path: &Path, is_configured: bool) -> Result<(Self, Option<Config>), CheckpointError> {
        let mut part = Part::read(path, is_configured, &mut Shared::default())?;
        let (file, metadata, config) = (part.file.clone(), std::mem::take(&mut part.metadata), part.config.take());
        let mut tensors = Self::default();
        tensors.add(part);
        tensors.add_aliases(&file, metadata)?;
        Ok((tensors, config))
    }

    /// Those of the shards that `index` lists, which lie beside it.
    pub(super) fn of_shards(folder: &Path, index: &str) -> Result<Self, CheckpointError> {
        let (file, text) = read_text(&folder.join(index), "the size of the shard index", limits::INDEX)?;
        let mut index = ShardIndex::parse(file.shown(), &text)?;
        drop(text);
        let mut tensors = Self::default();
        let mut metadata = vec![(file.shown().to_owned(), std::mem::take(&mut index.metadata))];
        let (mut sizes, mut shared) = ([0; 2], Shared::default());
        for shard in index.shards.keys() {
            let mut part = Part::read(&folder.join(&**shard), true, &mut shared).map_err(CheckpointError::of_shard)?;
            if part.is_fairseq {
                return Err(CheckpointError::NoStateDict { file: part.file });
            }
            index.check_shard(shard, &part.file, &part.names())?;
            part.metadata.retain(|_, kept| index.tensors.contains_key(kept));
            metadata.push((part.file.clone(), std::mem::take(&mut part.metadata)));
            for (sum, size) in sizes.iter_mut().zip(part.sizes()) {
                *sum += size;
            }
            tensors.add(part);
        }
        for (file, texts) in metadata {
            tensors.add_aliases(&file, texts)?;
        }
        tensors.warnings.extend(index.size_warning(file.shown(), sizes));
        Ok(tensors)
    }

    fn add(&mut self, part: Part) {
        self.stored.extend(part.stored);
        self.aliases.extend(part.aliases);
        self.warnings.extend(part.warnings);
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

/// The tensors of one file.
#[derive(Debug, Default)]
struct Part {
    /// The file, as messages show it.
    file: String,
    stored: BTreeMap<String, Stored>,
    /// Stored name of each tensor that is a second name of the same values.
    aliases: BTreeMap<String, String>,
    /// Texts of a header, of which some may be aliases.
    metadata: BTreeMap<String, String>,
    is_fairseq: bool,
    config: Option<Config>,
    warnings: Vec<String>,
}

impl Part {
    /// Reads the description of a file, which its first bytes tell the format of.
    fn read(path: &Path, is_configured: bool, shared: &mut Shared) -> Result<Self, CheckpointError> {
        if torch::is_archive(path)? {
            return Ok(Self::of_torch(shown(path), TorchFile::open(path, is_configured, shared)?));
        }
        if torch::is_unknown(path)? {
            let problem = "neither a zip archive nor a pickle, as torch.save writes them".into();
            return Err(CheckpointError::Archive { file: shown(path), problem });
        }
        let (input, file) = InputFile::open(path)?;
        let header = Header::read(input.shown(), input.size(), &file)?;
        input.check_unchanged(&file).map_err(|error| error.of(input.shown()))?;
        Ok(Self::of_header(&Arc::new(input), header))
    }

    fn of_header(file: &Arc<InputFile>, header: Header) -> Self {
        let stored = |(name, info): (String, TensorInfo)| {
            let place = Place::Range { file: Arc::clone(file), offset: info.offset, bytes: info.bytes };
            (name, Stored { dtype: info.dtype, shape: info.shape, place: Arc::new(place) })
        };
        let stored = header.tensors.into_iter().map(stored).collect();
        Self { file: file.shown().into(), stored, metadata: header.metadata, ..Self::default() }
    }

    fn of_torch(file: String, torch: TorchFile) -> Self {
        let TorchFile { tensors, aliases, is_fairseq, config, warnings } = torch;
        let stored = tensors.into_iter().map(|(name, view)| {
            let (dtype, shape) = (view.dtype(), view.shape().to_vec());
            (name, Stored { dtype, shape, place: Arc::new(Place::View(view)) })
        });
        Self { file, stored: stored.collect(), aliases, is_fairseq, config, warnings, ..Self::default() }
    }

    /// All names under which it holds values.
    fn names(&self) -> BTreeSet<&str> {
        self.stored.keys().chain(self.aliases.keys()).map(String::as_str).collect()
    }

    /// Bytes of all values, and those with values of several names counted under each of them.
    fn sizes(&self) -> [u64; 2] {
        let bytes = |name: &String| self.stored.get(name).map_or(0, |stored| stored.place.bytes());
        let once = self.stored.keys().map(bytes).sum();
        [once, once + self.aliases.values().map(bytes).sum::<u64>()]
    }
}
