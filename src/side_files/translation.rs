//! The files beside the graphs of a translation model: its vocabulary, and `generation.json`.

use std::path::{Path, PathBuf};

use moa_graphs::{
    families::{Config, DEFAULT_POSITIONS},
    model::EncoderDecoder,
};
use serde_json::Value;

use super::{LARGEST, SideFile, SideFileOptions, file_in};
use crate::text::{BpeCodes, Dictionary, Segmentation, TRANSLATION_CONFIG, TextError, TranslationConfig, read_bytes};

const DICTIONARY: &str = "dict.txt";
const SOURCE_DICTIONARY: &str = "dict.source.txt";
const TARGET_DICTIONARY: &str = "dict.target.txt";
const CODES: &str = "bpe.codes";

/// Keys that name the languages of a fairseq model.
const SOURCE_LANGUAGE: &str = "source_lang";
const TARGET_LANGUAGE: &str = "target_lang";

/// Another name of codes beside a checkpoint.
const OTHER_CODES: &str = "bpecodes";
const CODES_BESIDE: [&str; 2] = [CODES, OTHER_CODES];

/// Names of all these files, but for the dictionaries of languages.
pub(super) const NAMES: [&str; 6] =
    [TRANSLATION_CONFIG, DICTIONARY, SOURCE_DICTIONARY, TARGET_DICTIONARY, CODES, OTHER_CODES];

impl SideFileOptions {
    /// Dictionaries and codes, named or found: dictionaries beside the checkpoint, codes beside the dictionary.
    fn resolve(&self, config: &Config) -> (Option<[PathBuf; 2]>, Option<PathBuf>) {
        let dictionaries = self.dictionaries.clone().or_else(|| self.dictionaries_beside(config));
        let folder = dictionaries.as_ref().and_then(|[source, _]| source.parent());
        let codes = || folder.and_then(|folder| CODES_BESIDE.into_iter().find_map(|name| file_in(folder, name)));
        let codes = self.bpe_codes.clone().or_else(codes);
        (dictionaries, codes)
    }

    /// Dictionaries beside the checkpoint, of its two languages or of both.
    fn dictionaries_beside(&self, config: &Config) -> Option<[PathBuf; 2]> {
        let folder = self.checkpoint_folder()?;
        let of_language =
            |key: &str| config.name(key).and_then(|language| file_in(folder, &format!("dict.{language}.txt")));
        let pair = of_language(SOURCE_LANGUAGE).zip(of_language(TARGET_LANGUAGE)).map(<[PathBuf; 2]>::from);
        pair.or_else(|| file_in(folder, DICTIONARY).map(|path| [path.clone(), path]))
    }
}

/// Why vocabulary files do not belong to a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VocabularyError {
    /// A file cannot be read or breaks its format.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A dictionary has another number of symbols than the model.
    #[error("{}: {symbols} symbols with the four special ones; the {side} embedding has {rows}", .path.display())]
    Size {
        /// The dictionary.
        path: PathBuf,
        /// Its symbols.
        symbols: usize,
        /// `source` or `target`.
        side: &'static str,
        /// Rows of the embedding.
        rows: usize,
    },
    /// The model has one embedding for source and target, and their dictionaries differ.
    #[error(
        "{}: id {id} is {:?}, and {:?} in {}; the model has one embedding for source and target",
        .paths[1].display(), .symbols[1], .symbols[0], .paths[0].display()
    )]
    Shared {
        /// The dictionaries of source and target.
        paths: [PathBuf; 2],
        /// First id whose symbols differ.
        id: i64,
        /// Its symbols.
        symbols: [String; 2],
    },
    /// Codes were given, and no dictionary.
    #[error("{} has no dictionary", .codes.display())]
    NoDictionary {
        /// The codes.
        codes: PathBuf,
    },
    /// The model pads with another symbol than a fairseq dictionary.
    #[error("the model pads with id {found}, and a fairseq dictionary with {}", Dictionary::PAD)]
    Padding {
        /// Id of the model.
        found: usize,
    },
}

/// The files beside the graphs of `model`; none where there is no dictionary.
pub(crate) fn side_files(
    model: &EncoderDecoder,
    config: &Config,
    files: &SideFileOptions,
) -> Result<Vec<SideFile>, VocabularyError> {
    let (dictionaries, codes) = files.resolve(config);
    let Some(paths @ [source, target]) = &dictionaries else {
        return match codes {
            Some(codes) => Err(VocabularyError::NoDictionary { codes }),
            None => Ok(Vec::new()),
        };
    };
    let segmentation = check_dictionaries(model, paths)?;
    let mut written = vec![(if source == target { DICTIONARY } else { SOURCE_DICTIONARY }, source.as_path())];
    if source != target {
        written.push((TARGET_DICTIONARY, target.as_path()));
    }
    let segmentation = match &codes {
        Some(codes) => {
            BpeCodes::read(codes)?;
            written.push((CODES, codes.as_path()));
            Segmentation::Bpe
        }
        None => segmentation,
    };
    let mut result = Vec::new();
    for (name, path) in &written {
        result.push(SideFile { name: (*name).into(), bytes: read_bytes(path, LARGEST)? });
    }
    let last = written.iter().rev().find(|(name, _)| *name != CODES).map_or(DICTIONARY, |(name, _)| name);
    let mut generation = TranslationConfig::fairseq(segmentation, written[0].0, last);
    generation.bpe_codes = codes.as_ref().map(|_| CODES.into());
    describe(&mut generation, model, config)?;
    result.push(SideFile { name: TRANSLATION_CONFIG.into(), bytes: generation.to_json().into_bytes() });
    Ok(result)
}

/// Adds what the model says about its sequences.
fn describe(
    generation: &mut TranslationConfig,
    model: &EncoderDecoder,
    config: &Config,
) -> Result<(), VocabularyError> {
    for embedding in [&model.encoder.embedding, &model.decoder.embedding] {
        if i64::try_from(embedding.pad_token_id) != Ok(Dictionary::PAD) {
            return Err(VocabularyError::Padding { found: embedding.pad_token_id });
        }
    }
    // Upstream holds to what is configured where there are no positions too.
    let configured = |key: &str| {
        let size = config.keys().get(key).and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
        Some(size.unwrap_or(DEFAULT_POSITIONS))
    };
    let [source, target] = [&model.encoder.embedding, &model.decoder.embedding];
    generation.max_source_positions = source.max_tokens().or_else(|| configured("max_source_positions"));
    generation.max_target_positions = target.max_tokens().or_else(|| configured("max_target_positions"));
    generation.left_pad_source = config.flag("left_pad_source").unwrap_or(true);
    Ok(())
}

/// How text is split without codes; an error where a dictionary does not belong to its side of the model.
///
/// That is at whitespace, as fairseq does, but where all symbols of both sides are characters and a space has one.
fn check_dictionaries(model: &EncoderDecoder, paths: &[PathBuf; 2]) -> Result<Segmentation, VocabularyError> {
    let (encoder, decoder) = (&model.encoder.embedding.tokens, &model.decoder.embedding.tokens);
    let source = check_dictionary(&paths[0], "source", encoder.shape()[0])?;
    let target = check_dictionary(&paths[1], "target", model.decoder.output.shape()[0])?;
    if encoder.name() == decoder.name()
        && let Some(id) = source.first_difference(&target)
    {
        let symbols = [&source, &target].map(|dictionary| dictionary.symbol(id).to_owned());
        return Err(VocabularyError::Shared { paths: paths.clone(), id, symbols });
    }
    let of_characters = source.has_space() && source.is_of_characters() && target.is_of_characters();
    Ok(if of_characters { Segmentation::Characters } else { Segmentation::Words })
}

fn check_dictionary(path: &Path, side: &'static str, rows: usize) -> Result<Dictionary, VocabularyError> {
    let dictionary = Dictionary::read(path)?;
    let symbols = dictionary.len();
    if symbols == rows {
        return Ok(dictionary);
    }
    Err(VocabularyError::Size { path: path.into(), symbols, side, rows })
}
