//! Products of matrices with many vectors.
//!
//! A product adds its terms in ascending order, one after the other, whatever is computed beside it: neither the number
//! of vectors nor that of threads changes a bit. Sums that are rounded to f32 are those of fused multiply-adds where
//! f32 holds the matrix and the vector.

use std::{
    borrow::Cow,
    num::NonZero,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use moa_graphs::{Weight, WeightError};
use moa_schema::IntegerType;

use super::{
    columns::{Adding, COLUMNS, Columns, Fused, InDouble, InSingle},
    kept::{Kept, Values, exact_singles},
    math::{Sums, transpose},
    scaled::{self, Scaled},
    sequence::{Precision, Rounding, Sequence},
    stored::Stored,
};

/// Values that are read together.
const PART: usize = 1 << 18;
/// Products of fewer multiply-accumulates are not worth a thread.
const LEAST_WORK: usize = 1 << 21;

/// Matrices of one shape, `[M, I, O]`.
#[derive(Debug)]
pub(super) struct Matrices {
    values: Kept,
    inputs: usize,
    outputs: usize,
}

/// Which index of a stored matrix, `[R, C]`, is that of its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outputs {
    /// The first: rows and columns are exchanged.
    Rows,
    /// The last.
    Columns,
}

impl Matrices {
    /// The matrices, `[M, R, C]`, that `weight` holds from its element `first` on; they are read part by part.
    ///
    /// # Errors
    ///
    /// Where the weight cannot be read or is not finite.
    pub(super) fn read(
        stored: Stored,
        weight: &Weight,
        first: usize,
        shape: [usize; 3],
        outputs: Outputs,
    ) -> Result<Self, WeightError> {
        let mut values = Values::zeros(shape.iter().product());
        for part in parts(shape) {
            let read = stored.matrix_part(weight, first + part.start..first + part.end)?;
            values.hold(&read);
            part.each_run(shape, outputs, &read, |place, run| values.fill(place, run));
        }
        Ok(Self::new(Kept::Floats(values), shape, outputs))
    }

    /// The same for matrices of a routed operator of ours, which some exports store as integers.
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    pub(super) fn of_operator(
        stored: Stored,
        weight: &Weight,
        first: usize,
        shape: [usize; 3],
        outputs: Outputs,
    ) -> Result<Self, WeightError> {
        Self::of_integers(stored.integers(), (stored, weight), first, shape, outputs)
    }

    /// The matrix `[C, V]` of a head, which `weight [V, C]` holds and some exports store as integers.
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    pub(super) fn of_head(stored: Stored, weight: &Weight) -> Result<Self, WeightError> {
        let shape = [1, weight.shape()[0], weight.shape()[1]];
        Self::of_integers(stored.head_integers(), (stored, weight), 0, shape, Outputs::Rows)
    }

    fn of_integers(
        kind: Option<IntegerType>,
        (stored, weight): (Stored, &Weight),
        first: usize,
        shape: [usize; 3],
        outputs: Outputs,
    ) -> Result<Self, WeightError> {
        let Some(kind) = kind else {
            return Self::read(stored, weight, first, shape, outputs);
        };
        let read = |part: &Part| weight.part_to_f64(first + part.start..first + part.end);
        let scaled = Scaled::read(kind, shape, outputs, read)?;
        Ok(Self::new(Kept::Scaled(scaled), shape, outputs))
    }

    fn new(values: Kept, [_, rows, columns]: [usize; 3], outputs: Outputs) -> Self {
        let [inputs, outputs] = if outputs == Outputs::Rows { [columns, rows] } else { [rows, columns] };
        Self { values, inputs, outputs }
    }

    /// `I`, over all matrices.
    pub(super) fn rows(&self) -> usize {
        self.values.len() / self.outputs.max(1)
    }

    /// Row `index` over all matrices, `[O]`.
    pub(super) fn row(&self, index: usize) -> Vec<f64> {
        let mut row = vec![0.0; self.outputs];
        self.values.widen(index * self.outputs, &mut row);
        row
    }

    /// `x · matrix` for every vector of `x`, `[B, T, I]`, and the first matrix.
    pub(super) fn map(&self, x: &Sequence) -> Sequence {
        x.with(self.outputs, self.product(x.sums(), 0, &x.rows()))
    }

    /// [`Self::map`] as an export multiplies by the matrix of a head: one of integers belongs to an operator of ours,
    /// and so does one of floats whose products may be rounded.
    pub(super) fn map_head(&self, x: &Sequence) -> Sequence {
        match (x.precision.to, &self.values) {
            (Rounding::Products, _) | (_, Kept::Scaled(_)) => self.map_factors(x),
            (_, Kept::Floats(_)) => self.map(x),
        }
    }

    /// [`Self::map`] as an operator of ours multiplies.
    pub(super) fn map_factors(&self, x: &Sequence) -> Sequence {
        let rows = x.rows();
        let factors: Vec<_> = rows.iter().map(|row| self.factor(x.precision, row)).collect();
        let factors: Vec<&[f64]> = factors.iter().map(AsRef::as_ref).collect();
        x.with(self.outputs, self.product(x.sums(), 0, &factors))
    }

    /// A vector as an operator of ours multiplies it with these matrices.
    fn factor<'a>(&self, precision: Precision, vector: &'a [f64]) -> Cow<'a, [f64]> {
        match (precision.to, &self.values) {
            (Rounding::Integers, Kept::Scaled(_)) => Cow::Owned(scaled::factor(vector, precision.draw)),
            (Rounding::Integers, Kept::Floats(_)) | (Rounding::Products, Kept::Scaled(_)) => Cow::Borrowed(vector),
            _ => precision.factor(vector),
        }
    }

    /// `x[i] · matrix[of[i]]` for every vector, as an operator of ours multiplies them.
    pub(super) fn each(&self, precision: Precision, x: &[&[f64]], of: &[usize]) -> Vec<Vec<f64>> {
        let mut results = vec![Vec::new(); x.len()];
        let mut matrices = of.to_vec();
        matrices.sort_unstable();
        matrices.dedup();
        for matrix in matrices {
            let places: Vec<usize> = (0..of.len()).filter(|place| of[*place] == matrix).collect();
            let factors: Vec<_> = places.iter().map(|place| self.factor(precision, x[*place])).collect();
            let rows: Vec<&[f64]> = factors.iter().map(AsRef::as_ref).collect();
            for (place, row) in places.into_iter().zip(self.product(precision.sums(), matrix, &rows)) {
                results[place] = row;
            }
        }
        results
    }

    /// `x · matrix[index]` for every vector of `x`, `[I]` each.
    pub(super) fn product(&self, sums: Sums, index: usize, x: &[&[f64]]) -> Vec<Vec<f64>> {
        if sums == Sums::Double {
            return self.columns::<InDouble, 32>(index, x);
        }
        let fuses = self.values.are_singles();
        let singles: Vec<_> = x.iter().map(|x| exact_singles(x).filter(|_| fuses)).collect();
        let others = x.iter().zip(&singles).filter(|(_, single)| single.is_none());
        let others: Vec<_> = others.map(|(x, _)| *x).collect();
        let mut others = self.columns::<InSingle, 32>(index, &others).into_iter();
        let fused: Vec<_> = singles.iter().flatten().map(Vec::as_slice).collect();
        let mut fused = self.columns::<Fused, 64>(index, &fused).into_iter();
        singles.iter().filter_map(|single| if single.is_some() { fused.next() } else { others.next() }).collect()
    }

    /// The same, with sums of one kind, [`Columns`] of them at a time.
    fn columns<A: Adding, const LANES: usize>(&self, index: usize, x: &[&[A::Number]]) -> Vec<Vec<f64>> {
        let mut results: Vec<Vec<f64>> = x.iter().map(|_| Vec::with_capacity(self.outputs)).collect();
        let block = |block: usize| {
            let first = block * COLUMNS;
            let columns = COLUMNS.min(self.outputs - first);
            let start = index * self.inputs * self.outputs + first;
            (columns, Columns::<A, LANES>::new(&self.values, start, [self.outputs, columns], x).sums())
        };
        let work = x.len() * self.inputs * self.outputs;
        for (columns, sums) in in_order(self.outputs.div_ceil(COLUMNS), work, block) {
            for (result, sums) in results.iter_mut().zip(sums) {
                result.extend(sums[..columns].iter().map(|sum| (*sum).into()));
            }
        }
        results
    }
}

/// Whole rows of one of several stored matrices.
pub(super) struct Part {
    /// Where the matrix starts.
    base: usize,
    /// The first row.
    row: usize,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Part {
    /// Gives the `values` of this part as neighbours in a row of `[M, I, O]`, with the place of the first.
    pub(super) fn each_run(
        &self,
        [_, rows, columns]: [usize; 3],
        outputs: Outputs,
        values: &[f64],
        mut visit: impl FnMut(usize, &[f64]),
    ) {
        let width = columns.max(1);
        match outputs {
            Outputs::Columns => {
                values.chunks_exact(width).zip(self.row..).for_each(|(run, row)| visit(self.base + row * columns, run));
            }
            Outputs::Rows => {
                let exchanged = transpose(values, columns);
                let runs = exchanged.chunks_exact((values.len() / width).max(1));
                runs.enumerate().for_each(|(column, run)| visit(self.base + column * rows + self.row, run));
            }
        }
    }
}

/// What is read together of matrices `[M, R, C]`, in order.
pub(super) fn parts([matrices, rows, columns]: [usize; 3]) -> impl Iterator<Item = Part> {
    let together = (PART / columns.max(1)).max(1);
    (0..matrices).flat_map(move |matrix| {
        let base = matrix * rows * columns;
        (0..rows).step_by(together).map(move |row| {
            let end = base + rows.min(row + together) * columns;
            Part { base, row, start: base + row * columns, end }
        })
    })
}

/// Every vector of a list.
pub(super) fn slices(vectors: &[Vec<f64>]) -> Vec<&[f64]> {
    vectors.iter().map(Vec::as_slice).collect()
}

/// The results of `tasks` tasks, in order, by threads where there is `work` for them.
pub(super) fn in_order<T: Send>(tasks: usize, work: usize, task: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let useful = tasks.min(work / LEAST_WORK);
    if useful < 2 {
        return (0..tasks).map(task).collect();
    }
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(useful);
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= tasks {
                return done;
            }
            done.push((index, task(index)));
        }
    };
    let mut all = thread::scope(|scope| {
        // Where the system refuses a thread, those that there are do the work.
        let another = |_| thread::Builder::new().spawn_scoped(scope, take).ok();
        let others: Vec<_> = (1..threads).map_while(another).collect();
        let mut all = take();
        for other in others {
            match other.join() {
                Ok(done) => all.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    });
    all.sort_unstable_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
#[path = "matrix_tests.rs"]
mod tests;
