//! Keys or values that a model reads and writes in one place.

use half::f16;
use ort::value::{DynValue, PrimitiveTensorElementType, TensorElementType};

use super::OrtSession;
use crate::backend::BackendError;

/// A buffer `[rows, heads, capacity, width]` that is past and present of one cache at once, see
/// [`OrtSession::bind_cache`]. Whoever runs the model knows how many tokens of it are filled.
#[derive(Debug)]
pub struct OrtCache {
    pub(super) value: DynValue,
    shape: [usize; 4],
}

/// Which rows of a batch take the place of which.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RowMoves(Vec<Move>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    Copy { from: usize, to: usize },
    SetAside(usize),
    Restore(usize),
}

impl RowMoves {
    /// Row `i` becomes what row `parents[i]` was; each row is copied once at most, and one in place of which it stands
    /// already is not touched.
    pub fn new(parents: &[usize]) -> Self {
        let moved = |row: usize| parents[row] != row;
        let mut readers = vec![0usize; parents.len()];
        (0..parents.len()).filter(|row| moved(*row)).for_each(|row| readers[parents[row]] += 1);
        let mut done: Vec<bool> = (0..parents.len()).map(|row| !moved(row)).collect();
        let mut moves = Vec::new();
        let mut free: Vec<usize> = (0..parents.len()).filter(|row| !done[*row] && readers[*row] == 0).collect();
        while let Some(to) = free.pop() {
            let from = parents[to];
            moves.push(Move::Copy { from, to });
            done[to] = true;
            readers[from] -= 1;
            if readers[from] == 0 && !done[from] {
                free.push(from);
            }
        }
        // What is left are rings, each row of which is read by one other.
        for start in 0..parents.len() {
            if done[start] {
                continue;
            }
            moves.push(Move::SetAside(start));
            let mut to = start;
            while parents[to] != start {
                moves.push(Move::Copy { from: parents[to], to });
                done[to] = true;
                to = parents[to];
            }
            moves.push(Move::Restore(to));
            done[to] = true;
        }
        Self(moves)
    }

    /// Whether every row stays.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl OrtSession {
    /// A cache for the float input `name`, all zero.
    ///
    /// # Errors
    ///
    /// Where there is no memory for it.
    pub fn cache(&self, name: &str, shape: [usize; 4]) -> Result<OrtCache, BackendError> {
        Ok(OrtCache { value: self.zeros(name, &shape)?.0, shape })
    }

    /// The rows `rows` of `cache`, in this order, with their first `length` tokens and room for `capacity`; the input
    /// `name` will take it.
    ///
    /// # Errors
    ///
    /// Where there is no memory for it.
    ///
    /// # Panics
    ///
    /// Where `cache` has no such rows, or one of the two no room for `length` tokens.
    pub fn rearranged(
        &self,
        name: &str,
        cache: &OrtCache,
        rows: &[usize],
        [length, capacity]: [usize; 2],
    ) -> Result<OrtCache, BackendError> {
        let [_, heads, _, width] = cache.shape;
        let mut made = self.cache(name, [rows.len(), heads, capacity, width])?;
        let copied = match cache.value.dtype().tensor_type() {
            Some(TensorElementType::Float16) => made.take_rows::<f16>(cache, rows, length),
            _ => made.take_rows::<f32>(cache, rows, length),
        };
        copied.map_err(|error| self.failure("reorder rows", &error))?;
        Ok(made)
    }

    /// Moves the first `length` tokens of the rows of `cache`.
    ///
    /// # Errors
    ///
    /// Where the runtime does not give the values.
    ///
    /// # Panics
    ///
    /// Where `cache` has no such rows, or no room for `length` tokens.
    pub fn reorder(&self, cache: &mut OrtCache, moves: &RowMoves, length: usize) -> Result<(), BackendError> {
        let moved = match cache.value.dtype().tensor_type() {
            Some(TensorElementType::Float16) => cache.move_rows::<f16>(moves, length),
            _ => cache.move_rows::<f32>(moves, length),
        };
        moved.map_err(|error| self.failure("reorder rows", &error))
    }
}

impl OrtCache {
    /// Elements of one head.
    fn head(&self) -> usize {
        self.shape[2] * self.shape[3]
    }

    fn take_rows<T: PrimitiveTensorElementType + std::fmt::Debug + Copy>(
        &mut self,
        source: &Self,
        rows: &[usize],
        length: usize,
    ) -> Result<(), ort::Error> {
        let (heads, used) = (self.shape[1], length * self.shape[3]);
        let (to_head, from_head) = (self.head(), source.head());
        let (_, from) = source.value.try_extract_tensor::<T>()?;
        let (_, to) = self.value.try_extract_tensor_mut::<T>()?;
        let sources = rows.iter().flat_map(|row| (0..heads).map(move |head| (row * heads + head) * from_head));
        for (place, start) in sources.enumerate() {
            to[place * to_head..][..used].copy_from_slice(&from[start..][..used]);
        }
        Ok(())
    }

    fn move_rows<T: PrimitiveTensorElementType + std::fmt::Debug + Copy>(
        &mut self,
        moves: &RowMoves,
        length: usize,
    ) -> Result<(), ort::Error> {
        let (heads, head, used) = (self.shape[1], self.head(), length * self.shape[3]);
        let (_, values) = self.value.try_extract_tensor_mut::<T>()?;
        let starts = |row: usize| (row * heads..(row + 1) * heads).map(|place| place * head);
        let mut aside = Vec::new();
        for step in &moves.0 {
            match *step {
                Move::Copy { from, to } => {
                    starts(from).zip(starts(to)).for_each(|(from, to)| values.copy_within(from..from + used, to));
                }
                Move::SetAside(row) => {
                    aside.clear();
                    starts(row).for_each(|start| aside.extend_from_slice(&values[start..][..used]));
                }
                Move::Restore(row) => {
                    let parts = aside.chunks_exact(used.max(1));
                    starts(row).zip(parts).for_each(|(start, part)| values[start..][..used].copy_from_slice(part));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn moved(parents: &[usize]) -> (Vec<usize>, RowMoves) {
        let moves = RowMoves::new(parents);
        let (mut rows, mut aside): (Vec<_>, _) = ((0..parents.len()).collect(), None);
        for step in &moves.0 {
            match *step {
                Move::Copy { from, to } => rows[to] = rows[from],
                Move::SetAside(row) => aside = Some(rows[row]),
                Move::Restore(row) => rows[row] = aside.take().unwrap(),
            }
        }
        (rows, moves)
    }

    #[test]
    fn rows_that_stay_are_not_touched() {
        assert!(RowMoves::new(&[0, 1, 2]).is_empty());
        assert_eq!(RowMoves::new(&[0, 0, 2]).0, [Move::Copy { from: 0, to: 1 }]);
        assert_eq!(moved(&[1, 2, 0]).0, [1, 2, 0]);
        assert_eq!(moved(&[1, 0, 0, 3, 5, 4]).0, [1, 0, 0, 3, 5, 4]);
    }

    proptest! {
        #[test]
        fn every_row_becomes_its_parent(parents in (1usize..9).prop_flat_map(|n| prop::collection::vec(0..n, n))) {
            let (rows, moves) = moved(&parents);
            prop_assert_eq!(&rows, &parents);
            let copies = moves.0.iter().filter(|step| matches!(step, Move::Copy { .. } | Move::Restore(_))).count();
            prop_assert_eq!(copies, parents.iter().enumerate().filter(|(row, parent)| row != *parent).count());
        }
    }
}
