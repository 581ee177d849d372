//! `moa-export run`.

use std::{path::PathBuf, process::ExitCode};

use super::{
    Failure,
    args::{BackendArgument, RunArguments},
    print_result,
};
use crate::{
    backend::{self, Backend, OrtOptions},
    onnx::{Staging, WriteError, read_model},
    tensor_file,
};

pub(super) fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    let model = read_model(&arguments.model)?;
    let inputs = tensor_file::read(&arguments.inputs)?;
    let backend = backend(arguments.backend, arguments.threads, arguments.library.clone())?;
    let (folder, name) = output_place(&arguments.outputs)?;
    let mut staging = Staging::begin(&folder, std::slice::from_ref(&name), arguments.force)?;
    let outputs = backend.load(&model)?.run(&inputs)?;
    let bytes = tensor_file::encode(&outputs)?;
    staging.file::<WriteError>(&name, |writer| {
        writer.write_all(&bytes).map_err(|source| WriteError::Io { path: arguments.outputs.clone(), source })
    })?;
    staging.commit()?;
    let mut text = String::new();
    for (name, tensor) in &outputs {
        text.push_str(&format!("{name}  {} {:?}\n", tensor.data().type_name(), tensor.shape()));
    }
    print_result(&text)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn output_place(path: &std::path::Path) -> Result<(PathBuf, String), Failure> {
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        return Err(Failure::usage(format!("{} names no file", path.display()), None));
    };
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok((folder, name.to_owned()))
}

/// The backend that `choice` names.
pub(super) fn backend(
    choice: BackendArgument,
    threads: Option<usize>,
    library: Option<PathBuf>,
) -> Result<Box<dyn Backend>, Failure> {
    if threads == Some(0) {
        return Err(Failure::usage("--threads must be at least 1", None));
    }
    let options = OrtOptions { threads, operator_library: library };
    let backend = match choice {
        BackendArgument::Ort => backend::ort(options),
        BackendArgument::OrtFunction => backend::ort_function(options),
        BackendArgument::Tract => backend::tract(),
    };
    backend.ok_or_else(|| Failure::usage("this build has no such backend", Some("build with default features")))
}
