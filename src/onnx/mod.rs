//! ONNX files: graphs to bytes, and bytes back to validated models.

mod encode;
pub mod inline;
pub mod proto;
pub mod read;
mod write;

pub use encode::{DataFile, EncodeError, EncodeOptions, INLINE_LIMIT, encode, weight_bytes};
pub use inline::InlineError;
pub use read::{OnnxFile, ReadError, read_model};
pub use write::{Staging, WriteError, remove_unfinished};
