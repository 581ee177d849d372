//! Hidden states as the products of a layer read them.

use crate::buffer::Buffer;
use crate::row_stride::{meet, row_stride};
use crate::scalar::Scalar;
use crate::simd::quantized::WORDS;
use crate::simd::{Form, Isa, Left, RoundedRows};

/// Fewest tokens whose rows are moved apart.
const MANY: usize = 32;

/// A row for each token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HiddenStates<'a> {
    data: &'a [f32],
    width: usize,
    stride: usize,
    rounded: Option<RoundedRows<'a>>,
}

impl<'a> HiddenStates<'a> {
    /// The rows `[B * T, C]` where they stand, or as f32 in `memory`; there rounded too where products ask for it.
    ///
    /// Rows of many tokens that would meet in one set of a cache are copied apart: a block of them then stays in the
    /// nearest cache while panels pass. Tiles read rows that were split or rounded before, one after the other.
    pub(crate) fn new<T: Scalar>(isa: Isa, values: &'a [T], width: usize, memory: &'a mut Buffer) -> Self {
        let tokens = values.len().checked_div(width).unwrap_or(0);
        let apart = meet(width) && tokens >= MANY && !isa.has_tiles();
        let stride = if apart { row_stride(width) } else { width };
        let direct = T::direct(values).filter(|_| !apart);
        let copied = if direct.is_none() { tokens * stride } else { 0 };
        let rounded_stride = match isa.form() {
            Form::Values => 0,
            _ if isa.has_tiles() => 0,
            form => row_stride(form.len(width)),
        };
        let (copy, rounded) = memory.take(copied + tokens * rounded_stride).split_at_mut(copied);
        if direct.is_none() {
            for (row, values) in copy.chunks_exact_mut(stride).zip(values.chunks_exact(width)) {
                T::widen(values, &mut row[..width]);
            }
        }
        let data = direct.unwrap_or(copy);
        let rows = rounded.chunks_exact_mut(rounded_stride.max(1)).zip(data.chunks_exact(stride.max(1)));
        rows.for_each(|(rounded, row)| {
            isa.form().round(isa, &row[..width], &mut rounded[..isa.form().len(width)]);
        });
        let all = RoundedRows { form: isa.form(), data: rounded, stride: rounded_stride, of: stride, blocks: WORDS };
        Self { data, width, stride, rounded: (rounded_stride > 0).then_some(all) }
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
        Left { rounded: self.rounded, ..Left::new(self.data, starts, self.width) }
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
