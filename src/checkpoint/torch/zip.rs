//! A zip archive of stored entries, checked to describe every byte of the file exactly once.
//!
//! Only what `torch.save` writes is accepted: no compression, no encryption, no comment, one disk. The
//! central directory and the headers in front of the entries must agree.

use std::{
    collections::BTreeMap,
    io::{Read, Seek, SeekFrom},
};

use super::{
    fields::Fields,
    zip_entry::{Central, Entry},
};
use crate::checkpoint::{
    error::{CheckpointError, quoted},
    input::ReadError,
    limits,
};

/// Bytes of the header before an entry.
const HEADER: u64 = 30;
const END: u64 = 22;
const END_MAGIC: &[u8] = b"PK\x05\x06";
const LOCATOR: u64 = 20;
const END64: u64 = 56;
/// Bytes at the end of a file in which the end of an archive is looked for.
const SEARCHED: u64 = 1 << 20;

/// The file of an archive, read at any place.
pub(super) struct Source<'a, R> {
    pub(super) file: &'a str,
    pub(super) size: u64,
    pub(super) input: R,
}

impl<R: Read + Seek> Source<'_, R> {
    /// The `count` bytes from `offset` on.
    pub(super) fn at(&mut self, offset: u64, count: usize) -> Result<Vec<u8>, CheckpointError> {
        if offset.checked_add(count as u64).is_none_or(|end| end > self.size) {
            return Err(self.malformed(format!("its zip directory points beyond the end at byte {}", self.size)));
        }
        let mut bytes = vec![0; count];
        let read = self.input.seek(SeekFrom::Start(offset)).and_then(|_| self.input.read_exact(&mut bytes));
        read.map_err(|error| ReadError::from(error).of(self.file))?;
        Ok(bytes)
    }

    pub(super) fn malformed(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::Archive { file: self.file.into(), problem: problem.into() }
    }

    /// The error for the entry `name`.
    pub(super) fn faulty(&self, name: &str, problem: &str) -> CheckpointError {
        self.malformed(format!("zip entry {} {problem}", quoted(name)))
    }

    fn limit(&self, what: &'static str, limit: u64) -> CheckpointError {
        CheckpointError::Limit { file: self.file.into(), what, limit }
    }
}

/// Whether a file of `size` bytes that starts with an entry is too short for an archive.
pub(super) const fn is_cut(size: u64) -> bool {
    size < HEADER + END
}

/// Where the central directory is.
struct Directory {
    offset: u64,
    bytes: u64,
    entries: u64,
}

/// The entries of an archive.
#[derive(Debug)]
pub(super) struct Archive {
    entries: BTreeMap<String, Entry>,
    /// Name of the entry that the directory lists first.
    first: String,
}

impl Archive {
    /// Reads the directory of an archive and every header that it points to.
    pub(super) fn read<R: Read + Seek>(source: &mut Source<'_, R>) -> Result<Self, CheckpointError> {
        let directory = directory(source)?;
        let central = central(source, &directory)?;
        let first = central.first().map(|entry| entry.name.clone()).unwrap_or_default();
        let mut order: Vec<_> = central.iter().collect();
        order.sort_by_key(|entry| entry.header);
        let ends = order.iter().skip(1).map(|entry| entry.header).chain([directory.offset]);
        let mut entries = BTreeMap::new();
        let mut expected = 0;
        for (entry, end) in order.iter().zip(ends) {
            if entry.header != expected {
                return Err(source.faulty(&entry.name, &format!("leaves a hole at byte {expected} before it")));
            }
            let placed = entry.place(source, end)?;
            if entries.insert(entry.name.clone(), placed).is_some() {
                return Err(source.faulty(&entry.name, "is repeated"));
            }
            expected = end;
        }
        if expected != directory.offset {
            return Err(source.malformed(format!("has {} bytes of no zip entry", directory.offset)));
        }
        Ok(Self { entries, first })
    }

    /// The folder inside the archive that holds everything, with its slash.
    pub(super) fn folder(&self) -> &str {
        self.first.split_inclusive('/').next().unwrap_or_default()
    }

    /// The entry `name` of that folder.
    pub(super) fn record(&self, name: &str) -> Option<&Entry> {
        self.entry(&format!("{}{name}", self.folder()))
    }

    /// The entry `name`.
    pub(super) fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }
}

/// Finds the central directory from the end of the file.
fn directory<R: Read + Seek>(source: &mut Source<'_, R>) -> Result<Directory, CheckpointError> {
    let end_at = source.size.checked_sub(END).ok_or_else(|| without_end(source))?;
    let record = source.at(end_at, END as usize)?;
    let Some(end) = end_of_directory(&record) else {
        return Err(behind(source)?.unwrap_or_else(|| without_end(source)));
    };
    if !end.is_single || end.comment > 0 {
        return Err(source.malformed("its zip archive is one of several parts or has a comment"));
    }
    let directory = match matching(source, end.directory, end_at) {
        Ok(directory) => directory,
        Err(error) => return Err(behind(source)?.unwrap_or(error)),
    };
    if directory.entries > limits::ZIP_ENTRIES {
        return Err(source.limit("the number of zip entries", limits::ZIP_ENTRIES));
    }
    if directory.bytes > limits::ZIP_DIRECTORY {
        return Err(source.limit("the size of the zip directory", limits::ZIP_DIRECTORY));
    }
    Ok(directory)
}

/// Whether the directory of an archive has entries of all these names, or in folders of them, whatever else is wrong.
pub(super) fn lists_all<R: Read + Seek>(source: &mut Source<'_, R>, names: &[&str]) -> bool {
    let Ok(directory) = directory(source) else { return false };
    let Ok(bytes) = source.at(directory.offset, usize::try_from(directory.bytes).unwrap_or(usize::MAX)) else {
        return false;
    };
    let is_listed =
        |name: &&str| bytes.windows(name.len() + 1).any(|at| at.strip_prefix(b"/") == Some(name.as_bytes()));
    names.iter().all(is_listed)
}

/// The error for a file in which no end of an archive was found.
fn without_end<R: Read + Seek>(source: &Source<'_, R>) -> CheckpointError {
    let size = source.size;
    let why = if size > SEARCHED { "" } else { ": it is cut short" };
    source.malformed(format!("has {size} bytes and does not end with the directory of a zip archive{why}"))
}

/// The directory that the last record at `end_at` states, which must end where that and the ZIP64 records begin.
fn matching<R: Read + Seek>(
    source: &mut Source<'_, R>,
    stated: Directory,
    end_at: u64,
) -> Result<Directory, CheckpointError> {
    let (directory, end) = match end64(source, end_at)? {
        None => (stated, end_at),
        Some((directory, at)) => {
            let agrees = |short: u64, marker: u64, long: u64| short == marker || short == long;
            let all = agrees(stated.entries, 0xffff, directory.entries)
                && agrees(stated.bytes, 0xffff_ffff, directory.bytes)
                && agrees(stated.offset, 0xffff_ffff, directory.offset);
            if !all {
                return Err(source.malformed("the two ends of its zip directory contradict each other"));
            }
            (directory, at)
        }
    };
    if directory.offset.checked_add(directory.bytes) != Some(end) {
        return Err(source.malformed(format!(
            "its zip directory must end at byte {end}, found {} bytes from byte {}",
            directory.bytes, directory.offset
        )));
    }
    Ok(directory)
}

/// What is wrong with a file whose archive ends before it does; nothing where no such end is near that of the file.
fn behind<R: Read + Seek>(source: &mut Source<'_, R>) -> Result<Option<CheckpointError>, CheckpointError> {
    const TRIED: usize = 1 << 10;
    let from = source.size.saturating_sub(SEARCHED);
    let bytes = source.at(from, usize::try_from(source.size - from).unwrap_or(0))?;
    let records = bytes.windows(END as usize).enumerate().rev();
    let ends = records.filter_map(|(place, record)| Some((from + place as u64, end_of_directory(record)?)));
    for (at, LastRecord { directory, comment, .. }) in ends.take(TRIED) {
        let end = at + END + comment;
        let Ok(directory) = matching(source, directory, at) else { continue };
        if end > source.size || !source.at(directory.offset, 4).is_ok_and(|magic| magic == b"PK\x01\x02") {
            continue;
        }
        let commented = format!("its zip archive has a comment of {comment} bytes, as torch.save writes none");
        return Ok(Some(match (source.size - end, comment) {
            (0, _) => source.malformed(commented),
            (count, 0) => CheckpointError::Behind { file: source.file.into(), end, count },
            (count, _) => source.malformed(format!("{commented}, and {count} more bytes follow it")),
        }));
    }
    Ok(None)
}

/// What the last record of an archive says.
struct LastRecord {
    directory: Directory,
    /// Whether the archive is one file.
    is_single: bool,
    /// Bytes of the comment that follows.
    comment: u64,
}

/// What this record says, where it is the last of an archive.
fn end_of_directory(record: &[u8]) -> Option<LastRecord> {
    let mut fields = Fields(record.strip_prefix(END_MAGIC)?);
    let disks = (fields.u16()?, fields.u16()?);
    let (here, entries) = (fields.u16()?, fields.u16()?);
    let (bytes, offset) = (fields.u32()?, fields.u32()?);
    let comment = fields.u16()?.into();
    let directory = Directory { offset: offset.into(), bytes: bytes.into(), entries: entries.into() };
    Some(LastRecord { directory, is_single: disks == (0, 0) && here == entries, comment })
}

/// The end of a ZIP64 directory and where it starts, where there is one.
fn end64<R: Read + Seek>(source: &mut Source<'_, R>, end_at: u64) -> Result<Option<(Directory, u64)>, CheckpointError> {
    let Some(locator_at) = end_at.checked_sub(LOCATOR) else { return Ok(None) };
    let locator = source.at(locator_at, LOCATOR as usize)?;
    let Some(rest) = locator.strip_prefix(b"PK\x06\x07") else { return Ok(None) };
    let mut fields = Fields(rest);
    let (disk, at, disks) = (fields.u32(), fields.u64().unwrap_or(u64::MAX), fields.u32());
    let fits = at.checked_add(END64).is_some_and(|end| end <= locator_at);
    let record = if fits { source.at(at, END64 as usize)? } else { Vec::new() };
    let directory = record.strip_prefix(b"PK\x06\x06").and_then(|rest| {
        let mut fields = Fields(rest);
        let length = fields.u64()?;
        let _versions = fields.u32()?;
        let disks = (fields.u32()?, fields.u32()?);
        let (here, entries) = (fields.u64()?, fields.u64()?);
        let (bytes, offset) = (fields.u64()?, fields.u64()?);
        let whole = disks == (0, 0) && here == entries && length.checked_add(at + 12) == Some(locator_at);
        whole.then_some(Directory { offset, bytes, entries })
    });
    match (directory, disk, disks) {
        (Some(directory), Some(0), Some(0 | 1)) => Ok(Some((directory, at))),
        _ => Err(source.malformed("the ZIP64 end of its zip directory is malformed")),
    }
}

/// The entries that the central directory lists.
fn central<R: Read + Seek>(source: &mut Source<'_, R>, directory: &Directory) -> Result<Vec<Central>, CheckpointError> {
    let bytes = source.at(directory.offset, usize::try_from(directory.bytes).unwrap_or(usize::MAX))?;
    let mut fields = Fields(&bytes);
    let mut entries = Vec::new();
    while !fields.0.is_empty() {
        if entries.len() as u64 >= directory.entries {
            return Err(
                source.malformed(format!("its zip directory holds more than its {} entries", directory.entries))
            );
        }
        entries.push(Central::read(source, entries.len(), &mut fields)?);
    }
    if entries.len() as u64 != directory.entries {
        return Err(source.malformed(format!(
            "its zip directory must have {} entries, found {}",
            directory.entries,
            entries.len()
        )));
    }
    Ok(entries)
}
