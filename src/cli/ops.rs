//! `moa-export ops`.

use std::{path::PathBuf, process::ExitCode};

use moa_schema::{DOMAIN, OPERATORS, OPSET_VERSION};
use serde_json::{Value, json};

use super::table::size;
use super::{
    Failure,
    args::OpsArguments,
    document::{Kind, document},
    print_result,
};
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
        true => document(Kind::Ops, json(&library, &runtime, &survey)),
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
    let Survey { plugin, built_for, tensorrt, device } = survey;
    let path = |path: &PathBuf| path.display().to_string();
    let cache = Cache::of_user().map(|cache| {
        let (engines, bytes) = cache.size();
        json!({ "folder": path(&cache.folder().to_path_buf()), "engines": engines, "bytes": bytes })
    });
    json!({
        "domain": DOMAIN,
        "opset_version": OPSET_VERSION,
        "operators": operator_names(),
        "library": { "path": library.as_ref().ok().map(path), "why_not": why_not(library) },
        "onnxruntime": {
            "version": runtime.as_ref().ok().and_then(|(version, _)| version.as_deref()),
            "path": runtime.as_ref().ok().map(|(_, found)| path(found)),
            "why_not": why_not(runtime),
        },
        "plugin": {
            "path": plugin.as_ref().ok().map(path),
            "built_for": built_for.as_ref().ok(),
            "why_not": why_not(plugin).or_else(|| why_not(built_for)),
        },
        "tensorrt": {
            "version": tensorrt.as_ref().ok().map(|(version, _)| version),
            "path": tensorrt.as_ref().ok().and_then(|(_, found)| found.as_ref()).map(path),
            "why_not": why_not(tensorrt),
        },
        "gpu": {
            "name": device.as_ref().ok().map(|device| &device.name),
            "compute_capability": device.as_ref().ok().map(|device| device.capability.to_string()),
            "why_not": why_not(device),
        },
        "engine_cache": cache,
    })
}

fn why_not<T>(found: &Result<T, impl ToString>) -> Option<String> {
    found.as_ref().err().map(ToString::to_string)
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

C#
  using var options = new SessionOptions();
  options.RegisterCustomOpLibrary({path:?});
  using var session = new InferenceSession(\"model.onnx\", options);

Rust (crate ort)
  let environment = ort::init().build()?;
  let session = Session::builder(&environment)?.with_operator_library({path:?})?.commit_from_file(\"model.onnx\")?;
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
