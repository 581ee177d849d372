//! Other systems that the sources are compiled for here, and checked without a C compiler.

use std::{path::Path, process::Command};

use crate::{process::printed, project::Project};

/// A system that is not this one.
pub(crate) struct Foreign {
    /// As checks name it.
    pub(crate) title: &'static str,
    /// Rust's name of it.
    pub(crate) target: &'static str,
    /// Of `cargo clippy`: what can be compiled without C.
    arguments: &'static [&'static str],
}

/// All but what tract needs, which compiles C.
const WITHOUT_C: [&str; 15] = [
    "-p",
    "moa-schema",
    "-p",
    "moa-graphs",
    "-p",
    "moa-kernels",
    "-p",
    "moa-ort",
    "-p",
    "moa-export",
    "--no-default-features",
    "--features",
    "moa-export/ort",
    "--features",
    "moa-ort/cuda",
];

/// Each has its folder for builds, named as the target.
pub(crate) const ALL: [Foreign; 3] = [
    Foreign {
        title: "clippy: kernels on aarch64",
        target: "aarch64-unknown-linux-gnu",
        arguments: &["-p", "moa-schema", "-p", "moa-kernels", "--all-targets"],
    },
    Foreign { title: "clippy: Windows", target: "x86_64-pc-windows-gnu", arguments: &WITHOUT_C },
    Foreign { title: "clippy: macOS", target: "aarch64-apple-darwin", arguments: &WITHOUT_C },
];

impl Foreign {
    /// Clippy on what is compiled for it.
    pub(crate) fn clippy(&self, project: &Project) -> Command {
        let mut command = project.cargo(["clippy", "--target", self.target]);
        command.args(self.arguments).arg("--target-dir").arg(project.target.join("foreign"));
        command.args(["--", "-D", "warnings"]);
        command
    }
}

/// What runs programs of another system here.
pub(crate) struct Emulation {
    /// Rust's name of the system.
    pub(crate) target: &'static str,
    /// The C compiler that links for it.
    pub(crate) linker: &'static str,
    /// Names of the emulator, in the order in which they are tried.
    pub(crate) emulators: &'static [&'static str],
    /// How the linker, the emulator and the standard library are installed.
    pub(crate) fix: &'static str,
}

impl Emulation {
    /// The emulator that is there; why nothing can be emulated where something is missing.
    pub(crate) fn find(&self, project: &Project) -> Result<&'static str, String> {
        let Self { target, linker, emulators, fix } = self;
        if let Some(why) = lacks_target(project, target) {
            return Err(why);
        }
        let there = |name: &str| printed(Command::new(name).arg("--version"));
        there(linker).map_err(|why| format!("{why}; {fix}"))?;
        let found = emulators.iter().copied().find(|name| there(name).is_ok());
        found.ok_or_else(|| format!("there is no {}; {fix}", emulators.join(" or ")))
    }
}

/// Why nothing can be compiled for `target`; `None` where this Rust has its standard library.
pub(crate) fn lacks_target(project: &Project, target: &str) -> Option<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let folder = match printed(project.command(rustc).args(["--print", "target-libdir", "--target", target])) {
        Ok(folder) => folder,
        Err(why) => return Some(why),
    };
    let lacks = !Path::new(&folder).is_dir();
    lacks.then(|| format!("this Rust has no {target}; `rustup target add {target}` installs it"))
}
