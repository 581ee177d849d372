//! One operator of a graph as a graph of its own, with the weights it has there.

use moa_schema::{DOMAIN, ElementType, Operator, Parameter, RoutingPart, attribute, parameter};

use super::{
    LatencyError,
    shapes::{BATCH, PAST, SEQUENCE, SOURCE, axes},
    steering::Router,
};
use crate::onnx::{
    OnnxFile,
    proto::{
        FunctionProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, tensor_proto::DataType,
        tensor_shape_proto::dimension,
    },
    read::{module_of, operator_input, operator_of},
};

/// A graph of one operator.
#[derive(Debug, Clone)]
pub(super) struct CutOperator {
    /// Module of the layer.
    pub module: String,
    /// The graph; its inputs have the names of the operator's contract.
    pub file: OnnxFile,
    /// Its router.
    pub router: Router,
    /// Experts per token.
    pub top_k: usize,
}

/// Every routed operator of `file`, in the order of the graph.
///
/// # Errors
///
/// Where there is none, or one of them computes its weights instead of holding them.
pub(super) fn cut_operators(file: &OnnxFile) -> Result<Vec<CutOperator>, LatencyError> {
    let nodes = file.graph().into_iter().flat_map(|graph| &graph.node);
    let ours = nodes.filter_map(|node| Some((node, operator_of(node).filter(|operator| operator.is_routed())?)));
    let cut = ours.map(|(node, operator)| Cut { file, node, operator }.graph()).collect::<Result<Vec<_>, _>>()?;
    if cut.is_empty() {
        return Err(LatencyError::NoOperators { model: file.path().to_path_buf() });
    }
    Ok(cut)
}

/// A node on its way out of its graph.
struct Cut<'a> {
    file: &'a OnnxFile,
    node: &'a NodeProto,
    operator: &'static Operator,
}

impl Cut<'_> {
    fn module(&self) -> String {
        module_of(self.node).to_owned()
    }

    fn fail(&self, why: impl Into<String>) -> LatencyError {
        LatencyError::Cut { module: self.module(), why: why.into() }
    }

    /// The weight that the parameter `name` is given.
    fn weight(&self, name: &str) -> Result<&TensorProto, LatencyError> {
        let weight = operator_input(self.node, name).and_then(|given| self.file.initializer(given));
        weight.ok_or_else(|| self.fail(format!("its {name} is computed in the graph")))
    }

    fn attribute(&self, name: &str) -> Result<usize, LatencyError> {
        let size = self.node.int_attribute(name).and_then(|value| usize::try_from(value).ok());
        size.ok_or_else(|| self.fail(format!("it has no attribute {name}")))
    }

    fn is_given(&self, name: &str) -> bool {
        operator_input(self.node, name).is_some()
    }

    fn graph(&self) -> Result<CutOperator, LatencyError> {
        let mut node = self.node.clone();
        let mut graph = GraphProto { name: "operator".into(), ..GraphProto::default() };
        for (given, parameter) in node.input.iter_mut().zip(self.operator.inputs) {
            if given.is_empty() {
                continue;
            }
            match self.file.initializer(given) {
                Some(weight) if graph.initializer.iter().any(|known| known.name == weight.name) => {}
                Some(weight) => graph.initializer.push(weight.clone()),
                None if parameter.name.ends_with("weight") => {
                    return Err(self.fail(format!("its {} is computed in the graph", parameter.name)));
                }
                None => {
                    parameter.name.clone_into(given);
                    graph.input.push(self.input(parameter)?);
                }
            }
        }
        let computed: Vec<_> =
            self.operator.outputs.iter().take_while(|output| RoutingPart::of_output(output.name).is_none()).collect();
        node.output.truncate(computed.len());
        for (output, parameter) in node.output.iter_mut().zip(&computed) {
            if !output.is_empty() {
                parameter.name.clone_into(output);
                graph.output.push(ValueInfoProto::tensor(parameter.name, self.data_type(parameter)?, None));
            }
        }
        let mut model = self.file.model().clone();
        // A body declares as many outputs as its nodes have.
        let same = |function: &&mut FunctionProto| function.domain == DOMAIN && function.name == node.op_type;
        model.functions.iter_mut().filter(same).for_each(|function| function.output.truncate(node.output.len()));
        graph.node.push(node);
        model.graph = Some(graph);
        let file = self.file.with_model(model)?;
        Ok(CutOperator {
            module: self.module(),
            file,
            router: self.router()?,
            top_k: self.attribute(attribute::TOP_K)?,
        })
    }

    #[allow(clippy::cast_precision_loss)]
    fn router(&self) -> Result<Router, LatencyError> {
        let weight = self.weight(parameter::ROUTER_WEIGHT)?;
        let [width, experts] = self.sizes(weight)?;
        let bytes = self.file.initializer_values(&weight.name)?;
        let (values, _) = bytes.as_chunks::<4>();
        if weight.data_type != DataType::Float as i32 || values.len() != width * experts || experts == 0 {
            return Err(self.fail("its router is not float32"));
        }
        Ok(Router {
            width,
            experts,
            weight: values.iter().map(|value| f64::from(f32::from_le_bytes(*value))).collect(),
        })
    }

    fn sizes<const N: usize>(&self, weight: &TensorProto) -> Result<[usize; N], LatencyError> {
        let sizes: Option<Vec<usize>> = weight.dims.iter().map(|dim| usize::try_from(*dim).ok()).collect();
        let sizes = sizes.and_then(|sizes| sizes.try_into().ok());
        sizes.ok_or_else(|| self.fail(format!("weight {} has the shape {:?}", weight.name, weight.dims)))
    }

    fn data_type(&self, parameter: &Parameter) -> Result<DataType, LatencyError> {
        let weights = || {
            let kind = DataType::try_from(self.weight(parameter::OUTPUT_WEIGHT)?.data_type);
            kind.map_err(|_| self.fail("its weights have an unknown type"))
        };
        Ok(match parameter.element {
            ElementType::Float32 => DataType::Float,
            ElementType::Int32 => DataType::Int32,
            ElementType::Int64 => DataType::Int64,
            ElementType::Weight => weights()?,
            ElementType::Scale => match weights()? {
                DataType::Int4 => DataType::Bfloat16,
                _ => DataType::Float,
            },
            ElementType::Activation => self.activations(weights()?),
        })
    }

    /// The type of what the node reads and returns as activations; where the graph says none, the one that goes with
    /// its matrices in exports.
    fn activations(&self, weights: DataType) -> DataType {
        let of = |parameters: &'static [Parameter]| {
            parameters.iter().filter(|parameter| parameter.element == ElementType::Activation)
        };
        let inputs = of(self.operator.inputs).filter_map(|input| operator_input(self.node, input.name));
        let mut said = inputs.chain(self.node.output.first().map(String::as_str));
        let is_known = |kind: &DataType| matches!(kind, DataType::Float | DataType::Float16);
        said.find_map(|value| self.file.type_of(value).filter(is_known)).unwrap_or(match weights {
            DataType::Float16 => DataType::Float16,
            _ => DataType::Float,
        })
    }

    /// The graph input of a parameter, with the shape that the contract gives it.
    fn input(&self, parameter: &Parameter) -> Result<ValueInfoProto, LatencyError> {
        let unknown = || self.fail(format!("the shape {} of {} is not known", parameter.shape(), parameter.name));
        let dims = parameter.dims.iter().map(|symbol| self.dim(symbol)?.ok_or_else(unknown));
        Ok(ValueInfoProto::tensor(parameter.name, self.data_type(parameter)?, Some(dims.collect::<Result<_, _>>()?)))
    }

    /// Name of the axis of tokens in the whole graph.
    fn tokens(&self) -> &'static str {
        let axes = axes(self.file);
        if axes.contains(SOURCE) && !axes.contains(SEQUENCE) { SOURCE } else { SEQUENCE }
    }

    /// What a symbol of the contract stands for here.
    #[allow(clippy::cast_possible_wrap)]
    fn dim(&self, symbol: &str) -> Result<Option<dimension::Value>, LatencyError> {
        let named = |name: &str| dimension::Value::DimParam(name.to_owned());
        let fixed = |size: usize| dimension::Value::DimValue(size as i64);
        Ok(Some(match symbol {
            "B" => named(BATCH),
            "T" => named(self.tokens()),
            "S" => named(SOURCE),
            "P" => named(PAST),
            "P + T" if self.is_given(parameter::PAST_KEY) => named(&format!("{PAST} + {}", self.tokens())),
            "P + T" => named(self.tokens()),
            "C" => {
                let given = |name: &&str| self.is_given(name);
                let matrix = Some(parameter::INPUT_WEIGHT).filter(given).unwrap_or(parameter::QUERY_WEIGHT);
                fixed(self.sizes::<3>(self.weight(matrix)?)?[1])
            }
            "R" => fixed(self.sizes::<2>(self.weight(parameter::ROUTER_WEIGHT)?)?[0]),
            "G" => fixed(self.attribute(attribute::KV_NUM_HEADS)?),
            "D" => {
                let groups = self.attribute(attribute::KV_NUM_HEADS)?;
                let [_, _, columns] = self.sizes::<3>(self.weight(parameter::QUERY_WEIGHT)?)?;
                fixed(columns.checked_div(groups).ok_or_else(|| self.fail("kv_num_heads is 0"))?)
            }
            _ => return Ok(None),
        }))
    }
}

#[cfg(test)]
mod tests {
    use moa_schema::{FEED_FORWARD, FloatType, MatrixType, NodeTypes};
    use prost::Message;

    use super::*;
    use crate::onnx::{
        proto::{AttributeProto, ModelProto, OperatorSetIdProto},
        read::Dim,
        read_model,
    };

    fn kind_of(floats: FloatType) -> DataType {
        match floats {
            FloatType::F32 => DataType::Float,
            FloatType::F16 => DataType::Float16,
            FloatType::Bf16 => DataType::Bfloat16,
        }
    }

    fn weight(name: &str, kind: DataType, dims: &[i64]) -> TensorProto {
        let bytes = usize::try_from(dims.iter().product::<i64>()).unwrap() * kind.bits().unwrap() / 8;
        let (dims, data_type) = (dims.to_vec(), kind as i32);
        TensorProto {
            name: name.into(),
            dims,
            data_type,
            raw_data: Some(vec![0; bytes].into()),
            ..TensorProto::default()
        }
    }

    fn node(name: &str, inputs: &[&str], output: &str) -> NodeProto {
        let input = inputs.iter().map(|input| (*input).to_owned()).collect();
        NodeProto { op_type: name.into(), input, output: vec![output.into()], ..NodeProto::default() }
    }

    /// A layer whose hidden states are what `before` makes of the input `x` and the weight `g`.
    fn model([states, activations, weights]: [DataType; 3], before: Vec<NodeProto>) -> ModelProto {
        let mut layer = node(FEED_FORWARD.name, &["h", "r", "i", "o"], "y");
        layer.domain = DOMAIN.into();
        let [top_k, gated] = ["top_k", "gated"].map(|name| AttributeProto::int(name, 1));
        let [gate, silu] =
            [("gate_mode", "topk_softmax"), ("activation", "silu")].map(|(k, v)| AttributeProto::text(k, v));
        layer.attribute = vec![top_k, gate, silu, gated];
        let rows = ["batch", "sequence"].map(|name| dimension::Value::DimParam(name.into()));
        let dims = rows.into_iter().chain([dimension::Value::DimValue(2)]).collect();
        let import = |domain: &str, version| OperatorSetIdProto { domain: domain.into(), version };
        let graph = GraphProto {
            node: before.into_iter().chain([layer]).collect(),
            input: vec![ValueInfoProto::tensor("x", states, Some(dims))],
            output: vec![ValueInfoProto::tensor("y", activations, None)],
            initializer: vec![
                weight("g", activations, &[2]),
                weight("r", DataType::Float, &[2, 3]),
                weight("i", weights, &[3, 2, 8]),
                weight("o", weights, &[3, 4, 2]),
            ],
            ..GraphProto::default()
        };
        let opset_import = vec![import("", 18), import(DOMAIN, 1)];
        ModelProto { ir_version: 9, opset_import, graph: Some(graph), ..ModelProto::default() }
    }

    #[test]
    fn tokens_are_those_of_the_source_in_an_encoder_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.onnx");
        let axes = |names: [&str; 2]| Some(names.map(|name| dimension::Value::DimParam(name.into())).into());
        for (inputs, expected) in
            [([SOURCE, SEQUENCE], SEQUENCE), ([SEQUENCE, SOURCE], SEQUENCE), ([SOURCE; 2], SOURCE)]
        {
            let mut model = model([DataType::Float; 3], vec![node("Identity", &["x"], "h")]);
            let graph = model.graph.as_mut().unwrap();
            graph.input.clear();
            for (name, axis) in ["x", "mask"].into_iter().zip(inputs) {
                graph.input.push(ValueInfoProto::tensor(name, DataType::Float, axes([BATCH, axis])));
            }
            std::fs::write(&path, model.encode_to_vec()).unwrap();
            let cut = cut_operators(&read_model(&path).unwrap()).unwrap();
            let dims = cut[0].file.inputs()[0].dims.clone().unwrap();
            assert_eq!(
                dims,
                [Dim::Symbolic(BATCH.into()), Dim::Symbolic(expected.into()), Dim::Fixed(2)],
                "{inputs:?}"
            );
        }
    }

    #[test]
    fn activations_have_the_type_that_the_graph_gives_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.onnx");
        for NodeTypes { activations, weights } in NodeTypes::ALL {
            let MatrixType::Float(weights) = weights else { continue };
            let (activations, weights) = (kind_of(activations), kind_of(weights));
            let mut cast = node("Cast", &["x"], "h");
            cast.attribute.push(AttributeProto::int("to", activations as i64));
            for (states, before) in [
                (activations, vec![node("Identity", &["x"], "h")]),
                (activations, vec![node("Erf", &["x"], "e"), node("Mul", &["e", "g"], "h")]),
                (activations, vec![node("Erf", &["x"], "h")]),
                (DataType::Int32, vec![cast]),
            ] {
                std::fs::write(&path, model([states, activations, weights], before).encode_to_vec()).unwrap();
                let cut = cut_operators(&read_model(&path).unwrap()).unwrap();
                let (inputs, outputs) = (cut[0].file.inputs(), cut[0].file.outputs());
                let found = [&inputs[0], &outputs[0]].map(|value| (value.name.as_str(), value.data_type));
                assert_eq!(found, [("hidden_states", activations), ("output", activations)], "{weights:?}");
            }
        }
    }
}
