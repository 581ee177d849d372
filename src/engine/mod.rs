//! Engines for NVIDIA GPUs: what fits what, models as TensorRT takes them, and what a plan is bound to.

mod bf16;
mod cache;
mod choice;
mod head;
mod lock;
mod matrix;
mod positions;
mod prepare;
mod profile;
mod shape_list;

pub use cache::{Cache, CacheError, Cached};
pub use choice::{ChoiceError, Device, dtype_of, known_release_of, must_be, must_fit, release_of};
pub use lock::{
    BuildOptions, LOCK, LOCK_FORMAT, LockError, Machine, ModelHash, PLAN_WARNING, PlanLock, PluginHash, Recipe,
};
pub use matrix::{Dtype, Fit, GPUS, Gpu, Misfit, Plugin, RELEASES, Release, ReleaseNumber, Version, fit};
pub use positions::must_have_positions;
pub use prepare::{PrepareError, Prepared, is_prepared, prepare};
pub use profile::{DimRange, InputShapes, ShapeProfile, ShapeProfileError, open_dims, shapes};
pub use shape_list::{ShapeList, listed_shapes};
