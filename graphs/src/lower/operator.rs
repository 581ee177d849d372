//! Writes one of our operators as a node, as a node with a body, or as the body alone.

use std::collections::BTreeMap;

use moa_schema::{
    ACCURACY_LEVEL, AccuracyLevel, AttentionMode, CROSS_ATTENTION, CrossAttentionAttributes, DOMAIN, FEED_FORWARD,
    FeedForwardAttributes, IntegerType, LM_HEAD, OPSET_VERSION, Operator, PLUGIN_NAMESPACE, PLUGIN_VERSION, Parameter,
    RoutingPart, SELF_ATTENTION, SelfAttentionAttributes, cross_attention, feed_forward, lm_head, parameter,
    self_attention,
};

use super::{
    Dim, Form, LowerAttention, LowerError, Lowering, Options,
    attributes::{cross_attributes, feed_forward_attributes, scale, self_attributes},
};
use crate::{
    Precision, Weight,
    bodies::{self, CrossValues, FeedForwardSizes, FeedForwardValues, Heads, Matrix, Routed, SelfValues},
    derived_name,
    graph::{AngleFunction, Attribute, Builder, Function, OpId, RotaryTable, Value, WeightExpr},
    model::{Attention, ExpertFeedForward, ExpertLayout, KeyValueWeights, Rotary, Router, RouterInput},
};

/// Output of self-attention and the keys and values to keep.
pub(super) struct SelfAttentionOutput {
    pub(super) output: Value,
    pub(super) present: [Value; 2],
}

impl LowerAttention for Attention {
    const HAS_OPERATORS: bool = true;

    fn prefix(&self) -> &str {
        &self.prefix
    }

    fn self_attention(
        &self,
        l: &mut Lowering,
        hidden: &Value,
        mask: &Value,
        past: Option<[Value; 2]>,
    ) -> Result<SelfAttentionOutput, LowerError> {
        l.self_attention(self, hidden, mask, past, None)
    }

    fn cross_attention(
        &self,
        l: &mut Lowering,
        hidden: &Value,
        keys_and_values: [&Value; 2],
        masks: [&Value; 2],
    ) -> Result<Value, LowerError> {
        l.cross_attention(self, hidden, keys_and_values, masks)
    }

    fn keys_and_values(&self, l: &mut Lowering, memory: &Value) -> [Value; 2] {
        l.cross_keys_and_values(self, memory)
    }
}

/// The operators take no biases of experts.
fn refuse_biases(attention: &Attention) -> Result<(), LowerError> {
    match attention.expert_biases {
        None => Ok(()),
        Some(_) => Err(LowerError::ExpertBias { module: attention.module.clone() }),
    }
}

fn no_positions(attention: &Attention) -> LowerError {
    LowerError::NoPositions { module: attention.module.clone() }
}

impl Lowering {
    /// `MoASelfAttention` over `hidden` `[B, T, C]` with `mask` int32 `[B, P + T]`.
    pub(super) fn self_attention(
        &mut self,
        attention: &Attention,
        hidden: &Value,
        mask: &Value,
        past: Option<[Value; 2]>,
        position_ids: Option<&Value>,
    ) -> Result<SelfAttentionOutput, LowerError> {
        refuse_biases(attention)?;
        let attributes = SelfAttentionAttributes {
            top_k: attention.top_k,
            kv_num_heads: attention.kv_num_heads,
            causal: attention.causal,
            scale: scale(attention.head_size),
            gate_mode: attention.gate_mode,
            skip_padded_queries: attention.skip_padded_queries,
            attention_mode: attention.attention_mode,
        };
        let [router, router_input] = self.router(&attention.router, hidden);
        let b = &mut self.b;
        let mut inputs = absent_inputs(&SELF_ATTENTION);
        inputs[self_attention::HIDDEN_STATES] = hidden.clone();
        inputs[self_attention::ATTENTION_MASK] = mask.clone();
        inputs[self_attention::ROUTER_WEIGHT] = router;
        inputs[self_attention::ROUTER_INPUT] = router_input;
        inputs[self_attention::QUERY_WEIGHT] = expert_weight(b, &attention.query, attention.layout);
        inputs[self_attention::KV_WEIGHT] = kv_weight(b, attention);
        inputs[self_attention::OUTPUT_WEIGHT] = expert_weight(b, &attention.output, attention.layout);
        inputs[self_attention::OUTPUT_BIAS] = bias(b, attention.output_bias.as_ref());
        if let Some([key, value]) = past {
            inputs[self_attention::PAST_KEY] = key;
            inputs[self_attention::PAST_VALUE] = value;
        }
        if let Some(rotary) = attention.rotary {
            let ids = position_ids.ok_or_else(|| no_positions(attention))?;
            inputs[self_attention::COS_CACHE] = rotary_table(b, rotary, attention, AngleFunction::Cosine);
            inputs[self_attention::SIN_CACHE] = rotary_table(b, rotary, attention, AngleFunction::Sine);
            inputs[self_attention::POSITION_IDS] = ids.clone();
        }
        let routed = self.routed(&attention.module, attention.top_k);
        let node = Node {
            operator: &SELF_ATTENTION,
            module: &attention.module,
            width: attention.width,
            attributes: self_attributes(&attributes),
        };
        let heads = heads(attention);
        let [output, key, value] = self.operator(node, inputs, &routed, |b, inputs, routed| {
            bodies::self_attention(b, &self_values(inputs), &attributes, heads, routed)
        })?;
        Ok(SelfAttentionOutput { output, present: [key, value] })
    }

    /// `MoACrossAttention` over `hidden` `[B, T, C]`.
    pub(super) fn cross_attention(
        &mut self,
        attention: &Attention,
        hidden: &Value,
        [key, value]: [&Value; 2],
        [key_mask, query_mask]: [&Value; 2],
    ) -> Result<Value, LowerError> {
        refuse_biases(attention)?;
        if attention.rotary.is_some() {
            return Err(no_positions(attention));
        }
        if attention.router.input.is_some() || attention.attention_mode != AttentionMode::Softmax {
            return Err(LowerError::CrossAttention { module: attention.module.clone() });
        }
        let [router, _] = self.router(&attention.router, hidden);
        let attributes = CrossAttentionAttributes {
            top_k: attention.top_k,
            kv_num_heads: attention.kv_num_heads,
            scale: scale(attention.head_size),
            gate_mode: attention.gate_mode,
            skip_padded_queries: attention.skip_padded_queries,
        };
        let b = &mut self.b;
        let mut inputs = absent_inputs(&CROSS_ATTENTION);
        inputs[cross_attention::HIDDEN_STATES] = hidden.clone();
        inputs[cross_attention::KEY] = key.clone();
        inputs[cross_attention::VALUE] = value.clone();
        inputs[cross_attention::KEY_MASK] = key_mask.clone();
        inputs[cross_attention::QUERY_MASK] = query_mask.clone();
        inputs[cross_attention::ROUTER_WEIGHT] = router;
        inputs[cross_attention::QUERY_WEIGHT] = expert_weight(b, &attention.query, attention.layout);
        inputs[cross_attention::OUTPUT_WEIGHT] = expert_weight(b, &attention.output, attention.layout);
        inputs[cross_attention::OUTPUT_BIAS] = bias(b, attention.output_bias.as_ref());
        let routed = self.routed(&attention.module, attention.top_k);
        let node = Node {
            operator: &CROSS_ATTENTION,
            module: &attention.module,
            width: attention.width,
            attributes: cross_attributes(&attributes),
        };
        let heads = heads(attention);
        let [output] = self.operator(node, inputs, &routed, |b, inputs, routed| {
            [bodies::cross_attention(b, &cross_values(inputs), &attributes, heads, routed)]
        })?;
        Ok(output)
    }

    /// `MoEFeedForward` over `hidden` `[B, T, C]`.
    pub(super) fn expert_feed_forward(
        &mut self,
        block: &ExpertFeedForward,
        hidden: &Value,
    ) -> Result<Value, LowerError> {
        let attributes = FeedForwardAttributes {
            top_k: block.top_k,
            gate_mode: block.gate_mode,
            activation: block.activation,
            gated: block.gated,
        };
        let [router, router_input] = self.router(&block.router, hidden);
        let b = &mut self.b;
        let mut inputs = absent_inputs(&FEED_FORWARD);
        inputs[feed_forward::HIDDEN_STATES] = hidden.clone();
        inputs[feed_forward::ROUTER_WEIGHT] = router;
        inputs[feed_forward::ROUTER_INPUT] = router_input;
        inputs[feed_forward::INPUT_WEIGHT] = expert_weight(b, &block.input, block.layout);
        inputs[feed_forward::OUTPUT_WEIGHT] = expert_weight(b, &block.output, block.layout);
        inputs[feed_forward::OUTPUT_BIAS] = bias(b, block.output_bias.as_ref());
        let routed = self.routed(&block.module, block.top_k);
        let node = Node {
            operator: &FEED_FORWARD,
            module: &block.module,
            width: block.width,
            attributes: feed_forward_attributes(&attributes),
        };
        let sizes = FeedForwardSizes { experts: block.num_experts, hidden: block.hidden, width: block.width };
        let [output] = self.operator(node, inputs, &routed, |b, inputs, routed| {
            [bodies::feed_forward(b, &feed_forward_values(inputs), &attributes, sizes, routed)]
        })?;
        Ok(output)
    }

    /// A router as the operators take it, `[R, E]`, and what it reads in place of `hidden` `[B, T, C]`: `[B, T, R]` in
    /// f32, absent where it reads that.
    fn router(&mut self, router: &Router, hidden: &Value) -> [Value; 2] {
        let input = match router.input.as_deref() {
            Some(input) => self.router_input(input, hidden),
            None => Value::absent(),
        };
        let stored = self.b.weight(router.weight.name(), &router.weight);
        match router.layout {
            ExpertLayout::InOut => [stored, input],
            ExpertLayout::OutIn => [self.b.transpose(&stored, &[1, 0]), input],
        }
    }

    fn router_input(&mut self, RouterInput(linear): &RouterInput, hidden: &Value) -> Value {
        let b = &mut self.b;
        let hidden = b.to_float32(hidden);
        let (weight, bias) = (&linear.weight, &linear.bias);
        let weight = b.weight(weight.name(), weight);
        let weight = b.transpose(&weight, &[1, 0]);
        let product = b.op("MatMul", &[&hidden, &weight], []);
        let bias = b.weight(bias.name(), bias);
        let sum = b.op("Add", &[&product, &bias], []);
        bodies::gelu_float32(b, &sum)
    }

    /// `x · weightᵀ` for `x [B, T, C]` as `LMHead` has it, `[B, T, V]`; floats as [`Self::matmul_transposed`] has it.
    pub(super) fn lm_head(&mut self, weight: &Weight, x: &Value) -> Result<Value, LowerError> {
        let Options { precision, form, .. } = self.options;
        let is_of_floats = precision.head_integers().is_none();
        if !precision.has_lm_head() || is_of_floats && form == Form::Standard {
            return Ok(self.matmul_transposed(x, weight));
        }
        let mut inputs = absent_inputs(&LM_HEAD);
        inputs[lm_head::HIDDEN_STATES] = x.clone();
        inputs[lm_head::OUTPUT_WEIGHT] =
            if is_of_floats { self.turned(weight) } else { transposed(&mut self.b, weight, &[1, 0]) };
        let node = Node { operator: &LM_HEAD, module: HEAD, width: weight.shape()[0], attributes: BTreeMap::new() };
        let not_routed = Routed { indices: String::new(), weights: String::new() };
        let [logits] = self.operator(node, inputs, &not_routed, |b, inputs, _| {
            let weight = matrix(inputs, [lm_head::OUTPUT_WEIGHT, lm_head::OUTPUT_SCALE]);
            [bodies::lm_head(b, &inputs[lm_head::HIDDEN_STATES], &weight)]
        })?;
        Ok(logits)
    }

    /// Names of a module's routing; declared as graph outputs where the user asked for them.
    fn routed(&mut self, module: &str, top_k: usize) -> Routed {
        let [indices, weights] = RoutingPart::ALL.map(|part| part.name(module));
        if self.options.router_outputs {
            self.routers.push((module.to_owned(), top_k));
        }
        Routed { indices, weights }
    }

    /// One of our operators as the form asks: its body, or a node, with the body as a function in [`Form::Function`].
    ///
    /// `body` is given values for the inputs in the schema's order, absent ones included, and gives the outputs before
    /// the routing.
    fn operator<const N: usize>(
        &mut self,
        node: Node<'_>,
        mut inputs: Vec<Value>,
        routed: &Routed,
        body: impl Fn(&mut Builder, &[Value], &Routed) -> [Value; N],
    ) -> Result<[Value; N], LowerError> {
        let (precision, width) = (self.options.precision, node.width);
        let integers = if node.operator.is_routed() { precision.integers() } else { precision.head_integers() };
        if let Some(integers) = integers {
            quantize(&mut self.b, node.operator, integers, &mut inputs);
        }
        if self.options.form == Form::Standard {
            return Ok(body(&mut self.b, &inputs, routed));
        }
        let (results, routing) = node.operator.outputs.split_at(N);
        let outputs: Vec<_> = results.iter().map(|output| self.b.fresh_value(output.name).name().to_owned()).collect();
        let formal_body = |b: &mut Builder| {
            let named = |(value, formal): (&Value, &Parameter)| {
                if *value == Value::absent() { Value::absent() } else { b.named(formal.name) }
            };
            let formal: Vec<_> = inputs.iter().zip(node.operator.inputs).map(named).collect();
            let [indices, weights] =
                [0, 1].map(|index| routing.get(index).map_or_else(String::new, |output| output.name.to_owned()));
            let values = body(b, &formal, &Routed { indices, weights });
            for (value, output) in values.iter().zip(results) {
                b.rename(value, output.name);
            }
        };
        self.node(node, &inputs, &outputs, routed, formal_body)?;
        let activations = self.b.activations();
        let shape = [Dim::Unknown, Dim::Unknown, Dim::from(width)];
        self.b.describe(&self.b.named(&outputs[0]), activations, &shape);
        Ok(std::array::from_fn(|index| self.b.named(&outputs[index])))
    }

    /// A node of ours and, in the form [`Form::Function`], its body.
    fn node(
        &mut self,
        node: Node<'_>,
        inputs: &[Value],
        outputs: &[String],
        routed: &Routed,
        body: impl FnOnce(&mut Builder),
    ) -> Result<(), LowerError> {
        let Node { operator, module, mut attributes, .. } = node;
        let last = inputs.iter().rposition(|input| *input != Value::absent()).map_or(0, |last| last + 1);
        let inputs: Vec<_> = inputs[..last].iter().collect();
        let mut outputs: Vec<_> = outputs.iter().map(String::as_str).collect();
        if self.options.router_outputs && operator.is_routed() {
            outputs.extend([routed.indices.as_str(), routed.weights.as_str()]);
        }
        let op = OpId { domain: DOMAIN.into(), op_type: operator.name.into() };
        let accuracy = stated_accuracy(self.options.precision);
        attributes.extend(accuracy.map(|level| (ACCURACY_LEVEL.to_owned(), Attribute::Int(level.number()))));
        if self.options.form == Form::Fused {
            attributes.insert(PLUGIN_NAMESPACE.into(), Attribute::Text(DOMAIN.into()));
            attributes.insert(PLUGIN_VERSION.into(), Attribute::Text(OPSET_VERSION.to_string()));
        } else {
            let function = function(operator, op.clone(), [inputs.len(), outputs.len()], self.options.precision, body);
            if !self.b.function(function) {
                return Err(LowerError::SecondBody { operator: operator.name, module: module.into() });
            }
        }
        let name = if module.is_empty() { operator.name } else { module };
        self.b.custom_op(op, name, &inputs, &outputs, attributes);
        Ok(())
    }
}

/// Module of the node of a head.
const HEAD: &str = "lm_head.output";

/// One use of an operator.
struct Node<'a> {
    operator: &'static Operator,
    module: &'a str,
    /// The first output is `[B, T, width]`.
    width: usize,
    attributes: BTreeMap<String, Attribute>,
}

/// A place for each input, in the schema's order.
fn absent_inputs(operator: &Operator) -> Vec<Value> {
    vec![Value::absent(); operator.inputs.len()]
}

/// Puts integers in place of the trained matrices, and their scales beside them.
fn quantize(b: &mut Builder, operator: &Operator, integers: IntegerType, inputs: &mut [Value]) {
    for [weight, scale] in operator.matrices() {
        if inputs[weight] != Value::absent() {
            [inputs[weight], inputs[scale]] = b.quantized(&inputs[weight], integers);
        }
    }
}

/// What nodes say of their products; nothing where that is the default.
fn stated_accuracy(precision: Precision) -> Option<AccuracyLevel> {
    Some(precision.accuracy_level()).filter(|level| *level != AccuracyLevel::default())
}

fn function(
    operator: &Operator,
    op: OpId,
    [inputs, outputs]: [usize; 2],
    precision: Precision,
    body: impl FnOnce(&mut Builder),
) -> Function {
    let formal: Vec<_> = operator.inputs[..inputs].iter().map(|input| input.name).collect();
    let mut builder = Builder::body(&formal, precision);
    body(&mut builder);
    let attributes = operator.attributes.iter().map(|attribute| attribute.name);
    let attributes = attributes.chain(stated_accuracy(precision).map(|_| ACCURACY_LEVEL));
    Function {
        op,
        inputs: formal.iter().map(|name| (*name).to_owned()).collect(),
        outputs: operator.outputs[..outputs].iter().map(|output| output.name.to_owned()).collect(),
        attributes: attributes.map(str::to_owned).collect(),
        nodes: builder.into_nodes(),
    }
}

fn heads(attention: &Attention) -> Heads {
    Heads {
        width: attention.width,
        experts: attention.num_experts,
        kv_heads: attention.kv_num_heads,
        head: attention.head_size,
    }
}

/// Matrices of experts as the operators take them, inputs before outputs.
fn expert_weight(b: &mut Builder, weight: &Weight, layout: ExpertLayout) -> Value {
    match layout {
        ExpertLayout::InOut => b.matrix(weight.name(), weight),
        ExpertLayout::OutIn => transposed(b, weight, &[0, 2, 1]),
    }
}

fn transposed(b: &mut Builder, weight: &Weight, permutation: &[usize]) -> Value {
    let stored = b.matrix(weight.name(), weight);
    b.transpose(&stored, permutation)
}

fn bias(b: &mut Builder, bias: Option<&Weight>) -> Value {
    bias.map_or_else(Value::absent, |bias| b.bias(bias.name(), bias))
}

/// Key and value projections side by side, `[C, 2·G·D]`; absent where there are none.
fn kv_weight(b: &mut Builder, attention: &Attention) -> Value {
    let (key, value) = match &attention.keys_values {
        KeyValueWeights::Joint(both) => return transposed(b, both, &[1, 0]),
        KeyValueWeights::Separate { key, value } => (key, value),
        KeyValueWeights::HiddenStates => return Value::absent(),
    };
    let transposed = |weight| WeightExpr::from(weight).transposed(&[1, 0]);
    let columns = WeightExpr::Columns(vec![transposed(key), transposed(value)]);
    let prefix = &attention.prefix;
    let name = if prefix.is_empty() { "kv_proj.weight".to_owned() } else { format!("{prefix}.kv_proj.weight") };
    b.matrix(&name, columns)
}

fn rotary_table(b: &mut Builder, rotary: Rotary, attention: &Attention, function: AngleFunction) -> Value {
    let name = match function {
        AngleFunction::Cosine => parameter::COS_CACHE,
        AngleFunction::Sine => parameter::SIN_CACHE,
    };
    let table = RotaryTable { rows: rotary.positions, head: attention.head_size, base: rotary.base, function };
    b.weight(&derived_name::rotary(name), WeightExpr::Rotary(table))
}

/// An input, where it is there.
fn optional(input: &Value) -> Option<Value> {
    (*input != Value::absent()).then(|| input.clone())
}

/// A trained matrix, from the places of its weights and its scales.
fn matrix(inputs: &[Value], [weight, scale]: [usize; 2]) -> Matrix {
    Matrix { weight: inputs[weight].clone(), scale: optional(&inputs[scale]) }
}

fn self_values(inputs: &[Value]) -> SelfValues {
    use self_attention as at;
    let optional = |index: usize| optional(&inputs[index]);
    SelfValues {
        hidden_states: inputs[at::HIDDEN_STATES].clone(),
        attention_mask: inputs[at::ATTENTION_MASK].clone(),
        router_weight: inputs[at::ROUTER_WEIGHT].clone(),
        query_weight: matrix(inputs, [at::QUERY_WEIGHT, at::QUERY_SCALE]),
        router_input: optional(at::ROUTER_INPUT),
        kv_weight: optional(at::KV_WEIGHT).map(|_| matrix(inputs, [at::KV_WEIGHT, at::KV_SCALE])),
        output_weight: matrix(inputs, [at::OUTPUT_WEIGHT, at::OUTPUT_SCALE]),
        output_bias: optional(at::OUTPUT_BIAS),
        past: optional(at::PAST_KEY).zip(optional(at::PAST_VALUE)).map(<[Value; 2]>::from),
        rotary: optional(at::POSITION_IDS)
            .map(|positions| [inputs[at::COS_CACHE].clone(), inputs[at::SIN_CACHE].clone(), positions]),
    }
}

fn cross_values(inputs: &[Value]) -> CrossValues {
    use cross_attention as at;
    CrossValues {
        hidden_states: inputs[at::HIDDEN_STATES].clone(),
        key: inputs[at::KEY].clone(),
        value: inputs[at::VALUE].clone(),
        key_mask: inputs[at::KEY_MASK].clone(),
        query_mask: inputs[at::QUERY_MASK].clone(),
        router_weight: inputs[at::ROUTER_WEIGHT].clone(),
        query_weight: matrix(inputs, [at::QUERY_WEIGHT, at::QUERY_SCALE]),
        output_weight: matrix(inputs, [at::OUTPUT_WEIGHT, at::OUTPUT_SCALE]),
        output_bias: optional(&inputs[at::OUTPUT_BIAS]),
    }
}

fn feed_forward_values(inputs: &[Value]) -> FeedForwardValues {
    use feed_forward as at;
    FeedForwardValues {
        hidden_states: inputs[at::HIDDEN_STATES].clone(),
        router_input: optional(&inputs[at::ROUTER_INPUT]),
        router_weight: inputs[at::ROUTER_WEIGHT].clone(),
        input_weight: matrix(inputs, [at::INPUT_WEIGHT, at::INPUT_SCALE]),
        output_weight: matrix(inputs, [at::OUTPUT_WEIGHT, at::OUTPUT_SCALE]),
        output_bias: optional(&inputs[at::OUTPUT_BIAS]),
    }
}
