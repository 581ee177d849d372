//! Random numbers, rounding to element types, and comparison.

use half::{bf16, f16};
use moa_cuda::Element;

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `low ..= high`.
    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.between(0, 99) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.between(0, choices.len() - 1)]
    }

    /// `len` values, uniform in `-amplitude .. amplitude`, that `element` holds exactly.
    pub(crate) fn values(&mut self, element: Element, len: usize, amplitude: f32) -> Vec<f32> {
        let uniform = |random: &mut Self| amplitude * ((random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0);
        (0..len).map(|_| round(element, uniform(self))).collect()
    }

    /// One mask row: no padding, right padding, left padding, holes, or nothing but padding.
    pub(crate) fn mask(&mut self, len: usize) -> Vec<i32> {
        let kept = self.between(1, len.max(1));
        match self.between(0, 5) {
            0 => (0..len).map(|i| i32::from(i < kept)).collect(),
            1 => (0..len).map(|i| i32::from(i + kept >= len)).collect(),
            2 => (0..len).map(|_| i32::from(self.chance(60))).collect(),
            3 => vec![0; len],
            _ => vec![1; len],
        }
    }

    /// Router weights `[C, E]`; a third of the time so that column 0 of the input (which must be 1) drives every token
    /// to the same experts and leaves the others idle.
    pub(crate) fn router(&mut self, width: usize, experts: usize) -> Vec<f32> {
        let mut weight = self.values(Element::F32, width * experts, 2.0);
        if self.chance(33) {
            let hot = self.between(0, experts - 1);
            for (expert, weight) in weight[..experts].iter_mut().enumerate() {
                *weight = if expert == hot { 40.0 } else { 4.0 * (expert % 16) as f32 };
            }
        }
        weight
    }

    /// Inputs `[tokens, C]` with a 1 in column 0.
    pub(crate) fn hidden_states(&mut self, element: Element, tokens: usize, width: usize) -> Vec<f32> {
        let mut hidden_states = self.values(element, tokens * width, 1.0);
        hidden_states.iter_mut().step_by(width).for_each(|value| *value = 1.0);
        hidden_states
    }
}

/// Seeds, as many times more as the variable `EMULATION_FACTOR` says.
pub(crate) fn more(seeds: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let factor = std::env::var("EMULATION_FACTOR").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    seeds.start..seeds.start + (seeds.end - seeds.start) * factor
}

/// The nearest value that `element` holds.
pub(crate) fn round(element: Element, value: f32) -> f32 {
    match element {
        Element::F32 => value,
        Element::F16 => f16::from_f32(value).to_f32(),
        Element::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

/// The bytes of values that `element` holds.
pub(crate) fn encode(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Element::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        Element::Bf16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
    }
}

/// The values of bytes.
pub(crate) fn decode(element: Element, bytes: &[u8]) -> Vec<f32> {
    let pair = |bytes: &[u8]| [bytes[0], bytes[1]];
    match element {
        Element::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Element::F16 => bytes.chunks(2).map(|b| f16::from_le_bytes(pair(b)).to_f32()).collect(),
        Element::Bf16 => bytes.chunks(2).map(|b| bf16::from_le_bytes(pair(b)).to_f32()).collect(),
    }
}

/// Largest error of a row relative to the length of rows: a few roundings of the factors.
pub(crate) fn tolerance(element: Element, tf32: bool) -> f64 {
    match element {
        Element::F32 if !tf32 => 5e-6,
        Element::F32 | Element::F16 => 4.0 * f64::powi(2.0, -11),
        Element::Bf16 => 4.0 * f64::powi(2.0, -8),
    }
}

/// Fails at the first row whose error, as a vector, exceeds `tolerance` times its length, or the typical length of rows
/// if it is shorter than that, as where large terms cancel; NaN is always an error.
pub(crate) fn assert_rows_close(what: &str, found: &[f32], expected: &[f64], row: usize, tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let length = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>().sqrt();
    let typical = length(expected) / ((expected.len() / row) as f64).sqrt();
    for (index, (found, expected)) in found.chunks(row).zip(expected.chunks(row)).enumerate() {
        let error: Vec<f64> = found.iter().zip(expected).map(|(a, b)| f64::from(*a) - b).collect();
        let allowed = tolerance * length(expected).max(typical) + 1e-30;
        let is_close = length(&error) <= allowed;
        assert!(
            is_close,
            "{what}, row {index}: error {:e}, allowed {allowed:e}\n{found:?}\n{expected:?}",
            length(&error)
        );
    }
}

/// As the references need it.
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "{what}[{index}] is {found}, not {expected}");
    }
}

pub(crate) fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// `left [m, k] · right [k, n]`.
pub(crate) fn matmul(left: &[f64], right: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
    assert_eq!((left.len(), right.len()), (m * k, k * n));
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            let factor = left[i * k + l];
            out[i * n..][..n].iter_mut().zip(&right[l * n..][..n]).for_each(|(out, right)| *out += factor * right);
        }
    }
    out
}
