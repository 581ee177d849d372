//! Compact panels in vectors of 16 lanes, see `compact`.

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm512_and_si512, _mm512_broadcast_i32x4,
    _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_loadu_si512, _mm512_mask_set1_epi16, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_slli_epi32, _mm512_srli_epi16, _mm512_storeu_si512,
    _mm512_ternarylogic_epi32, _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
};

use half::bf16;

use super::avx512::mask;
use super::compact::{CompactRaw, GROUP, GROUP_STEPS, HEAD, MOST_ROWS, TABLE_WORDS};
use super::element::UPPER;
use super::product::{LINE, PAGE};
use super::{LANES, PANEL};

/// Vectors of a row of a group.
const VECTORS: usize = PANEL / LANES;

/// Pairs of steps of a group.
const PAIRS: usize = GROUP_STEPS / 2;

/// Bytes between what is read and what is fetched.
const AHEAD: usize = 2 * PAGE;

/// `(a & b) | c`, by its table.
const AND_OR: i32 = 0xea;

/// The table of a panel: what its exponents have in the upper byte of a bf16, and in the lower.
#[derive(Clone, Copy)]
struct Table([__m512i; 2]);

impl Table {
    /// # Safety
    ///
    /// The head of a panel must stand at `from`; the processor must have AVX-512 F.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load(from: *const u32) -> Self {
        // SAFETY: by the caller's promise.
        let [upper, lower] = unsafe { [from, from.wrapping_add(TABLE_WORDS)].map(|from| _mm_loadu_si128(from.cast())) };
        Self([_mm512_broadcast_i32x4(upper), _mm512_broadcast_i32x4(lower)])
    }
}

/// A group as pairs of steps, a column in each lane.
type Group = [[__m512i; VECTORS]; PAIRS];

/// The pairs of the group at `from`.
///
/// # Safety
///
/// A group must stand there; the processor must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn load(from: *const u32, table: Table) -> Group {
    let mut group = [[_mm512_setzero_si512(); VECTORS]; PAIRS];
    let four_bits = _mm512_set1_epi8(15);
    let [first, second, third, fourth] = &mut group;
    let vectors = first.iter_mut().zip(second).zip(third).zip(fourth);
    for (vector, (((first, second), third), fourth)) in vectors.enumerate() {
        let row = from.wrapping_add(vector * LANES);
        // SAFETY: by the caller's promise.
        let [codes, early, late] =
            unsafe { [0, 1, 2].map(|index| _mm512_loadu_si512(row.wrapping_add(index * PANEL).cast())) };
        let upper = _mm512_srli_epi16::<4>(codes);
        [*first, *second] = pairs(_mm512_and_si512(codes, four_bits), early, table);
        [*third, *fourth] = pairs(_mm512_and_si512(upper, four_bits), late, table);
    }
    group
}

/// Two pairs of 16 columns, of the `codes` of their exponents, and of signs and fractions.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn pairs(codes: __m512i, rest: __m512i, Table([upper, lower]): Table) -> [__m512i; 2] {
    let (sign, fraction) = (_mm512_set1_epi8(i8::MIN), _mm512_set1_epi8(i8::MAX));
    let upper = _mm512_ternarylogic_epi32::<AND_OR>(rest, sign, _mm512_shuffle_epi8(upper, codes));
    let lower = _mm512_ternarylogic_epi32::<AND_OR>(rest, fraction, _mm512_shuffle_epi8(lower, codes));
    [_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)]
}

/// Puts the patches of a group that begins at step `first` in their places: the first patch behind them.
///
/// Every vector is asked, so that none has to be in memory.
///
/// # Safety
///
/// Patches in rising order must stand at `patch`, none of them before the group, up to one that is behind it; the
/// processor must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn put_patches(group: &mut Group, first: usize, mut patch: *const u32) -> *const u32 {
    // SAFETY: by the caller's promise; bits stand behind each place but the last.
    unsafe {
        while (*patch as usize) < (first + GROUP_STEPS) * PANEL {
            let (step, column) = (*patch as usize / PANEL - first, *patch as usize % PANEL);
            let (lane, bits) = (1u32 << (column % LANES * 2 + step % 2), *patch.wrapping_add(1) as u16);
            for (pair, pairs) in group.iter_mut().enumerate() {
                for (vector, pairs) in pairs.iter_mut().enumerate() {
                    let lane = if [pair, vector] == [step / 2, column / LANES] { lane } else { 0 };
                    *pairs = _mm512_mask_set1_epi16(*pairs, lane, bits.cast_signed());
                }
            }
            patch = patch.wrapping_add(2);
        }
    }
    patch
}

/// Adds the terms of inner step `inner` of `M` rows.
///
/// # Safety
///
/// Element `inner` of every left row must be readable; the processor must have AVX-512 F.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn add<const M: usize>(
    sums: &mut [[__m512; VECTORS]; M],
    left: &[*const f32; M],
    inner: usize,
    lanes: [__m512i; VECTORS],
) {
    for (sums, left) in sums.iter_mut().zip(left) {
        // SAFETY: by the caller's promise.
        let value = unsafe { _mm512_set1_ps(*left.wrapping_add(inner)) };
        for (sum, lanes) in sums.iter_mut().zip(lanes) {
            *sum = _mm512_fmadd_ps(value, _mm512_castsi512_ps(lanes), *sum);
        }
    }
}

/// The first and the second step of pairs as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn widened([left, right]: [__m512i; VECTORS]) -> [[__m512i; VECTORS]; 2] {
    let upper = _mm512_set1_epi32(UPPER);
    let first = [_mm512_slli_epi32::<16>(left), _mm512_slli_epi32::<16>(right)];
    [first, [_mm512_and_si512(left, upper), _mm512_and_si512(right, upper)]]
}

/// `M` rows times one panel, which is fetched two pages ahead.
///
/// # Safety
///
/// As [`multiply`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn rows<const M: usize>(raw: &CompactRaw) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; M];
    let mut left = [raw.left[0]; M];
    left.copy_from_slice(&raw.left[..M]);
    let (mut at, mut patch) = (raw.panel.wrapping_add(HEAD), raw.patches);
    // SAFETY: every pointer is in bounds by the caller's promise; what is fetched may lie anywhere.
    unsafe {
        let table = Table::load(raw.panel);
        for first in (0..raw.inner).step_by(GROUP_STEPS) {
            for line in 0..GROUP * size_of::<u32>() / LINE {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_byte_add(AHEAD + line * LINE).cast());
            }
            let mut group = load(at, table);
            patch = put_patches(&mut group, first, patch);
            let whole = first + GROUP_STEPS <= raw.inner;
            for (pair, pairs) in group.into_iter().enumerate() {
                for (step, lanes) in widened(pairs).into_iter().enumerate() {
                    let step = first + 2 * pair + step;
                    if whole || step < raw.inner {
                        add(&mut sums, &left, step, lanes);
                    }
                }
            }
            at = at.wrapping_add(GROUP);
        }
        store(raw, &sums);
    }
}

/// Writes sums, or adds them times the factors of their rows.
///
/// # Safety
///
/// As [`multiply`], for the destination and the factors.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn store<const M: usize>(raw: &CompactRaw, sums: &[[__m512; VECTORS]; M]) {
    for (row, sums) in sums.iter().enumerate() {
        for (vector, sum) in sums.iter().enumerate() {
            let (out, mask) = (raw.out[row].wrapping_add(vector * LANES), mask(raw.columns, vector));
            // SAFETY: by the caller's promise.
            unsafe {
                let sum = match raw.factors.is_null() {
                    true => *sum,
                    false => {
                        let factor = _mm512_set1_ps(*raw.factors.wrapping_add(row));
                        _mm512_fmadd_ps(factor, *sum, _mm512_maskz_loadu_ps(mask, out))
                    }
                };
                _mm512_mask_storeu_ps(out, mask, sum);
            }
        }
    }
}

/// `count` rows, at least one and at most [`MOST_ROWS`], times one panel.
///
/// # Safety
///
/// Every pointer of `raw` must be in bounds for as many rows: `inner` elements of a left row, `columns` columns of the
/// destination, and groups for `inner` steps behind the head of the panel. Its patches must rise and end, not
/// before the end of the last group. The processor must have AVX-512 F and BW.
pub(super) unsafe fn multiply(count: usize, raw: &CompactRaw) {
    const KERNELS: [unsafe fn(&CompactRaw); MOST_ROWS] =
        [rows::<1>, rows::<2>, rows::<3>, rows::<4>, rows::<5>, rows::<6>, rows::<7>, rows::<8>];
    // SAFETY: by the caller's promise.
    unsafe { KERNELS[count - 1](raw) }
}

/// Unpacks as many steps of the groups of a panel as pairs fit into `out`.
///
/// # Safety
///
/// The head of the panel must stand at `head`; the processor must have AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn unpack(head: *const u32, groups: &[[u32; GROUP]], out: &mut [[bf16; 2]]) {
    // SAFETY: by the caller's promise.
    let table = unsafe { Table::load(head) };
    for (group, out) in groups.iter().zip(out.chunks_mut(PAIRS * PANEL)) {
        // SAFETY: the group is whole.
        let group = unsafe { load(group.as_ptr(), table) };
        for (pairs, out) in group.into_iter().zip(out.as_chunks_mut::<PANEL>().0) {
            for (pairs, out) in pairs.into_iter().zip(out.as_chunks_mut::<LANES>().0) {
                // SAFETY: `out` is a whole vector.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs) };
            }
        }
    }
}
