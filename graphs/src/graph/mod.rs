//! The graph IR: named values with symbolic dimensions, nodes keyed by `(domain, op_type)`, deferred weights.
//!
//! A graph is a plain value in topological order. Nothing here knows how it is stored.

mod builder;
mod data;
mod evaluate;
mod quantized;
mod tables;
mod turn;
mod uses;
mod view;

pub use builder::{Builder, Value};
pub use data::{Data, WeightExpr};
pub use evaluate::{Blocks, Buffers};
pub use quantized::Quantization;
pub use tables::{AngleFunction, RotaryTable, Sinusoids};

use crate::FloatType;
use moa_schema::IntegerType;
use std::{collections::BTreeMap, fmt};

/// Element types that graphs use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DType {
    Float32,
    Float16,
    Bfloat16,
    Int4,
    Int8,
    Int32,
    Int64,
    Bool,
}

impl From<FloatType> for DType {
    fn from(float: FloatType) -> Self {
        match float {
            FloatType::F32 => Self::Float32,
            FloatType::F16 => Self::Float16,
            FloatType::Bf16 => Self::Bfloat16,
        }
    }
}

impl From<IntegerType> for DType {
    fn from(integers: IntegerType) -> Self {
        match integers {
            IntegerType::Int8 => Self::Int8,
            IntegerType::Int4 => Self::Int4,
        }
    }
}

impl DType {
    /// Number of the type in ONNX, as `Cast` takes it.
    pub const fn onnx_number(self) -> i64 {
        match self {
            Self::Float32 => 1,
            Self::Int8 => 3,
            Self::Int32 => 6,
            Self::Int64 => 7,
            Self::Bool => 9,
            Self::Float16 => 10,
            Self::Bfloat16 => 16,
            Self::Int4 => 22,
        }
    }

    /// Bytes of so many elements: of 4-bit integers two share one, and the last may be alone in its own.
    pub const fn bytes(self, elements: u64) -> u64 {
        match self {
            Self::Int4 => elements.div_ceil(2),
            Self::Bool | Self::Int8 => elements,
            Self::Float16 | Self::Bfloat16 => 2 * elements,
            Self::Float32 | Self::Int32 => 4 * elements,
            Self::Int64 => 8 * elements,
        }
    }
}

/// One dimension of a graph input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dim {
    /// Known when the graph is built.
    Fixed(usize),
    /// Known when it runs; equal names are equal sizes.
    Symbolic(String),
    /// Of a value in between, whose size a runtime finds: tract takes a name there for one that it must prove.
    Unknown,
}

impl From<usize> for Dim {
    fn from(size: usize) -> Self {
        Self::Fixed(size)
    }
}

impl From<&str> for Dim {
    fn from(name: &str) -> Self {
        Self::Symbolic(name.into())
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(size) => write!(f, "{size}"),
            Self::Unknown => f.write_str("?"),
            Self::Symbolic(name) => f.write_str(name),
        }
    }
}

/// A graph input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueInfo {
    /// Name that callers use.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<Dim>,
}

/// Operator identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpId {
    /// Domain; empty for standard ONNX.
    pub domain: String,
    /// Operator type.
    pub op_type: String,
}

/// One node attribute.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Attribute {
    Int(i64),
    Float(f32),
    Text(String),
    Ints(Vec<i64>),
    Tensor(Constant),
}

/// A small literal tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Constant {
    /// Dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// Values in row-major order.
    pub values: ConstantValues,
}

/// Values of a [`Constant`].
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum ConstantValues {
    Float32(Vec<f32>),
    Float16(Vec<half::f16>),
    Int64(Vec<i64>),
}

/// One operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Unique name; for an operator of ours, the routed module.
    pub name: String,
    /// What it does.
    pub op: OpId,
    /// Names of values; an empty name is an absent optional input.
    pub inputs: Vec<String>,
    /// Names of values; an empty name is an output that nobody reads.
    pub outputs: Vec<String>,
    /// Attributes by name.
    pub attributes: BTreeMap<String, Attribute>,
}

/// A constant of the graph.
#[derive(Debug, Clone)]
pub struct Initializer {
    /// Name of the value.
    pub name: String,
    /// The values, or a way to them.
    pub data: Data,
}

impl Initializer {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Dimensions.
    pub fn shape(&self) -> Vec<usize> {
        self.data.shape()
    }

    /// Bytes of the values.
    pub fn bytes(&self) -> u64 {
        self.dtype().bytes(self.shape().iter().map(|dim| *dim as u64).product())
    }
}

/// An operator's meaning in standard operators.
#[derive(Debug, Clone, PartialEq)]
pub struct Function {
    /// Operator that it defines.
    pub op: OpId,
    /// Formal inputs.
    pub inputs: Vec<String>,
    /// Formal outputs.
    pub outputs: Vec<String>,
    /// Names of the attributes that callers may set.
    pub attributes: Vec<String>,
    /// Body in topological order.
    pub nodes: Vec<Node>,
}

/// A whole graph.
#[derive(Debug, Clone)]
pub struct Graph {
    /// Name.
    pub name: String,
    /// What callers give.
    pub inputs: Vec<ValueInfo>,
    /// What callers get.
    pub outputs: Vec<ValueInfo>,
    /// Types and shapes of values in between that no tool can infer, since they come from operators of ours.
    pub values: Vec<ValueInfo>,
    /// Constants, in order of first use.
    pub initializers: Vec<Initializer>,
    /// Operations in topological order.
    pub nodes: Vec<Node>,
    /// Operator bodies, at most one per operator.
    pub functions: Vec<Function>,
}
