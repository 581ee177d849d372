//! Element-wise functions of hidden rows, in plain arithmetic that is compiled once for each level of instructions.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::Instructions;
use super::Isa;
use super::lanes::{SMALLEST, exp_parts, multiply_add};
use super::levels::every_level;

/// Above, an exponential is infinite.
const LARGEST: f32 = 88.722_83;

/// `2 · √(2 / π)`, and that times 0.044715.
const GELU_TANH: [f32; 2] = [1.595_769, 0.071_354_814];

impl Isa {
    every_level! {
        /// `max(x, 0)` of every element, NaN of NaN.
        relu(values: &mut [f32]), relu
    }

    every_level! {
        /// `x / (1 + exp(-x))` of every element.
        silu(values: &mut [f32]), silu
    }

    every_level! {
        /// `x / (1 + exp(-y))` of every element, with `y = 2 · √(2 / π) · (x + 0.044715 · x³)`.
        gelu_tanh(values: &mut [f32]), gelu_tanh
    }
}

#[inline(always)]
fn relu<const FMA: bool>(values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value = if *value < 0.0 { 0.0 } else { *value });
}

#[inline(always)]
fn silu<const FMA: bool>(values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value /= 1.0 + exp::<FMA>(-*value));
}

#[inline(always)]
fn gelu_tanh<const FMA: bool>(values: &mut [f32]) {
    for value in values {
        let y = *value * multiply_add::<FMA>(GELU_TANH[1], *value * *value, GELU_TANH[0]);
        *value /= 1.0 + exp::<FMA>(-y);
    }
}

/// `exp(x)` within 2 units in the last place; 0 below the smallest normal result, NaN for NaN.
#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    let (value, power) = exp_parts::<FMA>(x);
    // In two steps, since the largest power is beyond an f32.
    let half = power >> 1;
    let [first, second] = [half, power - half].map(|power| f32::from_bits(((power + 127) << 23).cast_unsigned()));
    let scaled = value * first * second;
    let scaled = if x > LARGEST { f32::INFINITY } else { scaled };
    if x < SMALLEST { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::super::every_isa;
    use super::*;

    #[test]
    fn exponentials_of_both_signs_are_within_two_units_in_the_last_place() {
        for step in (-87_300..=88_700).step_by(if cfg!(miri) { 997 } else { 1 }) {
            let x = step as f32 * 0.001;
            let expected = f64::from(x).exp();
            // MinGW's multiply-add, which stands in for the instruction here, rounds twice.
            let fused = if cfg!(all(windows, target_env = "gnu")) { exp::<false>(x) } else { exp::<true>(x) };
            for found in [fused, exp::<false>(x)] {
                let unit = f64::from(f32::from_bits((expected as f32).to_bits() + 1) - expected as f32);
                assert!((f64::from(found) - expected).abs() <= 2.0 * unit, "exp({x}) = {found}, not {expected}");
            }
        }
        for (x, expected) in [(LARGEST, f32::MAX), (88.73, f32::INFINITY), (f32::INFINITY, f32::INFINITY), (-90.0, 0.0)]
        {
            assert!((exp::<true>(x) - expected).abs() <= 1e-4 * expected || exp::<true>(x) == expected, "exp({x})");
        }
        assert!(exp::<true>(f32::NAN).is_nan() && exp::<true>(f32::NEG_INFINITY) == 0.0);
    }

    #[test]
    fn every_level_gives_every_element() {
        for isa in every_isa() {
            let mut values: Vec<f32> = (0..70).map(|i| i as f32 - 35.0).collect();
            values.extend([88.7, -88.7, 200.0, 1e30, f32::INFINITY]);
            let (mut silu, mut relu, mut tanh) = (values.clone(), values.clone(), values.clone());
            isa.silu(&mut silu);
            isa.relu(&mut relu);
            isa.gelu_tanh(&mut tanh);
            for (((x, silu), relu), tanh) in values.into_iter().zip(silu).zip(relu).zip(tanh) {
                assert_eq!(relu, x.max(0.0), "{isa:?}");
                let expected = x / (1.0 + (-x).exp());
                let close = silu == expected || (silu - expected).abs() <= 4e-7 * expected.abs();
                assert!(close, "{isa:?} {x}: {silu}, not {expected}");
                let wide = f64::from(x);
                let y = (8.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
                let expected = wide / (1.0 + (-y).exp());
                let error = (f64::from(tanh) - expected).abs();
                let close = error <= 1.2e-7 * (2.0 + wide * wide) * expected.abs() + 4e-38;
                assert!(close || f64::from(tanh) == expected, "{isa:?} {x}: {tanh}, not {expected}");
            }
            for function in [Isa::silu, Isa::gelu_tanh] {
                let mut ends = [-89.0, -1e30, f32::NEG_INFINITY, f32::NAN];
                function(isa, &mut ends);
                assert!(ends[..2] == [0.0, 0.0] && ends[2..].iter().all(|end| end.is_nan()), "{isa:?} {ends:?}");
            }
        }
    }
}
