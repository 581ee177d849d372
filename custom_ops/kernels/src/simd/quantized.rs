//! Rows rounded to int8, and their products with weights in integers.
//!
//! A row is blocks of [`BLOCK`] inner steps, the last of them filled up with zeros: a scale, the sum of its integers,
//! and the integers, four of them where an f32 would stand. The sum of a block's products is exact; scaled, these sums
//! are added in rising order. `vnni` has an instruction for it that multiplies integers without a sign by integers with
//! one: weights are taken a power of two up, and what that adds, this power times the sum of the row's integers, is
//! taken off.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, __m512i, _mm_storeu_si128, _mm512_abs_ps, _mm512_castps_si512, _mm512_cvtepi32_epi8, _mm512_cvtps_epi32,
    _mm512_loadu_ps, _mm512_max_epu32, _mm512_mul_ps, _mm512_reduce_add_epi32, _mm512_reduce_max_epu32, _mm512_set1_ps,
};

use moa_schema::BLOCK;

use super::product::{Kernel, Mode, Raw};
#[cfg(target_arch = "x86_64")]
use super::vnni;
use super::{Element, Isa, LANES, Nibbles, PANEL};

/// Inner steps where an f32 would stand.
pub(super) const QUAD: usize = size_of::<f32>();

/// What stands before the integers of a block: their scale, and their sum.
pub(super) const HEAD: usize = 2;

/// What a block takes of the memory of f32.
pub(super) const WORDS: usize = HEAD + BLOCK / QUAD;

/// Most rows that a microkernel takes: it has two sums for each vector, one of integers and one of f32.
pub(crate) const QUANTIZED_ROWS: usize = 8;

/// The largest integer of a block.
const MOST: f32 = 127.0;

/// Blocks of smaller magnitude are 0: divided by their scale, values would be infinite.
const LEAST: f32 = 1e-36;

/// What a quantized row of `inner` values takes of the memory of f32.
pub(super) const fn len(inner: usize) -> usize {
    inner.div_ceil(BLOCK) * WORDS
}

/// Weights in integers.
pub(super) trait Integers: Element {
    /// The power of two that makes every integer positive.
    const UP: u32;

    /// The integer of step `step` of one column, and what the sum of its block is scaled by, where it is.
    ///
    /// # Safety
    ///
    /// As [`Element::load`].
    unsafe fn integer(from: *const Self, step: usize) -> (i32, Option<f32>);

    /// Four inner steps of the columns of a panel, [`Self::UP`] up: those from `step` on, a multiple of four, of which
    /// there are `steps`, others are any.
    ///
    /// # Safety
    ///
    /// The groups of these steps must be readable for all columns of the panel that begins at `from`; the processor
    /// must have AVX-512 F, BW and VBMI.
    #[cfg(target_arch = "x86_64")]
    unsafe fn quad(from: *const Self, step: usize, steps: usize) -> [__m512i; 2];

    /// What sums of the block of inner step `step` are scaled by, where they are.
    ///
    /// # Safety
    ///
    /// As [`Self::quad`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn block_scales(from: *const Self, step: usize) -> Option<[__m512; 2]>;
}

impl Integers for i8 {
    const UP: u32 = 7;

    unsafe fn integer(from: *const Self, _: usize) -> (i32, Option<f32>) {
        // SAFETY: by the caller's promise.
        (unsafe { *from }.into(), None)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    #[inline]
    unsafe fn quad(from: *const Self, step: usize, steps: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise.
        unsafe { vnni::quad_of_bytes(from, step, steps) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    #[inline]
    unsafe fn block_scales(_: *const Self, _: usize) -> Option<[__m512; 2]> {
        None
    }
}

impl Integers for Nibbles {
    const UP: u32 = 3;

    unsafe fn integer(from: *const Self, step: usize) -> (i32, Option<f32>) {
        // SAFETY: by the caller's promise.
        let (integer, scale) = unsafe { Self::integer_and_scale(from, step) };
        (integer, Some(scale))
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    #[inline]
    unsafe fn quad(from: *const Self, step: usize, _: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise; groups are filled up with zeros.
        unsafe { vnni::quad_of_nibbles(from, step) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    #[inline]
    unsafe fn block_scales(from: *const Self, step: usize) -> Option<[__m512; 2]> {
        // SAFETY: by the caller's promise.
        Some(unsafe { vnni::scales_of_nibbles(from, step) })
    }
}

/// The microkernel for quantized rows.
pub(super) fn kernel<W: Integers>(isa: Isa, rows: usize, vectors: usize) -> Kernel<W> {
    match isa.multiplies_integers() {
        #[cfg(target_arch = "x86_64")]
        true => vnni::kernel(rows, vectors),
        _ => plain::<W>,
    }
}

/// All rows times all columns in plain arithmetic, 16 columns at a time.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds.
unsafe fn plain<W: Integers>(raw: &Raw<W>) {
    for column in (0..raw.columns).step_by(LANES) {
        let count = (raw.columns - column).min(LANES);
        let offset = column / PANEL * raw.panel_stride + column % PANEL;
        for row in 0..raw.rows {
            // SAFETY: every pointer is in bounds by the caller's promise.
            unsafe {
                let out = std::slice::from_raw_parts_mut(raw.out[row].add(raw.first + column), count);
                for (lane, out) in out.iter_mut().enumerate() {
                    let first = if raw.mode == Mode::Resume { *raw.factors.add(row) * *out } else { 0.0 };
                    let mut sum = plain_sum(raw, row, raw.right.add(offset + lane), first);
                    if !raw.scales.is_null() {
                        sum *= *raw.scales.add(raw.first + column + lane);
                    }
                    match raw.mode {
                        Mode::AddScaled => *out = (*raw.factors.add(row)).mul_add(sum, *out),
                        _ => *out = sum,
                    }
                }
            }
        }
    }
}

/// `sum`, and the terms of a row and a column, whose first weight is at `right`.
///
/// # Safety
///
/// As [`plain`].
unsafe fn plain_sum<W: Integers>(raw: &Raw<W>, row: usize, mut right: *const W, mut sum: f32) -> f32 {
    // SAFETY: every pointer is in bounds by the caller's promise; any four bytes are integers.
    unsafe {
        for first in (0..raw.inner).step_by(BLOCK) {
            let block = raw.left[row].add(first / BLOCK * WORDS);
            let integers = block.add(HEAD).cast::<i8>();
            let (mut terms, mut of_block) = (0, None);
            for step in first..raw.inner.min(first + BLOCK) {
                let (integer, scale) = W::integer(right, step);
                terms += i32::from(*integers.add(step - first)) * integer;
                of_block = scale;
                right = right.wrapping_add(W::passed(step, raw.stride));
            }
            sum = match of_block {
                Some(scale) => (terms as f32 * *block).mul_add(scale, sum),
                None => (terms as f32).mul_add(*block, sum),
            };
        }
    }
    sum
}

impl Isa {
    /// Rounds a row to int8, in blocks; one with a value that is not finite has a scale that is NaN.
    pub(crate) fn quantize(self, row: &[f32], out: &mut [f32]) {
        let (whole, rest) = row.as_chunks();
        let (out, last) = out.as_chunks_mut().0.split_at_mut(whole.len());
        self.quantize_blocks(whole, out);
        if !rest.is_empty() {
            let mut whole = [0.0; BLOCK];
            whole[..rest.len()].copy_from_slice(rest);
            self.quantize_blocks(&[whole], last);
        }
    }

    fn quantize_blocks(self, blocks: &[[f32; BLOCK]], out: &mut [[f32; WORDS]]) {
        match self.multiplies_integers() {
            // SAFETY: `Isa` proves that the processor has the instructions.
            #[cfg(target_arch = "x86_64")]
            true => unsafe { quantize16(blocks, out) },
            _ => blocks.iter().zip(out).for_each(|(values, out)| quantize_block(values, out)),
        }
    }
}

/// The scale of a block whose largest magnitude has these bits, and what values are multiplied with.
fn scales(magnitude: u32) -> [f32; 2] {
    match f32::from_bits(magnitude) {
        magnitude if !magnitude.is_finite() => [f32::NAN, 0.0],
        magnitude if magnitude < LEAST => [0.0; 2],
        magnitude => [magnitude / MOST, MOST / magnitude],
    }
}

fn quantize_block(values: &[f32; BLOCK], out: &mut [f32; WORDS]) {
    let magnitude = values.iter().map(|value| value.abs().to_bits()).max().unwrap_or(0);
    let [scale, inverse] = scales(magnitude);
    let integers = values.map(|value| (value * inverse).round_ties_even() as i8);
    let sum: i32 = integers.iter().map(|integer| i32::from(*integer)).sum();
    let [head @ .., _, _, _, _, _, _, _, _] = out;
    *head = [scale, f32::from_bits(sum.cast_unsigned())];
    for (out, quad) in out[HEAD..].iter_mut().zip(integers.as_chunks().0) {
        *out = f32::from_ne_bytes(quad.map(i8::cast_unsigned));
    }
}

/// [`quantize_block`] in vectors of 16 lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn quantize16(blocks: &[[f32; BLOCK]], out: &mut [[f32; WORDS]]) {
    blocks.iter().zip(out).for_each(|(values, out)| quantize_block16(values, out));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn quantize_block16(values: &[f32; BLOCK], out: &mut [f32; WORDS]) {
    const HALF: usize = BLOCK / 2;
    // SAFETY: two vectors are read.
    let halves = [0, HALF].map(|first| unsafe { _mm512_loadu_ps(values[first..].as_ptr()) });
    let [first, second] = halves.map(|half| _mm512_castps_si512(_mm512_abs_ps(half)));
    let [scale, inverse] = scales(_mm512_reduce_max_epu32(_mm512_max_epu32(first, second)));
    if scale.is_nan() {
        out.fill(0.0);
        out[0] = scale;
        return;
    }
    let integers = halves.map(|half| _mm512_cvtps_epi32(_mm512_mul_ps(half, _mm512_set1_ps(inverse))));
    let sum: i32 = integers.into_iter().map(|integers| _mm512_reduce_add_epi32(integers)).sum();
    out[..HEAD].copy_from_slice(&[scale, f32::from_bits(sum.cast_unsigned())]);
    for (out, integers) in out[HEAD..].chunks_exact_mut(HALF / QUAD).zip(integers) {
        // SAFETY: a vector of 16 bytes is written, as many as the chunk has.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(integers)) };
    }
}

#[cfg(test)]
#[path = "quantized_tests.rs"]
mod tests;
