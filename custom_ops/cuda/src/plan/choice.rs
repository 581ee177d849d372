//! Which kernel and how many parts: from sizes and the device alone.

use moa_schema::GateMode;

use super::{PlanError, Regime};
use crate::catalog::{AttendKernel, Engine, ProductKernel};
use crate::{Device, Element, Options};

/// Tokens up to which every expert is computed for every token: below, reading the weights takes longer than the
/// products that nobody needs.
const DENSE_TOKENS: usize = 256;

/// Tokens that every block may route for itself: one group of the router.
const SPARSE_TOKENS: usize = 4;

/// Tokens that a group of the router takes.
pub(super) const GROUP_TOKENS: usize = 4;

/// Largest number of parts of one sum.
const MAX_SPLITS: usize = 32;

/// Stages that a part of an inner dimension is worth.
const CHUNKS_PER_SPLIT: usize = 4;

/// Largest power of two on gates in binary16: above, ordinary attention outputs could overflow.
const MAX_GATE_EXPONENT: u32 = 5;

/// How `tokens` tokens are computed.
pub(super) fn regime(tokens: usize, experts: usize, top_k: usize) -> Regime {
    if tokens <= SPARSE_TOKENS && tokens * top_k < experts {
        Regime::Sparse
    } else if top_k == experts || tokens <= DENSE_TOKENS {
        Regime::Dense
    } else if experts <= 2 * top_k {
        Regime::Grouped
    } else {
        Regime::GroupedReduce
    }
}

/// Engine and device of a plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub(super) element: Element,
    pub(super) device: Device,
    engine: Engine,
}

impl Choice {
    pub(super) fn new(element: Element, device: &Device, options: Options) -> Result<Self, PlanError> {
        let (major, minor) = device.compute_capability;
        if major < 7 {
            return Err(PlanError::Device { major, minor });
        }
        Ok(Self { element, device: *device, engine: Engine::of(element, device, options) })
    }

    /// The tile for products of `rows` rows in `matrices` matrices, with at least `extra` bytes of shared memory.
    pub(super) fn product(
        &self,
        rows: usize,
        columns: usize,
        bytes: impl Fn(&ProductKernel) -> usize,
    ) -> Result<ProductKernel, PlanError> {
        let available = self.device.shared_bytes_per_block;
        let wanted = match rows {
            0..=32 => 0,
            33..=256 => 1,
            _ if rows.div_ceil(128) * columns.div_ceil(128) < 2 * self.multiprocessors() => 1,
            _ => 2,
        };
        let kernels = ProductKernel::all(self.engine);
        let mut fitting = kernels[..=wanted].iter().rev().filter(|kernel| bytes(kernel) <= available as usize);
        fitting.next().copied().ok_or(PlanError::SharedMemory { kernel: "product", available })
    }

    /// The attention kernel for `rows` rows in each of `pairs` pairs of batch row and head.
    pub(super) fn attend(&self, rows: usize, pairs: usize, head: usize) -> Result<AttendKernel, PlanError> {
        let available = self.device.shared_bytes_per_block;
        let engines = [self.engine, Engine::Plain];
        let engines = engines.iter().filter(|engine| engine.exists(self.element, &self.device));
        let kernels = engines.flat_map(|engine| AttendKernel::all(*engine));
        let mut fitting =
            kernels.filter(|kernel| kernel.head >= head && kernel.shared_bytes(self.element) <= available as usize);
        let error = PlanError::SharedMemory { kernel: "attention", available };
        let tall = fitting.next().ok_or_else(|| error.clone())?;
        let fills_device = rows.div_ceil(tall.rows()) * pairs >= self.multiprocessors();
        if !tall.cuts_keys() && rows > 16 && fills_device {
            return Ok(tall);
        }
        std::iter::once(tall).chain(fitting).find(AttendKernel::cuts_keys).ok_or(error)
    }

    /// Parts into which the keys of `tiles` tiles of queries are cut.
    pub(super) fn key_splits(&self, kernel: &AttendKernel, tiles: usize, keys: usize) -> usize {
        if kernel.cuts_keys() { self.splits(tiles, keys.div_ceil(kernel.keys) / 2) } else { 1 }
    }

    /// Parts into which the inner dimension of `tiles` tiles is cut; each has about `chunks` stages.
    pub(super) fn output_splits(&self, tiles: usize, chunks: usize) -> usize {
        self.splits(tiles, chunks / CHUNKS_PER_SPLIT)
    }

    fn splits(&self, tiles: usize, at_most: usize) -> usize {
        let full = 2 * self.multiprocessors();
        let wanted = if tiles < full { (full + full / 2).div_ceil(tiles) } else { 1 };
        wanted.min(at_most).clamp(1, MAX_SPLITS)
    }

    /// Warps that share the tokens of one group of the router.
    pub(super) fn route_splits(&self, kernel: &ProductKernel, tokens: usize) -> usize {
        if tokens.div_ceil(GROUP_TOKENS) <= 2 * self.multiprocessors() { kernel.threads() / 32 } else { 1 }
    }

    /// Blocks that copy `bytes` bytes.
    pub(super) fn copy_blocks(&self, bytes: usize, threads: usize) -> usize {
        if bytes == 0 { 0 } else { bytes.div_ceil(64 * threads).clamp(1, 4 * self.multiprocessors()) }
    }

    /// The factor on gates, and what undoes it.
    pub(super) fn gate_scale(&self, experts: usize) -> [f32; 2] {
        if self.element != Element::F16 {
            return [1.0; 2];
        }
        let exponent = experts.next_power_of_two().trailing_zeros().min(MAX_GATE_EXPONENT);
        let scale = (1_u32 << exponent) as f32;
        [scale, 1.0 / scale]
    }

    fn multiprocessors(&self) -> usize {
        self.device.multiprocessors.max(1) as usize
    }
}

/// Bytes of shared memory that the router takes; as `RouteMemory` in `kernels/route.cuh`.
pub(super) fn route_bytes(kernel: &ProductKernel, splits: usize, experts: usize, top_k: usize) -> usize {
    let warps = kernel.threads() / 32;
    let sums = if splits > 1 { warps * GROUP_TOKENS * experts } else { 0 };
    4 * (sums + warps / splits * GROUP_TOKENS * (experts + 2 * top_k))
}

/// Place of a mode in the order that the kernels know.
pub(super) fn gate_mode(mode: GateMode) -> i32 {
    match mode {
        GateMode::SoftmaxTopk => 0,
        GateMode::SoftmaxTopkRenorm => 1,
        GateMode::TopkSoftmax => 2,
    }
}
