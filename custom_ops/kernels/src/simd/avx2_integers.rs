//! Microkernels of quantized rows in vectors of 8 lanes, and rounding in these.
//!
//! [`Dots`] is AVX_VNNI, for all integers. With AVX2 alone `avx2_nibbles` serves int4; int8 has nothing there: its
//! products are words that are soon full, and so take as long as those of f32.

use std::arch::asm;
use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_add_epi32, _mm_cvtsi128_si32, _mm_loadl_epi64, _mm_loadu_si128, _mm_max_epu32,
    _mm_prefetch, _mm_shuffle_epi32, _mm_unpackhi_epi8, _mm_unpackhi_epi16, _mm_unpacklo_epi8, _mm_unpacklo_epi16,
    _mm256_add_epi32, _mm256_and_ps, _mm256_broadcastsi128_si256, _mm256_castps_si256, _mm256_castsi256_si128,
    _mm256_cvtepi32_ps, _mm256_cvtps_epi32, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_max_epu32, _mm256_mul_ps, _mm256_packs_epi16, _mm256_packs_epi32,
    _mm256_permutevar8x32_epi32, _mm256_set_m128i, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_storeu_si256,
    _mm256_unpackhi_epi8, _mm256_unpackhi_epi16, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_xor_si256,
};

use moa_schema::BLOCK;

use super::avx2::{Fetches, WIDTH, finish, first_terms};
use super::partial_vectors::through_lanes;
use super::product::{Kernel, LINE, PAGE, Raw, STEPS};
use super::quantized::{HEAD, Integers, QUAD, QUANTIZED_ROWS, WORDS, lines_of_block, scales};
use super::{LANES, PANEL, StepOrder};

/// Vectors of a panel.
pub(super) const ALL: usize = PANEL / WIDTH;

/// How the products of a block are summed.
pub(super) trait Sums<W> {
    /// Most rows that take two vectors at once, where they do not take all.
    const MOST_OF_TWO: usize;

    /// The sums of the products of `M` rows and `V` vectors of columns in the block of inner step `step`, of which
    /// there are `steps`.
    ///
    /// # Safety
    ///
    /// The block of every row must be readable, and so must the groups of these steps for all columns of the panel from
    /// `right` on, at which a vector of it begins; the processor must have AVX2, FMA and F16C, and what the type says.
    unsafe fn of_block<const M: usize, const V: usize>(
        left: &[*const f32; M],
        right: *const W,
        step: usize,
        steps: usize,
    ) -> [[__m256i; V]; M];
}

/// Four products at once, by AVX_VNNI.
pub(super) struct Dots;

/// The microkernel for `rows` rows and `vectors` vectors of 16 columns of one panel. Few rows take all of a panel at
/// once, as it comes from memory; more take two vectors or one at a time, so that all their sums stay in registers.
pub(super) fn kernel<W: Integers, S: Sums<W>>(rows: usize, vectors: usize) -> Kernel<W> {
    match (rows, vectors) {
        (1, 2) => block::<W, S, 1, ALL>,
        (1, _) => some::<W, S, 1>(),
        (2, 2) => block::<W, S, 2, ALL>,
        (2, _) => some::<W, S, 2>(),
        (3, _) => some::<W, S, 3>(),
        (4, _) => some::<W, S, 4>(),
        (5, _) => some::<W, S, 5>(),
        (6, _) => some::<W, S, 6>(),
        (7, _) => some::<W, S, 7>(),
        _ => some::<W, S, QUANTIZED_ROWS>(),
    }
}

/// The microkernel for `M` rows that do not take all vectors of a panel at once.
fn some<W: Integers, S: Sums<W>, const M: usize>() -> Kernel<W> {
    if M <= S::MOST_OF_TWO { block::<W, S, M, 2> } else { block::<W, S, M, 1> }
}

/// `M` rows, all there are, times any number of columns.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds; the processor must have AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<W: Integers, S: Sums<W>, const M: usize, const V: usize>(raw: &Raw<W>) {
    // SAFETY: by the caller's promise.
    unsafe {
        match raw.columns.is_multiple_of(V * WIDTH) {
            true => pieces::<W, S, M, V>(raw),
            false => through_lanes(raw, pieces::<W, S, M, V>),
        }
    }
}

/// As [`block`], `V` vectors at a time; whole ones are written.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pieces<W: Integers, S: Sums<W>, const M: usize, const V: usize>(raw: &Raw<W>) {
    let pieces = raw.columns.div_ceil(V * WIDTH);
    for index in 0..pieces {
        // SAFETY: by the caller's promise.
        unsafe { piece::<W, S, M, V>(raw, index * V * WIDTH, Fetches::share(&raw.fetch, [index, pieces], index == 0)) };
    }
}

/// `M` rows, all there are, times `V` vectors from `column` on; whole vectors are written.
///
/// # Safety
///
/// As [`block`], where every destination holds the vectors.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn piece<W: Integers, S: Sums<W>, const M: usize, const V: usize>(
    raw: &Raw<W>,
    column: usize,
    mut fetches: Fetches,
) {
    let mut left: [*const f32; M] = std::array::from_fn(|row| raw.left[row]);
    let out: [*mut f32; M] = std::array::from_fn(|row| raw.out[row].wrapping_add(raw.first + column));
    let right = raw.right.wrapping_add(column);
    // SAFETY: every pointer is in bounds by the caller's promise.
    unsafe {
        let mut sums = first_terms::<W, M, V>(raw, 0, &out);
        for step in (0..raw.inner).step_by(BLOCK) {
            fetch(&mut fetches, raw.right, step);
            let terms = S::of_block::<M, V>(&left, right, step, BLOCK.min(raw.inner - step));
            let of_block = W::block_scales8::<V>(right, step);
            for ((sums, terms), left) in sums.iter_mut().zip(terms).zip(&mut left) {
                let of_row = _mm256_set1_ps(**left);
                for (vector, (sum, terms)) in sums.iter_mut().zip(terms).enumerate() {
                    let terms = _mm256_cvtepi32_ps(terms);
                    *sum = match of_block {
                        Some(scales) => _mm256_fmadd_ps(_mm256_mul_ps(terms, of_row), scales[vector], *sum),
                        None => _mm256_fmadd_ps(terms, of_row, *sum),
                    };
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
fn fetch<W: Integers>(fetches: &mut Fetches, right: *const W, step: usize) {
    if fetches.own {
        let lines = const { lines_of_block::<W>() };
        let block = right.cast::<i8>().wrapping_add(step / BLOCK * lines * LINE + PAGE);
        (0..lines).for_each(|line| _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(line * LINE)));
        return;
    }
    (0..BLOCK / STEPS).for_each(|_| fetches.take_line());
}

impl<W: Integers> Sums<W> for Dots {
    // Sums come back after some cycles, so that few rows need two vectors; those of more rows leave the registers
    // (benches/NOTES.md).
    const MOST_OF_TWO: usize = 6;

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn of_block<const M: usize, const V: usize>(
        left: &[*const f32; M],
        right: *const W,
        step: usize,
        steps: usize,
    ) -> [[__m256i; V]; M] {
        let mut terms = [[_mm256_setzero_si256(); V]; M];
        // SAFETY: by the caller's promise.
        unsafe {
            for (terms, left) in terms.iter_mut().zip(left) {
                let raised = (*left.add(1)).to_bits() << W::UP;
                *terms = [_mm256_set1_epi32(raised.wrapping_neg().cast_signed()); V];
            }
            match W::ORDER {
                StepOrder::Rising if steps < BLOCK => {
                    let quads = (0..steps.div_ceil(QUAD)).map(|quad| (quad, steps - quad * QUAD));
                    quads.for_each(|(quad, left_over)| add_quad(&mut terms, left, right, [step, quad, left_over]));
                }
                _ => (0..BLOCK / QUAD).for_each(|quad| add_quad(&mut terms, left, right, [step, quad, QUAD])),
            }
        }
        terms
    }
}

/// Adds the products of the integers `quad` of the block of inner step `step`, of which there are `steps`.
///
/// # Safety
///
/// As [`Sums::of_block`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn add_quad<W: Integers, const M: usize, const V: usize>(
    terms: &mut [[__m256i; V]; M],
    left: &[*const f32; M],
    right: *const W,
    [step, quad, steps]: [usize; 3],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let weights = W::quad8::<V>(right, step + quad * QUAD, steps);
        for (terms, left) in terms.iter_mut().zip(left) {
            let integers = _mm256_set1_epi32(left.add(HEAD + quad).cast::<i32>().read());
            for (terms, weights) in terms.iter_mut().zip(weights) {
                *terms = dots(*terms, weights, integers);
            }
        }
    }
}

/// Adds to each lane the products of four bytes without a sign, `weights`, and four with one. Not by an intrinsic:
/// these are not inlined where a function may not assume AVX_VNNI.
///
/// # Safety
///
/// The processor must have AVX_VNNI.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn dots(mut sums: __m256i, weights: __m256i, integers: __m256i) -> __m256i {
    if cfg!(miri) {
        return interpreted_dots(sums, weights, integers);
    }
    // SAFETY: by the caller's promise; nothing but the register changes.
    unsafe {
        asm!("{{vex}} vpdpbusd {}, {}, {}", inout(ymm_reg) sums, in(ymm_reg) weights, in(ymm_reg) integers,
            options(pure, nomem, nostack, preserves_flags));
    }
    sums
}

/// [`dots`] where assembly is not known.
#[target_feature(enable = "avx2")]
fn interpreted_dots(sums: __m256i, weights: __m256i, integers: __m256i) -> __m256i {
    // SAFETY: vectors of 32 bytes that any bits are values of.
    let [sums, weights, integers]: [[[u8; QUAD]; WIDTH]; 3] = unsafe { std::mem::transmute([sums, weights, integers]) };
    let lanes: [i32; WIDTH] = std::array::from_fn(|lane| {
        let products = weights[lane].iter().zip(integers[lane]);
        let terms = products.map(|(weight, integer)| i32::from(*weight) * i32::from(integer.cast_signed()));
        i32::from_ne_bytes(sums[lane]) + terms.sum::<i32>()
    });
    // SAFETY: as above.
    unsafe { std::mem::transmute(lanes) }
}

/// [`Integers::quad8`] of int8.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) unsafe fn quad_of_bytes<const V: usize>(from: *const i8, step: usize, steps: usize) -> [__m256i; V] {
    // Beyond the last step it is read again: the integers of rows are 0 there.
    let row = |row: usize| from.wrapping_add((step + row.min(steps - 1)) * PANEL);
    let up = _mm256_set1_epi8(i8::MIN);
    if V < ALL {
        let load = |place| match V {
            // SAFETY: by the caller's promise.
            1 => unsafe { _mm_loadl_epi64(row(place).cast()) },
            // SAFETY: by the caller's promise.
            _ => unsafe { _mm_loadu_si128(row(place).cast()) },
        };
        let [a, b, c, d] = [0, 1, 2, 3].map(load);
        let [early, late] = [(a, b), (c, d)].map(|(a, b)| [_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)]);
        return std::array::from_fn(|vector| {
            let (early, late) = (early[vector], late[vector]);
            let [low, high] = [_mm_unpacklo_epi16(early, late), _mm_unpackhi_epi16(early, late)];
            _mm256_xor_si256(_mm256_set_m128i(high, low), up)
        });
    }
    // Halves of vectors are interleaved apart, so that columns that follow each other stand in both.
    let apart = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    // SAFETY: by the caller's promise.
    let load = |place| unsafe { _mm256_permutevar8x32_epi32(_mm256_loadu_si256(row(place).cast()), apart) };
    let [a, b, c, d] = [0, 1, 2, 3].map(load);
    let [early, late] = [(a, b), (c, d)].map(|(a, b)| [_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)]);
    std::array::from_fn(|vector| {
        let (early, late) = (early[vector / 2], late[vector / 2]);
        let columns = match vector % 2 {
            0 => _mm256_unpacklo_epi16(early, late),
            _ => _mm256_unpackhi_epi16(early, late),
        };
        _mm256_xor_si256(columns, up)
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Instructions, Isa};
    use crate::skip::skip;

    #[test]
    fn plain_code_stands_for_the_instruction() {
        if Isa::at_most(Instructions::AvxVnni).0 != Instructions::AvxVnni {
            return skip("no AVX_VNNI");
        }
        let bytes: [[u8; 4 * WIDTH]; 3] =
            [5, 151, 77].map(|step: usize| std::array::from_fn(|i| (i * step + step) as u8));
        // SAFETY: vectors of as many bytes, and the processor was asked.
        let [found, expected]: [[i32; WIDTH]; 2] = unsafe {
            let [sums, weights, integers]: [__m256i; 3] = std::mem::transmute(bytes);
            [dots(sums, weights, integers), interpreted_dots(sums, weights, integers)]
                .map(|lanes| std::mem::transmute::<__m256i, [i32; WIDTH]>(lanes))
        };
        assert_eq!(found, expected);
    }
}
