//! The project's own commands: `cargo xtask help` lists them.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod aarch64;
mod check;
mod cuda;
mod demo;
mod foreign;
mod gpu_check;
mod miri;
mod nightly;
mod process;
mod project;
mod python;
mod sanitize;
mod summary;
mod synthesize;
mod tally;
mod tensorrt;
mod test;
mod windows;

use std::process::ExitCode;

use project::Project;

const HELP: &str = "\
cargo xtask COMMAND

  demo    export the bundled translation model, verify it in ONNX Runtime and tract, translate
  test    run every test of the project, Rust and Python
          --optimum: instead, those that need PyTorch: with Hugging Face's Optimum, of gpu-check, and of the
          emulated CUDA kernels
  check   formatting, layers, places of unsafe code, sizes, clippy, the compile half alone, documentation
  sanitize
          tests of the kernels, the doors of the operator library to C, the graphs and the readers of untrusted files
          under AddressSanitizer, which does not see into the assembly that multiplies on AMX tiles or into C and C++
  miri    small tests of the kernels and of the doors of the operator library in Miri, where rustup's nightly toolchain
          has it with rust-src; without AMX tiles, AVX-512 but for products, rounding to f16 with F16C, and the CUDA driver
  aarch64 tests of the kernels for aarch64 in qemu, where it, a C compiler and rustup's target are installed
  windows tests of the program and the operator library for Windows in Wine, where it, MinGW and rustup's target are
          installed
  cuda    compile the CUDA kernels for every architecture, without a GPU, and check what they need

  gpu-check [sm_90a …]
          fill a folder that checks and times the CUDA kernels on a machine with a GPU; with machine code of
          these architectures only, if any is named
  gpu-check tensorrt WHEEL sm_90a compute_80 …
          fill a folder that builds, proves and times TensorRT engines there; WHEEL is PyPI's tensorrt 8.6.0, which is
          cut into pieces beside it, and TENSORRT_ROOT holds the headers of 8.6
  tensorrt [test]
          build the TensorRT plugin against TENSORRT_ROOT, else against the headers of TensorRT 11.4 that Cargo
          fetches; test: run its tests alone
  synthesize jetmoe-8b|molm-350m-4b -o DIR [--layers N] [--shards N] [--seed N] [--sparse]
          a checkpoint of the shapes of jetmoe/jetmoe-8b, or of ibm/MoLM-350M-4B, with pseudo-random values

Builds of the operator library and of libmoa_cuda.so embed the CUDA kernels of the archive that MOA_CUDA_KERNELS names.
CXX names another C++ compiler than c++, CC another C compiler for tests than cc, CARGO_TARGET_DIR another folder than
target; ASAN_OPTIONS is added to the options of `sanitize`.
Property tests draw the same cases in every run of `test`; PROPTEST_RNG_SEED is another seed.
Python packages are installed under target/python and nowhere else. PYTHON names another
interpreter than python3, MOA_PYTORCH a folder with an installed PyTorch, where
`test --optimum` is not to load several GB.";

fn help() -> ExitCode {
    println!("{HELP}");
    ExitCode::SUCCESS
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments.as_slice() {
        [] | ["help", ..] => return help(),
        words if words.iter().any(|word| ["-h", "--help"].contains(word)) => return help(),
        ["demo"] => Project::find().and_then(|project| demo::run(&project)),
        ["test"] => Project::find().map(|project| test::run(&project)),
        ["test", "--optimum"] => Project::find().map(|project| test::run_optimum(&project)),
        ["check"] => Project::find().and_then(|project| check::run(&project)),
        ["cuda"] => Project::find().and_then(|project| cuda::run(&project)).map(|()| true),
        ["aarch64"] => Project::find().map(|project| aarch64::run(&project)),
        ["miri"] => Project::find().map(|project| miri::run(&project)),
        ["windows"] => Project::find().map(|project| windows::run(&project)),
        ["sanitize"] => Project::find().map(|project| sanitize::run(&project)),
        ["gpu-check", "tensorrt"] => Err("name the wheel: `cargo xtask gpu-check tensorrt WHEEL`".into()),
        ["gpu-check", "tensorrt", wheel, targets @ ..] => {
            Project::find().and_then(|project| gpu_check::tensorrt::run(&project, wheel, targets)).map(|()| true)
        }
        ["gpu-check", targets @ ..] => {
            Project::find().and_then(|project| gpu_check::run(&project, targets)).map(|()| true)
        }
        ["tensorrt"] => Project::find().and_then(|project| tensorrt::run(&project)).map(|()| true),
        ["tensorrt", "test"] => Project::find().and_then(|project| tensorrt::run_tests(&project)),
        ["synthesize", arguments @ ..] => synthesize::run(arguments).map(|()| true),
        _ => {
            eprintln!("error: there is no `cargo xtask {}`\n\n{HELP}", arguments.join(" "));
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}
