//! What the integration tests share: models and goldens of the fixtures, read without the program's own
//! checkpoint reader.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

pub(crate) mod causal;
mod data;
pub(crate) mod golden;

pub(crate) use data::data;

use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path, sync::Arc};

use moa_export::tensor::{NamedTensors, Tensor, TensorData};
use moa_graphs::{
    FloatType, Rounding, Runs, TensorDirectory, TensorSource, Weight, WeightError,
    families::{self, Config, ImportOptions},
    model::Model,
};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};

/// A JSON file of the fixtures.
pub(crate) fn json(path: impl AsRef<Path>) -> Value {
    let path = data(path);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All tensors of a safetensors file of the fixtures; uint8 becomes int64.
pub(crate) fn read_tensors(path: impl AsRef<Path>) -> NamedTensors {
    let bytes = read(&data(path));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, view)| (name, tensor(view.dtype(), view.shape(), view.data()))).collect()
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn tensor(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Tensor {
    fn numbers<const N: usize, T>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks().0.iter().map(|chunk| number(*chunk)).collect()
    }
    let values = match dtype {
        Dtype::F32 => TensorData::F32(numbers(bytes, f32::from_le_bytes)),
        Dtype::I32 => TensorData::I32(numbers(bytes, i32::from_le_bytes)),
        Dtype::I64 => TensorData::I64(numbers(bytes, i64::from_le_bytes)),
        Dtype::U8 => TensorData::I64(bytes.iter().map(|byte| i64::from(*byte)).collect()),
        other => panic!("element type {other:?}"),
    };
    Tensor::new(shape, values).unwrap()
}

/// Weights in memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Weights {
    origin: String,
    tensors: BTreeMap<String, (Vec<usize>, Arc<[f32]>)>,
    aliases: BTreeMap<String, String>,
}

impl Weights {
    /// No weights yet; messages call the place `origin`.
    pub(crate) fn new(origin: impl Into<String>) -> Self {
        Self { origin: origin.into(), ..Self::default() }
    }

    /// The weights of a safetensors file of the fixtures, with the aliases that its header lists.
    pub(crate) fn read(path: impl AsRef<Path>) -> Self {
        let path = data(path);
        let bytes = read(&path);
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let mut weights = Self::new(path.display().to_string());
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let values = tensor(view.dtype(), view.shape(), view.data());
            weights.insert(name, view.shape(), values.as_f32().expect("weights are float32").to_vec());
        }
        for (alias, name) in header.metadata().iter().flatten() {
            if weights.tensors.contains_key(name) {
                weights.aliases.insert(alias.clone(), name.clone());
            }
        }
        weights
    }

    /// Adds a tensor.
    pub(crate) fn insert(&mut self, name: impl Into<String>, shape: &[usize], values: Vec<f32>) {
        assert_eq!(shape.iter().product::<usize>(), values.len());
        self.tensors.insert(name.into(), (shape.to_vec(), values.into()));
    }
}

impl TensorDirectory for Weights {
    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<Weight> {
        let name = self.aliases.get(name).map_or(name, String::as_str);
        let (shape, values) = self.tensors.get(name)?;
        Some(Weight::new(name, shape.clone(), self.origin.clone(), Arc::new(Values(values.clone()))))
    }

    fn origin(&self) -> &str {
        &self.origin
    }
}

/// A weight of its own.
pub(crate) fn weight(name: &str, shape: &[usize], values: Vec<f32>) -> Weight {
    let mut weights = Weights::new("memory");
    weights.insert(name, shape, values);
    weights.tensor(name).unwrap()
}

struct Values(Arc<[f32]>);

impl TensorSource for Values {
    fn read_f32(&self) -> Result<Vec<f32>, WeightError> {
        Ok(self.0.to_vec())
    }

    fn read_f64(&self) -> Result<Vec<f64>, WeightError> {
        Ok(self.0.iter().map(|value| f64::from(*value)).collect())
    }

    fn read_runs(&self, runs: Runs, to: FloatType, out: &mut Vec<u8>) -> Result<(), WeightError> {
        for run in 0..runs.count {
            let start = runs.start + run * runs.stride;
            to.append(&self.0[start..start + runs.length], out).expect("values of tests fit");
        }
        Ok(())
    }

    fn stored_type(&self) -> &'static str {
        "F32"
    }

    fn stored_bytes(&self) -> u64 {
        self.0.len() as u64 * 4
    }

    fn read_bytes(&self, sink: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), WeightError> {
        let _until_it_breaks = self.0.iter().try_for_each(|value| sink(&value.to_le_bytes()));
        Ok(())
    }
}

/// The typed model of `weights` under the configuration `keys`.
pub(crate) fn import(keys: Map<String, Value>, weights: &Weights) -> Model {
    let config = Config::new("config.json", keys);
    families::import(&config, weights, ImportOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// The typed model of a fixture folder with `config.json` and `model.safetensors`.
pub(crate) fn import_folder(folder: impl AsRef<Path>) -> Model {
    let folder = folder.as_ref();
    let Value::Object(keys) = json(folder.join("config.json")) else { panic!("config.json is no object") };
    import(keys, &Weights::read(folder.join("model.safetensors")))
}

/// The values that the recipe of the layer fixtures gives the tensor `name`: SplitMix64 from `seed` mixed with
/// the FNV-1a hash of the name, scaled to `-amplitude .. amplitude`.
pub(crate) fn generated(seed: u64, name: &str, count: usize, amplitude: f64) -> Vec<f32> {
    let mut state = seed ^ fnv_1a(name);
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let unit = 1.0 / f64::from(1 << 24);
    (0..count).map(|_| (-amplitude + 2.0 * amplitude * ((next() >> 40) as f64 * unit)) as f32).collect()
}

/// FNV-1a, 64 bits.
pub(crate) fn fnv_1a(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

/// An int64 tensor.
pub(crate) fn integers(shape: &[usize], values: Vec<i64>) -> Tensor {
    Tensor::new(shape, TensorData::I64(values)).unwrap()
}

/// A float32 tensor.
pub(crate) fn floats(shape: &[usize], values: Vec<f32>) -> Tensor {
    Tensor::new(shape, TensorData::F32(values)).unwrap()
}

/// 1 where a token of `ids` is real, 0 where it is padding (id 1).
pub(crate) fn attention_mask(ids: &Tensor) -> Tensor {
    integers(ids.shape(), ids.as_i64().unwrap().iter().map(|id| i64::from(*id != 1)).collect())
}

/// Columns `from .. to` of an int64 matrix.
pub(crate) fn columns(matrix: &Tensor, from: usize, to: usize) -> Tensor {
    let (rows, width) = (matrix.shape()[0], matrix.shape()[1]);
    let values = matrix.as_i64().unwrap();
    integers(
        &[rows, to - from],
        (0..rows).flat_map(|row| &values[row * width + from..row * width + to]).copied().collect(),
    )
}

/// Inputs of a model over one sequence of tokens: the masked language model, or the encoder.
pub(crate) fn token_inputs(ids: &Tensor) -> NamedTensors {
    NamedTensors::from([("input_ids".into(), ids.clone()), ("attention_mask".into(), attention_mask(ids))])
}

/// Inputs of the decoder for the tokens `from .. to` of `target`.
///
/// `encoded` are the encoder's outputs for `source`, `previous` the decoder's outputs for the tokens before
/// `from`; without them the past is empty, of the encoder's element type.
pub(crate) fn decoder_inputs(
    source: &Tensor,
    target: &Tensor,
    (from, to): (usize, usize),
    encoded: &NamedTensors,
    previous: Option<&NamedTensors>,
) -> NamedTensors {
    let mut inputs = NamedTensors::from([
        ("input_ids".into(), columns(target, from, to)),
        ("attention_mask".into(), attention_mask(&columns(target, 0, to))),
        ("encoder_attention_mask".into(), attention_mask(source)),
    ]);
    for (name, tensor) in encoded.iter().chain(previous.into_iter().flatten()) {
        let Some(name) = name.strip_prefix("present.") else { continue };
        inputs.insert(format!("past_key_values.{name}"), tensor.clone());
        if previous.is_none() {
            inputs.insert(format!("past_key_values.{}", name.replace("encoder", "decoder")), without_tokens(tensor));
        }
    }
    inputs
}

/// A cache, `[B, G, 0, D]`, of the element type of `cache`.
fn without_tokens(cache: &Tensor) -> Tensor {
    let mut shape = cache.shape().to_vec();
    shape[2] = 0;
    let none = match cache.data() {
        TensorData::F32(_) => TensorData::F32(Vec::new()),
        _ => TensorData::F64(Vec::new()),
    };
    Tensor::new(shape, none).unwrap()
}
