//! The JSON files of a Hugging Face folder, as far as token ids and sizes are read from them.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{
    error::TextError,
    read::{is_there, read_text},
};
use crate::files::BYTE_ORDER_MARK;

/// Name of the tokenizer in a folder.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Name of what other programs read beside it.
pub const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";

/// What configurations hold where a vocabulary has no such token.
const NO_TOKEN: i64 = -1;

/// Settings of generation that a configuration may hold, with their defaults in transformers, truth as 1; without one
/// where they are absent by default.
const SETTINGS: [(&str, Option<f64>); 25] = [
    ("max_length", Some(20.0)),
    ("min_length", Some(0.0)),
    ("do_sample", Some(0.0)),
    ("early_stopping", Some(0.0)),
    ("num_beams", Some(1.0)),
    ("temperature", Some(1.0)),
    ("top_k", Some(50.0)),
    ("top_p", Some(1.0)),
    ("typical_p", Some(1.0)),
    ("repetition_penalty", Some(1.0)),
    ("length_penalty", Some(1.0)),
    ("no_repeat_ngram_size", Some(0.0)),
    ("encoder_no_repeat_ngram_size", Some(0.0)),
    ("num_return_sequences", Some(1.0)),
    ("output_scores", Some(0.0)),
    ("return_dict_in_generate", Some(0.0)),
    ("remove_invalid_values", Some(0.0)),
    ("num_beam_groups", Some(1.0)),
    ("diversity_penalty", Some(0.0)),
    ("bad_words_ids", None),
    ("forced_bos_token_id", None),
    ("forced_eos_token_id", None),
    ("exponential_decay_length_penalty", None),
    ("suppress_tokens", None),
    ("begin_suppress_tokens", None),
];

/// Settings for which transformers does not look where it chooses between its files, in the same way; it heeds them in
/// either. Of those that only limit how tokens are drawn there is none.
const FURTHER_SETTINGS: [(&str, Option<f64>); 13] = [
    ("max_new_tokens", None),
    ("min_new_tokens", Some(0.0)),
    ("sequence_bias", None),
    ("guidance_scale", Some(1.0)),
    ("stop_strings", None),
    ("watermarking_config", None),
    ("max_time", None),
    ("encoder_repetition_penalty", Some(1.0)),
    ("penalty_alpha", Some(0.0)),
    ("dola_layers", None),
    ("force_words_ids", None),
    ("constraints", None),
    ("token_healing", Some(0.0)),
];

/// Larger files are no configuration.
const LIMIT: u64 = 1 << 22;

/// The keys of a JSON file, with its path for messages.
#[derive(Debug, Clone, PartialEq)]
pub struct Keys {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Keys {
    /// The keys `map` that were read from `path`.
    pub fn new(path: impl Into<PathBuf>, map: Map<String, Value>) -> Self {
        Self { path: path.into(), map }
    }

    /// Reads the file; nothing where it is not there.
    ///
    /// # Errors
    ///
    /// Where it cannot be read, is too large or holds no JSON object.
    pub fn read(path: &Path) -> Result<Option<Self>, TextError> {
        if !is_there(path)? {
            return Ok(None);
        }
        let text = read_text(path, LIMIT)?;
        Self::parse(path, text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text)).map(Some)
    }

    /// The keys of the JSON object `text` that was read from `path`.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, TextError> {
        match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Ok(Self::new(path, map)),
            Ok(_) => Err(TextError::malformed(path, "no JSON object")),
            Err(error) => Err(TextError::malformed(path, format!("no JSON: {error}"))),
        }
    }

    /// Reads the `generation_config.json` at `path`; nothing where transformers goes by `config` instead.
    ///
    /// That is so where there is no such file, and where it says that it was made of the configuration and this has a
    /// setting of generation that is not the default. Source: `_prepare_generation_config` of
    /// `transformers/generation/utils.py`, 4.57.6, for configurations whose class keeps the defaults of all.
    /// transformers 5 may differ.
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    pub fn read_generation(path: &Path, config: Option<&Self>) -> Result<Option<Self>, TextError> {
        let is_own = |keys: &Self| keys.map.get("_from_model_config") != Some(&Value::Bool(true));
        let keys = Self::read(path)?;
        Ok(keys
            .filter(|keys| is_own(keys) || config.is_none_or(|config| config.generation_settings().next().is_none())))
    }

    /// Settings of generation that are here and not the default.
    pub fn generation_settings(&self) -> impl Iterator<Item = &'static str> {
        self.set_of(&SETTINGS)
    }

    /// Settings that are here and not neutral, and that make no configuration one of generation.
    pub fn further_generation_settings(&self) -> impl Iterator<Item = &'static str> {
        self.set_of(&FURTHER_SETTINGS)
    }

    fn set_of(&self, settings: &'static [(&'static str, Option<f64>)]) -> impl Iterator<Item = &'static str> {
        let differs = |default: Option<f64>, value: &Value| {
            let number = value.as_bool().map(|flag| f64::from(u8::from(flag))).or(value.as_f64());
            default.is_none() || number != default
        };
        let is_set =
            move |(key, default): &&(&str, Option<f64>)| self.get(key).is_some_and(|value| differs(*default, value));
        settings.iter().filter(is_set).map(|(key, _)| *key)
    }

    /// Whether there is a key, with `null` too.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The object under a key; `null` counts as absent.
    ///
    /// # Errors
    ///
    /// Where the key holds something else.
    pub fn object(&self, key: &str) -> Result<Option<Self>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self::new(&self.path, map.clone()))),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    /// The text under a key; `null` counts as absent.
    ///
    /// # Errors
    ///
    /// Where the key holds something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, TextError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, "a text"))
    }

    /// The truth under a key; `null` counts as absent.
    ///
    /// # Errors
    ///
    /// Where the key holds something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, TextError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, "true or false"))
    }

    /// The positive integer under a key; `null` counts as absent.
    ///
    /// # Errors
    ///
    /// Where the key holds something else.
    pub fn size(&self, key: &str) -> Result<Option<usize>, TextError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0);
        size.map(Some).ok_or_else(|| self.wrong(key, "a positive integer"))
    }

    /// The token ids under a key, which holds one or a list of them; `null` and -1 count as absent, also in a list.
    ///
    /// # Errors
    ///
    /// Where the key holds something else.
    pub fn token_ids(&self, key: &str) -> Result<Option<Vec<i64>>, TextError> {
        let Some(value) = self.get(key).filter(|value| value.as_i64() != Some(NO_TOKEN)) else { return Ok(None) };
        let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).map(i64::from);
        let ids: Option<Vec<i64>> = values.iter().filter(|value| value.as_i64() != Some(NO_TOKEN)).map(id).collect();
        ids.map(Some).ok_or_else(|| self.wrong(key, "a token id or a list of them"))
    }

    /// [`Self::token_ids`] of a model that has `symbols`.
    ///
    /// # Errors
    ///
    /// Where the key holds something else, or an id that the model does not have.
    pub fn known_token_ids(&self, key: &str, symbols: usize) -> Result<Option<Vec<i64>>, TextError> {
        let ids = self.token_ids(key)?;
        let is_known = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < symbols);
        match ids.iter().flatten().all(is_known) {
            true => Ok(ids),
            false => Err(self.wrong(key, &format!("below {symbols}, the symbols of the model"))),
        }
    }

    /// [`Self::token_ids`] that a model of `symbols` has; of others, `left_out` tells.
    ///
    /// # Errors
    ///
    /// Where the key holds something else.
    pub(crate) fn token_ids_below(
        &self,
        key: &str,
        symbols: usize,
        left_out: &mut Vec<String>,
    ) -> Result<Option<Vec<i64>>, TextError> {
        let is_known = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < symbols);
        let Some(ids) = self.token_ids(key)? else { return Ok(None) };
        let (known, unknown): (Vec<i64>, Vec<i64>) = ids.into_iter().partition(is_known);
        let origin = self.path.display();
        left_out.extend(unknown.into_iter().map(|id| {
            format!("{origin}: token {id} of \"{key}\" is left out: the model has {symbols} tokens, and never gives it")
        }));
        Ok(Some(known))
    }

    /// Refuses a key that does not hold what it must, which `form` says in words.
    pub(super) fn check(
        &self,
        key: &str,
        required: bool,
        form: &str,
        holds: fn(&Value) -> bool,
    ) -> Result<(), TextError> {
        match self.map.get(key) {
            Some(value) if holds(value) => Ok(()),
            Some(_) => Err(self.wrong(key, form)),
            None if required => {
                Err(TextError::malformed(&self.path, format!("key \"{key}\" is missing, and must be {form}")))
            }
            None => Ok(()),
        }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, expected: &str) -> TextError {
        let mut found = self.map.get(key).map_or_else(String::new, Value::to_string);
        if let Some((end, _)) = found.char_indices().nth(60) {
            found.truncate(end);
            found.push('…');
        }
        TextError::malformed(&self.path, format!("key \"{key}\" must be {expected}, found {found}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Keys {
        Keys::new("f.json", serde_json::from_str(text).unwrap())
    }

    #[test]
    fn ids_are_one_or_several() {
        let keys = keys(r#"{"a": 2, "b": [2, 7], "c": null, "none": -1, "some": [2, -1, 7], "empty": [-1]}"#);
        assert_eq!(keys.token_ids("a").unwrap(), Some(vec![2]));
        assert_eq!(keys.token_ids("b").unwrap(), Some(vec![2, 7]));
        assert_eq!(keys.token_ids("c").unwrap(), None);
        assert_eq!(keys.token_ids("d").unwrap(), None);
        assert_eq!(keys.token_ids("none").unwrap(), None);
        assert_eq!(keys.token_ids("some").unwrap(), Some(vec![2, 7]));
        assert_eq!(keys.token_ids("empty").unwrap(), Some(vec![]));
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, "\u{feff}{\"a\": 2}").unwrap();
        assert_eq!(Keys::read(&path).unwrap().unwrap().token_ids("a").unwrap(), Some(vec![2]));
    }

    #[test]
    fn settings_that_are_not_the_default_are_seen() {
        for text in [
            "{}",
            r#"{"num_beams": 1, "top_p": 1, "temperature": 1.0, "do_sample": false, "top_k": null}"#,
            r#"{"do_sample": 0, "num_beams": true, "suppress_tokens": null, "use_cache": false, "min_new_tokens": 3}"#,
        ] {
            assert!(keys(text).generation_settings().next().is_none(), "{text}");
        }
        for text in [
            r#"{"temperature": 0.7}"#,
            r#"{"do_sample": true}"#,
            r#"{"max_length": 50}"#,
            r#"{"suppress_tokens": []}"#,
            r#"{"early_stopping": "never"}"#,
        ] {
            assert!(keys(text).generation_settings().next().is_some(), "{text}");
        }
    }

    #[test]
    fn settings_that_choose_no_file_are_told_apart() {
        let text = r#"{"min_new_tokens": 0, "guidance_scale": 1, "stop_strings": null, "top_p": 0.9, "max_time": null,
            "encoder_repetition_penalty": 1.0, "penalty_alpha": 0, "token_healing": false}"#;
        assert!(keys(text).further_generation_settings().next().is_none());
        let text = r#"{"min_new_tokens": 3, "sequence_bias": [[[7], -9.0]], "guidance_scale": 1.5, "stop_strings": "t7",
            "watermarking_config": {"bias": 2.0}, "max_time": 0.5, "encoder_repetition_penalty": 2.0,
            "penalty_alpha": 0.6, "dola_layers": "high", "force_words_ids": [[5]], "constraints": [1],
            "token_healing": true, "max_new_tokens": 9}"#;
        let found: Vec<_> = keys(text).further_generation_settings().collect();
        assert_eq!(found, FURTHER_SETTINGS.map(|(name, _)| name));
        assert!(keys(text).generation_settings().next().is_none());
    }

    #[test]
    #[cfg(unix)]
    fn what_cannot_be_looked_at_is_not_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        assert_eq!(Keys::read(&path).unwrap(), None);
        std::os::unix::fs::symlink("config.json", &path).unwrap();
        let error = Keys::read(&path).unwrap_err();
        assert!(matches!(&error, TextError::Io { path: named, .. } if *named == path), "{error}");
    }

    #[test]
    fn a_wrong_value_names_file_key_and_value() {
        let keys = keys(r#"{"a": -2, "b": [2, "x"], "c": 0, "d": 3, "e": true, "f": null}"#);
        let message = |result: Result<Option<Vec<i64>>, TextError>| result.unwrap_err().to_string();
        assert_eq!(message(keys.token_ids("a")), "f.json: key \"a\" must be a token id or a list of them, found -2");
        assert!(message(keys.token_ids("b")).ends_with("found [2,\"x\"]"));
        assert!(keys.size("c").is_err() && keys.text("d").is_err() && keys.object("d").is_err());
        let message = keys.flag("c").unwrap_err().to_string();
        assert_eq!(message, "f.json: key \"c\" must be true or false, found 0");
        assert_eq!(["e", "f", "g"].map(|key| keys.flag(key).unwrap()), [Some(true), None, None]);
    }
}
