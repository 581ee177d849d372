//! Stick-breaking (Shen et al., "ModuleFormer", 2023) in plain arithmetic on groups of 16 lanes, compiled once for each
//! level of instructions.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::Instructions;
use super::lanes::exp;
use super::levels::every_level;
use super::{Isa, LANES};

impl Isa {
    every_level! {
        /// Breaks the sticks of 16 rows that stand side by side, `scores[key][row]`, from the last key to the first:
        /// each of the first `seen[row]` keys takes its share `sigmoid(score)` of what is `left` of the row's stick.
        ///
        /// Replaces each score by what its key took, 0 where the row does not see the key, and `left` by what nobody
        /// took. Less than the smallest normal number is nothing: [`f32::MIN_POSITIVE`].
        break_sticks(scores: &mut [[f32; LANES]], seen: &[u32; LANES], left: &mut [f32; LANES]), break_sticks
    }
}

/// Both shares are quotients of sums of positive terms, so that neither loses digits where the other one is near 1:
/// `e = exp(-|score|)`, of which `sigmoid(score)` and `1 - sigmoid(score)` are `1 / (1 + e)` and `e / (1 + e)`, in this
/// order for positive scores.
///
/// A small share is taken off the stick. As a factor near 1 it would be rounded in the same direction at each of many
/// equal keys, and what is left would drift.
#[inline(always)]
fn break_sticks<const FMA: bool>(scores: &mut [[f32; LANES]], seen: &[u32; LANES], left: &mut [f32; LANES]) {
    let mut rest = *left;
    for (key, group) in scores.iter_mut().enumerate().rev() {
        for lane in 0..LANES {
            let score = group[lane];
            let e = exp::<FMA>(-score.abs());
            let most = 1.0 / (1.0 + e);
            let least = e * most;
            let [larger, smaller] = [most, least].map(|share| share * rest[lane]);
            let (taken, others) = if score >= 0.0 { (larger, smaller) } else { (smaller, rest[lane] - smaller) };
            let sees = (key as u32) < seen[lane];
            group[lane] = if sees { normal_or_0(taken) } else { 0.0 };
            rest[lane] = if sees { normal_or_0(others) } else { rest[lane] };
        }
    }
    *left = rest;
}

/// NaN for NaN.
#[inline(always)]
fn normal_or_0(value: f32) -> f32 {
    if value < f32::MIN_POSITIVE { 0.0 } else { value }
}

#[cfg(test)]
mod tests {
    use super::super::every_isa;
    use super::*;

    /// What the keys of a row take, and what is left.
    fn broken(scores: &[f64]) -> (Vec<f64>, f64) {
        let mut left = 1.0;
        let mut taken: Vec<f64> = scores
            .iter()
            .rev()
            .map(|score| {
                let share = 1.0 / (1.0 + (-score).exp());
                let taken = share * left;
                left *= 1.0 / (1.0 + score.exp());
                taken
            })
            .collect();
        taken.reverse();
        (taken, left)
    }

    #[test]
    fn sticks_are_broken_as_in_f64() {
        for isa in every_isa() {
            for (keys, amplitude) in [(1, 1.0), (2, 9.0), (50, 0.3), (256, 3.0), (256, 90.0)] {
                let score = |key: usize, row: usize| ((key * 37 + row * 11) as f32 * 0.71).sin() * amplitude - 2.0;
                let seen: [u32; LANES] = std::array::from_fn(|row| (row as u32 * 29) % (keys as u32 + 1));
                let mut found: Vec<[f32; LANES]> =
                    (0..keys).map(|key| std::array::from_fn(|row| score(key, row))).collect();
                let mut left = [1.0; LANES];
                isa.break_sticks(&mut found, &seen, &mut left);
                for row in 0..LANES {
                    let scores: Vec<_> = (0..seen[row] as usize).map(|key| f64::from(score(key, row))).collect();
                    let (taken, rest) = broken(&scores);
                    let close = |found: f32, expected: f64| {
                        (f64::from(found) - expected).abs() <= 2e-6 * expected + f64::from(f32::MIN_POSITIVE)
                    };
                    assert!(close(left[row], rest), "{isa:?} {keys}: {} is left, not {rest}", left[row]);
                    for (key, taken) in taken.iter().enumerate() {
                        assert!(
                            close(found[key][row], *taken),
                            "{isa:?} {keys} {key}: {}, not {taken}",
                            found[key][row]
                        );
                    }
                    assert!(found[taken.len()..].iter().all(|group| group[row] == 0.0), "{isa:?}");
                }
            }
        }
    }

    #[test]
    fn what_equal_keys_leave_does_not_drift() {
        for isa in every_isa() {
            for (score, keys) in [(-5.3_f32, 200), (-5.3, 1000), (-3.9, 300), (-2.2, 60), (0.4, 40)] {
                let mut found = vec![[score; LANES]; keys];
                let mut left = [1.0; LANES];
                isa.break_sticks(&mut found, &[keys as u32; LANES], &mut left);
                let (taken, rest) = broken(&vec![f64::from(score); keys]);
                for (found, expected) in [(left[3], rest), (found[0][3], taken[0])] {
                    let error = (f64::from(found) - expected).abs() / expected;
                    assert!(error <= 5e-6, "{isa:?} {score} {keys}: {found}, not {expected}: {error:.1e}");
                }
            }
        }
    }

    #[test]
    fn a_stick_that_is_broken_in_two_parts_has_the_bits_of_one() {
        let scores: Vec<[f32; LANES]> =
            (0..60).map(|key| std::array::from_fn(|row| ((key * 7 + row * 3) as f32).cos() * 4.0)).collect();
        for isa in every_isa() {
            let (mut whole, mut left) = (scores.clone(), [1.0; LANES]);
            isa.break_sticks(&mut whole, &[60; LANES], &mut left);
            let (mut parts, mut rest) = (scores.clone(), [1.0; LANES]);
            isa.break_sticks(&mut parts[23..], &[37; LANES], &mut rest);
            isa.break_sticks(&mut parts[..23], &[23; LANES], &mut rest);
            assert_eq!((parts, rest), (whole, left), "{isa:?}");
        }
    }

    #[test]
    fn ends_of_scores() {
        for isa in every_isa() {
            let ends = [f32::INFINITY, f32::MAX, 100.0, 0.0, -100.0, f32::MIN, f32::NEG_INFINITY, f32::NAN];
            let mut scores = [[0.0; LANES], std::array::from_fn(|lane| ends[lane % ends.len()])];
            let mut left = [1.0; LANES];
            isa.break_sticks(&mut scores, &[2; LANES], &mut left);
            assert_eq!(scores[1][..7], [1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0], "{isa:?}");
            assert_eq!(scores[0][..7], [0.0, 0.0, 0.0, 0.25, 0.5, 0.5, 0.5], "{isa:?}");
            assert_eq!(left[..7], [0.0, 0.0, 0.0, 0.25, 0.5, 0.5, 0.5], "{isa:?}");
            assert!(scores[1][7].is_nan() && scores[0][7].is_nan() && left[7].is_nan(), "{isa:?}");
            let mut unseen = [[f32::NAN; LANES]];
            let mut left = [0.75; LANES];
            isa.break_sticks(&mut unseen, &[0; LANES], &mut left);
            assert_eq!((unseen, left), ([[0.0; LANES]], [0.75; LANES]), "{isa:?}");
        }
    }
}
