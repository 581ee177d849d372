//! The tables of `custom_ops/README.md` are those of the schema.

#![allow(clippy::unwrap_used)]

use std::fmt::Write;

use moa_schema::{
    AccuracyLevel, Activation, AttentionMode, Attribute, AttributeKind, ElementType, FURTHER_ATTRIBUTES, GateMode,
    OPERATORS, Operator, Parameter,
};

const README: &str = include_str!("../../README.md");

fn element(element: ElementType) -> &'static str {
    match element {
        ElementType::Activation => "activation",
        ElementType::Weight => "weight",
        ElementType::Float32 => "float32",
        ElementType::Scale => "scale",
        ElementType::Int32 => "int32",
        ElementType::Int64 => "int64",
    }
}

fn parameters(text: &mut String, kind: &str, parameters: &[Parameter]) {
    for (index, parameter) in parameters.iter().enumerate() {
        let (Parameter { name, optional, .. }, shape) = (parameter, parameter.shape());
        let kind = if *optional { format!("{kind} {index}, optional") } else { format!("{kind} {index}") };
        writeln!(text, "| {kind} | `{name}` | {} | {shape} |", element(parameter.element)).unwrap();
    }
}

/// What an attribute may be.
fn values(attribute: &Attribute) -> String {
    let listed = |texts: &[&str]| texts.iter().map(|text| format!("`{text}`")).collect::<Vec<_>>().join(", ");
    match (attribute.name, attribute.kind) {
        ("attention_mode", _) => listed(&AttentionMode::ALL.map(AttentionMode::as_str)),
        ("gate_mode", _) => listed(&GateMode::ALL.map(GateMode::as_str)),
        ("activation", _) => listed(&Activation::ALL.map(Activation::as_str)),
        ("causal" | "gated" | "skip_padded_queries", _) => "0 or 1".into(),
        (_, AttributeKind::Int) => "1 or more".into(),
        (_, AttributeKind::Float | AttributeKind::String) => String::new(),
    }
}

fn table(operator: &Operator) -> String {
    let mut text = format!("### {}\n\n| | name | type | shape or values |\n|---|---|---|---|\n", operator.name);
    parameters(&mut text, "input", operator.inputs);
    parameters(&mut text, "output", operator.outputs);
    for attribute in operator.attributes {
        writeln!(text, "| attribute | `{}` | {} | {} |", attribute.name, attribute.kind, values(attribute)).unwrap();
    }
    text
}

#[test]
fn the_tables_of_the_readme_are_those_of_the_schema() {
    for operator in OPERATORS {
        let table = table(&operator);
        assert!(README.contains(&format!("{table}\n")), "custom_ops/README.md must hold\n\n{table}");
    }
}

#[test]
fn the_readme_names_what_any_node_may_have() {
    for Attribute { name, kind } in FURTHER_ATTRIBUTES {
        assert!(README.contains(&format!("`{name}` ({kind})")), "{name}");
    }
}

#[test]
fn the_readme_says_what_every_accuracy_level_means() {
    for level in AccuracyLevel::ALL {
        assert!(README.contains(&format!("With {}, ", level.number())), "{level:?}");
    }
}
