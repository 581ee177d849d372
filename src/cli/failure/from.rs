//! Every typed error as a failure, but those of generation and engines.

use std::path::Path;

use moa_graphs::{FloatType, LowerError, WeightError};

use super::{Code, FOLDER_HELP, Failure};
use crate::{
    backend::{BackendError, BackendErrorKind},
    checkpoint::{self, CheckpointError},
    cli::codes::{CHECKPOINT, ONNX, WEIGHT},
    export::{ExportError, OPSETS, VocabularyError},
    file_names::{CHECKPOINT_ENDINGS, NoGraph, PLAN_ENDINGS},
    files::{ErrorKind, has_ending, help_with},
    latency::LatencyError,
    onnx::{EncodeError, ReadError, WriteError},
    parity::{AuditError, VerifyError},
    profile::ProfileError,
    provenance::ProvenanceError,
    shell::{path_word, word},
    tensor_file::{NUMPY_ARRAY, TensorFileError},
    text::TextError,
};

const NUMPY_HELP: &str = "save its arrays by name as one safetensors file: from safetensors.numpy import save_file; \
                          save_file(dict(numpy.load(\"in.npz\")), \"in.safetensors\")";

const NUMPY_ARRAY_HELP: &str = "save it under the name of its input or output as a safetensors file: from safetensors.numpy import \
                                save_file; save_file({\"NAME\": numpy.load(\"in.npy\")}, \"in.safetensors\")";

const WRITTEN: &str = "give what `moa-export CHECKPOINT -o OUT` wrote";

const CHECKPOINT_HELP: &str = "give the file or folder that `moa-export CHECKPOINT -o OUT` wrote of this checkpoint";

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        let engine = matches!(&error, CheckpointError::Header { file, .. } if has_ending(file, PLAN_ENDINGS));
        let help = match engine {
            true => Some("an engine is no checkpoint; give what the engine's ONNX file was exported from".into()),
            false => error.help(),
        };
        Self { help, ..Self::new(CHECKPOINT.of(error.kind()), error.to_string(), None) }
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        let engine =
            "give the ONNX file that the engine was built from, and with `--backends tensorrt` the engine as --plan";
        let by_name = || match &error {
            ReadError::Refused { path, .. } if has_ending(path, PLAN_ENDINGS) => Some(engine),
            ReadError::Refused { path, .. } if has_ending(path, CHECKPOINT_ENDINGS) => Some(CHECKPOINT_HELP),
            _ => None,
        };
        let whole = "give a whole .onnx file: copy or download it again, or export again";
        let help = error.help().or_else(by_name).or((error.kind() == ErrorKind::Malformed).then_some(whole));
        Self::new(ONNX.of(error.kind()), error.to_string(), help)
    }
}

impl From<ProvenanceError> for Failure {
    fn from(ProvenanceError { path, source }: ProvenanceError) -> Self {
        Self::io(&source, &path.display().to_string())
    }
}

impl From<WeightError> for Failure {
    fn from(error: WeightError) -> Self {
        let message = error.to_string();
        match error {
            WeightError::NonFinite { .. } => Self::new(
                Code::WeightMalformed,
                message,
                Some("the checkpoint is damaged or training diverged; export a sound one"),
            ),
            WeightError::OutOfRange { to, .. } => {
                let help = match to {
                    FloatType::F16 => "export with --dtype bf16 or --dtype fp32",
                    _ => "export with --dtype fp32",
                };
                Self::new(Code::WeightUnsupported, message, Some(help))
            }
            error => Self::new(WEIGHT.of(ErrorKind::from(&error)), message, help_of_weight(&error)),
        }
    }
}

fn help_of_weight(error: &WeightError) -> Option<&'static str> {
    match error {
        WeightError::Io { source, .. } => help_with(source),
        WeightError::ElementType { .. } => Some("dequantise the checkpoint first"),
        WeightError::Damaged { .. } => Some("copy or download the checkpoint again"),
        WeightError::Changed { .. } => Some("wait until nothing writes to the checkpoint, then try again"),
        _ => None,
    }
}

impl From<LowerError> for Failure {
    fn from(error: LowerError) -> Self {
        let help = match error {
            LowerError::ExpertBias { .. } => "set \"expert_bias\" to false in the configuration",
            LowerError::NoProducts { precision, .. } => {
                let help = format!("export with --dtype {}", precision.without_products().as_str());
                return Self::new(Code::FormUnsupported, error.to_string(), Some(&help));
            }
            LowerError::LastLogits => "leave out --last-logits",
            LowerError::NoPositions { .. } => "export the causal language model that the layer belongs to",
            _ => "export with --form standard or --form fused",
        };
        Self::new(Code::FormUnsupported, error.to_string(), Some(help))
    }
}

impl From<EncodeError> for Failure {
    fn from(error: EncodeError) -> Self {
        let message = error.to_string();
        match error {
            EncodeError::Weight(error) => error.into(),
            EncodeError::Data(_) => {
                Self::new(Code::DataIo, message, Some("free disk space, or write elsewhere with -o"))
            }
            _ => Self::new(Code::DataUnsupported, message, Some("leave out --external-data never")),
        }
    }
}

impl From<WriteError> for Failure {
    fn from(error: WriteError) -> Self {
        let message = error.to_string();
        match error {
            WriteError::Exists { .. } => Self::new(Code::OutputExists, message, Some("add --force to replace it")),
            WriteError::Link { target, .. } => {
                let help = match target.starts_with("/proc") {
                    true => "`-` prints to the standard output, where an option takes it".to_owned(),
                    false => format!("write to {} itself, or remove the link", target.display()),
                };
                Self::new(Code::OutputKind, message, Some(&help))
            }
            WriteError::WrongKind { .. } => Self::new(Code::OutputKind, message, Some("choose another output")),
            _ => Self::new(Code::WriteIo, message, Some("check that the folder exists, is writable and has room")),
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
            ExportError::Cancelled => Self::new(Code::Interrupted, message, None),
            ExportError::NoVocabulary { .. } => Self::new(
                Code::NoVocabulary,
                message,
                Some("leave out --dict, --source-dict, --target-dict and --bpe-codes"),
            ),
            ExportError::OwnFolder { .. } => Self::new(
                Code::OutputIsInput,
                message,
                Some("give another folder with -o OUT, or a file: -o model.onnx"),
            ),
            ExportError::Input { .. } => Self::new(Code::OutputIsInput, message, Some("write elsewhere with -o OUT")),
            ExportError::NeedsFolder { .. } => Self::new(Code::NeedsFolder, message, Some("give a folder: -o OUT")),
            ExportError::NotText { .. } => Self::new(Code::OutputName, message, Some("choose another output with -o")),
            ExportError::WrongEnding { .. } => {
                Self::new(Code::OutputName, message, Some("give -o NAME.onnx or a folder"))
            }
            ExportError::Opset { .. } => {
                let help = format!("give --opset {} to {}", OPSETS.start(), OPSETS.end());
                Self::new(Code::Opset, message, Some(&help))
            }
            ExportError::OldOpset { oldest, .. } => {
                Self::new(Code::Opset, message, Some(&format!("give --opset {oldest}, or leave it out")))
            }
        }
    }
}

impl From<TextError> for Failure {
    fn from(error: TextError) -> Self {
        let (code, help) = match &error {
            TextError::Io { source, .. } => (Code::TextFileIo, help_with(source)),
            TextError::Folder { .. } => (Code::TextFileIo, Some(FOLDER_HELP)),
            TextError::Limit { .. } => (Code::TextFileLimit, None),
            error => (Code::TextFile, error.help()),
        };
        Self::new(code, error.to_string(), help)
    }
}

impl From<VocabularyError> for Failure {
    fn from(error: VocabularyError) -> Self {
        let message = error.to_string();
        match error {
            VocabularyError::Text(error) => error.into(),
            VocabularyError::Size { .. } | VocabularyError::Shared { .. } => {
                let help = "name the dictionary of this model with --dict, or with --source-dict and --target-dict";
                Self::new(Code::OtherDictionary, message, Some(help))
            }
            VocabularyError::NoDictionary { .. } => {
                let help = "name it with --dict, or with --source-dict and --target-dict";
                Self::new(Code::NoDictionary, message, Some(help))
            }
            VocabularyError::Padding { .. } => Self::new(Code::Padding, message, None),
        }
    }
}

impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Self {
        let code = match error.kind() {
            BackendErrorKind::Unsupported => Code::BackendUnsupported,
            BackendErrorKind::Input => Code::Inputs,
            BackendErrorKind::NotFinite => Code::NotFinite,
            BackendErrorKind::Failed => Code::RuntimeFailed,
            _ => Code::RuntimeMissing,
        };
        match error {
            BackendError::Model(error) => error.into(),
            BackendError::Engine(error) => error.into(),
            error @ BackendError::Beside { .. } => Self::new(Code::WriteIo, error.to_string(), error.help()),
            error => Self::new(code, error.to_string(), error.help()),
        }
    }
}

impl From<TensorFileError> for Failure {
    fn from(error: TensorFileError) -> Self {
        let code = match &error {
            TensorFileError::Io { .. } => Code::TensorFileIo,
            TensorFileError::Dtype { .. } => Code::TensorType,
            _ => Code::TensorFile,
        };
        let help = match &error {
            TensorFileError::Io { source, .. } => help_with(source),
            TensorFileError::Numpy { kind: NUMPY_ARRAY, .. } => Some(NUMPY_ARRAY_HELP),
            TensorFileError::Numpy { .. } => Some(NUMPY_HELP),
            TensorFileError::Dtype { .. } => {
                Some("convert it before it is saved, as `tensor.float()` does, or `tensor.long()` for masks and ids")
            }
            _ => Some("named tensors are one .safetensors file, for inputs with a tensor per graph input"),
        };
        Self::new(code, error.to_string(), help)
    }
}

impl From<VerifyError> for Failure {
    fn from(error: VerifyError) -> Self {
        let message = error.to_string();
        match error {
            VerifyError::Import(error) => error.into(),
            VerifyError::Lower(error) => error.into(),
            VerifyError::Given(error) => error.into(),
            VerifyError::NoGraph(error) => error.into(),
            VerifyError::Missing { source, .. } => Self { message, ..source.into() },
            VerifyError::Read(error) | VerifyError::Audit(AuditError::Read(error)) => error.into(),
            VerifyError::Weight(error) | VerifyError::Audit(AuditError::Weight(error)) => error.into(),
            VerifyError::MissingGraph { .. } => Self::new(
                Code::MissingGraph,
                message,
                Some("give the file or folder that `moa-export CHECKPOINT -o OUT` wrote"),
            ),
            VerifyError::NeedsFolder { .. } => {
                Self::new(Code::NeedsFolder, message, Some("give the folder that holds it"))
            }
            VerifyError::Metadata { .. } | VerifyError::Contradiction { .. } | VerifyError::OtherPart { .. } => {
                Self::new(Code::OnnxMalformed, message, Some("give the file that `moa-export CHECKPOINT -o OUT` wrote"))
            }
            VerifyError::RoutingUnseen { is_of_other_weights: true, .. } => {
                Self::new(Code::OtherWeights, message, Some("give the checkpoint that it was exported from"))
            }
            VerifyError::RoutingUnseen { .. } => Self::new(
                Code::RoutingUnseen,
                message,
                Some(
                    "verify the file that moa-export wrote, before another program replaces operators by their bodies, \
                     or export with --router-outputs, which names the choices",
                ),
            ),
            VerifyError::NotGiven { .. } => Self::new(Code::Usage, message, Some("name it among the backends")),
            VerifyError::WrongFamily { .. } => {
                Self::new(Code::OtherCheckpoint, message, Some("give the checkpoint that the model was exported from"))
            }
        }
    }
}

/// What makes results of `bench` comparable.
pub(in crate::cli) const COMPARABLE: &str = "compare results of the same command on the same machine";

impl From<NoGraph> for Failure {
    fn from(error: NoGraph) -> Self {
        let help = match &error {
            NoGraph::Any { folder } => instead_of(folder),
            _ => WRITTEN.to_owned(),
        };
        Self::new(Code::MissingGraph, error.to_string(), Some(&help))
    }
}

/// What to give in place of a folder without graphs.
pub(in crate::cli) fn instead_of(folder: &Path) -> String {
    if !checkpoint::models().any(|name| folder.join(name).exists()) {
        return WRITTEN.to_owned();
    }
    let folder = path_word(folder).unwrap_or_else(|| "CHECKPOINT".to_owned());
    format!("it is a checkpoint; `moa-export {folder} -o OUT` makes a model of it")
}

impl From<LatencyError> for Failure {
    fn from(error: LatencyError) -> Self {
        let message = error.to_string();
        let form = "export with --form function, whose MoA operators are nodes";
        let (code, help) = match error {
            LatencyError::Read(error) => return error.into(),
            LatencyError::Backend(error) => return error.into(),
            LatencyError::Incomparable(_) => (Code::Usage, Some(COMPARABLE)),
            LatencyError::Shape(_) => (Code::BenchModel, None),
            LatencyError::NoGraph(error) => return error.into(),
            LatencyError::NothingInCommon { .. } => (Code::BenchUsage, Some("compare models of one kind")),
            LatencyError::UnknownAxis { axis } => {
                let help = format!("give it with --dim {}", word(format!("{axis}=SIZE")));
                return Self::new(Code::BenchUsage, message, Some(&help));
            }
            LatencyError::UnusedAxis { .. } => (Code::BenchUsage, Some("leave out the option that gives it a size")),
            LatencyError::FixedSize { .. } | LatencyError::UnknownInput { .. } => {
                (Code::BenchUsage, Some("give all inputs with --inputs FILE"))
            }
            LatencyError::MissingInput { .. } => {
                (Code::Inputs, Some("inputs are one .safetensors file with a tensor per graph input"))
            }
            LatencyError::TooLong { .. } => {
                (Code::BenchUsage, Some("give smaller sizes to --seq, --past and --source"))
            }
            LatencyError::TooLarge { .. } => {
                (Code::BenchUsage, Some("give smaller sizes to --batch, --seq, --past, --source or --dim"))
            }
            LatencyError::NotInPlace { skipped: Some(_) } => {
                let help = "give --backends ort, which says how to mend that, or leave out --in-place";
                (Code::BenchUsage, Some(help))
            }
            LatencyError::NotInPlace { skipped: None } => {
                let help = "give a decoder of --form function or fused to the backend ort, or leave out --in-place";
                (Code::BenchUsage, Some(help))
            }
            LatencyError::NoOperators { .. } | LatencyError::Cut { .. } => (Code::BenchUnsupported, Some(form)),
            LatencyError::Steering { .. } => (Code::BenchUnsupported, Some("leave out --routing")),
            LatencyError::Trace { .. } => {
                (Code::Content, Some("give outputs of `moa-export run` for a model exported with --router-outputs"))
            }
            LatencyError::Disagreement { .. } => {
                let help = "run `moa-export verify`; --allow-failed-parity times it all the same and says so";
                return Self::new(Code::Disagreement, format!("parity: {message}"), Some(help));
            }
        };
        Self::new(code, message, help)
    }
}

impl From<ProfileError> for Failure {
    fn from(error: ProfileError) -> Self {
        let message = error.to_string();
        let again = || Some("export with moa-export; any --form shows its routing".to_owned());
        match error {
            ProfileError::Read(error) => error.into(),
            ProfileError::Backend(error) => error.into(),
            ProfileError::NoGraph(error) => error.into(),
            ProfileError::NoRouting { .. } | ProfileError::Scores { .. } => Self::unsupported(message, again()),
            ProfileError::Missing { path } => {
                let error = std::io::Error::new(std::io::ErrorKind::NotFound, "there is no such file");
                Self::io(&error, &path.display().to_string())
            }
            ProfileError::Input { .. } | ProfileError::Shape(_) => {
                let help =
                    "an encoder-decoder takes input_ids, decoder_input_ids and their masks; one graph its own inputs";
                Self::malformed(message, help)
            }
            ProfileError::Output { .. } => Self::malformed(message, "run `moa-export verify` on the model"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provenance::hash_file;

    #[test]
    fn a_file_that_cannot_be_hashed_is_no_onnx_file() {
        let failure = Failure::from(hash_file(Path::new("nowhere/dict.txt")).unwrap_err());
        assert_eq!(failure.code(), Code::Io);
        assert!(failure.message.starts_with("nowhere/dict.txt: "), "{}", failure.message);
    }
}
