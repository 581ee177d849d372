//! Launches what [`moa_cuda`] plans, through the CUDA driver API.
//!
//! Nothing of CUDA is needed to build or to link this crate: [`Driver::system`] loads `libcuda.so.1` when it is asked
//! for, and says so where there is none.
//!
//! # From a node to the GPU
//!
//! 1. Once for each device: [`KernelSet::on_device`], or [`KernelSet::in_current_context`] for a caller that manages
//!    contexts itself. [`KernelSet::load`] then loads the kernels of one element type, resolves every function and
//!    raises its limit of shared memory.
//! 2. For every new shape: [`KernelSet::plan`] proves the shapes, plans the launches and binds them to functions.
//! 3. For every call: [`BoundPlan::enqueue`] puts the launches on a stream. It neither waits for the device, nor
//!    allocates memory there, nor loads code, so that a stream may be captured into a graph meanwhile.
//!
//! `ffi` is the door to the driver: the only module with `unsafe` code.

mod archive_file;
mod context;
mod error;
mod ffi;
mod kernels;
mod launch;
mod node;
mod plan;

pub use archive_file::{find_archive, has_archive};
pub use error::{DriverError, Error};
pub use ffi::{Context, Driver, Stream};
pub use kernels::{DeviceFacts, KernelSet, OVERLAP_VARIABLE};
pub use node::{Caches, Node};
pub use plan::{BoundPlan, Buffers};
