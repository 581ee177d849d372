//! Which nodes multiply, where their weights stand, and what quantisation calls them.

use std::collections::BTreeMap;

use moa_graphs::derived_name;
use moa_schema::{DOMAIN, LM_HEAD, RUNTIME_DOMAIN, lm_head};

use crate::onnx::proto::{NodeProto, TensorProto, tensor_proto::DataType};

/// Parts of the names of operators that multiply, or hold nodes that do.
const MULTIPLIERS: [&str; 12] =
    ["Attention", "Conv", "Einsum", "Gemm", "GRU", "If", "LSTM", "Loop", "MatMul", "MoE", "RNN", "Scan"];

/// Parts of the names of operators whose weights hold several values in one.
const PACKED: [&str; 4] = ["Bnb4", "BlockQuantized", "NBits", "QMoE"];

/// How ONNX Runtime's quantiser calls the integers of a weight.
const QUANTIZED: &str = "_quantized";

/// Rows and matrix of a product, by their place among the inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    pub(super) rows: usize,
    pub(super) matrix: usize,
    /// What is added to the product.
    pub(super) bias: Option<usize>,
}

/// Where the operands of a product stand; `None` for every other node.
pub(super) fn operands(node: &NodeProto) -> Option<Operands> {
    let (matrix, bias) = match (node.domain.as_str(), node.op_type.as_str()) {
        ("", "MatMul" | "MatMulInteger") | (RUNTIME_DOMAIN, "FusedMatMul" | "TransposeMatMul") => (1, None),
        ("", "Gemm") | (RUNTIME_DOMAIN, "FusedGemm") => (1, Some(2)),
        (RUNTIME_DOMAIN, "DynamicQuantizeMatMul") => (1, Some(4)),
        (RUNTIME_DOMAIN, "MatMulIntegerToFloat") => (1, Some(6)),
        (DOMAIN, name) if name == LM_HEAD.name => (lm_head::OUTPUT_WEIGHT, None),
        ("", "QLinearMatMul") => (3, None),
        (RUNTIME_DOMAIN, "QGemm") => (3, Some(6)),
        _ => return None,
    };
    Some(Operands { rows: 0, matrix, bias })
}

/// Whether a node only rounds or widens its first input.
pub(super) fn is_rounding(node: &NodeProto) -> bool {
    let rounds = ["Cast", "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"];
    node.domain.is_empty() && rounds.contains(&node.op_type.as_str())
}

/// Nodes whose products are not counted, by operator.
#[derive(Debug, Default)]
pub(super) struct Uncounted {
    nodes: BTreeMap<String, u64>,
}

impl Uncounted {
    /// Notes a node that multiplies, or of which nobody here knows whether it does.
    pub(super) fn note_unknown(&mut self, node: &NodeProto) {
        let is_known = matches!(node.domain.as_str(), "" | RUNTIME_DOMAIN);
        if !is_known || MULTIPLIERS.iter().any(|part| node.op_type.contains(part)) {
            self.note(node);
        }
    }

    pub(super) fn note(&mut self, node: &NodeProto) {
        let name = match node.domain.as_str() {
            "" => node.op_type.clone(),
            domain => format!("{domain}.{}", node.op_type),
        };
        *self.nodes.entry(name).or_default() += 1;
    }

    /// What cannot be told because of them.
    pub(super) fn not_told(&self) -> Vec<String> {
        if self.nodes.is_empty() {
            return Vec::new();
        }
        let counts: Vec<_> = self.nodes.iter().map(|(name, nodes)| format!("{nodes} {name}")).collect();
        let products = "active parameters and multiply-accumulates: what these nodes multiply is not counted:";
        let mut texts = vec![format!("{products} {}", counts.join(", "))];
        let packed = self.nodes.keys().filter(|name| PACKED.iter().any(|part| name.contains(part)));
        let packed: Vec<_> = packed.map(String::as_str).collect();
        if !packed.is_empty() {
            let values =
                "parameters: bytes that hold several weights, and their scales, are counted as they are stored:";
            texts.push(format!("{values} {}", packed.join(", ")));
        }
        texts
    }
}

/// Name in the checkpoint of an initializer that may be written transposed, reshaped, quantised or in a second type.
pub(super) fn stored_name(name: &str) -> &str {
    derived_name::stored(name.strip_suffix(QUANTIZED).unwrap_or(name))
}

/// Names of the weights of which one is there, where `name` is that of its scale or zero point.
pub(super) fn scaled_weights(name: &str) -> Vec<String> {
    if let Some(ours) = derived_name::scaled(name) {
        return ours.into();
    }
    let base = ["_scale", "_zero_point"].iter().find_map(|ending| name.strip_suffix(ending));
    base.map(|base| format!("{base}{QUANTIZED}")).into_iter().collect()
}

/// Whether the values were trained: no scalar, no list of sizes, no table of positions.
pub(super) fn is_parameter(tensor: &TensorProto) -> bool {
    let is_table = derived_name::is_table(stored_name(&tensor.name));
    let is_number = DataType::try_from(tensor.data_type).is_ok_and(|kind| {
        !matches!(kind, DataType::Undefined | DataType::String | DataType::Bool | DataType::Int32 | DataType::Int64)
            || kind == DataType::Int32 && tensor.name.ends_with(QUANTIZED)
    });
    !tensor.dims.is_empty() && is_number && !is_table
}

/// Values of a list of 64-bit integers in the model file.
pub(super) fn integers(tensor: &TensorProto) -> Vec<i64> {
    if tensor.data_type != DataType::Int64 as i32 {
        return Vec::new();
    }
    let raw = tensor.raw_data.as_deref().unwrap_or_default();
    let words = raw.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word));
    tensor.int64_data.iter().copied().chain(words).collect()
}

/// The last of [`integers`], if it is a size.
pub(super) fn last_integer(tensor: &TensorProto) -> Option<u64> {
    integers(tensor).last().and_then(|value| u64::try_from(*value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_has_one_name_however_it_is_written() {
        let turned = derived_name::turned("a.weight", &[1, 0]);
        for name in ["a.weight", &turned, "a.weight_quantized", &format!("{turned}_quantized")] {
            assert_eq!(stored_name(name), "a.weight", "{name}");
        }
    }

    #[test]
    fn scales_are_those_of_weights_in_integers() {
        assert_eq!(scaled_weights(&derived_name::scale("a.weight")), ["a.weight/int8", "a.weight/int4"]);
        for name in ["a.weight_scale", "a.weight_zero_point"] {
            assert_eq!(scaled_weights(name), ["a.weight_quantized"], "{name}");
        }
        assert_eq!(scaled_weights("a.weight"), [""; 0]);
    }
}
