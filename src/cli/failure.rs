//! From typed errors to one line, one help line and an exit code.

use std::path::Path;
use std::process::ExitCode;

use moa_graphs::{FloatType, ImportError, LowerError, WeightError};

use crate::{
    backend::{BackendError, BackendErrorKind, EngineError},
    checkpoint::CheckpointError,
    engine::{ChoiceError, LockError, PrepareError, ProfileError},
    export::{ExportError, OPSETS, VocabularyError},
    files::ErrorKind,
    latency::{LatencyError, PAST},
    onnx::{EncodeError, ReadError, WriteError},
    parity::{AuditError, VerifyError},
    tensor_file::TensorFileError,
    text::TextError,
};
#[cfg(feature = "ort")]
use crate::{
    generate::GenerateError,
    text::{CONFIG_FILE, TOKENIZER_FILE},
};

const FAILED: u8 = 1;
pub(super) const USAGE: u8 = 2;
const MALFORMED: u8 = 3;
const UNSUPPORTED: u8 = 4;
const IO: u8 = 5;
const RUNTIME: u8 = 6;
const LIMIT: u8 = 7;
const BUG: u8 = 70;
pub(super) const INTERRUPTED: u8 = 130;

/// What went wrong, as the user sees it.
#[derive(Debug)]
pub(super) struct Failure {
    exit: u8,
    /// `MOA-E` and four digits; the first two are the exit code.
    number: u8,
    pub(super) message: String,
    help: Option<String>,
}

impl Failure {
    fn new(exit: u8, number: u8, message: impl Into<String>, help: Option<&str>) -> Self {
        Self { exit, number, message: message.into(), help: help.map(ToOwned::to_owned) }
    }

    pub(super) fn usage(message: impl Into<String>, help: Option<&str>) -> Self {
        Self::new(USAGE, 1, message, help)
    }

    pub(super) fn unsupported(message: impl Into<String>, help: Option<String>) -> Self {
        Self { help, ..Self::new(UNSUPPORTED, 16, message, None) }
    }

    pub(super) fn runtime(message: impl Into<String>, help: Option<String>) -> Self {
        Self { help, ..Self::new(RUNTIME, 1, message, None) }
    }

    pub(super) fn io(error: &std::io::Error, place: &str) -> Self {
        Self::new(IO, 1, format!("{place}: {error}"), help_with(error))
    }

    #[cfg(feature = "ort")]
    pub(super) fn no_text(message: String) -> Self {
        Self::new(MALFORMED, 28, message, Some("give UTF-8 text, one sentence a line"))
    }

    #[cfg(feature = "ort")]
    pub(super) fn too_much(message: String, help: &str) -> Self {
        Self::new(LIMIT, 28, message, Some(help))
    }

    pub(super) fn interrupted(message: String) -> Self {
        Self::new(INTERRUPTED, 1, message, None)
    }

    pub(super) fn malformed(message: impl Into<String>, help: Option<&str>) -> Self {
        Self::new(MALFORMED, 29, message, help)
    }

    pub(super) fn bug(panic: &str) -> Self {
        let help = "please report this line with the command";
        Self::new(BUG, 1, format!("moa-export broke, which is a bug of ours: {panic}"), Some(help))
    }

    /// A dictionary of another size than the vocabulary of a graph.
    pub(super) fn other_vocabulary(message: String) -> Self {
        Self::new(MALFORMED, 22, message, Some("give the dictionary of this model"))
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

    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.exit)
    }

    /// One `error` line and at most one `help` line on stderr.
    pub(super) fn print(&self) {
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut text = format!("error[MOA-E{:02}{:02}]: {}\n", self.exit, self.number, one_line(&self.message));
        if let Some(help) = &self.help {
            text.push_str(&format!("help: {}\n", one_line(help)));
        }
        let _closed_stderr_is_no_error = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
    }
}

/// What may help where the operating system refused.
fn help_with(error: &std::io::Error) -> Option<&'static str> {
    (error.kind() == std::io::ErrorKind::NotFound).then_some("check the path")
}

/// Exit code of the class that errors of checkpoints and models share.
const fn class(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Malformed => MALFORMED,
        ErrorKind::Unsupported => UNSUPPORTED,
        ErrorKind::Io => IO,
        ErrorKind::Limit => LIMIT,
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        let engine = matches!(&error, CheckpointError::Header { file, .. } if is_engine_name(Path::new(file)));
        let help = match engine {
            true => Some("an engine is no checkpoint; give what the engine's ONNX file was exported from".into()),
            false => error.help(),
        };
        Self { help, ..Self::new(class(error.kind()), 2, error.to_string(), None) }
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        let engine =
            "give the ONNX file that the engine was built from, and with `--backends tensorrt` the engine as --plan";
        let named_so = matches!(&error, ReadError::Refused { path, .. } if is_engine_name(path));
        let help = error.help().or_else(|| named_so.then_some(engine));
        Self::new(class(error.kind()), 3, error.to_string(), help)
    }
}

/// Whether a file is named as engines of TensorRT are.
pub(super) fn is_engine_name(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ["engine", "plan"].iter().any(|one| ending.eq_ignore_ascii_case(one)))
}

impl From<WeightError> for Failure {
    fn from(error: WeightError) -> Self {
        let message = error.to_string();
        match error {
            WeightError::NonFinite { .. } => Self::new(
                MALFORMED,
                4,
                message,
                Some("the checkpoint is damaged or training diverged; export a sound one"),
            ),
            WeightError::OutOfRange { to, .. } => {
                let help = match to {
                    FloatType::F16 => "export with --dtype bf16 or --dtype fp32",
                    _ => "export with --dtype fp32",
                };
                Self::new(UNSUPPORTED, 29, message, Some(help))
            }
            error => Self::new(class(ErrorKind::from(&error)), 4, message, None),
        }
    }
}

impl From<ImportError> for Failure {
    fn from(error: ImportError) -> Self {
        let message = error.to_string();
        match error {
            ImportError::Weight(error) => error.into(),
            ImportError::Family { .. } => Self::new(
                UNSUPPORTED,
                5,
                message,
                Some("models with Mixture-of-Attention layers alone are exported here; Optimum exports others"),
            ),
            ImportError::Unsupported { .. } => Self::new(
                UNSUPPORTED,
                5,
                message,
                Some(
                    "where the weights need no such setting, correct the configuration or give another with --config FILE",
                ),
            ),
            ImportError::MissingKey { .. } | ImportError::InvalidKey { .. } => Self::new(
                MALFORMED,
                6,
                message,
                Some("correct the configuration, or give another one with --config FILE"),
            ),
            ImportError::ExtraTensors { .. } => Self::new(
                MALFORMED,
                7,
                message,
                Some("the configuration may name another family or fewer layers than the checkpoint has"),
            ),
            _ => Self::new(
                MALFORMED,
                8,
                message,
                Some(
                    "configuration and checkpoint must come from the same model; give another configuration with --config FILE",
                ),
            ),
        }
    }
}

impl From<LowerError> for Failure {
    fn from(error: LowerError) -> Self {
        let help = match error {
            LowerError::ExpertBias { .. } => "set \"expert_bias\" to false in the configuration",
            LowerError::LastLogits => "leave out --last-logits",
            _ => "export with --form standard or --form fused",
        };
        Self::new(UNSUPPORTED, 9, error.to_string(), Some(help))
    }
}

impl From<EncodeError> for Failure {
    fn from(error: EncodeError) -> Self {
        let message = error.to_string();
        match error {
            EncodeError::Weight(error) => error.into(),
            EncodeError::Data(_) => Self::new(IO, 10, message, Some("free disk space, or write elsewhere with -o")),
            _ => Self::new(UNSUPPORTED, 10, message, Some("leave out --external-data never")),
        }
    }
}

impl From<WriteError> for Failure {
    fn from(error: WriteError) -> Self {
        let message = error.to_string();
        match error {
            WriteError::Exists { .. } => Self::new(USAGE, 11, message, Some("add --force to replace it")),
            WriteError::WrongKind { .. } => Self::new(USAGE, 12, message, Some("choose another output")),
            _ => Self::new(IO, 11, message, Some("check that the folder exists, is writable and has room")),
        }
    }
}

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Self {
        let message = error.to_string();
        match error {
            ExportError::Checkpoint(error) => error.into(),
            ExportError::Import(error) => error.into(),
            ExportError::Lower(error) => error.into(),
            ExportError::Encode(error) => error.into(),
            ExportError::Weight(error) => error.into(),
            ExportError::Write(error) => error.into(),
            ExportError::Vocabulary(error) => error.into(),
            ExportError::Cancelled => Self::new(INTERRUPTED, 1, message, None),
            ExportError::NoVocabulary { .. } => {
                Self::new(USAGE, 20, message, Some("leave out --dict, --source-dict, --target-dict and --bpe-codes"))
            }
            ExportError::OwnFolder { .. } => {
                Self::new(USAGE, 13, message, Some("give another folder with -o OUT, or a file: -o model.onnx"))
            }
            ExportError::Input { .. } => Self::new(USAGE, 13, message, Some("write elsewhere with -o OUT")),
            ExportError::NeedsFolder { .. } => Self::new(USAGE, 13, message, Some("give a folder: -o OUT")),
            ExportError::NotText { .. } => Self::new(USAGE, 14, message, Some("choose another output with -o")),
            ExportError::WrongEnding { .. } => Self::new(USAGE, 14, message, Some("give -o NAME.onnx or a folder")),
            ExportError::Opset { .. } => {
                let help = format!("give --opset {} to {}", OPSETS.start(), OPSETS.end());
                Self::new(UNSUPPORTED, 15, message, Some(&help))
            }
        }
    }
}

impl From<TextError> for Failure {
    fn from(error: TextError) -> Self {
        let (exit, help) = match &error {
            TextError::Io { source, .. } => (IO, help_with(source)),
            TextError::Limit { .. } => (LIMIT, None),
            TextError::Malformed { .. } => (MALFORMED, None),
        };
        Self::new(exit, 21, error.to_string(), help)
    }
}

impl From<VocabularyError> for Failure {
    fn from(error: VocabularyError) -> Self {
        let message = error.to_string();
        match error {
            VocabularyError::Text(error) => error.into(),
            VocabularyError::Size { .. } => {
                let help = "name the dictionary of this model with --dict, or with --source-dict and --target-dict";
                Self::new(MALFORMED, 22, message, Some(help))
            }
            VocabularyError::NoDictionary { .. } => {
                let help = "name it with --dict, or with --source-dict and --target-dict";
                Self::new(USAGE, 22, message, Some(help))
            }
            VocabularyError::Padding { .. } => Self::new(UNSUPPORTED, 22, message, None),
        }
    }
}

#[cfg(feature = "ort")]
impl From<GenerateError> for Failure {
    fn from(error: GenerateError) -> Self {
        let message = error.to_string();
        match error {
            GenerateError::Text(error) => error.into(),
            GenerateError::Read(error) => error.into(),
            GenerateError::Backend(error) => error.into(),
            GenerateError::Missing { path } => {
                let help = match path.file_name().and_then(|name| name.to_str()) {
                    Some(CONFIG_FILE) => "export again with --dict FILE, or with dict.txt beside the checkpoint",
                    Some(TOKENIZER_FILE) => "give token ids with --token-ids, or put the model's tokenizer.json there",
                    _ => "give the folder that `moa-export CHECKPOINT -o OUT` wrote for a model that generates text",
                };
                Self::new(IO, 23, message, Some(help))
            }
            GenerateError::Graph { .. } => {
                let help = "generate runs the translation models and the causal language models that this version of \
                            moa-export writes: both decode step by step with caches";
                Self::new(UNSUPPORTED, 24, message, Some(help))
            }
            GenerateError::Vocabulary { .. } => {
                let help = "put the dictionary of this model there, or export again with --dict FILE";
                Self::new(MALFORMED, 22, message, Some(help))
            }
            GenerateError::Option(_) => {
                Self::new(USAGE, 25, message, Some("`moa-export generate --help` lists the options and their defaults"))
            }
            GenerateError::TooLong { .. } => Self::new(MALFORMED, 26, message, Some("split the line")),
            GenerateError::TokenId { .. } => {
                Self::new(MALFORMED, 29, message, Some("give ids of the tokenizer that the model was trained with"))
            }
            GenerateError::LongPrompt { .. } => Self::new(MALFORMED, 29, message, Some("shorten the prompt")),
            GenerateError::NotFinite { .. } => {
                Self::new(MALFORMED, 27, message, Some("run `moa-export verify` on the folder"))
            }
            GenerateError::Interrupted => Self::new(INTERRUPTED, 1, message, None),
        }
    }
}

impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Self {
        let (exit, number) = match error.kind() {
            BackendErrorKind::Unsupported => (UNSUPPORTED, 16),
            BackendErrorKind::Input => (MALFORMED, 16),
            BackendErrorKind::Failed => (RUNTIME, 17),
            _ => (RUNTIME, 16),
        };
        match error {
            BackendError::Model(error) => error.into(),
            BackendError::Engine(error) => error.into(),
            error => Self::new(exit, number, error.to_string(), error.help()),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let exit = match &error {
            EngineError::Io { .. } | EngineError::Lock(LockError::Missing { .. }) => IO,
            EngineError::Profile(_) => USAGE,
            EngineError::Cancelled => INTERRUPTED,
            error => match error.kind() {
                BackendErrorKind::Unsupported => UNSUPPORTED,
                BackendErrorKind::Input | BackendErrorKind::Model => MALFORMED,
                _ => RUNTIME,
            },
        };
        match error {
            EngineError::Read(error) => error.into(),
            error => Self::new(exit, 30, error.to_string(), error.help()),
        }
    }
}

impl From<ChoiceError> for Failure {
    fn from(error: ChoiceError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<PrepareError> for Failure {
    fn from(error: PrepareError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<ProfileError> for Failure {
    fn from(error: ProfileError) -> Self {
        let help = match &error {
            ProfileError::Unknown { open, .. } => Some(format!("the model leaves open: {}", open.join(", "))),
            ProfileError::Shapes { inputs, .. } => Some(format!("the model's inputs: {inputs}")),
            ProfileError::Missing { names } => Some(format!("add{}", sizes_of(names))),
            ProfileError::Positions { positions, .. } => {
                Some(format!("give sizes for at most {positions} tokens a row"))
            }
            _ => None,
        };
        let failure = Self::from(EngineError::from(error));
        Self { help: help.or(failure.help), ..failure }
    }
}

/// An option for each dimension; only keys and values of the past may be of none.
fn sizes_of(names: &[String]) -> String {
    let least = |name: &str| if name == PAST { "0" } else { "MIN" };
    names.iter().map(|name| format!(" --dim {name}={}:OPT:MAX", least(name))).collect()
}

impl From<TensorFileError> for Failure {
    fn from(error: TensorFileError) -> Self {
        let exit = match &error {
            TensorFileError::Io { .. } => IO,
            TensorFileError::Dtype { .. } => UNSUPPORTED,
            _ => MALFORMED,
        };
        Self::new(exit, 19, error.to_string(), Some("inputs are one .safetensors file with a tensor per graph input"))
    }
}

impl From<VerifyError> for Failure {
    fn from(error: VerifyError) -> Self {
        let message = error.to_string();
        match error {
            VerifyError::Export(error) => error.into(),
            VerifyError::Given(error) => error.into(),
            VerifyError::Read(error) | VerifyError::Audit(AuditError::Read(error)) => error.into(),
            VerifyError::Weight(error) | VerifyError::Audit(AuditError::Weight(error)) => error.into(),
            VerifyError::MissingGraph { .. } => {
                Self::new(IO, 18, message, Some("give the file or folder that `moa-export CHECKPOINT -o OUT` wrote"))
            }
            VerifyError::NeedsFolder { .. } => Self::new(USAGE, 18, message, Some("give the folder that holds it")),
            VerifyError::WrongFamily { .. } => {
                Self::new(USAGE, 18, message, Some("give the checkpoint that the model was exported from"))
            }
        }
    }
}

impl From<LatencyError> for Failure {
    fn from(error: LatencyError) -> Self {
        let message = error.to_string();
        let form = "export with --form function, whose MoA operators are nodes";
        let (exit, help) = match error {
            LatencyError::Read(error) => return error.into(),
            LatencyError::Backend(error) => return error.into(),
            LatencyError::Shape(_) | LatencyError::Histogram(_) => (MALFORMED, None),
            LatencyError::NoGraph { .. } => (USAGE, Some("give what `moa-export CHECKPOINT -o OUT` wrote")),
            LatencyError::NothingInCommon { .. } => (USAGE, Some("compare models of one kind")),
            LatencyError::UnknownAxis { .. } => (USAGE, Some("give it with --dim AXIS=N")),
            LatencyError::UnusedAxis { .. } => (USAGE, Some("leave out the option that gives it a size")),
            LatencyError::UnknownInput { .. } => (USAGE, Some("give all inputs with --inputs FILE")),
            LatencyError::MissingInput { .. } => {
                (MALFORMED, Some("inputs are one .safetensors file with a tensor per graph input"))
            }
            LatencyError::TooLong { .. } => (USAGE, Some("give smaller sizes to --seq and --past")),
            LatencyError::NoOperators { .. } | LatencyError::Cut { .. } => (UNSUPPORTED, Some(form)),
            LatencyError::Steering { .. } => (UNSUPPORTED, Some("leave out --routing")),
            LatencyError::Trace { .. } => {
                (MALFORMED, Some("give outputs of `moa-export run` for a model exported with --router-outputs"))
            }
            LatencyError::Disagreement { .. } => {
                let help = "run `moa-export verify`; --allow-failed-parity times it all the same and says so";
                return Self::new(FAILED, 29, format!("parity: {message}"), Some(help));
            }
        };
        Self::new(exit, 29, message, help)
    }
}
