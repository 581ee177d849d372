//! PyTorch files: a zip archive of one pickle and the storages that it names.
//!
//! The pickle is a state dictionary, as transformers wrote it before there was safetensors, or a dictionary that has
//! one as `"model"`; fairseq puts a configuration beside that. It is read into a description; nothing in it is
//! imported, called or executed. What it says besides the state dictionary and the configuration is never interpreted,
//! and storages that no tensor of the state dictionary names are never read.

mod config;
mod crc32;
mod fields;
mod gather;
mod globals;
mod layout;
mod opcode;
mod pickle;
mod storage;
mod tensors;
mod value;
mod zip;
mod zip_entry;

use std::{
    collections::BTreeMap,
    io::{Read, Seek},
    path::Path,
    sync::Arc,
};

use moa_graphs::families::Config;

use super::{
    error::{CheckpointError, listed, quoted},
    input::{InputFile, ReadError},
    limits,
};
use crate::{
    file_kind::{self, FileKind},
    files::has_ending,
};
use config::Keys;
use crc32::Crc32;
use gather::Kept;
use storage::{Storage, wrong_checksum};
use tensors::{Repeats, StateDict};
use value::Pickle;
use zip::{Archive, Source};
use zip_entry::Entry;

pub(super) use storage::View;

/// How names of PyTorch files end.
const ENDINGS: &[&str] = &["pt", "pth", "bin"];
const PICKLE: &str = "data.pkl";
/// Bytes that stay in memory of those that a strided tensor was last read from.
const KEPT: u64 = 64 << 20;
/// What a state dictionary without anything around it is called in messages.
const ROOT: &str = "its dictionary of tensors";
/// What an archive of a compiled program has besides.
const PROGRAM: &str = "constants.pkl";
/// The folder of its source texts, which are compressed.
const CODE: &str = "code/";

/// What the files of one checkpoint share.
#[derive(Debug)]
pub(super) struct Shared {
    kept: Arc<Kept>,
    repeats: Repeats,
}

impl Default for Shared {
    fn default() -> Self {
        Self { kept: Arc::new(Kept::new(KEPT)), repeats: Repeats::default() }
    }
}

/// What a file holds.
#[derive(Debug)]
pub(super) struct TorchFile {
    pub(super) tensors: BTreeMap<String, View>,
    /// Stored name of each tensor that is a second name of the same values.
    pub(super) aliases: BTreeMap<String, String>,
    /// Whether it has a configuration of its own, which fairseq writes.
    pub(super) is_fairseq: bool,
    /// That configuration, where it was asked for.
    pub(super) config: Option<Config>,
    /// What is odd about the file but does no harm.
    pub(super) warnings: Vec<String>,
}

impl TorchFile {
    /// Opens a file whose first bytes are those of a zip archive. Its own configuration is not read where it
    /// `is_configured`.
    pub(super) fn open(path: &Path, is_configured: bool, shared: &mut Shared) -> Result<Self, CheckpointError> {
        let (input, file) = InputFile::open(path)?;
        let mut source = Source { file: input.shown(), size: input.size(), input: &file };
        let contents = Contents::read(&mut source)?;
        input.check_unchanged(&file).map_err(|error| error.of(input.shown()))?;
        let input = Arc::new(input);
        let model = Model::new(input.shown(), &contents.pickle, &mut shared.repeats)?;
        let config = if is_configured { None } else { model.configuration()? };
        let warnings = model.warnings();
        let storages = model.storages(&contents.archive, &input, &shared.kept)?;
        let (mut firsts, mut tensors, mut aliases) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for name in model.names() {
            let Some(tensor) = model.dict.tensors.get(name) else { continue };
            let Some(storage) = storages.get(tensor.storage) else { continue };
            let first = *firsts.entry((tensor.storage, tensor.dtype.name(), &tensor.layout)).or_insert(name);
            if first == name {
                let view = View::new(Arc::clone(storage), tensor.layout.clone(), tensor.dtype);
                tensors.insert(name.to_owned(), view);
            } else {
                aliases.insert(name.to_owned(), first.to_owned());
            }
        }
        Ok(Self { tensors, aliases, is_fairseq: model.keys.is_some(), config, warnings })
    }
}

/// Whether a file is a zip archive by its first bytes.
pub(super) fn is_archive(path: &Path) -> Result<bool, CheckpointError> {
    prefix(path).map(|prefix| file_kind::is_zip(&prefix))
}

/// Whether a file is a PyTorch file by its name, and nothing that is known by its first bytes.
pub(super) fn is_unknown(path: &Path) -> Result<bool, CheckpointError> {
    if !has_ending(path, ENDINGS) {
        return Ok(false);
    }
    prefix(path).map(|prefix| file_kind::recognise(&prefix).is_none() && !file_kind::is_safetensors(&prefix))
}

/// The first bytes of a file.
fn prefix(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let (input, file) = InputFile::open(path)?;
    let mut prefix = Vec::new();
    let read = (&file).take(file_kind::PREFIX as u64).read_to_end(&mut prefix);
    read.map_err(|error| ReadError::from(error).of(input.shown()))?;
    Ok(prefix)
}

/// Describes the file `file`, without its storages, and gives the number of tensors.
pub(super) fn describe<R: Read + Seek>(file: &str, size: u64, input: R) -> Result<usize, CheckpointError> {
    let contents = Contents::read(&mut Source { file, size, input })?;
    count(&Model::new(file, &contents.pickle, &mut Repeats::default())?)
}

/// Describes the checkpoint in a pickle, and gives the number of tensors.
pub(super) fn describe_pickle(file: &str, bytes: &[u8]) -> Result<usize, CheckpointError> {
    let pickle = pickle::read(file, bytes.to_vec())?;
    count(&Model::new(file, &pickle, &mut Repeats::default())?)
}

fn count(model: &Model<'_, '_>) -> Result<usize, CheckpointError> {
    model.configuration().map(|_| model.dict.tensors.len())
}

/// The archive and the pickle of a file.
struct Contents {
    archive: Archive,
    pickle: Pickle,
}

impl Contents {
    fn read<R: Read + Seek>(source: &mut Source<'_, R>) -> Result<Self, CheckpointError> {
        let size = usize::try_from(source.size).unwrap_or(usize::MAX).min(file_kind::PREFIX);
        let prefix = source.at(0, size)?;
        let other = |found| CheckpointError::FileKind { file: source.file.into(), found };
        let other_zip = other(FileKind::Zip);
        let program = other(FileKind::TorchScript);
        let archive = match Archive::read(source) {
            Err(_) if zip::lists_all(source, &[PROGRAM, CODE]) => return Err(program),
            Err(_) if !zip::is_cut(source.size) && !file_kind::names_pickle(&prefix) => return Err(other_zip),
            archive => archive?,
        };
        let record = |name: &str| (format!("{}{name}", archive.folder()), archive.record(name));
        let (name, Some(entry)) = record(PICKLE) else { return Err(other_zip) };
        if record(PROGRAM).1.is_some() {
            return Err(program);
        }
        if let (name, Some(entry)) = record("byteorder") {
            check_byte_order(source, &name, entry)?;
        }
        let bytes = read_entry(source, &name, entry, "the size of its pickle", limits::PICKLE)?;
        let pickle = pickle::read(source.file, bytes)?;
        Ok(Self { archive, pickle })
    }
}

fn check_byte_order<R: Read + Seek>(
    source: &mut Source<'_, R>,
    name: &str,
    entry: &Entry,
) -> Result<(), CheckpointError> {
    const LONGEST: u64 = 64;
    match read_entry(source, name, entry, "the size of its byte order", LONGEST)?.as_slice() {
        b"little" => Ok(()),
        b"big" => Err(CheckpointError::Unsupported {
            file: source.file.into(),
            what: "a checkpoint of a big-endian machine".into(),
        }),
        _ => Err(source.faulty(name, "is neither \"little\" nor \"big\"")),
    }
}

/// The bytes of an entry, with the checksum verified.
fn read_entry<R: Read + Seek>(
    source: &mut Source<'_, R>,
    name: &str,
    entry: &Entry,
    what: &'static str,
    limit: u64,
) -> Result<Vec<u8>, CheckpointError> {
    if entry.bytes > limit {
        return Err(CheckpointError::Limit { file: source.file.into(), what, limit });
    }
    let bytes = source.at(entry.offset, usize::try_from(entry.bytes).unwrap_or(usize::MAX))?;
    let mut crc = Crc32::new();
    crc.update(&bytes);
    if crc.value() == entry.crc { Ok(bytes) } else { Err(source.malformed(wrong_checksum(name))) }
}

/// The error of a file whose root is no dictionary of tensors.
fn without_tensors(file: &str, pickle: &Pickle) -> CheckpointError {
    let entries = pickle.entries(pickle.root).unwrap_or_default();
    let keys: Vec<_> = entries.iter().filter_map(|(key, value)| Some((pickle.text(*key)?, *value))).collect();
    let mut found = pickle.kind(pickle.root);
    if !keys.is_empty() {
        found = format!("{found} of {}", listed(keys.iter().map(|(key, _)| *key)));
    }
    let holds =
        |value| pickle.entries(value).into_iter().flatten().any(|(_, part)| tensors::is_made_as_one(pickle, part));
    let part = keys.iter().find(|(_, value)| holds(*value)).map(|(key, _)| (*key).to_owned());
    CheckpointError::NoTensors { file: file.into(), found, part }
}

/// State dictionary and other parts of a checkpoint.
struct Model<'a, 'p> {
    file: &'a str,
    /// What fairseq writes, where it lies beside the state dictionary.
    keys: Option<Keys<'a, 'p>>,
    /// What the state dictionary is called in messages.
    place: &'static str,
    dict: StateDict<'p>,
}

impl<'a, 'p> Model<'a, 'p> {
    fn new(file: &'a str, pickle: &'p Pickle, repeats: &mut Repeats) -> Result<Self, CheckpointError> {
        let root = pickle.entries(pickle.root);
        let has_tensors = root.iter().flatten().any(|(_, value)| tensors::is_made_as_one(pickle, *value));
        let keys = root.map(|entries| Keys::new(file, pickle, &entries)).transpose()?;
        let inner = keys.as_ref().and_then(|keys| keys.get("model"));
        let (place, value, keys) = match inner.filter(|value| !tensors::is_made_as_one(pickle, *value)) {
            Some(value) => ("\"model\"", value, keys.filter(Keys::has_configuration)),
            None if has_tensors => (ROOT, pickle.root, None),
            None => return Err(without_tensors(file, pickle)),
        };
        let dict = StateDict::new(file, pickle, value, place, repeats)?;
        Ok(Self { file, keys, place, dict })
    }

    /// That of fairseq.
    fn configuration(&self) -> Result<Option<Config>, CheckpointError> {
        self.keys.as_ref().map(|keys| keys.configuration(&self.dict)).transpose()
    }

    /// Names of the tensors, the one that keeps values of several names before the others: the first by name in a
    /// checkpoint of fairseq, elsewhere the first of the dictionary, which transformers stores as safetensors.
    fn names(&self) -> Vec<&'p str> {
        match self.keys {
            Some(_) => self.dict.tensors.keys().copied().collect(),
            None => self.dict.order.clone(),
        }
    }

    /// Names what lies among the tensors and is none.
    fn warnings(&self) -> Vec<String> {
        let others = &self.dict.others;
        let names = listed(others.iter().copied());
        let left = || format!("{}: left out of {}, since they are no tensors: {names}", self.file, self.place);
        (!others.is_empty()).then(left).into_iter().collect()
    }

    /// The storages that the tensors name, which must be entries of the right size.
    fn storages(
        &self,
        archive: &Archive,
        input: &Arc<InputFile>,
        kept: &Arc<Kept>,
    ) -> Result<BTreeMap<&'p str, Arc<Storage>>, CheckpointError> {
        let malformed = |problem| CheckpointError::Archive { file: self.file.into(), problem };
        let mut storages = BTreeMap::new();
        for (key, info) in &self.dict.storages {
            let name = format!("{}data/{key}", archive.folder());
            let Some(entry) = archive.entry(&name) else {
                return Err(malformed(format!("zip entry {} is missing", quoted(&name))));
            };
            info.check(entry.bytes).map_err(|expected| {
                let found = entry.bytes;
                malformed(format!("zip entry {} must have {expected} bytes, found {found}", quoted(&name)))
            })?;
            storages.insert(*key, Arc::new(Storage::new(Arc::clone(input), name, entry.clone(), Arc::clone(kept))));
        }
        Ok(storages)
    }
}
