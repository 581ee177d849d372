//! In which floats a graph stores its weights and computes.

use moa_schema::{AccuracyLevel, IntegerType, MatrixType, NodeTypes};

use crate::FloatType;

/// Floats of a graph.
///
/// Routers, norms and rotary angles are f32 and computed in f32 in each of them, and logits are handed out as f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Everything is f32.
    #[default]
    Fp32,
    /// Weights, activations and key/value caches are f16.
    Fp16,
    /// Trained matrices are stored as bf16; activations, caches and biases are f32.
    Bf16,
    /// As [`Precision::Bf16`], and a kernel may round to bf16 what our operators multiply.
    Bf16Products,
    /// Matrices of experts, of the keys and values that they share, and of the head of a language model are stored in
    /// 8-bit integers with a scale for each column, see [`crate::quantization`]; everything else is f32.
    Int8,
    /// As [`Precision::Int8`], and a kernel may round to int8 what our operators multiply with matrices of integers,
    /// and to bf16 what their attention multiplies.
    Int8Products,
    /// As [`Precision::Int8`], in 4-bit integers with a scale for each 32 rows of a column; the head keeps 8 bits.
    Int4,
    /// As [`Precision::Int4`], and a kernel may round as for [`Precision::Int8Products`].
    Int4Products,
}

impl Precision {
    /// Every precision, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::Fp32,
        Self::Fp16,
        Self::Bf16,
        Self::Bf16Products,
        Self::Int8,
        Self::Int8Products,
        Self::Int4,
        Self::Int4Products,
    ];

    /// Name on the command line and in metadata.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Bf16Products => "bf16-products",
            Self::Int8 => "int8",
            Self::Int8Products => "int8-products",
            Self::Int4 => "int4",
            Self::Int4Products => "int4-products",
        }
    }

    /// The precision that `text` names, if any.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|precision| precision.as_str() == text)
    }

    /// The integers that the matrix of a head is stored in, if it is: a token is chosen by what stands there, so that
    /// it keeps 8 bits beside experts of 4.
    pub const fn head_integers(self) -> Option<IntegerType> {
        match self.integers() {
            Some(_) => Some(IntegerType::Int8),
            None => None,
        }
    }

    /// Whether the head of a language model is an operator of ours, since ONNX Runtime multiplies what it is stored in
    /// on no processor.
    pub const fn has_lm_head(self) -> bool {
        let weights = match self.head_integers() {
            Some(integers) => MatrixType::Integer(integers),
            None => MatrixType::Float(self.weights()),
        };
        NodeTypes { activations: self.activations(), weights }.have_no_matmul()
    }

    /// The integers that matrices which belong to a routed operator of ours are stored in, if they are.
    pub const fn integers(self) -> Option<IntegerType> {
        match self {
            Self::Int8 | Self::Int8Products => Some(IntegerType::Int8),
            Self::Int4 | Self::Int4Products => Some(IntegerType::Int4),
            Self::Fp32 | Self::Fp16 | Self::Bf16 | Self::Bf16Products => None,
        }
    }

    /// Type of trained matrices, projections, experts and embeddings, but for those that are integers.
    pub const fn weights(self) -> FloatType {
        match self {
            Self::Fp32 | Self::Int8 | Self::Int8Products | Self::Int4 | Self::Int4Products => FloatType::F32,
            Self::Fp16 => FloatType::F16,
            Self::Bf16 | Self::Bf16Products => FloatType::Bf16,
        }
    }

    /// Type of activations, key/value caches and biases.
    pub const fn activations(self) -> FloatType {
        match self {
            Self::Fp16 => FloatType::F16,
            Self::Fp32
            | Self::Bf16
            | Self::Bf16Products
            | Self::Int8
            | Self::Int8Products
            | Self::Int4
            | Self::Int4Products => FloatType::F32,
        }
    }

    /// What the nodes of our operators say of their products.
    pub const fn accuracy_level(self) -> AccuracyLevel {
        match self {
            Self::Bf16Products => AccuracyLevel::Bf16,
            Self::Int8Products | Self::Int4Products => AccuracyLevel::Int8,
            Self::Fp32 | Self::Fp16 | Self::Bf16 | Self::Int8 | Self::Int4 => AccuracyLevel::Activations,
        }
    }

    /// The precision that stores the same, and whose nodes say nothing of their products.
    #[must_use]
    pub const fn without_products(self) -> Self {
        match self {
            Self::Bf16 | Self::Bf16Products => Self::Bf16,
            Self::Int8 | Self::Int8Products => Self::Int8,
            Self::Int4 | Self::Int4Products => Self::Int4,
            Self::Fp32 | Self::Fp16 => self,
        }
    }
}
