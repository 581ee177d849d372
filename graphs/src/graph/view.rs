//! Tensors seen through transposes and reshapes, without moving a value.

use super::WeightExpr;

/// One axis of a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Axis {
    /// Elements along the axis.
    pub(super) size: usize,
    /// Elements of the root from one of them to the next.
    pub(super) stride: usize,
}

/// A tensor as another order of the elements of `root`.
#[derive(Debug)]
pub(super) struct View<'a> {
    pub(super) root: &'a WeightExpr,
    axes: Vec<Axis>,
}

impl<'a> View<'a> {
    /// `expr`, which has at least one element, as a view of the innermost expression that is possible.
    pub(super) fn of(expr: &'a WeightExpr) -> Self {
        match expr {
            WeightExpr::Transposed { input, permutation } => {
                let Self { root, axes } = Self::of(input);
                Self { root, axes: permutation.iter().map(|axis| axes[*axis]).collect() }
            }
            WeightExpr::Reshaped { input, shape } => {
                let Self { root, axes } = Self::of(input);
                match reshaped(merged(&axes), shape) {
                    Some(axes) => Self { root, axes },
                    None => Self { root: expr, axes: row_major(shape) },
                }
            }
            _ => Self { root: expr, axes: row_major(&expr.shape()) },
        }
    }

    /// The fewest axes that give the same order.
    pub(super) fn axes(&self) -> Vec<Axis> {
        merged(&self.axes)
    }
}

fn row_major(shape: &[usize]) -> Vec<Axis> {
    let mut stride = 1;
    let mut axes: Vec<_> = shape.iter().map(|size| Axis { size: *size, stride: 0 }).collect();
    for axis in axes.iter_mut().rev() {
        axis.stride = stride;
        stride *= axis.size;
    }
    axes
}

fn merged(axes: &[Axis]) -> Vec<Axis> {
    let mut result: Vec<Axis> = Vec::new();
    for axis in axes.iter().filter(|axis| axis.size != 1) {
        match result.last_mut() {
            Some(last) if last.stride == axis.stride * axis.size => {
                *last = Axis { size: last.size * axis.size, stride: axis.stride };
            }
            _ => result.push(*axis),
        }
    }
    result
}

/// `shape` over the same order; `None` where one of its axes would cross two of `axes`.
fn reshaped(mut axes: Vec<Axis>, shape: &[usize]) -> Option<Vec<Axis>> {
    let mut result = Vec::new();
    let mut rest = Axis { size: 1, stride: 0 };
    for size in shape.iter().rev() {
        if *size == 1 {
            result.push(Axis { size: 1, stride: 0 });
            continue;
        }
        if rest.size == 1 {
            rest = axes.pop()?;
        }
        if !rest.size.is_multiple_of(*size) {
            return None;
        }
        result.push(Axis { size: *size, stride: rest.stride });
        rest = Axis { size: rest.size / size, stride: rest.stride * size };
    }
    result.reverse();
    Some(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(pairs: &[(usize, usize)]) -> Vec<Axis> {
        pairs.iter().map(|(size, stride)| Axis { size: *size, stride: *stride }).collect()
    }

    #[test]
    fn neighbouring_axes_merge() {
        assert_eq!(merged(&row_major(&[2, 1, 3, 4])), axes(&[(24, 1)]));
        assert_eq!(merged(&axes(&[(5, 1), (2, 15), (3, 5)])), axes(&[(5, 1), (6, 5)]));
        assert_eq!(merged(&row_major(&[1, 1])), []);
    }

    #[test]
    fn shapes_split_and_join_axes_but_never_cross_them() {
        let turned = axes(&[(5, 1), (6, 5)]);
        assert_eq!(reshaped(turned.clone(), &[5, 2, 1, 3]), Some(axes(&[(5, 1), (2, 15), (1, 0), (3, 5)])));
        assert_eq!(reshaped(turned.clone(), &[30]), None);
        assert_eq!(reshaped(turned, &[3, 10]), None);
    }
}
