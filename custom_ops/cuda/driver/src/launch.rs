//! One kernel launch, as the driver takes it.

/// Largest size of the parameters of one kernel in bytes, for every architecture.
pub(crate) const PARAMETER_BYTES: usize = 4096;

/// What [`crate::Driver`] launches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch<'a> {
    /// Blocks.
    pub(crate) grid: u32,
    /// Threads of one block.
    pub(crate) block: u32,
    /// Dynamic shared memory of one block.
    pub(crate) shared_bytes: u32,
    /// Whether it may start before the launch in front of it has ended.
    pub(crate) overlap: bool,
    /// The kernel's only parameter, at most [`PARAMETER_BYTES`].
    pub(crate) parameters: &'a [u8],
}
