//! `cargo xtask cuda`: the CUDA kernels as machine code. Needs no GPU, driver or CUDA installation.

use crate::{
    process::{self, stage},
    project::Project,
    python::{Packages, Python},
};

/// Compiles what is not compiled yet, then checks the archive.
pub(crate) fn run(project: &Project) -> Result<(), String> {
    let python = Python::find(project)?;
    stage("Python packages", || python.install(Packages::Cuda)).0?;
    let archive = project.target.join("cuda/kernels.bin");
    stage("kernels", || {
        let mut compile = python.command(project, &[Packages::Cuda])?;
        compile.arg("tools/compile_cuda.py").arg("custom_ops/cuda/kernels").arg(&archive);
        process::run(&mut compile)
    })
    .0?;
    stage("archive", || {
        let words = ["test", "--release", "-p", "moa-cuda", "--test", "archive", "--", "--include-ignored"];
        process::run(project.cargo(words).env("MOA_CUDA_KERNELS", &archive))
    })
    .0
}
