//! The compile half of the journey: checkpoint bytes → typed model → graph → ONNX bytes.

mod inputs;
mod outputs;
mod pace;
mod plan;

use std::path::{Path, PathBuf};

use moa_graphs::{ImportError, LowerError, Options, Part, Precision, WeightError, model::Model};
use moa_schema::{GateMode, IntegerType};

use crate::{
    checkpoint::{Checkpoint, CheckpointError},
    metadata,
    onnx::{EncodeError, WriteError},
    side_files::{CausalLmFiles, SideFile, is_own_folder, library, side_files},
    source::import,
};
use inputs::keep_inputs;
use outputs::Outputs;
use plan::Plan;

pub use crate::{
    onnx::OPSETS,
    side_files::{SideFileOptions, VocabularyError},
};

/// The version that is written unless the user says otherwise, or the types of weights need a newer one.
pub const DEFAULT_OPSET: i64 = 18;

/// The version that began with 4-bit integers.
const INT4_OPSET: i64 = 21;

/// Where weights are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExternalData {
    /// Into the model up to 1.5 GB, else beside it.
    #[default]
    Auto,
    /// Into `NAME.onnx.data` beside the model.
    Always,
    /// Into the model.
    Never,
}

/// What the user may say about an export.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// How our operators are written, and which outputs there are.
    pub graph: Options,
    /// Version of the standard operator set, one of [`OPSETS`]; unless it is given, [`DEFAULT_OPSET`], or 21 in
    /// [`Precision::Int4`] and [`Precision::Int4Products`].
    pub opset: Option<i64>,
    /// Replaces the family's gate mode.
    pub gate_mode: Option<GateMode>,
    /// Where weights are written.
    pub external_data: ExternalData,
    /// What is put beside the graphs of a checkpoint.
    pub side_files: SideFileOptions,
    /// Whether existing outputs are replaced.
    pub force: bool,
}

/// Why there is no export.
///
/// No file has appeared then, unless moving the finished files of an export into a folder that was there fails on the
/// way: those moved by then are whole, and stay; old files that several new ones should replace come back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint is no model that can be exported.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The model has no graph in the form asked for.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The graph has no bytes.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A trained weight cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// The files cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The vocabulary files do not belong to the model.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    /// Vocabulary files were given for a model that does not translate.
    #[error("a {family} model has no vocabulary files")]
    NoVocabulary {
        /// `model_type`.
        family: String,
    },
    /// The configuration of the checkpoint would be replaced by that of the export.
    #[error("{} is the folder of the checkpoint, whose config.json must stay as it is", .path.display())]
    OwnFolder {
        /// The output.
        path: PathBuf,
    },
    /// An output would replace what the export is made from, or what lies beside that.
    #[error("{} {what} and would be overwritten", .path.display())]
    Input {
        /// The output.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// The output must be a folder.
    #[error("{} names one file, but a {family} model is exported as {files}", .path.display())]
    NeedsFolder {
        /// The output.
        path: PathBuf,
        /// `model_type`.
        family: String,
        /// Names of the files.
        files: String,
    },
    /// The output is named neither like a model nor like a folder.
    #[error("{} has the ending of another format than ONNX", .path.display())]
    WrongEnding {
        /// The output.
        path: PathBuf,
    },
    /// The output has a name that is no text.
    #[error("the name {} is not UTF-8", .path.display())]
    NotText {
        /// The output.
        path: PathBuf,
    },
    /// [`Watch::is_cancelled`] said so.
    #[error("the export was interrupted")]
    Cancelled,
    /// The operator set is not one of [`OPSETS`].
    #[error("opset {opset} cannot be written")]
    Opset {
        /// The version asked for.
        opset: i64,
    },
    /// The operator set is older than the types of weights.
    #[error("opset {opset} has no {}, which begins with opset {oldest}", precision.without_products().as_str())]
    OldOpset {
        /// The version asked for.
        opset: i64,
        /// What weights should be stored in.
        precision: Precision,
        /// The oldest version that has it.
        oldest: i64,
    },
}

/// One written file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

/// Sees the progress of an export, and may end it. Its methods are called from several threads.
pub trait Watch: Sync {
    /// Weights of about `bytes` bytes are going to be written.
    fn begin(&self, bytes: u64) {
        let _ = bytes;
    }

    /// `bytes` more bytes were written.
    fn wrote(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Whether the export shall end with [`ExportError::Cancelled`]; asked every few megabytes.
    fn is_cancelled(&self) -> bool {
        false
    }

    /// Whether the finished files may take their places; asked once, and [`Self::is_cancelled`] no more.
    fn may_place(&self) -> bool {
        !self.is_cancelled()
    }
}

/// Nobody watches.
impl Watch for () {}

/// What an export did.
#[derive(Debug, Clone)]
pub struct ExportReport {
    /// `model_type`.
    pub family: String,
    /// Opset that the models are of.
    pub opset: i64,
    /// Written files, models and data files.
    pub files: Vec<WrittenFile>,
    /// SHA-256 of the trained values: for every weight rank, dimensions, name of the stored type and stored bytes.
    pub source_sha256: String,
    /// What the files beside the graphs leave out of those beside the checkpoint, and why.
    pub notes: Vec<String>,
}

/// Exports `checkpoint` to `out`: a model file, or a folder that holds one or several.
///
/// Beside the graphs of a translation model lies the vocabulary that [`crate::generate`] needs, as far as
/// [`ExportOptions::side_files`] names or finds it. The folder of a causal language model gets `config.json` and
/// `genai_config.json`, whatever they say.
///
/// # Errors
///
/// See [`ExportError`].
pub fn export(checkpoint: &Checkpoint, out: &Path, options: &ExportOptions) -> Result<ExportReport, ExportError> {
    export_watched(checkpoint, out, options, &())
}

/// [`export`] under the eyes of `watch`.
///
/// # Errors
///
/// See [`ExportError`].
pub fn export_watched(
    checkpoint: &Checkpoint,
    out: &Path,
    options: &ExportOptions,
    watch: &dyn Watch,
) -> Result<ExportReport, ExportError> {
    let exporter = Exporter::new(options, watch)?;
    let model = import(checkpoint, options.gate_mode)?;
    let mut notes = Vec::new();
    let report = exporter.write(checkpoint.config().model_type(), &model, out, |plan| {
        let side_files = exporter.side_files(&model, checkpoint, plan, &mut notes)?;
        keep_inputs(checkpoint, &options.side_files, plan, &side_files)?;
        Ok(side_files)
    })?;
    Ok(ExportReport { notes, ..report })
}

/// Exports a model of `family` that comes from no checkpoint: its graphs alone, without side files.
///
/// # Errors
///
/// See [`ExportError`].
pub fn export_model(
    family: &str,
    model: &Model,
    out: &Path,
    options: &ExportOptions,
    watch: &dyn Watch,
) -> Result<ExportReport, ExportError> {
    Exporter::new(options, watch)?.write(family, model, out, |_| Ok(Vec::new()))
}

/// Options that can be followed, and who watches.
struct Exporter<'a> {
    options: &'a ExportOptions,
    /// Version of the standard operator set that is written.
    opset: i64,
    watch: &'a dyn Watch,
}

impl<'a> Exporter<'a> {
    fn new(options: &'a ExportOptions, watch: &'a dyn Watch) -> Result<Self, ExportError> {
        let precision = options.graph.precision;
        let oldest = (precision.integers() == Some(IntegerType::Int4)).then_some(INT4_OPSET);
        let opset = match (options.opset, oldest) {
            (None, oldest) => oldest.unwrap_or(DEFAULT_OPSET),
            (Some(opset), Some(oldest)) if opset < oldest => {
                return Err(ExportError::OldOpset { opset, precision, oldest });
            }
            (Some(opset), _) if OPSETS.contains(&opset) => opset,
            (Some(opset), _) => return Err(ExportError::Opset { opset }),
        };
        Ok(Self { options, opset, watch })
    }

    fn write(
        &self,
        family: &str,
        model: &Model,
        out: &Path,
        side_files: impl FnOnce(&Plan) -> Result<Vec<SideFile>, ExportError>,
    ) -> Result<ExportReport, ExportError> {
        let Self { options, opset, watch } = *self;
        let graphs = moa_graphs::lower(model, options.graph)?;
        let plan = Plan::new(out, family, &graphs, options.external_data)?;
        let side_files = side_files(&plan)?;
        let mut outputs = Outputs::begin(&plan, &side_files, options.force, watch)?;
        let metadata = |part, source_sha256: &str| metadata_of(family, part, source_sha256, options);
        match outputs.write(model, &plan, &graphs, opset, metadata) {
            Err(_) if watch.is_cancelled() => Err(ExportError::Cancelled),
            Ok(_) if !watch.may_place() => Err(ExportError::Cancelled),
            Ok(source_sha256) => {
                let (family, files) = (family.into(), outputs.commit()?);
                Ok(ExportReport { family, opset, files, source_sha256, notes: Vec::new() })
            }
            Err(error) => Err(error),
        }
    }

    /// Everything beside the graphs.
    fn side_files(
        &self,
        model: &Model,
        checkpoint: &Checkpoint,
        plan: &Plan,
        notes: &mut Vec<String>,
    ) -> Result<Vec<SideFile>, ExportError> {
        let (config, named) = (checkpoint.config(), &self.options.side_files);
        let mut files = match (model, &plan.files[..]) {
            (Model::EncoderDecoder(model), _) => side_files(model, config, named)?,
            _ if !named.names_no_vocabulary() => {
                return Err(ExportError::NoVocabulary { family: config.model_type().to_owned() });
            }
            (Model::CausalLm(model), [graph]) if plan.whole_folder => {
                if is_own_folder(&plan.folder, named) {
                    return Err(ExportError::OwnFolder { path: plan.folder.clone() });
                }
                let Options { form, precision, .. } = self.options.graph;
                let files = CausalLmFiles { model, config, form, precision, graph: &graph.model };
                files.make(named, notes).map_err(VocabularyError::from)?
            }
            _ => Vec::new(),
        };
        files.extend(library(named).map_err(VocabularyError::from)?);
        Ok(files)
    }
}

fn metadata_of(family: &str, part: Part, source: &str, options: &ExportOptions) -> Vec<(String, String)> {
    let mut entries = vec![
        (metadata::DTYPE, options.graph.precision.as_str().to_owned()),
        (metadata::FAMILY, family.to_owned()),
        (metadata::FORM, options.graph.form.as_str().to_owned()),
        (metadata::PART, part.as_str().to_owned()),
        (metadata::ROUTER_OUTPUTS, options.graph.router_outputs.to_string()),
        (metadata::SOURCE, source.to_owned()),
    ];
    if options.graph.last_logits {
        entries.push((metadata::LOGITS, metadata::LAST.to_owned()));
    }
    if let Some(mode) = options.gate_mode {
        entries.push((metadata::GATE_MODE, mode.as_str().to_owned()));
    }
    entries.sort();
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
