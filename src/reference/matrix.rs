//! Matrices in the fewest bytes that hold them, and their products with many vectors.
//!
//! A product adds its terms in ascending order, one after the other, whatever is computed beside it: neither the number
//! of vectors nor that of threads changes a bit.

use std::{
    borrow::Cow,
    num::NonZero,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use moa_graphs::{Weight, WeightError};
use moa_schema::IntegerType;

use super::{
    math::{Sums, transpose},
    scaled::{self, Scaled},
    sequence::{Precision, Sequence},
    stored::{Stored, is_kept_by_bf16},
};

/// Columns of a product that are computed together.
const COLUMNS: usize = 128;
/// Vectors whose sums stay near while a part of the matrix is read.
const ROWS: usize = 16;
/// Terms of a sum that are added in one go.
const TERMS: usize = 4;
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

#[derive(Debug)]
enum Kept {
    Floats(Values),
    Scaled(Scaled),
}

impl Kept {
    fn len(&self) -> usize {
        match self {
            Self::Floats(values) => values.len(),
            Self::Scaled(scaled) => scaled.len(),
        }
    }

    /// Fills `to` with the values from `start` on, which stand in one row.
    fn widen(&self, start: usize, to: &mut [f64]) {
        match self {
            Self::Floats(values) => values.widen(start, to),
            Self::Scaled(scaled) => scaled.widen(start, to),
        }
    }
}

/// Numbers in the narrowest of these types that holds all of them.
#[derive(Debug)]
enum Values {
    /// bf16: the upper halves of f32.
    Half(Vec<u16>),
    Single(Vec<f32>),
    Double(Vec<f64>),
}

fn of_upper_half(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

impl Values {
    fn zeros(count: usize) -> Self {
        Self::Half(vec![0; count])
    }

    fn len(&self) -> usize {
        match self {
            Self::Half(values) => values.len(),
            Self::Single(values) => values.len(),
            Self::Double(values) => values.len(),
        }
    }

    /// Becomes a wider type where this one does not hold `values`.
    #[allow(clippy::cast_possible_truncation)]
    fn hold(&mut self, values: &[f64]) {
        if let Self::Half(narrow) = self
            && !values.iter().all(|value| is_kept_by_bf16(*value))
        {
            *self = Self::Single(narrow.iter().map(|bits| of_upper_half(*bits)).collect());
        }
        let is_single = |value: &f64| f64::from(*value as f32).to_bits() == value.to_bits();
        if let Self::Single(narrow) = self
            && !values.iter().all(is_single)
        {
            *self = Self::Double(narrow.iter().map(|value| f64::from(*value)).collect());
        }
    }

    /// Writes `values`, which it must [`Self::hold`], from `start` on.
    #[allow(clippy::cast_possible_truncation)]
    fn fill(&mut self, start: usize, values: &[f64]) {
        let range = start..start + values.len();
        match self {
            Self::Half(all) => all[range].iter_mut().zip(values).for_each(|(to, value)| {
                *to = ((*value as f32).to_bits() >> 16) as u16;
            }),
            Self::Single(all) => all[range].iter_mut().zip(values).for_each(|(to, value)| *to = *value as f32),
            Self::Double(all) => all[range].copy_from_slice(values),
        }
    }

    /// Fills `to` with the values from `start` on.
    fn widen(&self, start: usize, to: &mut [f64]) {
        let range = start..start + to.len();
        match self {
            Self::Half(all) => {
                to.iter_mut().zip(&all[range]).for_each(|(to, bits)| *to = f64::from(of_upper_half(*bits)));
            }
            Self::Single(all) => to.iter_mut().zip(&all[range]).for_each(|(to, value)| *to = f64::from(*value)),
            Self::Double(all) => to.copy_from_slice(&all[range]),
        }
    }
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

    /// [`Self::map`] as an export multiplies by the matrix of a head: one of integers belongs to an operator of ours.
    pub(super) fn map_head(&self, x: &Sequence) -> Sequence {
        match self.values {
            Kept::Floats(_) => self.map(x),
            Kept::Scaled(_) => self.map_factors(x),
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
        match (precision, &self.values) {
            (Precision::Integers, Kept::Scaled(_)) => Cow::Owned(scaled::factor(vector)),
            (Precision::Integers, Kept::Floats(_)) | (Precision::Products, Kept::Scaled(_)) => Cow::Borrowed(vector),
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
        let mut results: Vec<Vec<f64>> = x.iter().map(|_| Vec::with_capacity(self.outputs)).collect();
        let blocks = self.outputs.div_ceil(COLUMNS);
        let block = |block: usize| match sums {
            Sums::Double => self.block::<false>(index, block * COLUMNS, x),
            Sums::Single => self.block::<true>(index, block * COLUMNS, x),
        };
        for columns in in_order(blocks, x.len() * self.inputs * self.outputs, block) {
            let width = columns.len() / x.len().max(1);
            for (result, part) in results.iter_mut().zip(columns.chunks_exact(width.max(1))) {
                result.extend_from_slice(part);
            }
        }
        results
    }

    /// Columns of the product from `first` on, `[vectors, columns]`.
    fn block<const SINGLE: bool>(&self, index: usize, first: usize, x: &[&[f64]]) -> Vec<f64> {
        let columns = COLUMNS.min(self.outputs - first);
        let start = index * self.inputs * self.outputs + first;
        let mut results = vec![0.0; x.len() * columns];
        let mut rows = [[0.0; COLUMNS]; TERMS];
        for (x, results) in x.chunks(ROWS).zip(results.chunks_mut(ROWS * columns)) {
            for term in (0..self.inputs).step_by(TERMS) {
                let terms = TERMS.min(self.inputs - term);
                for (offset, row) in rows[..terms].iter_mut().enumerate() {
                    self.values.widen(start + (term + offset) * self.outputs, &mut row[..columns]);
                }
                for (sums, x) in results.chunks_exact_mut(columns).zip(x) {
                    match <&[f64; TERMS]>::try_from(&x[term..term + terms]) {
                        Ok(x) => add_terms::<SINGLE>(sums, x, &rows),
                        Err(_) => x[term..].iter().zip(&rows).for_each(|(x, row)| add::<SINGLE>(sums, *x, row)),
                    }
                }
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

/// `sums += x · row`.
#[allow(clippy::cast_possible_truncation)]
fn add<const SINGLE: bool>(sums: &mut [f64], x: f64, row: &[f64; COLUMNS]) {
    for (sum, weight) in sums.iter_mut().zip(row) {
        *sum += x * weight;
        if SINGLE {
            *sum = f64::from(*sum as f32);
        }
    }
}

/// [`add`] of several terms, in order.
#[allow(clippy::cast_possible_truncation)]
fn add_terms<const SINGLE: bool>(sums: &mut [f64], x: &[f64; TERMS], [a, b, c, d]: &[[f64; COLUMNS]; TERMS]) {
    let rounded = |sum: f64| if SINGLE { f64::from(sum as f32) } else { sum };
    let columns = sums.len();
    let [a, b, c, d] = [a, b, c, d].map(|row| &row[..columns]);
    for column in 0..columns {
        let first = rounded(rounded(sums[column] + x[0] * a[column]) + x[1] * b[column]);
        sums[column] = rounded(rounded(first + x[2] * c[column]) + x[3] * d[column]);
    }
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
