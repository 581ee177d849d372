//! tract, in this process: the standard form, and the function form with its bodies put in place.

use std::collections::VecDeque;
use std::sync::Arc;

use prost::Message;
use tract_onnx::pb;
use tract_onnx::prelude::{
    DatumType, InferenceModel, InferenceModelExt, IntoTValue, TValue, Tensor as TractTensor, TypedSimplePlan,
};

use super::guard::guarded;
use super::signature::Signature;
use super::{Backend, BackendError, BackendKind, Bound, Runner, operators};
use crate::onnx::inline::inline_functions;
use crate::onnx::proto::{ModelProto, TensorProto, tensor_proto::DataType};
use crate::onnx::read::OnnxFile;
use crate::tensor::{NamedTensors, Tensor, TensorData};

/// Version of tract in this program.
pub const TRACT_VERSION: &str = "0.23.9";

/// Plans kept for input shapes, where one plan for all shapes cannot be made.
const PLANS: usize = 4;

const NAME: &str = BackendKind::Tract.name();

/// The backend `tract`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TractBackend;

impl Backend for TractBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Tract
    }

    fn computes_bodies(&self) -> bool {
        true
    }

    fn probe(&self, model: &OnnxFile) -> Result<(), BackendError> {
        let missing = operators::without_body(model.model());
        if !missing.is_empty() {
            return Err(BackendError::Unsupported {
                why: format!(
                    "the model is in fused form: {}, and tract has no such operators",
                    operators::without_bodies(&missing)
                ),
                help: Some("export with --form standard or --form function"),
            });
        }
        if let Some(kind) = unknown_type(model) {
            return Err(BackendError::Unsupported {
                why: format!("the model holds {} tensors, and tract has no such type", kind.type_name()),
                help: Some("export with --dtype fp32, --dtype fp16 or --dtype int8"),
            });
        }
        match operators::of_domain(model.model(), moa_schema::RUNTIME_DOMAIN).first() {
            Some(name) => Err(BackendError::Unsupported {
                why: format!("the model has ONNX Runtime's own operator {name}, and tract has no such operator"),
                help: Some("give the file as moa-export wrote it, or leave out this backend"),
            }),
            None => Ok(()),
        }
    }

    fn load(&self, model: &OnnxFile) -> Result<Box<dyn Runner>, BackendError> {
        self.probe(model)?;
        let runner = guarded(NAME, "load the model", || TractRunner::new(model))?;
        Ok(Box::new(runner))
    }
}

/// A type that the model holds and tract does not know.
fn unknown_type(model: &OnnxFile) -> Option<DataType> {
    let weights = model.graph().into_iter().flat_map(|graph| &graph.initializer).map(|weight| weight.data_type);
    let values = model.inputs().into_iter().chain(model.outputs()).map(|value| value.data_type as i32);
    let held: Vec<_> = weights.chain(values).collect();
    [DataType::Int4, DataType::Bfloat16].into_iter().find(|kind| held.contains(&(*kind as i32)))
}

type Plan = Arc<TypedSimplePlan>;

struct TractRunner {
    signature: Signature,
    outputs: Vec<String>,
    model: InferenceModel,
    /// One plan for all shapes.
    symbolic: Option<Plan>,
    /// Plans by the shapes of the inputs, oldest first.
    by_shape: VecDeque<(Vec<Vec<usize>>, Plan)>,
}

impl TractRunner {
    fn new(file: &OnnxFile) -> Result<Self, BackendError> {
        let failed = |error: tract_onnx::prelude::TractError| failed("load the model", &error);
        let proto = tract_proto(file)?;
        let parsed = tract_onnx::onnx().parse(&proto, None).map_err(failed)?;
        drop(proto);
        if let Some(name) = parsed.unresolved_inputs.first() {
            let text = format!("value `{name}` is not defined");
            return Err(BackendError::Failed { backend: NAME, stage: "load the model", text });
        }
        let symbolic = guarded(NAME, "plan", || plan(parsed.model.clone())).ok();
        let outputs = file.outputs().into_iter().map(|output| output.name).collect();
        let signature = Signature::new(file);
        Ok(Self { signature, outputs, model: parsed.model, symbolic, by_shape: VecDeque::new() })
    }

    /// Inputs in the order of the model.
    fn values(&self, inputs: &NamedTensors) -> Result<Vec<TractTensor>, BackendError> {
        let tensors = self.signature.inputs.iter().filter_map(|input| inputs.get(&input.name));
        tensors.map(|tensor| tract_tensor(tensor).map_err(|error| failed("take an input", &error))).collect()
    }

    fn plan_for(&mut self, shapes: &[Vec<usize>]) -> Result<Plan, BackendError> {
        if let Some((_, plan)) = self.by_shape.iter().find(|(known, _)| known == shapes) {
            return Ok(Arc::clone(plan));
        }
        let mut model = self.model.clone();
        for (index, shape) in shapes.iter().enumerate() {
            let fact = model.input_fact(index).map_err(|error| failed("plan", &error))?.clone();
            let fact = fact.with_shape(shape.as_slice());
            model.set_input_fact(index, fact).map_err(|error| failed("plan", &error))?;
        }
        let plan = plan(model)?;
        if self.by_shape.len() == PLANS {
            self.by_shape.pop_front();
        }
        self.by_shape.push_back((shapes.to_vec(), Arc::clone(&plan)));
        Ok(plan)
    }

    fn outputs(&self, values: &[TValue]) -> Result<NamedTensors, BackendError> {
        self.outputs.iter().zip(values).map(|(name, value)| Ok((name.clone(), tensor(name, value)?))).collect()
    }
}

impl Runner for TractRunner {
    fn run(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, BackendError> {
        self.signature.check(inputs)?;
        guarded(NAME, "run the model", || {
            let values = self.values(inputs)?;
            let shapes: Vec<Vec<usize>> = values.iter().map(|value| value.shape().to_vec()).collect();
            let attempt = |plan| guarded(NAME, "run the model", || self.outputs(&execute(plan, &values)?));
            if let Some(Ok(outputs)) = self.symbolic.as_ref().map(attempt) {
                return Ok(outputs);
            }
            let plan = self.plan_for(&shapes)?;
            let outputs = self.outputs(&execute(&plan, &values)?)?;
            self.symbolic = None;
            Ok(outputs)
        })
    }

    fn bind<'a>(&'a mut self, inputs: &'a NamedTensors) -> Result<Bound<'a>, BackendError> {
        self.signature.check(inputs)?;
        let values = self.values(inputs)?;
        let shapes: Vec<Vec<usize>> = values.iter().map(|value| value.shape().to_vec()).collect();
        let values: Vec<TValue> = values.into_iter().map(IntoTValue::into_tvalue).collect();
        let mut chosen: Option<Plan> = None;
        Ok(Box::new(move || {
            guarded(NAME, "run the model", || {
                if let Some(plan) = &chosen {
                    return execute_bound(plan, &values).map(|()| None);
                }
                if let Some(plan) = &self.symbolic
                    && guarded(NAME, "run the model", || execute_bound(plan, &values)).is_ok()
                {
                    chosen = Some(Arc::clone(plan));
                    return Ok(None);
                }
                let plan = self.plan_for(&shapes)?;
                execute_bound(&plan, &values)?;
                chosen = Some(plan);
                Ok(None)
            })
        }))
    }
}

fn execute_bound(plan: &Plan, values: &[TValue]) -> Result<(), BackendError> {
    plan.run(values.iter().cloned().collect()).map(drop).map_err(|error| failed("run the model", &error))
}

fn failed(stage: &'static str, error: &tract_onnx::prelude::TractError) -> BackendError {
    BackendError::Failed { backend: NAME, stage, text: format!("{error:#}") }
}

fn plan(model: InferenceModel) -> Result<Plan, BackendError> {
    let model = model.into_optimized().map_err(|error| failed("optimise the model", &error))?;
    TypedSimplePlan::new(model).map_err(|error| failed("plan", &error))
}

fn execute(plan: &Plan, values: &[TractTensor]) -> Result<Vec<TValue>, BackendError> {
    let inputs = values.iter().map(|value| value.clone().into_tvalue()).collect();
    let outputs = plan.run(inputs).map_err(|error| failed("run the model", &error))?;
    Ok(outputs.into_iter().collect())
}

/// The model as tract's messages: functions replaced, every weight inline as raw bytes.
fn tract_proto(file: &OnnxFile) -> Result<pb::ModelProto, BackendError> {
    let mut model: ModelProto = inline_functions(file.model())?;
    let weights = model.graph.as_mut().map(|graph| std::mem::take(&mut graph.initializer)).unwrap_or_default();
    let mut proto = pb::ModelProto::decode(model.encode_to_vec().as_slice()).map_err(|error| BackendError::Failed {
        backend: NAME,
        stage: "load the model",
        text: error.to_string(),
    })?;
    if let Some(graph) = &mut proto.graph {
        for weight in &weights {
            graph.initializer.push(tract_weight(file, weight)?);
        }
    }
    Ok(proto)
}

fn tract_weight(file: &OnnxFile, weight: &TensorProto) -> Result<pb::TensorProto, BackendError> {
    Ok(pb::TensorProto {
        name: weight.name.clone(),
        dims: weight.dims.clone(),
        data_type: weight.data_type,
        raw_data: file.values(weight)?.to_vec(),
        ..pb::TensorProto::default()
    })
}

fn tract_tensor(tensor: &Tensor) -> Result<TractTensor, tract_onnx::prelude::TractError> {
    match tensor.data() {
        TensorData::F16(values) => TractTensor::from_shape(tensor.shape(), values),
        TensorData::F32(values) => TractTensor::from_shape(tensor.shape(), values),
        TensorData::F64(values) => TractTensor::from_shape(tensor.shape(), values),
        TensorData::I32(values) => TractTensor::from_shape(tensor.shape(), values),
        TensorData::I64(values) => TractTensor::from_shape(tensor.shape(), values),
    }
}

fn tensor(name: &str, value: &TValue) -> Result<Tensor, BackendError> {
    let read = |error| failed("read an output", &error);
    let dtype = if value.datum_type().is_tdim() { DatumType::I64 } else { value.datum_type() };
    let value = value.cast_to_dt(dtype).map_err(read)?;
    let view = value.try_as_plain_ram().map_err(read)?;
    let data = match dtype {
        DatumType::F16 => TensorData::F16(view.as_slice().map_err(read)?.to_vec()),
        DatumType::F32 => TensorData::F32(view.as_slice().map_err(read)?.to_vec()),
        DatumType::F64 => TensorData::F64(view.as_slice().map_err(read)?.to_vec()),
        DatumType::I32 => TensorData::I32(view.as_slice().map_err(read)?.to_vec()),
        DatumType::I64 => TensorData::I64(view.as_slice().map_err(read)?.to_vec()),
        other => {
            let why = format!("output `{name}` is {other:?}");
            return Err(BackendError::Unsupported { why, help: None });
        }
    };
    Tensor::new(value.shape(), data).map_err(|error| BackendError::Failed {
        backend: NAME,
        stage: "read an output",
        text: format!("output `{name}`: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::TRACT_VERSION;

    #[test]
    fn the_version_is_the_pinned_one() {
        let pinned = format!("tract-onnx = {{ version = \"={TRACT_VERSION}\"");
        assert!(include_str!("../../Cargo.toml").contains(&pinned), "{pinned}");
    }
}
