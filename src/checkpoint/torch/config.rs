//! The configuration inside a fairseq checkpoint.

use std::collections::BTreeMap;

use moa_graphs::families::{Config, model_types, without_holders};
use serde_json::{Map, Number, Value as Json, json};

use super::{
    tensors::StateDict,
    value::{Object, Pickle, Value},
};
use crate::checkpoint::{
    error::{CheckpointError, quoted},
    limits,
};

/// Start of the names of the encoder of fairseq's RoBERTa.
const ROBERTA: &str = "encoder.sentence_encoder.";
/// End of the name of a tensor that every MoA layer has.
const ROUTER: &str = ".q_proj.w_gate";
/// What the task of a translation says of how its model is used: languages, and the side on which sources are padded.
const OF_TASK: [&str; 3] = ["source_lang", "target_lang", "left_pad_source"];

/// Keys of one dictionary of a pickle.
pub(super) struct Keys<'a, 'p> {
    file: &'a str,
    pickle: &'p Pickle,
    values: BTreeMap<&'p str, Value>,
}

impl<'a, 'p> Keys<'a, 'p> {
    /// The entries whose keys are texts, which must be unique.
    pub(super) fn new(file: &'a str, pickle: &'p Pickle, entries: &[(Value, Value)]) -> Result<Self, CheckpointError> {
        let mut values = BTreeMap::new();
        for (key, value) in entries {
            let Some(key) = pickle.text(*key) else { continue };
            if values.insert(key, *value).is_some() {
                let problem = format!("its pickle repeats the key {}", quoted(key));
                return Err(CheckpointError::Pickle { file: file.into(), problem });
            }
        }
        Ok(Self { file, pickle, values })
    }

    /// A present value; `None` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<Value> {
        self.values.get(key).copied().filter(|value| *value != Value::None)
    }

    /// Whether fairseq wrote a configuration.
    pub(super) fn has_configuration(&self) -> bool {
        ["args", "cfg"].into_iter().any(|key| self.get(key).is_some())
    }

    /// The configuration that this root of a checkpoint holds, for the tensors of its model.
    pub(super) fn configuration(&self, tensors: &StateDict<'_>) -> Result<Config, CheckpointError> {
        let keys = self.model_keys()?;
        let architecture = keys.get("arch").or(keys.get("_name")).and_then(|value| self.pickle.text(value));
        let family = self.family(architecture, tensors)?;
        let mut json = keys.json()?;
        self.add_task(&mut json)?;
        json.insert("model_type".into(), family.into());
        Ok(Config::new(self.file, json))
    }

    /// `args` of older versions, or `cfg["model"]`; fairseq takes the former where both are there.
    fn model_keys(&self) -> Result<Keys<'a, 'p>, CheckpointError> {
        let missing = |found: String| CheckpointError::NoModelKeys { file: self.file.into(), found };
        let model = match self.get("cfg").filter(|_| self.get("args").is_none()) {
            None => self.get("args"),
            Some(cfg) => {
                let entries = self.pickle.entries(cfg);
                let entries = entries.ok_or_else(|| missing(format!("\"cfg\" is {}", self.pickle.kind(cfg))))?;
                Keys::new(self.file, self.pickle, &entries)?.get("model")
            }
        };
        let Some(keys) = model else {
            return Err(missing("\"cfg\" has no \"model\"".into()));
        };
        let entries = self.pickle.namespace(keys).or_else(|| self.pickle.entries(keys));
        let entries = entries.ok_or_else(|| missing(format!("its keys are {}", self.pickle.kind(keys))))?;
        Keys::new(self.file, self.pickle, &entries)
    }

    /// Adds [`OF_TASK`] of `cfg["task"]`, where the model's own keys come from `cfg` and have none of them.
    fn add_task(&self, json: &mut Map<String, Json>) -> Result<(), CheckpointError> {
        let inner = |keys: &Self, key: &str| {
            let value = keys.get(key)?;
            self.pickle.namespace(value).or_else(|| self.pickle.entries(value))
        };
        let Some(cfg) = inner(self, "cfg").filter(|_| self.get("args").is_none()) else { return Ok(()) };
        let Some(task) = inner(&Keys::new(self.file, self.pickle, &cfg)?, "task") else { return Ok(()) };
        let task = Keys::new(self.file, self.pickle, &task)?;
        for key in OF_TASK {
            let value = task.get(key).map(|value| self.scalar(value));
            if let Some(value @ (Json::String(_) | Json::Bool(_))) = value
                && json.get(key).is_none_or(Json::is_null)
            {
                json.insert(key.into(), value);
            }
        }
        Ok(())
    }

    fn family(&self, architecture: Option<&str>, tensors: &StateDict<'_>) -> Result<&'static str, CheckpointError> {
        let mut names = tensors.tensors.keys().map(|name| without_holders(name));
        if names.any(|name| name.starts_with(ROBERTA) && name.ends_with(ROUTER)) {
            return Ok(model_types::MOA_ROBERTA);
        }
        let what = match architecture {
            Some(name) if name.starts_with(model_types::MOA_TRANSFORMER) => return Ok(model_types::MOA_TRANSFORMER),
            Some(name) => format!("the architecture {}", quoted(name)),
            None => "a model that names no architecture".into(),
        };
        let what = format!("{what} (supported: moa_transformer and what builds on it, RoBERTa with MoA layers)");
        Err(CheckpointError::Unsupported { file: self.file.into(), what })
    }

    /// The keys as JSON. What JSON cannot say becomes an object that no family reads.
    fn json(&self) -> Result<Map<String, Json>, CheckpointError> {
        let mut left = limits::CONFIG;
        let mut json = Map::new();
        for (key, value) in &self.values {
            let bytes = key.len() + self.pickle.text(*value).map_or(16, str::len);
            left = left.checked_sub(bytes as u64).ok_or_else(|| CheckpointError::Limit {
                file: self.file.into(),
                what: "the size of its configuration",
                limit: limits::CONFIG,
            })?;
            json.insert((*key).to_owned(), self.scalar(*value));
        }
        Ok(json)
    }

    fn scalar(&self, value: Value) -> Json {
        let other = || json!({ "python": self.pickle.kind(value) });
        match value {
            Value::None => Json::Null,
            Value::Bool(flag) => flag.into(),
            Value::Int(number) => number.into(),
            Value::Float(number) => Number::from_f64(number).map_or_else(other, Json::Number),
            Value::Object(_) => match self.pickle.object(value) {
                Some(Object::Text(_)) => self.pickle.text(value).into(),
                _ => other(),
            },
        }
    }
}
