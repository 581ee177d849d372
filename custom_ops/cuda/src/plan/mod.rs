//! From shapes to launches.

mod arena;
mod attention;
mod choice;
mod feed_forward;
mod layer;
mod router;

use thiserror::Error;

use crate::{Element, Parameters};

pub use attention::{SelfAttentionSettings, cross_attention, self_attention};
pub use feed_forward::feed_forward;

/// Kernel launches of one operator call, in order, on one stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Launches in order.
    pub launches: Vec<Launch>,
    /// Bytes of workspace; 0 where none is needed.
    pub workspace_bytes: usize,
    /// How the layer is computed.
    pub regime: Regime,
}

/// One kernel launch; the grid has one dimension.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Module of the kernel: [`Element::module`].
    pub element: Element,
    /// Symbol of the kernel.
    pub kernel: String,
    /// Blocks.
    pub grid: u32,
    /// Threads of one block.
    pub block: u32,
    /// Dynamic shared memory of one block in bytes.
    pub shared_bytes: u32,
    /// Whether the launch may start while the one before it still runs
    /// (`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`); the kernel itself waits for what it reads. False
    /// below compute capability 9.0, whose code has no instruction for that.
    pub overlap: bool,
    /// The kernel's only argument.
    pub parameters: Parameters,
}

/// How a layer is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Regime {
    /// Every expert for every token.
    Dense,
    /// The experts that the few tokens chose; each block routes them for itself.
    Sparse,
    /// The rows of each expert, listed; the output projection visits the experts of every tile of tokens.
    Grouped,
    /// As grouped, and the output projection computes listed rows that a last launch sums.
    GroupedReduce,
}

/// Why a shape has no plan.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// A size that the kernels do not support.
    #[error("the CUDA kernels support {name} up to {limit}, found {found}")]
    Limit {
        /// What is too large.
        name: &'static str,
        /// The largest value.
        limit: usize,
        /// What was asked for.
        found: usize,
    },
    /// The device is older than what the kernels are compiled for.
    #[error("the CUDA kernels need compute capability 7.0 or newer, found {major}.{minor}")]
    Device {
        /// Major version found.
        major: u32,
        /// Minor version found.
        minor: u32,
    },
    /// No kernel fits the device's shared memory.
    #[error("no {kernel} kernel fits {available} bytes of shared memory")]
    SharedMemory {
        /// Kernel family.
        kernel: &'static str,
        /// Bytes that the device has.
        available: u32,
    },
}
