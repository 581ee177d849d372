//! `cargo xtask miri`: tests in Miri, which interprets and knows every rule that `unsafe` code may break: bounds of
//! each borrow, aliasing, data races, memory that nobody wrote, alignment, leaks.
//!
//! It has no AMX tiles, and of AVX-512 no more than the microkernels of products use; it cannot call C. Tests of those
//! say so and are counted as skipped. Where a test goes through the levels of instructions, it meets all that the
//! processor is said to have. Of the kernels' integration tests it runs those that are small enough.

use crate::{nightly, project::Project, summary::Summary, tally::Tally};

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
const AVX_VNNI: &str = "+avx2,+fma,+f16c,+avxvnni";

const STAGES: [Stage; 8] = [
    Stage { title: "contract", features: "", arguments: &["-p", "moa-schema"] },
    Stage { title: "stages of the operators on AVX2", features: AVX2, arguments: &["-p", "moa-kernels", "--lib"] },
    Stage {
        title: "products of integers on AVX_VNNI",
        features: AVX_VNNI,
        arguments: &["-p", "moa-kernels", "--lib", "simd::quantized"],
    },
    Stage {
        title: "products on AVX-512",
        features: "+avx2,+fma,+f16c,+avx512f,+avx512dq,+avx512bw",
        arguments: &["-p", "moa-kernels", "--lib", "--", "simd::compact", "simd::product"],
    },
    Stage {
        title: "products and few slots on NEON",
        features: "+dotprod",
        arguments: &[
            "--target",
            "aarch64-unknown-linux-gnu",
            "-p",
            "moa-kernels",
            "--lib",
            "--",
            "simd::few_slots",
            "simd::neon",
            "simd::nibbles",
            "simd::product",
            "simd::quantized",
            "simd::widened",
        ],
    },
    Stage { title: "operators on AVX2", features: AVX2, arguments: SMALL },
    Stage { title: "operators on portable instructions", features: "", arguments: SMALL },
    Stage {
        title: "doors to ONNX Runtime and CUDA",
        features: "",
        arguments: &["-p", "moa-ort", "-p", "moa-cuda-c", "--lib"],
    },
];

/// Calls that do not take hours.
const SMALL: &[&str] = &["-p", "moa-kernels", "--test", "kernels", "small"];

/// Runs all of them; true where nothing failed.
pub(crate) fn run(project: &Project) -> bool {
    let interpreter = nightly::has_miri(project);
    Summary::of(|summary| {
        STAGES.into_iter().try_for_each(|Stage { title, features, arguments }| {
            let title = format!("{title} in Miri");
            summary.add_or_skip(&title, &interpreter, |()| miri(project, features, arguments))
        })
    })
}

fn miri(project: &Project, features: &str, arguments: &[&str]) -> Result<Tally, String> {
    let flags = if features.is_empty() { String::new() } else { format!("-Ctarget-feature={features}") };
    let mut command = nightly::command(project, "cargo");
    command.args(["miri", "test", "--no-fail-fast"]).args(arguments);
    command.env("CARGO_TARGET_DIR", project.target.join("miri")).env("MIRIFLAGS", FLAGS).env("RUSTFLAGS", flags);
    Tally::of_cargo(&mut command)
}
