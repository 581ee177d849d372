//! Which caches of a model our library updates in place.

use moa_schema::{DOMAIN, SELF_ATTENTION, self_attention::SHARED_CACHES};

use crate::onnx::read::OnnxFile;

/// Input and output of each cache that goes from the input to one `MoASelfAttention` and from there to the output, and
/// nowhere else: then nothing but that operator sees how many rows it has.
pub fn caches_in_place(model: &OnnxFile) -> Vec<[String; 2]> {
    let Some(graph) = model.graph() else { return Vec::new() };
    let readers = |name: &str| graph.node.iter().flat_map(|node| &node.input).filter(|input| *input == name).count();
    let own = graph.node.iter().filter(|node| node.domain == DOMAIN && node.op_type == SELF_ATTENTION.name);
    let pairs = own.flat_map(|node| {
        SHARED_CACHES.into_iter().filter_map(|(past, present)| Some([node.input.get(past)?, node.output.get(present)?]))
    });
    let is_open = |[past, present]: &[&String; 2]| {
        let [is_input, is_output] = [(&graph.input, past), (&graph.output, present)]
            .map(|(values, name)| values.iter().any(|value| value.name == **name));
        is_input && is_output && readers(past) == 1 && readers(present) == 0
    };
    pairs.filter(is_open).map(|pair| pair.map(String::clone)).collect()
}
