//! Writes graphs and operator bodies node by node; the only place that invents names.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use moa_schema::IntegerType;

use super::{
    Attribute, Constant, ConstantValues, DType, Data, Dim, Function, Graph, Initializer, Node, OpId, Quantization,
    ValueInfo, WeightExpr, uses::Uses,
};
use crate::{FloatType, Precision, derived_name};

/// A value of the graph under construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value(String);

impl Value {
    /// An absent optional input.
    pub fn absent() -> Self {
        Self(String::new())
    }

    /// Name in the graph.
    pub fn name(&self) -> &str {
        &self.0
    }
}

/// Builds one graph, or the body of one operator.
///
/// In a graph, constants are initializers, and transposing or reshaping a trained weight is done when it is
/// written. In a body, constants are nodes, and formal inputs are transposed when the model is loaded.
#[derive(Debug, Default)]
pub struct Builder {
    precision: Precision,
    in_body: bool,
    prefix: String,
    names: BTreeSet<String>,
    counters: HashMap<String, usize>,
    inputs: Vec<ValueInfo>,
    outputs: Vec<ValueInfo>,
    values: Vec<ValueInfo>,
    initializers: Vec<Initializer>,
    literals: Vec<(Constant, Value)>,
    weights: BTreeMap<String, (WeightExpr, FloatType)>,
    nodes: Vec<Node>,
    uses: Uses,
    functions: Vec<Function>,
}

impl Builder {
    /// A builder of a graph.
    pub fn graph(precision: Precision) -> Self {
        Self { precision, ..Self::default() }
    }

    /// A builder of an operator body whose formal inputs are `inputs`.
    pub fn body(inputs: &[&str], precision: Precision) -> Self {
        let names = inputs.iter().map(|name| (*name).to_owned()).collect();
        Self { precision, in_body: true, names, ..Self::default() }
    }

    /// Names of values and nodes start with `prefix` from here on.
    pub fn set_prefix(&mut self, prefix: &str) {
        self.prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    }

    /// Adds a graph input.
    pub fn input(&mut self, name: &str, dtype: DType, shape: &[Dim]) -> Value {
        self.names.insert(name.into());
        self.inputs.push(ValueInfo { name: name.into(), dtype, shape: shape.to_vec() });
        Value(name.into())
    }

    /// Makes `value` the graph output `name`.
    pub fn output(&mut self, value: &Value, name: &str, dtype: DType, shape: &[Dim]) {
        self.rename(value, name);
        self.uses.add_output(name);
        self.outputs.push(ValueInfo { name: name.into(), dtype, shape: shape.to_vec() });
    }

    /// Says what a value in between is.
    pub fn describe(&mut self, value: &Value, dtype: DType, shape: &[Dim]) {
        self.uses.add_description(self.values.len(), &value.0);
        self.values.push(ValueInfo { name: value.0.clone(), dtype, shape: shape.to_vec() });
    }

    /// Calls a value `name`: a copy where it is an input, an initializer or an output under another name.
    pub fn rename(&mut self, value: &Value, name: &str) -> Value {
        let renamed = Value(name.into());
        if *value == renamed {
            return renamed;
        }
        self.names.insert(name.into());
        if self.uses.is_inner(&value.0) {
            self.uses.rename(&value.0, name, &mut self.nodes, &mut self.values);
        } else {
            self.push("Identity", name, &[value], vec![name.into()], []);
        }
        renamed
    }

    /// The value called `name`: a formal input of a body, or an output that was named when it was made.
    pub fn named(&self, name: &str) -> Value {
        Value(name.into())
    }

    /// A trained weight as the f32 initializer `name`; the same name is added once.
    pub fn weight(&mut self, name: &str, expr: impl Into<WeightExpr>) -> Value {
        self.weight_as(name, expr, FloatType::F32)
    }

    /// A trained weight as the initializer `name` of the type `float`; the same name is added once, or once for each
    /// type: those after the first are called [`derived_name::of_type`].
    ///
    /// What [`Self::transpose`] and [`Self::reshape_static`] make of it has the same type.
    pub fn weight_as(&mut self, name: &str, expr: impl Into<WeightExpr>, float: FloatType) -> Value {
        if self.weights.get(name).is_some_and(|(_, known)| *known != float) {
            return self.weight_as(&derived_name::of_type(name, float), expr, float);
        }
        if self.names.insert(name.into()) {
            let expr = expr.into();
            self.weights.insert(name.into(), (expr.clone(), float));
            self.initializers.push(Initializer { name: name.into(), data: Data::Weight(expr, float) });
        }
        Value(name.into())
    }

    /// The trained weight `matrix`, `[.., inner, columns]`, in integers: an initializer of its shape, and one of their
    /// scales. What is no trained weight has no scales.
    pub fn quantized(&mut self, matrix: &Value, integers: IntegerType) -> [Value; 2] {
        let Some((expr, _)) = self.weights.get(matrix.name()) else {
            return [matrix.clone(), Value::absent()];
        };
        let names = [derived_name::in_integers(matrix.name(), integers), derived_name::scale(matrix.name())];
        if self.names.insert(names[0].clone()) {
            let matrices = Arc::new(Quantization::new(expr.clone(), integers));
            for (name, data) in names.iter().zip([Data::Integers(matrices.clone()), Data::Scales(matrices)]) {
                self.names.insert(name.clone());
                self.initializers.push(Initializer { name: name.clone(), data });
            }
        }
        names.map(Value)
    }

    /// A list of integers.
    pub fn ints(&mut self, values: &[i64]) -> Value {
        self.literal(Constant { shape: vec![values.len()], values: ConstantValues::Int64(values.to_vec()) })
    }

    /// One integer.
    pub fn int(&mut self, value: i64) -> Value {
        self.literal(Constant { shape: vec![], values: ConstantValues::Int64(vec![value]) })
    }

    /// One number in f32.
    pub fn float32(&mut self, value: f32) -> Value {
        self.literal(Constant { shape: vec![], values: ConstantValues::Float32(vec![value]) })
    }

    /// One number in the activations' type.
    pub fn float(&mut self, value: f32) -> Value {
        let values = match self.precision.activations() {
            FloatType::F16 => ConstantValues::Float16(vec![half::f16::from_f32(value)]),
            _ => return self.float32(value),
        };
        self.literal(Constant { shape: vec![], values })
    }

    fn literal(&mut self, constant: Constant) -> Value {
        if let Some((_, value)) = self.literals.iter().find(|(known, _)| *known == constant) {
            return value.clone();
        }
        let prefix = std::mem::take(&mut self.prefix);
        let value = if self.in_body {
            self.op("Constant", &[], [("value", Attribute::Tensor(constant.clone()))])
        } else {
            let name = self.fresh("constant");
            self.initializers.push(Initializer { name: name.clone(), data: Data::Literal(constant.clone()) });
            Value(name)
        };
        self.prefix = prefix;
        self.literals.push((constant, value.clone()));
        value
    }

    /// A standard operator with one output.
    pub fn op<const N: usize>(
        &mut self,
        op_type: &str,
        inputs: &[&Value],
        attributes: [(&str, Attribute); N],
    ) -> Value {
        let name = self.fresh(op_type);
        self.push(op_type, &name, inputs, vec![name.clone()], attributes);
        Value(name)
    }

    /// A standard operator with two outputs.
    pub fn op2<const N: usize>(
        &mut self,
        op_type: &str,
        inputs: &[&Value],
        attributes: [(&str, Attribute); N],
    ) -> [Value; 2] {
        let name = self.fresh(op_type);
        let second = self.fresh(op_type);
        self.push(op_type, &name, inputs, vec![name.clone(), second.clone()], attributes);
        [Value(name), Value(second)]
    }

    /// A node of a domain of its own, called `name` whose outputs are called `outputs`.
    pub fn custom_op(
        &mut self,
        op: OpId,
        name: &str,
        inputs: &[&Value],
        outputs: &[&str],
        attributes: BTreeMap<String, Attribute>,
    ) {
        self.names.extend(outputs.iter().map(|output| (*output).to_owned()));
        self.add(Node {
            name: name.into(),
            op,
            inputs: inputs.iter().map(|value| value.0.clone()).collect(),
            outputs: outputs.iter().map(|output| (*output).to_owned()).collect(),
            attributes,
        });
    }

    /// A fresh name for an output of [`Self::custom_op`].
    pub fn fresh_value(&mut self, stem: &str) -> Value {
        Value(self.fresh(stem))
    }

    /// Floats of this graph.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Type of activations.
    pub fn activations(&self) -> DType {
        self.precision.activations().into()
    }

    /// A trained matrix in the type that every matrix of its kind is stored in.
    pub fn matrix(&mut self, name: &str, expr: impl Into<WeightExpr>) -> Value {
        self.weight_as(name, expr, self.precision.weights())
    }

    /// A bias in the type of activations.
    pub fn bias(&mut self, name: &str, expr: impl Into<WeightExpr>) -> Value {
        self.weight_as(name, expr, self.precision.activations())
    }

    /// A trained matrix, or rows of one, in the type of activations.
    pub fn widen(&mut self, matrix: &Value) -> Value {
        self.convert(matrix, self.precision.weights(), self.precision.activations())
    }

    /// Activations as f32.
    pub fn to_float32(&mut self, activations: &Value) -> Value {
        self.convert(activations, self.precision.activations(), FloatType::F32)
    }

    /// f32 values as activations.
    pub fn from_float32(&mut self, values: &Value) -> Value {
        self.convert(values, FloatType::F32, self.precision.activations())
    }

    fn convert(&mut self, input: &Value, from: FloatType, to: FloatType) -> Value {
        if from == to { input.clone() } else { self.cast(input, to.into()) }
    }

    /// The same values as another type.
    pub fn cast(&mut self, input: &Value, to: DType) -> Value {
        self.op("Cast", &[input], [("to", Attribute::Int(to.onnx_number()))])
    }

    /// Axes reordered; of a trained weight, when it is written.
    pub fn transpose(&mut self, input: &Value, permutation: &[usize]) -> Value {
        if let Some((expr, float)) = self.weights.get(input.name()).cloned() {
            let name = derived_name::turned(input.name(), permutation);
            return self.weight_as(&name, expr.transposed(permutation), float);
        }
        #[allow(clippy::cast_possible_wrap)]
        let permutation = permutation.iter().map(|axis| *axis as i64).collect();
        self.op("Transpose", &[input], [("perm", Attribute::Ints(permutation))])
    }

    /// The same values under a fully known shape; of a trained weight, when it is written.
    pub fn reshape_static(&mut self, input: &Value, shape: &[usize]) -> Value {
        if let Some((expr, float)) = self.weights.get(input.name()).cloned() {
            let name = derived_name::reshaped(input.name(), shape);
            return self.weight_as(&name, expr.reshaped(shape), float);
        }
        #[allow(clippy::cast_possible_wrap)]
        let shape: Vec<_> = shape.iter().map(|dim| *dim as i64).collect();
        self.reshape(input, &shape)
    }

    /// The same values under another shape: 0 copies a dimension, -1 is inferred.
    pub fn reshape(&mut self, input: &Value, shape: &[i64]) -> Value {
        let shape = self.ints(shape);
        self.op("Reshape", &[input, &shape], [])
    }

    /// New axes of size 1.
    pub fn unsqueeze(&mut self, input: &Value, axes: &[i64]) -> Value {
        let axes = self.ints(axes);
        self.op("Unsqueeze", &[input, &axes], [])
    }

    /// Elements `start..end` of one axis.
    pub fn slice(&mut self, input: &Value, start: &Value, end: &Value, axis: i64) -> Value {
        let axis = self.ints(&[axis]);
        self.op("Slice", &[input, start, end, &axis], [])
    }

    /// Size of one axis, as a list of one integer. Without `start` and `end` of `Shape`, over which TensorRT 8.6's
    /// parser reads.
    pub fn size(&mut self, input: &Value, axis: i64) -> Value {
        let axis = self.ints(&[axis]);
        let shape = self.op("Shape", &[input], []);
        self.op("Gather", &[&shape, &axis], [])
    }

    /// Integers with what no table has in place of negative ones, which `Gather` counts from the table's end.
    pub fn without_negative(&mut self, indices: &Value) -> Value {
        let (zero, none) = (self.int(0), self.int(i32::MAX.into()));
        let negative = self.op("Less", &[indices, &zero], []);
        self.op("Where", &[&negative, &none, indices], [])
    }

    /// Whether a node reads `value`.
    pub fn is_read(&self, value: &Value) -> bool {
        self.uses.is_read(&value.0)
    }

    /// Registers the meaning of an operator; `false` where another meaning is registered already.
    pub fn function(&mut self, function: Function) -> bool {
        match self.functions.iter().find(|known| known.op == function.op) {
            Some(known) => *known == function,
            None => {
                self.functions.push(function);
                true
            }
        }
    }

    /// Ends a graph: initializers that no node reads are dropped.
    pub fn into_graph(self, name: &str) -> Graph {
        let read: BTreeSet<_> = self.nodes.iter().flat_map(|node| &node.inputs).collect();
        let initializers = self.initializers.into_iter().filter(|i| read.contains(&i.name)).collect();
        let outputs: BTreeSet<_> = self.outputs.iter().map(|output| output.name.clone()).collect();
        Graph {
            name: name.into(),
            inputs: self.inputs,
            outputs: self.outputs,
            values: self.values.into_iter().filter(|value| !outputs.contains(&value.name)).collect(),
            initializers,
            nodes: self.nodes,
            functions: self.functions,
        }
    }

    /// Ends a body.
    pub fn into_nodes(self) -> Vec<Node> {
        self.nodes
    }

    fn push<const N: usize>(
        &mut self,
        op_type: &str,
        name: &str,
        inputs: &[&Value],
        outputs: Vec<String>,
        attributes: [(&str, Attribute); N],
    ) {
        self.add(Node {
            name: name.into(),
            op: OpId { domain: String::new(), op_type: op_type.into() },
            inputs: inputs.iter().map(|value| value.0.clone()).collect(),
            outputs,
            attributes: attributes.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
        });
    }

    fn add(&mut self, node: Node) {
        self.uses.add_node(self.nodes.len(), &node);
        self.nodes.push(node);
    }

    fn fresh(&mut self, stem: &str) -> String {
        let stem = format!("{}{stem}", self.prefix);
        loop {
            let counter = self.counters.entry(stem.clone()).or_default();
            let name = if *counter == 0 { stem.clone() } else { format!("{stem}_{counter}") };
            *counter += 1;
            if self.names.insert(name.clone()) {
                return name;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(node: &Node) -> [Vec<&str>; 2] {
        [&node.inputs, &node.outputs].map(|names| names.iter().map(String::as_str).collect())
    }

    #[test]
    fn a_value_is_renamed_wherever_it_stands() {
        let mut b = Builder::graph(Precision::Fp32);
        let x = b.input("x", DType::Float32, &[]);
        let sum = b.op("Add", &[&x, &x], []);
        let product = b.op("Mul", &[&sum, &sum], []);
        b.describe(&sum, DType::Float32, &[Dim::Unknown]);
        assert!(b.is_read(&x) && b.is_read(&sum) && !b.is_read(&product));
        let renamed = b.rename(&sum, "sum");
        assert!(b.is_read(&renamed) && !b.is_read(&sum));
        let again = b.rename(&renamed, "again");
        let last = b.op("Neg", &[&again], []);
        b.output(&again, "y", DType::Float32, &[Dim::Unknown]);
        // What the graph hands out, or takes, keeps its name: a second one is a copy.
        let y = b.named("y");
        b.output(&y, "z", DType::Float32, &[]);
        b.output(&x, "copy", DType::Float32, &[]);
        b.output(&last, "last", DType::Float32, &[]);
        let graph = b.into_graph("g");
        let found: Vec<_> = graph.nodes.iter().map(names).collect();
        let expected = [
            [vec!["x", "x"], vec!["y"]],
            [vec!["y", "y"], vec!["Mul"]],
            [vec!["y"], vec!["last"]],
            [vec!["y"], vec!["z"]],
            [vec!["x"], vec!["copy"]],
        ];
        assert_eq!(found, expected);
        assert!(graph.values.is_empty(), "an output is described as one");
    }
}
