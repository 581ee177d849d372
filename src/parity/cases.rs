//! Inputs for verification: shapes that no export ever saw, padding on both sides, single tokens, and rows
//! that steer the router.

use moa_graphs::{
    WeightError,
    model::{Attention, CausalLm, Embedding, MoaLayer},
};
use moa_schema::interface::{ATTENTION_MASK, INPUT_IDS, MEMORY, QUERY, QUERY_ATTENTION_MASK};

use crate::{
    random::Random,
    tensor::{NamedTensors, Tensor, TensorData, TensorShapeError},
};

/// Most rows of a case.
pub const MOST_ROWS: usize = 128;
/// Most tokens of a row of a case, on either side of a model, cached ones included.
pub const MOST_TOKENS: usize = 200;
/// Tokens of the case [`MANY`]: kernels choose other paths where tokens are many.
const MANY_TOKENS: usize = MOST_TOKENS;
/// Name of the case of many tokens at once.
const MANY: &str = "many tokens at once";

/// Which end of a row is padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Padding {
    None,
    Left,
    Right,
    /// The last row holds nothing else.
    WholeRow,
}

impl Padding {
    /// Which positions of a row are real, where `pads` of them are to be padding; one always stays real.
    fn real(self, length: usize, pads: usize, is_last_row: bool) -> impl Iterator<Item = bool> {
        let pads = pads.min(length - 1);
        (0..length).map(move |position| match self {
            Self::None => true,
            Self::Left => position >= pads,
            Self::Right => position < length - pads,
            Self::WholeRow => !is_last_row,
        })
    }
}

/// How many positions of a row are padding; the first row of a batch has none.
fn pads_of(random: &mut Random, row: usize, length: usize) -> usize {
    if row == 0 { 0 } else { 1 + random.below(length.saturating_sub(1).max(1)) }
}

/// Token rows of one case.
#[derive(Debug, Clone)]
pub(super) struct Tokens {
    /// What the case is about.
    pub(super) name: String,
    /// Whether it is beyond the sizes that others need, so that an engine that is given may not take it.
    pub(super) is_large: bool,
    /// Rows.
    pub(super) batch: usize,
    /// Tokens per row, padding included.
    pub(super) length: usize,
    /// Ids, row-major.
    pub(super) ids: Vec<i64>,
    /// 1 for a real token, 0 for padding.
    pub(super) mask: Vec<i64>,
}

impl Tokens {
    /// `input_ids` and `attention_mask`.
    ///
    /// # Errors
    ///
    /// Never for tokens made by this module.
    pub(super) fn inputs(&self) -> Result<NamedTensors, TensorShapeError> {
        [(INPUT_IDS, &self.ids), (ATTENTION_MASK, &self.mask)]
            .into_iter()
            .map(|(name, values)| Ok((name.to_owned(), ints([self.batch, self.length], values.clone())?)))
            .collect()
    }
}

/// What token rows are made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vocabulary {
    /// Ids from 0.
    pub(super) size: usize,
    /// Id of the padding token.
    pub(super) pad: usize,
    /// Longest row.
    pub(super) limit: usize,
}

impl From<&Embedding> for Vocabulary {
    fn from(embedding: &Embedding) -> Self {
        let limit = embedding.max_tokens().unwrap_or(usize::MAX);
        Self { size: embedding.tokens.shape()[0], pad: embedding.pad_token_id, limit }
    }
}

impl From<&CausalLm> for Vocabulary {
    fn from(model: &CausalLm) -> Self {
        let limit = model.max_positions().unwrap_or(usize::MAX);
        Self { size: model.tokens.shape()[0], pad: model.pad_token_id, limit }
    }
}

/// Vocabularies up to this size are swept whole; a larger one takes minutes on a backend, since the reference computes
/// logits of every token for each of them.
const LARGEST_SWEEP: usize = 4096;
/// Tokens of a row of such a sweep, where the model takes as many.
const LONGEST_SWEPT: usize = LARGEST_SWEEP / MOST_ROWS;

/// Why [`token_cases`] have no sweep of this vocabulary, where they have none.
pub(super) fn left_out(vocabulary: impl Into<Vocabulary>) -> Option<String> {
    let size = vocabulary.into().size;
    (size > LARGEST_SWEEP)
        .then(|| format!("no case reads every token of the vocabulary: it has {size}, more than {LARGEST_SWEEP}"))
}

/// Token rows for one side of a model.
pub(super) fn token_cases(vocabulary: impl Into<Vocabulary>, random: &mut Random) -> Vec<Tokens> {
    let vocabulary = vocabulary.into();
    let limit = vocabulary.limit;
    let mut shapes = vec![
        ("two tokens", 2, 2, Padding::None),
        ("one token", 1, 1, Padding::None),
        ("odd length", 1, 7, Padding::None),
        ("padding on the right", 3, 11, Padding::Right),
        ("padding on the left", 3, 13, Padding::Left),
        ("a row of padding", 2, 5, Padding::WholeRow),
        ("long", 2, 67, Padding::Right),
    ];
    for shape in &mut shapes {
        shape.2 = shape.2.min(limit).max(1);
    }
    let mut cases: Vec<_> = shapes
        .into_iter()
        .map(|(name, batch, length, padding)| random_tokens(vocabulary, random, name, [batch, length], padding))
        .collect();
    cases.push(many_tokens(vocabulary, random));
    cases.extend(vocabulary_sweep(vocabulary));
    cases
}

/// Many tokens at once: one row, or as few as have room for them where the model's positions are fewer.
fn many_tokens(vocabulary: Vocabulary, random: &mut Random) -> Tokens {
    let length = vocabulary.limit.clamp(1, MANY_TOKENS);
    let rows = MANY_TOKENS.div_ceil(length).min(MOST_ROWS);
    Tokens { is_large: true, ..random_tokens(vocabulary, random, MANY, [rows, length], Padding::None) }
}

#[allow(clippy::cast_possible_wrap)]
fn random_tokens(
    vocabulary: Vocabulary,
    random: &mut Random,
    name: &str,
    [batch, length]: [usize; 2],
    padding: Padding,
) -> Tokens {
    let Vocabulary { size, pad, .. } = vocabulary;
    let mut tokens = Tokens { name: name.into(), is_large: false, batch, length, ids: Vec::new(), mask: Vec::new() };
    for row in 0..batch {
        let pads = pads_of(random, row, length);
        for real in padding.real(length, pads, row + 1 == batch) {
            let id = if real { other_than(random.below(size), pad, size) } else { pad };
            tokens.ids.push(id as i64);
            tokens.mask.push(i64::from(real));
        }
    }
    tokens
}

const fn other_than(id: usize, pad: usize, vocabulary: usize) -> usize {
    if id == pad { (id + 1) % vocabulary } else { id }
}

/// Every token of the vocabulary once, where it is not too large, that of padding as a real token too; in as few cases
/// as their rows allow.
#[allow(clippy::cast_possible_wrap)]
fn vocabulary_sweep(Vocabulary { size, limit, .. }: Vocabulary) -> Vec<Tokens> {
    if size > LARGEST_SWEEP {
        return Vec::new();
    }
    let length = limit.min(LONGEST_SWEPT);
    let ids: Vec<_> = (0..size.next_multiple_of(length)).map(|i| (i % size) as i64).collect();
    let case = |ids: &[i64]| {
        let (name, batch) = ("every token of the vocabulary".into(), ids.len() / length);
        Tokens { name, is_large: false, batch, length, ids: ids.to_vec(), mask: vec![1; ids.len()] }
    };
    ids.chunks(length * MOST_ROWS).map(case).collect()
}

/// Rows of the other side of a translation, as many as `batch`; those of `turn` differ from those of the next one in
/// length and padding.
pub(super) fn companion(
    vocabulary: impl Into<Vocabulary>,
    random: &mut Random,
    (batch, turn): (usize, usize),
) -> Tokens {
    let vocabulary = vocabulary.into();
    let shapes =
        [(9, Padding::Left), (12, Padding::Right), (1, Padding::None), (37, Padding::Left), (5, Padding::None)];
    let (length, padding) = shapes[turn % shapes.len()];
    random_tokens(vocabulary, random, "source", [batch, vocabulary.limit.min(length)], padding)
}

/// Rows that are decoded piece by piece over the caches of the piece before.
#[derive(Debug, Clone)]
pub(super) struct Steps {
    /// The whole rows.
    pub(super) tokens: Tokens,
    /// Where each piece ends, the last of them with the rows.
    pub(super) ends: Vec<usize>,
}

impl Steps {
    /// So many tokens at once, then one by one.
    fn after(prefix: usize, tokens: Tokens) -> Self {
        let ends = (prefix..=tokens.length).collect();
        Self { tokens, ends }
    }

    /// Pieces of `piece` tokens, each behind the cache of those before.
    fn in_pieces(piece: usize, name: &str, tokens: Tokens) -> Self {
        let ends = (0..tokens.length).step_by(piece).skip(1).chain([tokens.length]).collect();
        Self { tokens: Tokens { name: name.into(), ..tokens }, ends }
    }
}

/// Name of the case of one row that is decoded step by step.
const ONE_ROW: &str = "one row step by step after a prompt";
/// Tokens of its prompt: more than a vector has lanes and a tile has keys.
const PROMPT: usize = 40;
/// Tokens that follow each of its ends, the first of which is that of the prompt.
const AFTER_PROMPT: [usize; 6] = [9, 8, 7, 6, 1, 0];

/// Target rows for decoding over a cache.
pub(super) fn step_cases(vocabulary: impl Into<Vocabulary>, random: &mut Random) -> Vec<Steps> {
    let vocabulary = vocabulary.into();
    let length = vocabulary.limit.min(8);
    let first = random_tokens(vocabulary, random, "step by step from the first token", [2, length], Padding::None);
    let plain = random_tokens(vocabulary, random, "step by step after a prefix", [3, length], Padding::None);
    let prefix = length.min(4);
    let mut cases = vec![
        Steps::after(1, first),
        Steps::after(prefix, plain.clone()),
        Steps::in_pieces(3, "in pieces of three tokens", plain.clone()),
    ];
    if length > 3 {
        let mut padded = Tokens { name: "step by step after a padded prefix".into(), ..plain };
        padded.mask[length + 2] = 0;
        #[allow(clippy::cast_possible_wrap)]
        let pad = vocabulary.pad as i64;
        padded.ids[length + 2] = pad;
        cases.push(Steps::after(prefix, padded.clone()));
        cases.push(Steps::in_pieces(3, "in pieces of three tokens, one of them padding", padded));
    }
    cases.push(one_row(vocabulary, random));
    cases
}

/// A row by itself, as a caller generates text: a prompt, single tokens behind it, then a piece of several and one
/// more. Where the positions are few, the prompt is shorter, and then the rest is.
fn one_row(vocabulary: Vocabulary, random: &mut Random) -> Steps {
    let length = vocabulary.limit.min(PROMPT + AFTER_PROMPT[0]);
    let tokens = random_tokens(vocabulary, random, ONE_ROW, [1, length], Padding::None);
    let ends = AFTER_PROMPT.into_iter().filter_map(|rest| length.checked_sub(rest).filter(|end| *end > 0));
    Steps { tokens, ends: ends.collect() }
}

/// Rows of several lengths as generation batches them, padded on the left, to be decoded after a common prefix and in
/// pieces; none where the positions are too few.
pub(super) fn left_padded_steps(vocabulary: impl Into<Vocabulary>, random: &mut Random) -> Vec<Steps> {
    let vocabulary = vocabulary.into();
    let (length, prefix) = (vocabulary.limit.min(9), 6);
    if length <= prefix {
        return Vec::new();
    }
    let name = "step by step after left padding";
    let mut tokens = random_tokens(vocabulary, random, name, [3, length], Padding::None);
    for (row, pads) in [(1, 2), (2, prefix - 1)] {
        for place in row * length..row * length + pads {
            tokens.mask[place] = 0;
            #[allow(clippy::cast_possible_wrap)]
            let pad = vocabulary.pad as i64;
            tokens.ids[place] = pad;
        }
    }
    let pieces = Steps::in_pieces(4, "in pieces of four tokens after left padding", tokens.clone());
    vec![Steps::after(prefix, tokens), pieces]
}

/// Inputs of a single layer.
pub(super) struct LayerCase {
    /// What the case is about.
    pub(super) name: &'static str,
    /// As [`Tokens::is_large`].
    pub(super) is_large: bool,
    /// By name.
    pub(super) inputs: NamedTensors,
}

/// Cases of a single layer.
///
/// # Errors
///
/// Where the router cannot be read.
pub(super) fn layer_cases(layer: &MoaLayer, random: &mut Random) -> Result<Vec<LayerCase>, LayerCaseError> {
    let mut cases = Vec::new();
    let shapes = [
        ("two tokens", 2, 2, 2, Padding::None),
        ("one token", 1, 1, 3, Padding::None),
        ("odd length", 2, 7, 5, Padding::None),
        ("padding on the right", 3, 11, 9, Padding::Right),
        ("padding on the left", 3, 13, 6, Padding::Left),
        ("a row of padding", 2, 5, 4, Padding::WholeRow),
        ("long", 1, 67, 70, Padding::None),
        (MANY, 1, MANY_TOKENS, 70, Padding::None),
    ];
    for (name, batch, tokens, sources, padding) in shapes {
        let query = random_rows(random, batch * tokens * layer.attention.width);
        let inputs = layer_inputs(layer, random, query, [batch, tokens, sources], padding)?;
        cases.push(LayerCase { name, is_large: tokens == MANY_TOKENS, inputs });
    }
    let steered = steered_rows(&layer.attention, 6)?;
    let inputs = layer_inputs(layer, random, steered, [2, 3, 4], Padding::None)?;
    cases.push(LayerCase { name: "all tokens on one expert", is_large: false, inputs });
    Ok(cases)
}

/// Why inputs of a layer could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub(super) enum LayerCaseError {
    #[error(transparent)]
    Weight(#[from] WeightError),
    #[error(transparent)]
    Shape(#[from] TensorShapeError),
}

fn random_rows(random: &mut Random, values: usize) -> Vec<f32> {
    (0..values).map(|_| random.normalised()).collect()
}

/// Rows along the router's column of expert 0, so that it is chosen first for every token.
#[allow(clippy::cast_precision_loss)]
fn steered_rows(attention: &Attention, rows: usize) -> Result<Vec<f32>, WeightError> {
    let router = attention.router.weight.to_f32()?;
    let column: Vec<f32> = router.iter().step_by(attention.num_experts).copied().collect();
    let norm = column.iter().map(|value| value * value).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
    let factors = (0..rows).map(|row| 0.5 + row as f32 / 8.0);
    Ok(factors.flat_map(|factor| column.iter().map(move |value| factor * 4.0 * value / norm)).collect())
}

fn mask_rows(random: &mut Random, [batch, length]: [usize; 2], padding: Padding) -> Vec<i64> {
    let mut mask = Vec::new();
    for row in 0..batch {
        let pads = pads_of(random, row, length);
        mask.extend(padding.real(length, pads, row + 1 == batch).map(i64::from));
    }
    mask
}

fn layer_inputs(
    layer: &MoaLayer,
    random: &mut Random,
    query: Vec<f32>,
    [batch, tokens, sources]: [usize; 3],
    padding: Padding,
) -> Result<NamedTensors, TensorShapeError> {
    let mut inputs = NamedTensors::new();
    let query = Tensor::new([batch, tokens, layer.attention.width], TensorData::F32(query))?;
    inputs.insert(QUERY.into(), query);
    let query_mask = ints([batch, tokens], mask_rows(random, [batch, tokens], padding))?;
    if !layer.cross_attention {
        inputs.insert(ATTENTION_MASK.into(), query_mask);
        return Ok(inputs);
    }
    let memory = random_rows(random, batch * sources * layer.attention.source_width);
    inputs.insert(MEMORY.into(), Tensor::new([batch, sources, layer.attention.source_width], TensorData::F32(memory))?);
    let key_padding = if padding == Padding::WholeRow { Padding::None } else { padding };
    inputs.insert(ATTENTION_MASK.into(), ints([batch, sources], mask_rows(random, [batch, sources], key_padding))?);
    inputs.insert(QUERY_ATTENTION_MASK.into(), query_mask);
    Ok(inputs)
}

/// An int64 tensor.
///
/// # Errors
///
/// Where the number of values does not fit.
pub(super) fn ints(shape: [usize; 2], values: Vec<i64>) -> Result<Tensor, TensorShapeError> {
    Tensor::new(shape, TensorData::I64(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_where_its_name_says() {
        let real = |padding: Padding, is_last| padding.real(4, 3, is_last).map(u8::from).collect::<Vec<_>>();
        assert_eq!(real(Padding::None, true), [1, 1, 1, 1]);
        assert_eq!(real(Padding::Left, false), [0, 0, 0, 1]);
        assert_eq!(real(Padding::Right, false), [1, 0, 0, 0]);
        assert_eq!(real(Padding::WholeRow, false), [1, 1, 1, 1]);
        assert_eq!(real(Padding::WholeRow, true), [0, 0, 0, 0]);
        assert_eq!(Padding::Left.real(2, 9, false).collect::<Vec<_>>(), [false, true], "one stays");
        let random = &mut Random::new(0);
        assert_eq!(pads_of(random, 0, 9), 0);
        assert!((1..9).all(|row| (1..9).contains(&pads_of(random, row, 9))));
        let cases = token_cases(Vocabulary { size: 30, pad: 1, limit: usize::MAX }, random);
        let padded = |case: &&Tokens| case.mask.contains(&0);
        assert!(cases.iter().filter(padded).count() >= 3, "cases with padding");
        let pads = cases.iter().flat_map(|case| case.ids.iter().zip(&case.mask)).filter(|(_, mask)| **mask == 0);
        assert!(pads.into_iter().all(|(id, _)| *id == 1), "padding holds the id of padding");
    }

    #[test]
    fn several_tokens_come_behind_a_cache() {
        let vocabulary = Vocabulary { size: 30, pad: 1, limit: usize::MAX };
        let random = &mut Random::new(0);
        let all = [step_cases(vocabulary, random), left_padded_steps(vocabulary, random)];
        let behind = |steps: &Steps| steps.ends.windows(2).any(|ends| ends[1] - ends[0] > 1);
        assert_eq!(all.map(|steps| steps.iter().filter(|steps| behind(steps)).count()), [3, 1]);
        for (limit, ends) in [(usize::MAX, &[40, 41, 42, 43, 48, 49][..]), (8, &[1, 2, 7, 8]), (1, &[1]), (2, &[1, 2])]
        {
            let steps = one_row(Vocabulary { limit, ..vocabulary }, random);
            assert_eq!((steps.tokens.batch, steps.ends.as_slice()), (1, ends), "{limit}");
        }
        let sources = (0..5).map(|turn| companion(vocabulary, random, (2, turn)));
        let ends = |source: &Tokens| (source.length, source.mask[source.length], source.mask[2 * source.length - 1]);
        assert!(sources.map(|source| ends(&source)).eq([(9, 0, 1), (12, 1, 0), (1, 1, 1), (37, 0, 1), (5, 1, 1)]));
    }

    #[test]
    fn every_case_has_the_sizes_that_backends_are_told() {
        for (size, limit) in [(30, usize::MAX), (4096, usize::MAX), (4096, 7), (4096, 1), (30, 2), (5000, usize::MAX)] {
            let vocabulary = Vocabulary { size, pad: 1, limit };
            let random = &mut Random::new(0);
            let mut all = token_cases(vocabulary, random);
            let most = all.iter().filter(|case| case.is_large).map(|case| case.ids.len()).max();
            assert_eq!(most >= Some(192), limit > 1, "{most:?} for {limit}");
            let swept: usize =
                all.iter().filter(|case| case.name.starts_with("every")).map(|case| case.ids.len()).sum();
            let expected = if left_out(vocabulary).is_some() { 0 } else { size };
            assert!(swept >= expected && (expected > 0 || swept == 0), "{swept} of {size}");
            all.extend((0..5).map(|turn| companion(vocabulary, random, (3, turn))));
            for steps in step_cases(vocabulary, random).into_iter().chain(left_padded_steps(vocabulary, random)) {
                assert!(steps.ends.is_sorted_by(|a, b| a < b) && steps.ends[0] > 0, "{:?}", steps.ends);
                assert_eq!(steps.ends.last(), Some(&steps.tokens.length));
                all.push(steps.tokens);
            }
            for case in all {
                assert!(
                    case.batch <= MOST_ROWS && case.length <= MOST_TOKENS.min(limit),
                    "{size} {limit}: {}",
                    case.name
                );
                assert_eq!((case.ids.len(), case.mask.len()), (case.batch * case.length, case.batch * case.length));
            }
        }
    }
}
