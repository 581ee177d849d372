//! The online softmax of a block of rows in vectors of 16 lanes.

use std::arch::x86_64::{
    __m512, __mmask16, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm512_add_ps, _mm512_fmadd_ps, _mm512_fnmadd_ps,
    _mm512_loadu_ps, _mm512_mask_mov_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_maskz_mov_ps,
    _mm512_max_ps, _mm512_mul_ps, _mm512_reduce_add_ps, _mm512_reduce_max_ps, _mm512_roundscale_ps, _mm512_scalef_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps, _mm512_sub_ps,
};

use super::lanes::{LN2, TERMS};
use super::{LANES, ROWS};

/// Vectors of a row that go through [`exps`] together.
pub(super) const VECTORS: usize = 4;

/// Scores of these.
pub(super) const STEP: usize = VECTORS * LANES;

/// The first `count` lanes, all of them from [`LANES`] on.
pub(super) fn first_lanes(count: usize) -> __mmask16 {
    ((1u32 << count.min(LANES)) - 1) as __mmask16
}

/// The larger of each pair of lanes, and that of `lanes` where the other is NaN.
#[target_feature(enable = "avx512f")]
#[inline]
fn larger(part: __m512, lanes: __m512) -> __m512 {
    // The second operand is the result where one is NaN.
    _mm512_max_ps(part, lanes)
}

/// The largest of `seen` scores and `max`.
///
/// # Safety
///
/// The scores must be readable; the processor must have AVX-512 F.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn largest(scores: *const f32, seen: usize, max: f32) -> f32 {
    let mut lanes = _mm512_set1_ps(max);
    let whole = seen / LANES * LANES;
    // SAFETY: by the caller's promise; the mask keeps the last load inside.
    unsafe {
        for first in (0..whole).step_by(LANES) {
            lanes = larger(_mm512_loadu_ps(scores.add(first)), lanes);
        }
        if whole < seen {
            let mask = first_lanes(seen - whole);
            lanes = _mm512_mask_mov_ps(lanes, mask, larger(_mm512_maskz_loadu_ps(mask, scores.add(whole)), lanes));
        }
    }
    _mm512_reduce_max_ps(lanes)
}

/// `exp(x)` for `x` that is not positive; NaN for NaN.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn exp(x: __m512) -> __m512 {
    let [value] = exps([x]);
    value
}

/// [`exp`] of some vectors, a step of all of them at a time: steps of one vector wait for each other, and those of the
/// others fill that time. That is faster than one vector after the other.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn exps<const N: usize>(x: [__m512; N]) -> [__m512; N] {
    let mut steps = Exps::new(x);
    steps.powers();
    steps.rests();
    steps.first_terms();
    steps.last_terms();
    steps.square();
    steps.finish()
}

/// [`exps`] on the way, step by step, each of about as much work.
pub(super) struct Exps<const N: usize> {
    rests: [__m512; N],
    powers: [__m512; N],
    sums: [__m512; N],
}

impl<const N: usize> Exps<N> {
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn new(x: [__m512; N]) -> Self {
        // The second operand is the result where one is NaN; below the bound the result rounds to 0.
        let rests = x.map(|x| _mm512_max_ps(_mm512_set1_ps(-104.0), x));
        Self { rests, powers: rests, sums: rests }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn powers(&mut self) {
        let powers = self.rests.map(|x| _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E)));
        self.powers = powers.map(|x| _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x));
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn rests(&mut self) {
        for ln2 in LN2 {
            self.rests =
                pairs(self.powers, self.rests, |power, rest| _mm512_fnmadd_ps(power, _mm512_set1_ps(ln2), rest));
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn first_terms(&mut self) {
        self.sums = [_mm512_set1_ps(TERMS[4]); N];
        self.add_terms([TERMS[3], TERMS[2]]);
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn last_terms(&mut self) {
        self.add_terms([TERMS[1], TERMS[0]]);
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn add_terms(&mut self, terms: [f32; 2]) {
        for term in terms {
            self.sums = pairs(self.sums, self.rests, |sum, rest| _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term)));
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn square(&mut self) {
        self.sums = pairs(self.sums, self.rests, |sum, rest| _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), rest));
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn finish(&self) -> [__m512; N] {
        let values = self.sums.map(|sum| _mm512_add_ps(sum, _mm512_set1_ps(1.0)));
        pairs(values, self.powers, |value, power| _mm512_scalef_ps(value, power))
    }
}

/// What `join` makes of each pair of vectors.
#[target_feature(enable = "avx512f")]
#[inline]
fn pairs<const N: usize>(a: [__m512; N], b: [__m512; N], join: impl Fn(__m512, __m512) -> __m512) -> [__m512; N] {
    let mut joined = a;
    for (joined, b) in joined.iter_mut().zip(b) {
        *joined = join(*joined, b);
    }
    joined
}

/// [`super::Isa::softmax_rows`] for slices that are long enough.
///
/// # Safety
///
/// Row `r` of `scores` must hold `seen[r]` elements for every element of `max`; there must be as many of `sum`, at most
/// [`ROWS`]; the processor must have AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn softmax_rows(
    scores: &mut [f32],
    stride: usize,
    seen: &[usize; ROWS],
    max: &mut [f32],
    sum: &mut [f32],
) -> [f32; ROWS] {
    let (count, scores) = (max.len(), scores.as_mut_ptr());
    let (mut new, mut added) = ([0.0f32; LANES], [0.0f32; LANES]);
    // SAFETY: by the caller's promise about the rows; masks keep every access inside them.
    unsafe {
        for row in 0..count {
            new[row] = largest(scores.add(row * stride), seen[row], max[row]);
        }
        for row in 0..count {
            let (place, whole, rest) = (scores.add(row * stride), seen[row] / LANES * LANES, seen[row] % LANES);
            let (shift, mut lanes) = (_mm512_set1_ps(new[row]), _mm512_setzero_ps());
            let together = whole / STEP * STEP;
            for first in (0..together).step_by(STEP) {
                let parts: [__m512; VECTORS] = std::array::from_fn(|vector| {
                    _mm512_sub_ps(_mm512_loadu_ps(place.add(first + vector * LANES)), shift)
                });
                for (vector, part) in exps(parts).into_iter().enumerate() {
                    _mm512_storeu_ps(place.add(first + vector * LANES), part);
                    lanes = _mm512_add_ps(lanes, part);
                }
            }
            for first in (together..whole).step_by(LANES) {
                let part = exp(_mm512_sub_ps(_mm512_loadu_ps(place.add(first)), shift));
                _mm512_storeu_ps(place.add(first), part);
                lanes = _mm512_add_ps(lanes, part);
            }
            if rest > 0 {
                let (mask, place) = (first_lanes(rest), place.add(whole));
                let part = exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, place), shift));
                _mm512_mask_storeu_ps(place, mask, part);
                lanes = _mm512_add_ps(lanes, _mm512_maskz_mov_ps(mask, part));
            }
            added[row] = _mm512_reduce_add_ps(lanes);
        }
        let rows = first_lanes(count);
        let (before, after) = (_mm512_maskz_loadu_ps(rows, max.as_ptr()), _mm512_maskz_loadu_ps(rows, new.as_ptr()));
        let shrink = exp(_mm512_sub_ps(before, after));
        let total = _mm512_maskz_loadu_ps(rows, sum.as_ptr());
        let total = _mm512_fmadd_ps(total, shrink, _mm512_maskz_loadu_ps(rows, added.as_ptr()));
        _mm512_mask_storeu_ps(max.as_mut_ptr(), rows, after);
        _mm512_mask_storeu_ps(sum.as_mut_ptr(), rows, total);
        let mut factors = [0.0; LANES];
        _mm512_storeu_ps(factors.as_mut_ptr(), shrink);
        std::array::from_fn(|row| factors[row])
    }
}
