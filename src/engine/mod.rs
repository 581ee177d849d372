//! Engines for NVIDIA GPUs: what fits what.

mod matrix;

pub use matrix::{Dtype, Fit, GPUS, Gpu, Misfit, Plugin, RELEASES, Release, Version, fit};
