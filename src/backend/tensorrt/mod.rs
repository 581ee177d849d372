//! TensorRT: engines built from models, or read from plans, and run on the GPU.
//!
//! `door` is the only module with `unsafe` code: it loads `libmoa_tensorrt` and calls its engine interface. What is
//! loaded was proved before: a plan by its lock, a cached engine by the hash of what decides it.

mod builder;
mod door;
mod error;
mod installation;
mod runner;

use std::{
    cell::OnceCell,
    fmt,
    path::{Path, PathBuf},
};

pub use builder::{Plan, PlanRequest};
pub use error::{EngineError, EngineStage};
pub use installation::{Installation, Survey};

use moa_schema::{FloatType, interface::axis};

use super::{Backend, BackendError, BackendKind, Runner, operators, signature::Signature};
use crate::{
    engine::{BuildOptions, Cache, DimRange, Dtype, PLAN_WARNING, PlanLock, ShapeProfile, dtype_of, open_dims, shapes},
    onnx::{
        OnnxFile,
        proto::tensor_proto::DataType,
        read::{Dim, ValueInfo},
    },
    tensor::NamedTensors,
};
use runner::TensorRtRunner;

/// Sizes that an engine serves: smallest, most frequent, largest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranges {
    /// Of a dimension whose name is `batch`.
    pub batch: [u64; 3],
    /// Of a dimension whose name starts with `past`.
    pub past: [u64; 3],
    /// Of any other dimension that the model leaves open.
    pub tokens: [u64; 3],
    /// Of dimensions by their names, in place of these.
    pub named: Vec<DimRange>,
}

impl Default for Ranges {
    fn default() -> Self {
        Self { batch: [1, 1, 8], past: [0, 64, 512], tokens: [1, 64, 512], named: Vec::new() }
    }
}

impl Ranges {
    /// The same ranges, widened where `inputs` of `file` are larger or smaller, but not to sizes that no run has.
    #[must_use]
    pub fn holding(mut self, file: &OnnxFile, inputs: &NamedTensors) -> Self {
        for input in file.inputs() {
            let Some((dims, tensor)) = input.dims.as_ref().zip(inputs.get(&input.name)) else { continue };
            for (dim, size) in dims.iter().zip(tensor.shape()) {
                let Dim::Symbolic(name) = dim else { continue };
                let [least, usual, most] = self.of(name);
                let size = *size as u64;
                if dim.wrongly_empty(size).is_some() {
                    continue;
                }
                let sizes = [least.min(size), usual, most.max(size)];
                self.named.retain(|known| known.name != *name);
                self.named.push(DimRange { name: name.clone(), sizes });
            }
        }
        self
    }

    fn of(&self, name: &str) -> [u64; 3] {
        let given = self.named.iter().find(|sizes| sizes.name == name).map(|sizes| sizes.sizes);
        given.unwrap_or(match name {
            axis::BATCH => self.batch,
            past if axis::may_be_empty(past) => self.past,
            _ => self.tokens,
        })
    }

    /// The shapes of the inputs of `file`.
    fn shapes(&self, file: &OnnxFile) -> Result<ShapeProfile, EngineError> {
        let inputs = file.inputs();
        let sizes = |name: String| DimRange { sizes: self.of(&name), name };
        let dims: Vec<DimRange> = open_dims(&inputs).into_iter().map(sizes).collect();
        Ok(shapes(&inputs, &dims)?)
    }
}

/// What lets a plan be loaded, which is code that nobody can check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trust {
    /// A lock that says that the plan is whole and fits what is here.
    #[default]
    LockRequired,
    /// The word of the user, whatever the lock says.
    UserVouches,
}

/// How engines are had and run.
#[derive(Clone, Default)]
pub struct TensorRtOptions {
    /// A plan for the model as it is, or a folder with a plan for each graph; one is built where it is absent, or where
    /// a model was changed, such as to see its routing.
    pub plan: Option<PathBuf>,
    /// What the plan must show before it is loaded.
    pub trust: Trust,
    /// Where engines that are built are kept.
    pub cache: Option<Cache>,
    /// Sizes that engines are built for.
    pub ranges: Ranges,
    /// How engines are built.
    pub build: BuildOptions,
    /// Is told what the user should know and what is no error.
    pub notice: Option<fn(&str)>,
}

impl TensorRtOptions {
    fn tell(&self, text: &str) {
        if let Some(notice) = self.notice {
            notice(text);
        }
    }

    /// The plan for the graph of `file`, if there is one.
    fn plan_of(&self, file: &OnnxFile) -> Option<PathBuf> {
        let plan = self.plan.as_ref().filter(|_| !file.is_modified())?;
        plan_for(plan, file.path())
    }
}

/// The plan for the graph of the file `graph`: `plan` itself, or the one of its name where that is a folder.
pub fn plan_for(plan: &Path, graph: &Path) -> Option<PathBuf> {
    if !plan.is_dir() {
        return Some(plan.to_owned());
    }
    Some(plan.join(graph.with_extension("plan").file_name()?))
}

/// The backend `tensorrt`.
pub(super) struct TensorRtBackend {
    options: TensorRtOptions,
    /// Opened for the first model.
    installation: OnceCell<Installation>,
}

impl fmt::Debug for TensorRtBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorRtBackend").field("plan", &self.options.plan).finish_non_exhaustive()
    }
}

impl TensorRtBackend {
    pub(super) const fn new(options: TensorRtOptions) -> Self {
        Self { options, installation: OnceCell::new() }
    }

    fn installation(&self) -> Result<&Installation, BackendError> {
        if let Some(open) = self.installation.get() {
            return Ok(open);
        }
        let open = Installation::open()?;
        Ok(self.installation.get_or_init(|| open))
    }

    /// The plan that the user gave, which must be that of `file`.
    fn given_plan(&self, here: &Installation, path: PathBuf, file: &OnnxFile) -> Result<Vec<u8>, EngineError> {
        let (bytes, lock) = read_plan(here, &path, &self.options)?;
        match lock {
            Some(lock) if lock.recipe.model != here.given(file)?.hash => {
                Err(EngineError::OtherModel { plan: path, model: file.path().to_path_buf() })
            }
            _ => Ok(bytes),
        }
    }
}

impl Backend for TensorRtBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::TensorRt
    }

    /// The plugin computes with activations of the type of the matrices.
    fn rounds_to(&self, model: &OnnxFile) -> Option<FloatType> {
        (dtype_of(model) == Ok(Dtype::Bf16) && !operators::used(model.model()).is_empty()).then_some(FloatType::Bf16)
    }

    fn probe(&self, model: &OnnxFile) -> Result<(), BackendError> {
        self.installation()?;
        match self.options.plan_of(model) {
            Some(path) => match path.metadata() {
                Ok(_) => Ok(()),
                Err(source) => Err(EngineError::Io { path, source }.into()),
            },
            None => Ok(()),
        }
    }

    fn load(&self, model: &OnnxFile) -> Result<Box<dyn Runner>, BackendError> {
        let here = self.installation()?;
        let bytes = match self.options.plan_of(model) {
            Some(path) => self.given_plan(here, path, model)?,
            None => {
                let tell = |text: &str| self.options.tell(text);
                let request = PlanRequest {
                    profiles: vec![self.options.ranges.shapes(model)?],
                    options: self.options.build,
                    cache: self.options.cache.as_ref(),
                    notice: Some(&tell),
                    ..PlanRequest::default()
                };
                here.plan(model, &request)?.bytes
            }
        };
        let is_wide = |output: &ValueInfo| output.data_type == DataType::Int64;
        let wide = model.outputs().into_iter().filter(is_wide).map(|output| output.name).collect();
        let runner = TensorRtRunner::new(here.engine(&bytes)?, Some(Signature::new(model)), wide)?;
        Ok(Box::new(runner))
    }
}

fn read_plan(
    here: &Installation,
    path: &Path,
    options: &TensorRtOptions,
) -> Result<(Vec<u8>, Option<PlanLock>), EngineError> {
    let (bytes, lock) = here.read_plan(path, options.trust)?;
    if lock.is_none() {
        options.tell(&format!("{} is loaded without a lock that fits: {PLAN_WARNING}", path.display()));
    }
    Ok((bytes, lock))
}

/// A plan that is run by itself, without the model that it was built from.
///
/// # Errors
///
/// Where TensorRT is missing, and where the plan cannot be read or its lock does not fit.
pub fn load_plan(path: &Path, options: &TensorRtOptions) -> Result<Box<dyn Runner>, BackendError> {
    let here = Installation::open()?;
    let (bytes, _) = read_plan(&here, path, options)?;
    Ok(Box::new(TensorRtRunner::new(here.engine(&bytes)?, None, Vec::new())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `prepare` recommends NAME.trt.onnx, and `build` makes NAME.trt.plan of it.
    #[test]
    fn plans_in_a_folder_lose_one_ending_of_the_graph() {
        let folder = tempfile::tempdir().unwrap();
        for (graph, name) in [("out/model.trt.onnx", "model.trt.plan"), ("model.onnx", "model.plan")] {
            assert_eq!(plan_for(folder.path(), Path::new(graph)), Some(folder.path().join(name)));
        }
        assert_eq!(plan_for(Path::new("one.plan"), Path::new("model.onnx")), Some("one.plan".into()));
    }
}
