//! Distances of rows at which a cache holds a block of them.

use crate::simd::LANES;

/// Elements of f32 after which addresses meet in the same set of the nearest cache: 4096 bytes.
const SAME_SET: usize = 1024;

/// Whether rows so many elements apart meet in one set of the nearest cache.
pub(crate) fn meet(stride: usize) -> bool {
    stride.is_multiple_of(SAME_SET)
}

/// Elements between two rows of `columns` elements that do not meet: there is a gap behind each.
pub(crate) fn row_stride(columns: usize) -> usize {
    let stride = columns.next_multiple_of(LANES) + LANES;
    if meet(stride) { stride + LANES } else { stride }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_a_gap_and_do_not_meet() {
        for columns in 0..5000 {
            let stride = row_stride(columns);
            assert!(!meet(stride) && stride.is_multiple_of(LANES), "{columns}: {stride}");
            assert!((columns + LANES..=columns + 3 * LANES).contains(&stride), "{columns}: {stride}");
        }
        assert_eq!([512, 1000, 1024].map(row_stride), [528, 1040, 1040]);
    }
}
