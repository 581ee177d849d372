//! ONNX Runtime, with values that stay where it put them from one run to the next.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use half::f16;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{IoBinding, Session};
use ort::value::{DynValue, PrimitiveTensorElementType, Tensor, TensorElementType};

use super::door::run_bound;
use super::{OrtBackend, OrtCache, owned_value};
use crate::backend::guard::guarded;
use crate::backend::{Backend, BackendError, BackendKind, OrtOperators, OrtOptions};
use crate::onnx::read::OnnxFile;

/// A model whose inputs stay bound, and whose outputs can be inputs of the next run without a copy.
///
/// Names are not checked here: an unknown one, or a value of another type or shape than the model's, is an error
/// of the runtime.
#[derive(Debug)]
pub struct OrtSession {
    backend: &'static str,
    /// Before `session`, so that it is released first.
    binding: IoBinding,
    outputs: Vec<String>,
    /// Those of `outputs` that go where a cache is.
    in_place: BTreeSet<String>,
    memory: MemoryInfo<'static>,
    session: Session,
}

/// A tensor that the runtime holds.
#[derive(Debug)]
pub struct OrtValue(pub(super) DynValue);

impl OrtSession {
    /// Prepares a model to compute `outputs`, in this order.
    ///
    /// Where `profile` is given, the runtime records every node; see [`Self::end_profiling`].
    ///
    /// # Errors
    ///
    /// Where the runtime or the operator library is missing or too old, or does not take the model.
    pub fn load(
        model: &OnnxFile,
        outputs: Vec<String>,
        operators: OrtOperators,
        options: OrtOptions,
        profile: Option<&Path>,
    ) -> Result<Self, BackendError> {
        let backend = OrtBackend::new(operators, options);
        let name = backend.name();
        guarded(name, "load the model", || {
            let session = backend.session(model, profile)?;
            let failed = |error: ort::Error| failure(name, "bind inputs and outputs", &error);
            let binding = session.create_binding().map_err(failed)?;
            let memory = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::CPUOutput)
                .map_err(failed)?;
            Ok(Self { backend: name, binding, outputs, in_place: BTreeSet::new(), memory, session })
        })
    }

    /// Gives the input `name` a value, for this run and the following ones.
    ///
    /// # Errors
    ///
    /// Where the model has no such input.
    pub fn bind(&mut self, name: &str, value: &OrtValue) -> Result<(), BackendError> {
        let backend = self.backend;
        self.binding.bind_input(name, &value.0).map_err(|error| failure(backend, "bind an input", &error))
    }

    /// Lets the input `past` and the output `present` be one cache, for this run and the following ones; the runs then
    /// return this output no more. The model must write where it reads: the kernels of our library do.
    ///
    /// # Errors
    ///
    /// Where the model has no such input or output.
    pub fn bind_cache(&mut self, past: &str, present: &str, cache: &mut OrtCache) -> Result<(), BackendError> {
        let Self { backend, binding, .. } = self;
        let failed = |error: ort::Error| failure(backend, "bind a cache", &error);
        binding.bind_input(past, &cache.value).map_err(failed)?;
        binding.bind_output(present, &mut cache.value).map_err(failed)?;
        self.in_place.insert(present.to_owned());
        Ok(())
    }

    /// Computes the outputs from what is bound.
    ///
    /// # Errors
    ///
    /// Where an input has no value or a wrong one, and where the runtime fails.
    pub fn run(&mut self) -> Result<Vec<OrtValue>, BackendError> {
        let Self { backend, binding, outputs, in_place, memory, session } = self;
        let returned = || outputs.iter().filter(|name| !in_place.contains(*name));
        guarded(backend, "run the model", || {
            let failed = |error: ort::Error| failure(backend, "run the model", &error);
            // Bound anew for each run: otherwise the runtime writes into the values that the last one returned.
            for name in returned() {
                binding.bind_output_to_device(name.as_str(), memory).map_err(failed)?;
            }
            let mut computed = session.run_binding(binding).map_err(failed)?;
            let value = |name: &String| {
                let text = format!("there is no output `{name}`");
                computed.remove(name).map(OrtValue).ok_or(BackendError::Failed {
                    backend,
                    stage: "run the model",
                    text,
                })
            };
            returned().map(value).collect()
        })
    }

    /// Computes the outputs, in the order of [`Self::run`], into values of their shapes, such as it returned; that is
    /// cheaper than making new ones.
    ///
    /// # Errors
    ///
    /// Where an input has no value or a wrong one, the values are not as many as the outputs or have other shapes, and
    /// where the runtime fails.
    pub fn run_into(&mut self, values: &mut [OrtValue]) -> Result<(), BackendError> {
        let Self { backend, binding, outputs, in_place, session, .. } = self;
        let mut names = outputs.iter().filter(|name| !in_place.contains(*name));
        guarded(backend, "run the model", || {
            let failed = |error: ort::Error| failure(backend, "run the model", &error);
            for value in values {
                let name = names.next().ok_or_else(|| ort::Error::new("more values than outputs")).map_err(failed)?;
                binding.bind_output(name.as_str(), &mut value.0).map_err(failed)?;
            }
            if let Some(name) = names.next() {
                return Err(failed(ort::Error::new(format!("there is no value for output `{name}`"))));
            }
            run_bound(session, binding).map_err(failed)
        })
    }

    /// A tensor of 64-bit integers.
    ///
    /// # Errors
    ///
    /// Where the number of values is not that of the shape.
    pub fn integers(&self, shape: &[usize], values: Vec<i64>) -> Result<OrtValue, BackendError> {
        let value = Tensor::from_array((shape.to_vec(), values));
        value.map(|value| OrtValue(value.into_dyn())).map_err(|error| failure(self.backend, "make a tensor", &error))
    }

    /// A copy of `tensor`.
    ///
    /// # Errors
    ///
    /// Where the runtime cannot make it.
    pub fn tensor(&self, tensor: &crate::tensor::Tensor) -> Result<OrtValue, BackendError> {
        owned_value(tensor).map(OrtValue).map_err(|error| failure(self.backend, "make a tensor", &error))
    }

    /// A tensor for the float input `name`, all zero.
    ///
    /// # Errors
    ///
    /// Where there is no memory for it.
    pub fn zeros(&self, name: &str, shape: &[usize]) -> Result<OrtValue, BackendError> {
        let input = self.session.inputs().iter().find(|input| input.name() == name);
        let kind = input.and_then(|input| input.dtype().tensor_type());
        let value = match kind {
            Some(TensorElementType::Float16) => {
                Tensor::<f16>::new(self.session.allocator(), shape.to_vec()).map(Tensor::into_dyn)
            }
            _ => Tensor::<f32>::new(self.session.allocator(), shape.to_vec()).map(Tensor::into_dyn),
        };
        value.map(OrtValue).map_err(|error| failure(self.backend, "make a tensor", &error))
    }

    /// The rows `rows` of `value` along its first axis, in this order.
    ///
    /// # Errors
    ///
    /// Where `value` is no tensor of floats of 16 or 32 bits or of 64-bit integers with such rows.
    pub fn gather(&self, value: &OrtValue, rows: &[usize]) -> Result<OrtValue, BackendError> {
        let gathered = match value.0.dtype().tensor_type() {
            Some(TensorElementType::Int64) => Self::gather_of::<i64>(value, rows),
            Some(TensorElementType::Float16) => Self::gather_of::<f16>(value, rows),
            _ => Self::gather_of::<f32>(value, rows),
        };
        gathered.map_err(|error| failure(self.backend, "reorder rows", &error))
    }

    fn gather_of<T: PrimitiveTensorElementType + std::fmt::Debug + Copy + 'static>(
        value: &OrtValue,
        rows: &[usize],
    ) -> Result<OrtValue, ort::Error> {
        let (shape, values) = value.0.try_extract_tensor::<T>()?;
        let mut dims: Vec<i64> = shape.to_vec();
        let count = usize::try_from(dims.first().copied().unwrap_or_default()).unwrap_or_default();
        let Some(width) = values.len().checked_div(count).filter(|_| rows.iter().all(|row| *row < count)) else {
            return Err(ort::Error::new(format!("there are {count} rows")));
        };
        dims[0] = i64::try_from(rows.len()).unwrap_or_default();
        let mut gathered = Vec::with_capacity(rows.len() * width);
        for row in rows {
            gathered.extend_from_slice(&values[row * width..][..width]);
        }
        Ok(OrtValue(Tensor::from_array((dims, gathered))?.into_dyn()))
    }

    pub(super) fn failure(&self, stage: &'static str, error: &ort::Error) -> BackendError {
        failure(self.backend, stage, error)
    }

    /// Ends the recording of nodes and returns the file that holds it, Chrome's trace format.
    ///
    /// # Errors
    ///
    /// Where the runtime cannot write it.
    pub fn end_profiling(&mut self) -> Result<PathBuf, BackendError> {
        let backend = self.backend;
        self.session.end_profiling().map(PathBuf::from).map_err(|error| failure(backend, "end the profile", &error))
    }
}

impl OrtValue {
    /// Replaces the values of a tensor of 64-bit integers, wherever it is bound too.
    ///
    /// # Errors
    ///
    /// Where it is another kind of value, or has another number of them.
    pub fn set_integers(&mut self, values: &[i64]) -> Result<(), BackendError> {
        let failed = |error: ort::Error| failure(BackendKind::Ort.name(), "write a tensor", &error);
        let (_, integers) = self.0.try_extract_tensor_mut::<i64>().map_err(failed)?;
        if integers.len() != values.len() {
            return Err(failed(ort::Error::new(format!("{} values for {}", values.len(), integers.len()))));
        }
        integers.copy_from_slice(values);
        Ok(())
    }

    /// Dimensions and values of a tensor of 32-bit floats.
    ///
    /// # Errors
    ///
    /// Where it is another kind of value.
    pub fn floats(&self) -> Result<(&[i64], &[f32]), BackendError> {
        let extracted = self.0.try_extract_tensor::<f32>();
        extracted
            .map(|(shape, values)| (&**shape, values))
            .map_err(|error| failure(BackendKind::Ort.name(), "read an output", &error))
    }
}

fn failure(backend: &'static str, stage: &'static str, error: &ort::Error) -> BackendError {
    BackendError::failure(backend, stage, error.message())
}
