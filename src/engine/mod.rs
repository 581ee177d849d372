//! Engines for NVIDIA GPUs: what fits what, and models as TensorRT takes them.

mod matrix;
mod prepare;

pub use matrix::{Dtype, Fit, GPUS, Gpu, Misfit, Plugin, RELEASES, Release, Version, fit};
pub use prepare::{PrepareError, Prepared, prepare};
