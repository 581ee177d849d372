//! A model's configuration, read key by key with errors that name the key.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde_json::{Map, Value};

use crate::ImportError;

/// The keys of a `config.json`.
#[derive(Debug, Clone)]
pub struct Config {
    origin: String,
    keys: Map<String, Value>,
    asked: Arc<Mutex<Asked>>,
}

/// What was asked for; shared by copies of a configuration.
#[derive(Debug, Default)]
struct Asked {
    /// Sizes that are not there, with the default that was taken.
    assumed: BTreeMap<String, usize>,
    /// All keys, whether they are there or not.
    keys: BTreeSet<String>,
}

/// Largest size that a configuration may state; a width that is the product of three stays far below `usize::MAX`.
const MAX_SIZE: u64 = 1 << 20;

/// Models of more layers are refused.
const MAX_LAYERS: usize = 4096;

impl Config {
    /// Wraps the keys read from the file `origin`.
    pub fn new(origin: impl Into<String>, keys: Map<String, Value>) -> Self {
        Self { origin: origin.into(), keys, asked: Arc::default() }
    }

    /// The same keys with one more, or with another value for it.
    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.keys.insert(key.into(), value);
        self
    }

    /// File that the keys come from.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// All keys with their values, as they were read.
    pub const fn keys(&self) -> &Map<String, Value> {
        &self.keys
    }

    /// The family that the keys name; empty where they name none.
    pub fn model_type(&self) -> &str {
        self.get("model_type").and_then(Value::as_str).unwrap_or_default()
    }

    /// Whether a key is `true` or `false`; absent where it is neither.
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.get(key).and_then(Value::as_bool)
    }

    /// A text of letters, digits, `-` and `_`, which is safe inside a file name; absent where it is anything else.
    pub fn name(&self, key: &str) -> Option<&str> {
        let safe = |name: &&str| name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
        self.get(key).and_then(Value::as_str).filter(safe)
    }

    /// A present value; `null` counts as absent.
    fn get(&self, key: &str) -> Option<&Value> {
        let mut asked = self.asked();
        if !asked.keys.contains(key) {
            asked.keys.insert(key.into());
        }
        self.keys.get(key).filter(|value| !value.is_null())
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keys that nothing asked for so far, each with one that was asked for, is absent, and is spelt almost so.
    pub fn misspelt(&self) -> Vec<(String, String)> {
        let asked = self.asked();
        let is_absent = |key: &&String| !self.keys.contains_key(key.as_str());
        let meant = |key: &String| {
            let absent = asked.keys.iter().filter(is_absent).filter(|absent| is_almost(key, absent));
            absent.min_by_key(|absent| strsim::osa_distance(key, absent)).map(|meant| (key.clone(), meant.clone()))
        };
        self.keys.keys().filter(|key| !asked.keys.contains(key.as_str())).filter_map(meant).collect()
    }

    /// Whether the key is there, and null.
    pub(crate) fn is_null(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(Value::is_null)
    }

    fn missing(&self, key: &str, meaning: &str) -> ImportError {
        ImportError::MissingKey { origin: self.origin.clone(), key: key.into(), meaning: meaning.into() }
    }

    /// The error for a key whose value is none of what is `expected`.
    pub(crate) fn invalid(&self, key: &str, expected: impl Into<String>) -> ImportError {
        let found = self.keys.get(key).map_or_else(|| "nothing".to_owned(), shortened);
        ImportError::InvalidKey { origin: self.origin.clone(), key: key.into(), expected: expected.into(), found }
    }

    /// The error for a key that a family with `known` keys does not have.
    pub(crate) fn unknown(&self, key: &str, known: &[&str]) -> ImportError {
        ImportError::UnknownKey { origin: self.origin.clone(), key: key.into(), known: known.join(", ") }
    }

    /// The error for a model of none of the families that are `supported`.
    pub(crate) fn other_family(&self, found: &str, supported: &str) -> ImportError {
        ImportError::Family { origin: self.origin.clone(), found: found.into(), supported: supported.into() }
    }

    /// The error for a well-formed model that cannot be exported.
    pub(crate) fn unsupported(&self, what: String) -> ImportError {
        ImportError::Unsupported { origin: self.origin.clone(), what }
    }

    /// A text that must be present.
    pub(crate) fn text(&self, key: &str, meaning: &str) -> Result<&str, ImportError> {
        let value = self.get(key).ok_or_else(|| self.missing(key, meaning))?;
        value.as_str().ok_or_else(|| self.invalid(key, "a text"))
    }

    /// A text with a default.
    pub(crate) fn text_or<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str, ImportError> {
        self.get(key).map_or(Ok(default), |value| value.as_str().ok_or_else(|| self.invalid(key, "a text")))
    }

    /// Whether a key has a value other than `null`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// A positive integer that must be present.
    pub(crate) fn size(&self, key: &str, meaning: &str) -> Result<usize, ImportError> {
        if self.get(key).is_none() {
            return Err(self.missing(key, meaning));
        }
        self.size_or(key, 0)
    }

    /// The keys of an object that may be absent.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>, ImportError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let keys = value.as_object().ok_or_else(|| self.invalid(key, "an object"))?;
        Ok(Some(Self::new(format!("{}: \"{key}\"", self.origin), keys.clone())))
    }

    /// Refuses a checkpoint of quantised weights, as transformers marks it.
    pub(crate) fn refuse_quantized(&self) -> Result<(), ImportError> {
        match self.has("quantization_config") {
            true => {
                Err(self
                    .unsupported("\"quantization_config\": quantised weights; export the original checkpoint".into()))
            }
            false => Ok(()),
        }
    }

    /// A positive integer under either of two names, which must agree where both are there.
    pub(crate) fn agreed_size(&self, keys: [&'static str; 2]) -> Result<Option<(usize, &'static str)>, ImportError> {
        let [first, second] = keys.map(|key| self.optional_size(key).map(|size| size.map(|size| (size, key))));
        match (first?, second?) {
            (Some((first, key)), Some((second, other))) if first != second => {
                Err(self.invalid(key, format!("{second}, as \"{other}\" says, or one of the two absent")))
            }
            (first, second) => Ok(first.or(second)),
        }
    }

    /// A positive integer with a default.
    pub(crate) fn size_or(&self, key: &str, default: usize) -> Result<usize, ImportError> {
        Ok(self.optional_size(key)?.unwrap_or_else(|| self.assume(key, default)))
    }

    /// The default of a size that is absent, which errors about shapes will name.
    pub(crate) fn assume(&self, key: &str, default: usize) -> usize {
        self.asked().assumed.insert(key.into(), default);
        default
    }

    /// Names the defaults that sizes of `pattern` are made of and those of `found` are not; empty where there are none.
    pub(crate) fn defaults_in(&self, pattern: &[Option<usize>], found: &[usize]) -> String {
        let asked = self.asked();
        let is_part = |size: usize| {
            let mut pairs = pattern.iter().zip(found);
            pairs.any(|(wanted, found)| wanted.is_some_and(|w| w.is_multiple_of(size)) && !found.is_multiple_of(size))
        };
        let parts = asked.assumed.iter().filter(|(_, size)| is_part(**size));
        let names: Vec<_> = parts.map(|(key, size)| format!("\"{key}\", {size}")).collect();
        if names.is_empty() {
            return String::new();
        }
        format!(" with the default of {}, which {} does not give", names.join(" and of "), self.origin)
    }

    /// A positive integer that may be absent.
    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>, ImportError> {
        self.size_by(key, Value::as_u64)
    }

    /// As [`Self::optional_size`], where a text of digits is a size too.
    pub(crate) fn optional_size_or_text(&self, key: &str) -> Result<Option<usize>, ImportError> {
        self.size_by(key, |value| value.as_u64().or_else(|| value.as_str()?.parse().ok()))
    }

    fn size_by(&self, key: &str, number: impl Fn(&Value) -> Option<u64>) -> Result<Option<usize>, ImportError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = number(value).filter(|size| (1..=MAX_SIZE).contains(size));
        let size = size.and_then(|size| usize::try_from(size).ok());
        size.map(Some).ok_or_else(|| self.invalid(key, format!("an integer from 1 to {MAX_SIZE}")))
    }

    /// A number of layers that may be absent: a configuration alone can name as many as memory does not hold.
    pub(crate) fn optional_layers(&self, key: &str) -> Result<Option<usize>, ImportError> {
        match self.optional_size(key)? {
            Some(layers) if layers > MAX_LAYERS => Err(self.invalid(key, format!("an integer from 1 to {MAX_LAYERS}"))),
            layers => Ok(layers),
        }
    }

    /// A token id that may be absent, or -1 where there is no such token.
    pub(crate) fn optional_id(&self, key: &str) -> Result<Option<usize>, ImportError> {
        match self.get(key) {
            Some(value) if value.as_i64() != Some(-1) => self.id_or(key, 0).map(Some),
            _ => Ok(None),
        }
    }

    /// One token id or a list of them, without -1 where there is no such token.
    pub(crate) fn optional_ids(&self, key: &str) -> Result<Vec<usize>, ImportError> {
        let Some(Value::Array(ids)) = self.get(key) else { return Ok(self.optional_id(key)?.into_iter().collect()) };
        let ids = ids.iter().filter(|id| id.as_i64() != Some(-1));
        let ids: Option<Vec<_>> = ids.map(as_id).collect();
        ids.ok_or_else(|| self.invalid(key, format!("an integer from 0 to {MAX_SIZE}, or a list of such")))
    }

    /// An integer from 0, with a default.
    pub(crate) fn id_or(&self, key: &str, default: usize) -> Result<usize, ImportError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        as_id(value).ok_or_else(|| self.invalid(key, format!("an integer from 0 to {MAX_SIZE}")))
    }

    /// `true` or `false`, with a default.
    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ImportError> {
        self.get(key).map_or(Ok(default), |value| value.as_bool().ok_or_else(|| self.invalid(key, "true or false")))
    }

    /// A positive number, with a default.
    pub(crate) fn number_or(&self, key: &str, default: f64) -> Result<f64, ImportError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().filter(|number| *number > 0.0).ok_or_else(|| self.invalid(key, "a positive number"))
    }

    /// A number from 0, with a default.
    pub(crate) fn non_negative_or(&self, key: &str, default: f64) -> Result<f64, ImportError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().filter(|number| *number >= 0.0).ok_or_else(|| self.invalid(key, "a number from 0"))
    }

    /// A small positive number, with a default.
    pub(crate) fn epsilon_or(&self, key: &str, default: f32) -> Result<f32, ImportError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.as_f64().filter(|number| *number > 0.0 && *number < 1.0);
        #[allow(clippy::cast_possible_truncation)]
        number.map(|number| number as f32).ok_or_else(|| self.invalid(key, "a number between 0 and 1"))
    }

    /// A number from 0 that f32 holds, with a default.
    pub(crate) fn single_or(&self, key: &str, default: f32) -> Result<f32, ImportError> {
        #[allow(clippy::cast_possible_truncation)]
        let number = self.non_negative_or(key, default.into())? as f32;
        if number.is_finite() { Ok(number) } else { Err(self.invalid(key, "a number that f32 holds")) }
    }

    /// Refuses a feature that is switched on.
    pub(crate) fn refuse_flag(&self, key: &str) -> Result<(), ImportError> {
        if self.flag_or(key, false)? { Err(self.unsupported(format!("\"{key}\": true"))) } else { Ok(()) }
    }
}

/// Whether two names differ by one letter, by how words are parted, or by a longer last word.
fn is_almost(one: &str, other: &str) -> bool {
    const LETTERS: usize = 6;
    const LONGER: usize = 4;
    let [one, other] = [one, other].map(|name| name.to_ascii_lowercase().replace(['_', '-'], ""));
    let [short, long] = if one.len() <= other.len() { [&one, &other] } else { [&other, &one] };
    let goes_on = short.len() > LETTERS && long.starts_with(short.as_str()) && long.len() - short.len() <= LONGER;
    short.len() >= LETTERS && (goes_on || strsim::osa_distance(short, long) <= 1)
}

/// A token id.
fn as_id(value: &Value) -> Option<usize> {
    value.as_u64().filter(|id| *id <= MAX_SIZE).and_then(|id| usize::try_from(id).ok())
}

/// A value as JSON, cut where it is long.
fn shortened(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::new("config.json", serde_json::from_str(text).unwrap())
    }

    #[test]
    fn values_are_read_with_defaults() {
        let config = config(r#"{"a": 3, "b": null, "c": true, "d": "x", "e": 1e-5}"#);
        assert_eq!(config.size("a", "").unwrap(), 3);
        assert_eq!(config.size_or("b", 7).unwrap(), 7);
        assert!(config.flag_or("c", false).unwrap());
        assert_eq!(config.text_or("d", "y").unwrap(), "x");
        assert_eq!(config.epsilon_or("e", 1.0).unwrap(), 1e-5);
    }

    #[test]
    fn keys_that_nothing_reads_are_told_from_those_that_were_meant() {
        let config = config(
            r#"{"rope_thetta": 1, "rms_norm_epsilon": 2, "LayerNormEps": 3, "layers": 4, "top_k": 5, "hidden_size": 6}"#,
        );
        assert_eq!(config.misspelt(), []);
        for key in ["rope_theta", "rms_norm_eps", "layer_norm_eps", "num_layers", "hidden_size", "top_kk"] {
            config.size_or(key, 1).unwrap();
        }
        let pair = |key: &str, meant: &str| (key.to_owned(), meant.to_owned());
        let told = [
            pair("LayerNormEps", "layer_norm_eps"),
            pair("rms_norm_epsilon", "rms_norm_eps"),
            pair("rope_thetta", "rope_theta"),
        ];
        assert_eq!(config.clone().misspelt(), told);
        assert_eq!(config.with("rope_theta", 1.into()).misspelt(), told[..2]);
    }

    #[test]
    fn impossible_values_name_key_and_value() {
        for text in ["0", "-1", "2.5", "\"8\"", "1e999", "9223372036854775808", "[1]"] {
            let Ok(keys) = serde_json::from_str(&format!("{{\"n\": {text}}}")) else { continue };
            let error = Config::new("config.json", keys).size("n", "").expect_err(text).to_string();
            assert!(
                error.starts_with("config.json: key \"n\" must be an integer from 1 to 1048576, found "),
                "{error}"
            );
        }
    }

    #[test]
    fn layers_are_limited_and_an_id_may_be_none() {
        let config = config(r#"{"a": 4096, "b": 4097, "c": -1, "d": 7, "e": -2}"#);
        assert_eq!(config.optional_layers("a").unwrap(), Some(4096));
        let error = config.optional_layers("b").unwrap_err().to_string();
        assert!(error.contains("\"b\" must be an integer from 1 to 4096, found 4097"), "{error}");
        assert_eq!(["c", "d", "f"].map(|key| config.optional_id(key).unwrap()), [None, Some(7), None]);
        assert!(config.optional_id("e").is_err());
    }

    #[test]
    fn a_name_cannot_leave_its_folder() {
        let config = config(r#"{"a": "zh-Hans_CN", "b": "../de", "c": "de/x", "d": 3, "e": "d.e"}"#);
        assert_eq!(config.name("a"), Some("zh-Hans_CN"));
        for key in ["b", "c", "d", "e", "f"] {
            assert_eq!(config.name(key), None, "{key}");
        }
    }

    #[test]
    fn missing_key_says_what_it_means() {
        let error = config("{}").size("top_k", "experts per token").expect_err("no key").to_string();
        assert_eq!(error, "config.json: key \"top_k\" is missing (experts per token)");
    }
}
