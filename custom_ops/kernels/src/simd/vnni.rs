//! Microkernels of quantized rows in vectors of 16 lanes, by AVX512_VNNI.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, __mmask64, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_shuffle_epi8, _mm_storeu_si128,
    _mm512_abs_ps, _mm512_add_epi32, _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cvtepi32_epi8, _mm512_cvtepi32_ps, _mm512_cvtps_epi32, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi8, _mm512_max_epu32, _mm512_mul_ps,
    _mm512_permutex2var_epi32, _mm512_reduce_add_epi32, _mm512_reduce_max_epu32, _mm512_set1_epi8, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_sllv_epi32, _mm512_srlv_epi32,
    _mm512_ternarylogic_epi32, _mm512_xor_si512,
};

use moa_schema::BLOCK;

use super::avx512::{fetch, first_term, mask, scale, store};
use super::element::UPPER;
use super::nibbles::scale_shift;
use super::product::{Kernel, LINE, PAGE, Raw};
use super::quantized::{HEAD, Integers, QUAD, WORDS, lines_of_block, scales};
use super::{Element, LANES, Nibbles, PANEL};

/// From two vectors of two rows each of a panel, the four steps of each column: those of the first 16, then others.
static TURNED: [[u8; 4 * LANES]; 2] = {
    let mut places = [[0; 4 * LANES]; 2];
    let mut place = 0;
    while place < 4 * PANEL {
        let (column, step) = (place / QUAD, place % QUAD);
        places[column / LANES][place % (4 * LANES)] = (step * PANEL + column) as u8;
        place += 1;
    }
    places
};

/// From the same vectors, four columns of each row side by side.
static FOURS: [[u32; LANES]; 2] = {
    let mut places = [[0; LANES]; 2];
    let mut place = 0;
    while place < PANEL {
        places[place / LANES][place % LANES] = (place % QUAD * (PANEL / QUAD) + place / QUAD) as u32;
        place += 1;
    }
    places
};

/// From four columns of each of four rows, the four steps of each column.
static TURNED_FOUR: [u8; LANES] = {
    let mut places = [0; LANES];
    let mut place = 0;
    while place < LANES {
        places[place] = (place % QUAD * QUAD + place / QUAD) as u8;
        place += 1;
    }
    places
};

/// Of three vectors, the first where the second has bits, other than the third.
const LOW_EXCEPT: i32 = (0xf0 & 0xcc) ^ 0xaa;

/// The microkernel for `rows` rows and `vectors` vectors of one panel; the processor may have AVX512_VBMI.
pub(super) fn kernel<W: Integers>(rows: usize, vectors: usize, vbmi: bool) -> Kernel<W> {
    if vbmi { of_rows::<W, true>(rows, vectors) } else { of_rows::<W, false>(rows, vectors) }
}

fn of_rows<W: Integers, const VBMI: bool>(rows: usize, vectors: usize) -> Kernel<W> {
    let of_rows: [Kernel<W>; 2] = match rows {
        1 => [block::<W, 1, 1, VBMI>, block::<W, 1, 2, VBMI>],
        2 => [block::<W, 2, 1, VBMI>, block::<W, 2, 2, VBMI>],
        3 => [block::<W, 3, 1, VBMI>, block::<W, 3, 2, VBMI>],
        4 => [block::<W, 4, 1, VBMI>, block::<W, 4, 2, VBMI>],
        5 => [block::<W, 5, 1, VBMI>, block::<W, 5, 2, VBMI>],
        6 => [block::<W, 6, 1, VBMI>, block::<W, 6, 2, VBMI>],
        7 => [block::<W, 7, 1, VBMI>, block::<W, 7, 2, VBMI>],
        _ => [block::<W, 8, 1, VBMI>, block::<W, 8, 2, VBMI>],
    };
    of_rows[vectors - 1]
}

/// `M` rows times `V` vectors of one panel.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds; the processor must have AVX-512 F, BW and VNNI,
/// and VBMI where that is said.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn block<W: Integers, const M: usize, const V: usize, const VBMI: bool>(raw: &Raw<W>) {
    let mut sums = [[_mm512_setzero_ps(); V]; M];
    let mut ahead = raw.fetch.from.cast::<i8>();
    // SAFETY: every pointer is in bounds by the caller's promise.
    unsafe {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                let out = raw.out[row].wrapping_add(raw.first + vector * LANES);
                *sum = first_term(raw, row, out, mask(raw.columns, vector));
            }
        }
        for first in (0..raw.inner).step_by(BLOCK) {
            add_block::<W, M, V, VBMI>(&mut sums, raw, first, &mut ahead);
        }
        scale(raw, &mut sums);
        for (row, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                let out = raw.out[row].wrapping_add(raw.first + vector * LANES);
                store(raw, row, out, mask(raw.columns, vector), sum);
            }
        }
    }
}

/// Adds the terms of the block of inner step `first`.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
unsafe fn add_block<W: Integers, const M: usize, const V: usize, const VBMI: bool>(
    sums: &mut [[__m512; V]; M],
    raw: &Raw<W>,
    first: usize,
    ahead: &mut *const i8,
) {
    let steps = BLOCK.min(raw.inner - first);
    let mut terms = [[_mm512_setzero_si512(); V]; M];
    let left: [*const f32; M] = std::array::from_fn(|row| raw.left[row].wrapping_add(first / BLOCK * raw.blocks));
    // SAFETY: every pointer is in bounds by the caller's promise.
    unsafe {
        for (terms, left) in terms.iter_mut().zip(left) {
            let raised = (*left.add(1)).to_bits() << W::UP;
            *terms = [_mm512_set1_epi32(raised.wrapping_neg().cast_signed()); V];
        }
        for quad in 0..BLOCK / QUAD {
            if M == 1 && raw.fetch.next {
                fetch_own(raw.right, first, quad);
            } else {
                *ahead = fetch(&raw.fetch, *ahead);
            }
            let weights = W::quad::<VBMI>(raw.right, first + quad * QUAD, steps.saturating_sub(quad * QUAD));
            for (terms, left) in terms.iter_mut().zip(left) {
                let integers = _mm512_set1_epi32(left.add(HEAD + quad).cast::<i32>().read());
                for (terms, weights) in terms.iter_mut().zip(weights) {
                    *terms = _mm512_dpbusd_epi32(*terms, weights, integers);
                }
            }
        }
        let of_block = W::block_scales(raw.right, first);
        for ((sums, terms), left) in sums.iter_mut().zip(terms).zip(left) {
            let of_row = _mm512_set1_ps(*left);
            for (vector, (sum, terms)) in sums.iter_mut().zip(terms).enumerate() {
                let terms = _mm512_cvtepi32_ps(terms);
                *sum = match of_block {
                    Some(scales) => _mm512_fmadd_ps(_mm512_mul_ps(terms, of_row), scales[vector], *sum),
                    None => _mm512_fmadd_ps(terms, of_row, *sum),
                };
            }
        }
    }
}

/// Fetches what a single row reads a page after the steps of `quad` of the block of step `first`.
#[target_feature(enable = "avx512f")]
#[inline]
fn fetch_own<W: Integers>(right: *const W, first: usize, quad: usize) {
    let lines = const { lines_of_block::<W>() };
    let [begin, end] = [quad, quad + 1].map(|quad| quad * lines * QUAD / BLOCK);
    let block = right.cast::<i8>().wrapping_add(first / BLOCK * lines * LINE + PAGE);
    for line in begin..end {
        _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(line * LINE));
    }
}

/// Lanes of so many bytes.
const fn bytes(count: usize) -> __mmask64 {
    if count < 64 { (1 << count) - 1 } else { u64::MAX }
}

/// [`Integers::quad`] of int8.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn quad_of_bytes<const VBMI: bool>(from: *const i8, step: usize, steps: usize) -> [__m512i; 2] {
    let load = |rows: usize| {
        let from = from.wrapping_add((step + rows) * PANEL);
        // SAFETY: by the caller's promise, rows of the steps that there are.
        unsafe {
            match steps {
                QUAD.. => _mm512_loadu_si512(from.cast()),
                _ => _mm512_maskz_loadu_epi8(bytes(steps.saturating_sub(rows) * PANEL), from),
            }
        }
    };
    let up = _mm512_set1_epi8(i8::MIN);
    let [early, late] = [0, QUAD / 2].map(|rows| _mm512_xor_si512(load(rows), up));
    let load = |places: *const __m512i| {
        // SAFETY: a vector is read.
        unsafe { _mm512_loadu_si512(places) }
    };
    if VBMI {
        // SAFETY: by the caller's promise.
        return TURNED.each_ref().map(|places| unsafe { permute_bytes(early, load(places.as_ptr().cast()), late) });
    }
    // SAFETY: a vector of 16 bytes is read.
    let turned = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(TURNED_FOUR.as_ptr().cast()) });
    FOURS
        .each_ref()
        .map(|places| _mm512_shuffle_epi8(_mm512_permutex2var_epi32(early, load(places.as_ptr().cast()), late), turned))
}

/// The bytes at `places` of two vectors. Not by an intrinsic: these are not inlined where a function may not assume
/// AVX512_VBMI.
///
/// # Safety
///
/// The processor must have AVX512_VBMI.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn permute_bytes(mut early: __m512i, places: __m512i, late: __m512i) -> __m512i {
    // SAFETY: by the caller's promise; nothing but the register changes.
    unsafe {
        asm!("vpermt2b {}, {}, {}", inout(zmm_reg) early, in(zmm_reg) places, in(zmm_reg) late,
            options(pure, nomem, nostack, preserves_flags));
    }
    early
}

/// [`Integers::quad`] of int4.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn quad_of_nibbles(from: *const Nibbles, step: usize) -> [__m512i; 2] {
    let row = from.wrapping_add(Nibbles::group(step, PANEL) + Nibbles::row(step) * PANEL);
    // Bytes hold an even step and the odd one after it.
    let odd = _mm512_set1_epi32((step / QUAD % 2 * 4) as i32);
    let (low, up) = (_mm512_set1_epi8(15), _mm512_set1_epi8(8));
    [0, LANES].map(|first| {
        // SAFETY: by the caller's promise.
        let eight = unsafe { _mm512_loadu_si512(row.wrapping_add(first).cast()) };
        _mm512_ternarylogic_epi32::<LOW_EXCEPT>(_mm512_srlv_epi32(eight, odd), low, up)
    })
}

/// [`Integers::block_scales`] of int4.
///
/// # Safety
///
/// As that.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn scales_of_nibbles(from: *const Nibbles, step: usize) -> [__m512; 2] {
    let row = from.wrapping_add(Nibbles::group(step, PANEL));
    [0, LANES].map(|first| {
        // SAFETY: by the caller's promise.
        let both = unsafe { _mm512_loadu_si512(row.wrapping_add(first).cast()) };
        let scale = _mm512_sllv_epi32(both, _mm512_set1_epi32(scale_shift(step)));
        _mm512_castsi512_ps(_mm512_and_si512(scale, _mm512_set1_epi32(UPPER)))
    })
}

/// Rounds each block to int8 in vectors of 16 lanes, of which `steps` are those of each half.
#[target_feature(enable = "avx512f")]
pub(super) fn quantize16<'a>(steps: [u8; LANES], blocks: impl Iterator<Item = ([f32; BLOCK], &'a mut [f32; WORDS])>) {
    // SAFETY: a vector of 16 bytes is read.
    let steps = unsafe { _mm_loadu_si128(steps.as_ptr().cast()) };
    for (values, out) in blocks {
        // SAFETY: two vectors are read.
        let halves = [0, LANES].map(|first| unsafe { _mm512_loadu_ps(values[first..].as_ptr()) });
        let [first, second] = halves.map(|half| _mm512_castps_si512(_mm512_abs_ps(half)));
        let [scale, inverse] = scales(_mm512_reduce_max_epu32(_mm512_max_epu32(first, second)));
        if scale.is_nan() {
            out.fill(0.0);
            out[0] = scale;
            continue;
        }
        let [first, second] = halves.map(|half| _mm512_cvtps_epi32(_mm512_mul_ps(half, _mm512_set1_ps(inverse))));
        let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
        out[..HEAD].copy_from_slice(&[scale, f32::from_bits(sum.cast_unsigned())]);
        for (out, integers) in out[HEAD..].as_chunks_mut::<{ LANES / QUAD }>().0.iter_mut().zip([first, second]) {
            let integers = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(integers), steps);
            // SAFETY: a vector of 16 bytes is written, as many as the chunk has.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), integers) };
        }
    }
}
