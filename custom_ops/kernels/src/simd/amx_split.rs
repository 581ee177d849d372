//! f32 as the sum of bf16 parts, in the layout of tiles.
//!
//! `x = high + middle + low` exactly, for every finite `x` below 2^127: `high` is `x` rounded to the 8 bits of a bf16,
//! so the rest has 16 bits and is at most 2^-8 of `x`; `middle` is the rest cut to 8 bits; `low` has the bits that are
//! left, 8 at most. A value that is a bf16 is its own `high`, and one of 11 bits (an f16, or an int4 with its scale)
//! has no `low`.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_maskz_loadu_ps,
    _mm512_max_epu32, _mm512_min_epu32, _mm512_or_si512, _mm512_permutex2var_epi16, _mm512_permutexvar_epi16,
    _mm512_reduce_max_epu32, _mm512_reduce_min_epu32, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_srli_epi32, _mm512_storeu_si512, _mm512_sub_epi32, _mm512_sub_ps,
};

use std::ops::Range;

use half::bf16;

use super::avx512_softmax::first_lanes;
use super::element::UPPER;
use super::magnitudes::Magnitudes;
use super::product::LINE;
use super::tiles::{PARTS, STEP, TILE, TILE_LEN};
use super::{Element, LANES, PANEL};

/// The upper halves of two vectors, one after the other.
static IN_TURN: [u16; 32] = upper_halves(false);

/// The upper halves of two vectors in pairs, one of each.
static IN_PAIRS: [u16; 32] = upper_halves(true);

/// The halves of a vector of words in pairs, one of each.
static BOTH_HALVES: [u16; 32] = {
    let (mut order, mut lane) = ([0; 32], 0);
    while lane < 16 {
        (order[2 * lane], order[2 * lane + 1]) = (lane as u16, 16 + lane as u16);
        lane += 1;
    }
    order
};

const fn upper_halves(pairs: bool) -> [u16; 32] {
    let (mut order, mut lane) = ([0; 32], 0);
    while lane < 16 {
        let (first, second) = if pairs { (2 * lane, 2 * lane + 1) } else { (lane, 16 + lane) };
        order[first] = 2 * lane as u16 + 1;
        order[second] = 2 * lane as u16 + 33;
        lane += 1;
    }
    order
}

/// Half of the lowest bit that `high` keeps.
pub(super) const HALF: i32 = 0x8000;

/// Bytes between what is split and what is fetched for later: two pages, since processors look ahead within one.
pub(super) const AHEAD: usize = 8192;

/// The order of [`IN_PAIRS`] for `vpermt2w`.
#[target_feature(enable = "avx512f")]
pub(super) fn pairs() -> __m512i {
    // SAFETY: the array has the size of a vector.
    unsafe { _mm512_loadu_si512(IN_PAIRS.as_ptr().cast()) }
}

/// The order of [`IN_TURN`] for `vpermt2w`.
#[target_feature(enable = "avx512f")]
pub(super) fn in_turn() -> __m512i {
    // SAFETY: the array has the size of a vector.
    unsafe { _mm512_loadu_si512(IN_TURN.as_ptr().cast()) }
}

/// Writes the parts of one row of a step of a strip: `values`, in the `order` of [`in_turn`].
///
/// # Safety
///
/// Lines of all parts must be ours to write from `out` on; the processor must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn store_step([a, b]: [__m512; 2], order: __m512i, out: *mut bf16) {
    // SAFETY: by the caller's promise.
    unsafe { store_parts([parts(a), parts(b)], order, out) }
}

/// As [`store_step`] of values whose parts are known.
///
/// # Safety
///
/// As for [`store_step`].
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn store_parts([a, b]: [[__m512i; PARTS]; 2], order: __m512i, out: *mut bf16) {
    for (part, (a, b)) in a.into_iter().zip(b).enumerate() {
        // SAFETY: by the caller's promise.
        unsafe { _mm512_storeu_si512(out.add(part * 2 * TILE_LEN).cast(), _mm512_permutex2var_epi16(a, order, b)) };
    }
}

/// Parts of 16 values, each in the upper half of a lane; what stands in the lower halves has no meaning.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn parts(x: __m512) -> [__m512i; PARTS] {
    let (half, upper) = (_mm512_set1_epi32(HALF), _mm512_set1_epi32(UPPER));
    let high = _mm512_add_epi32(_mm512_castps_si512(x), half);
    let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(high, upper)));
    let middle = _mm512_castps_si512(rest);
    let low = _mm512_sub_ps(rest, _mm512_castsi512_ps(_mm512_and_si512(middle, upper)));
    [high, middle, _mm512_castps_si512(low)]
}

/// [`Magnitudes`] of each lane.
#[derive(Clone, Copy)]
struct Lanes {
    largest: __m512i,
    below_smallest: __m512i,
}

impl Lanes {
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn new() -> Self {
        Self { largest: _mm512_setzero_si512(), below_smallest: _mm512_set1_epi32(-1) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn take(&mut self, x: __m512) {
        let magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX));
        self.largest = _mm512_max_epu32(self.largest, magnitude);
        let below = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(1));
        self.below_smallest = _mm512_min_epu32(self.below_smallest, below);
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn join(self) -> Magnitudes {
        Magnitudes {
            largest: _mm512_reduce_max_epu32(self.largest),
            below_smallest: _mm512_reduce_min_epu32(self.below_smallest),
        }
    }
}

/// Splits `inner` elements of some rows into the tiles of a strip, from row `row` on, zeros after them; of no values
/// where they are not to be judged. Rows side by side fill neighbouring lines of the strip.
///
/// # Safety
///
/// `inner` elements of each row at `from` must be readable; `ceil(inner / STEP)` steps of a strip must be ours to write
/// at `strip`, of which the rows lie in one tile; the processor must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn rows<const N: usize, const JUDGE: bool>(
    from: [*const f32; N],
    inner: usize,
    strip: *mut bf16,
    row: usize,
) -> [Magnitudes; N] {
    let mut lanes = [Lanes::new(); N];
    // SAFETY: by the caller's promise; masks keep the last loads inside a row.
    unsafe {
        let order = in_turn();
        let mut out = strip.add(row / TILE * TILE_LEN + row % TILE * STEP);
        let mut step = |load: &dyn Fn(*const f32) -> [__m512; 2]| {
            for (row, (from, lanes)) in from.iter().zip(&mut lanes).enumerate() {
                let [a, b] = load(*from);
                if JUDGE {
                    lanes.take(a);
                    lanes.take(b);
                }
                store_step([a, b], order, out.add(row * STEP));
            }
            out = out.wrapping_add(PARTS * 2 * TILE_LEN);
        };
        let whole = inner / STEP * STEP;
        for first in (0..whole).step_by(STEP) {
            step(&|from| [_mm512_loadu_ps(from.add(first)), _mm512_loadu_ps(from.add(first + LANES))]);
        }
        if whole < inner {
            let left = inner - whole;
            let masks = [first_lanes(left), first_lanes(left.saturating_sub(LANES))];
            step(&|from| {
                let from = from.add(whole);
                [_mm512_maskz_loadu_ps(masks[0], from), _mm512_maskz_loadu_ps(masks[1], from.wrapping_add(LANES))]
            });
        }
    }
    lanes.map(|lanes| if JUDGE { lanes.join() } else { Magnitudes::default() })
}

/// Rounds `inner` elements of some rows into the tiles of a strip of one part, from row `row` on, zeros after them.
///
/// # Safety
///
/// `inner` elements of each row at `from` must be readable; `ceil(inner / STEP)` steps of a strip of one part must be
/// ours to write at `strip`, of which the rows lie in one tile; the processor must have AVX-512 F and AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn round_rows<const N: usize>(from: [*const f32; N], inner: usize, strip: *mut bf16, row: usize) {
    let mut out = strip.wrapping_add(row / TILE * TILE_LEN + row % TILE * STEP);
    // SAFETY: by the caller's promise; masks keep the last loads inside a row.
    unsafe {
        let whole = inner / STEP * STEP;
        for first in (0..whole).step_by(STEP) {
            for (row, from) in from.iter().enumerate() {
                let from = from.add(first);
                store_rounded([_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(LANES))], out.add(row * STEP));
            }
            out = out.wrapping_add(2 * TILE_LEN);
        }
        if whole < inner {
            let left = inner - whole;
            let [low, high] = [first_lanes(left), first_lanes(left.saturating_sub(LANES))];
            for (row, from) in from.iter().enumerate() {
                let from = from.add(whole);
                let both = [_mm512_maskz_loadu_ps(low, from), _mm512_maskz_loadu_ps(high, from.wrapping_add(LANES))];
                store_rounded(both, out.add(row * STEP));
            }
        }
    }
}

/// Writes one row of a step of a strip of one part: `values`, rounded.
///
/// # Safety
///
/// A line must be ours to write at `out`; the processor must have AVX-512 F and AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
pub(super) unsafe fn store_rounded([a, b]: [__m512; 2], out: *mut bf16) {
    // SAFETY: by the caller's promise; a vector of bf16 has the bits of its values.
    unsafe {
        let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(b, a));
        _mm512_storeu_si512(out.cast(), rounded);
    }
}

/// Splits `inner` rows of a panel into tiles of pairs of rows, zeros after them: the pairs `pairs` of every tile.
///
/// # Safety
///
/// Rows of [`PANEL`] elements for `inner` steps, `stride` elements apart, must be readable at `from`; `ceil(inner /
/// STEP)` steps of a panel of `W::PARTS` parts must be ours to write at `panel`; the processor must have AVX-512 F and
/// BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn panel<W: Element>(
    from: *const W,
    stride: usize,
    inner: usize,
    panel: *mut bf16,
    pairs: Range<usize>,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let order = self::pairs();
        for step in 0..inner.div_ceil(STEP) {
            for pair in pairs.clone() {
                let out = panel.add(step * W::PARTS * 2 * TILE_LEN + pair * STEP);
                let row = step * STEP + 2 * pair;
                for row in [row, row + 1] {
                    for begun in W::begun(row) {
                        let ahead = from.wrapping_add(W::group(row, stride) + begun * stride).wrapping_byte_add(AHEAD);
                        for line in (0..PANEL * size_of::<W>()).step_by(LINE) {
                            _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_byte_add(line).cast());
                        }
                    }
                }
                for half in 0..PANEL / LANES {
                    let load = |row: usize| match row < inner {
                        true => W::load16(from.add(W::group(row, stride) + half * LANES), row % W::STEPS),
                        false => _mm512_setzero_ps(),
                    };
                    let (a, b) = (load(row), load(row + 1));
                    for (part, (a, b)) in parts(a).into_iter().zip(parts(b)).enumerate().take(W::PARTS) {
                        let out = out.add((2 * part + half) * TILE_LEN);
                        _mm512_storeu_si512(out.cast(), _mm512_permutex2var_epi16(a, order, b));
                    }
                }
            }
        }
    }
}

/// Rounds `inner` rows of [`PANEL`] values into pairs of rows in bf16, zeros after the last up to a whole [`STEP`].
///
/// # Safety
///
/// `inner` rows must be readable at `from` and a panel of one part ours to write at `out`; the processor must have
/// AVX-512 F and BW, and AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn round_panel(from: *const f32, inner: usize, out: *mut bf16) {
    // SAFETY: by the caller's promise; a vector of bf16 has the bits of its values.
    unsafe {
        let order = _mm512_loadu_si512(BOTH_HALVES.as_ptr().cast());
        for row in (0..inner.next_multiple_of(STEP)).step_by(2) {
            for first in (0..PANEL).step_by(LANES) {
                let load = |row: usize| match row < inner {
                    true => _mm512_loadu_ps(from.add(row * PANEL + first)),
                    false => _mm512_setzero_ps(),
                };
                let both: __m512bh = _mm512_cvtne2ps_pbh(load(row + 1), load(row));
                let both = std::mem::transmute::<__m512bh, __m512i>(both);
                let pairs = _mm512_permutexvar_epi16(order, both);
                _mm512_storeu_si512(out.add(row * PANEL + 2 * first).cast(), pairs);
            }
        }
    }
}

/// Writes `inner` rows of [`PANEL`] integers as pairs of rows in bf16, zeros after the last; where `FETCH`, what
/// stands [`AHEAD`] is fetched.
///
/// # Safety
///
/// `inner` rows must be readable at `from` and `ceil(inner / 2)` rows of as many pairs ours to write at `out`; the
/// processor must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pair_integers<const FETCH: bool>(from: *const i8, inner: usize, out: *mut bf16) {
    // SAFETY: by the caller's promise.
    unsafe {
        for row in (0..inner).step_by(2) {
            if FETCH {
                _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(row * PANEL).wrapping_byte_add(AHEAD));
            }
            for first in (0..PANEL).step_by(LANES) {
                let load = |row: usize| match row < inner {
                    true => _mm512_castps_si512(i8::load16(from.add(row * PANEL + first), 0)),
                    false => _mm512_setzero_si512(),
                };
                // The lower half of the f32 of an int8 is 0.
                let both = _mm512_or_si512(_mm512_srli_epi32::<16>(load(row)), load(row + 1));
                _mm512_storeu_si512(out.add(row * PANEL + 2 * first).cast(), both);
            }
        }
    }
}

/// Magnitudes of the values in `count` elements, whole groups of rows of [`PANEL`].
///
/// # Safety
///
/// `count` elements must be readable at `from`; the processor must have AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn magnitudes<W: Element>(from: *const W, count: usize) -> Magnitudes {
    let mut lanes = Lanes::new();
    for group in (0..count).step_by(W::ROWS * PANEL) {
        for first in (group..group + PANEL).step_by(LANES) {
            for step in 0..W::STEPS {
                // SAFETY: by the caller's promise.
                lanes.take(unsafe { W::load16(from.add(first), step) });
            }
        }
    }
    lanes.join()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skip::skip;

    #[test]
    fn panels_are_rounded_and_paired_by_rows() {
        if !is_x86_feature_detected!("avx512bf16") || !is_x86_feature_detected!("avx512bw") {
            return skip("no AVX512_BF16");
        }
        for inner in [1, 2, 7, 32, 65] {
            let panel: Vec<f32> = (0..inner * PANEL).map(|index| (index as f32 - 99.0) / 7.0).collect();
            let mut pairs = vec![bf16::NAN; inner.next_multiple_of(STEP) * PANEL];
            // SAFETY: the sizes are those that the rows need, and the processor was asked.
            unsafe { round_panel(panel.as_ptr(), inner, pairs.as_mut_ptr()) };
            for (place, pair) in pairs.iter().enumerate() {
                let (row, column, step) = (place / (2 * PANEL), place / 2 % PANEL, place % 2);
                let value = panel.get((2 * row + step) * PANEL + column).copied().unwrap_or(0.0);
                assert_eq!(*pair, bf16::from_f32(value), "{inner}: {place}");
            }
        }
    }

    #[test]
    fn integers_are_paired_by_rows() {
        if !is_x86_feature_detected!("avx512f") || !is_x86_feature_detected!("avx512bw") {
            return skip("no AVX-512 BW");
        }
        for inner in [1, 2, 7, 64] {
            let integers: Vec<i8> = (0..inner * PANEL).map(|index| (index * 37 % 255) as u8 as i8).collect();
            let mut pairs = vec![bf16::NAN; inner.next_multiple_of(2) * PANEL];
            // SAFETY: the sizes are those that the rows need, and the processor was asked.
            unsafe { pair_integers::<false>(integers.as_ptr(), inner, pairs.as_mut_ptr()) };
            for (place, pair) in pairs.iter().enumerate() {
                let (row, column, step) = (place / (2 * PANEL), place / 2 % PANEL, place % 2);
                let integer = integers.get((2 * row + step) * PANEL + column).copied().unwrap_or(0);
                assert_eq!(pair.to_f32(), f32::from(integer), "{inner}: {place}");
            }
        }
    }
}
