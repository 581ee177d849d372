//! A result as people read it.

use std::collections::BTreeSet;

use super::{distinct, words::clock};
use crate::{
    cli::table::{counted, size, table},
    latency::{
        BATCH, BenchResult, Clock, Estimate, ExpertLoad, OperatorTimes, PAST, ParityRow, Receipt, Row, SEQUENCE,
        SOURCE, Verdict, layers, place, point_text,
    },
};

const NONE: &str = "–";

pub(super) fn text(result: &BenchResult) -> String {
    let mut text = machine(&result.receipt);
    if result.has_failed_parity() {
        text.push_str("\nPARITY FAILED: what is timed here does not all compute the same\n");
    }
    text.push_str(&format!("\n{}", times(result)));
    text.extend(in_place(result).map(|note| note + "\n"));
    text.push_str(&format!("\n{}", sessions(result)));
    for operators in by_part(&result.operators) {
        text.push_str(&format!("\n{}", places(&operators, in_pass(result))));
    }
    text.push_str(&experts(&result.experts));
    text.push_str(&parity(&result.parity));
    for skipped in &result.skipped {
        text.push_str(&format!("skipped: {}: {}\n", place(&skipped.subject, None), skipped.why));
    }
    for warning in &result.receipt.warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    let unsteady: BTreeSet<String> =
        result.rows.iter().filter(|row| !row.steady).map(|row| place(&row.subject, Some(&row.point))).collect();
    for place in unsteady {
        text.push_str(&format!("warning: {place} did not become steady in the warm-up\n"));
    }
    text
}

/// Two or three lines of the receipt.
fn machine(receipt: &Receipt) -> String {
    let machine = &receipt.machine;
    let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".into());
    let governor = if machine.governors.is_empty() { "unknown".into() } else { machine.governors.join(", ") };
    let mhz = machine.mhz.map_or_else(String::new, |mhz| format!(", {}", clock(mhz)));
    let locked = machine.clocks_locked.map_or("unknown", |locked| if locked { "yes" } else { "no" });
    let gpus = machine.gpus.as_ref().map_or_else(|| "none seen".to_owned(), |gpus| gpus.join("; "));
    let libraries: Vec<String> =
        receipt.runtimes.iter().map(|library| format!("{} {}", library.name, library.version)).collect();
    let load =
        |moment: &crate::provenance::Moment| moment.load.map_or_else(|| NONE.into(), |[one, ..]| format!("{one:.2}"));
    format!(
        "{}, {} of {} processors (list {}), {} of ONNX Runtime, governor {governor}{mhz}, clocks locked: {locked}\n{}, {}; GPUs: {gpus}\nmoa-export {}, {}\nload average {} before, {} after; routing {}\n",
        or_unknown(&machine.cpu),
        machine.usable_cpus,
        or_unknown(&machine.cpus.map(|count| count.to_string())),
        machine.affinity.as_deref().unwrap_or("unknown"),
        counted(receipt.threads.onnx_runtime, "thread"),
        or_unknown(&machine.system),
        or_unknown(&machine.kernel),
        receipt.program,
        libraries.join(", "),
        load(&receipt.before),
        load(&receipt.after),
        receipt.options.routing,
    )
}

/// A time with three or four digits, in the unit in which it is less than 1000 once it is rounded.
#[allow(clippy::cast_precision_loss)]
pub(super) fn duration(nanoseconds: u64) -> String {
    let value = nanoseconds as f64;
    match nanoseconds {
        0..999_950 => format!("{:.1} µs", value / 1e3),
        999_950..999_995_000 => format!("{:.2} ms", value / 1e6),
        _ => format!("{:.2} s", value / 1e9),
    }
}

/// The factor with its interval.
pub(super) fn ratio(estimate: &Estimate) -> String {
    let factor = |value: f64| with_digits(value, 3, 3);
    match estimate.interval {
        Some([low, high]) => format!("{}x [{}, {}]", factor(estimate.value), factor(low), factor(high)),
        None => format!("{}x", factor(estimate.value)),
    }
}

/// Tokens a second.
pub(super) fn rate(tokens: f64) -> String {
    with_digits(tokens, 3, 0)
}

/// At least so many significant digits, and at least so many decimals.
pub(super) fn with_digits(value: f64, digits: i32, decimals: usize) -> String {
    let places = digits.saturating_sub(1);
    let rounded = format!("{value:.*e}", usize::try_from(places).unwrap_or(0));
    let exponent = rounded.split_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok()).unwrap_or(places);
    let decimals = usize::try_from(places.saturating_sub(exponent)).unwrap_or(0).max(decimals);
    format!("{value:.decimals$}")
}

/// Columns that tell subjects apart, where there is something to tell apart.
pub(super) struct Names {
    part: bool,
    model: bool,
    module: bool,
    axes: Vec<String>,
}

impl Names {
    pub(super) fn of<'a>(rows: impl Iterator<Item = &'a Row> + Clone) -> Self {
        let models: BTreeSet<&str> = rows.clone().map(|row| row.subject.model.as_str()).collect();
        let known = [BATCH, SEQUENCE, PAST, SOURCE].map(str::to_owned);
        let all: BTreeSet<String> = rows.clone().flat_map(|row| row.point.keys().cloned()).collect();
        let first = known.iter().filter(|axis| all.contains(*axis));
        let axes = first.chain(all.iter().filter(|axis| !known.contains(axis))).cloned().collect();
        Self { part: true, model: models.len() > 1, module: rows.clone().any(|row| row.subject.module.is_some()), axes }
    }

    /// Without the part and the module, where these stand in a heading.
    pub(super) fn without_place(self) -> Self {
        Self { part: false, module: false, ..self }
    }

    pub(super) fn header(&self) -> Vec<String> {
        let mut header = Vec::new();
        header.extend(self.part.then(|| "part".to_owned()));
        header.extend(self.module.then(|| "module".to_owned()));
        header.extend(self.axes.iter().map(|axis| axis.replace("_sequence", "").replace(SEQUENCE, "seq")));
        header.extend(self.model.then(|| "model".to_owned()));
        header.push("backend".into());
        header
    }

    pub(super) fn cells(&self, row: &Row, clock: Clock) -> Vec<String> {
        let (Row { subject, point, .. }, mut cells) = (row, Vec::new());
        cells.extend(self.part.then(|| subject.part.clone()));
        cells.extend(self.module.then(|| subject.module.clone().unwrap_or_default()));
        let size = |axis: &String| point.get(axis).map_or_else(|| NONE.to_owned(), usize::to_string);
        cells.extend(self.axes.iter().map(size));
        cells.extend(self.model.then(|| subject.model.clone()));
        cells.push(match clock {
            Clock::Host => subject.backend.clone(),
            Clock::Device => format!("{}, CUDA events", subject.backend),
        });
        cells
    }
}

fn times(result: &BenchResult) -> String {
    let names = Names::of(result.rows.iter());
    let mut header = names.header();
    header.extend(["n", "min", "p50", "p90", "p99", "p99.9", "tokens/s", "relative to the first"].map(str::to_owned));
    let optional = |time: Option<u64>| time.map_or_else(|| NONE.to_owned(), duration);
    let row = |(clock, row): (Clock, Row)| {
        let mut cells = names.cells(&row, clock);
        let times = &row.times;
        cells.extend([times.samples.to_string(), duration(times.min), duration(times.p50)]);
        cells.extend([times.p90, times.p99, times.p99_9].map(optional));
        cells.push(rate(row.tokens_per_second));
        cells.push(row.ratio.as_ref().map_or_else(|| NONE.to_owned(), ratio));
        cells
    };
    let rows: Vec<_> = result.rows.iter().flat_map(Row::by_clock).map(row).collect();
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), &rows)
}

/// Who updated caches in place, where that was asked for.
pub(super) fn in_place(result: &BenchResult) -> Option<String> {
    let who = |row: &Row| place(&row.subject, None);
    let own = distinct(result.rows.iter().filter(|row| row.in_place).map(who)).join("; ");
    let note = || format!("Caches in place (past and present are one buffer): {own}. All others make new outputs.");
    result.receipt.options.in_place.then(note)
}

/// How caches are in the pass that records nodes, where they are in place in others.
pub(super) fn in_pass(result: &BenchResult) -> &'static str {
    if result.receipt.options.in_place { "; caches are not in place in it" } else { "" }
}

/// What comes before the steady state.
fn sessions(result: &BenchResult) -> String {
    let mut rows = Vec::new();
    for session in &result.sessions {
        let first = result.rows.iter().find(|row| row.subject == session.subject).map(|row| row.first_call);
        rows.push(vec![
            place(&session.subject, None),
            duration(session.load),
            first.map_or_else(|| NONE.to_owned(), duration),
            session.peak_memory.map_or_else(|| NONE.to_owned(), size),
        ]);
    }
    let process = result.receipt.after.peak_memory.map_or_else(|| NONE.to_owned(), size);
    let text = table(&["before the steady state", "load", "first call", "memory added at its peak"], &rows);
    format!("{text}whole process at its peak: {process}, all contestants and parity checks together\n")
}

fn by_part(operators: &[OperatorTimes]) -> Vec<Vec<&OperatorTimes>> {
    let mut parts: Vec<Vec<&OperatorTimes>> = Vec::new();
    for times in operators {
        match parts.iter_mut().find(|part| part[0].subject.part == times.subject.part) {
            Some(part) => part.push(times),
            None => parts.push(vec![times]),
        }
    }
    parts
}

/// Time by module, a column for each contestant.
fn places(operators: &[&OperatorTimes], in_pass: &str) -> String {
    let mut modules: Vec<&str> = Vec::new();
    let nodes = || operators.iter().flat_map(|times| &times.nodes);
    for layer in layers(nodes()) {
        for node in nodes().filter(|node| node.layer == layer) {
            if !modules.contains(&node.module.as_str()) {
                modules.push(&node.module);
            }
        }
    }
    let several = operators.iter().any(|times| times.subject.model != operators[0].subject.model);
    let header = operators.iter().map(|times| match several {
        true => format!("{} on {}", times.subject.model, times.subject.backend),
        false => times.subject.backend.clone(),
    });
    let part = format!("{}, nodes of", operators[0].subject.part);
    let header: Vec<String> = std::iter::once(part).chain(header).collect();
    let cell = |times: &OperatorTimes, module: &str| {
        let time: f64 = times.nodes.iter().filter(|node| node.module == module).map(|node| node.time).sum();
        let all: f64 = times.nodes.iter().map(|node| node.time).sum();
        if time > 0.0 { format!("{:.1} µs  {:.1} %", time / 1e3, 100.0 * time / all) } else { NONE.to_owned() }
    };
    let row = |module: &&str| {
        let name = if module.is_empty() { "no layer" } else { module };
        std::iter::once(name.to_owned()).chain(operators.iter().map(|times| cell(times, module))).collect()
    };
    let rows: Vec<Vec<String>> = modules.iter().map(row).collect();
    let text = table(&header.iter().map(String::as_str).collect::<Vec<_>>(), &rows);
    let point = Some(point_text(&operators[0].point)).filter(|point| !point.is_empty());
    let call = point.map_or_else(|| "a call".to_owned(), |point| format!("a call of {point}"));
    let text = format!("{text}\n{}", by_operator(operators, &header));
    format!("{text}{call}, in a pass of its own in which every node was recorded, which is slower{in_pass}\n")
}

/// The operators that take most time, a column for each contestant.
fn by_operator(operators: &[&OperatorTimes], header: &[String]) -> String {
    const SHOWN: usize = 8;
    let time = |times: &OperatorTimes, operator: &str| -> (f64, f64) {
        let own = times.nodes.iter().filter(|node| node.operator == operator);
        own.fold((0.0, 0.0), |(time, nodes), node| (time + node.time, nodes + node.nodes))
    };
    let mut names: Vec<&str> = Vec::new();
    for node in operators.iter().flat_map(|times| &times.nodes) {
        if !names.contains(&node.operator.as_str()) {
            names.push(&node.operator);
        }
    }
    let total = |name: &str| operators.iter().map(|times| time(times, name).0).sum::<f64>();
    names.sort_by(|a, b| total(b).total_cmp(&total(a)));
    let cell = |times: &OperatorTimes, name: &str| match time(times, name) {
        (_, 0.0) => NONE.to_owned(),
        (time, nodes) => format!("{:.1} µs  x{nodes:.0}", time / 1e3),
    };
    let rows: Vec<Vec<String>> = names
        .iter()
        .take(SHOWN)
        .map(|name| {
            std::iter::once((*name).to_owned()).chain(operators.iter().map(|times| cell(times, name))).collect()
        })
        .collect();
    let first = if names.len() > SHOWN { format!("operator ({SHOWN} of {})", names.len()) } else { "operator".into() };
    let header: Vec<&str> = std::iter::once(first.as_str()).chain(header[1..].iter().map(String::as_str)).collect();
    table(&header, &rows)
}

/// Load of the experts at the largest point of every layer.
fn experts(loads: &[ExpertLoad]) -> String {
    const SHOWN: usize = 16;
    let mut largest: Vec<&ExpertLoad> = Vec::new();
    for load in loads {
        let name = |load: &ExpertLoad| (load.model.clone(), load.part.clone(), load.module.clone());
        match largest.iter_mut().find(|known| name(known) == name(load)) {
            Some(known) if known.tokens < load.tokens => *known = load,
            Some(_) => {}
            None => largest.push(load),
        }
    }
    if largest.is_empty() {
        return String::new();
    }
    let rows = largest.into_iter().map(|load| {
        #[allow(clippy::cast_precision_loss)]
        let percent = |count: &u64| format!("{:3.0}", 100.0 * *count as f64 / load.tokens.max(1) as f64);
        let mut shares: Vec<_> = load.counts.iter().take(SHOWN).map(percent).collect();
        shares.extend((load.counts.len() > SHOWN).then(|| "…".to_owned()));
        let module = if load.module.is_empty() { "layer" } else { &load.module };
        let names = [load.model.clone(), load.part.clone(), module.to_owned(), load.tokens.to_string()];
        names.into_iter().chain([format!("{:.2}", load.imbalance()), shares.join(" ")]).collect()
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let header = ["expert load of", "part", "module", "tokens", "most/mean", "% of the tokens that go to each expert"];
    format!(
        "\n{}largest point of each layer; k experts a token, so that the shares add up to k times 100 %\n\n",
        table(&header, &rows)
    )
}

fn parity(rows: &[ParityRow]) -> String {
    let mut lines: Vec<String> = Vec::new();
    for row in rows {
        let who = format!("{} on {}", row.subject.model, row.subject.backend);
        let line = match &row.verdict {
            Verdict::Verified => format!("parity: {who}: verified against the checkpoint"),
            Verdict::Yardstick => format!("parity: {who}: computes the bodies, with which others are compared"),
            Verdict::NotChecked { why } => format!("parity: {who}: not checked, {why}"),
            Verdict::Failed { fault } => {
                format!("parity: {}: FAILED, {fault}", place(&row.subject, row.point.as_ref()))
            }
            Verdict::Agrees { with, agreement } => {
                let same = |other: &&ParityRow| {
                    (&other.subject.model, &other.subject.backend) == (&row.subject.model, &row.subject.backend)
                };
                let (mut worst, mut decisions) = (agreement, 0);
                for row in rows.iter().filter(same) {
                    let Verdict::Agrees { agreement, .. } = &row.verdict else { continue };
                    if agreement.largest_share() > worst.largest_share() {
                        worst = agreement;
                    }
                    decisions += agreement.decisions;
                }
                let (distance, tolerance) = (worst.max_abs.unwrap_or(f64::INFINITY), worst.tolerance);
                format!(
                    "parity: {who}: agrees with {with}, worst |diff| {distance:.1e} of {tolerance:.1e}, the same experts {decisions} times"
                )
            }
        };
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.into_iter().map(|line| line + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        latency::{NodeTime, sample},
        parity::Agreement,
    };

    #[test]
    fn times_change_units() {
        for (nanoseconds, text) in [
            (0, "0.0 µs"),
            (1_500, "1.5 µs"),
            (999_949, "999.9 µs"),
            (999_950, "1.00 ms"),
            (1_000_000, "1.00 ms"),
            (12_340_000, "12.34 ms"),
            (999_994_999, "999.99 ms"),
            (999_995_000, "1.00 s"),
            (1_000_000_000, "1.00 s"),
            (90_000_000_000, "90.00 s"),
        ] {
            assert_eq!(duration(nanoseconds), text);
        }
    }

    #[test]
    fn small_numbers_keep_their_digits() {
        let estimate = |value: f64| Estimate { value, interval: Some([0.9 * value, 1.1 * value]) };
        assert_eq!(ratio(&estimate(0.0025)), "0.00250x [0.00225, 0.00275]");
        assert_eq!(ratio(&estimate(0.0999_6)), "0.100x [0.0900, 0.110]");
        assert_eq!(ratio(&estimate(12.5)), "12.500x [11.250, 13.750]");
        assert_eq!(ratio(&Estimate { value: 1e-7, interval: None }), "0.000000100x");
        for (tokens, text) in [(0.0, "0.00"), (0.04, "0.0400"), (5.25, "5.25"), (99.96, "100"), (20_600.4, "20600")] {
            assert_eq!(rate(tokens), text);
        }
        assert_eq!([f64::NAN, f64::INFINITY].map(|value| with_digits(value, 3, 3)), ["NaN", "inf"]);
    }

    #[test]
    fn who_updates_caches_in_place_is_told() {
        let mut result = sample();
        assert_eq!(in_place(&result), None);
        result.receipt.options.in_place = true;
        result.rows[0].in_place = true;
        let expected = "\nCaches in place (past and present are one buffer): m.onnx on ort, decoder_model. All others";
        assert!(text(&result).contains(expected), "{}", text(&result));
    }

    #[test]
    fn the_worst_of_all_points_stands_beside_its_own_tolerance() {
        let mut result = sample();
        let agreements = [(1e-3, 1e-2), (4e-5, 1e-4), (0.0, 1.0)];
        result.parity = agreements
            .map(|(distance, tolerance)| {
                let agreement = Agreement { max_abs: Some(distance), tolerance, decisions: 3, ..Agreement::default() };
                let verdict = Verdict::Agrees { with: "ort-function".into(), agreement };
                ParityRow { subject: result.rows[0].subject.clone(), point: None, verdict }
            })
            .into();
        let told = "parity: m.onnx on ort: agrees with ort-function, worst |diff| 4.0e-5 of 1.0e-4, the same experts 9 times\n";
        assert_eq!(parity(&result.parity), told);
    }

    #[test]
    fn every_number_stands_in_its_column() {
        let mut result = sample();
        let node = |module: &str, operator: &str, time: f64| NodeTime {
            layer: "layers.0".into(),
            module: module.into(),
            operator: operator.into(),
            routed: operator == "MoA",
            nodes: 2.0,
            time,
        };
        result.operators.push(OperatorTimes {
            subject: result.rows[0].subject.clone(),
            point: result.rows[0].point.clone(),
            calls: 3,
            nodes: vec![node("layers.0.attn", "MoA", 7_500.0), node("layers.0", "Add", 2_500.0)],
        });
        let text = text(&result);
        for line in [
            "part           module    batch  seq  past  source  backend                n     min     p50     p90     p99     p99.9  tokens/s  relative to the first",
            "decoder_model            2      3    5     7       ort                    1000  1.0 µs  1.0 µs  1.0 µs  1.0 µs  –      1000      –",
            "decoder_model  layers.0  2      3    5     7       tensorrt               2000  2.0 µs  2.0 µs  2.0 µs  2.0 µs  –      2000      2.250x [1.750, 2.750]",
            "layers.0.attn            7.5 µs  75.0 %",
            "MoA       7.5 µs  x2",
            "m.onnx on ort, decoder_model                3.0 µs  1.0 µs      3.0 kB",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\nis no line of\n{text}");
        }
    }
}
