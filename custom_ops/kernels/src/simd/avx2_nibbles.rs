//! Microkernels of quantized rows times int4, by AVX2, and rounding in vectors of 8 lanes.
//!
//! int8 has none: its products are words that are soon full, and so take as long as those of f32.

use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T0, _mm_add_epi32, _mm_cvtsi128_si32, _mm_loadu_si128, _mm_max_epu32, _mm_prefetch,
    _mm_shuffle_epi32, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_ps, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cvtepi32_ps,
    _mm256_cvtps_epi32, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_max_epu32, _mm256_mul_ps, _mm256_packs_epi16, _mm256_packs_epi32,
    _mm256_permutevar8x32_epi32, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setr_epi32, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_slli_epi32, _mm256_sllv_epi32,
    _mm256_srli_epi16, _mm256_storeu_si256, _mm256_sub_epi32, _mm256_xor_si256,
};

use moa_schema::BLOCK;

use super::avx2::{Fetches, WIDTH, finish, first_terms, through_lanes};
use super::element::UPPER;
use super::nibbles::scale_shift;
use super::product::{Kernel, LINE, PAGE, Raw, STEPS};
use super::quantized::{HEAD, Integers, QUAD, QUANTIZED_ROWS, WORDS, lines_of_block, scales};
use super::{Element, LANES, Nibbles, PANEL};

/// Vectors of a panel.
const ALL: usize = PANEL / WIDTH;

/// The microkernel for `rows` rows and `vectors` vectors of 16 columns of one panel. Few rows take all of a panel at
/// once, as it comes from memory; more take one vector after the other, so that all their sums stay in registers.
pub(super) fn kernel(rows: usize, vectors: usize) -> Kernel<Nibbles> {
    match (rows, vectors) {
        (1, 2) => block::<1, ALL>,
        (1, _) => block::<1, 1>,
        (2, 2) => block::<2, ALL>,
        (2, _) => block::<2, 1>,
        (3, _) => block::<3, 1>,
        (4, _) => block::<4, 1>,
        (5, _) => block::<5, 1>,
        (6, _) => block::<6, 1>,
        (7, _) => block::<7, 1>,
        _ => block::<QUANTIZED_ROWS, 1>,
    }
}

/// `M` rows, all there are, times any number of columns.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds; the processor must have AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<const M: usize, const V: usize>(raw: &Raw<Nibbles>) {
    // SAFETY: by the caller's promise.
    unsafe {
        match raw.columns.is_multiple_of(V * WIDTH) {
            true => pieces::<M, V>(raw),
            false => through_lanes(raw, pieces::<M, V>),
        }
    }
}

/// As [`block`], `V` vectors at a time; whole ones are written.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pieces<const M: usize, const V: usize>(raw: &Raw<Nibbles>) {
    let pieces = raw.columns.div_ceil(V * WIDTH);
    for index in 0..pieces {
        // SAFETY: by the caller's promise.
        unsafe { piece::<M, V>(raw, index * V * WIDTH, Fetches::share(&raw.fetch, [index, pieces], index == 0)) };
    }
}

/// `M` rows, all there are, times `V` vectors from `column` on; whole vectors are written.
///
/// # Safety
///
/// As [`block`], where every destination holds the vectors.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn piece<const M: usize, const V: usize>(raw: &Raw<Nibbles>, column: usize, mut fetches: Fetches) {
    let mut left: [*const f32; M] = std::array::from_fn(|row| raw.left[row]);
    let out: [*mut f32; M] = std::array::from_fn(|row| raw.out[row].wrapping_add(raw.first + column));
    let right = raw.right.wrapping_add(column);
    // SAFETY: every pointer is in bounds by the caller's promise.
    unsafe {
        let mut sums = first_terms::<Nibbles, M, V>(raw, 0, &out);
        for step in (0..raw.inner).step_by(BLOCK) {
            fetch(&mut fetches, raw.right, step);
            let terms = block_terms::<M, V>(&left, right, step);
            let scales = block_scales::<V>(right, step);
            for ((sums, terms), left) in sums.iter_mut().zip(terms).zip(&mut left) {
                let of_row = _mm256_set1_ps(**left);
                for ((sum, terms), scales) in sums.iter_mut().zip(terms).zip(scales) {
                    *sum = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(terms), of_row), scales, *sum);
                }
                *left = left.wrapping_add(raw.blocks);
            }
        }
        finish(raw, 0, column, &out, sums);
    }
}

/// Fetches what belongs to the block of step `step`: of its own panel the same block a page later.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fetch(fetches: &mut Fetches, right: *const Nibbles, step: usize) {
    if fetches.own {
        let lines = const { lines_of_block::<Nibbles>() };
        let block = right.cast::<i8>().wrapping_add(step / BLOCK * lines * LINE + PAGE);
        (0..lines).for_each(|line| _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(line * LINE)));
        return;
    }
    (0..BLOCK / STEPS).for_each(|_| fetches.take_line());
}

/// The sums of the products of the block of inner step `step`. Weights are taken 8 up, so that they have no sign, and
/// what that adds is taken off. A word holds what is summed in it: 16 products of 15 and 127 at most.
///
/// # Safety
///
/// As [`piece`], for a block of every row and the vectors from `right` on.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn block_terms<const M: usize, const V: usize>(
    left: &[*const f32; M],
    right: *const Nibbles,
    step: usize,
) -> [[__m256i; V]; M] {
    let mut words = [[_mm256_setzero_si256(); V]; M];
    let (low, up) = (_mm256_set1_epi8(15), _mm256_set1_epi8(8));
    let rows = right.wrapping_add(Nibbles::group(step, PANEL) + Nibbles::row(step) * PANEL);
    // SAFETY: by the caller's promise.
    unsafe {
        for row in 0..BLOCK / Nibbles::EACH {
            let mut weights = [[_mm256_setzero_si256(); 2]; V];
            for (vector, weights) in weights.iter_mut().enumerate() {
                let eight = _mm256_loadu_si256(rows.wrapping_add(row * PANEL + vector * WIDTH).cast());
                let halves = [eight, _mm256_srli_epi16::<4>(eight)];
                *weights = halves.map(|half| _mm256_xor_si256(_mm256_and_si256(half, low), up));
            }
            for (words, left) in words.iter_mut().zip(left) {
                let quads = left.add(HEAD + row * Nibbles::EACH / QUAD).cast::<i32>();
                for odd in 0..2 {
                    let integers = _mm256_set1_epi32(quads.add(odd).read());
                    for (words, weights) in words.iter_mut().zip(&weights) {
                        *words = _mm256_add_epi16(*words, _mm256_maddubs_epi16(weights[odd], integers));
                    }
                }
            }
        }
        let mut terms = [[_mm256_setzero_si256(); V]; M];
        for ((terms, words), left) in terms.iter_mut().zip(words).zip(left) {
            let sum = _mm256_set1_epi32(left.add(1).cast::<i32>().read());
            let raised = _mm256_slli_epi32::<{ Nibbles::UP as i32 }>(sum);
            for (terms, words) in terms.iter_mut().zip(words) {
                *terms = _mm256_sub_epi32(_mm256_madd_epi16(words, _mm256_set1_epi16(1)), raised);
            }
        }
        terms
    }
}

/// What the sums of the block of inner step `step` are scaled by.
///
/// # Safety
///
/// As [`block_terms`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn block_scales<const V: usize>(from: *const Nibbles, step: usize) -> [__m256; V] {
    let row = from.wrapping_add(Nibbles::group(step, PANEL));
    let mut scales = [_mm256_set1_ps(0.0); V];
    for (vector, scales) in scales.iter_mut().enumerate() {
        // SAFETY: by the caller's promise.
        let both = unsafe { _mm256_loadu_si256(row.wrapping_add(vector * WIDTH).cast()) };
        let scale = _mm256_sllv_epi32(both, _mm256_set1_epi32(scale_shift(step)));
        *scales = _mm256_castsi256_ps(_mm256_and_si256(scale, _mm256_set1_epi32(UPPER)));
    }
    scales
}

/// Rounds each block to int8 in vectors of 8 lanes, of which `steps` are those of each half of a block.
#[target_feature(enable = "avx2")]
pub(super) fn quantize8<'a>(steps: [u8; LANES], blocks: impl Iterator<Item = ([f32; BLOCK], &'a mut [f32; WORDS])>) {
    // SAFETY: a vector of 16 bytes is read.
    let steps = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(steps.as_ptr().cast()) });
    let no_sign = _mm256_set1_ps(f32::from_bits(i32::MAX.cast_unsigned()));
    // Packed vectors stand in turns of four integers.
    let turns = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (values, out) in blocks {
        // SAFETY: four vectors are read.
        let values = [0, 8, 16, 24].map(|first| unsafe { _mm256_loadu_ps(values[first..].as_ptr()) });
        let [a, b, c, d] = values.map(|values| _mm256_castps_si256(_mm256_and_ps(values, no_sign)));
        let [scale, inverse] = scales(largest(_mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d))));
        if scale.is_nan() {
            out.fill(0.0);
            out[0] = scale;
            continue;
        }
        let inverse = _mm256_set1_ps(inverse);
        let [a, b, c, d] = values.map(|values| _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse)));
        let words = [_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)];
        let ones = _mm256_set1_epi16(1);
        let [low, high] = words.map(|words| _mm256_madd_epi16(words, ones));
        out[..HEAD].copy_from_slice(&[scale, f32::from_bits(sum(_mm256_add_epi32(low, high)).cast_unsigned())]);
        let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), turns);
        // SAFETY: a vector of 32 bytes is written, as many as a block has.
        unsafe { _mm256_storeu_si256(out[HEAD..].as_mut_ptr().cast(), _mm256_shuffle_epi8(bytes, steps)) };
    }
}

/// The largest of 8 lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn largest(lanes: __m256i) -> u32 {
    let four = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
    let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b_01_00_11_10>(four));
    _mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32::<0b_10_11_00_01>(two))).cast_unsigned()
}

/// The sum of 8 lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn sum(lanes: __m256i) -> i32 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b_01_00_11_10>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b_10_11_00_01>(two)))
}
