//! From weights as they are stored to the elements of panels.

use half::{bf16, f16};

use super::Element;

/// Where some rows of a panel stand in row-major matrices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The first value.
    pub(crate) first: usize,
    /// The first scale, where blocks of rows have scales.
    pub(crate) scale: usize,
    /// Values from one row to the next, and scales too.
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Place {
    pub(super) fn row<'a, T>(&self, source: &'a [T], row: usize) -> &'a [T] {
        &source[self.first + row * self.stride..][..self.columns]
    }
}

/// An element that weights are packed in.
pub(crate) trait Packable: Element {
    /// Weights as they are stored.
    type Source<'a>: Copy + Send + Sync;

    /// Sets the first elements of each row of a group to the columns at `place`, whose rows are [`Element::STEPS`], or
    /// fewer at the end.
    fn pack(source: Self::Source<'_>, place: &Place, out: &mut [Self]);

    /// Whether a group holds what is at `place`, bit by bit.
    fn holds(group: &[Self], source: Self::Source<'_>, place: &Place) -> bool;
}

/// [`Packable`] where an element is a weight.
macro_rules! weight_alone {
    ($weight:ty) => {
        impl Packable for $weight {
            type Source<'a> = &'a [Self];

            fn pack(source: &[Self], place: &Place, out: &mut [Self]) {
                out[..place.columns].copy_from_slice(place.row(source, 0));
            }

            fn holds(group: &[Self], source: &[Self], place: &Place) -> bool {
                group.iter().zip(place.row(source, 0)).all(|(a, b)| a.to_bits() == b.to_bits())
            }
        }
    };
}

weight_alone!(f32);
weight_alone!(f16);

impl Packable for [bf16; 2] {
    type Source<'a> = &'a [bf16];

    fn pack(source: &[bf16], place: &Place, out: &mut [Self]) {
        let pairs = out.iter_mut().zip(place.row(source, 0));
        match place.rows {
            1 => pairs.for_each(|(out, even)| *out = [*even, bf16::ZERO]),
            _ => pairs.zip(place.row(source, 1)).for_each(|((out, even), odd)| *out = [*even, *odd]),
        }
    }

    fn holds(group: &[Self], source: &[bf16], place: &Place) -> bool {
        (0..place.rows).all(|step| {
            let mut pairs = group.iter().zip(place.row(source, step));
            pairs.all(|(element, value)| element[step].to_bits() == value.to_bits())
        })
    }
}

impl Packable for i8 {
    type Source<'a> = &'a [Self];

    fn pack(source: &[Self], place: &Place, out: &mut [Self]) {
        out[..place.columns].copy_from_slice(place.row(source, 0));
    }

    fn holds(group: &[Self], source: &[Self], place: &Place) -> bool {
        group.starts_with(place.row(source, 0))
    }
}
