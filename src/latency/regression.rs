//! A result beside an older one.

use super::{
    contest::{place, place_of_job},
    receipt::Receipt,
    result::{BenchResult, FORMAT, Row},
    shapes::Sizes,
    statistics::Estimate,
    subjects::Job,
};

/// One row beside its older self.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Row of the new result.
    pub row: usize,
    /// Median of the turns then, with its interval.
    pub before: Estimate,
    /// And now.
    pub after: Estimate,
    /// Verdict.
    pub outcome: Outcome,
}

/// What the intervals say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The new interval lies above the old one by more than the threshold.
    Slower,
    /// The new interval lies below the old one by more than the threshold.
    Faster,
    /// Neither.
    Same,
}

/// The results were measured differently and say nothing about each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {before} then, {after} now")]
pub struct Incomparable {
    /// What differs.
    pub what: String,
    /// In the old result.
    pub before: String,
    /// In the new result.
    pub after: String,
}

/// Compares every row of `new` with the same one of `old`. A row is slower where even the lower end of its interval
/// is above the upper end of the old one times `1 + threshold`.
///
/// # Errors
///
/// Where processor, threads, routing or inputs differ, a row is new, or there were too few turns for an interval.
pub fn compare(new: &BenchResult, old: &BenchResult, threshold: f64) -> Result<Vec<Change>, Incomparable> {
    same_circumstances((new.format, &new.receipt), old)?;
    new.rows.iter().enumerate().map(|(index, row)| change(index, row, old, threshold)).collect()
}

/// Makes sure, before anything is timed, that [`compare`] will find `points` in `old`.
///
/// # Errors
///
/// Where processor, threads, routing or inputs differ, or a point is new.
pub(super) fn can_be_compared<'a>(
    receipt: &Receipt,
    mut points: impl Iterator<Item = (&'a Job, &'a Sizes)>,
    old: &BenchResult,
) -> Result<(), Incomparable> {
    same_circumstances((FORMAT, receipt), old)?;
    let is_known = |(job, point): &(&Job, &Sizes)| {
        let subject = |row: &Row| row.subject.part == job.part && row.subject.module == job.module;
        old.rows.iter().any(|row| subject(row) && row.point == **point)
    };
    let (before, after) = ("not measured".to_owned(), "asked for".to_owned());
    let new = points.find(|point| !is_known(point));
    new.map_or(Ok(()), |(job, point)| Err(Incomparable { what: place_of_job(job, point), before, after }))
}

fn same_circumstances(new: (u32, &Receipt), old: &BenchResult) -> Result<(), Incomparable> {
    let facts = |(format, receipt): (u32, &Receipt)| {
        let threads = receipt.threads;
        [
            ("format", format.to_string()),
            ("processor", receipt.machine.cpu.clone().unwrap_or_else(|| "unknown".into())),
            ("usable processors", receipt.machine.usable_cpus.to_string()),
            ("threads", format!("{} of ONNX Runtime, {} of tract", threads.onnx_runtime, threads.tract)),
            ("routing", receipt.options.routing.clone()),
            ("inputs", receipt.options.inputs.clone().unwrap_or_else(|| "random".into())),
            ("seed", receipt.options.seed.to_string()),
        ]
    };
    let pairs = facts((old.format, &old.receipt)).into_iter().zip(facts(new));
    match pairs.into_iter().find(|((_, before), (_, after))| before != after) {
        Some(((what, before), (_, after))) => Err(Incomparable { what: what.to_owned(), before, after }),
        None if old.format == FORMAT => Ok(()),
        None => Err(Incomparable { what: "format".into(), before: old.format.to_string(), after: FORMAT.to_string() }),
    }
}

fn change(index: usize, row: &Row, old: &BenchResult, threshold: f64) -> Result<Change, Incomparable> {
    let what = || place(&row.subject, Some(&row.point));
    let differ = |before: &str, after: &str| Incomparable { what: what(), before: before.into(), after: after.into() };
    let before = old.rows.iter().find(|old| old.subject == row.subject && old.point == row.point);
    let before = before.ok_or_else(|| differ("not measured", "measured"))?.turn_median;
    let after = row.turn_median;
    let few = "too few turns for an interval";
    let (old_interval, new_interval) = match (before.interval, after.interval) {
        (Some(before), Some(after)) => (before, after),
        (None, _) => return Err(differ(few, "measured")),
        (_, None) => return Err(differ("measured", few)),
    };
    let outcome = outcome(old_interval, new_interval, threshold);
    Ok(Change { row: index, before, after, outcome })
}

/// What a median became, by its intervals before and now: another where even the nearest ends are `threshold` apart.
fn outcome([old_low, old_high]: [f64; 2], [new_low, new_high]: [f64; 2], threshold: f64) -> Outcome {
    if new_low > old_high * (1.0 + threshold) {
        Outcome::Slower
    } else if new_high * (1.0 + threshold) < old_low {
        Outcome::Faster
    } else {
        Outcome::Same
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::sample;

    #[test]
    fn the_nearest_ends_of_intervals_decide() {
        for (old, new, threshold, expected) in [
            ([100.0, 110.0], [112.0, 120.0], 0.01, Outcome::Slower),
            ([100.0, 110.0], [112.0, 120.0], 0.05, Outcome::Same),
            ([100.0, 110.0], [105.0, 300.0], 0.01, Outcome::Same),
            ([112.0, 120.0], [100.0, 110.0], 0.01, Outcome::Faster),
            ([112.0, 120.0], [100.0, 110.0], 0.05, Outcome::Same),
            ([112.0, 120.0], [10.0, 113.0], 0.0, Outcome::Same),
        ] {
            assert_eq!(outcome(old, new, threshold), expected, "{old:?} {new:?} {threshold}");
        }
    }

    #[test]
    fn rows_are_compared_with_themselves_in_their_own_units() {
        let old = sample();
        let mut new = old.clone();
        new.rows.reverse();
        for row in &mut new.rows {
            row.turn_median = Estimate { value: 1_500.0, interval: Some([1_450.0, 1_550.0]) };
        }
        let outcomes = |threshold| -> Vec<_> {
            let changes = compare(&new, &old, threshold).unwrap();
            changes.iter().map(|change| (change.row, change.before.value, change.after.value, change.outcome)).collect()
        };
        let slower = (1, 1_000.0, 1_500.0, Outcome::Slower);
        assert_eq!(outcomes(0.25), [(0, 2_000.0, 1_500.0, Outcome::Faster), slower]);
        assert_eq!(outcomes(0.3), [(0, 2_000.0, 1_500.0, Outcome::Same), slower]);
        let mut other = old.clone();
        other.rows[0].point.insert("batch".into(), 3);
        let what = compare(&other, &old, 0.0).unwrap_err().to_string();
        assert!(
            what.starts_with("m.onnx on ort, decoder_model, batch 3, ") && what.contains("not measured then"),
            "{what}"
        );
        for (changed, text) in [(&mut new, "measured then, too few"), (&mut old.clone(), "measured now")] {
            changed.rows[0].turn_median.interval = None;
            let (new, old) = if text.ends_with("now") { (&old, &*changed) } else { (&*changed, &old) };
            assert!(compare(new, old, 0.0).unwrap_err().to_string().contains(text));
        }
    }

    type Edit = fn(&mut BenchResult);

    #[test]
    fn what_was_measured_differently_is_not_compared() {
        let changes: [(&str, Edit); 8] = [
            ("format: 1 then, 2 now", |new| new.format = 2),
            ("processor: a processor then, unknown now", |new| new.receipt.machine.cpu = None),
            ("usable processors: 6 then, 5 now", |new| new.receipt.machine.usable_cpus = 5),
            ("threads: 4 of ONNX Runtime, 1 of tract then, 3 of", |new| new.receipt.threads.onnx_runtime = 3),
            ("threads: 4 of ONNX Runtime, 1 of tract then, 4 of", |new| new.receipt.threads.tract = 2),
            ("routing: data then, single now", |new| new.receipt.options.routing = "single".into()),
            ("inputs: random then, a file now", |new| new.receipt.options.inputs = Some("a file".into())),
            ("seed: 0 then, 1 now", |new| new.receipt.options.seed = 1),
        ];
        let old = sample();
        for (text, change) in changes {
            let mut new = old.clone();
            change(&mut new);
            let found = compare(&new, &old, 0.0).unwrap_err().to_string();
            assert!(found.starts_with(text), "{found} instead of {text}");
        }
        let mut unknown = old.clone();
        unknown.format = 2;
        assert_eq!(compare(&unknown, &unknown, 0.0).unwrap_err().to_string(), "format: 2 then, 1 now");
        let mut elsewhere = old.clone();
        elsewhere.receipt.before = Default::default();
        elsewhere.receipt.unix_time += 1;
        assert!(compare(&elsewhere, &old, 0.0).is_ok());
    }
}
