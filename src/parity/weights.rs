//! Weight audit: every constant of a file beside what the checkpoint would give today, bit for bit.
//!
//! Inputs exercise a few rows of an embedding and some experts; this check sees every value.

use std::collections::{BTreeMap, BTreeSet};

use moa_graphs::{
    derived_name,
    graph::{Attribute, Buffers, Data, Graph, Initializer},
};

use super::{
    Watch,
    other_values::OtherValues,
    strays::{constants_in_nodes, values_read},
};
use crate::onnx::{
    OnnxFile, ReadError, data_type,
    proto::{GraphProto, ModelProto, NodeProto, TensorProto, tensor_proto::DataType},
};
use crate::tensor::coordinates;

/// Outcome of the audit of one file.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct WeightAudit {
    /// Constants compared.
    pub tensors: usize,
    /// Constants that differ, are missing or are too many, each with what is wrong; at most ten.
    pub faults: Vec<String>,
    /// How many such constants.
    pub fault_count: usize,
}

/// Most faults that are named.
const NAMED_FAULTS: usize = 10;

/// Why a constant could not be compared.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AuditError {
    #[error(transparent)]
    Weight(#[from] moa_graphs::WeightError),
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl WeightAudit {
    /// Whether all constants are equal.
    pub const fn passed(&self) -> bool {
        self.fault_count == 0
    }

    fn fault(&mut self, text: String) {
        self.fault_count += 1;
        if self.faults.len() < NAMED_FAULTS {
            self.faults.push(text);
        }
    }

    /// Compares the constants of `file` with those of `expected`, the graph that the checkpoint gives, and with those
    /// that it has where a weight was turned before it was written. Where another program `changed` the nodes, it may
    /// have moved constants that are not trained, such as an epsilon, into these, or made them nodes. Weights that no
    /// node reads are faults too: what is computed in their place is not the checkpoint's.
    ///
    /// # Errors
    ///
    /// Where a constant of either side cannot be read.
    pub fn run(file: &OnnxFile, expected: &Graph, changed: bool, watch: &dyn Watch) -> Result<Self, AuditError> {
        let (mut audit, mut buffers) = (Self::default(), AuditBuffers::default());
        let Some(graph) = file.graph() else { return Ok(audit) };
        let mut found = Found::of(file.model(), graph);
        let is_computed = |name: &str| graph.node.iter().any(|node| node.output.iter().any(|output| output == name));
        let mut unread = Vec::new();
        for initializer in &expected.initializers {
            let name = initializer.name.as_str();
            let is_literal = matches!(initializer.data, Data::Literal(_));
            match found.take(name) {
                Some(tensor) => {
                    audit.compare(file, tensor, initializer, &mut buffers)?;
                    unread.extend((!is_literal && !found.read.contains(name)).then_some(name));
                }
                None if changed && is_literal && !is_computed(name) => {}
                None => {
                    let what = if is_computed(name) { "computed by a node" } else { "missing" };
                    audit.tensors += 1;
                    audit.fault(format!("constant \"{name}\" is {what}"));
                }
            }
            watch.advance(initializer.bytes());
        }
        for (weight, initializer) in turned(expected) {
            if let Some(tensor) = found.take(&initializer.name) {
                audit.compare(file, tensor, &initializer, &mut buffers)?;
                unread.retain(|unread| *unread != weight || !found.read.contains(initializer.name.as_str()));
            }
        }
        for name in unread {
            audit.fault(format!("constant \"{name}\" is read by no node"));
        }
        for name in found.tensors.keys().chain(&found.in_nodes) {
            audit.fault(format!("constant \"{name}\" does not come from the checkpoint"));
        }
        Ok(audit)
    }

    fn compare(
        &mut self,
        file: &OnnxFile,
        tensor: &TensorProto,
        expected: &Initializer,
        buffers: &mut AuditBuffers,
    ) -> Result<(), AuditError> {
        let name = expected.name.as_str();
        self.tensors += 1;
        let shape: Vec<_> = expected.shape().into_iter().map(|dim| i64::try_from(dim).unwrap_or(i64::MAX)).collect();
        let wanted = data_type(expected.dtype());
        if tensor.dims != shape {
            self.fault(format!("constant \"{name}\" has shape {:?}, the checkpoint gives {shape:?}", tensor.dims));
        } else if tensor.data_type != wanted as i32 {
            let found = DataType::try_from(tensor.data_type).unwrap_or_default();
            let [found, wanted] = [found, wanted].map(DataType::type_name);
            self.fault(format!("constant \"{name}\" holds {found}, the checkpoint gives {wanted}"));
        } else if let Some(others) = other_values(file, tensor, &expected.data, buffers)? {
            let shape = expected.shape();
            let OtherValues { first, found, expected, count } = others;
            let (values, place): (usize, _) = (shape.iter().product(), coordinates(first, &shape));
            let differs = match values {
                1 => format!("is {found}"),
                _ => format!("differs in {count} of {values} values; at {place:?} it is {found}"),
            };
            self.fault(format!("constant \"{name}\" {differs}, the checkpoint gives {expected}"));
        }
        Ok(())
    }
}

/// The tensor that a node `Constant` gives out under `name`.
fn constant_node<'a>(graph: &'a GraphProto, name: &str) -> Option<&'a TensorProto> {
    let gives = |node: &&NodeProto| node.op_type == "Constant" && node.output.iter().any(|output| output == name);
    let node = graph.node.iter().find(gives)?;
    node.find_attribute("value")?.t.as_ref()
}

/// Weights that nodes turn, as runtimes write them when they save a graph: under the name of the node's output, or, as
/// other graphs of ours have them, under that of the weight. Each with the name of the weight.
fn turned(graph: &Graph) -> Vec<(&str, Initializer)> {
    let turned = graph.nodes.iter().filter(|node| node.op.op_type == "Transpose").filter_map(|node| {
        let (input, output) = (node.inputs.first()?, node.outputs.first()?);
        let initializer = graph.initializers.iter().find(|initializer| initializer.name == *input)?;
        let Data::Weight(expr, float) = &initializer.data else { return None };
        let Some(Attribute::Ints(order)) = node.attributes.get("perm") else { return None };
        let order: Vec<usize> = order.iter().filter_map(|axis| usize::try_from(*axis).ok()).collect();
        let turned = expr.clone().transposed(&order);
        let named = |name| (input.as_str(), Initializer { name, data: Data::Weight(turned.clone(), *float) });
        Some([output.clone(), derived_name::turned(input, &order)].map(named))
    });
    turned.flatten().collect()
}

/// Constants of a file that were not compared yet.
struct Found<'a> {
    graph: &'a GraphProto,
    tensors: BTreeMap<&'a str, &'a TensorProto>,
    in_nodes: Vec<&'a str>,
    /// Every value that a node reads.
    read: BTreeSet<&'a str>,
}

impl<'a> Found<'a> {
    fn of(model: &'a ModelProto, graph: &'a GraphProto) -> Self {
        let tensors = graph.initializer.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        Self { graph, tensors, in_nodes: constants_in_nodes(model), read: values_read(graph) }
    }

    /// The constant `name`, whether it is an initializer or a node gives it out.
    fn take(&mut self, name: &str) -> Option<&'a TensorProto> {
        let given = || constant_node(self.graph, name).inspect(|_| self.in_nodes.retain(|of| *of != name));
        self.tensors.remove(name).or_else(given)
    }
}

/// Memory for both sides of a comparison.
#[derive(Default)]
struct AuditBuffers {
    stored: Vec<u8>,
    computed: Buffers,
}

/// The values of a constant that are others than those of `data`, compared block by block.
fn other_values(
    file: &OnnxFile,
    tensor: &TensorProto,
    data: &Data,
    buffers: &mut AuditBuffers,
) -> Result<Option<OtherValues>, AuditError> {
    let kind = data_type(data.dtype());
    let (mut blocks, mut start) = (data.blocks(&mut buffers.computed), 0);
    let mut others: Option<OtherValues> = None;
    while let Some(computed) = blocks.next_block()? {
        let stored = &mut buffers.stored;
        stored.resize(computed.len(), 0);
        file.read_values(tensor, start, stored)?;
        let before = 8 * start / kind.bits().unwrap_or(8);
        if let Some(more) = OtherValues::of_block(kind, before, [stored, computed]) {
            match &mut others {
                Some(others) => others.count += more.count,
                None => others = Some(more),
            }
        }
        start += computed.len();
    }
    Ok(others)
}

#[cfg(test)]
mod tests {
    use moa_graphs::{FloatType, SyntheticTensors, TensorDirectory, graph::WeightExpr};
    use prost::Message;

    use super::*;
    use crate::onnx::{
        proto::{ModelProto, OperatorSetIdProto, ValueInfoProto},
        read_model,
    };

    /// 25 MB, which no block holds.
    const ELEMENTS: usize = 25 << 18;

    #[test]
    fn constants_of_several_blocks_are_compared_to_their_ends() {
        let weight = SyntheticTensors::random("made up", 1).make("w", &[ELEMENTS]).unwrap();
        let bytes: Vec<u8> = weight.to_f32().unwrap().iter().flat_map(|value| value.to_le_bytes()).collect();
        let data = Data::Weight(WeightExpr::Stored(weight), FloatType::F32);
        let folder = tempfile::tempdir().unwrap();
        let found = |bytes: Vec<u8>| {
            let weight = TensorProto {
                name: "w".into(),
                dims: vec![i64::try_from(ELEMENTS).unwrap()],
                data_type: DataType::Float as i32,
                raw_data: Some(bytes.into()),
                ..TensorProto::default()
            };
            let graph = GraphProto {
                initializer: vec![weight.clone()],
                output: vec![ValueInfoProto::tensor("w", DataType::Float, None)],
                ..GraphProto::default()
            };
            let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 18 }];
            let model = ModelProto { ir_version: 9, opset_import, graph: Some(graph), ..ModelProto::default() };
            let path = folder.path().join("m.onnx");
            std::fs::write(&path, model.encode_to_vec()).unwrap();
            let others = other_values(&read_model(&path).unwrap(), &weight, &data, &mut AuditBuffers::default());
            others.unwrap().map(|others| (others.first, others.count))
        };
        assert_eq!(found(bytes.clone()), None);
        let ends = [3, bytes.len() - 1];
        for index in ends {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            assert_eq!(found(changed), Some((index / 4, 1)));
        }
        let mut changed = bytes;
        for index in ends {
            changed[index] ^= 1;
        }
        assert_eq!(found(changed), Some((0, 2)));
    }
}
