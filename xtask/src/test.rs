//! `cargo xtask test`: every test, counted over all runners.

use std::ffi::OsString;

use crate::{
    process::{self, Stream, stage},
    project::{COMPILER_CRATES, OPERATOR_CRATES, Project},
    python::{Packages, Python, given_pytorch},
    summary::Summary,
    tally::{Tally, Unittest},
    tensorrt,
};

/// Runs everything but the tests with Optimum; true where nothing failed.
pub(crate) fn run(project: &Project) -> bool {
    Summary::of(|summary| run_stages(project, summary))
}

/// Runs the tests with Optimum, and the files of tests that skip some where there is no PyTorch; true where nothing
/// failed.
pub(crate) fn run_optimum(project: &Project) -> bool {
    Summary::of(|summary| run_optimum_stages(project, summary))
}

/// Adds a line for every stage; fails where the rest cannot run.
fn run_stages(project: &Project, summary: &mut Summary) -> Result<(), String> {
    let python = Python::find(project)?;
    let why_not_oldest = python.lacks(Packages::Oldest);
    stage("Python packages", || {
        python.install(Packages::Runtime)?;
        python.install(Packages::Test)?;
        if why_not_oldest.is_none() { python.install(Packages::Oldest) } else { Ok(()) }
    })
    .0?;
    stage("build", || project.build()).0?;
    let variables = variables(project, &python)?;
    let cargo = |crates: &[&str]| cargo_test(project, crates, &variables);
    summary.add("Rust: operator library", || cargo(&OPERATOR_CRATES))?;
    summary.add("Rust: compiler", || cargo(&COMPILER_CRATES))?;
    summary.add("Rust: xtask", || cargo(&["xtask"]))?;
    plugin(project, &variables, summary)?;
    let newest = [Packages::Test, Packages::Runtime];
    let unittest = |packages: &[Packages]| python_test(project, &python, packages, &variables, ("tests/python", ALL));
    summary.add("Python", || unittest(&newest))?;
    let title = "Python, on the oldest ONNX Runtime";
    let oldest = [Packages::Oldest, Packages::Test, Packages::Runtime];
    match why_not_oldest {
        None => summary.add(title, || unittest(&oldest))?,
        Some(why) => summary.skip(title, &why),
    }
    summary.skip(OPTIMUM, "PyTorch is several GB; `cargo xtask test --optimum` installs and runs it");
    Ok(())
}

/// The TensorRT plugin, where there are headers, and the program with libraries that play TensorRT.
fn plugin(project: &Project, variables: &[(&'static str, OsString)], summary: &mut Summary) -> Result<(), String> {
    let title = "TensorRT plugin, on a host that plays TensorRT";
    let (tested, elapsed) = stage(title, || tensorrt::test(project));
    let engines = "TensorRT engines of the program, on libraries that play TensorRT";
    match tested? {
        Ok((tally, fakes)) => {
            summary.push(title, tally, elapsed, None);
            let variables = [variables, &[("MOA_TENSORRT_FAKES", fakes.into_os_string())]].concat();
            summary.add(engines, || engine_test(project, &variables))
        }
        Err(why) => {
            summary.skip(title, &why);
            summary.skip(engines, &why);
            Ok(())
        }
    }
}

/// The tests that need such libraries.
fn engine_test(project: &Project, variables: &[(&str, OsString)]) -> Result<Tally, String> {
    let mut command = project.cargo_test(["-p", "moa-export", "--test", "cli", "--", "--ignored", "tensorrt_engines"]);
    Tally::of_cargo(command.envs(variables.iter().map(|(name, value)| (name, value))))
}

const OPTIMUM: &str = "Python, with Optimum";

fn run_optimum_stages(project: &Project, summary: &mut Summary) -> Result<(), String> {
    let python = Python::find(project)?;
    let packages = [Packages::Runtime, Packages::Optimum, Packages::Torch];
    let for_gpu_check = [Packages::Test, Packages::Runtime, Packages::Optimum, Packages::Torch];
    stage("Python packages", || {
        let mut missing = for_gpu_check.iter().filter(|set| **set != Packages::Torch || given_pytorch().is_none());
        missing.try_for_each(|set| python.install(*set))
    })
    .0?;
    stage("build", || project.build()).0?;
    let variables = variables(project, &python)?;
    summary.add(OPTIMUM, || python_test(project, &python, &packages, &variables, ("tests/optimum", ALL)))?;
    for (title, pattern) in WITH_PYTORCH {
        let place = ("tests/python", pattern);
        summary.add(title, || python_test(project, &python, &for_gpu_check, &variables, place))?;
    }
    Ok(())
}

/// Files of tests.
const ALL: &str = "test*.py";

/// Those of `tests/python` that skip tests where there is no PyTorch.
const WITH_PYTORCH: [(&str, &str); 2] = [
    ("Python, gpu-check with PyTorch", "test_gpu_check*.py"),
    ("Python, emulated kernels with PyTorch", "test_cuda_emulated.py"),
];

/// Where the tests find program, library and runtime.
fn variables(project: &Project, python: &Python) -> Result<[(&'static str, OsString); 4], String> {
    Ok([
        ("ORT_DYLIB_PATH", python.onnxruntime(Packages::Runtime)?.into_os_string()),
        ("MOA_ORT_LIBRARY", project.operator_library().into_os_string()),
        ("MOA_CUDA_LIBRARY", project.cuda_library().into_os_string()),
        ("MOA_EXPORT", project.program().into_os_string()),
    ])
}

fn cargo_test(project: &Project, crates: &[&str], variables: &[(&str, OsString)]) -> Result<Tally, String> {
    let packages = crates.iter().flat_map(|name| ["-p", name]);
    let mut command = project.cargo_test(["--no-fail-fast"].into_iter().chain(packages));
    Tally::of_cargo(command.envs(variables.iter().map(|(name, value)| (name, value))))
}

fn python_test(
    project: &Project,
    python: &Python,
    packages: &[Packages],
    variables: &[(&str, OsString)],
    (folder, pattern): (&str, &str),
) -> Result<Tally, String> {
    let mut command = python.command(project, packages)?;
    command.args(["-m", "unittest", "discover", "-v", "-s", folder, "-p", pattern]);
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let mut seen = Unittest::default();
    let status = process::watch(&mut command, Stream::Stderr, |line| seen.see(line))?;
    Ok(seen.tally().confirmed(status.success()))
}
