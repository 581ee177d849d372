//! Nodes that say how accurate their products must be.

use moa_schema::{ACCURACY_LEVEL, OPERATORS};
use serde_json::{Value as Json, json};

use super::*;
use crate::graph::Attribute;

/// With every operator of ours.
fn configurations() -> [Json; 2] {
    [test_models::jetmoe(), test_models::translator()]
}

fn baseline(model_type: &str) -> Json {
    json!({
        "model_type": model_type, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "vocab_size": 30, "encoder_layers": 1, "decoder_layers": 1, "max_positions": 16,
    })
}

fn graphs(config: &Json, form: Form, precision: Precision) -> Result<Vec<Graph>, LowerError> {
    test_models::graphs(config, Options { form, precision, ..Options::default() })
}

#[test]
fn nodes_of_ours_have_the_level_of_their_precision() {
    for precision in Precision::ALL {
        let expected = match precision {
            Precision::Bf16Products => Some(&Attribute::Int(3)),
            Precision::Int8Products | Precision::Int4Products => Some(&Attribute::Int(4)),
            _ => None,
        };
        for form in [Form::Function, Form::Fused] {
            let mut seen = Vec::new();
            for graph in configurations().iter().flat_map(|config| graphs(config, form, precision).unwrap()) {
                for node in &graph.nodes {
                    let is_ours = node.op.domain == moa_schema::DOMAIN;
                    let expected = expected.filter(|_| is_ours);
                    assert_eq!(node.attributes.get(ACCURACY_LEVEL), expected, "{} {}", precision.as_str(), node.name);
                    seen.extend(is_ours.then(|| node.op.op_type.clone()));
                }
                for function in &graph.functions {
                    let named = function.attributes.iter().filter(|name| *name == ACCURACY_LEVEL).count();
                    assert_eq!(named, usize::from(expected.is_some()), "{}", precision.as_str());
                    assert!(function.nodes.iter().all(|node| !node.attributes.contains_key(ACCURACY_LEVEL)));
                }
            }
            for operator in OPERATORS {
                let is_there = precision.has_lm_head() || !operator.is_for_processors;
                assert_eq!(seen.iter().any(|name| name == operator.name), is_there, "{}", operator.name);
            }
        }
    }
}

#[test]
fn what_has_no_operators_of_ours_has_no_level() {
    for [precision, stored] in [
        [Precision::Bf16Products, Precision::Bf16],
        [Precision::Int8Products, Precision::Int8],
        [Precision::Int4Products, Precision::Int4],
    ] {
        let refused = |config: &Json, form| graphs(config, form, precision).unwrap_err().to_string();
        let dtype = precision.as_str();
        let expected = |place| format!("dtype \"{dtype}\" is for products of our operators, and {place} has none");
        for config in configurations() {
            assert_eq!(refused(&config, Form::Standard), expected("the form \"standard\""));
            assert!(graphs(&config, Form::Standard, stored).is_ok());
        }
        for model_type in ["transformer", "roberta"] {
            for form in Form::ALL {
                assert_eq!(refused(&baseline(model_type), form), expected("a standard Transformer"));
            }
        }
    }
}

/// What is stored is the same with and without a level; types of weights and activations are those of the stored.
#[test]
fn products_change_nothing_that_is_stored() {
    for precision in Precision::ALL {
        let stored = precision.without_products();
        assert_eq!(Precision::parse(precision.as_str()), Some(precision));
        assert_eq!((stored.without_products(), stored.accuracy_level()), (stored, AccuracyLevel::Activations));
        assert_eq!(precision == stored, precision.accuracy_level() == AccuracyLevel::Activations);
        let of = |precision: Precision| (precision.integers(), precision.weights(), precision.activations());
        assert_eq!(of(precision), of(stored), "{}", precision.as_str());
    }
}
