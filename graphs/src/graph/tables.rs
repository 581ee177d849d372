//! Tables of positions that models compute and graphs hold. Elementary functions are those of `libm` in f64, rounded
//! once: those of `std` are the operating system's, and exports have the same bytes on each.

use std::ops::Range;

use crate::model::SINUSOID_BASE;

/// A function of an angle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AngleFunction {
    /// Its cosine.
    Cosine,
    /// Its sine.
    Sine,
}

/// A table of rotary angles: row `p` holds a function of `p · base^(-2i/D)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryTable {
    /// Positions.
    pub rows: usize,
    /// Head width `D`; the table has `D / 2` columns.
    pub head: usize,
    /// Base of the wavelengths.
    pub base: f64,
    /// What the table has of its angles.
    pub function: AngleFunction,
}

/// Size of a table of sinusoidal positions: row 0 is zero, for padding, and row `r` holds position `padding + r`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sinusoids {
    /// Positions, that of padding included.
    pub rows: usize,
    /// Model width.
    pub width: usize,
    /// Position of padding, from which real tokens count on.
    pub padding: usize,
}

impl Sinusoids {
    /// `[sin(p·f), cos(p·f)]` for the positions `p` of `rows`, every step rounded to f32 as fairseq does.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    pub(super) fn rows(self, rows: Range<usize>) -> Vec<f32> {
        let half = self.width / 2;
        let step = libm::log(SINUSOID_BASE) / (half as f64 - 1.0);
        let frequencies: Vec<f32> = (0..half).map(|i| rounded(libm::exp, i as f32 * -(step as f32))).collect();
        let mut values = Vec::with_capacity(rows.len() * self.width);
        for row in rows {
            if row == 0 {
                values.extend(std::iter::repeat_n(0.0, self.width));
                continue;
            }
            let position = (self.padding + row) as f32;
            let angles = frequencies.iter().map(|frequency| position * frequency);
            values.extend(angles.clone().map(|angle| rounded(libm::sin, angle)));
            values.extend(angles.map(|angle| rounded(libm::cos, angle)));
            values.extend(std::iter::repeat_n(0.0, self.width % 2));
        }
        values
    }
}

impl RotaryTable {
    /// The rows `rows`, every step rounded to f32 as Hugging Face's implementation does.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    pub(super) fn rows(self, rows: Range<usize>) -> Vec<f32> {
        let power = |exponent| libm::pow(f64::from(self.base as f32), exponent);
        let exponent = |i: usize| (2 * i) as f32 / self.head as f32;
        let frequencies: Vec<f32> = (0..self.head / 2).map(|i| 1.0 / rounded(power, exponent(i))).collect();
        let angles = rows.flat_map(|row| frequencies.iter().map(move |frequency| row as f32 * frequency));
        let function = match self.function {
            AngleFunction::Cosine => libm::cos,
            AngleFunction::Sine => libm::sin,
        };
        angles.map(|angle| rounded(function, angle)).collect()
    }
}

/// `function` of an f32, as f32.
#[allow(clippy::cast_possible_truncation)]
fn rounded(function: impl Fn(f64) -> f64, x: f32) -> f32 {
    function(f64::from(x)) as f32
}

#[cfg(test)]
mod tests {
    use super::AngleFunction::{Cosine, Sine};
    use super::*;

    #[test]
    fn sinusoids_have_halves_a_zero_padding_row_and_a_zero_last_column() {
        let table = Sinusoids { rows: 2, width: 5, padding: 1 }.rows(0..2);
        assert_eq!(table[..5], [0.0; 5]);
        assert_eq!([table[5], table[7]], [0.909_297_4, -0.416_146_84]);
        assert_eq!(table[9], 0.0);
    }

    /// Hashes of the bits. Hundreds of these values differ by a bit between `sinf` of Linux and that of Windows.
    #[test]
    fn tables_have_the_same_bits_on_every_system() {
        let sinusoids = Sinusoids { rows: 1025, width: 128, padding: 1 }.rows(0..1025);
        let [cosines, sines] =
            [Cosine, Sine].map(|function| RotaryTable { rows: 1025, head: 128, base: 1e4, function }.rows(0..1025));
        const HASHES: [u64; 3] = [0xaf08_ca2d_af99_7195, 0xc5df_f0b5_8eb5_c7de, 0xfd36_158e_b9db_c16f];
        let hash = |table: &[f32]| {
            let bytes = table.iter().flat_map(|value| value.to_bits().to_le_bytes());
            bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
        };
        assert_eq!([hash(&sinusoids), hash(&cosines), hash(&sines)], HASHES);
    }

    #[test]
    fn rows_do_not_depend_on_each_other() {
        let rotary = RotaryTable { rows: 9, head: 6, base: 10_000.0, function: Sine };
        assert_eq!(rotary.rows(0..9)[4 * 3..7 * 3], rotary.rows(4..7));
        let sinusoids = Sinusoids { rows: 9, width: 7, padding: 5 };
        assert_eq!(sinusoids.rows(0..9)[4 * 7..7 * 7], sinusoids.rows(4..7));
    }
}
