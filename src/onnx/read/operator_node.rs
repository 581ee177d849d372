//! Nodes of our operators, and the names by which routing leaves a graph.

use moa_schema::{DOMAIN, OPERATORS, Operator};

use crate::onnx::proto::NodeProto;

/// The operator that `node` calls, where it is one of ours.
pub(crate) fn operator_of(node: &NodeProto) -> Option<&'static Operator> {
    OPERATORS.iter().find(|operator| node.domain == DOMAIN && node.op_type == operator.name)
}

/// What a node of ours reads as its parameter `parameter`, where it reads one.
pub(crate) fn operator_input<'a>(node: &'a NodeProto, parameter: &str) -> Option<&'a str> {
    let index = operator_of(node)?.inputs.iter().position(|input| input.name == parameter)?;
    node.input.get(index).map(String::as_str).filter(|name| !name.is_empty())
}

/// What a router reads: the input of its own, or where there is none the hidden states.
pub(crate) const READ_BY_ROUTERS: [&str; 2] = ["router_input", "hidden_states"];

/// The module that a node of ours computes; empty for a layer that is a whole model, whose node has its operator's
/// name.
pub(crate) fn module_of(node: &NodeProto) -> &str {
    if node.name == node.op_type { "" } else { &node.name }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let node = node(DOMAIN);
        assert_eq!((operator_of(&node).unwrap().name, module_of(&node)), ("MoASelfAttention", ""));
        let read = ["hidden_states", "attention_mask", "router_weight", "query_weight", "nothing"];
        assert_eq!(read.map(|name| operator_input(&node, name)), [Some("x"), None, Some("r"), None, None]);
    }
}
