//! Proof that exported files say what the checkpoint says.
//!
//! In order: the constants of the files, bit for bit, and their nodes; then on every backend, for inputs of shapes that
//! no export ever saw, the chosen experts and the outputs, beside an f64 evaluation of the checkpoint that never
//! touches a graph. Another choice of experts needs scores as close as rounding explains, see [`MARGIN`]; outputs are
//! compared with the backend's own routing replayed in the reference, so that a near-tie neither hides nor
//! fakes an error.

mod agreement;
mod cases;
mod compare;
mod effects;
mod error;
mod files;
mod graph_check;
mod journey;
mod judge;
mod moved;
mod node_values;
mod nodes;
mod other_values;
mod rounding_cost;
mod routing;
mod settings;
mod skip;
mod spread;
mod strays;
mod verdict;
mod weights;

use std::path::{Path, PathBuf};

use moa_graphs::{Form, Options, Part, Precision, model::Model};
use moa_schema::{FloatType, GateMode};

pub use agreement::{Agreement, Expected, Yardstick, choices_of};
pub use cases::{MOST_ROWS, MOST_TOKENS};
pub use compare::{Comparison, Difference, Tolerance, ToleranceOptions};
pub use error::VerifyError;
pub use graph_check::GraphReport;
pub use nodes::NodeAudit;
pub use rounding_cost::RoundingCost;
pub use routing::{Disagreement, MARGIN, RoutingComparison, is_routing_output};
pub use skip::{SAME, Skip, SkipKind};
pub use verdict::Finding;
pub use weights::{AuditError, WeightAudit};

use crate::{
    backend::{Backend, BackendKind, repeats_ort},
    checkpoint::Checkpoint,
    metadata,
    onnx::{OnnxFile, weight_bytes},
    reference::{Factors, Reference},
    source::import,
};
use files::Files;
use graph_check::{GraphCheck, Truth};
use nodes::hidden_module;
use settings::{Settings, may_round_products};

/// What the user may say about a verification.
#[derive(Debug, Clone, Default)]
pub struct VerifyOptions {
    /// Replaces the derived tolerance.
    pub tolerance: ToleranceOptions,
    /// Seed of the inputs.
    pub seed: u64,
    /// Backends that are not skipped: where one cannot be used, nothing is verified.
    pub required: Vec<BackendKind>,
    /// Whether `ort-function` is skipped where the model has none of our operators, so that `ort` runs the same.
    pub skip_same: bool,
}

/// What a verification does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step<'a> {
    /// Reads the weights of the checkpoint.
    Checkpoint,
    /// Compares so many bytes of constants.
    Weights {
        /// Of all files.
        bytes: u64,
    },
    /// Runs the graphs.
    Runs {
        /// On what.
        backend: &'a str,
        /// How many runs there will be, where that is known.
        count: Option<u64>,
    },
}

/// Sees the progress of a verification.
pub trait Watch {
    /// A step begins.
    fn begin(&self, step: Step<'_>) {
        let _ = step;
    }

    /// So many more bytes or runs of the step are done.
    fn advance(&self, more: u64) {
        let _ = more;
    }
}

/// Nobody watches.
impl Watch for () {}

/// Outcome on one backend.
#[derive(Debug, Clone, serde::Serialize)]
pub struct BackendReport {
    /// Name of the backend.
    pub backend: String,
    /// Why it was not used, if it was not.
    pub skipped: Option<Skip>,
    /// What it rounds activations to, and so what its tolerances are derived from.
    #[serde(serialize_with = "as_text")]
    pub activations: FloatType,
    /// What it may round factors of products of our operators to, if that is less;
    /// tolerances are derived from it too.
    #[serde(serialize_with = "as_text_if_any")]
    pub products: Option<Factors>,
    /// Outcome per graph.
    pub graphs: Vec<GraphReport>,
}

impl BackendReport {
    fn of(backend: &dyn Backend, Truth { reference, .. }: Truth<'_>) -> Self {
        let (activations, products) = (reference.activations(), reference.products());
        Self { backend: backend.name().into(), skipped: None, activations, products, graphs: Vec::new() }
    }
}

fn as_text<S: serde::Serializer>(value: &impl std::fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn as_text_if_any<S: serde::Serializer>(
    value: &Option<impl std::fmt::Display>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => as_text(value, serializer),
        None => serializer.serialize_none(),
    }
}

fn by_name<S: serde::Serializer>(precision: &Precision, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(precision.as_str())
}

fn form_by_name<S: serde::Serializer>(form: &Option<Form>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(form.map_or(UNKNOWN, Form::as_str))
}

fn mode_by_name<S: serde::Serializer>(mode: &Option<GateMode>, serializer: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&mode.map(GateMode::as_str), serializer)
}

/// What a form is called that the files neither say nor show.
pub const UNKNOWN: &str = "unknown";

/// Outcome on what one file holds.
#[derive(Debug, Clone, serde::Serialize)]
pub struct FileAudit {
    /// File name.
    pub graph: String,
    /// Outcome.
    #[serde(flatten, serialize_with = "in_three_keys")]
    pub outcome: AuditOutcome,
}

impl FileAudit {
    /// Its nodes, where they were compared.
    pub fn nodes(&self) -> Option<&NodeAudit> {
        match &self.outcome {
            AuditOutcome::Compared { nodes, .. } => Some(nodes),
            AuditOutcome::Skipped(_) => None,
        }
    }

    /// Whether a constant differs.
    pub fn has_other_constants(&self) -> bool {
        matches!(&self.outcome, AuditOutcome::Compared { weights, .. } if !weights.passed())
    }
}

/// What became of the audit of a file.
#[derive(Debug, Clone)]
pub enum AuditOutcome {
    /// All was compared.
    Compared {
        /// Constants.
        weights: WeightAudit,
        /// The graph without them.
        nodes: NodeAudit,
    },
    /// Nothing was, for this reason.
    Skipped(String),
}

/// `weights` and `nodes`, or `skipped`; what does not apply is null.
fn in_three_keys<S: serde::Serializer>(outcome: &AuditOutcome, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(serde::Serialize)]
    struct Keys<'a> {
        weights: Option<&'a WeightAudit>,
        skipped: Option<&'a str>,
        nodes: Option<&'a NodeAudit>,
    }
    let keys = match outcome {
        AuditOutcome::Compared { weights, nodes } => Keys { weights: Some(weights), skipped: None, nodes: Some(nodes) },
        AuditOutcome::Skipped(why) => Keys { weights: None, skipped: Some(why), nodes: None },
    };
    serde::Serialize::serialize(&keys, serializer)
}

/// Outcome of a verification.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Verification {
    /// `model_type`.
    pub family: String,
    /// Form of the operators, as the files say or show.
    #[serde(serialize_with = "form_by_name")]
    pub form: Option<Form>,
    /// What the files store weights and compute in, as they say.
    #[serde(serialize_with = "by_name")]
    pub dtype: Precision,
    /// Gate mode that the export has in place of the family's, if it has.
    #[serde(serialize_with = "mode_by_name")]
    pub gate_mode: Option<GateMode>,
    /// Files of the export, those of its data included.
    #[serde(skip)]
    pub files: Vec<PathBuf>,
    /// Those of them that are graphs.
    #[serde(skip)]
    pub graph_paths: Vec<PathBuf>,
    /// Whether the export says that it was made from other weights than the checkpoint holds, where it says so and a
    /// constant differs.
    pub of_other_weights: Option<bool>,
    /// Constants per file.
    pub audits: Vec<FileAudit>,
    /// Runs per backend.
    pub backends: Vec<BackendReport>,
    /// What weights of integers change, for each graph that a backend ran to the end; empty where no weights are such.
    pub rounding_cost: Vec<RoundingCost>,
}

/// Compares the export at `path` with `checkpoint` on `backends`.
///
/// A backend that cannot take this form of export is reported as skipped.
///
/// # Errors
///
/// Where checkpoint or files cannot be read; differences are part of the result.
pub fn verify(
    path: &Path,
    checkpoint: &Checkpoint,
    backends: &[Box<dyn Backend>],
    options: &VerifyOptions,
) -> Result<Verification, VerifyError> {
    verify_watched(path, checkpoint, backends, options, &())
}

/// [`verify`] under the eyes of `watch`.
///
/// # Errors
///
/// As [`verify`].
pub fn verify_watched(
    path: &Path,
    checkpoint: &Checkpoint,
    backends: &[Box<dyn Backend>],
    options: &VerifyOptions,
    watch: &dyn Watch,
) -> Result<Verification, VerifyError> {
    let family = checkpoint.config().model_type().to_owned();
    let probe = import(checkpoint, None)?;
    let files = Files::open(path, &family, &probe)?;
    for kind in &options.required {
        let backend = backends.iter().find(|backend| backend.kind() == *kind);
        let backend = backend.ok_or(VerifyError::NotGiven { name: kind.name() })?;
        files.graphs.iter().try_for_each(|(_, file)| must_be_there(backend.as_ref(), file))?;
    }
    let Settings { gate_mode, form, is_stated, precision, .. } = files.settings;
    let model = match gate_mode {
        Some(_) => import(checkpoint, gate_mode)?,
        None => probe,
    };
    watch.begin(Step::Checkpoint);
    let reference = Reference::stored_as(&model, precision)?;
    let audits = audit(&files, &model, checkpoint, watch)?;
    let of_other_weights = match audits.iter().any(FileAudit::has_other_constants) {
        true => files.is_of_other_weights(checkpoint)?,
        false => None,
    };
    let (mut reports, mut count) = (Vec::new(), None);
    let (mut trained, mut rounding_cost): (_, Vec<RoundingCost>) = (None, Vec::new());
    for backend in backends {
        let untold = precision.integers().is_some() && rounding_cost.len() < files.graphs.len();
        match (untold, &trained) {
            (true, None) => {
                watch.begin(Step::Checkpoint);
                trained = Some(Reference::new(&model)?);
            }
            (false, Some(_)) => trained = None,
            _ => {}
        }
        let truth = Truth { reference: &reference, trained: trained.as_ref(), tolerance: options.tolerance, watch };
        watch.begin(Step::Runs { backend: backend.name(), count });
        let is_same = options.skip_same && repeats(backend.as_ref(), &reports, &files);
        let mut report = match is_same.then(Skip::same).or_else(|| failed_before(backend.as_ref(), &reports)) {
            Some(skip) => BackendReport { skipped: Some(skip), ..BackendReport::of(backend.as_ref(), truth) },
            None => run_backend(backend.as_ref(), &files, &model, truth, options.seed)?,
        };
        for graph in report.graphs.iter_mut().filter(|graph| graph.failure.is_none()) {
            let cost = graph.rounding_cost.take();
            rounding_cost.extend(cost.filter(|cost| rounding_cost.iter().all(|told| told.graph != cost.graph)));
        }
        let runs = report.graphs.iter().map(|graph| graph.runs as u64).sum();
        count = count.max(Some(runs)).filter(|runs| *runs > 0);
        reports.push(report);
    }
    let is_known = is_stated || audits.iter().all(|audit| audit.nodes().is_some());
    Ok(Verification {
        family,
        form: is_known.then_some(form),
        dtype: precision,
        gate_mode,
        files: files.paths(),
        graph_paths: files.graph_paths(),
        of_other_weights,
        audits,
        backends: reports,
        rounding_cost,
    })
}

/// Constants and nodes of every file. Where the files do not say their form and the nodes are not those of the form
/// that the graphs look like, another program wrote them, and neither is compared.
fn audit(
    files: &Files,
    model: &Model,
    checkpoint: &Checkpoint,
    watch: &dyn Watch,
) -> Result<Vec<FileAudit>, VerifyError> {
    let Settings { form, is_stated, precision, last_logits, router_outputs, .. } = files.settings;
    let options = Options { form, precision, router_outputs, last_logits };
    let expected = moa_graphs::lower(model, options)?;
    let pairs = || files.graphs.iter().map(|(_, file)| file).zip(expected.iter().map(|graph| &graph.graph));
    for (file, graph) in pairs() {
        if let Some(module) = hidden_module(file, graph) {
            let is_of_other_weights = files.is_of_other_weights(checkpoint)? == Some(true);
            let graph = file.path().display().to_string();
            return Err(VerifyError::RoutingUnseen { graph, module, is_of_other_weights });
        }
    }
    let nodes = pairs().map(|(file, graph)| NodeAudit::run(file, graph, is_stated));
    let nodes: Vec<_> = nodes.collect();
    if !is_stated && nodes.iter().any(|audit| audit.is_rewritten) {
        let why = format!("its metadata do not say in which form moa-export wrote it ({})", metadata::FORM);
        let skipped = |(_, file): &(Part, OnnxFile)| FileAudit {
            graph: file.name(),
            outcome: AuditOutcome::Skipped(why.clone()),
        };
        return Ok(files.graphs.iter().map(skipped).collect());
    }
    watch.begin(Step::Weights { bytes: expected.iter().map(|graph| weight_bytes(&graph.graph)).sum() });
    let mut audits = Vec::new();
    for ((file, graph), nodes) in pairs().zip(nodes) {
        let weights = WeightAudit::run(file, graph, nodes.is_rewritten, watch)?;
        audits.push(FileAudit { graph: file.name(), outcome: AuditOutcome::Compared { weights, nodes } });
    }
    Ok(audits)
}

fn must_be_there(backend: &dyn Backend, file: &OnnxFile) -> Result<(), VerifyError> {
    backend.probe(file).map_err(|error| match error.is_given() {
        true => VerifyError::Given(error),
        false => VerifyError::Missing { backend: backend.name(), source: error },
    })
}

/// Whether `backend` computes what ONNX Runtime has computed.
fn repeats(backend: &dyn Backend, reports: &[BackendReport], files: &Files) -> bool {
    let has_run = |report: &BackendReport| report.backend == BackendKind::Ort.name() && report.skipped.is_none();
    reports.iter().any(has_run) && repeats_ort(backend, files.graphs.iter().map(|(_, file)| file))
}

/// Why `backend` is not to run graphs of which ONNX Runtime has failed to run one: the result is known, and a runtime
/// that checks less may take the program down with it.
fn failed_before(backend: &dyn Backend, reports: &[BackendReport]) -> Option<Skip> {
    let is_ort = |name: &str| BackendKind::of_name(name).is_some_and(|kind| kind.ort_operators().is_some());
    reports.iter().filter(|report| is_ort(&report.backend) && !is_ort(backend.name())).find_map(|report| {
        let graph = report.graphs.iter().find(|graph| graph.failure.is_some())?;
        Some(Skip::failed(&report.backend, &graph.graph))
    })
}

fn run_backend(
    backend: &dyn Backend,
    files: &Files,
    model: &Model,
    truth: Truth<'_>,
    seed: u64,
) -> Result<BackendReport, VerifyError> {
    let rounded = files.graphs.iter().find_map(|(_, file)| backend.rounds_to(file));
    let nodes_allow = || may_round_products(files.graphs.iter().map(|(_, file)| file), files.settings.precision);
    let may_round = !backend.computes_bodies() && nodes_allow();
    let exact = || (!may_round).then(|| truth.reference.with_exact_products());
    let rounding = rounded.map(|to| truth.reference.rounding_to(to)).or_else(exact);
    let truth = Truth { reference: rounding.as_ref().unwrap_or(truth.reference), ..truth };
    let mut report = BackendReport::of(backend, truth);
    let mut checks = Vec::new();
    for (part, file) in &files.graphs {
        match GraphCheck::load(backend, file, (*part, files.settings.last_logits), truth) {
            Ok(check) => checks.push(check),
            Err(error) if error.is_skip() => {
                report.skipped = Some(Skip::of(&error));
                return Ok(report);
            }
            Err(error) if error.is_given() => return Err(VerifyError::Given(error)),
            Err(error) => {
                report.graphs = vec![GraphReport { failure: Some(error.to_string()), ..GraphReport::of(file.name()) }];
                return Ok(report);
            }
        }
    }
    run_journeys(model, &mut checks, seed);
    report.graphs = checks.into_iter().map(GraphCheck::finish).collect();
    Ok(report)
}

fn run_journeys(model: &Model, checks: &mut [GraphCheck<'_>], seed: u64) {
    match (model, checks) {
        (Model::EncoderDecoder(model), [encoder, decoder]) => {
            let outcome = journey::encoder(&model.encoder.embedding, encoder, seed);
            encoder.report.failure = outcome.err().map(|error| error.to_string());
            let outcome = journey::decoder(model, encoder, decoder, seed);
            decoder.report.failure = outcome.err().map(|error| error.to_string());
        }
        (Model::MaskedLm(model), [check]) => {
            let outcome = journey::encoder(&model.encoder.embedding, check, seed);
            check.report.failure = outcome.err().map(|error| error.to_string());
        }
        (Model::CausalLm(model), [check]) => {
            check.report.failure = journey::causal_lm(model, check, seed).err().map(|error| error.to_string());
        }
        (Model::Layer(layer), [check]) => {
            check.report.failure = journey::layer(layer, check, seed).err().map(|error| error.to_string());
        }
        (_, checks) => {
            for check in checks {
                check.report.failure = Some("no cases are known for this family".into());
            }
        }
    }
}
