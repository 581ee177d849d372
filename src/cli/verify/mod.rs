//! `moa-export verify`.

mod args;
mod receipt;
mod report;

use std::{collections::BTreeSet, path::PathBuf, process::ExitCode};

pub(super) use args::VerifyArguments;
use clap::ValueEnum;
use moa_graphs::{Form, Precision};
use moa_schema::interface::past_of;
use receipt::Receipt;
use serde::Serialize;
use serde_json::Value;

use super::{
    Failure,
    apart::keep_apart,
    backends::{BackendOptions, backends, check_ort_options},
    document::{Kind, document},
    interrupt::Ending,
    must_be_open, note, open_checkpoint,
    output_file::{JSON, OutputFile, PAGE, commit_all, own_ending},
    print_aside, print_result,
    progress::VerifyProgress,
    table::table,
    tolerance::{check_tolerance, tolerance, worst},
};
use crate::{
    backend::{BackendKind, Ranges},
    checkpoint::Checkpoint,
    parity::{
        AuditOutcome, BackendReport, Difference, FileAudit, GraphReport, MOST_ROWS, MOST_TOKENS, RoundingCost, Skip,
        SkipKind, Step, ToleranceOptions, UNKNOWN, Verification, VerifyOptions, Watch, is_routing_output,
        verify_watched,
    },
};

pub(super) fn run(arguments: &VerifyArguments) -> Result<ExitCode, Failure> {
    let VerifyArguments { model, json, report, .. } = arguments;
    let places = [Some(model), json.as_ref(), report.as_ref()].into_iter().flatten();
    let ending = Ending::at_once(places.map(PathBuf::as_path))?;
    must_be_open(model)?;
    check_tolerance("--atol", arguments.atol)?;
    check_tolerance("--rtol", arguments.rtol)?;
    keep_apart(&[json.as_deref(), report.as_deref()], arguments.inputs())?;
    own_ending(json.as_deref(), JSON)?;
    own_ending(report.as_deref(), PAGE)?;
    let checkpoint = open_checkpoint(&arguments.checkpoint, arguments.config.as_deref())?;
    verify(arguments, &checkpoint, None, &ending)
}

/// Verifies; the result of an export that came before, where there is one, is printed with it.
pub(super) fn verify(
    arguments: &VerifyArguments,
    checkpoint: &Checkpoint,
    exported: Option<Value>,
    ending: &Ending,
) -> Result<ExitCode, Failure> {
    let named = !arguments.backends.is_empty();
    let chosen = if named { arguments.backends.as_slice() } else { BackendKind::value_variants() };
    arguments.tensorrt.check(chosen)?;
    check_ort_options(chosen, arguments.library.as_deref(), arguments.threads)?;
    let backend_options = BackendOptions {
        threads: arguments.threads,
        library: arguments.library.clone(),
        tensorrt: arguments.tensorrt.options(verified_ranges()),
    };
    let backends = backends(chosen, &backend_options)?;
    let is_given = |kind: BackendKind| match kind {
        BackendKind::Ort => arguments.library.is_some(),
        BackendKind::TensorRt => arguments.tensorrt.plan.is_some(),
        BackendKind::OrtFunction | BackendKind::Tract => false,
    };
    let kinds = backends.iter().map(|backend| backend.kind());
    let options = VerifyOptions {
        tolerance: ToleranceOptions { atol: arguments.atol, rtol: arguments.rtol },
        seed: arguments.seed,
        required: kinds.filter(|kind| named || is_given(*kind)).collect(),
        skip_same: !named,
    };
    let report_file = OutputFile::of_option(arguments.json.as_deref(), arguments.force)?;
    let page = OutputFile::of_option(arguments.report.as_deref(), arguments.force)?;
    let progress = VerifyProgress::new();
    let result = verify_watched(&arguments.model, checkpoint, &backends, &options, &progress)?;
    let is_kept = arguments.json.is_some() || arguments.report.is_some();
    let receipt = is_kept.then(|| {
        progress.begin(Step::Checkpoint);
        Receipt::new(arguments, checkpoint, &backends, &result)
    });
    drop(progress);
    // What was found is worth its report without that.
    let receipt = receipt
        .and_then(|receipt| receipt.map_err(|failure| note(&format!("there is no receipt: {}", failure.message))).ok());
    let unused = must_have_run(&result, &options.required);
    let is_in_part = arguments.strict && result.proves_in_part();
    let verdict = Verdict::of(&result, unused.is_some() || is_in_part);
    let found = || json(&result, verdict, receipt.as_ref());
    let as_json = arguments.json.is_some() && report_file.is_none();
    let printed = print(arguments, &result, verdict, as_json.then(|| with_export(exported, found())));
    let page = page.map(|page| page.fill(report::page(arguments, &result, verdict, receipt.as_ref()).to_html()));
    let file = report_file.map(|file| file.fill(document(Kind::Verify, found())));
    let written = commit_all([page, file], ending);
    printed.and(written)?;
    match unused {
        _ if verdict == Verdict::Differs => Ok(ExitCode::FAILURE),
        Some(failure) => Err(failure),
        None if is_in_part => Ok(ExitCode::FAILURE),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// Prints the document, where there is one, and the verdict beside it, or else both in words.
fn print(
    arguments: &VerifyArguments,
    result: &Verification,
    verdict: Verdict,
    document: Option<String>,
) -> Result<(), Failure> {
    let Some(document) = document else { return print_result(&text(arguments, result, verdict)) };
    print_result(&document)?;
    print_aside(&format!("{}\n", verdict.text(result)));
    Ok(())
}

/// What a verification comes to, wherever it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// What was compared agrees.
    Verified,
    /// Something differs.
    Differs,
    /// Nothing differs, and what had to be compared was not.
    Incomplete,
}

impl Verdict {
    fn of(result: &Verification, is_incomplete: bool) -> Self {
        match () {
            () if result.differs() => Self::Differs,
            () if is_incomplete => Self::Incomplete,
            () => Self::Verified,
        }
    }

    /// For people.
    pub(super) fn text(self, result: &Verification) -> String {
        match self {
            Self::Verified => verified(result),
            Self::Differs => "NOT verified".into(),
            Self::Incomplete if result.passed() => format!("INCOMPLETE: {}", verified(result)),
            Self::Incomplete => "NOT verified: no backend was used".into(),
        }
    }
}

/// The first backend that was not used and had to be, if there is one: of those that were asked for, and of all where
/// none was used.
fn must_have_run(result: &Verification, required: &[BackendKind]) -> Option<Failure> {
    let all_unused = result.backends.iter().all(|report| report.skipped.is_some());
    let is_asked_for = |report: &BackendReport| report.skipped.as_ref().is_some_and(|skip| skip.is_asked_for);
    let is_required = |report: &BackendReport| required.iter().any(|kind| kind.name() == report.backend);
    let must_run = |report: &&BackendReport| all_unused || is_required(report) || is_asked_for(report);
    result.backends.iter().filter(must_run).find_map(unused_backend)
}

/// Sizes that hold every case of a verification.
fn verified_ranges() -> Ranges {
    let [batch, tokens] = [MOST_ROWS, MOST_TOKENS].map(|most| most as u64);
    Ranges { batch: [1, 2, batch], past: [0, 8, tokens], tokens: [1, 8, tokens], named: Vec::new() }
}

fn unused_backend(report: &BackendReport) -> Option<Failure> {
    let Skip { why, kind, help, .. } = report.skipped.as_ref()?;
    let (message, help) = (format!("backend {} was not used: {why}", report.backend), help.map(str::to_owned));
    Some(match kind {
        SkipKind::Unsupported => Failure::unsupported(message, help),
        _ => Failure::runtime(message, help),
    })
}

fn json(result: &Verification, verdict: Verdict, receipt: Option<&Receipt>) -> Value {
    let mut value = serde_json::to_value(result).unwrap_or_default();
    if let Some(object) = value.as_object_mut() {
        object.insert("receipt".into(), serde_json::to_value(receipt).unwrap_or_default());
        object.insert("verdict".into(), serde_json::to_value(verdict).unwrap_or_default());
        object.insert("passed".into(), (verdict == Verdict::Verified).into());
        object.insert("not_compared".into(), result.not_compared().into());
        object.insert("graph_changed".into(), result.graph_changed().into());
    }
    value
}

/// The result of an export with that of its verification, or the latter alone.
fn with_export(exported: Option<Value>, verification: Value) -> String {
    match exported {
        Some(Value::Object(mut object)) => {
            object.insert("verification".into(), verification);
            document(Kind::Export, object)
        }
        _ => document(Kind::Verify, verification),
    }
}

fn text(arguments: &VerifyArguments, result: &Verification, verdict: Verdict) -> String {
    let mut text = format!(
        "{} compared with {} ({}, {} form, {})\n",
        arguments.model.display(),
        arguments.checkpoint.display(),
        result.family,
        result.form.map_or(UNKNOWN, Form::as_str),
        result.dtype.as_str()
    );
    if let Some(mode) = &result.gate_mode {
        text.push_str(&format!("gates: {}, in place of the family's\n", mode.as_str()));
    }
    text.push('\n');
    for audit in &result.audits {
        text.push_str(&audit_line(audit, result.dtype));
    }
    text.extend(origin(result).map(|line| format!("{line}\n")));
    text.push('\n');
    let header = ["backend", "graph", "runs", "values", "same experts", "worst |diff|", "tolerance", "verdict"];
    let rows: Vec<_> = result.backends.iter().flat_map(backend_rows).collect();
    text.push_str(&table(&header, &rows));
    for line in skipped(result).chain(left_out(result)).chain(rounding_costs(result)) {
        text.push_str(&format!("{line}\n"));
    }
    for report in &result.backends {
        for graph in &report.graphs {
            text.push_str(&details(&report.backend, graph));
        }
    }
    text.push_str(&format!("\n{}\n", verdict.text(result)));
    text
}

/// What is verified of a result that passed, and what was not compared.
fn verified(result: &Verification) -> String {
    let all = result.backends.len();
    let skipped = result.backends.iter().filter(|report| report.skipped.is_some()).count();
    let names = || result.backends.iter().map(|report| report.backend.as_str()).collect::<Vec<_>>().join(", ");
    let mut text = match skipped {
        0 => format!("verified on {}", names()),
        _ => format!("verified on {} of {all} backends, {skipped} skipped", all - skipped),
    };
    let named = |of: fn(&FileAudit) -> bool| {
        let names: Vec<_> = result.audits.iter().filter(|audit| of(audit)).map(|audit| audit.graph.as_str()).collect();
        Some(names.join(" and ")).filter(|names| !names.is_empty())
    };
    if let Some(names) = named(|audit| matches!(audit.outcome, AuditOutcome::Skipped(_))) {
        text.push_str(&format!("; the weights of {names} were NOT compared"));
    }
    if let Some(names) = named(|audit| audit.nodes().is_some_and(|nodes| nodes.difference.is_some())) {
        text.push_str(&format!("; the graph of {names} was changed, and is proved for these inputs alone"));
    }
    text
}

/// Backends that were not used, a line for each.
pub(super) fn skipped(result: &Verification) -> impl Iterator<Item = String> {
    result.backends.iter().filter_map(|report| {
        let skip = report.skipped.as_ref()?;
        let places = if skip.brief == skip.why { "" } else { "; `moa-export ops` shows where it is looked for" };
        Some(format!("{} was skipped: {}{places}", report.backend, skip.brief))
    })
}

/// Cases that each graph did without, on whatever backend.
pub(super) fn left_out(result: &Verification) -> BTreeSet<String> {
    let graphs = result.backends.iter().flat_map(|report| &report.graphs);
    graphs.filter_map(|graph| Some(format!("{}: {}", graph.graph, graph.left_out.as_ref()?))).collect()
}

/// What weights of few bits change, a line for each graph.
pub(super) fn rounding_costs(result: &Verification) -> Vec<String> {
    let dtype = result.dtype.as_str();
    if result.rounding_cost.is_empty() && result.dtype.integers().is_some() {
        return vec![format!("what the rounding to {dtype} changes was not seen: no backend ran a graph to the end")];
    }
    let line = |cost: &RoundingCost| {
        let share = |some: usize, all: usize| format!("{:.1} % of {all}", 100.0 * some as f64 / all.max(1) as f64);
        let mut text = format!(
            "{} in {dtype}, beside the checkpoint's own weights on these inputs: the same experts in {} choices",
            cost.graph,
            share(cost.same_experts, cost.decisions),
        );
        if cost.positions > 0 {
            text.push_str(&format!(", the same best token at {} positions", share(cost.same_best, cost.positions)));
        }
        let [relative, largest] = [cost.relative_difference, cost.largest_difference];
        text + &format!("; outputs differ by {relative:.1e} of their root mean square, at most by {largest:.1e}")
    };
    result.rounding_cost.iter().map(line).collect()
}

/// What was found in a file that stores weights as `dtype`.
pub(super) fn audit_line(audit: &FileAudit, dtype: Precision) -> String {
    let name = &audit.graph;
    let (weights, nodes) = match &audit.outcome {
        AuditOutcome::Compared { weights, nodes } => (weights, nodes),
        AuditOutcome::Skipped(why) => return format!("weights of {name}: skipped, {why}\n"),
    };
    let mut text = match weights.fault_count {
        0 => {
            let of_checkpoint = match dtype {
                Precision::Fp32 => "the checkpoint".to_owned(),
                _ => format!("the checkpoint's in {}", dtype.as_str()),
            };
            format!("weights of {name}: {} constants equal {of_checkpoint} bit for bit\n", weights.tensors)
        }
        1 => format!("weights of {name}: 1 FAULT\n"),
        count => format!("weights of {name}: {count} FAULTS\n"),
    };
    for fault in &weights.faults {
        text.push_str(&format!("  {fault}\n"));
    }
    if let Some(more) = weights.fault_count.checked_sub(weights.faults.len()).filter(|more| *more > 0) {
        text.push_str(&format!("  and {more} more\n"));
    }
    text.push_str(&match &nodes.difference {
        None => format!("graph of {name}: {} nodes are those that the checkpoint gives\n", nodes.nodes),
        Some(found) => format!(
            "graph of {name}: {found} is NOT what the checkpoint gives; beyond the weights, what it computes was \
             compared for these inputs alone\n"
        ),
    });
    let faults = nodes.order.iter().chain(&nodes.value).chain(&nodes.shape);
    text.extend(faults.map(|fault| format!("graph of {name}: FAULT, {fault}\n")));
    text
}

/// Where constants that differ may come from.
pub(super) fn origin(result: &Verification) -> Option<&'static str> {
    let most_differ = |audit: &FileAudit| match &audit.outcome {
        AuditOutcome::Compared { weights, .. } => 2 * weights.fault_count > weights.tensors,
        AuditOutcome::Skipped(_) => false,
    };
    match result.of_other_weights {
        Some(true) => {
            Some("the export was made from another checkpoint: moa.source.sha256 is not the hash of this one")
        }
        Some(false) => Some(
            "the export was made from these weights; its files were changed, or another configuration or version was used",
        ),
        None if result.audits.iter().any(most_differ) => {
            Some("most constants differ: this may be an export of another checkpoint")
        }
        None => None,
    }
}

fn backend_rows(report: &BackendReport) -> Vec<Vec<String>> {
    if report.skipped.is_some() {
        let mut row = vec![report.backend.clone()];
        row.extend(["-"; 6].map(str::to_owned));
        row.push("skipped".to_owned());
        return vec![row];
    }
    report
        .graphs
        .iter()
        .map(|graph| {
            let routing = &graph.routing;
            let ties = if routing.ties > 0 { format!(" (+{} ties)", routing.ties) } else { String::new() };
            let seen = |text: String| if graph.runs == 0 { "-".to_owned() } else { text };
            vec![
                report.backend.clone(),
                graph.graph.clone(),
                graph.runs.to_string(),
                seen(graph.outputs.values.to_string()),
                seen(format!("{}/{}{ties}", routing.equal, routing.decisions)),
                seen(worst(&graph.outputs)),
                seen(tolerance(&graph.outputs)),
                if graph.passed() { "ok" } else { "FAILED" }.to_owned(),
            ]
        })
        .collect()
}

/// What failed, where it was first seen, and between which modules it arose.
pub(super) fn details(backend: &str, graph: &GraphReport) -> String {
    if graph.passed() {
        return String::new();
    }
    let mut text = format!("\n{backend}, {}:\n", graph.graph);
    if let Some(failure) = &graph.failure {
        text.push_str(&format!("  stopped: {failure}\n"));
    }
    if let Some(d) = &graph.routing.unexplained {
        text.push_str(&format!(
            "  {} tokens went to other experts; the first in \"{}\", module {}, row {}, token {}: {:?} instead of {:?} by a margin of {:.1e}\n",
            graph.routing.unexplained_count, d.case, d.module, d.batch, d.token, d.found, d.expected, d.margin
        ));
    }
    let difference = |label: &str, d: &Difference| {
        format!(
            "  {label}: {} at {:?}: {} instead of {} (tolerance {:.1e})\n",
            d.place, d.index, d.found, d.expected, d.tolerance
        )
    };
    let outputs = &graph.outputs;
    if !outputs.passed() {
        text.push_str(&format!("  {} of {} values out of tolerance\n", outputs.mismatches, outputs.values));
        text.extend(outputs.first.iter().map(|d| difference("first", d)));
        text.extend(outputs.worst.iter().map(|d| difference("worst", d)));
    }
    text.extend(graph.excess.iter().map(|excess| format!("  {excess}\n")));
    if graph.runs == 0 {
        return text;
    }
    let routing = &graph.routing;
    text.push_str(&match (&routing.last_agreeing, &routing.first_divergent, &routing.unexplained) {
        (Some(last), Some(first), _) => {
            format!("  arises after the router of {last} and before or in that of {first}\n")
        }
        (None, Some(first), _) => format!("  arises before or in the router of {first}\n"),
        (_, None, Some(choice)) => {
            format!("  arises where {} chooses: the weights of what routers chose agree\n", choice.module)
        }
        (_, None, None) => where_routers_agree(graph),
    });
    if let Some(case) = &graph.altered {
        text.push_str(&format!(
            "  routers were seen in a copy with more outputs, which gave other bits from \"{case}\" on\n"
        ));
    }
    text
}

/// What is known of the place of a fault that no router shows: caches and routing are outputs of modules in between.
fn where_routers_agree(graph: &GraphReport) -> String {
    let first = graph.outputs.first.as_ref().map(|first| first.place.rsplit(": ").next().unwrap_or_default());
    match first {
        _ if graph.failure.is_some() => String::new(),
        None => "  every router agrees\n".into(),
        Some(output) if past_of(output).is_some() || is_routing_output(output) => {
            format!("  every router agrees: the first difference is in {output}\n")
        }
        Some(_) => "  every router agrees: arises after the last one\n".into(),
    }
}
