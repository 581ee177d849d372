//! CUDA kernels of the `ai.moa` operators, the planner of their launches, and the archive of their machine code.
//!
//! The contract of each operator is `moa_schema`'s. This crate knows no runtime and calls no driver: it says what to
//! launch. Nothing here needs a GPU, a driver or CUDA.
//!
//! # From a node to launches
//!
//! 1. Once: [`archive::Archive::select`] finds the machine code of a module ([`Element::module`]) for the device.
//! 2. For every new shape: [`plan::self_attention`], [`plan::cross_attention`] or [`plan::feed_forward`] gives a
//!    [`plan::Plan`]: launches and the bytes of workspace that they need. It depends on shapes, attributes, element
//!    type and device alone, never on values.
//! 3. For every call: each launch's [`Parameters::bytes`], with the addresses of this call, is the one argument of its
//!    kernel. Launches run in order on one stream.
//!
//! A caller proves that outputs overlap nothing but, where caches are shared as `moa_schema` says, the past that they
//! update. The workspace may hold anything before a call and must start at a multiple of [`WORKSPACE_ALIGNMENT`].
//! Tensors are as the schema has them, row-major, no weight is packed. Where all addresses are multiples of 16 and all
//! rows are whole runs of 16 bytes, memory is read asynchronously, 16 bytes at a time; else element by element, with
//! the same result.
//!
//! # How a layer is computed
//!
//! | [`plan::Regime`] | when | launches of self-attention |
//! |---|---|---|
//! | dense | `k = E`, or at most 256 tokens | 3: router + queries of every expert + keys and values; attention; output |
//! | sparse | at most 4 tokens, `k * tokens < E` | 3: as dense, but a block routes the tokens itself and leaves out experts that nobody chose |
//! | grouped | more tokens, `E <= 2 * k` | 5: router + keys and values; lists; queries; attention; output |
//! | grouped, reduced | more tokens, `E > 2 * k` | 6: as grouped, with an output row for every slot, and their sum |
//!
//! A feed-forward layer routes first (one launch), then computes hidden rows and output. Routing sorts nothing: a
//! token's experts are a byte each in `[E, N]`, its slots rise with the expert, and one block an expert turns its bytes
//! into a list. The gate is folded into the rows that enter the output projection, so the weighted sum over experts is
//! part of that product's inner dimension.
//! Attention reads each key once for all `k` queries of a token; with few queries, blocks cut the keys and the last to
//! arrive combines their parts.
//!
//! # What a call does not do
//!
//! It does not synchronise, allocate, load or copy from the host: grids, blocks and memory follow from shapes alone,
//! and what depends on routing (counts, lists, visited experts) stays on the device. So a stream that runs it can be
//! captured.
//!
//! # Same bits every time
//!
//! No float is added atomically. Integer tickets decide only which block combines parts, never their order: parts are
//! added by rising index. They are set to 0 by the call's own first launch. Regime, tiles and parts follow from shapes,
//! attributes and the device. The bits differ between devices of another number of multiprocessors or another
//! architecture, and between batch shapes.
//!
//! # Precision
//!
//! The router is f32 whatever the element type is. Sums are f32. Queries, new keys and values, weights of attention,
//! gated rows and, in the last regime, the products of single slots are rounded to the element type; in binary16 what a
//! gate makes smaller than `2^-14` keeps `2^-25` of absolute precision, as the output itself does. f32 is computed by
//! fused multiply-add in f32, or with factors rounded to TF32 where [`Options::tf32`] allows it.
//!
//! # Which units
//!
//! | element | compute capability 7.0 | 7.5 | 8.0 and newer |
//! |---|---|---|---|
//! | f16 | tensor cores, `mma.m8n8k4` | tensor cores, `mma.m16n8k8` | tensor cores, `mma.m16n8k16` |
//! | bf16 | plain units | plain units | tensor cores, `mma.m16n8k16` |
//! | f32 | plain units | plain units | plain units, or tensor cores with TF32 |
//!
//! Before 8.0 there are no asynchronous copies: on tensor cores, what is loaded next waits in registers while a tile is
//! computed. Compute capability 9.0 runs the path of 8.0 and, where [`Options::wgmma`] asks for it, as the driver does,
//! warpgroup products (`wgmma`) on 16-bit elements: for products that fill the device with tiles of 128 x 128 or, by
//! blocks that stay, 128 x 256, and for attention that fills it with tiles of 128 queries. Asynchronous copies put the
//! factors into the 128-byte pattern that these products read from shared memory; weights as they are, rows gathered by
//! the lists of experts. What they gain is in `benches/gpu.md`.
//!
//! Not there: weights of another type than activations ([`Element::of`]); TF32 by warpgroup products, which read 32-bit
//! factors along the inner index alone while weights lie across it; bulk tensor copies, which cannot gather rows.
//!
//! # What a token may see
//!
//! A key that a query does not see, masked or later under a causal mask, never changes its result, not even where the
//! key or its value is not finite: the scores of unseen keys are replaced, masked rows are never read, and values of
//! keys that some rows of a tile do not see are set apart where they are not finite. A weight of the output projection
//! that is not finite reaches the tokens of a tile of which one chose its expert.
//!
//! # How it is proved
//!
//! `kernels/hardware.cuh` holds every use of the hardware; `kernels/emulator` gives the same functions on the host, and
//! the tests run the very sources, launched as planned, against the contract in f64, under several orders of threads.
//! `cargo xtask gpu-check` does the same on a GPU, and measures.

pub mod archive;
mod catalog;
mod constants;
mod device;
mod parameters;
pub mod plan;

pub use catalog::{entry_points, module_source};
pub use constants::{ACTIVATIONS, MAX_SPLITS, RowMode, c_constants};
pub use device::{Device, Element, Options};
pub use parameters::{Buffer, Parameters, c_header};

/// SHA-256 of the kernel sources in hexadecimal: the planner, and what the kernels take, are for these alone.
pub const SOURCE_HASH: &str = env!("MOA_CUDA_SOURCE_HASH");

/// Alignment of the workspace and of everything in it, in bytes.
pub const WORKSPACE_ALIGNMENT: usize = 256;

/// Bits that kernels set in the status word ([`Buffer::Status`]).
///
/// A GPU call cannot fail without waiting for the device. So the rows that a fault concerns become NaN, and the word
/// says why to whoever reads it later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// A router logit of a routed token is NaN or infinite; its output row is NaN.
    RouterLogits = 1,
    /// A position id lies outside the rotary caches; the rows that it rotates are NaN.
    Position = 2,
}
