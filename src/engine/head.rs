//! The head of a language model, which is an operator of ours on processors alone.

use moa_schema::{LM_HEAD, lm_head};

use super::bf16::cast;
use crate::onnx::proto::{NodeProto, tensor_proto::DataType};

/// Whether `node`, which is of our domain, is a head with a matrix of floats.
pub(super) fn is_of_floats(node: &NodeProto) -> bool {
    node.op_type == LM_HEAD.name && node.input.get(lm_head::OUTPUT_SCALE).is_none_or(String::is_empty)
}

/// The nodes that stand for `head`, one with a matrix of bf16: that matrix as f32, and the product.
pub(super) fn as_matmul(head: NodeProto) -> [NodeProto; 2] {
    let matrix = head.input.get(lm_head::OUTPUT_WEIGHT).cloned().unwrap_or_default();
    let wide = format!("{matrix}.f32");
    let cast = cast(&matrix, &wide, DataType::Float);
    let rows = head.input.into_iter().take(1);
    let product = NodeProto {
        name: head.name,
        op_type: "MatMul".into(),
        input: rows.chain([wide]).collect(),
        output: head.output,
        ..NodeProto::default()
    };
    [cast, product]
}
