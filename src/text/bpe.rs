//! Byte-pair codes of subword-nmt, versions 0.1 and 0.2.

use std::{collections::HashMap, ops::Range, path::Path};

use super::error::{BYTE_ORDER_MARK, MARKED, TextError, read_text};
use crate::files::escaped;

const LIMIT: u64 = 64 << 20;
const MAX_MERGES: usize = 1 << 20;
/// Characters of a line that messages show.
const LONGEST: usize = 60;
const END_OF_WORD: &str = "</w>";

/// Which symbols merge into which, and in what order.
#[derive(Debug, Clone)]
pub struct BpeCodes {
    symbols: HashMap<String, usize>,
    merges: HashMap<(usize, usize), Merge>,
    /// Version 0.1: the end of a word is a symbol of its own.
    separate_end: bool,
}

#[derive(Debug, Clone, Copy)]
struct Merge {
    rank: usize,
    symbol: usize,
}

/// Part of a word: its bytes, and its symbol where any merge knows it.
#[derive(Debug, Clone)]
struct Piece {
    bytes: Range<usize>,
    symbol: Option<usize>,
}

impl BpeCodes {
    /// Reads a file of codes.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read, is no text, has another version, or a line is no pair; names the line.
    pub fn read(path: &Path) -> Result<Self, TextError> {
        Self::parse(&read_text(path, LIMIT)?).map_err(|what| TextError::Codes { path: path.into(), what })
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with(BYTE_ORDER_MARK) {
            return Err(MARKED.into());
        }
        let mut lines = text.trim_end_matches(['\n', '\r']).lines().enumerate().peekable();
        let version = lines.peek().and_then(|(_, line)| line.strip_prefix("#version:")).map(str::trim);
        let separate_end = match version {
            None | Some("0.1") => true,
            Some("0.2") => false,
            Some(other) => return Err(format!("line 1: version {other:?} of the codes; 0.1 and 0.2 are read")),
        };
        if version.is_some() {
            lines.next();
        }
        let mut codes = Self { symbols: HashMap::new(), merges: HashMap::new(), separate_end };
        for (index, line) in lines {
            let mut parts = line.trim_matches([' ', '\r']).split(' ').filter(|part| !part.is_empty());
            let (Some(left), Some(right), None) = (parts.next(), parts.next(), parts.next()) else {
                return Err(format!("line {}: expected two symbols that merge", index + 1));
            };
            if codes.merges.is_empty() && !(is_character(left) && is_character(right)) {
                let found = escaped(&format!("{left} {right}"), LONGEST);
                return Err(format!(
                    "line {}: the first merge must be of two characters, found \"{found}\"",
                    index + 1
                ));
            }
            if index > MAX_MERGES {
                return Err(format!("line {}: more than {MAX_MERGES} merges", index + 1));
            }
            let pair = (codes.intern(left), codes.intern(right));
            let merge = Merge { rank: index, symbol: codes.intern(&format!("{left}{right}")) };
            codes.merges.entry(pair).or_insert(merge);
        }
        if codes.merges.is_empty() {
            return Err("holds no merges; a line is expected to be two symbols, such as `e n</w>`".into());
        }
        Ok(codes)
    }

    fn intern(&mut self, symbol: &str) -> usize {
        let next = self.symbols.len();
        *self.symbols.entry(symbol.to_owned()).or_insert(next)
    }

    /// The pieces of one word, in order, without marks.
    pub fn split<'a>(&self, word: &'a str) -> Vec<&'a str> {
        let mut pieces = self.characters(word);
        while let Some(best) = self.best_pair(&pieces) {
            pieces = self.merge_all(&pieces, best);
        }
        pieces.into_iter().map(|piece| &word[piece.bytes]).filter(|text| !text.is_empty()).collect()
    }

    fn characters(&self, word: &str) -> Vec<Piece> {
        let mut pieces: Vec<_> = word
            .char_indices()
            .map(|(start, character)| {
                let bytes = start..start + character.len_utf8();
                let last = bytes.end == word.len() && !self.separate_end;
                let text = format!("{character}{}", if last { END_OF_WORD } else { "" });
                Piece { bytes, symbol: self.symbols.get(&text).copied() }
            })
            .collect();
        if self.separate_end {
            pieces.push(Piece { bytes: word.len()..word.len(), symbol: self.symbols.get(END_OF_WORD).copied() });
        }
        pieces
    }

    fn merge(&self, left: &Piece, right: &Piece) -> Option<Merge> {
        self.merges.get(&(left.symbol?, right.symbol?)).copied()
    }

    /// The merge of the lowest rank among neighbours.
    fn best_pair(&self, pieces: &[Piece]) -> Option<Merge> {
        pieces.windows(2).filter_map(|pair| self.merge(&pair[0], &pair[1])).min_by_key(|merge| merge.rank)
    }

    /// Applies one merge wherever it fits, from the left.
    fn merge_all(&self, pieces: &[Piece], best: Merge) -> Vec<Piece> {
        let mut merged = Vec::with_capacity(pieces.len());
        let mut index = 0;
        while let Some(piece) = pieces.get(index) {
            let next = pieces.get(index + 1);
            match next.filter(|next| self.merge(piece, next).is_some_and(|merge| merge.rank == best.rank)) {
                Some(next) => {
                    merged.push(Piece { bytes: piece.bytes.start..next.bytes.end, symbol: Some(best.symbol) });
                    index += 2;
                }
                None => {
                    merged.push(piece.clone());
                    index += 1;
                }
            }
        }
        merged
    }
}

/// Whether a symbol is what words are cut into before the first merge.
fn is_character(symbol: &str) -> bool {
    let character = symbol.strip_suffix(END_OF_WORD).unwrap_or(symbol);
    symbol == END_OF_WORD || character.chars().count() == 1
}

#[cfg(test)]
mod tests {
    use super::BpeCodes;

    #[test]
    fn lower_ranks_merge_first() {
        let codes = BpeCodes::parse("#version: 0.2\nb c\na b\n").unwrap();
        assert_eq!(codes.split("abcd"), ["a", "bc", "d"]);
    }

    #[test]
    fn the_end_of_a_word_is_part_of_its_last_symbol() {
        let codes = BpeCodes::parse("#version: 0.2\na b</w>\na b\n").unwrap();
        assert_eq!(codes.split("abab"), ["ab", "ab"]);
        let codes = BpeCodes::parse("#version: 0.2\na b</w>\n").unwrap();
        assert_eq!(codes.split("abab"), ["a", "b", "ab"]);
    }

    #[test]
    fn overlapping_pairs_merge_from_the_left() {
        let codes = BpeCodes::parse("#version: 0.2\nx x\n").unwrap();
        assert_eq!(codes.split("xxxxa"), ["xx", "xx", "a"]);
        assert_eq!(codes.split("xxxa"), ["xx", "x", "a"]);
    }

    #[test]
    fn version_0_1_ends_words_with_a_symbol_of_its_own() {
        let codes = BpeCodes::parse("a b\nab </w>\n").unwrap();
        assert_eq!(codes.split("cab"), ["c", "ab"]);
        assert_eq!(codes.split("abc"), ["ab", "c"]);
    }

    #[test]
    fn single_characters_and_unknown_characters_stay() {
        let codes = BpeCodes::parse("#version: 0.2\na b\n").unwrap();
        assert_eq!(codes.split("é"), ["é"]);
        assert_eq!(codes.split("abé漢"), ["ab", "é", "漢"]);
    }

    #[test]
    fn broken_lines_are_named() {
        assert_eq!(BpeCodes::parse("#version: 0.2\na b\nc\n").unwrap_err(), "line 3: expected two symbols that merge");
        assert_eq!(BpeCodes::parse("a b c\n").unwrap_err(), "line 1: expected two symbols that merge");
        assert!(BpeCodes::parse("\u{feff}#version: 0.2\na b\n").unwrap_err().contains("byte order mark"));
        for text in ["", "\n", "#version: 0.2", "#version: 0.2\n\n"] {
            assert!(BpeCodes::parse(text).unwrap_err().starts_with("holds no merges"), "{text:?}");
        }
        for (text, line) in [("the 1234\n", 1), ("#version: 0.2\nhello world\n", 2), ("e 12\n", 1), ("a</w>b c", 1)] {
            let error = BpeCodes::parse(text).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: the first merge must be of two characters")), "{error}");
        }
        assert!(BpeCodes::parse("e </w>\n").is_ok() && BpeCodes::parse("#version: 0.2\nä ß</w>\n").is_ok());
        let refused = BpeCodes::parse("#version: 0.3\n").unwrap_err();
        assert_eq!(refused, "line 1: version \"0.3\" of the codes; 0.1 and 0.2 are read");
    }
}
