//! `libmoa_cuda.so`: the CUDA kernels of the `ai.moa` operators behind the C ABI of `include/moa_cuda.h`.
//!
//! `abi` is the door: the only module with `unsafe` blocks. It checks every pointer and size that it can check, hands
//! plain values to `convert`, and turns each error and each panic into a code and one line of text.

mod abi;
mod convert;
mod failure;
mod types;
