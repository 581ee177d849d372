//! Times as comma-separated values, one row a contestant and point, and one more where its device tells times too.

use super::text::with_digits;
use crate::{
    file_names::{MODEL_ENDINGS, Part, data_file, graph_file},
    files::has_ending,
    latency::{BATCH, BenchResult, Clock, PAST, Row, SEQUENCE, SOURCE, Verdict},
    provenance::ModelFile,
};

const HEADER: &str = "model,backend,part,module,clock,batch,sequence,past_sequence,source,samples,min_ns,mean_ns,p50_ns,\
p90_ns,p99_ns,p99_9_ns,max_ns,tokens_per_second,ratio,ratio_low,ratio_high,turns,turn_median_ns,turn_median_low_ns,\
turn_median_high_ns,first_call_ns,load_ns,added_memory_bytes,steady,in_place,parity,cpu,threads,load_average_before,\
load_average_after,routing,seed,program,unix_time,model_sha256,data_sha256";

/// All rows; what is not known is empty.
pub(super) fn csv(result: &BenchResult) -> String {
    let mut text = format!("{HEADER}\n");
    for row in &result.rows {
        for (clock, row) in row.by_clock() {
            let cells: Vec<String> = cells(result, &row, clock).iter().map(|cell| quoted(cell)).collect();
            text.push_str(&cells.join(","));
            text.push('\n');
        }
    }
    text
}

fn cells(result: &BenchResult, row: &Row, clock: Clock) -> Vec<String> {
    let Row { subject, times, .. } = row;
    let receipt = &result.receipt;
    let size = |axis: &str| row.point.get(axis).map(usize::to_string).unwrap_or_default();
    let mut cells = vec![subject.model.clone(), subject.backend.clone(), subject.part.clone()];
    cells.push(subject.module.clone().unwrap_or_default());
    cells.push(if clock == Clock::Host { "host" } else { "device" }.into());
    cells.extend([BATCH, SEQUENCE, PAST, SOURCE].map(size));
    cells.extend([times.samples.to_string(), times.min.to_string(), format!("{:.1}", times.mean)]);
    cells.push(times.p50.to_string());
    cells.extend([times.p90, times.p99, times.p99_9].map(optional));
    cells.extend([times.max.to_string(), with_digits(row.tokens_per_second, 3, 1)]);
    let interval = row.ratio.and_then(|ratio| ratio.interval);
    let ratio = [row.ratio.map(|ratio| ratio.value), interval.map(|[low, _]| low), interval.map(|[_, high]| high)];
    cells.extend(ratio.map(|value| value.map(|value| with_digits(value, 4, 6)).unwrap_or_default()));
    cells.extend(of_the_host(result, row).map(|cell| if clock == Clock::Host { cell } else { String::new() }));
    cells.extend([row.steady.to_string(), row.in_place.to_string()]);
    cells.extend([result.parity_of(row).map(Verdict::name).unwrap_or_default().into()]);
    cells.push(receipt.machine.cpu.clone().unwrap_or_default());
    cells.push(receipt.threads.onnx_runtime.to_string());
    let load = |load: Option<[f64; 3]>| load.map(|[one, ..]| one.to_string()).unwrap_or_default();
    cells.extend([load(receipt.before.load), load(receipt.after.load), receipt.options.routing.clone()]);
    cells.extend([receipt.options.seed.to_string(), receipt.program.clone(), receipt.unix_time.to_string()]);
    cells.extend(hashes(result, row));
    cells
}

/// Turns, their median with its interval, the first call, and what the session took.
fn of_the_host(result: &BenchResult, row: &Row) -> [String; 7] {
    let [low, high] = [0, 1].map(|end| row.turn_median.interval.map(|interval| interval[end]));
    let [median, low, high] =
        [Some(row.turn_median.value), low, high].map(|time| time.map(|time| format!("{time:.0}")).unwrap_or_default());
    let session = result.sessions.iter().find(|session| session.subject == row.subject);
    let load = optional(session.map(|session| session.load));
    let memory = optional(session.and_then(|session| session.peak_memory));
    [row.turns.to_string(), median, low, high, row.first_call.to_string(), load, memory]
}

/// SHA-256 of the graph that was timed, and of its weights where they lie beside it.
fn hashes(result: &BenchResult, row: &Row) -> [String; 2] {
    let own = || result.receipt.files.iter().filter(|file| file.model == row.subject.model);
    let mut graphs = own().filter(|file| has_ending(&file.file, MODEL_ENDINGS));
    let name = Part::parse(&row.subject.part).map(graph_file);
    let graph = graphs.clone().find(|file| Some(&file.file) == name.as_ref()).or_else(|| graphs.next());
    let data = graph.map(|graph| data_file(graph.file.as_ref()));
    let data = data.and_then(|data| own().find(|file| data.as_os_str() == file.file.as_str()));
    [graph, data].map(|file: Option<&ModelFile>| file.map(|file| file.sha256.clone()).unwrap_or_default())
}

fn optional(value: Option<u64>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

/// As RFC 4180 says.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::latency::{ParityRow, sample};

    #[test]
    fn cells_with_commas_and_quotes_are_quoted() {
        assert_eq!(quoted("a"), "a");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }

    /// Cells by the names of their columns.
    fn by_name(line: &str) -> BTreeMap<&'static str, &str> {
        let (names, cells): (Vec<_>, Vec<_>) = (HEADER.split(',').collect(), line.split(',').collect());
        assert_eq!(names.len(), cells.len(), "{line}");
        names.into_iter().zip(cells).collect()
    }

    #[test]
    fn a_model_whose_name_ends_in_capitals_has_its_hash() {
        let mut result = sample();
        result.receipt.files.iter_mut().for_each(|file| file.file = file.file.to_uppercase());
        let text = csv(&result);
        assert_eq!(by_name(text.lines().nth(1).unwrap())["model_sha256"], "e");
    }

    #[test]
    fn every_cell_stands_under_its_name() {
        let mut result = sample();
        let [failed, verified] = [Verdict::Failed { fault: "NaN".into() }, Verdict::Verified];
        let subject = &result.rows[0].subject;
        result.parity =
            [failed, verified].map(|verdict| ParityRow { subject: subject.clone(), point: None, verdict }).into();
        let text = csv(&result);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (4, HEADER), "two rows, and one of a device");
        let expected = [
            [("model", "m.onnx"), ("backend", "ort"), ("part", "decoder_model"), ("module", "")],
            [("batch", "2"), ("sequence", "3"), ("past_sequence", "5"), ("source", "7")],
            [("samples", "1000"), ("min_ns", "1001"), ("mean_ns", "1000.2"), ("p50_ns", "1002")],
            [("p90_ns", "1003"), ("p99_ns", "1004"), ("p99_9_ns", ""), ("max_ns", "1006")],
            [("tokens_per_second", "1000.5"), ("ratio", ""), ("ratio_low", ""), ("ratio_high", "")],
            [("first_call_ns", "1007"), ("load_ns", "3000"), ("added_memory_bytes", "3001"), ("steady", "true")],
            [("turns", "20"), ("turn_median_ns", "1000"), ("turn_median_low_ns", "1000"), ("clock", "host")],
            [("parity", "failed"), ("cpu", "a processor"), ("threads", "4"), ("load_average_before", "0.5")],
            [("turn_median_high_ns", "1000"), ("seed", "0"), ("data_sha256", "x"), ("clock", "host")],
            [("load_average_after", "1.5"), ("routing", "data"), ("model_sha256", "d"), ("backend", "ort")],
        ];
        let first = by_name(lines[1]);
        for (name, cell) in expected.into_iter().flatten() {
            assert_eq!(first[name], cell, "{name}");
        }
        let second = by_name(lines[2]);
        for (name, cell) in [
            ("backend", "tensorrt"),
            ("module", "layers.0"),
            ("samples", "2000"),
            ("ratio", "2.250000"),
            ("ratio_low", "1.750000"),
            ("ratio_high", "2.750000"),
            ("load_ns", "4000"),
            ("steady", "false"),
        ] {
            assert_eq!(second[name], cell, "{name}");
        }
        let device = by_name(lines[3]);
        assert_eq!((device["backend"], device["clock"], device["samples"]), ("tensorrt", "device", "1500"));
        assert_eq!((device["min_ns"], device["turn_median_ns"]), ("1501", ""));
        assert_eq!((device["ratio"], device["load_ns"]), ("", ""), "the device's own times have neither");
    }
}
