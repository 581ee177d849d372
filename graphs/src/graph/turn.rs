//! Transposes of matrices in memory.

use crate::FloatType;

/// Side of the square tiles in which matrices are transposed: a tile is held in registers.
pub(super) const TILE: usize = 16;

/// Appends the transpose of a matrix of `columns` columns.
pub(super) fn transpose(matrix: &[u8], columns: usize, to: FloatType, out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + matrix.len(), 0);
    let result = &mut out[start..];
    match to.bytes() {
        2 => transpose_elements(matrix.as_chunks::<2>().0, columns, result.as_chunks_mut::<2>().0),
        _ => transpose_elements(matrix.as_chunks::<4>().0, columns, result.as_chunks_mut::<4>().0),
    }
}

fn transpose_elements<const WIDTH: usize>(matrix: &[[u8; WIDTH]], columns: usize, result: &mut [[u8; WIDTH]]) {
    let rows = matrix.len() / columns;
    for column in (0..columns).step_by(TILE) {
        for row in (0..rows).step_by(TILE) {
            let (height, width) = (TILE.min(rows - row), TILE.min(columns - column));
            if (height, width) == (TILE, TILE) {
                transpose_tile(&matrix[row * columns + column..], columns, &mut result[column * rows + row..], rows);
                continue;
            }
            for row in row..row + height {
                for column in column..column + width {
                    result[column * rows + row] = matrix[row * columns + column];
                }
            }
        }
    }
}

/// A whole tile at the start of `matrix` and `result`, whose rows are `columns` and `rows` elements apart.
fn transpose_tile<const WIDTH: usize>(matrix: &[[u8; WIDTH]], columns: usize, result: &mut [[u8; WIDTH]], rows: usize) {
    let mut tile = [[[0; WIDTH]; TILE]; TILE];
    for index in 0..TILE {
        for (value, line) in matrix[index * columns..][..TILE].iter().zip(&mut tile) {
            line[index] = *value;
        }
    }
    for (index, line) in tile.iter().enumerate() {
        result[index * rows..][..TILE].copy_from_slice(line);
    }
}
