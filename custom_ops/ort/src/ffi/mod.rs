//! The door to ONNX Runtime: the only module with `unsafe` code.
//!
//! Inside, `api` wraps the function table, `call` the tensors of one call, `pool` the threads, and `library` holds the
//! callbacks. What leaves the module is safe to use.
#![allow(unsafe_code)]

mod api;
mod call;
mod library;
mod pool;

pub(crate) use call::{Activation, Call, Inputs};
pub use library::RegisterCustomOps;
