//! A result as one page with pictures.

use std::collections::BTreeSet;

use super::{
    changes, distinct,
    short::Short,
    text::{Names, duration, in_pass, in_place, ratio},
    words::clock,
};
use crate::{
    cli::{
        module_labels::labels,
        receipt::{fact, file_fact, utc},
        table::counted,
    },
    latency::{
        BATCH, BenchResult, ExpertLoad, NodeTime, PAST, Point, Receipt, Regression, Row, SEQUENCE, SOURCE, Verdict,
        layers, place, point_text,
    },
    report::{Axis, Bars, Cell, Column, Distribution, HeatMap, Lines, Report, Section, Series, Status, Table},
};

/// Samples that a distribution is drawn of, at most.
const DRAWN: u64 = 2000;

/// Distributions that are drawn of one part, at most: those of its largest points.
const DISTRIBUTIONS: usize = 6;

/// The page; of an older result, what became of it, or why that is not known.
pub(super) fn html(result: &BenchResult, changes: Result<Option<&Regression>, &str>) -> String {
    let receipt = &result.receipt;
    let cpu = receipt.machine.cpu.as_deref().unwrap_or("an unknown processor");
    let names = distinct(receipt.files.iter().map(|file| file.model.as_str())).join(", ");
    let threads = counted(receipt.threads.onnx_runtime, "thread");
    let subtitle = format!("{names}: {threads} on {cpu}, routing {}", receipt.options.routing);
    let mut report = Report::new("Latency", subtitle);
    report.about(names);
    verdict(&mut report, result, changes.ok().flatten());
    let section = report.section("What was timed");
    section.paragraph(
        "The runtime's own call, inputs bound before it. Contestants of a point take turns in one process; the time \
         beside the first is the median of the turns' ratios with a 95 % interval. It is of these sessions alone: \
         copies of one model differed by up to 0.5 % beyond it (18 pairs on one machine). Plots show the median of \
         the turns, each by the median of its calls; p50 and tokens/s are of all calls. A dash stands where too few \
         samples lie beyond a percentile.",
    );
    if result.rows.iter().any(|row| row.device.is_some()) {
        section.paragraph("Rows with CUDA events are the same calls between two events on the device.");
    }
    let short = Short::of(result);
    if let Some(note) = in_place(&short.result) {
        section.paragraph(note);
    }
    if !short.names().is_empty() {
        section.facts(short.names().to_vec());
    }
    let result = &short.result;
    match changes {
        Ok(Some(changes)) => changes::section(&mut report, result, changes),
        Ok(None) => {}
        Err(why_not) => drop(report.section(changes::HEADING).paragraph(why_not)),
    }
    for part in parts(result) {
        curves(&mut report, result, &part);
        distributions(&mut report, result, &part);
    }
    operators(&mut report, result);
    experts(&mut report, &result.experts);
    parity(&mut report, result);
    sessions(&mut report, result);
    facts(&mut report, receipt);
    report.footer(format!("moa-export {}", receipt.program));
    report.to_html()
}

fn verdict(report: &mut Report, result: &BenchResult, changes: Option<&Regression>) {
    let of = |wanted: fn(&Verdict) -> bool| result.parity.iter().any(|row| wanted(&row.verdict));
    let unchecked = of(|verdict| matches!(verdict, Verdict::NotChecked { .. }));
    if result.has_failed_parity() {
        report.verdict(Status::Bad, "PARITY FAILED: what is timed here does not all compute the same");
    } else if changes.is_some_and(Regression::is_slower) {
        report.verdict(Status::Bad, "slower than the older result, as the comparison shows");
    } else if !result.receipt.warnings.is_empty() {
        let count = result.receipt.warnings.len();
        let parity = if unchecked { "parity was not checked everywhere" } else { "the backends agree" };
        report.verdict(Status::Warning, format!("{parity}; {count} circumstances weaken the times, see the receipt"));
    } else if unchecked {
        report.verdict(Status::Neutral, "parity was not checked everywhere");
    } else {
        report.verdict(Status::Good, "the backends agree, and nothing is known that weakens the times");
    }
}

/// The rows of a part.
fn times(section: &mut Section, result: &BenchResult, part: &Place) {
    let names = Names::of(rows(result, part)).without_place();
    let mut columns: Vec<Column> = names.header().into_iter().map(Column::text).collect();
    columns.extend(["n", "p50", "relative to the first", "min", "p90", "p99", "p99.9", "tokens/s"].map(Column::number));
    let mut table = Table::new(columns);
    let optional = |time: Option<u64>| Cell::from(time.map_or_else(|| "–".to_owned(), duration));
    for (clock, row) in rows(result, part).flat_map(Row::by_clock) {
        let mut cells: Vec<Cell> = names.cells(&row, clock).into_iter().map(Cell::from).collect();
        let times = &row.times;
        let beside = row.ratio.as_ref().map_or_else(|| "–".to_owned(), ratio);
        cells.extend([times.samples.into(), duration(times.p50).into(), beside.into(), duration(times.min).into()]);
        cells.extend([times.p90, times.p99, times.p99_9].map(optional));
        cells.push(row.tokens_per_second.into());
        table.push(cells);
    }
    section.table(table);
}

/// A part, and the layer where operators are timed one by one.
type Place = (String, Option<String>);

fn parts(result: &BenchResult) -> Vec<Place> {
    distinct(result.rows.iter().map(|row| (row.subject.part.clone(), row.subject.module.clone())))
}

fn name((part, module): &Place) -> String {
    module.as_ref().map_or_else(|| part.clone(), |module| format!("{part}, {module}"))
}

fn rows<'a>(result: &'a BenchResult, (part, module): &'a Place) -> impl Iterator<Item = &'a Row> + Clone {
    result.rows.iter().filter(move |row| row.subject.part == *part && row.subject.module == *module)
}

fn who(row: &Row, several_models: bool) -> String {
    if several_models {
        format!("{} on {}", row.subject.model, row.subject.backend)
    } else {
        row.subject.backend.clone()
    }
}

fn has_several_models(result: &BenchResult) -> bool {
    result.rows.iter().any(|row| row.subject.model != result.rows[0].subject.model)
}

/// The unit that the pictures of a part share, that of its slowest row: its name, and its nanoseconds.
fn unit(result: &BenchResult, part: &Place) -> (&'static str, f64) {
    match rows(result, part).map(|row| row.turn_median.value).fold(0.0, f64::max) {
        0.0..999_950.0 => ("µs", 1e3),
        0.0..999_995_000.0 => ("ms", 1e6),
        _ => ("s", 1e9),
    }
}

/// Latency against every axis that has several sizes; bars where none has.
#[allow(clippy::cast_precision_loss)]
fn curves(report: &mut Report, result: &BenchResult, part: &Place) {
    let several = has_several_models(result);
    let (unit, of_unit) = unit(result, part);
    let section = report.section(name(part));
    times(section, result, part);
    let mut drawn = false;
    for axis in [SEQUENCE, SOURCE, PAST, BATCH] {
        let sizes: BTreeSet<usize> = rows(result, part).filter_map(|row| row.point.get(axis).copied()).collect();
        let follows = axis == SOURCE && rows(result, part).any(|row| row.point.contains_key(SEQUENCE));
        if sizes.len() < 2 || follows {
            continue;
        }
        drawn = true;
        let rest = |row: &Row| {
            let mut rest = row.point.clone();
            rest.remove(axis);
            if row.point.contains_key(SEQUENCE) {
                rest.remove(SOURCE);
            }
            rest
        };
        let mut series: Vec<(String, Point, Vec<&Row>)> = Vec::new();
        for row in rows(result, part) {
            let (who, rest) = (who(row, several), rest(row));
            match series.iter_mut().find(|(name, known, _)| *name == who && *known == rest) {
                Some((_, _, rows)) => rows.push(row),
                None => series.push((who, rest, vec![row])),
            }
        }
        let differing = series.iter().any(|(_, rest, _)| *rest != series[0].1);
        let x = if axis == PAST { Axis::linear("cached tokens", "") } else { Axis::log(axis, "") };
        let y = Axis::log("time of a call", unit);
        let mut plot =
            Lines::new(format!("Median time against {axis}, with its 95 % interval"), x.ticks_at_values(), y);
        for (who, rest, mut rows) in series {
            rows.sort_by_key(|row| row.point.get(axis).copied());
            let label = if differing { format!("{who}, {}", point_text(&rest)) } else { who };
            let x = |row: &&Row| row.point.get(axis).copied().unwrap_or_default() as f64;
            let points: Vec<_> = rows.iter().map(|row| (x(row), row.turn_median.value / of_unit)).collect();
            let band = rows.iter().map(|row| {
                let [low, high] = row.turn_median.interval.unwrap_or([row.turn_median.value; 2]);
                (low / of_unit, high / of_unit)
            });
            plot = plot.series(Series::new(label).points(points).band(band));
        }
        section.plot(plot);
    }
    if !drawn {
        let mut bars = Bars::new("Median time", Axis::linear("time of a call", unit).from_zero());
        for row in rows(result, part) {
            bars = bars.bar(who(row, several), row.turn_median.value / of_unit);
        }
        section.plot(bars);
    }
}

/// The spread of all calls at the largest points.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
fn distributions(report: &mut Report, result: &BenchResult, part: &Place) {
    let several = has_several_models(result);
    let (unit, of_unit) = unit(result, part);
    let mut points = distinct(rows(result, part).map(|row| &row.point));
    points.sort_by_key(|point| std::cmp::Reverse(point.values().map(|size| size.max(&1)).product::<usize>()));
    points.truncate(if part.1.is_some() { 1 } else { DISTRIBUTIONS });
    let place = |point: &Point| rows(result, part).position(|row| row.point == *point);
    points.sort_by_key(|point| place(point));
    let section = report.section(format!("{}: every call", name(part)));
    section.paragraph(format!("Times to three digits; of many calls every n-th, so that there are at most {DRAWN}."));
    for point in points {
        let title = format!("Share of calls that took no longer, at {}", point_text(point));
        let mut plot = Distribution::cumulative(title, Axis::log("time of a call", unit));
        for row in rows(result, part).filter(|row| row.point == *point) {
            let every = row.times.samples.div_ceil(DRAWN).max(1);
            let mut seen = 0;
            let samples = row.times.histogram.iter().flat_map(|(time, count)| {
                let before = seen / every;
                seen += count;
                std::iter::repeat_n(*time as f64 / of_unit, (seen / every - before) as usize)
            });
            let samples: Vec<f64> = samples.collect();
            plot = plot.series(who(row, several), samples);
        }
        section.plot(plot);
    }
}

/// Time by layer, its MoA modules and the rest of it set end to end.
fn operators(report: &mut Report, result: &BenchResult) {
    let all = &result.operators;
    if all.is_empty() {
        return;
    }
    let section = report.section("Where the time goes");
    section.paragraph(format!(
        "From a pass of its own in which the runtime recorded every node, which is slower{}; of each node the median \
         over the calls. Nodes of bodies count for the layer that they were put into.",
        in_pass(result),
    ));
    if all.iter().any(|times| !times.nodes.iter().any(|node| node.routed)) {
        section.paragraph("A graph without MoA operators does not tell which nodes are MoA: layers are shown whole.");
    }
    for times in all {
        let title = format!("{}, a call of {}", place(&times.subject, None), point_text(&times.point));
        section.plot(by_layer(title, &times.nodes));
    }
}

fn by_layer(title: String, nodes: &[NodeTime]) -> Bars {
    let tells = nodes.iter().any(|node| node.routed);
    let title = if tells { title } else { format!("{title}, whole layers") };
    let mut bars = Bars::new(title, Axis::linear("time of the nodes", "µs").from_zero());
    if tells {
        bars = bars.parts(["MoA", "the rest of the layer"]);
    }
    for layer in layers(nodes) {
        let sum = |routed: bool| -> f64 {
            let own = nodes.iter().filter(|node| node.layer == layer && node.routed == routed);
            own.map(|node| node.time / 1e3).sum()
        };
        let label = if layer.is_empty() { "no layer" } else { layer };
        bars = if tells { bars.stacked(label, [sum(true), sum(false)]) } else { bars.bar(label, sum(false)) };
    }
    bars
}

#[allow(clippy::cast_precision_loss)]
fn experts(report: &mut Report, loads: &[ExpertLoad]) {
    let fields = distinct(loads.iter().map(|load| (load.model.as_str(), load.part.as_str(), &load.point)));
    if fields.is_empty() {
        return;
    }
    let section = report.section("Expert load");
    section.paragraph("Share of the tokens that each expert really got, read back from the router's own choice.");
    for (model, part, point) in fields {
        let own: Vec<_> = loads
            .iter()
            .filter(|load| (load.model.as_str(), load.part.as_str(), &load.point) == (model, part, point))
            .collect();
        let experts = own.iter().map(|load| load.counts.len()).max().unwrap_or(0);
        let title = format!("{model}, {part}, {}", point_text(point));
        let mut map = HeatMap::new(title, Axis::linear("share of the tokens", "%"));
        map = map.columns("expert", (0..experts).map(|expert| expert.to_string()));
        let labels = labels(own.iter().map(|load| load.module.as_str()));
        for (label, load) in labels.iter().zip(own) {
            let share = |count: &u64| Some(100.0 * *count as f64 / load.tokens.max(1) as f64);
            map = map.row(format!("{label} ({:.2})", load.imbalance()), load.counts.iter().map(share));
        }
        section.plot(map);
    }
    section.paragraph("In parentheses: the most used expert's tokens beside the mean.");
}

fn parity(report: &mut Report, result: &BenchResult) {
    let section = report.section("Parity");
    let columns = ["who", "verdict", "worst |diff|", "tolerance"];
    let mut table = Table::new([
        Column::text(columns[0]),
        Column::text(columns[1]),
        Column::number(columns[2]),
        Column::number(columns[3]),
    ]);
    for row in &result.parity {
        let (status, text, numbers) = match &row.verdict {
            Verdict::Verified => (Status::Good, "verified against the checkpoint".to_owned(), None),
            Verdict::Agrees { with, agreement } => (Status::Good, format!("agrees with {with}"), Some(agreement)),
            Verdict::Yardstick => (Status::Neutral, "what others are compared with".to_owned(), None),
            Verdict::NotChecked { why } => (Status::Neutral, format!("not checked: {why}"), None),
            Verdict::Failed { fault } => (Status::Bad, format!("FAILED: {fault}"), None),
        };
        let difference = numbers.map(|agreement| agreement.max_abs.unwrap_or(f64::INFINITY));
        let tolerance = numbers.map(|agreement| agreement.tolerance);
        let who = place(&row.subject, row.point.as_ref());
        table.push([who.into(), Cell::Status(status, text), difference.into(), tolerance.into()]);
    }
    section.table(table);
    for skipped in &result.skipped {
        section.paragraph(format!("Skipped: {}: {}", place(&skipped.subject, None), skipped.why));
    }
}

fn sessions(report: &mut Report, result: &BenchResult) {
    let section = report.section("Before the steady state");
    let number = Column::number;
    let mut table =
        Table::new([Column::text("who"), number("load"), number("first call"), number("memory added / MB")]);
    for session in &result.sessions {
        let first = result.rows.iter().find(|row| row.subject == session.subject);
        let first = first.map_or_else(|| "–".to_owned(), |row| duration(row.first_call));
        #[allow(clippy::cast_precision_loss)]
        let memory = session.peak_memory.map(|bytes| bytes as f64 / 1e6);
        table.push([place(&session.subject, None).into(), duration(session.load).into(), first.into(), memory.into()]);
    }
    section.table(table);
    section.paragraph(
        "Memory: what loading and a first call at every point added to the resident memory of the process at its peak. \
         What a runtime does once in a process is in none of these figures: before them, every runtime but TensorRT \
         loaded and called one graph. Between copies of one model the memory differs by some hundred kB.",
    );
}

/// The receipt, as a list.
fn facts(report: &mut Report, receipt: &Receipt) {
    let machine = &receipt.machine;
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".into());
    let flag = |value: Option<bool>| value.map_or("unknown", |value| if value { "yes" } else { "no" }).to_owned();
    let load = |load: Option<[f64; 3]>| load.map_or_else(|| "unknown".into(), |[a, b, c]| format!("{a}, {b}, {c}"));
    let cpus = machine.cpus.map_or_else(|| "unknown".into(), |count| count.to_string());
    let governors = if machine.governors.is_empty() { "unknown".into() } else { machine.governors.join(", ") };
    let seconds = receipt.options.seconds.map_or_else(|| "any number of".into(), |seconds| seconds.to_string());
    let samples = receipt.options.samples.map_or_else(|| "any number of".into(), |samples| samples.to_string());
    let mut facts = vec![
        ("Processor".to_owned(), text(&machine.cpu)),
        ("Processors".into(), format!("{} usable of {}, list {}", machine.usable_cpus, cpus, text(&machine.affinity))),
        (
            "Threads".into(),
            format!("{} of ONNX Runtime, {} of tract", receipt.threads.onnx_runtime, receipt.threads.tract),
        ),
        ("Frequency governor".into(), governors),
        ("Clock".into(), machine.mhz.map_or_else(|| "unknown".into(), clock)),
        ("Clocks locked".into(), flag(machine.clocks_locked)),
        ("Boost".into(), flag(machine.boost)),
        (
            "Throttled while timing".into(),
            receipt.throttled.map_or_else(|| "not counted here".into(), |count| format!("{count} times")),
        ),
        ("Virtual machine".into(), flag(machine.virtual_machine)),
        (
            "Graphics processors".into(),
            machine.gpus.as_ref().map_or_else(|| "none seen".into(), |gpus| gpus.join("; ")),
        ),
        ("System".into(), format!("{}, {}", text(&machine.system), text(&machine.kernel))),
        ("Load average before".into(), load(receipt.before.load)),
        ("Load average after".into(), load(receipt.after.load)),
        ("A point ends after".into(), format!("{samples} samples or {seconds} seconds, what comes first")),
        ("Seed".into(), receipt.options.seed.to_string()),
        ("Time".into(), utc(receipt.unix_time)),
    ];
    facts.extend(receipt.options.instructions.iter().map(|level| ("Instructions, at most".to_owned(), level.clone())));
    facts.extend(receipt.options.packing.iter().map(|way| ("Packing of bf16".to_owned(), way.clone())));
    facts.extend(receipt.runtimes.iter().map(fact));
    for file in &receipt.files {
        facts.push((format!("{}: {}", file.model, file.file), file_fact(file)));
    }
    if receipt.options.in_place {
        facts.push(("Caches".into(), "updated in place where graph and backend can".into()));
    }
    if receipt.options.allow_failed_parity {
        facts.push(("Parity".into(), "was allowed to fail".into()));
    }
    facts.extend(receipt.warnings.iter().map(|warning| ("Warning".to_owned(), warning.clone())));
    report.section("Receipt").facts(facts);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        latency::{DeviceTimes, Subject, sample},
        provenance::ModelFile,
    };

    #[test]
    fn pictures_of_a_part_have_the_unit_of_its_slowest_row() {
        let mut result = sample();
        let first = result.rows[0].clone();
        for (slowest, expected) in [(999_949.0, "µs"), (1_000_000.0, "ms"), (2e9, "s")] {
            let mut slow = first.clone();
            slow.turn_median.value = slowest;
            result.rows = vec![first.clone(), slow];
            assert_eq!(unit(&result, &parts(&result)[0]).0, expected);
            let page = html(&result, Ok(None));
            assert!(page.contains(&format!("time of a call ({expected})")), "{slowest}");
        }
    }

    #[test]
    fn models_stand_in_the_order_in_which_they_were_given() {
        let mut result = sample();
        let file = result.receipt.files[0].clone();
        result.receipt.files = ["b", "a", "b"].map(|model| ModelFile { model: model.into(), ..file.clone() }).into();
        result.receipt.options.in_place = true;
        let row = Row { in_place: true, device: None, ..result.rows[0].clone() };
        let subject = |model: &str| Subject { model: model.into(), ..row.subject.clone() };
        result.rows = ["b", "a"].map(|model| Row { subject: subject(model), ..row.clone() }).into();
        let [first, second] = ["b", "a"].map(|model| place(&subject(model), None));
        let page = html(&result, Ok(None));
        assert!(page.contains("<title>b, a – Latency</title>"), "{page}");
        assert!(page.contains(&format!("one buffer): {first}; {second}. All")), "{page}");
    }

    #[test]
    fn device_rows_are_explained_where_there_are_some() {
        let mut result = sample();
        for row in &mut result.rows {
            row.device = None;
        }
        assert!(!html(&result, Ok(None)).contains("CUDA events"));
        let times = result.rows[0].times.clone();
        result.rows[0].device = Some(DeviceTimes { times, ratio: None, turn_medians: Vec::new() });
        assert!(html(&result, Ok(None)).contains("Rows with CUDA events are"));
    }

    #[test]
    fn loads_are_labelled_as_profiles_are() {
        let mut result = sample();
        let load = ExpertLoad {
            model: "m.onnx".into(),
            part: "model".into(),
            module: String::new(),
            point: Point::new(),
            tokens: 2,
            counts: vec![1, 1],
        };
        let modules = ["model.layers.0.self_attention.experts", "model.layers.0.mlp"];
        result.experts = modules.map(|module| ExpertLoad { module: module.into(), ..load.clone() }).into();
        let page = html(&result, Ok(None));
        for label in [">layers.0.self_attention.experts (1.00)<", ">layers.0.mlp (1.00)<"] {
            assert!(page.contains(label), "{page}");
        }
    }

    #[test]
    fn points_are_drawn_in_the_order_of_the_table() {
        let mut result = sample();
        let first = result.rows[0].clone();
        result.rows =
            [1, 4, 16].map(|size| Row { point: [(SEQUENCE.to_owned(), size)].into(), ..first.clone() }).into();
        let page = html(&result, Ok(None));
        let places = [1, 4, 16].map(|size| page.find(&format!("no longer, at sequence {size}<")).unwrap());
        assert!(places.is_sorted(), "{places:?}");
    }
}
