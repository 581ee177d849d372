//! Nodes of our operators: which operator, what it reads, which module it computes.

use moa_schema::{Operator, PRESENT_INPUTS};

use crate::onnx::proto::NodeProto;

/// The operator that `node` calls, where it is one of ours.
pub(crate) fn operator_of(node: &NodeProto) -> Option<&'static Operator> {
    Operator::called(&node.domain, &node.op_type)
}

/// What a node of ours reads as its parameter `parameter`, where it reads one.
pub(crate) fn operator_input<'a>(node: &'a NodeProto, parameter: &str) -> Option<&'a str> {
    let index = operator_of(node)?.inputs.iter().position(|input| input.name == parameter)?;
    input(node, present_inputs(node), index)
}

/// Which inputs of its operator a node has whose inputs were moved together, a bit for each.
pub(super) fn present_inputs(node: &NodeProto) -> Option<i64> {
    node.int_attribute(PRESENT_INPUTS).filter(|mask| *mask != 0)
}

/// What `node` reads as the input `index` of its operator, where it reads one.
pub(super) fn input(node: &NodeProto, present: Option<i64>, index: usize) -> Option<&str> {
    let place = match present {
        Some(mask) if mask >> index & 1 == 0 => return None,
        Some(mask) => (mask & ((1 << index) - 1)).count_ones() as usize,
        None => index,
    };
    node.input.get(place).map(String::as_str).filter(|name| !name.is_empty())
}

/// The module that a node of ours computes; empty for a layer that is a whole model, whose node has its operator's
/// name.
pub(crate) fn module_of(node: &NodeProto) -> &str {
    if node.name == node.op_type { "" } else { &node.name }
}

#[cfg(test)]
mod tests {
    use moa_schema::DOMAIN;

    use super::*;
    use crate::onnx::proto::AttributeProto;

    #[test]
    fn an_operator_is_ours_in_our_domain_alone() {
        let node = |domain: &str| NodeProto {
            domain: domain.into(),
            op_type: "MoASelfAttention".into(),
            name: "MoASelfAttention".into(),
            input: vec!["x".into(), String::new(), "r".into()],
            ..NodeProto::default()
        };
        assert_eq!(operator_of(&node("com.example")), None);
        let mut node = node(DOMAIN);
        assert_eq!((operator_of(&node).unwrap().name, module_of(&node)), ("MoASelfAttention", ""));
        let read = ["hidden_states", "attention_mask", "router_weight", "query_weight", "nothing"];
        let found = |node: &NodeProto| read.map(|name| operator_input(node, name).map(str::to_owned));
        assert_eq!(found(&node), [Some("x"), None, Some("r"), None, None].map(|name| name.map(str::to_owned)));
        node.input.remove(1);
        node.attribute.push(AttributeProto {
            name: PRESENT_INPUTS.into(),
            i: Some(0b101),
            ..AttributeProto::default()
        });
        assert_eq!(found(&node), [Some("x"), None, Some("r"), None, None].map(|name| name.map(str::to_owned)));
    }
}
