//! One graph on one backend, case by case beside the reference.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use moa_schema::FloatType;

use crate::{
    backend::{Backend, BackendError, Runner},
    onnx::{OnnxFile, proto::tensor_proto::DataType},
    reference::{Choices, Part, Reference, ReferenceError},
    tensor::{NamedTensors, Tensor, TensorData},
};

use super::{
    Watch,
    compare::{Comparison, Tolerance, ToleranceOptions, largest, largest_difference},
    instrument::expose_routing,
    routing::{BackendRouting, RoutingComparison, backend_routing, without_routing},
};

const LOGITS: &str = "logits";

/// Outcome of one graph on one backend.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct GraphReport {
    /// File name of the graph.
    pub graph: String,
    /// Runs compared.
    pub runs: usize,
    /// Chosen experts.
    pub routing: RoutingComparison,
    /// Outputs.
    pub outputs: Comparison,
    /// The first run that gave other bits once its routing was made an output: the runtime computes the file in another
    /// way than the copy whose routing was compared.
    pub altered: Option<String>,
    /// What no run shows, and why, where cases were left out.
    pub left_out: Option<String>,
    /// What stopped the check, if something did.
    pub failure: Option<String>,
}

impl GraphReport {
    /// Nothing was run yet.
    pub(super) fn of(file: &OnnxFile) -> Self {
        Self {
            graph: file.name(),
            runs: 0,
            routing: RoutingComparison::default(),
            outputs: Comparison::default(),
            altered: None,
            left_out: None,
            failure: None,
        }
    }

    /// Whether routing and outputs agree, and nothing stopped the check.
    pub const fn passed(&self) -> bool {
        self.failure.is_none() && self.runs > 0 && self.routing.passed() && self.outputs.passed()
    }
}

/// Why a case could not be compared.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub(super) enum CheckError {
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("reference: {0}")]
    Reference(#[from] ReferenceError),
    #[error("output \"{0}\" is missing or no routing")]
    Routing(String),
    #[error("output \"{name}\" is missing")]
    MissingOutput { name: String },
    #[error("output \"{name}\" has shape {found:?}, expected {expected:?}")]
    Shape { name: String, found: Vec<usize>, expected: Vec<usize> },
}

/// What one run of a graph gave.
pub(super) struct Run {
    pub(super) outputs: NamedTensors,
    pub(super) routing: BackendRouting,
}

/// What graphs are compared with.
#[derive(Clone, Copy)]
pub(super) struct Truth<'a> {
    pub(super) reference: &'a Reference,
    pub(super) tolerance: ToleranceOptions,
    /// Sees every run that was compared.
    pub(super) watch: &'a dyn Watch,
}

/// A loaded graph and the comparison so far.
pub(super) struct GraphCheck<'a> {
    part: Part,
    /// Whether `logits` holds the last position only.
    last_logits: bool,
    truth: Truth<'a>,
    /// The file as it is.
    plain: Box<dyn Runner>,
    /// The same graph with its routing as outputs.
    routed: Box<dyn Runner>,
    modules: Vec<String>,
    /// Inputs that the graph takes as f16.
    half: BTreeSet<String>,
    /// What is out of tolerance by the effects that were seen so far.
    doubtful: Vec<Doubtful>,
    /// What rounding does to each output, as a part of its largest value: the most that any case showed. A case by
    /// itself may be one number, whose roundings cancel by chance.
    effects: BTreeMap<String, f64>,
    pub(super) report: GraphReport,
}

/// An output beside its reference, to be judged when all cases are seen.
struct Doubtful {
    place: String,
    name: String,
    found: Tensor,
    expected: Tensor,
}

impl<'a> GraphCheck<'a> {
    pub(super) fn load(
        backend: &dyn Backend,
        file: &OnnxFile,
        (part, last_logits): (Part, bool),
        truth: Truth<'a>,
    ) -> Result<Self, BackendError> {
        let mut model = file.model().clone();
        let modules = expose_routing(&mut model);
        Ok(Self {
            part,
            last_logits,
            truth,
            plain: backend.load(file)?,
            routed: backend.load(&file.with_model(model)?)?,
            modules,
            doubtful: Vec::new(),
            effects: BTreeMap::new(),
            half: file.inputs().into_iter().filter(|i| i.data_type == DataType::Float16).map(|i| i.name).collect(),
            report: GraphReport::of(file),
        })
    }

    /// Runs the graph without comparing.
    pub(super) fn run(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, CheckError> {
        let inputs = self.as_taken(inputs);
        Ok(without_routing(self.plain.run(&inputs)?).collect())
    }

    /// The inputs in the types that the graph takes; the reference gets the same values.
    fn as_taken(&self, inputs: &NamedTensors) -> NamedTensors {
        let taken = |(name, tensor): (&String, &Tensor)| {
            (name.clone(), if self.half.contains(name) { tensor.to_f16() } else { tensor.clone() })
        };
        inputs.iter().map(taken).collect()
    }

    /// Runs the graph and compares it with a reference that replays the graph's routing.
    pub(super) fn check(&mut self, case: &str, inputs: &NamedTensors) -> Result<Run, CheckError> {
        let inputs = &self.as_taken(inputs);
        let outputs = self.run(inputs)?;
        let routed = self.routed.run(inputs)?;
        let routing = backend_routing(&routed, &self.modules).map_err(CheckError::Routing)?;
        if self.report.altered.is_none() && !same_bits(&outputs, &routed) {
            self.report.altered = Some(case.to_owned());
        }
        let expected = self.truth.reference.run(self.part, inputs, Some(&routing.choices))?;
        let rounded = self.truth.reference.run_rounded(self.part, inputs, Some(&routing.choices))?;
        self.report.runs += 1;
        self.truth.watch.advance(1);
        let two_bytes = self.truth.reference.activations() != FloatType::F32;
        let moved = if two_bytes { &rounded.routing } else { &expected.routing };
        self.report.routing.add(case, &routing, &expected.routing, moved);
        for (name, expected) in &expected.outputs {
            let found = outputs.get(name).ok_or_else(|| CheckError::MissingOutput { name: name.clone() })?;
            let expected = [Some(expected), rounded.outputs.get(name)];
            self.compare(&format!("{case}: {name}"), (name, 1), found, expected)?;
        }
        Ok(Run { outputs, routing })
    }

    /// Compares `found` with the reference's output `name` for `inputs`; where the graph computes the last logits
    /// only, with as many positions from the end as `found` has.
    pub(super) fn check_output(
        &mut self,
        case: &str,
        inputs: &NamedTensors,
        replay: &Choices,
        name: &str,
        found: &Tensor,
    ) -> Result<(), CheckError> {
        let expected = self.truth.reference.run(self.part, inputs, Some(replay))?;
        let rounded = self.truth.reference.run_rounded(self.part, inputs, Some(replay))?;
        let positions = found.shape().get(1).copied().unwrap_or_default();
        self.compare(case, (name, positions), found, [expected.outputs.get(name), rounded.outputs.get(name)])
    }

    /// `last` positions of the logits are compared where the graph computes no others.
    fn compare(
        &mut self,
        place: &str,
        (name, last): (&str, usize),
        found: &Tensor,
        [expected, rounded]: [Option<&Tensor>; 2],
    ) -> Result<(), CheckError> {
        let expected = expected.ok_or_else(|| CheckError::MissingOutput { name: name.to_owned() })?;
        let cut = self.last_logits && name == LOGITS;
        let kept = |tensor| if cut { last_positions(tensor, last) } else { Cow::Borrowed(tensor) };
        let (expected, rounded) = (kept(expected), rounded.map(kept));
        if found.shape() != expected.shape() {
            let (found, expected) = (found.shape().to_vec(), expected.shape().to_vec());
            return Err(CheckError::Shape { name: name.into(), found, expected });
        }
        let rounding = rounded.map_or(0.0, |rounded| largest_difference(&rounded, &expected));
        let effect = self.effects.entry(name.to_owned()).or_default();
        *effect = effect.max(rounding / scale(&expected));
        let mut judged = self.report.outputs.clone();
        judged.add(place, found, &expected, self.tolerance(name, &expected));
        if judged.mismatches == self.report.outputs.mismatches {
            self.report.outputs = judged;
            return Ok(());
        }
        let (place, name) = (place.to_owned(), name.to_owned());
        self.doubtful.push(Doubtful { place, name, found: found.clone(), expected: expected.into_owned() });
        Ok(())
    }

    fn tolerance(&self, name: &str, expected: &Tensor) -> Tolerance {
        let rounding = self.effects.get(name).copied().unwrap_or_default() * scale(expected);
        Tolerance::derive(self.truth.tolerance, largest(expected), rounding)
    }

    /// The outcome of all cases.
    pub(super) fn finish(mut self) -> GraphReport {
        for Doubtful { place, name, found, expected } in std::mem::take(&mut self.doubtful) {
            self.report.outputs.add(&place, &found, &expected, self.tolerance(&name, &expected));
        }
        self.report
    }
}

/// Whether `others` has the outputs of `some`, to the bit.
fn same_bits(some: &NamedTensors, others: &NamedTensors) -> bool {
    let bits = |tensor: &Tensor| tensor.to_f64().iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    some.iter().all(|(name, tensor)| others.get(name).is_some_and(|other| bits(other) == bits(tensor)))
}

/// What the effect of rounding on an output is a part of.
fn scale(expected: &Tensor) -> f64 {
    largest(expected).max(1.0)
}

/// The last `count` positions of `[batch, positions, width]`; the tensor itself where it has no more.
fn last_positions(tensor: &Tensor, count: usize) -> Cow<'_, Tensor> {
    let [batch, positions, width] = *tensor.shape() else { return Cow::Borrowed(tensor) };
    if count >= positions {
        return Cow::Borrowed(tensor);
    }
    let values = tensor.to_f64();
    let rows = values.chunks_exact((positions * width).max(1));
    let kept = rows.flat_map(|row| row[(positions - count) * width..].to_vec()).collect();
    Tensor::new([batch, count, width], TensorData::F64(kept)).map_or(Cow::Borrowed(tensor), Cow::Owned)
}
