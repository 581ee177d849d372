//! Byte-pair codes of subword-nmt, versions 0.1 and 0.2.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, binary_heap::PeekMut},
    ops::Range,
    path::Path,
};

use super::{
    error::{MARKED, TextError},
    read::read_text,
};
use crate::files::{BYTE_ORDER_MARK, escaped};

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
    /// Places of its neighbours; there is none before the first, and nothing at that after the last.
    before: Option<usize>,
    next: usize,
}

impl Piece {
    fn new(bytes: Range<usize>, symbol: Option<usize>, place: usize) -> Self {
        Self { bytes, symbol, before: place.checked_sub(1), next: place + 1 }
    }
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

    /// The pieces of one word, in order, without marks: the merge of the lowest rank is applied wherever it fits, from
    /// the left, until none fits. The time is that of sorting the characters.
    pub fn split<'a>(&self, word: &'a str) -> Vec<&'a str> {
        let mut pieces = Pieces::new(self.characters(word));
        let mut fitting: BinaryHeap<_> =
            (0..pieces.all.len()).filter_map(|place| self.fitting(&pieces, place)).map(Reverse).collect();
        let mut alike = Vec::new();
        while let Some(Reverse((rank, first))) = fitting.pop() {
            alike.push(first);
            while let Some(next) = fitting.peek_mut().filter(|next| next.0.0 == rank) {
                alike.push(PeekMut::pop(next).0.1);
            }
            for place in alike.drain(..) {
                let Some(merge) = self.merge_at(&pieces, place).filter(|merge| merge.rank == rank) else { continue };
                let before = pieces.merge(place, merge.symbol);
                fitting.extend(
                    before.into_iter().chain([place]).filter_map(|place| self.fitting(&pieces, place)).map(Reverse),
                );
            }
        }
        pieces.all.iter().flatten().map(|piece| &word[piece.bytes.clone()]).filter(|text| !text.is_empty()).collect()
    }

    /// The rank of what fits at a place, and the place.
    fn fitting(&self, pieces: &Pieces, place: usize) -> Option<(usize, usize)> {
        Some((self.merge_at(pieces, place)?.rank, place))
    }

    /// What the piece at a place merges into with the one after it.
    fn merge_at(&self, pieces: &Pieces, place: usize) -> Option<Merge> {
        let piece = pieces.at(place)?;
        self.merge(piece, pieces.at(piece.next)?)
    }

    fn characters(&self, word: &str) -> Vec<Piece> {
        let mut pieces: Vec<_> = word
            .char_indices()
            .enumerate()
            .map(|(place, (start, character))| {
                let bytes = start..start + character.len_utf8();
                let last = bytes.end == word.len() && !self.separate_end;
                let text = format!("{character}{}", if last { END_OF_WORD } else { "" });
                Piece::new(bytes, self.symbols.get(&text).copied(), place)
            })
            .collect();
        if self.separate_end {
            let end = self.symbols.get(END_OF_WORD).copied();
            pieces.push(Piece::new(word.len()..word.len(), end, pieces.len()));
        }
        pieces
    }

    fn merge(&self, left: &Piece, right: &Piece) -> Option<Merge> {
        self.merges.get(&(left.symbol?, right.symbol?)).copied()
    }
}

/// The pieces of a word, each where its first character was.
struct Pieces {
    all: Vec<Option<Piece>>,
}

impl Pieces {
    fn new(pieces: Vec<Piece>) -> Self {
        Self { all: pieces.into_iter().map(Some).collect() }
    }

    fn at(&self, place: usize) -> Option<&Piece> {
        self.all.get(place)?.as_ref()
    }

    /// Joins a piece with the one after it; gives the place of the one before it.
    fn merge(&mut self, place: usize, symbol: usize) -> Option<usize> {
        let next = self.at(place)?.next;
        let joined = self.all.get_mut(next).and_then(Option::take)?;
        if let Some(Some(after)) = self.all.get_mut(joined.next) {
            after.before = Some(place);
        }
        let piece = self.all.get_mut(place)?.as_mut()?;
        (piece.bytes.end, piece.symbol, piece.next) = (joined.bytes.end, Some(symbol), joined.next);
        piece.before
    }
}

/// Whether a symbol is what words are cut into before the first merge.
fn is_character(symbol: &str) -> bool {
    let character = symbol.strip_suffix(END_OF_WORD).unwrap_or(symbol);
    symbol == END_OF_WORD || character.chars().count() == 1
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

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

    /// The definition: one merge after the other, each in a pass over the whole word.
    fn split_by_passes<'a>(codes: &BpeCodes, word: &'a str) -> Vec<&'a str> {
        let mut pieces = codes.characters(word);
        while let Some(best) =
            pieces.windows(2).filter_map(|pair| codes.merge(&pair[0], &pair[1])).min_by_key(|merge| merge.rank)
        {
            let mut index = 0;
            while index + 1 < pieces.len() {
                let merge = codes.merge(&pieces[index], &pieces[index + 1]);
                if merge.is_some_and(|merge| merge.rank == best.rank) {
                    pieces[index].bytes.end = pieces[index + 1].bytes.end;
                    pieces[index].symbol = Some(best.symbol);
                    pieces.remove(index + 1);
                }
                index += 1;
            }
        }
        pieces.into_iter().map(|piece| &word[piece.bytes]).filter(|text| !text.is_empty()).collect()
    }

    proptest! {
        #[test]
        fn words_are_split_as_by_passes(
            version in prop_oneof![Just("#version: 0.2\n"), Just("")],
            merges in vec(("[ab]{1,3}", "[ab]{1,3}(</w>)?"), 1..20),
            word in "[abc]{0,40}",
        ) {
            let lines: String = merges.iter().map(|(left, right)| format!("{left} {right}\n")).collect();
            let codes = BpeCodes::parse(&format!("{version}a b\n{lines}")).unwrap();
            prop_assert_eq!(codes.split(&word), split_by_passes(&codes, &word));
        }
    }

    #[test]
    fn a_lower_rank_waits_until_a_merge_was_applied_everywhere() {
        let codes = BpeCodes::parse("#version: 0.2\nx z\nxy x\nx y\n").unwrap();
        assert_eq!(codes.split("xyxy_"), ["xy", "xy", "_"]);
        assert_eq!(codes.split("xyxyx_"), ["xy", "xyx", "_"]);
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
