//! Named tensors: what goes into a model and what comes out of it, on every backend.

use std::collections::BTreeMap;

use half::f16;

/// Tensors by input or output name.
pub type NamedTensors = BTreeMap<String, Tensor>;

/// A dense row-major tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: TensorData,
}

/// Values of a tensor.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum TensorData {
    F16(Vec<f16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl TensorData {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F16(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::I64(values) => values.len(),
        }
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type as messages name it.
    pub const fn type_name(&self) -> &'static str {
        match self {
            Self::F16(_) => "float16",
            Self::F32(_) => "float32",
            Self::F64(_) => "float64",
            Self::I32(_) => "int32",
            Self::I64(_) => "int64",
        }
    }
}

/// The number of values does not fit the shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{values} values do not make a tensor of shape {shape:?}")]
pub struct TensorShapeError {
    /// Number of values given.
    pub values: usize,
    /// Shape asked for.
    pub shape: Vec<usize>,
}

impl Tensor {
    /// A tensor of `shape`.
    ///
    /// # Errors
    ///
    /// Where `data` holds another number of values than `shape` has.
    pub fn new(shape: impl Into<Vec<usize>>, data: TensorData) -> Result<Self, TensorShapeError> {
        let shape = shape.into();
        let size = shape.iter().try_fold(1usize, |size, dim| size.checked_mul(*dim));
        if size == Some(data.len()) {
            return Ok(Self { shape, data });
        }
        Err(TensorShapeError { values: data.len(), shape })
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The values.
    pub const fn data(&self) -> &TensorData {
        &self.data
    }

    /// All values as f64.
    #[allow(clippy::cast_precision_loss)]
    pub fn to_f64(&self) -> Vec<f64> {
        match &self.data {
            TensorData::F16(values) => values.iter().map(|value| value.to_f64()).collect(),
            TensorData::F32(values) => values.iter().map(|value| f64::from(*value)).collect(),
            TensorData::F64(values) => values.clone(),
            TensorData::I32(values) => values.iter().map(|value| f64::from(*value)).collect(),
            TensorData::I64(values) => values.iter().map(|value| *value as f64).collect(),
        }
    }

    /// Whether the tensor holds floats.
    pub const fn is_float(&self) -> bool {
        matches!(self.data, TensorData::F16(_) | TensorData::F32(_) | TensorData::F64(_))
    }

    /// The same tensor with f32 values rounded to f16, to nearest, ties to even; others stay as they are.
    #[must_use]
    pub fn to_f16(&self) -> Self {
        let data = match &self.data {
            TensorData::F32(values) => TensorData::F16(values.iter().copied().map(f16::from_f32).collect()),
            other => other.clone(),
        };
        Self { shape: self.shape.clone(), data }
    }

    /// The values where the tensor holds 64-bit integers.
    pub fn as_i64(&self) -> Option<&[i64]> {
        if let TensorData::I64(values) = &self.data { Some(values) } else { None }
    }

    /// The values where the tensor holds f32.
    pub fn as_f32(&self) -> Option<&[f32]> {
        if let TensorData::F32(values) = &self.data { Some(values) } else { None }
    }

    /// The values where the tensor holds f64.
    pub fn as_f64(&self) -> Option<&[f64]> {
        if let TensorData::F64(values) = &self.data { Some(values) } else { None }
    }
}

/// Where the value with the number `index` of a tensor of such a shape stands.
pub(crate) fn coordinates(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut result = vec![0; shape.len()];
    for (place, size) in result.iter_mut().zip(shape).rev() {
        *place = index % size.max(&1);
        index /= size.max(&1);
    }
    result
}
