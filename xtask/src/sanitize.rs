//! `cargo xtask sanitize`: tests under AddressSanitizer.
//!
//! The sanitizer comes with rustc and is an unstable option, which `RUSTC_BOOTSTRAP` allows on a stable toolchain. It
//! is told what Rust reads and writes, in vectors too; not what `asm!` does (the products on AMX tiles) and not what a
//! library in C++ does (the driver that the tests of the GPU's doors talk to). Of both it sees the memory that they
//! leave behind.

use std::{env, ffi::OsString, fs, path::Path};

use crate::{process::printed, project::Project, summary::Summary, tally::Tally};

/// With `--target`, flags do not reach build scripts and macros of the compiler.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Arguments of `cargo test`, by what they test.
const TESTS: [(&str, &[&str]); 4] = [
    ("contract and kernels", &["-p", "moa-schema", "-p", "moa-kernels"]),
    ("doors to ONNX Runtime and CUDA", &["-p", "moa-ort", "-p", "moa-cuda-driver", "-p", "moa-cuda-c"]),
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
pub(crate) fn run(project: &Project) -> bool {
    let sanitizer = has_sanitizer(project);
    Summary::of(|summary| {
        TESTS.into_iter().try_for_each(|(title, arguments)| {
            let title = format!("{title} under AddressSanitizer");
            summary.add_or_skip(&title, &sanitizer, |()| address(project, arguments))
        })
    })
}

fn address(project: &Project, arguments: &[&str]) -> Result<Tally, String> {
    let mut command = project.cargo_test(["--no-fail-fast", "--config", SETTINGS, "--target", TARGET]);
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address").env("ASAN_OPTIONS", options());
    command.arg("--target-dir").arg(project.target.join("sanitize")).args(arguments);
    Tally::of_cargo(&mut command)
}

/// Why nothing can be linked with AddressSanitizer, where it cannot. Some distributions leave its library out.
fn has_sanitizer(project: &Project) -> Result<(), String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(format!("the sanitizer is set up for {TARGET} alone"));
    }
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let folder = printed(project.command(rustc).args(["--print", "target-libdir", "--target", TARGET]));
    folder.and_then(|folder| has_address(Path::new(&folder)))
}

fn has_address(folder: &Path) -> Result<(), String> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let found = names.into_iter().any(|name| name.to_string_lossy().ends_with("_rt.asan.a"));
    found
        .then_some(())
        .ok_or_else(|| format!("this Rust has no AddressSanitizer in {}; that of rustup does", folder.display()))
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
