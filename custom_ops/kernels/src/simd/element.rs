//! Numbers as weights are stored, widened to f32 in registers.
//!
//! Widening is exact, so a product with stored weights has the bits of the product with the same weights as f32.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m512, _mm_loadu_si128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_slli_epi32, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps,
    _mm512_loadu_ps, _mm512_slli_epi32,
};

use half::{bf16, f16};

/// An element of a weight.
pub(crate) trait Element: Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// bf16 parts that add up to any value.
    const PARTS: usize;

    /// The same value.
    fn widen(self) -> f32;

    /// The values where they are f32.
    fn direct(values: &[Self]) -> Option<&[f32]>;

    /// Whether two elements have the same bits.
    fn same_bits(self, other: Self) -> bool;

    /// 16 values.
    ///
    /// # Safety
    ///
    /// 16 elements must be readable at `from`; the processor must have AVX-512 F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load16(from: *const Self) -> __m512;

    /// 8 values.
    ///
    /// # Safety
    ///
    /// 8 elements must be readable at `from`; the processor must have AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load8(from: *const Self) -> __m256;
}

impl Element for f32 {
    const PARTS: usize = 3;

    fn widen(self) -> f32 {
        self
    }

    fn direct(values: &[Self]) -> Option<&[f32]> {
        Some(values)
    }

    fn same_bits(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load16(from: *const Self) -> __m512 {
        // SAFETY: by the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load8(from: *const Self) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }
}

impl Element for bf16 {
    const PARTS: usize = 1;

    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn direct(_: &[Self]) -> Option<&[f32]> {
        None
    }

    fn same_bits(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load16(from: *const Self) -> __m512 {
        // SAFETY: by the caller's promise; a bf16 is the upper half of an f32.
        let half = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load8(from: *const Self) -> __m256 {
        // SAFETY: as above.
        let half = unsafe { _mm_loadu_si128(from.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
    }
}

impl Element for f16 {
    const PARTS: usize = 2;

    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn direct(_: &[Self]) -> Option<&[f32]> {
        None
    }

    fn same_bits(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load16(from: *const Self) -> __m512 {
        // SAFETY: by the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load8(from: *const Self) -> __m256 {
        // SAFETY: by the caller's promise.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.cast()) })
    }
}
