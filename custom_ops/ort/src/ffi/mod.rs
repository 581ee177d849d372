//! The door to ONNX Runtime: the only module with `unsafe` code.
//!
//! Inside, `api` wraps the function table, `call` the tensors of one call, `shape` their dimensions, `pool` the
//! threads, `library` holds the callbacks of operators and `node_kernel` those of nodes; `cuda` and `device_call` are
//! counterparts for a GPU. What leaves the module is safe to use.
#![allow(unsafe_code)]

mod api;
mod call;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod device_call;
#[cfg(test)]
mod fake_tensor;
mod kind;
mod library;
mod node_kernel;
mod pool;
mod shape;

pub(crate) use call::{Activation, Call, Elements, Inputs};
#[cfg(feature = "cuda")]
pub(crate) use device_call::{DeviceCall, DeviceMemory};
pub use library::RegisterCustomOps;
pub(crate) use shape::Shape;
