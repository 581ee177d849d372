//! From the backends that a command names to those that run.

use std::path::{Path, PathBuf};

use super::{Failure, args::BackendArgument};
use crate::backend::{self, Backend, OrtOptions, TensorRtOptions};

/// How backends are made, whichever is chosen.
#[derive(Clone, Default)]
pub(super) struct BackendOptions {
    pub(super) threads: Option<usize>,
    /// The operator library of ONNX Runtime.
    pub(super) library: Option<PathBuf>,
    pub(super) tensorrt: TensorRtOptions,
}

/// Refuses what none of the chosen backends would heed, and a variable that the operator library would refuse.
pub(super) fn check_ort_options(
    chosen: &[BackendArgument],
    library: Option<&Path>,
    threads: Option<usize>,
) -> Result<(), Failure> {
    let is_chosen = |backend: BackendArgument| chosen.contains(&backend);
    if is_chosen(BackendArgument::Ort) {
        let help = "name one of these, or leave the variable out";
        let refused = |message| Failure::usage(message, help);
        backend::most_instructions().map_err(refused)?;
        backend::packing_of_weights().map_err(refused)?;
    }
    let what = if library.is_some() && !is_chosen(BackendArgument::Ort) {
        "--library is for the backend ort, which was not chosen"
    } else if threads.is_some() && !is_chosen(BackendArgument::Ort) && !is_chosen(BackendArgument::OrtFunction) {
        "--threads is for ONNX Runtime, and the backend is another"
    } else {
        return Ok(());
    };
    let flag = what.split(' ').next().unwrap_or_default();
    Err(Failure::usage(what, &format!("choose such a backend, or leave out {flag}")))
}

/// The backends that `choices` name, each once.
pub(super) fn backends(
    choices: &[BackendArgument],
    options: &BackendOptions,
) -> Result<Vec<Box<dyn Backend>>, Failure> {
    let backends = choices.iter().map(|choice| backend(*choice, options)).collect::<Result<Vec<_>, _>>()?;
    match (0..choices.len()).find(|index| choices[..*index].contains(&choices[*index])) {
        Some(index) => {
            let message = format!("backend {} is named twice", backends[index].name());
            Err(Failure::usage(message, "name each backend once"))
        }
        None => Ok(backends),
    }
}

/// The backend that `choice` names.
pub(super) fn backend(choice: BackendArgument, options: &BackendOptions) -> Result<Box<dyn Backend>, Failure> {
    let ort = OrtOptions::new(options.threads, options.library.as_deref());
    let backend = match choice {
        BackendArgument::Ort => backend::ort(ort),
        BackendArgument::OrtFunction => backend::ort_function(ort),
        BackendArgument::Tract => backend::tract(),
        BackendArgument::Tensorrt => Some(backend::tensorrt(options.tensorrt.clone())),
    };
    backend.ok_or_else(|| Failure::usage("this build has no such backend", "build with default features"))
}
