//! Which inputs of a graph decide about positions, and how many positions there are.

use std::collections::BTreeMap;

use moa_schema::{interface::ATTENTION_MASK, parameter};

use super::{LONGEST_CHAIN, OnnxFile, PositionTable, ValueInfo, operator_input};
use crate::{
    metadata,
    onnx::proto::{NodeProto, tensor_proto::DataType},
};

impl OnnxFile {
    /// The input whose real tokens a graph of ours counts to find positions, with the smallest table that they are
    /// looked up in.
    pub fn counted_positions(&self) -> Option<(String, PositionTable)> {
        let counted = self.nodes().filter(|node| node.op_type == "CumSum" && node.domain.is_empty());
        let mut masks = counted.map(|node| {
            let ones = node.input.first()?;
            let chosen = self.producer(ones).filter(|node| node.op_type == "Where" && node.domain.is_empty());
            self.graph_input_behind(chosen.map_or(Some(ones), |node| node.input.first())?)
        });
        let mask = masks.next()??;
        let is_only = masks.all(|other| other.as_ref() == Some(&mask));
        let given: Vec<&str> = self.rotary_operators().map(|(_, table)| table).collect();
        let tables = self.position_tables().into_iter().filter(|table| !given.contains(&table.name.as_str()));
        let smallest = tables.min_by_key(|table| table.positions)?;
        is_only.then_some((mask, smallest))
    }

    /// Inputs that hold the positions of a rotary embedding, that of our operators or of their bodies, with the number
    /// of positions that there are.
    pub fn given_positions(&self) -> BTreeMap<String, i64> {
        let rows = |table: &str| self.initializer(table)?.dims.first().copied();
        let ours = self.rotary_operators().filter_map(|(node, table)| {
            let ids = operator_input(node, parameter::POSITION_IDS)?;
            Some((self.graph_input_behind(ids)?, rows(table)?))
        });
        let tables = self.guarded_lookups().into_iter().filter(|(_, tables)| tables.len() > 1);
        let bodies = tables.flat_map(|(ids, tables)| tables.into_values().map(move |rows| (ids.clone(), rows)));
        let mut inputs = BTreeMap::new();
        for (ids, rows) in ours.chain(bodies) {
            let least = inputs.entry(ids).or_insert(rows);
            *least = rows.min(*least);
        }
        inputs
    }

    /// The input that says which tokens are real, with the smallest table of positions: a row of more tokens than that
    /// cannot be computed.
    pub fn longest_row(&self) -> Option<(String, PositionTable)> {
        let mut rotary = self.rotary_operators();
        let of_rotary = || {
            let (node, _) = rotary.next()?;
            let mask = self.graph_input_behind(operator_input(node, parameter::ATTENTION_MASK)?)?;
            Some((mask, self.position_tables().into_iter().min_by_key(|table| table.positions)?))
        };
        self.counted_positions().or_else(of_rotary)
    }

    /// Whether this program wrote it.
    pub fn is_export(&self) -> bool {
        self.model().metadata_props.iter().any(|entry| entry.key.starts_with(metadata::PREFIX))
    }

    /// Inputs of an export that tell real tokens, 1, from padding, 0.
    pub fn masks(&self) -> Vec<String> {
        let is_export = self.is_export();
        let is_mask =
            |input: &ValueInfo| input.name.ends_with(ATTENTION_MASK) && input.data_type == DataType::Int64 && is_export;
        self.inputs().into_iter().filter(is_mask).map(|input| input.name).collect()
    }

    /// The values in `name`, where it holds them with what no table has in place of negative ones, whether or not their
    /// shape is held against another.
    pub(super) fn guarded(&self, name: &str) -> Option<&str> {
        let guard = self
            .producer(self.of_shape(name).unwrap_or(name))
            .filter(|node| node.op_type == "Where" && node.domain.is_empty())?;
        let [is_negative, none, values] = guard.input.as_slice() else { return None };
        let less = self.producer(is_negative).filter(|node| node.op_type == "Less" && node.domain.is_empty())?;
        let [compared, zero] = less.input.as_slice() else { return None };
        let is = |name: &str, value: i64| {
            let number = self.initializer(name).filter(|tensor| tensor.dims.is_empty());
            number.and_then(|tensor| self.values(tensor).ok()).is_some_and(|bytes| *bytes == value.to_le_bytes())
        };
        (compared == values && is(zero, 0) && is(none, i32::MAX.into())).then_some(values)
    }

    /// The values in `name`, where it holds them as long as they have the shape that a body gives them.
    fn of_shape(&self, name: &str) -> Option<&str> {
        let both = self.producer(name).filter(|node| node.op_type == "Max" && node.domain.is_empty())?;
        let [values, shaped] = both.input.as_slice() else { return None };
        let reshape = self.producer(shaped).filter(|node| node.op_type == "Reshape" && node.domain.is_empty())?;
        reshape.input.first().filter(|given| *given == values).map(String::as_str)
    }

    /// The node that computes `name`.
    pub(crate) fn producer(&self, name: &str) -> Option<&NodeProto> {
        self.graph()?.node.get(*self.index().producers.get(name)?)
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &NodeProto> {
        self.graph().into_iter().flat_map(|graph| &graph.node)
    }

    /// Operators of ours that rotate, with the names of their tables.
    pub(super) fn rotary_operators(&self) -> impl Iterator<Item = (&NodeProto, &str)> {
        self.nodes().filter_map(|node| Some((node, operator_input(node, parameter::COS_CACHE)?)))
    }

    /// The input of the graph that `name` is, or was before casts.
    pub(super) fn graph_input_behind(&self, name: &str) -> Option<String> {
        let mut name = name;
        for _ in 0..LONGEST_CHAIN {
            let Some(node) = self.producer(name) else { break };
            name = node.input.first().filter(|_| node.op_type == "Cast" && node.domain.is_empty())?;
        }
        let is_input = self.initializer(name).is_none() && self.inputs().iter().any(|input| input.name == name);
        is_input.then(|| name.to_owned())
    }
}
