//! Where things are.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use moa_schema::{CUDA_LIBRARY, ORT_LIBRARY, library_file};

use crate::process;

/// Crates of the operator library.
pub(crate) const OPERATOR_CRATES: [&str; 7] =
    ["moa-schema", "moa-kernels", "moa-cuda", "moa-cuda-driver", "moa-cuda-c", "moa-cuda-fake", "moa-ort"];

/// Crates of the compiler. Cargo unifies features within one invocation, and the operator library must not get
/// those of the compiler: they are never built together.
pub(crate) const COMPILER_CRATES: [&str; 2] = ["moa-graphs", "moa-export"];

/// Seed of property tests.
const SEED: &str = "PROPTEST_RNG_SEED";

/// The repository and its build folder.
#[derive(Debug)]
pub(crate) struct Project {
    /// Root of the repository.
    pub(crate) root: PathBuf,
    /// Cargo's target folder.
    pub(crate) target: PathBuf,
}

impl Project {
    /// The project that Cargo started this program for.
    pub(crate) fn find() -> Result<Self, String> {
        let root = match env::var_os("CARGO_MANIFEST_DIR") {
            Some(manifest) => PathBuf::from(manifest).join(".."),
            None => PathBuf::from("."),
        };
        let root = fs::canonicalize(root).map_err(|error| format!("the repository is not there: {error}"))?;
        if !root.join("xtask/Cargo.toml").is_file() {
            return Err("run `cargo xtask` inside the repository".into());
        }
        let target = env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty());
        let target = target.map_or_else(|| root.join("target"), PathBuf::from);
        let target = std::path::absolute(target).map_err(|error| format!("the target folder: {error}"))?;
        Ok(Self { root, target })
    }

    /// `path`, from the root where it lies there.
    pub(crate) fn shown(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap_or(path).display().to_string()
    }

    /// `program`, started in the root.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        command
    }

    /// `cargo` with these arguments.
    pub(crate) fn cargo<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = self.command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(arguments);
        command
    }

    /// `cargo test --release` with these arguments. Property tests draw the same cases in every run, so that none fails
    /// by chance, unless the user names a seed; `cargo test` alone draws new ones.
    pub(crate) fn cargo_test<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = self.cargo(["test", "--release"].into_iter().chain(arguments));
        if env::var_os(SEED).is_none() {
            command.env(SEED, "1");
        }
        command
    }

    /// Builds the program, the operator library and that of the CUDA kernels.
    pub(crate) fn build(&self) -> Result<(), String> {
        for package in ["moa-export", "moa-ort", "moa-cuda-c"] {
            process::run(&mut self.cargo(["build", "--release", "-p", package]))?;
        }
        Ok(())
    }

    /// The program `moa-export`.
    pub(crate) fn program(&self) -> PathBuf {
        self.target.join("release").join(format!("moa-export{}", env::consts::EXE_SUFFIX))
    }

    /// The operator library.
    pub(crate) fn operator_library(&self) -> PathBuf {
        self.library(ORT_LIBRARY)
    }

    /// The CUDA kernels behind their C ABI.
    pub(crate) fn cuda_library(&self) -> PathBuf {
        self.library(CUDA_LIBRARY)
    }

    fn library(&self, name: &str) -> PathBuf {
        self.target.join("release").join(library_file(name))
    }
}
