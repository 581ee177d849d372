//! `model.safetensors.index.json` and its like: which shard holds which tensor.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use serde::{
    Deserialize,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::{
    error::{CheckpointError, listed, quoted},
    header::TensorName,
    json::Reader,
    limits,
};
use crate::files::is_plain_name;

/// Everything that an index says.
#[derive(Debug, Default)]
pub(super) struct ShardIndex {
    /// Shard of each tensor.
    pub(super) tensors: BTreeMap<String, Arc<str>>,
    /// How many tensors each shard holds.
    pub(super) shards: BTreeMap<Arc<str>, usize>,
    /// Texts of its metadata.
    pub(super) metadata: BTreeMap<String, String>,
    /// What its metadata says about the bytes of all tensors.
    total_size: Option<f64>,
}

impl ShardIndex {
    /// Parses the text of the index file `file`.
    pub(super) fn parse(file: &str, text: &[u8]) -> Result<Self, CheckpointError> {
        let reader = Reader::new(file, "its text");
        reader.parse(text, IndexSeed(&reader))
    }

    /// Checks that a shard holds exactly the tensors that the index places in it.
    pub(super) fn check_shard(&self, shard: &str, file: &str, held: &BTreeSet<&str>) -> Result<(), CheckpointError> {
        let refuse = |names: Vec<&str>, fault: &str| {
            let problem = format!("{fault}: {}", listed(names.into_iter()));
            Err(CheckpointError::Index { file: file.into(), problem })
        };
        let names = || held.iter().copied();
        let unlisted: Vec<_> = names().filter(|name| !self.tensors.contains_key(*name)).collect();
        if !unlisted.is_empty() {
            return refuse(unlisted, "holds tensors that are not in the index");
        }
        let elsewhere = |name: &&str| self.tensors.get(*name).is_some_and(|listed| **listed != *shard);
        let misplaced: Vec<_> = names().filter(elsewhere).collect();
        if !misplaced.is_empty() {
            return refuse(misplaced, "holds tensors that the index places in another shard");
        }
        if self.shards.get(shard) == Some(&held.len()) {
            return Ok(());
        }
        let here = self.tensors.iter().filter(|(name, listed)| ***listed == *shard && !held.contains(name.as_str()));
        refuse(here.map(|(name, _)| name.as_str()).collect(), "lacks tensors that the index places here")
    }

    /// A warning where the index states another number of bytes than the shards hold, tied tensors counted `once` or
    /// under each of their names.
    #[allow(clippy::cast_precision_loss)]
    pub(super) fn size_warning(&self, file: &str, [once, each]: [u64; 2]) -> Option<String> {
        let stated = self.total_size.filter(|stated| *stated != once as f64 && *stated != each as f64)?;
        Some(format!("{file}: \"total_size\" is {stated}, but the tensors have {once} bytes"))
    }
}

struct IndexSeed<'r, 'a>(&'r Reader<'a>);

impl<'de> DeserializeSeed<'de> for IndexSeed<'_, '_> {
    type Value = ShardIndex;

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<ShardIndex, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexSeed<'_, '_> {
    type Value = ShardIndex;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with \"weight_map\"")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut input: A) -> Result<ShardIndex, A::Error> {
        let reader = self.0;
        let mut index = ShardIndex::default();
        let mut keys = BTreeSet::new();
        while let Some(key) = input.next_key::<String>()? {
            check_key(reader, &keys, &key).map_err(|refusal| reader.refuse(refusal))?;
            match key.as_str() {
                "weight_map" => input.next_value_seed(WeightMap { reader, index: &mut index })?,
                "metadata" => input.next_value_seed(IndexMetadata { reader, index: &mut index })?,
                _ => {
                    input.next_value::<IgnoredAny>()?;
                }
            }
            keys.insert(key);
        }
        if !keys.contains("weight_map") {
            return Err(reader.refuse(reader.json("key \"weight_map\" is missing".into())));
        }
        Ok(index)
    }
}

fn check_key(reader: &Reader<'_>, keys: &BTreeSet<String>, key: &str) -> Result<(), CheckpointError> {
    if keys.contains(key) {
        return Err(reader.repeated(key));
    }
    if keys.len() >= limits::TENSORS {
        return Err(reader.limit("the number of its keys", limits::TENSORS));
    }
    Ok(())
}

struct WeightMap<'r, 'a> {
    reader: &'r Reader<'a>,
    index: &'r mut ShardIndex,
}

impl WeightMap<'_, '_> {
    /// Adds one entry.
    fn place(&mut self, name: String, shard: &str) -> Result<(), CheckpointError> {
        let Self { reader, index } = self;
        let shard = shard.strip_prefix("./").unwrap_or(shard);
        if !is_plain_name(shard) {
            let problem = format!("tensor {}: {} is not a plain file name", quoted(&name), quoted(shard));
            return Err(CheckpointError::Index { file: reader.file.into(), problem });
        }
        if index.tensors.contains_key(&name) {
            return Err(reader.repeated(&name));
        }
        if index.tensors.len() >= limits::TENSORS {
            return Err(reader.limit("the number of tensors", limits::TENSORS));
        }
        let shard = match index.shards.get_key_value(shard) {
            Some((known, _)) => Arc::clone(known),
            None if index.shards.len() >= limits::SHARDS => {
                return Err(reader.limit("the number of shards", limits::SHARDS));
            }
            None => Arc::from(shard),
        };
        *index.shards.entry(Arc::clone(&shard)).or_default() += 1;
        index.tensors.insert(name, shard);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for WeightMap<'_, '_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of file names as \"weight_map\"")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut input: A) -> Result<(), A::Error> {
        while let Some(name) = input.next_key_seed(TensorName(self.reader))? {
            let shard = input.next_value::<String>()?;
            self.place(name, &shard).map_err(|refusal| self.reader.refuse(refusal))?;
        }
        Ok(())
    }
}

struct IndexMetadata<'r, 'a> {
    reader: &'r Reader<'a>,
    index: &'r mut ShardIndex,
}

impl<'de> DeserializeSeed<'de> for IndexMetadata<'_, '_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexMetadata<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object as \"metadata\"")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut input: A) -> Result<(), A::Error> {
        let reader = self.reader;
        let mut keys = BTreeSet::new();
        while let Some(key) = input.next_key::<String>()? {
            check_key(reader, &keys, &key).map_err(|refusal| reader.refuse(refusal))?;
            match input.next_value::<Scalar>()? {
                Scalar::Number(number) if key == "total_size" => self.index.total_size = Some(number),
                Scalar::Text(text) => {
                    self.index.metadata.insert(key.clone(), text);
                }
                _ => {}
            }
            keys.insert(key);
        }
        Ok(())
    }
}

/// A text or number; everything else is skipped.
enum Scalar {
    Text(String),
    Number(f64),
    Other,
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: serde::Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_any(ScalarVisitor)
    }
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Scalar, E> {
        Ok(Scalar::Other)
    }

    #[allow(clippy::cast_precision_loss)]
    fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value as f64))
    }

    #[allow(clippy::cast_precision_loss)]
    fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value as f64))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut input: A) -> Result<Scalar, A::Error> {
        while input.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut input: A) -> Result<Scalar, A::Error> {
        while input.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other)
    }
}
