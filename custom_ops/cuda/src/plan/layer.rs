//! What the three operators share: the launches of a routed layer.

use super::arena::Arena;
use super::choice::{Choice, Work, output_parts, regime};
use super::{Launch, Plan, PlanError, Regime};
use crate::catalog::{LIST_PAIRS, MAX_EXPERTS, MAX_HEAD, MAX_TOP_K, ProductKernel, SUM_SLOTS};
use crate::constants::{LIST_THREADS, RowMode, SUM_THREADS};
use crate::{Buffer, Element, Parameters};

/// What the router reads in place of the hidden states, in f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct RouterInput {
    pub(super) buffer: Buffer,
    /// `R`.
    pub(super) width: usize,
}

impl RouterInput {
    /// Input `index` of `width` columns, where there is one.
    pub(super) fn new(index: usize, width: Option<usize>) -> Option<Self> {
        width.map(|width| Self { buffer: Buffer::Input(index), width })
    }
}

/// Sizes of a layer; symbols as in the schema.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) past: usize,
    /// Rows of the tensors that hold the past: as many, or more where these have room.
    pub(super) past_rows: usize,
    pub(super) keys: usize,
    pub(super) width: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    /// 1 in a feed-forward layer.
    pub(super) kv_heads: usize,
    /// `F` in a feed-forward layer.
    pub(super) head: usize,
    /// Whether `input_weight` has two blocks of columns.
    pub(super) gated: bool,
    /// Rows of the rotary caches, 0 where nothing is rotated.
    pub(super) rotary_positions: usize,
    pub(super) router_input: Option<RouterInput>,
    pub(super) is_attention: bool,
}

impl Sizes {
    /// Tokens of all batch rows.
    pub(super) fn all_tokens(&self) -> usize {
        self.batch * self.tokens
    }

    /// Width of one expert's rows.
    pub(super) fn columns(&self) -> usize {
        self.kv_heads.saturating_mul(self.head)
    }

    fn check(&self) -> Result<(), PlanError> {
        let limits = [
            ("experts", self.experts, MAX_EXPERTS),
            ("experts per token", self.top_k, MAX_TOP_K),
            ("head width", if self.is_attention { self.head } else { 1 }, MAX_HEAD),
            ("rotary positions", self.rotary_positions, INT),
            ("model width", self.width, INT),
            ("width of the router", self.router_input.map_or(0, |input| input.width), INT),
            ("rows of chosen experts", product(&[self.batch, self.tokens, self.top_k]), INT),
            ("keys", product(&[self.batch, self.kv_heads, self.keys.max(self.past_rows)]), INT / 2),
            (
                "elements of the rows of all experts",
                product(&[self.batch, self.tokens, self.experts, self.columns()]),
                FAR,
            ),
            ("elements of the rows of all slots", product(&[self.batch, self.tokens, self.top_k, self.width]), FAR),
            ("columns of all experts", product(&[2, self.experts, self.kv_heads, self.head]), INT),
        ];
        for (name, found, limit) in limits {
            if found > limit {
                return Err(PlanError::Limit { name, limit, found });
            }
        }
        Ok(())
    }
}

/// Largest count that kernels keep in an `int`, with room to round up to a tile.
pub(super) const INT: usize = (i32::MAX - 1024) as usize;

/// Largest count that the workspace is made for.
const FAR: usize = 1 << 42;

fn product(factors: &[usize]) -> usize {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

/// A size as kernels take it; sizes are checked to fit.
pub(super) fn int(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// The first projections by blocks that stay.
#[derive(Debug, Clone, Copy)]
pub(super) struct Persistent {
    kernel: ProductKernel,
    /// Tiles over the rows of experts, at most.
    row_tiles: usize,
    /// Tiles over tokens.
    token_tiles: usize,
    /// Tiles over the columns of experts, keys and values; of keys and values together where these have none.
    columns: [usize; 3],
    /// All tiles.
    tiles: usize,
}

/// A plan on its way.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) sizes: Sizes,
    pub(super) choice: Choice,
    pub(super) regime: Regime,
    /// What all launches share.
    pub(super) base: Parameters,
    pub(super) arena: Arena,
    launches: Vec<Launch>,
    /// Tickets of attention, then of the output projection.
    pub(super) tickets: [usize; 2],
}

impl Layer {
    /// Checks the sizes, and gives the routing its place in the workspace.
    pub(super) fn new(sizes: Sizes, choice: Choice, parameters: Parameters) -> Result<Self, PlanError> {
        sizes.check()?;
        let mut arena = Arena::default();
        let (tokens, pairs) = (sizes.all_tokens(), sizes.all_tokens() * sizes.top_k);
        let length = 16 / choice.element.bytes();
        let half = if sizes.rotary_positions > 0 { 2 } else { 1 };
        let whole_runs = sizes.width.is_multiple_of(length) && sizes.head.is_multiple_of(half * length);
        let base = Parameters {
            batch: int(sizes.batch),
            tokens: int(sizes.tokens),
            past: int(sizes.past),
            past_rows: int(sizes.past_rows),
            keys: int(sizes.keys),
            width: int(sizes.width),
            experts: int(sizes.experts),
            top_k: int(sizes.top_k),
            kv_heads: int(sizes.kv_heads),
            head: int(sizes.head),
            columns: int(sizes.columns()),
            input_columns: int(if sizes.gated { 2 * sizes.columns() } else { sizes.columns() }),
            rotary_positions: int(sizes.rotary_positions),
            gated: i32::from(sizes.gated),
            vectors: i32::from(whole_runs),
            key_splits: 1,
            output_splits: 1,
            slots: arena.take(sizes.experts * tokens),
            pair_experts: arena.take(pairs * 4),
            pair_gates: arena.take(pairs * 4),
            status: Buffer::Status,
            ..parameters
        };
        let regime = regime(tokens, sizes.experts, sizes.top_k);
        Ok(Self { sizes, choice, regime, base, arena, launches: Vec::new(), tickets: [0; 2] })
    }

    /// Whether experts take the rows of their lists.
    pub(super) fn is_grouped(&self) -> bool {
        matches!(self.regime, Regime::Grouped | Regime::GroupedReduce)
    }

    /// How the rows of experts are computed.
    fn row_mode(&self) -> RowMode {
        match self.regime {
            Regime::Grouped | Regime::GroupedReduce => RowMode::Listed,
            _ if !self.sizes.is_attention => RowMode::Chosen,
            Regime::Dense => RowMode::All,
            Regime::Sparse if self.sizes.router_input.is_some() => RowMode::Chosen,
            Regime::Sparse => RowMode::Routed,
        }
    }

    /// Whether blocks of experts route the tokens themselves.
    pub(super) fn routes_in_blocks(&self) -> bool {
        self.row_mode() == RowMode::Routed
    }

    /// Gives the rows of experts their place: for every expert, or for every slot.
    pub(super) fn place_rows(&mut self) {
        let slots = if matches!(self.row_mode(), RowMode::All | RowMode::Routed) {
            self.sizes.experts
        } else {
            self.sizes.top_k
        };
        let row = self.sizes.all_tokens() * self.sizes.columns() * self.choice.element.bytes();
        self.base.rows = self.arena.take(slots * row);
        // Slot by slot, an attention block reads the very rows that it writes, and reads them first.
        let in_place = matches!(self.row_mode(), RowMode::Listed | RowMode::Chosen);
        self.base.attended = if in_place { self.base.rows } else { self.arena.take(self.sizes.top_k * row) };
        self.base.row_mode = self.row_mode().number();
    }

    /// Tiles over tokens or, at most, over the lists of all experts.
    fn row_tiles(&self, kernel: &ProductKernel, listed: bool) -> usize {
        let Sizes { experts, top_k, .. } = self.sizes;
        let tokens = self.sizes.all_tokens();
        match listed {
            true => (tokens * top_k + experts * (kernel.rows - 1)) / kernel.rows,
            false => tokens.div_ceil(kernel.rows),
        }
    }

    /// Tiles over rows and columns of the experts.
    pub(super) fn fill_experts(&self, kernel: &ProductKernel, parameters: &mut Parameters) {
        parameters.row_tiles = int(self.row_tiles(kernel, self.is_grouped()));
        parameters.input_tiles = int(self.input_tiles(kernel, self.sizes.gated));
    }

    /// Tiles over the columns of one matrix; each half of a tile takes one of two partners where columns are paired.
    pub(super) fn input_tiles(&self, kernel: &ProductKernel, gated: bool) -> usize {
        let Sizes { kv_heads, head, rotary_positions, .. } = self.sizes;
        if rotary_positions > 0 {
            kv_heads * (head / 2).div_ceil(kernel.columns / 2)
        } else if gated {
            self.sizes.columns().div_ceil(kernel.columns / 2)
        } else {
            self.sizes.columns().div_ceil(kernel.columns)
        }
    }

    /// The lists of the experts.
    pub(super) fn push_lists(&mut self) -> Result<(), PlanError> {
        let Sizes { experts, .. } = self.sizes;
        self.base.expert_pairs = self.arena.take(experts * self.sizes.all_tokens() * 4);
        self.base.expert_counts = self.arena.take(experts * 4);
        self.push(LIST_PAIRS.to_owned(), experts, LIST_THREADS, LIST_THREADS / 32 * 4, self.base)
    }

    /// The rows of experts, in a launch of their own behind the router.
    pub(super) fn push_experts(&mut self) -> Result<(), PlanError> {
        let Sizes { experts, top_k, gated, .. } = self.sizes;
        let tokens = self.sizes.all_tokens();
        let rows = if self.is_grouped() { (tokens * top_k).div_ceil(experts) } else { tokens };
        let columns = self.sizes.columns() * experts.min(tokens * top_k) * if gated { 2 } else { 1 };
        let work = Work { rows, columns, parts: 1, routes: false, output: false };
        let kernel = self.choice.product(work, |kernel| kernel.project_bytes(self.choice.element, 0))?;
        let mut parameters = self.base;
        parameters.route_splits = 1;
        self.fill_experts(&kernel, &mut parameters);
        let shared = kernel.project_bytes(self.choice.element, 0);
        self.push_project(&kernel, shared, parameters, true)
    }

    /// Columns of all tiles of the first projections whose blocks stay: of experts, keys and values.
    fn persistent_columns(&self, kernel: &ProductKernel, appends: bool) -> [usize; 3] {
        let Sizes { experts, rotary_positions, .. } = self.sizes;
        let columns = self.sizes.columns();
        let matrices = if self.is_grouped() { 1 } else { experts };
        let tiles = |columns: usize| columns.div_ceil(kernel.columns);
        let cache = match (appends, rotary_positions > 0) {
            (false, _) => [0, 0],
            (true, false) => [tiles(2 * columns), 0],
            (true, true) => [tiles(columns); 2],
        };
        [tiles(matrices * columns), cache[0], cache[1]]
    }

    /// Whether rows are whole runs, so few that kernels count them in 32 bits.
    fn has_near_runs(&self) -> bool {
        let Sizes { top_k, width, .. } = self.sizes;
        let row = width.max(top_k.saturating_mul(self.sizes.columns()));
        self.base.vectors != 0 && product(&[self.sizes.all_tokens(), row]) <= 1 << 35
    }

    /// The first projections by blocks that stay, where that suits: tiles over rows, over tokens, and over columns.
    ///
    /// Rotated heads must be two lines of 64 columns, others whole lines; where every expert takes every token, kernels
    /// count the elements of all matrices in 31 bits.
    pub(super) fn persistent_project(&self, appends: bool) -> Option<Persistent> {
        let Sizes { experts, top_k, width, head, rotary_positions, is_attention, .. } = self.sizes;
        let whole_lines = if rotary_positions > 0 { head == 128 } else { head.is_multiple_of(64) };
        let is_near = match self.row_mode() {
            RowMode::All => product(&[experts, width, self.sizes.columns()]) <= i32::MAX as usize,
            mode => mode == RowMode::Listed,
        };
        if !self.has_near_runs() || !is_attention || !is_near || !whole_lines {
            return None;
        }
        let tokens = self.sizes.all_tokens();
        let rows = if self.is_grouped() { tokens * top_k / experts } else { tokens };
        let of = |kernel: &ProductKernel| {
            let token_tiles = self.row_tiles(kernel, false);
            let row_tiles = self.row_tiles(kernel, self.is_grouped());
            let columns = self.persistent_columns(kernel, appends);
            let tiles =
                product(&[row_tiles, columns[0]]).saturating_add(product(&[token_tiles, columns[1] + columns[2]]));
            Persistent { kernel: *kernel, row_tiles, token_tiles, columns, tiles }
        };
        self.choice.persistent(rows, |kernel| of(kernel).tiles).map(|kernel| of(&kernel))
    }

    /// Keys, values and rows of experts in one launch behind the router.
    pub(super) fn push_persistent(&mut self, persistent: &Persistent) -> Result<(), PlanError> {
        let Persistent { kernel, row_tiles, token_tiles, columns, tiles } = persistent;
        let parameters = Parameters {
            row_tiles: int(*row_tiles),
            input_tiles: int(columns[0]),
            kv_row_tiles: int(*token_tiles),
            key_tiles: int(columns[1]),
            value_tiles: int(columns[2]),
            ..self.base
        };
        let shared = kernel.project_bytes(self.choice.element, 0);
        self.push_staying(kernel, "project", *tiles, shared, parameters)
    }

    fn push_staying(
        &mut self,
        kernel: &ProductKernel,
        family: &str,
        tiles: usize,
        shared: usize,
        parameters: Parameters,
    ) -> Result<(), PlanError> {
        if tiles > INT / 2 {
            return Err(PlanError::Limit { name: "tiles of a product", limit: INT / 2, found: tiles });
        }
        let blocks = self.choice.staying_blocks(tiles);
        self.push(kernel.symbol(family), blocks, kernel.threads(), shared, parameters)
    }

    /// A launch of `project`; none where it has nothing to do.
    pub(super) fn push_project(
        &mut self,
        kernel: &ProductKernel,
        shared: usize,
        parameters: Parameters,
        overlap: bool,
    ) -> Result<(), PlanError> {
        let wide = |value: i32| usize::try_from(value).unwrap_or(0);
        let p = &parameters;
        let matrices = if p.row_mode == RowMode::Listed.number() { 1 } else { self.sizes.experts };
        let blocks = [
            wide(p.route_blocks),
            product(&[wide(p.row_tiles), wide(p.input_tiles), matrices]),
            product(&[wide(p.kv_row_tiles), wide(p.key_tiles) + wide(p.value_tiles)]),
            wide(p.copy_blocks),
        ];
        let blocks = blocks.iter().fold(0_usize, |sum, blocks| sum.saturating_add(*blocks));
        if blocks == 0 {
            return Ok(());
        }
        self.push(kernel.symbol("project"), blocks, kernel.threads(), shared, parameters)?;
        if let (false, Some(launch)) = (overlap, self.launches.last_mut()) {
            launch.overlap = false;
        }
        Ok(())
    }

    /// Says how many tickets attention and the output projection take, before the first launch.
    pub(super) fn place_tickets(&mut self, attention: usize) -> Result<(), PlanError> {
        let (kernel, _, splits) = self.output_kernel()?;
        let tiles = self.sizes.all_tokens().div_ceil(kernel.rows) * self.sizes.width.div_ceil(kernel.columns);
        let output = if splits > 1 { tiles } else { 0 };
        self.tickets = [attention, output].map(|count| count.next_multiple_of(crate::WORKSPACE_ALIGNMENT / 4));
        if attention + output > 0 {
            self.base.tickets = self.arena.take((self.tickets[0] + self.tickets[1]) * 4);
        }
        Ok(())
    }

    /// Kernel, row tiles and parts of the output projection.
    fn output_kernel(&self) -> Result<(ProductKernel, usize, usize), PlanError> {
        let Sizes { experts, top_k, width, .. } = self.sizes;
        let (tokens, reduces) = (self.sizes.all_tokens(), self.regime == Regime::GroupedReduce);
        let rows = if reduces { (tokens * top_k).div_ceil(experts) } else { tokens };
        let columns = if reduces { width * experts } else { width };
        let inner = experts.min(tokens * top_k) * self.sizes.columns();
        let parts = if reduces { 1 } else { output_parts(inner) };
        let row_tiles = |kernel: &ProductKernel| self.row_tiles(kernel, reduces);
        let tiles = |kernel: &ProductKernel| product(&[row_tiles(kernel), width.div_ceil(kernel.columns)]);
        if let Some(kernel) = self.choice.persistent(rows, tiles).filter(|_| self.has_near_runs()) {
            return Ok((kernel, row_tiles(&kernel), 1));
        }
        let work = Work { rows, columns, parts, routes: false, output: true };
        let kernel = self.choice.product(work, |kernel| kernel.output_bytes(self.choice.element))?;
        let row_tiles = row_tiles(&kernel);
        if reduces {
            return Ok((kernel, row_tiles, 1));
        }
        let splits = self.choice.output_splits(row_tiles * width.div_ceil(kernel.columns), inner);
        Ok((kernel, row_tiles, splits))
    }

    /// The output projection, and the sum over slots where it computes them apart.
    pub(super) fn push_output(&mut self) -> Result<(), PlanError> {
        let (kernel, row_tiles, splits) = self.output_kernel()?;
        let Sizes { top_k, width, .. } = self.sizes;
        let (tokens, reduces) = (self.sizes.all_tokens(), self.regime == Regime::GroupedReduce);
        let element = self.choice.element;
        if reduces {
            self.base.partial_rows = self.arena.take(tokens * top_k * width * element.bytes());
        } else if splits > 1 {
            self.base.partial_rows = self.arena.take(splits * tokens * width * 4);
        }
        let tickets = match self.base.tickets {
            Buffer::Workspace(start) => Buffer::Workspace(start + self.tickets[0] * 4),
            other => other,
        };
        let columns = width.div_ceil(kernel.columns);
        let parameters = Parameters {
            row_mode: if reduces { RowMode::Listed } else { RowMode::Chosen }.number(),
            row_tiles: int(row_tiles),
            output_tiles: int(columns),
            output_splits: int(splits),
            tickets: if splits > 1 { tickets } else { Buffer::Null },
            ..self.base
        };
        let (tiles, shared) = (product(&[row_tiles, columns, splits]), kernel.output_bytes(element));
        if kernel.stays() {
            self.push_staying(&kernel, "output", tiles, shared, parameters)?;
        } else {
            self.push(kernel.symbol("output"), tiles, kernel.threads(), shared, parameters)?;
        }
        if reduces {
            let runs = tokens * width.div_ceil(16 / element.bytes());
            self.push(SUM_SLOTS.to_owned(), runs.div_ceil(SUM_THREADS), SUM_THREADS, 0, self.base)?;
        }
        Ok(())
    }

    /// Adds a launch.
    pub(super) fn push(
        &mut self,
        kernel: String,
        blocks: usize,
        threads: usize,
        shared: usize,
        parameters: Parameters,
    ) -> Result<(), PlanError> {
        let limit = INT;
        let grid = u32::try_from(blocks).ok().filter(|_| blocks <= limit);
        let grid = grid.ok_or(PlanError::Limit { name: "blocks", limit, found: blocks })?;
        let narrow = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        self.launches.push(Launch {
            element: self.choice.element,
            kernel,
            grid,
            block: narrow(threads),
            shared_bytes: narrow(shared),
            overlap: !self.launches.is_empty() && self.choice.overlaps(self.sizes.all_tokens(), self.regime),
            parameters,
        });
        Ok(())
    }

    /// Takes the kernel of the last launch from the module of f32.
    pub(super) fn compute_in_f32(&mut self) {
        if let Some(launch) = self.launches.last_mut() {
            launch.element = Element::F32;
        }
    }

    /// The finished plan.
    pub(super) fn finish(self) -> Plan {
        Plan { launches: self.launches, workspace_bytes: self.arena.bytes(), regime: self.regime }
    }
}
