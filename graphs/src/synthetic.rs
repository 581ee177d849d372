//! Tensors that no checkpoint holds: shapes alone, or random values.

use std::{cell::RefCell, collections::BTreeMap, ops::ControlFlow, sync::Arc};

use crate::{FloatType, Rounding, Runs, TensorDirectory, TensorSource, Weight, WeightError};

/// A directory that has every tensor that it is asked for.
///
/// A tensor that was made is found again under its name, and under no other; so parameters are shared where the
/// configuration shares them.
///
/// Random values depend on seed, name and index only. They are uniform: matrices within `sqrt(6 / (a + b))` of 0
/// for the last two dimensions `a` and `b` (Glorot and Bengio, 2010), embeddings within `sqrt(3 / C)` for the
/// width `C`, vectors within 0.1 of 0, and those that normalisations multiply with within 0.1 of 1.
#[derive(Debug)]
pub struct SyntheticTensors {
    origin: String,
    seed: Option<u64>,
    made: RefCell<BTreeMap<String, Weight>>,
}

impl SyntheticTensors {
    /// Tensors that have a shape and no values; messages call their place `origin`.
    pub fn shapes(origin: impl Into<String>) -> Self {
        Self { origin: origin.into(), seed: None, made: RefCell::default() }
    }

    /// Tensors of random values; messages call their place `origin`.
    pub fn random(origin: impl Into<String>, seed: u64) -> Self {
        Self { seed: Some(seed), ..Self::shapes(origin) }
    }
}

impl TensorDirectory for SyntheticTensors {
    fn names(&self) -> Vec<&str> {
        Vec::new()
    }

    fn tensor(&self, name: &str) -> Option<Weight> {
        self.made.borrow().get(name).cloned()
    }

    fn origin(&self) -> &str {
        &self.origin
    }

    fn make(&self, name: &str, shape: &[usize]) -> Option<Weight> {
        let source: Arc<dyn TensorSource> = match self.seed {
            None => Arc::new(Unknown { name: name.into(), origin: self.origin.clone() }),
            Some(seed) => Arc::new(Uniform::new(name, shape, seed)),
        };
        let weight = Weight::new(name, shape.to_vec(), self.origin.clone(), source);
        self.made.borrow_mut().insert(name.into(), weight.clone());
        Some(weight)
    }

    fn is_synthetic(&self) -> bool {
        true
    }
}

/// Element type of synthetic tensors.
const STORED_TYPE: &str = "F32";

/// A tensor without values.
struct Unknown {
    name: String,
    origin: String,
}

impl Unknown {
    fn error(&self) -> WeightError {
        WeightError::NoValues { origin: self.origin.clone(), tensor: self.name.clone() }
    }
}

impl TensorSource for Unknown {
    fn read_f32(&self) -> Result<Vec<f32>, WeightError> {
        Err(self.error())
    }

    fn read_f64(&self) -> Result<Vec<f64>, WeightError> {
        Err(self.error())
    }

    fn read_runs(&self, _: Runs, _: FloatType, _: &mut Vec<u8>) -> Result<(), WeightError> {
        Err(self.error())
    }

    fn stored_bytes(&self) -> u64 {
        0
    }

    fn stored_type(&self) -> &'static str {
        STORED_TYPE
    }

    fn read_bytes(&self, _sink: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), WeightError> {
        Err(self.error())
    }
}

/// Values drawn from an interval.
struct Uniform {
    key: u64,
    len: usize,
    centre: f32,
    bound: f32,
}

/// Largest distance of an element of a vector from its centre.
const VECTOR_BOUND: f32 = 0.1;

/// Values that are drawn before they are handed on.
const BLOCK: usize = 1 << 14;

impl Uniform {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    fn new(name: &str, shape: &[usize], seed: u64) -> Self {
        let is_norm = name.rsplit('.').nth(1).is_some_and(|module| module.contains("norm"));
        let (centre, bound) = match shape {
            [] | [_] if is_norm && name.ends_with(".weight") => (1.0, VECTOR_BOUND),
            [] | [_] => (0.0, VECTOR_BOUND),
            [_, width] if name.contains("embed_") => (0.0, (3.0 / *width as f64).sqrt() as f32),
            [.., rows, columns] => (0.0, (6.0 / (rows + columns) as f64).sqrt() as f32),
        };
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self { key: mix(mix(seed) ^ name), len: shape.iter().product(), centre, bound }
    }

    /// The value at `index`: 24 random bits as a multiple of 2^-23 in `[-1, 1)`.
    #[allow(clippy::cast_precision_loss)]
    fn value(&self, index: usize) -> f32 {
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        let bits = mix(self.key.wrapping_add((index as u64).wrapping_mul(GOLDEN))) >> 40;
        self.centre + self.bound * (bits as f32 / 8_388_608.0 - 1.0)
    }
}

/// The output function of SplitMix64 (Steele, Lea and Flood, 2014).
const fn mix(mut state: u64) -> u64 {
    state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

impl TensorSource for Uniform {
    fn read_f32(&self) -> Result<Vec<f32>, WeightError> {
        Ok((0..self.len).map(|index| self.value(index)).collect())
    }

    fn read_f64(&self) -> Result<Vec<f64>, WeightError> {
        Ok((0..self.len).map(|index| f64::from(self.value(index))).collect())
    }

    fn read_runs(&self, runs: Runs, to: FloatType, out: &mut Vec<u8>) -> Result<(), WeightError> {
        let mut values = Vec::with_capacity(BLOCK);
        for run in 0..runs.count {
            let start = runs.start + run * runs.stride;
            for first in (start..start + runs.length).step_by(BLOCK) {
                values.clear();
                values.extend((first..(first + BLOCK).min(start + runs.length)).map(|index| self.value(index)));
                let _always_in_range = to.append(&values, out);
            }
        }
        Ok(())
    }

    fn stored_bytes(&self) -> u64 {
        self.len as u64 * 4
    }

    fn stored_type(&self) -> &'static str {
        STORED_TYPE
    }

    fn read_bytes(&self, sink: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), WeightError> {
        let mut block = Vec::with_capacity(4 * BLOCK);
        for start in (0..self.len).step_by(BLOCK) {
            block.clear();
            let end = (start + BLOCK).min(self.len);
            block.extend((start..end).flat_map(|index| self.value(index).to_le_bytes()));
            if sink(&block).is_break() {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u64, name: &str, shape: &[usize]) -> Vec<f32> {
        SyntheticTensors::random("seed", seed).make(name, shape).unwrap().to_f32().unwrap()
    }

    #[test]
    fn values_depend_on_seed_and_name_alone() {
        let first = values(1, "a.weight", &[40, 60]);
        assert_eq!(first, values(1, "a.weight", &[40, 60]));
        assert_ne!(first, values(2, "a.weight", &[40, 60]));
        assert_ne!(first, values(1, "b.weight", &[40, 60]));
    }

    #[test]
    fn values_fill_their_interval() {
        let matrix = values(0, "fc1.weight", &[200, 100]);
        let bound = (6f32 / 300.0).sqrt();
        let (mut sum, mut squares) = (0.0, 0.0);
        for value in &matrix {
            assert!(value.abs() <= bound);
            sum += f64::from(*value);
            squares += f64::from(*value).powi(2);
        }
        let count = matrix.len() as f64;
        assert!((sum / count).abs() < 0.003 && (squares / count * 3.0 / f64::from(bound).powi(2) - 1.0).abs() < 0.03);
        let scales = values(0, "encoder.layers.0.final_layer_norm.weight", &[64]);
        assert!(scales.iter().all(|value| (value - 1.0).abs() <= 0.1) && scales[0] != scales[1]);
    }

    #[test]
    fn bytes_are_the_values() {
        let weight = SyntheticTensors::random("seed", 3).make("x", &[3, BLOCK]).unwrap();
        let mut bytes = Vec::new();
        let mut take = |block: &[u8]| {
            bytes.extend_from_slice(block);
            ControlFlow::Continue(())
        };
        weight.read_bytes(&mut take).unwrap();
        let expected: Vec<u8> = weight.to_f32().unwrap().iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(bytes == expected);
        let mut blocks = 0;
        let mut take = |_: &[u8]| {
            blocks += 1;
            ControlFlow::Break(())
        };
        weight.read_bytes(&mut take).unwrap();
        assert_eq!(blocks, 1);
    }

    #[test]
    fn shapes_have_no_values() {
        let tensors = SyntheticTensors::shapes("config.json");
        assert!(tensors.tensor("x").is_none());
        let error = tensors.make("x", &[2]).unwrap().to_f32().expect_err("no values").to_string();
        assert_eq!(error, "config.json: only the shape of tensor \"x\" is known");
        assert_eq!(tensors.tensor("x").unwrap().shape(), [2]);
    }
}
