//! Models that are written weight by weight: everything else is in memory, and every length is known before the first
//! byte.
//!
//! A message of protobuf is the concatenation of its fields, and prost writes them by number. So a model is what prost
//! makes of the fields before the weights, the weights, and what prost makes of the fields after them.

use std::{io::Write, mem};

use moa_graphs::graph::{Buffers, Data};
use prost::Message;

use super::encode::{EncodeError, entry};
use super::proto::{GraphProto, ModelProto, TensorProto};

/// `ModelProto.graph`, with a length.
const GRAPH: u8 = 7 << 3 | 2;

/// `GraphProto.initializer`, with a length.
const INITIALIZER: u8 = 5 << 3 | 2;

/// `TensorProto.raw_data`, with a length.
const RAW_DATA: u8 = 9 << 3 | 2;

/// Protobuf's end.
const LIMIT: u64 = i32::MAX as u64;

/// A model of which only the metadata, and the values of weights that are not in a data file, are missing.
pub struct Encoded<'a> {
    /// Fields before the graph.
    head: ModelProto,
    /// Fields before the initializers.
    graph_head: GraphProto,
    initializers: Vec<EncodedTensor<'a>>,
    /// Fields after the initializers.
    graph_tail: GraphProto,
    /// Fields after the graph.
    tail: ModelProto,
}

/// An initializer of which only the values are missing, where they are not in a data file.
pub(super) struct EncodedTensor<'a> {
    /// Where there are `values`, without a field after `raw_data`.
    pub(super) tensor: TensorProto,
    /// What goes to `raw_data`, and how many bytes that is.
    pub(super) values: Option<(&'a Data, u64)>,
}

impl<'a> Encoded<'a> {
    /// `model` without initializers, and these.
    pub(super) fn new(mut model: ModelProto, initializers: Vec<EncodedTensor<'a>>) -> Result<Self, EncodeError> {
        let mut graph = model.graph.take().unwrap_or_default();
        let encoded = Self {
            graph_tail: GraphProto {
                input: mem::take(&mut graph.input),
                output: mem::take(&mut graph.output),
                value_info: mem::take(&mut graph.value_info),
                ..GraphProto::default()
            },
            graph_head: graph,
            initializers,
            tail: ModelProto {
                opset_import: mem::take(&mut model.opset_import),
                functions: mem::take(&mut model.functions),
                ..ModelProto::default()
            },
            head: model,
        };
        encoded.check_size()?;
        Ok(encoded)
    }

    /// Writes the model to `writer`, with `metadata` as its `metadata_props`, in this order; one block of one weight
    /// after another, so that no more is in memory.
    ///
    /// # Errors
    ///
    /// A model over 2 GiB, of which nothing is written; a weight that cannot be read or does not fit its type; what
    /// `writer` returns.
    pub fn write(mut self, metadata: &[(String, String)], writer: &mut dyn Write) -> Result<(), EncodeError> {
        self.tail.metadata_props = metadata.iter().map(|(key, value)| entry(key, value)).collect();
        self.check_size()?;
        writer.write_all(&self.head.encode_to_vec())?;
        write_prefix(GRAPH, self.graph_bytes(), writer)?;
        writer.write_all(&self.graph_head.encode_to_vec())?;
        let mut buffers = Buffers::default();
        for initializer in &self.initializers {
            initializer.write(&mut buffers, writer)?;
        }
        writer.write_all(&self.graph_tail.encode_to_vec())?;
        writer.write_all(&self.tail.encode_to_vec())?;
        Ok(())
    }

    fn graph_bytes(&self) -> u64 {
        let initializers: u64 = self.initializers.iter().map(|initializer| field_bytes(initializer.bytes())).sum();
        length(&self.graph_head) + initializers + length(&self.graph_tail)
    }

    fn check_size(&self) -> Result<(), EncodeError> {
        let bytes = length(&self.head) + field_bytes(self.graph_bytes()) + length(&self.tail);
        if bytes > LIMIT { Err(EncodeError::TooLarge { bytes }) } else { Ok(()) }
    }
}

impl EncodedTensor<'_> {
    fn bytes(&self) -> u64 {
        length(&self.tensor) + self.values.map_or(0, |(_, bytes)| field_bytes(bytes))
    }

    fn write(&self, buffers: &mut Buffers, writer: &mut dyn Write) -> Result<(), EncodeError> {
        write_prefix(INITIALIZER, self.bytes(), writer)?;
        writer.write_all(&self.tensor.encode_to_vec())?;
        if let Some((values, bytes)) = self.values {
            write_prefix(RAW_DATA, bytes, writer)?;
            let mut blocks = values.blocks(buffers);
            while let Some(block) = blocks.next_block()? {
                writer.write_all(block)?;
            }
        }
        Ok(())
    }
}

fn length(message: &impl Message) -> u64 {
    message.encoded_len() as u64
}

/// Bytes of a field of `bytes` bytes, its key and its length among them.
fn field_bytes(bytes: u64) -> u64 {
    let length = usize::try_from(bytes).map_or(0, prost::length_delimiter_len);
    1 + length as u64 + bytes
}

/// Writes what comes before the `bytes` bytes of a field.
fn write_prefix(key: u8, bytes: u64, writer: &mut dyn Write) -> Result<(), EncodeError> {
    let length = usize::try_from(bytes).map_err(|_| EncodeError::TooLarge { bytes })?;
    let mut prefix = vec![key];
    prost::encode_length_delimiter(length, &mut prefix).map_err(|_| EncodeError::TooLarge { bytes })?;
    Ok(writer.write_all(&prefix)?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moa_graphs::{
        FloatType,
        graph::{Constant, ConstantValues, Graph, Initializer, Quantization, Sinusoids, ValueInfo, WeightExpr},
    };
    use moa_schema::IntegerType;
    use proptest::prelude::*;

    use super::*;
    use crate::onnx::{DataFile, encode};

    /// What an initializer is made of.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Kind {
        Literal,
        Table,
        Integers(IntegerType),
        Scales(IntegerType),
    }

    const KINDS: [Kind; 6] = [
        Kind::Literal,
        Kind::Table,
        Kind::Integers(IntegerType::Int8),
        Kind::Scales(IntegerType::Int8),
        Kind::Integers(IntegerType::Int4),
        Kind::Scales(IntegerType::Int4),
    ];

    /// A table of positions, which is evaluated when it is written, its integers or scales, or a literal.
    fn initializer(name: &str, rows: usize, width: usize, kind: Kind) -> Initializer {
        let table = WeightExpr::Sinusoids(Sinusoids { rows, width, padding: 0 });
        let data = match kind {
            Kind::Literal => Data::Literal(Constant {
                shape: vec![rows, width],
                values: ConstantValues::Int64((0..rows * width).map(|value| value as i64).collect()),
            }),
            Kind::Table => Data::Weight(table, FloatType::F16),
            Kind::Integers(integers) => Data::Integers(Arc::new(Quantization::new(table, integers))),
            Kind::Scales(integers) => Data::Scales(Arc::new(Quantization::new(table, integers))),
        };
        Initializer { name: name.into(), data }
    }

    fn graph(name: &str, initializers: Vec<Initializer>) -> Graph {
        let value = |name: &str| ValueInfo { name: name.into(), dtype: moa_graphs::graph::DType::Int64, shape: vec![] };
        Graph {
            name: name.into(),
            inputs: vec![value("in")],
            outputs: vec![value("out")],
            values: vec![],
            initializers,
            nodes: vec![],
            functions: vec![],
        }
    }

    fn bytes_of(encoded: Encoded<'_>, metadata: &[(String, String)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        encoded.write(metadata, &mut bytes).unwrap();
        bytes
    }

    proptest! {
        #[test]
        fn the_bytes_are_those_that_prost_writes_at_once(
            name in "[a-z]{0,200}",
            tensors in prop::collection::vec(
                ("[a-z.]{0,140}", 0..90_usize, 1..60_usize, prop::sample::select(KINDS.to_vec())),
                0..6,
            ),
            metadata in prop::collection::vec(("[a-z]{0,9}", "[a-z]{0,200}"), 0..4),
            external in any::<bool>(),
        ) {
            let initializers: Vec<_> =
                tensors.iter().map(|(name, rows, width, kind)| initializer(name, *rows, *width, *kind)).collect();
            let graph = graph(&name, initializers);
            let mut beside = Vec::new();
            let data = external.then(|| DataFile {
                location: "model.onnx.data".into(),
                writer: &mut beside,
                position: 0,
                buffers: Buffers::default(),
            });
            let bytes = bytes_of(encode(&graph, 18, data).unwrap(), &metadata);
            let model = ModelProto::decode(bytes.as_slice()).unwrap();
            prop_assert!(model.encode_to_vec() == bytes);
            let has_int4 = tensors.iter().any(|(.., kind)| *kind == Kind::Integers(IntegerType::Int4));
            prop_assert_eq!(model.ir_version, if has_int4 { 10 } else { 9 });
            let found: Vec<_> = model.metadata_props.iter().map(|e| (e.key.clone(), e.value.clone())).collect();
            prop_assert_eq!(found, metadata);
            let written = model.graph.unwrap();
            prop_assert_eq!((written.name, written.input.len(), written.output.len()), (name, 1, 1));
            prop_assert_eq!(written.initializer.len(), graph.initializers.len());
            for (tensor, initializer) in written.initializer.iter().zip(&graph.initializers) {
                prop_assert_eq!(&tensor.name, &initializer.name);
                prop_assert_eq!(i64::from(tensor.data_type), initializer.dtype().onnx_number());
                match &tensor.raw_data {
                    Some(values) => prop_assert!(*values == initializer.data.to_bytes().unwrap()),
                    None => {
                        let length = tensor.external_data.iter().find(|entry| entry.key == "length").unwrap();
                        prop_assert!(external && initializer.bytes() >= 1024);
                        prop_assert_eq!(&length.value, &initializer.data.to_bytes().unwrap().len().to_string());
                    }
                }
            }
        }
    }

    #[test]
    fn a_model_beyond_protobuf_is_refused_before_a_byte_is_written() {
        // 2 147 483 647 bytes in all are the last that fit; the values are claimed and never made.
        let with = |elements: usize| graph("g", vec![initializer("w", elements, 1, Kind::Table)]);
        let overhead = {
            let (small, large) = (with(1 << 29), with((1 << 30) - 1000));
            let bytes = |graph: &Graph| match encode(graph, 18, None) {
                Ok(encoded) => length(&encoded.head) + field_bytes(encoded.graph_bytes()) + length(&encoded.tail),
                Err(error) => panic!("{error}"),
            };
            assert_eq!(bytes(&large) - bytes(&small), 2 * ((1 << 29) - 1000));
            usize::try_from(bytes(&small)).unwrap() - (1 << 30)
        };
        let most = ((1 << 31) - 1 - overhead) / 2;
        let fits = with(most);
        let encoded = encode(&fits, 18, None).unwrap();
        let (mut written, long) = (Vec::new(), vec![(String::new(), "x".repeat(8))]);
        assert!(matches!(encoded.write(&long, &mut written), Err(EncodeError::TooLarge { bytes }) if bytes > LIMIT));
        assert!(written.is_empty());
        assert!(matches!(encode(&with(most + 1), 18, None), Err(EncodeError::TooLarge { .. })));
    }
}
