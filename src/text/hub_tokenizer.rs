//! `tokenizer.json` of Hugging Face's tokenizers.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use tokenizers::{Encoding, Token, Tokenizer};

use super::{
    error::TextError,
    hub::{Keys, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE},
    read::{is_there, read_text},
};
use crate::files::folder_of;

const LIMIT: u64 = 1 << 28;

/// Text to ids and back, as a `tokenizer.json` says; templates of chats are not applied.
#[derive(Debug)]
pub struct HubTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
}

impl HubTokenizer {
    /// Reads the tokenizer of a folder; nothing where it has none.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read or is no tokenizer.
    pub fn read(folder: &Path) -> Result<Option<Self>, TextError> {
        let path = folder.join(TOKENIZER_FILE);
        if !is_there(&path)? {
            return Ok(None);
        }
        let text = read_text(&path, LIMIT)?;
        let mut tokenizer = sound(&path, || {
            let parsed = Tokenizer::from_bytes(text.as_bytes());
            parsed.map_err(|error| format!("is no tokenizer of Hugging Face: {error}").into())
        })?;
        tokenizer.with_padding(None);
        sound(&path, || tokenizer.with_truncation(None).map(drop))?;
        Ok(Some(Self { path, tokenizer }))
    }

    /// Tokens that it knows, those that were added to its model too.
    pub fn size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// Ids of a text, with the special tokens that the tokenizer adds to a single sequence.
    ///
    /// # Errors
    ///
    /// Where the tokenizer has no token for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, TextError> {
        let encoding = sound(&self.path, || self.tokenizer.encode_fast(text, true))?;
        Ok(encoding.get_ids().iter().copied().map(i64::from).collect())
    }

    /// What `tokenizer_config.json` says otherwise than this tokenizer does: whether tokens are put around a text.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read or breaks its format.
    pub fn contradiction(&self) -> Result<Option<String>, TextError> {
        let path = folder_of(&self.path).join(TOKENIZER_CONFIG_FILE);
        let Some(config) = Keys::read(&path)? else { return Ok(None) };
        let [before, behind] = self.around_a_text()?;
        let mut parts = Vec::new();
        for (key, ids, place) in [("add_bos_token", before, "before"), ("add_eos_token", behind, "behind")] {
            let tokens: Vec<_> = ids.iter().map(|id| self.tokenizer.id_to_token(*id).unwrap_or_default()).collect();
            match config.flag(key)? {
                Some(true) if ids.is_empty() => {
                    parts.push(format!("{key} is true, and {TOKENIZER_FILE} puts no token {place} a text"));
                }
                Some(false) if !ids.is_empty() => {
                    let tokens = tokens.join(" ");
                    parts.push(format!("{key} is false, and {TOKENIZER_FILE} puts {tokens} {place} a text"));
                }
                _ => {}
            }
        }
        Ok((!parts.is_empty()).then(|| format!("{}: {}", path.display(), parts.join("; "))))
    }

    /// Tokens that are put before a text, and behind it.
    fn around_a_text(&self) -> Result<[Vec<u32>; 2], TextError> {
        const TEXT: u32 = u32::MAX;
        let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let whole = sound(&self.path, || self.tokenizer.post_process(text, None, true))?;
        let mut parts = whole.get_ids().split(|id| *id == TEXT).map(<[u32]>::to_vec);
        Ok([parts.next().unwrap_or_default(), parts.next_back().unwrap_or_default()])
    }

    /// What the tokenizer calls a token, which may be a part of a character or a space; nothing where it lacks it.
    pub fn symbol(&self, id: i64) -> Option<String> {
        u32::try_from(id).ok().and_then(|id| self.tokenizer.id_to_token(id))
    }

    /// Whether a token is no part of a text: it is special, or the tokenizer lacks it.
    fn is_silent(&self, id: i64) -> bool {
        self.symbol(id).is_none_or(|token| self.tokenizer.get_added_vocabulary().is_special_token(&token))
    }

    /// The text of ids, without special tokens and without ids that the tokenizer lacks.
    ///
    /// # Errors
    ///
    /// Where the tokenizer fails.
    pub fn decode(&self, ids: &[i64]) -> Result<String, TextError> {
        let ids: Vec<u32> = ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
        sound(&self.path, || self.tokenizer.decode(&ids, true))
    }
}

/// What the tokenizer says, with its panics, which are about its file.
fn sound<T>(path: &Path, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TextError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(TextError::malformed(path, error.to_string())),
        Err(_) => Err(TextError::malformed(path, "the tokenizer cannot be used")),
    }
}

/// Tokens before a new one that its text may depend on: a space may belong to either, a character to several.
const CONTEXT: usize = 6;

/// Most tokens of one character, which are bytes.
const LONGEST_CHARACTER: usize = 4;

/// Stands for bytes that are no character, or none yet.
const INCOMPLETE: char = '\u{FFFD}';

/// The text that continues a prompt, piece by piece as tokens come.
#[derive(Debug, Clone, Default)]
pub struct Pieces {
    /// Tokens that are part of the text: the last ones of the prompt, then those that follow it.
    ids: Vec<i64>,
    /// How many of them are the prompt's.
    prompt: usize,
    /// First token whose text was not returned.
    unread: usize,
}

impl Pieces {
    /// The text after `prompt`.
    pub fn after(prompt: &[i64], tokenizer: &HubTokenizer) -> Self {
        let visible = prompt.iter().rev().copied().filter(|id| !tokenizer.is_silent(*id));
        let mut ids: Vec<_> = visible.take(CONTEXT + LONGEST_CHARACTER).collect();
        ids.reverse();
        Self { prompt: ids.len(), unread: ids.len(), ids }
    }

    /// Adds a token and returns the text that is now certain; nothing in the middle of a character.
    ///
    /// # Errors
    ///
    /// Where the tokenizer fails.
    pub fn push(&mut self, token: i64, tokenizer: &HubTokenizer) -> Result<String, TextError> {
        if tokenizer.is_silent(token) {
            return Ok(String::new());
        }
        self.ids.push(token);
        let (start, known) = self.known(tokenizer)?;
        let text = tokenizer.decode(&self.ids[start..])?;
        if text.ends_with(INCOMPLETE) {
            return Ok(String::new());
        }
        Ok(self.read(&known, &text))
    }

    /// What was held back.
    ///
    /// # Errors
    ///
    /// Where the tokenizer fails.
    pub fn finish(&mut self, tokenizer: &HubTokenizer) -> Result<String, TextError> {
        let (start, known) = self.known(tokenizer)?;
        let text = tokenizer.decode(&self.ids[start..])?;
        Ok(self.read(&known, &text))
    }

    /// All of the text, which is that of the pieces but for runs of bytes that turned out to be no characters.
    ///
    /// # Errors
    ///
    /// Where the tokenizer fails.
    pub fn whole(&self, tokenizer: &HubTokenizer) -> Result<String, TextError> {
        Self { unread: self.prompt, ..self.clone() }.finish(tokenizer)
    }

    /// First token of those that are decoded together, and what of their text was returned. It begins a character:
    /// where one byte of a run is none, some tokenizers give none of the run's characters.
    fn known(&self, tokenizer: &HubTokenizer) -> Result<(usize, String), TextError> {
        let text = |start: usize| tokenizer.decode(&self.ids[start..self.unread]);
        let latest = self.unread.saturating_sub(CONTEXT);
        for start in (latest.saturating_sub(LONGEST_CHARACTER - 1)..=latest).rev() {
            let known = text(start)?;
            if !known.starts_with(INCOMPLETE) {
                return Ok((start, known));
            }
        }
        Ok((latest, text(latest)?))
    }

    /// The part of `text` that follows what is `known`, and was returned.
    fn read(&mut self, known: &str, text: &str) -> String {
        let common = known.char_indices().zip(text.chars()).take_while(|((_, a), b)| a == b);
        let end = common.map(|((place, letter), _)| place + letter.len_utf8()).last().unwrap_or_default();
        self.unread = self.ids.len();
        text[end..].to_owned()
    }
}

#[cfg(test)]
#[path = "hub_tokenizer_tests.rs"]
mod tests;
