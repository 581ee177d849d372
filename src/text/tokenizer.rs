//! Text ↔ token ids of one model.

use std::{collections::HashMap, path::Path};

use super::{
    BpeCodes, Dictionary, TextError, TranslationConfig,
    dictionary::{CONTINUES, SPACE},
    translation_config::{Files, Segmentation},
};

/// Turns text into the ids that a model was trained on, and back.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    source: Dictionary,
    target: Dictionary,
    segments: Segments,
}

#[derive(Debug, Clone)]
enum Segments {
    Words,
    Bpe(BpeCodes),
    Characters,
}

impl Tokenizer {
    /// Reads the vocabulary files that `config` names in `folder`.
    ///
    /// # Errors
    ///
    /// Where a file cannot be read or breaks its format.
    pub fn read(folder: &Path, config: &TranslationConfig) -> Result<Self, TextError> {
        let Files { source, target, codes } = config.files(folder)?;
        let source_dictionary = Dictionary::read(&source)?;
        let target_dictionary = if source == target { source_dictionary.clone() } else { Dictionary::read(&target)? };
        let segments = match (config.segmentation, codes) {
            (Segmentation::Bpe, Some(codes)) => Segments::Bpe(BpeCodes::read(&codes)?),
            (Segmentation::Characters, _) => Segments::Characters,
            _ => Segments::Words,
        };
        Ok(Self { source: source_dictionary, target: target_dictionary, segments })
    }

    /// Symbols of the source language.
    pub const fn source(&self) -> &Dictionary {
        &self.source
    }

    /// Symbols of the target language.
    pub const fn target(&self) -> &Dictionary {
        &self.target
    }

    /// Ids of one line of source text, without an end; what the dictionary does not have is `<unk>`.
    pub fn encode(&self, line: &str) -> Vec<i64> {
        self.encode_with(&self.source, line)
    }

    /// [`Self::encode`] of several lines; splits a word once, however often it stands there.
    pub fn encode_all<L: AsRef<str>>(&self, lines: &[L]) -> Vec<Vec<i64>> {
        let mut known: HashMap<&str, Vec<i64>> = HashMap::new();
        let lines = lines.iter().map(AsRef::as_ref);
        lines
            .map(|line| {
                let Segments::Bpe(codes) = &self.segments else { return self.encode(line) };
                let mut ids = Vec::new();
                for word in line.split_whitespace() {
                    ids.extend(known.entry(word).or_insert_with(|| encode_word(&self.source, codes, word)).iter());
                }
                ids
            })
            .collect()
    }

    /// [`Self::encode`] for target text.
    pub fn encode_target(&self, line: &str) -> Vec<i64> {
        self.encode_with(&self.target, line)
    }

    fn encode_with(&self, dictionary: &Dictionary, line: &str) -> Vec<i64> {
        let words = line.split_whitespace();
        match &self.segments {
            Segments::Words => words.map(|word| dictionary.id(word)).collect(),
            Segments::Bpe(codes) => words.flat_map(|word| encode_word(dictionary, codes, word)).collect(),
            Segments::Characters => {
                let mut buffer = [0; 4];
                let text = words.collect::<Vec<_>>().join(SPACE);
                text.chars().map(|character| dictionary.id(character.encode_utf8(&mut buffer))).collect()
            }
        }
    }

    /// Target text of ids; begin, padding and end are left out.
    pub fn decode(&self, ids: &[i64]) -> String {
        let silent = |id: &i64| [Dictionary::BOS, Dictionary::PAD, Dictionary::EOS].contains(id);
        let symbols: Vec<_> = ids.iter().filter(|id| !silent(id)).map(|id| self.target.symbol(*id)).collect();
        match &self.segments {
            Segments::Words => symbols.join(" "),
            Segments::Bpe(_) => {
                let text = format!("{} ", symbols.join(" ")).replace(&format!("{CONTINUES} "), "");
                text.trim_end().to_owned()
            }
            Segments::Characters => symbols.concat().replace(SPACE, " "),
        }
    }
}

fn encode_word(dictionary: &Dictionary, codes: &BpeCodes, word: &str) -> Vec<i64> {
    let pieces = codes.split(word);
    let last = pieces.len().saturating_sub(1);
    let id = |(index, piece): (usize, &&str)| match index == last {
        true => dictionary.id(piece),
        false => dictionary.id(&format!("{piece}{CONTINUES}")),
    };
    pieces.iter().enumerate().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::{BpeCodes, Dictionary, Segments, Tokenizer};

    fn tokenizer(dictionary: &str, segments: Segments) -> Tokenizer {
        let dictionary = Dictionary::parse(dictionary).unwrap();
        Tokenizer { source: dictionary.clone(), target: dictionary, segments }
    }

    #[test]
    fn words_are_split_at_any_whitespace() {
        let tokenizer = tokenizer("one 2\ntwo 1\n", Segments::Words);
        assert_eq!(tokenizer.encode("  one\ttwo  three one "), [4, 5, 3, 4]);
        assert_eq!(tokenizer.decode(&[0, 4, 3, 5, 2]), "one <unk> two");
        assert!(tokenizer.encode(" \t ").is_empty());
        assert_eq!(tokenizer.encode_all(&["one", "", "two one"]), [vec![4], vec![], vec![5, 4]]);
    }

    #[test]
    fn each_language_has_its_own_dictionary() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("source", "one 2\ntwo 1\n"), ("target", "zwei 2\neins 1\ndrei 1\n")] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let read = |name| Dictionary::read(&folder.path().join(name)).unwrap();
        let tokenizer = Tokenizer { source: read("source"), target: read("target"), segments: Segments::Words };
        assert_eq!(tokenizer.encode("two eins"), [5, 3]);
        assert_eq!(tokenizer.encode_all(&["two eins"]), [[5, 3]]);
        assert_eq!(tokenizer.decode(&[4, 5, 6]), "zwei eins drei");
    }

    #[test]
    fn pieces_that_continue_a_word_carry_a_mark() {
        let codes = BpeCodes::parse("#version: 0.2\na b\n").unwrap();
        let tokenizer = tokenizer("ab@@ 2\nc 1\nb 1\n", Segments::Bpe(codes));
        assert_eq!(tokenizer.encode("abc c abx"), [4, 5, 5, 4, 3]);
        assert_eq!(tokenizer.encode_all(&["abc c abx", "abx\tabc"]), [vec![4, 5, 5, 4, 3], vec![4, 3, 4, 5]]);
        assert_eq!(tokenizer.decode(&[4, 5, 6, 2]), "abc b");
        assert_eq!(tokenizer.decode(&[5, 4, 2]), "c ab", "a mark at the end goes too");
    }

    #[test]
    fn characters_write_spaces_as_a_symbol() {
        let tokenizer = tokenizer("▁ 3\na 2\nb 1\n", Segments::Characters);
        assert_eq!(tokenizer.encode(" ab  a"), [5, 6, 4, 5]);
        assert_eq!(tokenizer.decode(&[5, 6, 4, 5, 2]), "ab a");
    }
}
