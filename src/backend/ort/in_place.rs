//! Runs of ONNX Runtime in which past and present of each cache are one buffer.

use half::f16;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{IoBinding, Session};
use ort::value::{DynValue, PrimitiveTensorElementType, Tensor as OrtTensor};

use super::{owned_value, tensor};
use crate::backend::BackendError;
use crate::tensor::{NamedTensors, Tensor, TensorData};

/// What the rows of a buffer hold that nobody has filled: no value that a sum overlooks.
const UNFILLED: f32 = 1000.0;

/// Computes all outputs; those of `caches`, input and output of each, have `capacity` rows, of which the model fills
/// those after its past.
pub(super) fn run(
    backend: &'static str,
    session: &mut Session,
    inputs: &NamedTensors,
    (caches, capacity): (&[[String; 2]], usize),
) -> Result<NamedTensors, BackendError> {
    let failed =
        |error: ort::Error| BackendError::failure(backend, "run the model with caches in place", error.message());
    let names: Vec<String> = session.outputs().iter().map(|output| output.name().to_owned()).collect();
    let mut binding = session.create_binding().map_err(failed)?;
    let BoundInputs { shared, values: _bound } =
        bind_inputs(session, &mut binding, inputs, (caches, &|_| capacity)).map_err(failed)?;
    let memory = MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::CPUOutput);
    let memory = memory.map_err(failed)?;
    let is_shared = |name: &str| shared.iter().any(|(present, _)| present == name);
    for name in names.iter().filter(|name| !is_shared(name)) {
        binding.bind_output_to_device(name.as_str(), &memory).map_err(failed)?;
    }
    let mut outputs = NamedTensors::new();
    let computed = session.run_binding(&binding).map_err(failed)?;
    for (name, value) in computed.iter().filter(|(name, _)| !is_shared(name)) {
        outputs.insert(name.to_owned(), tensor(backend, name, &value)?);
    }
    drop(computed);
    for (present, buffer) in &shared {
        outputs.insert(present.clone(), tensor(backend, present, buffer)?);
    }
    Ok(outputs)
}

/// What must live as long as a binding of it.
pub(super) struct BoundInputs {
    /// Inputs that are no caches.
    pub(super) values: Vec<DynValue>,
    /// Each buffer that is past and present, with the name of the output.
    pub(super) shared: Vec<(String, DynValue)>,
}

/// Binds `inputs`, and the outputs of `caches` to the same buffers, whose rows follow from those of the past.
pub(super) fn bind_inputs(
    session: &Session,
    binding: &mut IoBinding,
    inputs: &NamedTensors,
    (caches, capacity): (&[[String; 2]], &dyn Fn(usize) -> usize),
) -> Result<BoundInputs, ort::Error> {
    let mut bound = BoundInputs { values: Vec::new(), shared: Vec::new() };
    for (name, input) in inputs {
        if let Some([_, present]) = caches.iter().find(|[past, _]| past == name) {
            let rows = input.shape().get(2).copied().unwrap_or_default();
            let mut buffer = with_room(session, input, capacity(rows))?;
            binding.bind_input(name, &buffer)?;
            binding.bind_output(present, &mut buffer)?;
            bound.shared.push((present.clone(), buffer));
        } else {
            let value = owned_value(input)?;
            binding.bind_input(name, &value)?;
            bound.values.push(value);
        }
    }
    Ok(bound)
}

/// The rows of `cache`, `[batch, heads, rows, width]`, in a buffer of `capacity` rows.
fn with_room(session: &Session, cache: &Tensor, capacity: usize) -> Result<DynValue, ort::Error> {
    match (cache.shape(), cache.data()) {
        (&[batch, heads, rows, width], TensorData::F32(values)) => {
            buffer(session, [batch, heads, capacity.max(rows), width], values, UNFILLED)
        }
        (&[batch, heads, rows, width], TensorData::F16(values)) => {
            buffer(session, [batch, heads, capacity.max(rows), width], values, f16::from_f32(UNFILLED))
        }
        _ => Err(ort::Error::new("a cache is no tensor of floats with four dimensions")),
    }
}

/// A buffer that the runtime owns, since it takes no other for an output; `values` are the first rows of each head.
fn buffer<T: PrimitiveTensorElementType + std::fmt::Debug + Copy + 'static>(
    session: &Session,
    shape: [usize; 4],
    values: &[T],
    unfilled: T,
) -> Result<DynValue, ort::Error> {
    let mut made = OrtTensor::<T>::new(session.allocator(), shape.to_vec())?.into_dyn();
    let [batch, heads, rows, width] = shape;
    let filled = values.len().checked_div(batch * heads).unwrap_or_default();
    let (_, places) = made.try_extract_tensor_mut::<T>()?;
    places.fill(unfilled);
    if filled > 0 {
        let heads = places.chunks_exact_mut(rows * width).zip(values.chunks_exact(filled));
        heads.for_each(|(to, from)| to[..filled].copy_from_slice(from));
    }
    Ok(made)
}
