//! Tests of the engine shim: libraries that play TensorRT, its parser and the CUDA driver over the same headers, and
//! the kernels on their emulator.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{Build, FIXED, FOLDERS, SANITIZERS};
use crate::{process, tally::Tally};

/// Sources of the emulator, in `custom_ops/cuda`.
const EMULATED: [&str; 8] = [
    "kernels/f32.cu",
    "kernels/f16.cu",
    "kernels/bf16.cu",
    "kernels/emulator/block.cpp",
    "kernels/emulator/signal.cpp",
    "kernels/emulator/warp.cpp",
    "kernels/emulator/warpgroup.cpp",
    "fake/emulated.cpp",
];

/// Builds everything into a folder of its own, which a program then has in `LD_LIBRARY_PATH`, and runs the tests there.
pub(super) fn test(build: &Build<'_>) -> Result<Tally, String> {
    let interface = build.interface();
    let folder = folder(build);
    fs::create_dir_all(&folder).map_err(at(&folder))?;
    let tested = build.test_folder(interface).join("libmoa_tensorrt.so");
    copy(&tested, &folder.join("libmoa_tensorrt.so"))?;
    process::run(&mut build.project.cargo(["build", "--release", "-p", "moa-cuda-c"]))?;
    copy(&build.project.cuda_library(), &folder.join("libmoa_cuda.so"))?;
    let define = format!("-DMOA_PLUGIN_V2={interface}");
    let options = [&SANITIZERS[..], &["-O1", &define]].concat();
    fakes(build, &folder, &options)?;
    emulator(build, &folder)?;
    let program = folder.join("engine");
    let mut command = build.compile(&options);
    command.arg(format!("-DMOA_CUDA_SOURCE_HASH=\"{}\"", moa_cuda::SOURCE_HASH));
    command.args(build.sources("tests/engine")?).arg(build.project.root.join("custom_ops/tensorrt/tests/harness.cpp"));
    process::run(command.args([FIXED, "-ldl", "-pthread", "-o"]).arg(&program))?;
    let mut run = build.project.command(&program);
    run.arg(folder.join("libmoa_tensorrt.so")).arg(&folder).arg(&build.project.root);
    run.env("LD_LIBRARY_PATH", &folder);
    for variable in ["MOA_CUDA_LIBRARY", "MOA_CUDA_KERNELS", "MOA_FAKE_TENSORRT"] {
        run.env_remove(variable);
    }
    Tally::of_cargo(&mut run)
}

/// Where the tests lie.
fn folder(build: &Build<'_>) -> PathBuf {
    build.out.join(format!("engine-{}", build.headers.version()))
}

/// Builds the same libraries without sanitizers, for programs that have none, beside the emulator and the archive that
/// the tests left; the folder.
pub(super) fn plain(build: &Build<'_>) -> Result<PathBuf, String> {
    let place = build.out.join("fakes");
    fs::create_dir_all(&place).map_err(at(&place))?;
    let define = format!("-DMOA_PLUGIN_V2={}", build.interface());
    let options = ["-O1", &define];
    let library = build.library("libmoa_tensorrt_plain.so", &FOLDERS, &options)?;
    fs::rename(&library, place.join("libmoa_tensorrt.so")).map_err(at(&library))?;
    fakes(build, &place, &options)?;
    for name in ["libmoa_cuda.so", "libemulated.so", "kernels.bin"] {
        copy(&folder(build).join(name), &place.join(name))?;
    }
    Ok(place)
}

/// Compiles the libraries that play TensorRT and the driver, and folders that lack one or have another.
fn fakes(build: &Build<'_>, folder: &Path, options: &[&str]) -> Result<(), String> {
    let major = build.headers.major;
    let other = if major == 8 { 10 } else { 8 };
    let shared = [options, &["-shared", "-fvisibility=default"]].concat();
    let sources = build.project.root.join("custom_ops/tensorrt/fake");
    let library = |names: &[&str], soname: &str, beside: Option<&PathBuf>| {
        let target = folder.join(soname);
        let mut command = build.compile(&shared);
        command.args(names.iter().map(|name| sources.join(name))).args(beside).arg("-ldl");
        command.arg(format!("-Wl,-soname,{soname}")).arg("-o").arg(&target);
        process::run(&mut command).map(|()| target)
    };
    let runtime = ["builder.cpp", "cast.cpp", "execution.cpp", "instance.cpp", "model.cpp", "network.cpp", "plan.cpp"];
    let nvinfer = library(&runtime, &format!("libnvinfer.so.{major}"), None)?;
    library(&["parser.cpp"], &format!("libnvonnxparser.so.{major}"), Some(&nvinfer))?;
    library(&["driver.cpp"], "libcuda.so.1", None)?;
    for (name, major) in [("no_parser", major), ("other", other)] {
        fs::create_dir_all(folder.join(name)).map_err(at(folder))?;
        copy(&nvinfer, &folder.join(name).join(format!("libnvinfer.so.{major}")))?;
    }
    Ok(())
}

/// Compiles the kernels for the processor, as the fake driver finds them.
fn emulator(build: &Build<'_>, folder: &Path) -> Result<(), String> {
    let mut command = build.project.command(&build.compiler);
    command.args(["-std=c++17", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fPIC", "-shared"]);
    command.args(["-Wl,--no-undefined", "-x", "c++"]);
    command.args(EMULATED.map(|name| build.project.root.join("custom_ops/cuda").join(name)));
    process::run(command.arg("-o").arg(folder.join("libemulated.so")))
}

/// Copies a file, as a new one: the old one may be loaded.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let _ = fs::remove_file(to);
    fs::copy(from, to).map(drop).map_err(at(from))
}

fn at(path: &Path) -> impl Fn(std::io::Error) -> String {
    let place = path.display().to_string();
    move |error| format!("{place}: {error}")
}
