//! Which tables a graph looks rows up in, and how many rows they have.

use std::collections::BTreeMap;

use super::OnnxFile;
use crate::onnx::proto::{NodeProto, tensor_proto::DataType};

/// A table of positions: more positions than it has rows cannot be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PositionTable {
    /// Name of the weight.
    pub name: String,
    /// Most positions of a row.
    pub positions: usize,
}

impl OnnxFile {
    /// Graph inputs that are the indices of a `Gather` of rows of a weight, with the number of rows.
    pub fn looked_up_rows(&self) -> BTreeMap<String, i64> {
        let inputs: Vec<String> = self.inputs().into_iter().map(|input| input.name).collect();
        self.row_gathers()
            .filter(|(_, indices)| inputs.contains(indices))
            .filter_map(|(weight, indices)| Some((indices.clone(), *self.initializer(weight)?.dims.first()?)))
            .collect()
    }

    /// Tables of positions: weights whose rows a graph of ours finds by counting tokens, and the tables of the
    /// rotary embedding.
    pub fn position_tables(&self) -> Vec<PositionTable> {
        let inputs: Vec<String> = self.inputs().into_iter().map(|input| input.name).collect();
        let counted = self.row_gathers().filter(|(_, indices)| !inputs.contains(indices)).filter_map(|(weight, by)| {
            let rows = *self.initializer(weight)?.dims.first()?;
            let first = self.first_position(by)?;
            Some((weight.clone(), rows - first))
        });
        let nodes = self.graph().into_iter().flat_map(|graph| &graph.node);
        let rotary = nodes.filter_map(|node| {
            let operator = moa_schema::OPERATORS.iter().find(|operator| operator.name == node.op_type)?;
            let index = operator.inputs.iter().position(|input| input.name == "cos_cache")?;
            let name = node.input.get(index).filter(|_| node.domain == moa_schema::DOMAIN)?;
            Some((name.clone(), *self.initializer(name)?.dims.first()?))
        });
        let tables: BTreeMap<String, i64> = counted.chain(rotary).collect();
        let positions = |rows: i64| usize::try_from(rows).unwrap_or_default();
        tables.into_iter().map(|(name, rows)| PositionTable { name, positions: positions(rows) }).collect()
    }

    /// Weight and indices of every `Gather` of rows.
    fn row_gathers(&self) -> impl Iterator<Item = (&String, &String)> {
        let nodes = self.graph().into_iter().flat_map(|graph| &graph.node);
        let gathers = nodes.filter(|node| node.op_type == "Gather" && node.domain.is_empty());
        let of_rows = gathers.filter(|node| node.attribute.iter().all(|a| a.name != "axis" || a.i.unwrap_or(0) == 0));
        of_rows.filter_map(|node| match node.input.as_slice() {
            [weight, indices] if self.initializer(weight).is_some() => Some((weight, indices)),
            _ => None,
        })
    }

    /// Index of the first position, where `indices` are a count of tokens, or that plus a constant.
    fn first_position(&self, indices: &str) -> Option<i64> {
        let nodes = &self.graph()?.node;
        let producer = |name: &str| nodes.iter().find(|node| node.output.iter().any(|output| output == name));
        let mut behind = vec![(producer(indices)?, 0)];
        while let Some((node, mut offset)) = behind.pop() {
            match node.op_type.as_str() {
                // A count begins at 1.
                "CumSum" => return Some(offset + 1),
                "Add" => offset += node.input.iter().find_map(|input| self.integer(input, &producer))?,
                "Where" | "Slice" | "Cast" | "Mul" => {}
                _ => continue,
            }
            behind.extend(node.input.iter().filter_map(|input| Some((producer(input)?, offset))));
        }
        None
    }

    /// The value of a constant integer, whether it is a weight or a node.
    fn integer<'a>(&self, name: &str, producer: &impl Fn(&str) -> Option<&'a NodeProto>) -> Option<i64> {
        let tensor = match self.initializer(name) {
            Some(tensor) => tensor,
            None => {
                let node = producer(name).filter(|node| node.op_type == "Constant")?;
                node.attribute.iter().find_map(|attribute| attribute.t.as_ref())?
            }
        };
        let bytes = self.values(tensor).ok().filter(|_| tensor.data_type == DataType::Int64 as i32)?;
        Some(i64::from_le_bytes(bytes.as_ref().try_into().ok()?))
    }
}
