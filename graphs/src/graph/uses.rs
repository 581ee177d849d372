//! Where a graph under construction names its values.

use std::collections::HashMap;

use super::{Node, ValueInfo};

/// Number of a node, and of an input or output of it.
type Place = (usize, usize);

/// The places of one name.
#[derive(Debug, Default)]
struct Places {
    computed: Vec<Place>,
    read: Vec<Place>,
    /// Numbers among the values that are described.
    described: Vec<usize>,
    is_output: bool,
}

/// For each name its places, so that a value is found and renamed without a look at all nodes.
#[derive(Debug, Default)]
pub(super) struct Uses(HashMap<String, Places>);

impl Uses {
    fn of(&mut self, name: &str) -> &mut Places {
        self.0.entry(name.to_owned()).or_default()
    }

    /// Adds the names of the node `index`.
    pub(super) fn add_node(&mut self, index: usize, node: &Node) {
        for (place, name) in node.inputs.iter().enumerate() {
            self.of(name).read.push((index, place));
        }
        for (place, name) in node.outputs.iter().enumerate() {
            self.of(name).computed.push((index, place));
        }
    }

    /// Adds the description `index`.
    pub(super) fn add_description(&mut self, index: usize, name: &str) {
        self.of(name).described.push(index);
    }

    /// Makes `name` an output of the graph.
    pub(super) fn add_output(&mut self, name: &str) {
        self.of(name).is_output = true;
    }

    /// Whether a node reads `name`.
    pub(super) fn is_read(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|places| !places.read.is_empty())
    }

    /// Whether a node computes `name`, and the graph does not hand it out under this name.
    pub(super) fn is_inner(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|places| !places.computed.is_empty() && !places.is_output)
    }

    /// Calls `from` by the name `to` wherever it stands.
    pub(super) fn rename(&mut self, from: &str, to: &str, nodes: &mut [Node], values: &mut [ValueInfo]) {
        let Some(places) = self.0.remove(from) else { return };
        for (node, input) in &places.read {
            nodes[*node].inputs[*input] = to.to_owned();
        }
        for (node, output) in &places.computed {
            nodes[*node].outputs[*output] = to.to_owned();
        }
        for index in &places.described {
            values[*index].name = to.to_owned();
        }
        let known = self.of(to);
        known.read.extend(places.read);
        known.computed.extend(places.computed);
        known.described.extend(places.described);
        known.is_output |= places.is_output;
    }
}
