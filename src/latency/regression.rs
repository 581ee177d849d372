//! A result beside an older one.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{
    contest::{Contestant, place, place_of_job},
    receipt::Receipt,
    result::{BenchResult, Row, Subject},
    shapes::Point,
    statistics::Estimate,
    subjects::{Job, Model},
};
use crate::provenance::ModelFile;

/// What became of every row of an older result.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Regression {
    /// How much slower or faster a row may become, as a share of its time.
    pub threshold: f64,
    /// Files, by model and name, whose bytes no file of that model had then.
    pub other_files: Vec<String>,
    /// Row by row.
    pub rows: Vec<Change>,
}

/// One row beside its older self.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Row of the new result, from 0.
    pub row: usize,
    /// Median of the turns then, with its interval.
    #[serde(rename = "before_ns")]
    pub before: Estimate,
    /// And now.
    #[serde(rename = "after_ns")]
    pub after: Estimate,
    /// Verdict.
    pub outcome: Outcome,
}

/// What the intervals say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
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

impl Incomparable {
    fn new(what: String, before: &str, after: &str) -> Self {
        Self { what, before: before.into(), after: after.into() }
    }
}

impl Regression {
    /// Whether a row became slower.
    pub fn is_slower(&self) -> bool {
        self.rows.iter().any(|change| change.outcome == Outcome::Slower)
    }
}

/// Compares every row of `new` with the same one of `old`. A row is slower where even the lower end of its interval
/// is above the upper end of the old one times `1 + threshold`. A model stands for the one of its name, or for the only
/// one where each result has one.
///
/// # Errors
///
/// Where processor, threads, routing or inputs differ, a row is new, or there were too few turns for an interval.
pub fn compare(new: &BenchResult, old: &BenchResult, threshold: f64) -> Result<Regression, Incomparable> {
    same_circumstances(&new.receipt, &old.receipt)?;
    let older = Older::of(&new.receipt, old);
    let rows = new.rows.iter().enumerate().map(|(index, row)| older.change(index, row, threshold));
    Ok(Regression { threshold, other_files: older.other_files(&new.receipt), rows: rows.collect::<Result<_, _>>()? })
}

/// Makes sure, before anything is loaded, that [`compare`] will find the points of `jobs` in `old`.
///
/// # Errors
///
/// Where processor, threads, routing or inputs differ, or a point of a model is new.
pub(super) fn can_be_compared(
    receipt: &Receipt,
    models: &[Model],
    jobs: &[Job],
    old: &BenchResult,
) -> Result<(), Incomparable> {
    same_circumstances(receipt, &old.receipt)?;
    let older = Older::of(receipt, old);
    for job in jobs {
        for (member, point) in job.members.iter().flat_map(|member| job.points.iter().map(move |point| (member, point)))
        {
            let model = &models[member.model].label;
            if older.rows_at(model, (job.part.as_str(), job.module.as_deref()), point).next().is_none() {
                let what = format!("{model}, {}", place_of_job(job, point));
                return Err(Incomparable::new(what, "not measured", "asked for"));
            }
        }
    }
    Ok(())
}

/// Makes sure, before anything is timed, that [`compare`] will find each of `contestants` at `points` in `old`.
///
/// # Errors
///
/// Where one is new, or had too few turns.
pub(super) fn are_known(
    receipt: &Receipt,
    contestants: &[Contestant],
    points: &[Point],
    old: &BenchResult,
) -> Result<(), Incomparable> {
    let older = Older::of(receipt, old);
    let all = contestants.iter().flat_map(|contestant| points.iter().map(move |point| (&contestant.subject, point)));
    all.into_iter().try_for_each(|(subject, point)| match older.row(subject, point)?.turn_median.interval {
        Some(_) => Ok(()),
        None => Err(Incomparable::new(place(subject, Some(point)), FEW, "asked for")),
    })
}

/// Said of a row without an interval.
const FEW: &str = "too few turns for an interval";

/// An older result, and which of its models stands for the only one of the new result, where each has one.
struct Older<'a> {
    result: &'a BenchResult,
    renamed: Option<(&'a str, &'a str)>,
}

impl<'a> Older<'a> {
    fn of(new: &'a Receipt, old: &'a BenchResult) -> Self {
        let only = |receipt: &'a Receipt| {
            let models: BTreeSet<&str> = receipt.files.iter().map(|file| file.model.as_str()).collect();
            models.first().copied().filter(|_| models.len() == 1)
        };
        Self { result: old, renamed: only(new).zip(only(&old.receipt)) }
    }

    /// The name then of what is `model` now.
    fn name<'b>(&'b self, model: &'b str) -> &'b str {
        self.renamed.filter(|(now, _)| *now == model).map_or(model, |(_, then)| then)
    }

    /// Rows of what is `model` now, of whatever backend.
    fn rows_at<'b>(
        &'b self,
        model: &'b str,
        place: (&'b str, Option<&'b str>),
        point: &'b Point,
    ) -> impl Iterator<Item = &'b Row> {
        let then = self.name(model);
        self.result.rows.iter().filter(move |row| {
            let Subject { model, part, module, .. } = &row.subject;
            model == then && (part.as_str(), module.as_deref()) == place && row.point == *point
        })
    }

    fn row<'b>(&'b self, subject: &'b Subject, point: &'b Point) -> Result<&'b Row, Incomparable> {
        let Subject { model, backend, part, module } = subject;
        let found = self.rows_at(model, (part, module.as_deref()), point).find(|row| row.subject.backend == *backend);
        found.ok_or_else(|| Incomparable::new(place(subject, Some(point)), "not measured", "measured"))
    }

    fn change(&self, index: usize, row: &Row, threshold: f64) -> Result<Change, Incomparable> {
        let (before, after) = (self.row(&row.subject, &row.point)?.turn_median, row.turn_median);
        let differ = |before, after| Incomparable::new(place(&row.subject, Some(&row.point)), before, after);
        match (before.interval, after.interval) {
            (Some(old), Some(new)) => Ok(Change { row: index, before, after, outcome: outcome(old, new, threshold) }),
            (None, _) => Err(differ(FEW, "measured")),
            (_, None) => Err(differ("measured", FEW)),
        }
    }

    fn other_files(&self, new: &Receipt) -> Vec<String> {
        let is_same = |old: &ModelFile, new: &ModelFile| old.model == self.name(&new.model) && old.sha256 == new.sha256;
        let is_known = |file: &&ModelFile| self.result.receipt.files.iter().any(|old| is_same(old, file));
        let others = new.files.iter().filter(|file| !is_known(file));
        others
            .map(
                |file| {
                    if file.model == file.file { file.file.clone() } else { format!("{}/{}", file.model, file.file) }
                },
            )
            .collect()
    }
}

/// Said of a processor without a name, which may be any other.
const UNKNOWN: &str = "unknown";

fn same_circumstances(new: &Receipt, old: &Receipt) -> Result<(), Incomparable> {
    let facts = |receipt: &Receipt| {
        let threads = receipt.threads;
        [
            ("processor", receipt.machine.cpu.clone().unwrap_or_else(|| UNKNOWN.into())),
            ("usable processors", receipt.machine.usable_cpus.to_string()),
            ("threads", format!("{} of ONNX Runtime, {} of tract", threads.onnx_runtime, threads.tract)),
            ("routing", receipt.options.routing.clone()),
            ("inputs", receipt.options.inputs.clone().unwrap_or_else(|| "random".into())),
            ("caches in place", if receipt.options.in_place { "yes" } else { "no" }.into()),
            ("seed", receipt.options.seed.to_string()),
            ("instructions", receipt.options.instructions.clone().unwrap_or_else(|| "all".into())),
            ("packing of bf16", receipt.options.packing.clone().unwrap_or_else(|| "plain".into())),
        ]
    };
    let mut pairs = facts(old).into_iter().zip(facts(new));
    let difference =
        pairs.find(|((what, before), (_, after))| before != after || (*what == "processor" && before == UNKNOWN));
    difference.map_or(Ok(()), |((what, before), (_, after))| Err(Incomparable::new(what.to_owned(), &before, &after)))
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
            changes
                .rows
                .iter()
                .map(|change| (change.row, change.before.value, change.after.value, change.outcome))
                .collect()
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

    /// Models by their files: name of the model, name of the file, hash.
    fn with_models(files: &[[&str; 3]]) -> BenchResult {
        let mut result = sample();
        let file = |[model, file, sha256]: &[&str; 3]| ModelFile {
            model: (*model).into(),
            file: (*file).into(),
            bytes: 1,
            sha256: (*sha256).into(),
        };
        result.receipt.files = files.iter().map(file).collect();
        result.rows.truncate(1);
        result.rows[0].subject.model = files[0][0].into();
        result
    }

    #[test]
    fn the_only_model_stands_for_the_only_one_and_other_files_are_told() {
        let old = with_models(&[["before", "model.onnx", "a"], ["before", "model.onnx.data", "b"]]);
        let new = with_models(&[["after", "model.onnx", "a"], ["after", "model.onnx.data", "c"]]);
        assert_eq!(compare(&new, &old, 0.0).unwrap().other_files, ["after/model.onnx.data"]);
        let same = with_models(&[["after", "model.onnx", "a"], ["after", "model.onnx.data", "b"]]);
        assert_eq!(compare(&same, &old, 0.0).unwrap().other_files, [""; 0]);
        let file = with_models(&[["m.onnx", "m.onnx", "d"]]);
        assert_eq!(compare(&file, &old, 0.0).unwrap().other_files, ["m.onnx"]);
        let two = with_models(&[["after", "model.onnx", "a"], ["other", "model.onnx", "a"]]);
        let refusal = compare(&two, &old, 0.0).unwrap_err();
        assert!(refusal.what.starts_with("after on ort"), "{refusal}");
        assert!(compare(&old, &two, 0.0).is_err() && compare(&two, &two, 0.0).is_ok());
    }

    type Edit = fn(&mut BenchResult);

    #[test]
    fn what_was_measured_differently_is_not_compared() {
        let changes: [(&str, Edit); 9] = [
            ("processor: a processor then, unknown now", |new| new.receipt.machine.cpu = None),
            ("usable processors: 6 then, 5 now", |new| new.receipt.machine.usable_cpus = 5),
            ("threads: 4 of ONNX Runtime, 1 of tract then, 3 of", |new| new.receipt.threads.onnx_runtime = 3),
            ("threads: 4 of ONNX Runtime, 1 of tract then, 4 of", |new| new.receipt.threads.tract = 2),
            ("routing: data then, single now", |new| new.receipt.options.routing = "single".into()),
            ("inputs: random then, a file now", |new| new.receipt.options.inputs = Some("a file".into())),
            ("seed: 0 then, 1 now", |new| new.receipt.options.seed = 1),
            ("instructions: all then, avx2 now", |new| new.receipt.options.instructions = Some("avx2".into())),
            ("packing of bf16: plain then, compact now", |new| new.receipt.options.packing = Some("compact".into())),
        ];
        let old = sample();
        for (text, change) in changes {
            let mut new = old.clone();
            change(&mut new);
            let found = compare(&new, &old, 0.0).unwrap_err().to_string();
            assert!(found.starts_with(text), "{found} instead of {text}");
        }
        let mut unnamed = old.clone();
        unnamed.receipt.machine.cpu = None;
        let found = compare(&unnamed, &unnamed, 0.0).unwrap_err().to_string();
        assert_eq!(found, "processor: unknown then, unknown now");
        let mut elsewhere = old.clone();
        elsewhere.receipt.before = Default::default();
        elsewhere.receipt.unix_time += 1;
        assert!(compare(&elsewhere, &old, 0.0).is_ok());
    }
}
