//! Attributes and types of values, made and read.

use super::proto::{
    AttributeProto, NodeProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto::AttributeType,
    tensor_proto::DataType,
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};

impl AttributeProto {
    /// An attribute that holds an integer.
    pub fn int(name: &str, value: i64) -> Self {
        Self { name: name.into(), r#type: AttributeType::Int as i32, i: Some(value), ..Self::default() }
    }

    /// An attribute that holds a text.
    pub fn text(name: &str, value: &str) -> Self {
        let bytes = value.as_bytes().to_vec();
        Self { name: name.into(), r#type: AttributeType::String as i32, s: Some(bytes), ..Self::default() }
    }
}

impl NodeProto {
    /// The attribute `name`, where the node has it.
    pub fn find_attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attribute.iter().find(|attribute| attribute.name == name)
    }

    /// The integer under `name`, where the node has one.
    pub fn int_attribute(&self, name: &str) -> Option<i64> {
        self.find_attribute(name)?.i
    }

    /// The text under `name`, where the node has one.
    pub fn text_attribute(&self, name: &str) -> Option<&str> {
        std::str::from_utf8(self.find_attribute(name)?.s.as_deref()?).ok()
    }
}

impl ValueInfoProto {
    /// A tensor; without `dims`, one of any shape.
    pub fn tensor(name: &str, data_type: DataType, dims: Option<Vec<dimension::Value>>) -> Self {
        let dim = |value| Dimension { value: Some(value) };
        let shape = dims.map(|dims| TensorShapeProto { dim: dims.into_iter().map(dim).collect() });
        let tensor = type_proto::Tensor { elem_type: data_type as i32, shape };
        let r#type = Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)) });
        Self { name: name.into(), r#type, ..Self::default() }
    }
}
