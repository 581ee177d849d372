//! Matrices of integers with scales: one for each column, or for each [`BLOCK`] rows of it in
//! [`IntegerType::Int4`], the last of which may be fewer.
//!
//! A weight is `integer · scale`, in f64 exactly. All that it comes from is f32. With `farthest` the value of the
//! largest magnitude among those of a scale, the positive one of two, `scale` is the f32 next to `|farthest| / 127`, or
//! in [`IntegerType::Int4`] the bf16 next to the f32 next to `farthest / -8`. `integer` is the f32 next to
//! `weight / scale`, rounded to the nearest integer of the type's range, ties to even; it is 0 where `scale` is.

use moa_graphs::WeightError;
use moa_schema::{BLOCK, IntegerType};

use super::{
    kept::Number,
    matrix::{Outputs, Part, parts},
    sequence::{Draw, UNIT_OF_BRAIN},
    stored::{is_kept_by_bf16, to_bf16, to_integer},
};

/// Matrices of one shape, `[M, I, O]`.
#[derive(Debug)]
pub(super) struct Scaled {
    integers: Vec<i8>,
    /// `[M, ceil(I / block), O]`.
    scales: Vec<f64>,
    /// Rows that share a scale.
    block: usize,
    inputs: usize,
    outputs: usize,
    /// Whether f32 holds all values.
    are_singles: bool,
}

impl Scaled {
    /// The stored matrices `[M, R, C]`, `shape`, whose parts `read` gives, each of them twice.
    ///
    /// # Errors
    ///
    /// Those of `read`.
    pub(super) fn read(
        kind: IntegerType,
        shape: [usize; 3],
        outputs: Outputs,
        read: impl Fn(&Part) -> Result<Vec<f64>, WeightError>,
    ) -> Result<Self, WeightError> {
        let [matrices, rows, columns] = shape;
        let [inputs, count] = if outputs == Outputs::Rows { [columns, rows] } else { [rows, columns] };
        let block = match kind {
            IntegerType::Int8 => inputs.max(1),
            IntegerType::Int4 => BLOCK,
        };
        let mut made = Self {
            integers: vec![0; matrices * rows * columns],
            scales: vec![0.0; matrices * inputs.div_ceil(block) * count],
            block,
            inputs,
            outputs: count,
            are_singles: false,
        };
        for part in parts(shape) {
            part.each_run(shape, outputs, &read(&part)?, |place, run| {
                let scales = made.scale_of(place);
                made.scales[scales..].iter_mut().zip(run).for_each(|(farthest, value)| {
                    *farthest = farther(*farthest, to_f32(*value));
                });
            });
        }
        made.scales.iter_mut().for_each(|farthest| *farthest = scale(kind, *farthest));
        // 7 binary digits of an integer and 8 of a scale are 15 at most.
        made.are_singles = made.scales.iter().all(|scale| is_kept_by_bf16(*scale));
        for part in parts(shape) {
            part.each_run(shape, outputs, &read(&part)?, |place, run| {
                let scales = &made.scales[made.scale_of(place)..];
                let integers = made.integers[place..].iter_mut().zip(run).zip(scales);
                integers.for_each(|((to, value), scale)| *to = integer(kind, *value, *scale));
            });
        }
        Ok(made)
    }

    pub(super) fn len(&self) -> usize {
        self.integers.len()
    }

    /// Whether f32 holds all values.
    pub(super) const fn are_singles(&self) -> bool {
        self.are_singles
    }

    /// Fills `to` with the values from `start` on, which stand in one row, rounded to its type.
    #[inline(always)]
    pub(super) fn widen<N: Number>(&self, start: usize, to: &mut [N]) {
        let scales = &self.scales[self.scale_of(start)..];
        let integers = &self.integers[start..];
        to.iter_mut().zip(integers.iter().zip(scales)).for_each(|(to, (integer, scale))| {
            *to = N::nearest(f64::from(*integer) * scale);
        });
    }

    /// Where the scale of the integer at `index` stands; those of what follows in its row stand next to it.
    fn scale_of(&self, index: usize) -> usize {
        let (row, column) = (index / self.outputs, index % self.outputs);
        let blocks = self.inputs.div_ceil(self.block);
        (row / self.inputs * blocks + row % self.inputs / self.block) * self.outputs + column
    }
}

/// A vector as it may be multiplied with matrices of integers: in int8 or in bf16, each value in the one that moves it
/// further, since a kernel may take either.
pub(super) fn factor(vector: &[f64], draw: Draw) -> Vec<f64> {
    let mut factors = in_blocks(vector, draw);
    for (value, factor) in vector.iter().zip(&mut factors).filter(|(value, _)| value.is_finite()) {
        let brain = to_bf16(draw.moved(*value, UNIT_OF_BRAIN));
        if (brain - value).abs() > (*factor - value).abs() {
            *factor = brain;
        }
    }
    factors
}

/// A vector in int8: of each [`BLOCK`] values, the last of which may be fewer, `integer · scale`, both by the rule of
/// [`IntegerType::Int8`]. Blocks with a value that is not finite stay.
fn in_blocks(vector: &[f64], draw: Draw) -> Vec<f64> {
    let mut factors = vector.to_vec();
    for block in factors.chunks_mut(BLOCK).filter(|block| block.iter().all(|value| value.is_finite())) {
        let scale = scale(IntegerType::Int8, block.iter().fold(0.0, |largest, value| farther(largest, to_f32(*value))));
        for value in block {
            let moved = *value + draw.share(*value) * scale;
            *value = f64::from(integer(IntegerType::Int8, moved, scale)) * scale;
        }
    }
    factors
}

/// The nearest f32.
#[allow(clippy::cast_possible_truncation)]
fn to_f32(value: f64) -> f64 {
    f64::from(value as f32)
}

/// The one of the larger magnitude, the positive one of two that have the same.
fn farther(one: f64, other: f64) -> f64 {
    let is_other = other.abs() > one.abs() || other == -one && other > one;
    if is_other { other } else { one }
}

/// The bf16 below 2^125.
const LARGEST_SCALE: f64 = 255.0 / 256.0 * (1_u128 << 125) as f64;

/// The scale of values of which `farthest`, an f32, has the largest magnitude.
fn scale(kind: IntegerType, farthest: f64) -> f64 {
    match kind {
        IntegerType::Int8 => to_f32(farthest.abs() / 127.0),
        // A scale is never -0, and -8 times it is an f32.
        IntegerType::Int4 => to_bf16(to_f32(farthest / -8.0)).clamp(-LARGEST_SCALE, LARGEST_SCALE) + 0.0,
    }
}

#[allow(clippy::cast_possible_truncation)]
fn integer(kind: IntegerType, weight: f64, scale: f64) -> i8 {
    let [smallest, largest] = match kind {
        IntegerType::Int8 => [-127.0, 127.0],
        IntegerType::Int4 => [-8.0, 7.0],
    };
    if scale == 0.0 {
        return 0;
    }
    to_integer(to_f32(to_f32(weight) / scale)).clamp(smallest, largest) as i8
}

#[cfg(test)]
mod tests {
    use std::slice;

    use moa_graphs::quantization;

    use super::*;

    /// Numbers of either sign and of every magnitude that an f32 has, subnormal ones too, and between f32.
    fn numbers(count: usize) -> Vec<f64> {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        let mut number = || {
            let bits = next() & 0x7fff_ffff | next() << 31;
            let value = f64::from(f32::from_bits(bits));
            if value.is_finite() { value * (1.0 + f64::from(next()) * 2f64.powi(-60)) } else { 0.0 }
        };
        (0..count).map(|_| number()).collect()
    }

    /// Compares integers for parts of `values` where these are all that a scale belongs to.
    fn compare(kind: IntegerType, values: &[f64]) {
        let floats = values.iter().map(|value| *value as f32);
        let expected = quantization::scale(kind, floats.fold(0.0, quantization::farther));
        let found = scale(kind, values.iter().fold(0.0, |farthest, value| farther(farthest, to_f32(*value))));
        assert_eq!(found.to_bits(), f64::from(expected).to_bits(), "{kind}: {values:?}");
        for value in values {
            for part in [1.0, 0.5, 1.5 / 127.0, 2.5 / 127.0, 0.3, -0.7, -1.0, -0.1875, 0.9375, 0.0, 1e-9] {
                let weight = value * part;
                let integers = [
                    integer(kind, weight, found),
                    integer(kind, f64::from(weight as f32), found),
                    quantization::quantized(kind, weight as f32, expected),
                ];
                assert!(integers.iter().all(|q| *q == integers[2]), "{kind}: {weight} / {found}: {integers:?}");
            }
        }
    }

    /// The two rules were written apart; what one does the other must do.
    #[test]
    fn integers_and_scales_are_those_of_exports() {
        let numbers = numbers(200_000);
        for kind in IntegerType::ALL {
            numbers.iter().for_each(|number| compare(kind, slice::from_ref(number)));
            numbers.array_windows().for_each(|[one, other]| {
                compare(kind, &[*one, *other]);
                compare(kind, &[*one, -one, other * 1e-3]);
            });
            for step in (1..0x0180_0000u32).step_by(257).chain(1..2000) {
                let number = f64::from(f32::from_bits(step));
                compare(kind, &[number]);
                compare(kind, &[-number, number / 2.0]);
            }
            // Halfway between two bf16, and on either side.
            for halfway in (0x8000..0x7f80_0000u32).step_by(0x1_0000) {
                let number = |bits| f64::from(f32::from_bits(bits));
                [halfway - 1, halfway, halfway + 1].iter().for_each(|bits| compare(kind, &[number(*bits)]));
            }
            for values in [&[0.0][..], &[-0.0], &[], &[0.0, -0.0], &[-1.0, 1.0], &[f64::from(f32::MIN), 1.0]] {
                compare(kind, values);
            }
        }
    }

    /// What the values of one scale become, by the rule of exports.
    fn expected(kind: IntegerType, values: &[f64]) -> Vec<f64> {
        let floats = values.iter().map(|value| *value as f32);
        let scale = quantization::scale(kind, floats.fold(0.0, quantization::farther));
        let integer = |value: &f64| quantization::quantized(kind, *value as f32, scale);
        values.iter().map(|value| f64::from(integer(value)) * f64::from(scale)).collect()
    }

    /// Matrices `[M, I, O]` as they are stored where outputs are rows, `[M, O, I]`.
    fn exchanged(values: &[f64], [matrices, inputs, outputs]: [usize; 3]) -> Vec<f64> {
        let place = |m: usize, o: usize, i: usize| (m * inputs + i) * outputs + o;
        let rows = (0..matrices).flat_map(|m| (0..outputs).map(move |o| (m, o)));
        rows.flat_map(|(m, o)| (0..inputs).map(move |i| values[place(m, o, i)])).collect()
    }

    /// Compares all matrices with what `expected` makes of each column's values, `rows` at a time.
    fn compare_matrices(kind: IntegerType, values: &[f64], shape: [usize; 3], rows: usize) {
        let [matrices, inputs, outputs] = shape;
        let mut all = vec![0.0; values.len()];
        for (m, o) in (0..matrices).flat_map(|m| (0..outputs).map(move |o| (m, o))) {
            for first in (0..inputs).step_by(rows) {
                let places = (first..inputs.min(first + rows)).map(|i| (m * inputs + i) * outputs + o);
                let weights: Vec<f64> = places.clone().map(|place| values[place]).collect();
                places.zip(expected(kind, &weights)).for_each(|(place, value)| all[place] = value);
            }
        }
        for (stored, shape, layout) in [
            (values.to_vec(), shape, Outputs::Columns),
            (exchanged(values, shape), [matrices, outputs, inputs], Outputs::Rows),
        ] {
            let read = |part: &Part| Ok(stored[part.start..part.end].to_vec());
            let scaled = Scaled::read(kind, shape, layout, read).unwrap();
            assert_eq!(scaled.len(), values.len());
            for skipped in [0, 1] {
                for (row, expected) in all.chunks_exact(outputs).enumerate() {
                    let mut found = vec![0.0; outputs - skipped];
                    scaled.widen(row * outputs + skipped, &mut found);
                    assert!(found == expected[skipped..], "{kind} {shape:?} {layout:?}: row {row} from {skipped}");
                }
            }
        }
    }

    #[test]
    fn every_column_of_every_matrix_has_its_scale() {
        // Columns of the first matrix, then of the second: [254, -2], [0, 0], [1, 127].
        let given = [254.0, 0.0, 1.0, -2.0, 0.0, 127.0, 12.7, 3.0, 0.0, 6.35, -3.0, 0.0];
        let integers = [127, 0, 1, -1, 0, 127, 127, 127, 0, 64, -127, 0];
        let scales = [254.0, 0.0, 127.0, 12.7, 3.0, 0.0].map(|largest| to_f32(to_f32(largest) / 127.0));
        let scaled = Scaled::read(IntegerType::Int8, [2, 2, 3], Outputs::Columns, |part| {
            Ok(given[part.start..part.end].to_vec())
        });
        let scaled = scaled.unwrap();
        assert_eq!((scaled.integers.as_slice(), scaled.scales.as_slice()), (&integers[..], &scales[..]));
        compare_matrices(IntegerType::Int8, &given, [2, 2, 3], 2);
        compare_matrices(IntegerType::Int4, &given, [2, 2, 3], BLOCK);
    }

    /// Inner dimensions that end within a block and with one, and matrices that are read in several parts: of rows that
    /// no block ends with, and, exchanged, of a few columns each.
    #[test]
    fn every_block_of_every_column_has_its_scale() {
        let numbers = numbers(1 << 16);
        for shape in [[1, 1, 1], [2, 31, 3], [2, 32, 3], [3, 33, 2], [2, 70, 5], [2, 70, 10_007], [1, 4099, 130]] {
            // A step that shares no factor with what there is.
            let values: Vec<f64> =
                (0..shape.iter().product()).map(|at: usize| numbers[at * 31 % numbers.len()]).collect();
            compare_matrices(IntegerType::Int4, &values, shape, BLOCK);
            compare_matrices(IntegerType::Int8, &values, shape, shape[1]);
        }
        let [_, rows, columns] = [2, 70, 10_007];
        let ends: Vec<usize> = parts([2, rows, columns]).map(|part| part.end / columns % rows).collect();
        assert!(ends.iter().any(|end| end % BLOCK != 0 && *end != 0), "{ends:?}");
    }

    #[test]
    fn four_bits_have_the_farthest_weight_for_their_smallest_integer() {
        // One column of two blocks: the second is one row.
        let mut given = vec![0.0; 33];
        (given[0], given[1], given[2], given[31], given[32]) = (4.0, -4.0, 0.75, 0.25, -0.5);
        let read = |part: &Part| Ok(given[part.start..part.end].to_vec());
        for (shape, outputs) in [([1, 33, 1], Outputs::Columns), ([1, 1, 33], Outputs::Rows)] {
            let scaled = Scaled::read(IntegerType::Int4, shape, outputs, read).unwrap();
            assert_eq!(scaled.scales, [-0.5, 0.0625]);
            // 1.5 and 0.5 are ties.
            assert_eq!([0, 1, 2, 3, 31, 32].map(|row| scaled.integers[row]), [-8, 7, -2, 0, 0, -8]);
        }
    }

    #[test]
    fn factors_are_the_nearest_multiples_of_the_scale_of_their_block() {
        let numbers: Vec<f64> = numbers(1 << 12).iter().map(|value| to_f32(*value)).collect();
        for length in [0, 1, 31, 32, 33, 64, 70] {
            for vector in numbers.chunks_exact(length.max(1)).map(|vector| &vector[..length]) {
                let found = in_blocks(vector, Draw::NEAREST);
                assert_eq!(found.len(), length);
                assert_eq!(
                    in_blocks(&vector.iter().map(|v| -v).collect::<Vec<_>>(), Draw::NEAREST),
                    found.iter().map(|v| -v).collect::<Vec<_>>()
                );
                for (block, found) in vector.chunks(32).zip(found.chunks(32)) {
                    let scale = to_f32(block.iter().fold(0.0, |largest: f64, value| largest.max(value.abs())) / 127.0);
                    for (value, found) in block.iter().zip(found) {
                        let steps = if scale == 0.0 { 0.0 } else { found / scale };
                        assert!(steps == steps.round() && steps.abs() <= 127.0, "{value} is {found} of {scale}");
                        // Half a step, and what f32 makes of the quotient; without a scale a value is subnormal.
                        let most = if scale == 0.0 { 1e-42 } else { 0.500_01 * scale + 127.0 * 2f64.powi(-149) };
                        assert!((value - found).abs() <= most, "{value} is {found} of {scale}");
                    }
                }
            }
        }
    }

    /// 1.5 and -2.5 steps are ties.
    #[test]
    fn factors_of_a_block_know_nothing_of_other_blocks() {
        let mut vector = [0.0; 32 + 32 + 3];
        (vector[0], vector[1], vector[2], vector[31]) = (127.0, 1.5, -2.5, 0.4);
        (vector[64], vector[65], vector[66]) = (-1.0 / 1024.0, 0.6 / (127.0 * 1024.0), -0.0);
        let found = in_blocks(&vector, Draw::NEAREST);
        assert_eq!([0, 1, 2, 31].map(|place| found[place]), [127.0, 2.0, -2.0, 0.0]);
        assert!(found[32..64].iter().all(|value| *value == 0.0), "a block of zeros");
        let scale = to_f32(1.0 / (127.0 * 1024.0));
        assert_eq!(found[64..], [-127.0 * scale, scale, 0.0]);
        for strange in [f64::INFINITY, f64::NAN] {
            vector[33] = strange;
            let found = in_blocks(&vector, Draw::NEAREST);
            assert!(found[33].to_bits() == strange.to_bits() && found[1] == 2.0 && found[65] == scale);
        }
    }

    /// A value alone in its block is int8 as it is, and one far below another is 0 there.
    #[test]
    fn factors_are_those_that_move_values_further() {
        let third = to_f32(1.0 / 3.0);
        let mut vector = vec![0.0; 64];
        (vector[0], vector[32], vector[33], vector[34]) = (third, 127.0, 0.25, f64::from(f32::MIN_POSITIVE));
        let found = factor(&vector, Draw::NEAREST);
        assert_eq!(found[0], to_bf16(third));
        assert!((in_blocks(&vector, Draw::NEAREST)[0] - third).abs() < (found[0] - third).abs() / 100.0);
        assert_eq!(found[32..35], [127.0, 0.0, 0.0]);
        let strange = factor(&[f64::NAN, third, f64::INFINITY], Draw::NEAREST);
        assert!(strange[0].is_nan() && strange[1] == to_bf16(third) && strange[2] == f64::INFINITY);
    }

    #[test]
    fn matrices_of_nothing_have_nothing() {
        for kind in IntegerType::ALL {
            for shape in [[0, 3, 4], [2, 0, 3], [2, 3, 0]] {
                for outputs in [Outputs::Rows, Outputs::Columns] {
                    let scaled = Scaled::read(kind, shape, outputs, |_| Ok(Vec::new())).unwrap();
                    assert_eq!(scaled.len(), 0);
                }
            }
        }
    }
}
