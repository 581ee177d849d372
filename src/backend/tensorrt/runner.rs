//! An engine that computes named tensors.

use half::f16;

use super::{
    EngineError, NAME,
    door::{Context, DoorError, Engine, EngineTensor},
};
use crate::{
    backend::{BackendError, Bound, Runner, guard::guarded, signature::Signature},
    engine::InputShapes,
    onnx::proto::tensor_proto::DataType,
    tensor::{NamedTensors, Tensor, TensorData},
};

const RUN: &str = "run the engine";

/// A loaded engine, with the signature of the model that it was built from where that is known.
pub(super) struct TensorRtRunner {
    signature: Option<Signature>,
    /// Outputs that the model gives as int64, and TensorRT may give as int32.
    wide: Vec<String>,
    tensors: Vec<EngineTensor>,
    ranges: Vec<InputShapes>,
    context: Context,
}

impl TensorRtRunner {
    /// Prepares `engine` to run; `wide` names the outputs that are int64 whatever the engine makes of them.
    pub(super) fn new(engine: Engine, signature: Option<Signature>, wide: Vec<String>) -> Result<Self, EngineError> {
        let failed = |error| EngineError::of("load the plan", error);
        let tensors = engine.tensors().map_err(failed)?;
        if let Some(shape) = tensors.iter().find(|tensor| tensor.is_on_host) {
            let text =
                format!("`{}` is a shape in the memory of the host, which this program does not give", shape.name);
            return Err(EngineError::Unsupported { text });
        }
        let inputs = tensors.iter().filter(|tensor| tensor.is_input);
        let ranges = inputs.map(|input| range(&engine, input)).collect::<Result<_, _>>().map_err(failed)?;
        let context = engine.context().map_err(failed)?;
        Ok(Self { signature, wide, tensors, ranges, context })
    }

    fn inputs(&self) -> impl Iterator<Item = &EngineTensor> {
        self.tensors.iter().filter(|tensor| tensor.is_input)
    }

    /// Checks names, types and shapes, by the model where it is known and by the engine.
    fn check(&self, inputs: &NamedTensors) -> Result<(), BackendError> {
        if let Some(signature) = &self.signature {
            signature.check(inputs)?;
        }
        let wrong = |name: &str, expected: String, found: String| {
            Err(BackendError::Input { name: name.to_owned(), expected, found })
        };
        if let Some(name) = inputs.keys().find(|name| self.inputs().all(|input| input.name != **name)) {
            let known: Vec<&str> = self.inputs().map(|input| input.name.as_str()).collect();
            return wrong(name, format!("one of {}", known.join(", ")), "an unknown name".into());
        }
        for (input, range) in self.inputs().zip(&self.ranges) {
            let Some(tensor) = inputs.get(&input.name) else {
                return wrong(&input.name, described(input, range), "nothing".into());
            };
            let fits = holds(input.element, tensor.data()) && range.hold(tensor.shape());
            if !fits {
                let found = format!("{} {:?}", tensor.data().type_name(), tensor.shape());
                return wrong(&input.name, described(input, range), found);
            }
        }
        Ok(())
    }

    /// Gives the inputs to the device.
    fn give(&mut self, inputs: &NamedTensors) -> Result<(), BackendError> {
        for (name, tensor) in inputs {
            self.context.set_shape(name, tensor.shape()).map_err(running)?;
        }
        for input in self.tensors.iter().filter(|tensor| tensor.is_input) {
            let Some(tensor) = inputs.get(&input.name) else { continue };
            let bytes = bytes_of(&input.name, input.element, tensor.data())?;
            self.context.upload(&input.name, &bytes).map_err(running)?;
        }
        Ok(())
    }

    fn take(&mut self, index: usize) -> Result<(String, Tensor), BackendError> {
        let EngineTensor { name, element, .. } = self.tensors[index].clone();
        let shape = self.context.shape(&name).map_err(running)?;
        let width = width_of(element).ok_or_else(|| BackendError::Unsupported {
            why: format!("output `{name}` has the element type {element} of ONNX, which this program does not read"),
            help: None,
        })?;
        let mut bytes = vec![0; shape.iter().product::<usize>() * width];
        self.context.download(&name, &mut bytes).map_err(running)?;
        let tensor = Tensor::new(shape, values_of(element, &bytes, self.wide.contains(&name)));
        let tensor = tensor.map_err(|error| failed("read an output", format!("output `{name}`: {error}")))?;
        Ok((name, tensor))
    }
}

impl Runner for TensorRtRunner {
    fn run(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, BackendError> {
        self.check(inputs)?;
        guarded(NAME, RUN, || {
            self.give(inputs)?;
            self.context.run().map_err(running)?;
            let outputs: Vec<_> = (0..self.tensors.len()).filter(|index| !self.tensors[*index].is_input).collect();
            outputs.into_iter().map(|index| self.take(index)).collect()
        })
    }

    fn bind<'a>(&'a mut self, inputs: &'a NamedTensors) -> Result<Bound<'a>, BackendError> {
        self.check(inputs)?;
        self.give(inputs)?;
        Ok(Box::new(move || guarded(NAME, RUN, || self.context.run().map_err(running))))
    }
}

/// The shapes of an input; fixed ones need no profile.
fn range(engine: &Engine, input: &EngineTensor) -> Result<InputShapes, DoorError> {
    let fixed: Option<Vec<u64>> = input.dims.iter().map(|size| size.map(|size| size as u64)).collect();
    match fixed {
        Some(dims) => Ok(InputShapes { name: input.name.clone(), min: dims.clone(), opt: dims.clone(), max: dims }),
        None => engine.range(&input.name),
    }
}

fn running(error: DoorError) -> BackendError {
    EngineError::of(RUN, error).into()
}

fn failed(stage: &'static str, text: String) -> BackendError {
    BackendError::Failed { backend: NAME, stage, text }
}

fn described(input: &EngineTensor, range: &InputShapes) -> String {
    let name = data_type(input.element).map_or("values of an unknown type", |kind| kind.type_name());
    match range.is_fixed() {
        true => format!("{name} {:?}", range.min),
        false => format!("{name} from {:?} to {:?}, the range that the engine was built for", range.min, range.max),
    }
}

fn data_type(element: i32) -> Option<DataType> {
    DataType::try_from(element).ok()
}

/// Whether an engine's input takes such values; where TensorRT narrowed int64, the model's type is taken too.
fn holds(element: i32, data: &TensorData) -> bool {
    matches!(
        (data_type(element), data),
        (Some(DataType::Float), TensorData::F32(_))
            | (Some(DataType::Float16), TensorData::F16(_))
            | (Some(DataType::Int64), TensorData::I64(_))
            | (Some(DataType::Int32), TensorData::I32(_) | TensorData::I64(_))
    )
}

/// The values as the engine reads them.
fn bytes_of(name: &str, element: i32, data: &TensorData) -> Result<Vec<u8>, BackendError> {
    let narrow = |value: &i64| {
        i32::try_from(*value).map(i32::to_ne_bytes).map_err(|_| BackendError::Input {
            name: name.to_owned(),
            expected: "values that an int32 holds: this TensorRT has no int64".into(),
            found: value.to_string(),
        })
    };
    Ok(match data {
        TensorData::F16(values) => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        TensorData::F32(values) => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        TensorData::F64(values) => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        TensorData::I32(values) => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        TensorData::I64(values) if data_type(element) == Some(DataType::Int32) => {
            values.iter().map(narrow).collect::<Result<Vec<_>, _>>()?.concat()
        }
        TensorData::I64(values) => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
    })
}

const fn width_of(element: i32) -> Option<usize> {
    const HALF: i32 = DataType::Float16 as i32;
    const FLOAT: i32 = DataType::Float as i32;
    const INT32: i32 = DataType::Int32 as i32;
    const INT64: i32 = DataType::Int64 as i32;
    match element {
        HALF => Some(2),
        FLOAT | INT32 => Some(4),
        INT64 => Some(8),
        _ => None,
    }
}

/// The values of an output; those of `wide` ones are int64 as in the model.
fn values_of(element: i32, bytes: &[u8], wide: bool) -> TensorData {
    fn numbers<const N: usize, T>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|chunk| number(*chunk)).collect()
    }
    match data_type(element) {
        Some(DataType::Float16) => TensorData::F16(numbers(bytes, f16::from_ne_bytes)),
        Some(DataType::Int32) if wide => TensorData::I64(numbers(bytes, |chunk| i32::from_ne_bytes(chunk).into())),
        Some(DataType::Int32) => TensorData::I32(numbers(bytes, i32::from_ne_bytes)),
        Some(DataType::Int64) => TensorData::I64(numbers(bytes, i64::from_ne_bytes)),
        _ => TensorData::F32(numbers(bytes, f32::from_ne_bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_the_way_to_the_device_and_back() {
        let all = [
            (DataType::Float, TensorData::F32(vec![1.5, -0.0, f32::MAX])),
            (DataType::Float16, TensorData::F16(vec![f16::from_f32(1.5), f16::MIN])),
            (DataType::Int32, TensorData::I32(vec![i32::MIN, 7])),
            (DataType::Int64, TensorData::I64(vec![i64::MIN, 7])),
        ];
        for (kind, data) in all {
            let element = kind as i32;
            assert!(holds(element, &data));
            let bytes = bytes_of("x", element, &data).unwrap();
            assert_eq!(bytes.len(), data.len() * width_of(element).unwrap());
            assert_eq!(values_of(element, &bytes, false), data);
        }
        assert!(!holds(DataType::Float as i32, &TensorData::F64(vec![])));
        assert_eq!(width_of(DataType::Bool as i32), None);
    }

    #[test]
    fn ids_are_narrowed_where_there_is_no_int64() {
        let element = DataType::Int32 as i32;
        let ids = TensorData::I64(vec![0, -1, i64::from(i32::MAX)]);
        assert!(holds(element, &ids));
        let bytes = bytes_of("x", element, &ids).unwrap();
        assert_eq!(values_of(element, &bytes, true), ids);
        assert_eq!(values_of(element, &bytes, false), TensorData::I32(vec![0, -1, i32::MAX]));
        let error = bytes_of("ids", element, &TensorData::I64(vec![1 << 31])).unwrap_err().to_string();
        assert_eq!(
            error,
            "input `ids`: expected values that an int32 holds: this TensorRT has no int64, found 2147483648"
        );
    }
}
