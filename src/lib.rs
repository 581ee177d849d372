//! Compiler from trained Mixture-of-Attention-heads (MoA) weights to verified ONNX.
//!
//! ```text
//! checkpoint bytes → Checkpoint → Model → Graph → ONNX bytes      compile half
//! ONNX bytes → backends → parity | latency | generate             deploy half
//! ```
//!
//! The journey is [`checkpoint`], [`export`](mod@export) and [`onnx`]; typed models and graphs live in [`moa_graphs`].
//! [`reference`](mod@reference) evaluates a checkpoint in f64 without any graph, and [`parity`] compares what
//! [`backend`]s compute with it. [`text`] is what a translation model needs beside its graphs. ARCHITECTURE.md
//! states which module may know which.
//!
//! An export, and its proof on ONNX Runtime without the operator library:
//!
//! ```
//! use std::path::Path;
//!
//! use moa_export::{
//!     backend::{BackendKind, OrtOptions, ort_function},
//!     checkpoint::Checkpoint,
//!     export::{ExportOptions, export},
//!     moa_graphs::{Form, Options, Precision},
//!     parity::{VerifyOptions, verify},
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let out = folder.path().join("out");
//! let checkpoint = Checkpoint::open(Path::new("tests/data/mlm"), None)?;
//! let graph = Options { form: Form::Function, precision: Precision::Bf16, ..Options::default() };
//! let report = export(&checkpoint, &out, &ExportOptions { graph, ..ExportOptions::default() })?;
//! println!("{} files of what was trained: {}", report.files.len(), report.source_sha256);
//!
//! let backends: Vec<_> = ort_function(OrtOptions::default()).into_iter().collect();
//! let required = vec![BackendKind::OrtFunction];
//! let result = verify(&out, &checkpoint, &backends, &VerifyOptions { required, ..VerifyOptions::default() })?;
//! assert!(result.passed() && result.not_compared().is_empty(), "{result:?}");
//! # Ok(())
//! # }
//! ```

pub use moa_graphs;
pub use moa_schema;

pub mod backend;
pub mod checkpoint;
pub mod cli;
pub mod digest;
pub mod engine;
pub mod export;
mod file_kind;
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
pub mod provenance;
pub mod random;
pub mod reference;
pub mod report;
pub mod scratch;
mod shell;
mod side_files;
pub mod source;
pub mod tensor;
pub mod tensor_file;
pub mod text;
