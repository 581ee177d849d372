//! The libraries that backends load, and how a user names or gets each.

use std::env;
use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf, absolute};

/// What the environment variable `name` names; an empty value is none.
pub(super) fn named(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// What the operator library is wanted for, which decides what else would do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LibraryUse {
    /// To run graphs that may carry bodies.
    Run,
    /// To run a graph in fused form.
    RunFused,
    /// To lie beside an export.
    Copy,
}

/// A library that a backend loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RuntimeLibrary {
    /// `libonnxruntime`.
    OnnxRuntime,
    /// `libmoa_ort`, and what it is for.
    Operators(LibraryUse),
    /// `libmoa_tensorrt`.
    TensorRtPlugin,
}

impl RuntimeLibrary {
    /// Environment variable that names it.
    pub const fn variable(self) -> &'static str {
        match self {
            Self::OnnxRuntime => "ORT_DYLIB_PATH",
            Self::Operators(_) => "MOA_ORT_LIBRARY",
            Self::TensorRtPlugin => "MOA_TENSORRT_LIBRARY",
        }
    }

    /// What that variable names; an empty value is none.
    pub fn named(self) -> Option<PathBuf> {
        named(self.variable())
    }

    /// What to do where its variable names no such library.
    pub(super) const fn help_if_misnamed(self) -> &'static str {
        match self {
            Self::OnnxRuntime => "correct or unset ORT_DYLIB_PATH",
            Self::Operators(_) => "correct or unset MOA_ORT_LIBRARY",
            Self::TensorRtPlugin => "correct or unset MOA_TENSORRT_LIBRARY; `cargo xtask tensorrt` builds the plugin",
        }
    }

    /// How to get it where it was not found.
    pub const fn help_if_missing(self) -> &'static str {
        match self {
            Self::OnnxRuntime => "python3 -m pip install onnxruntime, or set ORT_DYLIB_PATH to libonnxruntime",
            Self::Operators(LibraryUse::Run) => {
                "build it with `cargo build --release -p moa-ort` and set MOA_ORT_LIBRARY to it; the backend \
                 `ort-function` needs none"
            }
            Self::Operators(LibraryUse::RunFused) => {
                "no backend but `tensorrt` runs a fused graph without it: build it with `cargo build --release -p \
                 moa-ort` and set MOA_ORT_LIBRARY to it, or export with --form function"
            }
            Self::Operators(LibraryUse::Copy) => {
                "build it with `cargo build --release -p moa-ort` and set MOA_ORT_LIBRARY to it, or leave out \
                 --with-library"
            }
            Self::TensorRtPlugin => "build it with `cargo xtask tensorrt`, or set MOA_TENSORRT_LIBRARY to it",
        }
    }

    /// How to get one that can be loaded.
    pub const fn help_if_unusable(self) -> &'static str {
        match self {
            Self::Operators(LibraryUse::Run) => {
                "give the libmoa_ort of this version of moa-export for this machine, or use the backend \
                 `ort-function`, which needs none"
            }
            Self::Operators(LibraryUse::RunFused) => {
                "give the libmoa_ort of this version of moa-export for this machine, or export with --form function, \
                 which the backend `ort-function` runs without one"
            }
            Self::Operators(LibraryUse::Copy) => {
                "give the libmoa_ort of this version of moa-export for this machine, or leave out --with-library"
            }
            Self::OnnxRuntime | Self::TensorRtPlugin => self.help_if_missing(),
        }
    }

    /// How to get one that can be loaded in place of the file `path`, which its variable may name.
    pub(super) fn help_in_place_of(self, path: &Path) -> &'static str {
        let named = self.named().and_then(|named| absolute(named).ok());
        match self {
            _ if named.is_none_or(|named| named != path) => self.help_if_unusable(),
            Self::Operators(_) => {
                "set MOA_ORT_LIBRARY to the libmoa_ort of this version of moa-export for this machine, or unset it"
            }
            Self::OnnxRuntime | Self::TensorRtPlugin => self.help_if_misnamed(),
        }
    }
}

/// What the loader said of the library at `path`, which a loading library keeps behind the name of its function.
pub(super) fn said_of(path: &Path, error: &dyn Error) -> String {
    let said = error.source().unwrap_or(error).to_string();
    match said.strip_prefix(&format!("{}: ", path.display())) {
        Some(why) => why.to_owned(),
        None => said,
    }
}

impl fmt::Display for RuntimeLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OnnxRuntime => "ONNX Runtime",
            Self::Operators(_) => "the operator library libmoa_ort",
            Self::TensorRtPlugin => "the TensorRT plugin libmoa_tensorrt",
        })
    }
}
