//! Named tensors in `.safetensors` files, for `run`.

use std::path::{Path, PathBuf};

use half::f16;
use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::TensorView};

use crate::file_kind::{FileKind, PREFIX, names_pickle, recognise};
use crate::files::read_whole;
use crate::tensor::{NamedTensors, Tensor, TensorData};

/// Why tensors cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFileError {
    /// The file cannot be read.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The bytes are no safetensors file.
    #[error("{} is no safetensors file: {source}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: SafeTensorError,
    },
    /// The bytes are those of a file that NumPy wrote.
    #[error("{} is {kind} of NumPy, expected a safetensors file", .path.display())]
    Numpy {
        /// The file.
        path: PathBuf,
        /// Which of its files it is.
        kind: &'static str,
    },
    /// The bytes are those of a file of another kind.
    #[error("{} is {kind}, expected a safetensors file", .path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: FileKind,
    },
    /// A tensor has a type that is not read.
    #[error("{}: tensor \"{tensor}\" is {dtype:?}; expected F16, F32, F64, I32 or I64", .path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
    },
    /// Outputs cannot be encoded.
    #[error("outputs cannot be encoded: {0}")]
    Encode(SafeTensorError),
}

/// What [`TensorFileError::Numpy`] calls a file of one array, which has no name.
pub(crate) const NUMPY_ARRAY: &str = "an array (.npy)";

/// Reads the tensors of `path`.
///
/// # Errors
///
/// A file that cannot be read or is no safetensors file, and tensors other than F16, F32, F64, I32 and I64.
pub fn read(path: &Path) -> Result<NamedTensors, TensorFileError> {
    let bytes = read_whole(path).map_err(|source| TensorFileError::Io { path: path.into(), source })?;
    if let Some(kind) = numpy_kind(&bytes) {
        return Err(TensorFileError::Numpy { path: path.into(), kind });
    }
    let file = SafeTensors::deserialize(&bytes).map_err(|source| match other_kind(&bytes) {
        Some(kind) => TensorFileError::Other { path: path.into(), kind },
        None => TensorFileError::Malformed { path: path.into(), source },
    })?;
    let mut tensors = NamedTensors::new();
    for (name, view) in file.iter() {
        let data = decode(&view).ok_or_else(|| TensorFileError::Dtype {
            path: path.into(),
            tensor: name.into(),
            dtype: view.dtype(),
        })?;
        let tensor = Tensor::new(view.shape(), data).map_err(|_| TensorFileError::Malformed {
            path: path.into(),
            source: SafeTensorError::TensorInvalidInfo,
        })?;
        tensors.insert(name.into(), tensor);
    }
    Ok(tensors)
}

/// What `bytes` are that are no safetensors file, where that is known.
fn other_kind(bytes: &[u8]) -> Option<FileKind> {
    let start = bytes.get(..bytes.len().min(PREFIX)).unwrap_or_default();
    match recognise(start)? {
        FileKind::Zip if names_pickle(start) => Some(FileKind::Torch),
        kind => Some(kind),
    }
}

/// Which file of NumPy `bytes` are: one array, or a zip archive that begins with one.
fn numpy_kind(bytes: &[u8]) -> Option<&'static str> {
    let start = bytes.get(..bytes.len().min(PREFIX)).unwrap_or_default();
    match recognise(start)? {
        FileKind::Npy => Some(NUMPY_ARRAY),
        FileKind::Zip if start.windows(4).any(|name| name == b".npy") => Some("an archive (.npz)"),
        _ => None,
    }
}

fn decode(view: &TensorView<'_>) -> Option<TensorData> {
    let (two, _) = view.data().as_chunks::<2>();
    let (four, _) = view.data().as_chunks::<4>();
    let (eight, _) = view.data().as_chunks::<8>();
    match view.dtype() {
        Dtype::F16 => Some(TensorData::F16(two.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect())),
        Dtype::F32 => Some(TensorData::F32(four.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())),
        Dtype::F64 => Some(TensorData::F64(eight.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())),
        Dtype::I32 => Some(TensorData::I32(four.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect())),
        Dtype::I64 => Some(TensorData::I64(eight.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())),
        _ => None,
    }
}

/// The bytes of a safetensors file that holds `tensors`.
///
/// # Errors
///
/// Where the format cannot hold them.
pub fn encode(tensors: &NamedTensors) -> Result<Vec<u8>, TensorFileError> {
    let encoded: Vec<_> =
        tensors.iter().map(|(name, tensor)| (name, tensor.shape(), bytes_of(tensor.data()))).collect();
    let views = encoded
        .iter()
        .map(|(name, shape, (dtype, bytes))| Ok((*name, TensorView::new(*dtype, shape.to_vec(), bytes)?)))
        .collect::<Result<Vec<_>, _>>()
        .map_err(TensorFileError::Encode)?;
    safetensors::serialize(views, None).map_err(TensorFileError::Encode)
}

fn bytes_of(data: &TensorData) -> (Dtype, Vec<u8>) {
    match data {
        TensorData::F16(values) => (Dtype::F16, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        TensorData::F32(values) => (Dtype::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        TensorData::F64(values) => (Dtype::F64, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        TensorData::I32(values) => (Dtype::I32, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        TensorData::I64(values) => (Dtype::I64, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_comes_back_as_it_was_written() {
        let all = [
            TensorData::F16([1.5, -2.0, 65504.0].map(f16::from_f32).to_vec()),
            TensorData::F32(vec![1.5, -0.1, f32::MAX]),
            TensorData::F64(vec![1.5, -0.1, f64::MAX]),
            TensorData::I32(vec![1, -2, i32::MIN]),
            TensorData::I64(vec![1, -2, i64::MAX]),
        ];
        let tensors: NamedTensors = all
            .into_iter()
            .zip(["a", "b", "c", "d", "e"])
            .map(|(data, name)| (name.into(), Tensor::new([3], data).unwrap()))
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let bytes = encode(&tensors).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let stored = SafeTensors::deserialize(&bytes).unwrap();
        let types = ["a", "b", "c", "d", "e"].map(|name| stored.tensor(name).unwrap().dtype());
        assert_eq!(types, [Dtype::F16, Dtype::F32, Dtype::F64, Dtype::I32, Dtype::I64]);
        let found = read(&path).unwrap();
        assert!(
            tensors.iter().all(|(name, tensor)| found.get(name).is_some_and(|found| found.data() == tensor.data()))
        );
    }
}
