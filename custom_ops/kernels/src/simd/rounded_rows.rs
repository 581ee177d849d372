//! Rows of the left factor as products take them that are allowed less than f32, and which of them a thread has at
//! hand.

use std::cell::Cell;

use moa_schema::BLOCK;

use super::known_rows::KnownRows;
use super::magnitudes::Magnitudes;
use super::quantized::{self, Integers};
use super::tiles::ROW_LIMIT;
use super::{Epoch, Isa, LANES, Left, Nibbles};
use crate::buffer::Buffer;
use crate::row_stride::row_stride;

/// How a row of the left factor stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// As f32.
    Values,
    /// Rounded to bf16, two inner steps where an f32 would stand, see [`super::pairs`].
    Pairs,
    /// Rounded to int8, see [`super::quantized`].
    Quantized(StepOrder),
}

/// In which order the integers of eight inner steps stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepOrder {
    Rising,
    /// Those of even steps, then those of odd ones.
    EvenFirst,
}

impl Form {
    /// That of rows which are multiplied with int8, and with int4.
    pub(crate) const OF_INT8: Self = Self::Quantized(<i8 as Integers>::ORDER);
    pub(crate) const OF_INT4: Self = Self::Quantized(Nibbles::ORDER);

    /// Whether rows are integers.
    pub(crate) const fn is_quantized(self) -> bool {
        matches!(self, Self::Quantized(_))
    }

    /// What a row of `inner` values takes of the memory of f32.
    pub(crate) const fn len(self, inner: usize) -> usize {
        match self {
            Self::Values => inner,
            Self::Pairs => inner.div_ceil(2),
            Self::Quantized(_) => quantized::len(inner),
        }
    }

    /// Rows in this form, of `inner` values each, as a product takes them; those that are quantized in `blocks`.
    fn left<'a>(self, data: &'a [f32], starts: &'a [usize], inner: usize, blocks: usize) -> Left<'a> {
        match self {
            Self::Values => Left::new(data, starts, inner),
            Self::Pairs => Left::new(data, starts, self.len(inner)),
            Self::Quantized(_) => Left { blocks: Some(blocks), ..Left::new(data, starts, inner) },
        }
    }

    /// Fills `out`, of [`Self::len`] elements.
    pub(crate) fn round(self, isa: Isa, row: &[f32], out: &mut [f32]) {
        match self {
            Self::Values => out.copy_from_slice(row),
            Self::Pairs => isa.round_to_pairs(row, out),
            Self::Quantized(order) => isa.quantize(order, row, out),
        }
    }

    /// Bytes that a thread keeps once it has rounded rows of up to `inner` values.
    pub(crate) fn thread_bytes(self, inner: usize) -> usize {
        match self {
            Self::Values => 0,
            _ => (MOST * row_stride(self.len(inner)) + LANES) * size_of::<f32>() + KnownRows::BYTES,
        }
    }
}

/// Rows that were rounded for a whole call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RoundedRows<'a> {
    pub(crate) form: Form,
    pub(crate) data: &'a [f32],
    /// Elements from one row to the next.
    pub(crate) stride: usize,
    /// The same of the rows that they were made of.
    pub(crate) of: usize,
    /// Elements from one block of a quantized row to the next.
    pub(crate) blocks: usize,
}

impl<'a> RoundedRows<'a> {
    /// Rows that stand where others stood, `stride` apart, and so does each block of them.
    pub(crate) fn in_place(order: StepOrder, data: &'a [f32], stride: usize) -> Self {
        Self { form: Form::Quantized(order), data, stride, of: stride, blocks: BLOCK }
    }
}

/// Rounded rows, and which they are.
#[derive(Debug, Default)]
struct Rounded {
    rows: Buffer,
    known: KnownRows,
}

thread_local! {
    static ROUNDED: Cell<Rounded> = Cell::default();
}

/// Most rows that are rounded together.
const MOST: usize = ROW_LIMIT;

/// Calls `multiply` with the rows `left` in another form: those that are there, or in memory of this thread. There,
/// rows that come again within an `epoch`, always in one form, are not rounded again.
///
/// # Panics
///
/// If there are more rows than fit this memory, or one is out of bounds.
pub(crate) fn with_rounded(
    (isa, form): (Isa, Form),
    left: Left<'_>,
    epoch: Option<Epoch>,
    multiply: impl FnOnce(Left<'_>),
) {
    let count = left.starts.len();
    assert!(count <= MOST, "rows to be rounded");
    let mut starts = [0; MOST];
    if let Some(RoundedRows { data, stride, of, blocks, .. }) = left.rounded.filter(|rounded| rounded.form == form) {
        starts.iter_mut().zip(left.starts).for_each(|(rounded, start)| *rounded = start / of * stride);
        return multiply(form.left(data, &starts[..count], left.inner, blocks));
    }
    let mut rounded = ROUNDED.take();
    let len = form.len(left.inner);
    let stride = row_stride(len);
    let rows = match rounded.known.find(epoch, left) {
        Some(_) => rounded.rows.filled(),
        None => {
            rounded.known.make_room();
            let rows = rounded.rows.take(MOST * stride);
            for (start, out) in left.starts.iter().zip(rows.chunks_exact_mut(stride)) {
                form.round(isa, &left.data[*start..][..left.inner], &mut out[..len]);
            }
            rounded.known.remember(epoch, left, &[Magnitudes::default(); MOST]);
            rows
        }
    };
    starts.iter_mut().enumerate().for_each(|(row, start)| *start = row * stride);
    multiply(form.left(rows, &starts[..count], left.inner, quantized::WORDS));
    ROUNDED.set(rounded);
}

#[cfg(test)]
mod tests {
    use super::super::Instructions;
    use super::*;

    fn plain() -> Isa {
        Isa::at_most(Instructions::Portable)
    }

    /// The first element of the first row in a form.
    fn first(form: Form, rows: &[f32], starts: &[usize], epoch: Option<Epoch>) -> f32 {
        let mut found = 0.0;
        with_rounded((plain(), form), Left::new(rows, starts, 20), epoch, |left| found = left.data[left.starts[0]]);
        found
    }

    #[test]
    fn rows_are_rounded_once_an_epoch() {
        let (ones, starts) = (vec![1.0; 40], [0, 20]);
        let mut rows = ones.clone();
        rows[0] = 3.0;
        for form in [Form::Pairs, Form::Quantized(StepOrder::Rising), Form::Quantized(StepOrder::EvenFirst)] {
            let [one, three] = [&ones, &rows].map(|rows| first(form, rows, &starts, None));
            assert_ne!(one, three);
            let mut rows = ones.clone();
            let epoch = Some(Epoch::new());
            assert_eq!(first(form, &rows, &starts, epoch), one);
            rows[0] = 3.0;
            assert_eq!(first(form, &rows, &starts, epoch), one, "the caller says that nothing has changed");
            for (starts, epoch) in
                [(&starts[..1], epoch), (&starts, Some(Epoch::new())), (&starts, None), (&starts, None)]
            {
                assert_eq!(first(form, &rows, starts, epoch), three);
            }
        }
    }

    #[test]
    fn a_thread_keeps_what_is_stated() {
        for form in [Form::Pairs, Form::Quantized(StepOrder::Rising), Form::Quantized(StepOrder::EvenFirst)] {
            let (rows, starts) = (vec![1.0; 128 * 70], std::array::from_fn::<_, 128, _>(|row| row * 70));
            with_rounded((plain(), form), Left::new(&rows, &starts, 70), Some(Epoch::new()), |_| {});
            let Rounded { rows, known } = ROUNDED.take();
            assert_eq!(rows.bytes() + known.bytes(), form.thread_bytes(70), "{form:?}");
        }
    }
}
