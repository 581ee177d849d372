//! How an export was written: what its files say, and what their graphs show where they say nothing.

use moa_graphs::{Form, Part, Precision};
use moa_schema::{AccuracyLevel, DOMAIN, GateMode, interface::LOGITS};

use super::{VerifyError, routing::is_routing_output};
use crate::{
    metadata,
    onnx::{
        OnnxFile,
        proto::tensor_proto::DataType,
        read::{Dim, accuracy_of, for_each_node},
    },
};

/// What decides how a checkpoint is lowered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    /// In place of the family's.
    pub(super) gate_mode: Option<GateMode>,
    pub(super) form: Form,
    /// Whether the files say the form; else it is what the graphs look like.
    pub(super) is_stated: bool,
    pub(super) precision: Precision,
    /// Whether `logits` holds the last position only.
    pub(super) last_logits: bool,
    /// Whether routing is a graph output.
    pub(super) router_outputs: bool,
}

impl Settings {
    /// Those of the files of one export.
    ///
    /// # Errors
    ///
    /// Where a file says what no export does, or two files say different things.
    pub(super) fn of(files: &[&OnnxFile]) -> Result<Self, VerifyError> {
        metadata::OF_NUMBERS.into_iter().try_for_each(|key| stated(files, key, |_| Some(())).map(drop))?;
        let form = stated(files, metadata::FORM, Form::parse)?;
        let precision = stated(files, metadata::DTYPE, Precision::parse)?;
        let last_logits = stated(files, metadata::LOGITS, |text| (text == metadata::LAST).then_some(true))?;
        let router_outputs = stated(files, metadata::ROUTER_OUTPUTS, |text| text.parse().ok())?;
        Ok(Self {
            gate_mode: stated(files, metadata::GATE_MODE, GateMode::parse)?,
            form: form.unwrap_or_else(|| shown_form(files)),
            is_stated: form.is_some(),
            precision: precision.unwrap_or_else(|| shown_precision(files)),
            last_logits: last_logits.unwrap_or_else(|| form.is_none() && shows_last_logits(files)),
            router_outputs: router_outputs.unwrap_or_else(|| shows_routing(files)),
        })
    }
}

/// Refuses a file that says that it holds another graph than `expected`.
pub(super) fn check_part(file: &OnnxFile, expected: Part) -> Result<(), VerifyError> {
    match stated(&[file], metadata::PART, Part::parse)? {
        Some(found) if found != expected => Err(VerifyError::OtherPart { graph: file.name(), found, expected }),
        _ => Ok(()),
    }
}

fn wrong(file: &OnnxFile, key: &'static str, found: &str) -> VerifyError {
    VerifyError::Metadata { graph: file.name(), key, found: found.into() }
}

/// What all files say under `key`, if they do.
fn stated<T>(
    files: &[&OnnxFile],
    key: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, VerifyError> {
    let Some((first, others)) = files.split_first() else { return Ok(None) };
    let said = first.metadata(key);
    if let Some(other) = others.iter().find(|other| other.metadata(key) != said) {
        return Err(VerifyError::Contradiction { key, first: first.name(), second: other.name() });
    }
    said.map(|text| parse(text).ok_or_else(|| wrong(first, key, text))).transpose()
}

fn shown_form(files: &[&OnnxFile]) -> Form {
    let mut has_operators = false;
    for graph in files.iter().filter_map(|file| file.graph()) {
        for_each_node(&graph.node, &mut |node| has_operators |= node.domain == DOMAIN);
    }
    let has_bodies = files.iter().flat_map(|file| file.functions()).any(|function| function.domain == DOMAIN);
    match (has_operators, has_bodies) {
        (true, true) => Form::Function,
        (true, false) => Form::Fused,
        (false, _) => Form::Standard,
    }
}

fn shown_precision(files: &[&OnnxFile]) -> Precision {
    let weights = || files.iter().filter_map(|file| file.graph()).flat_map(|graph| &graph.initializer);
    let stores = |kind: DataType| weights().any(|weight| weight.data_type == kind as i32);
    let kinds = [
        (DataType::Int4, Precision::Int4),
        (DataType::Float16, Precision::Fp16),
        (DataType::Bfloat16, Precision::Bf16),
        (DataType::Int8, Precision::Int8),
    ];
    let stored = kinds.into_iter().find(|(kind, _)| stores(*kind)).map_or(Precision::Fp32, |(_, precision)| precision);
    let shown = Precision::ALL.into_iter().find(|precision| {
        precision.without_products() == stored && may_round_products(files.iter().copied(), *precision)
    });
    shown.unwrap_or(stored)
}

/// Whether a node allows products with factors rounded as in exports of `precision`. Nodes of another level count for
/// nothing: in those exports there is nothing that it would let a kernel round.
pub(super) fn may_round_products<'a>(files: impl IntoIterator<Item = &'a OnnxFile>, precision: Precision) -> bool {
    let level = precision.accuracy_level();
    let mut any = false;
    for graph in files.into_iter().filter_map(OnnxFile::graph) {
        for_each_node(&graph.node, &mut |node| any |= accuracy_of(node) == level);
    }
    any && level != AccuracyLevel::default()
}

fn shows_last_logits(files: &[&OnnxFile]) -> bool {
    let outputs = files.iter().flat_map(|file| file.outputs());
    outputs.filter(|output| output.name == LOGITS).any(|output| {
        let dims = output.dims.unwrap_or_default();
        matches!(dims.get(1), Some(Dim::Fixed(1)))
    })
}

fn shows_routing(files: &[&OnnxFile]) -> bool {
    files.iter().flat_map(|file| file.outputs()).any(|output| is_routing_output(&output.name))
}
