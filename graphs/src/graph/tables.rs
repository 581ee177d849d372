//! Tables of positions that models compute and graphs hold.

use std::ops::Range;

use crate::model::SINUSOID_BASE;

/// Size of a table of rotary angles: row `p` holds the cosines (or sines) of `p · base^(-2i/D)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryTable {
    /// Positions.
    pub rows: usize,
    /// Head width `D`; the table has `D / 2` columns.
    pub head: usize,
    /// Base of the wavelengths.
    pub base: f64,
    /// Sines in place of cosines.
    pub sine: bool,
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
        let step = SINUSOID_BASE.ln() / (half as f64 - 1.0);
        let frequencies: Vec<f32> = (0..half).map(|i| (i as f32 * -(step as f32)).exp()).collect();
        let mut values = Vec::with_capacity(rows.len() * self.width);
        for row in rows {
            if row == 0 {
                values.extend(std::iter::repeat_n(0.0, self.width));
                continue;
            }
            let position = (self.padding + row) as f32;
            let angles = frequencies.iter().map(|frequency| position * frequency);
            values.extend(angles.clone().map(f32::sin));
            values.extend(angles.map(f32::cos));
            values.extend(std::iter::repeat_n(0.0, self.width % 2));
        }
        values
    }
}

impl RotaryTable {
    /// The rows `rows`, every step rounded to f32 as Hugging Face's implementation does.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    pub(super) fn rows(self, rows: Range<usize>) -> Vec<f32> {
        let exponent = |i: usize| (2 * i) as f32 / self.head as f32;
        let frequencies: Vec<f32> = (0..self.head / 2).map(|i| 1.0 / (self.base as f32).powf(exponent(i))).collect();
        let angles = rows.flat_map(|row| frequencies.iter().map(move |frequency| row as f32 * frequency));
        if self.sine { angles.map(f32::sin).collect() } else { angles.map(f32::cos).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinusoids_have_halves_a_zero_padding_row_and_a_zero_last_column() {
        let table = Sinusoids { rows: 2, width: 5, padding: 1 }.rows(0..2);
        assert_eq!(table[..5], [0.0; 5]);
        assert_eq!(table[5], 2f32.sin());
        assert_eq!(table[7], 2f32.cos());
        assert_eq!(table[9], 0.0);
    }

    #[test]
    fn rows_do_not_depend_on_each_other() {
        let rotary = RotaryTable { rows: 9, head: 6, base: 10_000.0, sine: true };
        assert_eq!(rotary.rows(0..9)[4 * 3..7 * 3], rotary.rows(4..7));
        let sinusoids = Sinusoids { rows: 9, width: 7, padding: 5 };
        assert_eq!(sinusoids.rows(0..9)[4 * 7..7 * 7], sinusoids.rows(4..7));
    }
}
