//! Loops of 8 lanes.

use std::arch::x86_64::{
    __m256, _mm256_add_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};
use std::hint::black_box;

use super::super::LANES;
use super::super::avx2::WIDTH;
use super::super::avx2_softmax::{STEP, VECTORS, exps};

/// Sums under way: with the factors, registers have room for no more that are even.
const SUMS: usize = 12;

/// Vectors that a step of [`read`] adds.
const READS: usize = 8;

/// The sum of all lanes.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn total<const N: usize>(sums: [__m256; N]) -> f32 {
    let mut lanes = [0.0; WIDTH];
    let mut total = 0.0;
    for sum in sums {
        // SAFETY: there are as many lanes.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
        total += lanes.iter().sum::<f32>();
    }
    total
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn multiply_adds(count: usize) -> f32 {
    let [a, b] = black_box([0.5, 0.25]).map(|value| _mm256_set1_ps(value));
    let mut sums = [_mm256_setzero_ps(); SUMS];
    for _ in 0..count * (LANES / WIDTH) / SUMS {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(a, b, *sum);
        }
    }
    total(sums)
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn exponentials(values: &[f32]) -> f32 {
    let mut sums = [_mm256_setzero_ps(); VECTORS];
    for step in values.as_chunks::<STEP>().0 {
        // SAFETY: a step holds the lanes of every vector.
        let vectors: [_; VECTORS] =
            std::array::from_fn(|vector| unsafe { _mm256_loadu_ps(step.as_ptr().add(vector * WIDTH)) });
        for (sum, part) in sums.iter_mut().zip(exps(vectors)) {
            *sum = _mm256_add_ps(*sum, part);
        }
    }
    total(sums)
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn read(values: &[f32]) -> f32 {
    let mut sums = [_mm256_setzero_ps(); READS];
    for step in values.as_chunks::<{ READS * WIDTH }>().0 {
        for (vector, sum) in sums.iter_mut().enumerate() {
            // SAFETY: a step holds the lanes of every vector.
            *sum = _mm256_add_ps(*sum, unsafe { _mm256_loadu_ps(step.as_ptr().add(vector * WIDTH)) });
        }
    }
    total(sums)
}
