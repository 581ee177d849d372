//! Times as comma-separated values, one row a contestant and point, and one more where its device tells times too.

use super::text::{with_devices, with_digits};
use crate::{
    file_names::graph_file,
    latency::{BATCH, BenchResult, PAST, Row, SEQUENCE, SOURCE},
};

const HEADER: &str = "model,backend,part,module,batch,sequence,past_sequence,source,samples,min_ns,mean_ns,p50_ns,p90_ns,\
p99_ns,p99_9_ns,max_ns,tokens_per_second,ratio,ratio_low,ratio_high,first_call_ns,load_ns,peak_memory_bytes,steady,\
parity_allowed_to_fail,cpu,threads,load_before,load_after,routing,model_sha256";

/// All rows; what is not known is empty.
pub(super) fn csv(result: &BenchResult) -> String {
    let mut text = format!("{HEADER}\n");
    for row in &with_devices(&result.rows) {
        let cells: Vec<String> = cells(result, row).iter().map(|cell| quoted(cell)).collect();
        text.push_str(&cells.join(","));
        text.push('\n');
    }
    text
}

fn cells(result: &BenchResult, row: &Row) -> Vec<String> {
    let Row { subject, times, .. } = row;
    let receipt = &result.receipt;
    let optional = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let size = |axis: &str| row.point.get(axis).map(usize::to_string).unwrap_or_default();
    let mut cells = vec![subject.model.clone(), subject.backend.clone(), subject.part.clone()];
    cells.push(subject.module.clone().unwrap_or_default());
    cells.extend([BATCH, SEQUENCE, PAST, SOURCE].map(size));
    cells.extend([times.samples.to_string(), times.min.to_string(), format!("{:.1}", times.mean)]);
    cells.push(times.p50.to_string());
    cells.extend([times.p90, times.p99, times.p99_9].map(optional));
    cells.extend([times.max.to_string(), with_digits(row.tokens_per_second, 3, 1)]);
    let interval = row.ratio.and_then(|ratio| ratio.interval);
    let ratio = [row.ratio.map(|ratio| ratio.value), interval.map(|[low, _]| low), interval.map(|[_, high]| high)];
    cells.extend(ratio.map(|value| value.map(|value| with_digits(value, 4, 6)).unwrap_or_default()));
    cells.push(row.first_call.to_string());
    let session = result.sessions.iter().find(|session| session.subject == *subject);
    cells.push(optional(session.map(|session| session.load)));
    cells.push(optional(session.and_then(|session| session.peak_memory)));
    cells.extend([row.steady.to_string(), receipt.options.allow_failed_parity.to_string()]);
    cells.push(receipt.machine.cpu.clone().unwrap_or_default());
    cells.push(receipt.threads.onnx_runtime.to_string());
    let load = |load: Option<[f64; 3]>| load.map(|[one, ..]| one.to_string()).unwrap_or_default();
    cells.extend([load(receipt.before.load), load(receipt.after.load), receipt.options.routing.clone()]);
    let own = receipt.files.iter().filter(|file| file.model == subject.model);
    let mut own = own.filter(|file| file.file.ends_with(".onnx"));
    let stem = graph_file(&subject.part);
    let first = own.clone().find(|file| file.file == stem).or_else(|| own.next());
    cells.push(first.map(|file| file.sha256.clone()).unwrap_or_default());
    cells
}

/// As RFC 4180 says.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::latency::sample;

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
    fn every_cell_stands_under_its_name() {
        let text = csv(&sample());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (4, HEADER), "two rows, and one of a device");
        let expected = [
            [("model", "m.onnx"), ("backend", "ort"), ("part", "decoder_model"), ("module", "")],
            [("batch", "2"), ("sequence", "3"), ("past_sequence", "5"), ("source", "7")],
            [("samples", "1000"), ("min_ns", "1001"), ("mean_ns", "1000.2"), ("p50_ns", "1002")],
            [("p90_ns", "1003"), ("p99_ns", "1004"), ("p99_9_ns", ""), ("max_ns", "1006")],
            [("tokens_per_second", "1000.5"), ("ratio", ""), ("ratio_low", ""), ("ratio_high", "")],
            [("first_call_ns", "1007"), ("load_ns", "3000"), ("peak_memory_bytes", "3001"), ("steady", "true")],
            [("parity_allowed_to_fail", "false"), ("cpu", "a processor"), ("threads", "4"), ("load_before", "0.5")],
            [("load_after", "1.5"), ("routing", "data"), ("model_sha256", "d"), ("backend", "ort")],
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
        let device = lines[3].replace("\"tensorrt, CUDA events\"", "events");
        let device = by_name(&device);
        assert_eq!((device["backend"], device["samples"], device["min_ns"]), ("events", "1500", "1501"));
        assert_eq!((device["ratio"], device["load_ns"]), ("", ""), "the device's own times have neither");
    }
}
