//! Graph → `ModelProto`: mechanical, without a decision left.

use std::io;

use moa_graphs::{
    WeightError,
    graph::{Attribute, Buffers, Constant, DType, Data, Dim, Function, Graph, Initializer, Node, ValueInfo},
};
use prost::bytes::Bytes;

use super::encoded::{Encoded, EncodedTensor};
use super::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto::AttributeType,
    tensor_proto::{DataLocation, DataType},
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};

/// Versions of the standard operator set that can be written.
pub const OPSETS: std::ops::RangeInclusive<i64> = 18..=21;

/// IR version: the newest that ONNX Runtime 1.17 reads.
const IR_VERSION: i64 = 9;

/// The IR version that began with 4-bit integers.
const INT4_IR_VERSION: i64 = 10;

/// Initializers smaller than this stay in the model file.
const SMALLEST_EXTERNAL_BYTES: u64 = 1024;

/// Alignment of tensors in the data file, so that a runtime may map them.
const ALIGNMENT: u64 = 4096;

/// Weights beyond this many bytes go to a data file of their own unless the user says otherwise: protobuf
/// ends at 2 GiB.
pub const INLINE_LIMIT: u64 = 1_500_000_000;

/// Why a graph has no bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// A trained weight cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// Values cannot be written.
    #[error("weights cannot be written: {0}")]
    Data(#[from] io::Error),
    /// Protobuf cannot hold the model.
    #[error("the model needs {bytes} bytes in one file, and protobuf ends at 2147483647")]
    TooLarge {
        /// Encoded size.
        bytes: u64,
    },
}

/// Receives the values of large initializers.
pub struct DataFile<'a> {
    /// File name beside the model.
    pub location: String,
    /// Where bytes go.
    pub writer: &'a mut dyn io::Write,
    /// Bytes written so far.
    pub position: u64,
    /// Where blocks are made.
    pub buffers: Buffers,
}

impl DataFile<'_> {
    /// Appends the values of a tensor at the next aligned offset, block by block, and returns that offset.
    fn append(&mut self, data: &Data) -> Result<u64, EncodeError> {
        let offset = self.position.next_multiple_of(ALIGNMENT);
        io::copy(&mut io::Read::take(io::repeat(0), offset - self.position), self.writer)?;
        self.position = offset;
        let mut blocks = data.blocks(&mut self.buffers);
        while let Some(block) = blocks.next_block()? {
            self.writer.write_all(block)?;
            self.position += block.len() as u64;
        }
        Ok(offset)
    }
}

/// Bytes of all initializers of a graph.
pub fn weight_bytes(graph: &Graph) -> u64 {
    graph.initializers.iter().map(Initializer::bytes).sum()
}

/// Encodes `graph` with version `opset` of the standard operator set; with `data`, large initializers go there as
/// they are read. The others stay where they are until [`Encoded::write`].
///
/// The same graph and options give the same bytes.
///
/// # Errors
///
/// A weight that cannot be read or does not fit its type, a data file that cannot be written, a model over 2 GiB.
pub fn encode<'a>(graph: &'a Graph, opset: i64, mut data: Option<DataFile<'_>>) -> Result<Encoded<'a>, EncodeError> {
    let initializers = graph
        .initializers
        .iter()
        .map(|initializer| encode_initializer(initializer, data.as_mut()))
        .collect::<Result<_, _>>()?;
    Encoded::new(structure(graph, opset), initializers)
}

/// The message of `graph`, without its weights.
pub fn structure(graph: &Graph, opset: i64) -> ModelProto {
    ModelProto {
        ir_version: ir_version(graph),
        producer_name: env!("CARGO_PKG_NAME").into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        graph: Some(GraphProto {
            name: graph.name.clone(),
            node: graph.nodes.iter().map(encode_node).collect(),
            input: graph.inputs.iter().map(encode_value_info).collect(),
            output: graph.outputs.iter().map(encode_value_info).collect(),
            value_info: graph.values.iter().map(encode_value_info).collect(),
            ..GraphProto::default()
        }),
        opset_import: opset_imports(graph, opset),
        functions: graph.functions.iter().map(|function| encode_function(function, opset)).collect(),
        ..ModelProto::default()
    }
}

fn ir_version(graph: &Graph) -> i64 {
    let has_int4 = graph.initializers.iter().any(|initializer| initializer.dtype() == DType::Int4);
    if has_int4 { INT4_IR_VERSION } else { IR_VERSION }
}

fn opset_imports(graph: &Graph, opset: i64) -> Vec<OperatorSetIdProto> {
    let mut imports = vec![OperatorSetIdProto { domain: String::new(), version: opset }];
    if graph.nodes.iter().any(|node| node.op.domain == moa_schema::DOMAIN) {
        imports.push(OperatorSetIdProto { domain: moa_schema::DOMAIN.into(), version: moa_schema::OPSET_VERSION });
    }
    if graph.nodes.iter().any(|node| node.op.domain == moa_schema::RUNTIME_DOMAIN) {
        imports.push(OperatorSetIdProto { domain: moa_schema::RUNTIME_DOMAIN.into(), version: 1 });
    }
    imports
}

pub(super) fn entry(key: &str, value: &str) -> StringStringEntryProto {
    StringStringEntryProto { key: key.into(), value: value.into() }
}

#[allow(clippy::cast_possible_wrap)]
fn encode_dims(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|dim| *dim as i64).collect()
}

/// The element type of ONNX.
pub(crate) const fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::Float32 => DataType::Float,
        DType::Int4 => DataType::Int4,
        DType::Int8 => DataType::Int8,
        DType::Int32 => DataType::Int32,
        DType::Int64 => DataType::Int64,
        DType::Bool => DataType::Bool,
        DType::Float16 => DataType::Float16,
        DType::Bfloat16 => DataType::Bfloat16,
    }
}

fn encode_initializer<'a>(
    initializer: &'a Initializer,
    data: Option<&mut DataFile<'_>>,
) -> Result<EncodedTensor<'a>, EncodeError> {
    let mut tensor = TensorProto {
        name: initializer.name.clone(),
        dims: encode_dims(&initializer.shape()),
        data_type: data_type(initializer.dtype()) as i32,
        ..TensorProto::default()
    };
    let bytes = initializer.bytes();
    match data {
        Some(file) if bytes >= SMALLEST_EXTERNAL_BYTES => {
            let offset = file.append(&initializer.data)?;
            tensor.data_location = DataLocation::External as i32;
            tensor.external_data = vec![
                entry("location", &file.location),
                entry("offset", &offset.to_string()),
                entry("length", &bytes.to_string()),
            ];
            Ok(EncodedTensor { tensor, values: None })
        }
        _ => Ok(EncodedTensor { tensor, values: Some((&initializer.data, bytes)) }),
    }
}

#[allow(clippy::cast_possible_wrap)]
fn encode_value_info(value: &ValueInfo) -> ValueInfoProto {
    let dim = |dim: &Dim| Dimension {
        value: match dim {
            Dim::Fixed(size) => Some(dimension::Value::DimValue(*size as i64)),
            Dim::Symbolic(name) => Some(dimension::Value::DimParam(name.clone())),
            Dim::Unknown => None,
        },
    };
    let tensor = type_proto::Tensor {
        elem_type: data_type(value.dtype) as i32,
        shape: Some(TensorShapeProto { dim: value.shape.iter().map(dim).collect() }),
    };
    ValueInfoProto {
        name: value.name.clone(),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)) }),
        ..ValueInfoProto::default()
    }
}

fn encode_node(node: &Node) -> NodeProto {
    NodeProto {
        name: node.name.clone(),
        op_type: node.op.op_type.clone(),
        domain: node.op.domain.clone(),
        input: node.inputs.clone(),
        output: node.outputs.clone(),
        attribute: node.attributes.iter().map(|(name, value)| encode_attribute(name, value)).collect(),
        ..NodeProto::default()
    }
}

fn encode_attribute(name: &str, value: &Attribute) -> AttributeProto {
    let mut proto = AttributeProto { name: name.into(), ..AttributeProto::default() };
    let kind = match value {
        Attribute::Int(value) => {
            proto.i = Some(*value);
            AttributeType::Int
        }
        Attribute::Float(value) => {
            proto.f = Some(*value);
            AttributeType::Float
        }
        Attribute::Text(value) => {
            proto.s = Some(value.clone().into_bytes());
            AttributeType::String
        }
        Attribute::Ints(values) => {
            proto.ints.clone_from(values);
            AttributeType::Ints
        }
        Attribute::Tensor(constant) => {
            proto.t = Some(encode_constant(constant));
            AttributeType::Tensor
        }
    };
    proto.r#type = kind as i32;
    proto
}

fn encode_constant(constant: &Constant) -> TensorProto {
    TensorProto {
        dims: encode_dims(&constant.shape),
        data_type: data_type(constant.dtype()) as i32,
        raw_data: Some(Bytes::from(constant.to_bytes())),
        ..TensorProto::default()
    }
}

fn encode_function(function: &Function, opset: i64) -> FunctionProto {
    FunctionProto {
        name: function.op.op_type.clone(),
        domain: function.op.domain.clone(),
        input: function.inputs.clone(),
        output: function.outputs.clone(),
        attribute: function.attributes.clone(),
        node: function.nodes.iter().map(encode_node).collect(),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: opset }],
        ..FunctionProto::default()
    }
}
