//! Choosing the next token of a causal language model.

use crate::random::Random;

/// How a [`TextGenerator`](super::TextGenerator) continues a prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingOptions {
    /// Most new tokens for a prompt.
    pub max_new: usize,
    /// 0 takes the most probable token; else logits are divided by it before tokens are drawn.
    pub temperature: f64,
    /// Tokens to draw from, the most probable ones; 0 is all.
    pub top_k: usize,
    /// Of these, as few of the most probable ones as reach this probability together, from 0 to 1.
    pub top_p: f64,
    /// Start of the random numbers. Prompt `i` draws from SplitMix64 that starts at the `i`-th number of SplitMix64
    /// from this seed, so that what a prompt gives depends neither on the batch nor on the prompts around it.
    pub seed: u64,
    /// Whether an end token is a token like others.
    pub ignore_eos: bool,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self { max_new: 128, temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0, ignore_eos: false }
    }
}

impl SamplingOptions {
    /// Which option is out of its range, if one is.
    pub(super) fn fault(&self) -> Option<String> {
        if self.max_new == 0 {
            return Some("max-new 0: it must be at least 1".into());
        }
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Some(format!("temperature {}: it must be a finite number of 0 or more", self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Some(format!("top-p {}: it must be more than 0 and at most 1", self.top_p));
        }
        None
    }
}

/// The next token; `None` where logits are NaN, or infinite but for excluded tokens. Of equal logits the lower token
/// counts as the more probable one.
pub(super) fn choose(logits: &[f32], options: &SamplingOptions, random: &mut Random) -> Option<i64> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !highest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
        return None;
    }
    let token = if options.temperature > 0.0 {
        draw(logits, highest, options, random)
    } else {
        logits.iter().position(|logit| *logit == highest)?
    };
    i64::try_from(token).ok()
}

fn draw(logits: &[f32], highest: f32, options: &SamplingOptions, random: &mut Random) -> usize {
    let weights = weights(logits, highest, options);
    let mut left = random.fraction() * weights.iter().map(|(_, weight)| weight).sum::<f64>();
    let chosen = weights.iter().find(|(_, weight)| {
        left -= weight;
        left < 0.0
    });
    // Rounding may leave something: never a token that is excluded.
    let last = || weights.iter().rfind(|(_, weight)| *weight > 0.0);
    chosen.or_else(last).map_or(0, |(token, _)| *token)
}

/// The tokens to draw from and what each weighs: all in their order, or those that top-k and top-p keep, the most
/// probable first.
fn weights(logits: &[f32], highest: f32, options: &SamplingOptions) -> Vec<(usize, f64)> {
    let order = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let mut tokens: Vec<usize> = (0..logits.len()).collect();
    if options.top_k > 0 && options.top_k < tokens.len() {
        tokens.select_nth_unstable_by(options.top_k - 1, order);
        tokens.truncate(options.top_k);
        tokens.sort_unstable_by(order);
    }
    let weight = |token: usize| libm::exp(f64::from(logits[token] - highest) / options.temperature);
    let mut weights: Vec<_> = tokens.into_iter().map(|token| (token, weight(token))).collect();
    if options.top_p < 1.0 {
        let all = weights.iter().map(|(_, weight)| weight).sum::<f64>();
        // All tokens below this weigh less together than top-p leaves out, and need no order; half, for rounding.
        let least = 0.5 * (1.0 - options.top_p) * all / weights.len() as f64;
        weights.retain(|(_, weight)| *weight >= least);
        weights.sort_unstable_by(|(a, _), (b, _)| order(a, b));
        let mut sum = 0.0;
        let last = weights.iter().position(|(_, weight)| {
            sum += weight;
            sum >= options.top_p * all
        });
        weights.truncate(last.map_or(weights.len(), |last| last + 1));
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, 2.0, f32::NEG_INFINITY];

    fn shares(options: SamplingOptions) -> [f64; 5] {
        let mut random = Random::stream(7, 0);
        let mut counts = [0.0; 5];
        for _ in 0..40_000 {
            let token = choose(&LOGITS, &options, &mut random).unwrap();
            counts[usize::try_from(token).unwrap()] += 1.0 / 40_000.0;
        }
        counts
    }

    fn assert_shares(options: SamplingOptions, kept: &[usize]) {
        let weight = |token: usize| (f64::from(LOGITS[token]) / options.temperature).exp();
        let all: f64 = kept.iter().map(|token| weight(*token)).sum();
        for (token, share) in shares(options).into_iter().enumerate() {
            let expected = if kept.contains(&token) { weight(token) / all } else { 0.0 };
            assert!((share - expected).abs() < 0.01, "{options:?}: token {token}: {share} instead of {expected}");
        }
    }

    #[test]
    fn tokens_come_with_their_probabilities() {
        let options = SamplingOptions { temperature: 1.0, ..SamplingOptions::default() };
        assert_shares(options, &[0, 1, 2, 3]);
        assert_shares(SamplingOptions { temperature: 0.5, ..options }, &[0, 1, 2, 3]);
        assert_shares(SamplingOptions { top_k: 3, ..options }, &[1, 2, 3]);
        assert_shares(SamplingOptions { top_p: 0.5, ..options }, &[1, 3]);
        assert_shares(SamplingOptions { top_p: 0.3, ..options }, &[1]);
        assert_shares(SamplingOptions { top_k: 2, top_p: 0.6, ..options }, &[1, 3]);
    }

    #[test]
    fn tokens_that_need_no_order_are_those_that_top_p_leaves_out() {
        let mut random = Random::stream(3, 0);
        for temperature in [0.1, 0.7, 3.0] {
            let logits: Vec<f32> = (0..2000).map(|_| 20.0 * random.unit()).collect();
            let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sorted: Vec<usize> = (0..logits.len()).collect();
            sorted.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let weight = |token: &usize| (f64::from(logits[*token] - highest) / temperature).exp();
            let all = sorted.iter().map(weight).sum::<f64>();
            for top_p in [1e-9, 0.3, 0.9, 0.999, 1.0 - 1e-9] {
                let options = SamplingOptions { temperature, top_p, ..SamplingOptions::default() };
                let found: Vec<usize> = weights(&logits, highest, &options).iter().map(|(token, _)| *token).collect();
                assert_eq!(found, sorted[..found.len()], "{temperature} {top_p}");
                let reached = |count: usize| sorted[..count].iter().map(weight).sum::<f64>() / all - top_p;
                assert!(reached(found.len()) >= -1e-12 && reached(found.len() - 1) <= 1e-12, "{temperature} {top_p}");
            }
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_highest() {
        let mut random = Random::stream(0, 0);
        let greedy = SamplingOptions::default();
        assert_eq!(choose(&LOGITS, &greedy, &mut random), Some(1));
        assert_eq!(choose(&[1.0, f32::NAN], &greedy, &mut random), None);
        assert_eq!(choose(&[1.0, f32::INFINITY], &greedy, &mut random), None);
        assert_eq!(choose(&[f32::NEG_INFINITY; 3], &greedy, &mut random), None);
    }

    #[test]
    fn options_out_of_range_are_named() {
        let default = SamplingOptions::default();
        for (options, start) in [
            (SamplingOptions { max_new: 0, ..default }, "max-new 0"),
            (SamplingOptions { temperature: -1.0, ..default }, "temperature -1"),
            (SamplingOptions { temperature: f64::NAN, ..default }, "temperature NaN"),
            (SamplingOptions { top_p: 0.0, ..default }, "top-p 0"),
            (SamplingOptions { top_p: 1.5, ..default }, "top-p 1.5"),
        ] {
            assert!(options.fault().unwrap().starts_with(start));
        }
        assert_eq!(default.fault(), None);
    }
}
