//! Plans of any shape: they fit the device, their tiles cover every element once, and their memory does not overlap.

#![allow(clippy::unwrap_used, clippy::panic)]

use moa_cuda::plan::{self, Launch, Plan, PlanError, Regime, SelfAttentionSettings};
use moa_cuda::{Buffer, Device, Element, MAX_SPLITS, Options, RowMode, WORKSPACE_ALIGNMENT, entry_points};
use moa_schema::{
    Activation, AttentionMode, CrossAttentionAttributes, CrossAttentionDims, FeedForwardAttributes, FeedForwardDims,
    GateMode, SelfAttentionAttributes, SelfAttentionDims, feed_forward, self_attention,
};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy)]
struct Shape {
    batch: usize,
    tokens: usize,
    past: usize,
    width: usize,
    experts: usize,
    top_k: usize,
    kv_heads: usize,
    head: usize,
    hidden: usize,
    rotary: bool,
    gated: bool,
    returns_cache: bool,
    /// Rows to spare of caches that are updated in place.
    room: Option<usize>,
    wgmma: bool,
    /// Columns of `router_input`.
    router: Option<usize>,
    /// Whether keys and values are the hidden states, which are as wide then.
    keeps_hidden: bool,
    sticks: bool,
}

/// A layer of floats with nothing special about it, for tests that say what is.
const PLAIN: Shape = Shape {
    batch: 1,
    tokens: 3,
    past: 0,
    width: 8,
    experts: 4,
    top_k: 2,
    kv_heads: 1,
    head: 8,
    hidden: 8,
    rotary: false,
    gated: false,
    returns_cache: false,
    room: None,
    wgmma: false,
    router: None,
    keeps_hidden: false,
    sticks: false,
};

#[derive(Debug, Clone, Copy)]
enum Operator {
    SelfAttention,
    CrossAttention,
    FeedForward,
}

/// Small and large values of a size.
fn size(limit: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1..=limit.min(9), 1..=limit.min(300), 1..=limit]
}

prop_compose! {
    fn shapes()(
        batch in size(300), tokens in size(5000), past in prop_oneof![Just(0), size(100_000)],
        width in prop_oneof![size(9000), (1..=64_usize).prop_map(|lines| 64 * lines)],
        experts in size(256), share in 0.0..1.0_f64, kv_heads in size(32),
        head in prop_oneof![size(256), (1..=4_usize).prop_map(|lines| 64 * lines)], hidden in size(20_000),
        rotary in any::<bool>(), gated in any::<bool>(), returns_cache in any::<bool>(),
        room in prop::option::of(0..5000_usize), wgmma in any::<bool>(),
        router in prop::option::of(size(9000)), keeps_hidden in any::<bool>(), sticks in any::<bool>(),
    ) -> Shape {
        let top_k = 1 + (share * experts.min(128) as f64) as usize;
        let top_k = top_k.min(experts).min(128);
        let rotary = rotary && head % 2 == 0;
        let width = if keeps_hidden { kv_heads * head } else { width };
        Shape {
            batch, tokens, past, width, experts, top_k, kv_heads, head, hidden, rotary, gated, returns_cache, room, wgmma,
            router, keeps_hidden, sticks,
        }
    }
}

fn devices() -> impl Strategy<Value = Device> {
    let kinds = [
        ((7, 0), 98_304),
        ((7, 5), 65_536),
        ((8, 0), 166_912),
        ((8, 6), 101_376),
        ((9, 0), 232_448),
        ((12, 0), 101_376),
    ];
    (prop::sample::select(kinds.to_vec()), 1..=200_u32).prop_map(|((compute_capability, shared), multiprocessors)| {
        Device { compute_capability, multiprocessors, shared_bytes_per_block: shared }
    })
}

fn elements() -> impl Strategy<Value = Element> {
    prop::sample::select(Element::ALL.to_vec())
}

fn operators() -> impl Strategy<Value = Operator> {
    prop::sample::select(vec![Operator::SelfAttention, Operator::CrossAttention, Operator::FeedForward])
}

fn plan_of(operator: Operator, shape: &Shape, element: Element, device: &Device) -> Result<Plan, PlanError> {
    let Shape { batch, tokens, past, width, experts, top_k, kv_heads, head, hidden, .. } = *shape;
    let (scale, gate_mode, skip_padded_queries) = (1.0, GateMode::SoftmaxTopk, true);
    let options = Options { tf32: shape.gated, wgmma: shape.wgmma };
    match operator {
        Operator::SelfAttention => {
            let dims = SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head };
            let attributes = SelfAttentionAttributes {
                top_k,
                kv_num_heads: kv_heads,
                causal: true,
                scale,
                gate_mode,
                skip_padded_queries,
                attention_mode: if shape.sticks { AttentionMode::StickBreaking } else { AttentionMode::Softmax },
            };
            let settings = SelfAttentionSettings {
                rotary_positions: shape.rotary.then_some(past + tokens),
                router_width: shape.router,
                keeps_hidden: shape.keeps_hidden,
                capacity: shape.room.map(|rows| past + tokens + rows),
                returns_keys: shape.returns_cache,
                returns_values: shape.returns_cache,
            };
            plan::self_attention(&dims, &attributes, &settings, element, device, options)
        }
        Operator::CrossAttention => {
            let dims = CrossAttentionDims { batch, tokens, keys: past + 1, width, experts, top_k, kv_heads, head };
            let attributes =
                CrossAttentionAttributes { top_k, kv_num_heads: kv_heads, scale, gate_mode, skip_padded_queries };
            plan::cross_attention(&dims, &attributes, element, device, options)
        }
        Operator::FeedForward => {
            let dims = FeedForwardDims { batch, tokens, width, experts, top_k, hidden };
            let attributes =
                FeedForwardAttributes { top_k, gate_mode, activation: Activation::Silu, gated: shape.gated };
            plan::feed_forward(&dims, &attributes, shape.router, element, device, options)
        }
    }
}

fn wide(value: i32) -> usize {
    usize::try_from(value).unwrap()
}

/// Rows and columns of a product's tile, from its symbol.
fn tile_of(launch: &Launch) -> (usize, usize) {
    let (rows, columns) = launch.kernel.rsplit_once('_').unwrap().1.split_once('x').unwrap();
    (rows.parse().unwrap(), columns.parse().unwrap())
}

/// `tiles` tiles of `step` cover `extent`, and none of them is empty.
fn assert_cover(what: &str, tiles: usize, step: usize, extent: usize) {
    assert!(tiles * step >= extent && (tiles * step < extent + step), "{what}: {tiles} tiles of {step} for {extent}");
}

/// Whether blocks of a launch compute tile after tile.
fn stays(launch: &Launch) -> bool {
    ["_attend_wgmma_", "_wgmma_128x256"].iter().any(|part| launch.kernel.contains(part))
}

/// Blocks of a launch that has so many `tiles`.
fn assert_grid(launch: &Launch, tiles: usize, device: &Device) {
    let at_one_time = if stays(launch) { device.multiprocessors.max(1) as usize } else { usize::MAX };
    assert_eq!(launch.grid as usize, tiles.min(at_one_time), "{}", launch.kernel);
}

/// Tiles of blocks that stay cover the columns of all experts, or of one where rows are listed, and of keys and values,
/// which share theirs unless heads are rotated.
fn check_staying_project(launch: &Launch, shape: &Shape, device: &Device) {
    let p = &launch.parameters;
    let (rows, columns) = tile_of(launch);
    let tokens = shape.batch * shape.tokens;
    let (listed, rotates) = (p.row_mode == RowMode::Listed.number(), p.rotary_positions > 0);
    assert_eq!((wide(p.head) % 64, p.copy_blocks, p.route_blocks, p.activation), (0, 0, 0, -1));
    assert!(!rotates || p.head == 128);
    let matrices = if listed { 1 } else { shape.experts };
    assert!(
        i32::try_from(matrices * shape.width * wide(p.columns)).is_ok(),
        "columns are counted from the first matrix"
    );
    assert_cover("columns of experts", wide(p.input_tiles), columns, matrices * wide(p.columns));
    let pairs = tokens * shape.top_k;
    let row_tiles = if listed { (pairs + shape.experts * (rows - 1)) / rows } else { tokens.div_ceil(rows) };
    assert_eq!(wide(p.row_tiles), row_tiles);
    if p.kv_weight != Buffer::Null {
        let together = if rotates { 1 } else { 2 };
        assert_cover("keys", wide(p.key_tiles), columns, together * wide(p.columns));
        assert_eq!(p.value_tiles, if rotates { p.key_tiles } else { 0 });
        assert_cover("tokens", wide(p.kv_row_tiles), rows, tokens);
    }
    let cache_tiles = wide(p.kv_row_tiles) * (wide(p.key_tiles) + wide(p.value_tiles));
    assert_grid(launch, row_tiles * wide(p.input_tiles) + cache_tiles, device);
}

/// Blocks of the roles of a `project` launch add up to its grid, and their tiles cover their matrices.
fn check_project(launch: &Launch, shape: &Shape, regime: Regime) {
    let p = &launch.parameters;
    let (rows, columns) = tile_of(launch);
    let tokens = shape.batch * shape.tokens;
    let listed = p.row_mode == RowMode::Listed.number();
    let experts = wide(p.row_tiles) * wide(p.input_tiles) * if listed { 1 } else { shape.experts };
    let appended = wide(p.kv_row_tiles) * (wide(p.key_tiles) + wide(p.value_tiles));
    let blocks = wide(p.route_blocks) + experts + appended + wide(p.copy_blocks);
    assert_eq!(launch.grid as usize, blocks, "roles of the grid");
    assert_eq!(listed, matches!(regime, Regime::Grouped | Regime::GroupedReduce));
    let warps = launch.block as usize / 32;
    assert!(warps.is_multiple_of(wide(p.route_splits)));
    if p.route_blocks > 0 {
        assert_cover("router", wide(p.route_blocks), warps / wide(p.route_splits) * 4, tokens);
    }
    if p.row_mode == RowMode::Routed.number() {
        assert!(tokens <= warps / wide(p.route_splits) * 4, "a block routes every token");
    }
    if p.row_tiles > 0 {
        if listed {
            // The most tiles that lists of this many pairs can have: all but full tiles in each expert.
            let pairs = tokens * shape.top_k;
            let most = (pairs + shape.experts * (rows - 1)) / rows;
            assert!(wide(p.row_tiles) >= most, "{} row tiles for {most}", p.row_tiles);
        } else {
            assert_cover("rows", wide(p.row_tiles), rows, tokens);
        }
        if p.rotary_positions == 0 && p.gated == 0 {
            assert_cover("columns", wide(p.input_tiles), columns, wide(p.columns));
        } else if p.gated != 0 {
            assert_cover("columns", wide(p.input_tiles), columns / 2, wide(p.columns));
        } else {
            let heads = shape.kv_heads;
            assert!(wide(p.input_tiles).is_multiple_of(heads));
            assert_cover("columns", wide(p.input_tiles) / heads, columns / 2, shape.head / 2);
        }
    }
    if p.kv_row_tiles > 0 {
        assert_cover("new keys", wide(p.kv_row_tiles), rows, tokens);
        assert_cover("values", wide(p.value_tiles), columns, wide(p.columns));
    }
}

fn check_output(launch: &Launch, shape: &Shape, device: &Device) {
    let p = &launch.parameters;
    let (rows, columns) = tile_of(launch);
    let tokens = shape.batch * shape.tokens;
    assert_grid(launch, wide(p.row_tiles) * wide(p.output_tiles) * wide(p.output_splits), device);
    assert_cover("output columns", wide(p.output_tiles), columns, shape.width);
    if p.row_mode == RowMode::Chosen.number() {
        assert_cover("output rows", wide(p.row_tiles), rows, tokens);
        assert!(p.output_splits == 1 || p.tickets != Buffer::Null);
    } else {
        assert!(wide(p.row_tiles) >= (tokens * shape.top_k + shape.experts * (rows - 1)) / rows);
    }
}

fn check_attend(launch: &Launch, shape: &Shape, device: &Device) {
    let p = &launch.parameters;
    let rows: usize = launch.kernel.rsplit_once("_r").unwrap().1.parse().unwrap();
    let head: usize = launch.kernel.split_once("_d").unwrap().1.split_once('_').unwrap().0.parse().unwrap();
    assert!(head >= shape.head);
    assert_cover("queries", wide(p.query_tiles), rows, shape.tokens * shape.top_k);
    let blocks = wide(p.query_tiles) * shape.batch * shape.kv_heads * wide(p.key_splits);
    assert_grid(launch, blocks, device);
    assert!(p.key_splits <= MAX_SPLITS as i32, "{} parts of keys", p.key_splits);
    assert!(p.key_splits == 1 || (rows == 16 && p.tickets != Buffer::Null), "only short tiles cut keys");
}

/// Bytes that a launch may touch behind a pointer into the workspace.
fn pieces(plan: &Plan, launch: &Launch, element: Element) -> Vec<(&'static str, usize, usize)> {
    let p = &launch.parameters;
    let bytes = element.bytes();
    let tokens = wide(p.batch) * wide(p.tokens);
    let (pairs, w) = (tokens * wide(p.top_k), wide(p.columns));
    let row_slots = if p.row_mode == RowMode::All.number() || p.row_mode == RowMode::Routed.number() {
        wide(p.experts)
    } else {
        wide(p.top_k)
    };
    let attend_rows = if launch.kernel.contains("attend") { wide(p.query_tiles) * 16 } else { 0 };
    let partial_rows = match (plan.regime, p.output_splits) {
        (Regime::GroupedReduce, _) => pairs * wide(p.width) * bytes,
        (_, 1) => 0,
        (_, splits) => wide(splits) * tokens * wide(p.width) * 4,
    };
    let attended = pairs * w * bytes;
    let cache = |rows: i32| wide(p.batch) * wide(p.kv_heads) * wide(rows) * wide(p.head) * bytes;
    let size = |name: &str| match name {
        "slots" => wide(p.experts) * tokens,
        "pair_experts" | "pair_gates" => pairs * 4,
        "expert_pairs" => wide(p.experts) * tokens * 4,
        "expert_counts" => wide(p.experts) * 4,
        // The output projection sees the slots only, which may lie in the same place.
        "rows" if launch.kernel.contains("output") => 0,
        "rows" => tokens * row_slots * w * bytes,
        "attended" => attended,
        "partial_rows" => partial_rows,
        "partial_attention" => {
            attend_rows * wide(p.batch) * wide(p.kv_heads) * wide(p.key_splits) * (wide(p.head) + 4) * 4
        }
        "key" => cache(p.key_rows),
        "value" => cache(p.value_rows),
        "tickets" => wide(p.tickets_count) * 4,
        other => panic!("{other} is not in the workspace"),
    };
    let pointers = p.pointers().into_iter();
    pointers
        .filter_map(|(name, buffer)| match buffer {
            Buffer::Workspace(start) => Some((name, start, size(name))),
            _ => None,
        })
        .collect()
}

fn check_workspace(plan: &Plan, element: Element) {
    for launch in &plan.launches {
        let mut pieces = pieces(plan, launch, element);
        let in_place =
            [RowMode::Listed, RowMode::Chosen].iter().any(|mode| mode.number() == launch.parameters.row_mode);
        if in_place {
            pieces.retain(|(name, ..)| *name != "rows");
        }
        pieces.retain(|(.., bytes)| *bytes > 0);
        pieces.sort_by_key(|(_, start, _)| *start);
        for (name, start, bytes) in &pieces {
            assert!(start.is_multiple_of(WORKSPACE_ALIGNMENT), "{name} begins at {start}");
            assert!(start + bytes <= plan.workspace_bytes, "{name} leaves the workspace");
        }
        for pair in pieces.windows(2) {
            let [(name, start, bytes), (other, behind, _)] = [pair[0], pair[1]];
            assert!(start + bytes <= behind, "{name} overlaps {other} in {}", launch.kernel);
        }
    }
}

/// Whether a launch is the router that reads an input of its own, alone and in f32.
fn reads_router_input(launch: &Launch) -> bool {
    [self_attention::ROUTER_INPUT, feed_forward::ROUTER_INPUT]
        .map(Buffer::Input)
        .contains(&launch.parameters.hidden_states)
}

fn check(plan: &Plan, shape: &Shape, operator: Operator, element: Element, device: &Device) {
    let has_input = shape.router.is_some() && !matches!(operator, Operator::CrossAttention);
    let copies_hidden = shape.keeps_hidden && matches!(operator, Operator::SelfAttention);
    let copies = plan.launches.iter().any(|launch| launch.parameters.copy_blocks > 0);
    assert!(if copies_hidden { copies } else { !copies || shape.returns_cache });
    let routers = plan.launches.iter().filter(|launch| launch.parameters.route_blocks > 0).count();
    assert_eq!(routers, 1, "one launch routes for all");
    for (index, launch) in plan.launches.iter().enumerate() {
        let first_of_its_own = index == 0 && has_input;
        assert_eq!(reads_router_input(launch), first_of_its_own);
        assert_eq!(launch.element, if first_of_its_own { Element::F32 } else { element });
        let known = entry_points(launch.element, device.compute_capability);
        assert!(known.contains(&launch.kernel), "{} is not compiled for {device:?}", launch.kernel);
        assert!(launch.shared_bytes <= device.shared_bytes_per_block, "{}: shared memory", launch.kernel);
        assert!(launch.grid > 0 && launch.grid <= i32::MAX as u32, "{}: grid", launch.kernel);
        assert!((32..=1024).contains(&launch.block));
        let few = shape.batch * shape.tokens <= 256 && plan.regime != Regime::Sparse;
        let waits = index > 0 && device.compute_capability >= (9, 0) && few;
        assert_eq!(launch.overlap, waits, "the first launch waits for what was there before, and old code for nothing");
        if launch.kernel.contains("project") && stays(launch) {
            check_staying_project(launch, shape, device);
        } else if launch.kernel.contains("project") {
            check_project(launch, shape, plan.regime);
        } else if launch.kernel.contains("output") {
            check_output(launch, shape, device);
        } else if launch.kernel.contains("attend") {
            check_attend(launch, shape, device);
        }
    }
    check_workspace(plan, element);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn plans_cover_their_shapes_and_fit(
        shape in shapes(), device in devices(), element in elements(), operator in operators(),
    ) {
        match plan_of(operator, &shape, element, &device) {
            Ok(plan) => {
                check(&plan, &shape, operator, element, &device);
                prop_assert_eq!(Ok(plan), plan_of(operator, &shape, element, &device));
            }
            // Only products of sizes exceed what kernels count.
            Err(PlanError::Limit { found, limit, .. }) => prop_assert!(found > limit && limit > 1_000_000),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn absurd_sizes_are_refused(
        batch in prop_oneof![1..=4_usize, Just(usize::MAX)], tokens in 1..=usize::MAX, width in 1..=usize::MAX,
        element in elements(), operator in operators(),
    ) {
        let shape = Shape {
            batch, tokens, width, experts: 8, kv_heads: 2, head: 64, hidden: width, gated: true, returns_cache: true,
            wgmma: true, ..PLAIN
        };
        let device = Device { compute_capability: (9, 0), multiprocessors: 132, shared_bytes_per_block: 232_448 };
        if tokens > 1 << 40 || width > 1 << 40 {
            let is_limit = matches!(plan_of(operator, &shape, element, &device), Err(PlanError::Limit { .. }));
            prop_assert!(is_limit, "an absurd size has a plan");
        }
    }
}

#[test]
fn limits_are_named() {
    let shape = PLAIN;
    let device = Device { compute_capability: (8, 0), multiprocessors: 108, shared_bytes_per_block: 166_912 };
    let error = |shape: &Shape, device: &Device| {
        plan_of(Operator::SelfAttention, shape, Element::F16, device).unwrap_err().to_string()
    };
    assert_eq!(
        error(&Shape { head: 257, ..shape }, &device),
        "the CUDA kernels support head width up to 256, found 257"
    );
    assert_eq!(
        error(&Shape { experts: 300, ..shape }, &device),
        "the CUDA kernels support experts up to 256, found 300"
    );
    assert_eq!(
        error(&Shape { experts: 200, top_k: 129, ..shape }, &device),
        "the CUDA kernels support experts per token up to 128, found 129"
    );
    let old = Device { compute_capability: (6, 1), ..device };
    assert_eq!(error(&shape, &old), "the CUDA kernels need compute capability 7.0 or newer, found 6.1");
    let poor = Device { shared_bytes_per_block: 1000, ..device };
    assert_eq!(error(&shape, &poor), "no attention kernel fits 1000 bytes of shared memory");
}

/// The launches that the regimes promise.
#[test]
fn regimes_follow_from_sizes() {
    let device = Device { compute_capability: (9, 0), multiprocessors: 132, shared_bytes_per_block: 232_448 };
    for (tokens, experts, top_k, regime, attention, feed_forward) in [
        (1, 32, 16, Regime::Sparse, 3, 3),
        (1, 8, 8, Regime::Dense, 3, 3),
        (256, 32, 16, Regime::Dense, 3, 3),
        (2048, 8, 8, Regime::Dense, 3, 3),
        (2048, 32, 16, Regime::Grouped, 5, 4),
        (2048, 8, 2, Regime::GroupedReduce, 6, 5),
    ] {
        let sizes = Shape { tokens, width: 512, experts, top_k, head: 128, hidden: 256, ..PLAIN };
        let shape = Shape { returns_cache: true, wgmma: true, ..sizes };
        let plan = plan_of(Operator::SelfAttention, &shape, Element::Bf16, &device).unwrap();
        assert_eq!((plan.regime, plan.launches.len()), (regime, attention));
        let only_routes = plan.launches[0].kernel == "moa_route_tokens";
        let plan = plan_of(Operator::FeedForward, &shape, Element::Bf16, &device).unwrap();
        assert_eq!((plan.regime, plan.launches.len()), (regime, feed_forward));
        // A router that reads an input of its own takes the place of one that has a launch, or stands in front.
        let shape = Shape { router: Some(64), ..shape };
        let plan = plan_of(Operator::SelfAttention, &shape, Element::Bf16, &device).unwrap();
        assert_eq!(plan.launches.len(), attention + usize::from(!only_routes));
        let plan = plan_of(Operator::FeedForward, &shape, Element::Bf16, &device).unwrap();
        assert_eq!(plan.launches.len(), feed_forward);
    }
}
