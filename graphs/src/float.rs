//! Floating-point types of stored weights, and the one rounding on the way to them.

use half::{bf16, f16, slice::HalfFloatSliceExt};

pub use moa_schema::FloatType;

/// A value that a [`FloatType`] does not hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutOfRange {
    /// Where it stands among the values given.
    pub index: usize,
    /// The value, before it is rounded.
    pub value: f64,
}

/// Values converted at once.
const CHUNK: usize = 1 << 10;

/// Rounding to a type of stored weights.
pub trait Rounding: Copy {
    /// Largest finite value.
    fn largest(self) -> f64;

    /// Appends `values` to `out`, little-endian, each rounded to nearest, ties to even.
    ///
    /// # Errors
    ///
    /// The first value that would become infinite or is no number; `out` is of no use then.
    fn append(self, values: &[f32], out: &mut Vec<u8>) -> Result<(), OutOfRange>;

    /// Appends `values` to `out` as [`Self::append`] does, each rounded once.
    ///
    /// # Errors
    ///
    /// As [`Self::append`].
    fn append_f64(self, values: &[f64], out: &mut Vec<u8>) -> Result<(), OutOfRange>;

    /// Whether `value`, rounded, is finite.
    fn holds(self, value: f64) -> bool;
}

impl Rounding for FloatType {
    fn largest(self) -> f64 {
        match self {
            Self::F32 => f32::MAX.into(),
            Self::F16 => f16::MAX.to_f64(),
            Self::Bf16 => bf16::MAX.to_f64(),
        }
    }

    fn append(self, values: &[f32], out: &mut Vec<u8>) -> Result<(), OutOfRange> {
        let mut start = 0;
        for values in values.chunks(CHUNK) {
            let finite = match self {
                Self::F32 => append_f32(values, out),
                Self::F16 => append_f16(values, out),
                Self::Bf16 => append_bf16(values, out),
            };
            if !finite {
                let faulty = |value: &f32| !self.holds((*value).into());
                let index = values.iter().position(faulty).unwrap_or_default();
                return Err(OutOfRange { index: start + index, value: values[index].into() });
            }
            start += values.len();
        }
        Ok(())
    }

    fn append_f64(self, values: &[f64], out: &mut Vec<u8>) -> Result<(), OutOfRange> {
        let mut narrow = Vec::with_capacity(CHUNK);
        for (chunk, values) in values.chunks(CHUNK).enumerate() {
            narrow.clear();
            narrow.extend(values.iter().map(|value| narrowed(self, *value)));
            self.append(&narrow, out).map_err(|fault| {
                let index = chunk * CHUNK + fault.index;
                OutOfRange { index, value: values[fault.index] }
            })?;
        }
        Ok(())
    }

    fn holds(self, value: f64) -> bool {
        let narrow = narrowed(self, value);
        match self {
            Self::F32 => narrow.is_finite(),
            Self::F16 => f16::from_f32(narrow).is_finite(),
            Self::Bf16 => bf16::from_f32(narrow).is_finite(),
        }
    }
}

/// The f32 that rounds to what `value` itself rounds to.
///
/// For the narrow types that is `value` rounded to odd, which keeps the second rounding innocuous: S. Boldo and
/// G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
#[allow(clippy::cast_possible_truncation)]
fn narrowed(to: FloatType, value: f64) -> f32 {
    let nearest = value as f32;
    if to == FloatType::F32 || f64::from(nearest) == value || !nearest.is_finite() {
        return nearest;
    }
    let toward_zero = nearest.to_bits() - u32::from(f64::from(nearest).abs() > value.abs());
    f32::from_bits(toward_zero | 1)
}

fn append_f32(values: &[f32], out: &mut Vec<u8>) -> bool {
    append_bytes(values, out, |value| value.to_le_bytes());
    values.iter().fold(true, |finite, value| finite & value.is_finite())
}

fn append_f16(values: &[f32], out: &mut Vec<u8>) -> bool {
    let mut rounded = [f16::ZERO; CHUNK];
    let rounded = &mut rounded[..values.len()];
    rounded.convert_from_f32_slice(values);
    append_bytes(rounded, out, |value| value.to_le_bytes());
    rounded.iter().fold(true, |finite, value| finite & value.is_finite())
}

fn append_bf16(values: &[f32], out: &mut Vec<u8>) -> bool {
    let mut rounded = [bf16::ZERO; CHUNK];
    let rounded = &mut rounded[..values.len()];
    rounded.convert_from_f32_slice(values);
    append_bytes(rounded, out, |value| value.to_le_bytes());
    rounded.iter().fold(true, |finite, value| finite & value.is_finite())
}

fn append_bytes<T: Copy, const WIDTH: usize>(values: &[T], out: &mut Vec<u8>, bytes: impl Fn(T) -> [u8; WIDTH]) {
    let start = out.len();
    out.resize(start + values.len() * WIDTH, 0);
    for (target, value) in out[start..].as_chunks_mut().0.iter_mut().zip(values) {
        *target = bytes(*value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn appended(to: FloatType, values: &[f64]) -> Vec<u16> {
        let mut bytes = Vec::new();
        to.append_f64(values, &mut bytes).unwrap();
        bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
    }

    #[test]
    fn ties_go_to_even_and_are_seen_once() {
        let ulp = 2f64.powi(-8) * 2.0;
        let tie = 1.0 + ulp / 2.0;
        let just_above = tie + 2f64.powi(-40);
        let next_tie = 1.0 + 1.5 * ulp;
        assert_eq!(appended(FloatType::Bf16, &[1.0, tie, just_above, next_tie]), [0x3f80, 0x3f80, 0x3f81, 0x3f82]);
        let ulp = 2f64.powi(-10);
        let tie = 1.0 + ulp / 2.0;
        assert_eq!(appended(FloatType::F16, &[tie, tie + 2f64.powi(-40), -tie]), [0x3c00, 0x3c01, 0xbc00]);
        let smallest = 2f64.powi(-24);
        let values = [smallest, smallest / 2.0, smallest / 2.0 * (1.0 + 2f64.powi(-45)), 0.0, -0.0];
        assert_eq!(appended(FloatType::F16, &values), [1, 0, 1, 0, 0x8000]);
    }

    #[test]
    fn every_value_of_the_type_stays_itself() {
        for bits in 0..=u16::MAX {
            for (to, value) in
                [(FloatType::F16, f16::from_bits(bits).to_f64()), (FloatType::Bf16, bf16::from_bits(bits).to_f64())]
            {
                if value.is_finite() {
                    assert_eq!(appended(to, &[value]), [bits], "{to} {value}");
                }
            }
        }
    }

    #[test]
    fn what_overflows_is_named() {
        let mut values = vec![1.0; CHUNK + 7];
        for (to, fits, value) in [
            (FloatType::F16, 65519.996, 65520.0),
            (FloatType::Bf16, 3.3961e38, 3.3962e38),
            (FloatType::F32, f32::MAX, f32::INFINITY),
            (FloatType::F16, -1.0, f32::NAN),
        ] {
            values[CHUNK + 3] = fits;
            to.append(&values, &mut Vec::new()).unwrap();
            values[CHUNK + 3] = value;
            let fault = to.append(&values, &mut Vec::new()).unwrap_err();
            assert_eq!(fault.index, CHUNK + 3, "{to}");
            assert!(fault.value == f64::from(value) || value.is_nan());
        }
        let fault = FloatType::F32.append_f64(&[0.0, 1e39], &mut Vec::new()).unwrap_err();
        assert_eq!(fault, OutOfRange { index: 1, value: 1e39 });
    }
}
