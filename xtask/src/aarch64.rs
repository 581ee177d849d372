//! `cargo xtask aarch64`: tests of the kernels for aarch64 in an emulator, which finds wrong results and tells nothing
//! of speed.

use crate::{foreign::Emulation, project::Project, summary::Summary, tally::Tally};

const EMULATION: Emulation = Emulation {
    target: "aarch64-unknown-linux-gnu",
    linker: "aarch64-linux-gnu-gcc",
    // The statically linked one first.
    emulators: &["qemu-aarch64-static", "qemu-aarch64"],
    fix: "`apt install gcc-aarch64-linux-gnu qemu-user-static` and `rustup target add` install what is needed",
};

/// Where the emulated program finds its libraries.
const SYSROOT: &str = "/usr/aarch64-linux-gnu";

/// Some tests.
struct Stage {
    title: &'static str,
    /// The processor that is emulated; all that the emulator knows where it is empty.
    processor: &'static str,
    /// Of `cargo test`.
    arguments: &'static [&'static str],
}

/// Tests of the operators are run in parts: the emulator keeps some memory of every thread that has ended.
const STAGES: [Stage; 6] = [
    Stage {
        title: "contract and stages of the operators on aarch64",
        processor: "",
        arguments: &["-p", "moa-schema", "-p", "moa-kernels", "--lib"],
    },
    Stage {
        title: "operators on aarch64",
        processor: "",
        arguments: &["-p", "moa-kernels", "--test", "kernels", "--", "--skip", "shared_cache", "--skip", "quantized"],
    },
    Stage {
        title: "operators on aarch64, caches that are shared",
        processor: "",
        arguments: &["-p", "moa-kernels", "--test", "kernels", "shared_cache"],
    },
    Stage {
        title: "operators on aarch64, rounded rows",
        processor: "",
        arguments: &["-p", "moa-kernels", "--test", "kernels", "quantized"],
    },
    Stage {
        title: "memory that operators take on aarch64",
        processor: "",
        arguments: &["-p", "moa-kernels", "--test", "allocations"],
    },
    Stage {
        title: "kernels on aarch64 without dot products",
        processor: "cortex-a72",
        arguments: &["-p", "moa-kernels", "--lib", "simd"],
    },
];

/// Runs all of them; true where nothing failed.
pub(crate) fn run(project: &Project) -> bool {
    let emulator = emulator(project);
    Summary::of(|summary| {
        STAGES.into_iter().try_for_each(|Stage { title, processor, arguments }| {
            summary.add_or_skip(title, &emulator, |emulator| emulated(project, emulator, processor, arguments))
        })
    })
}

fn emulated(project: &Project, emulator: &str, processor: &str, arguments: &[&str]) -> Result<Tally, String> {
    let mut command = project.cargo_test(["--no-fail-fast", "--target", EMULATION.target]);
    command.arg("--target-dir").arg(project.target.join("aarch64")).args(arguments);
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", EMULATION.linker);
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{emulator} -L {SYSROOT}"));
    command.env_remove("QEMU_CPU").envs((!processor.is_empty()).then_some(("QEMU_CPU", processor)));
    Tally::of_cargo(&mut command)
}

/// The emulator that is there; why nothing can be emulated where something is missing.
fn emulator(project: &Project) -> Result<&'static str, String> {
    if cfg!(target_arch = "aarch64") {
        return Err(
            "nothing is emulated on aarch64 itself, where `cargo xtask test` runs what the processor has".into()
        );
    }
    EMULATION.find(project)
}
