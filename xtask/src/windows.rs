//! `cargo xtask windows`: tests of the program and of the operator library for Windows, in Wine, with ONNX Runtime's
//! own build for Windows. They find what differs there, and tell nothing of speed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    foreign::Emulation,
    process,
    project::Project,
    python::{Packages, Python},
    summary::Summary,
    tally::Tally,
};

const EMULATION: Emulation = Emulation {
    target: "x86_64-pc-windows-gnu",
    linker: "x86_64-w64-mingw32-gcc",
    // Debian has Wine on no path.
    emulators: &["wine64", "wine", "/usr/lib/wine/wine64"],
    fix: "`apt install wine64 gcc-mingw-w64-x86-64` and `rustup target add` install what is needed",
};

/// The source of random numbers of Rust's standard library, which older Wines lack.
const RANDOM: &str = "#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T count) { return SystemFunction036(bytes, count); }
";

/// Tests, with the arguments of `cargo test`. Left out are those of the CUDA driver, whose library has another name on
/// Windows, of the command line, which need Linux, and of text generation: ONNX Runtime complains of Wine's missing
/// screen beside its messages.
const STAGES: [(&str, &str); 4] = [
    ("kernels on Windows", "-p moa-schema -p moa-graphs -p moa-kernels"),
    ("operator library on Windows", "-p moa-ort --lib -- --skip cuda"),
    ("compiler on Windows", "-p moa-export --lib"),
    (
        "exports and backends on Windows",
        "-p moa-export --test backends --test baseline --test checkpoint --test goldens --test inspect \
         --test jetmoe --test molm --test onnx_read --test profile --test reference --test report \
         --test settings --test storage_types --test torch_checkpoint --test verify",
    ),
];

/// Runs all of them; true where nothing failed.
pub(crate) fn run(project: &Project) -> bool {
    let wine = EMULATION.find(project);
    Summary::of(|summary| {
        let system = match wine {
            Ok(wine) => Ok(System::set_up(project, wine)?),
            Err(why) => Err(why),
        };
        STAGES.iter().try_for_each(|(title, arguments)| {
            let mut tests = project.cargo_test(["--no-fail-fast"].into_iter().chain(arguments.split(' ')));
            summary.add_or_skip(title, &system, |system| Tally::of_cargo(system.in_it(&mut tests)))
        })
    })
}

/// A Windows below the target folder.
struct System {
    wine: &'static str,
    folder: PathBuf,
    onnxruntime: PathBuf,
}

impl System {
    /// Makes it, with ONNX Runtime and the operator library.
    fn set_up(project: &Project, wine: &'static str) -> Result<Self, String> {
        let folder = project.target.join("windows");
        let source = folder.join("random.c");
        let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&source, RANDOM));
        written.map_err(|error| format!("{}: {error}", source.display()))?;
        let mut compiler = Command::new(EMULATION.linker);
        compiler.args(["-shared", "-o"]).arg(folder.join("bcryptprimitives.dll")).arg(&source).arg("-ladvapi32");
        process::run(&mut compiler)?;
        let python = Python::find(project)?;
        python.install(Packages::Windows)?;
        let onnxruntime = python.packages(Packages::Windows).join("onnxruntime/capi/onnxruntime.dll");
        let system = Self { wine, folder, onnxruntime };
        process::run(system.in_it(&mut project.cargo(["build", "--release", "-p", "moa-ort"])))?;
        Ok(system)
    }

    /// Cargo's `command`, whose programs are built for and run in this system.
    fn in_it<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let library = self.folder.join(EMULATION.target).join("release/moa_ort.dll");
        command.env("CARGO_BUILD_TARGET", EMULATION.target).env("CARGO_TARGET_DIR", &self.folder);
        command.env("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER", EMULATION.linker);
        command.env("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER", self.wine);
        command.env("WINEDEBUG", "-all").env("WINEPREFIX", self.folder.join("wine"));
        command.env("WINEPATH", seen_inside(&self.folder)).env("ORT_DISABLE_TELEMETRY", "1");
        command.env("ORT_DYLIB_PATH", seen_inside(&self.onnxruntime)).env("MOA_ORT_LIBRARY", seen_inside(&library))
    }
}

/// An absolute path as programs in Wine see it.
fn seen_inside(path: &Path) -> String {
    format!("Z:{}", path.display())
}
