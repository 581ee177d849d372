//! One MoA attention layer.

use moa_graphs::{WeightError, model};

use super::{
    ReferenceError,
    math::{add_scaled, dot, softmax, transpose, vector_matrix},
    router::{Router, Tape},
    sequence::{Heads, Mask, Sequence},
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
/// y = Σ over e in I of w[e] · o[e] · output[e]
/// ```
#[derive(Debug)]
pub(super) struct Attention {
    router: Router,
    /// `[E, C, G·D]`.
    query: Vec<f64>,
    /// `[source width, G·D]`.
    key: Vec<f64>,
    /// `[source width, G·D]`.
    value: Vec<f64>,
    /// `[E, G·D, C]`.
    output: Vec<f64>,
    width: usize,
    kv_num_heads: usize,
    head_size: usize,
    causal: bool,
    skip_padded_queries: bool,
}

impl Attention {
    pub(super) fn new(model: &model::Attention) -> Result<Self, WeightError> {
        let source_width = model.key.shape()[1];
        Ok(Self {
            router: Router::new(&model.module, &model.router, model.num_experts, model.top_k, model.gate_mode)?,
            query: model.query.to_f64()?,
            key: transpose(&model.key.to_f64()?, source_width),
            value: transpose(&model.value.to_f64()?, source_width),
            output: model.output.to_f64()?,
            width: model.router.shape()[0],
            kv_num_heads: model.kv_num_heads,
            head_size: model.head_size,
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
        let columns = self.kv_num_heads * self.head_size;
        let project =
            |w: &[f64]| Heads::split(&source.map(columns, |z| vector_matrix(z, w, columns)), self.kv_num_heads);
        KeyValues { key: project(&self.key), value: project(&self.value) }
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
        let routed = queries.real.iter().map(|real| *real || !self.skip_padded_queries).collect();
        let routing = self.router.route(x, routed, tape)?;
        let past = source.key.tokens.saturating_sub(x.tokens);
        let mut values = Vec::with_capacity(x.values.len());
        for b in 0..x.batch {
            for t in 0..x.tokens {
                let end = if self.causal { past + t + 1 } else { source.key.tokens };
                let visible: Vec<usize> = (0..end).filter(|s| keys.is_real(b, *s)).collect();
                let mut y = vec![0.0; self.width];
                for (expert, weight) in routing.choice(b, t) {
                    add_scaled(&mut y, weight, &self.expert(expert, x.row(b, t), source, b, &visible));
                }
                values.extend(y);
            }
        }
        Ok(Sequence { values, ..*x })
    }

    /// `o · output[expert]` for the token `x`, `[C]`, of row `b`.
    fn expert(&self, expert: usize, x: &[f64], source: &KeyValues, b: usize, visible: &[usize]) -> Vec<f64> {
        let columns = self.kv_num_heads * self.head_size;
        let size = self.width * columns;
        let (from, to) = (expert * size, (expert + 1) * size);
        let query = vector_matrix(x, &self.query[from..to], columns);
        let heads = query.chunks_exact(self.head_size).enumerate();
        let attended: Vec<f64> = heads.flat_map(|(g, query)| attend(query, source, b, g, visible)).collect();
        vector_matrix(&attended, &self.output[from..to], self.width)
    }
}

/// `softmax(query · D^-1/2 · Kᵀ) · V` over the `visible` tokens of row `b`, head `g`; 0 where there are none.
fn attend(query: &[f64], source: &KeyValues, b: usize, g: usize, visible: &[usize]) -> Vec<f64> {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let query: Vec<f64> = query.iter().map(|q| q * scale).collect();
    let scores: Vec<f64> = visible.iter().map(|s| dot(&query, source.key.row(b, g, *s))).collect();
    let mut attended = vec![0.0; query.len()];
    for (s, share) in visible.iter().zip(softmax(&scores)) {
        add_scaled(&mut attended, share, source.value.row(b, g, *s));
    }
    attended
}
