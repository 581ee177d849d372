//! f32 weights that two bytes hold exactly, as those of a checkpoint in bf16 or f16 do after it was widened.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::buffer::emptied;
use crate::weight_data::WeightData;

/// Weights in the type of two bytes that holds each of them.
pub(crate) enum Narrowed {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Narrowed {
    /// `None` where `data` is not f32, or no admitted type holds all of it bit by bit.
    ///
    /// # Panics
    ///
    /// With [`crate::OutOfMemory`].
    pub(crate) fn exact(data: WeightData<'_>, admits_f16: bool) -> Option<Self> {
        let WeightData::F32(values) = data else { return None };
        if values.iter().copied().all(is_bf16) {
            let upper = |value: &f32| bf16::from_bits((value.to_bits() >> u16::BITS) as u16);
            let mut uppers = Vec::new();
            emptied(&mut uppers, values.len()).extend(values.iter().map(upper));
            return Some(Self::Bf16(uppers));
        }
        (admits_f16 && values.iter().copied().all(is_f16)).then(|| {
            let mut halves = Vec::new();
            emptied(&mut halves, values.len()).resize(values.len(), f16::ZERO);
            halves.convert_from_f32_slice(values);
            Self::F16(halves)
        })
    }

    pub(crate) fn data(&self) -> WeightData<'_> {
        match self {
            Self::Bf16(values) => WeightData::Bf16(values),
            Self::F16(values) => WeightData::F16(values),
        }
    }
}

/// Whether `data` is f32, of which neither bf16 nor f16 holds all.
pub(crate) fn needs_four_bytes(data: WeightData<'_>) -> bool {
    let WeightData::F32(values) = data else { return false };
    !values.iter().copied().all(is_bf16) && !values.iter().copied().all(is_f16)
}

fn is_bf16(value: f32) -> bool {
    value.to_bits().trailing_zeros() >= u16::BITS
}

/// Whether an f16 has this value; no NaN is taken for one.
fn is_f16(value: f32) -> bool {
    let bits = value.to_bits();
    let (exponent, fraction) = (bits >> 23 & 0xff, bits & 0x007f_ffff);
    // Zeros at the end of 24 bits, of which the last is worth 2^(exponent - 150) and that of an f16 2^-24 at least.
    let zeros = (fraction | 0x0080_0000).trailing_zeros();
    match exponent {
        0 | 255 => fraction == 0,
        103..=142 => zeros >= 126u32.saturating_sub(exponent).max(13),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(values: &[f32]) -> Option<Narrowed> {
        Narrowed::exact(WeightData::F32(values), true)
    }

    fn widened(narrowed: &Narrowed) -> Vec<u32> {
        match narrowed {
            Narrowed::Bf16(values) => values.iter().map(|value| u32::from(value.to_bits()) << u16::BITS).collect(),
            Narrowed::F16(values) => values.iter().map(|value| value.to_f32().to_bits()).collect(),
        }
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    /// Signed zeros, subnormal numbers, infinities and NaN with its payload are bf16.
    #[test]
    fn every_bf16_is_kept_bit_by_bit() {
        let all: Vec<f32> = (0..=u16::MAX).map(|upper| f32::from_bits(u32::from(upper) << 16)).collect();
        let Some(narrowed @ Narrowed::Bf16(_)) = exact(&all) else { panic!("not in bf16") };
        assert!(widened(&narrowed) == bits(&all));
    }

    /// What it says of every f16, and of the f32 beside each, agrees with rounding.
    #[test]
    fn every_f16_is_known_and_nothing_else() {
        for half in (0..=u16::MAX).step_by(if cfg!(miri) { 509 } else { 1 }) {
            let value = f16::from_bits(half).to_f32_const();
            for bits in [value.to_bits() - u32::from(half & 0x7fff > 0), value.to_bits(), value.to_bits() + 1] {
                let value = f32::from_bits(bits);
                let exact = f16::from_f32_const(value).to_f32_const().to_bits() == bits;
                assert_eq!(is_f16(value), exact && !value.is_nan(), "{bits:x}");
            }
        }
        for power in -126..128 {
            let value = 2f32.powi(power);
            assert_eq!(is_f16(value), (-24..=15).contains(&power), "2^{power}");
        }
    }

    #[test]
    #[cfg_attr(all(miri, target_feature = "f16c"), ignore = "Miri cannot round to f16 with F16C")]
    fn every_f16_that_is_no_nan_is_kept_bit_by_bit() {
        let all: Vec<f32> = (0..=u16::MAX).map(|half| f16::from_bits(half).to_f32()).filter(|v| !v.is_nan()).collect();
        let Some(narrowed @ Narrowed::F16(_)) = exact(&all) else { panic!("not in f16") };
        assert!(widened(&narrowed) == bits(&all));
        assert!(Narrowed::exact(WeightData::F32(&all), false).is_none(), "f16 was not admitted");
    }

    /// One value that needs four bytes, anywhere, keeps all of them.
    #[test]
    #[cfg_attr(all(miri, target_feature = "f16c"), ignore = "Miri cannot round to f16 with F16C")]
    fn other_values_stay_as_they_are() {
        let mut values = vec![f16::from_f32(0.1).to_f32(); 100];
        assert!(matches!(exact(&values), Some(Narrowed::F16(_))));
        assert!(!needs_four_bytes(WeightData::F32(&values)));
        for other in [0.1, 65536.0 + 8.0, f32::from_bits(1), 2f32.powi(-25), f32::from_bits(0x7fc0_0001)] {
            for place in [0, 50, 99] {
                let before = std::mem::replace(&mut values[place], other);
                assert!(exact(&values).is_none(), "{other} at {place}");
                assert!(needs_four_bytes(WeightData::F32(&values)), "{other} at {place}");
                values[place] = before;
            }
        }
    }

    #[test]
    fn stored_halves_are_left_alone() {
        assert!(Narrowed::exact(WeightData::F16(&[f16::ONE]), true).is_none());
        assert!(Narrowed::exact(WeightData::Bf16(&[bf16::ONE]), true).is_none());
        assert!(!needs_four_bytes(WeightData::F16(&[f16::ONE])) && !needs_four_bytes(WeightData::F32(&[1.0])));
    }
}
