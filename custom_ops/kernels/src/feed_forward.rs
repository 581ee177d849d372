//! `MoEFeedForward`.

use moa_schema::{Activation, FeedForwardAttributes, FeedForwardDims};

use crate::activation;
use crate::buffer::Buffer;
use crate::check::{at_least_one, length, optional_length, router, weight};
use crate::geometry::Geometry;
use crate::grid::{Claims, Grid, Layout, Tile};
use crate::hidden_states::HiddenStates;
use crate::kernel_scratch::{BorderScratch, Scratch};
use crate::output_projection::{Order, OutputInputs};
use crate::packed::Packed;
use crate::pool::{Counted, Stage};
use crate::prepared::{FewestOnTiles, Prepared, Weight};
use crate::routing::{ExpertTiles, RouterInputs, Routing};
use crate::row_stride::row_stride;
use crate::rows::{IN_ORDER, RowProduct, TILE_ROWS, task_columns};
use crate::scalar::Scalar;
use crate::simd::{Epoch, Isa, PANEL, ROWS, StepOrder};
use crate::weight_data::WeightData;
use crate::{KernelError, ThreadPool, pool};

/// Inputs of [`feed_forward`], row-major.
#[derive(Debug, Clone, Copy)]
pub struct FeedForwardInputs<'a, T = f32> {
    /// `[B, T, C]`.
    pub hidden_states: &'a [T],
    /// `[C, E]`; `[R, E]` where there is a `router_input`.
    pub router_weight: &'a [f32],
    /// `[E, C, F]`, or `[E, C, 2 * F]` where gated.
    pub input_weight: WeightData<'a>,
    /// `[E, F, C]`.
    pub output_weight: WeightData<'a>,
    /// `[C]`.
    pub output_bias: Option<&'a [T]>,
    /// `[B, T, R]`: what the router reads instead of the hidden states, always in f32.
    pub router_input: Option<&'a [f32]>,
}

/// Outputs of [`feed_forward`], row-major; `None` where nobody asks for the value.
#[derive(Debug)]
pub struct FeedForwardOutputs<'a, T = f32> {
    /// `[B, T, C]`.
    pub output: &'a mut [T],
    /// `[B, T, k]`, falling score, ties by lower expert.
    pub topk_indices: Option<&'a mut [i64]>,
    /// `[B, T, k]`, in the order of `topk_indices`.
    pub topk_weights: Option<&'a mut [f32]>,
}

/// Routed feed-forward layer; every token is routed.
///
/// # Errors
///
/// [`KernelError::Length`], [`KernelError::Empty`] or [`KernelError::TopK`] where a slice or `top_k` does not fit
/// `dims`; [`KernelError::Experts`] where `dims` has too many;
/// [`KernelError::RouterLogits`] where a logit is NaN or infinite.
pub fn feed_forward<T: Scalar>(
    dims: &FeedForwardDims,
    attributes: &FeedForwardAttributes,
    inputs: &FeedForwardInputs<'_, T>,
    outputs: &mut FeedForwardOutputs<'_, T>,
    pool: &dyn ThreadPool,
) -> Result<(), KernelError> {
    Prepared::default().feed_forward(dims, attributes, inputs, outputs, pool)
}

impl Prepared {
    /// As [`feed_forward`], with what is packed already.
    ///
    /// # Errors
    ///
    /// As [`feed_forward`].
    pub fn feed_forward<T: Scalar>(
        &self,
        dims: &FeedForwardDims,
        attributes: &FeedForwardAttributes,
        inputs: &FeedForwardInputs<'_, T>,
        outputs: &mut FeedForwardOutputs<'_, T>,
        pool: &dyn ThreadPool,
    ) -> Result<(), KernelError> {
        let columns = if attributes.gated { dims.hidden.saturating_mul(2) } else { dims.hidden };
        let read = check(dims, columns, inputs, outputs)?;
        self.with_scratch(|scratch| self.compute_feed_forward((dims, read), attributes, inputs, outputs, pool, scratch))
    }

    fn compute_feed_forward<T: Scalar>(
        &self,
        (dims, read_width): (&FeedForwardDims, usize),
        attributes: &FeedForwardAttributes,
        inputs: &FeedForwardInputs<'_, T>,
        outputs: &mut FeedForwardOutputs<'_, T>,
        pool: &dyn ThreadPool,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let FeedForwardDims { batch, tokens, width, experts, top_k, hidden } = *dims;
        let pool = &Counted::new(pool, &self.threads);
        let Scratch { routing, weights, hidden: hidden_scratch, output, border, .. } = scratch;
        let BorderScratch { hidden_states, router_input, bias, output: result } = border;
        let given = [(Weight::Input, inputs.input_weight), (Weight::Output, inputs.output_weight)];
        let isa = self.isa_of(FewestOnTiles::FEED_FORWARD, batch * tokens, [top_k, experts], given);
        let hidden_states = HiddenStates::new(isa, inputs.hidden_states, width, hidden_states);
        let read =
            inputs.router_input.map(|values| HiddenStates::new(isa.keeping_rows(), values, read_width, router_input));
        let blocks = if attributes.gated { 2 } else { 1 };
        let weights = self.weights(
            weights,
            [
                (Weight::Router, Geometry::router(read_width, experts), inputs.router_weight.into()),
                (Weight::Input, Geometry::inputs(experts, width, blocks, hidden), inputs.input_weight),
                (Weight::Output, Geometry::outputs(experts, hidden, width), inputs.output_weight),
            ],
            pool,
        );
        let router = RouterInputs {
            read: read.unwrap_or(hidden_states),
            router_weight: weights.get(Weight::Router),
            tokens_per_row: tokens,
            experts,
            top_k,
            gate_mode: attributes.gate_mode,
        };
        let (router, by_expert) = routing.router(isa, router, (0..batch * tokens).map(|_| true))?;
        pool::run(pool, &[&router]);
        router.check()?;
        let Some(routing) = router.routing(by_expert) else { return Ok(()) };
        let output_weights = weights.get(Weight::Output);
        let in_place = isa.quantized_in_place(output_weights.panels().form(), hidden);
        let hidden_inputs = HiddenInputs {
            isa,
            routing,
            hidden_states,
            weights: weights.get(Weight::Input),
            activation: attributes.activation,
            gated: attributes.gated,
            in_place,
        };
        pool::run(pool, &[&hidden_scratch.stage(hidden_inputs, hidden)]);
        let output_inputs = OutputInputs {
            isa,
            routing,
            expert_rows: hidden_scratch.rows.filled(),
            stride: row_stride(hidden),
            order: Order::Rows,
            in_place,
            weights: output_weights,
            bias: inputs.output_bias.map(|values| bias.widened(values)),
            width,
            threads: pool.threads(),
        };
        result.rounded_into(outputs.output, |out| pool::run(pool, &[&output.stage(output_inputs, out)]));
        router.export(outputs.topk_indices.as_deref_mut(), outputs.topk_weights.as_deref_mut());
        Ok(())
    }
}

/// Fewest columns that one task of the hidden layer computes.
const COLUMNS_PER_TASK: usize = 4 * PANEL;

/// Most columns of a task.
const WIDEST_TASK: usize = 2 * COLUMNS_PER_TASK;

/// Memory that the hidden layer keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct HiddenScratch {
    rows: Buffer,
    tiles: ExpertTiles,
    claims: Claims,
}

/// What the hidden layer reads.
struct HiddenInputs<'a> {
    isa: Isa,
    routing: Routing<'a>,
    hidden_states: HiddenStates<'a>,
    weights: &'a Packed,
    activation: Activation,
    gated: bool,
    /// How rows are quantized where they stand, if they are.
    in_place: Option<StepOrder>,
}

/// The stage that fills `[rows of the routing, F]`, with rows [`row_stride`] apart, with the activated hidden rows,
/// quantized where they are.
struct Hidden<'a> {
    inputs: HiddenInputs<'a>,
    experts: &'a [usize],
    grid: Grid<'a, f32>,
    epoch: Epoch,
}

impl HiddenScratch {
    fn stage<'a>(&'a mut self, inputs: HiddenInputs<'a>, hidden: usize) -> Hidden<'a> {
        self.tiles.fill(inputs.routing, TILE_ROWS);
        let ExpertTiles { experts, bounds } = &self.tiles;
        let stride = row_stride(hidden);
        let rows = self.rows.take(inputs.routing.rows() * stride);
        let wide = task_columns(inputs.isa, inputs.routing.rows(), experts.len(), hidden, COLUMNS_PER_TASK);
        let layout = Layout { stride, columns: hidden, tile_columns: wide.min(WIDEST_TASK) };
        let grid = Grid::new(rows, layout, bounds, &mut self.claims);
        Hidden { inputs, experts, grid, epoch: Epoch::new() }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        self.rows.bytes() + self.tiles.bytes() + Claims::bytes([&self.claims])
    }
}

impl Stage for Hidden<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(index) else { return };
        let HiddenInputs { isa, routing, hidden_states, activation, in_place, .. } = self.inputs;
        let (count, columns) = (out.rows(), out.columns());
        let mut starts = [0; TILE_ROWS];
        for (row, start) in starts[..count].iter_mut().enumerate() {
            *start = hidden_states.start(routing.pair(out.first_row() + row) / routing.top_k);
        }
        let mut product = RowProduct {
            matrix: self.experts[index / self.grid.across()],
            first_column: out.first_column(),
            epoch: Some(self.epoch),
            ..RowProduct::new(hidden_states.rows(&starts[..count]), self.inputs.weights, &IN_ORDER, columns)
        };
        product.compute(isa, &mut out);
        for row in 0..count {
            activation::apply(isa, activation, out.row(row));
        }
        if self.inputs.gated {
            // A single row feels how long it takes to clear more.
            let (mut few, mut many): ([f32; ROWS * WIDEST_TASK], [f32; TILE_ROWS * WIDEST_TASK]);
            let factors = match count <= ROWS {
                true => {
                    few = [0.0; _];
                    &mut few[..]
                }
                false => {
                    many = [0.0; _];
                    &mut many[..]
                }
            };
            product.block = 1;
            product.compute(isa, &mut Tile::dense(factors, WIDEST_TASK));
            for (row, factors) in factors.chunks(WIDEST_TASK).enumerate().take(count) {
                out.row(row).iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
            }
        }
        if let Some(order) = in_place {
            (0..count).for_each(|row| isa.quantize_in_place(order, out.row(row)));
        }
    }
}

/// Proves all lengths; returns the width of what the router reads.
fn check<T>(
    dims: &FeedForwardDims,
    columns: usize,
    inputs: &FeedForwardInputs<'_, T>,
    outputs: &FeedForwardOutputs<'_, T>,
) -> Result<usize, KernelError> {
    let FeedForwardDims { batch, tokens, width, experts, top_k, hidden } = *dims;
    at_least_one(&[("B", batch), ("T", tokens), ("C", width), ("F", hidden)])?;
    length("hidden_states", inputs.hidden_states.len(), &[batch, tokens, width])?;
    let read = router(inputs.router_weight, inputs.router_input, [batch, tokens], [width, experts])?;
    weight(["input_weight", "input_scale"], inputs.input_weight, [experts, width, columns])?;
    weight(["output_weight", "output_scale"], inputs.output_weight, [experts, hidden, width])?;
    optional_length("output_bias", inputs.output_bias.map(<[_]>::len), &[width])?;
    length("output", outputs.output.len(), &[batch, tokens, width])?;
    optional_length("topk_indices", outputs.topk_indices.as_ref().map(|o| o.len()), &[batch, tokens, top_k])?;
    optional_length("topk_weights", outputs.topk_weights.as_ref().map(|o| o.len()), &[batch, tokens, top_k])?;
    Ok(read)
}
