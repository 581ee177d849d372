//! `cargo xtask sanitize`: tests under AddressSanitizer.
//!
//! The sanitizer comes with rustc and is an unstable option, which `RUSTC_BOOTSTRAP` allows on a stable toolchain. What
//! it is run on has no dependency in C: the contract, the kernels, the graphs, and every reader of untrusted files.

use std::{env, ffi::OsString};

use crate::{
    process::{self, Stream, stage},
    project::Project,
    tally::Tally,
};

/// With `--target`, flags do not reach build scripts and macros of the compiler.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Arguments of `cargo test`, by what they test.
const TESTS: [(&str, &[&str]); 3] = [
    ("contract and kernels", &["-p", "moa-schema", "-p", "moa-kernels"]),
    ("graphs", &["-p", "moa-graphs"]),
    (
        "readers of checkpoints and models",
        &[
            "-p",
            "moa-export",
            "--no-default-features",
            "--test",
            "checkpoint",
            "--test",
            "torch_checkpoint",
            "--test",
            "onnx_read",
        ],
    ),
];

/// Runs all of them; true where nothing failed.
pub(crate) fn run(project: &Project) -> Result<bool, String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(format!("the sanitizer is set up for {TARGET}"));
    }
    let mut all = Tally::default();
    for (title, arguments) in TESTS {
        let (tally, _) = stage(&format!("{title} under AddressSanitizer"), || address(project, arguments));
        all = all + tally?;
    }
    println!("\n{all}");
    Ok(all.failed == 0)
}

fn address(project: &Project, arguments: &[&str]) -> Result<Tally, String> {
    let target_dir = project.target.join("sanitize");
    let mut command = project.cargo_test(["--no-fail-fast", "--target", TARGET]);
    command.arg("--target-dir").arg(target_dir).args(arguments);
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    command.env("ASAN_OPTIONS", options());
    let mut tally = Tally::default();
    let status = process::watch(&mut command, Stream::Stdout, |line| tally = tally + Tally::of_cargo_line(line))?;
    Ok(tally.confirmed(status.success()))
}

/// What the user says comes last, and counts.
fn options() -> OsString {
    let mut options = OsString::from("detect_stack_use_after_return=1");
    if let Some(more) = env::var_os("ASAN_OPTIONS") {
        options.push(":");
        options.push(more);
    }
    options
}
