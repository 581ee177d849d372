//! Beam search over any decoder, as fairseq's `SequenceGenerator` does it.
//!
//! Each step takes the best `2 * beam` continuations of a sentence's live hypotheses. Those among the first `beam`
//! that end are finished; the first `beam` that do not end live on. Ties go to the lower row, then the lower token.

use super::{
    SearchOptions, Stop,
    scores::{Candidate, End, Rule, best},
};

/// Computes the next token's logits for rows of hypotheses.
pub(super) trait Decoder {
    /// Why a step failed.
    type Error;

    /// Appends `tokens[i]` to the hypothesis that was row `parents[i]` of the step before, and returns the logits
    /// of the new rows, `[rows, vocabulary]`. Before the first step, row `i` is sentence `i`.
    fn step(&mut self, parents: &[usize], tokens: &[i64]) -> Result<&[f32], Self::Error>;
}

/// Ids with a meaning of their own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbols {
    pub(super) start: i64,
    pub(super) padding: i64,
    pub(super) end: i64,
}

/// A hypothesis that ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Finished {
    /// Tokens after the start, the end included.
    pub(super) tokens: Vec<i64>,
    /// Log-probability of each.
    pub(super) log_probabilities: Vec<f64>,
    /// Their sum over the length penalty.
    pub(super) score: f64,
}

/// Why a search stopped without a result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SearchError<E> {
    /// The decoder failed.
    Decoder(E),
    /// The logits of a sentence are NaN or infinite.
    NotFinite {
        /// Its number in the batch.
        sentence: usize,
    },
}

/// The best hypotheses of each sentence, best first; `max_lens` are the most tokens before the end.
pub(super) fn search<D: Decoder>(
    decoder: &mut D,
    max_lens: &[usize],
    symbols: Symbols,
    options: &SearchOptions,
) -> Result<Vec<Vec<Finished>>, SearchError<D::Error>> {
    let mut results = vec![Vec::new(); max_lens.len()];
    let sentence = |(number, max_len): (usize, &usize)| (number, Sentence::new(number, *max_len, symbols.start));
    let mut sentences: Vec<_> = max_lens.iter().enumerate().map(sentence).collect();
    let mut step = 0;
    while !sentences.is_empty() {
        let (parents, tokens) = next_rows(&sentences);
        let logits = decoder.step(&parents, &tokens).map_err(SearchError::Decoder)?;
        let mut rows = logits.chunks_exact((logits.len() / tokens.len()).max(1));
        let mut first_row = 0;
        for (number, sentence) in &mut sentences {
            let count = sentence.live.len();
            let rule = sentence.rule(step, symbols, options);
            let rows = rows.by_ref().zip(sentence.live.iter().map(|live| live.score));
            let candidates = best(rows.take(count), 2 * options.beam, rule);
            let candidates = candidates.ok_or(SearchError::NotFinite { sentence: *number })?;
            sentence.advance(&candidates, symbols.end, step, options);
            sentence.live.iter_mut().for_each(|live| live.row += first_row);
            first_row += count;
        }
        for (number, sentence) in sentences.extract_if(.., |(_, sentence)| sentence.is_done(step, options)) {
            results[number] = sentence.finished;
        }
        step += 1;
    }
    Ok(results)
}

/// Rows that live on, in order: the row that each continues, and its newest token.
fn next_rows(sentences: &[(usize, Sentence)]) -> (Vec<usize>, Vec<i64>) {
    sentences.iter().flat_map(|(_, sentence)| &sentence.live).map(|live| (live.row, live.token)).unzip()
}

/// A token, the log-probability up to it, and the token before it.
#[derive(Clone, Copy)]
struct Node {
    token: i64,
    score: f64,
    parent: Option<usize>,
}

/// A hypothesis that has not ended.
struct Live {
    /// Row of the step before that it continues.
    row: usize,
    token: i64,
    node: Option<usize>,
    score: f64,
}

/// One sentence of the batch.
struct Sentence {
    max_len: usize,
    nodes: Vec<Node>,
    live: Vec<Live>,
    /// Best first.
    finished: Vec<Finished>,
}

impl Sentence {
    fn new(row: usize, max_len: usize, start: i64) -> Self {
        let first = Live { row, token: start, node: None, score: 0.0 };
        Self { max_len, nodes: Vec::new(), live: vec![first], finished: Vec::new() }
    }

    fn rule(&self, step: usize, symbols: Symbols, options: &SearchOptions) -> Rule {
        let end = match step {
            _ if step >= self.max_len => End::Only,
            _ if step < options.min_len => End::Forbidden,
            _ => End::Allowed,
        };
        Rule { padding: symbols.padding, end: symbols.end, when: end }
    }

    /// Replaces the live hypotheses by their continuations; `candidates` are sorted.
    fn advance(&mut self, candidates: &[Candidate], end: i64, step: usize, options: &SearchOptions) {
        let mut live = Vec::with_capacity(options.beam);
        for (rank, candidate) in candidates.iter().enumerate() {
            let parent = self.live[candidate.row].node;
            if candidate.token == end {
                let full = options.stop == Stop::Fairseq && self.finished.len() >= options.beam;
                if rank < options.beam && !full {
                    self.finish(candidate, parent, step, options.length_penalty);
                }
            } else if live.len() < options.beam {
                self.nodes.push(Node { token: candidate.token, score: candidate.score, parent });
                let node = Some(self.nodes.len() - 1);
                live.push(Live { row: candidate.row, token: candidate.token, node, score: candidate.score });
            }
        }
        self.live = live;
    }

    fn finish(&mut self, candidate: &Candidate, parent: Option<usize>, step: usize, length_penalty: f64) {
        let mut path = vec![Node { token: candidate.token, score: candidate.score, parent }];
        let mut node = parent;
        while let Some(found) = node.and_then(|node| self.nodes.get(node)) {
            path.push(*found);
            node = found.parent;
        }
        path.reverse();
        let before = std::iter::once(0.0).chain(path.iter().map(|node| node.score));
        let hypothesis = Finished {
            tokens: path.iter().map(|node| node.token).collect(),
            log_probabilities: path.iter().zip(before).map(|(node, before)| node.score - before).collect(),
            score: normalised(candidate.score, step + 1, length_penalty),
        };
        let place = self.finished.partition_point(|other| other.score >= hypothesis.score);
        self.finished.insert(place, hypothesis);
    }

    /// Whether the results of this sentence are settled after `step`.
    fn is_done(&self, step: usize, options: &SearchOptions) -> bool {
        if self.live.is_empty() || step >= self.max_len {
            return true;
        }
        if options.stop == Stop::Fairseq || options.beam == 1 {
            return self.finished.len() >= options.beam;
        }
        let Some(worst) = self.finished.get(options.nbest - 1) else { return false };
        // A log-probability only falls; over the longest length it falls the least.
        let length = if options.length_penalty >= 0.0 { self.max_len + 1 } else { step + 2 };
        let bound = |live: &Live| normalised(live.score, length, options.length_penalty);
        self.live.iter().all(|live| worst.score >= bound(live))
    }
}

#[allow(clippy::cast_precision_loss)]
fn normalised(score: f64, length: usize, length_penalty: f64) -> f64 {
    score / (length as f64).powf(length_penalty)
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
