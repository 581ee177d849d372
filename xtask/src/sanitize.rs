//! `cargo xtask sanitize`: tests under AddressSanitizer.
//!
//! The sanitizer comes with rustc and is an unstable option, which `RUSTC_BOOTSTRAP` allows on a stable toolchain. It is
//! told what Rust reads and writes, in vectors too; not what `asm!` does (the products on AMX tiles) and not what a library
//! in C++ does (the driver that the tests of the GPU's doors talk to). Of both it sees the memory that they leave behind.

use std::{env, ffi::OsString};

use crate::{process::stage, project::Project, tally::Tally};

/// With `--target`, flags do not reach build scripts and macros of the compiler.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Arguments of `cargo test`, by what they test.
const TESTS: [(&str, &[&str]); 4] = [
    ("contract and kernels", &["-p", "moa-schema", "-p", "moa-kernels"]),
    (
        "doors to ONNX Runtime and CUDA",
        &["-p", "moa-ort", "-p", "moa-cuda-driver", "-p", "moa-cuda-c", "--no-default-features"],
    ),
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

/// How they are compiled.
const SETTINGS: &str = "xtask/sanitize.toml";

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
    let mut command = project.cargo_test(["--no-fail-fast", "--config", SETTINGS, "--target", TARGET]);
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    command.arg("--target-dir").arg(target_dir).args(arguments);
    command.env("ASAN_OPTIONS", options());
    Tally::of_cargo(&mut command)
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
