//! Types of elements, as the schema, memory and the runtime name them.

use moa_schema::{ElementType, FloatType, IntegerType, MatrixType, NodeTypes};
use ort_sys::ONNXTensorElementDataType;

/// What the elements of a parameter are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Float(FloatType),
    Integer(IntegerType),
    Int32,
    Int64,
}

impl Kind {
    pub(super) const fn of(element: ElementType, types: NodeTypes) -> Self {
        match (element, types.weights) {
            (ElementType::Activation, _) => Self::Float(types.activations),
            (ElementType::Weight, MatrixType::Float(float)) => Self::Float(float),
            (ElementType::Weight, MatrixType::Integer(integers)) => Self::Integer(integers),
            (ElementType::Scale, MatrixType::Integer(integers)) => Self::Float(integers.scales()),
            (ElementType::Float32 | ElementType::Scale, _) => Self::Float(FloatType::F32),
            (ElementType::Int32, _) => Self::Int32,
            (ElementType::Int64, _) => Self::Int64,
        }
    }

    /// Width of one element, or of a pair of int4.
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::Float(float) => float.bytes(),
            Self::Integer(_) => size_of::<i8>(),
            Self::Int32 => size_of::<i32>(),
            Self::Int64 => size_of::<i64>(),
        }
    }
}

/// The ONNX code of an element type.
pub(super) fn element_code(element: ElementType, types: NodeTypes) -> ONNXTensorElementDataType {
    match Kind::of(element, types) {
        Kind::Float(FloatType::F32) => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        Kind::Float(FloatType::F16) => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        Kind::Float(FloatType::Bf16) => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        Kind::Integer(IntegerType::Int8) => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        Kind::Integer(IntegerType::Int4) => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4,
        Kind::Int32 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        Kind::Int64 => ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
    }
}
