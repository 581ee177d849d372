//! Writes one of our operators as a node, as a node with a body, or as the body alone.

use std::collections::BTreeMap;

use moa_schema::{
    CROSS_ATTENTION, CrossAttentionAttributes, DOMAIN, FEED_FORWARD, FeedForwardAttributes, OPSET_VERSION, Operator,
    PLUGIN_NAMESPACE, PLUGIN_VERSION, SELF_ATTENTION, SelfAttentionAttributes,
};

use super::{Form, LowerAttention, LowerError, Lowering};
use crate::{
    Precision, Weight,
    bodies::{self, CrossValues, FeedForwardSizes, FeedForwardValues, Heads, Routed, SelfValues},
    graph::{Attribute, Builder, Function, OpId, RotaryTable, Value, WeightExpr},
    model::{Attention, ExpertFeedForward, ExpertLayout, KeyValueWeights, Rotary},
};

/// Output of self-attention and the keys and values to keep.
pub(super) struct SelfAttentionOutput {
    pub(super) output: Value,
    pub(super) present: [Value; 2],
}

impl LowerAttention for Attention {
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
            scale: scale(attention),
            gate_mode: attention.gate_mode,
            skip_padded_queries: attention.skip_padded_queries,
        };
        let b = &mut self.b;
        let values = SelfValues {
            hidden_states: hidden.clone(),
            attention_mask: mask.clone(),
            router_weight: router_weight(b, &attention.router, attention.layout),
            query_weight: expert_weight(b, &attention.query, attention.layout),
            kv_weight: kv_weight(b, attention),
            output_weight: expert_weight(b, &attention.output, attention.layout),
            output_bias: bias(b, attention.output_bias.as_ref()),
            past,
            rotary: attention.rotary.zip(position_ids).map(|(rotary, ids)| rotary_tables(b, rotary, attention, ids)),
        };
        let heads = heads(attention);
        let routed = self.routed(&attention.module, attention.top_k);
        if self.options.form == Form::Standard {
            let [output, key, value] = bodies::self_attention(&mut self.b, &values, &attributes, heads, &routed);
            return Ok(SelfAttentionOutput { output, present: [key, value] });
        }
        let inputs = self_inputs(&values);
        let outputs = self.node_outputs(&["output", "present_key", "present_value"], &routed);
        let texts = self_attributes(&attributes);
        let present = [values.output_bias.is_some(), values.past.is_some(), values.rotary.is_some()];
        let body = |b: &mut Builder| {
            let values = formal_self_values(b, present);
            let formal = Routed { indices: "topk_indices".into(), weights: "topk_weights".into() };
            let [output, key, value] = bodies::self_attention(b, &values, &attributes, heads, &formal);
            b.rename(&output, "output");
            b.rename(&key, "present_key");
            b.rename(&value, "present_value");
        };
        self.node(&SELF_ATTENTION, &attention.module, &inputs, &outputs, texts, body)?;
        let [output, key, value] = [0, 1, 2].map(|index| self.b.named(&outputs[index]));
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
        let attributes = CrossAttentionAttributes {
            top_k: attention.top_k,
            kv_num_heads: attention.kv_num_heads,
            scale: scale(attention),
            gate_mode: attention.gate_mode,
            skip_padded_queries: attention.skip_padded_queries,
        };
        let b = &mut self.b;
        let values = CrossValues {
            hidden_states: hidden.clone(),
            key: key.clone(),
            value: value.clone(),
            key_mask: key_mask.clone(),
            query_mask: query_mask.clone(),
            router_weight: router_weight(b, &attention.router, attention.layout),
            query_weight: expert_weight(b, &attention.query, attention.layout),
            output_weight: expert_weight(b, &attention.output, attention.layout),
            output_bias: bias(b, attention.output_bias.as_ref()),
        };
        let heads = heads(attention);
        let routed = self.routed(&attention.module, attention.top_k);
        if self.options.form == Form::Standard {
            return Ok(bodies::cross_attention(&mut self.b, &values, &attributes, heads, &routed));
        }
        let inputs = cross_inputs(&values);
        let outputs = self.node_outputs(&["output"], &routed);
        let has_bias = values.output_bias.is_some();
        let body = |b: &mut Builder| {
            let values = formal_cross_values(b, has_bias);
            let formal = Routed { indices: "topk_indices".into(), weights: "topk_weights".into() };
            let output = bodies::cross_attention(b, &values, &attributes, heads, &formal);
            b.rename(&output, "output");
        };
        let texts = cross_attributes(&attributes);
        self.node(&CROSS_ATTENTION, &attention.module, &inputs, &outputs, texts, body)?;
        Ok(self.b.named(&outputs[0]))
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
        let b = &mut self.b;
        let values = FeedForwardValues {
            hidden_states: hidden.clone(),
            router_weight: router_weight(b, &block.router, block.layout),
            input_weight: expert_weight(b, &block.input, block.layout),
            output_weight: expert_weight(b, &block.output, block.layout),
            output_bias: bias(b, block.output_bias.as_ref()),
        };
        let sizes = FeedForwardSizes { experts: block.num_experts, hidden: block.hidden, width: block.width };
        let routed = self.routed(&block.module, block.top_k);
        if self.options.form == Form::Standard {
            return Ok(bodies::feed_forward(&mut self.b, &values, &attributes, sizes, &routed));
        }
        let inputs = feed_forward_inputs(&values);
        let outputs = self.node_outputs(&["output"], &routed);
        let has_bias = values.output_bias.is_some();
        let body = |b: &mut Builder| {
            let values = formal_feed_forward_values(b, has_bias);
            let formal = Routed { indices: "topk_indices".into(), weights: "topk_weights".into() };
            let output = bodies::feed_forward(b, &values, &attributes, sizes, &formal);
            b.rename(&output, "output");
        };
        let texts = feed_forward_attributes(&attributes);
        self.node(&FEED_FORWARD, &block.module, &inputs, &outputs, texts, body)?;
        Ok(self.b.named(&outputs[0]))
    }

    /// Names of a module's routing; declared as graph outputs where the user asked for them.
    fn routed(&mut self, module: &str, top_k: usize) -> Routed {
        let prefix = if module.is_empty() { "router".to_owned() } else { format!("router.{module}") };
        let names = Routed { indices: format!("{prefix}.indices"), weights: format!("{prefix}.weights") };
        if self.options.router_outputs {
            self.routers.push((prefix, top_k));
        }
        names
    }

    /// Output names of a node: `formal` ones, then the routing where it is a graph output.
    fn node_outputs(&mut self, formal: &[&str], routed: &Routed) -> Vec<String> {
        let mut names: Vec<_> = formal.iter().map(|name| self.b.fresh_value(name).name().to_owned()).collect();
        if self.options.router_outputs {
            names.extend([routed.indices.clone(), routed.weights.clone()]);
        }
        names
    }

    /// A node of ours and, in the form [`Form::Function`], its body.
    fn node(
        &mut self,
        operator: &'static Operator,
        module: &str,
        inputs: &[Value],
        outputs: &[String],
        mut attributes: BTreeMap<String, Attribute>,
        body: impl FnOnce(&mut Builder),
    ) -> Result<(), LowerError> {
        let op = OpId { domain: DOMAIN.into(), op_type: operator.name.into() };
        if self.options.form == Form::Fused {
            attributes.insert(PLUGIN_NAMESPACE.into(), Attribute::Text(DOMAIN.into()));
            attributes.insert(PLUGIN_VERSION.into(), Attribute::Text(OPSET_VERSION.to_string()));
        } else {
            let function = function(operator, op.clone(), [inputs.len(), outputs.len()], self.options.precision, body);
            if !self.b.function(function) {
                return Err(LowerError::SecondBody { operator: operator.name, module: module.into() });
            }
        }
        let inputs: Vec<_> = inputs.iter().collect();
        let outputs: Vec<_> = outputs.iter().map(String::as_str).collect();
        let name = if module.is_empty() { operator.name } else { module };
        self.b.custom_op(op, name, &inputs, &outputs, attributes);
        Ok(())
    }
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
    Function {
        op,
        inputs: formal.iter().map(|name| (*name).to_owned()).collect(),
        outputs: operator.outputs[..outputs].iter().map(|output| output.name.to_owned()).collect(),
        attributes: operator.attributes.iter().map(|attribute| attribute.name.to_owned()).collect(),
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

#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
fn scale(attention: &Attention) -> f32 {
    (attention.head_size as f64).powf(-0.5) as f32
}

/// A router as the operators take it, `[C, E]`.
fn router_weight(b: &mut Builder, router: &Weight, layout: ExpertLayout) -> Value {
    match layout {
        ExpertLayout::InOut => b.weight(router.name(), router),
        ExpertLayout::OutIn => {
            let stored = b.weight(router.name(), router);
            b.transpose(&stored, &[1, 0])
        }
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

fn bias(b: &mut Builder, bias: Option<&Weight>) -> Option<Value> {
    bias.map(|bias| b.bias(bias.name(), bias))
}

/// Key and value projections side by side, `[C, 2·G·D]`.
fn kv_weight(b: &mut Builder, attention: &Attention) -> Value {
    let (key, value) = match &attention.keys_values {
        KeyValueWeights::Joint(both) => return transposed(b, both, &[1, 0]),
        KeyValueWeights::Separate { key, value } => (key, value),
    };
    let transposed = |weight| WeightExpr::from(weight).transposed(&[1, 0]);
    let columns = WeightExpr::Columns(vec![transposed(key), transposed(value)]);
    let prefix = &attention.prefix;
    let name = if prefix.is_empty() { "kv_proj.weight".to_owned() } else { format!("{prefix}.kv_proj.weight") };
    b.matrix(&name, columns)
}

/// Cosines, sines and positions.
fn rotary_tables(b: &mut Builder, rotary: Rotary, attention: &Attention, position_ids: &Value) -> [Value; 3] {
    let table = |sine| RotaryTable { rows: rotary.positions, head: attention.head_size, base: rotary.base, sine };
    [
        b.weight("rotary.cos_cache", WeightExpr::Rotary(table(false))),
        b.weight("rotary.sin_cache", WeightExpr::Rotary(table(true))),
        position_ids.clone(),
    ]
}

/// Inputs in the schema's order, up to the last one that is present.
fn self_inputs(values: &SelfValues) -> Vec<Value> {
    let optional = |value: &Option<Value>| value.clone().unwrap_or_else(Value::absent);
    let absent = Value::absent;
    let [past_key, past_value] = values.past.clone().unwrap_or_else(|| [absent(), absent()]);
    let [cos, sin, positions] = values.rotary.clone().unwrap_or_else(|| [absent(), absent(), absent()]);
    let mut inputs = vec![
        values.hidden_states.clone(),
        values.attention_mask.clone(),
        values.router_weight.clone(),
        values.query_weight.clone(),
        values.kv_weight.clone(),
        values.output_weight.clone(),
        optional(&values.output_bias),
        past_key,
        past_value,
        cos,
        sin,
        positions,
    ];
    while inputs.last() == Some(&Value::absent()) {
        inputs.pop();
    }
    inputs
}

fn cross_inputs(values: &CrossValues) -> Vec<Value> {
    let mut inputs = vec![
        values.hidden_states.clone(),
        values.key.clone(),
        values.value.clone(),
        values.key_mask.clone(),
        values.query_mask.clone(),
        values.router_weight.clone(),
        values.query_weight.clone(),
        values.output_weight.clone(),
    ];
    inputs.extend(values.output_bias.clone());
    inputs
}

fn feed_forward_inputs(values: &FeedForwardValues) -> Vec<Value> {
    let mut inputs = vec![
        values.hidden_states.clone(),
        values.router_weight.clone(),
        values.input_weight.clone(),
        values.output_weight.clone(),
    ];
    inputs.extend(values.output_bias.clone());
    inputs
}

fn formal_self_values(b: &Builder, [bias, past, rotary]: [bool; 3]) -> SelfValues {
    SelfValues {
        hidden_states: b.named("hidden_states"),
        attention_mask: b.named("attention_mask"),
        router_weight: b.named("router_weight"),
        query_weight: b.named("query_weight"),
        kv_weight: b.named("kv_weight"),
        output_weight: b.named("output_weight"),
        output_bias: bias.then(|| b.named("output_bias")),
        past: past.then(|| [b.named("past_key"), b.named("past_value")]),
        rotary: rotary.then(|| [b.named("cos_cache"), b.named("sin_cache"), b.named("position_ids")]),
    }
}

fn formal_cross_values(b: &Builder, bias: bool) -> CrossValues {
    CrossValues {
        hidden_states: b.named("hidden_states"),
        key: b.named("key"),
        value: b.named("value"),
        key_mask: b.named("key_mask"),
        query_mask: b.named("query_mask"),
        router_weight: b.named("router_weight"),
        query_weight: b.named("query_weight"),
        output_weight: b.named("output_weight"),
        output_bias: bias.then(|| b.named("output_bias")),
    }
}

fn formal_feed_forward_values(b: &Builder, bias: bool) -> FeedForwardValues {
    FeedForwardValues {
        hidden_states: b.named("hidden_states"),
        router_weight: b.named("router_weight"),
        input_weight: b.named("input_weight"),
        output_weight: b.named("output_weight"),
        output_bias: bias.then(|| b.named("output_bias")),
    }
}

fn attributes<const N: usize>(entries: [(&str, Attribute); N]) -> BTreeMap<String, Attribute> {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[allow(clippy::cast_possible_wrap)]
fn int(value: usize) -> Attribute {
    Attribute::Int(value as i64)
}

fn self_attributes(a: &SelfAttentionAttributes) -> BTreeMap<String, Attribute> {
    attributes([
        ("top_k", int(a.top_k)),
        ("kv_num_heads", int(a.kv_num_heads)),
        ("causal", int(usize::from(a.causal))),
        ("scale", Attribute::Float(a.scale)),
        ("gate_mode", Attribute::Text(a.gate_mode.as_str().into())),
        ("skip_padded_queries", int(usize::from(a.skip_padded_queries))),
    ])
}

fn cross_attributes(a: &CrossAttentionAttributes) -> BTreeMap<String, Attribute> {
    attributes([
        ("top_k", int(a.top_k)),
        ("kv_num_heads", int(a.kv_num_heads)),
        ("scale", Attribute::Float(a.scale)),
        ("gate_mode", Attribute::Text(a.gate_mode.as_str().into())),
        ("skip_padded_queries", int(usize::from(a.skip_padded_queries))),
    ])
}

fn feed_forward_attributes(a: &FeedForwardAttributes) -> BTreeMap<String, Attribute> {
    attributes([
        ("top_k", int(a.top_k)),
        ("gate_mode", Attribute::Text(a.gate_mode.as_str().into())),
        ("activation", Attribute::Text(a.activation.as_str().into())),
        ("gated", int(usize::from(a.gated))),
    ])
}
