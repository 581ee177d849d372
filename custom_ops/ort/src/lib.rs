//! `libmoa_ort.so`: the `ai.moa` operators as an ONNX Runtime custom-operator library for the CPU provider, and, where
//! the process has kernels for it, for the CUDA provider (feature `cuda`).
//!
//! The library exports one symbol, `RegisterCustomOps`; a session loads it with `register_custom_ops_library` or
//! `RegisterCustomOpsLibrary`. It asks for the C API of ONNX Runtime 1.18, whatever the build enables, so one file
//! works in that version and in every later one.
//!
//! `ffi` is the door: the only module with `unsafe` code. `failure`, `attributes`, `prepare` and `compute` are safe
//! code between that door and `moa_kernels`; `gpu` is that for `moa_cuda_driver`. No panic leaves the library: every
//! callback catches it and answers with a status that names the node, as it does where there is no memory for scratch
//! or packed weights.

mod attributes;
mod compute;
mod failure;
mod ffi;
#[cfg(feature = "cuda")]
mod gpu;
mod prepare;

pub use ffi::RegisterCustomOps;
