//! Element-wise functions of the feed-forward experts.

use moa_schema::Activation;

/// The scalar function of `activation`.
pub(crate) fn function(activation: Activation) -> fn(f32) -> f32 {
    match activation {
        Activation::Relu => relu,
        Activation::Gelu => gelu,
        Activation::Silu => silu,
    }
}

/// `max(x, 0)`, NaN for NaN.
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// `x · Φ(x)` with `Φ(x) = erfc(-x / √2) / 2`, which keeps its relative precision in the lower tail.
fn gelu(x: f32) -> f32 {
    x * (0.5 * libm::erfcf(-x * std::f32::consts::FRAC_1_SQRT_2))
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_follow_their_f64_definition() {
        for step in (-1200..=1200).step_by(if cfg!(miri) { 97 } else { 1 }) {
            let x = step as f32 * 0.01;
            let wide = f64::from(x);
            let cases = [
                (relu(x), wide.max(0.0)),
                (gelu(x), wide * 0.5 * libm::erfc(-wide * std::f64::consts::FRAC_1_SQRT_2)),
                (silu(x), wide / (1.0 + (-wide).exp())),
            ];
            for (found, expected) in cases {
                let relative = 1.2e-7 * (2.0 + wide * wide);
                let error = (f64::from(found) - expected).abs();
                assert!(error <= relative * expected.abs(), "x = {x}: {found}, not {expected}");
            }
        }
    }

    #[test]
    fn nan_stays_nan() {
        for activation in Activation::ALL {
            assert!(function(activation)(f32::NAN).is_nan());
        }
    }
}
