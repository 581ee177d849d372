//! Trained tensors: described at once, read only when their values are needed.

use std::{
    fmt,
    ops::{ControlFlow, Range},
    sync::Arc,
};

use crate::{FloatType, Rounding};

/// Why the values of a tensor cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// The bytes could not be read.
    #[error("{origin}: tensor \"{tensor}\" cannot be read: {source}")]
    Io {
        /// File that holds the tensor.
        origin: String,
        /// Name of the tensor.
        tensor: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The elements are of no type that weights have.
    #[error("{origin}: tensor \"{tensor}\" has the element type {found}, and weights are F16, BF16, F32, F64")]
    ElementType {
        /// File that holds the tensor.
        origin: String,
        /// Name of the tensor.
        tensor: String,
        /// The type.
        found: String,
    },
    /// The bytes are not those that were stored.
    #[error("{origin}: tensor \"{tensor}\" is damaged: {what}")]
    Damaged {
        /// File that holds the tensor.
        origin: String,
        /// Name of the tensor.
        tensor: String,
        /// What shows it.
        what: String,
    },
    /// The file is another one than when it was opened.
    #[error("{origin}: the file changed while its tensor \"{tensor}\" was read")]
    Changed {
        /// File that holds the tensor.
        origin: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// The tensor has a shape and no values.
    #[error("{origin}: only the shape of tensor \"{tensor}\" is known")]
    NoValues {
        /// Where the shape is from.
        origin: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// A weight is NaN or infinite as f32.
    #[error(
        "{origin}: tensor \"{tensor}\" holds {count} {} NaN or infinite as f32, the first at index {first}",
        if *.count == 1 { "value that is" } else { "values that are" }
    )]
    NonFinite {
        /// File that holds the tensor.
        origin: String,
        /// Name of the tensor.
        tensor: String,
        /// How many such values.
        count: usize,
        /// Row-major index of the first one.
        first: usize,
    },
    /// A weight would become infinite in the type that it is written in.
    #[error(
        "{origin}: tensor \"{tensor}\" holds {value} at index {index}, and the largest {to} is {}", .to.largest()
    )]
    OutOfRange {
        /// File that holds the tensor.
        origin: String,
        /// Name of the tensor.
        tensor: String,
        /// The value.
        value: f64,
        /// Row-major index of the first such value.
        index: usize,
        /// The type that it was to be written in.
        to: FloatType,
    },
}

/// Runs of neighbouring elements of a tensor in row-major order, equally long and equally far apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// Index of the first element of the first run.
    pub start: usize,
    /// Elements of one run.
    pub length: usize,
    /// Number of runs.
    pub count: usize,
    /// Elements from the start of one run to the start of the next; at least `length`.
    pub stride: usize,
}

impl Runs {
    /// `length` neighbouring elements.
    pub const fn one(start: usize, length: usize) -> Self {
        Self { start, length, count: 1, stride: length }
    }

    /// Elements of all runs.
    pub const fn elements(self) -> usize {
        self.length * self.count
    }

    /// The same elements, as one run where no other element lies between them.
    #[must_use]
    pub const fn joined(self) -> Self {
        if self.length == self.stride { Self::one(self.start, self.elements()) } else { self }
    }
}

/// Reads the values of one stored tensor, in row-major order.
pub trait TensorSource: Send + Sync {
    /// All values as f32: f16 and bf16 widened exactly, f64 rounded once to nearest.
    ///
    /// # Errors
    ///
    /// Where the values cannot be read; [`WeightError::NonFinite`] where a value is NaN or infinite as f32.
    fn read_f32(&self) -> Result<Vec<f32>, WeightError>;

    /// All values as f64, exact for every stored type.
    ///
    /// # Errors
    ///
    /// Where the values cannot be read; [`WeightError::NonFinite`] where a value is NaN or infinite as it is stored.
    fn read_f64(&self) -> Result<Vec<f64>, WeightError>;

    /// The values `part` as f64, exact for every stored type; unless overridden, all values are read for it.
    ///
    /// # Errors
    ///
    /// As [`Self::read_f64`].
    fn read_f64_part(&self, part: Range<usize>) -> Result<Vec<f64>, WeightError> {
        Ok(self.read_f64()?.get(part).unwrap_or_default().to_vec())
    }

    /// Appends the values of `runs` to `out` as `to`, little-endian, each rounded once to nearest, ties to even.
    ///
    /// # Errors
    ///
    /// As [`Self::read_f32`], and [`WeightError::OutOfRange`] where a value would become infinite. Which values are
    /// named does not depend on `runs`.
    fn read_runs(&self, runs: Runs, to: FloatType, out: &mut Vec<u8>) -> Result<(), WeightError>;

    /// Name of the stored element type, such as `BF16`.
    fn stored_type(&self) -> &'static str;

    /// Bytes of the stored values.
    fn stored_bytes(&self) -> u64;

    /// Gives the stored bytes, little-endian, block by block to `sink`, until it breaks; empty blocks ask whether to go
    /// on.
    ///
    /// # Errors
    ///
    /// Where the bytes cannot be read.
    fn read_bytes(&self, sink: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), WeightError>;
}

/// The tensors of one checkpoint, by name.
pub trait TensorDirectory {
    /// Every stored name, sorted.
    fn names(&self) -> Vec<&str>;

    /// Every further name of a stored tensor, sorted.
    fn aliases(&self) -> Vec<&str> {
        Vec::new()
    }

    /// The tensor stored under `name`, or under the name that the checkpoint says `name` is an alias of.
    fn tensor(&self, name: &str) -> Option<Weight>;

    /// The name under which the tensor that is called `name` here is, or would be, stored.
    fn stored_name(&self, name: &str) -> String {
        name.into()
    }

    /// What messages call the place where tensors are looked for: a file or folder.
    fn origin(&self) -> &str;

    /// Makes the tensor `name`, where no file says which tensors there are; see [`crate::SyntheticTensors`].
    fn make(&self, _name: &str, _shape: &[usize]) -> Option<Weight> {
        None
    }

    /// Whether [`Self::make`] makes what is asked for.
    fn is_synthetic(&self) -> bool {
        false
    }
}

/// One trained tensor: name, shape, and a way to its values.
#[derive(Clone)]
pub struct Weight {
    name: String,
    shape: Vec<usize>,
    origin: String,
    source: Arc<dyn TensorSource>,
}

impl Weight {
    /// Describes a tensor of `shape` stored as `name` in the file `origin`.
    pub fn new(
        name: impl Into<String>,
        shape: Vec<usize>,
        origin: impl Into<String>,
        source: Arc<dyn TensorSource>,
    ) -> Self {
        Self { name: name.into(), shape, origin: origin.into(), source }
    }

    /// The same tensor under another name.
    pub(crate) fn renamed(self, name: String) -> Self {
        Self { name, ..self }
    }

    /// Name in the checkpoint, without what may stand before the names of all; see [`TensorDirectory::stored_name`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// File that holds the tensor.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Name of the stored element type; see [`TensorSource::stored_type`].
    pub fn stored_type(&self) -> &'static str {
        self.source.stored_type()
    }

    /// Bytes of the stored values.
    pub fn stored_bytes(&self) -> u64 {
        self.source.stored_bytes()
    }

    /// Gives the stored bytes to `sink`; see [`TensorSource::read_bytes`].
    ///
    /// # Errors
    ///
    /// As [`TensorSource::read_bytes`].
    pub fn read_bytes(&self, sink: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), WeightError> {
        self.source.read_bytes(sink)
    }

    /// Appends some of the values to `out`; see [`TensorSource::read_runs`].
    ///
    /// # Errors
    ///
    /// As [`TensorSource::read_runs`].
    pub fn read_runs(&self, runs: Runs, to: FloatType, out: &mut Vec<u8>) -> Result<(), WeightError> {
        self.source.read_runs(runs, to, out)
    }

    /// All values as f32, row-major; see [`TensorSource::read_f32`].
    ///
    /// # Errors
    ///
    /// As [`TensorSource::read_f32`].
    pub fn to_f32(&self) -> Result<Vec<f32>, WeightError> {
        self.source.read_f32()
    }

    /// All values as f64, row-major; see [`TensorSource::read_f64`].
    ///
    /// # Errors
    ///
    /// As [`TensorSource::read_f64`].
    pub fn to_f64(&self) -> Result<Vec<f64>, WeightError> {
        self.source.read_f64()
    }

    /// Some of the values as f64; see [`TensorSource::read_f64_part`].
    ///
    /// # Errors
    ///
    /// As [`TensorSource::read_f64_part`].
    pub fn part_to_f64(&self, part: Range<usize>) -> Result<Vec<f64>, WeightError> {
        self.source.read_f64_part(part)
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({:?} {:?})", self.name, self.shape)
    }
}
