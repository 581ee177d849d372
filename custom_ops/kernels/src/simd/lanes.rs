//! Row functions in plain arithmetic on groups of 16 lanes, compiled once for each level of instructions.
#![allow(unsafe_code)]

use super::levels::every_level;
#[cfg(target_arch = "x86_64")]
use super::{Instructions, avx2_softmax, avx512_softmax};
use super::{Isa, LANES, ROWS};

/// `ln(2)` in two parts; multiples of the first are exact.
pub(super) const LN2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// `(exp(r) - 1 - r) / r²` for `|r| ≤ ln(2) / 2`, fitted to a relative error of 4e-9 in `exp(r)`.
pub(super) const TERMS: [f32; 5] = [0.499_999_94, 0.166_665_21, 0.041_668_393, 0.008_368_745, 0.001_381_453_1];

/// Adding it rounds to an integer that stands in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// Below, an exponential is 0.
pub(super) const SMALLEST: f32 = -87.336;

impl Isa {
    #[cfg(test)]
    every_level! {
        /// Takes a row of scores into a running softmax with the maximum `max` so far.
        ///
        /// Replaces each score by `exp(score - new maximum)`; returns the new maximum and the sum of what it wrote.
        softmax(scores: &mut [f32], max: f32) -> (f32, f32), softmax
    }

    /// [`Isa::softmax`] for the rows of a block, `stride` elements apart, of which `seen` elements count.
    ///
    /// Updates the running maxima and sums; returns by how much what was summed before shrinks.
    ///
    /// # Panics
    ///
    /// If a row does not lie in `scores`.
    pub(crate) fn softmax_rows(
        self,
        scores: &mut [f32],
        stride: usize,
        seen: &[usize; ROWS],
        max: &mut [f32],
        sum: &mut [f32],
    ) -> [f32; ROWS] {
        assert!(max.len() == sum.len() && max.len() <= ROWS, "rows of a block");
        for (row, seen) in seen.iter().enumerate().take(max.len()) {
            assert!(row * stride + seen <= scores.len() && *seen <= stride, "scores of a block");
        }
        // SAFETY: the rows lie in `scores`; `Isa` proves that the processor has the instructions.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match self.0 {
                Instructions::Portable | Instructions::Neon => {}
                Instructions::Avx2 | Instructions::AvxVnni => {
                    return avx2_softmax::softmax_rows(scores, stride, seen, max, sum);
                }
                Instructions::Avx512 | Instructions::Amx => {
                    return avx512_softmax::softmax_rows(scores, stride, seen, max, sum);
                }
            }
        }
        self.softmax_rows_in_lanes(scores, stride, seen, max, sum)
    }

    every_level! {
        /// [`Isa::softmax_rows`] in plain arithmetic.
        softmax_rows_in_lanes(
            scores: &mut [f32],
            stride: usize,
            seen: &[usize; ROWS],
            max: &mut [f32],
            sum: &mut [f32]
        ) -> [f32; ROWS],
        softmax_rows
    }

    every_level! {
        /// As [`Isa::softmax`] for 16 rows at once that stand side by side: `scores[key][row]`.
        softmax_lanes(scores: &mut [[f32; LANES]], max: &mut [f32; LANES], sum: &mut [f32; LANES]), softmax_lanes
    }

    every_level! {
        /// Divides the elements of each lane by its divisor; there are as many lanes as divisors.
        divide_lanes(values: &mut [f32], divisors: &[f32]), divide_lanes
    }

    every_level! {
        /// Copies the largest scores of each lane to `best`, one to each group and falling, and their places in the
        /// lane to `places`; of equal ones the first place comes first.
        top_lanes(scores: &[[f32; LANES]], best: &mut [[f32; LANES]], places: &mut [[f32; LANES]]), top_lanes
    }

    every_level! {
        /// Puts `count` rows of `data`, `stride` elements apart, side by side: element `i` of row `r` goes to
        /// `out[i * LANES + r]`. Lanes past the last row, to the next multiple of 4, repeat it; others stay as they
        /// are.
        ///
        /// # Panics
        ///
        /// If there are no rows or more than [`LANES`], or one does not lie in `data`.
        interleave(data: &[f32], stride: usize, count: usize, out: &mut [f32]), interleave
    }

    #[cfg(test)]
    every_level! {
        /// `exp(x)` of every element; elements must not be positive.
        exp(values: &mut [f32]), exp_all
    }

    every_level! {
        /// Multiplies every element.
        scale(values: &mut [f32], factor: f32), scale
    }

    every_level! {
        /// `out = product`; a zero becomes positive.
        replace(out: &mut [f32], product: &[f32]), replace
    }

    every_level! {
        /// `out = factor · out + product`.
        resume(out: &mut [f32], factor: f32, product: &[f32]), resume
    }

    every_level! {
        /// `out += factor · product` for one term `(factor, product)` after the other.
        ///
        /// # Panics
        ///
        /// If a product is shorter than `out`.
        add_terms(out: &mut [f32], terms: &[(f32, &[f32])]), add_terms
    }
}

/// `a · b + c` in one rounding where `FMA`, else in two.
#[inline(always)]
pub(super) fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `exp(x)` for `x` that is not positive, within 2 units in the last place; 0 below the smallest normal result, NaN
/// for NaN.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    let (value, power) = exp_parts::<FMA>(x);
    let scaled = value * f32::from_bits(power.wrapping_add(127).cast_unsigned() << 23);
    if x < SMALLEST { 0.0 } else { scaled }
}

/// `exp(x)` as a number near 1 and the power of 2 that it is multiplied with.
#[inline(always)]
pub(super) fn exp_parts<const FMA: bool>(x: f32) -> (f32, i32) {
    let shifted = multiply_add::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let power = shifted - ROUND;
    let rest = multiply_add::<FMA>(power, -LN2[1], multiply_add::<FMA>(power, -LN2[0], x));
    let mut sum = TERMS[4];
    sum = multiply_add::<FMA>(sum, rest, TERMS[3]);
    sum = multiply_add::<FMA>(sum, rest, TERMS[2]);
    sum = multiply_add::<FMA>(sum, rest, TERMS[1]);
    sum = multiply_add::<FMA>(sum, rest, TERMS[0]);
    let value = multiply_add::<FMA>(sum, rest * rest, rest) + 1.0;
    (value, shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed())
}

#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Joins lanes in pairs: 8 apart, then 4, 2 and 1.
#[inline(always)]
pub(super) fn in_pairs(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
    }
    lanes[0]
}

#[inline(always)]
fn softmax<const FMA: bool>(scores: &mut [f32], max: f32) -> (f32, f32) {
    let (groups, rest) = scores.as_chunks_mut::<LANES>();
    let mut lanes = [max; LANES];
    for group in groups.iter() {
        for (lane, score) in lanes.iter_mut().zip(group) {
            *lane = larger(*score, *lane);
        }
    }
    for (lane, score) in lanes.iter_mut().zip(rest.iter()) {
        *lane = larger(*score, *lane);
    }
    let max = in_pairs(lanes, larger);
    let mut sums = [0.0; LANES];
    for group in groups {
        for (sum, score) in sums.iter_mut().zip(group) {
            *score = exp::<FMA>(*score - max);
            *sum += *score;
        }
    }
    for (sum, score) in sums.iter_mut().zip(rest) {
        *score = exp::<FMA>(*score - max);
        *sum += *score;
    }
    (max, in_pairs(sums, |a, b| a + b))
}

#[inline(always)]
fn softmax_rows<const FMA: bool>(
    scores: &mut [f32],
    stride: usize,
    seen: &[usize; ROWS],
    max: &mut [f32],
    sum: &mut [f32],
) -> [f32; ROWS] {
    let mut factors = [0.0; ROWS];
    let rows = scores.chunks_exact_mut(stride).zip(seen).zip(max.iter_mut().zip(sum)).zip(&mut factors);
    for (((scores, seen), (max, sum)), factor) in rows {
        let (new, added) = softmax::<FMA>(&mut scores[..*seen], *max);
        *factor = exp::<FMA>(*max - new);
        *sum = *sum * *factor + added;
        *max = new;
    }
    factors
}

#[inline(always)]
fn softmax_lanes<const FMA: bool>(scores: &mut [[f32; LANES]], max: &mut [f32; LANES], sum: &mut [f32; LANES]) {
    let mut new = *max;
    for group in scores.iter() {
        for (max, score) in new.iter_mut().zip(group) {
            *max = larger(*score, *max);
        }
    }
    let mut sums = [0.0; LANES];
    for group in scores {
        for ((sum, score), max) in sums.iter_mut().zip(group).zip(new) {
            *score = exp::<FMA>(*score - max);
            *sum += *score;
        }
    }
    *max = new;
    *sum = sums;
}

/// With a known number of lanes the compiler would divide groups side by side, by gathers and scatters.
#[inline(always)]
fn divide_lanes<const FMA: bool>(values: &mut [f32], divisors: &[f32]) {
    for group in values.chunks_exact_mut(divisors.len()) {
        group.iter_mut().zip(divisors).for_each(|(value, divisor)| *value /= divisor);
    }
}

/// Scores that were taken are told by their order, not overwritten: that loop the compiler would turn into gathers and
/// scatters.
#[inline(always)]
fn top_lanes<const FMA: bool>(scores: &[[f32; LANES]], best: &mut [[f32; LANES]], places: &mut [[f32; LANES]]) {
    let (mut last, mut last_at) = ([f32::INFINITY; LANES], [-1.0; LANES]);
    for (best, places) in best.iter_mut().zip(places) {
        let (mut most, mut at) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
        for (place, group) in scores.iter().enumerate() {
            for lane in 0..LANES {
                let behind = (group[lane] < last[lane]) | (group[lane] == last[lane]) & (place as f32 > last_at[lane]);
                let score = if behind { group[lane] } else { f32::NEG_INFINITY };
                at[lane] = if score > most[lane] { place as f32 } else { at[lane] };
                most[lane] = larger(score, most[lane]);
            }
        }
        (last, last_at) = (most, at);
        (*best, *places) = (most, at);
    }
}

#[inline(always)]
fn interleave<const FMA: bool>(data: &[f32], stride: usize, count: usize, out: &mut [f32]) {
    const TOGETHER: usize = 4;
    assert!((1..=LANES).contains(&count), "rows of a block");
    let (lines, _) = out.as_chunks_mut::<LANES>();
    for first in (0..count).step_by(TOGETHER) {
        let rows: [&[f32]; TOGETHER] =
            std::array::from_fn(|row| &data[(first + row).min(count - 1) * stride..][..lines.len()]);
        for (index, line) in lines.iter_mut().enumerate() {
            line[first..first + TOGETHER].copy_from_slice(&rows.map(|row| row[index]));
        }
    }
}

#[cfg(test)]
#[inline(always)]
fn exp_all<const FMA: bool>(values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value = exp::<FMA>(*value));
}

#[inline(always)]
fn scale<const FMA: bool>(values: &mut [f32], factor: f32) {
    values.iter_mut().for_each(|value| *value *= factor);
}

#[inline(always)]
fn replace<const FMA: bool>(out: &mut [f32], product: &[f32]) {
    out.iter_mut().zip(product).for_each(|(out, product)| *out = product + 0.0);
}

#[inline(always)]
fn resume<const FMA: bool>(out: &mut [f32], factor: f32, product: &[f32]) {
    out.iter_mut().zip(product).for_each(|(out, product)| *out = multiply_add::<FMA>(factor, *out, *product));
}

#[inline(always)]
fn add_terms<const FMA: bool>(out: &mut [f32], terms: &[(f32, &[f32])]) {
    let (groups, rest) = out.as_chunks_mut::<LANES>();
    let whole = groups.len() * LANES;
    for (first, out) in (0..whole).step_by(LANES).zip(groups) {
        let mut sums = *out;
        for (factor, product) in terms {
            let values = product[first..][..LANES].iter();
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = multiply_add::<FMA>(*factor, *value, *sum));
        }
        *out = sums;
    }
    for (factor, product) in terms {
        let values = product[whole..][..rest.len()].iter();
        rest.iter_mut().zip(values).for_each(|(sum, value)| *sum = multiply_add::<FMA>(*factor, *value, *sum));
    }
}

#[cfg(test)]
mod tests {
    use super::super::every_isa;
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for isa in every_isa() {
            let steps = (0..200_000).step_by(if cfg!(miri) { 997 } else { 1 });
            let inputs: Vec<f32> = steps.map(|i| -(i as f32) * 4.37e-4).filter(|x| *x >= -87.3).collect();
            let mut found = inputs.clone();
            isa.exp(&mut found);
            for (x, found) in inputs.iter().zip(found) {
                let expected = f64::from(*x).exp();
                let unit = f64::from(f32::EPSILON) * 2f64.powi(expected.log2().floor() as i32);
                let error = (f64::from(found) - expected).abs() / unit;
                assert!(error <= 2.0, "{isa:?}: exp({x}) is {found}, off by {error} units");
            }
        }
    }

    #[test]
    fn lanes_give_their_largest_and_where_they_stood() {
        let score = |place: usize, lane: usize| ((place * 7 + lane * 3) % 11) as f32 - 5.0;
        for isa in every_isa() {
            for (count, k) in [(1, 1), (8, 4), (8, 8), (40, 3)] {
                let scores: Vec<[f32; LANES]> =
                    (0..count).map(|place| std::array::from_fn(|lane| score(place, lane))).collect();
                let (mut best, mut places) = (vec![[f32::NAN; LANES]; k], vec![[f32::NAN; LANES]; k]);
                isa.top_lanes(&scores, &mut best, &mut places);
                for lane in 0..LANES {
                    let mut order: Vec<usize> = (0..count).collect();
                    order.sort_by(|a, b| score(*b, lane).total_cmp(&score(*a, lane)));
                    for slot in 0..k {
                        assert_eq!(places[slot][lane], order[slot] as f32, "{isa:?} {count} {k}");
                        assert_eq!(best[slot][lane], score(order[slot], lane), "{isa:?} {count} {k}");
                    }
                }
            }
        }
    }

    #[test]
    fn interleaved_rows_stand_side_by_side() {
        let data: Vec<f32> = (0..LANES * 50).map(|i| i as f32).collect();
        for isa in every_isa() {
            for (count, len, stride) in [(1, 32, 0), (4, 32, 48), (6, 1, 3), (7, 16, 50), (LANES, 40, 50)] {
                let mut out = vec![-1.0; len * LANES];
                isa.interleave(&data, stride, count, &mut out);
                for (place, value) in out.iter().enumerate() {
                    let (index, row) = (place / LANES, place % LANES);
                    let filled = row < count.next_multiple_of(4);
                    let wanted = if filled { data[row.min(count - 1) * stride + index] } else { -1.0 };
                    assert_eq!(*value, wanted, "{isa:?} {count}: {place}");
                }
            }
        }
    }

    #[test]
    fn ends_of_exp() {
        for isa in every_isa() {
            let mut values = [0.0, -0.0, -1e4, f32::NEG_INFINITY, f32::MIN, -1e-30];
            isa.exp(&mut values);
            assert_eq!(values, [1.0, 1.0, 0.0, 0.0, 0.0, 1.0], "{isa:?}");
            let mut values = [f32::NAN; 17];
            isa.exp(&mut values);
            assert!(values.iter().all(|value| value.is_nan()), "{isa:?}");
        }
    }

    #[test]
    fn products_of_tiles_are_written_as_asked() {
        for isa in every_isa() {
            let mut out = [2.0; 3];
            isa.replace(&mut out, &[-0.0, 3.0, -1.0]);
            assert_eq!(out.map(f32::to_bits), [0.0f32, 3.0, -1.0].map(f32::to_bits), "{isa:?}");
            isa.resume(&mut out, 2.0, &[1.0, 1.0, 4.0]);
            assert_eq!(out, [1.0, 7.0, 2.0], "{isa:?}");
            isa.add_terms(&mut out, &[(-2.0, &[1.0, 3.0, 0.5]), (3.0, &[0.0, 1.0, 2.0, 9.0])]);
            assert_eq!(out, [-1.0, 4.0, 7.0], "{isa:?}");
        }
    }

    #[test]
    fn softmax_of_every_length_follows_f64() {
        for isa in every_isa() {
            for len in [1, 2, 15, 16, 17, 100, 256] {
                let scores: Vec<f32> = (0..len).map(|i| ((i * 37 % 101) as f32 * 0.71).sin() * 9.0).collect();
                for start in [f32::NEG_INFINITY, 20.0] {
                    let mut found = scores.clone();
                    let (max, sum) = isa.softmax(&mut found, start);
                    assert_eq!(max, scores.iter().copied().fold(start, f32::max));
                    let wide = |score: f32| f64::from(score - max).exp();
                    let total: f64 = scores.iter().copied().map(wide).sum();
                    assert!((f64::from(sum) - total).abs() <= 2e-6 * total, "{isa:?}: {sum}, not {total}");
                    for (found, score) in found.iter().zip(&scores) {
                        assert!((f64::from(*found) - wide(*score)).abs() <= 1e-6 * wide(*score));
                    }
                }
            }
        }
    }

    #[test]
    fn a_block_of_rows_agrees_with_rows_alone() {
        for isa in every_isa() {
            for count in [1, 5, ROWS] {
                let seen: [usize; ROWS] = std::array::from_fn(|row| (row * 29) % 101);
                let start: Vec<f32> = (0..ROWS * 110).map(|i| (i as f32 * 0.37).sin() * 20.0).collect();
                let (mut scores, mut max, mut sum) = (start.clone(), vec![1.5; count], vec![0.25; count]);
                max[0] = f32::NEG_INFINITY;
                let (before, factors) = (max.clone(), isa.softmax_rows(&mut scores, 110, &seen, &mut max, &mut sum));
                for row in 0..count {
                    let mut alone = start[row * 110..][..seen[row]].to_vec();
                    let (alone_max, alone_sum) = isa.softmax(&mut alone, before[row]);
                    if seen[row] == 0 && before[row] == f32::NEG_INFINITY {
                        continue;
                    }
                    assert_eq!(max[row], alone_max);
                    let factor = (before[row] - alone_max).exp();
                    assert!((factors[row] - factor).abs() <= 1e-6 * factor);
                    let total = 0.25 * factor + alone_sum;
                    assert!((sum[row] - total).abs() <= 1e-5 * total, "{isa:?}: {} {total}", sum[row]);
                    for (found, alone) in scores[row * 110..].iter().zip(&alone) {
                        assert!((found - alone).abs() <= 1e-6 * alone + 1e-37, "{isa:?}: {found} {alone}");
                    }
                    assert_eq!(
                        scores[row * 110 + seen[row]..(row + 1) * 110],
                        start[row * 110 + seen[row]..(row + 1) * 110]
                    );
                }
            }
        }
    }

    #[test]
    fn rows_side_by_side_agree_with_rows_alone() {
        for isa in every_isa() {
            let scores: Vec<[f32; LANES]> =
                (0..50).map(|key| std::array::from_fn(|row| ((key * 7 + row * 3) as f32).cos())).collect();
            let (mut together, mut max, mut sum) = (scores.clone(), [f32::NEG_INFINITY; LANES], [0.0; LANES]);
            isa.softmax_lanes(&mut together, &mut max, &mut sum);
            for row in 0..LANES {
                let mut alone: Vec<f32> = scores.iter().map(|group| group[row]).collect();
                let (alone_max, alone_sum) = isa.softmax(&mut alone, f32::NEG_INFINITY);
                assert_eq!(max[row], alone_max);
                assert!((sum[row] - alone_sum).abs() <= 1e-5 * alone_sum);
                assert!(together.iter().zip(alone).all(|(group, alone)| group[row] == alone));
            }
        }
    }
}
