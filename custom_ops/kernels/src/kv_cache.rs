//! Keys and values of the new tokens, appended to those of the past.

use crate::gemm::{Matrix, Write, multiply};
use crate::rope::Rotary;
use crate::{ThreadPool, pool};

/// Tokens that one task projects.
const TOKENS_PER_TILE: usize = 128;

/// What self-attention projects keys and values from.
pub(crate) struct KeyValueInputs<'a> {
    /// `[B * T, C]`.
    pub(crate) hidden_states: &'a [f32],
    /// `[C, 2 * G * D]`, keys first.
    pub(crate) kv_weight: &'a [f32],
    /// `[B, G, P, D]`, empty where there is no past.
    pub(crate) past_key: &'a [f32],
    /// `[B, G, P, D]`, empty where there is no past.
    pub(crate) past_value: &'a [f32],
    pub(crate) rotary: Option<Rotary<'a>>,
    pub(crate) tokens: usize,
    pub(crate) past: usize,
    pub(crate) width: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

/// Fills `key` and `value`, each `[B, G, P + T, D]`: the past, then the new tokens, whose keys are rotated.
pub(crate) fn append(pool: &dyn ThreadPool, inputs: &KeyValueInputs<'_>, key: &mut [f32], value: &mut [f32]) {
    let (tokens, heads, head) = (inputs.tokens, inputs.kv_heads, inputs.head);
    let projected = project(pool, inputs);
    let total = projected.len() / (2 * heads * head);
    let chunk = (inputs.past + tokens) * head;
    let items = key.chunks_mut(chunk).zip(value.chunks_mut(chunk)).enumerate().collect();
    pool::for_each(pool, items, |(index, (key, value))| {
        let (batch, group) = (index / heads, index % heads);
        let past = inputs.past * head;
        let new = |block: usize| &projected[(block * total + batch * tokens) * head..][..tokens * head];
        key[..past].copy_from_slice(&inputs.past_key[index * past..][..past]);
        key[past..].copy_from_slice(new(group));
        value[..past].copy_from_slice(&inputs.past_value[index * past..][..past]);
        value[past..].copy_from_slice(new(heads + group));
        if let Some(rotary) = inputs.rotary {
            for (token, row) in (batch * tokens..).zip(key[past..].chunks_mut(head)) {
                rotary.rotate(token, row);
            }
        }
    });
}

/// `hidden_states · kv_weight`, head by head: `[2 * G, B * T, D]`.
fn project(pool: &dyn ThreadPool, inputs: &KeyValueInputs<'_>) -> Vec<f32> {
    let (width, head, blocks) = (inputs.width, inputs.head, 2 * inputs.kv_heads);
    let weight = Matrix::dense(inputs.kv_weight, width, blocks * head);
    let total = inputs.hidden_states.len() / width;
    let mut projected = vec![0.0; blocks * total * head];
    let mut items = Vec::new();
    for (block, rows) in projected.chunks_mut(total * head).enumerate() {
        let tiles = rows.chunks_mut(TOKENS_PER_TILE * head).enumerate();
        items.extend(tiles.map(|(tile, out)| (block, tile * TOKENS_PER_TILE, out)));
    }
    pool::for_each(pool, items, |(block, first, out)| {
        let rows = out.len() / head;
        let x = Matrix::dense(&inputs.hidden_states[first * width..][..rows * width], rows, width);
        multiply(out, x, weight.columns(block * head..(block + 1) * head), Write::Replace);
    });
    projected
}
