//! The door to the `gemm` crate: checked views in, one product out.
#![allow(unsafe_code)]

use std::ops::Range;

/// A matrix view `[rows, columns]` into a slice, with strides in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

/// Whether a product replaces the destination or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Write {
    Replace,
    Add,
}

impl<'a> Matrix<'a> {
    /// `rows` rows of `columns` elements, `row_stride` apart.
    ///
    /// # Panics
    ///
    /// If the last element lies outside `data`.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        let end = (rows.saturating_sub(1)).checked_mul(row_stride).and_then(|start| start.checked_add(columns));
        let fits = end.is_some_and(|end| end <= data.len());
        assert!(rows == 0 || columns == 0 || fits, "matrix out of bounds");
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// Row-major rows without gaps.
    ///
    /// # Panics
    ///
    /// If `data` is not `rows * columns` long.
    pub(crate) fn dense(data: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(Some(data.len()), rows.checked_mul(columns), "matrix length");
        Self::new(data, rows, columns, columns)
    }

    /// The columns `range` of a matrix that is not transposed.
    ///
    /// # Panics
    ///
    /// If the range ends past the last column.
    pub(crate) fn columns(self, range: Range<usize>) -> Self {
        assert!(self.column_stride == 1 && range.end <= self.columns, "column range");
        let start = range.start.min(self.data.len());
        Self::new(&self.data[start..], self.rows, range.len(), self.row_stride)
    }

    /// The transposed view.
    pub(crate) fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

/// `out = left · right`, or `out += left · right`; `out` is row-major without gaps, `[left.rows, right.columns]`.
///
/// # Panics
///
/// If the inner dimensions differ or `out` has another length.
pub(crate) fn multiply(out: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, write: Write) {
    let (rows, inner, columns) = (left.rows, left.columns, right.columns);
    assert_eq!(inner, right.rows, "inner dimensions");
    assert_eq!(Some(out.len()), rows.checked_mul(columns), "destination length");
    // SAFETY: `Matrix` proved that every element of `left` and `right` lies in its slice (transposing keeps the set
    // of elements); `out` holds `rows * columns` elements and, being `&mut`, overlaps neither. Slices are at most
    // `isize::MAX` bytes long, so no stride or offset wraps. T is f32, which the crate supports.
    unsafe {
        ::gemm::gemm(
            rows,
            columns,
            inner,
            out.as_mut_ptr(),
            1,
            columns as isize,
            write == Write::Add,
            left.data.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.data.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            ::gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i * 7 % 11) as f32 - 5.0).collect()
    }

    #[test]
    fn product_of_small_integers_is_exact() {
        for (m, k, n) in [(1, 1, 1), (1, 9, 33), (5, 2, 17), (3, 0, 4), (33, 64, 1), (40, 70, 65), (0, 3, 4)] {
            let (a, b, start) = (ramp(m * k), ramp(k * n), ramp(m * n));
            let mut expected = vec![0.0; m * n];
            for i in 0..m {
                for j in 0..n {
                    expected[i * n + j] = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
                }
            }
            let mut out = vec![f32::NAN; m * n];
            multiply(&mut out, Matrix::dense(&a, m, k), Matrix::dense(&b, k, n), Write::Replace);
            assert_eq!(out, expected);

            let mut out = start.clone();
            multiply(&mut out, Matrix::dense(&a, m, k), Matrix::dense(&b, k, n), Write::Add);
            let sums: Vec<f32> = expected.iter().zip(&start).map(|(e, s)| e + s).collect();
            assert_eq!(out, sums);

            let mut flipped = vec![0.0; k * n];
            for l in 0..k {
                for j in 0..n {
                    flipped[j * k + l] = b[l * n + j];
                }
            }
            let mut out = vec![f32::NAN; m * n];
            multiply(&mut out, Matrix::dense(&a, m, k), Matrix::dense(&flipped, n, k).transposed(), Write::Replace);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn column_range_reads_its_columns() {
        let b = ramp(3 * 8);
        let mut out = vec![0.0; 3];
        multiply(
            &mut out,
            Matrix::dense(&[0.0, 0.0, 1.0], 1, 3),
            Matrix::dense(&b, 3, 8).columns(5..8),
            Write::Replace,
        );
        assert_eq!(out, &b[21..24]);
    }

    #[test]
    #[should_panic(expected = "matrix out of bounds")]
    fn short_slice_is_refused() {
        let _ = Matrix::new(&[0.0; 7], 2, 3, 5);
    }
}
