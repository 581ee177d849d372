//! From the backends that a command names to those that run.

use std::path::{Path, PathBuf};

use clap::{ValueEnum, builder::PossibleValue};

use super::Failure;
use crate::backend::{self, Backend, BackendKind, OrtOperators, OrtOptions, TensorRtOptions};

impl ValueEnum for BackendKind {
    fn value_variants<'a>() -> &'a [Self] {
        &Self::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Ort => "ONNX Runtime with our operator library",
            Self::OrtFunction => "ONNX Runtime without it: the bodies run",
            Self::Tract => "tract",
            Self::TensorRt => "TensorRT on an NVIDIA GPU, with our plugin",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}

impl ValueEnum for OrtOperators {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Library, Self::Functions]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        BackendKind::from(*self).to_possible_value()
    }
}

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
    chosen: &[BackendKind],
    library: Option<&Path>,
    threads: Option<usize>,
) -> Result<(), Failure> {
    let is_chosen = |backend: BackendKind| chosen.contains(&backend);
    if is_chosen(BackendKind::Ort) {
        let help = "name one of these, or leave the variable out";
        let refused = |message| Failure::usage(message, help);
        backend::most_instructions().map_err(refused)?;
        backend::packing_of_weights().map_err(refused)?;
    }
    let what = if library.is_some() && !is_chosen(BackendKind::Ort) {
        "--library is for the backend ort, which was not chosen"
    } else if threads.is_some() && !is_chosen(BackendKind::Ort) && !is_chosen(BackendKind::OrtFunction) {
        "--threads is for ONNX Runtime, and the backend is another"
    } else {
        return Ok(());
    };
    let flag = what.split(' ').next().unwrap_or_default();
    Err(Failure::usage(what, &format!("choose such a backend, or leave out {flag}")))
}

/// The backends that `choices` name, each once.
pub(super) fn backends(choices: &[BackendKind], options: &BackendOptions) -> Result<Vec<Box<dyn Backend>>, Failure> {
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
pub(super) fn backend(choice: BackendKind, options: &BackendOptions) -> Result<Box<dyn Backend>, Failure> {
    let ort = OrtOptions::new(options.threads, options.library.as_deref());
    let backend = match choice {
        BackendKind::Ort => backend::ort(ort),
        BackendKind::OrtFunction => backend::ort_function(ort),
        BackendKind::Tract => backend::tract(),
        BackendKind::TensorRt => Some(backend::tensorrt(options.tensorrt.clone())),
    };
    backend.ok_or_else(|| Failure::usage("this build has no such backend", "build with default features"))
}
