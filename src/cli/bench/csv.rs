//! Times as comma-separated values, one row a contestant and point, and one more where its device tells times too.

use super::text::with_devices;
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
    cells.extend([times.max.to_string(), format!("{:.1}", row.tokens_per_second)]);
    let interval = row.ratio.and_then(|ratio| ratio.interval);
    let ratio = [row.ratio.map(|ratio| ratio.value), interval.map(|[low, _]| low), interval.map(|[_, high]| high)];
    cells.extend(ratio.map(|value| value.map(|value| format!("{value:.6}")).unwrap_or_default()));
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
    use super::*;

    #[test]
    fn cells_with_commas_and_quotes_are_quoted() {
        assert_eq!(quoted("a"), "a");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
