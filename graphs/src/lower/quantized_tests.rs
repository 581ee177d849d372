//! Models whose matrices are int8.

use std::collections::BTreeMap;

use moa_schema::{ElementType, OPERATORS};
use serde_json::{Value as Json, json};

use super::*;
use crate::{
    SyntheticTensors,
    families::{Config, ImportOptions, import},
    graph::{Initializer, Node},
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

fn weights(graph: &Graph) -> BTreeMap<&str, &Initializer> {
    graph.initializers.iter().map(|initializer| (initializer.name.as_str(), initializer)).collect()
}

fn ours(graph: &Graph) -> impl Iterator<Item = &Node> {
    graph.nodes.iter().filter(|node| node.op.domain == moa_schema::DOMAIN)
}

#[test]
fn nodes_read_integers_and_a_scale_for_each_column() {
    let mut seen = BTreeMap::new();
    for config in [jetmoe(), translator()] {
        for graph in graphs(&config, Form::Fused, Precision::Int8) {
            let weights = weights(&graph);
            for node in ours(&graph) {
                *seen.entry(node.op.op_type.clone()).or_insert(0) += 1;
                let operator = OPERATORS.iter().find(|operator| operator.name == node.op.op_type).unwrap();
                let place = |name: &str| operator.inputs.iter().position(|input| input.name == name).unwrap();
                for input in operator.inputs.iter().filter(|input| input.element == ElementType::Weight) {
                    let matrix = weights[node.inputs[place(input.name)].as_str()];
                    let scale = weights[node.inputs[place(&input.name.replace("_weight", "_scale"))].as_str()];
                    assert_eq!((matrix.dtype(), scale.dtype()), (DType::Int8, DType::Float32));
                    assert_eq!(format!("{}/scale", matrix.name.strip_suffix("/int8").unwrap()), scale.name);
                    let mut shape = matrix.shape.clone();
                    assert_eq!(shape.len(), input.dims.len());
                    shape.remove(shape.len() - 2);
                    assert_eq!(scale.shape, shape);
                    assert_eq!(scale.data.to_bytes().unwrap().len() as u64, scale.bytes());
                }
                let router = weights[node.inputs[place("router_weight")].as_str()];
                assert_eq!(router.dtype(), DType::Float32);
            }
            let integers = weights.values().filter(|weight| weight.dtype() == DType::Int8);
            let readers = |weight: &Initializer| ours(&graph).filter(|node| node.inputs.contains(&weight.name)).count();
            assert!(integers.into_iter().all(|weight| readers(weight) == 1));
        }
    }
    let expected = [("MoACrossAttention", 1), ("MoASelfAttention", 4), ("MoEFeedForward", 2)];
    assert_eq!(seen, expected.map(|(name, count)| (name.to_owned(), count)).into());
}

#[test]
fn bodies_multiply_integers_with_their_scales_first() {
    for config in [jetmoe(), translator()] {
        for graph in graphs(&config, Form::Function, Precision::Int8) {
            for function in &graph.functions {
                let weights =
                    function.inputs.iter().filter(|name| name.ends_with("_weight") && *name != "router_weight");
                for weight in weights {
                    let scale = weight.replace("_weight", "_scale");
                    assert!(function.inputs.contains(&scale), "{scale}");
                    check_product(&function.nodes, weight, &scale);
                }
            }
            assert!(!graph.functions.is_empty());
        }
        for graph in graphs(&config, Form::Standard, Precision::Int8) {
            let integers = graph.initializers.iter().filter(|weight| weight.dtype() == DType::Int8);
            for integers in integers {
                check_product(&graph.nodes, &integers.name, &integers.name.replace("/int8", "/scale"));
            }
        }
    }
}

/// The only reader of `weight` casts it, and the product with `scale` is all that reads that.
fn check_product(nodes: &[Node], weight: &str, scale: &str) {
    let reader = |value: &str| {
        let readers: Vec<_> = nodes.iter().filter(|node| node.inputs.iter().any(|input| input == value)).collect();
        let [reader] = readers.as_slice() else { panic!("{value} has {} readers", readers.len()) };
        *reader
    };
    let (cast, row) = (reader(weight), reader(scale));
    assert_eq!([cast, row].map(|node| node.op.op_type.as_str()), ["Cast", "Unsqueeze"]);
    let product = reader(&cast.outputs[0]);
    assert_eq!(product.op.op_type, "Mul");
    assert_eq!(product.inputs, [cast.outputs[0].clone(), row.outputs[0].clone()]);
}

#[test]
fn floats_have_no_scales() {
    for precision in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
        for form in Form::ALL {
            for graph in [jetmoe(), translator()].iter().flat_map(|config| graphs(config, form, precision)) {
                let weights = graph.initializers.iter().map(|weight| (weight.name.as_str(), weight.dtype()));
                assert!(weights.into_iter().all(|(name, dtype)| !name.ends_with("/scale") && dtype != DType::Int8));
                let scales = |inputs: &[String]| inputs.iter().any(|input| input.ends_with("_scale"));
                assert!(!graph.functions.iter().any(|function| scales(&function.inputs)));
            }
        }
    }
}

#[test]
fn other_matrices_stay_floats() {
    let graphs = graphs(&translator(), Form::Fused, Precision::Int8);
    for graph in &graphs {
        for node in graph.nodes.iter().filter(|node| node.op.op_type == "MatMul") {
            if let Some(matrix) = weights(graph).get(node.inputs[1].as_str()) {
                assert_eq!(matrix.dtype(), DType::Float32, "{}", matrix.name);
            }
        }
    }
    let integers = |graph: &Graph| graph.initializers.iter().filter(|weight| weight.dtype() == DType::Int8).count();
    assert_eq!(graphs.iter().map(integers).collect::<Vec<_>>(), [3, 5]);
}
