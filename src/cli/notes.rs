//! What several commands note of configurations, dictionaries and tokenizers.

use moa_graphs::families::Config;

use super::note;
#[cfg(feature = "tokenizers")]
use crate::text::{HubTokenizer, TOKENIZER_FILE};

/// Names keys of a configuration that nothing reads where one is absent that is spelt almost so.
pub(super) fn note_of_keys(config: &Config) {
    for (key, meant) in config.misspelt() {
        note(&format!("{}: nothing reads \"{key}\"; did you mean \"{meant}\"?", config.origin()));
    }
}

/// Names the first line with tokens that the dictionary does not have, and how many others there are; of each line, how
/// many tokens it has, and how many of them are unknown.
pub(super) fn note_of_unknown(lines: &[(usize, usize)], place: impl Fn(usize) -> String) {
    let mut unknown_lines = lines.iter().enumerate().filter(|(_, (_, unknown))| *unknown > 0);
    let Some((index, (all, unknown))) = unknown_lines.next() else { return };
    let others = match unknown_lines.count() {
        0 => String::new(),
        1 => ", and 1 more line has such tokens".to_owned(),
        count => format!(", and {count} more lines have such tokens"),
    };
    note(&format!("{}: {unknown} of {all} tokens are not in the dictionary{others}", place(index)));
}

/// Says what `command` follows where the tokenizer's configuration says something else than the tokenizer does.
#[cfg(feature = "tokenizers")]
pub(super) fn note_of_contradiction(tokenizer: &HubTokenizer, command: &str) {
    let found = match tokenizer.contradiction() {
        Ok(None) => return,
        Ok(Some(found)) => found,
        Err(error) => error.to_string(),
    };
    note(&format!("{found}; `{command}` goes by {TOKENIZER_FILE} alone"));
}

/// Says that a tokenizer may be that of another model: one that knows more tokens than the model, or less than half of
/// them, where padding of tables explains neither.
#[cfg(feature = "tokenizers")]
pub(super) fn note_of_size(tokenizer: &HubTokenizer, symbols: Option<usize>) {
    let known = tokenizer.size();
    if let Some(symbols) = symbols.filter(|symbols| known > *symbols || known < symbols / 2) {
        note(&format!(
            "{TOKENIZER_FILE} knows {known} tokens, and the model {symbols}: it may be that of another model"
        ));
    }
}
