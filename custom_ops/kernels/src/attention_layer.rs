//! What both attention operators do once keys and values are known.

use moa_schema::AttentionMode;

use crate::attention::{ATTENDED_ROWS, Attention, AttentionInputs, cut_pairs};
use crate::cached::{CacheRows, Cached, KeysAndValues};
use crate::hidden_states::HiddenStates;
use crate::kernel_scratch::LayerScratch;
use crate::key_panels::{Cache, KEYS_PER_TILE, Panels, Visible};
use crate::many_tokens::ManyInputs;
use crate::output_projection::{Order, OutputInputs, OutputScratch};
use crate::packed::Packed;
use crate::pool::{Awaited, Counted};
use crate::query_projection::QueryInputs;
use crate::rope::Rotary;
use crate::routing::{ByExpert, Router, Routing};
use crate::row_stride::row_stride;
use crate::simd::{FewKeys, Isa};
use crate::waiting_inputs::WaitingInputs;
use crate::{KernelError, attention_tiles, decode, few_tokens, many_tokens, pool, single_token};

/// Fewest query rows, which share the splitting of keys, and keys that attention takes to tiles where products with
/// weights have too few tokens for these.
const APART: [usize; 2] = [2 * ATTENDED_ROWS, 4 * KEYS_PER_TILE];

/// How a layer is computed. `serves` of the module that a variant names says which shapes it takes.
enum Way {
    /// [`single_token`]: tasks of the run that routes wait for what they need.
    SingleToken,
    /// [`few_tokens`]: the same.
    FewTokens,
    /// One stage after another, with all threads at each.
    Stages(Attending),
}

/// How queries attend where all threads share the stage.
enum Attending {
    /// [`decode`]: each token goes through the keys one by one.
    ToKeys,
    /// [`Attention`] to panels of keys; on AMX tiles by these instructions where there are some, else in blocks of
    /// [`many_tokens`] where [`AttentionLayer::blocks_of_many`] finds enough.
    ToPanels(Option<Isa>),
}

/// Inputs of the steps after routing and the cache.
pub(crate) struct AttentionLayer<'a> {
    /// That of products with weights.
    pub(crate) isa: Isa,
    /// The most that the node may use.
    pub(crate) widest_isa: Isa,
    pub(crate) pool: &'a Counted<'a>,
    /// `[B * T, C]`.
    pub(crate) hidden_states: HiddenStates<'a>,
    pub(crate) query_weight: &'a Packed,
    pub(crate) output_weight: &'a Packed,
    /// `[C]`.
    pub(crate) output_bias: Option<&'a [f32]>,
    /// `[B, S]`, 0 where the key is masked.
    pub(crate) key_mask: &'a [i32],
    pub(crate) rotary: Option<Rotary<'a>>,
    /// Stick-breaking is served by the stages that all threads share, on vectors.
    pub(crate) mode: AttentionMode,
    /// Whether activations, and what is cached, have fewer bits than f32.
    pub(crate) is_narrow: bool,
    /// `Some(P)`: query `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    pub(crate) scale: f32,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) top_k: usize,
    pub(crate) keys: usize,
    /// Rows of the caches, of which the first are keys.
    pub(crate) rows: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

/// The stages before those of the layer, which runs them too.
pub(crate) struct FirstStages<'a> {
    pub(crate) router: &'a Awaited<Router<'a>>,
    pub(crate) by_expert: &'a mut ByExpert,
    pub(crate) keys_and_values: &'a dyn KeysAndValues,
}

impl AttentionLayer<'_> {
    fn way(&self) -> Way {
        if self.is_one() {
            Way::SingleToken
        } else if self.is_few() {
            Way::FewTokens
        } else if decode::serves(self.tokens, self.top_k, self.head) {
            Way::Stages(Attending::ToKeys)
        } else {
            Way::Stages(Attending::ToPanels(self.tiles()))
        }
    }

    fn is_one(&self) -> bool {
        let sizes = [self.batch, self.tokens, self.kv_heads];
        self.is_softmax() && single_token::serves(self.isa, sizes, self.top_k, self.output_weight.geometry())
    }

    fn is_few(&self) -> bool {
        let sizes = [self.batch, self.tokens, self.kv_heads];
        self.is_softmax() && few_tokens::serves(self.isa, sizes, self.keys, self.top_k, self.output_weight.geometry())
    }

    fn is_softmax(&self) -> bool {
        self.mode == AttentionMode::Softmax
    }

    /// Whether keys and values are read once each, as they are stored: they are not worth being widened before.
    pub(crate) fn reads_stored(&self) -> bool {
        let Self { isa, tokens, top_k, head, .. } = *self;
        if !self.is_softmax() {
            return decode::serves(tokens, top_k, head);
        }
        (self.is_one() || decode::reads_stored(isa, tokens, top_k, head)) && !FewKeys::serves(isa, self.keys, head)
    }

    /// Whether keys and values of f32 are attended to as those of fewer bits that [`Self::reads_stored`] finds in the
    /// same call where more is asked for: the bits of the output are the same.
    fn as_stored(&self) -> bool {
        self.is_narrow && self.reads_stored()
    }

    /// Whether the past is read where it stood before it was copied.
    pub(crate) fn reads_past(&self) -> bool {
        self.is_softmax() && decode::reads_past(self.isa, self.tokens, self.top_k, self.head)
    }

    /// Routes the tokens, fills keys and values and `output [B * T, C]`.
    ///
    /// # Errors
    ///
    /// As [`Router::check`].
    pub(crate) fn run(
        &self,
        first: FirstStages<'_>,
        layer: &mut LayerScratch,
        output_scratch: &mut OutputScratch,
        output: &mut [f32],
    ) -> Result<(), KernelError> {
        layer.visible.read(self.key_mask, self.keys);
        let router = first.router;
        match self.way() {
            Way::SingleToken => {
                let LayerScratch { visible, single, .. } = layer;
                single.run(self.pool, self.waiting_inputs(&first, visible), first.by_expert, output);
            }
            Way::FewTokens => {
                let LayerScratch { visible, few, .. } = layer;
                few.run(self.pool, self.waiting_inputs(&first, visible), first.by_expert, output);
            }
            Way::Stages(attending) => {
                pool::run(self.pool, &[router, first.keys_and_values]);
                router.stage().check()?;
                let routing = router.stage().routing(first.by_expert);
                if let Some((routing, cached)) = routing.zip(first.keys_and_values.cached()) {
                    self.compute(attending, routing, cached, layer, output_scratch, output);
                }
            }
        }
        router.stage().check()
    }

    /// What the stages of one token, or of few, read.
    fn waiting_inputs<'a>(&'a self, first: &FirstStages<'a>, visible: &'a Visible) -> WaitingInputs<'a> {
        WaitingInputs {
            queries: self.query_inputs(),
            router: first.router,
            keys_and_values: first.keys_and_values,
            tokens: self.tokens,
            top_k: self.top_k,
            keys: self.keys,
            as_stored: self.as_stored(),
            visible,
            causal_past: self.causal_past,
            output_weights: self.output_weight,
            bias: self.output_bias,
        }
    }

    /// Fills `output [B * T, C]` where the first stages have run.
    fn compute(
        &self,
        attending: Attending,
        routing: Routing<'_>,
        cached: Cached<'_>,
        layer: &mut LayerScratch,
        output_scratch: &mut OutputScratch,
        output: &mut [f32],
    ) {
        match attending {
            Attending::ToKeys => self.attend_to_keys(routing, cached, layer),
            Attending::ToPanels(tiles) => {
                if let Some(cut) = self.blocks_of_many(routing).filter(|_| tiles.is_none()) {
                    return self.compute_blocks(cut, routing, cached, layer, output);
                }
                self.attend_to_panels(tiles, routing, cached, layer);
            }
        }
        let outputs = OutputInputs {
            isa: self.isa,
            routing,
            expert_rows: layer.attended.filled(),
            stride: row_stride(self.kv_heads * self.head),
            order: Order::Pairs,
            in_place: None,
            weights: self.output_weight,
            bias: self.output_bias,
            width: self.hidden_states.width(),
            threads: self.pool.threads(),
        };
        pool::run(self.pool, &[&output_scratch.stage(outputs, output)]);
    }

    /// Fills what slots attend to: queries first, then key after key.
    fn attend_to_keys(&self, routing: Routing<'_>, cached: Cached<'_>, layer: &mut LayerScratch) {
        let LayerScratch { visible, queries, decode, wide, attended, .. } = layer;
        let cached = if self.reads_stored() { cached } else { Cached::F32(cached.widened(wide)) };
        pool::run(self.pool, &[&queries.stage(self.query_inputs(), routing)]);
        let inputs = self.attention_inputs(self.isa, routing, queries.queries(), visible);
        let attended = attended.take(self.attended_len());
        pool::run(self.pool, &[&decode.stage(inputs, cached, self.keys, attended)]);
    }

    /// Fills what slots attend to: queries and panels of keys first, then tile after tile.
    fn attend_to_panels(&self, tiles: Option<Isa>, routing: Routing<'_>, cached: Cached<'_>, layer: &mut LayerScratch) {
        let LayerScratch { visible, queries, panels, wide, attended, bounds, claims, .. } = layer;
        let (isa, on_tiles) = (tiles.unwrap_or(self.isa), tiles.is_some());
        let (pack_keys, pack_values) = panels.stages(self.cache(isa, cached.widened(wide), visible), self.scale, tiles);
        pool::run(self.pool, &[&queries.stage(self.unscaled_queries(), routing), &pack_keys, &pack_values]);
        let inputs = self.attention_inputs(isa, routing, queries.queries(), visible);
        cut_pairs(bounds, &inputs, on_tiles);
        let (panels, attended) = (panels.panels(self.keys, self.head), attended.take(self.attended_len()));
        pool::run(self.pool, &[&Attention::new(inputs, panels, attended, bounds, claims, on_tiles)]);
    }

    /// Fills `output [B * T, C]` by blocks of tokens, `cut` of them in each row of the batch.
    fn compute_blocks(
        &self,
        cut: usize,
        routing: Routing<'_>,
        cached: Cached<'_>,
        layer: &mut LayerScratch,
        output: &mut [f32],
    ) {
        let LayerScratch { visible, panels, many, wide, .. } = layer;
        let (pack_keys, pack_values) =
            panels.stages(self.cache(self.isa, cached.widened(wide), visible), self.scale, None);
        pool::run(self.pool, &[&pack_keys, &pack_values]);
        let inputs = self.many_inputs(routing, panels.panels(self.keys, self.head), visible);
        pool::run(self.pool, &[&many.stage(inputs, cut, output)]);
    }

    /// Elements of what all slots attend to.
    fn attended_len(&self) -> usize {
        self.batch * self.tokens * self.top_k * row_stride(self.kv_heads * self.head)
    }

    fn cache<'b>(&self, isa: Isa, rows: CacheRows<'b>, visible: &'b Visible) -> Cache<'b> {
        let CacheRows { key, value, .. } = rows;
        let Self { batch, keys, rows, kv_heads, head, .. } = *self;
        Cache { isa, key, value, visible, batch, keys, rows, kv_heads, head }
    }

    /// The instructions of attention where tiles serve it.
    fn tiles(&self) -> Option<Isa> {
        let Self { tokens, top_k, keys, head, .. } = *self;
        let rows = tokens * top_k;
        let isa = if rows >= APART[0] && keys >= APART[1] { self.widest_isa.rounding_as(self.isa) } else { self.isa };
        (self.is_softmax() && attention_tiles::serves(isa, rows, keys, head)).then_some(isa)
    }

    /// Into how many blocks each row of the batch is cut, where there are so many tokens that blocks of them are tasks.
    fn blocks_of_many(&self, routing: Routing<'_>) -> Option<usize> {
        let Self { isa, pool, batch, tokens, top_k, .. } = *self;
        let alike = batch == 1 || routing.rows() == batch * tokens * top_k;
        let sizes = many_tokens::Sizes { batch, tokens, top_k, alike, threads: pool.threads() };
        many_tokens::blocks(isa, sizes, self.output_weight.geometry()).filter(|_| self.is_softmax())
    }

    fn many_inputs<'b>(&'b self, routing: Routing<'b>, panels: Panels<'b>, visible: &'b Visible) -> ManyInputs<'b> {
        ManyInputs {
            queries: self.unscaled_queries(),
            routing,
            panels,
            visible,
            causal_past: self.causal_past,
            batch: self.batch,
            tokens: self.tokens,
            output_weights: self.output_weight,
            bias: self.output_bias,
        }
    }

    fn attention_inputs<'b>(
        &self,
        isa: Isa,
        routing: Routing<'b>,
        queries: &'b [f32],
        visible: &'b Visible,
    ) -> AttentionInputs<'b> {
        let Self { mode, causal_past, batch, tokens, kv_heads, head, .. } = *self;
        let as_stored = self.as_stored();
        AttentionInputs { isa, routing, queries, visible, mode, as_stored, causal_past, batch, tokens, kv_heads, head }
    }

    /// Queries of keys that are scaled as they are packed.
    fn unscaled_queries(&self) -> QueryInputs<'_> {
        QueryInputs { scale: None, ..self.query_inputs() }
    }

    fn query_inputs(&self) -> QueryInputs<'_> {
        QueryInputs {
            isa: self.isa,
            hidden_states: self.hidden_states,
            weights: self.query_weight,
            rotary: self.rotary,
            scale: Some(self.scale),
            kv_heads: self.kv_heads,
            head: self.head,
        }
    }
}
