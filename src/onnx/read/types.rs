//! Element types of values, as far as a graph says them.

use super::{LONGEST_CHAIN, OnnxFile, operator_of, structure::element_type, tensor};
use crate::onnx::proto::{NodeProto, tensor_proto::DataType};

/// Standard operators whose inputs all have the type of their output.
const OF_ONE_TYPE: [&str; 7] = ["Add", "Sub", "Mul", "Div", "MatMul", "Gemm", "LayerNormalization"];

/// Further ones whose first input has it.
const OF_FIRST_TYPE: [&str; 14] = [
    "Identity",
    "Dropout",
    "Pow",
    "Sqrt",
    "Softmax",
    "Tanh",
    "Gelu",
    "Relu",
    "Gather",
    "Reshape",
    "Transpose",
    "Slice",
    "Squeeze",
    "Unsqueeze",
];

/// One whose second input has it.
const OF_SECOND_TYPE: [&str; 1] = ["RMSNormalization"];

impl OnnxFile {
    /// The element type of a value of the graph: as it is declared, or as the nodes before it say.
    pub(crate) fn type_of(&self, value: &str) -> Option<DataType> {
        let mut value = value;
        for _ in 0..LONGEST_CHAIN {
            if let Some(declared) = self.declared_type(value) {
                return Some(declared);
            }
            let node = self.producer(value)?;
            if node.output.first().is_none_or(|output| output != value) {
                return None;
            }
            let by_all = is_standard(node, &OF_ONE_TYPE);
            if let Some(declared) = node.input.iter().filter(|_| by_all).find_map(|input| self.declared_type(input)) {
                return Some(declared);
            }
            match node.op_type.as_str() {
                "Cast" if node.domain.is_empty() => return tensor::data_type(cast_to(node)?).ok(),
                _ if is_standard(node, &OF_SECOND_TYPE) => value = node.input.get(1)?,
                _ if by_all || is_standard(node, &OF_FIRST_TYPE) || operator_of(node).is_some() => {
                    value = node.input.first()?;
                }
                _ => return None,
            }
        }
        None
    }

    fn declared_type(&self, value: &str) -> Option<DataType> {
        if let Some(weight) = self.initializer(value) {
            return tensor::data_type(weight.data_type).ok();
        }
        let graph = self.graph()?;
        let mut declared = graph.input.iter().chain(&graph.value_info).chain(&graph.output);
        element_type(declared.find(|known| known.name == value)?)
    }
}

fn is_standard(node: &NodeProto, operators: &[&str]) -> bool {
    node.domain.is_empty() && operators.contains(&node.op_type.as_str())
}

fn cast_to(node: &NodeProto) -> Option<i32> {
    i32::try_from(node.int_attribute("to")?).ok()
}
