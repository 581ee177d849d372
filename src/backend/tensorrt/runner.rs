//! An engine that computes named tensors.

use half::f16;

use super::{
    EngineError,
    door::{Context, DoorError, Engine, EngineTensor},
    error::EngineStage,
};
use crate::{
    backend::{BackendError, BackendKind, Bound, Runner, guard::guarded, signature::Signature},
    engine::{InputShapes, ShapeProfile},
    onnx::proto::tensor_proto::DataType,
    tensor::{NamedTensors, Tensor, TensorData},
};

const RUN: &str = EngineStage::Run.as_str();

const NAME: &str = BackendKind::TensorRt.name();

/// A loaded engine, with the signature of the model that it was built from where that is known.
pub(super) struct TensorRtRunner {
    signature: Option<Signature>,
    /// Outputs that the model gives as int64, and TensorRT may give as int32.
    wide: Vec<String>,
    tensors: Vec<EngineTensor>,
    engine: Engine,
    /// The shapes of the inputs in every optimisation profile.
    profiles: Vec<ShapeProfile>,
    /// The context of every profile that has run.
    contexts: Vec<Option<Context>>,
}

impl TensorRtRunner {
    /// Prepares `engine` to run; `wide` names the outputs that are int64 whatever the engine makes of them.
    pub(super) fn new(engine: Engine, signature: Option<Signature>, wide: Vec<String>) -> Result<Self, EngineError> {
        let failed = |error| EngineError::of(EngineStage::LoadPlan, error);
        let tensors = engine.tensors().map_err(failed)?;
        if let Some(shape) = tensors.iter().find(|tensor| tensor.is_on_host) {
            let text =
                format!("`{}` is a shape in the memory of the host, which this program does not give", shape.name);
            return Err(EngineError::Unsupported { text });
        }
        if let Some(odd) = tensors.iter().find(|tensor| width_of(tensor.element).is_none()) {
            let (name, kind) = (&odd.name, type_name(odd.element));
            let known = [DataType::Float, DataType::Float16, DataType::Int32, DataType::Int64];
            let known = known.map(|kind| kind.type_name()).join(", ");
            let text = format!("`{name}` holds {kind} in the engine, and this program gives and takes {known}");
            return Err(EngineError::Unsupported { text });
        }
        let inputs: Vec<_> = tensors.iter().filter(|tensor| tensor.is_input).collect();
        let ranges = |profile| inputs.iter().map(|input| range(&engine, profile, input)).collect();
        let count = engine.profile_count().map_err(failed)?;
        let profiles = (0..count).map(ranges).collect::<Result<Vec<ShapeProfile>, _>>().map_err(failed)?;
        let mut contexts: Vec<Option<Context>> = profiles.iter().map(|_| None).collect();
        // What the device has no room for is found before anything runs.
        if let Some(first) = contexts.first_mut() {
            *first = Some(engine.context(0).map_err(failed)?);
        }
        Ok(Self { signature, wide, tensors, engine, profiles, contexts })
    }

    fn inputs(&self) -> impl Iterator<Item = &EngineTensor> {
        self.tensors.iter().filter(|tensor| tensor.is_input)
    }

    /// Checks names, types and shapes, by the model where it is known and by the engine; the first profile that holds
    /// the shapes.
    fn check(&self, inputs: &NamedTensors) -> Result<usize, BackendError> {
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
        for (place, input) in self.inputs().enumerate() {
            let ranges: Vec<&InputShapes> = self.profiles.iter().map(|profile| &profile[place]).collect();
            let Some(tensor) = inputs.get(&input.name) else {
                return wrong(&input.name, described(input, &ranges), "nothing".into());
            };
            let is_held = ranges.iter().any(|range| range.hold(tensor.shape()));
            if !holds(input.element, tensor.data()) || !is_held && ranges.len() == 1 {
                let found = format!("{} {:?}", tensor.data().type_name(), tensor.shape());
                return wrong(&input.name, described(input, &ranges), found);
            }
        }
        let found = self.profiles.iter().position(|profile| holds_all(profile, inputs));
        found.ok_or_else(|| EngineError::Shape { text: no_profile(&self.profiles, inputs) }.into())
    }

    /// Gives the inputs to the device; the context that runs them.
    fn give(&mut self, profile: usize, inputs: &NamedTensors) -> Result<&mut Context, BackendError> {
        let context = match &mut self.contexts[profile] {
            Some(context) => context,
            none => none.insert(self.engine.context(u32::try_from(profile).unwrap_or(u32::MAX)).map_err(running)?),
        };
        for (name, tensor) in inputs {
            context.set_shape(name, tensor.shape()).map_err(running)?;
        }
        for input in self.tensors.iter().filter(|tensor| tensor.is_input) {
            let Some(tensor) = inputs.get(&input.name) else { continue };
            let bytes = bytes_of(&input.name, input.element, tensor.data())?;
            context.upload(&input.name, &bytes).map_err(running)?;
        }
        Ok(context)
    }
}

/// An output of what `context` has run; that of a `wide` one is int64 as in the model.
fn take(context: &mut Context, output: &EngineTensor, wide: bool) -> Result<Tensor, BackendError> {
    let EngineTensor { name, element, .. } = output;
    let shape = context.shape(name).map_err(running)?;
    let width = width_of(*element).ok_or_else(|| failed("read an output", format!("`{name}` has no known type")))?;
    let mut bytes = vec![0; shape.iter().product::<usize>() * width];
    context.download(name, &mut bytes).map_err(running)?;
    let tensor = Tensor::new(shape, values_of(*element, &bytes, wide));
    tensor.map_err(|error| failed("read an output", format!("output `{name}`: {error}")))
}

impl Runner for TensorRtRunner {
    fn run(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, BackendError> {
        let profile = self.check(inputs)?;
        guarded(NAME, RUN, || {
            let outputs: Vec<EngineTensor> = self.tensors.iter().filter(|tensor| !tensor.is_input).cloned().collect();
            let wide = self.wide.clone();
            let context = self.give(profile, inputs)?;
            context.run().map_err(running)?;
            let named = |output: EngineTensor| {
                let tensor = take(context, &output, wide.contains(&output.name))?;
                Ok((output.name, tensor))
            };
            outputs.into_iter().map(named).collect()
        })
    }

    fn bind<'a>(&'a mut self, inputs: &'a NamedTensors) -> Result<Bound<'a>, BackendError> {
        let profile = self.check(inputs)?;
        let context = self.give(profile, inputs)?;
        Ok(Box::new(move || guarded(NAME, RUN, || context.run_timed().map(Some).map_err(running))))
    }
}

/// The shapes of an input in a profile; fixed ones need none.
fn range(engine: &Engine, profile: u32, input: &EngineTensor) -> Result<InputShapes, DoorError> {
    let fixed: Option<Vec<u64>> = input.dims.iter().map(|size| size.map(|size| size as u64)).collect();
    match fixed {
        Some(dims) => Ok(InputShapes { name: input.name.clone(), min: dims.clone(), opt: dims.clone(), max: dims }),
        None => engine.range(profile, &input.name),
    }
}

/// Whether a profile holds the shapes of all inputs.
fn holds_all(profile: &[InputShapes], inputs: &NamedTensors) -> bool {
    profile.iter().all(|range| inputs.get(&range.name).is_some_and(|tensor| range.hold(tensor.shape())))
}

/// What is given, and what every profile takes.
fn no_profile(profiles: &[ShapeProfile], inputs: &NamedTensors) -> String {
    let list = |parts: Vec<String>| parts.join(", ");
    let given = list(inputs.iter().map(|(name, tensor)| format!("{name} {:?}", tensor.shape())).collect());
    let of_profile = |(index, profile): (usize, &ShapeProfile)| {
        let ranges = profile.iter().map(|range| format!("{} {}", range.name, range_text(range))).collect();
        format!("profile {index} takes {}", list(ranges))
    };
    let taken: Vec<String> = profiles.iter().enumerate().map(of_profile).collect();
    format!("no profile of the engine holds {given}: {}", taken.join("; "))
}

fn range_text(range: &InputShapes) -> String {
    match range.is_fixed() {
        true => format!("{:?}", range.min),
        false => format!("from {:?} to {:?}", range.min, range.max),
    }
}

fn running(error: DoorError) -> BackendError {
    EngineError::of(EngineStage::Run, error).into()
}

fn failed(stage: &'static str, text: String) -> BackendError {
    BackendError::Failed { backend: NAME, stage, text }
}

fn described(input: &EngineTensor, ranges: &[&InputShapes]) -> String {
    let name = type_name(input.element);
    let texts: Vec<String> = ranges.iter().map(|range| range_text(range)).collect();
    let built = match ranges {
        [one] if one.is_fixed() => "",
        [_] => ", the range that the engine was built for",
        _ => ", the ranges that the engine was built for",
    };
    format!("{name} {}{built}", texts.join(" or "))
}

fn data_type(element: i32) -> Option<DataType> {
    DataType::try_from(element).ok()
}

fn type_name(element: i32) -> &'static str {
    data_type(element).map_or("values of an unknown type", |kind| kind.type_name())
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
