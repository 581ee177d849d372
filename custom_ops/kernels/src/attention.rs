//! Attention of the chosen experts' queries over shared keys and values, with an online softmax.
//!
//! One task handles the `k` slots of a few tokens for one key/value head. It lists the keys that may be seen at all,
//! so that every query sees a prefix of that list, and walks the list in tiles. The scores of one tile are all that is
//! ever stored.

use std::ops::Range;

use crate::gemm::{Matrix, Write, multiply};
use crate::rope::Rotary;
use crate::routing::Routing;
use crate::{ThreadPool, pool};

/// Query rows (tokens times slots) that one task aims at.
const QUERY_ROWS: usize = 64;

/// Keys of one tile.
const KEYS_PER_TILE: usize = 256;

/// Inputs of the attention of one call.
pub(crate) struct Attention<'a> {
    pub(crate) routing: &'a Routing,
    /// `[G, rows of the routing, D]`, before rotation and scaling.
    pub(crate) queries: &'a [f32],
    /// `[B, G, S, D]`.
    pub(crate) key: &'a [f32],
    /// `[B, G, S, D]`.
    pub(crate) value: &'a [f32],
    /// `[B, S]`, 0 where the key is masked.
    pub(crate) key_mask: &'a [i32],
    pub(crate) rotary: Option<Rotary<'a>>,
    /// `Some(P)`: query `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    pub(crate) scale: f32,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) keys: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

impl Attention<'_> {
    /// Attends; the result is `[B, G, T, k, D]`, 0 where a token is not routed or may see no key.
    pub(crate) fn compute(&self, pool: &dyn ThreadPool) -> Vec<f32> {
        let token_len = self.routing.top_k * self.head;
        let mut out = vec![0.0; self.batch * self.kv_heads * self.tokens * token_len];
        let visible: Vec<_> = (0..self.batch).map(|batch| self.visible_keys(batch)).collect();
        let tokens_per_tile = (QUERY_ROWS / self.routing.top_k).max(1);
        let mut items = Vec::new();
        for (index, out) in out.chunks_mut(self.tokens * token_len).enumerate() {
            let tiles = out.chunks_mut(tokens_per_tile * token_len).enumerate();
            items.extend(tiles.map(|(tile, out)| (index, tile * tokens_per_tile, out)));
        }
        pool::for_each(pool, items, |(index, first, out)| {
            let tokens = first..first + out.len() / token_len;
            self.attend(index, tokens, &visible[index / self.kv_heads], out);
        });
        out
    }

    /// Places of the keys that are not masked, rising.
    fn visible_keys(&self, batch: usize) -> Vec<usize> {
        let mask = &self.key_mask[batch * self.keys..][..self.keys];
        mask.iter().enumerate().filter(|(_, mask)| **mask != 0).map(|(key, _)| key).collect()
    }

    /// Attention of some tokens of the (batch, head) pair `index = b * G + g`; `out` is `[tokens, k, D]`.
    fn attend(&self, index: usize, tokens: Range<usize>, visible: &[usize], out: &mut [f32]) {
        let mut queries = self.gather(index, tokens, visible);
        let (Some(&common), Some(&longest)) = (queries.seen.iter().min(), queries.seen.iter().max()) else { return };
        let len = self.keys * self.head;
        let (key, value) = (&self.key[index * len..][..len], &self.value[index * len..][..len]);
        let (mut key_rows, mut value_rows) = (Vec::new(), Vec::new());
        for section in [0..common, common..longest] {
            for start in section.clone().step_by(KEYS_PER_TILE) {
                let tile = start..section.end.min(start + KEYS_PER_TILE);
                let places = &visible[tile.clone()];
                let key = gather_tile(key, self.head, places, &mut key_rows);
                let value = gather_tile(value, self.head, places, &mut value_rows);
                queries.visit(tile, key, value, self.head);
            }
        }
        queries.finish(self.head, out);
    }

    /// The query rows of some tokens, rotated and scaled; tokens that are not routed or see nothing are left out.
    fn gather(&self, index: usize, tokens: Range<usize>, visible: &[usize]) -> Queries {
        let (batch, group) = (index / self.kv_heads, index % self.kv_heads);
        let mut queries = Queries::default();
        for (place, token) in tokens.enumerate() {
            let seen = match self.causal_past {
                Some(past) => visible.partition_point(|&key| key <= past + token),
                None => visible.len(),
            };
            let token = batch * self.tokens + token;
            let Some(rows) = self.routing.rows_of(token).filter(|_| seen > 0) else { continue };
            for (slot, row) in rows.iter().enumerate() {
                let start = queries.data.len();
                let source = (group * self.routing.rows() + row) * self.head;
                queries.data.extend_from_slice(&self.queries[source..][..self.head]);
                let query = &mut queries.data[start..];
                if let Some(rotary) = self.rotary {
                    rotary.rotate(token, query);
                }
                query.iter_mut().for_each(|value| *value *= self.scale);
                queries.seen.push(seen);
                queries.places.push(place * self.routing.top_k + slot);
            }
        }
        let rows = queries.seen.len();
        queries.max = vec![f32::NEG_INFINITY; rows];
        queries.sum = vec![0.0; rows];
        queries.mixed = vec![0.0; rows * self.head];
        queries
    }
}

/// The rows `places` of a matrix with rows of `head` elements; a copy only where they have gaps.
fn gather_tile<'a>(rows: &'a [f32], head: usize, places: &[usize], copy: &'a mut Vec<f32>) -> &'a [f32] {
    let (Some(&first), Some(&last)) = (places.first(), places.last()) else { return &[] };
    if last - first + 1 == places.len() {
        return &rows[first * head..(last + 1) * head];
    }
    copy.clear();
    for &place in places {
        copy.extend_from_slice(&rows[place * head..][..head]);
    }
    copy
}

/// Query rows of one task and their running softmax.
#[derive(Default)]
struct Queries {
    /// `[rows, D]`.
    data: Vec<f32>,
    /// How many of the listed keys each row sees.
    seen: Vec<usize>,
    /// Where each row goes in the output of the task.
    places: Vec<usize>,
    max: Vec<f32>,
    sum: Vec<f32>,
    /// `[rows, D]`: the values mixed so far, to be divided by `sum`.
    mixed: Vec<f32>,
    scores: Vec<f32>,
}

impl Queries {
    /// Takes one tile of the key list into the softmax; `key` and `value` are `[tile, D]`.
    fn visit(&mut self, tile: Range<usize>, key: &[f32], value: &[f32], head: usize) {
        let (rows, keys) = (self.seen.len(), tile.len());
        self.scores.resize(rows * keys, 0.0);
        let key = Matrix::dense(key, keys, head).transposed();
        multiply(&mut self.scores, Matrix::dense(&self.data, rows, head), key, Write::Replace);
        let mut ragged = false;
        for (row, scores) in self.scores.chunks_mut(keys).enumerate() {
            let seen = self.seen[row].clamp(tile.start, tile.end) - tile.start;
            ragged |= seen < keys;
            let scores = &mut scores[..seen];
            let max = scores.iter().copied().fold(self.max[row], f32::max);
            let shrink = (self.max[row] - max).exp();
            scores.iter_mut().for_each(|score| *score = (*score - max).exp());
            self.sum[row] = self.sum[row] * shrink + scores.iter().sum::<f32>();
            self.max[row] = max;
            self.mixed[row * head..][..head].iter_mut().for_each(|value| *value *= shrink);
        }
        if ragged {
            self.mix_ragged(tile, value, head);
        } else {
            let weights = Matrix::dense(&self.scores, rows, keys);
            multiply(&mut self.mixed, weights, Matrix::dense(value, keys, head), Write::Add);
        }
    }

    /// Adds the values of a tile of which the rows see different parts; what a row does not see is not read for it.
    fn mix_ragged(&mut self, tile: Range<usize>, value: &[f32], head: usize) {
        let rows = self.scores.chunks(tile.len()).zip(self.mixed.chunks_mut(head));
        for ((weights, mixed), &seen) in rows.zip(&self.seen) {
            let seen = seen.clamp(tile.start, tile.end) - tile.start;
            for (weight, value) in weights[..seen].iter().zip(value.chunks(head)) {
                for (sum, value) in mixed.iter_mut().zip(value) {
                    *sum += weight * value;
                }
            }
        }
    }

    fn finish(&self, head: usize, out: &mut [f32]) {
        for ((&place, &sum), mixed) in self.places.iter().zip(&self.sum).zip(self.mixed.chunks(head)) {
            for (out, value) in out[place * head..][..head].iter_mut().zip(mixed) {
                *out = value / sum;
            }
        }
    }
}
