//! Weights as they are packed, and as f32.
//!
//! Widening is exact, so a product with stored weights has the bits of the product with the same weights as f32. An
//! integer is widened to the f32 of its value: what it is scaled by is no matter of elements.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m512, _mm_loadl_epi64, _mm_loadu_si128, _mm256_and_si256, _mm256_castsi256_ps, _mm256_cvtepi8_epi32,
    _mm256_cvtepi32_ps, _mm256_cvtph_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_slli_epi32,
    _mm512_and_si512, _mm512_castsi512_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_set1_epi32, _mm512_slli_epi32,
};

use half::{bf16, f16};

/// The bits of an f32 that are a bf16.
#[cfg(target_arch = "x86_64")]
const UPPER: i32 = 0xffff_0000_u32.cast_signed();

/// An element of packed weights: one or more inner steps of one column.
pub(crate) trait Element: Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// A weight as it is stored.
    type Stored: Copy + Send + Sync;

    /// Inner steps of an element.
    const STEPS: usize;

    /// bf16 parts that add up to any value.
    const PARTS: usize;

    /// Sets the first elements to one column each of the rows, which are [`Element::STEPS`], or fewer at the end.
    fn pack(rows: &[&[Self::Stored]], out: &mut [Self]);

    /// Whether the first elements hold these rows, bit by bit.
    fn holds(elements: &[Self], rows: &[&[Self::Stored]]) -> bool;

    /// The value of inner step `step` of the element.
    fn widen(self, step: usize) -> f32;

    /// The values where they are f32.
    fn direct(values: &[Self]) -> Option<&[f32]>;

    /// The values where they stand as AMX tiles take them: pairs of inner steps in bf16.
    fn pairs(values: &[Self]) -> Option<&[bf16]>;

    /// The values where they are integers, each of them a bf16.
    fn integers(_: &[Self]) -> Option<&[i8]> {
        None
    }

    /// Inner step `step` of 16 elements.
    ///
    /// # Safety
    ///
    /// 16 elements must be readable at `from`; the processor must have AVX-512 F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load16(from: *const Self, step: usize) -> __m512;

    /// Inner step `step` of 8 elements.
    ///
    /// # Safety
    ///
    /// 8 elements must be readable at `from`; the processor must have AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load8(from: *const Self, step: usize) -> __m256;

    /// Rows of elements that `inner` steps take.
    fn rows(inner: usize) -> usize {
        inner.div_ceil(Self::STEPS)
    }

    /// Elements to the row of the next inner step after `step`, where rows are `stride` apart.
    fn passed(step: usize, stride: usize) -> usize {
        if step % Self::STEPS + 1 == Self::STEPS { stride } else { 0 }
    }
}

/// [`Element::pack`] and [`Element::holds`] where an element is a weight.
macro_rules! weight_alone {
    () => {
        type Stored = Self;

        const STEPS: usize = 1;

        fn pack(rows: &[&[Self]], out: &mut [Self]) {
            rows.iter().for_each(|row| out[..row.len()].copy_from_slice(row));
        }

        fn holds(elements: &[Self], rows: &[&[Self]]) -> bool {
            rows.iter().all(|row| elements.iter().zip(*row).all(|(a, b)| a.to_bits() == b.to_bits()))
        }

        fn pairs(_: &[Self]) -> Option<&[bf16]> {
            None
        }
    };
}

impl Element for f32 {
    weight_alone!();

    const PARTS: usize = 3;

    fn widen(self, _: usize) -> f32 {
        self
    }

    fn direct(values: &[Self]) -> Option<&[f32]> {
        Some(values)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load16(from: *const Self, _: usize) -> __m512 {
        // SAFETY: by the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load8(from: *const Self, _: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }
}

/// Two inner steps of a column side by side: an instruction widens either of them for a whole vector, and AMX tiles
/// take them as they stand.
impl Element for [bf16; 2] {
    type Stored = bf16;

    const STEPS: usize = 2;

    const PARTS: usize = 1;

    fn pack(rows: &[&[bf16]], out: &mut [Self]) {
        match rows {
            [even, odd] => out.iter_mut().zip(*even).zip(*odd).for_each(|((out, even), odd)| *out = [*even, *odd]),
            [even] => out.iter_mut().zip(*even).for_each(|(out, even)| *out = [*even, bf16::ZERO]),
            _ => {}
        }
    }

    fn holds(elements: &[Self], rows: &[&[bf16]]) -> bool {
        rows.iter().enumerate().all(|(step, row)| {
            elements.iter().zip(*row).all(|(element, value)| element[step].to_bits() == value.to_bits())
        })
    }

    fn widen(self, step: usize) -> f32 {
        f32::from_bits(u32::from(self[step % 2].to_bits()) << 16)
    }

    fn direct(_: &[Self]) -> Option<&[f32]> {
        None
    }

    fn pairs(values: &[Self]) -> Option<&[bf16]> {
        Some(values.as_flattened())
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load16(from: *const Self, step: usize) -> __m512 {
        // SAFETY: by the caller's promise; a bf16 is the upper half of an f32.
        let both = unsafe { _mm512_loadu_si512(from.cast()) };
        _mm512_castsi512_ps(match step % 2 {
            0 => _mm512_slli_epi32::<16>(both),
            _ => _mm512_and_si512(both, _mm512_set1_epi32(UPPER)),
        })
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load8(from: *const Self, step: usize) -> __m256 {
        // SAFETY: as above.
        let both = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm256_castsi256_ps(match step % 2 {
            0 => _mm256_slli_epi32::<16>(both),
            _ => _mm256_and_si256(both, _mm256_set1_epi32(UPPER)),
        })
    }
}

impl Element for f16 {
    weight_alone!();

    const PARTS: usize = 2;

    fn widen(self, _: usize) -> f32 {
        self.to_f32()
    }

    fn direct(_: &[Self]) -> Option<&[f32]> {
        None
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load16(from: *const Self, _: usize) -> __m512 {
        // SAFETY: by the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load8(from: *const Self, _: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.cast()) })
    }
}

/// Integers, which the scales of their columns make weights of once they are multiplied and summed.
impl Element for i8 {
    type Stored = Self;

    const STEPS: usize = 1;

    const PARTS: usize = 1;

    fn pack(rows: &[&[Self]], out: &mut [Self]) {
        rows.iter().for_each(|row| out[..row.len()].copy_from_slice(row));
    }

    fn holds(elements: &[Self], rows: &[&[Self]]) -> bool {
        rows.iter().all(|row| elements.starts_with(row))
    }

    fn widen(self, _: usize) -> f32 {
        self.into()
    }

    fn direct(_: &[Self]) -> Option<&[f32]> {
        None
    }

    fn pairs(_: &[Self]) -> Option<&[bf16]> {
        None
    }

    fn integers(values: &[Self]) -> Option<&[i8]> {
        Some(values)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load16(from: *const Self, _: usize) -> __m512 {
        // SAFETY: by the caller's promise.
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(from.cast()) }))
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load8(from: *const Self, _: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(from.cast()) }))
    }
}
