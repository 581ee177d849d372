//! What rounding does to outputs, and what is granted for it.

use std::collections::BTreeMap;

use crate::tensor::Tensor;

use super::compare::{Tolerance, ToleranceOptions, effect_of_rounding, largest};

/// The effect on each output, as a part of each of its [`scales`]: the most that any case showed. A case by itself may
/// be one number, whose roundings cancel by chance.
pub(super) struct Effects {
    options: ToleranceOptions,
    seen: BTreeMap<String, [f64; 2]>,
}

impl Effects {
    /// Nothing was seen yet.
    pub(super) const fn of(options: ToleranceOptions) -> Self {
        Self { options, seen: BTreeMap::new() }
    }

    /// Takes note of what rounding did to an output.
    pub(super) fn see(&mut self, name: &str, expected: &Tensor, rounded: Option<&Tensor>) {
        let rounding = rounded.and_then(|rounded| effect_of_rounding(rounded, expected)).unwrap_or_default();
        let effect = self.seen.entry(name.to_owned()).or_default();
        for (effect, scale) in effect.iter_mut().zip(scales(expected)) {
            *effect = effect.max(rounding / scale);
        }
    }

    /// What is granted to an output by what was seen so far.
    pub(super) fn tolerance(&self, name: &str, expected: &Tensor) -> Tolerance {
        let effects = self.seen.get(name).copied().unwrap_or_default();
        let rounding = effects.into_iter().zip(scales(expected)).map(|(effect, scale)| effect * scale);
        let rounding = rounding.fold(f64::INFINITY, f64::min);
        Tolerance::derive(self.options, largest(expected), rounding)
    }
}

/// What the effect of rounding on an output is a part of; it is no more than that of either allows. The largest value
/// holds small outputs to their own size, and 1 in place of a smaller one keeps a case whose values cancel from telling
/// of others.
fn scales(expected: &Tensor) -> [f64; 2] {
    let largest = largest(expected);
    [if largest > 0.0 { largest } else { 1.0 }, largest.max(1.0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::TensorData;

    #[test]
    fn small_outputs_are_held_to_their_own_size() {
        let scales = |values: &[f32]| scales(&Tensor::new([values.len()], TensorData::F32(values.to_vec())).unwrap());
        assert_eq!(scales(&[0.25, -0.5]), [0.5, 1.0]);
        assert_eq!(scales(&[0.25, -4.0]), [4.0; 2]);
        assert_eq!(scales(&[0.0, 0.0]), [1.0; 2]);
        assert_eq!(scales(&[]), [1.0; 2]);
    }
}
