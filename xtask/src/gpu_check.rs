//! `cargo xtask gpu-check`: everything that checks and times the CUDA kernels, in one folder that needs neither Rust
//! nor a network where it runs.

pub(crate) mod tensorrt;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    cuda,
    process::{self, stage},
    project::Project,
    python::Python,
};

/// Largest size of the folder in bytes: it is carried to the machine with the GPU.
const MAX_BYTES: u64 = 45 << 20;

/// Newest version of glibc that the libraries may ask for: Ubuntu 24.04 has it.
const NEWEST_GLIBC: (u32, u32) = (2, 39);

/// What the folder begins with; Python is looked for in the `PATH` alone.
const RUN: &str = r#"#!/bin/sh
# Usage: sh run.sh OUT [options of gpu_check]. Writes OUT/results.json, OUT/table.txt and OUT/log.txt in under 10 minutes.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: sh run.sh OUT}
shift
export PYTHONPATH="$kit${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m gpu_check --kit "$kit" --out "$out" "$@"
"#;

/// Prepares the folder, with machine code for `targets` or for every architecture, and says how to run it.
pub(crate) fn run(project: &Project, targets: &[&str]) -> Result<(), String> {
    let kit = project.target.join("gpu-check");
    let archive = project.target.join("cuda/kernels.bin");
    cuda::run(project)?;
    let libraries = stage("build", || build(project)).0?;
    stage("fill the folder", || {
        fill(project, &kit, &archive, &libraries)?;
        if targets.is_empty() { Ok(()) } else { slim(project, &archive, &kit, targets) }
    })
    .0?;
    let bytes = size(&kit).map_err(|error| format!("{}: {error}", kit.display()))?;
    if bytes > MAX_BYTES {
        let place = project.shown(&kit);
        return Err(format!(
            "{place} holds {bytes} bytes, and {MAX_BYTES} are allowed; name the architectures whose machine code it \
             needs: `cargo xtask gpu-check sm_90a`"
        ));
    }
    let place = project.shown(&kit);
    println!("\n{place}: {:.1} MiB. On a machine with a GPU, PyTorch and Triton:", bytes as f64 / f64::from(1 << 20));
    println!("    sh {place}/run.sh OUT");
    Ok(())
}

/// Builds the libraries and proves that they load on older systems than this one.
fn build(project: &Project) -> Result<[PathBuf; 2], String> {
    for package in ["moa-cuda-c", "moa-ort"] {
        process::run(&mut project.cargo(["build", "--release", "-p", package]))?;
    }
    let libraries = [project.cuda_library(), project.operator_library()];
    for library in &libraries {
        let (major, minor) = runs_elsewhere(project, library)?;
        println!("{}: GLIBC {major}.{minor}", project.shown(library));
    }
    Ok(libraries)
}

/// The version of glibc that a program or library asks for, which no machine with a GPU may lack.
fn runs_elsewhere(project: &Project, file: &Path) -> Result<(u32, u32), String> {
    let bytes = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let newest = newest_glibc(&bytes);
    if newest <= NEWEST_GLIBC {
        return Ok(newest);
    }
    let ((major, minor), file) = (NEWEST_GLIBC, project.shown(file));
    Err(format!(
        "{file} needs GLIBC {}.{}, and {major}.{minor} is the newest that is allowed; build it on an older system",
        newest.0, newest.1
    ))
}

/// The newest version of glibc whose symbols a library names.
fn newest_glibc(library: &[u8]) -> (u32, u32) {
    const MARK: &[u8] = b"GLIBC_";
    let marks = library.windows(MARK.len()).enumerate().filter(|(_, window)| *window == MARK);
    let versions = marks.filter_map(|(place, _)| {
        let rest = &library[place + MARK.len()..];
        let length = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
        let mut numbers = std::str::from_utf8(&rest[..length]).ok()?.split('.').map_while(|word| word.parse().ok());
        Some((numbers.next()?, numbers.next()?))
    });
    versions.max().unwrap_or((0, 0))
}

/// Copies everything into a fresh folder; what an ONNX Runtime stage needs beside it stays.
fn fill(project: &Project, kit: &Path, archive: &Path, libraries: &[PathBuf]) -> Result<(), String> {
    let tools = project.root.join("tools/gpu_check");
    let at = |place: &Path| {
        let place = place.display().to_string();
        move |error: io::Error| format!("{place}: {error}")
    };
    for stale in ["gpu_check", "work"] {
        let folder = kit.join(stale);
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(at(&folder))?;
        }
    }
    copy_sources(&tools, &kit.join("gpu_check")).map_err(at(&tools))?;
    let reference = project.root.join("tests/python/operator_reference.py");
    let graphs = project.root.join("benches/cpu_operator_graphs.py");
    for file in libraries.iter().map(PathBuf::as_path).chain([archive, &reference, &graphs]) {
        let target = kit.join(file.file_name().unwrap_or_default());
        fs::copy(file, &target).map_err(at(file))?;
    }
    let run = kit.join("run.sh");
    fs::write(&run, RUN).map_err(at(&run))
}

/// Leaves machine code for `targets` alone in the folder's archive.
fn slim(project: &Project, archive: &Path, kit: &Path, targets: &[&str]) -> Result<(), String> {
    let mut command = Python::find(project)?.command(project, &[])?;
    command.arg("tools/gpu_check/slim.py").arg(archive).arg(kit.join("kernels.bin")).args(targets);
    process::run(&mut command)
}

/// Copies Python files and folders.
fn copy_sources(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let target = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            if path.file_name().is_none_or(|name| name != "__pycache__") {
                copy_sources(&path, &target)?;
            }
        } else if path.extension().is_some_and(|ending| ending == "py") {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

/// Bytes of all files of the folder, those of ONNX Runtime not counted.
fn size(folder: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if path.is_dir() {
            bytes += if entry.file_name() == "onnxruntime" { 0 } else { size(&path)? };
        } else {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::planted;

    #[test]
    fn the_newest_version_is_found() {
        let library = b"\0GLIBC_2.2.5\0memcpy\0GLIBC_2.34\0GLIBC_2.9\0GLIBC_PRIVATE\0GLIBC_";
        assert_eq!(newest_glibc(library), (2, 34));
        assert_eq!(newest_glibc(b"nothing"), (0, 0));
    }

    #[test]
    fn sources_are_copied_and_nothing_else() {
        let tree = planted(&[
            ("from/a.py", "1"),
            ("from/inner/b.py", "22"),
            ("from/__pycache__/a.pyc", "x"),
            ("from/README.md", "x"),
        ]);
        let to = tree.path().join("to");
        copy_sources(&tree.path().join("from"), &to).unwrap();
        assert_eq!(size(&to).unwrap(), 3);
        assert!(to.join("inner/b.py").is_file());
    }
}
