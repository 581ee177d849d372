//! Embedding, normalisation, feed-forward and encoder stack, shared by the families.

use moa_schema::interface::{ATTENTION_MASK, INPUT_IDS};

use super::{BATCH, LowerAttention, LowerError, Lowering};
use crate::{
    bodies::activation,
    derived_name,
    graph::{Attribute, DType, Dim, Sinusoids, Value, WeightExpr},
    model::{
        DenseFeedForward, Embedding, Encoder, EncoderLayer, FeedForward, LayerNorm, Linear, Norm, Positions, RmsNorm,
    },
};

/// Tokens to embed, and where they stand among the tokens seen so far.
pub(super) struct Tokens<'a> {
    /// `[B, T]` int64.
    pub(super) ids: &'a Value,
    /// `[B, P + T]` int64.
    pub(super) mask: &'a Value,
    /// `P` as a list of one integer; `None` where there is no past.
    pub(super) past: Option<&'a Value>,
}

impl Lowering {
    /// `x + f(norm(x))` where `before`, else `norm(x + f(x))`.
    pub(super) fn residual(
        &mut self,
        x: &Value,
        norm: &LayerNorm,
        before: bool,
        f: impl FnOnce(&mut Self, &Value) -> Result<Value, LowerError>,
    ) -> Result<Value, LowerError> {
        self.residual_with(x, norm, before, |l, x| Ok((f(l, x)?, ()))).map(|(sum, ())| sum)
    }

    /// [`Self::residual`], with what `f` gives beside its output.
    pub(super) fn residual_with<T>(
        &mut self,
        x: &Value,
        norm: &LayerNorm,
        before: bool,
        f: impl FnOnce(&mut Self, &Value) -> Result<(Value, T), LowerError>,
    ) -> Result<(Value, T), LowerError> {
        if before {
            let normed = self.norm(norm, x);
            let (added, beside) = f(self, &normed)?;
            return Ok((self.b.op("Add", &[x, &added], []), beside));
        }
        let (added, beside) = f(self, x)?;
        let sum = self.b.op("Add", &[x, &added], []);
        Ok((self.norm(norm, &sum), beside))
    }

    pub(super) fn norm(&mut self, norm: &LayerNorm, x: &Value) -> Value {
        let x = self.b.to_float32(x);
        let normed = self.norm_float32(norm, &x);
        self.b.from_float32(&normed)
    }

    /// Of f32, in f32.
    fn norm_float32(&mut self, norm: &LayerNorm, x: &Value) -> Value {
        let weight = self.b.weight(norm.weight.name(), &norm.weight);
        let bias = self.b.weight(norm.bias.name(), &norm.bias);
        let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(norm.epsilon))];
        self.b.op("LayerNormalization", &[x, &weight, &bias], attributes)
    }

    pub(super) fn either_norm(&mut self, norm: &Norm, x: &Value) -> Value {
        match norm {
            Norm::Layer(norm) => self.norm(norm, x),
            Norm::Rms(norm) => self.rms_norm(norm, x),
        }
    }

    /// `x · weight / sqrt(mean(x²) + epsilon)`.
    fn rms_norm(&mut self, norm: &RmsNorm, x: &Value) -> Value {
        let (two, epsilon, axes) = (self.b.float32(2.0), self.b.float32(norm.epsilon), self.b.ints(&[-1]));
        let weight = self.b.weight(norm.weight.name(), &norm.weight);
        let x = self.b.to_float32(x);
        let squares = self.b.op("Pow", &[&x, &two], []);
        let mean = self.b.op("ReduceMean", &[&squares, &axes], [("keepdims", Attribute::Int(1))]);
        let sum = self.b.op("Add", &[&mean, &epsilon], []);
        let root = self.b.op("Sqrt", &[&sum], []);
        let normed = self.b.op("Div", &[&x, &root], []);
        let scaled = self.b.op("Mul", &[&normed, &weight], []);
        self.b.from_float32(&scaled)
    }

    pub(super) fn linear(&mut self, linear: &Linear, x: &Value) -> Value {
        let product = self.matmul_transposed(x, &linear.weight);
        let bias = self.b.bias(linear.bias.name(), &linear.bias);
        self.b.op("Add", &[&product, &bias], [])
    }

    /// `x · weightᵀ`.
    pub(super) fn matmul_transposed(&mut self, x: &Value, weight: &crate::Weight) -> Value {
        let weight = self.turned(weight);
        let weight = self.b.widen(&weight);
        self.b.op("MatMul", &[x, &weight], [])
    }

    /// A trained matrix `[O, I]` as `[I, O]`. One that a node reads as it is, such as a table of tokens tied to the
    /// output, stays one initializer: runtimes turn it once, when they load the model.
    pub(super) fn turned(&mut self, weight: &crate::Weight) -> Value {
        let stored = self.b.matrix(weight.name(), weight);
        match self.b.is_read(&stored) {
            true => self.b.op("Transpose", &[&stored], [("perm", Attribute::Ints(vec![1, 0]))]),
            false => self.b.transpose(&stored, &[1, 0]),
        }
    }

    /// The last product of a model with such attention.
    pub(super) fn output<A: LowerAttention>(&mut self, weight: &crate::Weight, x: &Value) -> Result<Value, LowerError> {
        if A::HAS_OPERATORS { self.lm_head(weight, x) } else { Ok(self.matmul_transposed(x, weight)) }
    }

    pub(super) fn feed_forward(&mut self, block: &FeedForward, x: &Value) -> Result<Value, LowerError> {
        match block {
            FeedForward::Experts(block) => self.expert_feed_forward(block, x),
            FeedForward::Dense(DenseFeedForward { input, activation: kind, output }) => {
                let hidden = self.linear(input, x);
                let hidden = activation(&mut self.b, &hidden, *kind);
                Ok(self.linear(output, &hidden))
            }
        }
    }

    /// `[B, T, C]`. What follows the sum is f32 up to one cast: a 16-bit `Where` has no CPU kernel in ONNX Runtime,
    /// which would widen it together with an attention node that reads it, weights and all.
    pub(super) fn embed(&mut self, embedding: &Embedding, tokens: &Tokens<'_>) -> Value {
        self.b.set_prefix(&embedding.prefix);
        let mut x = self.token_rows(&embedding.tokens, tokens.ids);
        #[allow(clippy::float_cmp)]
        if embedding.scale != 1.0 {
            let scale = self.b.float(embedding.scale);
            x = self.b.op("Mul", &[&x, &scale], []);
        }
        if let Some(rows) = self.position_rows(embedding, tokens) {
            x = self.b.op("Add", &[&x, &rows], []);
        }
        if embedding.norm.is_none() && !embedding.zero_at_padding {
            return x;
        }
        let mut x = self.b.to_float32(&x);
        if let Some(norm) = &embedding.norm {
            x = self.norm_float32(norm, &x);
        }
        if embedding.zero_at_padding {
            let mask = match embedding.positions {
                Positions::None => self.as_ids(tokens.mask, tokens.ids),
                Positions::Learned(_) | Positions::Sinusoidal { .. } => tokens.mask.clone(),
            };
            let real = self.b.unsqueeze(&mask, &[-1]);
            let real = self.b.cast(&real, DType::Bool);
            let zero = self.b.float32(0.0);
            x = self.b.op("Where", &[&real, &x, &zero], []);
        }
        self.b.from_float32(&x)
    }

    /// Rows of the table of tokens, in the type of activations; a negative id is an error.
    pub(super) fn token_rows(&mut self, table: &crate::Weight, ids: &Value) -> Value {
        let ids = self.b.without_negative(ids);
        self.rows(table, &ids)
    }

    /// Rows of a trained table, in the type of activations.
    fn rows(&mut self, table: &crate::Weight, ids: &Value) -> Value {
        let table = self.b.matrix(table.name(), table);
        let rows = self.b.op("Gather", &[&table, ids], [("axis", Attribute::Int(0))]);
        self.b.widen(&rows)
    }

    /// What is added to the embedding of each token for its position; `None` where the model has no positions.
    #[allow(clippy::cast_possible_wrap)]
    fn position_rows(&mut self, embedding: &Embedding, tokens: &Tokens<'_>) -> Option<Value> {
        let padding = embedding.pad_token_id;
        match &embedding.positions {
            Positions::None => None,
            Positions::Learned(table) => {
                let count = self.token_count(tokens);
                let padding = self.b.int(padding as i64);
                let positions = self.b.op("Add", &[&count, &padding], []);
                Some(self.rows(table, &positions))
            }
            Positions::Sinusoidal { rows } => {
                let count = self.token_count(tokens);
                let table = Sinusoids { rows: rows.saturating_sub(padding), width: embedding.width(), padding };
                let name = derived_name::sinusoids(&format!("{}.embed_positions", embedding.prefix));
                let table = self.b.weight(&name, WeightExpr::Sinusoids(table));
                let rows = self.b.op("Gather", &[&table, &count], [("axis", Attribute::Int(0))]);
                Some(self.b.from_float32(&rows))
            }
        }
    }

    /// `matrix` in the shape of the ids, which would be spread over its rows and columns if they were fewer. Where as
    /// many lie otherwise, the first layer finds a mask of another shape than the tokens'.
    fn as_ids(&mut self, matrix: &Value, ids: &Value) -> Value {
        let shape = self.b.op("Shape", &[ids], []);
        self.b.op("Reshape", &[matrix, &shape], [])
    }

    /// Real tokens up to and with each real token, 0 at padding: `[B, T]` int64, as the ids are.
    fn token_count(&mut self, tokens: &Tokens<'_>) -> Value {
        let real = self.b.cast(tokens.mask, DType::Bool);
        let (axis, zero) = (self.b.int(1), self.b.int(0));
        // A mask may hold other numbers than 1. Not by a cast to int64, which tract takes for a size.
        let ones = self.b.op("Where", &[&real, &axis, &zero], []);
        let count = self.b.op("CumSum", &[&ones, &axis], []);
        let mut count = self.b.op("Where", &[&real, &count, &zero], []);
        if let Some(past) = tokens.past {
            let end = self.b.ints(&[i64::MAX]);
            count = self.b.slice(&count, past, &end, 1);
        }
        self.as_ids(&count, tokens.ids)
    }

    /// The encoder's `input_ids` and `attention_mask`, and its output `[B, sequence, C]`.
    pub(super) fn encoder<A: LowerAttention>(&mut self, encoder: &Encoder<A>) -> Result<Value, LowerError> {
        let shape = [Dim::from(BATCH), Dim::from(self.tokens)];
        let ids = self.b.input(INPUT_IDS, DType::Int64, &shape);
        let [mask, mask_int32] = self.mask_input(ATTENTION_MASK, &shape);
        let mut x = self.embed(&encoder.embedding, &Tokens { ids: &ids, mask: &mask, past: None });
        for layer in &encoder.layers {
            x = self.encoder_layer(layer, &x, &mask_int32)?;
        }
        self.b.set_prefix(&encoder.embedding.prefix);
        Ok(encoder.norm.as_ref().map_or(x.clone(), |norm| self.norm(norm, &x)))
    }

    fn encoder_layer<A: LowerAttention>(
        &mut self,
        layer: &EncoderLayer<A>,
        x: &Value,
        mask: &Value,
    ) -> Result<Value, LowerError> {
        self.b.set_prefix(&layer.prefix);
        let before = layer.normalize_before;
        let x = self.residual(x, &layer.self_attention_norm, before, |l, x| {
            Ok(layer.self_attention.self_attention(l, x, mask, None)?.output)
        })?;
        self.residual(&x, &layer.final_norm, before, |l, x| l.feed_forward(&layer.feed_forward, x))
    }
}
