//! The structures that `cuLaunchKernelEx` reads, as `cuda.h` lays them out.

use std::ffi::{c_int, c_uint, c_void};

use crate::launch::{Launch, PARAMETER_BYTES};

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: *mut c_void,
    attributes: *mut LaunchAttribute,
    attribute_count: c_uint,
}

impl LaunchConfig {
    pub(super) fn new(launch: &Launch<'_>, stream: *mut c_void, attributes: *mut LaunchAttribute, count: u32) -> Self {
        Self {
            grid: [launch.grid, 1, 1],
            block: [launch.block, 1, 1],
            shared_bytes: launch.shared_bytes,
            stream,
            attributes,
            attribute_count: count,
        }
    }
}

/// `CUlaunchAttribute`: an identity, and a union of 64 bytes that starts at a multiple of 8.
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    identity: c_int,
    pad: c_int,
    value: [c_uint; 16],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel may start before the one in front of it has
    /// ended, and waits for it on the device.
    pub(super) const PROGRAMMATIC_STREAM_SERIALIZATION: Self = {
        let mut value = [0; 16];
        value[0] = 1;
        Self { identity: 6, pad: 0, value }
    };
}

/// Parameters of one kernel, aligned as strictly as any of them can ask.
#[repr(C, align(64))]
pub(super) struct ParameterBuffer(pub(super) [u8; PARAMETER_BYTES]);

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    #[test]
    fn structures_have_the_layout_of_cuda_h() {
        assert_eq!((size_of::<LaunchAttribute>(), align_of::<LaunchAttribute>()), (72, 8));
        assert_eq!(offset_of!(LaunchAttribute, value), 8);
        assert_eq!(offset_of!(LaunchConfig, shared_bytes), 24);
        assert_eq!(offset_of!(LaunchConfig, stream), 32);
        assert_eq!(offset_of!(LaunchConfig, attributes), 40);
        assert_eq!(offset_of!(LaunchConfig, attribute_count), 48);
        assert_eq!(size_of::<LaunchConfig>(), 56);
    }
}
