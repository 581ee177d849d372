//! One MoA attention layer.

use moa_graphs::{Weight, WeightError, model};
use moa_schema::AttentionMode;

use super::{
    ReferenceError,
    math::{add_scaled, dot, softmax, stick_breaking},
    matrix::{Matrices, Outputs, in_order, slices},
    router::{Router, Tape},
    sequence::{Heads, Mask, Precision, Sequence},
    stored::Stored,
};

/// Keys and values of the tokens attended to, each `[B, G, S, D]`.
#[derive(Debug, Clone)]
pub(super) struct KeyValues {
    pub(super) key: Heads,
    pub(super) value: Heads,
}

impl KeyValues {
    /// These tokens followed by those of `new`.
    pub(super) fn followed_by(&self, new: &Self) -> Self {
        Self { key: self.key.followed_by(&new.key), value: self.value.followed_by(&new.value) }
    }

    /// The same as an operator of ours multiplies them.
    fn factors(&self, precision: Precision) -> Self {
        let factors = |heads: &Heads| Heads { values: precision.factor(&heads.values).into_owned(), ..*heads };
        Self { key: factors(&self.key), value: factors(&self.value) }
    }
}

/// Weights of a [`model::Attention`].
///
/// With `I` the chosen experts of token `x` and `w` their weights (Zhang et al., "Mixture of Attention
/// Heads", EMNLP 2022, equations 4 to 8, as released):
///
/// ```text
/// K = z · keyᵀ          V = z · valueᵀ                 shared by all experts
/// q[e] = x · query[e] · D^-1/2
/// o[e] = softmax(q[e] · Kᵀ) · V                        over visible keys, for each head g
///        or [`stick_breaking`] in place of softmax
/// y = Σ over e in I of w[e] · o[e] · output[e] + bias
/// ```
///
/// With rotary position embedding, every head of q and K is turned by the angles of its token's position before
/// the two meet (Su et al., "RoFormer", 2021, in the rotate-half order of JetMoE).
#[derive(Debug)]
pub(super) struct Attention {
    router: Router,
    /// `[E, C, G·D]`.
    query: Matrices,
    /// Of keys and of values, `[source width, G·D]`; `None` where they are the source itself.
    keys_values: Option<[Matrices; 2]>,
    /// Whether the operator has these matrices, and not a product of the graph.
    has_keys_values: bool,
    /// `[E, G·D, C]`.
    output: Matrices,
    /// `[C]`.
    bias: Option<Vec<f64>>,
    rotary: Option<Rotary>,
    width: usize,
    kv_num_heads: usize,
    head_size: usize,
    attention_mode: AttentionMode,
    causal: bool,
    skip_padded_queries: bool,
}

/// How matrices are read.
type ReadMatrices = fn(Stored, &Weight, usize, [usize; 3], Outputs) -> Result<Matrices, WeightError>;

impl Attention {
    /// Self-attention, whose operator has the matrices of keys and values.
    pub(super) fn new(model: &model::Attention, stored: Stored) -> Result<Self, WeightError> {
        Ok(Self { has_keys_values: true, ..Self::read(model, stored, Matrices::of_operator)? })
    }

    /// Attention to a memory, whose keys and values are projected by a product of the graph.
    pub(super) fn to_memory(model: &model::Attention, stored: Stored) -> Result<Self, WeightError> {
        Self::read(model, stored, Matrices::read)
    }

    fn read(model: &model::Attention, stored: Stored, keys_values: ReadMatrices) -> Result<Self, WeightError> {
        let (width, columns) = (model.width, model.kv_num_heads * model.head_size);
        let shape = [1, columns, model.source_width];
        let read = |weight, first| keys_values(stored, weight, first, shape, Outputs::Rows);
        let keys_values = match &model.keys_values {
            model::KeyValueWeights::Separate { key, value } => Some([read(key, 0)?, read(value, 0)?]),
            model::KeyValueWeights::Joint(both) => Some([read(both, 0)?, read(both, columns * model.source_width)?]),
            model::KeyValueWeights::HiddenStates => None,
        };
        Ok(Self {
            router: Router::of_attention(model)?,
            query: expert_matrices(&model.query, model.layout, stored)?,
            keys_values,
            has_keys_values: false,
            output: expert_matrices(&model.output, model.layout, stored)?,
            bias: model.output_bias.as_ref().map(|bias| stored.bias(bias)).transpose()?,
            rotary: model.rotary.map(|rotary| Rotary::new(rotary, model.head_size)),
            width,
            kv_num_heads: model.kv_num_heads,
            head_size: model.head_size,
            attention_mode: model.attention_mode,
            causal: model.causal,
            skip_padded_queries: model.skip_padded_queries,
        })
    }

    /// `C`.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Shape of keys and of values, `[batch, G, tokens, D]`.
    pub(super) fn cache_shape(&self, batch: usize, tokens: usize) -> [usize; 4] {
        [batch, self.kv_num_heads, tokens, self.head_size]
    }

    /// Keys and values of `source`, `[B, S, source width]`.
    pub(super) fn keys_values(&self, source: &Sequence) -> KeyValues {
        self.keys_values_at(source, None)
    }

    /// The same for tokens at `positions`, `[B, S]`.
    pub(super) fn keys_values_at(&self, source: &Sequence, positions: Option<&Positions>) -> KeyValues {
        let columns = self.kv_num_heads * self.head_size;
        let [mut key, value] = match &self.keys_values {
            Some(matrices) => {
                let map = if self.has_keys_values { Matrices::map_factors } else { Matrices::map };
                matrices.each_ref().map(|matrix| map(matrix, source))
            }
            None => [source.clone(), source.clone()],
        };
        if let Some((rotary, positions)) = self.rotary.as_ref().zip(positions) {
            for (index, position) in positions.0.iter().enumerate() {
                rotary.turn(&mut key.values[index * columns..(index + 1) * columns], *position);
            }
        }
        let split = |projected: &Sequence| Heads::split(projected, self.kv_num_heads);
        KeyValues { key: split(&key), value: split(&value) }
    }

    /// The layer's output for `x`, `[B, T, C]`, whose real tokens are `queries`, attending to the tokens of
    /// `source` whose real ones are `keys`.
    ///
    /// If the layer is causal, the last `T` tokens of `source` are those of `x`, and token `t` of `x` sees
    /// itself and what stands before it. A token that sees no key gets 0.
    pub(super) fn run(
        &self,
        x: &Sequence,
        queries: &Mask,
        source: &KeyValues,
        keys: &Mask,
        tape: &mut Tape<'_>,
    ) -> Result<Sequence, ReferenceError> {
        self.run_at(x, queries, None, source, keys, tape)
    }

    /// The same for tokens `x` at `positions`, `[B, T]`.
    pub(super) fn run_at(
        &self,
        x: &Sequence,
        queries: &Mask,
        positions: Option<&Positions>,
        source: &KeyValues,
        keys: &Mask,
        tape: &mut Tape<'_>,
    ) -> Result<Sequence, ReferenceError> {
        let routed = queries.real.iter().map(|real| *real || !self.skip_padded_queries).collect();
        let routing = self.router.route(x, routed, tape)?;
        let (sums, source) = (x.sums(), &source.factors(x.precision));
        let mut values = Vec::with_capacity(x.batch * x.tokens);
        for slots in routing.slots() {
            let rows: Vec<&[f64]> = slots.tokens.iter().map(|token| x.token(*token)).collect();
            let mut queries = self.query.each(x.precision, &rows, &slots.experts);
            if let Some((rotary, positions)) = self.rotary.as_ref().zip(positions) {
                let tokens = queries.iter_mut().zip(&slots.tokens);
                tokens.for_each(|(query, token)| rotary.turn(query, positions.0[*token]));
            }
            let attended = self.attend(x.precision, &queries, &slots.tokens, x.tokens, source, keys);
            let outputs = self.output.each(x.precision, &slices(&attended), &slots.experts);
            for (token, mut y) in slots.range.clone().zip(slots.sums(sums, self.width, &outputs)) {
                if let (Some(bias), true) = (&self.bias, routing.routed[token]) {
                    add_scaled(sums, &mut y, 1.0, bias);
                }
                values.push(y);
            }
        }
        Ok(x.with(self.width, values))
    }

    /// What each of the `queries`, `[G·D]`, of the tokens `of`, counted over rows of `tokens`, attends to: `[G·D]`;
    /// `source` holds factors.
    fn attend(
        &self,
        precision: Precision,
        queries: &[Vec<f64>],
        of: &[usize],
        tokens: usize,
        source: &KeyValues,
        keys: &Mask,
    ) -> Vec<Vec<f64>> {
        let past = source.key.tokens.saturating_sub(tokens);
        let work = 2 * queries.len() * source.key.tokens * self.kv_num_heads * self.head_size;
        in_order(queries.len(), work, |index| {
            let (b, t) = (of[index] / tokens, of[index] % tokens);
            let end = if self.causal { past + t + 1 } else { source.key.tokens };
            let visible: Vec<usize> = (0..end).filter(|s| keys.is_real(b, *s)).collect();
            let heads = queries[index].chunks_exact(self.head_size).enumerate();
            heads.flat_map(|(g, query)| self.attend_head(precision, query, source, [b, g], &visible)).collect()
        })
    }

    /// What `query` `[D]` takes of the values of the `visible` tokens of row `b`, head `g`; 0 where there are none.
    fn attend_head(
        &self,
        precision: Precision,
        query: &[f64],
        source: &KeyValues,
        [b, g]: [usize; 2],
        visible: &[usize],
    ) -> Vec<f64> {
        let (sums, scale) = (precision.sums(), 1.0 / (query.len() as f64).sqrt());
        let query: Vec<f64> = query.iter().map(|q| q * scale).collect();
        let query = precision.factor(&query);
        let scores: Vec<f64> = visible.iter().map(|s| dot(sums, &query, source.key.row(b, g, *s))).collect();
        let weights = match self.attention_mode {
            AttentionMode::Softmax => softmax(sums, &scores),
            AttentionMode::StickBreaking => stick_breaking(sums, &scores),
        };
        let mut attended = vec![0.0; query.len()];
        for (s, weight) in visible.iter().zip(precision.factor(&weights).iter()) {
            add_scaled(sums, &mut attended, *weight, source.value.row(b, g, *s));
        }
        attended
    }
}

/// Positions of tokens, `[B, T]`.
#[derive(Debug, Clone)]
pub(super) struct Positions(pub(super) Vec<usize>);

/// Rotary position embedding of heads of one width.
#[derive(Debug)]
struct Rotary {
    head_size: usize,
    /// `base^(-2i/D)` in f32, as the original computes it.
    frequencies: Vec<f32>,
}

impl Rotary {
    fn new(model: model::Rotary, head_size: usize) -> Self {
        let base = model.base as f32;
        let frequency = |i: usize| 1.0 / base.powf((2 * i) as f32 / head_size as f32);
        Self { head_size, frequencies: (0..head_size / 2).map(frequency).collect() }
    }

    /// Turns every head of `row`, `[heads·D]`: pair `(i, i + D/2)` by the angle `position · frequency[i]`.
    fn turn(&self, row: &mut [f64], position: usize) {
        let half = self.head_size / 2;
        for head in row.chunks_exact_mut(self.head_size) {
            for (i, frequency) in self.frequencies.iter().enumerate() {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                let (first, second) = (head[i], head[i + half]);
                head[i] = first * cos - second * sin;
                head[i + half] = second * cos + first * sin;
            }
        }
    }
}

/// Matrices of experts with inputs before outputs, `[E, in, out]`.
pub(super) fn expert_matrices(
    weight: &Weight,
    layout: model::ExpertLayout,
    stored: Stored,
) -> Result<Matrices, WeightError> {
    let shape = *weight.shape().first_chunk().unwrap_or(&[0; 3]);
    let outputs = match layout {
        model::ExpertLayout::InOut => Outputs::Columns,
        model::ExpertLayout::OutIn => Outputs::Rows,
    };
    Matrices::of_operator(stored, weight, 0, shape, outputs)
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
    use crate::reference::{Routing, math::Sums, scaled, sequence::Draw, stored::to_bf16};

    const TOKENS: usize = 5;

    fn in_bf16(values: &[f64]) -> Vec<f64> {
        values.iter().copied().map(to_bf16).collect()
    }

    fn in_integers(values: &[f64]) -> Vec<f64> {
        scaled::factor(values, Draw::NEAREST)
    }

    /// How a row of a product is rounded.
    type Round = fn(&[f64]) -> Vec<f64>;

    /// What is stored, and how rows are then rounded.
    const ROUNDED: [(moa_graphs::Precision, Precision, Round); 3] = [
        (moa_graphs::Precision::Fp32, Precision::PRODUCTS, in_bf16),
        (moa_graphs::Precision::Int8, Precision::INTEGERS, in_integers),
        (moa_graphs::Precision::Int4, Precision::INTEGERS, in_integers),
    ];

    /// A layer of width 16 with a bias, and keys and values of its own or of a memory.
    fn layer(cross_attention: bool, stored: moa_graphs::Precision) -> Attention {
        let config = json!({
            "model_type": "moa_layer", "embed_dim": 16, "num_expert": 5, "top_k": 2, "head_dim": 8,
            "cross_attention": cross_attention,
        });
        let config = Config::new("config.json", config.as_object().unwrap().clone());
        let tensors = SyntheticTensors::random("memory", 3);
        let model = families::import(&config, &tensors, ImportOptions::default()).unwrap();
        let Model::Layer(layer) = model else { panic!("no layer") };
        let stored = Stored::new(stored);
        let read = if cross_attention { Attention::to_memory } else { Attention::new };
        read(&layer.attention, stored).unwrap()
    }

    fn input(precision: Precision) -> Sequence {
        let values = (0..TOKENS * 16).map(|index| (7.0 * index as f64).sin()).collect();
        Sequence { precision, batch: 1, tokens: TOKENS, width: 16, values }.rounded()
    }

    fn run(layer: &Attention, x: &Sequence, source: &KeyValues) -> (Vec<f64>, Routing) {
        let mask = Mask { batch: 1, tokens: TOKENS, real: vec![true; TOKENS] };
        let mut tape = Tape::new(None);
        let output = layer.run(x, &mask, source, &mask, &mut tape).unwrap();
        (output.values, tape.into_routing())
    }

    #[test]
    fn keys_and_values_of_the_operator_alone_are_of_rounded_rows() {
        for (stored, precision, rounding) in ROUNDED {
            let [x, single] = [precision, Precision::SINGLE].map(input);
            let values = |pair: KeyValues| [pair.key.values, pair.value.values];
            let rounded = Sequence { values: single.rows().into_iter().flat_map(rounding).collect(), ..single.clone() };
            let own = layer(false, stored);
            assert_eq!(values(own.keys_values(&x)), values(own.keys_values(&rounded)));
            assert_ne!(values(own.keys_values(&x)), values(own.keys_values(&single)));
            let of_memory = layer(true, stored);
            assert_eq!(values(of_memory.keys_values(&x)), values(of_memory.keys_values(&single)));
            let without = Attention { keys_values: None, ..own };
            assert_eq!(values(without.keys_values(&x)), values(without.keys_values(&single)));
        }
        let [x, single] = [Precision::INTEGERS, Precision::SINGLE].map(input);
        let of_floats = layer(false, moa_graphs::Precision::Fp32);
        assert_eq!(of_floats.keys_values(&x).key, of_floats.keys_values(&single).key);
    }

    #[test]
    fn queries_and_outputs_are_of_rounded_rows_and_routers_are_not() {
        for (stored, precision, rounding) in ROUNDED {
            let [x, single] = [precision, Precision::SINGLE].map(input);
            let layer = layer(false, stored);
            let source = layer.keys_values(&single);
            let (found, routing) = run(&layer, &x, &source);
            let (exact, exact_routing) = run(&layer, &single, &source);
            assert_eq!(routing, exact_routing);
            assert_ne!(found, exact);
            let mask = Mask { batch: 1, tokens: TOKENS, real: vec![true; TOKENS] };
            let routing = routing.into_values().next().unwrap();
            let slots = routing.slots().next().unwrap();
            let rows: Vec<_> = slots.tokens.iter().map(|token| rounding(single.token(*token))).collect();
            let sums = Sums::Single;
            let queries = layer.query.each(Precision::SINGLE, &slices(&rows), &slots.experts);
            let source = source.factors(precision);
            let attended = layer.attend(precision, &queries, &slots.tokens, TOKENS, &source, &mask);
            let attended: Vec<_> = attended.iter().map(|row| rounding(row)).collect();
            let outputs = layer.output.each(Precision::SINGLE, &slices(&attended), &slots.experts);
            let mut expected = slots.sums(sums, 16, &outputs);
            expected.iter_mut().for_each(|y| layer.bias.iter().for_each(|bias| add_scaled(sums, y, 1.0, bias)));
            assert_eq!(found, single.with(16, expected).values);
        }
    }

    /// Queries, keys, weights and values are rounded once each, and sums are not.
    #[test]
    fn both_factors_of_scores_and_of_what_is_attended_to_are_rounded() {
        let layer = layer(false, moa_graphs::Precision::Fp32);
        let [x, single] = [Precision::PRODUCTS, Precision::SINGLE].map(input);
        let source = layer.keys_values(&single);
        let visible: Vec<usize> = (0..TOKENS).collect();
        let query: Vec<f64> = x.token(0)[..8].to_vec();
        let attend = |precision, source: &KeyValues| layer.attend_head(precision, &query, source, [0, 0], &visible);
        let factors = source.factors(Precision::PRODUCTS);
        assert_eq!(factors.key.values, in_bf16(&source.key.values));
        assert_eq!(factors.value.values, in_bf16(&source.value.values));
        assert_eq!(source.factors(Precision::SINGLE).value, source.value);
        let scaled: Vec<f64> = query.iter().map(|q| q / 8f64.sqrt()).collect();
        let score = |s: &usize| dot(Sums::Single, &in_bf16(&scaled), factors.key.row(0, 0, *s));
        let weights = softmax(Sums::Single, &visible.iter().map(score).collect::<Vec<_>>());
        let mut expected = vec![0.0; 8];
        for (s, weight) in in_bf16(&weights).into_iter().enumerate() {
            add_scaled(Sums::Single, &mut expected, weight, factors.value.row(0, 0, s));
        }
        let found = attend(Precision::PRODUCTS, &factors);
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12;
        assert!(found.iter().zip(&expected).all(near), "{found:?} {expected:?}");
        let single = attend(Precision::SINGLE, &source);
        assert!(!found.iter().zip(&single).all(near));
        assert_eq!(source.factors(Precision::INTEGERS).key, factors.key);
        assert_eq!(attend(Precision::INTEGERS, &factors), found);
    }
}
