//! The operators' contract as a C++ header.

use std::fmt::Write;

use moa_cuda::ACTIVATIONS;
use moa_schema::{
    Activation, AttentionMode, Attribute, AttributeKind, CUDA_LIBRARY, CUDA_VARIABLE, DOMAIN, ElementType, GateMode,
    OPERATORS, OPSET_VERSION, OUTPUT_COUNT, Operator, PLUGIN_NAMESPACE, PLUGIN_VERSION, PRESENT_INPUTS, Parameter,
};

/// Names of the namespaces that hold the positions of inputs, in the order of [`served`].
const NAMESPACES: [&str; 3] = ["self_attention", "cross_attention", "feed_forward"];

/// The tables of `custom_ops/schema`.
pub(super) fn header() -> String {
    let mut text = String::from(
        "// Written by `cargo xtask tensorrt` from custom_ops/schema.\n#pragma once\n\n\
         #include \"contract_types.h\"\n\nnamespace moa::contract {\n\n",
    );
    let version = OPSET_VERSION.to_string();
    for (name, value) in [
        ("domain", DOMAIN),
        ("opset_version", &version),
        ("present_inputs", PRESENT_INPUTS),
        ("output_count", OUTPUT_COUNT),
        ("plugin_version", PLUGIN_VERSION),
        ("plugin_namespace", PLUGIN_NAMESPACE),
        ("cuda_variable", CUDA_VARIABLE),
        ("cuda_library", &format!("lib{CUDA_LIBRARY}.so")),
    ] {
        line(&mut text, &format!("inline constexpr const char *{name} = \"{value}\";"));
    }
    names(&mut text, "gate_modes", &GateMode::ALL.map(GateMode::as_str));
    names(&mut text, "activations", &ACTIVATIONS.map(Activation::as_str));
    names(&mut text, "attention_modes", &AttentionMode::ALL.map(AttentionMode::as_str));
    let served = served();
    for (operator, namespace) in served.iter().zip(NAMESPACES) {
        tables(&mut text, operator, namespace);
    }
    let all = NAMESPACES.map(|name| format!("{name}::all"));
    line(&mut text, &format!("inline constexpr Operator operator_table[] = {{{}}};", all.join(", ")));
    line(&mut text, &format!("inline constexpr List<Operator> operators{{operator_table, {}}};", served.len()));
    text.push_str("\n}  // namespace moa::contract\n");
    text
}

/// The operators that the plugins serve, as they are where matrices are floats.
fn served() -> Vec<Operator> {
    OPERATORS.iter().filter(|operator| !operator.is_for_processors).map(Operator::of_floats).collect()
}

fn tables(text: &mut String, operator: &Operator, namespace: &str) {
    line(text, &format!("\nnamespace {namespace} {{"));
    for (position, input) in operator.inputs.iter().enumerate() {
        line(text, &format!("inline constexpr std::size_t {} = {position};", input.name));
    }
    let inputs: Vec<_> = operator.inputs.iter().map(parameter).collect();
    let outputs: Vec<_> = operator.outputs.iter().map(parameter).collect();
    let attributes: Vec<_> = operator.attributes.iter().map(attribute).collect();
    for (kind, name, rows) in
        [("Parameter", "inputs", inputs), ("Parameter", "outputs", outputs), ("Attribute", "attributes", attributes)]
    {
        line(text, &format!("inline constexpr {kind} {name}_table[] = {{{}}};", rows.join(", ")));
    }
    let list = |name: &str, count: usize| format!("{{{name}_table, {count}}}");
    let lists = [
        list("inputs", operator.inputs.len()),
        list("outputs", operator.outputs.len()),
        list("attributes", operator.attributes.len()),
    ];
    line(text, &format!("inline constexpr Operator all{{\"{}\", {}}};", operator.name, lists.join(", ")));
    line(text, &format!("}}  // namespace {namespace}"));
}

fn parameter(parameter: &Parameter) -> String {
    let element = match parameter.element {
        ElementType::Activation => "activation",
        ElementType::Weight => "weight",
        ElementType::Float32 | ElementType::Scale => "float32",
        ElementType::Int32 => "int32",
        ElementType::Int64 => "int64",
    };
    let extents: Vec<_> = parameter.dims.iter().map(|dim| format!("Extent::{}", extent(dim))).collect();
    format!("{{\"{}\", Element::{element}, {}, {{{}}}}}", parameter.name, parameter.optional, extents.join(", "))
}

/// What a dimension is, by the symbol that the schema has for it.
fn extent(dim: &str) -> &'static str {
    match dim {
        "B" => "batch",
        "T" => "tokens",
        "P" | "S" => "others",
        "P + T" => "tokens_and_others",
        _ => "fixed",
    }
}

fn attribute(attribute: &Attribute) -> String {
    let kind = match attribute.kind {
        AttributeKind::Int => "integer",
        AttributeKind::Float => "real",
        AttributeKind::String => "text",
    };
    format!("{{\"{}\", Kind::{kind}}}", attribute.name)
}

fn names(text: &mut String, list: &str, values: &[&str]) {
    let quoted: Vec<_> = values.iter().map(|value| format!("\"{value}\"")).collect();
    line(text, &format!("inline constexpr const char *{list}_table[] = {{{}}};", quoted.join(", ")));
    line(text, &format!("inline constexpr List<const char *> {list}{{{list}_table, {}}};", values.len()));
}

fn line(text: &mut String, line: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{line}");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_header_holds_every_name_of_the_contract() {
        let header = header();
        assert_eq!(served().len(), NAMESPACES.len());
        for operator in served() {
            let parameters = operator.inputs.iter().chain(operator.outputs).map(|parameter| parameter.name);
            for name in parameters.chain(operator.attributes.iter().map(|a| a.name)).chain([operator.name]) {
                assert!(header.contains(&format!("\"{name}\"")), "{name}");
            }
        }
        for line in ["domain = \"ai.moa\"", "opset_version = \"1\"", "plugin_version = \"plugin_version\""] {
            assert!(header.contains(&format!("inline constexpr const char *{line};\n")), "{line}");
        }
        // As MOA_CUDA_RELU, MOA_CUDA_SOFTMAX and those after them number them.
        assert!(header.contains("activations_table[] = {\"relu\", \"gelu\", \"silu\", \"gelu_tanh\"}"));
        assert!(header.contains("attention_modes_table[] = {\"softmax\", \"stick_breaking\"}"));
        assert!(header.contains("{\"kv_weight\", Element::weight, true, {Extent::fixed, Extent::fixed}}"));
        let dims =
            served().iter().flat_map(|operator| operator.inputs).flat_map(|input| input.dims).collect::<BTreeSet<_>>();
        let fixed: Vec<_> = dims.into_iter().filter(|dim| extent(dim) == "fixed").collect();
        assert_eq!(fixed, [&"2 * G * D", &"C", &"D", &"D / 2", &"E", &"F", &"G", &"G * D", &"R", &"positions"]);
        let mask = "{\"attention_mask\", Element::int32, false, {Extent::batch, Extent::tokens_and_others}}";
        assert!(header.contains(mask));
        // As MOA_CUDA_SELF_ATTENTION and the two after it number them.
        let names: Vec<_> = served().iter().map(|operator| operator.name).collect();
        assert_eq!(names, ["MoASelfAttention", "MoACrossAttention", "MoEFeedForward"]);
    }
}
