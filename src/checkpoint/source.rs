//! The values of one stored tensor, read and converted when they are asked for.

use std::{io, sync::Arc};

use half::{bf16, f16};
use moa_graphs::{TensorSource, Weight, WeightError};

use super::{dtype::Dtype, input::InputFile, torch::View};

/// Appends the values of little-endian bytes.
type Decoder<T> = fn(&[u8], &mut Vec<T>);

/// Where the values of a tensor are.
#[derive(Debug)]
pub(super) enum Place {
    /// Side by side in a file, from this byte on.
    Range { file: Arc<InputFile>, offset: u64, bytes: u64 },
    /// In a storage of a PyTorch file.
    View(View),
}

impl Place {
    fn file(&self) -> &InputFile {
        match self {
            Self::Range { file, .. } => file,
            Self::View(view) => view.file(),
        }
    }

    /// Gives the values in row-major order to `take`, in blocks of whole elements.
    fn read_blocks(&self, take: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        match self {
            Self::Range { file, offset, bytes } => {
                file.read_blocks(*offset, *bytes, take).map_err(|error| error.into_io())
            }
            Self::View(view) => view.read_blocks(take),
        }
    }
}

/// A tensor of a checkpoint, and where it is.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) place: Arc<Place>,
}

impl Stored {
    /// The tensor as a weight called `name`.
    pub(super) fn weight(&self, name: &str) -> Weight {
        let elements = self.shape.iter().product();
        let source = StoredTensor { name: name.into(), dtype: self.dtype, elements, place: Arc::clone(&self.place) };
        Weight::new(name, self.shape.clone(), self.place.file().shown(), Arc::new(source))
    }
}

/// The values of a stored tensor.
struct StoredTensor {
    name: String,
    dtype: Dtype,
    elements: usize,
    place: Arc<Place>,
}

impl StoredTensor {
    fn origin(&self) -> String {
        self.place.file().shown().into()
    }

    fn unreadable(&self, source: io::Error) -> WeightError {
        WeightError::Io { origin: self.origin(), tensor: self.name.clone(), source }
    }

    fn read<T>(&self, decode: Option<Decoder<T>>, is_finite: fn(&T) -> bool) -> Result<Vec<T>, WeightError> {
        let Some(decode) = decode else {
            let text = format!(
                "element type {} is not supported (supported: F16, BF16, F32, F64); dequantise first",
                self.dtype
            );
            return Err(self.unreadable(io::Error::new(io::ErrorKind::Unsupported, text)));
        };
        let mut values = Vec::new();
        values.try_reserve_exact(self.elements).map_err(|error| self.unreadable(error.into()))?;
        let (mut count, mut first) = (0, None);
        let read = self.place.read_blocks(&mut |block| {
            let start = values.len();
            decode(block, &mut values);
            for (index, value) in values.iter().enumerate().skip(start) {
                if !is_finite(value) {
                    count += 1;
                    first.get_or_insert(index);
                }
            }
        });
        read.map_err(|error| self.unreadable(error))?;
        match first {
            None => Ok(values),
            Some(first) => {
                let (origin, tensor) = (self.origin(), self.name.clone());
                Err(WeightError::NonFinite { origin, tensor, count, first })
            }
        }
    }
}

impl TensorSource for StoredTensor {
    fn read_f32(&self) -> Result<Vec<f32>, WeightError> {
        self.read(f32_decoder(self.dtype), |value| value.is_finite())
    }

    fn read_f64(&self) -> Result<Vec<f64>, WeightError> {
        self.read(f64_decoder(self.dtype), |value| value.is_finite())
    }

    fn stored_type(&self) -> &'static str {
        self.dtype.name()
    }

    fn read_bytes(&self, sink: &mut dyn FnMut(&[u8])) -> Result<(), WeightError> {
        self.place.read_blocks(sink).map_err(|error| self.unreadable(error))
    }
}

#[allow(clippy::cast_possible_truncation)]
fn f32_decoder(dtype: Dtype) -> Option<Decoder<f32>> {
    let decoder: Decoder<f32> = match dtype {
        Dtype::F16 => |bytes, values| extend(bytes, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::BF16 => |bytes, values| extend(bytes, values, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Dtype::F32 => |bytes, values| extend(bytes, values, f32::from_le_bytes),
        Dtype::F64 => |bytes, values| extend(bytes, values, |bytes| f64::from_le_bytes(bytes) as f32),
        _ => return None,
    };
    Some(decoder)
}

fn f64_decoder(dtype: Dtype) -> Option<Decoder<f64>> {
    let decoder: Decoder<f64> = match dtype {
        Dtype::F16 => |bytes, values| extend(bytes, values, |bytes| f16::from_le_bytes(bytes).to_f64()),
        Dtype::BF16 => |bytes, values| extend(bytes, values, |bytes| bf16::from_le_bytes(bytes).to_f64()),
        Dtype::F32 => |bytes, values| extend(bytes, values, |bytes| f32::from_le_bytes(bytes).into()),
        Dtype::F64 => |bytes, values| extend(bytes, values, f64::from_le_bytes),
        _ => return None,
    };
    Some(decoder)
}

fn extend<const WIDTH: usize, T>(bytes: &[u8], values: &mut Vec<T>, convert: impl Fn([u8; WIDTH]) -> T) {
    let (elements, _) = bytes.as_chunks();
    values.extend(elements.iter().map(|element| convert(*element)));
}
