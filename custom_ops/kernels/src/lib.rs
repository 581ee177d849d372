//! CPU kernels of the `ai.moa` operators, in f32, on plain slices.
//!
//! The contract of each operator (symbols, shapes, semantics) is `moa_schema`'s; this crate knows no runtime.
//! A caller proves shapes with a `moa_schema` dims type, fills a struct of slices and lends a [`ThreadPool`].
//!
//! # How a layer is computed
//!
//! 1. `routing`: logits, gate and top-k of every token, then the (token, slot) pairs counted into expert order.
//! 2. `grouped_gemm`: one product per expert over the rows of that expert only; an idle expert costs nothing.
//! 3. `kv_cache`, `rope`, `attention` (attention operators only): keys and values, then online softmax.
//! 4. `combine`: the weighted sum of a token's `k` rows, plus the bias.
//!
//! # Same bits for every number of threads
//!
//! Work is cut into tiles whose borders depend on the shapes and the routing, never on the number of threads; each
//! element of a result is written by one task, which adds in one order:
//!
//! * a router logit adds its `C` products by rising input column, one rounding per multiply and per add; it depends
//!   on the token and the weights alone, so a token takes the same experts in every batch;
//! * a projection is one GEMM per tile of rows;
//! * an attention row visits its visible keys in rising order, a tile of keys at a time;
//! * an output row is the bias (or 0), then the `k` slots in falling order of their score.
//!
//! # Padding
//!
//! A masked key is never read, so NaN or infinity in a padded position reaches no other token. A padded query under
//! `skip_padded_queries` is not routed at all: its output row is 0, its `topk_weights` are 0 and its `topk_indices`
//! are `0 .. k`.

mod activation;
mod attention;
mod check;
mod combine;
mod cross_attention;
mod error;
mod feed_forward;
mod gemm;
mod grouped_gemm;
mod kv_cache;
mod pool;
mod projection;
mod rope;
mod routing;
mod self_attention;

pub use cross_attention::{CrossAttentionInputs, CrossAttentionOutputs, cross_attention};
pub use error::KernelError;
pub use feed_forward::{FeedForwardInputs, FeedForwardOutputs, feed_forward};
pub use pool::{Sequential, ThreadPool};
pub use self_attention::{SelfAttentionInputs, SelfAttentionOutputs, self_attention};
