//! `moa-export ops`.

use std::{path::PathBuf, process::ExitCode};

use moa_schema::{DOMAIN, OPERATORS, OPSET_VERSION};
use serde_json::{Value, json};

use super::table::size;
use super::{Failure, args::OpsArguments, print_result};
#[cfg(not(feature = "ort"))]
use crate::backend::find_onnxruntime;
#[cfg(feature = "ort")]
use crate::backend::load_onnxruntime;
use crate::{
    backend::{BackendError, Survey, operator_library},
    engine::Cache,
};

/// How the operator library is made where there is none.
const BUILD: &str = "\
Building the library, in the sources of moa-export
  cargo build --release -p moa-ort
  export MOA_ORT_LIBRARY=\"$PWD/target/release/libmoa_ort.so\"
";

/// ONNX Runtime: its version, where it could be loaded to tell, and its path.
type Runtime = (Option<String>, PathBuf);

pub(super) fn run(arguments: &OpsArguments) -> Result<ExitCode, Failure> {
    let (library, runtime, survey) = (operator_library(), runtime(), Survey::make());
    print_result(&match arguments.json {
        true => format!("{:#}\n", json(&library, &runtime, &survey)),
        false => text(&library, &runtime, &survey),
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(feature = "ort")]
fn runtime() -> Result<Runtime, BackendError> {
    let runtime = load_onnxruntime()?;
    Ok((Some(runtime.version().to_owned()), runtime.path().to_owned()))
}

#[cfg(not(feature = "ort"))]
fn runtime() -> Result<Runtime, BackendError> {
    Ok((None, find_onnxruntime()?))
}

fn operator_names() -> Vec<&'static str> {
    OPERATORS.iter().map(|operator| operator.name).collect()
}

fn json(library: &Result<PathBuf, BackendError>, runtime: &Result<Runtime, BackendError>, survey: &Survey) -> Value {
    let why = |error: Option<&BackendError>| error.map(ToString::to_string);
    json!({
        "library": library.as_ref().ok().map(|path| path.display().to_string()),
        "library_why_not": why(library.as_ref().err()),
        "onnxruntime": runtime.as_ref().ok().map(|(_, path)| path.display().to_string()),
        "onnxruntime_version": runtime.as_ref().ok().and_then(|(version, _)| version.as_deref()),
        "onnxruntime_why_not": why(runtime.as_ref().err()),
        "tensorrt": tensorrt_json(survey),
        "domain": DOMAIN,
        "version": OPSET_VERSION,
        "operators": operator_names(),
    })
}

fn text(library: &Result<PathBuf, BackendError>, runtime: &Result<Runtime, BackendError>, survey: &Survey) -> String {
    let library_text = library.as_ref().map_or_else(ToString::to_string, |path| path.display().to_string());
    let runtime_text = runtime.as_ref().map_or_else(ToString::to_string, |(version, path)| match version {
        Some(version) => format!("{version}, {}", path.display()),
        None => path.display().to_string(),
    });
    format!(
        "operators     {} (domain {DOMAIN}, version {OPSET_VERSION})
library       {library_text}
ONNX Runtime  {runtime_text}
{}
{}",
        operator_names().join(", "),
        tensorrt_text(survey),
        library.as_ref().map_or_else(|_| BUILD.to_owned(), |path| registration(&path.display().to_string())),
    )
}

/// How programs give the library at `path` to ONNX Runtime.
fn registration(path: &str) -> String {
    format!(
        "Python
  options = onnxruntime.SessionOptions()
  options.register_custom_ops_library({path:?})
  session = onnxruntime.InferenceSession(\"model.onnx\", options)

C++
  Ort::SessionOptions options;
  options.RegisterCustomOpsLibrary({path:?});
  Ort::Session session(env, \"model.onnx\", options);

Rust (crate ort)
  let session = Session::builder(&env)?.with_operator_library({path:?})?.commit_from_file(\"model.onnx\")?;
"
    )
}

/// Lines on TensorRT: what is there, and of what is not, why.
fn tensorrt_text(survey: &Survey) -> String {
    let plugin = match &survey.plugin {
        Ok(path) => {
            let built_for = survey.built_for.as_ref().map_or_else(|why| why.clone(), |target| format!("for {target}"));
            format!("{}, {built_for}", path.display())
        }
        Err(error) => return format!("TensorRT      {error}\n"),
    };
    let tensorrt = survey.tensorrt.as_ref().map_or_else(Clone::clone, |(version, path)| {
        path.as_ref().map_or_else(|| version.clone(), |path| format!("{version}, {}", path.display()))
    });
    let device = survey
        .device
        .as_ref()
        .map_or_else(Clone::clone, |device| format!("{}, compute capability {}", device.name, device.capability));
    let engines = Cache::of_user().map_or_else(String::new, |cache| {
        let (count, bytes) = cache.size();
        format!("engines       {count} in {}, {}\n", cache.folder().display(), size(bytes))
    });
    format!("TensorRT      {tensorrt}\nplugin        {plugin}\nGPU           {device}\n{engines}")
}

fn tensorrt_json(survey: &Survey) -> Value {
    let (version, nvinfer) =
        survey.tensorrt.as_ref().map_or((None, None), |(version, path)| (Some(version), path.as_ref()));
    let cache = Cache::of_user();
    json!({
        "plugin": survey.plugin.as_ref().ok().map(|path| path.display().to_string()),
        "plugin_built_for": survey.built_for.as_ref().ok(),
        "version": version,
        "nvinfer": nvinfer.map(|path| path.display().to_string()),
        "why_not": survey.tensorrt.as_ref().err(),
        "gpu": survey.device.as_ref().ok().map(|device| &device.name),
        "compute_capability": survey.device.as_ref().ok().map(|device| device.capability.to_string()),
        "cache": cache.as_ref().map(|cache| cache.folder().display().to_string()),
        "cached_engines": cache.as_ref().map(|cache| cache.size().0),
        "cached_bytes": cache.as_ref().map(|cache| cache.size().1),
    })
}
