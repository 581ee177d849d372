//! The structures of `moa_cuda.h`.

/// `MOA_CUDA_MAX_RANK`.
pub(crate) const MAX_RANK: usize = 4;

/// Room for one line of text, its zero included.
pub(crate) const ERROR_BYTES: usize = 512;

/// `moa_cuda_error`.
#[repr(C)]
pub(crate) struct RawError {
    pub(crate) text: [u8; ERROR_BYTES],
}

/// `moa_cuda_options`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawOptions {
    pub(crate) struct_size: u32,
    pub(crate) device: i32,
    pub(crate) compute_major: u32,
    pub(crate) compute_minor: u32,
    pub(crate) archive: usize,
    pub(crate) archive_bytes: u64,
}

/// `moa_cuda_device`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawDevice {
    pub(crate) struct_size: u32,
    pub(crate) compute: [u32; 2],
    pub(crate) device: [u32; 2],
    pub(crate) multiprocessors: u32,
    pub(crate) shared_bytes_per_block: u32,
    pub(crate) l2_bytes: u32,
}

/// `moa_cuda_node`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawNode {
    pub(crate) struct_size: u32,
    pub(crate) operator_id: u32,
    pub(crate) element: u32,
    pub(crate) flags: u32,
    pub(crate) top_k: u32,
    pub(crate) kv_num_heads: u32,
    pub(crate) gate_mode: u32,
    pub(crate) activation: u32,
    pub(crate) causal: u32,
    pub(crate) skip_padded_queries: u32,
    pub(crate) gated: u32,
    pub(crate) scale: f32,
    pub(crate) attention_mode: u32,
}

/// `moa_cuda_shape`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawShape {
    pub(crate) rank: i32,
    pub(crate) reserved: i32,
    pub(crate) dims: [i64; MAX_RANK],
}

/// `moa_cuda_plan_info`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawPlanInfo {
    pub(crate) struct_size: u32,
    pub(crate) launches: u32,
    pub(crate) regime: u32,
    pub(crate) reserved: u32,
    pub(crate) workspace_bytes: u64,
}

/// A structure that begins with its size in bytes, as the caller knows it.
///
/// # Safety
///
/// Every bit pattern of the structure is a value of it, and its first field is the size, as `u32`.
#[allow(unsafe_code)]
pub(crate) unsafe trait Sized32: Copy {
    /// Size in the first version of the interface.
    const OLDEST: usize;
    /// Its name in the header.
    const NAME: &'static str;
    /// The values that fields have which the caller does not know.
    const DEFAULT: Self;
}

/// Declares a structure, with the first field that its first version did not have.
macro_rules! sized {
    ($kind:ident, $name:literal, $default:expr) => {
        sized!($kind, $name, $default, size_of::<Self>());
    };
    ($kind:ident, $name:literal, $default:expr, since $field:ident) => {
        sized!($kind, $name, $default, std::mem::offset_of!(Self, $field));
    };
    ($kind:ident, $name:literal, $default:expr, $oldest:expr) => {
        // SAFETY: integers, floats and arrays of them; the first field is `struct_size`.
        #[allow(unsafe_code)]
        unsafe impl Sized32 for $kind {
            const OLDEST: usize = $oldest;
            const NAME: &'static str = $name;
            const DEFAULT: Self = $default;
        }
    };
}

sized!(
    RawOptions,
    "moa_cuda_options",
    RawOptions { struct_size: 0, device: -1, compute_major: 0, compute_minor: 0, archive: 0, archive_bytes: 0 }
);
sized!(
    RawDevice,
    "moa_cuda_device",
    RawDevice {
        struct_size: 0,
        compute: [0; 2],
        device: [0; 2],
        multiprocessors: 0,
        shared_bytes_per_block: 0,
        l2_bytes: 0
    }
);
sized!(
    RawNode,
    "moa_cuda_node",
    RawNode {
        struct_size: 0,
        operator_id: 0,
        element: 0,
        flags: 0,
        top_k: 0,
        kv_num_heads: 0,
        gate_mode: 0,
        activation: 0,
        causal: 0,
        skip_padded_queries: 0,
        gated: 0,
        scale: 0.0,
        attention_mode: 0,
    },
    since attention_mode
);
sized!(
    RawPlanInfo,
    "moa_cuda_plan_info",
    RawPlanInfo { struct_size: 0, launches: 0, regime: 0, reserved: 0, workspace_bytes: 0 }
);
