//! `MoASelfAttention` and `MoACrossAttention`.

use moa_schema::{
    AttentionMode, CrossAttentionAttributes, CrossAttentionDims, SelfAttentionAttributes, SelfAttentionDims,
    cross_attention as cross, self_attention as own,
};

use super::choice::Choice;
use super::layer::{Layer, RouterInput, Sizes, int};
use super::{Plan, PlanError};
use crate::catalog::AttendKernel;
use crate::constants::gate_number;
use crate::{Buffer, Device, Element, Options, Parameters};

/// What a plan for `MoASelfAttention` depends on besides sizes and attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SelfAttentionSettings {
    /// Rows of `cos_cache`, where the node has rotary inputs.
    pub rotary_positions: Option<usize>,
    /// Columns `R` of `router_input`, where the node has it.
    pub router_width: Option<usize>,
    /// Whether the node has no `kv_weight`: keys and values are the hidden states.
    pub keeps_hidden: bool,
    /// Rows `M` of caches that are updated in place: a new cache that is wanted is the memory of the past then, which
    /// is its first `P` rows.
    pub capacity: Option<usize>,
    /// Whether the output `present_key` is wanted.
    pub returns_keys: bool,
    /// Whether the output `present_value` is wanted.
    pub returns_values: bool,
}

/// Plans `MoASelfAttention`.
///
/// # Errors
///
/// [`PlanError`] where a size exceeds what the kernels or the device support.
pub fn self_attention(
    dims: &SelfAttentionDims,
    attributes: &SelfAttentionAttributes,
    settings: &SelfAttentionSettings,
    element: Element,
    device: &Device,
    options: Options,
) -> Result<Plan, PlanError> {
    let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = *dims;
    let sizes = Sizes {
        batch,
        tokens,
        past,
        past_rows: settings.capacity.unwrap_or(past),
        keys: past.saturating_add(tokens),
        width,
        experts,
        top_k,
        kv_heads,
        head,
        gated: false,
        rotary_positions: settings.rotary_positions.unwrap_or(0),
        router_input: RouterInput::new(own::ROUTER_INPUT, settings.router_width),
        is_attention: true,
    };
    let rows = if settings.keeps_hidden { NewRows::Hidden } else { NewRows::Projected };
    let parameters = Parameters {
        hidden_states: Buffer::Input(own::HIDDEN_STATES),
        router_weight: Buffer::Input(own::ROUTER_WEIGHT),
        query_mask: Buffer::Input(own::ATTENTION_MASK),
        key_mask: Buffer::Input(own::ATTENTION_MASK),
        input_weight: Buffer::Input(own::QUERY_WEIGHT),
        kv_weight: if rows == NewRows::Projected { Buffer::Input(own::KV_WEIGHT) } else { Buffer::Null },
        output_weight: Buffer::Input(own::OUTPUT_WEIGHT),
        output_bias: Buffer::Input(own::OUTPUT_BIAS),
        past_key: Buffer::Input(own::PAST_KEY),
        past_value: Buffer::Input(own::PAST_VALUE),
        cos_cache: Buffer::Input(own::COS_CACHE),
        sin_cache: Buffer::Input(own::SIN_CACHE),
        position_ids: Buffer::Input(own::POSITION_IDS),
        output: Buffer::Output(own::OUTPUT),
        topk_indices: Buffer::Output(own::TOPK_INDICES),
        topk_weights: Buffer::Output(own::TOPK_WEIGHTS),
        query_mask_stride: int(past.saturating_add(tokens)),
        query_mask_offset: int(past),
        gate_mode: gate_number(attributes.gate_mode),
        activation: -1,
        causal: i32::from(attributes.causal),
        skip_padded: i32::from(attributes.skip_padded_queries),
        scale: attributes.scale,
        ..Parameters::default()
    };
    let mut layer = Layer::new(sizes, Choice::new(element, device, options)?, parameters)?;
    let cache_rows = settings.capacity.unwrap_or(past + tokens);
    let rows_behind = cache_rows.saturating_sub(past);
    let new_bytes = batch * kv_heads * rows_behind * head * element.bytes();
    let mut cache = |wanted, output| match wanted {
        true => (Buffer::Output(output), int(cache_rows)),
        false => (layer.arena.take(new_bytes), int(rows_behind)),
    };
    let (key, key_rows) = cache(settings.returns_keys, own::PRESENT_KEY);
    let (value, value_rows) = cache(settings.returns_values, own::PRESENT_VALUE);
    layer.base = Parameters { key, key_rows, value, value_rows, rows_behind: int(rows_behind), ..layer.base };
    let returns_cache = settings.returns_keys || settings.returns_values;
    let copies_past = returns_cache && past > 0 && settings.capacity.is_none();
    plan(layer, Caches { rows, copies_past, mode: attributes.attention_mode })
}

/// Plans `MoACrossAttention`.
///
/// # Errors
///
/// [`PlanError`] where a size exceeds what the kernels or the device support.
pub fn cross_attention(
    dims: &CrossAttentionDims,
    attributes: &CrossAttentionAttributes,
    element: Element,
    device: &Device,
    options: Options,
) -> Result<Plan, PlanError> {
    let CrossAttentionDims { batch, tokens, keys, width, experts, top_k, kv_heads, head } = *dims;
    let sizes =
        Sizes { batch, tokens, keys, width, experts, top_k, kv_heads, head, is_attention: true, ..Sizes::default() };
    let parameters = Parameters {
        hidden_states: Buffer::Input(cross::HIDDEN_STATES),
        router_weight: Buffer::Input(cross::ROUTER_WEIGHT),
        query_mask: Buffer::Input(cross::QUERY_MASK),
        key_mask: Buffer::Input(cross::KEY_MASK),
        input_weight: Buffer::Input(cross::QUERY_WEIGHT),
        output_weight: Buffer::Input(cross::OUTPUT_WEIGHT),
        output_bias: Buffer::Input(cross::OUTPUT_BIAS),
        key: Buffer::Input(cross::KEY),
        value: Buffer::Input(cross::VALUE),
        output: Buffer::Output(cross::OUTPUT),
        topk_indices: Buffer::Output(cross::TOPK_INDICES),
        topk_weights: Buffer::Output(cross::TOPK_WEIGHTS),
        query_mask_stride: int(tokens),
        gate_mode: gate_number(attributes.gate_mode),
        activation: -1,
        skip_padded: i32::from(attributes.skip_padded_queries),
        scale: attributes.scale,
        ..Parameters::default()
    };
    let mut layer = Layer::new(sizes, Choice::new(element, device, options)?, parameters)?;
    (layer.base.key_rows, layer.base.value_rows, layer.base.rows_behind) = (int(keys), int(keys), int(keys));
    plan(layer, Caches { rows: NewRows::None, copies_past: false, mode: AttentionMode::Softmax })
}

/// What the keys and values behind the past are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NewRows {
    /// There are none: all are given.
    None,
    /// The hidden states times `kv_weight`.
    Projected,
    /// The hidden states.
    Hidden,
}

/// How the caches come about, and are attended to.
#[derive(Debug, Clone, Copy)]
struct Caches {
    rows: NewRows,
    /// Whether a cache that is returned has a past.
    copies_past: bool,
    mode: AttentionMode,
}

impl Caches {
    /// Whether the first launch that reads the hidden states copies rows.
    fn copies(&self) -> bool {
        self.copies_past || self.rows == NewRows::Hidden
    }
}

/// Weights that wait in the cache of the second level for the launch that reads them, in bytes: an H100 has 50 MB.
const AHEAD_BYTES: usize = 16 << 20;

/// Launches of an attention layer.
fn plan(mut layer: Layer, caches: Caches) -> Result<Plan, PlanError> {
    let appends = caches.rows == NewRows::Projected;
    let Sizes { batch, tokens, keys, top_k, kv_heads, head, experts, .. } = layer.sizes;
    let (rows, pairs) = (tokens * top_k, batch * kv_heads);
    let attend = layer.choice.attend(rows, pairs, head, keys, caches.mode)?;
    let query_tiles = rows.div_ceil(attend.rows());
    let splits = layer.choice.key_splits(&attend, query_tiles * pairs, keys);
    layer.place_rows();
    layer.place_tickets(if splits > 1 { query_tiles * pairs } else { 0 })?;
    let grouped = layer.is_grouped();
    let inner = experts.saturating_mul(layer.sizes.columns());
    let output_bytes = inner.saturating_mul(layer.sizes.width * layer.choice.element.bytes());
    layer.base.ahead_bytes = int(if grouped { 0 } else { output_bytes.min(AHEAD_BYTES) });
    let columns = layer.sizes.columns();
    let all_columns = if grouped { 0 } else { experts * columns } + if appends { 2 * columns } else { 0 };
    let persistent = layer.persistent_project(appends);
    let apart = persistent.is_some();
    if !push_only_router(&mut layer, caches, apart)? {
        push_first(&mut layer, all_columns, caches, apart)?;
    }
    if grouped {
        layer.push_lists()?;
    }
    match persistent {
        Some(persistent) => layer.push_persistent(&persistent)?,
        None if grouped => layer.push_experts()?,
        None => {}
    }
    push_attend(&mut layer, &attend, query_tiles, splits)?;
    layer.push_output()?;
    Ok(layer.finish())
}

/// The router in a launch of its own; whether nothing is left for the launch that would have routed.
fn push_only_router(layer: &mut Layer, caches: Caches, apart: bool) -> Result<bool, PlanError> {
    if layer.push_input_router()? || !apart || caches.copies() {
        return Ok(false);
    }
    layer.push_router()
}

/// The router, unless it is done, and the first projections of `all_columns` columns unless they are `apart`; what is
/// copied with them.
fn push_first(layer: &mut Layer, all_columns: usize, caches: Caches, apart: bool) -> Result<(), PlanError> {
    let appends = caches.rows == NewRows::Projected;
    let Sizes { batch, past, tokens, kv_heads, head, .. } = layer.sizes;
    let columns = layer.sizes.columns();
    let past_rows = if caches.copies_past { past } else { 0 };
    let new_rows = if caches.rows == NewRows::Hidden { tokens } else { 0 };
    let copied_bytes = batch * kv_heads * (past_rows + new_rows) * head * layer.choice.element.bytes();
    layer.push_first(all_columns, caches.copies(), |layer, kernel, parameters| {
        parameters.copy_blocks = int(layer.choice.copy_blocks(copied_bytes, kernel.threads()));
        if apart {
            return;
        }
        if !layer.is_grouped() {
            layer.fill_experts(kernel, parameters);
        }
        if appends {
            parameters.kv_row_tiles = int(layer.sizes.all_tokens().div_ceil(kernel.rows));
            parameters.key_tiles = int(layer.input_tiles(kernel, false));
            parameters.value_tiles = int(columns.div_ceil(kernel.columns));
        }
    })
}

fn push_attend(layer: &mut Layer, kernel: &AttendKernel, tiles: usize, splits: usize) -> Result<(), PlanError> {
    let Sizes { batch, kv_heads, head, .. } = layer.sizes;
    let pairs = batch * kv_heads;
    let mut parameters = Parameters { query_tiles: int(tiles), key_splits: int(splits), ..layer.base };
    if splits > 1 {
        parameters.partial_attention = layer.arena.take(tiles * pairs * splits * kernel.rows() * (head + 4) * 4);
    }
    let shared = kernel.shared_bytes(layer.choice.element);
    let blocks = layer.choice.attend_blocks(kernel, tiles.saturating_mul(pairs).saturating_mul(splits))?;
    layer.push(kernel.symbol(), blocks, kernel.threads(), shared, parameters)
}
