//! Types of elements, as the schema, memory and the runtime name them.

use std::borrow::Cow;

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

/// Names of element types by their ONNX code.
const NAMES: [&str; 23] = [
    "undefined",
    "float32",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "string",
    "bool",
    "float16",
    "float64",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8e4m3fn",
    "float8e4m3fnuz",
    "float8e5m2",
    "float8e5m2fnuz",
    "uint4",
    "int4",
];

/// The name of an element type; one that a newer runtime knows is told by its ONNX code.
pub(super) fn element_name(code: i32) -> Cow<'static, str> {
    let name = usize::try_from(code).ok().and_then(|code| NAMES.get(code));
    name.map_or_else(|| format!("ONNX element type {code}").into(), |name| Cow::Borrowed(*name))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_types_have_the_names_of_their_codes() {
        let weights = |weights| NodeTypes { activations: FloatType::F16, weights };
        let named = |element, types| element_name(element_code(element, types) as i32).into_owned();
        for (matrix, name) in [
            (MatrixType::Float(FloatType::F32), "float32"),
            (MatrixType::Float(FloatType::F16), "float16"),
            (MatrixType::Float(FloatType::Bf16), "bfloat16"),
            (MatrixType::Integer(IntegerType::Int8), "int8"),
            (MatrixType::Integer(IntegerType::Int4), "int4"),
        ] {
            assert_eq!(named(ElementType::Weight, weights(matrix)), name);
        }
        let types = weights(MatrixType::Float(FloatType::F32));
        let names = [ElementType::Activation, ElementType::Int32, ElementType::Int64].map(|it| named(it, types));
        assert_eq!(names, ["float16", "int32", "int64"]);
        assert_eq!([23, -1].map(element_name), ["ONNX element type 23", "ONNX element type -1"]);
    }
}
