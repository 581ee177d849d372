//! Running a model file on a runtime.
//!
//! A [`Backend`] loads a checked [`OnnxFile`]; the [`Runner`] that it returns computes all outputs of the graph.
//! Backends know nothing of how a model was made.

mod cut_off;
mod error;
mod guard;
mod implied;
mod in_place;
mod kind;
mod libraries;
mod operators;
#[cfg(feature = "ort")]
mod ort;
mod runtime_library;
mod signature;
mod tensorrt;
#[cfg(feature = "tract")]
mod tract;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use moa_schema::FloatType;

use crate::onnx::read::OnnxFile;
use crate::tensor::NamedTensors;

#[cfg(feature = "ort")]
pub use self::ort::{NodeRun, OrtCache, OrtRuntime, OrtSession, OrtTrace, OrtValue, RowMoves, load_onnxruntime};
pub use error::{BackendError, BackendErrorKind, NamedBy};
pub use implied::add_implied;
pub use in_place::caches_in_place;
pub use kind::{BackendKind, OrtOperators};
pub use libraries::{
    TENSORRT_ROOT, find_onnxruntime, find_operator_library, find_tensorrt_plugin, most_instructions, operator_library,
    operator_library_to_copy, packing_of_weights,
};
pub use runtime_library::{LibraryUse, RuntimeLibrary};
pub use tensorrt::{
    EngineError, EngineStage, Installation, Plan, PlanRequest, Ranges, Survey, TensorRtOptions, Trust,
    load_plan as load_tensorrt_plan, plan_for,
};
#[cfg(feature = "tract")]
pub use tract::TRACT_VERSION;

/// Whether `model` has operators of ours.
pub fn uses_operators(model: &OnnxFile) -> bool {
    !operators::used(model.model()).is_empty()
}

/// Whether `backend` computes with `models` what ONNX Runtime computes with the library, which none of them needs.
pub fn repeats_ort<'a>(backend: &dyn Backend, models: impl IntoIterator<Item = &'a OnnxFile>) -> bool {
    backend.kind() == BackendKind::OrtFunction && !models.into_iter().any(uses_operators)
}

/// A runtime.
pub trait Backend {
    /// What it is.
    fn kind(&self) -> BackendKind;

    /// Name on the command line and in reports.
    fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Looks whether what the backend needs for `model` is there, such as libraries and bodies, without loading it.
    ///
    /// # Errors
    ///
    /// As [`Self::load`], as far as that can be told before.
    fn probe(&self, _model: &OnnxFile) -> Result<(), BackendError> {
        Ok(())
    }

    /// Prepares a model to run.
    ///
    /// # Errors
    ///
    /// Where the runtime is missing or too old, or does not take the model.
    fn load(&self, model: &OnnxFile) -> Result<Box<dyn Runner>, BackendError>;

    /// Type that the backend rounds activations of `model` to, where it is another one than the model's own.
    fn rounds_to(&self, _model: &OnnxFile) -> Option<FloatType> {
        None
    }

    /// Whether the backend computes operators of ours by their bodies, which round no factors whatever a node allows.
    fn computes_bodies(&self) -> bool {
        false
    }
}

/// A model that is ready to run.
pub trait Runner {
    /// Computes all outputs of the graph, by name.
    ///
    /// # Errors
    ///
    /// Where an input is missing, unknown, or of the wrong type or shape, and where the runtime fails.
    fn run(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, BackendError>;

    /// The same computation with one buffer of `capacity` rows for past and present of each cache, as a caller has it
    /// who updates caches in place: its rows hold the past first, and what nobody wrote after that. The outputs of
    /// caches are whole buffers. `None` where model or backend have no such caches.
    ///
    /// # Errors
    ///
    /// As [`Self::run`].
    fn run_in_place(&mut self, inputs: &NamedTensors, capacity: usize) -> Result<Option<NamedTensors>, BackendError> {
        let (_, _) = (inputs, capacity);
        Ok(None)
    }

    /// The same computation again and again: `inputs` are given to the runtime once, and the outputs of each call
    /// stay in the runtime's own form and are dropped. What a call costs is the runtime's own time.
    ///
    /// # Errors
    ///
    /// As [`Self::run`].
    fn bind<'a>(&'a mut self, inputs: &'a NamedTensors) -> Result<Bound<'a>, BackendError> {
        Ok(Box::new(move || self.run(inputs).map(|_| None)))
    }

    /// [`Self::bind`] with one buffer for past and present of each cache, which has room for `room` rows behind its
    /// past; every call writes the same rows. As [`Self::bind`] where model or backend have no such caches. Also gives
    /// the number of caches that are bound so.
    ///
    /// # Errors
    ///
    /// As [`Self::run`].
    fn bind_in_place<'a>(
        &'a mut self,
        inputs: &'a NamedTensors,
        room: usize,
    ) -> Result<(Bound<'a>, usize), BackendError> {
        let _ = room;
        Ok((self.bind(inputs)?, 0))
    }
}

/// One computation on inputs that are bound; see [`Runner::bind`]. Tells its time on the device, between two events on
/// the device's own clock, where the backend has that.
pub type Bound<'a> = Box<dyn FnMut() -> Result<Option<Duration>, BackendError> + 'a>;

/// How ONNX Runtime computes.
#[derive(Debug, Clone, Default)]
pub struct OrtOptions {
    /// Threads within one operator; as many as ONNX Runtime chooses where absent.
    ///
    /// Sessions share the threads of the process, which are as many as the first of them wants; one that wants another
    /// number has its own.
    pub threads: Option<usize>,
    /// Whether sessions have threads of their own all the same, such as where several compute at once.
    pub own_threads: bool,
    /// The operator library; searched for where absent.
    pub operator_library: Option<PathBuf>,
}

impl OrtOptions {
    /// With `threads` and the operator library `library`, where they are given.
    pub fn new(threads: Option<usize>, library: Option<&Path>) -> Self {
        Self { threads, operator_library: library.map(Path::to_path_buf), own_threads: false }
    }
}

/// The backend `ort`: ONNX Runtime, with the operator library for the operators of this project; `None` where this
/// build has none.
pub fn ort(options: OrtOptions) -> Option<Box<dyn Backend>> {
    #[cfg(feature = "ort")]
    let backend: Option<Box<dyn Backend>> = Some(Box::new(ort::OrtBackend::new(OrtOperators::Library, options)));
    #[cfg(not(feature = "ort"))]
    let (backend, _) = (None, options);
    backend
}

/// The backend `ort-function`: ONNX Runtime alone, which computes the functions that the model carries; `None`
/// where this build has none.
pub fn ort_function(options: OrtOptions) -> Option<Box<dyn Backend>> {
    #[cfg(feature = "ort")]
    let backend: Option<Box<dyn Backend>> = Some(Box::new(ort::OrtBackend::new(OrtOperators::Functions, options)));
    #[cfg(not(feature = "ort"))]
    let (backend, _) = (None, options);
    backend
}

/// The backend `tract`, for the standard form and the function form; `None` where this build has none.
pub fn tract() -> Option<Box<dyn Backend>> {
    #[cfg(feature = "tract")]
    let backend: Option<Box<dyn Backend>> = Some(Box::new(tract::TractBackend));
    #[cfg(not(feature = "tract"))]
    let backend = None;
    backend
}

/// The backend `tensorrt`: engines on an NVIDIA GPU, with the plugin for the operators of this project.
pub fn tensorrt(options: TensorRtOptions) -> Box<dyn Backend> {
    Box::new(tensorrt::TensorRtBackend::new(options))
}
