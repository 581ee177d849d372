//! Which kernel and how many parts: from sizes and the device alone.

use moa_schema::AttentionMode;

use super::layer::INT;
use super::{PlanError, Regime};
use crate::catalog::{AttendKernel, Engine, ProductKernel, route};
use crate::constants::{GROUP_TOKENS, MAX_SPLITS};
use crate::{Device, Element, Options};

/// Tokens up to which every expert is computed for every token: below, reading the weights takes longer than the
/// products that nobody needs.
const DENSE_TOKENS: usize = 256;

/// Tokens up to which kernels overlap. An estimate: on an H100 that is faster at 128 and slower at 2048.
const OVERLAP_TOKENS: usize = 256;

/// Tokens that every block may route for itself: one group of the router.
const SPARSE_TOKENS: usize = GROUP_TOKENS;

/// Inner indices that a part of an inner dimension is worth.
const INNER_PER_SPLIT: usize = 1024;

/// Keys from which on one tile of rows is work enough for a block that stays. An estimate: on an H100 it is too little
/// with 128 keys, and enough with 2048.
const LONG_KEYS: usize = 512;

/// Columns of the tiles of few rows.
const NARROW_COLUMNS: usize = 16;
const WIDE_COLUMNS: usize = 64;

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
    /// What computes large products, where it is not `engine`.
    large: Option<Engine>,
}

impl Choice {
    pub(super) fn new(element: Element, device: &Device, options: Options) -> Result<Self, PlanError> {
        let (major, minor) = device.compute_capability;
        if major < 7 {
            return Err(PlanError::Device { major, minor });
        }
        let large = Some(Engine::Wgmma).filter(|engine| options.wgmma && engine.exists(element, device));
        Ok(Self { element, device: *device, engine: Engine::of(element, device, options), large })
    }

    /// The same device, for kernels of f32 that round nothing to TF32.
    pub(super) fn in_f32(&self) -> Result<Self, PlanError> {
        Self::new(Element::F32, &self.device, Options::default())
    }

    /// The tile for products, of those whose shared memory `bytes` fits the device.
    ///
    /// Few rows take narrow tiles where wide ones leave many multiprocessors without any, or each more to read.
    pub(super) fn product(
        &self,
        work: Work,
        bytes: impl Fn(&ProductKernel) -> usize,
    ) -> Result<ProductKernel, PlanError> {
        let Work { rows, columns, parts, routes, output } = work;
        let available = self.device.shared_bytes_per_block;
        let covers = |height: usize, across: usize| rows.div_ceil(height).saturating_mul(columns.div_ceil(across));
        let large = covers(128, 128);
        let height = match rows {
            0..=32 => 16,
            65.. if self.large.is_some() && large >= self.multiprocessors() / if rows <= 256 { 2 } else { 1 } => 128,
            // Parts of a sum are written and read again: of lower tiles there are as many, with fewer parts.
            33..=128 if output && covers(64, WIDE_COLUMNS).saturating_mul(parts) < 2 * self.multiprocessors() => 16,
            33..=256 => 64,
            _ if large < 2 * self.multiprocessors() => 64,
            _ => 128,
        };
        let tiles = |across: usize| covers(height, across).saturating_mul(parts);
        let reads = |across: usize| tiles(across).max(self.multiprocessors()).saturating_mul(rows.min(height) + across);
        let idles = rows <= 256 && !self.occupies(tiles(WIDE_COLUMNS));
        let narrow = height < 128 && !routes && (idles || reads(NARROW_COLUMNS) <= reads(WIDE_COLUMNS));
        let engines = std::iter::once(self.engine).chain(self.large);
        // Tiles of 64 rows by a warpgroup are faster than others for 2048 rows on an H200, and slower for 64, where
        // weights are what takes the time. The bounds in between are estimates.
        let spreads = rows > 256 && self.occupies(covers(64, 128));
        let pays = |kernel: &ProductKernel| Some(kernel.engine) != self.large || kernel.rows > 64 || spreads;
        let kernels = engines.flat_map(ProductKernel::all).filter(pays);
        let fitting = kernels.filter(|kernel| kernel.rows <= height && bytes(kernel) <= available as usize);
        // Of the largest, the last.
        let best = fitting.max_by_key(|kernel| ((kernel.columns < WIDE_COLUMNS) == narrow, kernel.rows));
        best.ok_or(PlanError::SharedMemory { kernel: "product", available })
    }

    /// The tile whose blocks stay, for matrices of `rows` rows, where there are so many `tiles` of it that few
    /// multiprocessors wait for the last ones: an estimate.
    pub(super) fn persistent(&self, rows: usize, tiles: impl Fn(&ProductKernel) -> usize) -> Option<ProductKernel> {
        let kernel = self.large.and_then(ProductKernel::persistent).filter(|kernel| rows >= kernel.rows)?;
        let fits = kernel.project_bytes(self.element, 0) <= self.device.shared_bytes_per_block as usize;
        let (tiles, at_once) = (tiles(&kernel), self.multiprocessors());
        let places = tiles.div_ceil(at_once).saturating_mul(at_once);
        (fits && tiles > 0 && 4 * tiles >= 3 * places).then_some(kernel)
    }

    /// Blocks that stay, for so many tiles.
    pub(super) fn staying_blocks(&self, tiles: usize) -> usize {
        tiles.min(self.multiprocessors())
    }

    /// The attention kernel for `rows` rows in each of `pairs` pairs of batch row and head, which see at most `keys`
    /// keys.
    pub(super) fn attend(
        &self,
        rows: usize,
        pairs: usize,
        head: usize,
        keys: usize,
        mode: AttentionMode,
    ) -> Result<AttendKernel, PlanError> {
        let available = self.device.shared_bytes_per_block;
        let fits =
            |kernel: &AttendKernel| kernel.head >= head && kernel.shared_bytes(self.element) <= available as usize;
        let blocks = |kernel: &AttendKernel| rows.div_ceil(kernel.rows()) * pairs;
        let fills = |kernel: &AttendKernel| blocks(kernel) >= self.multiprocessors();
        let large = self.large.map(AttendKernel::all).unwrap_or_default().into_iter().find(fits);
        // Blocks that stay earn their long beginning by a second tile of rows, or by many keys.
        let lasts = |kernel: &AttendKernel| keys >= LONG_KEYS || blocks(kernel) >= 2 * self.multiprocessors();
        let suits = |kernel: &AttendKernel| rows > kernel.rows() / 2 && self.occupies(blocks(kernel)) && lasts(kernel);
        if let Some(kernel) = large.filter(|kernel| mode == AttentionMode::Softmax && suits(kernel)) {
            return Ok(kernel);
        }
        let engines = [self.engine, Engine::Plain];
        let engines = engines.iter().filter(|engine| engine.exists(self.element, &self.device));
        let kernels = engines.flat_map(|engine| AttendKernel::all(*engine)).map(|kernel| kernel.of(mode));
        let mut fitting = kernels.filter(fits);
        let error = PlanError::SharedMemory { kernel: "attention", available };
        let tall = fitting.next().ok_or_else(|| error.clone())?;
        if !tall.cuts_keys() && rows > 16 && fills(&tall) {
            return Ok(tall);
        }
        std::iter::once(tall).chain(fitting).find(AttendKernel::cuts_keys).ok_or(error)
    }

    /// Parts into which the keys of `tiles` tiles of queries are cut.
    pub(super) fn key_splits(&self, kernel: &AttendKernel, tiles: usize, keys: usize) -> usize {
        if kernel.cuts_keys() { self.splits(tiles, keys.div_ceil(kernel.keys) / 2) } else { 1 }
    }

    /// Blocks that compute `tiles` tiles.
    pub(super) fn attend_blocks(&self, kernel: &AttendKernel, tiles: usize) -> Result<usize, PlanError> {
        // Blocks that stay count on, to one tile each behind the last.
        let limit = INT / 2;
        match kernel.stays() {
            true if tiles > limit => Err(PlanError::Limit { name: "tiles of queries", limit, found: tiles }),
            true => Ok(self.staying_blocks(tiles)),
            false => Ok(tiles),
        }
    }

    /// Parts into which the inner dimension, `inner`, of `tiles` tiles is cut.
    pub(super) fn output_splits(&self, tiles: usize, inner: usize) -> usize {
        self.splits(tiles, output_parts(inner))
    }

    fn splits(&self, tiles: usize, at_most: usize) -> usize {
        let full = 2 * self.multiprocessors();
        // More blocks than run at one time would leave the last of them alone.
        let wanted = (full + full / 2) / tiles.max(1);
        wanted.min(at_most).clamp(1, MAX_SPLITS)
    }

    /// Warps that share the tokens of one group of the router.
    pub(super) fn route_splits(&self, kernel: &ProductKernel, tokens: usize) -> usize {
        if tokens.div_ceil(GROUP_TOKENS) <= 2 * self.multiprocessors() { kernel.threads() / 32 } else { 1 }
    }

    /// Warps that share tokens in a launch that routes many of them and does nothing else, where that suits: blocks of
    /// more tokens split weights less often, and are fewer.
    pub(super) fn route_many(&self, tokens: usize, width: usize, experts: usize, top_k: usize) -> Option<usize> {
        let [few, many] = [2, 4];
        let splits = if tokens.div_ceil(route::tokens(many)) > self.multiprocessors() { few } else { many };
        let fits = route::shared_bytes(splits, width, experts, top_k) <= self.device.shared_bytes_per_block as usize;
        (self.engine == Engine::Tensor && experts <= route::MAX_EXPERTS && fits).then_some(splits)
    }

    /// Whether a kernel begins before the grid in front of it has ended. Those of an older architecture would read what
    /// is not written yet, since they do not wait on the device (`griddepcontrol.wait`); of more tokens, and where most
    /// blocks find no token of theirs, blocks that wait take room from those that work.
    pub(super) fn overlaps(&self, tokens: usize, regime: Regime) -> bool {
        self.device.compute_capability >= (9, 0) && tokens <= OVERLAP_TOKENS && regime != Regime::Sparse
    }

    /// Blocks that copy `bytes` bytes.
    pub(super) fn copy_blocks(&self, bytes: usize, threads: usize) -> usize {
        if bytes == 0 { 0 } else { bytes.div_ceil(64 * threads).clamp(1, 4 * self.multiprocessors()) }
    }

    /// Whether `blocks` blocks give at least three quarters of the multiprocessors work. The share is an estimate:
    /// below, slower kernels that occupy all of them are expected to be faster. Not measured.
    fn occupies(&self, blocks: usize) -> bool {
        4 * blocks >= 3 * self.multiprocessors()
    }

    fn multiprocessors(&self) -> usize {
        self.device.multiprocessors.max(1) as usize
    }
}

/// What a product computes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work {
    /// Rows of one matrix, on average.
    pub(super) rows: usize,
    /// Columns of all matrices.
    pub(super) columns: usize,
    /// Largest number of parts of the inner dimension.
    pub(super) parts: usize,
    /// Whether every block routes the tokens itself, and more blocks are more work.
    pub(super) routes: bool,
    /// Whether the rows are there, and the inner dimension may be cut into parts.
    pub(super) output: bool,
}

/// Largest number of parts of an inner dimension.
pub(super) fn output_parts(inner: usize) -> usize {
    (inner / INNER_PER_SPLIT).clamp(1, MAX_SPLITS)
}

/// Bytes of shared memory that the router takes; as `RouteMemory` in `kernels/route.cuh`.
pub(super) fn route_bytes(kernel: &ProductKernel, splits: usize, experts: usize, top_k: usize) -> usize {
    let warps = kernel.threads() / 32;
    let sums = if splits > 1 { warps * GROUP_TOKENS * experts } else { 0 };
    4 * (sums + warps / splits * GROUP_TOKENS * (experts + 2 * top_k))
}
