//! `moa_tensorrt_engine.h`: its structures, as C lays them out, and the table of its functions.

use std::ffi::{c_char, c_void};

use libloading::Library;

pub(super) const ABI_VERSION: u32 = 2;

pub(super) const OK: i32 = 0;
pub(super) const TF32: u32 = 1;
pub(super) const MAX_RANK: usize = 8;

/// A handle that the library gave.
#[repr(C)]
pub(super) struct Opaque {
    _private: [u8; 0],
}

/// `moa_trt_error`.
#[repr(C)]
pub(super) struct ErrorText {
    pub(super) text: [c_char; 8192],
}

/// `moa_trt_shape`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) rank: i32,
    pub(super) reserved: i32,
    pub(super) dims: [i64; MAX_RANK],
}

/// `moa_trt_target`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) struct_size: u32,
    pub(super) abi_version: u32,
    pub(super) header: [u32; 3],
    pub(super) plugin_interface: u32,
}

/// `moa_trt_open_options`.
#[repr(C)]
pub(super) struct OpenOptions {
    pub(super) struct_size: u32,
    pub(super) device: i32,
    pub(super) folder: *const c_char,
    pub(super) log: Option<unsafe extern "C" fn(*mut c_void, i32, *const c_char)>,
    pub(super) log_severity: i32,
    pub(super) reserved: u32,
    pub(super) user: *mut c_void,
}

/// `moa_trt_versions`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Versions {
    pub(super) struct_size: u32,
    pub(super) numbers: [u32; 4],
    pub(super) parser: u32,
    pub(super) nvinfer_path: *const c_char,
    pub(super) parser_path: *const c_char,
}

/// `moa_trt_device`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Device {
    pub(super) struct_size: u32,
    pub(super) ordinal: i32,
    pub(super) compute_major: u32,
    pub(super) compute_minor: u32,
    pub(super) driver_version: u32,
    pub(super) multiprocessors: u32,
    pub(super) total_bytes: u64,
    pub(super) name: [c_char; 256],
    pub(super) uuid: [c_char; 40],
}

/// `moa_trt_range`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub(super) input: *const c_char,
    pub(super) min: Shape,
    pub(super) opt: Shape,
    pub(super) max: Shape,
}

/// `moa_trt_profile`.
#[repr(C)]
pub(super) struct Profile {
    pub(super) ranges: *const Range,
    pub(super) range_count: usize,
}

/// `moa_trt_progress`.
pub(super) type Progress = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char, i32, i32) -> i32;

/// `moa_trt_build_options`.
#[repr(C)]
pub(super) struct BuildOptions {
    pub(super) struct_size: u32,
    pub(super) flags: u32,
    pub(super) model: *const c_void,
    pub(super) model_bytes: u64,
    pub(super) model_path: *const c_char,
    pub(super) profiles: *const Profile,
    pub(super) profile_count: usize,
    pub(super) workspace_bytes: u64,
    pub(super) optimization_level: i32,
    pub(super) is_detailed: u32,
    pub(super) timing_cache: *const c_void,
    pub(super) timing_cache_bytes: u64,
    pub(super) progress: Option<Progress>,
    /// `moa_trt_on_parser_error`, which is not used: the errors stand in the text.
    pub(super) parser_error: Option<unsafe extern "C" fn()>,
    pub(super) user: *mut c_void,
}

/// `moa_trt_engine_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct EngineInfo {
    pub(super) struct_size: u32,
    pub(super) tensor_count: u32,
    pub(super) profile_count: u32,
    pub(super) layer_count: u32,
    pub(super) device_bytes: u64,
}

/// `moa_trt_tensor`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Tensor {
    pub(super) struct_size: u32,
    pub(super) element: i32,
    pub(super) is_input: u32,
    pub(super) is_on_host: u32,
    pub(super) name: *const c_char,
    pub(super) shape: Shape,
}

type Handle = *mut Opaque;
type Failure = *mut ErrorText;

macro_rules! table {
    ($($field:ident: $symbol:literal = fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library; valid as long as it is loaded.
        pub(super) struct Table {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Table {
            /// Finds every function; the error names the first that is missing.
            ///
            /// # Safety
            ///
            /// `library` must be a build of `libmoa_tensorrt`, whose functions have the types of the header, and stay
            /// loaded as long as the table is used.
            pub(super) unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $(
                        // SAFETY: the caller vouches for the types.
                        $field: *unsafe { library.get($symbol) }?,
                    )*
                })
            }
        }
    };
}

table! {
    built_for: b"moa_trt_built_for\0" = fn(*mut Target, Failure) -> i32;
    open: b"moa_trt_open\0" = fn(*const OpenOptions, *mut Handle, Failure) -> i32;
    close: b"moa_trt_close\0" = fn(Handle);
    get_versions: b"moa_trt_get_versions\0" = fn(Handle, *mut Versions, Failure) -> i32;
    get_device: b"moa_trt_get_device\0" = fn(i32, *mut Device, Failure) -> i32;
    build: b"moa_trt_build\0" = fn(Handle, *const BuildOptions, *mut Handle, Failure) -> i32;
    plan_destroy: b"moa_trt_plan_destroy\0" = fn(Handle);
    plan_data: b"moa_trt_plan_data\0" = fn(*const Opaque) -> *const c_void;
    plan_bytes: b"moa_trt_plan_bytes\0" = fn(*const Opaque) -> u64;
    plan_timing_cache: b"moa_trt_plan_timing_cache\0" = fn(*const Opaque) -> *const c_void;
    plan_timing_cache_bytes: b"moa_trt_plan_timing_cache_bytes\0" = fn(*const Opaque) -> u64;
    engine_create: b"moa_trt_engine_create\0" = fn(Handle, *const c_void, u64, *mut Handle, Failure) -> i32;
    engine_destroy: b"moa_trt_engine_destroy\0" = fn(Handle);
    get_engine_info: b"moa_trt_get_engine_info\0" = fn(*const Opaque, *mut EngineInfo, Failure) -> i32;
    get_tensor: b"moa_trt_get_tensor\0" = fn(*const Opaque, u32, *mut Tensor, Failure) -> i32;
    get_range: b"moa_trt_get_range\0" = fn(*const Opaque, u32, *const c_char, *mut Range, Failure) -> i32;
    engine_layers: b"moa_trt_engine_layers\0" = fn(Handle, *mut *const c_char, Failure) -> i32;
    context_create: b"moa_trt_context_create\0" = fn(Handle, u32, *mut Handle, Failure) -> i32;
    context_destroy: b"moa_trt_context_destroy\0" = fn(Handle);
    set_shape: b"moa_trt_set_shape\0" = fn(Handle, *const c_char, *const Shape, Failure) -> i32;
    tensor_shape: b"moa_trt_tensor_shape\0" = fn(Handle, *const c_char, *mut Shape, Failure) -> i32;
    upload: b"moa_trt_upload\0" = fn(Handle, *const c_char, *const c_void, u64, Failure) -> i32;
    run: b"moa_trt_run\0" = fn(Handle, Failure) -> i32;
    run_timed: b"moa_trt_run_timed\0" = fn(Handle, *mut f32, Failure) -> i32;
    download: b"moa_trt_download\0" = fn(Handle, *const c_char, *mut c_void, u64, Failure) -> i32;
}

/// Asks a library for the version of its interface.
///
/// # Safety
///
/// `library` must be a build of `libmoa_tensorrt`.
pub(super) unsafe fn abi_version(library: &Library) -> Result<u32, libloading::Error> {
    // SAFETY: the function has this type in every version of the interface.
    let function = unsafe { library.get::<unsafe extern "C" fn() -> u32>(b"moa_trt_abi_version\0") }?;
    // SAFETY: it reads a constant.
    Ok(unsafe { function() })
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::{fmt::Write, mem::offset_of, mem::size_of, path::Path, process::Command};

    use super::*;

    /// C that compiles where the header lays its structures out as this file does.
    fn assertions() -> String {
        let mut text = String::from("#include <moa_tensorrt_engine.h>\n");
        macro_rules! same {
            ($c:literal, $rust:ty $(, $field:ident as $name:literal)*) => {
                writeln!(text, "_Static_assert(sizeof(struct {}) == {}, \"size\");", $c, size_of::<$rust>()).unwrap();
                $(writeln!(
                    text,
                    "_Static_assert(offsetof(struct {}, {}) == {}, \"{}\");",
                    $c, $name, offset_of!($rust, $field), $name
                ).unwrap();)*
            };
        }
        same!("moa_trt_error", ErrorText, text as "text");
        same!("moa_trt_shape", Shape, dims as "dims");
        same!("moa_trt_target", Target, abi_version as "abi_version", header as "header_major", plugin_interface as "plugin_interface");
        same!("moa_trt_open_options", OpenOptions, device as "device", folder as "folder", log as "log",
              log_severity as "log_severity", user as "user");
        same!("moa_trt_versions", Versions, numbers as "major", parser as "parser", nvinfer_path as "nvinfer_path",
              parser_path as "parser_path");
        same!("moa_trt_device", Device, ordinal as "ordinal", compute_major as "compute_major",
              compute_minor as "compute_minor", driver_version as "driver_version", multiprocessors as "multiprocessors",
              total_bytes as "total_bytes", name as "name", uuid as "uuid");
        same!("moa_trt_range", Range, input as "input", min as "min", opt as "opt", max as "max");
        same!("moa_trt_profile", Profile, ranges as "ranges", range_count as "range_count");
        same!("moa_trt_build_options", BuildOptions, flags as "flags", model as "model", model_bytes as "model_bytes",
              model_path as "model_path", profiles as "profiles", profile_count as "profile_count",
              workspace_bytes as "workspace_bytes", optimization_level as "optimization_level",
              is_detailed as "is_detailed", timing_cache as "timing_cache",
              timing_cache_bytes as "timing_cache_bytes", progress as "progress", parser_error as "parser_error",
              user as "user");
        same!("moa_trt_engine_info", EngineInfo, tensor_count as "tensor_count", profile_count as "profile_count",
              layer_count as "layer_count", device_bytes as "device_bytes");
        same!("moa_trt_tensor", Tensor, element as "element", is_input as "is_input", is_on_host as "is_on_host",
              name as "name", shape as "shape");
        for (name, value) in [("ABI_VERSION", ABI_VERSION), ("TF32", TF32), ("MAX_RANK", 8)] {
            writeln!(text, "_Static_assert(MOA_TRT_{name} == {value}, \"{name}\");").unwrap();
        }
        text
    }

    #[test]
    fn structures_have_the_layout_of_the_header() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("layout.c");
        let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("custom_ops/tensorrt/include");
        let compiles = |text: &str| {
            std::fs::write(&source, text).unwrap();
            let compiler = std::env::var("CC").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "cc".into());
            let mut command = Command::new(compiler);
            command.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-include", "stddef.h"]);
            let output = command.arg("-I").arg(&include).arg(&source).output().unwrap();
            (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (same, why) = compiles(&assertions());
        assert!(same, "{why}");
        let (same, _) = compiles(&assertions().replacen("== 8192", "== 8193", 1));
        assert!(!same, "a wrong size was not found");
    }
}
