//! `moa-export run`.

mod args;
mod expect;

use std::{fs::metadata, process::ExitCode};

pub(super) use args::RunArguments;
use expect::{Compare, Compared};
use serde::Serialize;

use super::{
    Failure,
    apart::keep_apart,
    backends::{BackendOptions, backend, check_ort_options},
    document::{Kind, document},
    interrupt::Ending,
    only_graph,
    output_file::{OutputFile, TENSORS, commit_all, own_ending},
    print_result,
    table::table,
};
use crate::{
    backend::{self, BackendKind, Ranges, Runner, add_implied},
    file_names::PLAN_ENDINGS,
    files::has_ending,
    latency::inputs_at,
    onnx::{OnnxFile, read_model},
    tensor::{NamedTensors, Tensor, TensorData},
    tensor_file,
};

pub(super) fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    let written = [arguments.outputs.as_deref(), arguments.random.save_inputs.as_deref()];
    let ending = Ending::at_once(written.into_iter().flatten().chain([arguments.model.as_path()]))?;
    keep_apart(&written, arguments.inputs())?;
    written.into_iter().try_for_each(|path| own_ending(path, TENSORS))?;
    let runnable = Runnable::open(arguments)?;
    check_ort_options(&[runnable.backend(arguments)], arguments.library.as_deref(), arguments.threads)?;
    let expected = arguments.expect.read()?;
    let inputs = runnable.inputs(arguments)?;
    let [kept_outputs, kept_inputs] = written.map(|path| OutputFile::of_option(path, arguments.force));
    let (kept_outputs, kept_inputs) = (kept_outputs?, kept_inputs?);
    let mut runner = runnable.load(arguments, &inputs)?;
    let outputs = runner.run(&inputs).map_err(|error| match &arguments.inputs {
        Some(path) => Failure::of_inputs(error, path),
        None => error.into(),
    })?;
    let compared = expected.map(|expected| expected.compare(&outputs)).transpose()?;
    let fill = |file: Option<OutputFile>, tensors: &NamedTensors| -> Result<_, Failure> {
        let Some(file) = file else { return Ok(None) };
        Ok(Some(file.fill(tensor_file::encode(tensors)?)))
    };
    commit_all([fill(kept_outputs, &outputs)?, fill(kept_inputs, &inputs)?], &ending)?;
    let rows: Vec<_> = outputs.iter().map(|output| Output::of(output, compared.as_ref())).collect();
    print_result(&match arguments.json {
        true => document(Kind::Run, serde_json::json!({ "outputs": rows })),
        false => summary(&rows, compared.as_ref()),
    })?;
    Ok(ExitCode::from(u8::from(!compared.as_ref().is_none_or(expect::passed))))
}

/// Type, shape and range of a tensor.
#[derive(Serialize)]
struct Output<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [usize],
    #[serde(flatten)]
    range: Range,
    expected: Option<&'a Compare>,
}

impl<'a> Output<'a> {
    fn of((name, tensor): (&'a String, &'a Tensor), compared: Option<&'a Compared>) -> Self {
        let expected = compared.and_then(|compared| compared.get(name));
        let (dtype, shape) = (tensor.data().type_name(), tensor.shape());
        Self { name, dtype, shape, range: Range::of(tensor), expected }
    }
}

/// A line for each, then one for each that differs.
fn summary(outputs: &[Output<'_>], compared: Option<&Compared>) -> String {
    let mut header = vec!["output", "type", "shape", "least", "mean", "largest", "not finite"];
    let row = |Output { name, dtype, shape, range, .. }: &Output<'_>| {
        let [least, mean, largest] =
            [range.least, range.mean, range.largest].map(|value| value.map_or("-".to_owned(), short));
        let named = [(*name).to_owned(), (*dtype).to_owned(), format!("{shape:?}")];
        named.into_iter().chain([least, mean, largest, range.not_finite.to_string()]).collect::<Vec<_>>()
    };
    let mut rows: Vec<_> = outputs.iter().map(row).collect();
    if outputs.iter().all(|output| output.range.not_finite == 0) {
        header.pop();
        rows.iter_mut().for_each(|row| row.truncate(header.len()));
    }
    let Some(compared) = compared else { return table(&header, &rows) };
    header.extend(expect::COLUMNS);
    for (row, output) in rows.iter_mut().zip(outputs) {
        row.extend(expect::cells(output.expected));
    }
    table(&header, &rows) + &expect::differences(compared)
}

/// Finite values of a tensor, and how many others there are.
#[derive(Default, Serialize)]
struct Range {
    least: Option<f64>,
    mean: Option<f64>,
    largest: Option<f64>,
    not_finite: usize,
}

impl Range {
    #[allow(clippy::cast_precision_loss)]
    fn of(tensor: &Tensor) -> Self {
        match tensor.data() {
            TensorData::F16(values) => Self::of_values(values.iter().map(|value| value.to_f64())),
            TensorData::F32(values) => Self::of_values(values.iter().map(|value| f64::from(*value))),
            TensorData::F64(values) => Self::of_values(values.iter().copied()),
            TensorData::I32(values) => Self::of_values(values.iter().map(|value| f64::from(*value))),
            TensorData::I64(values) => Self::of_values(values.iter().map(|value| *value as f64)),
        }
    }

    #[allow(clippy::cast_precision_loss)]
    fn of_values(values: impl Iterator<Item = f64>) -> Self {
        let (mut range, mut sum, mut count) = (Self::default(), 0.0, 0_usize);
        for value in values {
            if !value.is_finite() {
                range.not_finite += 1;
                continue;
            }
            range.least = Some(range.least.map_or(value, |least| least.min(value)));
            range.largest = Some(range.largest.map_or(value, |largest| largest.max(value)));
            sum += value;
            count += 1;
        }
        Self { mean: (count > 0).then(|| sum / count as f64), ..range }
    }
}

/// A number to five places or five digits; whole numbers as they are.
fn short(value: f64) -> String {
    let magnitude = value.abs();
    if value.fract() == 0.0 && magnitude < 1e15 {
        return format!("{value}");
    }
    if (1e-3..1e5).contains(&magnitude) { format!("{value:.5}") } else { format!("{value:.4e}") }
}

/// What is run: a model on a backend, or a plan.
enum Runnable {
    Model(Box<OnnxFile>),
    Plan,
}

impl Runnable {
    fn open(arguments: &RunArguments) -> Result<Self, Failure> {
        if !has_ending(&arguments.model, PLAN_ENDINGS) {
            arguments.tensorrt.check(&[arguments.backend.unwrap_or(BackendKind::Ort)])?;
            return Ok(Self::Model(Box::new(read_model(&only_graph(&arguments.model)?)?)));
        }
        let message = format!("{} is a plan, which TensorRT alone runs", arguments.model.display());
        match arguments.backend {
            Some(BackendKind::TensorRt) | None if arguments.tensorrt.plan.is_none() => {
                arguments.tensorrt.check_cache(true)?;
                let missing = |error| Failure::io(&error, &arguments.model.display().to_string());
                metadata(&arguments.model).map_err(missing)?;
                Ok(Self::Plan)
            }
            _ => Err(Failure::usage(message, "leave out --backend and --plan")),
        }
    }

    fn backend(&self, arguments: &RunArguments) -> BackendKind {
        match self {
            Self::Model(_) => arguments.backend.unwrap_or(BackendKind::Ort),
            Self::Plan => BackendKind::TensorRt,
        }
    }

    fn inputs(&self, arguments: &RunArguments) -> Result<NamedTensors, Failure> {
        match (&arguments.inputs, self) {
            (Some(path), Self::Plan) => Ok(tensor_file::read(path)?),
            (Some(path), Self::Model(model)) => {
                let mut inputs = tensor_file::read(path)?;
                add_implied(&model.inputs(), &mut inputs).map_err(|error| Failure::of_inputs(error, path))?;
                Ok(inputs)
            }
            (None, Self::Model(model)) => Ok(inputs_at(model, &arguments.random.grid()?, arguments.random.seed)?),
            (None, Self::Plan) => {
                let help = "give --inputs FILE, or the model as MODEL and the plan as --plan";
                Err(Failure::usage("--random needs a model, and a plan does not tell what its ids mean", help))
            }
        }
    }

    fn load(&self, arguments: &RunArguments, inputs: &NamedTensors) -> Result<Box<dyn Runner>, Failure> {
        let Self::Model(model) = self else {
            let options = arguments.tensorrt.options(Ranges::default());
            return Ok(backend::load_tensorrt_plan(&arguments.model, &options)?);
        };
        let options = BackendOptions {
            threads: arguments.threads,
            library: arguments.library.clone(),
            tensorrt: arguments.tensorrt.options(Ranges::default().holding(model, inputs)),
        };
        Ok(backend(self.backend(arguments), &options)?.load(model)?)
    }
}
