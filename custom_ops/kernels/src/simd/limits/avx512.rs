//! Loops of 16 lanes.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_reduce_add_ps,
    _mm512_set1_ps, _mm512_setzero_ps,
};
use std::hint::black_box;

use super::super::LANES;
use super::super::avx512_softmax::{STEP, VECTORS, exps};
use super::super::product::{LINE, PAGE};

/// Sums under way, more than the processor needs to be busy.
const SUMS: usize = 16;

/// Vectors that a step of [`read`] adds.
const READS: usize = 8;

/// The sum of all lanes.
#[target_feature(enable = "avx512f")]
#[inline]
fn total<const N: usize>(sums: [__m512; N]) -> f32 {
    sums.into_iter().map(|sum| _mm512_reduce_add_ps(sum)).sum()
}

#[target_feature(enable = "avx512f")]
pub(super) fn multiply_adds(count: usize) -> f32 {
    let [a, b] = black_box([0.5, 0.25]).map(|value| _mm512_set1_ps(value));
    let mut sums = [_mm512_setzero_ps(); SUMS];
    for _ in 0..count / SUMS {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(a, b, *sum);
        }
    }
    total(sums)
}

#[target_feature(enable = "avx512f")]
pub(super) fn exponentials(values: &[f32]) -> f32 {
    let mut sums = [_mm512_setzero_ps(); VECTORS];
    for step in values.as_chunks::<STEP>().0 {
        // SAFETY: a step holds the lanes of every vector.
        let vectors: [_; VECTORS] =
            std::array::from_fn(|vector| unsafe { _mm512_loadu_ps(step.as_ptr().add(vector * LANES)) });
        for (sum, part) in sums.iter_mut().zip(exps(vectors)) {
            *sum = _mm512_add_ps(*sum, part);
        }
    }
    total(sums)
}

#[target_feature(enable = "avx512f")]
pub(super) fn read(values: &[f32], ahead: bool) -> f32 {
    let mut sums = [_mm512_setzero_ps(); READS];
    for step in values.as_chunks::<{ READS * LANES }>().0 {
        for (vector, sum) in sums.iter_mut().enumerate() {
            let place = step.as_ptr().wrapping_add(vector * LANES);
            if ahead && (vector * LANES * size_of::<f32>()).is_multiple_of(LINE) {
                _mm_prefetch::<_MM_HINT_T0>(place.wrapping_byte_add(PAGE).cast());
            }
            // SAFETY: a step holds the lanes of every vector.
            *sum = _mm512_add_ps(*sum, unsafe { _mm512_loadu_ps(place) });
        }
    }
    total(sums)
}
