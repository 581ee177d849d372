//! The header of a safetensors file, checked to describe every byte of the file exactly once.

use std::{collections::BTreeMap, fmt, io::Read};

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};

use super::{
    dtype::Dtype,
    error::{CheckpointError, quoted},
    input::ReadError,
    json::Reader,
    limits,
};
use crate::file_kind::{self, FileKind};

/// Bytes of the little-endian length in front of the header.
const LENGTH: u64 = 8;

/// One stored tensor.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Where its values start, in bytes from the start of the file.
    pub(super) offset: u64,
    /// Bytes of its values.
    pub(super) bytes: u64,
}

/// Everything that a header says.
#[derive(Debug, Default)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    pub(super) metadata: BTreeMap<String, String>,
}

impl Header {
    /// Reads the header of the file `file` of `file_size` bytes.
    pub(super) fn read(file: &str, file_size: u64, mut input: impl Read) -> Result<Self, CheckpointError> {
        let mut prefix = Vec::new();
        read_up_to(&mut input, file_kind::PREFIX as u64, &mut prefix).map_err(|error| error.of(file))?;
        let length = header_length(file, file_size, &prefix)?;
        let mut text = prefix.split_off(LENGTH as usize);
        let missing = length.saturating_sub(text.len() as u64);
        read_up_to(&mut input, missing, &mut text).map_err(|error| error.of(file))?;
        if (text.len() as u64) < length {
            return Err(CheckpointError::Changed { file: file.into() });
        }
        text.truncate(usize::try_from(length).unwrap_or(usize::MAX));
        let mut header = Self::parse(file, &text)?;
        header.place(file, LENGTH + length, file_size)?;
        Ok(header)
    }

    fn parse(file: &str, text: &[u8]) -> Result<Self, CheckpointError> {
        let padding = text.iter().rev().take_while(|byte| **byte == b' ').count();
        let (json, _) = text.split_at(text.len() - padding);
        if json.last() != Some(&b'}') {
            return Err(malformed(file, "its header must end with '}' and then nothing but spaces".into()));
        }
        let reader = Reader::new(file, "its header");
        reader.parse(json, HeaderSeed(&reader))
    }

    /// Checks that the tensors follow each other without hole or overlap up to the end of the file, and
    /// makes their offsets count from the start of the file.
    fn place(&mut self, file: &str, start: u64, file_size: u64) -> Result<(), CheckpointError> {
        let mut order: Vec<_> = self.tensors.iter_mut().collect();
        order.sort_by_key(|(_, info)| (info.offset, info.bytes));
        let size = file_size.saturating_sub(start);
        let outside = order.iter().find(|(_, info)| info.offset > size);
        let outside = outside.map(|(name, info)| (quoted(name), info.offset));
        let mut end = 0u64;
        let mut previous: Option<&str> = None;
        for (name, info) in order {
            if info.offset != end {
                if let Some((tensor, first)) = outside {
                    let problem = format!("starts at byte {first} of the data, which has {size}");
                    return Err(CheckpointError::Tensor { file: file.into(), tensor, problem });
                }
                let after = previous.map_or_else(String::new, |name| format!(", where {} ends", quoted(name)));
                let fault = if info.offset < end { "overlaps another tensor" } else { "leaves a hole before it" };
                let problem =
                    format!("{fault}: expected to start at byte {end} of the data{after}, found {}", info.offset);
                return Err(CheckpointError::Tensor { file: file.into(), tensor: quoted(name), problem });
            }
            end = end.saturating_add(info.bytes);
            info.offset = info.offset.saturating_add(start);
            previous = Some(name);
        }
        let expected = start.saturating_add(end);
        if expected != file_size {
            return Err(CheckpointError::Size { file: file.into(), expected, found: file_size });
        }
        Ok(())
    }
}

fn malformed(file: &str, problem: String) -> CheckpointError {
    CheckpointError::Header { file: file.into(), problem }
}

fn read_up_to(input: &mut impl Read, bytes: u64, text: &mut Vec<u8>) -> Result<(), ReadError> {
    input.by_ref().take(bytes).read_to_end(text)?;
    Ok(())
}

/// The length of the header, checked before anything of that size is read.
fn header_length(file: &str, file_size: u64, prefix: &[u8]) -> Result<u64, CheckpointError> {
    let length = prefix.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let first = prefix.get(LENGTH as usize);
    let plausible = length.is_some_and(|length| length <= limits::FORMAT_HEADER) && first == Some(&b'{');
    let text = || (length.is_some() && file_kind::is_text(prefix)).then_some(FileKind::Text);
    if let Some(found) = file_kind::recognise(prefix).or_else(text).filter(|_| !plausible) {
        return Err(CheckpointError::FileKind { file: file.into(), found });
    }
    let Some(length) = length else {
        return Err(malformed(
            file,
            format!("the file has {file_size} bytes; a safetensors file has at least {LENGTH}"),
        ));
    };
    if length > limits::FORMAT_HEADER {
        let most = limits::FORMAT_HEADER;
        return Err(malformed(
            file,
            format!("not a safetensors file: expected a header of at most {most} bytes, found a length of {length}"),
        ));
    }
    if length > file_size.saturating_sub(LENGTH) {
        return Err(CheckpointError::Size { file: file.into(), expected: LENGTH + length, found: file_size });
    }
    if length > limits::HEADER {
        return Err(CheckpointError::Limit {
            file: file.into(),
            what: "the size of its header",
            limit: limits::HEADER,
        });
    }
    if length == 0 || first != Some(&b'{') {
        return Err(malformed(file, "not a safetensors file: its header must start with '{'".into()));
    }
    Ok(length)
}

struct HeaderSeed<'r, 'a>(&'r Reader<'a>);

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_, '_> {
    type Value = Header;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<Header, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_, '_> {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut input: A) -> Result<Header, A::Error> {
        let reader = self.0;
        let mut header = Header::default();
        let mut metadata = None;
        while let Some(name) = input.next_key_seed(TensorName(reader))? {
            if name == "__metadata__" {
                if metadata.replace(input.next_value_seed(Metadata(reader))?).is_some() {
                    return Err(reader.refuse(reader.repeated(&name)));
                }
                continue;
            }
            if header.tensors.contains_key(&name) {
                return Err(reader.refuse(reader.repeated(&name)));
            }
            if header.tensors.len() >= limits::TENSORS {
                return Err(reader.refuse(reader.limit("the number of tensors", limits::TENSORS)));
            }
            let entry = Entry { reader, name: &name };
            let info = input.next_value_seed(entry);
            let info = info.map_err(|_| {
                let form = "{\"dtype\": text, \"shape\": [sizes], \"data_offsets\": [begin, end]}";
                reader.refuse(entry.malformed(format!("its entry is not of the form {form}")))
            })?;
            header.tensors.insert(name, info);
        }
        header.metadata = metadata.unwrap_or_default();
        Ok(header)
    }
}

/// A name, refused before it is copied.
pub(super) struct TensorName<'r, 'a>(pub(super) &'r Reader<'a>);

impl<'de> DeserializeSeed<'de> for TensorName<'_, '_> {
    type Value = String;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<String, D::Error> {
        input.deserialize_str(self)
    }
}

impl Visitor<'_> for TensorName<'_, '_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<String, E> {
        self.0.check_name(name).map_err(|refusal| self.0.refuse(refusal))?;
        Ok(name.into())
    }
}

struct Metadata<'r, 'a>(&'r Reader<'a>);

impl<'de> DeserializeSeed<'de> for Metadata<'_, '_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<Self::Value, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Metadata<'_, '_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts as \"__metadata__\"")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut input: A) -> Result<Self::Value, A::Error> {
        let reader = self.0;
        let mut texts = BTreeMap::new();
        while let Some((key, text)) = input.next_entry::<String, String>()? {
            if texts.contains_key(&key) {
                return Err(reader.refuse(reader.repeated(&key)));
            }
            if texts.len() >= limits::TENSORS {
                return Err(reader.refuse(reader.limit("the number of metadata entries", limits::TENSORS)));
            }
            texts.insert(key, text);
        }
        Ok(texts)
    }
}

/// The description of the tensor `name`; its offset counts from the start of the data.
#[derive(Clone, Copy)]
struct Entry<'r, 'a> {
    reader: &'r Reader<'a>,
    name: &'r str,
}

impl Entry<'_, '_> {
    fn malformed(&self, problem: String) -> CheckpointError {
        CheckpointError::Tensor { file: self.reader.file.into(), tensor: quoted(self.name), problem }
    }

    fn info(&self, dtype: &str, shape: Vec<usize>, [begin, end]: [u64; 2]) -> Result<TensorInfo, CheckpointError> {
        let Some(dtype) = Dtype::from_name(dtype) else {
            return Err(CheckpointError::UnknownDtype {
                file: self.reader.file.into(),
                tensor: quoted(self.name),
                found: quoted(dtype),
            });
        };
        let Some(bits) = bits(dtype, &shape) else {
            return Err(self.malformed(format!("{dtype} of shape {shape:?} has more elements than any file holds")));
        };
        if bits % 8 != 0 {
            return Err(self.malformed(format!("{dtype} of shape {shape:?} does not fill whole bytes")));
        }
        let bytes = bits / 8;
        if end.checked_sub(begin) != Some(bytes) {
            let problem =
                format!("expected {bytes} bytes for {dtype} of shape {shape:?}, found bytes {begin} to {end}");
            return Err(self.malformed(problem));
        }
        Ok(TensorInfo { dtype, shape, offset: begin, bytes })
    }
}

/// Size of a tensor; an empty one is still refused where its other dimensions overflow.
fn bits(dtype: Dtype, shape: &[usize]) -> Option<u64> {
    let mut bits = dtype.bits();
    for dim in shape {
        bits = bits.checked_mul(u64::try_from(*dim).ok()?.max(1))?;
    }
    Some(if shape.contains(&0) { 0 } else { bits })
}

impl<'de> DeserializeSeed<'de> for Entry<'_, '_> {
    type Value = TensorInfo;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<TensorInfo, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Entry<'_, '_> {
    type Value = TensorInfo;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut input: A) -> Result<TensorInfo, A::Error> {
        let refuse = |problem: String| self.reader.refuse(self.malformed(problem));
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(key) = input.next_key::<String>()? {
            let repeated = match key.as_str() {
                "dtype" => dtype.replace(input.next_value::<String>()?).is_some(),
                "shape" => shape.replace(input.next_value_seed(Shape(self.reader))?).is_some(),
                "data_offsets" => offsets.replace(input.next_value::<[u64; 2]>()?).is_some(),
                _ => return Err(refuse(format!("its entry has the unknown key {}", quoted(&key)))),
            };
            if repeated {
                return Err(refuse(format!("its entry repeats the key \"{key}\"")));
            }
        }
        let missing = |key: &str| refuse(format!("its entry lacks the key \"{key}\""));
        let dtype = dtype.ok_or_else(|| missing("dtype"))?;
        let shape = shape.ok_or_else(|| missing("shape"))?;
        let offsets = offsets.ok_or_else(|| missing("data_offsets"))?;
        self.info(&dtype, shape, offsets).map_err(|refusal| self.reader.refuse(refusal))
    }
}

struct Shape<'r, 'a>(&'r Reader<'a>);

impl<'de> DeserializeSeed<'de> for Shape<'_, '_> {
    type Value = Vec<usize>;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<Self::Value, D::Error> {
        input.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Shape<'_, '_> {
    type Value = Vec<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut input: A) -> Result<Self::Value, A::Error> {
        let mut shape = Vec::new();
        while let Some(dim) = input.next_element()? {
            if shape.len() >= limits::RANK {
                return Err(self.0.refuse(self.0.limit("the number of dimensions of a tensor", limits::RANK)));
            }
            shape.push(dim);
        }
        Ok(shape)
    }
}
