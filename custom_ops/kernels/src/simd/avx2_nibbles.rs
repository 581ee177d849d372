//! Quantized rows times int4 in vectors of 8 lanes, see `avx2_integers`.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_add_epi16, _mm256_and_si256, _mm256_castsi256_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_si256,
    _mm256_slli_epi32, _mm256_sllv_epi32, _mm256_srli_epi16, _mm256_srlv_epi32, _mm256_sub_epi32, _mm256_xor_si256,
};

use moa_schema::BLOCK;

use super::avx2::WIDTH;
use super::avx2_integers::Sums;
use super::element::UPPER;
use super::nibbles::scale_shift;
use super::quantized::{HEAD, Integers, QUAD};
use super::{Element, Nibbles, PANEL};

/// Products are added in words. Weights are taken 8 up, so that they have no sign, and what that adds is taken off. A
/// word holds what is summed in it: 16 products of 15 and 127 at most.
pub(super) struct Words;

impl Sums<Nibbles> for Words {
    const MOST_OF_TWO: usize = 0;

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn of_block<const M: usize, const V: usize>(
        left: &[*const f32; M],
        right: *const Nibbles,
        step: usize,
        _: usize,
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
}

/// [`Integers::quad8`] of int4.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) unsafe fn quad<const V: usize>(from: *const Nibbles, step: usize) -> [__m256i; V] {
    let row = from.wrapping_add(Nibbles::group(step, PANEL) + Nibbles::row(step) * PANEL);
    // Bytes hold an even step and the odd one after it.
    let odd = _mm256_set1_epi32((step / QUAD % 2 * 4) as i32);
    let (low, up) = (_mm256_set1_epi8(15), _mm256_set1_epi8(8));
    std::array::from_fn(|vector| {
        // SAFETY: by the caller's promise.
        let eight = unsafe { _mm256_loadu_si256(row.wrapping_add(vector * WIDTH).cast()) };
        _mm256_xor_si256(_mm256_and_si256(_mm256_srlv_epi32(eight, odd), low), up)
    })
}

/// [`Integers::block_scales8`] of int4.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn block_scales<const V: usize>(from: *const Nibbles, step: usize) -> [__m256; V] {
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
