//! Hidden states as the products of a layer read them.

use crate::buffer::Buffer;
use crate::row_stride::{meet, row_stride};
use crate::scalar::Scalar;
use crate::simd::{Isa, Left};

/// Fewest tokens whose rows are moved apart.
const MANY: usize = 32;

/// A row for each token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HiddenStates<'a> {
    data: &'a [f32],
    width: usize,
    stride: usize,
}

impl<'a> HiddenStates<'a> {
    /// The rows `[B * T, C]` where they stand, or as f32 in `memory`.
    ///
    /// Rows of many tokens that would meet in one set of a cache are copied apart: a block of them then stays in the
    /// nearest cache while panels pass. Tiles read parts of rows that were split before, one after the other.
    pub(crate) fn new<T: Scalar>(isa: Isa, values: &'a [T], width: usize, memory: &'a mut Buffer) -> Self {
        let tokens = values.len().checked_div(width).unwrap_or(0);
        if !meet(width) || tokens < MANY || isa.has_tiles() {
            return Self { data: memory.widened(values), width, stride: width };
        }
        let stride = row_stride(width);
        let data = memory.take(tokens * stride);
        for (row, values) in data.chunks_exact_mut(stride).zip(values.chunks_exact(width)) {
            T::widen(values, &mut row[..width]);
        }
        Self { data, width, stride }
    }

    /// Number of rows.
    pub(crate) fn tokens(&self) -> usize {
        self.data.len().checked_div(self.stride).unwrap_or(0)
    }

    /// Elements of a row.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Where the row of a token begins.
    pub(crate) fn start(&self, token: usize) -> usize {
        token * self.stride
    }

    /// The row of a token.
    pub(crate) fn row(&self, token: usize) -> &'a [f32] {
        &self.data[self.start(token)..][..self.width]
    }

    /// The rows that begin at `starts`.
    pub(crate) fn rows<'b>(&self, starts: &'b [usize]) -> Left<'b>
    where
        'a: 'b,
    {
        Left { data: self.data, starts, inner: self.width }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::simd::every_isa;

    #[test]
    #[cfg_attr(miri, ignore = "too many elements, and Miri cannot round to f16 with F16C")]
    fn rows_that_meet_are_moved_apart_and_others_stay() {
        for isa in every_isa() {
            for (tokens, width, apart) in [(32, 1024, true), (31, 1024, false), (40, 512, false), (33, 1023, false)] {
                let values: Vec<f32> = (0..tokens * width).map(|i| (i % 2003) as f32).collect();
                let half: Vec<f16> = values.iter().copied().map(f16::from_f32).collect();
                let [mut direct, mut widened] = [Buffer::default(), Buffer::default()];
                let states = HiddenStates::new(isa, &values, width, &mut direct);
                let from_half = HiddenStates::new(isa, &half, width, &mut widened);
                for states in [states, from_half] {
                    let rows = (0..tokens).flat_map(|token| states.row(token).to_vec());
                    assert!(rows.eq(values.iter().copied()), "{isa:?} {tokens} {width}");
                    assert_eq!(states.stride != width, apart && !isa.has_tiles(), "{isa:?} {tokens} {width}");
                }
                assert_eq!(states.data.as_ptr() == values.as_ptr(), states.stride == width);
            }
        }
    }
}
