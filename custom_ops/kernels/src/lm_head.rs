//! `LMHead`.

use moa_schema::LmHeadDims;

use crate::check::{at_least_one, length, weight};
use crate::geometry::Geometry;
use crate::grid::{Claims, Grid, Layout, cut};
use crate::hidden_states::HiddenStates;
use crate::kernel_scratch::Scratch;
use crate::packed::Packed;
use crate::pool::{Counted, Stage};
use crate::prepared::{FewestOnTiles, Prepared, Weight};
use crate::rows::{IN_ORDER, RowProduct, TILE_ROWS, task_columns};
use crate::scalar::Scalar;
use crate::simd::{Epoch, Isa, PANEL};
use crate::weight_data::WeightData;
use crate::{KernelError, ThreadPool, pool};

/// Inputs of [`lm_head`], row-major.
#[derive(Debug, Clone, Copy)]
pub struct LmHeadInputs<'a, T = f32> {
    /// `[B, T, C]`.
    pub hidden_states: &'a [T],
    /// `[C, V]`.
    pub output_weight: WeightData<'a>,
}

/// `logits [B, T, V] = hidden_states · output_weight`.
///
/// # Errors
///
/// [`KernelError::Length`] or [`KernelError::Empty`] where a slice does not fit `dims`.
pub fn lm_head<T: Scalar>(
    dims: &LmHeadDims,
    inputs: &LmHeadInputs<'_, T>,
    logits: &mut [T],
    pool: &dyn ThreadPool,
) -> Result<(), KernelError> {
    Prepared::default().lm_head(dims, inputs, logits, pool)
}

impl Prepared {
    /// As [`lm_head`], with what is packed already.
    ///
    /// # Errors
    ///
    /// As [`lm_head`].
    pub fn lm_head<T: Scalar>(
        &self,
        dims: &LmHeadDims,
        inputs: &LmHeadInputs<'_, T>,
        logits: &mut [T],
        pool: &dyn ThreadPool,
    ) -> Result<(), KernelError> {
        let LmHeadDims { batch, tokens, width, vocabulary } = *dims;
        at_least_one(&[("B", batch), ("T", tokens), ("C", width), ("V", vocabulary)])?;
        length("hidden_states", inputs.hidden_states.len(), &[batch, tokens, width])?;
        weight(["output_weight", "output_scale"], inputs.output_weight, [1, width, vocabulary])?;
        length("logits", logits.len(), &[batch, tokens, vocabulary])?;
        self.with_scratch(|scratch| self.compute_lm_head(dims, inputs, logits, pool, scratch));
        Ok(())
    }

    fn compute_lm_head<T: Scalar>(
        &self,
        dims: &LmHeadDims,
        inputs: &LmHeadInputs<'_, T>,
        logits: &mut [T],
        pool: &dyn ThreadPool,
        scratch: &mut Scratch,
    ) {
        let LmHeadDims { batch, tokens, width, vocabulary } = *dims;
        let pool = &Counted::new(pool, &self.threads);
        let Scratch { weights, layer, border, .. } = scratch;
        let given = [(Weight::Output, inputs.output_weight)];
        let isa = self.isa_of(FewestOnTiles::FEED_FORWARD, batch * tokens, [1, 1], given);
        let hidden_states = HiddenStates::new(isa, inputs.hidden_states, width, &mut border.hidden_states);
        let geometry = Geometry::outputs(1, width, vocabulary);
        let weights = self.weights(weights, [(Weight::Output, geometry, inputs.output_weight)], pool);
        let weights = weights.get(Weight::Output);
        cut(&mut layer.bounds, batch * tokens, TILE_ROWS);
        border.output.rounded_into(logits, |logits| {
            let head = Head::new(isa, hidden_states, weights, logits, (&layer.bounds, &mut layer.claims));
            pool::run(pool, &[&head]);
        });
    }
}

/// Fewest columns that one task computes.
const COLUMNS_PER_TASK: usize = 4 * PANEL;

/// The only stage: some columns of up to [`TILE_ROWS`] tokens a task.
struct Head<'a> {
    isa: Isa,
    hidden_states: HiddenStates<'a>,
    weights: &'a Packed,
    grid: Grid<'a, f32>,
    epoch: Epoch,
}

impl<'a> Head<'a> {
    fn new(
        isa: Isa,
        hidden_states: HiddenStates<'a>,
        weights: &'a Packed,
        logits: &'a mut [f32],
        (bounds, claims): (&'a [usize], &'a mut Claims),
    ) -> Self {
        let (tiles, columns) = (bounds.len() - 1, weights.geometry().columns);
        let tile_columns = task_columns(isa, hidden_states.tokens(), tiles, columns, COLUMNS_PER_TASK);
        let layout = Layout { stride: columns, columns, tile_columns };
        let grid = Grid::new(logits, layout, bounds, claims);
        Self { isa, hidden_states, weights, grid, epoch: Epoch::new() }
    }

    /// The tile of a task: weights are read once for all tokens.
    fn by_columns(&self, index: usize) -> usize {
        let (across, down) = (self.grid.across(), self.grid.len() / self.grid.across());
        index % down * across + index / down
    }
}

impl Stage for Head<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(self.by_columns(index)) else { return };
        let mut starts = [0; TILE_ROWS];
        let count = out.rows();
        for (row, start) in starts[..count].iter_mut().enumerate() {
            *start = self.hidden_states.start(out.first_row() + row);
        }
        RowProduct {
            first_column: out.first_column(),
            epoch: Some(self.epoch),
            ..RowProduct::new(self.hidden_states.rows(&starts[..count]), self.weights, &IN_ORDER, out.columns())
        }
        .compute(self.isa, &mut out);
    }
}
