//! Which elements of a storage a tensor has, and in which order.

use std::ops::{ControlFlow, Range};

/// A strided view of a storage, proven to stay inside of it; it may name an element several times.
///
/// Strides of dimensions of one element are zero, so that equal views are equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Layout {
    offset: u64,
    shape: Vec<usize>,
    strides: Vec<u64>,
}

impl Layout {
    /// The view of `available` elements; otherwise what is wrong with it.
    pub(super) fn new(offset: i64, shape: &[i64], strides: &[i64], available: u64) -> Result<Self, String> {
        if shape.len() != strides.len() {
            return Err(format!("has {} dimensions, but {} strides", shape.len(), strides.len()));
        }
        let Ok(mut offset) = u64::try_from(offset) else {
            return Err(format!("starts at element {offset} of its storage"));
        };
        let sizes: Option<Vec<_>> = shape.iter().map(|size| usize::try_from(*size).ok()).collect();
        let sizes = sizes.ok_or_else(|| format!("has the shape {shape:?}"))?;
        let elements = sizes.iter().try_fold(1usize, |product, size| product.checked_mul((*size).max(1)));
        if elements.is_none() {
            return Err(format!("of shape {shape:?} has more elements than any file holds"));
        }
        let empty = sizes.contains(&0);
        let mut steps = Vec::new();
        for (size, stride) in sizes.iter().zip(strides) {
            let step = match u64::try_from(*stride) {
                Ok(step) => step,
                Err(_) => return Err(format!("has the stride {stride}; strides must not be negative")),
            };
            steps.push(if *size <= 1 || empty { 0 } else { step });
        }
        if empty {
            offset = 0;
        } else {
            let last = reach(&sizes, &steps)?.checked_add(offset);
            if last.is_none_or(|last| last >= available) {
                let needed = last.and_then(|last| last.checked_add(1)).map_or("more".into(), |count| count.to_string());
                return Err(format!("needs {needed} elements of its storage, which has {available}"));
            }
        }
        Ok(Self { offset, shape: sizes, strides: steps })
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How many elements the view has.
    pub(super) fn elements(&self) -> u64 {
        self.shape.iter().map(|size| *size as u64).product()
    }

    /// The first element, and how many there are up to the last one.
    pub(super) fn span(&self) -> (u64, u64) {
        let steps = self.shape.iter().zip(&self.strides);
        let reach: u64 = steps.map(|(size, step)| (*size as u64).saturating_sub(1) * step).sum();
        (self.offset, if self.elements() == 0 { 0 } else { reach + 1 })
    }

    /// Whether the elements lie side by side in row-major order.
    pub(super) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (size, step) in self.shape.iter().zip(&self.strides).rev() {
            if *size > 1 && *step != expected {
                return false;
            }
            expected *= *size as u64;
        }
        true
    }

    /// Gives the `elements`, counted in row-major order, as rows, until `take` breaks.
    pub(super) fn rows(&self, elements: Range<u64>, mut take: impl FnMut(Row) -> ControlFlow<()>) -> ControlFlow<()> {
        let mut outer = self.axes();
        let (size, step) = outer.pop().unwrap_or((1, 0));
        let mut at = elements.start;
        while at < elements.end {
            let (mut row, index) = (at / size, at % size);
            let mut first = self.offset + index * step;
            for (size, step) in outer.iter().rev() {
                first += row % size * step;
                row /= size;
            }
            let count = (size - index).min(elements.end - at);
            take(Row { first, step, count })?;
            at += count;
        }
        ControlFlow::Continue(())
    }

    /// Sizes and strides, outermost first, where dimensions that are one in the storage are one.
    fn axes(&self) -> Vec<(u64, u64)> {
        let mut axes: Vec<(u64, u64)> = Vec::new();
        let steps = self.shape.iter().map(|size| *size as u64).zip(self.strides.iter().copied());
        for (size, step) in steps.filter(|(size, _)| *size != 1) {
            match axes.last_mut() {
                Some(outer) if step.checked_mul(size) == Some(outer.1) => *outer = (outer.0 * size, step),
                _ => axes.push((size, step)),
            }
        }
        axes
    }
}

/// Elements of a storage, equally far apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// The first one, counted from the start of the storage.
    pub(super) first: u64,
    pub(super) step: u64,
    pub(super) count: u64,
}

/// The last element counted from the first one.
fn reach(sizes: &[usize], steps: &[u64]) -> Result<u64, String> {
    let reach = sizes.iter().zip(steps).try_fold(0u64, |reach, (size, step)| {
        step.checked_mul((*size as u64).saturating_sub(1)).and_then(|length| length.checked_add(reach))
    });
    reach.ok_or_else(|| format!("of shape {sizes:?} has strides beyond any file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places of the elements `range`.
    fn part(layout: &Layout, range: Range<u64>) -> Vec<u64> {
        let mut places = Vec::new();
        let end = layout.rows(range, |row| {
            places.extend((0..row.count).map(|index| row.first + index * row.step));
            ControlFlow::Continue(())
        });
        assert!(end.is_continue());
        places
    }

    /// Places of all elements, which must not depend on where they are cut.
    fn places(layout: &Layout) -> Vec<u64> {
        let all = part(layout, 0..layout.elements());
        for cut in 0..layout.elements() {
            let parts = [part(layout, 0..cut), part(layout, cut..layout.elements())].concat();
            assert_eq!(parts, all, "cut at {cut}");
        }
        all
    }

    #[test]
    fn views_name_their_elements() {
        let rows = Layout::new(2, &[2, 3], &[3, 1], 8).unwrap();
        assert!(rows.is_contiguous());
        assert_eq!(rows.span(), (2, 6));
        let turned = Layout::new(1, &[3, 2], &[1, 3], 8).unwrap();
        assert!(!turned.is_contiguous());
        assert_eq!(places(&turned), [1, 4, 2, 5, 3, 6]);
        let spread = Layout::new(0, &[2, 1, 2], &[5, 0, 2], 8).unwrap();
        assert_eq!(places(&spread), [0, 2, 5, 7]);
        assert_eq!(places(&Layout::new(7, &[], &[], 8).unwrap()), [7]);
        let empty = Layout::new(9, &[3, 0], &[1, 1], 0).unwrap();
        assert_eq!((empty.span(), empty.elements(), empty.is_contiguous()), ((0, 0), 0, true));
    }

    #[test]
    fn elements_may_be_named_several_times() {
        let spread = Layout::new(2, &[3, 2], &[0, 1], 4).unwrap();
        assert_eq!((spread.span(), spread.elements(), spread.is_contiguous()), ((2, 2), 6, false));
        assert_eq!(places(&spread), [2, 3, 2, 3, 2, 3]);
        assert_eq!(places(&Layout::new(0, &[2, 3], &[1, 1], 4).unwrap()), [0, 1, 2, 1, 2, 3]);
        assert_eq!(places(&Layout::new(3, &[2, 2], &[0, 0], 4).unwrap()), [3, 3, 3, 3]);
    }

    #[test]
    fn dimensions_that_are_one_make_one_row() {
        let rows = |shape: &[i64], strides: &[i64]| {
            let layout = Layout::new(0, shape, strides, 64).unwrap();
            let (mut rows, all) = (0, layout.elements());
            let _never = layout.rows(0..all, |_| {
                rows += 1;
                ControlFlow::Continue(())
            });
            rows
        };
        assert_eq!(rows(&[4, 1, 2, 1], &[4, 9, 2, 9]), 1);
        assert_eq!(rows(&[8, 8, 1], &[0, 0, 0]), 1);
        assert_eq!(rows(&[3, 2, 2], &[8, 2, 1]), 3);
        let broken = Layout::new(0, &[3, 2], &[1, 3], 6).unwrap().rows(0..6, |_| ControlFlow::Break(()));
        assert!(broken.is_break());
    }

    #[test]
    fn one_element_has_any_stride() {
        let single = Layout::new(3, &[1, 4], &[i64::MAX, 1], 8).unwrap();
        assert_eq!(single, Layout::new(3, &[1, 4], &[0, 1], 8).unwrap());
        assert!(single.is_contiguous());
    }

    #[test]
    fn impossible_views_are_refused() {
        let cases: [(i64, &[i64], &[i64], &str); 9] = [
            (0, &[3], &[1, 1], "has 1 dimensions, but 2 strides"),
            (-1, &[3], &[1], "starts at element -1"),
            (0, &[-3], &[1], "has the shape [-3]"),
            (0, &[2], &[-1], "has the stride -1"),
            (0, &[1], &[-1], "has the stride -1"),
            (6, &[3], &[1], "needs 9 elements of its storage, which has 8"),
            (0, &[3, 3], &[4, 1], "needs 11 elements of its storage, which has 8"),
            (0, &[i64::MAX, i64::MAX], &[1, 1], "more elements than any file"),
            (0, &[i64::MAX, 2], &[3, 1], "beyond any file"),
        ];
        for (offset, shape, strides, part) in cases {
            let problem = Layout::new(offset, shape, strides, 8).expect_err(part);
            assert!(problem.contains(part), "{problem}");
        }
        assert!(Layout::new(1, &[i64::MAX, 1], &[0, 1], 1).is_err());
        assert!(Layout::new(i64::MAX, &[2], &[i64::MAX], 8).is_err());
        assert!(Layout::new(i64::MAX, &[2, 2], &[i64::MAX, 1], 8).is_err());
    }
}
