//! The kernels against a naive f64 implementation, on random shapes, masks and routings.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stdout, clippy::unwrap_used)]

mod attention_reference;
mod cross_attention;
mod feed_forward;
mod few_tokens;
mod integers;
mod lm_head;
mod many_tokens;
mod memory;
mod prepared;
mod quantized;
mod refusals;
mod rounded;
mod rounded_on_tiles;
mod routing_reference;
mod self_attention;
mod shared_cache;
#[path = "../../src/skip.rs"]
mod skip;
mod small;
mod stick_breaking;
mod stored;
mod support;
mod tiles;
mod wide_rows;
