//! Checkpoints that tests can break.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
};

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::{Map, Value, json};

use crate::common::{data, generated};

/// One stored tensor.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Stored {
    pub(crate) fn floats(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        assert_eq!(self.dtype, Dtype::F32);
        let (chunks, _) = self.bytes.as_chunks();
        chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    pub(crate) fn set(&mut self, index: usize, value: f32) {
        self.bytes[4 * index..][..4].copy_from_slice(&value.to_le_bytes());
    }

    /// The same values as another type of float.
    fn converted(&self, dtype: Dtype) -> Self {
        let values = self.values().into_iter();
        let bytes = match dtype {
            Dtype::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
            Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
            Dtype::F64 => values.flat_map(|value| f64::from(value).to_le_bytes()).collect(),
            other => panic!("{other:?}"),
        };
        Self { dtype, shape: self.shape.clone(), bytes }
    }
}

/// Configuration and tensors.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) config: Map<String, Value>,
    pub(crate) tensors: BTreeMap<String, Stored>,
    pub(crate) metadata: HashMap<String, String>,
}

impl Model {
    pub(crate) fn read(fixture: &str) -> Self {
        let bytes = fs::read(data(fixture).join("model.safetensors")).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let stored = |(name, view): (String, TensorView<'_>)| {
            let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name, Stored { dtype, shape, bytes })
        };
        Self {
            config: serde_json::from_slice(&fs::read(data(fixture).join("config.json")).unwrap()).unwrap(),
            tensors: SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(stored).collect(),
            metadata: header.metadata().clone().unwrap_or_default(),
        }
    }

    /// The encoder-decoder that most tests start from; it stores fc1 and ffd.0, and the embedding, repeatedly.
    pub(crate) fn translator() -> Self {
        Self::read("variants/v_postnorm")
    }

    /// One self-attention layer.
    pub(crate) fn layer() -> Self {
        Self::layer_of(8, 4, 4)
    }

    pub(crate) fn layer_of(width: usize, experts: usize, head: usize) -> Self {
        let keys = json!({
            "model_type": "moa_layer", "embed_dim": width, "num_expert": experts, "top_k": 2, "head_dim": head
        });
        let shapes: [(&str, &[usize]); 5] = [
            ("q_proj.w_gate", &[width, experts]),
            ("q_proj.experts.w", &[experts, width, head]),
            ("q_proj.output_experts.w", &[experts, head, width]),
            ("k_proj.weight", &[head, width]),
            ("v_proj.weight", &[head, width]),
        ];
        let tensor = |(name, shape): (&str, &[usize])| {
            let values = generated(7, name, shape.iter().product(), 0.5);
            (name.to_owned(), Stored::floats(shape, &values))
        };
        Self {
            config: keys.as_object().unwrap().clone(),
            tensors: shapes.into_iter().map(tensor).collect(),
            metadata: HashMap::new(),
        }
    }

    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.config.insert(key.into(), value.into());
    }

    #[track_caller]
    pub(crate) fn tensor(&mut self, name: &str) -> &mut Stored {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub(crate) fn convert_one(&mut self, name: &str, dtype: Dtype) {
        let tensor = self.tensor(name);
        *tensor = tensor.converted(dtype);
    }

    /// Stores every tensor as another type of float.
    pub(crate) fn convert(&mut self, dtype: Dtype) {
        for tensor in self.tensors.values_mut() {
            *tensor = tensor.converted(dtype);
        }
    }

    /// The bytes of a safetensors file of the tensors that `choose` takes.
    fn encoded(&self, choose: impl Fn(usize) -> bool) -> Vec<u8> {
        let chosen = self.tensors.iter().enumerate().filter(|(index, _)| choose(*index));
        let views = chosen.map(|(_, (name, stored))| {
            (name, TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes).unwrap())
        });
        let metadata = Some(self.metadata.clone()).filter(|metadata| !metadata.is_empty());
        serialize(views, metadata).unwrap()
    }

    pub(crate) fn file(&self) -> Vec<u8> {
        self.encoded(|_| true)
    }

    fn write_config(&self, folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("config.json"), Value::Object(self.config.clone()).to_string()).unwrap();
    }

    /// Writes `config.json` and `model.safetensors`.
    pub(crate) fn write(&self, folder: &Path) {
        self.write_config(folder);
        fs::write(folder.join("model.safetensors"), self.file()).unwrap();
    }

    /// Writes `config.json`, an index and `count` shards; neighbours are in different shards.
    pub(crate) fn write_sharded(&self, folder: &Path, count: usize) {
        self.write_config(folder);
        let name = |shard: usize| format!("model-{:05}-of-{count:05}.safetensors", shard + 1);
        for shard in 0..count {
            fs::write(folder.join(name(shard)), self.encoded(|index| index % count == shard)).unwrap();
        }
        let map: Map<_, _> = self
            .tensors
            .keys()
            .enumerate()
            .map(|(index, tensor)| (tensor.clone(), name(index % count).into()))
            .collect();
        let bytes: usize = self.tensors.values().map(|tensor| tensor.bytes.len()).sum();
        let index = json!({ "metadata": { "total_size": bytes }, "weight_map": map });
        fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}
