//! Why something on the device cannot be done.

use moa_cuda::SOURCE_HASH;
use moa_cuda::archive::ArchiveError;
use moa_cuda::plan::PlanError;
use moa_schema::ShapeError;

/// A call of the driver that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {name} ({code}), {text}")]
pub struct DriverError {
    /// The function that was called.
    pub call: &'static str,
    /// `CUresult`.
    pub code: i32,
    /// Its name in `cuda.h`.
    pub name: String,
    /// What the driver says about it.
    pub text: String,
}

/// Why kernels cannot be loaded, planned or launched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver library is not there.
    #[error(
        "the CUDA driver {library} cannot be loaded: {why}; it comes with the NVIDIA driver, not with CUDA's toolkit"
    )]
    NoDriver {
        /// What was looked for.
        library: String,
        /// What the loader says.
        why: String,
    },
    /// The driver lacks a function.
    #[error(
        "the CUDA driver has no {function}; the kernels need a driver of CUDA 12 (525) or newer, and of CUDA 12.9 (575) \
         where they run through PTX"
    )]
    OldDriver {
        /// The function that is missing.
        function: &'static str,
    },
    /// The driver does not know the version of the archive's PTX; what runs older machine code does not help there.
    #[error(
        "{source}; the {module} kernels run through PTX on this device, which needs a driver of CUDA 12.9 (575 on Linux) \
         or newer, and this one is of CUDA {major}.{minor}"
    )]
    OldDriverForPtx {
        /// What the driver said.
        source: DriverError,
        /// Module.
        module: &'static str,
        /// Version of CUDA that the driver serves, major.
        major: u32,
        /// The same, minor.
        minor: u32,
    },
    /// The driver refused a call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The thread has no context, and none was named.
    #[error("the calling thread has no current CUDA context; make one current, or name a device")]
    NoContext,
    /// The file of kernels cannot be read.
    #[error("the kernel archive {place} cannot be read: {why}")]
    ArchiveFile {
        /// Where it was looked for.
        place: String,
        /// Why not.
        why: String,
    },
    /// This build holds no kernels, and nothing says where they are.
    #[error(
        "this build holds no CUDA kernels: set {variable} to the file that `cargo xtask cuda` writes, or build with it"
    )]
    NoArchive {
        /// The variable that names the file.
        variable: &'static str,
    },
    /// The file of kernels is malformed.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The archive was compiled from other sources than those that this library plans for.
    #[error(
        "the kernel archive was compiled from other sources ({found}) than this library ({SOURCE_HASH}); write it again \
         with `cargo xtask cuda`, from the sources of the library"
    )]
    OtherSources {
        /// SHA-256 of the archive's sources.
        found: String,
    },
    /// No image of the archive runs on the device.
    #[error("the kernel archive has no {module} kernels for compute capability {major}.{minor}")]
    NoImage {
        /// Module.
        module: &'static str,
        /// Compute capability, major.
        major: u32,
        /// Compute capability, minor.
        minor: u32,
    },
    /// A plan names a kernel that the archive does not hold: the two are of different versions.
    #[error("the {module} kernels of the archive lack `{kernel}`; build archive and library from the same sources")]
    NoKernel {
        /// Module.
        module: &'static str,
        /// Symbol.
        kernel: String,
    },
    /// The shapes of a node do not fit each other.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The shapes have no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A call that cannot be right.
    #[error("{0}")]
    Argument(String),
}
