//! Rows rounded to bf16, and their products with weights, keys and values of bf16: two inner steps at a time, by
//! AVX512_BF16.
//!
//! A pair of a row stands where an f32 would, so that the microkernels find pairs where they find values. The
//! instruction adds the product of the second values to the sum, then that of the first, both exact until the sum is
//! rounded; subnormal numbers are 0 to it.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::{float32x4_t, uint32x4_t};
#[cfg(target_arch = "x86_64")]
use std::arch::asm;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256bh, __m256i, __m512, __m512bh, __m512i, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh,
    _mm512_cvtneps_pbh, _mm512_loadu_ps, _mm512_or_si512, _mm512_slli_epi32, _mm512_storeu_si512,
};

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::LANES;
use super::{Element, Isa, Right};

/// Two inner steps of a column as one.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Pair([bf16; 2]);

impl<'a> Right<'a, [bf16; 2]> {
    /// The same, to be multiplied with rows of pairs.
    pub(crate) fn pairs(self) -> Right<'a, Pair> {
        let Self { data, stride, panel_stride } = self;
        // SAFETY: a `Pair` is what it holds, with nothing beside it.
        let data = unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) };
        Right { data, stride, panel_stride }
    }
}

impl<'a> Right<'a> {
    /// The same, whose values are pairs.
    pub(crate) fn of_pairs(self) -> Right<'a, Pair> {
        self.of_both().pairs()
    }

    /// The same, whose values are pairs, to be multiplied with rows of f32.
    pub(crate) fn of_both(self) -> Right<'a, [bf16; 2]> {
        let Self { data, stride, panel_stride } = self;
        // SAFETY: an f32 has the size of two bf16 and is aligned for them, and any bits are some.
        let data = unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) };
        Right { data, stride, panel_stride }
    }
}

/// The bf16 that is nearest, as an f32.
pub(crate) fn nearest_bf16(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

/// Both values rounded.
fn pair(first: f32, second: f32) -> f32 {
    let [first, second] = [first, second].map(|value| u32::from(bf16::from_f32(value).to_bits()));
    f32::from_bits(second << 16 | first)
}

/// The values of a pair.
fn values(pair: f32) -> [f32; 2] {
    [pair.to_bits() << 16, pair.to_bits() & 0xffff_0000].map(f32::from_bits)
}

impl Element for Pair {
    const STEPS: usize = 1;

    const PARTS: usize = 1;

    const IS_PAIR: bool = true;

    unsafe fn load(from: *const Self, _: usize) -> f32 {
        // SAFETY: by the caller's promise; a pair has the size of an f32.
        unsafe { from.cast::<f32>().read_unaligned() }
    }

    fn multiply_add(value: f32, lane: f32, sum: f32) -> f32 {
        let ([first, second], [of_first, of_second]) = (values(value), values(lane));
        first * of_first + (second * of_second + sum)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn row16(from: *const Self, _: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise; a pair has the bits of an f32.
        unsafe { f32::row16(from.cast(), 0) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn next16(row: &mut [__m512i; 2]) -> __m512 {
        // SAFETY: by the caller's promise.
        unsafe { f32::next16(row) }
    }

    /// The instruction has a feature that the microkernels do not ask for, since they serve processors without it too:
    /// its intrinsic would be a call.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn multiply_add16(value: __m512, lanes: __m512, mut sum: __m512) -> __m512 {
        // SAFETY: the processor has the instruction by the caller's promise, and it reads and writes registers alone.
        unsafe {
            asm!(
                "vdpbf16ps {sum}, {lanes}, {value}",
                sum = inout(zmm_reg) sum,
                lanes = in(zmm_reg) lanes,
                value = in(zmm_reg) value,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sum
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn row8(from: *const Self, _: usize) -> [__m256i; 2] {
        // SAFETY: by the caller's promise; a pair has the bits of an f32.
        unsafe { f32::row8(from.cast(), 0) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn next8(row: &mut [__m256i; 2]) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe { f32::next8(row) }
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn row4(from: *const Self, _: usize) -> [uint32x4_t; 2] {
        // SAFETY: by the caller's promise; a pair has the bits of an f32.
        unsafe { f32::row4(from.cast(), 0) }
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn next4(row: &mut [uint32x4_t; 2]) -> float32x4_t {
        // SAFETY: by the caller's promise.
        unsafe { f32::next4(row) }
    }
}

impl Isa {
    /// Rounds a row to pairs, the last of which has a 0 where the row has no value.
    pub(crate) fn round_to_pairs(self, row: &[f32], out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if self.multiplies_pairs() {
            // SAFETY: `Isa` proves that the processor has the instructions.
            return unsafe { round16(row, out) };
        }
        for (out, values) in out.iter_mut().zip(row.chunks(2)) {
            *out = pair(values[0], values.get(1).copied().unwrap_or(0.0));
        }
    }

    /// Makes pairs of what stands in the same place, rounded; all slices are equally long.
    pub(crate) fn pair_up(self, first: &[f32], second: &[f32], out: &mut [f32]) {
        let done = match self.multiplies_pairs() {
            // SAFETY: `Isa` proves that the processor has the instructions.
            #[cfg(target_arch = "x86_64")]
            true => unsafe { pair_up16(first, second, out) },
            _ => 0,
        };
        for (out, (first, second)) in out.iter_mut().zip(first.iter().zip(second)).skip(done) {
            *out = pair(*first, *second);
        }
    }
}

/// [`Isa::round_to_pairs`] in vectors of 16 lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn round16(row: &[f32], out: &mut [f32]) {
    let (whole, rest) = row.as_chunks::<{ 2 * LANES }>();
    let (out, last) = out.split_at_mut(whole.len() * LANES);
    whole.iter().zip(out.as_chunks_mut().0).for_each(|(values, out)| round_step(values, out));
    if !rest.is_empty() {
        let (mut values, mut pairs) = ([0.0; 2 * LANES], [0.0; LANES]);
        values[..rest.len()].copy_from_slice(rest);
        round_step(&values, &mut pairs);
        last.copy_from_slice(&pairs[..last.len()]);
    }
}

/// A vector of pairs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn round_step(values: &[f32; 2 * LANES], out: &mut [f32; LANES]) {
    // SAFETY: two vectors are read, one is written, and pairs have the bits that these have.
    unsafe {
        let [first, second] = [0, LANES].map(|place| _mm512_loadu_ps(values[place..].as_ptr()));
        let pairs: __m512bh = _mm512_cvtne2ps_pbh(second, first);
        _mm512_storeu_si512(out.as_mut_ptr().cast(), std::mem::transmute::<__m512bh, __m512i>(pairs));
    }
}

/// [`Isa::pair_up`] in vectors of 16 lanes; returns how many pairs these make.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn pair_up16(first: &[f32], second: &[f32], out: &mut [f32]) -> usize {
    let (first, second, out) = (first.as_chunks::<LANES>().0, second.as_chunks::<LANES>().0, out.as_chunks_mut().0);
    for (out, (first, second)) in out.iter_mut().zip(first.iter().zip(second)) {
        let out: &mut [f32; LANES] = out;
        // SAFETY: whole vectors are read and written, and a vector of bf16 has the bits of its values.
        unsafe {
            let [first, second] = [first, second].map(|values| {
                let rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(values.as_ptr()));
                _mm512_cvtepu16_epi32(std::mem::transmute::<__m256bh, __m256i>(rounded))
            });
            let pairs = _mm512_or_si512(first, _mm512_slli_epi32::<16>(second));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs);
        }
    }
    first.len().min(second.len()) * LANES
}

#[cfg(test)]
mod tests {
    use super::super::{
        Form, Instructions, LANES, Left, PANEL, Product, ROWS, RoundedRows, Write, every_isa, with_rounded,
    };
    use super::*;
    use crate::geometry::Geometry;
    use crate::grid::Tile;
    use crate::packed::{Packed, Panels};
    use crate::row_stride::row_stride;
    use crate::skip::leave_out;
    use crate::weight_data::WeightData;

    /// In plain arithmetic, and by the instruction where the processor has it.
    fn both_ways() -> Vec<Isa> {
        let rounding = Isa::at_most(Instructions::Avx512).rounding();
        if !rounding.rounds() {
            leave_out("no AVX512_BF16, or none that is faster than AVX-512");
        }
        [Isa::at_most(Instructions::Portable)].into_iter().chain(rounding.rounds().then_some(rounding)).collect()
    }

    /// What the values of a row become.
    fn rounded(row: &[f32]) -> Vec<f32> {
        row.iter().map(|value| bf16::from_f32(*value).to_f32()).collect()
    }

    #[test]
    fn rows_are_rounded_to_the_nearest_bf16() {
        let halfway =
            [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x3f80_7fff, 0xbf81_8000, 0x7f7f_ffff].map(f32::from_bits);
        let mut row: Vec<f32> = (0..90).map(|i| (i as f32 * 0.37).sin() * 10f32.powi(i % 30 - 15)).collect();
        row.extend(halfway);
        row.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        for isa in both_ways() {
            for inner in 0..row.len() {
                let mut pairs = vec![9.0; inner.div_ceil(2)];
                isa.round_to_pairs(&row[..inner], &mut pairs);
                let found: Vec<f32> = pairs.into_iter().flat_map(values).collect();
                let mut expected = rounded(&row[..inner]);
                expected.resize(found.len(), 0.0);
                let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(found.iter().zip(&expected).all(same), "{isa:?} {inner}: {found:?}");
            }
        }
    }

    #[test]
    fn values_in_the_same_place_are_paired_up() {
        let row: Vec<f32> = (0..140).map(|i| (i as f32 * 0.37).sin()).collect();
        for isa in both_ways() {
            for len in [0, 1, 16, 33, 70] {
                let (first, second) = (&row[..len], &row[70..][..len]);
                let mut found = vec![0.0; len];
                isa.pair_up(first, second, &mut found);
                let expected: Vec<f32> =
                    first.iter().zip(second).map(|(first, second)| pair(*first, *second)).collect();
                let bits = |pairs: &[f32]| pairs.iter().map(|pair| pair.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{isa:?} {len}");
                assert!(found.iter().zip(first).all(|(found, first)| values(*found)[0] == nearest_bf16(*first)));
            }
        }
    }

    /// `columns` columns, from `first` on, of `rows` rows of one matrix whose values are all bf16.
    fn product(isa: Isa, left: Left<'_>, weights: &Packed, [first, columns]: [usize; 2], write: Write<'_>) -> Vec<f32> {
        let Panels::Bf16(panels) = weights.panels() else { panic!("not packed as it is stored") };
        let mut out = vec![2.0; left.starts.len() * columns];
        let rows: Vec<usize> = (0..left.starts.len()).collect();
        let right = weights.geometry().right(panels, 0, 0, first / PANEL).pairs();
        with_rounded((isa, Form::Pairs), left, None, |left| {
            Product { left, right, rows: &rows, first_column: 0, columns, write, scales: None, ahead: None }
                .compute(isa, &mut Tile::dense(&mut out, columns));
        });
        out
    }

    fn weights(inner: usize, columns: usize, value: impl Fn(usize) -> f32) -> (Vec<f32>, Packed) {
        let values: Vec<bf16> = (0..inner * columns).map(|i| bf16::from_f32(value(i))).collect();
        let geometry = Geometry { matrices: 1, blocks: 1, inner, columns };
        let packed = Packed::new(geometry, WeightData::Bf16(&values)).unwrap();
        (values.into_iter().map(bf16::to_f32).collect(), packed)
    }

    /// Small integers, so that every order of adding is exact.
    #[test]
    #[cfg_attr(miri, ignore = "too many products")]
    fn every_block_of_pairs_is_exact() {
        for inner in [1, 2, 3, 33, 70] {
            let left: Vec<f32> = (0..ROWS * inner).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
            for columns in [1, 15, 16, 17, 32, 33, 70, 128, 150] {
                let (wide, packed) = weights(inner, columns, |i| (i * 5 % 13) as f32 - 6.0);
                for (isa, count) in both_ways().into_iter().flat_map(|isa| (1..=ROWS).map(move |count| (isa, count))) {
                    let starts: Vec<usize> = (0..count).map(|row| row * inner).collect();
                    let factors: Vec<f32> = (0..count).map(|row| 3.0 - row as f32).collect();
                    let left = Left::new(&left, &starts, inner);
                    for (write, before) in
                        [(Write::Replace, 0.0), (Write::Resume(&factors), 2.0), (Write::AddScaled(&factors), 2.0)]
                    {
                        let found = product(isa, left, &packed, [0, columns], write);
                        for (place, found) in found.into_iter().enumerate() {
                            let (row, column) = (place / columns, place % columns);
                            let terms = (0..inner).map(|l| left.data[row * inner + l] * wide[l * columns + column]);
                            let sum: f32 = terms.sum();
                            let expected = match write {
                                Write::Replace => sum,
                                Write::Resume(_) => factors[row] * before + sum,
                                Write::AddScaled(_) => before + factors[row] * sum,
                            };
                            assert_eq!(found, expected, "{isa:?} {count}x{inner}x{columns} at {row}, {column}");
                        }
                    }
                }
            }
        }
    }

    /// Neither the block, nor the columns beside, nor who has rounded the rows, changes a bit; and both ways add alike.
    #[test]
    #[cfg_attr(miri, ignore = "too many products")]
    fn pairs_have_the_same_bits_in_every_block() {
        for inner in [100, 333] {
            let stride = row_stride(inner);
            let rows: Vec<f32> = (0..ROWS * stride).map(|i| (i as f32 * 0.37).sin()).collect();
            let half = stride / 2;
            let mut pairs = vec![0.0; ROWS * half];
            let (_, packed) = weights(inner, 5 * PANEL, |i| (i as f32 * 0.11).cos());
            let starts: Vec<usize> = (0..ROWS).map(|row| row * stride).collect();
            let all = Left::new(&rows, &starts, inner);
            let whole = product(Isa::at_most(Instructions::Portable), all, &packed, [0, 5 * PANEL], Write::Replace);
            for isa in both_ways() {
                for (row, pairs) in rows.chunks(stride).zip(pairs.chunks_mut(half)) {
                    isa.round_to_pairs(&row[..inner], &mut pairs[..inner.div_ceil(2)]);
                }
                let rounded = RoundedRows { form: Form::Pairs, data: &pairs, stride: half, of: stride, blocks: 0 };
                for left in [all, Left { rounded: Some(rounded), ..all }] {
                    for (first, count) in (0..ROWS).map(|row| (row, 1)).chain([(0, ROWS), (3, 2), (1, 3), (4, 7)]) {
                        let left = Left { starts: &starts[first..first + count], ..left };
                        for [column, columns] in [[0, 5 * PANEL], [2 * PANEL, 9], [PANEL, PANEL + LANES]] {
                            let found = product(isa, left, &packed, [column, columns], Write::Replace);
                            for (row, found) in found.chunks(columns).enumerate() {
                                let expected = &whole[(first + row) * 5 * PANEL + column..][..columns];
                                assert_eq!(found, expected, "{isa:?} {inner} {first} {count} {column}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_level_multiplies_pairs() {
        for isa in every_isa() {
            let (_, packed) = weights(6, 150, |i| (i % 7) as f32);
            let left = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, -1.0];
            let plain = Isa::at_most(Instructions::Portable);
            for starts in [&[0][..], &[0, 2, 1]] {
                let left = Left::new(&left, starts, 6);
                let [found, expected] = [isa, plain].map(|isa| product(isa, left, &packed, [0, 150], Write::Replace));
                assert_eq!(found, expected, "{isa:?}");
            }
        }
    }
}
