//! Values of initializers: literals, and expressions over trained weights that are evaluated when written.

use super::{Constant, ConstantValues};
use crate::{Weight, WeightError, model::SINUSOID_BASE};

/// Where the values of an initializer come from.
#[derive(Debug, Clone)]
pub enum Data {
    /// They are here.
    Literal(Constant),
    /// They are computed from trained weights when the graph is written.
    Weight(WeightExpr),
}

impl Data {
    /// The values as little-endian bytes, row-major.
    ///
    /// # Errors
    ///
    /// Where a trained weight cannot be read.
    pub fn to_bytes(&self) -> Result<Vec<u8>, WeightError> {
        match self {
            Self::Literal(constant) => Ok(constant.to_bytes()),
            Self::Weight(expr) => Ok(f32_bytes(&expr.evaluate()?)),
        }
    }
}

impl Constant {
    /// The values as little-endian bytes, row-major.
    pub fn to_bytes(&self) -> Vec<u8> {
        match &self.values {
            ConstantValues::Float32(values) => f32_bytes(values),
            ConstantValues::Int64(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * 4);
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

/// An f32 tensor computed from trained weights without rounding: only reordering, or the sinusoid table.
#[derive(Debug, Clone)]
pub enum WeightExpr {
    /// The stored tensor.
    Stored(Weight),
    /// Axes reordered: axis `i` of the result is axis `permutation[i]` of the input.
    Transposed {
        /// What is reordered.
        input: Box<WeightExpr>,
        /// One entry per axis.
        permutation: Vec<usize>,
    },
    /// The same values under another shape.
    Reshaped {
        /// What is reshaped.
        input: Box<WeightExpr>,
        /// New shape of equal size.
        shape: Vec<usize>,
    },
    /// Matrices of equal height side by side.
    Columns(Vec<WeightExpr>),
    /// The table of sinusoidal positions.
    Sinusoids(Sinusoids),
    /// Cosines or sines of rotary angles.
    Rotary(RotaryTable),
}

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

/// Size of a table of sinusoidal positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sinusoids {
    /// Positions.
    pub rows: usize,
    /// Model width.
    pub width: usize,
    /// The row that is zero.
    pub padding_row: usize,
}

impl WeightExpr {
    /// Dimensions of the result.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Stored(weight) => weight.shape().to_vec(),
            Self::Transposed { input, permutation } => {
                let shape = input.shape();
                permutation.iter().map(|axis| shape[*axis]).collect()
            }
            Self::Reshaped { shape, .. } => shape.clone(),
            Self::Columns(parts) => {
                let rows = parts.first().map_or(0, |part| part.shape()[0]);
                vec![rows, parts.iter().map(|part| part.shape()[1]).sum()]
            }
            Self::Sinusoids(table) => vec![table.rows, table.width],
            Self::Rotary(table) => vec![table.rows, table.head / 2],
        }
    }

    /// The values, row-major.
    ///
    /// # Errors
    ///
    /// Where a trained weight cannot be read.
    pub fn evaluate(&self) -> Result<Vec<f32>, WeightError> {
        match self {
            Self::Stored(weight) => weight.to_f32(),
            Self::Transposed { input, permutation } => Ok(transpose(&input.evaluate()?, &input.shape(), permutation)),
            Self::Reshaped { input, .. } => input.evaluate(),
            Self::Columns(parts) => side_by_side(parts),
            Self::Sinusoids(table) => Ok(table.values()),
            Self::Rotary(table) => Ok(table.values()),
        }
    }

    /// This tensor with its axes reordered.
    #[must_use]
    pub fn transposed(self, permutation: &[usize]) -> Self {
        Self::Transposed { input: Box::new(self), permutation: permutation.to_vec() }
    }

    /// This tensor under another shape of equal size.
    #[must_use]
    pub fn reshaped(self, shape: &[usize]) -> Self {
        Self::Reshaped { input: Box::new(self), shape: shape.to_vec() }
    }
}

impl From<&Weight> for WeightExpr {
    fn from(weight: &Weight) -> Self {
        Self::Stored(weight.clone())
    }
}

/// Side of the square tiles in which matrices are transposed.
const TILE: usize = 32;

fn transpose(values: &[f32], shape: &[usize], permutation: &[usize]) -> Vec<f32> {
    if let ([rows, columns], [1, 0]) = (shape, permutation) {
        return transpose_matrix(values, *rows, *columns);
    }
    if let ([_, rows, columns], [0, 2, 1]) = (shape, permutation) {
        let matrices = values.chunks_exact((rows * columns).max(1));
        return matrices.flat_map(|matrix| transpose_matrix(matrix, *rows, *columns)).collect();
    }
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let mut result = Vec::with_capacity(values.len());
    let mut index = vec![0; shape.len()];
    for _ in 0..values.len() {
        let offset: usize = index.iter().zip(permutation).map(|(i, axis)| i * strides[*axis]).sum();
        result.push(values[offset]);
        for axis in (0..index.len()).rev() {
            index[axis] += 1;
            if index[axis] < shape[permutation[axis]] {
                break;
            }
            index[axis] = 0;
        }
    }
    result
}

fn transpose_matrix(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut result = vec![0.0; values.len()];
    for row_start in (0..rows).step_by(TILE) {
        for column_start in (0..columns).step_by(TILE) {
            for row in row_start..(row_start + TILE).min(rows) {
                for column in column_start..(column_start + TILE).min(columns) {
                    result[column * rows + row] = values[row * columns + column];
                }
            }
        }
    }
    result
}

fn side_by_side(parts: &[WeightExpr]) -> Result<Vec<f32>, WeightError> {
    let rows = parts.first().map_or(0, |part| part.shape()[0]);
    let parts = parts.iter().map(WeightExpr::evaluate).collect::<Result<Vec<_>, _>>()?;
    let mut result = Vec::with_capacity(parts.iter().map(Vec::len).sum());
    for row in 0..rows {
        for part in &parts {
            let columns = part.len() / rows;
            result.extend_from_slice(&part[row * columns..(row + 1) * columns]);
        }
    }
    Ok(result)
}

impl Sinusoids {
    /// `[sin(p·f), cos(p·f)]` per row, every step rounded to f32 as fairseq does.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    fn values(self) -> Vec<f32> {
        let half = self.width / 2;
        let step = SINUSOID_BASE.ln() / (half as f64 - 1.0);
        let frequencies: Vec<f32> = (0..half).map(|i| (i as f32 * -(step as f32)).exp()).collect();
        let mut values = Vec::with_capacity(self.rows * self.width);
        for row in 0..self.rows {
            if row == self.padding_row {
                values.extend(std::iter::repeat_n(0.0, self.width));
                continue;
            }
            let angles = frequencies.iter().map(|frequency| row as f32 * frequency);
            values.extend(angles.clone().map(f32::sin));
            values.extend(angles.map(f32::cos));
            values.extend(std::iter::repeat_n(0.0, self.width % 2));
        }
        values
    }
}

impl RotaryTable {
    /// Every step rounded to f32 as Hugging Face's implementation does.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    fn values(self) -> Vec<f32> {
        let exponent = |i: usize| (2 * i) as f32 / self.head as f32;
        let frequencies: Vec<f32> = (0..self.head / 2).map(|i| 1.0 / (self.base as f32).powf(exponent(i))).collect();
        let angles = (0..self.rows).flat_map(|row| frequencies.iter().map(move |frequency| row as f32 * frequency));
        if self.sine { angles.map(f32::sin).collect() } else { angles.map(f32::cos).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn general_transpose_equals_matrix_transpose() {
        let values: Vec<f32> = (0..35 * 70).map(|v| v as f32).collect();
        let matrix = transpose(&values, &[35, 70], &[1, 0]);
        let general = transpose(&values, &[1, 1, 35, 70], &[0, 1, 3, 2]);
        assert_eq!(matrix, general);
        assert_eq!(matrix, transpose(&values, &[1, 35, 70], &[0, 2, 1]));
        assert_eq!(matrix[35], 1.0);
    }

    #[test]
    fn transposing_twice_is_the_identity() {
        let values: Vec<f32> = (0..24).map(|v| v as f32).collect();
        let once = transpose(&values, &[2, 3, 4], &[2, 0, 1]);
        assert_eq!(once[..3], [0.0, 4.0, 8.0]);
        assert_eq!(transpose(&once, &[4, 2, 3], &[1, 2, 0]), values);
    }

    #[test]
    fn sinusoids_have_halves_a_zero_padding_row_and_a_zero_last_column() {
        let table = Sinusoids { rows: 3, width: 5, padding_row: 1 }.values();
        assert_eq!(table[5..10], [0.0; 5]);
        assert_eq!(table[10], 2f32.sin());
        assert_eq!(table[12], 2f32.cos());
        assert_eq!(table[14], 0.0);
    }
}
