//! Models whose matrices are integers.

use std::collections::BTreeMap;

use moa_schema::{IntegerType, OPERATORS};
use serde_json::{Value as Json, json};

use super::*;
use crate::{
    SyntheticTensors,
    families::{Config, ImportOptions, import},
    graph::{Attribute, Initializer, Node},
};

fn graphs(config: &Json, form: Form, precision: Precision) -> Vec<Graph> {
    let config = Config::new("config.json", config.as_object().unwrap().clone());
    let model = import(&config, &SyntheticTensors::random("memory", 1), ImportOptions::default()).unwrap();
    let options = Options { form, precision, router_outputs: false, last_logits: false };
    lower(&model, options).unwrap().into_iter().map(|named| named.graph).collect()
}

/// Stored transposed, gated, with experts in feed-forward blocks.
fn jetmoe() -> Json {
    json!({
        "model_type": "jetmoe", "hidden_size": 16, "vocab_size": 30, "num_experts_per_tok": 2, "kv_channels": 8,
        "num_key_value_heads": 3, "num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 24,
    })
}

/// Stored as the operators take them, with cross-attention.
fn translator() -> Json {
    json!({
        "model_type": "moa_transformer", "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "num_expert": 6,
        "encoder_attention_heads": 2, "decoder_attention_heads": 3, "head_dim": 8, "vocab_size": 30,
        "encoder_layers": 1, "decoder_layers": 1,
    })
}

/// Every model in every type of integers.
fn in_integers(form: Form) -> impl Iterator<Item = (IntegerType, Graph)> {
    [(Precision::Int8, IntegerType::Int8), (Precision::Int4, IntegerType::Int4)].into_iter().flat_map(
        move |(precision, integers)| {
            let all = [jetmoe(), translator()].map(|config| graphs(&config, form, precision));
            all.into_iter().flatten().map(move |graph| (integers, graph))
        },
    )
}

fn weights(graph: &Graph) -> BTreeMap<&str, &Initializer> {
    graph.initializers.iter().map(|initializer| (initializer.name.as_str(), initializer)).collect()
}

fn ours(graph: &Graph) -> impl Iterator<Item = &Node> {
    graph.nodes.iter().filter(|node| node.op.domain == moa_schema::DOMAIN)
}

#[test]
fn nodes_read_integers_and_their_scales() {
    let mut seen = BTreeMap::new();
    for (integers, graph) in in_integers(Form::Fused) {
        let weights = weights(&graph);
        for node in ours(&graph) {
            *seen.entry(node.op.op_type.clone()).or_insert(0) += 1;
            let operator = OPERATORS.iter().find(|operator| operator.name == node.op.op_type).unwrap();
            for [matrix, scale] in operator.matrices() {
                let rank = operator.inputs[matrix].dims.len();
                let [matrix, scale] = [matrix, scale].map(|place| weights[node.inputs[place].as_str()]);
                assert_eq!([matrix.dtype(), scale.dtype()], [integers.into(), integers.scales().into()]);
                let name = matrix.name.strip_suffix(&format!("/{integers}")).unwrap();
                assert_eq!((format!("{name}/scale"), rank), (scale.name.clone(), matrix.shape.len()));
                assert_eq!(scale.shape, integers.scale_shape(&matrix.shape));
                for weight in [matrix, scale] {
                    assert_eq!(weight.data.to_bytes().unwrap().len() as u64, weight.bytes());
                }
            }
            let router = operator.inputs.iter().position(|input| input.name == "router_weight").unwrap();
            assert_eq!(weights[node.inputs[router].as_str()].dtype(), DType::Float32);
        }
        let matrices = weights.values().filter(|weight| weight.dtype() == integers.into());
        let readers = |weight: &Initializer| ours(&graph).filter(|node| node.inputs.contains(&weight.name)).count();
        assert!(matrices.into_iter().all(|weight| readers(weight) == 1));
    }
    let expected = [("MoACrossAttention", 2), ("MoASelfAttention", 8), ("MoEFeedForward", 4)];
    assert_eq!(seen, expected.map(|(name, count)| (name.to_owned(), count)).into());
}

#[test]
fn bodies_multiply_integers_with_their_scales_first() {
    for (integers, graph) in in_integers(Form::Function) {
        for function in &graph.functions {
            let weights = function.inputs.iter().filter(|name| name.ends_with("_weight") && *name != "router_weight");
            for weight in weights {
                let scale = weight.replace("_weight", "_scale");
                assert!(function.inputs.contains(&scale), "{scale}");
                check_product(&function.nodes, integers, weight, &scale);
            }
        }
        assert!(!graph.functions.is_empty());
    }
    for (integers, graph) in in_integers(Form::Standard) {
        for matrix in graph.initializers.iter().filter(|weight| weight.dtype() == integers.into()) {
            let scale = matrix.name.replace(&format!("/{integers}"), "/scale");
            check_product(&graph.nodes, integers, &matrix.name, &scale);
        }
    }
}

/// The only reader of `weight` widens it, and nothing else reads its scale.
fn check_product(nodes: &[Node], integers: IntegerType, weight: &str, scale: &str) {
    let reader = |value: &str| {
        let readers: Vec<_> = nodes.iter().filter(|node| node.inputs.iter().any(|input| input == value)).collect();
        let [reader] = readers.as_slice() else { panic!("{value} has {} readers", readers.len()) };
        *reader
    };
    let (widened, row) = (reader(weight), reader(scale));
    match integers {
        IntegerType::Int8 => {
            assert_eq!([widened, row].map(|node| node.op.op_type.as_str()), ["Cast", "Unsqueeze"]);
            let product = reader(&widened.outputs[0]);
            assert_eq!(product.op.op_type, "Mul");
            assert_eq!(product.inputs, [widened.outputs[0].clone(), row.outputs[0].clone()]);
        }
        IntegerType::Int4 => {
            assert_eq!([widened, row].map(|node| node.op.op_type.as_str()), ["DequantizeLinear", "Cast"]);
            assert_eq!(widened.inputs, [weight, row.outputs[0].as_str()]);
            let blocks = [("axis", Attribute::Int(-2)), ("block_size", Attribute::Int(32))];
            assert_eq!(widened.attributes, blocks.map(|(name, value)| (name.to_owned(), value)).into());
        }
    }
}

#[test]
fn floats_have_no_scales() {
    for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
        for form in Form::ALL {
            for graph in [jetmoe(), translator()].iter().flat_map(|config| graphs(config, form, precision)) {
                let weights = graph.initializers.iter().map(|weight| (weight.name.as_str(), weight.dtype()));
                let is_float = |dtype: DType| ![DType::Int8, DType::Int4].contains(&dtype);
                assert!(weights.into_iter().all(|(name, dtype)| !name.ends_with("/scale") && is_float(dtype)));
                let scales = |inputs: &[String]| inputs.iter().any(|input| input.ends_with("_scale"));
                assert!(!graph.functions.iter().any(|function| scales(&function.inputs)));
            }
        }
    }
}

#[test]
fn other_matrices_stay_floats() {
    let mut counts = Vec::new();
    for (integers, graph) in in_integers(Form::Fused) {
        for node in graph.nodes.iter().filter(|node| node.op.op_type == "MatMul") {
            if let Some(matrix) = weights(&graph).get(node.inputs[1].as_str()) {
                assert_eq!(matrix.dtype(), DType::Float32, "{}", matrix.name);
            }
        }
        counts.push(graph.initializers.iter().filter(|weight| weight.dtype() == integers.into()).count());
    }
    assert_eq!(counts, [10, 3, 5].repeat(2));
}
