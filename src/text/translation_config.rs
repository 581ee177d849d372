//! `generation.json`: what a folder of graphs needs to turn text into text.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Dictionary, Keys, error::TextError, read::read_text};
use crate::files::{BYTE_ORDER_MARK, is_plain_name};

/// Name of the file in an exported folder.
pub const TRANSLATION_CONFIG: &str = "generation.json";

const FORMAT: u32 = 1;
const LIMIT: u64 = 1 << 20;

/// What a key must hold: in words, and as a test.
type Form = (&'static str, fn(&Value) -> bool);

const TEXT: Form = ("a text", Value::is_string);
const ID: Form = ("a whole number", Value::is_i64);
const SIZE: Form = ("a whole number, or null", |value| value.is_null() || value.is_u64());

/// Every key of the file, whether it must be there, and its form.
const KEYS: [(&str, bool, Form); 13] = [
    ("format", true, ("a whole number", |value| value.as_u64().is_some_and(|format| u32::try_from(format).is_ok()))),
    ("tokenizer", true, ("\"words\", \"bpe\" or \"characters\"", is_segmentation)),
    ("source_dictionary", true, TEXT),
    ("target_dictionary", true, TEXT),
    ("bpe_codes", false, ("a text, or null", |value| value.is_null() || value.is_string())),
    ("bos_token_id", true, ID),
    ("pad_token_id", true, ID),
    ("eos_token_id", true, ID),
    ("unk_token_id", true, ID),
    ("decoder_start_token_id", true, ID),
    ("left_pad_source", true, ("true or false", Value::is_boolean)),
    ("max_source_positions", false, SIZE),
    ("max_target_positions", false, SIZE),
];

fn is_segmentation(value: &Value) -> bool {
    Segmentation::deserialize(value).is_ok()
}

/// How text is cut into symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Segmentation {
    /// At whitespace.
    Words,
    /// At whitespace, then by the merges of subword-nmt; a piece that continues a word ends in `@@`.
    Bpe,
    /// Every character; a space is `▁`.
    Characters,
}

/// Which files and ids belong to an exported translation model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TranslationConfig {
    format: u32,
    /// How text is cut into symbols.
    #[serde(rename = "tokenizer")]
    pub segmentation: Segmentation,
    /// Name of the fairseq dictionary of the source language, in the same folder.
    pub source_dictionary: String,
    /// Name of the fairseq dictionary of the target language, in the same folder.
    pub target_dictionary: String,
    /// Name of the subword-nmt codes, in the same folder.
    #[serde(default)]
    pub bpe_codes: Option<String>,
    bos_token_id: i64,
    pad_token_id: i64,
    eos_token_id: i64,
    unk_token_id: i64,
    decoder_start_token_id: i64,
    /// Whether shorter sources of a batch are padded on the left.
    pub left_pad_source: bool,
    /// Longest source that has positions, its end included; absent where there is no limit.
    #[serde(default)]
    pub max_source_positions: Option<usize>,
    /// Longest target that has positions, its start included; absent where there is no limit.
    #[serde(default)]
    pub max_target_positions: Option<usize>,
}

/// Where the vocabulary files are.
pub(super) struct Files {
    pub(super) source: PathBuf,
    pub(super) target: PathBuf,
    pub(super) codes: Option<PathBuf>,
}

impl TranslationConfig {
    /// The configuration of a fairseq model: its ids, a decoder that starts from the end symbol.
    pub fn fairseq(segmentation: Segmentation, source_dictionary: &str, target_dictionary: &str) -> Self {
        Self {
            format: FORMAT,
            segmentation,
            source_dictionary: source_dictionary.into(),
            target_dictionary: target_dictionary.into(),
            bpe_codes: None,
            bos_token_id: Dictionary::BOS,
            pad_token_id: Dictionary::PAD,
            eos_token_id: Dictionary::EOS,
            unk_token_id: Dictionary::UNK,
            decoder_start_token_id: Dictionary::EOS,
            left_pad_source: true,
            max_source_positions: None,
            max_target_positions: None,
        }
    }

    /// Reads `generation.json` of an exported folder.
    ///
    /// # Errors
    ///
    /// Where it cannot be read, has another format, or states what this program cannot do.
    pub fn read(folder: &Path) -> Result<Self, TextError> {
        let path = folder.join(TRANSLATION_CONFIG);
        let text = read_text(&path, LIMIT)?;
        let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text);
        let malformed = |what: String| TextError::malformed(&path, what);
        let keys = Keys::parse(&path, text)?;
        KEYS.into_iter().try_for_each(|(key, required, (form, holds))| keys.check(key, required, form, holds))?;
        let config: Self = serde_json::from_str(text).map_err(|error| malformed(error.to_string()))?;
        config.check().map_err(malformed)?;
        Ok(config)
    }

    /// The text of the file.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// The id that the decoder reads first.
    pub const fn decoder_start(&self) -> i64 {
        self.decoder_start_token_id
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("format {}; format {FORMAT} is read", self.format));
        }
        let ids = [
            ("bos_token_id", self.bos_token_id, Dictionary::BOS),
            ("pad_token_id", self.pad_token_id, Dictionary::PAD),
            ("eos_token_id", self.eos_token_id, Dictionary::EOS),
            ("unk_token_id", self.unk_token_id, Dictionary::UNK),
        ];
        if let Some((name, found, expected)) = ids.into_iter().find(|(_, found, expected)| found != expected) {
            return Err(format!("{name} is {found}; in a fairseq dictionary it is {expected}"));
        }
        if self.decoder_start_token_id < 0 {
            return Err(format!("decoder_start_token_id is {}", self.decoder_start_token_id));
        }
        if (self.segmentation == Segmentation::Bpe) != self.bpe_codes.is_some() {
            return Err("bpe_codes must be there with the tokenizer \"bpe\", and only then".into());
        }
        let limits = [self.max_source_positions, self.max_target_positions];
        if limits.into_iter().flatten().any(|limit| limit < 2) {
            return Err("max_source_positions and max_target_positions must be at least 2".into());
        }
        Ok(())
    }

    /// Places of the vocabulary files; they cannot lie outside of `folder`.
    pub(super) fn files(&self, folder: &Path) -> Result<Files, TextError> {
        let place = |name: &str| match is_plain_name(name) {
            true => Ok(folder.join(name)),
            false => Err(TextError::malformed(&folder.join(TRANSLATION_CONFIG), format!("{name:?} is no file name"))),
        };
        Ok(Files {
            source: place(&self.source_dictionary)?,
            target: place(&self.target_dictionary)?,
            codes: self.bpe_codes.as_deref().map(place).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::{KEYS, Segmentation, TRANSLATION_CONFIG, TranslationConfig};

    fn read(text: &str) -> Result<TranslationConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(TRANSLATION_CONFIG), text).unwrap();
        TranslationConfig::read(folder.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_written_is_read() {
        let mut config = TranslationConfig::fairseq(Segmentation::Bpe, "dict.txt", "dict.txt");
        config.bpe_codes = Some("bpe.codes".into());
        config.max_source_positions = Some(1024);
        assert_eq!(read(&config.to_json()).unwrap(), config);
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        let good = TranslationConfig::fairseq(Segmentation::Words, "dict.txt", "dict.txt").to_json();
        for (from, to, why) in [
            ("\"format\": 1", "\"format\": 2", "format 2; format 1 is read"),
            ("\"pad_token_id\": 1", "\"pad_token_id\": 0", "pad_token_id is 0"),
            ("\"words\"", "\"bpe\"", "bpe_codes must be there"),
            ("\"words\"", "\"sentencepiece\"", "or \"characters\", found \"sentencepiece\""),
            ("\"words\"", "null", "key \"tokenizer\" must be \"words\", \"bpe\" or \"characters\", found null"),
            ("\"format\": 1", "\"format\": null", "key \"format\" must be a whole number, found null"),
            ("\"format\": 1,", "", "key \"format\" is missing, and must be a whole number"),
            ("\"format\": 1", "\"format\": 1, \"format\": 1", "duplicate field `format`"),
            ("\"dict.txt\"", "7", "key \"source_dictionary\" must be a text, found 7"),
            ("\"bos_token_id\": 0", "\"bos_token_id\": 0.5", "key \"bos_token_id\" must be a whole number, found 0.5"),
            ("\"left_pad_source\": true", "\"left_pad_source\": 1", "key \"left_pad_source\" must be true or false"),
            ("\"max_source_positions\": null", "\"max_source_positions\": 1", "must be at least 2"),
            ("{", "[", "no JSON: expected"),
        ] {
            let error = read(&good.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    /// All keys that are written have a form, and each has that.
    #[test]
    fn every_key_has_a_form() {
        let written = TranslationConfig::fairseq(Segmentation::Words, "dict.txt", "dict.txt").to_json();
        let written: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&written).unwrap();
        assert_eq!(written.keys().map(String::as_str).collect::<BTreeSet<_>>(), KEYS.map(|(key, ..)| key).into());
        let all = serde_json::json!([null, 7, -7, 1.5, "bpe", true, [], {}]);
        for (key, required, (_, holds)) in KEYS {
            for value in all.as_array().unwrap().iter().filter(|value| holds(value)) {
                let mut config = written.clone();
                config.insert(key.into(), value.clone());
                let read = serde_json::from_value::<TranslationConfig>(config.into());
                assert!(read.is_ok(), "{key}: {value}: {read:?}");
            }
            let mut config = written.clone();
            config.remove(key);
            assert_eq!(serde_json::from_value::<TranslationConfig>(config.into()).is_err(), required, "{key}");
        }
    }

    #[test]
    fn files_stay_in_the_folder() {
        for name in ["../dict.txt", "/etc/passwd", "a/b", "a\\b", "c:dict.txt", "..", ""] {
            let config = TranslationConfig::fairseq(Segmentation::Words, name, "dict.txt");
            assert!(config.files(std::path::Path::new("out")).is_err(), "{name}");
        }
    }
}
