//! Matrices of 8-bit integers with a scale for each column.
//!
//! A weight is `integer · scale`, in f64 exactly. With `largest` the largest magnitude of a column as f32, `scale` is
//! the f32 next to `largest / 127` and `integer` the f32 next to `weight / scale`, rounded to the nearest integer, ties
//! to even; it is 0 where `scale` is.

use moa_graphs::WeightError;

use super::matrix::{Outputs, Part, parts};

/// The largest integer.
const LARGEST: f64 = 127.0;

/// Matrices of one shape, `[M, I, O]`.
#[derive(Debug)]
pub(super) struct Scaled {
    integers: Vec<i8>,
    /// `[M, O]`.
    scales: Vec<f64>,
    /// `I · O`.
    matrix: usize,
    outputs: usize,
}

impl Scaled {
    /// The stored matrices `[M, R, C]`, `shape`, whose parts `read` gives, each of them twice.
    ///
    /// # Errors
    ///
    /// Those of `read`.
    pub(super) fn read(
        shape: [usize; 3],
        outputs: Outputs,
        read: impl Fn(&Part) -> Result<Vec<f64>, WeightError>,
    ) -> Result<Self, WeightError> {
        let [matrices, rows, columns] = shape;
        let count = if outputs == Outputs::Rows { rows } else { columns };
        let mut made = Self {
            integers: vec![0; matrices * rows * columns],
            scales: vec![0.0; matrices * count],
            matrix: rows * columns,
            outputs: count,
        };
        for part in parts(shape) {
            part.each_run(shape, outputs, &read(&part)?, |place, run| {
                let scales = made.scale_of(place);
                made.scales[scales..].iter_mut().zip(run).for_each(|(largest, value)| {
                    *largest = largest.max(to_f32(*value).abs());
                });
            });
        }
        made.scales.iter_mut().for_each(|largest| *largest = to_f32(*largest / LARGEST));
        for part in parts(shape) {
            part.each_run(shape, outputs, &read(&part)?, |place, run| {
                let scales = &made.scales[made.scale_of(place)..];
                let integers = made.integers[place..].iter_mut().zip(run).zip(scales);
                integers.for_each(|((to, value), scale)| *to = integer(*value, *scale));
            });
        }
        Ok(made)
    }

    pub(super) fn len(&self) -> usize {
        self.integers.len()
    }

    /// Fills `to` with the values from `start` on, which stand in one row.
    pub(super) fn widen(&self, start: usize, to: &mut [f64]) {
        let scales = &self.scales[self.scale_of(start)..];
        let integers = &self.integers[start..];
        to.iter_mut().zip(integers.iter().zip(scales)).for_each(|(to, (integer, scale))| {
            *to = f64::from(*integer) * scale;
        });
    }

    /// Where the scale of the integer at `index` stands.
    fn scale_of(&self, index: usize) -> usize {
        index / self.matrix * self.outputs + index % self.outputs
    }
}

/// The nearest f32.
#[allow(clippy::cast_possible_truncation)]
fn to_f32(value: f64) -> f64 {
    f64::from(value as f32)
}

#[allow(clippy::cast_possible_truncation)]
fn integer(weight: f64, scale: f64) -> i8 {
    if scale == 0.0 {
        return 0;
    }
    to_f32(to_f32(weight) / scale).round_ties_even().clamp(-LARGEST, LARGEST) as i8
}

#[cfg(test)]
mod tests {
    use moa_graphs::quantization;

    use super::*;

    /// Numbers of every magnitude that an f32 has, subnormal ones too, and between f32.
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

    /// The two rules were written apart; what one does the other must do.
    #[test]
    fn integers_and_scales_are_those_of_exports() {
        for weight in numbers(200_000) {
            let largest = to_f32(weight).abs();
            let scale = quantization::scale(largest as f32);
            assert_eq!(to_f32(largest / LARGEST), f64::from(scale), "{weight}");
            for part in [1.0, 0.5, 1.5 / LARGEST, 2.5 / LARGEST, 0.3, -0.7, -1.0, 1e-9] {
                let weight = f64::from((weight * part) as f32);
                let expected = quantization::quantized(weight as f32, scale);
                assert_eq!(integer(weight, f64::from(scale)), expected, "{weight} / {scale}");
            }
        }
    }

    #[test]
    fn every_column_of_every_matrix_has_its_scale() {
        // Columns of the first matrix, then of the second: [254, -2], [0, 0], [1, 127].
        let given = [254.0, 0.0, 1.0, -2.0, 0.0, 127.0, 12.7, 3.0, 0.0, 6.35, -3.0, 0.0];
        let expected = |scales: [f64; 6]| {
            let integers = [127, 0, 1, -1, 0, 127, 127, 127, 0, 64, -127, 0];
            let scale = |index: usize| scales[index / 6 * 3 + index % 3];
            integers.iter().enumerate().map(|(index, q)| f64::from(*q) * scale(index)).collect::<Vec<_>>()
        };
        let expected = expected([254.0, 0.0, 127.0, 12.7, 3.0, 0.0].map(|largest| to_f32(to_f32(largest) / LARGEST)));
        let turned: Vec<f64> = given.chunks(6).flat_map(|m| [0, 3, 1, 4, 2, 5].map(|index| m[index])).collect();
        for (outputs, shape, stored) in
            [(Outputs::Columns, [2, 2, 3], given.to_vec()), (Outputs::Rows, [2, 3, 2], turned)]
        {
            let read = |part: &Part| Ok(stored[part.start..part.end].to_vec());
            let scaled = Scaled::read(shape, outputs, read).unwrap();
            assert_eq!(scaled.len(), 12);
            for row in 0..4 {
                let mut values = [0.0; 3];
                scaled.widen(row * 3, &mut values);
                assert_eq!(values, expected[row * 3..row * 3 + 3], "row {row}");
                scaled.widen(row * 3 + 1, &mut values[..2]);
                assert_eq!(values[..2], expected[row * 3 + 1..row * 3 + 3], "row {row}");
            }
        }
    }
}
