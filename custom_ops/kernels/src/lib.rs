//! CPU kernels of the `ai.moa` operators, computing in f32, on plain slices.
//!
//! The contract of each operator (symbols, shapes, semantics) is `moa_schema`'s; this crate knows no runtime.
//! A caller proves shapes with a `moa_schema` dims type, fills a struct of slices and lends a [`ThreadPool`].
//!
//! A weight that never changes is packed once, in a [`Prepared`]; its calls allocate nothing once their scratch memory
//! has grown to the largest shape.
//!
//! # How a layer is computed
//!
//! 1. `routing`: logits, gate and top-k of every token, then the (token, slot) pairs counted into expert order;
//!    `kv_cache` beside it: keys and values of the new tokens.
//! 2. `query_projection`: the rows of each expert times its weights, rotated and scaled; an idle expert costs nothing.
//!    `key_panels` beside it: keys and values in the order in which `attention` reads them.
//! 3. `attention`: tiles of tokens, all `k` slots at once, with an online softmax, or by `stick_breaking`; `decode` for
//!    single tokens.
//! 4. `output_projection`: some columns of some tokens at a time, expert by expert, each product added with its gate.
//!
//! Where a small layer with one key/value head has a single token, and the processor AVX2, `single_token` stands for 2
//! to 4: each task takes a group of slots from the query to the product with the output weights. `few_tokens` does so
//! for the rows of an expert where there are few tokens and keys. Both begin beside 1.
//! Many tokens are cut into blocks by `many_tokens`, as evenly as the threads of the call can share them, which takes
//! each through 2 to 4. These three, and attention on AMX tiles, serve softmax alone.
//!
//! `lm_head` is one product, of some columns a task.
//!
//! Without a projection of keys and values the hidden states are copied where these go.
//!
//! `simd` holds the microkernels, `rows` gathers rows into blocks for them, `packed` the panels that they read.
//!
//! # Same bits for every number of threads
//!
//! Work is cut into tiles whose borders depend on the shapes and the routing, and those of blocks of tokens on the
//! number of threads; each element of a result is written by one task, which adds in one order, whatever else the tile
//! holds:
//!
//! * an element of a product is one chain of fused multiply-adds by rising inner index, from 0, whatever the block that
//!   it is computed in; so a token takes the same experts alone and in every batch;
//! * of rows that are rounded to bf16 it is such a chain of pairs of inner steps, see `simd::pairs`; the sizes of a
//!   call decide whether they are;
//! * on AMX tiles it is a chain of sums of 32 products of parts (`simd::tiles` has the order and the error). Which
//!   products go there follows from their sizes, and inside one from the values of the row and of the weights; routers
//!   never do;
//! * an attention row visits its visible keys in rising order, 256 at a time (128 where there is one token); inside a
//!   tile, the sum of the weights is taken in 16 lanes, which are then added in pairs;
//! * by stick-breaking it visits these tiles in falling order: what a key takes and leaves is known once all later keys
//!   have taken their shares, one after the other; inside a tile, values are added by rising key;
//! * where up to four slots are attended with at once, by softmax, a score is taken in the lanes of a vector, 16, with
//!   AVX2 8 and with NEON 4, each a chain by rising index;
//! * an output row is the bias (or 0), then gate times product of the chosen experts in rising order.
//!
//! The bits differ between levels of instructions, and where portable code has no fused multiply-add, so that each step
//! rounds twice: on x86-64.
//!
//! # Types
//!
//! Weights are f32, f16, bf16, int8 or int4 ([`WeightData`]), packed as they are stored, or f32 that never changes in
//! two bytes where these hold it exactly (see [`Prepared::pack`]), and widened as they are multiplied: int4 to the f32
//! that it is times its scale. Widening is exact and the order of adding the same, so the results have the bits of the
//! same weights as f32, except in products of few rows or columns times f16 or int4, which stay off AMX tiles where f32
//! goes to them. int8 is multiplied as the f32 of its value, and the sum of a column once with its scale, before the
//! gate: scales that are powers of 2 give the bits of the weights as f32. Activations are f32 or f16 ([`Scalar`]): f16
//! is widened on entry and rounded once on exit, and new keys and values are rounded before they are attended to, as a
//! later step finds them in the cache. Activations are rounded to bf16 where a caller allows it alone
//! ([`Prepared::with_accuracy`]): tiles multiply all three bf16 parts of an f32, of which a bf16 weight has one.
//!
//! Where it is allowed, weights are bf16 or packed as such, experts have four rows or more on average and the processor
//! multiplies pairs of bf16 in the time of an f32, both factors of every product but the router's are rounded, those of
//! attention too unless it is `decode` or one of the two for few tokens, and two inner steps are added at a time: the
//! later one first. Of values, a pair is two keys; one that a row sees without the key behind it is added alone, with
//! the same bits but for subnormal numbers, which pairs take for 0.
//!
//! # Padding
//!
//! A masked key is never read, so NaN or infinity in a padded position reaches no other token, and it takes nothing of
//! a stick. A padded query under `skip_padded_queries` is not routed at all: its output row is 0, its `topk_weights`
//! are 0 and its `topk_indices` are `0 .. k`, which the contract leaves open.
//!
//! Values of keys that a query sees must be finite: of a stick that is used up, earlier ones are not read or taken 0
//! times, as the other rows of its block decide.
//!
//! # Memory
//!
//! Scratch and packed weights are kept between calls. A call for which there is no memory unwinds with [`OutOfMemory`],
//! and what it has begun to fill is unspecified; so does [`Prepared::pack`].

mod activation;
mod attention;
mod attention_layer;
mod attention_tiles;
mod buffer;
mod cached;
mod check;
mod compact_product;
mod cross_attention;
mod decode;
mod error;
mod feed_forward;
mod few_tokens;
mod geometry;
mod grid;
mod hidden_states;
mod huge_pages;
mod kernel_scratch;
mod key_panels;
mod kv_cache;
mod lm_head;
mod many_tokens;
#[cfg(feature = "measure")]
pub mod measure;
mod narrowed;
mod output_projection;
mod packed;
mod pool;
mod prepared;
mod query_projection;
mod rope;
mod routing;
mod row_stride;
mod rows;
mod scalar;
mod self_attention;
mod simd;
mod single_token;
#[cfg(test)]
mod skip;
mod stick_breaking;
mod terms;
mod waiting_inputs;
mod weight_data;

pub use buffer::OutOfMemory;
pub use cross_attention::{CrossAttentionInputs, CrossAttentionOutputs, cross_attention};
pub use error::KernelError;
pub use feed_forward::{FeedForwardInputs, FeedForwardOutputs, feed_forward};
pub use lm_head::{LmHeadInputs, lm_head};
pub use packed::Packing;
pub use pool::{Sequential, ThreadPool};
pub use prepared::{Prepared, ScratchPool, Weight};
pub use scalar::{Scalar, Stored};
pub use self_attention::{SelfAttentionInputs, SelfAttentionOutputs, self_attention};
pub use simd::Instructions;
pub use weight_data::{Int4, WeightData};
