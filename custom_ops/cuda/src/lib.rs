//! CUDA kernels of the `ai.moa` operators, the planner of their launches, and the archive of their machine code.
//!
//! The contract of each operator is `moa_schema`'s. This crate knows no runtime and calls no driver: it says what to
//! launch. Nothing here needs a GPU, a driver or CUDA.
//!
//! # From a node to launches
//!
//! 1. Once: [`archive::Archive::select`] finds the machine code of a module ([`Element::module`]) for the device.
//! 2. For every new shape: [`plan::self_attention`], [`plan::cross_attention`] or [`plan::feed_forward`] gives a
//!    [`plan::Plan`]: launches and the bytes of workspace that they need. It depends on shapes, attributes, element type
//!    and device alone, never on values.
//! 3. For every call: each launch's [`Parameters::bytes`], with the addresses of this call, is the one argument of its
//!    kernel. Launches run in order on one stream.
//!
//! A caller proves that inputs and outputs do not overlap. The workspace may hold anything before a call and must start
//! at a multiple of [`WORKSPACE_ALIGNMENT`].

pub mod archive;
mod catalog;
mod device;
mod parameters;
pub mod plan;

pub use catalog::{entry_points, module_source};
pub use device::{Device, Element, Options};
pub use parameters::{Buffer, Parameters, c_header};

/// Alignment of the workspace and of everything in it, in bytes.
pub const WORKSPACE_ALIGNMENT: usize = 256;

/// Bits that kernels set in the status word ([`Buffer::Status`]).
///
/// A GPU call cannot fail without waiting for the device. So the rows that a fault concerns become NaN, and the word
/// says why to whoever reads it later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// A router logit of a routed token is NaN or infinite; its output row is NaN.
    RouterLogits = 1,
    /// A position id lies outside the rotary caches; the rows that it rotates are NaN.
    Position = 2,
}
