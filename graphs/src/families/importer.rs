//! Takes tensors out of a directory one by one, proving shapes, and knows what was left over.

use std::{collections::BTreeSet, ops::Range};

use super::{COMPILED_PREFIX, Config};
use crate::{FloatType, ImportError, Instead, Runs, TensorDirectory, Weight, WeightError};

/// A dimension that is known, or any (`None`).
pub(super) type Dim = Option<usize>;

/// Elements of two tensors that are compared at once.
const COMPARED: usize = 1 << 20;

/// Stored types whose values are f32 without rounding.
const EXACT_IN_F32: [&str; 3] = ["F32", "F16", "BF16"];

pub(super) struct Importer<'a> {
    config: &'a Config,
    tensors: &'a dyn TensorDirectory,
    taken: BTreeSet<String>,
    /// Pairs of tensors that were found equal.
    equal: BTreeSet<[String; 2]>,
}

impl<'a> Importer<'a> {
    pub(super) fn new(config: &'a Config, tensors: &'a dyn TensorDirectory) -> Self {
        Self { config, tensors, taken: BTreeSet::new(), equal: BTreeSet::new() }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_some()
    }

    /// What messages call the tensor `name`.
    pub(super) fn stored_name(&self, name: &str) -> String {
        self.tensors.stored_name(name)
    }

    /// The tensor `name`, which must have exactly `shape`.
    pub(super) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Weight, ImportError> {
        let pattern: Vec<Dim> = shape.iter().copied().map(Some).collect();
        self.take_any(name, &pattern)
    }

    /// The tensor `name`, whose shape must fit `pattern`.
    pub(super) fn take_any(&mut self, name: &str, pattern: &[Dim]) -> Result<Weight, ImportError> {
        let stored = self.tensors.tensor(name);
        let Some(weight) = stored.or_else(|| self.make(name, pattern)) else {
            return Err(ImportError::MissingTensor {
                origin: self.tensors.origin().into(),
                tensor: self.stored_name(name),
                expected: pattern_text(pattern),
                instead: self.longer(name).map(|longer| Instead::Longer(longer).into()),
            });
        };
        self.check_shape(name, &weight, pattern)?;
        self.taken.insert(name.into());
        Ok(weight)
    }

    /// The stored name of a tensor that is called `name` where nothing holds the model or a part of it.
    fn longer(&self, name: &str) -> Option<String> {
        let is_behind = |stored: &&&str| {
            let before = stored.strip_suffix(name);
            before.is_some_and(|before| before.ends_with('.')) || stored.replace(COMPILED_PREFIX, "") == name
        };
        self.tensors.names().iter().find(is_behind).map(|stored| self.stored_name(stored))
    }

    /// `stated` by the configuration where tensors are synthetic, else whatever the stored tensor has.
    pub(super) fn or_stated(&self, stated: Option<usize>) -> Dim {
        stated.filter(|_| self.is_synthetic())
    }

    pub(super) fn is_synthetic(&self) -> bool {
        self.tensors.is_synthetic()
    }

    fn make(&self, name: &str, pattern: &[Dim]) -> Option<Weight> {
        let shape: Option<Vec<_>> = pattern.iter().copied().collect();
        self.tensors.make(name, &shape?)
    }

    /// One parameter stored under at least one of `names`; where it is stored more than once, all values
    /// must be equal.
    pub(super) fn take_shared(&mut self, names: &[&str], pattern: &[Dim]) -> Result<Weight, ImportError> {
        let first = names.iter().copied().find(|name| self.has(name)).or(names.first().copied()).unwrap_or_default();
        let kept = self.take_any(first, pattern)?;
        for name in names.iter().copied().filter(|name| *name != first) {
            if !self.has(name) {
                continue;
            }
            let other = self.take_any(name, pattern)?;
            if other.name() != kept.name() {
                self.check_equal(&kept, &other)?;
            }
        }
        Ok(kept)
    }

    /// The table of tokens and the matrix of the output, of equal shape; one parameter under either name where `tied`.
    pub(super) fn take_ends(
        &mut self,
        [tokens, output]: [&str; 2],
        tied: bool,
        shape: [Dim; 2],
    ) -> Result<[Weight; 2], ImportError> {
        let both = [tokens, output];
        let (token_names, output_names) = if tied { (&both[..], &both[..]) } else { (&both[..1], &both[1..]) };
        let tokens = self.take_shared(token_names, &shape)?;
        let output = self.take_shared(output_names, &[Some(tokens.shape()[0]), shape[1]])?;
        Ok([tokens, output])
    }

    /// Refuses padding that the embedding has no row for, and other special tokens that are none. A model does not
    /// produce those without a row.
    pub(super) fn check_ids(&self, tokens: &Weight) -> Result<(), ImportError> {
        let (config, rows) = (self.config, tokens.shape()[0]);
        for key in ["pad_token_id", "bos_token_id", "eos_token_id"] {
            if config.optional_ids(key)?.into_iter().any(|id| id >= rows) && key == "pad_token_id" {
                let tokens = self.stored_name(tokens.name());
                return Err(config.invalid(key, format!("below {rows}, the rows of \"{tokens}\"")));
            }
        }
        Ok(())
    }

    fn check_shape(&self, name: &str, weight: &Weight, pattern: &[Dim]) -> Result<(), ImportError> {
        let shape = weight.shape();
        let fits = shape.len() == pattern.len()
            && shape.iter().zip(pattern).all(|(found, expected)| *found > 0 && expected.is_none_or(|e| e == *found));
        if fits {
            return Ok(());
        }
        Err(ImportError::WrongShape {
            origin: weight.origin().into(),
            tensor: self.stored_name(name),
            expected: pattern_text(pattern) + &self.config.defaults_in(pattern, shape),
            found: format!("{shape:?}"),
        })
    }

    fn check_equal(&mut self, first: &Weight, second: &Weight) -> Result<(), ImportError> {
        let conflict = |index| ImportError::AliasConflict {
            origin: self.tensors.origin().into(),
            first: self.stored_name(first.name()),
            second: self.stored_name(second.name()),
            index,
        };
        let pair = [first, second].map(|weight| weight.name().to_owned());
        if self.equal.contains(&pair) {
            return Ok(());
        }
        if first.shape() != second.shape() {
            return Err(conflict(0));
        }
        let elements: usize = first.shape().iter().product();
        for start in (0..elements).step_by(COMPARED) {
            if let Some(index) = first_difference(first, second, start..elements.min(start + COMPARED))? {
                return Err(conflict(start + index));
            }
        }
        self.equal.insert(pair);
        Ok(())
    }

    /// Fails where a name of a tensor, be it an alias, was neither asked for nor is known to be that of no weight.
    pub(super) fn finish(self, family: &str, is_buffer: impl Fn(&str) -> bool) -> Result<(), ImportError> {
        let names = self.tensors.names().into_iter().chain(self.tensors.aliases());
        let extra: Vec<_> = names.filter(|name| !self.taken.contains(*name) && !is_buffer(name)).collect();
        let Some(first) = extra.first() else { return Ok(()) };
        let found = self.tensors.tensor(first).map_or_else(String::new, |weight| format!("{:?}", weight.shape()));
        Err(ImportError::ExtraTensors {
            origin: self.tensors.origin().into(),
            family: family.into(),
            found,
            extra: extra.into_iter().map(|name| self.stored_name(name)).collect(),
        })
    }
}

/// Where two tensors differ first within `part`, in place from its start.
fn first_difference(first: &Weight, second: &Weight, part: Range<usize>) -> Result<Option<usize>, WeightError> {
    let are_in_f32 = [first, second].iter().all(|weight| EXACT_IN_F32.contains(&weight.stored_type()));
    if !are_in_f32 {
        let (a, b) = (first.part_to_f64(part.clone())?, second.part_to_f64(part)?);
        return Ok(a.iter().zip(&b).position(|(a, b)| a.to_bits() != b.to_bits()));
    }
    let values = |weight: &Weight| {
        let mut bytes = Vec::new();
        weight.read_runs(Runs::one(part.start, part.len()), FloatType::F32, &mut bytes).map(|()| bytes)
    };
    let (a, b) = (values(first)?, values(second)?);
    if a == b {
        return Ok(None);
    }
    Ok(a.chunks(size_of::<f32>()).zip(b.chunks(size_of::<f32>())).position(|(a, b)| a != b))
}

fn pattern_text(pattern: &[Dim]) -> String {
    let dims: Vec<_> = pattern.iter().map(|dim| dim.map_or_else(|| "any".to_owned(), |d| d.to_string())).collect();
    format!("[{}]", dims.join(", "))
}

#[cfg(test)]
mod tests {
    use std::{
        ops::{ControlFlow, Range},
        sync::Arc,
    };

    use super::*;
    use crate::{FloatType, Runs, TensorSource, WeightError};

    const ELEMENTS: usize = COMPARED + 9;

    /// Ones, and a two at this place; they are read in parts only.
    struct Ones {
        two: usize,
        stored: &'static str,
    }

    impl Ones {
        fn value(&self, index: usize) -> f32 {
            if index == self.two { 2.0 } else { 1.0 }
        }
    }

    impl TensorSource for Ones {
        fn read_f32(&self) -> Result<Vec<f32>, WeightError> {
            panic!("all values are read")
        }

        fn read_f64(&self) -> Result<Vec<f64>, WeightError> {
            panic!("all values are read")
        }

        fn read_f64_part(&self, part: Range<usize>) -> Result<Vec<f64>, WeightError> {
            assert!(part.len() <= COMPARED && part.end <= ELEMENTS, "{part:?}");
            assert_eq!(self.stored, "F64");
            Ok(part.map(|index| self.value(index).into()).collect())
        }

        fn read_runs(&self, runs: Runs, to: FloatType, out: &mut Vec<u8>) -> Result<(), WeightError> {
            assert!((runs.count, to) == (1, FloatType::F32) && runs.length <= COMPARED, "{runs:?}");
            out.extend((runs.start..runs.start + runs.length).flat_map(|index| self.value(index).to_le_bytes()));
            Ok(())
        }

        fn stored_type(&self) -> &'static str {
            self.stored
        }

        fn stored_bytes(&self) -> u64 {
            0
        }

        fn read_bytes(&self, _: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), WeightError> {
            panic!("nothing is hashed")
        }
    }

    struct Pair(usize, &'static str);

    impl TensorDirectory for Pair {
        fn names(&self) -> Vec<&str> {
            vec!["a", "b"]
        }

        fn tensor(&self, name: &str) -> Option<Weight> {
            let two = if name == "b" { self.0 } else { ELEMENTS };
            Some(Weight::new(name, vec![ELEMENTS], "memory", Arc::new(Ones { two, stored: self.1 })))
        }

        fn origin(&self) -> &str {
            "memory"
        }
    }

    #[test]
    fn two_names_of_a_parameter_are_compared_part_by_part() {
        let config = Config::new("config.json", serde_json::Map::new());
        let taken = |pair: &Pair| {
            Importer::new(&config, pair).take_shared(&["a", "b"], &[None]).map(|kept| kept.name().to_owned())
        };
        for stored in ["F64", "F32", "BF16"] {
            assert_eq!(taken(&Pair(ELEMENTS, stored)).unwrap(), "a");
            for place in [0, COMPARED - 1, COMPARED, ELEMENTS - 1] {
                match taken(&Pair(place, stored)) {
                    Err(ImportError::AliasConflict { index, .. }) => assert_eq!(index, place),
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    #[test]
    fn tensors_that_were_found_equal_are_not_read_again() {
        let config = Config::new("config.json", serde_json::Map::new());
        let same = Pair(ELEMENTS, "F32");
        let mut importer = Importer::new(&config, &same);
        importer.take_shared(&["a", "b"], &[None]).unwrap();
        let [first, second] = ["a", "b"].map(|name| same.tensor(name).unwrap());
        let unread = Weight::new("b", vec![0], "memory", Arc::new(Ones { two: 0, stored: "F32" }));
        importer.check_equal(&first, &unread).unwrap();
        assert!(importer.check_equal(&second, &unread).is_err());
    }
}
