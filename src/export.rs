//! The compile half of the journey: checkpoint bytes → typed model → graph → ONNX bytes.

use std::{
    io,
    path::{Path, PathBuf},
};

use moa_graphs::{
    Form, ImportError, LowerError, NamedGraph, Options, WeightError, families, families::ImportOptions, model::Model,
};
use moa_schema::GateMode;
use sha2::{Digest, Sha256};

use crate::{
    checkpoint::{Checkpoint, CheckpointError},
    onnx::{DataFile, EncodeError, EncodeOptions, INLINE_LIMIT, Staging, WriteError, encode, weight_bytes},
    side_files::{CausalLmFiles, SideFile, is_own_folder, library, side_files},
};

pub use crate::side_files::{SideFileOptions, VocabularyError};

/// Versions of the standard operator set that can be written.
pub const OPSETS: std::ops::RangeInclusive<i64> = 18..=20;

/// The version that is written unless the user says otherwise.
pub const DEFAULT_OPSET: i64 = 18;

/// Keys of the metadata that every exported file carries.
pub mod metadata {
    /// SHA-256 of the trained values; see [`super::weights_sha256`].
    pub const SOURCE: &str = "moa.source.sha256";
    /// `model_type` of the configuration.
    pub const FAMILY: &str = "moa.family";
    /// [`moa_graphs::Form`].
    pub const FORM: &str = "moa.form";
    /// `last` where `logits` holds the last position only.
    pub const LOGITS: &str = "moa.logits";
    /// Value of [`LOGITS`].
    pub const LAST: &str = "last";
    /// [`moa_schema::GateMode`] where the user replaced the family's.
    pub const GATE_MODE: &str = "moa.gate_mode";
    /// Whether routing is a graph output.
    pub const ROUTER_OUTPUTS: &str = "moa.router_outputs";
    /// `model_type` names one family; this says which of its graphs the file holds.
    pub const PART: &str = "moa.part";
}

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
#[derive(Debug, Clone, Copy)]
pub struct ExportOptions {
    /// How our operators are written, and which outputs there are.
    pub graph: Options,
    /// Version of the standard operator set, one of [`OPSETS`].
    pub opset: i64,
    /// Replaces the family's gate mode.
    pub gate_mode: Option<GateMode>,
    /// Where weights are written.
    pub external_data: ExternalData,
    /// Whether existing outputs are replaced.
    pub force: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            graph: Options { form: Form::Function, router_outputs: false, last_logits: false },
            opset: DEFAULT_OPSET,
            gate_mode: None,
            external_data: ExternalData::Auto,
            force: false,
        }
    }
}

/// Why there is no export.
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
    /// The operator set is not one of [`OPSETS`].
    #[error("opset {opset} cannot be written")]
    Opset {
        /// The version asked for.
        opset: i64,
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

/// What an export did.
#[derive(Debug, Clone)]
pub struct ExportReport {
    /// `model_type`.
    pub family: String,
    /// Written files, models and data files.
    pub files: Vec<WrittenFile>,
    /// SHA-256 of the trained values; see [`weights_sha256`].
    pub source_sha256: String,
}

/// The typed model of a checkpoint.
///
/// # Errors
///
/// Where configuration and tensors do not make a model of a supported family.
pub fn import(checkpoint: &Checkpoint, gate_mode: Option<GateMode>) -> Result<Model, ImportError> {
    families::import(checkpoint.config(), checkpoint, ImportOptions { gate_mode })
}

/// SHA-256, in hexadecimal, of what was trained: for every weight of the model, in the order of its
/// structure, rank, dimensions (64 bits each, little-endian), name of the stored type and stored bytes.
///
/// The same weights give the same hash whatever file format, sharding or aliases they were stored with.
///
/// # Errors
///
/// Where a weight cannot be read.
pub fn weights_sha256(model: &Model) -> Result<String, WeightError> {
    let mut hash = Sha256::new();
    for weight in model.weights() {
        let shape = weight.shape();
        hash.update((shape.len() as u64).to_le_bytes());
        for dim in shape {
            hash.update((*dim as u64).to_le_bytes());
        }
        hash.update(weight.stored_type());
        weight.read_bytes(&mut |block| hash.update(block))?;
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Exports `checkpoint` to `out`: a model file, or a folder that holds one or several.
///
/// # Errors
///
/// See [`ExportError`]; then no file has appeared at or under `out`.
pub fn export(checkpoint: &Checkpoint, out: &Path, options: &ExportOptions) -> Result<ExportReport, ExportError> {
    export_with(checkpoint, out, options, &SideFileOptions::default())
}

/// [`export`], with what `files` names or finds beside the graphs.
///
/// Beside the graphs of a translation model, the vocabulary that [`crate::generate`] needs. In the folder of a causal
/// language model, whatever `files` says, `config.json` and `genai_config.json`.
///
/// # Errors
///
/// See [`ExportError`]; then no file has appeared at or under `out`.
pub fn export_with(
    checkpoint: &Checkpoint,
    out: &Path,
    options: &ExportOptions,
    files: &SideFileOptions,
) -> Result<ExportReport, ExportError> {
    check_opset(options)?;
    let family = checkpoint.config().model_type();
    let model = import(checkpoint, options.gate_mode)?;
    write_model(family, &model, out, options, |plan| companions(&model, checkpoint, plan, options, files))
}

/// [`export`] of a model of `family` that comes from no checkpoint.
///
/// # Errors
///
/// See [`ExportError`]; then no file has appeared at or under `out`.
pub fn export_model(
    family: &str,
    model: &Model,
    out: &Path,
    options: &ExportOptions,
) -> Result<ExportReport, ExportError> {
    check_opset(options)?;
    write_model(family, model, out, options, |_| Ok(Vec::new()))
}

fn check_opset(options: &ExportOptions) -> Result<(), ExportError> {
    if OPSETS.contains(&options.opset) { Ok(()) } else { Err(ExportError::Opset { opset: options.opset }) }
}

fn write_model(
    family: &str,
    model: &Model,
    out: &Path,
    options: &ExportOptions,
    side_files: impl FnOnce(&Plan) -> Result<Vec<SideFile>, ExportError>,
) -> Result<ExportReport, ExportError> {
    let graphs = moa_graphs::lower(model, options.graph)?;
    let plan = plan(out, family, &graphs, options)?;
    let side_files = side_files(&plan)?;
    let graph_names = plan.files.iter().flat_map(|file| file.data.iter().chain([&file.model]).cloned());
    let names: Vec<_> = side_files.iter().map(|file| file.name.clone()).chain(graph_names).collect();
    let mut staging = Staging::begin(&plan.folder, &names, options.force)?;
    let source_sha256 = weights_sha256(model)?;
    let mut sizes = Vec::new();
    for file in &side_files {
        sizes.push(write_side_file(&mut staging, file)?);
    }
    for (file, graph) in plan.files.iter().zip(&graphs) {
        let encode_options =
            EncodeOptions { opset: options.opset, metadata: metadata_of(family, graph.stem, &source_sha256, options) };
        sizes.extend(write_graph(&mut staging, &plan.folder, file, graph, &encode_options)?);
    }
    let files = staging.commit()?.into_iter().zip(sizes).map(|(path, bytes)| WrittenFile { path, bytes }).collect();
    Ok(ExportReport { family: family.into(), files, source_sha256 })
}

/// Endings of files that are no ONNX, so that a folder of such a name is a slip.
const FOREIGN_ENDINGS: [&str; 12] =
    ["bin", "engine", "gguf", "json", "onx", "ort", "pb", "plan", "pt", "pth", "safetensors", "tflite"];

/// Everything beside the graphs.
fn companions(
    model: &Model,
    checkpoint: &Checkpoint,
    plan: &Plan,
    options: &ExportOptions,
    files: &SideFileOptions,
) -> Result<Vec<SideFile>, ExportError> {
    let config = checkpoint.config();
    let mut companions = match (model, &plan.files[..]) {
        (Model::EncoderDecoder(model), _) => side_files(model, config, files)?,
        _ if !files.names_no_vocabulary() => {
            return Err(ExportError::NoVocabulary { family: config.model_type().to_owned() });
        }
        (Model::CausalLm(model), [graph]) if plan.whole_folder => {
            if is_own_folder(&plan.folder, files) {
                return Err(ExportError::OwnFolder { path: plan.folder.clone() });
            }
            let form = options.graph.form;
            let companions = CausalLmFiles { model, config, form, graph: &graph.model };
            companions.make(files).map_err(VocabularyError::from)?
        }
        _ => Vec::new(),
    };
    companions.extend(library(files).map_err(VocabularyError::from)?);
    Ok(companions)
}

/// Where the graphs of one export go.
struct Plan {
    folder: PathBuf,
    /// Whether the output is a folder, and not one file in it.
    whole_folder: bool,
    files: Vec<PlannedFile>,
}

struct PlannedFile {
    /// Name of the model file.
    model: String,
    /// Name of the data file, where there is one.
    data: Option<String>,
}

fn plan(out: &Path, family: &str, graphs: &[NamedGraph], options: &ExportOptions) -> Result<Plan, ExportError> {
    let ending = out.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let external = |graph: &NamedGraph| match options.external_data {
        ExternalData::Always => true,
        ExternalData::Never => false,
        ExternalData::Auto => weight_bytes(&graph.graph) > INLINE_LIMIT,
    };
    let file = |model: String, graph: &NamedGraph| PlannedFile {
        data: external(graph).then(|| format!("{model}.data")),
        model,
    };
    if ending.eq_ignore_ascii_case("onnx") && !out.is_dir() {
        let Some(name) = out.file_name().and_then(|name| name.to_str()) else {
            return Err(ExportError::NotText { path: out.into() });
        };
        let [graph] = graphs else {
            let files: Vec<_> = graphs.iter().map(|graph| format!("{}.onnx", graph.stem)).collect();
            let files = files.join(" and ");
            return Err(ExportError::NeedsFolder { path: out.into(), family: family.into(), files });
        };
        let folder = match out.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let files = vec![file(name.to_owned(), graph)];
        return Ok(Plan { folder: folder.into(), whole_folder: false, files });
    }
    if FOREIGN_ENDINGS.iter().any(|foreign| ending.eq_ignore_ascii_case(foreign)) {
        return Err(ExportError::WrongEnding { path: out.into() });
    }
    let files = graphs.iter().map(|graph| file(format!("{}.onnx", graph.stem), graph)).collect();
    Ok(Plan { folder: out.into(), whole_folder: true, files })
}

fn metadata_of(family: &str, part: &str, source: &str, options: &ExportOptions) -> Vec<(String, String)> {
    let mut entries = vec![
        (metadata::FAMILY, family.to_owned()),
        (metadata::FORM, options.graph.form.as_str().to_owned()),
        (metadata::PART, part.to_owned()),
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

/// Writes one graph and returns the sizes of its files, in the order in which they were staged.
fn write_graph(
    staging: &mut Staging,
    folder: &Path,
    file: &PlannedFile,
    graph: &NamedGraph,
    options: &EncodeOptions,
) -> Result<Vec<u64>, ExportError> {
    let mut sizes = Vec::new();
    let mut encoded = None;
    if let Some(location) = &file.data {
        staging.file::<ExportError>(location, |writer| {
            let mut counted = Counted { writer, bytes: 0 };
            let data = DataFile { location: location.clone(), writer: &mut counted, position: 0 };
            encoded = Some(encode(&graph.graph, options, Some(data)).map_err(|error| match error {
                EncodeError::Data(source) => WriteError::Io { path: folder.join(location), source }.into(),
                error => ExportError::from(error),
            })?);
            sizes.push(counted.bytes);
            Ok(())
        })?;
    }
    let bytes = match encoded {
        Some(bytes) => bytes,
        None => encode(&graph.graph, options, None)?,
    };
    let target = folder.join(&file.model);
    staging.file::<ExportError>(&file.model, |writer| {
        writer.write_all(&bytes).map_err(|source| WriteError::Io { path: target, source }.into())
    })?;
    sizes.push(bytes.len() as u64);
    Ok(sizes)
}

/// Writes one file beside the graphs and returns its size.
fn write_side_file(staging: &mut Staging, file: &SideFile) -> Result<u64, ExportError> {
    let target = PathBuf::from(&file.name);
    staging.file::<ExportError>(&file.name, |writer| {
        writer.write_all(&file.bytes).map_err(|source| WriteError::Io { path: target, source }.into())
    })?;
    Ok(file.bytes.len() as u64)
}

/// A writer that knows how much went through it.
struct Counted<'a> {
    writer: &'a mut dyn io::Write,
    bytes: u64,
}

impl io::Write for Counted<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.writer.write(buffer)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}
