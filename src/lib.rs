//! Compiler from trained Mixture-of-Attention-heads (MoA) weights to verified ONNX.
//!
//! ```text
//! checkpoint bytes → Checkpoint → Model → Graph → ONNX bytes      compile half
//! ONNX bytes → backends → parity | latency | generate             deploy half
//! ```
//!
//! The journey is [`checkpoint`], [`export`] and [`onnx`]; typed models and graphs live in `moa_graphs`.
//! [`reference`](mod@reference) evaluates a checkpoint in f64 without any graph, and [`parity`] compares what
//! [`backend`]s compute with it. [`text`] is what a translation model needs beside its graphs. ARCHITECTURE.md
//! states which module may know which.

pub mod backend;
pub mod checkpoint;
pub mod cli;
pub mod digest;
pub mod engine;
pub mod export;
pub mod file_names;
mod files;
#[cfg(feature = "ort")]
pub mod generate;
pub mod inspect;
pub mod latency;
pub mod metadata;
pub mod onnx;
pub mod parity;
pub mod profile;
pub mod random;
pub mod reference;
pub mod report;
pub mod scratch;
mod side_files;
pub mod tensor;
pub mod tensor_file;
pub mod text;
