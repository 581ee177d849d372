//! Names of what exported models take and give, and of the axes of that.
//!
//! | graph | takes | gives |
//! |---|---|---|
//! | attention layer | [`QUERY`], [`ATTENTION_MASK`] | [`OUTPUT`] |
//! | cross-attention layer | these, [`MEMORY`], [`QUERY_ATTENTION_MASK`] | [`OUTPUT`] |
//! | masked language model | [`INPUT_IDS`], [`ATTENTION_MASK`] | [`LOGITS`] |
//! | causal language model | these, a past, [`POSITION_IDS`] where it rotates | [`LOGITS`], the next past |
//! | encoder | [`INPUT_IDS`], [`ATTENTION_MASK`] | [`LAST_HIDDEN_STATE`], the decoder's [`Cache::of_encoder`] |
//! | decoder | these, both caches, [`ENCODER_ATTENTION_MASK`] | [`LOGITS`], [`Cache::of_decoder`] |

use std::fmt::Display;

/// Token ids `[B, T]`.
pub const INPUT_IDS: &str = "input_ids";
/// 1 at real tokens, 0 at padding; `[B, P + T]` beside caches, which it covers.
pub const ATTENTION_MASK: &str = "attention_mask";
/// What [`ATTENTION_MASK`] is to the encoder, given to the decoder.
pub const ENCODER_ATTENTION_MASK: &str = "encoder_attention_mask";
/// Which tokens of [`QUERY`] are real where [`ATTENTION_MASK`] tells those of [`MEMORY`].
pub const QUERY_ATTENTION_MASK: &str = "query_attention_mask";
/// [`INPUT_IDS`] of the decoder, where one run takes inputs of both.
pub const DECODER_INPUT_IDS: &str = "decoder_input_ids";
/// [`ATTENTION_MASK`] of the decoder, where one run takes inputs of both.
pub const DECODER_ATTENTION_MASK: &str = "decoder_attention_mask";
/// Positions `[B, T]`.
pub const POSITION_IDS: &str = "position_ids";
/// What a layer's tokens are `[B, T, C]`.
pub const QUERY: &str = "query";
/// What a layer's tokens attend to `[B, S, C]`.
pub const MEMORY: &str = "memory";
/// What a layer makes of [`QUERY`].
pub const OUTPUT: &str = "output";
/// Scores of every symbol `[B, T, V]`, `[B, 1, V]` where only the last position has any.
pub const LOGITS: &str = "logits";
/// What an encoder makes of its tokens `[B, S, C]`.
pub const LAST_HIDDEN_STATE: &str = "last_hidden_state";

/// Names of the axes that have no fixed size.
pub mod axis {
    /// Rows `B`.
    pub const BATCH: &str = "batch";
    /// New tokens `T`.
    pub const SEQUENCE: &str = "sequence";
    /// Tokens `S` that attention reads besides the new ones' own past.
    pub const SOURCE: &str = "source";
    /// Tokens `P` whose keys and values are cached.
    pub const PAST: &str = "past_sequence";

    /// Whether an axis counts tokens of calls before, of which there may be none: all others are of 1 at least. Graphs
    /// of other programs have other names for the past.
    #[must_use]
    pub fn may_be_empty(axis: &str) -> bool {
        axis.starts_with("past")
    }
}

/// Stands for the number of a layer in patterns of names, as `genai_config.json` has them.
pub const ANY_LAYER: &str = "%d";

const PAST: &str = "past_key_values.";
const PRESENT: &str = "present.";
const ENCODER: &str = ".encoder.";

/// Keys and values of one layer, `[B, G, P, D]` each: two inputs, and the two outputs that are the next call's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache(String);

impl Cache {
    /// The keys and values of the only attention of a layer: its number, or [`ANY_LAYER`].
    pub fn of_layer(layer: impl Display) -> Self {
        Self(format!("{layer}."))
    }

    /// The decoder's own keys and values, which grow by a line for each token.
    pub fn of_decoder(layer: usize) -> Self {
        Self(format!("{layer}.decoder."))
    }

    /// The keys and values of what the encoder read.
    pub fn of_encoder(layer: usize) -> Self {
        Self(format!("{layer}{ENCODER}"))
    }

    /// Inputs: keys, then values.
    #[must_use]
    pub fn past(&self) -> [String; 2] {
        self.parts(PAST)
    }

    /// Outputs: keys, then values.
    #[must_use]
    pub fn present(&self) -> [String; 2] {
        self.parts(PRESENT)
    }

    fn parts(&self, start: &str) -> [String; 2] {
        ["key", "value"].map(|part| format!("{start}{}{part}", self.0))
    }
}

/// The input that the next call, or the decoder, is given the output `present` by.
#[must_use]
pub fn past_of(present: &str) -> Option<String> {
    present.strip_prefix(PRESENT).map(|cache| format!("{PAST}{cache}"))
}

/// Whether an input takes keys or values of a cache.
fn is_past(input: &str) -> bool {
    input.starts_with(PAST)
}

/// Whether an input takes keys or values of earlier tokens of the same rows.
#[must_use]
pub fn is_own_past(input: &str) -> bool {
    is_past(input) && !input.contains(ENCODER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_given_to_the_next_call_as_its_past() {
        let caches = [Cache::of_layer(0), Cache::of_decoder(11), Cache::of_encoder(2)];
        for (cache, own) in caches.iter().zip([true, true, false]) {
            for (present, past) in cache.present().iter().zip(cache.past()) {
                assert_eq!(past_of(present), Some(past.clone()));
                assert!(is_past(&past) && is_own_past(&past) == own, "{past}");
                assert!(!is_past(present) && !is_own_past(present) && past_of(&past).is_none());
            }
        }
        assert_eq!(past_of(LOGITS), None);
    }

    #[test]
    fn only_the_past_may_be_empty() {
        for (name, expected) in [
            (axis::PAST, true),
            ("past_len", true),
            (axis::BATCH, false),
            (axis::SEQUENCE, false),
            (axis::SOURCE, false),
        ] {
            assert_eq!(axis::may_be_empty(name), expected, "{name}");
        }
    }

    #[test]
    fn caches_have_the_names_that_other_programs_expect() {
        assert_eq!(Cache::of_layer(ANY_LAYER).past(), ["past_key_values.%d.key", "past_key_values.%d.value"]);
        assert_eq!(Cache::of_layer(3).present(), ["present.3.key", "present.3.value"]);
        assert_eq!(Cache::of_decoder(0).past()[1], "past_key_values.0.decoder.value");
        assert_eq!(Cache::of_encoder(0).present()[0], "present.0.encoder.key");
    }
}
