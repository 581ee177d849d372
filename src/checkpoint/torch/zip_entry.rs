//! One entry of a zip archive: its line in the directory, and the header in front of its data.

use std::io::{Read, Seek};

use super::{fields::Fields, zip::Source};
use crate::checkpoint::{
    error::{CheckpointError, quoted},
    limits,
};

const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;
/// Checksum and sizes follow the data.
const TRAILING: u16 = 1 << 3;
const PATCH: u16 = 1 << 5;
const STORED: u16 = 0;
const LOCAL: usize = 30;
/// Stands for a size or offset that is kept in the ZIP64 field.
const ELSEWHERE: u64 = 0xffff_ffff;

/// Where the data of an entry are.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// From the start of the file.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) crc: u32,
}

/// What both headers of an entry say.
struct Common {
    flags: u16,
    method: u16,
    crc: u32,
    compressed: u64,
    bytes: u64,
    name: usize,
    extra: usize,
}

impl Common {
    /// The fields from the flags to the length of the extra fields.
    fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let (flags, method, _time, _date) = (fields.u16()?, fields.u16()?, fields.u16()?, fields.u16()?);
        let (crc, compressed, bytes) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let (name, extra) = (fields.u16()?, fields.u16()?);
        Some(Self {
            flags,
            method,
            crc,
            compressed: compressed.into(),
            bytes: bytes.into(),
            name: name.into(),
            extra: extra.into(),
        })
    }
}

/// A line of the central directory.
pub(super) struct Central {
    pub(super) name: String,
    /// Where the entry starts.
    pub(super) header: u64,
    flags: u16,
    crc: u32,
    bytes: u64,
}

impl Central {
    /// Reads the line `index`.
    pub(super) fn read<R: Read + Seek>(
        source: &Source<'_, R>,
        index: usize,
        fields: &mut Fields<'_>,
    ) -> Result<Self, CheckpointError> {
        let malformed = || source.malformed(format!("line {index} of its zip directory is malformed"));
        let line = Line::read(fields).ok_or_else(malformed)?;
        let name = std::str::from_utf8(line.name).map_err(|_| malformed())?;
        check_name(source, name)?;
        let Line { mut common, mut header, disk, extra, .. } = line;
        let wanted = [&mut common.bytes, &mut common.compressed, &mut header];
        if !apply_zip64(extra, wanted) || disk != 0 {
            return Err(source.faulty(name, "has malformed fields in the zip directory"));
        }
        if common.flags & ENCRYPTED != 0 {
            return Err(source.faulty(name, "is encrypted"));
        }
        if common.method != STORED || common.flags & PATCH != 0 {
            return Err(source.faulty(name, "is compressed; PyTorch stores its entries as they are"));
        }
        if common.compressed != common.bytes {
            let problem = format!("is stored as {} bytes, but has {} bytes", common.compressed, common.bytes);
            return Err(source.faulty(name, &problem));
        }
        Ok(Self { name: name.into(), header, flags: common.flags, crc: common.crc, bytes: common.bytes })
    }

    /// Checks the header in front of the data, and that the entry ends exactly at `end`.
    pub(super) fn place<R: Read + Seek>(&self, source: &mut Source<'_, R>, end: u64) -> Result<Entry, CheckpointError> {
        if end.saturating_sub(self.header) < LOCAL as u64 {
            return Err(self.overlaps(source));
        }
        let bytes = source.at(self.header, LOCAL)?;
        let Some(mut common) = local_header(&bytes) else {
            return Err(source.faulty(&self.name, &format!("has no header at byte {}", self.header)));
        };
        let offset = self.header + (LOCAL + common.name + common.extra) as u64;
        let Some(gap) = offset.checked_add(self.bytes).and_then(|data_end| end.checked_sub(data_end)) else {
            return Err(self.overlaps(source));
        };
        let texts = source.at(self.header + LOCAL as u64, common.name + common.extra)?;
        let (name, extra) = texts.split_at(common.name);
        if !self.agrees(&mut common, name, extra) {
            return Err(source.faulty(&self.name, "is described otherwise in its own header than in the zip directory"));
        }
        let trailer = source.at(end - gap.min(24), usize::try_from(gap.min(24)).unwrap_or(0))?;
        if gap > 24 || !self.trailed_by(&trailer) {
            return Err(source.faulty(&self.name, &format!("leaves a hole of {gap} bytes behind it")));
        }
        Ok(Entry { offset, bytes: self.bytes, crc: self.crc })
    }

    fn overlaps<R: Read + Seek>(&self, source: &Source<'_, R>) -> CheckpointError {
        source.faulty(&self.name, &format!("of {} bytes overlaps what follows it", self.bytes))
    }

    /// Whether the header in front of the data says the same.
    fn agrees(&self, local: &mut Common, name: &[u8], extra: &[u8]) -> bool {
        let same = name == self.name.as_bytes() && local.flags == self.flags && local.method == STORED;
        if !same {
            return false;
        }
        if self.flags & TRAILING == 0 {
            let fits = apply_zip64(extra, [&mut local.bytes, &mut local.compressed]);
            return fits && (local.crc, local.compressed, local.bytes) == (self.crc, self.bytes, self.bytes);
        }
        let open = |size: u64| size == 0 || size == self.bytes || size == ELSEWHERE;
        let crc = local.crc == 0 || local.crc == self.crc;
        crc && open(local.compressed) && open(local.bytes) && zip64(extra).is_some()
    }

    /// Whether the bytes behind the data are the checksum and sizes that should be there.
    fn trailed_by(&self, trailer: &[u8]) -> bool {
        if self.flags & TRAILING == 0 {
            return trailer.is_empty();
        }
        let signed = trailer.len() == 16 || trailer.len() == 24;
        let rest = if signed { trailer.strip_prefix(b"PK\x07\x08") } else { Some(trailer) };
        let Some(rest) = rest else { return false };
        let mut fields = Fields(rest);
        let crc = fields.u32();
        let sizes = match fields.0.len() {
            8 => [fields.u32().map(u64::from), fields.u32().map(u64::from)],
            16 => [fields.u64(), fields.u64()],
            _ => return false,
        };
        crc == Some(self.crc) && sizes == [Some(self.bytes); 2]
    }
}

/// The header in front of the data, where there is one.
fn local_header(bytes: &[u8]) -> Option<Common> {
    let mut fields = Fields(bytes.strip_prefix(b"PK\x03\x04")?);
    let _version = fields.u16()?;
    Common::read(&mut fields)
}

/// The parts of a line of the central directory.
struct Line<'a> {
    common: Common,
    name: &'a [u8],
    extra: &'a [u8],
    header: u64,
    disk: u16,
}

impl<'a> Line<'a> {
    fn read(fields: &mut Fields<'a>) -> Option<Self> {
        if fields.take(4)? != b"PK\x01\x02" {
            return None;
        }
        let _versions = fields.u32()?;
        let common = Common::read(fields)?;
        let (comment, disk, _attributes) = (fields.u16()?, fields.u16()?, (fields.u16()?, fields.u32()?));
        let header = fields.u32()?.into();
        let name = fields.take(common.name)?;
        let extra = fields.take(common.extra)?;
        fields.take(comment.into())?;
        Some(Self { common, name, extra, header, disk })
    }
}

/// The ZIP64 field among extra fields, empty where there is none; `None` where they are malformed.
fn zip64(extra: &[u8]) -> Option<&[u8]> {
    const ID: u16 = 1;
    let mut fields = Fields(extra);
    let mut found = None;
    while !fields.0.is_empty() {
        let (id, length) = (fields.u16()?, fields.u16()?);
        let data = fields.take(length.into())?;
        if id == ID && found.replace(data).is_some() {
            return None;
        }
    }
    Some(found.unwrap_or_default())
}

/// Replaces the `wanted` values that are kept in the ZIP64 field; `false` where it lacks one.
fn apply_zip64<const COUNT: usize>(extra: &[u8], wanted: [&mut u64; COUNT]) -> bool {
    let Some(field) = zip64(extra) else { return false };
    let mut fields = Fields(field);
    for value in wanted.into_iter().filter(|value| **value == ELSEWHERE) {
        match fields.u64() {
            Some(long) => *value = long,
            None => return false,
        }
    }
    true
}

/// Refuses names that lead out of a folder or cannot be shown.
fn check_name<R: Read + Seek>(source: &Source<'_, R>, name: &str) -> Result<(), CheckpointError> {
    if name.len() > limits::NAME {
        let what = "the length of the name of a zip entry";
        return Err(CheckpointError::Limit { file: source.file.into(), what, limit: limits::NAME as u64 });
    }
    let harmless = |c: char| !c.is_control() && c != '\\';
    if name.is_empty()
        || name.starts_with('/')
        || name.split('/').any(|part| part == "..")
        || !name.chars().all(harmless)
    {
        return Err(source.malformed(format!("zip entry name {} is not a plain path", quoted(name))));
    }
    Ok(())
}
