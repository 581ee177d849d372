//! Attention of the standard Transformer, in standard operators ([`Form::Standard`]) or by ONNX Runtime's own
//! `com.microsoft::MultiHeadAttention` ([`Form::Fused`]).

use std::collections::BTreeMap;

use moa_schema::RUNTIME_DOMAIN;

use super::{Form, LowerAttention, LowerError, Lowering, attributes::scale, operator::SelfAttentionOutput};
use crate::{
    FloatType,
    graph::{Attribute, DType, OpId, Value},
    model::DenseAttention,
};

/// What is added to a masked score in activations of this type: the sum is below every attainable score, and finite, so
/// that a row whose keys are all masked stays free of NaN. f16 ends so early that the score needs half of its range.
fn masked_bias(activations: FloatType) -> f32 {
    match activations {
        FloatType::F16 => half::f16::MIN.to_f32() / 2.0,
        _ => f32::MIN,
    }
}

const RUNTIME_OPERATOR: &str = "MultiHeadAttention";

impl LowerAttention for DenseAttention {
    const HAS_OPERATORS: bool = false;

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
        let query = l.linear(&self.query, hidden);
        let [key, value] = [&self.key, &self.value].map(|linear| l.linear(linear, hidden));
        if l.dense_form()? == Form::Fused {
            let [output, present @ ..] = self.runtime_node(l, [&query, &key, &value], [mask, &Value::absent()], past);
            return Ok(SelfAttentionOutput { output: l.linear(&self.output, &output), present });
        }
        let new = [key, value].map(|projected| self.heads_first(l, &projected));
        let present = match past {
            None => new,
            Some(past) => {
                let [key, value] =
                    [0, 1].map(|i| l.b.op("Concat", &[&past[i], &new[i]], [("axis", Attribute::Int(2))]));
                [key, value]
            }
        };
        let bias = l.attention_bias(mask, self.causal.then_some(hidden));
        let output = self.attend(l, &query, &present, &bias);
        Ok(SelfAttentionOutput { output, present })
    }

    fn cross_attention(
        &self,
        l: &mut Lowering,
        hidden: &Value,
        [key, value]: [&Value; 2],
        [key_mask, _]: [&Value; 2],
    ) -> Result<Value, LowerError> {
        let query = l.linear(&self.query, hidden);
        if l.dense_form()? == Form::Fused {
            let bias = self.bias_of_every_head(l, key_mask, hidden);
            let [output, ..] = self.runtime_node(l, [&query, key, value], [&Value::absent(), &bias], None);
            return Ok(l.linear(&self.output, &output));
        }
        let bias = l.attention_bias(key_mask, None);
        Ok(self.attend(l, &query, &[key.clone(), value.clone()], &bias))
    }

    fn keys_and_values(&self, l: &mut Lowering, memory: &Value) -> [Value; 2] {
        [&self.key, &self.value].map(|linear| {
            let projected = l.linear(linear, memory);
            self.heads_first(l, &projected)
        })
    }
}

impl DenseAttention {
    /// `[B, T, C]` as `[B, H, T, D]`.
    #[allow(clippy::cast_possible_wrap)]
    fn heads_first(&self, l: &mut Lowering, projected: &Value) -> Value {
        let split = l.b.reshape(projected, &[0, 0, self.heads as i64, self.head_size as i64]);
        l.b.transpose(&split, &[0, 2, 1, 3])
    }

    /// What is added to the scores of cross-attention, `[B, H, T, S]`: ONNX Runtime up to 1.20 misreads a mask of keys
    /// where there are more or fewer queries than keys, and a bias that is one for all heads.
    #[allow(clippy::cast_possible_wrap)]
    fn bias_of_every_head(&self, l: &mut Lowering, mask: &Value, hidden: &Value) -> Value {
        let key = (format!("{}/heads", mask.name()), false);
        if let Some(bias) = l.biases.get(&key) {
            return bias.clone();
        }
        let bias = l.attention_bias(mask, None);
        let (heads, keys, tokens) = (l.b.ints(&[1, self.heads as i64]), l.b.ints(&[1]), l.b.size(hidden, 1));
        let shape = l.b.op("Concat", &[&heads, &tokens, &keys], [("axis", Attribute::Int(0))]);
        let bias = l.b.op("Expand", &[&bias, &shape], []);
        l.biases.insert(key, bias.clone());
        bias
    }

    /// `[B, T, C]` from `[B, T, C]` queries, `[B, H, S, D]` keys and values, and what is added to the scores.
    #[allow(clippy::cast_possible_wrap)]
    fn attend(&self, l: &mut Lowering, query: &Value, [key, value]: &[Value; 2], bias: &Value) -> Value {
        let scale = l.b.float(scale(self.head_size));
        let query = l.b.op("Mul", &[query, &scale], []);
        let query = self.heads_first(l, &query);
        let key = l.b.transpose(key, &[0, 1, 3, 2]);
        let scores = l.b.op("MatMul", &[&query, &key], []);
        let scores = l.b.op("Add", &[&scores, bias], []);
        let probabilities = l.b.op("Softmax", &[&scores], [("axis", Attribute::Int(-1))]);
        let attended = l.b.op("MatMul", &[&probabilities, value], []);
        let attended = l.b.transpose(&attended, &[0, 2, 1, 3]);
        let attended = l.b.reshape(&attended, &[0, 0, (self.heads * self.head_size) as i64]);
        l.linear(&self.output, &attended)
    }

    /// The runtime's operator on projected queries, keys and values: `[B, T, C]` and present keys and values.
    #[allow(clippy::cast_possible_wrap)]
    fn runtime_node(
        &self,
        l: &mut Lowering,
        [query, key, value]: [&Value; 3],
        [mask, bias]: [&Value; 2],
        past: Option<[Value; 2]>,
    ) -> [Value; 3] {
        let attributes = BTreeMap::from([
            ("num_heads".to_owned(), Attribute::Int(self.heads as i64)),
            ("scale".to_owned(), Attribute::Float(scale(self.head_size))),
            ("unidirectional".to_owned(), Attribute::Int(self.causal.into())),
        ]);
        let absent = Value::absent();
        let mut inputs = vec![query, key, value, &absent, mask, bias];
        let outputs = ["attended", "present_key", "present_value"].map(|stem| l.b.fresh_value(stem));
        let mut names: Vec<_> = outputs.iter().map(Value::name).collect();
        match &past {
            Some([key, value]) => inputs.extend([key, value]),
            None => names.truncate(1),
        }
        let op = OpId { domain: RUNTIME_DOMAIN.into(), op_type: RUNTIME_OPERATOR.into() };
        l.b.custom_op(op, &self.prefix, &inputs, &names, attributes);
        outputs
    }
}

impl Lowering {
    /// The form, which must be one that standard attention has.
    fn dense_form(&self) -> Result<Form, LowerError> {
        match self.options.form {
            Form::Function => Err(LowerError::NoFunction),
            form => Ok(form),
        }
    }

    /// What is added to scores, 0 or [`masked_bias`]: `[B, 1, 1, S]`, or `[B, 1, T, S]` where `causal` gives the
    /// `[B, T, C]` queries that see no later key. One value serves every layer.
    fn attention_bias(&mut self, mask: &Value, causal: Option<&Value>) -> Value {
        let key = (mask.name().to_owned(), causal.is_some());
        if let Some(bias) = self.biases.get(&key) {
            return bias.clone();
        }
        let b = &mut self.b;
        let allowed = b.unsqueeze(mask, &[1, 2]);
        let mut allowed = b.cast(&allowed, DType::Bool);
        if let Some(hidden) = causal {
            let axis = b.ints(&[0]);
            let (zero, one) = (b.int(0), b.int(1));
            let [total, tokens] = [b.size(mask, 1), b.size(hidden, 1)].map(|size| b.op("Squeeze", &[&size, &axis], []));
            let past = b.op("Sub", &[&total, &tokens], []);
            let rows = b.op("Range", &[&past, &total, &one], []);
            let rows = b.unsqueeze(&rows, &[1]);
            let columns = b.op("Range", &[&zero, &total, &one], []);
            let visible = b.op("LessOrEqual", &[&columns, &rows], []);
            allowed = b.op("And", &[&allowed, &visible], []);
        }
        let masked = masked_bias(b.precision().activations());
        let (zero, masked) = (b.float(0.0), b.float(masked));
        let bias = b.op("Where", &[&allowed, &zero, &masked], []);
        self.biases.insert(key, bias.clone());
        bias
    }
}
