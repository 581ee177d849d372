//! One line, one help line and an exit code: what the user sees of an error.

mod from;
mod from_engine;
#[cfg(feature = "ort")]
mod from_generate;
mod from_import;

pub(super) use from::COMPARABLE;
#[cfg(feature = "ort")]
pub(super) use from::instead_of;
#[cfg(feature = "ort")]
pub(super) use from_generate::failure_in;

use std::path::Path;

use super::codes::Code;
use crate::{backend::BackendError, files::help_with, text::TextError};

/// What went wrong, as the user sees it.
#[derive(Debug)]
pub(super) struct Failure {
    code: Code,
    pub(super) message: String,
    help: Option<String>,
}

/// What to do about a folder in place of a file.
const FOLDER_HELP: &str = "give the file in it that is meant";

impl Failure {
    fn new(code: Code, message: impl Into<String>, help: Option<&str>) -> Self {
        Self { code, message: message.into(), help: help.map(ToOwned::to_owned) }
    }

    pub(super) fn output_name(message: impl Into<String>, help: &str) -> Self {
        Self::new(Code::OutputName, message, Some(help))
    }

    pub(super) fn output_is_input(message: impl Into<String>, help: &str) -> Self {
        Self::new(Code::OutputIsInput, message, Some(help))
    }

    pub(super) fn usage(message: impl Into<String>, help: &str) -> Self {
        Self::new(Code::Usage, message, Some(help))
    }

    pub(super) fn unsupported(message: impl Into<String>, help: Option<String>) -> Self {
        Self { help, ..Self::new(Code::BackendUnsupported, message, None) }
    }

    pub(super) fn dtype(message: impl Into<String>, help: String) -> Self {
        Self::new(Code::Dtype, message, Some(&help))
    }

    pub(super) fn too_long(message: String, help: &str) -> Self {
        Self::new(Code::TooLong, message, Some(help))
    }

    pub(super) fn token_id(message: String) -> Self {
        Self::new(Code::TokenId, message, Some("give ids of the tokenizer that the model was trained with"))
    }

    pub(super) fn runtime(message: impl Into<String>, help: Option<String>) -> Self {
        Self { help, ..Self::new(Code::RuntimeMissing, message, None) }
    }

    /// Ctrl-C, which nothing waits for.
    pub(super) fn not_heard(message: String) -> Self {
        let help = "the limit of processes and threads of your user may be reached: `ulimit -u`";
        Self::new(Code::Io, message, Some(help))
    }

    pub(super) fn io(error: &std::io::Error, place: &str) -> Self {
        Self::new(Code::Io, format!("{place}: {error}"), help_with(error))
    }

    /// A result whose folder is missing.
    pub(super) fn no_folder(path: &Path, folder: &Path) -> Self {
        let message = format!("{} cannot be written: there is no folder {}", path.display(), folder.display());
        Self::new(Code::WriteIo, message, Some("correct the path, or make the folder"))
    }

    /// Something that must not be looked at.
    pub(super) fn closed(error: &std::io::Error, path: &Path) -> Self {
        let help = "let your user read and enter the folder and those above it, or give a copy that it may read";
        Self::new(Code::Io, format!("{}: {error}", path.display()), Some(help))
    }

    /// A file of lines that cannot be read.
    pub(super) fn of_lines(error: TextError) -> Self {
        let message = error.to_string();
        match error {
            TextError::Io { source, path } => Self::io(&source, &path.display().to_string()),
            TextError::Folder { .. } => Self::new(Code::Io, message, Some(FOLDER_HELP)),
            TextError::Limit { .. } => Self::too_much(message, "split the file"),
            TextError::Malformed { .. } | TextError::Dictionary { .. } | TextError::Codes { .. } => {
                Self::malformed(message, "give a file of lines")
            }
        }
    }

    pub(super) fn no_text(message: String) -> Self {
        Self::new(Code::NoText, message, Some("give UTF-8 text, one sentence a line"))
    }

    pub(super) fn too_much(message: String, help: &str) -> Self {
        Self::new(Code::TextLimit, message, Some(help))
    }

    pub(super) fn interrupted(message: String) -> Self {
        Self::new(Code::Interrupted, message, None)
    }

    pub(super) fn malformed(message: impl Into<String>, help: &str) -> Self {
        Self::new(Code::Content, message, Some(help))
    }

    pub(super) fn bug(panic: &str) -> Self {
        let help = "please report this line with the command";
        Self::new(Code::Bug, format!("moa-export broke, which is a bug of ours: {panic}"), Some(help))
    }

    /// A dictionary of another size than the vocabulary of a graph.
    pub(super) fn other_vocabulary(message: String) -> Self {
        Self::new(
            Code::OtherDictionary,
            message,
            Some("give the dictionary of this model; one in its folder may be of an earlier export"),
        )
    }

    /// The same, said of what stands in a file.
    pub(super) fn of_file(self, path: &Path) -> Self {
        Self { message: format!("{}: {}", path.display(), self.message), ..self }
    }

    /// What is wrong with inputs names the file that they come from.
    pub(super) fn of_inputs(error: BackendError, path: &Path) -> Self {
        let is_input = matches!(error, BackendError::Input { .. });
        let failure = Self::from(error);
        if is_input { failure.of_file(path) } else { failure }
    }

    pub(super) fn code(&self) -> Code {
        self.code
    }

    /// One `error` line and at most one `help` line on stderr.
    pub(super) fn print(&self) {
        let mut text = format!("error[{}]: {}\n", self.code, super::one_line(&self.message));
        if let Some(help) = &self.help {
            text.push_str(&format!("help: {}\n", super::one_line(help)));
        }
        super::print_aside(&text);
    }
}
