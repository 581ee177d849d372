//! `moa-export ops`.

use std::process::ExitCode;

use moa_schema::{DOMAIN, OPERATORS, OPSET_VERSION};

use super::table::size;
use super::{Failure, args::OpsArguments, print_result};
use crate::{
    backend::{BackendError, Survey, find_onnxruntime, find_operator_library},
    engine::Cache,
};

pub(super) fn run(arguments: &OpsArguments) -> Result<ExitCode, Failure> {
    let library = find_operator_library(None);
    let runtime = find_onnxruntime();
    let shown = |found: &Result<std::path::PathBuf, _>| found.as_ref().ok().map(|path| path.display().to_string());
    let names: Vec<_> = OPERATORS.iter().map(|operator| operator.name).collect();
    let survey = Survey::make();
    if arguments.json {
        let value = serde_json::json!({
            "library": shown(&library),
            "onnxruntime": shown(&runtime),
            "tensorrt": tensorrt_json(&survey),
            "domain": DOMAIN,
            "version": OPSET_VERSION,
            "operators": names,
        });
        print_result(&format!("{value:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = |found: &Result<std::path::PathBuf, BackendError>| match found {
        Ok(path) => path.display().to_string(),
        Err(error) => error.to_string(),
    };
    let (library_text, runtime_text) = (text(&library), text(&runtime));
    let path = shown(&library).unwrap_or_else(|| "libmoa_ort.so".into());
    print_result(&format!(
        "operators     {} (domain {DOMAIN}, version {OPSET_VERSION})
library       {library_text}
ONNX Runtime  {runtime_text}
{}
Python
  options = onnxruntime.SessionOptions()
  options.register_custom_ops_library({path:?})
  session = onnxruntime.InferenceSession(\"model.onnx\", options)

C++
  Ort::SessionOptions options;
  options.RegisterCustomOpsLibrary({path:?});
  Ort::Session session(env, \"model.onnx\", options);

Rust (crate ort)
  let session = Session::builder(&env)?.with_operator_library({path:?})?.commit_from_file(\"model.onnx\")?;
",
        names.join(", "),
        tensorrt_text(&survey)
    ))?;
    Ok(ExitCode::SUCCESS)
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

fn tensorrt_json(survey: &Survey) -> serde_json::Value {
    let (version, nvinfer) =
        survey.tensorrt.as_ref().map_or((None, None), |(version, path)| (Some(version), path.as_ref()));
    let cache = Cache::of_user();
    serde_json::json!({
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
