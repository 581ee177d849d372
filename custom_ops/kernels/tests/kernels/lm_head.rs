//! `LMHead`.

use half::f16;
use moa_kernels::{Instructions, LmHeadInputs, Prepared, Scalar, Sequential, ThreadPool, Weight, WeightData};
use moa_schema::{AccuracyLevel, LmHeadDims};

use crate::integers::{int4, integers, integers_of_any_scale};
use crate::quantized::{LIMITS, Rounding, assert_rounded, quantizing, round_rows, types, with_whole_scales};
use crate::rounded::{exact, rounding, to_bf16 as to_bf16_rows};
use crate::skip::{leave_out, skip};
use crate::stored::{LEVELS, Narrow, halves, rounded};
use crate::support::{Random, Threads, assert_close, bits, matmul, widen};
use crate::tiles::has_tiles;

#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) dims: LmHeadDims,
    pub(crate) hidden_states: Vec<f32>,
    pub(crate) output_weight: Vec<f32>,
}

impl Case {
    pub(crate) fn random(random: &mut Random, [batch, tokens, width, vocabulary]: [usize; 4]) -> Self {
        let amplitude = (3.0 / width as f32).sqrt();
        Self {
            dims: LmHeadDims { batch, tokens, width, vocabulary },
            hidden_states: random.values(batch * tokens * width, 1.0),
            output_weight: random.values(width * vocabulary, amplitude),
        }
    }

    /// With a matrix that `round` stores.
    pub(crate) fn rounded(&self, round: Rounding) -> (Self, Narrow) {
        let mut case = self.clone();
        let narrow = round(&mut case.output_weight, [self.dims.width, self.dims.vocabulary]);
        (case, narrow)
    }

    /// The token `index` of all rows alone.
    fn token(&self, index: usize) -> Self {
        let LmHeadDims { width, .. } = self.dims;
        let hidden_states = self.hidden_states[index * width..][..width].to_vec();
        Self { dims: LmHeadDims { batch: 1, tokens: 1, ..self.dims }, hidden_states, ..self.clone() }
    }

    pub(crate) fn compute(&self, prepared: &Prepared, weights: WeightData<'_>, pool: &dyn ThreadPool) -> Vec<f32> {
        logits(&self.dims, &self.hidden_states, prepared, weights, pool)
    }

    fn expected(&self) -> Vec<f64> {
        let LmHeadDims { batch, tokens, width, vocabulary } = self.dims;
        matmul(&widen(&self.hidden_states), &widen(&self.output_weight), batch * tokens, width, vocabulary)
    }

    /// `prepared` with the matrix of the case.
    fn pack(&self, mut prepared: Prepared, weights: WeightData<'_>) -> Prepared {
        prepared.pack(Weight::Output, [1, self.dims.width, self.dims.vocabulary], 1, weights).unwrap();
        assert!(prepared.weight_bytes() > 0);
        prepared
    }
}

fn logits<T: Scalar>(
    dims: &LmHeadDims,
    hidden_states: &[T],
    prepared: &Prepared,
    output_weight: WeightData<'_>,
    pool: &dyn ThreadPool,
) -> Vec<T> {
    let mut unset = vec![T::default()];
    T::round(&[f32::NAN], &mut unset);
    let mut logits = unset.repeat(dims.batch * dims.tokens * dims.vocabulary);
    prepared.lm_head(dims, &LmHeadInputs { hidden_states, output_weight }, &mut logits, pool).unwrap();
    logits
}

fn to_bf16(values: &mut [f32], _: [usize; 2]) -> Narrow {
    Narrow::round(values, true)
}

fn to_f16(values: &mut [f32], _: [usize; 2]) -> Narrow {
    Narrow::round(values, false)
}

/// What stores a matrix in fewer bytes.
const TYPES: [Rounding; 5] = [to_bf16, to_f16, integers, integers_of_any_scale, int4];

/// Calls `check` with f32, and with each type that stores the matrix in fewer bytes and a case that holds its values.
fn in_every_type(case: &Case, check: impl Fn(&Case, WeightData<'_>)) {
    check(case, (&case.output_weight).into());
    for round in TYPES {
        let (case, narrow) = case.rounded(round);
        check(&case, narrow.data());
    }
}

/// Batch, tokens, width and vocabulary: one element, parts of blocks and panels and whole ones, several tiles of rows
/// and of columns, and rows that are moved apart.
const SHAPES: [[usize; 4]; 8] = [
    [1, 1, 1, 1],
    [1, 1, 96, 700],
    [3, 1, 45, 33],
    [1, 7, 64, 128],
    [2, 70, 33, 385],
    [1, 129, 31, 129],
    [3, 200, 160, 31],
    [1, 33, 1024, 161],
];

/// These shapes, and random ones.
fn cases() -> impl Iterator<Item = Case> {
    let random = (0..8).map(|seed| {
        let mut random = Random(seed);
        let widths = [2 * random.between(0, 60) + 1, 32 * random.between(1, 6)];
        let columns = [random.between(1, 700), 32 * random.between(1, 20), 128 * random.between(1, 5)];
        [random.between(1, 3), random.between(1, 200), random.pick(&widths), random.pick(&columns)]
    });
    SHAPES.into_iter().chain(random).zip(100..).map(|(shape, seed)| Case::random(&mut Random(seed), shape))
}

#[test]
fn logits_match_the_reference() {
    for case in cases() {
        in_every_type(&case, |case, weights| {
            let expected = case.expected();
            for limit in LEVELS {
                let found = case.compute(&Prepared::new(limit), weights, &Sequential);
                assert_close(&format!("logits of {:?} by {limit:?}", case.dims), &found, &expected, 3e-5);
            }
        });
    }
}

#[test]
fn threads_and_packing_change_no_bit() {
    for case in cases() {
        in_every_type(&case, |case, weights| {
            let each = || [Prepared::default()].into_iter().chain(LIMITS.map(quantizing));
            for (prepared, other) in each().zip(each()) {
                let expected = bits(&case.compute(&prepared, weights, &Sequential));
                for prepared in [prepared, case.pack(other, weights)] {
                    for threads in [1, 2, 3, 8] {
                        let found = bits(&case.compute(&prepared, weights, &Threads(threads)));
                        assert_eq!(found, expected, "{:?}, {threads} threads", case.dims);
                    }
                }
            }
        });
    }
}

/// Products of many rows may go to AMX tiles, and those of one row stay on vectors.
#[test]
fn a_token_alone_has_the_bits_that_it_has_among_others() {
    for case in cases() {
        let LmHeadDims { batch, tokens, vocabulary, .. } = case.dims;
        in_every_type(&case, |case, weights| {
            let levels = LEVELS.into_iter().filter(|level| *level < Instructions::Amx).map(Prepared::new);
            for prepared in levels.chain(LIMITS.map(quantizing)) {
                let prepared = case.pack(prepared, weights);
                let all = case.compute(&prepared, weights, &Sequential);
                for token in (0..batch * tokens).step_by(11).chain([batch * tokens - 1]) {
                    let alone = case.token(token).compute(&prepared, weights, &Sequential);
                    assert_eq!(bits(&alone), bits(&all[token * vocabulary..][..vocabulary]), "{:?} {token}", case.dims);
                }
            }
        });
    }
}

/// Where f32 goes to AMX tiles, few rows or columns times two parts of a weight do not.
#[test]
fn stored_weights_have_the_bits_of_f32() {
    let types: [(Rounding, bool); 4] = [(to_bf16, true), (integers, true), (to_f16, false), (int4, false)];
    for case in cases() {
        for (round, on_tiles) in types {
            let (case, narrow) = case.rounded(round);
            for limit in LEVELS.into_iter().filter(|limit| on_tiles || *limit < Instructions::Amx) {
                let [found, expected] = [narrow.data(), (&case.output_weight).into()]
                    .map(|weights| bits(&case.compute(&Prepared::new(limit), weights, &Sequential)));
                assert_eq!(found, expected, "{:?} {limit:?}", case.dims);
            }
        }
    }
}

/// Other hidden states than f32 are widened, and logits rounded once.
#[test]
fn half_logits_are_those_of_f32_rounded() {
    for mut case in cases() {
        let narrow = rounded(&mut case.hidden_states);
        in_every_type(&case, |case, weights| {
            for prepared in [Prepared::default()].into_iter().chain(LIMITS.map(quantizing)) {
                let found = logits::<f16>(&case.dims, &narrow, &prepared, weights, &Threads(2));
                let expected = halves(&case.compute(&prepared, weights, &Sequential));
                assert!(found == expected, "{:?}", case.dims);
            }
        });
    }
}

/// A matrix that is not the one that was packed is packed for the call.
#[test]
fn weights_of_another_shape_are_not_used() {
    let [first, second] = [[1, 3, 40, 70], [1, 3, 70, 40]].map(|shape| Case::random(&mut Random(1), shape));
    let prepared = first.pack(Prepared::default(), (&first.output_weight).into());
    assert_close(
        "logits",
        &second.compute(&prepared, (&second.output_weight).into(), &Sequential),
        &second.expected(),
        1e-5,
    );
}

/// Rounding the hidden states to the integers of their blocks before the call changes no bit of it, and makes exact
/// products of what the call rounds.
#[test]
fn rows_are_rounded_where_the_processor_multiplies_integers() {
    for (mut case, (limit, round)) in cases().flat_map(|case| types(true, skip).map(move |kind| (case.clone(), kind))) {
        let prepared = quantizing(limit);
        with_whole_scales(&mut case.hidden_states, case.dims.width);
        let (mut case, narrow) = case.rounded(round);
        let before = case.compute(&prepared, narrow.data(), &Sequential);
        if case.dims.width > 1 {
            assert_rounded([&before, &case.compute(&exact(), narrow.data(), &Sequential)], &case.dims);
        }
        round_rows(&mut case.hidden_states);
        assert_eq!(bits(&case.compute(&prepared, narrow.data(), &Sequential)), bits(&before), "{:?}", case.dims);
        assert_close(&format!("logits of {:?}", case.dims), &before, &case.expected(), 1e-5);
    }
}

#[test]
fn rows_beside_floats_and_integers_that_are_not_faster_stay_as_they_are() {
    let floats: [Rounding; 2] = [to_bf16, to_f16];
    let floats = || LIMITS.into_iter().flat_map(move |limit| floats.map(|round| (limit, round)));
    for case in cases() {
        for (limit, round) in floats().chain(types(false, leave_out)) {
            let prepared = quantizing(limit);
            let (case, narrow) = case.rounded(round);
            let [found, expected] =
                [&prepared, &exact()].map(|prepared| bits(&case.compute(prepared, narrow.data(), &Sequential)));
            assert_eq!(found, expected, "{:?}", case.dims);
        }
    }
}

/// Where this processor rounds rows to bf16, by vectors or on tiles; a word where it does not.
fn rounding_to_bf16() -> impl Iterator<Item = impl Fn(AccuracyLevel) -> Prepared> {
    let on_tiles = has_tiles().then_some(Instructions::Amx);
    let levels = rounding().map(|_| Instructions::Avx512).into_iter().chain(on_tiles);
    levels.map(|level| move |accuracy| Prepared::new(level).with_accuracy(accuracy))
}

/// Rounding the hidden states to bf16 before the call changes no bit of it, and makes exact products of what it rounds:
/// all, where no row or column is left beside those of tiles.
#[test]
fn many_rows_beside_bf16_are_rounded_to_it() {
    for prepared in rounding_to_bf16() {
        let prepared = || prepared(AccuracyLevel::Bf16);
        for (seed, shape) in (0..).zip([[1, 128, 96, 384], [2, 96, 321, 704], [1, 128, 1024, 128]]) {
            let (mut case, narrow) = Case::random(&mut Random(seed), shape).rounded(to_bf16);
            let before = case.compute(&prepared(), narrow.data(), &Sequential);
            assert_rounded([&before, &case.compute(&exact(), narrow.data(), &Sequential)], &case.dims);
            let weights = (&case.output_weight).into();
            let packed = [narrow.data(), weights].map(|weights| (case.pack(prepared(), weights), weights));
            for (prepared, weights) in packed.into_iter().chain([(prepared(), narrow.data())]) {
                let found = case.compute(&prepared, weights, &Threads(3));
                assert_eq!(bits(&found), bits(&before), "{:?}", case.dims);
            }
            case.hidden_states = to_bf16_rows(&case.hidden_states);
            assert_eq!(bits(&case.compute(&prepared(), narrow.data(), &Sequential)), bits(&before), "{:?}", case.dims);
            assert_close(&format!("logits of {:?}", case.dims), &before, &case.expected(), 3e-5);
        }
    }
}

/// A step of one sequence, and rows beside a matrix that bf16 does not hold.
#[test]
fn other_rows_beside_floats_are_not_rounded_to_bf16() {
    for prepared in rounding_to_bf16() {
        for shape in SHAPES {
            let case = Case::random(&mut Random(7), shape);
            let few = case.token(0).rounded(to_bf16);
            let [few_weights, weights] = [few.1.data(), (&case.output_weight).into()];
            for (case, weights) in [(&few.0, few_weights), (&case, weights)] {
                let levels = [AccuracyLevel::Bf16, AccuracyLevel::Activations];
                let [found, expected] = levels.map(|level| bits(&case.compute(&prepared(level), weights, &Sequential)));
                assert_eq!(found, expected, "{:?}", case.dims);
            }
        }
    }
}

/// A token that is not a number is none of another's business.
#[test]
fn a_row_that_is_not_a_number_stays_alone() {
    for case in cases() {
        let LmHeadDims { batch, tokens, width, vocabulary } = case.dims;
        let token = batch * tokens / 2;
        in_every_type(&case, |case, weights| {
            for prepared in [Prepared::default()].into_iter().chain(LIMITS.map(quantizing)) {
                let mut expected = case.compute(&prepared, weights, &Sequential);
                let mut poisoned = case.clone();
                poisoned.hidden_states[token * width + width / 2] = f32::NAN;
                let mut found = poisoned.compute(&prepared, weights, &Threads(2));
                let own = token * vocabulary..(token + 1) * vocabulary;
                assert!(found[own.clone()].iter().all(|logit| logit.is_nan()), "{:?}", case.dims);
                found.drain(own.clone());
                expected.drain(own);
                assert_eq!(bits(&found), bits(&expected), "{:?}", case.dims);
            }
        });
    }
}
