//! Weights in files beside the model: one plain name, one regular file, exact bounds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::io;
use std::path::Path;

use prost::bytes::Bytes;

use super::error::{Fault, ReadError, shown};
use super::tensor;
use crate::files::{is_plain_name, read_exact_at};
use crate::onnx::proto::{StringStringEntryProto, TensorProto};

/// Data files of a model.
#[derive(Debug, Default)]
pub(super) struct DataFiles {
    open: BTreeMap<String, (File, u64)>,
    /// Those that are not there.
    absent: BTreeSet<String>,
}

/// What becomes of a data file that is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absent {
    Refused,
    LeftOut,
}

/// Where the values of one tensor lie.
struct Extent<'a> {
    location: &'a str,
    offset: u64,
    length: Option<u64>,
}

impl DataFiles {
    /// Opens the data files of `tensors`, which must lie beside the model at `path`.
    pub(super) fn open<'a>(
        path: &Path,
        tensors: impl IntoIterator<Item = &'a TensorProto>,
        absent: Absent,
    ) -> Result<Self, ReadError> {
        let mut files = Self::default();
        for tensor in tensors.into_iter().filter(|tensor| !tensor.external_data.is_empty()) {
            let extent = Extent::parse(tensor).map_err(|fault| fault.at(path))?;
            if files.absent.contains(extent.location) {
                continue;
            }
            if !files.open.contains_key(extent.location) {
                let file = match open_beside(path, extent.location) {
                    Err(ReadError::NoData { .. }) if absent == Absent::LeftOut => {
                        files.absent.insert(extent.location.to_owned());
                        continue;
                    }
                    file => file?,
                };
                files.open.insert(extent.location.to_owned(), file);
            }
            files.bounds(tensor, &extent).map_err(|fault| fault.at(path))?;
        }
        Ok(files)
    }

    /// Whether the model has no data file.
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.absent.is_empty()
    }

    /// Names of the files, in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.open.keys().map(String::as_str)
    }

    /// Names of those that are not there.
    pub(super) fn absent(&self) -> impl Iterator<Item = &str> {
        self.absent.iter().map(String::as_str)
    }

    /// The values of a tensor.
    pub(super) fn values(&self, path: &Path, tensor: &TensorProto) -> Result<Bytes, ReadError> {
        let location = Extent::parse(tensor).map_err(|fault| fault.at(path))?.location;
        if self.absent.contains(location) {
            return Err(ReadError::NoData { path: path.to_owned(), data: path.with_file_name(location) });
        }
        let size = tensor::byte_size(tensor).map_err(|fault| fault.at(path))?;
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(size).is_err() {
            let fault =
                Fault::limit(format!("tensor {} takes {size} bytes, more than memory has", shown(&tensor.name)));
            return Err(fault.at(path));
        }
        bytes.resize(size, 0);
        self.read(path, tensor, 0, &mut bytes)?;
        Ok(bytes.into())
    }

    /// Fills `bytes` with the values of a tensor from byte `start` on.
    pub(super) fn read(
        &self,
        path: &Path,
        tensor: &TensorProto,
        start: usize,
        bytes: &mut [u8],
    ) -> Result<(), ReadError> {
        let bounded = || -> Result<_, Fault> {
            let extent = Extent::parse(tensor)?;
            let length = self.bounds(tensor, &extent)?;
            if length.checked_sub(start).is_none_or(|rest| rest < bytes.len()) {
                return Err(Fault::malformed(format!("tensor {} is too short", shown(&tensor.name))));
            }
            Ok(extent)
        };
        let extent = bounded().map_err(|fault| fault.at(path))?;
        if let Some((file, _)) = self.open.get(extent.location) {
            read_exact_at(file, bytes, extent.offset + start as u64)
                .map_err(|error| ReadError::io(&path.with_file_name(extent.location), error))?;
        }
        Ok(())
    }

    /// Checks an extent against the shape and the file; returns its length.
    fn bounds(&self, tensor: &TensorProto, extent: &Extent<'_>) -> Result<usize, Fault> {
        let size = tensor::byte_size(tensor)?;
        let needed = size as u64;
        let available = self.open.get(extent.location).map_or(0, |(_, length)| *length);
        let rest = available.checked_sub(extent.offset);
        let length = extent.length.or(rest);
        if length != Some(needed) {
            let found = length.unwrap_or(0);
            let text =
                format!("tensor {}: {found} bytes of external data, its shape needs {needed}", shown(&tensor.name));
            return Err(Fault::malformed(text));
        }
        if rest.is_none_or(|rest| rest < needed) {
            let text = format!(
                "tensor {}: bytes {} to {} lie outside {}, which has {available}",
                shown(&tensor.name),
                extent.offset,
                u128::from(extent.offset) + u128::from(needed),
                shown(extent.location)
            );
            return Err(Fault::malformed(text).help("the data file was cut off, or belongs to another model"));
        }
        Ok(size)
    }
}

impl<'a> Extent<'a> {
    fn parse(tensor: &'a TensorProto) -> Result<Self, Fault> {
        let mut entries: [Option<&'a str>; KEYS.len()] = [None; KEYS.len()];
        for StringStringEntryProto { key, value } in &tensor.external_data {
            let Some(index) = KEYS.iter().position(|known| known == key) else {
                let text = format!("tensor {}: unknown external data key {}", shown(&tensor.name), shown(key));
                return Err(Fault::malformed(text));
            };
            if entries[index].replace(value).is_some() {
                let text = format!("tensor {}: external data key {} is repeated", shown(&tensor.name), shown(key));
                return Err(Fault::malformed(text));
            }
        }
        let number = |text: Option<&str>| text.map(|text| decimal(tensor, text)).transpose();
        let [location, offset, length, _checksum] = entries;
        Ok(Self {
            location: plain_name(tensor, location)?,
            offset: number(offset)?.unwrap_or(0),
            length: number(length)?,
        })
    }
}

/// What `onnx.proto` says of external data. The checksum is that of the whole file, which nobody need read.
const KEYS: [&str; 4] = ["location", "offset", "length", "checksum"];

fn decimal(tensor: &TensorProto, text: &str) -> Result<u64, Fault> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(number) if digits => Ok(number),
        _ => Err(Fault::malformed(format!("tensor {}: {} is no byte count", shown(&tensor.name), shown(text)))),
    }
}

/// A location that can only name a file in the folder of the model.
fn plain_name<'a>(tensor: &TensorProto, location: Option<&'a str>) -> Result<&'a str, Fault> {
    let location = location.unwrap_or_default();
    if !is_plain_name(location) {
        let text = format!("tensor {}: external data location {} is refused", shown(&tensor.name), shown(location));
        return Err(Fault::malformed(text).help("external data must be one file in the folder of the model"));
    }
    Ok(location)
}

/// Opens the regular file `location` in the folder of `model`; follows no link.
fn open_beside(model: &Path, location: &str) -> Result<(File, u64), ReadError> {
    const HELP: &str = "external data must be one regular file of its own: copy it beside the model";
    let path = model.with_file_name(location);
    let refuse =
        |what: &str| Fault::malformed(format!("external data {} is {what}", shown(location))).help(HELP).at(model);
    let before = fs::symlink_metadata(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ReadError::NoData { path: model.to_owned(), data: path.clone() },
        _ => ReadError::io(&path, error),
    })?;
    if before.is_symlink() {
        return Err(refuse("a symbolic link"));
    }
    if !before.is_file() {
        return Err(refuse("no regular file"));
    }
    let file = File::open(&path).map_err(|error| ReadError::io(&path, error))?;
    let opened = file.metadata().map_err(|error| ReadError::io(&path, error))?;
    if !same_file(&before, &opened) {
        return Err(refuse("being replaced while it is read"));
    }
    if is_hard_linked(&opened) {
        return Err(refuse("a hard link"));
    }
    Ok((file, opened.len()))
}

#[cfg(unix)]
fn same_file(left: &Metadata, right: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    left.dev() == right.dev() && left.ino() == right.ino()
}

#[cfg(not(unix))]
fn same_file(left: &Metadata, right: &Metadata) -> bool {
    left.len() == right.len() && left.file_type() == right.file_type()
}

#[cfg(unix)]
fn is_hard_linked(metadata: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.nlink() > 1
}

#[cfg(not(unix))]
const fn is_hard_linked(_: &Metadata) -> bool {
    false
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::onnx::proto::tensor_proto::DataType;

    #[test]
    fn a_data_file_that_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("w.data")).unwrap();
        file.set_len(4).unwrap();
        let files = DataFiles { open: BTreeMap::from([("w.data".to_owned(), (file, 4))]), ..DataFiles::default() };
        let location = StringStringEntryProto { key: "location".into(), value: "w.data".into() };
        let tensor = TensorProto {
            name: "w".into(),
            dims: vec![1],
            data_type: DataType::Float as i32,
            external_data: vec![location],
            ..TensorProto::default()
        };
        let error = files.values(&folder.path().join("model.onnx"), &tensor).unwrap_err().to_string();
        assert!(error.starts_with(&folder.path().join("w.data").display().to_string()), "{error}");
    }
}
