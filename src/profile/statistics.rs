//! From choices and scores to loads, margins and information.

use std::collections::BTreeMap;

use super::{Balance, Margin, ModuleProfile, PmiOptions, Score, TokenPmi};
use crate::file_names::Part;

/// What was seen of one module so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    tokens: u64,
    top_k: usize,
    counts: Vec<u64>,
    margins: Vec<f64>,
    apart: u64,
    largest_gap: f64,
    /// By token id: how often it was seen, and how often with each expert.
    by_token: BTreeMap<i64, (u64, Vec<u64>)>,
}

/// One run of a module: choices `[tokens, k]`, scores `[tokens, experts]`.
pub(super) struct Seen<'a> {
    pub(super) indices: &'a [i64],
    pub(super) scores: &'a [f32],
    pub(super) top_k: usize,
    pub(super) experts: usize,
    /// Whether a token is no padding.
    pub(super) real: &'a [bool],
    pub(super) ids: Option<&'a [i64]>,
}

impl Tally {
    /// Adds one run; the error is an expert that does not exist, or a score that is no number.
    pub(super) fn add(&mut self, seen: &Seen<'_>) -> Result<(), String> {
        self.top_k = seen.top_k;
        self.counts.resize(seen.experts, 0);
        for token in (0..seen.real.len()).filter(|token| seen.real[*token]) {
            let scores = &seen.scores[token * seen.experts..(token + 1) * seen.experts];
            if scores.iter().any(|score| score.is_nan()) {
                return Err("a score is not a number, as where an input is not".into());
            }
            let chosen = seen.indices[token * seen.top_k..(token + 1) * seen.top_k].iter();
            let chosen: Option<Vec<usize>> =
                chosen.map(|expert| usize::try_from(*expert).ok().filter(|expert| *expert < seen.experts)).collect();
            let chosen = chosen.ok_or_else(|| format!("an expert outside 0 to {}", seen.experts - 1))?;
            self.tokens += 1;
            chosen.iter().for_each(|expert| self.counts[*expert] += 1);
            self.add_scores(&chosen, scores);
            if let Some(ids) = seen.ids {
                let (count, experts) = self.by_token.entry(ids[token]).or_default();
                *count += 1;
                experts.resize(seen.experts, 0);
                chosen.iter().for_each(|expert| experts[*expert] += 1);
            }
        }
        Ok(())
    }

    fn add_scores(&mut self, chosen: &[usize], scores: &[f32]) {
        let mut ranked: Vec<usize> = (0..scores.len()).collect();
        ranked.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        let k = chosen.len();
        if k < ranked.len() {
            self.margins.push(f64::from(scores[ranked[k - 1]]) - f64::from(scores[ranked[k]]));
        }
        let passed_over = ranked[..k].iter().find(|expert| !chosen.contains(expert));
        let taken = ranked[k..].iter().rfind(|expert| chosen.contains(expert));
        self.apart += u64::from(passed_over.is_some());
        if let (Some(better), Some(worse)) = (passed_over, taken) {
            self.largest_gap = self.largest_gap.max(f64::from(scores[*better]) - f64::from(scores[*worse]));
        }
    }

    pub(super) fn finish(
        self,
        (graph, part): (&str, Part),
        module: &str,
        score: Score,
        options: PmiOptions,
    ) -> ModuleProfile {
        let total: u64 = self.counts.iter().sum();
        let load_percent = self.counts.iter().map(|count| 100.0 * ratio(*count, total)).collect();
        let pmi = (!self.by_token.is_empty()).then(|| pmi(&self.by_token, &self.counts, self.top_k, options));
        ModuleProfile {
            graph: graph.into(),
            part,
            module: module.into(),
            top_k: self.top_k,
            tokens: self.tokens,
            balance: balance(&self.counts),
            load_percent,
            margin: margin(score, self.margins),
            tokens_apart_from_scores: self.apart,
            largest_gap_apart: self.largest_gap,
            pmi,
            counts: self.counts,
        }
    }
}

#[allow(clippy::cast_precision_loss)]
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[allow(clippy::cast_precision_loss)]
fn balance(counts: &[u64]) -> Balance {
    let total: u64 = counts.iter().sum();
    let experts = counts.len() as f64;
    let shares: Vec<f64> = counts.iter().map(|count| ratio(*count, total)).collect();
    let variance = shares.iter().map(|share| (share * experts - 1.0).powi(2)).sum::<f64>() / experts;
    let entropy: f64 = shares.iter().filter(|share| **share > 0.0).map(|share| -share * share.ln()).sum();
    Balance {
        max_over_mean: shares.iter().copied().fold(0.0, f64::max) * experts,
        coefficient_of_variation: variance.sqrt(),
        normalized_entropy: if counts.len() > 1 { entropy / experts.ln() } else { 1.0 },
        idle: counts.iter().filter(|count| **count == 0).count(),
    }
}

fn margin(score: Score, mut samples: Vec<f64>) -> Margin {
    samples.sort_by(f64::total_cmp);
    let quantile = |tenths: usize| {
        let rank = (tenths * samples.len()).div_ceil(10).max(1);
        samples.get(rank - 1).copied()
    };
    let (p10, p50, p90) = (quantile(1), quantile(5), quantile(9));
    Margin { score, min: samples.first().copied(), p10, p50, p90, max: samples.last().copied(), samples }
}

/// Tokens that each expert takes more often than chance, by falling information, the more frequent and then the smaller
/// id first among equals.
#[allow(clippy::cast_precision_loss)]
fn pmi(
    by_token: &BTreeMap<i64, (u64, Vec<u64>)>,
    counts: &[u64],
    top_k: usize,
    options: PmiOptions,
) -> Vec<Vec<TokenPmi>> {
    let total: u64 = counts.iter().sum();
    let of_expert = |(expert, in_all): (usize, &u64)| {
        let is_preferred = |count: u64, with_expert: u64| {
            let chance = u128::from(count) * top_k as u128 * u128::from(*in_all);
            u128::from(with_expert) * u128::from(total) > chance
        };
        let mut tokens: Vec<_> = by_token
            .iter()
            .filter(|(_, (count, experts))| *count >= options.min_count && is_preferred(*count, experts[expert]))
            .map(|(token, (count, experts))| {
                let with_expert = experts[expert];
                let expected = ratio(*count * top_k as u64, total) * *in_all as f64;
                TokenPmi { token: *token, count: *count, with_expert, pmi: (with_expert as f64 / expected).log2() }
            })
            .collect();
        tokens.sort_by(|a, b| b.pmi.total_cmp(&a.pmi).then(b.count.cmp(&a.count)).then(a.token.cmp(&b.token)));
        tokens.truncate(options.top);
        tokens
    };
    counts.iter().enumerate().map(of_expert).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen<'a>(indices: &'a [i64], scores: &'a [f32], real: &'a [bool], ids: &'a [i64]) -> Seen<'a> {
        Seen { indices, scores, top_k: 1, experts: 2, real, ids: Some(ids) }
    }

    #[test]
    fn balance_has_its_extremes_where_it_says() {
        let equal = balance(&[5, 5, 5, 5]);
        assert_eq!((equal.max_over_mean, equal.coefficient_of_variation, equal.idle), (1.0, 0.0, 0));
        assert!((equal.normalized_entropy - 1.0).abs() < 1e-12);
        let one = balance(&[0, 20, 0, 0]);
        assert_eq!((one.max_over_mean, one.normalized_entropy, one.idle), (4.0, 0.0, 3));
        assert!((one.coefficient_of_variation - 3f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn padding_counts_nowhere() {
        let mut tally = Tally::default();
        let scores = [0.75, 0.25, 0.4, 0.6, f32::NAN, f32::NAN];
        tally.add(&seen(&[0, 1, 99], &scores, &[true, true, false], &[7, 8, 1])).unwrap();
        let profile = tally.finish(("g", Part::Model), "m", Score::Probability, PmiOptions { min_count: 1, top: 9 });
        assert_eq!((profile.tokens, profile.counts.as_slice()), (2, [1, 1].as_slice()));
        assert_eq!(profile.margin.min, Some(f64::from(0.6f32) - f64::from(0.4f32)));
        let ranked: Vec<i64> = profile.pmi.unwrap().iter().flatten().map(|token| token.token).collect();
        assert_eq!(ranked, [7, 8]);
    }

    #[test]
    fn information_is_one_bit_where_the_expert_halves_the_choices() {
        let mut tally = Tally::default();
        tally.add(&seen(&[0, 0, 1, 1], &[0.5; 8], &[true; 4], &[7, 7, 8, 9])).unwrap();
        assert_eq!((tally.apart, tally.largest_gap), (2, 0.0), "equal scores rank the lower index first");
        let pmi = pmi(&tally.by_token, &tally.counts, 1, PmiOptions { min_count: 2, top: 9 });
        assert_eq!(pmi, [vec![TokenPmi { token: 7, count: 2, with_expert: 2, pmi: 1.0 }], vec![]]);
    }

    #[test]
    fn tokens_that_an_expert_takes_no_more_often_than_chance_are_not_listed() {
        let mut tally = Tally::default();
        let (indices, ids) = ([0, 0, 0, 1, 0, 1, 0, 1, 1, 1], [7, 7, 7, 7, 8, 8, 9, 9, 9, 9]);
        tally.add(&seen(&indices, &[0.5; 20], &[true; 10], &ids)).unwrap();
        assert_eq!(tally.counts, [5, 5]);
        let pmi = pmi(&tally.by_token, &tally.counts, 1, PmiOptions { min_count: 1, top: 9 });
        let listed: Vec<Vec<i64>> = pmi.iter().map(|tokens| tokens.iter().map(|one| one.token).collect()).collect();
        assert_eq!(listed, [vec![7], vec![9]]);
    }

    #[test]
    fn choices_that_the_scores_do_not_explain_tell_how_far_they_are_from_it() {
        let mut tally = Tally::default();
        tally.add(&seen(&[1, 0, 0], &[0.75, 0.25, 0.5, 0.625, 1.0, 0.0], &[true; 3], &[7, 7, 8])).unwrap();
        assert_eq!((tally.apart, tally.largest_gap), (2, 0.5));
    }

    #[test]
    fn information_counts_every_choice_of_a_token() {
        let mut tally = Tally::default();
        let indices = [0, 1, 0, 1, 0, 1, 2, 3];
        let scores = [0.4, 0.4, 0.1, 0.1, 0.4, 0.4, 0.1, 0.1, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1, 0.4, 0.4];
        let ids = [7, 7, 7, 8];
        let chosen =
            Seen { indices: &indices, scores: &scores, top_k: 2, experts: 4, real: &[true; 4], ids: Some(&ids) };
        tally.add(&chosen).unwrap();
        let pmi = pmi(&tally.by_token, &tally.counts, 2, PmiOptions { min_count: 1, top: 9 });
        let found: Vec<_> = pmi.iter().map(|tokens| tokens[0].pmi).collect();
        let (often, once) = ((4.0f64 / 3.0).log2(), 2.0);
        assert!(found.iter().zip([often, often, once, once]).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?}");
    }

    #[test]
    fn margins_are_told_by_rank() {
        let found = margin(Score::Logit, (1..=10).rev().map(f64::from).collect());
        assert_eq!([found.min, found.p10, found.p50, found.p90, found.max], [1.0, 1.0, 5.0, 9.0, 10.0].map(Some));
        let none = margin(Score::Logit, Vec::new());
        assert_eq!((none.min, none.p50, none.max), (None, None, None));
    }

    #[test]
    fn impossible_choices_are_refused() {
        assert!(Tally::default().add(&seen(&[2], &[0.5; 2], &[true], &[7])).is_err());
        assert!(Tally::default().add(&seen(&[0], &[f32::NAN; 2], &[true], &[7])).is_err());
    }
}
