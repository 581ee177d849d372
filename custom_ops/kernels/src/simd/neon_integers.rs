//! Microkernels of quantized rows in vectors of 4 lanes, by the dot products of four bytes that most aarch64 have, and
//! rounding in these.

use std::arch::aarch64::{
    float32x4_t, int8x16_t, int32x4_t, vabsq_f32, vaddq_f32, vaddq_s32, vaddvq_s32, vandq_u8, vcombine_s8,
    vcombine_s16, vcombine_u8, vcvtq_f32_s32, vdupq_n_f32, vdupq_n_s32, vdupq_n_u8, vdupq_n_u32, vfmaq_f32,
    vfmaq_n_f32, vld1_u8, vld1q_f32, vld1q_s8, vld1q_u8, vld1q_u32, vmaxq_u32, vmaxvq_u32, vmovn_s16, vmovn_s32,
    vmulq_n_f32, vreinterpretq_f32_u32, vreinterpretq_s8_s32, vreinterpretq_s8_u8, vreinterpretq_s8_u16,
    vreinterpretq_s32_f32, vreinterpretq_s32_s8, vreinterpretq_u8_u32, vreinterpretq_u16_u8, vreinterpretq_u32_f32,
    vshlq_n_u8, vshrq_n_s32, vst1q_s8, vsubq_s32, vuzp1q_s8, vuzp2q_s8, vzip1q_s32, vzip1q_u8, vzip1q_u16, vzip2q_u8,
    vzip2q_u16,
};
use std::arch::asm;

use moa_schema::BLOCK;

use super::lanes::ROUND;
use super::neon::{WIDTH, finish, first_terms};
use super::nibbles::scales4;
use super::partial_vectors::through_lanes;
use super::product::{Kernel, Raw};
use super::quantized::{HEAD, Integers, QUAD, QUANTIZED_ROWS, WORDS, scales};
use super::{Element, LANES, Nibbles, PANEL, StepOrder};

/// Quads of integers of rows in one vector.
const QUADS: usize = 4;

/// The microkernel for `rows` rows. Few rows take 16 columns at once, since every sum waits for the one before; more
/// take 8, so that the sums of integers of a block stay in registers.
pub(super) fn kernel<W: Integers>(rows: usize) -> Kernel<W> {
    match rows {
        1 => block::<W, 1, 4>,
        2 => block::<W, 2, 4>,
        3 => block::<W, 3, 4>,
        4 => block::<W, 4, 2>,
        5 => block::<W, 5, 2>,
        6 => block::<W, 6, 2>,
        7 => block::<W, 7, 2>,
        _ => block::<W, QUANTIZED_ROWS, 2>,
    }
}

/// `M` rows, all there are, times any number of columns.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds; the processor must have dot products.
#[target_feature(enable = "neon,dotprod")]
unsafe fn block<W: Integers, const M: usize, const V: usize>(raw: &Raw<W>) {
    // SAFETY: by the caller's promise.
    unsafe {
        match raw.columns.is_multiple_of(LANES) {
            true => pieces::<W, M, V>(raw),
            false => through_lanes(raw, pieces::<W, M, V>),
        }
    }
}

/// As [`block`], `V` vectors at a time; whole vectors of 16 columns are written.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "neon,dotprod")]
unsafe fn pieces<W: Integers, const M: usize, const V: usize>(raw: &Raw<W>) {
    for column in (0..raw.columns.next_multiple_of(LANES)).step_by(V * WIDTH) {
        // SAFETY: by the caller's promise.
        unsafe { piece::<W, M, V>(raw, column) };
    }
}

/// `M` rows, all there are, times `V` vectors from `column` on; whole vectors are written.
///
/// # Safety
///
/// As [`block`], where every destination holds the vectors.
#[target_feature(enable = "neon,dotprod")]
#[inline]
unsafe fn piece<W: Integers, const M: usize, const V: usize>(raw: &Raw<W>, column: usize) {
    let mut left: [*const f32; M] = std::array::from_fn(|row| raw.left[row]);
    let out: [*mut f32; M] = std::array::from_fn(|row| raw.out[row].wrapping_add(raw.first + column));
    let right = raw.right.wrapping_add(column);
    // SAFETY: every pointer is in bounds by the caller's promise.
    unsafe {
        let mut sums = first_terms::<W, M, V>(raw, 0, &out);
        for step in (0..raw.inner).step_by(BLOCK) {
            let terms = of_block::<W, M, V>(&left, right, step, BLOCK.min(raw.inner - step));
            let of_block = W::block_scales4::<V>(right, step);
            for ((sums, terms), left) in sums.iter_mut().zip(terms).zip(&mut left) {
                for (vector, (sum, terms)) in sums.iter_mut().zip(terms).enumerate() {
                    let terms = vcvtq_f32_s32(terms);
                    *sum = match of_block {
                        Some(scales) => vfmaq_f32(*sum, vmulq_n_f32(terms, **left), scales[vector]),
                        None => vfmaq_n_f32(*sum, terms, **left),
                    };
                }
                *left = left.wrapping_add(raw.blocks);
            }
        }
        finish(raw, 0, column, &out, sums);
    }
}

/// The sums of the products of `M` rows and `V` vectors of columns in the block of inner step `step`, of which there
/// are `steps`.
///
/// # Safety
///
/// The block of every row must be readable, and so must the groups of these steps for all columns of the panel from
/// `right` on, at which a vector of it begins; the processor must have dot products.
#[target_feature(enable = "neon,dotprod")]
#[inline]
unsafe fn of_block<W: Integers, const M: usize, const V: usize>(
    left: &[*const f32; M],
    right: *const W,
    step: usize,
    steps: usize,
) -> [[int32x4_t; V]; M] {
    let mut terms = [[vdupq_n_s32(0); V]; M];
    // SAFETY: by the caller's promise.
    unsafe {
        if W::ORDER == StepOrder::Rising && steps < BLOCK {
            for quad in 0..steps.div_ceil(QUAD) {
                let weights = W::quad4::<V>(right, step + quad * QUAD, steps - quad * QUAD);
                let integers = |left: &*const f32| left.add(HEAD + quad).cast::<i32>().read();
                let integers = left.each_ref().map(|left| vreinterpretq_s8_s32(vdupq_n_s32(integers(left))));
                add_quad::<M, V, 0>(&mut terms, &integers, weights);
            }
            return terms;
        }
        for first in (0..BLOCK / QUAD).step_by(QUADS) {
            let integers = left.map(|left| vld1q_s8(left.add(HEAD + first).cast()));
            let weights = |quad| W::quad4::<V>(right, step + (first + quad) * QUAD, QUAD);
            add_quad::<M, V, 0>(&mut terms, &integers, weights(0));
            add_quad::<M, V, 1>(&mut terms, &integers, weights(1));
            add_quad::<M, V, 2>(&mut terms, &integers, weights(2));
            add_quad::<M, V, 3>(&mut terms, &integers, weights(3));
        }
    }
    if W::SIXTEENFOLD { terms.map(|terms| terms.map(|terms| vshrq_n_s32::<4>(terms))) } else { terms }
}

/// Adds the products of `weights` and the integers in lane `LANE` of each row.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn add_quad<const M: usize, const V: usize, const LANE: usize>(
    terms: &mut [[int32x4_t; V]; M],
    integers: &[int8x16_t; M],
    weights: [int8x16_t; V],
) {
    for (terms, integers) in terms.iter_mut().zip(integers) {
        for (terms, weights) in terms.iter_mut().zip(weights) {
            *terms = dots::<LANE>(*terms, weights, *integers);
        }
    }
}

/// Adds to each lane the products of its four bytes of `weights` and those in lane `LANE` of `integers`. Not by an
/// intrinsic: none is stable.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn dots<const LANE: usize>(mut sums: int32x4_t, weights: int8x16_t, integers: int8x16_t) -> int32x4_t {
    if cfg!(miri) {
        return interpreted_dots(sums, weights, integers, LANE);
    }
    // SAFETY: nothing but the register changes.
    unsafe {
        asm!("sdot {:v}.4s, {:v}.16b, {:v}.4b[{}]", inout(vreg) sums, in(vreg) weights, in(vreg) integers,
            const LANE, options(pure, nomem, nostack, preserves_flags));
    }
    sums
}

/// [`dots`] where assembly is not known.
#[target_feature(enable = "neon")]
fn interpreted_dots(sums: int32x4_t, weights: int8x16_t, integers: int8x16_t, lane: usize) -> int32x4_t {
    // SAFETY: vectors of 16 bytes that any bits are values of.
    let sums: [i32; WIDTH] = unsafe { std::mem::transmute(sums) };
    // SAFETY: as above.
    let [weights, integers]: [[[i8; QUAD]; WIDTH]; 2] = unsafe { std::mem::transmute([weights, integers]) };
    let lanes: [i32; WIDTH] = std::array::from_fn(|place| {
        let products = weights[place].iter().zip(integers[lane]);
        sums[place] + products.map(|(weight, integer)| i32::from(*weight) * i32::from(integer)).sum::<i32>()
    });
    // SAFETY: as above.
    unsafe { std::mem::transmute(lanes) }
}

/// [`Integers::quad4`] of int8.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "neon")]
#[inline]
pub(super) unsafe fn quad_of_bytes<const V: usize>(from: *const i8, step: usize, steps: usize) -> [int8x16_t; V] {
    // Beyond the last step it is read again: the integers of rows are 0 there.
    let row = |row: usize| from.wrapping_add((step + row.min(steps - 1)) * PANEL).cast::<u8>();
    let load = |place| match V {
        // SAFETY: by the caller's promise.
        2 => unsafe { vcombine_u8(vld1_u8(row(place)), vld1_u8(row(place))) },
        // SAFETY: by the caller's promise.
        _ => unsafe { vld1q_u8(row(place)) },
    };
    let [a, b, c, d] = [0, 1, 2, 3].map(load);
    let [early, late] =
        [(a, b), (c, d)].map(|(a, b)| [vzip1q_u8(a, b), vzip2q_u8(a, b)].map(|bytes| vreinterpretq_u16_u8(bytes)));
    std::array::from_fn(|vector| {
        let (early, late) = (early[vector / 2], late[vector / 2]);
        vreinterpretq_s8_u16(match vector % 2 {
            0 => vzip1q_u16(early, late),
            _ => vzip2q_u16(early, late),
        })
    })
}

/// [`Integers::quad4`] of int4, 16 times as large.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "neon")]
#[inline]
pub(super) unsafe fn quad_of_nibbles<const V: usize>(from: *const Nibbles, step: usize) -> [int8x16_t; V] {
    let row = from.wrapping_add(Nibbles::group(step, PANEL) + Nibbles::row(step) * PANEL);
    std::array::from_fn(|vector| {
        // SAFETY: by the caller's promise.
        let eight = vreinterpretq_u8_u32(unsafe { vld1q_u32(row.wrapping_add(vector * WIDTH).cast()) });
        // Bytes hold an even step and the odd one after it.
        vreinterpretq_s8_u8(match step / QUAD % 2 {
            0 => vshlq_n_u8::<4>(eight),
            _ => vandq_u8(eight, vdupq_n_u8(0xf0)),
        })
    })
}

/// [`Integers::block_scales4`] of int4.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "neon")]
#[inline]
pub(super) unsafe fn scales_of_nibbles<const V: usize>(from: *const Nibbles, step: usize) -> [float32x4_t; V] {
    let row = from.wrapping_add(Nibbles::group(step, PANEL));
    std::array::from_fn(|vector| {
        // SAFETY: by the caller's promise.
        let both = unsafe { vld1q_u32(row.wrapping_add(vector * WIDTH).cast()) };
        vreinterpretq_f32_u32(scales4(both, step))
    })
}

/// Rounds each block to int8.
#[target_feature(enable = "neon")]
pub(super) fn quantize4<'a>(order: StepOrder, blocks: impl Iterator<Item = ([f32; BLOCK], &'a mut [f32; WORDS])>) {
    for (values, out) in blocks {
        // SAFETY: whole vectors are read.
        let values: [float32x4_t; BLOCK / WIDTH] =
            std::array::from_fn(|vector| unsafe { vld1q_f32(values[vector * WIDTH..].as_ptr()) });
        let magnitudes = values.map(|values| vreinterpretq_u32_f32(vabsq_f32(values)));
        let [scale, inverse] = scales(vmaxvq_u32(magnitudes.into_iter().fold(vdupq_n_u32(0), |a, b| vmaxq_u32(a, b))));
        if scale.is_nan() {
            out.fill(0.0);
            out[0] = scale;
            continue;
        }
        let rounded = values.map(|values| vaddq_f32(vmulq_n_f32(values, inverse), vdupq_n_f32(ROUND)));
        let integers =
            rounded.map(|lanes| vsubq_s32(vreinterpretq_s32_f32(lanes), vdupq_n_s32(ROUND.to_bits() as i32)));
        let sum = vaddvq_s32(integers.into_iter().fold(vdupq_n_s32(0), |a, b| vaddq_s32(a, b)));
        out[..HEAD].copy_from_slice(&[scale, f32::from_bits(sum.cast_unsigned())]);
        let words = |first| vcombine_s16(vmovn_s32(integers[first]), vmovn_s32(integers[first + 1]));
        for half in 0..BLOCK / LANES {
            let bytes = vcombine_s8(vmovn_s16(words(half * 4)), vmovn_s16(words(half * 4 + 2)));
            // SAFETY: a vector of 16 bytes is written, as many as half of a block has.
            unsafe { vst1q_s8(out[HEAD + half * WIDTH..].as_mut_ptr().cast(), ordered(order, bytes)) };
        }
    }
}

/// Integers of rising steps in another order.
#[target_feature(enable = "neon")]
#[inline]
fn ordered(order: StepOrder, bytes: int8x16_t) -> int8x16_t {
    match order {
        StepOrder::Rising => bytes,
        StepOrder::EvenFirst => {
            let [even, odd] = [vuzp1q_s8(bytes, bytes), vuzp2q_s8(bytes, bytes)].map(|half| vreinterpretq_s32_s8(half));
            vreinterpretq_s8_s32(vzip1q_s32(even, odd))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no assembly")]
    fn plain_code_stands_for_the_instruction() {
        if !std::arch::is_aarch64_feature_detected!("dotprod") {
            return crate::skip::skip("no dot products");
        }
        let bytes: [[u8; 4 * WIDTH]; 3] =
            [5, 151, 77].map(|step: usize| std::array::from_fn(|i| (i * step + step) as u8));
        // SAFETY: vectors of as many bytes, and the processor was asked.
        unsafe {
            let [sums, weights, integers]: [int32x4_t; 3] = std::mem::transmute(bytes);
            let (weights, integers) = (vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(integers));
            let lanes = |lanes| std::mem::transmute::<int32x4_t, [i32; WIDTH]>(lanes);
            let plain = |lane| lanes(interpreted_dots(sums, weights, integers, lane));
            assert_eq!(lanes(dots::<0>(sums, weights, integers)), plain(0));
            assert_eq!(lanes(dots::<1>(sums, weights, integers)), plain(1));
            assert_eq!(lanes(dots::<2>(sums, weights, integers)), plain(2));
            assert_eq!(lanes(dots::<3>(sums, weights, integers)), plain(3));
        }
    }
}
