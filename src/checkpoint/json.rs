//! Strict JSON: structured refusals out of serde visitors, repeated keys refused.

use std::{cell::RefCell, fmt};

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value, error::Category};

use super::{
    error::{CheckpointError, quoted},
    limits,
};

/// The file being read, and the first refusal of a visitor.
pub(super) struct Reader<'a> {
    pub(super) file: &'a str,
    /// What messages call the text, such as "its header".
    subject: &'static str,
    refusal: RefCell<Option<CheckpointError>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a str, subject: &'static str) -> Self {
        Self { file, subject, refusal: RefCell::new(None) }
    }

    /// Reads one JSON text.
    pub(super) fn parse<'de, S: DeserializeSeed<'de>>(
        &self,
        bytes: &'de [u8],
        seed: S,
    ) -> Result<S::Value, CheckpointError> {
        let text = std::str::from_utf8(bytes)
            .map_err(|error| self.json(format!("{} is not UTF-8 at byte {}", self.subject, error.valid_up_to())))?;
        let mut input = serde_json::Deserializer::from_str(text);
        let value = seed.deserialize(&mut input).and_then(|value| input.end().map(|()| value));
        value.map_err(|error| self.refusal.take().unwrap_or_else(|| self.problem(&error)))
    }

    /// Where and how the text is not the expected JSON, without its content.
    fn problem(&self, error: &serde_json::Error) -> CheckpointError {
        let subject = self.subject;
        let text = error.to_string();
        self.json(match (error.classify(), text.rfind("expected ")) {
            (Category::Data, Some(expected)) => format!("{subject} is malformed: {}", &text[expected..]),
            (Category::Data, None) => {
                format!("{subject} has a wrong value at line {} column {}", error.line(), error.column())
            }
            _ => format!("{subject} is not valid JSON: {text}"),
        })
    }

    /// Keeps a refusal and gives the error that ends the parse.
    pub(super) fn refuse<E: Error>(&self, refusal: CheckpointError) -> E {
        self.refusal.borrow_mut().get_or_insert(refusal);
        E::custom("refused")
    }

    pub(super) fn json(&self, problem: String) -> CheckpointError {
        CheckpointError::Json { file: self.file.into(), problem }
    }

    pub(super) fn repeated(&self, key: &str) -> CheckpointError {
        self.json(format!("key {} is repeated", quoted(key)))
    }

    pub(super) fn limit(&self, what: &'static str, limit: usize) -> CheckpointError {
        CheckpointError::Limit { file: self.file.into(), what, limit: limit as u64 }
    }

    /// Refuses names that no tensor should have.
    pub(super) fn check_name(&self, name: &str) -> Result<(), CheckpointError> {
        if name.len() > limits::NAME {
            return Err(self.limit("the length of a tensor name", limits::NAME));
        }
        if name.chars().any(char::is_control) {
            return Err(self.json(format!("tensor name {} holds a control character", quoted(name))));
        }
        Ok(())
    }
}

/// Any value with unique keys and bounded nesting.
pub(super) struct StrictValue<'r, 'a> {
    pub(super) reader: &'r Reader<'a>,
    /// Levels of nesting around this value.
    pub(super) depth: usize,
}

impl StrictValue<'_, '_> {
    fn inner<E: Error>(&self) -> Result<Self, E> {
        if self.depth >= limits::DEPTH {
            return Err(self.reader.refuse(self.reader.limit("the nesting of its JSON", limits::DEPTH)));
        }
        Ok(Self { reader: self.reader, depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for StrictValue<'_, '_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<Value, D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictValue<'_, '_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut input: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = input.next_element_seed(self.inner()?)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, input: A) -> Result<Value, A::Error> {
        strict_map(self, input).map(Value::Object)
    }
}

fn strict_map<'de, A: MapAccess<'de>>(
    level: StrictValue<'_, '_>,
    mut input: A,
) -> Result<Map<String, Value>, A::Error> {
    let mut keys = Map::new();
    while let Some(key) = input.next_key::<String>()? {
        if keys.contains_key(&key) {
            return Err(level.reader.refuse(level.reader.repeated(&key)));
        }
        let value = input.next_value_seed(level.inner()?)?;
        keys.insert(key, value);
    }
    Ok(keys)
}

/// An object with unique keys and bounded nesting.
pub(super) struct StrictObject<'r, 'a>(pub(super) &'r Reader<'a>);

impl<'de> DeserializeSeed<'de> for StrictObject<'_, '_> {
    type Value = Map<String, Value>;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<Self::Value, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StrictObject<'_, '_> {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, input: A) -> Result<Self::Value, A::Error> {
        strict_map(StrictValue { reader: self.0, depth: 0 }, input)
    }
}
