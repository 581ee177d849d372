//! The kernels that are compiled, and what each needs.
//!
//! The sources of the modules (`kernels/f32.cu`, `f16.cu`, `bf16.cu`) are made from this table; a test compares them.

use std::fmt::Write;

use moa_schema::AttentionMode;

use crate::constants::{LIST_THREADS, SUM_THREADS};
use crate::{Device, Element, Options};

/// What multiplies small matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Tensor cores on 16-bit elements, by `mma.m16n8k16`.
    Tensor,
    /// Tensor cores of compute capability 7.5 on binary16, by `mma.m16n8k8`.
    Turing,
    /// Tensor cores of compute capability 7.0 on binary16, by `mma.m8n8k4`.
    Volta,
    /// Tensor cores of compute capability 9.0 on 16-bit elements, by `wgmma`: large products alone.
    Wgmma,
    /// Tensor cores on f32 elements that are rounded to TF32.
    Tf32,
    /// Fused multiply-add in f32.
    Plain,
}

impl Engine {
    /// The fastest engine of a device for an element type.
    pub(crate) fn of(element: Element, device: &Device, options: Options) -> Self {
        let (before_7_5, before_8_0) = (device.compute_capability < (7, 5), device.compute_capability < (8, 0));
        match element {
            Element::F16 if before_7_5 => Self::Volta,
            Element::F16 if before_8_0 => Self::Turing,
            Element::F16 => Self::Tensor,
            Element::Bf16 if !before_8_0 => Self::Tensor,
            Element::F32 if options.tf32 && !before_8_0 => Self::Tf32,
            Element::Bf16 | Element::F32 => Self::Plain,
        }
    }

    /// Whether the module of `element` holds kernels of this engine for a device.
    pub(crate) fn exists(self, element: Element, device: &Device) -> bool {
        let best = Self::of(element, device, Options { tf32: true, wgmma: true });
        match self {
            Self::Wgmma => element != Element::F32 && device.compute_capability == (9, 0),
            Self::Plain => self == best || element == Element::F32,
            _ => self == best,
        }
    }

    /// Engines of a module.
    fn all(element: Element) -> &'static [Self] {
        match element {
            Element::F32 => &[Self::Tf32, Self::Plain],
            Element::F16 => &[Self::Tensor, Self::Wgmma, Self::Turing, Self::Volta],
            Element::Bf16 => &[Self::Tensor, Self::Wgmma, Self::Plain],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Turing => "turing",
            Self::Volta => "volta",
            Self::Wgmma => "wgmma",
            Self::Tf32 => "tf32",
            Self::Plain => "plain",
        }
    }

    fn c_type(self, element: Element) -> &'static str {
        match (self, element) {
            (Self::Tensor, Element::Bf16) => "TensorCores<bfloat16>",
            (Self::Tensor, _) => "TensorCores<binary16>",
            (Self::Turing, _) => "TensorCores<binary16, true>",
            (Self::Volta, _) => "VoltaCores",
            (Self::Wgmma, Element::Bf16) => "bfloat16",
            (Self::Wgmma, _) => "binary16",
            (Self::Tf32, _) => "Tf32Cores",
            (Self::Plain, Element::Bf16) => "PlainUnits<bfloat16>",
            (Self::Plain, _) => "PlainUnits<float>",
        }
    }

    /// The condition of the preprocessor under which a module holds this engine.
    fn c_condition(self, element: Element) -> &'static str {
        match (self, element) {
            (Self::Tensor, _) => "HAS_TENSOR_CORES_16",
            (Self::Turing, _) => "HAS_TURING_CORES",
            (Self::Volta, _) => "HAS_VOLTA_CORES",
            (Self::Wgmma, _) => "HAS_WARPGROUP_PRODUCTS",
            (Self::Tf32, _) => "HAS_TENSOR_CORES_TF32",
            (Self::Plain, Element::Bf16) => "NEEDS_PLAIN_UNITS_BF16",
            (Self::Plain, _) => "1",
        }
    }

    /// Elements that pad a row of a left factor, and a row of a right one.
    fn padding(self, element: Element) -> [usize; 2] {
        match self {
            Self::Tensor | Self::Turing | Self::Volta => [8, 8],
            Self::Wgmma => [0, 0],
            Self::Tf32 => [4, 8],
            Self::Plain => [16 / element.bytes(); 2],
        }
    }

    /// Stages of a product: where loads wait in registers, one is computed while another is loaded. Tiles of few rows
    /// or columns, which wait for weights, load more of them.
    fn stages(self, rows: usize, columns: usize) -> usize {
        match self {
            Self::Turing | Self::Volta => 2,
            Self::Wgmma if (rows, columns) == (128, 128) => 3,
            Self::Wgmma => 4,
            Self::Tensor if rows.max(columns) == 16 => 5,
            Self::Tensor if rows.min(columns) == 16 => 6,
            Self::Tensor | Self::Tf32 | Self::Plain => 4,
        }
    }
}

/// A kernel of the families `project` and `output`: one tile of a matrix product a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProductKernel {
    pub(crate) engine: Engine,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Inner indices of a stage.
    depth: usize,
    /// Warps along rows, columns and depth.
    warps: [usize; 3],
    stages: usize,
    /// Blocks of one multiprocessor that registers must allow.
    blocks: usize,
}

/// Bytes behind a tile of the output projection: a ticket and the visited experts.
const VISITED_BYTES: usize = MAX_EXPERTS * 3 + 16;

/// Columns of the tiles whose blocks stay.
const PERSISTENT_COLUMNS: usize = 256;

/// Experts that the kernels take.
pub(crate) const MAX_EXPERTS: usize = 256;

/// Experts per token that the kernels take.
pub(crate) const MAX_TOP_K: usize = 128;

/// Head width that the kernels take.
pub(crate) const MAX_HEAD: usize = 256;

impl ProductKernel {
    /// Kernels of an engine: of 16 rows, of 64, each narrow and wide, and of 128; of warpgroups, of 64 and 128.
    pub(crate) fn all(engine: Engine) -> Vec<Self> {
        let deep = if matches!(engine, Engine::Tf32 | Engine::Plain) { 1 } else { 2 };
        let kernel = |rows, columns, depth: usize, warps, blocks| Self {
            engine,
            rows,
            columns,
            depth: depth * deep,
            warps,
            stages: engine.stages(rows, columns),
            blocks,
        };
        if engine == Engine::Wgmma {
            return [64, 128].map(|rows| kernel(rows, 128, 32, [rows / 16, 1, 1], 2)).to_vec();
        }
        let mut all = vec![
            kernel(16, 16, 64, [1, 1, 8], 2),
            kernel(16, 64, 32, [1, 1, 4], 2),
            kernel(64, 16, 32, [1, 1, 4], 2),
            kernel(64, 64, 32, [2, 2, 1], 3),
        ];
        // The sums of so large a tile are more than 7.5 has room for.
        if engine != Engine::Turing {
            let blocks = if matches!(engine, Engine::Tensor | Engine::Tf32) { 2 } else { 1 };
            all.push(kernel(128, 128, 16, [2, 4, 1], blocks));
        }
        all
    }

    /// The kernel of an engine whose blocks compute tile after tile.
    pub(crate) fn persistent(engine: Engine) -> Option<Self> {
        let (rows, columns) = (128, PERSISTENT_COLUMNS);
        let stages = engine.stages(rows, columns);
        (engine == Engine::Wgmma).then_some(Self {
            engine,
            rows,
            columns,
            depth: 64,
            warps: [8, 1, 1],
            stages,
            blocks: 1,
        })
    }

    /// Whether a block computes tile after tile.
    pub(crate) fn stays(&self) -> bool {
        self.columns == PERSISTENT_COLUMNS
    }

    /// Threads of a block: beside those that multiply, one warpgroup copies for them.
    pub(crate) fn threads(&self) -> usize {
        32 * self.warps.iter().product::<usize>() + if self.stays() { 128 } else { 0 }
    }

    /// Bytes of shared memory that the tile takes.
    fn tile_bytes(&self, element: Element) -> usize {
        if self.stays() {
            let stage = (self.rows + self.columns) * self.depth * element.bytes();
            let lists = (4 * (MAX_EXPERTS + 1)).next_multiple_of(8);
            return self.stages * (stage + 2 * 8) + lists;
        }
        let [left, right] = self.engine.padding(element);
        let stage = self.rows * (self.depth + left) + self.depth * (self.columns + right);
        let sums = self.warps[2] * self.rows * (self.columns + 4) * 4;
        (self.stages * stage * element.bytes()).max(sums)
    }

    /// Bytes of shared memory of a `project` launch whose router needs `route_bytes`.
    pub(crate) fn project_bytes(&self, element: Element, route_bytes: usize) -> usize {
        self.tile_bytes(element).max(route_bytes)
    }

    /// Bytes of shared memory of an `output` launch.
    pub(crate) fn output_bytes(&self, element: Element) -> usize {
        self.tile_bytes(element) + if self.stays() { 0 } else { 16 + VISITED_BYTES }
    }

    /// Symbol in a family, `project` or `output`.
    pub(crate) fn symbol(&self, family: &str) -> String {
        format!("moa_{family}_{}_{}x{}", self.engine.name(), self.rows, self.columns)
    }

    fn c_type(&self, element: Element) -> String {
        let Self { engine, rows, columns, depth, warps: [a, b, c], stages, .. } = self;
        if *engine == Engine::Wgmma {
            let kind = if self.stays() { "PersistentTile" } else { "WarpgroupTile" };
            return format!("{kind}<{}, {rows}, {columns}, {stages}>", engine.c_type(element));
        }
        format!("Tile<{}, {rows}, {columns}, {depth}, {a}, {b}, {c}, {stages}>", engine.c_type(element))
    }

    fn write(&self, element: Element, text: &mut String) {
        let (tile, threads) = (self.c_type(element), self.threads());
        for family in ["project", "output"] {
            let (symbol, blocks) = (self.symbol(family), self.blocks);
            let function = if self.stays() { format!("{family}_tiles") } else { family.to_owned() };
            let _ = writeln!(text, "KERNEL({symbol}, {threads}, {blocks}, {function}<{tile}>(p))");
        }
        let bytes = self.tile_bytes(element);
        let _ = writeln!(text, "static_assert({tile}::SHARED_BYTES == {bytes}, \"as the planner has it\");");
    }
}

/// A kernel of the family `attend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttendKernel {
    engine: Engine,
    /// Head width that it takes at most.
    pub(crate) head: usize,
    row_warps: usize,
    key_warps: usize,
    /// Keys of a tile.
    pub(crate) keys: usize,
    mode: AttentionMode,
}

impl AttendKernel {
    /// Kernels of an engine for the softmax: by head width, the tall one first.
    pub(crate) fn all(engine: Engine) -> Vec<Self> {
        // Warps along rows, warps along keys, keys of a tile.
        let table: &[(usize, usize, usize)] = match engine {
            Engine::Wgmma => &[(8, 1, 128), (8, 1, 128), (8, 1, 64)],
            Engine::Tensor => &[(4, 1, 64), (1, 4, 64), (4, 1, 64), (1, 4, 64), (4, 1, 32), (1, 4, 64)],
            // 7.5 has 64 KiB of shared memory.
            Engine::Turing => &[(4, 1, 64), (1, 4, 64), (4, 1, 64), (1, 4, 64), (2, 1, 32), (1, 2, 32)],
            // Two blocks of most kernels share the 96 KiB of 7.0.
            Engine::Volta => &[(4, 1, 64), (1, 4, 64), (4, 1, 32), (1, 4, 64), (4, 1, 16), (1, 2, 32)],
            Engine::Tf32 => &[(4, 1, 64), (1, 4, 32), (4, 1, 32), (1, 4, 32), (2, 1, 16), (1, 2, 16)],
            Engine::Plain => &[(4, 1, 32), (1, 4, 32), (2, 1, 32), (1, 4, 32), (2, 1, 16), (1, 2, 16)],
        };
        let heads = [64, 128, MAX_HEAD].into_iter().flat_map(|head| std::iter::repeat_n(head, table.len() / 3));
        let mode = AttentionMode::Softmax;
        let kernel = |(head, &(row_warps, key_warps, keys))| Self { engine, head, row_warps, key_warps, keys, mode };
        heads.zip(table).map(kernel).collect()
    }

    /// The same tile for another mode of attention, which kernels of warpgroups do not have.
    pub(crate) fn of(self, mode: AttentionMode) -> Self {
        Self { mode, ..self }
    }

    /// Kernels of an engine, for every mode that it has.
    fn of_all_modes(engine: Engine) -> Vec<Self> {
        let modes = if engine == Engine::Wgmma { &AttentionMode::ALL[..1] } else { &AttentionMode::ALL[..] };
        modes.iter().flat_map(|mode| Self::all(engine).into_iter().map(|kernel| kernel.of(*mode))).collect()
    }

    fn breaks_sticks(&self) -> bool {
        self.mode == AttentionMode::StickBreaking
    }

    /// Rows of a tile.
    pub(crate) fn rows(&self) -> usize {
        16 * self.row_warps
    }

    /// Whether blocks may cut the keys of a tile.
    pub(crate) fn cuts_keys(&self) -> bool {
        self.key_warps > 1
    }

    /// Threads of a block: beside those that multiply, one warpgroup copies for them.
    pub(crate) fn threads(&self) -> usize {
        32 * self.row_warps * self.key_warps + if self.stays() { 128 } else { 0 }
    }

    /// Whether a block computes tile after tile, so that no more of them than run at one time are worth launching.
    pub(crate) fn stays(&self) -> bool {
        self.engine == Engine::Wgmma
    }

    /// Blocks of one multiprocessor that registers must allow where its shared memory does: with one row of tiles,
    /// bytes on their way are everything.
    fn blocks(&self) -> usize {
        let waits = self.engine == Engine::Tensor && self.cuts_keys() && self.head < MAX_HEAD;
        if waits && !self.breaks_sticks() { 3 } else { 1 }
    }

    /// Bytes of shared memory.
    pub(crate) fn shared_bytes(&self, element: Element) -> usize {
        let [pad, value_pad] = self.engine.padding(element);
        let queries = self.rows() * (self.head + pad) * element.bytes();
        let tile = self.keys * (2 * self.head + pad + value_pad) * element.bytes();
        if self.engine == Engine::Wgmma {
            // Tiles of queries, and of keys and of values.
            let (query_stages, stages) = match self.head {
                0..=64 => (1, 4),
                65..=128 => (2, 2),
                _ => (1, 2),
            };
            return query_stages * (queries + 16) + stages * (tile + 4 * 8 + 4 + self.keys / 8) + 3 * 8;
        }
        let merge = if self.cuts_keys() { self.key_warps * self.rows() * (self.head + 4) * 4 } else { 0 };
        let warps = self.row_warps * self.key_warps;
        let scratch = if self.engine == Engine::Plain { warps * 16 * (self.keys / self.key_warps + 4) * 4 } else { 0 };
        let left = if self.breaks_sticks() && self.cuts_keys() { self.key_warps * self.rows() * 4 } else { 0 };
        queries + tile.max(merge) + scratch + left + 16
    }

    /// Symbol.
    pub(crate) fn symbol(&self) -> String {
        let mode = if self.breaks_sticks() { "_sticks" } else { "" };
        format!("moa_attend_{}{mode}_d{}_r{}", self.engine.name(), self.head, self.rows())
    }

    fn write(&self, element: Element, text: &mut String) {
        let Self { engine, head, row_warps, key_warps, keys, .. } = self;
        let sticks = if self.breaks_sticks() { ", true" } else { "" };
        let engine_type = engine.c_type(element);
        let (family, kind) = match engine {
            Engine::Wgmma => ("attend_warpgroups", format!("WarpgroupAttention<{engine_type}, {head}>")),
            _ => ("attend", format!("Attention<{engine_type}, {head}, {row_warps}, {key_warps}, {keys}{sticks}>")),
        };
        let (symbol, threads, blocks) = (self.symbol(), self.threads(), self.blocks());
        let bytes = self.shared_bytes(element);
        let blocks = if blocks > 1 { format!("BLOCKS({blocks}, {bytes})") } else { blocks.to_string() };
        let _ = writeln!(text, "KERNEL({symbol}, {threads}, {blocks}, {family}<{kind}>(p))");
        let _ = writeln!(text, "static_assert({kind}::SHARED_BYTES == {bytes}, \"as the planner has it\");");
    }
}

/// The kernel that routes many tokens.
pub(crate) mod route {
    /// Symbol.
    pub(crate) const SYMBOL: &str = "moa_route_tokens";

    /// Threads of a block, of which each warp takes so many tokens together with others.
    pub(crate) const THREADS: usize = 256;
    const ROWS: usize = 32;

    /// Experts that it takes.
    pub(crate) const MAX_EXPERTS: usize = 64;

    /// Bytes of weights that shared memory holds at a time, and of those of 64 inner indices and 8 experts.
    const SLICE_BYTES: usize = 96 << 10;
    const CHUNK_BYTES: usize = 64 * 8 * 3 * 2;

    /// Tokens of a block whose warps share tokens by `splits`.
    pub(crate) fn tokens(splits: usize) -> usize {
        THREADS / 32 / splits * ROWS
    }

    /// Bytes of shared memory: scores, and one after the other weights, sums and choices.
    pub(crate) fn shared_bytes(splits: usize, width: usize, experts: usize, top_k: usize) -> usize {
        let (tokens, blocks) = (tokens(splits), experts.div_ceil(8).next_power_of_two());
        let columns = blocks.min(4);
        let weights = width.div_ceil(64).saturating_mul(columns * CHUNK_BYTES).min(SLICE_BYTES);
        let sums = splits * tokens * experts.max(columns * 8 + 4) * 4;
        let choices = tokens * (experts + 2 * 4 * top_k);
        tokens * (8 * blocks + 4) * 4 + weights.max(sums).max(choices)
    }
}

/// Symbol of the kernel that lists the pairs of each expert.
pub(crate) const LIST_PAIRS: &str = "moa_list_pairs";

/// Symbol of the kernel that sums the slots of each token.
pub(crate) const SUM_SLOTS: &str = "moa_sum_slots";

/// Entry points of a module in machine code for devices of this compute capability; sorted. PTX lacks those of
/// warpgroup products (`_wgmma_`).
pub fn entry_points(element: Element, compute_capability: (u32, u32)) -> Vec<String> {
    let device = Device { compute_capability, multiprocessors: 1, shared_bytes_per_block: 0 };
    let mut names = vec![LIST_PAIRS.to_owned(), SUM_SLOTS.to_owned()];
    for engine in Engine::all(element).iter().filter(|engine| engine.exists(element, &device)) {
        for kernel in ProductKernel::all(*engine).into_iter().chain(ProductKernel::persistent(*engine)) {
            names.extend(["project", "output"].map(|family| kernel.symbol(family)));
        }
        names.extend(AttendKernel::of_all_modes(*engine).iter().map(AttendKernel::symbol));
        names.extend((*engine == Engine::Tensor).then(|| route::SYMBOL.to_owned()));
    }
    names.sort();
    names
}

/// The text of `kernels/{module}.cu`.
pub fn module_source(element: Element) -> String {
    let c_element = match element {
        Element::F32 => "float",
        Element::F16 => "binary16",
        Element::Bf16 => "bfloat16",
    };
    let mut text = String::from("// Made from src/catalog.rs; a test compares the two.\n");
    let _ = writeln!(text, "#define MODULE \"{}\"\n", element.module());
    for header in [
        "parameters",
        "attend",
        "lists",
        "output",
        "project",
        "volta",
        "warpgroup",
        "attend_warpgroup",
        "persistent_layer",
        "route_tokens",
    ] {
        let _ = writeln!(text, "#include \"{header}.cuh\"");
    }
    let _ = writeln!(text, "\nKERNEL({LIST_PAIRS}, {LIST_THREADS}, 1, list_pairs(p))");
    let _ = writeln!(text, "KERNEL({SUM_SLOTS}, {SUM_THREADS}, 1, sum_slots<{c_element}>(p))");
    for engine in Engine::all(element) {
        let _ = writeln!(text, "\n#if {}", engine.c_condition(element));
        let products = ProductKernel::all(*engine).into_iter().chain(ProductKernel::persistent(*engine));
        products.for_each(|kernel| kernel.write(element, &mut text));
        AttendKernel::of_all_modes(*engine).iter().for_each(|kernel| kernel.write(element, &mut text));
        if *engine == Engine::Tensor {
            let _ = writeln!(text, "KERNEL({}, {}, 1, route_many<{c_element}>(p))", route::SYMBOL, route::THREADS);
        }
        text.push_str("#endif\n");
    }
    text
}
