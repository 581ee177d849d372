//! The page of `moa-export verify --report`.

use moa_graphs::{Form, Precision};

use super::{
    Verdict, args::VerifyArguments, audit_line, details, left_out, origin, receipt::Receipt, rounding_costs, skipped,
};
use crate::{
    cli::{
        receipt::{fact, file_fact, threads, utc},
        tolerance::{tolerance, worst},
    },
    parity::{AuditOutcome, BackendReport, Difference, FileAudit, GraphReport, NodeAudit, UNKNOWN, Verification},
    report::{Axis, Bars, Cell, Column, Report, Section, Status, Table, signed},
};

pub(super) fn page(
    arguments: &VerifyArguments,
    result: &Verification,
    verdict: Verdict,
    receipt: Option<&Receipt>,
) -> Report {
    let subtitle = format!("{} compared with {}", arguments.model.display(), arguments.checkpoint.display());
    let mut report = Report::new("Verification", subtitle);
    report.about(arguments.model.display().to_string());
    report.footer(format!("moa-export {}", env!("CARGO_PKG_VERSION")));
    let unread = |audit: &FileAudit| audit.nodes().is_none_or(|nodes| nodes.difference.is_some());
    let status = match verdict {
        Verdict::Verified if !result.audits.iter().any(unread) => Status::Good,
        Verdict::Verified | Verdict::Incomplete => Status::Warning,
        Verdict::Differs => Status::Bad,
    };
    report.verdict(status, verdict.text(result));
    about(report.section("Export"), arguments, result);
    constants(report.section("Constants and nodes"), result);
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
    if let Some(receipt) = receipt {
        report.section("Receipt").facts(facts(receipt));
    }
    report
}

/// The receipt, as a list.
fn facts(receipt: &Receipt) -> Vec<(String, String)> {
    let mut facts = vec![("Processor".to_owned(), receipt.cpu.clone().unwrap_or_else(|| "unknown".into()))];
    facts.extend(threads(receipt.threads, &receipt.runtimes));
    facts.push(("Seed of the inputs".into(), receipt.seed.to_string()));
    facts.push(("Time".into(), utc(receipt.unix_time)));
    facts.extend(receipt.instructions.iter().map(|level| ("Instructions, at most".to_owned(), level.clone())));
    facts.extend(receipt.packing.iter().map(|way| ("Packing of bf16".to_owned(), way.clone())));
    facts.extend(receipt.runtimes.iter().map(fact));
    facts.extend(receipt.files.iter().map(|file| (file.file.clone(), file_fact(file))));
    facts.push(("Weights of the checkpoint".into(), format!("sha256 {}", receipt.checkpoint_sha256)));
    facts
}

fn graphs(result: &Verification) -> impl Iterator<Item = (&BackendReport, &GraphReport)> {
    result.backends.iter().flat_map(|backend| backend.graphs.iter().map(move |graph| (backend, graph)))
}

fn about(section: &mut Section, arguments: &VerifyArguments, result: &Verification) {
    let form = result.form.map_or(UNKNOWN, Form::as_str);
    let named = [("family", result.family.as_str()), ("form", form), ("dtype", result.dtype.as_str())];
    let mut facts: Vec<_> = named.into_iter().map(|(name, value)| (name, value.to_owned())).collect();
    let replaced = result.gate_mode.map(|mode| format!("{}, in place of the family's", mode.as_str()));
    facts.push(("gates", replaced.unwrap_or_else(|| "of the family".into())));
    for (name, value) in [("absolute tolerance", arguments.atol), ("relative tolerance", arguments.rtol)] {
        facts.extend(value.map(|value| (name, value.to_string())));
    }
    section.facts(facts);
    section.paragraph(
        "Each backend ran inputs of shapes that no export saw, and is compared with an f64 evaluation of the checkpoint \
         that never touches a graph. This reference replays the experts that the backend chose. A value may differ from \
         the reference by the absolute tolerance plus the relative one times the reference. If none is given, the \
         absolute one is the model's rounding error in the type of its activations and of what our operators multiply, \
         in the case where that is largest, and the relative one is 0.",
    );
}

fn constants(section: &mut Section, result: &Verification) {
    let columns = [
        Column::text("graph"),
        Column::text("verdict"),
        Column::number("constants"),
        Column::number("faults"),
        Column::number("nodes"),
        Column::text("compared with the checkpoint's"),
    ];
    let mut table = Table::new(columns);
    for audit in &result.audits {
        let (weights, nodes) = match &audit.outcome {
            AuditOutcome::Compared { weights, nodes } => (weights, nodes),
            AuditOutcome::Skipped(why) => {
                let verdict = Cell::Status(Status::Warning, format!("skipped: {why}"));
                let [a, b, c, d] = ["–"; 4].map(Cell::from);
                table.push([audit.graph.as_str().into(), verdict, a, b, c, d]);
                continue;
            }
        };
        let verdict = match weights.passed() {
            true => Cell::Status(Status::Good, sameness_of_bits(result.dtype)),
            false => Cell::Status(Status::Bad, "differ".into()),
        };
        let graph = audit.graph.as_str().into();
        let numbers = [weights.tensors, weights.fault_count, nodes.nodes].map(Cell::from);
        table.push([graph, verdict].into_iter().chain(numbers).chain([sameness(nodes)]));
    }
    section.table(table);
    let different =
        |audit: &&FileAudit| audit.has_other_constants() || audit.nodes().is_some_and(|nodes| nodes.fault().is_some());
    for audit in result.audits.iter().filter(different) {
        audit_line(audit, result.dtype).lines().for_each(|line| {
            section.paragraph(line.trim());
        });
    }
    if let Some(line) = origin(result) {
        section.paragraph(line);
    }
}

/// What constants that agree agree with: in other types than f32, what rounding makes of the checkpoint.
fn sameness_of_bits(dtype: Precision) -> String {
    match dtype {
        Precision::Fp32 => "bit for bit".into(),
        _ => format!("bit for bit in {}", dtype.as_str()),
    }
}

/// Whether the nodes are those that the checkpoint gives.
fn sameness(nodes: &NodeAudit) -> Cell {
    let (status, text) = match nodes {
        NodeAudit { order: Some(_), .. } => (Status::Bad, "in another order".into()),
        NodeAudit { value: Some(found), .. } | NodeAudit { shape: Some(found), .. } => (Status::Bad, found.clone()),
        NodeAudit { difference: Some(found), .. } => (Status::Warning, format!("others: {found}")),
        NodeAudit { difference: None, .. } => (Status::Good, "the same".into()),
    };
    Cell::Status(status, text)
}

fn backends(section: &mut Section, result: &Verification) {
    let texts = ["backend", "graph", "verdict", "activations"].map(Column::text);
    let numbers = ["runs", "values", "mismatches", "worst |diff|", "tolerance"].map(Column::number);
    let mut table = Table::new(texts.into_iter().chain(numbers));
    for backend in &result.backends {
        if backend.skipped.is_some() {
            let mut row =
                vec![backend.backend.as_str().into(), "–".into(), Cell::Status(Status::Neutral, "skipped".into())];
            row.resize(9, "–".into());
            table.push(row);
        }
        for graph in &backend.graphs {
            let outputs = &graph.outputs;
            table.push([
                backend.backend.as_str().into(),
                graph.graph.as_str().into(),
                verdict(graph.passed()),
                activations(backend).into(),
                graph.runs.into(),
                seen(graph, outputs.values.to_string()),
                seen(graph, outputs.mismatches.to_string()),
                seen(graph, signed(&worst(outputs))),
                seen(graph, signed(&tolerance(outputs))),
            ]);
        }
    }
    section.table(table);
    for line in skipped(result).chain(left_out(result)).chain(rounding_costs(result)) {
        section.paragraph(line);
    }
    let columns = ["backend", "graph", "case and output"].map(Column::text).into_iter();
    let columns = columns.chain(["index", "found", "expected", "tolerance"].map(Column::number));
    let mut worst = Table::new(columns).caption("The value whose difference is the largest share of its tolerance");
    for (backend, graph) in graphs(result) {
        let Some(Difference { place, index, found, expected, tolerance }) = &graph.outputs.worst else { continue };
        worst.push([
            backend.backend.as_str().into(),
            graph.graph.as_str().into(),
            place.as_str().into(),
            format!("{index:?}").into(),
            signed(&format!("{found:.8}")).into(),
            signed(&format!("{expected:.8}")).into(),
            signed(&format!("{tolerance:.1e}")).into(),
        ]);
    }
    section.table(worst);
}

/// What a backend rounds activations to, and what it may round them to before products.
fn activations(BackendReport { activations, products, .. }: &BackendReport) -> String {
    products.map_or_else(|| activations.to_string(), |products| format!("{activations}, {products} in products"))
}

/// What the runs of a graph showed, where there were any.
fn seen(graph: &GraphReport, found: String) -> Cell {
    if graph.runs == 0 { "–".into() } else { found.into() }
}

fn verdict(passed: bool) -> Cell {
    if passed { Cell::Status(Status::Good, "ok".into()) } else { Cell::Status(Status::Bad, "failed".into()) }
}

/// Shares of the tolerance up to which the tolerance can be seen beside them on a linear axis.
const LINEAR: f64 = 20.0;

/// The largest difference of each graph as a share of the tolerance of its value.
fn differences(section: &mut Section, result: &Verification) {
    let largest = graphs(result).map(|(_, graph)| graph.outputs.largest_share).fold(0.0, f64::max);
    let (title, unit) = ("|diff| / tolerance", "%");
    let axis = if largest > LINEAR { Axis::log(title, unit) } else { Axis::linear(title, unit) };
    let mut bars = Bars::new("Largest difference by tolerance", axis);
    let mut any = false;
    let granted = |graph: &GraphReport| graph.outputs.atol > 0.0 || graph.outputs.rtol > 0.0;
    for (backend, graph) in graphs(result).filter(|(_, graph)| granted(graph)) {
        let share = 100.0 * graph.outputs.largest_share;
        bars = bars.bar(format!("{}, {}", backend.backend, graph.graph), share);
        any = true;
    }
    if any {
        section.plot(bars.reference(100.0, "tolerance"));
    }
}

fn routing(section: &mut Section, result: &Verification) {
    section.paragraph(
        "A token may go to other experts than in the reference where their scores are no further apart than the margin \
         that rounding explains (a tie); anything else is a failure. Scores are probabilities, or logits where the gate \
         takes the top k before its softmax.",
    );
    let numbers = ["routed tokens", "same experts", "ties", "margin", "unexplained"].map(Column::number);
    let texts = ["backend", "graph", "verdict"].map(Column::text);
    let mut table = Table::new(texts.into_iter().chain(numbers));
    for (backend, graph) in graphs(result) {
        let routing = &graph.routing;
        table.push([
            backend.backend.as_str().into(),
            graph.graph.as_str().into(),
            if graph.runs == 0 { Cell::Status(Status::Neutral, "not seen".into()) } else { verdict(routing.passed()) },
            routing.decisions.into(),
            routing.equal.into(),
            routing.ties.into(),
            seen(graph, signed(&format!("{:.1e}", routing.margin))),
            routing.unexplained_count.into(),
        ]);
    }
    section.table(table);
}
