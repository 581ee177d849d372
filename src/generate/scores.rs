//! From logits to the best continuations.

/// Whether a hypothesis may end at this step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Allowed,
    Forbidden,
    Only,
}

/// Which tokens may be chosen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    pub(super) padding: i64,
    pub(super) end: i64,
    pub(super) when: End,
}

/// A continuation of one hypothesis by one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    /// Number of the hypothesis among those of its sentence.
    pub(super) row: usize,
    pub(super) token: i64,
    /// Log-probability of the hypothesis with the token.
    pub(super) score: f64,
}

/// The best `count` continuations of rows of logits, each with the log-probability up to it, best first.
///
/// `None` where logits are NaN or infinite.
pub(super) fn best<'a>(
    rows: impl Iterator<Item = (&'a [f32], f64)>,
    count: usize,
    rule: Rule,
) -> Option<Vec<Candidate>> {
    let mut best = Best { candidates: Vec::with_capacity(count + 1), count };
    for (row, (logits, score)) in rows.enumerate() {
        let base = score - log_sum_exp(logits)?;
        match rule.when {
            End::Only => {
                let end = usize::try_from(rule.end).ok().and_then(|end| logits.get(end));
                best.offer(end.map(|logit| Candidate { row, token: rule.end, score: base + f64::from(*logit) }));
            }
            End::Allowed | End::Forbidden => best.offer_row(row, logits, base, rule),
        }
    }
    Some(best.candidates)
}

/// The best candidates so far, best first; of equal ones the earlier first.
struct Best {
    candidates: Vec<Candidate>,
    count: usize,
}

impl Best {
    /// What a candidate must exceed to be among the best.
    fn least(&self) -> f64 {
        if self.candidates.len() < self.count {
            return f64::NEG_INFINITY;
        }
        self.candidates.last().map_or(f64::INFINITY, |worst| worst.score)
    }

    fn offer(&mut self, candidate: Option<Candidate>) {
        let Some(candidate) = candidate.filter(|candidate| candidate.score > self.least()) else { return };
        let place = self.candidates.partition_point(|other| other.score >= candidate.score);
        self.candidates.insert(place, candidate);
        self.candidates.truncate(self.count);
    }

    /// Offers every permitted token of a row; few chunks hold one that can be among the best.
    fn offer_row(&mut self, row: usize, logits: &[f32], base: f64, rule: Rule) {
        let permitted = |token| token != rule.padding && (rule.when == End::Allowed || token != rule.end);
        let mut floor = at_most(self.least() - base);
        for (chunk, first) in logits.chunks(CHUNK).zip((0i64..).step_by(CHUNK)) {
            if !chunk.iter().fold(false, |any, logit| any | (*logit >= floor)) {
                continue;
            }
            for (token, logit) in (first..).zip(chunk).filter(|(token, _)| permitted(*token)) {
                self.offer(Some(Candidate { row, token, score: base + f64::from(*logit) }));
            }
            floor = at_most(self.least() - base);
        }
    }
}

/// The largest f32 that is not above `value`.
#[allow(clippy::cast_possible_truncation)]
fn at_most(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) > value { near.next_down() } else { near }
}

/// Logits that are compared with the worst of the best at once.
const CHUNK: usize = 16;

const LANES: usize = 8;

/// `ln(sum(exp(logits)))`; `None` where it is not finite.
///
/// Every eighth value is folded with the others of its lane; compilers turn loops over lanes into vectors.
fn log_sum_exp(logits: &[f32]) -> Option<f64> {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);
    let mut highest = last;
    for chunk in chunks {
        for (highest, logit) in highest.iter_mut().zip(chunk) {
            *highest = if *logit > *highest { *logit } else { *highest };
        }
    }
    let highest = highest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0.0f64; LANES];
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(exp_below(chunk, highest)) {
            *sum += f64::from(value);
        }
    }
    for (sum, value) in sums.iter_mut().zip(exp_below(&last, highest)).take(rest.len()) {
        *sum += f64::from(value);
    }
    let total = f64::from(highest) + sums.into_iter().sum::<f64>().ln();
    total.is_finite().then_some(total)
}

/// `e^(logit - highest)` of each lane, for logits that are not higher, within 2 units in the last place; NaN stays NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`: a polynomial for `e^r`, `2^n` by its bits.
fn exp_below(logits: &[f32; LANES], highest: f32) -> [f32; LANES] {
    const LEAST: f32 = -87.0;
    /// Adding it leaves `n` in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let (mut rest, mut rounded) = ([0.0; LANES], [0.0; LANES]);
    for (rest, logit) in rest.iter_mut().zip(logits) {
        let x = logit - highest;
        *rest = if x < LEAST { LEAST } else { x };
    }
    for (rounded, rest) in rounded.iter_mut().zip(&rest) {
        *rounded = rest * std::f32::consts::LOG2_E + ROUND;
    }
    for (rest, rounded) in rest.iter_mut().zip(&rounded) {
        let n = rounded - ROUND;
        *rest = (*rest - n * LN_2_HIGH) - n * LN_2_LOW;
    }
    let mut values = [0.0; LANES];
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        for (value, rest) in values.iter_mut().zip(rest) {
            *value = *value * rest + coefficient;
        }
    }
    for (value, rounded) in values.iter_mut().zip(rounded) {
        *value *= f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    }
    values
}

#[cfg(test)]
mod tests {
    use super::{Candidate, End, LANES, Rule, at_most, best, exp_below, log_sum_exp};

    const RULE: Rule = Rule { padding: 1, end: 2, when: End::Allowed };

    #[test]
    fn log_probabilities_sum_to_one() {
        let logits = [1.5f32, -300.0, 88.0, 87.5, 0.0];
        let total = log_sum_exp(&logits).unwrap();
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - total).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        for broken in [f32::NAN, f32::INFINITY] {
            assert_eq!(log_sum_exp(&[0.0, broken]), None);
        }
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 2]), None);
    }

    #[test]
    fn the_exponential_is_exact_to_the_last_places() {
        for step in 0..870_000 {
            let x = -step as f32 * 1e-4;
            let exact = f64::from(x).exp();
            for value in exp_below(&[x; LANES], 0.0) {
                let error = (f64::from(value) - exact).abs() / exact;
                assert!(error < 2.5e-7, "{x}: {error}");
            }
        }
        assert!(exp_below(&[f32::NAN; LANES], 0.0).iter().all(|value| value.is_nan()));
        assert!(exp_below(&[f32::NEG_INFINITY; LANES], 0.0).iter().all(|value| *value < 1e-37));
    }

    #[test]
    fn floors_are_rounded_down() {
        for value in [0.1, -0.1, 1.0, -3.0, 1e300, -1e300, f64::INFINITY, f64::NEG_INFINITY] {
            let floor = at_most(value);
            assert!(f64::from(floor) <= value, "{value}");
            assert!(floor == f32::INFINITY || f64::from(floor.next_up()) > value, "{value}");
        }
    }

    #[test]
    fn ties_go_to_the_lower_row_then_the_lower_token() {
        let row = [0.0f32, 9.0, 0.0, 0.0];
        let found = best([(row.as_slice(), -1.0), (row.as_slice(), -1.0)].into_iter(), 5, RULE).unwrap();
        let order: Vec<_> = found.iter().map(|candidate| (candidate.row, candidate.token)).collect();
        assert_eq!(order, [(0, 0), (0, 2), (0, 3), (1, 0), (1, 2)]);
    }

    #[test]
    fn the_best_are_those_of_a_sort() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as f32 / 16.0
        };
        for (tokens, count) in [(5, 3), (16, 4), (50, 8), (333, 8), (40, 300)] {
            let rows: Vec<(Vec<f32>, f64)> =
                (0..4).map(|row| ((0..tokens).map(|_| next()).collect(), -f64::from(row))).collect();
            let borrowed = || rows.iter().map(|(logits, score)| (logits.as_slice(), *score));
            let mut all = Vec::new();
            for (row, (logits, score)) in borrowed().enumerate() {
                let base = score - log_sum_exp(logits).unwrap();
                let tokens = (0i64..).zip(logits).filter(|(token, _)| *token != 1);
                all.extend(tokens.map(|(token, logit)| Candidate { row, token, score: base + f64::from(*logit) }));
            }
            all.sort_by(|a, b| b.score.total_cmp(&a.score));
            all.truncate(count);
            assert_eq!(best(borrowed(), count, RULE).unwrap(), all);
        }
    }

    #[test]
    fn rules_hold() {
        let row = [0.0f32, 9.0, 5.0, 1.0];
        let tokens = |when| -> Vec<i64> {
            let found: Vec<Candidate> = best([(row.as_slice(), 0.0)].into_iter(), 8, Rule { when, ..RULE }).unwrap();
            found.iter().map(|candidate| candidate.token).collect()
        };
        assert_eq!(tokens(End::Allowed), [2, 3, 0]);
        assert_eq!(tokens(End::Forbidden), [3, 0]);
        assert_eq!(tokens(End::Only), [2]);
    }
}
