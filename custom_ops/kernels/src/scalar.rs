//! Activations as they are stored outside the kernels, which compute in f32.

use half::{f16, slice::HalfFloatSliceExt};

use crate::simd::copy_past_caches;

/// A float of the tensors that go in and out: f32 is mostly read and written where it stands; f16 is widened on entry
/// and rounded once on exit.
pub trait Scalar: Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// The values where they are f32.
    fn direct(values: &[Self]) -> Option<&[f32]>;

    /// The values as they are stored.
    fn stored<const N: usize>(values: [&[Self]; N]) -> Stored<'_, N>;

    /// The values where they are f32, else as they were.
    ///
    /// # Errors
    ///
    /// The values, where they are not f32.
    fn direct_mut(values: &mut [Self]) -> Result<&mut [f32], &mut [Self]>;

    /// Copies values that nothing reads soon, past the processor's caches; both slices are equally long.
    fn copy_past_caches(values: &[Self], out: &mut [Self]);

    /// Writes the values as f32, exactly; both slices are equally long.
    fn widen(values: &[Self], out: &mut [f32]);

    /// Writes f32 values, rounded to nearest, ties to even; both slices are equally long.
    fn round(values: &[f32], out: &mut [Self]);

    /// Replaces values by what [`Scalar::round`] keeps of them.
    fn round_in_place(values: &mut [f32]);
}

/// Some slices of one type of [`Scalar`].
#[derive(Debug, Clone, Copy)]
pub enum Stored<'a, const N: usize> {
    /// Of f32.
    F32([&'a [f32]; N]),
    /// Of f16.
    F16([&'a [f16]; N]),
}

impl Scalar for f32 {
    fn direct(values: &[Self]) -> Option<&[f32]> {
        Some(values)
    }

    fn stored<const N: usize>(values: [&[Self]; N]) -> Stored<'_, N> {
        Stored::F32(values)
    }

    fn direct_mut(values: &mut [Self]) -> Result<&mut [f32], &mut [Self]> {
        Ok(values)
    }

    fn copy_past_caches(values: &[Self], out: &mut [Self]) {
        copy_past_caches(values, out);
    }

    fn widen(values: &[Self], out: &mut [f32]) {
        out.copy_from_slice(values);
    }

    fn round(values: &[f32], out: &mut [Self]) {
        out.copy_from_slice(values);
    }

    fn round_in_place(_: &mut [f32]) {}
}

impl Scalar for f16 {
    fn direct(_: &[Self]) -> Option<&[f32]> {
        None
    }

    fn stored<const N: usize>(values: [&[Self]; N]) -> Stored<'_, N> {
        Stored::F16(values)
    }

    fn direct_mut(values: &mut [Self]) -> Result<&mut [f32], &mut [Self]> {
        Err(values)
    }

    fn copy_past_caches(values: &[Self], out: &mut [Self]) {
        copy_past_caches(values, out);
    }

    fn widen(values: &[Self], out: &mut [f32]) {
        values.convert_to_f32_slice(out);
    }

    fn round(values: &[f32], out: &mut [Self]) {
        out.convert_from_f32_slice(values);
    }

    fn round_in_place(values: &mut [f32]) {
        let mut rounded = [Self::default(); 64];
        for values in values.chunks_mut(rounded.len()) {
            let rounded = &mut rounded[..values.len()];
            rounded.convert_from_f32_slice(values);
            rounded.convert_to_f32_slice(values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(all(miri, target_feature = "f16c"), ignore = "Miri cannot round to f16 with F16C")]
    fn halves_round_to_nearest_even_and_come_back_exactly() {
        let mut values: Vec<f32> = vec![1.0, 1.0 + 2f32.powi(-11), 1.0 + 3.0 * 2f32.powi(-11), -65519.0, 65520.0, 4e-8];
        values.extend((0..100).map(|i| (i as f32 * 0.37).sin()));
        let (mut stored, mut back) = (vec![f16::default(); values.len()], vec![0.0; values.len()]);
        f16::round(&values, &mut stored);
        f16::widen(&stored, &mut back);
        let smallest = 2f32.powi(-24);
        assert_eq!(back[..6], [1.0, 1.0, 1.0 + 2f32.powi(-9), -65504.0, f32::INFINITY, smallest]);
        f16::round_in_place(&mut values);
        assert_eq!(values, back);
        assert!(f16::direct(&stored).is_none() && f32::direct(&back).is_some());
        assert!(matches!(f16::stored([&stored]), Stored::F16([values]) if values == stored));
        assert!(matches!(f32::stored([&back]), Stored::F32([values]) if values == back));
    }
}
