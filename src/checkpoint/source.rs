//! The values of one stored tensor, read and converted when they are asked for.

use std::{
    ops::{ControlFlow, Range},
    sync::Arc,
};

use half::{bf16, f16};
use moa_graphs::{FloatType, Rounding, Runs, TensorSource, Weight, WeightError};

use super::{
    dtype::Dtype,
    input::{InputFile, Pieces, ReadError},
    torch::View,
};

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
    pub(super) fn file(&self) -> &InputFile {
        match self {
            Self::Range { file, .. } => file,
            Self::View(view) => view.file(),
        }
    }

    /// Bytes of all values.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Range { bytes, .. } => *bytes,
            Self::View(view) => view.bytes(),
        }
    }

    /// Gives the bytes of `pieces`, counted from the first value in row-major order, to `take`, in blocks of whole
    /// elements, which may be empty, until it breaks.
    fn read_pieces(&self, pieces: Pieces, take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), ReadError> {
        match self {
            Self::Range { file, offset, .. } => {
                let pieces = Pieces { offset: offset + pieces.offset, ..pieces };
                file.read_pieces(pieces, take)
            }
            Self::View(view) => view.read_pieces(pieces, take),
        }
    }

    /// Gives all values in row-major order to `take`, in blocks of whole elements,
    /// until it breaks.
    fn read_blocks(&self, take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), ReadError> {
        let bytes = self.bytes();
        self.read_pieces(Pieces { offset: 0, bytes, count: 1, stride: bytes }, take)
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

    /// Bytes of so many elements.
    const fn bytes(&self, elements: usize) -> u64 {
        elements as u64 * self.dtype.bits() / 8
    }

    fn unreadable(&self, error: ReadError) -> WeightError {
        error.of_tensor(self.origin(), self.name.clone())
    }

    fn unsupported(&self) -> WeightError {
        WeightError::ElementType { origin: self.origin(), tensor: self.name.clone(), found: self.dtype.to_string() }
    }

    /// Why the values do not fit `to` or are not finite, found by looking at all of them.
    fn misfit(&self, is_finite: fn(f64) -> bool, to: FloatType) -> WeightError {
        let (mut seen, mut count, mut first, mut out_of_range) = (0, 0, None, None);
        let Some(decode) = f64_decoder(self.dtype) else { return self.unsupported() };
        let mut values = Vec::new();
        let read = self.place.read_blocks(&mut |block| {
            values.clear();
            decode(block, &mut values);
            for value in &values {
                if !is_finite(*value) {
                    count += 1;
                    first.get_or_insert(seen);
                } else if !to.holds(*value) {
                    out_of_range.get_or_insert((seen, *value));
                }
                seen += 1;
            }
            ControlFlow::Continue(())
        });
        let (origin, tensor) = (self.origin(), self.name.clone());
        match (read, first, out_of_range) {
            (Err(error), ..) => self.unreadable(error),
            (_, Some(first), _) => WeightError::NonFinite { origin, tensor, count, first },
            (_, None, Some((index, value))) => WeightError::OutOfRange { origin, tensor, value, index, to },
            (_, None, None) => self.unreadable(ReadError::Changed),
        }
    }

    fn read<T>(&self, decode: Option<Decoder<T>>, is_finite: fn(&T) -> bool) -> Result<Vec<T>, WeightError> {
        let decode = decode.ok_or_else(|| self.unsupported())?;
        let mut values = Vec::new();
        values.try_reserve_exact(self.elements).map_err(|error| self.unreadable(ReadError::Io(error.into())))?;
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
            ControlFlow::Continue(())
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

    fn read_f64_part(&self, part: Range<usize>) -> Result<Vec<f64>, WeightError> {
        let decode = f64_decoder(self.dtype).ok_or_else(|| self.unsupported())?;
        let (offset, bytes) = (self.bytes(part.start), self.bytes(part.len()));
        let mut values = Vec::with_capacity(part.len());
        let read = self.place.read_pieces(Pieces { offset, bytes, count: 1, stride: bytes }, &mut |block| {
            decode(block, &mut values);
            ControlFlow::Continue(())
        });
        read.map_err(|error| self.unreadable(error))?;
        if values.iter().all(|value| value.is_finite()) {
            return Ok(values);
        }
        Err(self.misfit(f64::is_finite, FloatType::F32))
    }

    fn read_runs(&self, runs: Runs, to: FloatType, out: &mut Vec<u8>) -> Result<(), WeightError> {
        let mut converter = Converter::new(self.dtype, to).ok_or_else(|| self.unsupported())?;
        let (offset, length, stride) = (self.bytes(runs.start), self.bytes(runs.length), self.bytes(runs.stride));
        out.reserve(runs.elements() * to.bytes());
        let mut fits = true;
        let pieces = Pieces { offset, bytes: length, count: runs.count as u64, stride };
        let read = self.place.read_pieces(pieces, &mut |block| {
            fits &= converter.append(block, to, out);
            ControlFlow::Continue(())
        });
        read.map_err(|error| self.unreadable(error))?;
        if fits { Ok(()) } else { Err(self.misfit(|value| FloatType::F32.holds(value), to)) }
    }

    fn stored_type(&self) -> &'static str {
        self.dtype.name()
    }

    fn stored_bytes(&self) -> u64 {
        self.place.bytes()
    }

    fn read_bytes(&self, sink: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), WeightError> {
        self.place.read_blocks(sink).map_err(|error| self.unreadable(error))
    }
}

/// Rounds blocks of stored values to another type.
enum Converter {
    /// The bytes stay as they are.
    Copy(fn(&[u8]) -> bool),
    /// The values are exact as f32.
    Single(Decoder<f32>, Vec<f32>),
    Double(Decoder<f64>, Vec<f64>),
}

impl Converter {
    fn new(from: Dtype, to: FloatType) -> Option<Self> {
        Some(match (from, to) {
            (Dtype::F32, FloatType::F32) => {
                Self::Copy(|bytes| all(bytes, |value| f32::from_le_bytes(value).is_finite()))
            }
            (Dtype::F16, FloatType::F16) => {
                Self::Copy(|bytes| all(bytes, |value| f16::from_le_bytes(value).is_finite()))
            }
            (Dtype::BF16, FloatType::Bf16) => {
                Self::Copy(|bytes| all(bytes, |value| bf16::from_le_bytes(value).is_finite()))
            }
            (Dtype::F64, _) => Self::Double(f64_decoder(from)?, Vec::new()),
            _ => Self::Single(f32_decoder(from)?, Vec::new()),
        })
    }

    /// Appends `block` to `out` as `to`; `false` where a value does not fit.
    fn append(&mut self, block: &[u8], to: FloatType, out: &mut Vec<u8>) -> bool {
        match self {
            Self::Copy(is_finite) => {
                out.extend_from_slice(block);
                is_finite(block)
            }
            Self::Single(decode, values) => {
                values.clear();
                decode(block, values);
                to.append(values, out).is_ok()
            }
            Self::Double(decode, values) => {
                values.clear();
                decode(block, values);
                to.append_f64(values, out).is_ok()
            }
        }
    }
}

/// Whether `holds` is true of every element; looks at all of them, which is faster than to stop.
fn all<const WIDTH: usize>(bytes: &[u8], holds: impl Fn([u8; WIDTH]) -> bool) -> bool {
    let (elements, _) = bytes.as_chunks();
    elements.iter().fold(true, |all, element| all & holds(*element))
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
