//! The search on a decoder whose probabilities are written down.

use super::{Decoder, Finished, SearchError, Symbols, search};
use crate::generate::{SearchOptions, Stop};

const SYMBOLS: Symbols = Symbols { start: 2, padding: 1, end: 2 };
const VOCABULARY: usize = 6;

/// Log-probabilities of the next token by the tokens so far; it checks the rows that it is told to continue.
struct Toy<F> {
    prefixes: Vec<Vec<i64>>,
    logits: Vec<f32>,
    probabilities: F,
    steps: usize,
}

impl<F: Fn(&[i64]) -> [f64; VOCABULARY]> Toy<F> {
    fn new(sentences: usize, probabilities: F) -> Self {
        Self { prefixes: vec![Vec::new(); sentences], logits: Vec::new(), probabilities, steps: 0 }
    }

    fn search(mut self, max_len: usize, options: &SearchOptions) -> (Vec<Vec<Finished>>, usize) {
        let max_lens = vec![max_len; self.prefixes.len()];
        let results = search(&mut self, &max_lens, SYMBOLS, options).unwrap();
        (results, self.steps)
    }
}

impl<F: Fn(&[i64]) -> [f64; VOCABULARY]> Decoder for Toy<F> {
    type Error = ();

    fn step(&mut self, parents: &[usize], tokens: &[i64]) -> Result<&[f32], ()> {
        let continued = |(parent, token): (&usize, &i64)| [self.prefixes[*parent].as_slice(), &[*token]].concat();
        self.prefixes = parents.iter().zip(tokens).map(continued).collect();
        self.steps += 1;
        let rows = self.prefixes.iter().flat_map(|prefix| (self.probabilities)(&prefix[1..]));
        self.logits = rows.map(|probability| probability.ln() as f32).collect();
        Ok(&self.logits)
    }
}

fn options(beam: usize, stop: Stop) -> SearchOptions {
    SearchOptions { beam, nbest: beam, stop, ..SearchOptions::default() }
}

fn tokens(results: &[Finished]) -> Vec<&[i64]> {
    results.iter().map(|hypothesis| hypothesis.tokens.as_slice()).collect()
}

/// Token 3 is likelier at first, but 4 leads to the likelier whole.
fn garden_path(prefix: &[i64]) -> [f64; VOCABULARY] {
    match prefix {
        [] => [0.0, 0.0, 0.0, 0.6, 0.4, 0.0],
        [3] => [0.0, 0.0, 0.5, 0.25, 0.25, 0.0],
        [4] => [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        _ => [0.0, 0.0, 0.5, 0.5, 0.0, 0.0],
    }
}

#[test]
fn greedy_takes_the_best_next_token() {
    for stop in [Stop::Fairseq, Stop::Best] {
        let (results, steps) = Toy::new(1, garden_path).search(10, &options(1, stop));
        assert_eq!(tokens(&results[0]), [[3, 2]]);
        assert!((results[0][0].score - 0.3f64.ln() / 2.0).abs() < 1e-6);
        assert_eq!(steps, 2);
    }
}

#[test]
fn a_beam_finds_the_likelier_whole() {
    let (results, _) = Toy::new(1, garden_path).search(10, &options(2, Stop::Fairseq));
    assert_eq!(tokens(&results[0]), [[4, 2], [3, 2]]);
    let best = &results[0][0];
    assert!((best.score - 0.4f64.ln() / 2.0).abs() < 1e-6);
    assert!((best.log_probabilities[0] - 0.4f64.ln()).abs() < 1e-6 && best.log_probabilities[1].abs() < 1e-6);
}

/// The end is a little likely from the start; the right way is longer.
fn early_ends(prefix: &[i64]) -> [f64; VOCABULARY] {
    match prefix {
        [] => [0.0, 0.0, 0.0, 0.9, 0.05, 0.05],
        [3] => [0.0, 0.0, 0.04, 0.9, 0.03, 0.03],
        [3, 3] => [0.0, 0.0, 0.01, 0.97, 0.01, 0.01],
        [3, 3, 3] => [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        _ => [0.0, 0.0, 0.9, 0.05, 0.05, 0.0],
    }
}

#[test]
fn fairseq_stops_at_bad_ends_and_best_does_not() {
    let (fairseq, early) = Toy::new(1, early_ends).search(10, &options(2, Stop::Fairseq));
    let (best, late) = Toy::new(1, early_ends).search(10, &options(2, Stop::Best));
    assert_eq!(tokens(&fairseq[0]), [[3, 4, 2].as_slice(), &[4, 2]]);
    assert_eq!(best[0][0].tokens, [3, 3, 3, 2]);
    assert!(early < late, "{early} {late}");
}

#[test]
fn best_returns_what_an_exhaustive_search_finds() {
    for length_penalty in [-1.0, 0.0, 0.6, 1.0, 2.0] {
        let wide = SearchOptions { length_penalty, ..options(400, Stop::Best) };
        let narrow = SearchOptions { length_penalty, nbest: 2, ..options(400, Stop::Best) };
        let (all, _) = Toy::new(1, early_ends).search(4, &wide);
        let (two, _) = Toy::new(1, early_ends).search(4, &narrow);
        assert_eq!(tokens(&two[0])[..2], tokens(&all[0])[..2], "length penalty {length_penalty}");
    }
}

/// The likelier start ends at once; behind the other, every token is certain up to the longest length.
fn certain_to_the_end(prefix: &[i64]) -> [f64; VOCABULARY] {
    match prefix {
        [] => [0.0, 0.0, 0.0, 0.6, 0.4, 0.0],
        [3, ..] => [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        _ => [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
    }
}

/// What [`Stop::Best`] hopes for comes true here, so to stop a step earlier would be wrong.
#[test]
fn a_certain_continuation_wins_at_the_longest_length() {
    for max_len in [3, 10, 40] {
        let only_end = move |prefix: &[i64]| match prefix.len() == max_len {
            true => [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
            false => certain_to_the_end(prefix),
        };
        let options = SearchOptions { nbest: 1, ..options(2, Stop::Best) };
        let (results, steps) = Toy::new(1, only_end).search(max_len, &options);
        assert_eq!((results[0][0].tokens.len(), steps), (max_len + 1, max_len + 1));
        assert!((results[0][0].score - 0.4f64.ln() / (max_len + 1) as f64).abs() < 1e-6);
    }
}

/// Scores of every hypothesis of at most `max_len` tokens before the end, best first.
fn every_score(
    probabilities: &impl Fn(&[i64]) -> [f64; VOCABULARY],
    (max_len, length_penalty): (usize, f64),
    (prefix, score): (&mut Vec<i64>, f64),
    scores: &mut Vec<f64>,
) {
    let row = probabilities(prefix);
    if !prefix.is_empty() {
        scores.push((score + row[2].ln()) / ((prefix.len() + 1) as f64).powf(length_penalty));
    }
    if prefix.len() < max_len {
        for token in 3..6 {
            prefix.push(token);
            let next = score + row[token as usize].ln();
            every_score(probabilities, (max_len, length_penalty), (prefix, next), scores);
            prefix.pop();
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    #[test]
    fn best_finds_the_best_of_all(
        weights in proptest::collection::vec(1u32..1000, 64),
        power in 1i32..4,
        max_len in 1usize..5,
        nbest in 1usize..6,
        length_penalty in proptest::sample::select(vec![-1.0, 0.0, 0.6, 1.0, 2.0]),
    ) {
        let nbest = nbest.min(3);
        let probabilities = |prefix: &[i64]| {
            let place = prefix.iter().fold(7usize, |place, token| place * 31 + *token as usize);
            let weight = |token: usize| f64::from(weights[(place * 4 + token) % 64]).powi(power);
            let sum: f64 = (2..6).map(weight).sum();
            std::array::from_fn(|token| if token < 2 { 0.0 } else { weight(token) / sum })
        };
        let mut all = Vec::new();
        every_score(&probabilities, (max_len, length_penalty), (&mut Vec::new(), 0.0), &mut all);
        all.sort_by(|a, b| b.total_cmp(a));
        let options = SearchOptions { length_penalty, nbest, ..options(400, Stop::Best) };
        let (found, _) = Toy::new(1, probabilities).search(max_len, &options);
        for (found, wanted) in found[0].iter().zip(&all).take(nbest) {
            // Logits are f32: 2⁻²³ of the sum of all logarithms, and of at most 1.5 for each of five normalisers.
            proptest::prop_assert!((found.score - wanted).abs() < 1e-5 * (1.0 + wanted.abs()), "{} is not {wanted}", found.score);
        }
        proptest::prop_assert!(found[0].len() >= nbest.min(all.len()));
    }
}

#[test]
fn lengths_are_bounded_on_both_sides() {
    let never = |_: &[i64]| [0.0, 0.0, 0.0, 0.9, 0.1, 0.0];
    let reluctant = move |prefix: &[i64]| {
        let mut row = never(prefix);
        row[2] = 1e-9;
        row
    };
    let (results, _) = Toy::new(1, reluctant).search(3, &options(2, Stop::Fairseq));
    assert_eq!(results[0][0].tokens, [3, 3, 3, 2]);
    assert!(results[0].iter().all(|hypothesis| hypothesis.tokens.len() == 4));
    let eager = |_: &[i64]| [0.0, 0.0, 0.9, 0.1, 0.0, 0.0];
    let at_least = SearchOptions { min_len: 3, ..options(1, Stop::Fairseq) };
    let (results, _) = Toy::new(1, eager).search(9, &at_least);
    assert_eq!(tokens(&results[0]), [[3, 3, 3, 2]]);
}

#[test]
fn sentences_of_a_batch_do_not_touch_each_other() {
    let by_sentence = |prefix: &[i64]| match prefix {
        [] => [0.0, 0.0, 0.1, 0.5, 0.2, 0.2],
        [.., 3] if prefix.len() < 4 => [0.0, 0.0, 0.2, 0.5, 0.2, 0.1],
        _ => [0.0, 0.0, 0.7, 0.1, 0.1, 0.1],
    };
    for stop in [Stop::Fairseq, Stop::Best] {
        let (alone, _) = Toy::new(1, by_sentence).search(6, &options(3, stop));
        let (batch, _) = Toy::new(5, by_sentence).search(6, &options(3, stop));
        assert!(batch.iter().all(|result| *result == alone[0]));
    }
    let mut decoder = Toy::new(3, by_sentence);
    let results = search(&mut decoder, &[0, 6, 2], SYMBOLS, &SearchOptions { min_len: 0, ..options(3, Stop::Best) });
    let results = results.unwrap();
    assert_eq!(tokens(&results[0]), [[2]]);
    assert!(results[2].iter().all(|hypothesis| hypothesis.tokens.len() <= 3));
}

#[test]
fn broken_logits_are_an_error_of_their_sentence() {
    let mut decoder = Toy::new(2, |_: &[i64]| [f64::NAN; VOCABULARY]);
    let error = search(&mut decoder, &[3, 3], SYMBOLS, &options(2, Stop::Best)).unwrap_err();
    assert_eq!(error, SearchError::NotFinite { sentence: 0 });
}
