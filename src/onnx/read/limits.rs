//! A pass over the wire format before anything is decoded: bounds what decoding may allocate.

use super::error::Fault;
use crate::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, TensorShapeProto,
    TypeProto, ValueInfoProto, type_proto,
};

/// Largest model file; a protobuf message cannot be larger.
pub(super) const MAX_FILE_BYTES: u64 = i32::MAX as u64;

/// Most fields of all messages together; those that hold no message cost some ten bytes once decoded.
const MAX_FIELDS: usize = 4_000_000;

/// Most bytes of all messages together once they are decoded, what they point to apart.
pub(in crate::onnx) const MAX_DECODED: usize = 1 << 30;

/// Most values in packed lists of integers; each costs up to eight times its size in the file.
const MAX_PACKED_INTEGERS: usize = 1 << 26;

/// Deepest nesting of messages: sixteen graphs within graphs, and the messages within the innermost one.
const MAX_DEPTH: usize = 56;

/// Messages whose fields are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    SparseTensor,
    ValueInfo,
    Type,
    TensorType,
    Shape,
    Function,
    /// Holds no further message.
    Leaf,
}

/// What the payload of a length-delimited field is.
#[derive(Debug, PartialEq, Eq)]
enum Payload {
    Message(Message),
    Integers,
    Bytes,
}

impl Message {
    /// Bytes of the message once it is decoded, what it points to apart.
    const fn decoded(self) -> usize {
        match self {
            Self::Model => size_of::<ModelProto>(),
            Self::Graph => size_of::<GraphProto>(),
            Self::Node => size_of::<NodeProto>(),
            Self::Attribute => size_of::<AttributeProto>(),
            Self::Tensor => size_of::<TensorProto>(),
            Self::SparseTensor => size_of::<SparseTensorProto>(),
            Self::ValueInfo => size_of::<ValueInfoProto>(),
            Self::Type => size_of::<TypeProto>(),
            Self::TensorType => size_of::<type_proto::Tensor>(),
            Self::Shape => size_of::<TensorShapeProto>(),
            Self::Function => size_of::<FunctionProto>(),
            // The largest of those that hold no further message has two names.
            Self::Leaf => 2 * size_of::<String>(),
        }
    }

    const fn payload(self, field: u64) -> Payload {
        use Message::{
            Attribute, Function, Graph, Leaf, Model, Node, Shape, SparseTensor, Tensor, TensorType, Type, ValueInfo,
        };
        Payload::Message(match (self, field) {
            (Model, 7) | (Attribute, 6 | 11) => Graph,
            (Model, 25) => Function,
            (Model, 8 | 14) | (Function, 9 | 14) | (Tensor, 3 | 13) | (Shape, 1) => Leaf,
            (Graph, 1) | (Function, 7) => Node,
            (Graph, 5) | (Attribute, 5 | 10) | (SparseTensor, 1 | 2) => Tensor,
            (Graph, 15) | (Attribute, 22 | 23) => SparseTensor,
            (Graph, 11..=13) | (Function, 12) => ValueInfo,
            (Node, 5) | (Function, 11) => Attribute,
            (ValueInfo, 2) | (Attribute, 14 | 15) => Type,
            (Type, 1) => TensorType,
            (TensorType, 2) => Shape,
            (Tensor, 1 | 5 | 7 | 11) | (SparseTensor, 3) | (Attribute, 8) => return Payload::Integers,
            _ => return Payload::Bytes,
        })
    }
}

struct Scan {
    fields: usize,
    integers: usize,
    decoded: usize,
}

/// Checks that `bytes` are well-formed on the wire and decode to bounded memory.
pub(super) fn check(bytes: &[u8]) -> Result<(), Fault> {
    Scan { fields: 0, integers: 0, decoded: 0 }.message(bytes, Message::Model, 0)
}

impl Scan {
    fn message(&mut self, mut bytes: &[u8], message: Message, depth: usize) -> Result<(), Fault> {
        if depth > MAX_DEPTH {
            return Err(Fault::limit(format!("graphs are nested deeper than {MAX_DEPTH} messages")));
        }
        self.decoded = self.decoded.saturating_add(message.decoded());
        if self.decoded > MAX_DECODED {
            return Err(Fault::limit(format!(
                "the nodes of the model take more than {MAX_DECODED} bytes once they are read"
            )));
        }
        while !bytes.is_empty() {
            self.fields += 1;
            if self.fields > MAX_FIELDS {
                return Err(Fault::limit(format!("the model holds more than {MAX_FIELDS} fields")));
            }
            let tag = varint(&mut bytes)?;
            if tag > u64::from(u32::MAX) || tag >> 3 == 0 {
                return Err(wire());
            }
            match tag & 7 {
                0 => drop(varint(&mut bytes)?),
                1 => drop(take(&mut bytes, 8)?),
                5 => drop(take(&mut bytes, 4)?),
                2 => {
                    let length = varint(&mut bytes)?;
                    let payload = take(&mut bytes, length)?;
                    self.payload(payload, message.payload(tag >> 3), depth)?;
                }
                _ => return Err(wire()),
            }
        }
        Ok(())
    }

    fn payload(&mut self, bytes: &[u8], payload: Payload, depth: usize) -> Result<(), Fault> {
        match payload {
            Payload::Bytes => Ok(()),
            Payload::Message(message) => self.message(bytes, message, depth + 1),
            Payload::Integers => {
                self.integers += bytes.iter().filter(|byte| **byte < 0x80).count();
                if self.integers <= MAX_PACKED_INTEGERS {
                    return Ok(());
                }
                Err(Fault::limit(format!("the model holds more than {MAX_PACKED_INTEGERS} packed integers")))
            }
        }
    }
}

fn wire() -> Fault {
    Fault::malformed("not an ONNX model: the bytes are no protobuf message, or the file is cut off".into())
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8], Fault> {
    let length = usize::try_from(length).map_err(|_| wire())?;
    let (head, tail) = bytes.split_at_checked(length).ok_or_else(wire)?;
    *bytes = tail;
    Ok(head)
}

fn varint(bytes: &mut &[u8]) -> Result<u64, Fault> {
    let mut value = 0u64;
    for (index, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if *byte < 0x80 {
            *bytes = &bytes[index + 1..];
            return Ok(value);
        }
    }
    Err(wire())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The message of a type of `proto.rs`.
    fn message(name: &str) -> Message {
        match name {
            "ModelProto" => Message::Model,
            "GraphProto" => Message::Graph,
            "NodeProto" => Message::Node,
            "AttributeProto" => Message::Attribute,
            "TensorProto" => Message::Tensor,
            "SparseTensorProto" => Message::SparseTensor,
            "ValueInfoProto" => Message::ValueInfo,
            "TypeProto" => Message::Type,
            "Tensor" => Message::TensorType,
            "TensorShapeProto" => Message::Shape,
            "FunctionProto" => Message::Function,
            "OperatorSetIdProto" | "StringStringEntryProto" | "Segment" | "Dimension" => Message::Leaf,
            _ => panic!("{name} is in no list of messages"),
        }
    }

    /// The last name of a type or variant, such as `TensorShapeProto` of `Option<super::TensorShapeProto>`.
    fn last_name(line: &str) -> &str {
        line.rsplit(|letter: char| !letter.is_alphanumeric()).find(|word| !word.is_empty()).unwrap()
    }

    #[test]
    fn every_field_that_is_decoded_is_followed() {
        let (mut parent, mut fields) = (None, 0);
        let mut lines = include_str!("../proto.rs").lines().map(str::trim);
        while let Some(line) = lines.next() {
            if let Some(name) = line.strip_prefix("pub struct ") {
                parent = Some(message(last_name(name)));
            } else if line == "pub mod type_proto {" {
                // The kinds of a type are fields of the type itself.
                parent = Some(Message::Type);
            }
            let Some(field) = line.strip_prefix("#[prost(") else { continue };
            let is_integers = field.starts_with(['i', 'u']) && field.contains("repeated");
            if !field.starts_with("message") && !is_integers {
                continue;
            }
            let tag = field.split('"').rev().nth(1).unwrap().parse().unwrap();
            let declared = lines.next().unwrap();
            let expected = if is_integers { Payload::Integers } else { Payload::Message(message(last_name(declared))) };
            assert_eq!(parent.unwrap().payload(tag), expected, "{parent:?}: {declared}");
            fields += 1;
        }
        assert!(fields > 30, "{fields} fields were found");
    }
}
