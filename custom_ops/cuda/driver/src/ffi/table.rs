//! The functions of the driver library, by their exported names.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;

use libloading::Library;

use super::layout::LaunchConfig;
use crate::error::Error;

type Handle = *mut c_void;

/// `cuGetErrorName` and `cuGetErrorString`.
pub(super) type Describe = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

/// Declares [`Table`] and the one place that fills it.
macro_rules! functions {
    ($($field:ident = $symbol:literal: $kind:ty,)*) => {
        /// Functions of the driver; the library that holds them is never unloaded.
        pub(super) struct Table {
            $(pub(super) $field: $kind,)*
        }

        impl Table {
            /// Loads the library and looks every function up.
            pub(super) fn load(path: &Path) -> Result<Self, Error> {
                // SAFETY: the driver library's initialisers have no preconditions.
                let library = unsafe { Library::new(path) };
                let library = library.map_err(|error| Error::NoDriver {
                    library: path.display().to_string(),
                    why: error.to_string(),
                })?;
                // Threads and exit handlers of the driver run its code until the process ends.
                let library = ManuallyDrop::new(library);
                Ok(Self {
                    $($field: {
                        // SAFETY: `cuda.h` gives a function of this name this type.
                        let symbol = unsafe { library.get::<$kind>(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|_| Error::OldDriver { function: $symbol })?
                    },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit": unsafe extern "C" fn(c_uint) -> c_int,
    version = "cuDriverGetVersion": unsafe extern "C" fn(*mut c_int) -> c_int,
    error_name = "cuGetErrorName": Describe,
    error_string = "cuGetErrorString": Describe,
    current_context = "cuCtxGetCurrent": unsafe extern "C" fn(*mut Handle) -> c_int,
    push_context = "cuCtxPushCurrent_v2": unsafe extern "C" fn(Handle) -> c_int,
    pop_context = "cuCtxPopCurrent_v2": unsafe extern "C" fn(*mut Handle) -> c_int,
    current_device = "cuCtxGetDevice": unsafe extern "C" fn(*mut c_int) -> c_int,
    device = "cuDeviceGet": unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    device_attribute = "cuDeviceGetAttribute": unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    retain_primary = "cuDevicePrimaryCtxRetain": unsafe extern "C" fn(*mut Handle, c_int) -> c_int,
    release_primary = "cuDevicePrimaryCtxRelease_v2": unsafe extern "C" fn(c_int) -> c_int,
    load_module = "cuModuleLoadDataEx":
        unsafe extern "C" fn(*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void) -> c_int,
    unload_module = "cuModuleUnload": unsafe extern "C" fn(Handle) -> c_int,
    function = "cuModuleGetFunction": unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int,
    function_attribute = "cuFuncGetAttribute": unsafe extern "C" fn(*mut c_int, c_int, Handle) -> c_int,
    set_function_attribute = "cuFuncSetAttribute": unsafe extern "C" fn(Handle, c_int, c_int) -> c_int,
    is_capturing = "cuStreamIsCapturing": unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    allocate = "cuMemAlloc_v2": unsafe extern "C" fn(*mut u64, usize) -> c_int,
    free = "cuMemFree_v2": unsafe extern "C" fn(u64) -> c_int,
    set_bytes = "cuMemsetD8_v2": unsafe extern "C" fn(u64, u8, usize) -> c_int,
    copy_to_host = "cuMemcpyDtoH_v2": unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int,
    launch = "cuLaunchKernelEx":
        unsafe extern "C" fn(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void) -> c_int,
}
