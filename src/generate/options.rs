//! What a search may be told.

/// When a sentence is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stop {
    /// As soon as `beam` hypotheses have ended, however good those are that have not: what fairseq does.
    Fairseq,
    /// When no live hypothesis can still be among the `nbest` best.
    #[default]
    Best,
}

/// How translations are searched for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SearchOptions {
    /// Hypotheses that are followed side by side; 1 is greedy.
    pub beam: usize,
    /// Translations to return, at most `beam`.
    pub nbest: usize,
    /// A score is the sum of log-probabilities over this power of the length, the end included.
    pub length_penalty: f64,
    /// Fewest tokens before the end.
    pub min_len: usize,
    /// Most tokens before the end, for each token of the source, its end included.
    pub max_len_a: f64,
    /// Most tokens before the end, added to `max_len_a` times the source's length.
    pub max_len_b: usize,
    /// When a sentence is done.
    pub stop: Stop,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self { beam: 4, nbest: 1, length_penalty: 1.0, min_len: 1, max_len_a: 0.0, max_len_b: 200, stop: Stop::Best }
    }
}

/// Widest beam; each hypothesis holds caches of its own.
const MAX_BEAM: usize = 1024;

/// Steepest length penalty, of either sign: far beyond it, powers of lengths are no numbers or leave nothing of a
/// score.
const MAX_PENALTY: f64 = 10.0;

impl SearchOptions {
    /// Which option is out of its range, if one is.
    pub(super) fn fault(&self) -> Option<String> {
        if !(1..=MAX_BEAM).contains(&self.beam) {
            return Some(format!("beam {}: it must be from 1 to {MAX_BEAM}", self.beam));
        }
        if !(1..=self.beam).contains(&self.nbest) {
            return Some(format!("nbest {}: it must be from 1 to the beam, {}", self.nbest, self.beam));
        }
        if !(-MAX_PENALTY..=MAX_PENALTY).contains(&self.length_penalty) {
            let found = self.length_penalty;
            return Some(format!("length penalty {found}: it must be from -{MAX_PENALTY} to {MAX_PENALTY}"));
        }
        if !(self.max_len_a.is_finite() && self.max_len_a >= 0.0) {
            return Some(format!("max-len-a {}: it must be 0 or more", self.max_len_a));
        }
        if self.max_len_a == 0.0 && self.min_len > self.max_len_b {
            return Some(format!("min-len {}: more than max-len-b, {}", self.min_len, self.max_len_b));
        }
        None
    }

    /// Most tokens before the end, for a source of `source_len` tokens and a decoder with `positions`.
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss)]
    pub(super) fn max_len(&self, source_len: usize, positions: Option<usize>) -> usize {
        let allowed = (self.max_len_a * source_len as f64) as usize;
        let allowed = allowed.saturating_add(self.max_len_b);
        positions.map_or(allowed, |positions| allowed.min(positions.saturating_sub(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_translation_may_be_as_long_as_the_source_and_the_model_let_it() {
        let options = SearchOptions { max_len_a: 1.5, max_len_b: 3, ..SearchOptions::default() };
        assert_eq!(options.max_len(5, None), 10);
        assert_eq!(options.max_len(5, Some(8)), 7);
        assert_eq!(SearchOptions::default().max_len(5, None), 200);
        assert_eq!(SearchOptions { max_len_a: 1e300, ..options }.max_len(5, Some(8)), 7);
    }

    #[test]
    fn options_out_of_range_are_named() {
        let default = SearchOptions::default();
        for (options, start) in [
            (SearchOptions { beam: 0, ..default }, Some("beam 0")),
            (SearchOptions { beam: 1025, ..default }, Some("beam 1025")),
            (SearchOptions { nbest: 0, ..default }, Some("nbest 0")),
            (SearchOptions { nbest: 5, ..default }, Some("nbest 5")),
            (SearchOptions { length_penalty: 10.5, ..default }, Some("length penalty 10.5")),
            (SearchOptions { length_penalty: f64::NAN, ..default }, Some("length penalty NaN")),
            (SearchOptions { max_len_a: -0.5, ..default }, Some("max-len-a -0.5")),
            (SearchOptions { max_len_a: f64::INFINITY, ..default }, Some("max-len-a inf")),
            (SearchOptions { min_len: 201, ..default }, Some("min-len 201")),
            (SearchOptions { min_len: 201, max_len_a: 1.0, ..default }, None),
            (SearchOptions { beam: 1024, nbest: 1024, length_penalty: -10.0, ..default }, None),
        ] {
            let fault = options.fault();
            match (&fault, start) {
                (Some(fault), Some(start)) => assert!(fault.starts_with(start), "{fault}"),
                _ => assert_eq!(fault.as_deref(), start),
            }
        }
    }
}
