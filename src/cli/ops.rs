//! `moa-export ops`.

use std::process::ExitCode;

use moa_schema::{DOMAIN, OPERATORS, OPSET_VERSION};

use super::{Failure, args::OpsArguments, print_result};
use crate::backend::{BackendError, find_onnxruntime, find_operator_library};

pub(super) fn run(arguments: &OpsArguments) -> Result<ExitCode, Failure> {
    let library = find_operator_library(None);
    let runtime = find_onnxruntime();
    let shown = |found: &Result<std::path::PathBuf, _>| found.as_ref().ok().map(|path| path.display().to_string());
    let names: Vec<_> = OPERATORS.iter().map(|operator| operator.name).collect();
    if arguments.json {
        let value = serde_json::json!({
            "library": shown(&library),
            "onnxruntime": shown(&runtime),
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
        names.join(", ")
    ))?;
    Ok(ExitCode::SUCCESS)
}
