//! ONNX Runtime, with the operator library or without it.

mod cache;
mod door;
mod in_place;
mod runtime;
mod session;
mod trace;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, Tensor as OrtTensor, TensorElementType, TensorRef};
use prost::Message;

use super::cut_off::cut_off;
use super::guard::guarded;
use super::libraries::find_operator_library;
use super::signature::Signature;
use super::{
    Backend, BackendError, BackendKind, Bound, LibraryUse, OrtOperators, OrtOptions, Runner, RuntimeLibrary,
    caches_in_place, operators,
};
use crate::engine::is_prepared;
use crate::files::folder_of;
use crate::onnx::proto::{ModelProto, tensor_proto::DataType};
use crate::onnx::read::OnnxFile;
use crate::scratch::{scratch_file, without_path};
use crate::tensor::{NamedTensors, Tensor, TensorData};

pub use cache::{OrtCache, RowMoves};
pub use runtime::{OrtRuntime, load_onnxruntime};
pub use session::{OrtSession, OrtValue};
pub use trace::{NodeRun, OrtTrace};

/// ONNX Runtime keeps the domains of custom operators in one table of the process and does not guard it: two
/// sessions made at once may both find the domain missing, and one of them then fails.
static LOADING: Mutex<()> = Mutex::new(());

/// The backends `ort` and `ort-function`.
#[derive(Debug, Clone)]
pub(super) struct OrtBackend {
    options: OrtOptions,
    operators: OrtOperators,
}

impl OrtBackend {
    pub(super) const fn new(operators: OrtOperators, options: OrtOptions) -> Self {
        Self { options, operators }
    }

    fn failed(&self, stage: &'static str, error: &ort::Error<impl Sized>) -> BackendError {
        BackendError::failure(self.name(), stage, error.message())
    }

    /// The operator library, where this backend and the model need one.
    fn library(&self, model: &OnnxFile) -> Result<Option<PathBuf>, BackendError> {
        match self.operators {
            OrtOperators::Library if operators::used(model.model()).is_empty() => Ok(None),
            OrtOperators::Library => find_operator_library(self.options.operator_library.as_deref()).map(Some),
            OrtOperators::Functions => {
                require_bodies(&operators::without_body(model.model()))?;
                Ok(None)
            }
        }
    }

    fn builder(&self, runtime: &OrtRuntime, library: Option<&Path>) -> Result<SessionBuilder, BackendError> {
        let mut builder = runtime
            .session_builder(&self.options)
            .map_err(|error| self.failed("create a session", &error))?
            .with_optimization_level(GraphOptimizationLevel::All)
            .map_err(|error| self.failed("set the optimisation level", &error))?;
        if let Some(path) = library {
            let library = RuntimeLibrary::Operators(LibraryUse::Run);
            let unusable = |why| BackendError::RuntimeUnusable { library, path: path.into(), why };
            if let Some(why) = cut_off(path) {
                return Err(unusable(why));
            }
            builder = builder.with_operator_library(path).map_err(|error| unusable(error.message().to_owned()))?;
        }
        Ok(builder)
    }

    /// The runtime, and what builds a session for `model` with the libraries that it needs.
    fn start(&self, model: &OnnxFile) -> Result<(OrtRuntime, SessionBuilder), BackendError> {
        refuse_prepared(model)?;
        let of_model = |error: BackendError| error.with_use(use_by(model));
        let library = self.library(model).map_err(of_model)?;
        let runtime = load_onnxruntime()?;
        let builder = self.builder(&runtime, library.as_deref()).map_err(of_model)?;
        Ok((runtime, builder))
    }

    /// The runtime's session for `model`; it records every node where `profile` names the start of a file name.
    pub(super) fn session(&self, model: &OnnxFile, profile: Option<&Path>) -> Result<Session, BackendError> {
        let (runtime, mut builder) = self.start(model)?;
        if let Some(profile) = profile {
            builder = builder.with_profiling(profile).map_err(|error| self.failed("start a profile", &error))?;
        }
        let _one_at_a_time = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
        let session = if model.is_as_stored() {
            builder.commit_from_file(model.path())
        } else if model.has_external_data() {
            let file = write_beside(model)?;
            builder.commit_from_file(&file)
        } else {
            builder.commit_from_memory(&model.model().encode_to_vec())
        };
        session.map_err(|error| {
            newer_runtime_needed(runtime.version(), model.model())
                .unwrap_or_else(|| self.failed("load the model", &error))
        })
    }
}

impl Backend for OrtBackend {
    fn kind(&self) -> BackendKind {
        self.operators.into()
    }

    fn computes_bodies(&self) -> bool {
        matches!(self.operators, OrtOperators::Functions)
    }

    fn probe(&self, model: &OnnxFile) -> Result<(), BackendError> {
        guarded(self.name(), "load its libraries", || self.start(model).map(|_| ()))
    }

    fn load(&self, model: &OnnxFile) -> Result<Box<dyn Runner>, BackendError> {
        let session = guarded(self.name(), "load the model", || self.session(model, None))?;
        let caches = match self.operators {
            OrtOperators::Library => caches_in_place(model),
            OrtOperators::Functions => Vec::new(),
        };
        Ok(Box::new(OrtRunner { backend: self.name(), session, signature: Signature::new(model), caches }))
    }
}

/// Lets ONNX Runtime load the operator library `path` and register its operators, without a session.
pub(super) fn register(runtime: &OrtRuntime, path: &Path) -> Result<(), BackendError> {
    let backend = OrtBackend::new(OrtOperators::Library, OrtOptions::default());
    guarded(backend.name(), "load the operator library", || backend.builder(runtime, Some(path)).map(drop))
}

/// What the operator library is to `model`.
fn use_by(model: &OnnxFile) -> LibraryUse {
    if operators::without_body(model.model()).is_empty() { LibraryUse::Run } else { LibraryUse::RunFused }
}

/// Refuses nodes as TensorRT's parser alone takes them.
fn refuse_prepared(model: &OnnxFile) -> Result<(), BackendError> {
    if !is_prepared(model.model()) {
        return Ok(());
    }
    Err(BackendError::Unsupported {
        why: "the model was prepared for TensorRT: its nodes read bf16, or inputs that were moved together".into(),
        help: Some("give the file that it was prepared from"),
    })
}

fn require_bodies(missing: &BTreeSet<String>) -> Result<(), BackendError> {
    if missing.is_empty() {
        return Ok(());
    }
    Err(BackendError::Unsupported {
        why: format!("the model is in fused form: {}", operators::without_bodies(missing)),
        help: Some("use the backend `ort`, which computes it in the operator library, or export with --form function"),
    })
}

/// Writes a changed model beside its data files, where their names resolve; removed when dropped.
fn write_beside(model: &OnnxFile) -> Result<tempfile::TempPath, BackendError> {
    let folder = folder_of(model.path());
    let write = || {
        let mut file = scratch_file(folder)?;
        file.write_all(&model.model().encode_to_vec())?;
        file.flush()?;
        // Windows lets nobody else read a file that is open here.
        Ok(file.into_temp_path())
    };
    write().map_err(|source| BackendError::Beside { folder: folder.to_owned(), source: without_path(source) })
}

/// Newest IR version and opset of each release of ONNX Runtime that raised one of them.
const RELEASES: [(u32, i64, i64); 8] =
    [(17, 9, 20), (18, 10, 21), (21, 10, 22), (22, 10, 23), (23, 11, 24), (24, 13, 25), (31, 13, 26), (32, 14, 28)];

/// The first release in which an operator of ours can take int4.
const WITH_INT4: u32 = 19;

/// The error of a model that is newer than the runtime which refused it.
fn newer_runtime_needed(version: &str, model: &ModelProto) -> Option<BackendError> {
    let standard = model.opset_import.iter().find(|import| import.domain.is_empty());
    let opset = standard.map_or(0, |import| import.version);
    let (needed, ..) = RELEASES.into_iter().find(|(_, ir, newest)| model.ir_version <= *ir && opset <= *newest)?;
    let found: u32 = version.split('.').nth(1)?.parse().ok()?;
    let mut weights = model.graph.iter().flat_map(|graph| &graph.initializer);
    let has_int4 = weights.any(|weight| weight.data_type == DataType::Int4 as i32);
    let (release, why) = match has_int4 && needed < WITH_INT4 {
        true => (WITH_INT4, "int4".to_owned()),
        false => (needed, format!("IR version {} and opset {opset}", model.ir_version)),
    };
    (found < release)
        .then(|| BackendError::RuntimeTooOld { found: version.to_owned(), needed: format!("1.{release} for {why}") })
}

struct OrtRunner {
    backend: &'static str,
    session: Session,
    signature: Signature,
    /// Input and output of each cache that the library updates in place.
    caches: Vec<[String; 2]>,
}

impl Runner for OrtRunner {
    fn run(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, BackendError> {
        self.signature.check(inputs)?;
        let backend = self.backend;
        guarded(backend, "run the model", || {
            let failed = |error: ort::Error| BackendError::failure(backend, "run the model", error.message());
            let mut values = Vec::with_capacity(inputs.len());
            for (name, tensor) in inputs {
                values.push((name.as_str(), input_value(tensor).map_err(failed)?));
            }
            let outputs = self.session.run(values).map_err(failed)?;
            outputs.iter().map(|(name, value)| Ok((name.to_owned(), tensor(backend, name, &value)?))).collect()
        })
    }

    fn run_in_place(&mut self, inputs: &NamedTensors, capacity: usize) -> Result<Option<NamedTensors>, BackendError> {
        let Self { backend, session, signature, caches } = self;
        if caches.is_empty() {
            return Ok(None);
        }
        signature.check(inputs)?;
        let backend = *backend;
        guarded(backend, "run the model", || in_place::run(backend, session, inputs, (caches, capacity)).map(Some))
    }

    fn bind<'a>(&'a mut self, inputs: &'a NamedTensors) -> Result<Bound<'a>, BackendError> {
        Ok(self.bind_with(inputs, (&[], 0))?.0)
    }

    fn bind_in_place<'a>(
        &'a mut self,
        inputs: &'a NamedTensors,
        room: usize,
    ) -> Result<(Bound<'a>, usize), BackendError> {
        let caches = self.caches.clone();
        self.bind_with(inputs, (&caches, room))
    }
}

impl OrtRunner {
    /// Binds the inputs, and lets each of `caches` be one buffer with room for so many rows behind its past. Also gives
    /// the number of these.
    fn bind_with(
        &mut self,
        inputs: &NamedTensors,
        (caches, room): (&[[String; 2]], usize),
    ) -> Result<(Bound<'_>, usize), BackendError> {
        self.signature.check(inputs)?;
        let Self { backend, session, .. } = self;
        let backend = *backend;
        let failed = move |stage| move |error: ort::Error| BackendError::failure(backend, stage, error.message());
        let binding = |error| failed("bind inputs and outputs")(error);
        let mut bound = session.create_binding().map_err(binding)?;
        let kept = in_place::bind_inputs(session, &mut bound, inputs, (caches, &|rows| rows + room));
        let kept = kept.map_err(binding)?;
        let names = session.outputs().iter().map(|output| output.name().to_owned());
        let outputs: Vec<String> = names.filter(|name| kept.shared.iter().all(|(shared, _)| shared != name)).collect();
        let memory = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::CPUOutput);
        let memory = memory.map_err(binding)?;
        let shared = kept.shared.len();
        let call = move || {
            let _bound_as_long_as_the_calls = &kept;
            guarded(backend, "run the model", || {
                // Bound anew, so that every call makes its outputs as a caller's would.
                for name in &outputs {
                    bound.bind_output_to_device(name.as_str(), &memory).map_err(failed("run the model"))?;
                }
                session.run_binding(&bound).map(|_| None).map_err(failed("run the model"))
            })
        };
        Ok((Box::new(call), shared))
    }
}

/// A copy of `tensor` that the runtime holds.
pub(super) fn owned_value(tensor: &Tensor) -> Result<DynValue, ort::Error> {
    let shape = tensor.shape().to_vec();
    Ok(match tensor.data() {
        TensorData::F16(values) => OrtTensor::from_array((shape, values.clone()))?.into_dyn(),
        TensorData::F32(values) => OrtTensor::from_array((shape, values.clone()))?.into_dyn(),
        TensorData::F64(values) => OrtTensor::from_array((shape, values.clone()))?.into_dyn(),
        TensorData::I32(values) => OrtTensor::from_array((shape, values.clone()))?.into_dyn(),
        TensorData::I64(values) => OrtTensor::from_array((shape, values.clone()))?.into_dyn(),
    })
}

fn input_value(tensor: &Tensor) -> Result<SessionInputValue<'_>, ort::Error> {
    let shape = tensor.shape();
    Ok(match tensor.data() {
        TensorData::F16(values) => TensorRef::from_array_view((shape, values.as_slice()))?.into(),
        TensorData::F32(values) => TensorRef::from_array_view((shape, values.as_slice()))?.into(),
        TensorData::F64(values) => TensorRef::from_array_view((shape, values.as_slice()))?.into(),
        TensorData::I32(values) => TensorRef::from_array_view((shape, values.as_slice()))?.into(),
        TensorData::I64(values) => TensorRef::from_array_view((shape, values.as_slice()))?.into(),
    })
}

pub(super) fn tensor(backend: &'static str, name: &str, value: &DynValue) -> Result<Tensor, BackendError> {
    let failed = |text: String| BackendError::Failed { backend, stage: "read an output", text };
    macro_rules! values {
        ($kind:ident, $element:ty) => {{
            let (shape, values) = value.try_extract_tensor::<$element>().map_err(|error| failed(error.to_string()))?;
            (shape, TensorData::$kind(values.to_vec()))
        }};
    }
    let (shape, data) = match value.dtype().tensor_type() {
        Some(TensorElementType::Float16) => values!(F16, half::f16),
        Some(TensorElementType::Float32) => values!(F32, f32),
        Some(TensorElementType::Float64) => values!(F64, f64),
        Some(TensorElementType::Int32) => values!(I32, i32),
        Some(TensorElementType::Int64) => values!(I64, i64),
        other => {
            let why = format!("output `{name}` is {}", other.map_or("no tensor".into(), |kind| kind.to_string()));
            return Err(BackendError::Unsupported { why, help: None });
        }
    };
    let dims: Option<Vec<usize>> = shape.iter().map(|dim| usize::try_from(*dim).ok()).collect();
    let dims = dims.ok_or_else(|| failed(format!("output `{name}` has the shape {shape}")))?;
    Tensor::new(dims, data).map_err(|error| failed(format!("output `{name}`: {error}")))
}

#[cfg(test)]
mod tests {
    use super::newer_runtime_needed;
    use crate::onnx::proto::{GraphProto, ModelProto, OperatorSetIdProto, TensorProto, tensor_proto::DataType};

    #[test]
    fn a_newer_model_names_the_runtime_it_needs() {
        let model = |ir_version, version| ModelProto {
            ir_version,
            opset_import: vec![OperatorSetIdProto { domain: String::new(), version }],
            ..ModelProto::default()
        };
        let needed = |found: &str, model| newer_runtime_needed(found, &model).map(|error| error.to_string());
        let expected = "ONNX Runtime 1.20.1 is too old: 1.22 for IR version 10 and opset 23 is needed";
        assert_eq!(needed("1.20.1", model(10, 23)).as_deref(), Some(expected));
        assert_eq!(needed("1.31.1", model(13, 26)), None);
        assert_eq!(needed("1.17.0", model(9, 20)), None);
        assert_eq!(needed("a build of its own", model(13, 26)), None);
        let weight = TensorProto { data_type: DataType::Int4 as i32, ..TensorProto::default() };
        let graph = GraphProto { initializer: vec![weight], ..GraphProto::default() };
        let int4 = || ModelProto { graph: Some(graph.clone()), ..model(10, 21) };
        let expected = "ONNX Runtime 1.18.1 is too old: 1.19 for int4 is needed";
        assert_eq!(needed("1.18.1", int4()).as_deref(), Some(expected));
        assert_eq!(needed("1.19.0", int4()), None);
        let releases = [
            (9, 20, 17),
            (9, 21, 18),
            (10, 21, 18),
            (10, 22, 21),
            (10, 23, 22),
            (11, 1, 23),
            (10, 25, 24),
            (12, 1, 24),
            (13, 26, 31),
            (13, 28, 32),
            (14, 18, 32),
        ];
        for (ir_version, opset, release) in releases {
            let found = needed("1.16.3", model(ir_version, opset)).unwrap_or_default();
            assert!(
                found.contains(&format!("too old: 1.{release} for IR version {ir_version} and opset {opset}")),
                "{found}"
            );
            assert_eq!(needed(&format!("1.{release}.0"), model(ir_version, opset)), None);
        }
    }
}
