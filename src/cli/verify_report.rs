//! The page of `moa-export verify --report`.

use super::{
    args::VerifyArguments,
    verify::{audit_line, details},
};
use crate::{
    parity::{BackendReport, Difference, GraphReport, MARGIN, Verification},
    report::{Axis, Bars, Cell, Column, Report, Section, Status, Table},
};

pub(super) fn page(arguments: &VerifyArguments, result: &Verification) -> Report {
    let subtitle = format!("{} beside {}", arguments.model.display(), arguments.checkpoint.display());
    let mut report = Report::new("Verification", subtitle);
    report.footer(format!("moa-export {}", env!("CARGO_PKG_VERSION")));
    let skipped = result.backends.iter().filter(|backend| backend.skipped.is_some()).count();
    let (status, verdict) = match (result.passed(), skipped) {
        (true, 0) => (Status::Good, "verified on every backend".to_owned()),
        (true, skipped) => {
            let used = result.backends.len() - skipped;
            (Status::Good, format!("verified on {used} of {} backends, {skipped} skipped", result.backends.len()))
        }
        (false, _) => (Status::Bad, "not verified".to_owned()),
    };
    report.verdict(status, verdict);
    about(report.section("Export"), arguments, result);
    constants(report.section("Constants"), result);
    let section = report.section("Backends");
    backends(section, result);
    differences(section, result);
    routing(report.section("Routing"), result);
    let failed: Vec<_> = graphs(result).filter(|(_, graph)| !graph.passed()).collect();
    if !failed.is_empty() {
        let section = report.section("What failed");
        for (backend, graph) in failed {
            details(&backend.backend, graph).lines().filter(|line| !line.is_empty()).for_each(|line| {
                section.paragraph(line.trim());
            });
        }
    }
    report
}

fn graphs(result: &Verification) -> impl Iterator<Item = (&BackendReport, &GraphReport)> {
    result.backends.iter().flat_map(|backend| backend.graphs.iter().map(move |graph| (backend, graph)))
}

fn about(section: &mut Section, arguments: &VerifyArguments, result: &Verification) {
    let mut facts = vec![("family", result.family.clone()), ("form", result.form.clone())];
    facts.push(("gates", result.gate_mode.clone().unwrap_or_else(|| "of the checkpoint".into())));
    facts.push(("seed of the inputs", arguments.seed.to_string()));
    for (name, value) in [("absolute tolerance", arguments.atol), ("relative tolerance", arguments.rtol)] {
        facts.extend(value.map(|value| (name, value.to_string())));
    }
    section.facts(facts);
    section.paragraph(
        "Each backend ran inputs of shapes that no export saw, beside an f64 evaluation of the checkpoint that never \
         touches a graph. The reference replays the experts that the backend chose; unless it was given, the \
         tolerance is what rounding to f32 explains for this model and input.",
    );
}

fn constants(section: &mut Section, result: &Verification) {
    let columns =
        [Column::text("graph"), Column::number("constants"), Column::number("faults"), Column::text("verdict")];
    let mut table = Table::new(columns);
    for audit in &result.audits {
        let weights = &audit.weights;
        let verdict = match &audit.skipped {
            Some(why) => Cell::Status(Status::Neutral, format!("skipped: {why}")),
            None if weights.passed() => Cell::Status(Status::Good, "bit for bit".into()),
            None => Cell::Status(Status::Bad, "differ".into()),
        };
        table.push([audit.graph.as_str().into(), weights.tensors.into(), weights.fault_count.into(), verdict]);
    }
    section.table(table);
    for audit in result.audits.iter().filter(|audit| audit.skipped.is_none() && !audit.weights.passed()) {
        audit_line(audit).lines().for_each(|line| {
            section.paragraph(line.trim());
        });
    }
}

fn backends(section: &mut Section, result: &Verification) {
    let numbers = ["runs", "values", "mismatches", "max |diff|", "max ULP", "tolerance"].map(Column::number);
    let columns = [Column::text("backend"), Column::text("graph")].into_iter().chain(numbers);
    let mut table = Table::new(columns.chain([Column::text("verdict")]));
    for backend in &result.backends {
        if backend.skipped.is_some() {
            let mut row = vec![Cell::from(backend.backend.as_str())];
            row.resize(8, "–".into());
            row.push(Cell::Status(Status::Neutral, "skipped".into()));
            table.push(row);
        }
        for graph in &backend.graphs {
            let outputs = &graph.outputs;
            table.push([
                backend.backend.as_str().into(),
                graph.graph.as_str().into(),
                graph.runs.into(),
                outputs.values.into(),
                outputs.mismatches.into(),
                format!("{:.1e}", outputs.max_abs).into(),
                outputs.max_ulp.round().into(),
                format!("{:.1e}", outputs.atol).into(),
                verdict(graph.passed()),
            ]);
        }
    }
    section.table(table);
    for backend in &result.backends {
        if let Some(why) = &backend.skipped {
            section.paragraph(format!("{} was skipped: {why}", backend.backend));
        }
    }
    let columns = ["backend", "graph", "case and output"].map(Column::text).into_iter();
    let columns = columns.chain(["index", "found", "expected"].map(Column::number));
    let mut worst = Table::new(columns).caption("The value with the largest difference");
    for (backend, graph) in graphs(result) {
        let Some(Difference { place, index, found, expected }) = &graph.outputs.worst else { continue };
        worst.push([
            backend.backend.as_str().into(),
            graph.graph.as_str().into(),
            place.as_str().into(),
            format!("{index:?}").into(),
            format!("{found:.8}").into(),
            format!("{expected:.8}").into(),
        ]);
    }
    section.table(worst);
}

fn verdict(passed: bool) -> Cell {
    if passed { Cell::Status(Status::Good, "ok".into()) } else { Cell::Status(Status::Bad, "failed".into()) }
}

/// The largest difference of each graph as a share of its tolerance.
fn differences(section: &mut Section, result: &Verification) {
    let mut bars = Bars::new("Largest difference by tolerance", Axis::linear("max |diff| / tolerance", "%"));
    let mut any = false;
    for (backend, graph) in graphs(result).filter(|(_, graph)| graph.outputs.atol > 0.0) {
        let share = 100.0 * graph.outputs.max_abs / graph.outputs.atol;
        bars = bars.bar(format!("{}, {}", backend.backend, graph.graph), share);
        any = true;
    }
    if any {
        section.plot(bars.reference(100.0, "tolerance"));
    }
}

fn routing(section: &mut Section, result: &Verification) {
    section.paragraph(format!(
        "A token may go to other experts than in the reference where their scores are closer than {MARGIN:e} (a tie); \
         anything else is a failure."
    ));
    let numbers = ["routed tokens", "same experts", "ties", "unexplained"].map(Column::number);
    let columns = [Column::text("backend"), Column::text("graph")].into_iter().chain(numbers);
    let mut table = Table::new(columns.chain([Column::text("verdict")]));
    for (backend, graph) in graphs(result) {
        let routing = &graph.routing;
        table.push([
            backend.backend.as_str().into(),
            graph.graph.as_str().into(),
            routing.decisions.into(),
            routing.equal.into(),
            routing.ties.into(),
            routing.unexplained_count.into(),
            verdict(routing.passed()),
        ]);
    }
    section.table(table);
}
