//! Checking inputs against a model before a runtime sees them.

use std::collections::{BTreeMap, HashMap};

use super::BackendError;
use crate::onnx::proto::tensor_proto::DataType;
use crate::onnx::read::{Dim, OnnxFile, PositionTable, ValueInfo, dims_text, sum};
use crate::tensor::{NamedTensors, Tensor, TensorData, coordinates};

/// Inputs that a model takes.
pub(super) struct Signature {
    pub(super) inputs: Vec<ValueInfo>,
    /// Inputs that look up rows of a weight, and how many rows it has.
    rows: BTreeMap<String, i64>,
    /// Inputs that tell real tokens from padding.
    masks: Vec<String>,
    /// The input whose ones are counted to find positions, and their table.
    counted: Option<(String, PositionTable)>,
}

impl Signature {
    pub(super) fn new(model: &OnnxFile) -> Self {
        let rows = model.looked_up_rows().into_iter().chain(model.given_positions());
        Self { inputs: model.inputs(), rows: rows.collect(), masks: model.masks(), counted: model.counted_positions() }
    }

    /// Checks names, types and shapes, and that every dimension of one name has one size; names the first culprit.
    pub(super) fn check(&self, tensors: &NamedTensors) -> Result<(), BackendError> {
        if let Some(name) = tensors.keys().find(|name| self.inputs.iter().all(|input| input.name != **name)) {
            let known: Vec<&str> = self.inputs.iter().map(|input| input.name.as_str()).collect();
            return Err(misfit(name, format!("one of {}", known.join(", ")), "an unknown name".into()));
        }
        let mut sizes = HashMap::new();
        for input in &self.inputs {
            let Some(tensor) = tensors.get(&input.name) else {
                return Err(misfit(&input.name, describe(input), "nothing".into()));
            };
            if data_type(tensor.data()) != input.data_type || !fits(input, tensor, &mut sizes) {
                let found = format!("{} {:?}", tensor.data().type_name(), tensor.shape());
                return Err(misfit(&input.name, describe(input) + &equalities(input, &sizes), found));
            }
            check_not_empty(input, tensor)?;
            self.check_values(&input.name, tensor)?;
        }
        self.check_sums(tensors, &sizes)?;
        self.check_positions(tensors)
    }

    /// Checks that every looked-up row is there, and that masks are masks; runtimes differ in what they do elsewhere.
    fn check_values(&self, name: &str, tensor: &Tensor) -> Result<(), BackendError> {
        let (most, expected) = match self.rows.get(name) {
            Some(rows) => (rows - 1, format!("values from 0 to {}", rows - 1)),
            None if self.masks.iter().any(|mask| mask == name) => (1, "1 for a real token and 0 for padding".into()),
            None => return Ok(()),
        };
        let values = tensor.as_i64().unwrap_or_default();
        match values.iter().position(|value| !(0..=most).contains(value)) {
            Some(index) => {
                let found = format!("{} at {:?}", values[index], coordinates(index, tensor.shape()));
                Err(misfit(name, expected, found))
            }
            None => Ok(()),
        }
    }

    /// Checks that every real token has a position: its number among the real tokens of its row.
    fn check_positions(&self, tensors: &NamedTensors) -> Result<(), BackendError> {
        let Some((name, table)) = &self.counted else { return Ok(()) };
        let Some((tensor, values)) = tensors.get(name).and_then(|tensor| Some((tensor, tensor.as_i64()?))) else {
            return Ok(());
        };
        let most = i64::try_from(table.positions).unwrap_or(i64::MAX);
        let length = tensor.shape().last().copied().unwrap_or(1).max(1);
        for (row, mask) in values.chunks(length).enumerate() {
            let mut count = 0_i64;
            for real in mask {
                count = count.saturating_add(*real);
                if count.saturating_mul(*real) > most {
                    let expected = format!("at most {most} real tokens in a row, the positions of `{}`", table.name);
                    let real = mask.iter().fold(0_i64, |count, real| count.saturating_add(*real));
                    return Err(misfit(name, expected, format!("{real} in row {row}")));
                }
            }
        }
        Ok(())
    }

    /// Checks the dimensions whose name is a sum of other names.
    fn check_sums(&self, tensors: &NamedTensors, sizes: &HashMap<&str, usize>) -> Result<(), BackendError> {
        for input in &self.inputs {
            let Some((dims, tensor)) = input.dims.as_ref().zip(tensors.get(&input.name)) else { continue };
            for (dim, size) in dims.iter().zip(tensor.shape()) {
                let Dim::Symbolic(name) = dim else { continue };
                if !name.contains('+') {
                    continue;
                }
                if let Some(expected) = sum(name, |term| sizes.get(term).copied()).filter(|expected| expected != size) {
                    let expected = format!("{} with {name} = {expected}", describe(input));
                    let found = format!("{} {:?}", tensor.data().type_name(), tensor.shape());
                    return Err(misfit(&input.name, expected, found));
                }
            }
        }
        Ok(())
    }
}

/// Only what came before may be empty: without a row or a token there is nothing to compute.
fn check_not_empty(input: &ValueInfo, tensor: &Tensor) -> Result<(), BackendError> {
    let empty = |(dim, size): (&Dim, &usize)| dim.wrongly_empty(*size as u64).is_some();
    if !input.dims.iter().flatten().zip(tensor.shape()).any(empty) {
        return Ok(());
    }
    let expected = format!("{} of at least 1 each", describe(input));
    Err(misfit(&input.name, expected, format!("{} {:?}", tensor.data().type_name(), tensor.shape())))
}

pub(super) fn misfit(name: &str, expected: String, found: String) -> BackendError {
    BackendError::Input { name: name.to_owned(), expected, found }
}

fn data_type(data: &TensorData) -> DataType {
    match data {
        TensorData::F16(_) => DataType::Float16,
        TensorData::F32(_) => DataType::Float,
        TensorData::F64(_) => DataType::Double,
        TensorData::I32(_) => DataType::Int32,
        TensorData::I64(_) => DataType::Int64,
    }
}

fn fits<'a>(input: &'a ValueInfo, tensor: &Tensor, sizes: &mut HashMap<&'a str, usize>) -> bool {
    let Some(dims) = &input.dims else { return true };
    let matches = |(dim, size): (&'a Dim, &usize)| match dim {
        Dim::Fixed(fixed) => fixed == size,
        Dim::Symbolic(name) if name.contains('+') => true,
        Dim::Symbolic(name) => sizes.entry(name.as_str()).or_insert(*size) == size,
        Dim::Unknown => true,
    };
    dims.len() == tensor.shape().len() && dims.iter().zip(tensor.shape()).all(matches)
}

fn describe(input: &ValueInfo) -> String {
    let Some(dims) = &input.dims else { return input.data_type.type_name().to_owned() };
    format!("{} {}", input.data_type.type_name(), dims_text(dims))
}

/// Sizes that earlier inputs gave to the symbols of this one.
fn equalities(input: &ValueInfo, sizes: &HashMap<&str, usize>) -> String {
    let symbols = input.dims.iter().flatten().filter_map(|dim| match dim {
        Dim::Symbolic(name) => Some((name, sizes.get(name.as_str())?)),
        _ => None,
    });
    let mut texts: Vec<String> = symbols.map(|(name, size)| format!("{name} = {size}")).collect();
    texts.dedup();
    if texts.is_empty() { String::new() } else { format!(" with {}", texts.join(", ")) }
}
