//! `cargo xtask miri`: tests in Miri, which interprets and knows every rule that `unsafe` code may break: bounds of each
//! borrow, aliasing, data races, memory that nobody wrote, alignment, leaks.
//!
//! It has no AMX tiles, and of AVX-512 no more than the microkernels of products use. Where a test goes through the levels of
//! instructions, it meets all that the processor is said to have.

use std::process::Command;

use crate::{process::stage, project::Project, tally::Tally};

/// What Miri is a part of.
const TOOLCHAIN: &str = "nightly";

const INSTALL: &str = "rustup toolchain install nightly --component miri --component rust-src";

/// Functions such as `exp` give the same in every run, as they do outside.
const FLAGS: &str = "-Zmiri-deterministic-floats";

/// Some tests.
struct Stage {
    title: &'static str,
    /// Instructions that the processor is said to have.
    features: &'static str,
    /// Of `cargo test`.
    arguments: &'static [&'static str],
}

const AVX2: &str = "+avx2,+fma,+f16c";

const STAGES: [Stage; 6] = [
    Stage { title: "contract", features: "", arguments: &["-p", "moa-schema"] },
    Stage { title: "stages of the operators on AVX2", features: AVX2, arguments: &["-p", "moa-kernels", "--lib"] },
    Stage {
        title: "products on AVX-512",
        features: "+avx2,+fma,+f16c,+avx512f,+avx512dq",
        arguments: &["-p", "moa-kernels", "--lib", "simd::product"],
    },
    Stage { title: "operators on AVX2", features: AVX2, arguments: SMALL },
    Stage { title: "operators on portable instructions", features: "", arguments: SMALL },
    Stage {
        title: "door to ONNX Runtime",
        features: "",
        arguments: &["-p", "moa-ort", "--lib", "--no-default-features"],
    },
];

/// Calls that do not take hours.
const SMALL: &[&str] = &["-p", "moa-kernels", "--test", "kernels", "small"];

/// Runs all of them; true where nothing failed.
pub(crate) fn run(project: &Project) -> Result<bool, String> {
    if let Some(why) = missing(project) {
        println!("skipped: {why}; `{INSTALL}` installs it");
        return Ok(true);
    }
    let mut all = Tally::default();
    for Stage { title, features, arguments } in STAGES {
        let (tally, _) = stage(&format!("{title} in Miri"), || {
            let mut command = miri(project, &["test", "--no-fail-fast"]);
            command.args(arguments).env("MIRIFLAGS", FLAGS).env("RUSTFLAGS", flags(features));
            Tally::of_cargo(&mut command)
        });
        all = all + tally?;
    }
    println!("\n{all}");
    Ok(all.failed == 0)
}

/// Why there is no Miri, if there is none.
fn missing(project: &Project) -> Option<String> {
    match miri(project, &["--version"]).output() {
        Ok(output) if output.status.success() => None,
        Ok(_) => Some(format!("the toolchain {TOOLCHAIN} has no Miri")),
        Err(error) => Some(format!("rustup cannot be started ({error})")),
    }
}

/// `cargo miri` of the toolchain that has it, whichever runs this program.
fn miri(project: &Project, arguments: &[&str]) -> Command {
    let mut command = project.command("rustup");
    command.args(["run", TOOLCHAIN, "cargo", "miri"]).args(arguments);
    for other in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(other);
    }
    command.env("CARGO_TARGET_DIR", project.target.join("miri"));
    command
}

fn flags(features: &str) -> String {
    if features.is_empty() { String::new() } else { format!("-Ctarget-feature={features}") }
}
