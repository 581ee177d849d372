//! What an export wrote, for people and for programs.

use super::table::size;
use crate::export::{ExportOptions, ExportReport};

/// One line a file.
pub(super) fn wrote(report: &ExportReport) -> String {
    report.files.iter().map(|file| format!("wrote {}  {}\n", file.path.display(), size(file.bytes))).collect()
}

/// The same with what the files hold, and no verification yet.
pub(super) fn report_json(report: &ExportReport, options: &ExportOptions) -> serde_json::Value {
    let files: Vec<_> = report
        .files
        .iter()
        .map(|file| serde_json::json!({ "path": file.path.display().to_string(), "bytes": file.bytes }))
        .collect();
    serde_json::json!({
        "family": report.family,
        "form": options.graph.form.as_str(),
        "dtype": options.graph.precision.as_str(),
        "opset": report.opset,
        "source_sha256": report.source_sha256,
        "files": files,
        "verification": null,
    })
}
