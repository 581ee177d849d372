//! One graph on one backend, case by case beside the reference.

use std::{borrow::Cow, collections::BTreeSet};

use moa_graphs::Part;
use moa_schema::{FloatType, RoutingPart, interface::LOGITS};
use serde::{Serialize, Serializer};

use crate::{
    backend::{Backend, BackendError, BackendErrorKind, Runner},
    onnx::{OnnxFile, expose_routing, proto::tensor_proto::DataType},
    reference::{Choices, Evaluation, ModuleChoices, ModuleRouting, Reference, ReferenceError, Routing},
    tensor::{NamedTensors, Tensor, TensorData, TensorShapeError},
};

use super::{
    Watch,
    compare::{Comparison, ToleranceOptions},
    judge::{Case, Judge, Output},
    rounding_cost::{RoundingCost, is_fresh},
    routing::{BackendRouting, RoutingComparison, backend_routing, without_routing},
};

/// Rows that a cache has beyond those that are filled, where it is updated in place.
const ROOM: usize = 5;

/// Outcome of one graph on one backend.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct GraphReport {
    /// File name of the graph.
    pub graph: String,
    /// Runs compared.
    pub runs: usize,
    /// Chosen experts.
    #[serde(serialize_with = "if_routed")]
    pub routing: RoutingComparison,
    /// Outputs.
    #[serde(serialize_with = "if_compared")]
    pub outputs: Comparison,
    /// The first run that gave other bits once its routing was made an output: the runtime computes the file in another
    /// way than the copy whose routing was compared.
    pub altered: Option<String>,
    /// What no run shows, and why, where cases were left out.
    pub left_out: Option<String>,
    /// What weights of few bits change; found on one backend for all.
    #[serde(skip)]
    pub(super) rounding_cost: Option<RoundingCost>,
    /// An output that differs in all by more than rounding explains, though no value does by itself.
    pub excess: Option<String>,
    /// What stopped the check, if something did.
    pub failure: Option<String>,
}

fn if_routed<S: Serializer>(routing: &RoutingComparison, serializer: S) -> Result<S::Ok, S::Error> {
    Some(routing).filter(|routing| routing.decisions > 0).serialize(serializer)
}

fn if_compared<S: Serializer>(outputs: &Comparison, serializer: S) -> Result<S::Ok, S::Error> {
    Some(outputs).filter(|outputs| outputs.values > 0).serialize(serializer)
}

impl GraphReport {
    /// Nothing was run yet.
    pub(super) fn of(graph: String) -> Self {
        Self {
            graph,
            runs: 0,
            routing: RoutingComparison::default(),
            outputs: Comparison::default(),
            altered: None,
            left_out: None,
            rounding_cost: None,
            excess: None,
            failure: None,
        }
    }

    /// Whether routing and outputs agree, and nothing stopped the check.
    pub const fn passed(&self) -> bool {
        self.failure.is_none()
            && self.excess.is_none()
            && self.runs > 0
            && self.routing.passed()
            && self.outputs.passed()
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
    #[error(transparent)]
    Tensor(#[from] TensorShapeError),
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
    /// The checkpoint's own weights, where what `reference` made of them is to be told.
    pub(super) trained: Option<&'a Reference>,
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
    /// Modules whose weights are outputs of the file.
    weighted: Vec<String>,
    /// Inputs that the graph takes as f16.
    half: BTreeSet<String>,
    judge: Judge,
    pub(super) report: GraphReport,
}

/// Evaluations by which the effect of rounding is found anew where values are out of tolerance.
const DRAWS: u8 = 2;

impl<'a> GraphCheck<'a> {
    pub(super) fn load(
        backend: &dyn Backend,
        file: &OnnxFile,
        (part, last_logits): (Part, bool),
        truth: Truth<'a>,
    ) -> Result<Self, BackendError> {
        let mut model = file.model().clone();
        let outputs: BTreeSet<_> = file.outputs().into_iter().map(|output| output.name).collect();
        let modules = expose_routing(&mut model);
        let weighted = modules.iter().filter(|module| outputs.contains(&RoutingPart::Weights.name(module)));
        Ok(Self {
            weighted: weighted.cloned().collect(),
            part,
            last_logits,
            truth,
            plain: backend.load(file)?,
            routed: backend.load(&file.with_model(model)?)?,
            modules,
            judge: Judge::new(truth.tolerance),
            half: file.inputs().into_iter().filter(|i| i.data_type == DataType::Float16).map(|i| i.name).collect(),
            report: GraphReport::of(file.name()),
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
        self.check_as(case, inputs, None)
    }

    /// [`Self::check`] of a call with caches; where backend and graph can update these in place, once more with buffers
    /// that have room for more than the `filled` tokens that then are in them.
    pub(super) fn check_step(&mut self, case: &str, inputs: &NamedTensors, filled: usize) -> Result<Run, CheckError> {
        self.check_as(case, inputs, Some(filled))
    }

    /// [`Self::check`] of a whole case, which is left out by name where it is large and a backend, such as an engine
    /// that was given, does not take inputs of its shapes.
    pub(super) fn check_case(
        &mut self,
        (case, is_large): (&str, bool),
        inputs: &NamedTensors,
    ) -> Result<(), CheckError> {
        match self.check(case, inputs) {
            Err(CheckError::Backend(error)) if is_large && error.kind() == BackendErrorKind::Input => {
                let others = self.report.left_out.take().map_or(String::new(), |others| others + "; ");
                self.report.left_out = Some(format!("{others}the case \"{case}\" was not run: {error}"));
                Ok(())
            }
            outcome => outcome.map(|_| ()),
        }
    }

    fn check_as(&mut self, case: &str, inputs: &NamedTensors, filled: Option<usize>) -> Result<Run, CheckError> {
        let inputs = &self.as_taken(inputs);
        let before = self.judge.doubts();
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
        let reference = self.truth.reference;
        let beyond_f32 = reference.activations() != FloatType::F32 || reference.products().is_some();
        let moved = if beyond_f32 { &rounded.routing } else { &expected.routing };
        self.report.routing.add(case, &routing, &expected.routing, moved);
        let beside = [&expected.outputs, &rounded.outputs];
        self.compare_outputs(case, &outputs, beside)?;
        if let Some(filled) = filled
            && let Some(outputs) = self.plain.run_in_place(inputs, filled + ROOM)?
        {
            let outputs = without_routing(outputs).map(|(name, value)| (name, first_rows(value, filled))).collect();
            self.compare_outputs(&format!("{case}, caches updated in place"), &outputs, beside)?;
        }
        self.compare_weights(case, &routing, [&expected.routing, &rounded.routing])?;
        if let Some(trained) = self.truth.trained.filter(|_| is_fresh(inputs)) {
            let cost = self.report.rounding_cost.get_or_insert_with(|| RoundingCost::of(&self.report.graph));
            let [rounded, trained] = [self.truth.reference, trained].map(|of| of.run(self.part, inputs, None));
            cost.add(inputs, &rounded?, &trained?);
        }
        let expected = self.outputs_of(expected)?;
        let case = || Case { inputs: inputs.clone(), choices: routing.choices.clone(), expected, ends: None };
        self.judge.keep(before, case);
        Ok(Run { outputs, routing })
    }

    fn compare_outputs(
        &mut self,
        case: &str,
        found: &NamedTensors,
        [expected, rounded]: [&NamedTensors; 2],
    ) -> Result<(), CheckError> {
        for (name, expected) in expected {
            let found = found.get(name).ok_or_else(|| CheckError::MissingOutput { name: name.clone() })?;
            self.compare(&format!("{case}: {name}"), (name, None), found, [Some(expected), rounded.get(name)])?;
        }
        Ok(())
    }

    /// Compares the weights that are outputs of the file, slot by slot, as any other output.
    fn compare_weights(
        &mut self,
        case: &str,
        routing: &BackendRouting,
        [expected, rounded]: [&Routing; 2],
    ) -> Result<(), CheckError> {
        for module in self.weighted.clone() {
            let name = RoutingPart::Weights.name(&module);
            let (Some(found), Some(expected)) = (routing.choices.get(&module), expected.get(&module)) else {
                return Err(CheckError::Routing(name));
            };
            let rounded = rounded.get(&module).map(|rounded| routed_weights(&rounded.choices, expected)).transpose()?;
            let (found, expected) = (routed_weights(found, expected)?, routed_weights(&expected.choices, expected)?);
            self.compare(&format!("{case}: {name}"), (&name, None), &found, [Some(&expected), rounded.as_ref()])?;
        }
        Ok(())
    }

    /// What the file has as outputs of what was evaluated: weights too, where it has those.
    fn outputs_of(&self, evaluation: Evaluation) -> Result<NamedTensors, TensorShapeError> {
        let Evaluation { mut outputs, routing } = evaluation;
        for (module, routing) in self.weighted.iter().filter_map(|module| routing.get_key_value(module)) {
            outputs.insert(RoutingPart::Weights.name(module), routed_weights(&routing.choices, routing)?);
        }
        Ok(outputs)
    }

    /// Compares logits that were computed in pieces with those of one pass over all `inputs`; where the graph computes
    /// the last logits only, `found` has those of the positions before `ends`.
    pub(super) fn check_logits(
        &mut self,
        case: &str,
        inputs: &NamedTensors,
        replay: &Choices,
        (found, ends): (&Tensor, &[usize]),
    ) -> Result<(), CheckError> {
        let expected = self.truth.reference.run(self.part, inputs, Some(replay))?;
        let rounded = self.truth.reference.run_rounded(self.part, inputs, Some(replay))?;
        let both = [expected.outputs.get(LOGITS), rounded.outputs.get(LOGITS)];
        let before = self.judge.doubts();
        self.compare(case, (LOGITS, Some(ends)), found, both)?;
        let expected = expected.outputs.into_iter().filter(|(name, _)| name == LOGITS).collect();
        let case = || Case { inputs: inputs.clone(), choices: replay.clone(), expected, ends: Some(ends.to_vec()) };
        self.judge.keep(before, case);
        Ok(())
    }

    /// Where the graph computes the last logits only, those of the positions before `ends` are compared, or of the last
    /// one.
    fn compare(
        &mut self,
        place: &str,
        (name, ends): (&str, Option<&[usize]>),
        found: &Tensor,
        [expected, rounded]: [Option<&Tensor>; 2],
    ) -> Result<(), CheckError> {
        let expected = expected.ok_or_else(|| CheckError::MissingOutput { name: name.to_owned() })?;
        let kept = |tensor| self.compared(name, tensor, ends);
        let (expected, rounded) = (kept(expected), rounded.map(kept));
        if found.shape() != expected.shape() {
            let (found, expected) = (found.shape().to_vec(), expected.shape().to_vec());
            return Err(CheckError::Shape { name: name.into(), found, expected });
        }
        let output = Output { place, name, found, expected: &expected, rounded: rounded.as_deref() };
        self.judge.compare(&output, self.truth.reference.products().is_some());
        Ok(())
    }

    /// What is compared of an output.
    fn compared<'t>(&self, name: &str, tensor: &'t Tensor, ends: Option<&[usize]>) -> Cow<'t, Tensor> {
        let cut = self.last_logits && name == LOGITS;
        if cut { positions_before(tensor, ends) } else { Cow::Borrowed(tensor) }
    }

    /// Looks for the effect of rounding anew in cases that are nearly within it.
    fn draw_again(&mut self) -> Result<(), CheckError> {
        for case in self.judge.near_misses() {
            let Case { inputs, choices, expected, ends } = case.as_ref();
            for draw in 1..=DRAWS {
                let rounded = self.truth.reference.run_rounded_again(self.part, inputs, Some(choices), draw)?;
                let rounded = self.outputs_of(rounded)?;
                for (name, expected) in expected {
                    let kept = |tensor| self.compared(name, tensor, ends.as_deref());
                    let (expected, rounded) = (kept(expected), rounded.get(name).map(kept));
                    self.judge.see(name, &expected, rounded.as_deref());
                }
            }
        }
        Ok(())
    }

    /// The outcome of all cases.
    pub(super) fn finish(mut self) -> GraphReport {
        if self.truth.tolerance.atol.is_none()
            && let Err(error) = self.draw_again()
        {
            self.report.failure.get_or_insert_with(|| error.to_string());
        }
        self.report.routing.finish();
        (self.report.outputs, self.report.excess) = self.judge.finish();
        self.report
    }
}

/// The weights of `choices`, 0 where `routing` sends a token nowhere: what stands there has no meaning.
fn routed_weights(choices: &ModuleChoices, routing: &ModuleRouting) -> Result<Tensor, TensorShapeError> {
    let tokens = choices.weights.chunks(choices.top_k.max(1)).zip(&routing.routed);
    let weights = tokens.flat_map(|(weights, routed)| weights.iter().map(|weight| if *routed { *weight } else { 0.0 }));
    Tensor::new([choices.batch, choices.tokens, choices.top_k], TensorData::F64(weights.collect()))
}

/// Whether `others` has the outputs of `some`, to the bit.
fn same_bits(some: &NamedTensors, others: &NamedTensors) -> bool {
    let bits = |tensor: &Tensor| tensor.to_f64().iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    some.iter().all(|(name, tensor)| others.get(name).is_some_and(|other| bits(other) == bits(tensor)))
}

/// The first `filled` rows of a cache, `[batch, heads, rows, width]`, where it has more; other outputs as they are.
fn first_rows(value: Tensor, filled: usize) -> Tensor {
    let [batch, heads, rows, width] = *value.shape() else { return value };
    if rows <= filled {
        return value;
    }
    let values = value.to_f64();
    let kept = values.chunks_exact((rows * width).max(1)).flat_map(|head| head[..filled * width].to_vec()).collect();
    Tensor::new([batch, heads, filled, width], TensorData::F64(kept)).unwrap_or(value)
}

/// The positions before `ends` of `[batch, positions, width]`, or the last one.
fn positions_before<'a>(tensor: &'a Tensor, ends: Option<&[usize]>) -> Cow<'a, Tensor> {
    let [batch, positions, width] = *tensor.shape() else { return Cow::Borrowed(tensor) };
    let last = [positions];
    let ends = ends.unwrap_or(&last);
    let values = tensor.to_f64();
    let rows = values.chunks_exact((positions * width).max(1));
    let before = |row: &[f64]| ends.iter().flat_map(|end| row[(end - 1) * width..end * width].to_vec()).collect();
    let kept = rows.flat_map(|row| -> Vec<f64> { before(row) }).collect();
    Tensor::new([batch, ends.len(), width], TensorData::F64(kept)).map_or(Cow::Borrowed(tensor), Cow::Owned)
}

#[cfg(test)]
#[path = "graph_check_tests.rs"]
mod tests;
