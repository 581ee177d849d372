//! The nightly toolchain of rustup, for what no stable one has.

use std::{path::Path, process::Command};

use crate::{process::printed, project::Project};

/// Its name.
const TOOLCHAIN: &str = "nightly";

/// A program of that toolchain, whichever runs this one.
pub(crate) fn command(project: &Project, program: &str) -> Command {
    let mut command = project.command("rustup");
    command.args(["run", TOOLCHAIN, program]);
    for other in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(other);
    }
    command
}

/// Why the standard library cannot be compiled with it, where it cannot be.
fn has_sources(project: &Project) -> Result<(), String> {
    let sysroot = printed(command(project, "rustc").args(["--print", "sysroot"]));
    let sysroot = sysroot.map_err(|why| missing(&why, &["rust-src"]))?;
    let there = Path::new(&sysroot).join("lib/rustlib/src/rust/library/Cargo.lock").is_file();
    there.then_some(()).ok_or_else(|| missing(&format!("the toolchain {TOOLCHAIN} has no rust-src"), &["rust-src"]))
}

/// Why `cargo miri` cannot be run with it, where it cannot be.
pub(crate) fn has_miri(project: &Project) -> Result<(), String> {
    let version = printed(command(project, "cargo").args(["miri", "--version"]));
    version.map_err(|why| missing(&why, &["miri", "rust-src"]))?;
    has_sources(project)
}

fn missing(why: &str, components: &[&str]) -> String {
    let components = components.join(",");
    format!("{why}; `rustup toolchain install {TOOLCHAIN} --component {components}` installs what is needed")
}
