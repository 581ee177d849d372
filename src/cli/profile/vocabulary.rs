//! What makes token ids of the text that `profile` reads, and names them.

use std::path::Path;

use crate::cli::Failure;
#[cfg(feature = "tokenizers")]
use crate::cli::{note, notes::note_of_size};
#[cfg(feature = "tokenizers")]
use crate::text::HubTokenizer;
use crate::{
    file_names::{Part, graph_file},
    profile::Profiler,
    text::{Dictionary, TRANSLATION_CONFIG, TextError, Tokenizer, TranslationConfig},
};

/// The vocabulary beside the graphs.
pub(super) enum Vocabulary {
    /// Of a translation model.
    Fairseq { config: TranslationConfig, tokenizer: Box<Tokenizer> },
    /// Of a language model.
    #[cfg(feature = "tokenizers")]
    Hub(Box<HubTokenizer>),
}

impl Vocabulary {
    /// The vocabulary of `folder`, if it holds one. A `tokenizer.json` that cannot be used is an error where text is to
    /// be read.
    pub(super) fn find(folder: &Path, reads_text: bool) -> Result<Option<Self>, TextError> {
        if folder.join(TRANSLATION_CONFIG).exists() {
            let config = TranslationConfig::read(folder)?;
            let tokenizer = Box::new(Tokenizer::read(folder, &config)?);
            return Ok(Some(Self::Fairseq { tokenizer, config }));
        }
        match folder.join(graph_file(Part::Encoder)).exists() {
            true => Ok(None),
            false => Self::of_hub(folder, reads_text),
        }
    }

    #[cfg(feature = "tokenizers")]
    fn of_hub(folder: &Path, reads_text: bool) -> Result<Option<Self>, TextError> {
        match HubTokenizer::read(folder) {
            Err(error) if !reads_text => {
                note(&format!("{error}; tokens have no names"));
                Ok(None)
            }
            found => Ok(found?.map(|tokenizer| Self::Hub(Box::new(tokenizer)))),
        }
    }

    #[cfg(not(feature = "tokenizers"))]
    #[allow(clippy::unnecessary_wraps)]
    const fn of_hub(_: &Path, _: bool) -> Result<Option<Self>, TextError> {
        Ok(None)
    }

    /// What names a token of a graph.
    pub(super) fn symbol(&self, part: Part, id: i64) -> Option<String> {
        match self {
            Self::Fairseq { tokenizer, .. } => Some(dictionary(tokenizer, part).symbol(id).to_owned()),
            #[cfg(feature = "tokenizers")]
            Self::Hub(tokenizer) => tokenizer.symbol(id),
        }
    }

    /// Refuses dictionaries that the graphs were not made with; of a tokenizer that may be another model's, a note says
    /// so.
    pub(super) fn check(&self, folder: &Path, profiler: &Profiler) -> Result<(), Failure> {
        match self {
            Self::Fairseq { tokenizer, .. } => check_dictionaries(folder, |part| dictionary(tokenizer, part), profiler),
            #[cfg(feature = "tokenizers")]
            Self::Hub(tokenizer) => {
                note_of_size(tokenizer, profiler.symbols().next().map(|(_, _, symbols)| symbols));
                Ok(())
            }
        }
    }
}

const fn dictionary(tokenizer: &Tokenizer, part: Part) -> &Dictionary {
    match part {
        Part::Decoder => tokenizer.target(),
        Part::Encoder | Part::Model => tokenizer.source(),
    }
}

/// Refuses dictionaries that the graphs were not made with. A masked language model knows
/// one symbol more than its dictionary: fairseq adds the mask when it trains.
pub(super) fn check_dictionaries<'a>(
    path: &Path,
    dictionary: impl Fn(Part) -> &'a Dictionary,
    profiler: &Profiler,
) -> Result<(), Failure> {
    let masks = usize::from(!profiler.is_encoder_decoder());
    profiler.symbols().try_for_each(|(graph, part, symbols)| {
        let found = dictionary(part).len();
        if (found..=found + masks).contains(&symbols) {
            return Ok(());
        }
        let path = path.display();
        let message = format!("{path}: {found} symbols with the four special ones; {graph} knows {symbols}");
        Err(Failure::other_vocabulary(message))
    })
}
