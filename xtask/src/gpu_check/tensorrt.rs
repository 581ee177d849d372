//! `cargo xtask gpu-check tensorrt WHEEL`: a folder that builds, proves and times TensorRT engines where it runs, and
//! TensorRT itself in pieces beside it.

use std::{fs, path::Path};

use super::{MAX_BYTES, copy_sources, runs_elsewhere, size, slim};
use crate::{
    process,
    project::Project,
    python::{Packages, Python},
    tensorrt,
};

/// The only release whose libraries come as a package that needs no account.
const RELEASE: (u32, u32) = (8, 6);

/// What the folder begins with.
const RUN: &str = r#"#!/bin/sh
# Usage: sh run.sh PIECES OUT [options of gpu_check.tensorrt_stage]. Writes OUT/tensorrt.json and OUT/tensorrt.txt.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
pieces=${1:?usage: sh run.sh PIECES OUT}
out=${2:?usage: sh run.sh PIECES OUT}
shift 2
export PYTHONPATH="$kit${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m gpu_check.tensorrt_stage --kit "$kit" --pieces "$pieces" --out "$out" "$@"
"#;

/// Prepares both folders and says how to use them.
pub(crate) fn run(project: &Project, wheel: &str, targets: &[&str]) -> Result<(), String> {
    let version =
        tensorrt::named_release()?.ok_or("set TENSORRT_ROOT to a folder that holds TensorRT 8.6's `include`")?;
    if version != RELEASE {
        return Err(format!("TENSORRT_ROOT has the headers of {}.{}, and the wheel is of 8.6", version.0, version.1));
    }
    let archive = project.target.join("cuda/kernels.bin");
    if !archive.is_file() {
        return Err(format!("{} is not there: run `cargo xtask cuda`", project.shown(&archive)));
    }
    tensorrt::run(project)?;
    project.build()?;
    let kit = project.target.join("gpu-check-trt");
    fill(project, &kit)?;
    slim(project, &archive, &kit, targets)?;
    let python = Python::find(project)?;
    python.install(Packages::Runtime)?;
    let mut command = python.command(project, &[Packages::Runtime])?;
    process::run(command.arg("tools/gpu_check/tensorrt_kit.py").arg(&kit).arg(wheel))?;
    let bytes = size(&kit).map_err(|error| format!("{}: {error}", kit.display()))?;
    if bytes > MAX_BYTES {
        return Err(format!(
            "{} holds {bytes} bytes, and {MAX_BYTES} are allowed; name one PTX beside the machine code, and no other \
             stays: `cargo xtask gpu-check tensorrt WHEEL sm_90a compute_80`",
            project.shown(&kit)
        ));
    }
    let place = project.shown(&kit);
    println!(
        "\n{place}: {:.1} MiB, and TensorRT in {place}-pieces. On a machine with a GPU:",
        bytes as f64 / f64::from(1 << 20)
    );
    println!("    sh {place}/run.sh PIECES OUT");
    Ok(())
}

/// Copies what was built into a fresh folder.
fn fill(project: &Project, kit: &Path) -> Result<(), String> {
    let at = |place: &Path| {
        let place = place.display().to_string();
        move |error| format!("{place}: {error}")
    };
    if kit.exists() {
        fs::remove_dir_all(kit).map_err(at(kit))?;
    }
    copy_sources(&project.root.join("tools/gpu_check"), &kit.join("gpu_check")).map_err(at(kit))?;
    let built = project.target.join("tensorrt");
    let files =
        [project.program(), built.join("libmoa_tensorrt.so"), built.join("libmoa_cuda.so"), project.operator_library()];
    for file in &files {
        runs_elsewhere(project, file)?;
        fs::copy(file, kit.join(file.file_name().unwrap_or_default())).map_err(at(file))?;
    }
    fs::write(kit.join("run.sh"), RUN).map_err(at(kit))
}
