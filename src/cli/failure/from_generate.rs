//! The typed error of generation as a failure.

use std::io::ErrorKind;

use super::{Code, Failure};
use crate::{
    generate::GenerateError,
    text::{TOKENIZER_FILE, TRANSLATION_CONFIG, TextError},
};

impl From<GenerateError> for Failure {
    fn from(error: GenerateError) -> Self {
        let message = error.to_string();
        match error {
            GenerateError::Text(error) => {
                let again = "copy the file again from where the model came from, or export again with --force";
                let missing = "put it there from a copy of the export, or export again with --force";
                let help = match &error {
                    TextError::Io { source, .. } if source.kind() == ErrorKind::NotFound => Some(missing),
                    TextError::Dictionary { .. } => Some(again),
                    _ => None,
                };
                let failure = Self::from(error);
                let help = help.map(ToOwned::to_owned).or(failure.help).or_else(|| Some(again.into()));
                Self { help, ..failure }
            }
            GenerateError::TwoExports { .. } => {
                Self::new(Code::OnnxMalformed, message, Some("export both again into one folder"))
            }
            GenerateError::Read(error) => error.into(),
            GenerateError::Backend(error) => error.into(),
            GenerateError::Missing { path } => {
                let help = match path.file_name().and_then(|name| name.to_str()) {
                    Some(TRANSLATION_CONFIG) => {
                        "export again with --dict FILE, or dict.txt beside it; baselines have none"
                    }
                    Some(TOKENIZER_FILE) => "give token ids with --token-ids, or put the model's tokenizer.json there",
                    _ => "give the folder that `moa-export CHECKPOINT -o OUT` wrote for a model that generates text",
                };
                Self::new(Code::MissingFile, message, Some(help))
            }
            GenerateError::Graph { .. } => {
                let help = "generate runs the translation models and the causal language models that this version of \
                            moa-export writes: both decode step by step with caches";
                Self::new(Code::NoGenerator, message, Some(help))
            }
            GenerateError::Vocabulary { .. } => {
                let help = "put the dictionary of this model there, or export again with --dict FILE";
                Self::new(Code::OtherDictionary, message, Some(help))
            }
            GenerateError::Option(_) => Self::new(
                Code::GenerationOption,
                message,
                Some("`moa-export generate --help` lists the options and their defaults"),
            ),
            GenerateError::TooLong { .. } => Self::too_long(message, "split the line, or add --skip-long"),
            GenerateError::TokenId { .. } => Self::token_id(message),
            GenerateError::LongPrompt { .. } => Self::too_long(message, "shorten the prompt"),
            GenerateError::NotFinite { .. } | GenerateError::NotFiniteBehind { .. } => {
                Self::new(Code::NotFinite, message, Some("run `moa-export verify` on the folder"))
            }
            GenerateError::Interrupted => Self::new(Code::Interrupted, message, None),
        }
    }
}

/// An error of one line or prompt of what is called `name`.
pub(in crate::cli) fn failure_in(name: &str, error: GenerateError) -> Failure {
    let place = match error {
        GenerateError::TooLong { .. }
        | GenerateError::NotFinite { .. }
        | GenerateError::NotFiniteBehind { .. }
        | GenerateError::TokenId { .. }
        | GenerateError::LongPrompt { .. } => format!("{name}, "),
        _ => String::new(),
    };
    let mut failure = Failure::from(error);
    failure.message.insert_str(0, &place);
    failure
}
