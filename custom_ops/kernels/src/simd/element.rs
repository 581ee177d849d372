//! Weights as they are packed, and as f32.
//!
//! Widening is exact, so a product with stored weights has the bits of the product with the same weights as f32. An
//! int8 is widened to the f32 of its value: what it is scaled by is no matter of elements.
#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::{
    float32x4_t, uint32x4_t, vandq_u32, vcreate_s8, vcvt_f32_f16, vcvtq_f32_s32, vdupq_n_u32, vget_low_s16, vld1_u16,
    vld1q_f32, vld1q_u32, vmovl_s8, vmovl_s16, vreinterpret_f16_u16, vreinterpretq_f32_u32, vreinterpretq_s32_u32,
    vreinterpretq_u32_f32, vreinterpretq_u32_s32, vshlq_n_u32,
};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512i, _mm_loadl_epi64, _mm_loadu_si128, _mm256_and_si256, _mm256_castps_si256,
    _mm256_castsi256_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtph_ps, _mm256_loadu_si256,
    _mm256_set1_epi32, _mm256_slli_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_si512, _mm512_set1_epi32,
    _mm512_slli_epi32,
};

#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use half::{bf16, f16};

use super::portable::multiply_add;
use super::product::Kernel;
use super::{Isa, quantized};

/// The bits of an f32 that are a bf16.
pub(super) const UPPER: i32 = 0xffff_0000_u32.cast_signed();

/// An element of packed weights: one or more inner steps of one column, or a part of these.
///
/// A panel is groups of [`Element::ROWS`] rows of [`PANEL`](super::PANEL) elements. Where there is more than one row in
/// a group, they follow each other without a gap.
pub(crate) trait Element: Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// Inner steps of a group.
    const STEPS: usize;

    /// Rows of elements of a group.
    const ROWS: usize = 1;

    /// Inner steps of one element, which a row of them holds.
    const EACH: usize = Self::STEPS;

    /// bf16 parts that add up to any value.
    const PARTS: usize;

    /// Whether rows are multiplied with such elements by AVX512_BF16 alone, and else in plain arithmetic.
    const IS_PAIR: bool = false;

    /// Inner step `step` of one column.
    ///
    /// # Safety
    ///
    /// The elements of the column must be readable in every row of the group, the first of which is at `from`.
    unsafe fn load(from: *const Self, step: usize) -> f32;

    /// `sum`, and the product of a value of the left factor with what [`Element::load`] gives.
    fn multiply_add(value: f32, lane: f32, sum: f32) -> f32 {
        multiply_add(value, lane, sum)
    }

    /// The values where they are f32.
    fn direct(_: &[Self]) -> Option<&[f32]> {
        None
    }

    /// The values where they stand as AMX tiles take them: pairs of inner steps in bf16.
    fn pairs(_: &[Self]) -> Option<&[bf16]> {
        None
    }

    /// The values where they are integers, each of them a bf16.
    fn integers(_: &[Self]) -> Option<&[i8]> {
        None
    }

    /// The microkernel for quantized rows, where elements are integers.
    fn quantized_kernel(_isa: Isa, _rows: usize, _vectors: usize) -> Option<Kernel<Self>> {
        None
    }

    /// 16 columns in registers, from inner step `step` on as far as the same elements hold them.
    ///
    /// # Safety
    ///
    /// 16 elements must be readable in every row of the group, the first of which is at `from`; the processor must have
    /// AVX-512 F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn row16(from: *const Self, step: usize) -> [__m512i; 2];

    /// The next inner step of 16 columns.
    ///
    /// # Safety
    ///
    /// The processor must have AVX-512 F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn next16(row: &mut [__m512i; 2]) -> __m512;

    /// Inner step `step` of 16 columns.
    ///
    /// # Safety
    ///
    /// As [`Element::row16`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load16(from: *const Self, step: usize) -> __m512 {
        // SAFETY: by the caller's promise.
        unsafe { Self::next16(&mut Self::row16(from, step)) }
    }

    /// `sum`, and the products of `value`, a value of the left factor in every lane, with a step of 16 columns.
    ///
    /// # Safety
    ///
    /// The processor must have AVX-512 F, and AVX512_BF16 where [`Element::IS_PAIR`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn multiply_add16(value: __m512, lanes: __m512, sum: __m512) -> __m512 {
        _mm512_fmadd_ps(value, lanes, sum)
    }

    /// 8 columns in registers, from inner step `step` on as far as the same elements hold them.
    ///
    /// # Safety
    ///
    /// 8 elements must be readable in every row of the group, the first of which is at `from`; the processor must have
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn row8(from: *const Self, step: usize) -> [__m256i; 2];

    /// The next inner step of 8 columns.
    ///
    /// # Safety
    ///
    /// The processor must have AVX2.
    #[cfg(target_arch = "x86_64")]
    unsafe fn next8(row: &mut [__m256i; 2]) -> __m256;

    /// Inner step `step` of 8 columns.
    ///
    /// # Safety
    ///
    /// As [`Element::row8`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn load8(from: *const Self, step: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe { Self::next8(&mut Self::row8(from, step)) }
    }

    /// 4 columns in registers, from inner step `step` on as far as the same elements hold them.
    ///
    /// # Safety
    ///
    /// 4 elements must be readable in every row of the group, the first of which is at `from`; the processor must have
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    unsafe fn row4(from: *const Self, step: usize) -> [uint32x4_t; 2];

    /// The next inner step of 4 columns.
    ///
    /// # Safety
    ///
    /// The processor must have NEON.
    #[cfg(target_arch = "aarch64")]
    unsafe fn next4(row: &mut [uint32x4_t; 2]) -> float32x4_t;

    /// Inner step `step` of 4 columns.
    ///
    /// # Safety
    ///
    /// As [`Element::row4`].
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn load4(from: *const Self, step: usize) -> float32x4_t {
        // SAFETY: by the caller's promise.
        unsafe { Self::next4(&mut Self::row4(from, step)) }
    }

    /// Rows of elements that `inner` steps take.
    fn rows(inner: usize) -> usize {
        inner.div_ceil(Self::STEPS) * Self::ROWS
    }

    /// Elements to the group of inner step `step`, where rows are `stride` apart.
    fn group(step: usize, stride: usize) -> usize {
        step / Self::STEPS * Self::ROWS * stride
    }

    /// Elements to the group of the next inner step after `step`, where rows are `stride` apart.
    fn passed(step: usize, stride: usize) -> usize {
        if step % Self::STEPS + 1 == Self::STEPS { Self::ROWS * stride } else { 0 }
    }

    /// Rows of a group of which inner step `step` is the first to read.
    #[cfg(target_arch = "x86_64")]
    fn begun(step: usize) -> Range<usize> {
        if step.is_multiple_of(Self::STEPS) { 0..1 } else { 0..0 }
    }
}

impl Element for f32 {
    const STEPS: usize = 1;

    const PARTS: usize = 3;

    unsafe fn load(from: *const Self, _: usize) -> f32 {
        // SAFETY: by the caller's promise.
        unsafe { *from }
    }

    fn direct(values: &[Self]) -> Option<&[f32]> {
        Some(values)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn row16(from: *const Self, _: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise.
        unsafe { [_mm512_loadu_si512(from.cast()); 2] }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn next16([row, _]: &mut [__m512i; 2]) -> __m512 {
        _mm512_castsi512_ps(*row)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn row8(from: *const Self, _: usize) -> [__m256i; 2] {
        // SAFETY: by the caller's promise.
        unsafe { [_mm256_loadu_si256(from.cast()); 2] }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn next8([row, _]: &mut [__m256i; 2]) -> __m256 {
        _mm256_castsi256_ps(*row)
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn row4(from: *const Self, _: usize) -> [uint32x4_t; 2] {
        // SAFETY: by the caller's promise.
        [vreinterpretq_u32_f32(unsafe { vld1q_f32(from) }); 2]
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn next4([row, _]: &mut [uint32x4_t; 2]) -> float32x4_t {
        vreinterpretq_f32_u32(*row)
    }
}

/// Two inner steps of a column side by side: an instruction widens either of them for a whole vector, and AMX tiles
/// take them as they stand.
impl Element for [bf16; 2] {
    const STEPS: usize = 2;

    const PARTS: usize = 1;

    unsafe fn load(from: *const Self, step: usize) -> f32 {
        // SAFETY: by the caller's promise.
        f32::from_bits(u32::from(unsafe { *from }[step % 2].to_bits()) << 16)
    }

    fn pairs(values: &[Self]) -> Option<&[bf16]> {
        Some(values.as_flattened())
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn row16(from: *const Self, step: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise; a bf16 is the upper half of an f32.
        let both = unsafe { _mm512_loadu_si512(from.cast()) };
        let second = _mm512_and_si512(both, _mm512_set1_epi32(UPPER));
        [if step.is_multiple_of(2) { _mm512_slli_epi32::<16>(both) } else { second }, second]
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn next16(row: &mut [__m512i; 2]) -> __m512 {
        let [first, second] = *row;
        *row = [second; 2];
        _mm512_castsi512_ps(first)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn row8(from: *const Self, step: usize) -> [__m256i; 2] {
        // SAFETY: by the caller's promise.
        let both = unsafe { _mm256_loadu_si256(from.cast()) };
        let second = _mm256_and_si256(both, _mm256_set1_epi32(UPPER));
        [if step.is_multiple_of(2) { _mm256_slli_epi32::<16>(both) } else { second }, second]
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn next8(row: &mut [__m256i; 2]) -> __m256 {
        let [first, second] = *row;
        *row = [second; 2];
        _mm256_castsi256_ps(first)
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn row4(from: *const Self, step: usize) -> [uint32x4_t; 2] {
        // SAFETY: by the caller's promise; a bf16 is the upper half of an f32.
        let both = unsafe { vld1q_u32(from.cast()) };
        let second = vandq_u32(both, vdupq_n_u32(UPPER.cast_unsigned()));
        [if step.is_multiple_of(2) { vshlq_n_u32::<16>(both) } else { second }, second]
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn next4(row: &mut [uint32x4_t; 2]) -> float32x4_t {
        let [first, second] = *row;
        *row = [second; 2];
        vreinterpretq_f32_u32(first)
    }
}

impl Element for f16 {
    const STEPS: usize = 1;

    const PARTS: usize = 2;

    unsafe fn load(from: *const Self, _: usize) -> f32 {
        // SAFETY: by the caller's promise.
        unsafe { *from }.to_f32()
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn row16(from: *const Self, _: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise.
        [_mm512_castps_si512(_mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })); 2]
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn next16([row, _]: &mut [__m512i; 2]) -> __m512 {
        _mm512_castsi512_ps(*row)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn row8(from: *const Self, _: usize) -> [__m256i; 2] {
        // SAFETY: by the caller's promise.
        [_mm256_castps_si256(_mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.cast()) })); 2]
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn next8([row, _]: &mut [__m256i; 2]) -> __m256 {
        _mm256_castsi256_ps(*row)
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn row4(from: *const Self, _: usize) -> [uint32x4_t; 2] {
        // SAFETY: by the caller's promise.
        let halves = unsafe { vld1_u16(from.cast()) };
        [vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves))); 2]
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn next4([row, _]: &mut [uint32x4_t; 2]) -> float32x4_t {
        vreinterpretq_f32_u32(*row)
    }
}

/// int8, which the scales of their columns make weights of once they are multiplied and summed.
impl Element for i8 {
    const STEPS: usize = 1;

    const PARTS: usize = 1;

    unsafe fn load(from: *const Self, _: usize) -> f32 {
        // SAFETY: by the caller's promise.
        unsafe { *from }.into()
    }

    fn integers(values: &[Self]) -> Option<&[i8]> {
        Some(values)
    }

    fn quantized_kernel(isa: Isa, rows: usize, vectors: usize) -> Option<Kernel<Self>> {
        Some(quantized::kernel(isa, rows, vectors))
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn row16(from: *const Self, _: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise.
        [_mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(from.cast()) }); 2]
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn next16([row, _]: &mut [__m512i; 2]) -> __m512 {
        _mm512_cvtepi32_ps(*row)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn row8(from: *const Self, _: usize) -> [__m256i; 2] {
        // SAFETY: by the caller's promise.
        [_mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(from.cast()) }); 2]
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn next8([row, _]: &mut [__m256i; 2]) -> __m256 {
        _mm256_cvtepi32_ps(*row)
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn row4(from: *const Self, _: usize) -> [uint32x4_t; 2] {
        // SAFETY: by the caller's promise; the four bytes are read at any alignment.
        let bytes = vcreate_s8(u64::from(unsafe { from.cast::<u32>().read_unaligned() }));
        [vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes)))); 2]
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn next4([row, _]: &mut [uint32x4_t; 2]) -> float32x4_t {
        vcvtq_f32_s32(vreinterpretq_s32_u32(*row))
    }
}
