//! Random numbers, thread pools and comparison.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use moa_kernels::ThreadPool;

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `low ..= high`.
    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.between(0, 99) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.between(0, choices.len() - 1)]
    }

    /// `len` values, uniform in `-amplitude .. amplitude`.
    pub(crate) fn values(&mut self, len: usize, amplitude: f32) -> Vec<f32> {
        (0..len).map(|_| amplitude * ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0)).collect()
    }

    /// One mask row: no padding, right padding, left padding, holes, or nothing but padding.
    pub(crate) fn mask(&mut self, len: usize) -> Vec<i32> {
        let kept = self.between(1, len.max(1));
        match self.between(0, 5) {
            0 => (0..len).map(|i| i32::from(i < kept)).collect(),
            1 => (0..len).map(|i| i32::from(i + kept >= len)).collect(),
            2 => (0..len).map(|_| i32::from(self.chance(60))).collect(),
            3 => vec![0; len],
            _ => vec![1; len],
        }
    }

    /// Router weights `[C, E]`; a third of the time so that column 0 of the input (which must be 1) drives every token
    /// to the same experts and leaves the others idle.
    pub(crate) fn router(&mut self, width: usize, experts: usize) -> Vec<f32> {
        let mut weight = self.values(width * experts, 2.0);
        if self.chance(33) {
            let hot = self.between(0, experts - 1);
            for (expert, weight) in weight[..experts].iter_mut().enumerate() {
                *weight = if expert == hot { 40.0 } else { 4.0 * expert as f32 };
            }
        }
        weight
    }

    /// Inputs `[tokens, C]` with a 1 in column 0.
    pub(crate) fn hidden_states(&mut self, tokens: usize, width: usize) -> Vec<f32> {
        let mut hidden_states = self.values(tokens * width, 1.0);
        hidden_states.iter_mut().step_by(width).for_each(|value| *value = 1.0);
        hidden_states
    }
}

/// `count` scoped threads that take indices from one counter.
pub(crate) struct Threads(pub(crate) usize);

impl ThreadPool for Threads {
    fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.0 {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= total {
                            break;
                        }
                        task(index);
                    }
                });
            }
        });
    }
}

/// A thread for each task, all at once.
pub(crate) struct Crowd;

impl ThreadPool for Crowd {
    fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        let all = Barrier::new(total);
        std::thread::scope(|scope| {
            for index in 0..total {
                let all = &all;
                scope.spawn(move || {
                    all.wait();
                    task(index);
                });
            }
        });
    }
}

/// Fails at the first element that is not within `tolerance · (1 + |expected|)`; NaN is never within.
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "{what}[{index}] is {found}, not {expected}");
    }
}

/// The bits of a result, so that two NaNs or two zeros compare as they are.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

pub(crate) fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// `left [m, k] · right [k, n]`.
pub(crate) fn matmul(left: &[f64], right: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
    assert_eq!((left.len(), right.len()), (m * k, k * n));
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                out[i * n + j] += left[i * k + l] * right[l * n + j];
            }
        }
    }
    out
}
