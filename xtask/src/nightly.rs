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

/// Why the standard library cannot be compiled with it; `None` where it can be.
fn lacks_sources(project: &Project) -> Option<String> {
    let sysroot = match printed(command(project, "rustc").args(["--print", "sysroot"])) {
        Ok(sysroot) => sysroot,
        Err(why) => return Some(missing(&why, &["rust-src"])),
    };
    let there = Path::new(&sysroot).join("lib/rustlib/src/rust/library/Cargo.lock").is_file();
    (!there).then(|| missing(&format!("the toolchain {TOOLCHAIN} has no rust-src"), &["rust-src"]))
}

/// Why `cargo miri` cannot be run with it; `None` where it can be.
pub(crate) fn lacks_miri(project: &Project) -> Option<String> {
    let lacks = printed(command(project, "cargo").args(["miri", "--version"])).err();
    lacks.map(|why| missing(&why, &["miri", "rust-src"])).or_else(|| lacks_sources(project))
}

fn missing(why: &str, components: &[&str]) -> String {
    let components = components.join(",");
    format!("{why}; `rustup toolchain install {TOOLCHAIN} --component {components}` installs what is needed")
}
