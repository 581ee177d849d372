//! Element-wise functions of the feed-forward experts.

use moa_schema::Activation;

use crate::simd::Isa;

/// Replaces values by what `activation` makes of them; NaN stays NaN.
pub(crate) fn apply(isa: Isa, activation: Activation, values: &mut [f32]) {
    match activation {
        Activation::Relu => isa.relu(values),
        Activation::Gelu => values.iter_mut().for_each(|value| *value = gelu(*value)),
        Activation::GeluTanh => isa.gelu_tanh(values),
        Activation::Silu => isa.silu(values),
    }
}

/// `x · Φ(x)` with `Φ(x) = erfc(-x / √2) / 2`, which keeps its relative precision in the lower tail.
fn gelu(x: f32) -> f32 {
    x * (0.5 * libm::erfcf(-x * std::f32::consts::FRAC_1_SQRT_2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::every_isa;

    /// Above what is 0 because its exponential is beyond an f32.
    const TINY: f64 = 4e-38;

    #[test]
    fn activations_follow_their_f64_definition() {
        let by = if cfg!(miri) { 97 } else { 1 };
        let values: Vec<f32> = (-1200..=1200).step_by(by).map(|step| step as f32 * 0.01).collect();
        for isa in every_isa() {
            for activation in Activation::ALL {
                let mut found = values.clone();
                apply(isa, activation, &mut found);
                for (x, found) in values.iter().zip(found) {
                    let wide = f64::from(*x);
                    let expected = match activation {
                        Activation::Relu => wide.max(0.0),
                        Activation::Gelu => wide * 0.5 * libm::erfc(-wide * std::f64::consts::FRAC_1_SQRT_2),
                        Activation::GeluTanh => {
                            let y = (8.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
                            wide / (1.0 + (-y).exp())
                        }
                        Activation::Silu => wide / (1.0 + (-wide).exp()),
                    };
                    let relative = 1.2e-7 * (2.0 + wide * wide);
                    let error = (f64::from(found) - expected).abs();
                    let close = error <= relative * expected.abs() + TINY;
                    assert!(close, "{isa:?} {activation:?}({x}): {found}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn nan_stays_nan() {
        for isa in every_isa() {
            for activation in Activation::ALL {
                let mut values = [f32::NAN; 20];
                apply(isa, activation, &mut values);
                assert!(values.iter().all(|value| value.is_nan()), "{isa:?} {activation:?}");
            }
        }
    }
}
