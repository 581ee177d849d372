//! The launches that begin a layer: the router, and what reads the hidden states beside it.

use super::PlanError;
use super::choice::{Work, route_bytes};
use super::layer::{Layer, RouterInput, Sizes, int};
use crate::Parameters;
use crate::catalog::{ProductKernel, route};
use crate::constants::GROUP_TOKENS;

/// Tokens from which on a launch that only routes has a kernel of its own, where others would take it too: an estimate.
const MANY_TOKENS: usize = 1024;

impl Layer {
    /// The first launch that reads hidden states: the router, unless it is done, projections of `columns` columns, and
    /// rows that are copied where `copies` is set; `fill` says the parameters of these two for a kernel.
    pub(super) fn push_first(
        &mut self,
        columns: usize,
        copies: bool,
        fill: impl Fn(&Self, &ProductKernel, &mut Parameters),
    ) -> Result<(), PlanError> {
        let routes = self.sizes.router_input.is_none();
        let tokens = self.sizes.all_tokens();
        let only_routes = routes && columns == 0 && !copies;
        if only_routes && tokens >= MANY_TOKENS && self.push_router()? {
            return Ok(());
        }
        let element = self.choice.element;
        let bytes =
            |kernel: &ProductKernel| kernel.project_bytes(element, if routes { self.route_bytes(kernel) } else { 0 });
        let rows = if columns == 0 { 0 } else { tokens };
        let work = Work { rows, columns, parts: 1, routes: self.routes_in_blocks(), output: false };
        let kernel = self.choice.product(work, bytes)?;
        let shared = bytes(&kernel);
        let mut parameters =
            if routes { self.route_parameters(&kernel) } else { Parameters { route_splits: 1, ..self.base } };
        fill(self, &kernel, &mut parameters);
        self.push_project(&kernel, shared, parameters, !routes)
    }

    /// The router in a launch of its own, in f32, where it reads an input of its own; false where it does not.
    pub(super) fn push_input_router(&mut self) -> Result<bool, PlanError> {
        let Some(RouterInput { buffer, width }) = self.sizes.router_input else { return Ok(false) };
        let choice = self.choice.in_f32()?;
        let bytes = |kernel: &ProductKernel| kernel.project_bytes(choice.element, self.route_bytes(kernel));
        let work = Work { rows: 0, columns: 0, parts: 1, routes: false, output: false };
        let kernel = choice.product(work, bytes)?;
        let shared = bytes(&kernel);
        let parameters = Parameters {
            hidden_states: buffer,
            width: int(width),
            vectors: i32::from(width.is_multiple_of(16 / choice.element.bytes())),
            ..self.route_parameters(&kernel)
        };
        self.push_project(&kernel, shared, parameters, false)?;
        self.compute_in_f32();
        Ok(true)
    }

    /// Bytes of shared memory of the router beside a tile.
    fn route_bytes(&self, kernel: &ProductKernel) -> usize {
        let Sizes { experts, top_k, .. } = self.sizes;
        route_bytes(kernel, self.choice.route_splits(kernel, self.sizes.all_tokens()), experts, top_k)
    }

    /// The router's part of a launch of a tile.
    fn route_parameters(&self, kernel: &ProductKernel) -> Parameters {
        let tokens = self.sizes.all_tokens();
        let splits = self.choice.route_splits(kernel, tokens);
        Parameters {
            route_splits: int(splits),
            route_blocks: int(tokens.div_ceil(kernel.threads() / 32 / splits * GROUP_TOKENS)),
            tickets_count: int(self.tickets[0] + self.tickets[1]),
            ..self.base
        }
    }

    /// The router of many tokens as the first launch; false where it does not suit.
    pub(super) fn push_router(&mut self) -> Result<bool, PlanError> {
        let Sizes { width, experts, top_k, .. } = self.sizes;
        let tokens = self.sizes.all_tokens();
        let splits = self.choice.route_many(tokens, width, experts, top_k).filter(|_| self.base.vectors != 0);
        let Some(splits) = splits else { return Ok(false) };
        let blocks = tokens.div_ceil(route::tokens(splits));
        let parameters = Parameters {
            route_splits: int(splits),
            route_blocks: int(blocks),
            tickets_count: int(self.tickets[0] + self.tickets[1]),
            ..self.base
        };
        let shared = route::shared_bytes(splits, width, experts, top_k);
        self.push(route::SYMBOL.to_owned(), blocks, route::THREADS, shared, parameters)?;
        Ok(true)
    }
}
