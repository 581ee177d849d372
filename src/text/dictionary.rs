//! fairseq dictionaries: one symbol and its count a line, ids in the order of the lines.

use std::{collections::HashMap, path::Path};

use super::{
    error::{MARKED, TextError},
    read::read_text,
};
use crate::files::BYTE_ORDER_MARK;

const LIMIT: u64 = 64 << 20;
const MAX_SYMBOLS: usize = 1 << 20;

/// Symbols that fairseq puts before those of the file: begin, padding, end, unknown.
const SPECIAL: [&str; 4] = ["<s>", "<pad>", "</s>", "<unk>"];
/// Ends a piece that continues a word.
pub(super) const CONTINUES: &str = "@@";
/// Stands for a space among the symbols of characters, and begins a word among those of SentencePiece.
pub(super) const SPACE: &str = "▁";
const OVERWRITE: &str = "#fairseq:overwrite";

/// The symbols of one language and their ids.
///
/// The special symbols have ids but no text maps to them, so that an input cannot contain padding or an end.
#[derive(Debug, Clone)]
pub struct Dictionary {
    symbols: Vec<String>,
    ids: HashMap<String, usize>,
}

impl Dictionary {
    /// Id of `<s>`.
    pub const BOS: i64 = 0;
    /// Id of `<pad>`.
    pub const PAD: i64 = 1;
    /// Id of `</s>`.
    pub const EOS: i64 = 2;
    /// Id of `<unk>`.
    pub const UNK: i64 = 3;

    /// Reads a `dict.txt`.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read, is no text, or a line is not `symbol count`; names the line.
    pub fn read(path: &Path) -> Result<Self, TextError> {
        Self::parse(&read_text(path, LIMIT)?).map_err(|what| TextError::Dictionary { path: path.into(), what })
    }

    /// The dictionary that `text` writes down.
    ///
    /// # Errors
    ///
    /// Which line is wrong, and why.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with(BYTE_ORDER_MARK) {
            return Err(MARKED.into());
        }
        let mut dictionary = Self { symbols: SPECIAL.map(str::to_owned).into(), ids: HashMap::new() };
        for (index, line) in text.lines().enumerate() {
            let refused = |why: &str| Err(format!("line {}: {why}", index + 1));
            let line = line.trim_end();
            let (line, overwrite) = match line.strip_suffix(OVERWRITE) {
                Some(rest) => (rest.trim_end(), true),
                None => (line, false),
            };
            let Some((symbol, _)) = line.rsplit_once(' ').filter(|(_, count)| count.parse::<i64>().is_ok()) else {
                return refused("expected a symbol and its count");
            };
            let known = SPECIAL.contains(&symbol) || dictionary.ids.contains_key(symbol);
            if known && !overwrite {
                return refused(&format!("symbol {symbol:?} is there already"));
            }
            if dictionary.symbols.len() >= MAX_SYMBOLS {
                return refused(&format!("more than {MAX_SYMBOLS} symbols"));
            }
            dictionary.ids.insert(symbol.to_owned(), dictionary.symbols.len());
            dictionary.symbols.push(symbol.to_owned());
        }
        if dictionary.ids.is_empty() { Err("there is no symbol".into()) } else { Ok(dictionary) }
    }

    /// Number of ids, the special ones included.
    pub fn len(&self) -> usize {
        self.symbols.len()
    }

    /// Never: the special symbols are always there.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Id of a symbol; that of `<unk>` where the dictionary does not have it.
    pub fn id(&self, symbol: &str) -> i64 {
        self.ids.get(symbol).and_then(|id| i64::try_from(*id).ok()).unwrap_or(Self::UNK)
    }

    /// Symbol of an id; `<unk>` where the dictionary does not have it.
    pub fn symbol(&self, id: i64) -> &str {
        usize::try_from(id).ok().and_then(|id| self.symbols.get(id)).map_or(SPECIAL[3], String::as_str)
    }

    /// The first id that has another symbol in `other`, or has one in only one of the two.
    pub fn first_difference(&self, other: &Self) -> Option<i64> {
        let length = self.symbols.len().max(other.symbols.len());
        let id = (0..length).find(|id| self.symbols.get(*id) != other.symbols.get(*id));
        id.and_then(|id| i64::try_from(id).ok())
    }

    /// Whether a space has a symbol.
    pub fn has_space(&self) -> bool {
        self.ids.contains_key(SPACE)
    }

    /// Whether every symbol of the file is one character.
    pub fn is_of_characters(&self) -> bool {
        let filler = |symbol: &str| symbol.starts_with("madeupword");
        let own = self.symbols.iter().skip(SPECIAL.len());
        own.filter(|symbol| !filler(symbol)).all(|symbol| symbol.chars().count() == 1)
    }

    /// Whether a symbol is a piece that continues a word, as subword-nmt writes them.
    pub fn has_pieces(&self) -> bool {
        self.symbols.iter().any(|symbol| symbol.len() > CONTINUES.len() && symbol.ends_with(CONTINUES))
    }

    /// Whether a symbol begins a word and is longer than its mark, as SentencePiece writes them.
    pub fn has_sentence_pieces(&self) -> bool {
        self.symbols.iter().any(|symbol| symbol.len() > SPACE.len() && symbol.starts_with(SPACE))
    }
}

#[cfg(test)]
mod tests {
    use super::Dictionary;

    #[test]
    fn ids_follow_the_lines_after_the_special_symbols() {
        let dictionary = Dictionary::parse("und@@ 12\nzig 3\n").unwrap();
        assert_eq!(dictionary.len(), 6);
        assert_eq!([dictionary.id("und@@"), dictionary.id("zig")], [4, 5]);
        assert_eq!([dictionary.symbol(5), dictionary.symbol(3), dictionary.symbol(9)], ["zig", "<unk>", "<unk>"]);
    }

    #[test]
    fn text_never_becomes_a_special_symbol() {
        let dictionary = Dictionary::parse("a 1\n").unwrap();
        for text in ["<s>", "<pad>", "</s>", "<unk>", "b", ""] {
            assert_eq!(dictionary.id(text), Dictionary::UNK, "{text}");
        }
    }

    #[test]
    fn broken_lines_are_named() {
        for (text, message) in [
            ("a 1\n\n", "line 2: expected a symbol and its count"),
            ("a 1\nb\n", "line 2: expected a symbol and its count"),
            ("a x\n", "line 1: expected a symbol and its count"),
            ("a 1\na 2\n", "line 2: symbol \"a\" is there already"),
            ("<pad> 1\n", "line 1: symbol \"<pad>\" is there already"),
            ("\u{feff}a 1\n", "begins with a byte order mark; save it as UTF-8 without one"),
            ("", "there is no symbol"),
        ] {
            assert_eq!(Dictionary::parse(text).unwrap_err(), message);
        }
    }

    #[test]
    fn a_repeated_symbol_may_be_declared() {
        let dictionary = Dictionary::parse("a 1\na 2 #fairseq:overwrite\n").unwrap();
        assert_eq!((dictionary.len(), dictionary.id("a")), (6, 5));
    }

    #[test]
    fn characters_and_spaces_are_recognised() {
        for (text, of_characters, space) in [
            ("▁ 9\ne 3\nmadeupword0000 0\n", true, true),
            ("c 9\na 3\nt 3\n", true, false),
            ("▁ 9\nzig 3\n", false, true),
            ("e 9\n▁zig 3\n", false, false),
        ] {
            let dictionary = Dictionary::parse(text).unwrap();
            assert_eq!((dictionary.is_of_characters(), dictionary.has_space()), (of_characters, space), "{text}");
        }
    }

    #[test]
    fn the_first_difference_is_found() {
        let difference = |one: &str, other: &str| {
            let [one, other] = [one, other].map(|text| Dictionary::parse(text).unwrap());
            one.first_difference(&other)
        };
        assert_eq!(difference("a 1\nb 1\n", "a 7\nb 3\n"), None);
        assert_eq!(difference("a 1\nb 1\n", "b 1\na 1\n"), Some(4));
        assert_eq!(difference("a 1\n", "a 1\nb 1\n"), Some(5));
    }

    #[test]
    fn pieces_of_words_are_recognised() {
        assert!(Dictionary::parse("und@@ 12\nzig 3\n").unwrap().has_pieces());
        assert!(!Dictionary::parse("@@ 12\nzig@ 3\n").unwrap().has_pieces());
        assert!(Dictionary::parse("▁the 12\nn 3\n").unwrap().has_sentence_pieces());
        assert!(!Dictionary::parse("▁ 12\nthe▁ 3\n").unwrap().has_sentence_pieces());
    }
}
