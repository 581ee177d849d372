//! Embedding, normalisation and feed-forward blocks.

use moa_graphs::{WeightError, model};
use moa_schema::Activation;

use super::{
    ReferenceError,
    attention::expert_matrices,
    inputs::TokenIds,
    math::{Sums, activate, add_scaled, layer_norm},
    matrix::{Matrices, Outputs, slices},
    router::{Router, Tape},
    sequence::{Mask, Sequence, TOGETHER},
    stored::Stored,
};

/// `x · weightᵀ + bias`.
#[derive(Debug)]
pub(super) struct Linear {
    /// `[in, out]`.
    weight: Matrices,
    /// `[out]`.
    bias: Vec<f64>,
}

impl Linear {
    pub(super) fn new(model: &model::Linear, stored: Stored) -> Result<Self, WeightError> {
        let (outputs, inputs) = (model.weight.shape()[0], model.weight.shape()[1]);
        let weight = Matrices::read(stored, &model.weight, 0, [1, outputs, inputs], Outputs::Rows)?;
        Ok(Self { weight, bias: stored.bias(&model.bias)? })
    }

    /// `[in]` to `[out]`, of every vector; nothing but sums is rounded.
    pub(super) fn apply(&self, sums: Sums, x: &[&[f64]]) -> Vec<Vec<f64>> {
        let mut all = self.weight.product(sums, 0, x);
        all.iter_mut().for_each(|y| add_scaled(sums, y, 1.0, &self.bias));
        all
    }
}

/// Layer normalisation, Ba et al. 2016, over the last axis.
#[derive(Debug)]
pub(super) struct LayerNorm {
    weight: Vec<f64>,
    bias: Vec<f64>,
    epsilon: f64,
}

impl LayerNorm {
    pub(super) fn new(model: &model::LayerNorm) -> Result<Self, WeightError> {
        Ok(Self { weight: model.weight.to_f64()?, bias: model.bias.to_f64()?, epsilon: f64::from(model.epsilon) })
    }

    /// The normalisation of a `model` that may have none.
    pub(super) fn optional(model: Option<&model::LayerNorm>) -> Result<Option<Self>, WeightError> {
        model.map(Self::new).transpose()
    }

    /// `[C]` to `[C]`.
    pub(super) fn apply(&self, sums: Sums, x: &[f64]) -> Vec<f64> {
        layer_norm(sums, x, &self.weight, &self.bias, self.epsilon)
    }

    /// `[B, T, C]` to `[B, T, C]`.
    pub(super) fn run(&self, x: &Sequence) -> Sequence {
        x.map(x.width, |row| self.apply(x.sums(), row))
    }
}

/// `f` with its normalisation and residual: `x + f(norm(x))` if `normalize_before`, else `norm(x + f(x))`.
pub(super) fn residual(
    x: Sequence,
    norm: &LayerNorm,
    normalize_before: bool,
    f: impl FnOnce(&Sequence) -> Result<Sequence, ReferenceError>,
) -> Result<Sequence, ReferenceError> {
    if normalize_before {
        let y = f(&norm.run(&x))?;
        Ok(x.plus(&y))
    } else {
        let y = f(&x)?;
        Ok(norm.run(&x.plus(&y)))
    }
}

/// A feed-forward block.
#[derive(Debug)]
pub(super) enum FeedForward {
    /// `output(activation(input(x)))`.
    Dense { input: Linear, activation: Activation, output: Linear },
    /// `Σ over chosen e of w[e] · activation(x · input[e]) · output[e]`.
    Experts(ExpertFeedForward),
}

impl FeedForward {
    pub(super) fn new(model: &model::FeedForward, stored: Stored) -> Result<Self, WeightError> {
        Ok(match model {
            model::FeedForward::Dense(dense) => Self::Dense {
                input: Linear::new(&dense.input, stored)?,
                activation: dense.activation,
                output: Linear::new(&dense.output, stored)?,
            },
            model::FeedForward::Experts(experts) => Self::Experts(ExpertFeedForward::new(experts, stored)?),
        })
    }

    /// `[B, T, C]` to `[B, T, C]`.
    pub(super) fn run(&self, x: &Sequence, tape: &mut Tape<'_>) -> Result<Sequence, ReferenceError> {
        match self {
            Self::Dense { input, activation, output } => {
                let mut values = Vec::with_capacity(x.batch * x.tokens);
                for rows in x.rows().chunks(TOGETHER) {
                    let mut hidden = input.apply(x.sums(), rows);
                    hidden.iter_mut().flatten().for_each(|h| *h = activate(*activation, *h));
                    values.extend(output.apply(x.sums(), &slices(&hidden)));
                }
                Ok(x.with(x.width, values))
            }
            Self::Experts(experts) => experts.run(x, tape),
        }
    }
}

/// Weights of a [`model::ExpertFeedForward`].
#[derive(Debug)]
pub(super) struct ExpertFeedForward {
    router: Router,
    /// `[E, C, F]`, or `[E, C, 2·F]` where gated.
    input: Matrices,
    /// `[E, F, C]`.
    output: Matrices,
    /// `[C]`.
    bias: Option<Vec<f64>>,
    hidden: usize,
    activation: Activation,
}

impl ExpertFeedForward {
    pub(super) fn new(model: &model::ExpertFeedForward, stored: Stored) -> Result<Self, WeightError> {
        Ok(Self {
            router: Router::of_feed_forward(model)?,
            input: expert_matrices(&model.input, model.layout, stored)?,
            output: expert_matrices(&model.output, model.layout, stored)?,
            bias: model.output_bias.as_ref().map(|bias| stored.bias(bias)).transpose()?,
            hidden: model.hidden,
            activation: model.activation,
        })
    }

    /// `[B, T, C]` to `[B, T, C]`; padding is routed like every other token.
    pub(super) fn run(&self, x: &Sequence, tape: &mut Tape<'_>) -> Result<Sequence, ReferenceError> {
        let (routing, sums) = (self.router.route(x, vec![true; x.batch * x.tokens], tape)?, x.sums());
        let mut values = Vec::with_capacity(x.batch * x.tokens);
        for slots in routing.slots() {
            let rows: Vec<&[f64]> = slots.tokens.iter().map(|token| x.token(*token)).collect();
            let mut hidden = self.input.each(x.precision, &rows, &slots.experts);
            hidden.iter_mut().for_each(|row| self.activate(row));
            let outputs = self.output.each(x.precision, &slices(&hidden), &slots.experts);
            for mut y in slots.sums(sums, x.width, &outputs) {
                if let Some(bias) = &self.bias {
                    add_scaled(sums, &mut y, 1.0, bias);
                }
                values.push(y);
            }
        }
        Ok(x.with(x.width, values))
    }

    /// `activation(row)`, or `activation(first half) · second half` of it where gated: `[F]`.
    fn activate(&self, row: &mut Vec<f64>) {
        let linear = row.split_off(self.hidden);
        row.iter_mut().for_each(|h| *h = activate(self.activation, *h));
        row.iter_mut().zip(&linear).for_each(|(h, linear)| *h *= linear);
    }
}

/// Division by the root of the mean square, Zhang and Sennrich 2019, over the last axis.
#[derive(Debug)]
pub(super) struct RmsNorm {
    weight: Vec<f64>,
    epsilon: f64,
}

impl RmsNorm {
    fn new(model: &model::RmsNorm) -> Result<Self, WeightError> {
        Ok(Self { weight: model.weight.to_f64()?, epsilon: f64::from(model.epsilon) })
    }

    /// `[B, T, C]` to `[B, T, C]`.
    fn run(&self, x: &Sequence) -> Sequence {
        x.map(x.width, |row| {
            let mean = x.sums().sum(row.iter().map(|x| x * x)) / row.len() as f64;
            let root = (mean + self.epsilon).sqrt();
            row.iter().zip(&self.weight).map(|(x, weight)| weight * x / root).collect()
        })
    }
}

/// Normalisation in a causal language model.
#[derive(Debug)]
pub(super) enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    pub(super) fn new(model: &model::Norm) -> Result<Self, WeightError> {
        Ok(match model {
            model::Norm::Layer(norm) => Self::Layer(LayerNorm::new(norm)?),
            model::Norm::Rms(norm) => Self::Rms(RmsNorm::new(norm)?),
        })
    }

    /// `[B, T, C]` to `[B, T, C]`.
    pub(super) fn run(&self, x: &Sequence) -> Sequence {
        match self {
            Self::Layer(norm) => norm.run(x),
            Self::Rms(norm) => norm.run(x),
        }
    }
}

/// Token and position embedding: `norm(scale · tokens[id] + positions[position])`.
#[derive(Debug)]
pub(super) struct Embedding {
    /// `[V, C]`.
    tokens: Matrices,
    width: usize,
    scale: f64,
    /// `[rows, C]`.
    positions: Option<Vec<f64>>,
    norm: Option<LayerNorm>,
    pad_token_id: usize,
    zero_at_padding: bool,
}

impl Embedding {
    pub(super) fn new(model: &model::Embedding, stored: Stored) -> Result<Self, WeightError> {
        let width = model.width();
        Ok(Self {
            tokens: Matrices::read(stored, &model.tokens, 0, [1, model.tokens.shape()[0], width], Outputs::Columns)?,
            width,
            scale: f64::from(model.scale),
            positions: match &model.positions {
                model::Positions::None => None,
                model::Positions::Sinusoidal { rows } => Some(sinusoids(*rows, width, model.pad_token_id)),
                model::Positions::Learned(table) => Some(stored.matrix(table)?),
            },
            norm: LayerNorm::optional(model.norm.as_ref())?,
            pad_token_id: model.pad_token_id,
            zero_at_padding: model.zero_at_padding,
        })
    }

    /// Vectors, `[B, T, C]`, of the tokens `ids`, `[B, T]`, which are the last `T` of `mask`, `[B, P + T]`.
    pub(super) fn run(&self, ids: TokenIds<'_>, mask: &Mask) -> Result<Sequence, ReferenceError> {
        let mut values = Vec::with_capacity(ids.ids.len() * self.width);
        let past = mask.tokens - ids.tokens;
        for b in 0..ids.batch {
            let mut real_tokens = (0..past).filter(|s| mask.is_real(b, *s)).count();
            for t in 0..ids.tokens {
                let is_real = mask.is_real(b, past + t);
                real_tokens += usize::from(is_real);
                let position = if is_real { self.pad_token_id + real_tokens } else { self.pad_token_id };
                let mut x: Vec<f64> = self.token(ids, b * ids.tokens + t)?.iter().map(|x| self.scale * x).collect();
                if let Some(row) = self.position(b, position)? {
                    add_scaled(ids.precision.sums(), &mut x, 1.0, row);
                }
                if let Some(norm) = &self.norm {
                    x = norm.apply(ids.precision.sums(), &x);
                }
                if self.zero_at_padding && !is_real {
                    x.fill(0.0);
                }
                values.extend(x);
            }
        }
        let x = Sequence { precision: ids.precision, batch: ids.batch, tokens: ids.tokens, width: self.width, values };
        Ok(x.rounded())
    }

    /// The row of the token at `index` of `ids`.
    fn token(&self, ids: TokenIds<'_>, index: usize) -> Result<Vec<f64>, ReferenceError> {
        let (id, vocabulary) = (ids.ids[index], self.tokens.rows());
        match usize::try_from(id).ok().filter(|id| *id < vocabulary) {
            Some(id) => Ok(self.tokens.row(id)),
            None => Err(ReferenceError::TokenId { input: ids.input.into(), index, id, vocabulary }),
        }
    }

    /// The row of `position`, needed by row `b` of the batch, where the model has positions.
    fn position(&self, b: usize, position: usize) -> Result<Option<&[f64]>, ReferenceError> {
        let Some(table) = &self.positions else { return Ok(None) };
        let rows = table.len() / self.width;
        if position >= rows {
            return Err(ReferenceError::Position { row: b, position, rows });
        }
        Ok(Some(&table[position * self.width..(position + 1) * self.width]))
    }
}

/// The table of [`model::Positions::Sinusoidal`], `[rows, width]`, computed in f32 as upstream does.
fn sinusoids(rows: usize, width: usize, pad_token_id: usize) -> Vec<f64> {
    let half = width / 2;
    let exponent = -(model::SINUSOID_BASE.ln() / (half as f64 - 1.0)) as f32;
    let frequencies: Vec<f32> = (0..half).map(|i| (i as f32 * exponent).exp()).collect();
    let mut table = Vec::with_capacity(rows * width);
    for position in 0..rows {
        if position == pad_token_id {
            table.extend(std::iter::repeat_n(0.0, width));
            continue;
        }
        let angles = frequencies.iter().map(|frequency| position as f32 * frequency);
        table.extend(angles.clone().map(|angle| f64::from(angle.sin())));
        table.extend(angles.map(|angle| f64::from(angle.cos())));
        table.extend(std::iter::repeat_n(0.0, width % 2));
    }
    table
}

#[cfg(test)]
mod tests {
    use moa_graphs::{
        SyntheticTensors,
        families::{self, Config, ImportOptions},
        model::Model,
    };
    use serde_json::json;

    use super::*;
    use crate::reference::{
        scaled,
        sequence::{Draw, Precision},
        stored::to_bf16,
    };

    #[test]
    fn sinusoids_are_concatenated_halves_with_a_zero_row_and_column() {
        let table = sinusoids(3, 5, 1);
        assert_eq!(table[..5], [0.0, 0.0, 1.0, 1.0, 0.0]);
        assert_eq!(table[5..10], [0.0; 5]);
        let expected = [2.0_f64.sin(), 2e-4_f64.sin(), 2.0_f64.cos(), 2e-4_f64.cos(), 0.0];
        for (found, expected) in table[10..].iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-7, "{found} instead of {expected}");
        }
    }

    #[test]
    fn residuals_normalise_before_or_after() {
        let norm = LayerNorm { weight: vec![1.0; 2], bias: vec![0.0; 2], epsilon: 0.0 };
        let x = Sequence { precision: Precision::DOUBLE, batch: 1, tokens: 1, width: 2, values: vec![2.0, 6.0] };
        let double = |x: &Sequence| Ok(x.clone().plus(x));
        assert_eq!(residual(x.clone(), &norm, true, double).unwrap().values, [0.0, 8.0]);
        assert_eq!(residual(x, &norm, false, double).unwrap().values, [-1.0, 1.0]);
    }

    fn imported(config: &serde_json::Value) -> Model {
        let config = Config::new("config.json", config.as_object().unwrap().clone());
        families::import(&config, &SyntheticTensors::random("memory", 3), ImportOptions::default()).unwrap()
    }

    /// Vectors of width 16.
    fn input(precision: Precision) -> Sequence {
        let values = (0..5 * 16).map(|index| (7.0 * index as f64).sin()).collect();
        Sequence { precision, batch: 1, tokens: 5, width: 16, values }.rounded()
    }

    #[test]
    fn products_of_experts_are_of_rounded_rows_and_routers_are_not() {
        let Model::CausalLm(model) = imported(&json!({
            "model_type": "jetmoe", "hidden_size": 16, "vocab_size": 30, "num_experts_per_tok": 2, "kv_channels": 8,
            "num_key_value_heads": 3, "num_hidden_layers": 1, "num_local_experts": 4, "intermediate_size": 24,
        })) else {
            panic!("no language model")
        };
        type Round = fn(&[f64]) -> Vec<f64>;
        let in_bf16: Round = |row| row.iter().copied().map(to_bf16).collect();
        let in_integers: Round = |row| scaled::factor(row, Draw::NEAREST);
        for (stored, precision, rounding) in [
            (moa_graphs::Precision::Fp32, Precision::PRODUCTS, in_bf16),
            (moa_graphs::Precision::Int8, Precision::INTEGERS, in_integers),
            (moa_graphs::Precision::Int4, Precision::INTEGERS, in_integers),
        ] {
            let block = ExpertFeedForward::new(&model.layers[0].feed_forward, Stored::new(stored)).unwrap();
            let [x, single] = [precision, Precision::SINGLE].map(input);
            let run = |x: &Sequence| {
                let mut tape = Tape::new(None);
                (block.run(x, &mut tape).unwrap().values, tape.into_routing())
            };
            let ((found, routing), (exact, exact_routing)) = (run(&x), run(&single));
            assert_eq!(routing, exact_routing);
            assert_ne!(found, exact);
            let routing = routing.into_values().next().unwrap();
            let slots = routing.slots().next().unwrap();
            let rows: Vec<_> = slots.tokens.iter().map(|token| rounding(single.token(*token))).collect();
            let mut hidden = block.input.each(Precision::SINGLE, &slices(&rows), &slots.experts);
            hidden.iter_mut().for_each(|row| block.activate(row));
            let hidden: Vec<_> = hidden.iter().map(|row| rounding(row)).collect();
            let outputs = block.output.each(Precision::SINGLE, &slices(&hidden), &slots.experts);
            let mut expected = slots.sums(Sums::Single, 16, &outputs);
            expected.iter_mut().for_each(|y| block.bias.iter().for_each(|bias| add_scaled(Sums::Single, y, 1.0, bias)));
            assert_eq!(found, single.with(16, expected).values);
        }
    }

    #[test]
    fn products_of_dense_blocks_are_of_rows_as_they_are() {
        let Model::EncoderDecoder(model) = imported(&json!({
            "model_type": "moa_transformer", "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "num_expert": 6,
            "encoder_attention_heads": 2, "decoder_attention_heads": 3, "head_dim": 8, "vocab_size": 30,
            "encoder_layers": 1, "decoder_layers": 1,
        })) else {
            panic!("no encoder-decoder")
        };
        for stored in [moa_graphs::Precision::Fp32, moa_graphs::Precision::Int8] {
            let block = FeedForward::new(&model.encoder.layers[0].feed_forward, Stored::new(stored)).unwrap();
            assert!(matches!(block, FeedForward::Dense { .. }));
            let run = |precision| block.run(&input(precision), &mut Tape::new(None)).unwrap().values;
            assert_eq!(run(Precision::PRODUCTS), run(Precision::SINGLE));
            assert_eq!(run(Precision::INTEGERS), run(Precision::SINGLE));
        }
    }
}
