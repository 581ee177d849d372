//! Environment variables that change what kernels do or say where those for GPUs are, and the names of our libraries:
//! for the kernels, and for locks and receipts of what was made with which of them.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::ffi::OsStr;

/// Names the widest instructions that the CPU kernels use; an empty value counts as none. Read when the kernel of a
/// node is made.
pub const INSTRUCTIONS_VARIABLE: &str = "MOA_CPU_INSTRUCTIONS";

/// Levels of instructions that [`INSTRUCTIONS_VARIABLE`] names, the narrowest first.
pub const INSTRUCTION_LEVELS: [&str; 6] = ["portable", "neon", "avx2", "avx-vnni", "avx512", "amx"];

/// Names how large matrices of bf16 are packed; an empty value counts as none. Read when the kernel of a node is made.
pub const PACKING_VARIABLE: &str = "MOA_CPU_PACKING";

/// Ways to pack that [`PACKING_VARIABLE`] names, the default first.
pub const PACKINGS: [&str; 2] = ["plain", "compact"];

/// Names a kernel archive that is used in place of the one in the build.
pub const ARCHIVE_VARIABLE: &str = "MOA_CUDA_KERNELS";

/// Names the library with the CUDA kernels where it does not lie beside the TensorRT plugin, as [`CUDA_LIBRARY`].
pub const CUDA_VARIABLE: &str = "MOA_CUDA_LIBRARY";

/// The operator library for ONNX Runtime, by its name for [`library_file`].
pub const ORT_LIBRARY: &str = "moa_ort";

/// The TensorRT plugin, by its name for [`library_file`].
pub const TENSORRT_LIBRARY: &str = "moa_tensorrt";

/// The library with the CUDA kernels, by its name for [`library_file`].
pub const CUDA_LIBRARY: &str = "moa_cuda";

/// The file of the library `name`, with what this system puts before and behind it.
#[must_use]
pub fn library_file(name: &str) -> String {
    format!("{DLL_PREFIX}{name}{DLL_SUFFIX}")
}

/// Set to `0`, it keeps large products of 16-bit tensors from warpgroup products on a device of compute capability 9.0
/// whose machine code is in the archive; any other value does nothing. Read when a kernel set is made.
pub const WGMMA_VARIABLE: &str = "MOA_CUDA_WGMMA";

/// Set to a number, plans are made as for a device of so many multiprocessors, so that small calls take the kernels of
/// large ones: for checks of every kernel. An empty value counts as none. Read when a plan is made.
pub const MULTIPROCESSORS_VARIABLE: &str = "MOA_CUDA_MULTIPROCESSORS";

/// The level that the value of [`INSTRUCTIONS_VARIABLE`] names.
///
/// # Errors
///
/// What is wrong with a value that is none of [`INSTRUCTION_LEVELS`].
pub fn instructions(value: Option<&OsStr>) -> Result<Option<&'static str>, String> {
    one_of(INSTRUCTIONS_VARIABLE, &INSTRUCTION_LEVELS, value)
}

/// The way to pack that the value of [`PACKING_VARIABLE`] names.
///
/// # Errors
///
/// What is wrong with a value that is none of [`PACKINGS`].
pub fn packing(value: Option<&OsStr>) -> Result<Option<&'static str>, String> {
    one_of(PACKING_VARIABLE, &PACKINGS, value)
}

fn one_of(variable: &str, names: &[&'static str], value: Option<&OsStr>) -> Result<Option<&'static str>, String> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    let refused = || format!("{variable} must be one of {}, found {}", names.join(", "), value.display());
    names.iter().find(|name| value == **name).copied().ok_or_else(refused).map(Some)
}

/// Whether the value of [`WGMMA_VARIABLE`] keeps products from warpgroup products.
pub fn is_wgmma_off(value: Option<&OsStr>) -> bool {
    value.is_some_and(|value| value == "0")
}

/// What the value of [`MULTIPROCESSORS_VARIABLE`] asks for.
///
/// # Errors
///
/// What is wrong with a value that is no number from 1 on.
pub fn multiprocessors(value: Option<&OsStr>) -> Result<Option<u32>, String> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    let number = value.to_str().and_then(|text| text.parse().ok()).filter(|number| *number > 0);
    let refused = || format!("{MULTIPROCESSORS_VARIABLE} must be a number from 1 on, found {}", value.display());
    number.ok_or_else(refused).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_value_counts_as_none() {
        for (value, expected) in [(None, None), (Some(""), None), (Some("avx-vnni"), Some("avx-vnni"))] {
            assert_eq!(instructions(value.map(OsStr::new)), Ok(expected), "{value:?}");
        }
        let refused = "MOA_CPU_INSTRUCTIONS must be one of portable, neon, avx2, avx-vnni, avx512, amx, found AVX2";
        assert_eq!(instructions(Some("AVX2".as_ref())), Err(refused.to_owned()));
        for (value, expected) in [(None, None), (Some(""), None), (Some("compact"), Some("compact"))] {
            assert_eq!(packing(value.map(OsStr::new)), Ok(expected), "{value:?}");
        }
        let refused = "MOA_CPU_PACKING must be one of plain, compact, found 12";
        assert_eq!(packing(Some("12".as_ref())), Err(refused.to_owned()));
        assert!(is_wgmma_off(Some("0".as_ref())));
        for value in [None, Some(""), Some("1"), Some("off")] {
            assert!(!is_wgmma_off(value.map(OsStr::new)), "{value:?}");
        }
        for (value, expected) in [(None, None), (Some(""), None), (Some("1"), Some(1)), (Some("007"), Some(7))] {
            assert_eq!(multiprocessors(value.map(OsStr::new)), Ok(expected), "{value:?}");
        }
        for value in ["0", "-1", "one", " "] {
            let expected = format!("MOA_CUDA_MULTIPROCESSORS must be a number from 1 on, found {value}");
            assert_eq!(multiprocessors(Some(value.as_ref())), Err(expected));
        }
    }
}
