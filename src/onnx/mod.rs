//! ONNX files: graphs to bytes, and bytes back to validated models.

mod encode;
mod encoded;
pub mod inline;
pub mod proto;
mod proto_values;
pub mod read;
mod routing;
mod write;

pub(crate) use encode::data_type;
pub use encode::{DataFile, EncodeError, INLINE_LIMIT, OPSETS, encode, structure, weight_bytes};
pub use encoded::Encoded;
pub use inline::InlineError;
pub use read::{OnnxFile, ReadError, read_model};
pub use routing::expose_routing;
pub use write::{Staging, Unfinished, WRITE_BLOCK, WriteError};
