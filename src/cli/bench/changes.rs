//! What became of an older result.

use super::text::duration;
use crate::{
    cli::table::table,
    latency::{BenchResult, Change, Estimate, Outcome, Regression, place},
    report::{Cell, Column, Report, Status, Table},
};

const HEADER: [&str; 5] = ["compared with the older result", "then", "now", "change", "verdict"];

/// Heading of a page.
pub(super) const HEADING: &str = "Beside the older result";

/// For a terminal.
pub(super) fn text(result: &BenchResult, changes: &Regression) -> String {
    let row = |change: &Change| cells(result, change).into_iter().chain([word(change.outcome).to_owned()]).collect();
    let rows: Vec<Vec<String>> = changes.rows.iter().map(row).collect();
    let others = others(changes).map(|text| text + "\n").unwrap_or_default();
    format!("\n{}{}\n{others}", table(&HEADER, &rows), verdict(changes))
}

/// For a page.
pub(super) fn section(report: &mut Report, result: &BenchResult, changes: &Regression) {
    let section = report.section(HEADING);
    let [who, then, now, change, outcome] = HEADER;
    let mut table = Table::new([
        Column::text(who),
        Column::number(then),
        Column::number(now),
        Column::number(change),
        Column::text(outcome),
    ]);
    for change in &changes.rows {
        let status = match change.outcome {
            Outcome::Slower => Status::Bad,
            Outcome::Faster => Status::Good,
            Outcome::Same => Status::Neutral,
        };
        let outcome = Cell::Status(status, word(change.outcome).to_owned());
        table.push(cells(result, change).into_iter().map(Cell::from).chain([outcome]));
    }
    section.table(table);
    section.paragraph(verdict(changes));
    if let Some(others) = others(changes) {
        section.paragraph(others);
    }
}

/// Who, then, now, and the change.
fn cells(result: &BenchResult, change: &Change) -> [String; 4] {
    let row = &result.rows[change.row];
    let percent = 100.0 * (change.after.value / change.before.value - 1.0);
    [
        place(&row.subject, Some(&row.point)),
        estimate(&change.before),
        estimate(&change.after),
        format!("{percent:+.1} %"),
    ]
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn estimate(estimate: &Estimate) -> String {
    let time = |value: f64| duration(value.round().max(0.0) as u64);
    let interval =
        estimate.interval.map_or_else(String::new, |[low, high]| format!(" [{}, {}]", time(low), time(high)));
    format!("{}{interval}", time(estimate.value))
}

const fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Slower => "SLOWER",
        Outcome::Faster => "faster",
        Outcome::Same => "same",
    }
}

fn verdict(changes: &Regression) -> String {
    let slower = changes.rows.iter().filter(|change| change.outcome == Outcome::Slower).count();
    let verdict = match slower {
        0 => "no row became slower".to_owned(),
        1 => "1 row became slower".to_owned(),
        _ => format!("{slower} rows became slower"),
    };
    let threshold = (1e8 * changes.threshold).round() / 1e6;
    format!("{verdict}, beyond both 95 % intervals and {threshold} %")
}

fn others(changes: &Regression) -> Option<String> {
    let files = changes.other_files.join(", ");
    (!files.is_empty()).then(|| format!("the older result is of other bytes of {files}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::{compare, sample};

    #[test]
    fn changes_are_told_in_per_cent() {
        let old = sample();
        let mut new = old.clone();
        new.rows[0].turn_median = Estimate { value: 1_500_000.0, interval: Some([1_400_000.0, 1_600_000.0]) };
        let changes = compare(&new, &old, 0.05).unwrap();
        let found = text(&new, &changes);
        for part in ["1.0 µs [1.0 µs, 1.0 µs]", "1.50 ms [1.40 ms, 1.60 ms]", "+149900.0 %", "SLOWER", "+0.0 %", "same"]
        {
            assert!(found.contains(part), "{part} is not in\n{found}");
        }
        assert!(found.ends_with("1 row became slower, beyond both 95 % intervals and 5 %\n"), "{found}");
    }
}
