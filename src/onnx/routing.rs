//! Makes the routing of a file visible: the same graph with more outputs.

use moa_schema::{DOMAIN, Operator, RoutingPart};

use super::{
    proto::{FunctionProto, ModelProto, NodeProto, ValueInfoProto, tensor_proto::DataType},
    read::{module_of, operator_of},
};

/// Makes the routing of every routed module a graph output; returns the modules in the order of the graph.
pub fn expose_routing(model: &mut ModelProto) -> Vec<String> {
    for function in &mut model.functions {
        declare_routing(function);
        widen_calls(&mut function.node);
    }
    let Some(graph) = model.graph.as_mut() else { return Vec::new() };
    let modules: Vec<_> = graph.node.iter_mut().filter_map(routed_module).collect();
    widen_calls(&mut graph.node);
    for module in &modules {
        for part in RoutingPart::ALL {
            let name = part.name(module);
            if graph.output.iter().all(|output| output.name != name) {
                graph.output.push(ValueInfoProto::tensor(&name, data_type(part), None));
            }
        }
    }
    modules
}

/// Bodies compute their routing under the schema's names, whether it is an output or not.
fn declare_routing(function: &mut FunctionProto) {
    let operator = Operator::called(&function.domain, &function.name);
    let missing = operator.and_then(|operator| operator.outputs.get(function.output.len()..)).unwrap_or_default();
    function.output.extend(missing.iter().map(|output| output.name.to_owned()));
}

/// The module that a node routes, if it does; a node of ours then writes its routing.
fn routed_module(node: &mut NodeProto) -> Option<String> {
    let named = node.output.iter().find_map(|name| RoutingPart::Indices.module(name)).map(str::to_owned);
    if node.domain != DOMAIN {
        return named;
    }
    let operator = operator_of(node)?;
    let module = named.unwrap_or_else(|| module_of(node).to_owned());
    for part in RoutingPart::ALL {
        let position = operator.outputs.iter().position(|output| output.name == part.output())?;
        if node.output.len() <= position {
            node.output.resize(position + 1, String::new());
        }
        if node.output[position].is_empty() {
            node.output[position] = part.name(&module);
        }
    }
    Some(module)
}

/// A node has as many outputs as its body, those too whose routing nobody sees.
fn widen_calls(nodes: &mut [NodeProto]) {
    for node in nodes {
        let outputs = operator_of(node).map_or(0, |operator| operator.outputs.len());
        node.output.resize(node.output.len().max(outputs), String::new());
        for graph in node.attribute.iter_mut().flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs))
        {
            widen_calls(&mut graph.node);
        }
    }
}

fn data_type(part: RoutingPart) -> DataType {
    match part {
        RoutingPart::Indices => DataType::Int64,
        RoutingPart::Weights => DataType::Float,
    }
}
