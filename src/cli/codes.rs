//! Codes of errors: `MOA-E`, the exit code and two digits. No code has two meanings; docs/errors.md lists them all.

use crate::files::ErrorKind;

/// Names, numbers and meanings; the compiler refuses a number that stands here twice.
macro_rules! codes {
    ($($name:ident = $number:literal, $meaning:literal;)*) => {
        /// What went wrong, as one of the lines of docs/errors.md.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[cfg_attr(not(feature = "ort"), allow(dead_code))]
        pub(super) enum Code {
            $(#[doc = $meaning] $name = $number,)*
        }

        #[cfg(test)]
        const MEANINGS: &[(Code, &str)] = &[$((Code::$name, $meaning)),*];
    };
}

codes! {
    OtherWeights = 118, "`verify`, `bench`: the ONNX file was made from another checkpoint, and does not show which experts this one chooses";
    Disagreement = 129, "`bench`: backends disagree, so nothing is timed";
    Usage = 201, "the command line, options that do not go together, or a variable with a value that it cannot have";
    OutputExists = 211, "an output exists, and there is no `--force`";
    OutputKind = 212, "an output is a folder and must be a file, the other way round, or a link";
    OutputIsInput = 213, "an output would replace what the export is made from";
    OutputName = 214, "the name of an output has the ending of another format";
    OtherCheckpoint = 218, "the model comes from another family than the checkpoint";
    NoVocabulary = 220, "a dictionary or codes for a model that has none";
    NoDictionary = 222, "codes are given and no dictionary";
    GenerationOption = 225, "an option of `generate` has a value that generation does not take";
    BenchUsage = 229, "`bench` and `run`: models, sizes or inputs that do not fit each other";
    ProfileSizes = 230, "sizes of an engine that do not fit the model";
    NeedsFolder = 231, "one file is named where the model is several";
    CheckpointMalformed = 302, "the checkpoint, or a file beside it, is damaged or contradicts itself";
    OnnxMalformed = 303, "the ONNX file is damaged, no model, or a folder";
    WeightMalformed = 304, "a weight is damaged, NaN or infinite";
    ConfigKey = 306, "a key of the configuration is missing or impossible";
    ExtraTensors = 307, "the checkpoint holds tensors that the configuration does not explain";
    OtherConfig = 308, "a tensor is missing, has another shape than the configuration says, or differs from the one it is shared with";
    Inputs = 316, "inputs that do not fit the model or the engine";
    TensorFile = 319, "a file of named tensors is damaged";
    TextFile = 321, "a dictionary, codes or a JSON file beside the graphs is damaged";
    OtherDictionary = 322, "the dictionary belongs to another model";
    TooLong = 326, "a line or prompt is longer than the model's positions";
    NotFinite = 327, "the model computes NaN or infinity";
    NoText = 328, "an input is not UTF-8 text";
    Content = 329, "a file given to a command holds something else than it reads";
    Plan = 330, "a plan or its lock is damaged, or belongs to another model";
    TokenId = 332, "`generate`, `profile`: a token id that the model does not have";
    BenchModel = 333, "`bench`: sizes that cannot be stored";
    CheckpointUnsupported = 402, "the checkpoint is of a format that is not read";
    OnnxUnsupported = 403, "the ONNX file is of a version or kind that is not read";
    WeightUnsupported = 404, "a weight is of a type that is not read, or beyond the range of `--dtype`";
    ModelUnsupported = 405, "the configuration's family or a setting of it has no export";
    FormUnsupported = 409, "the model has no graph in this form or with this option";
    DataUnsupported = 410, "the weights do not fit into one model file";
    Opset = 415, "`--opset` is not supported";
    BackendUnsupported = 416, "the backend does not take this model";
    RoutingUnseen = 418, "the ONNX file does not show which experts are chosen, so that it cannot be verified";
    TensorType = 419, "a named tensor has a type that no input takes";
    Padding = 422, "the dictionary pads with another token than the model";
    NoGenerator = 424, "the folder holds no model that `generate` runs";
    BenchUnsupported = 429, "`bench`: operators cannot be isolated, or routed as asked";
    EngineUnsupported = 430, "TensorRT or the GPU cannot take this model";
    Dtype = 431, "`--dtype` cannot be written, or built for this GPU or model";
    Io = 501, "a file or a stream cannot be read or written";
    CheckpointIo = 502, "the checkpoint cannot be read";
    OnnxIo = 503, "the ONNX file cannot be read";
    WeightIo = 504, "a weight cannot be read";
    DataIo = 510, "weights cannot be written";
    WriteIo = 511, "an output cannot be written";
    MissingGraph = 518, "the export lacks a graph";
    TensorFileIo = 519, "a file of named tensors cannot be read or written";
    TextFileIo = 521, "a dictionary, codes or a JSON file cannot be read";
    MissingFile = 523, "the folder lacks a file that `generate` needs";
    EngineIo = 530, "a plan, its lock or the cache of engines cannot be read or written";
    RuntimeMissing = 616, "a runtime or library is missing, too old or cannot be loaded";
    RuntimeFailed = 617, "ONNX Runtime or tract failed";
    EngineFailed = 630, "TensorRT, its plugin or the GPU failed";
    CheckpointLimit = 702, "the checkpoint is larger than is read, or its tensors repeat too many elements";
    OnnxLimit = 703, "the ONNX file is larger or deeper than is read";
    TextFileLimit = 721, "a dictionary, codes or a JSON file is larger than is read";
    TextLimit = 728, "an input text is larger than is read";
    Bug = 7001, "a bug of moa-export; please report the line";
    Interrupted = 13001, "Ctrl-C or termination";
}

/// The exit code of a program that was told to end.
pub(super) const INTERRUPTED: u8 = Code::Interrupted.exit();

impl Code {
    /// The exit code of the program.
    #[allow(clippy::cast_possible_truncation)]
    pub(super) const fn exit(self) -> u8 {
        (self as u16 / 100) as u8
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MOA-E{:04}", *self as u16)
    }
}

/// Codes of one thing that is read, by what is wrong with it.
pub(super) struct Codes {
    malformed: Code,
    unsupported: Code,
    io: Code,
    limit: Code,
}

pub(super) const CHECKPOINT: Codes = Codes {
    malformed: Code::CheckpointMalformed,
    unsupported: Code::CheckpointUnsupported,
    io: Code::CheckpointIo,
    limit: Code::CheckpointLimit,
};
pub(super) const ONNX: Codes = Codes {
    malformed: Code::OnnxMalformed,
    unsupported: Code::OnnxUnsupported,
    io: Code::OnnxIo,
    limit: Code::OnnxLimit,
};
pub(super) const WEIGHT: Codes = Codes {
    malformed: Code::WeightMalformed,
    unsupported: Code::WeightUnsupported,
    io: Code::WeightIo,
    limit: Code::CheckpointLimit,
};

impl Codes {
    /// The code of a class of errors.
    pub(super) const fn of(&self, kind: ErrorKind) -> Code {
        match kind {
            ErrorKind::Malformed => self.malformed,
            ErrorKind::Unsupported => self.unsupported,
            ErrorKind::Io => self.io,
            ErrorKind::Limit => self.limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::MEANINGS;

    #[test]
    fn the_document_lists_every_code() {
        let row = |(code, meaning): &(super::Code, &str)| format!("| `{code}` | {} | {meaning} |\n", code.exit());
        let table: String = MEANINGS.iter().map(row).collect();
        let document = include_str!("../../docs/errors.md");
        assert!(document.ends_with(&format!("|---|---|---|\n{table}")), "docs/errors.md must end with\n\n{table}");
    }
}
