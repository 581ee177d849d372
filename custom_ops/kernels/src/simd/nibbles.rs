//! Weights in 4-bit integers with a scale for each 32 of them.
//!
//! A group is 64 inner steps in nine rows: first the scales, in bf16, of both halves side by side, then integers, eight
//! steps of a column in a lane, the first in its lowest bits. A weight is its integer times its scale: 11 bits at most,
//! so that the product is exact, and nothing is left to do once weights are summed.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::{
    float32x4_t, uint32x4_t, vandq_u32, vcvtq_f32_s32, vdupq_n_u32, vld1q_u32, vmulq_f32, vreinterpretq_f32_u32,
    vreinterpretq_s32_u32, vshlq_n_u32, vshrq_n_s32, vshrq_n_u32,
};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512i, _mm256_and_si256, _mm256_castsi256_ps, _mm256_cvtepi32_ps, _mm256_loadu_si256,
    _mm256_mul_ps, _mm256_set1_epi32, _mm256_slli_epi32, _mm256_sllv_epi32, _mm256_srai_epi32, _mm256_srli_epi32,
    _mm256_srlv_epi32, _mm512_and_si512, _mm512_castsi512_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_permutexvar_ps,
    _mm512_set1_epi32, _mm512_setr_ps, _mm512_sllv_epi32, _mm512_srli_epi32, _mm512_srlv_epi32,
};
#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use moa_schema::BLOCK;

use super::element::UPPER;
use super::product::Kernel;
use super::{Element, Isa, PANEL, Packable, Place, quantized};
use crate::weight_data::Int4;

/// Bits of an integer.
const BITS: usize = 4;

/// Eight integers of a column, or two of its scales.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Nibbles(u32);

impl Nibbles {
    /// Adds the integers from place `first` of `values` on, one to each of `out`, `shift` bits up.
    fn add(out: &mut [Self], values: &[u8], first: usize, shift: usize) {
        let add = |out: &mut Self, integer: u8| out.0 |= u32::from(integer & 15) << shift;
        let (alone, pairs) = out.split_at_mut((first % 2).min(out.len()));
        alone.iter_mut().for_each(|out| add(out, values[first / 2] >> BITS));
        let (pairs, last) = pairs.as_chunks_mut::<2>();
        let values = &values[first.div_ceil(2)..];
        for ([early, late], both) in pairs.iter_mut().zip(values) {
            add(early, *both);
            add(late, *both >> BITS);
        }
        last.iter_mut().for_each(|out| add(out, values[pairs.len()]));
    }

    /// The row of a group that holds the integers of step `step`.
    pub(super) const fn row(step: usize) -> usize {
        1 + step % Self::STEPS / Self::EACH
    }

    /// The integer of step `step` of one column, and its scale.
    ///
    /// # Safety
    ///
    /// As [`Element::load`].
    pub(super) unsafe fn integer_and_scale(from: *const Self, step: usize) -> (i32, f32) {
        // SAFETY: by the caller's promise.
        let [integers, scales] = unsafe { [*from.add(Self::row(step) * PANEL), *from] };
        let shift = (Self::EACH - 1 - step % Self::EACH) * BITS;
        let integer = (integers.0 << shift).cast_signed() >> ((Self::EACH - 1) * BITS);
        (integer, f32::from_bits(scales.0 << scale_shift(step) & UPPER.cast_unsigned()))
    }
}

/// The scales of step `step`, of both halves of a group, as f32.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
#[inline]
pub(super) fn scales4(both: uint32x4_t, step: usize) -> uint32x4_t {
    match scale_shift(step) {
        0 => vandq_u32(both, vdupq_n_u32(UPPER.cast_unsigned())),
        _ => vshlq_n_u32::<16>(both),
    }
}

/// Bits that the scale of step `step` is below the upper half of a lane.
pub(super) const fn scale_shift(step: usize) -> i32 {
    if (step / BLOCK).is_multiple_of(2) { 16 } else { 0 }
}

impl Packable for Nibbles {
    type Source<'a> = Int4<'a>;

    fn pack(Int4 { values, scales }: Int4<'_>, place: &Place, out: &mut [Self]) {
        out.fill(Self::default());
        for half in 0..place.rows.div_ceil(BLOCK) {
            let scales = &scales[place.scale + half * place.stride..][..place.columns];
            for (out, scale) in out.iter_mut().zip(scales) {
                out.0 |= u32::from(scale.to_bits()) << (16 * half);
            }
        }
        for row in 0..place.rows {
            let out = &mut out[Self::row(row) * PANEL..][..place.columns];
            Self::add(out, values, place.first + row * place.stride, row % Self::EACH * BITS);
        }
    }

    fn holds(group: &[Self], source: Int4<'_>, place: &Place) -> bool {
        let mut packed = [Self::default(); Self::ROWS * PANEL];
        Self::pack(source, place, &mut packed);
        group == packed
    }
}

impl Element for Nibbles {
    const STEPS: usize = 2 * BLOCK;

    const ROWS: usize = 1 + Self::STEPS / Self::EACH;

    const EACH: usize = 8;

    const PARTS: usize = 2;

    fn quantized_kernel(isa: Isa, rows: usize, vectors: usize) -> Option<Kernel<Self>> {
        Some(quantized::kernel(isa, rows, vectors))
    }

    unsafe fn load(from: *const Self, step: usize) -> f32 {
        // SAFETY: by the caller's promise.
        let (integer, scale) = unsafe { Self::integer_and_scale(from, step) };
        integer as f32 * scale
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn row16(from: *const Self, step: usize) -> [__m512i; 2] {
        // SAFETY: by the caller's promise.
        let [integers, scales] =
            unsafe { [from.add(Self::row(step) * PANEL), from].map(|from| _mm512_loadu_si512(from.cast())) };
        let integers = _mm512_srlv_epi32(integers, _mm512_set1_epi32((step % Self::EACH * BITS) as i32));
        let scale = _mm512_sllv_epi32(scales, _mm512_set1_epi32(scale_shift(step)));
        [integers, _mm512_and_si512(scale, _mm512_set1_epi32(UPPER))]
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn next16([integers, scale]: &mut [__m512i; 2]) -> __m512 {
        let values =
            _mm512_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0);
        // A permutation reads four bits of a lane.
        let value = _mm512_permutexvar_ps(*integers, values);
        *integers = _mm512_srli_epi32::<{ BITS as u32 }>(*integers);
        _mm512_mul_ps(value, _mm512_castsi512_ps(*scale))
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn row8(from: *const Self, step: usize) -> [__m256i; 2] {
        // SAFETY: by the caller's promise.
        let [integers, scales] =
            unsafe { [from.add(Self::row(step) * PANEL), from].map(|from| _mm256_loadu_si256(from.cast())) };
        let integers = _mm256_srlv_epi32(integers, _mm256_set1_epi32((step % Self::EACH * BITS) as i32));
        let scale = _mm256_sllv_epi32(scales, _mm256_set1_epi32(scale_shift(step)));
        [integers, _mm256_and_si256(scale, _mm256_set1_epi32(UPPER))]
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn next8([integers, scale]: &mut [__m256i; 2]) -> __m256 {
        let value = _mm256_srai_epi32::<28>(_mm256_slli_epi32::<28>(*integers));
        *integers = _mm256_srli_epi32::<{ BITS as i32 }>(*integers);
        _mm256_mul_ps(_mm256_cvtepi32_ps(value), _mm256_castsi256_ps(*scale))
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn row4(from: *const Self, step: usize) -> [uint32x4_t; 2] {
        // SAFETY: by the caller's promise.
        let [integers, scales] =
            unsafe { [from.add(Self::row(step) * PANEL), from].map(|from| vld1q_u32(from.cast())) };
        let shift = |integers, _| vshrq_n_u32::<{ BITS as i32 }>(integers);
        let integers = (0..step % Self::EACH).fold(integers, shift);
        [integers, scales4(scales, step)]
    }

    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    #[inline]
    unsafe fn next4([integers, scale]: &mut [uint32x4_t; 2]) -> float32x4_t {
        let value = vshrq_n_s32::<28>(vreinterpretq_s32_u32(vshlq_n_u32::<28>(*integers)));
        *integers = vshrq_n_u32::<{ BITS as i32 }>(*integers);
        vmulq_f32(vcvtq_f32_s32(value), vreinterpretq_f32_u32(*scale))
    }

    #[cfg(target_arch = "x86_64")]
    fn begun(step: usize) -> Range<usize> {
        match step % Self::STEPS {
            0 => 0..2,
            step if step.is_multiple_of(Self::EACH) => Self::row(step)..Self::row(step) + 1,
            _ => 0..0,
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::geometry::Geometry;
    use crate::packed::{Packed, Panels};
    use crate::weight_data::WeightData;

    /// Rows begin in the middle of a byte, groups and blocks end early, and so do panels.
    const GEOMETRY: Geometry = match cfg!(miri) {
        true => Geometry { matrices: 1, blocks: 3, inner: 67, columns: 37 },
        false => Geometry { matrices: 2, blocks: 3, inner: 107, columns: 37 },
    };

    /// Every step of every column, by each way to read it.
    #[test]
    fn every_weight_is_its_integer_times_its_scale() {
        let Geometry { matrices, blocks, inner, columns } = GEOMETRY;
        let row = blocks * columns;
        let values: Vec<u8> = (0..GEOMETRY.len().div_ceil(2)).map(|i| (i * 151 % 256) as u8).collect();
        let scales: Vec<bf16> = (0..matrices * inner.div_ceil(BLOCK) * row)
            .map(|i| bf16::from_bits(0x3f80 ^ (i as u16 & 0x7f) ^ (i as u16 & 1) << 15 ^ (i as u16 & 2) << 11))
            .collect();
        let source = WeightData::I4(Int4 { values: &values, scales: &scales });
        let packed = Packed::new(GEOMETRY, source).unwrap();
        let Panels::I4(panels) = packed.panels() else { panic!("not packed as it is stored") };
        for (matrix, block, panel) in (0..matrices * blocks * 2).map(|i| (i / 2 / blocks, i / 2 % blocks, i % 2)) {
            let panel_of = GEOMETRY.right(panels, matrix, block, panel);
            for step in 0..inner {
                let group = &panel_of.data[Nibbles::group(step, PANEL)..];
                for column in 0..PANEL.min(columns - panel * PANEL) {
                    let place = block * columns + panel * PANEL + column;
                    let index = (matrix * inner + step) * row + place;
                    let integer = (values[index / 2] << (4 - index % 2 * 4)).cast_signed() >> 4;
                    let scale = scales[(matrix * inner.div_ceil(BLOCK) + step / BLOCK) * row + place];
                    let expected = f32::from(integer) * scale.to_f32();
                    // SAFETY: the group has all of its rows.
                    let found = unsafe { Nibbles::load(group.as_ptr().wrapping_add(column), step) };
                    assert_eq!(found, expected, "{matrix} {block} {step} {column}");
                }
                vectors_are_columns(group, step);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn vectors_are_columns(group: &[Nibbles], step: usize) {
        use crate::simd::{Instructions, Isa, LANES};

        let isa = Isa::at_most(Instructions::default());
        for first in (0..PANEL).step_by(LANES) {
            let from = group.as_ptr().wrapping_add(first);
            // SAFETY: the group has all of its rows, and the processor was asked.
            unsafe {
                let columns: [f32; LANES] = std::array::from_fn(|lane| Nibbles::load(from.add(lane), step));
                if isa.has_wide_vectors() {
                    assert_eq!(std::mem::transmute::<__m512, [f32; LANES]>(Nibbles::load16(from, step)), columns);
                    let mut row = Nibbles::row16(from, step - step % Nibbles::EACH);
                    let lanes = (0..=step % Nibbles::EACH).map(|_| Nibbles::next16(&mut row)).last().unwrap();
                    assert_eq!(std::mem::transmute::<__m512, [f32; LANES]>(lanes), columns);
                }
                if isa.has_wide_vectors() || isa.has_narrow_vectors() {
                    let halves = [0, LANES / 2].map(|half| Nibbles::load8(from.add(half), step));
                    assert_eq!(std::mem::transmute::<[__m256; 2], [f32; LANES]>(halves), columns);
                }
            }
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn vectors_are_columns(group: &[Nibbles], step: usize) {
        use crate::simd::neon::WIDTH;

        for first in (0..PANEL).step_by(WIDTH) {
            let from = group.as_ptr().wrapping_add(first);
            // SAFETY: the group has all of its rows, and every aarch64 has NEON.
            unsafe {
                let columns: [f32; WIDTH] = std::array::from_fn(|lane| Nibbles::load(from.add(lane), step));
                let lanes = Nibbles::load4(from, step);
                assert_eq!(std::mem::transmute::<float32x4_t, [f32; WIDTH]>(lanes), columns);
            }
        }
    }

    #[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
    fn vectors_are_columns(_: &[Nibbles], _: usize) {}

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn rows_begin_where_they_are_read_first() {
        let begun: Vec<usize> = (0..Nibbles::STEPS).flat_map(Nibbles::begun).collect();
        assert_eq!(begun, (0..Nibbles::ROWS).collect::<Vec<_>>());
        assert_eq!([0, 63, 64, 65].map(Nibbles::rows), [0, 9, 9, 18]);
    }
}
