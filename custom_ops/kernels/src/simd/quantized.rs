//! Rows rounded to int8, and their products with weights in integers.
//!
//! A row is blocks of [`BLOCK`] inner steps, the last of them filled up with zeros: a scale, the sum of its integers,
//! and the integers, four of them where an f32 would stand. The sum of a block's products is exact; scaled, these sums
//! are added in rising order. `vnni` has an instruction for it that multiplies integers without a sign by integers with
//! one: weights are taken a power of two up, and what that adds, this power times the sum of the row's integers, is
//! taken off. That of `neon_integers` multiplies integers with signs.
#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::{float32x4_t, int8x16_t};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m256i, __m512, __m512i};

use moa_schema::BLOCK;

#[cfg(target_arch = "aarch64")]
use super::neon_integers;
use super::portable::fused;
use super::product::{Kernel, Mode, Raw};
use super::{Element, Form, Instructions, Isa, LANES, Nibbles, PANEL, StepOrder};
#[cfg(target_arch = "x86_64")]
use super::{
    avx2_integers::{self, Dots},
    avx2_nibbles,
    product::LINE,
    vnni,
};

/// Inner steps where an f32 would stand.
pub(super) const QUAD: usize = size_of::<f32>();

/// Inner steps whose integers stand in an [`StepOrder`].
const EIGHT: usize = 2 * QUAD;

/// What stands before the integers of a block: their scale, and their sum.
pub(super) const HEAD: usize = 2;

/// What a block takes of the memory of f32.
pub(crate) const WORDS: usize = HEAD + BLOCK / QUAD;

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

/// Cache lines of a panel that hold the weights of a block.
#[cfg(target_arch = "x86_64")]
pub(super) const fn lines_of_block<W: Element>() -> usize {
    W::ROWS * PANEL * size_of::<W>() * BLOCK / W::STEPS / LINE
}

/// What a quantized row takes whose blocks are so far apart.
pub(super) fn span(inner: usize, blocks: usize) -> usize {
    assert!(blocks >= WORDS, "blocks side by side");
    inner.div_ceil(BLOCK).checked_sub(1).map_or(0, |others| others.saturating_mul(blocks).saturating_add(WORDS))
}

/// Weights in integers.
pub(super) trait Integers: Element {
    /// The power of two that makes every integer positive.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const UP: u32;

    /// Whether [`Self::quad4`] gives integers 16 times as large.
    #[cfg(target_arch = "aarch64")]
    const SIXTEENFOLD: bool;

    /// In which order the integers of rows must stand.
    const ORDER: StepOrder;

    /// The integer of step `step` of one column, and what the sum of its block is scaled by, where it is.
    ///
    /// # Safety
    ///
    /// As [`Element::load`].
    unsafe fn integer(from: *const Self, step: usize) -> (i32, Option<f32>);

    /// Four inner steps of the columns of a panel, [`Self::UP`] up: those of the integers that stand from `step` on, a
    /// multiple of four; of rising ones there are `steps`, others are any.
    ///
    /// # Safety
    ///
    /// The groups of these steps must be readable for all columns of the panel that begins at `from`; the processor
    /// must have AVX-512 F and BW, and VBMI where that is said.
    #[cfg(target_arch = "x86_64")]
    unsafe fn quad<const VBMI: bool>(from: *const Self, step: usize, steps: usize) -> [__m512i; 2];

    /// What sums of the block of inner step `step` are scaled by, where they are.
    ///
    /// # Safety
    ///
    /// As [`Self::quad`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn block_scales(from: *const Self, step: usize) -> Option<[__m512; 2]>;

    /// As [`Self::quad`], the steps that there are, of `V` vectors of 8 columns: one, or all of a panel.
    ///
    /// # Safety
    ///
    /// The groups of these steps, one at least, must be readable for all columns of the panel of which a vector begins
    /// at `from`; the processor must have AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn quad8<const V: usize>(from: *const Self, step: usize, steps: usize) -> [__m256i; V];

    /// As [`Self::block_scales`].
    ///
    /// # Safety
    ///
    /// As [`Self::quad8`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn block_scales8<const V: usize>(from: *const Self, step: usize) -> Option<[__m256; V]>;

    /// As [`Self::quad`] with a sign, the steps that there are, of `V` vectors of 4 columns, 2 or 4 of them.
    ///
    /// # Safety
    ///
    /// The groups of these steps, one at least, must be readable for all columns of the panel of which a vector begins
    /// at `from`; the processor must have NEON.
    #[cfg(target_arch = "aarch64")]
    unsafe fn quad4<const V: usize>(from: *const Self, step: usize, steps: usize) -> [int8x16_t; V];

    /// As [`Self::block_scales`].
    ///
    /// # Safety
    ///
    /// As [`Self::quad4`].
    #[cfg(target_arch = "aarch64")]
    unsafe fn block_scales4<const V: usize>(from: *const Self, step: usize) -> Option<[float32x4_t; V]>;

    /// The microkernel with vectors of 8 columns that AVX2 alone has, where there is one.
    #[cfg(target_arch = "x86_64")]
    fn kernel8(_rows: usize, _vectors: usize) -> Option<Kernel<Self>> {
        None
    }
}

impl Integers for i8 {
    const UP: u32 = 7;

    #[cfg(target_arch = "aarch64")]
    const SIXTEENFOLD: bool = false;

    const ORDER: StepOrder = StepOrder::Rising;

    unsafe fn integer(from: *const Self, _: usize) -> (i32, Option<f32>) {
        // SAFETY: by the caller's promise.
        (unsafe { *from }.into(), None)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn quad<const VBMI: bool>(from: *const Self, step: usize, steps: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise.
        unsafe { vnni::quad_of_bytes::<VBMI>(from, step, steps) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn block_scales(_: *const Self, _: usize) -> Option<[__m512; 2]> {
        None
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn quad8<const V: usize>(from: *const Self, step: usize, steps: usize) -> [__m256i; V] {
        // SAFETY: by the caller's promise.
        unsafe { avx2_integers::quad_of_bytes(from, step, steps) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn block_scales8<const V: usize>(_: *const Self, _: usize) -> Option<[__m256; V]> {
        None
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn quad4<const V: usize>(from: *const Self, step: usize, steps: usize) -> [int8x16_t; V] {
        // SAFETY: by the caller's promise.
        unsafe { neon_integers::quad_of_bytes(from, step, steps) }
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn block_scales4<const V: usize>(_: *const Self, _: usize) -> Option<[float32x4_t; V]> {
        None
    }
}

impl Integers for Nibbles {
    const UP: u32 = 3;

    #[cfg(target_arch = "aarch64")]
    const SIXTEENFOLD: bool = true;

    const ORDER: StepOrder = StepOrder::EvenFirst;

    unsafe fn integer(from: *const Self, step: usize) -> (i32, Option<f32>) {
        // SAFETY: by the caller's promise.
        let (integer, scale) = unsafe { Self::integer_and_scale(from, step) };
        (integer, Some(scale))
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn quad<const VBMI: bool>(from: *const Self, step: usize, _: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise; groups are filled up with zeros.
        unsafe { vnni::quad_of_nibbles(from, step) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn block_scales(from: *const Self, step: usize) -> Option<[__m512; 2]> {
        // SAFETY: by the caller's promise.
        Some(unsafe { vnni::scales_of_nibbles(from, step) })
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn quad8<const V: usize>(from: *const Self, step: usize, _: usize) -> [__m256i; V] {
        // SAFETY: by the caller's promise; groups are filled up with zeros.
        unsafe { avx2_nibbles::quad(from, step) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn block_scales8<const V: usize>(from: *const Self, step: usize) -> Option<[__m256; V]> {
        // SAFETY: by the caller's promise.
        Some(unsafe { avx2_nibbles::block_scales(from, step) })
    }

    #[cfg(target_arch = "x86_64")]
    fn kernel8(rows: usize, vectors: usize) -> Option<Kernel<Self>> {
        Some(avx2_integers::kernel::<Self, avx2_nibbles::Words>(rows, vectors))
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn quad4<const V: usize>(from: *const Self, step: usize, _: usize) -> [int8x16_t; V] {
        // SAFETY: by the caller's promise; groups are filled up with zeros.
        unsafe { neon_integers::quad_of_nibbles(from, step) }
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn block_scales4<const V: usize>(from: *const Self, step: usize) -> Option<[float32x4_t; V]> {
        // SAFETY: by the caller's promise.
        Some(unsafe { neon_integers::scales_of_nibbles(from, step) })
    }
}

/// The microkernel for quantized rows.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn kernel<W: Integers>(isa: Isa, rows: usize, vectors: usize) -> Kernel<W> {
    match isa.0 {
        #[cfg(target_arch = "aarch64")]
        Instructions::Neon if isa.form().is_quantized() => neon_integers::kernel(rows),
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 if isa.form().is_quantized() => vnni::kernel(rows, vectors, isa.1.permutes_bytes),
        #[cfg(target_arch = "x86_64")]
        Instructions::AvxVnni => avx2_integers::kernel::<W, Dots>(rows, vectors),
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => W::kernel8(rows, vectors).unwrap_or(plain),
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
                        Mode::AddScaled => *out = fused(*raw.factors.add(row), sum, *out),
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
unsafe fn plain_sum<W: Integers>(raw: &Raw<W>, row: usize, right: *const W, mut sum: f32) -> f32 {
    let steps: [u8; BLOCK] = W::ORDER.steps();
    // SAFETY: every pointer is in bounds by the caller's promise; any four bytes are integers.
    unsafe {
        for first in (0..raw.inner).step_by(BLOCK) {
            let block = raw.left[row].add(first / BLOCK * raw.blocks);
            let integers = block.add(HEAD).cast::<i8>();
            let (mut terms, mut of_block) = (0, None);
            let places = steps.into_iter().map(|step| first + usize::from(step)).enumerate();
            for (place, step) in places.filter(|(_, step)| *step < raw.inner) {
                let (integer, scale) = W::integer(right.add(W::group(step, raw.stride)), step);
                terms += i32::from(*integers.add(place)) * integer;
                of_block = scale;
            }
            sum = match of_block {
                Some(scale) => fused(terms as f32 * *block, scale, sum),
                None => fused(terms as f32, *block, sum),
            };
        }
    }
    sum
}

impl StepOrder {
    /// The inner step of eight whose integer stands in a place of eight.
    const fn step(self, place: usize) -> usize {
        match self {
            Self::Rising => place,
            Self::EvenFirst => place % QUAD * 2 + place / QUAD,
        }
    }

    /// The inner steps of the integers of a block.
    const fn steps<const N: usize>(self) -> [u8; N] {
        let (mut steps, mut place) = ([0; N], 0);
        while place < N {
            steps[place] = (place / EIGHT * EIGHT + self.step(place % EIGHT)) as u8;
            place += 1;
        }
        steps
    }
}

impl Isa {
    /// Rounds a row to int8, in blocks; one with a value that is not finite has a scale that is NaN.
    pub(crate) fn quantize(self, order: StepOrder, row: &[f32], out: &mut [f32]) {
        let (whole, rest) = row.as_chunks();
        let (out, last) = out.as_chunks_mut().0.split_at_mut(whole.len());
        self.quantize_blocks(order, whole.iter().copied().zip(out));
        let mut whole = [0.0; BLOCK];
        whole[..rest.len()].copy_from_slice(rest);
        self.quantize_blocks(order, std::iter::once(whole).zip(last));
    }

    /// The order in which rows of `inner` values are quantized where they stand, before they are multiplied with
    /// weights that want this form; `None` where they are not, as where tiles may take them.
    pub(crate) fn quantized_in_place(self, form: Form, inner: usize) -> Option<StepOrder> {
        match form {
            Form::Quantized(order) if !self.has_tiles() && self.quantizes_to(form) && inner.is_multiple_of(BLOCK) => {
                Some(order)
            }
            _ => None,
        }
    }

    /// Rounds a row of whole blocks, each of which stands then where it began.
    pub(crate) fn quantize_in_place(self, order: StepOrder, row: &mut [f32]) {
        debug_assert!(row.len().is_multiple_of(BLOCK), "whole blocks");
        let blocks = row.as_chunks_mut::<BLOCK>().0.iter_mut();
        self.quantize_blocks(order, blocks.filter_map(|block| Some((*block, block.first_chunk_mut()?))));
    }

    fn quantize_blocks<'a>(self, order: StepOrder, blocks: impl Iterator<Item = ([f32; BLOCK], &'a mut [f32; WORDS])>) {
        match self.0 {
            // SAFETY: `Isa` proves that the processor has the instructions.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 | Instructions::Amx => unsafe { vnni::quantize16(order.steps(), blocks) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 | Instructions::AvxVnni => unsafe { avx2_integers::quantize8(order.steps(), blocks) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => unsafe { neon_integers::quantize4(order, blocks) },
            _ => blocks.for_each(|(values, out)| quantize_block(order.steps(), &values, out)),
        }
    }
}

/// The scale of a block whose largest magnitude has these bits, and what values are multiplied with.
pub(super) fn scales(magnitude: u32) -> [f32; 2] {
    match f32::from_bits(magnitude) {
        magnitude if !magnitude.is_finite() => [f32::NAN, 0.0],
        magnitude if magnitude < LEAST => [0.0; 2],
        magnitude => [magnitude / MOST, MOST / magnitude],
    }
}

fn quantize_block(steps: [u8; BLOCK], values: &[f32; BLOCK], out: &mut [f32; WORDS]) {
    let magnitude = values.iter().map(|value| value.abs().to_bits()).max().unwrap_or(0);
    let [scale, inverse] = scales(magnitude);
    let integers = steps.map(|step| (values[usize::from(step)] * inverse).round_ties_even() as i8);
    let sum: i32 = integers.iter().map(|integer| i32::from(*integer)).sum();
    out[..HEAD].copy_from_slice(&[scale, f32::from_bits(sum.cast_unsigned())]);
    for (out, quad) in out[HEAD..].iter_mut().zip(integers.as_chunks().0) {
        *out = f32::from_ne_bytes(quad.map(i8::cast_unsigned));
    }
}

#[cfg(test)]
#[path = "quantized_tests.rs"]
mod tests;
