//! Which tables a graph looks rows up in, and how many rows they have.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{LONGEST_CHAIN, OnnxFile};
use crate::onnx::proto::tensor_proto::DataType;

/// A table of positions: more positions than it has rows cannot be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PositionTable {
    /// Name of the weight.
    pub name: String,
    /// Most positions of a row.
    pub positions: usize,
}

/// Most values behind positions that are looked at: exports have some ten.
const MOST_BEHIND: usize = 4 * LONGEST_CHAIN;

impl OnnxFile {
    /// Graph inputs that are the indices of a `Gather` of rows of a weight, with the number of rows.
    pub fn looked_up_rows(&self) -> BTreeMap<String, i64> {
        let inputs: Vec<String> = self.inputs().into_iter().map(|input| input.name).collect();
        let plain = self
            .row_gathers()
            .filter(|(_, indices)| inputs.contains(indices))
            .filter_map(|(weight, indices)| Some((indices.clone(), *self.initializer(weight)?.dims.first()?)));
        let guarded = self.guarded_lookups().into_iter().filter(|(_, tables)| tables.len() == 1);
        plain.chain(guarded.filter_map(|(ids, tables)| Some((ids, *tables.values().next()?)))).collect()
    }

    /// Graph inputs whose values are rows of weights, negative ones being made an error, with these weights and their
    /// rows. A table of tokens is alone; cosines and sines are two.
    pub(super) fn guarded_lookups(&self) -> BTreeMap<String, BTreeMap<&str, i64>> {
        let mut lookups = BTreeMap::<_, BTreeMap<_, _>>::new();
        for (weight, indices) in self.row_gathers() {
            let ids = self.guarded(indices).and_then(|ids| self.graph_input_behind(ids));
            let rows = self.initializer(weight).and_then(|table| table.dims.first());
            if let (Some(ids), Some(rows)) = (ids, rows) {
                lookups.entry(ids).or_default().insert(weight.as_str(), *rows);
            }
        }
        lookups
    }

    /// Tables of positions: weights whose rows a graph of ours finds by counting tokens, and the tables of the
    /// rotary embedding.
    pub fn position_tables(&self) -> Vec<PositionTable> {
        let inputs: HashSet<String> = self.inputs().into_iter().map(|input| input.name).collect();
        let mut firsts = HashMap::new();
        let gathers = self.row_gathers().filter(|(_, indices)| !inputs.contains(*indices));
        let counted = gathers.filter_map(|(weight, by)| {
            let rows = *self.initializer(weight)?.dims.first()?;
            let first = (*firsts.entry(by.as_str()).or_insert_with(|| self.first_position(by)))?;
            Some((weight.clone(), rows.checked_sub(first)?))
        });
        let rotary = self.rotary_operators();
        let rotary = rotary.filter_map(|(_, table)| Some((table.to_owned(), *self.initializer(table)?.dims.first()?)));
        let tables: BTreeMap<String, i64> = counted.chain(rotary).collect();
        let positions = |rows: i64| usize::try_from(rows).unwrap_or_default();
        tables.into_iter().map(|(name, rows)| PositionTable { name, positions: positions(rows) }).collect()
    }

    /// Most positions of a row that every table of positions has, those of cosines and sines in standard operators
    /// included; `None` where there is no such table.
    pub fn most_positions(&self) -> Option<usize> {
        let given = self.given_positions().into_values().map(|rows| usize::try_from(rows).unwrap_or_default());
        self.position_tables().into_iter().map(|table| table.positions).chain(given).min()
    }

    /// Weight and indices of every `Gather` of rows.
    fn row_gathers(&self) -> impl Iterator<Item = (&String, &String)> {
        let gathers = self.nodes().filter(|node| node.op_type == "Gather" && node.domain.is_empty());
        let of_rows = gathers.filter(|node| node.attribute.iter().all(|a| a.name != "axis" || a.i.unwrap_or(0) == 0));
        of_rows.filter_map(|node| match node.input.as_slice() {
            [weight, indices] if self.initializer(weight).is_some() => Some((weight, indices)),
            _ => None,
        })
    }

    /// Index of the first position, where `indices` are a count of tokens, or that plus a constant.
    fn first_position(&self, indices: &str) -> Option<i64> {
        let mut seen = HashSet::new();
        let mut behind = vec![(indices, 0i64)];
        while let Some((name, mut offset)) = behind.pop().filter(|_| seen.len() < MOST_BEHIND) {
            let Some(node) = self.producer(name).filter(|_| seen.insert(name)) else { continue };
            match node.op_type.as_str() {
                // A count begins at 1.
                "CumSum" => return offset.checked_add(1),
                "Add" => offset = offset.checked_add(node.input.iter().find_map(|input| self.integer(input))?)?,
                "Where" | "Slice" | "Cast" | "Mul" | "Reshape" => {}
                _ => continue,
            }
            behind.extend(node.input.iter().map(|input| (input.as_str(), offset)));
        }
        None
    }

    /// The value of a constant integer, whether it is a weight or a node.
    fn integer(&self, name: &str) -> Option<i64> {
        let tensor = match self.initializer(name) {
            Some(tensor) => tensor,
            None => {
                let node = self.producer(name).filter(|node| node.op_type == "Constant")?;
                node.attribute.iter().find_map(|attribute| attribute.t.as_ref())?
            }
        };
        if tensor.data_type != DataType::Int64 as i32 || tensor.dims.iter().any(|size| *size != 1) {
            return None;
        }
        let bytes = self.values(tensor).ok()?;
        Some(i64::from_le_bytes(bytes.as_ref().try_into().ok()?))
    }
}
