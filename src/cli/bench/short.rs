//! Names of models that fit into tables and legends.

use super::distinct;
use crate::{
    latency::{BenchResult, Subject},
    report::shortened,
};

/// Most characters of a name.
const LIMIT: usize = 28;

/// A result whose models have short names everywhere but in its receipt.
pub(super) struct Short {
    pub(super) result: BenchResult,
    names: Vec<(String, String)>,
}

impl Short {
    pub(super) fn of(result: &BenchResult) -> Self {
        let models = distinct(result.sessions.iter().map(|session| session.subject.model.as_str()));
        let names = short_names(models.into_iter());
        let mut result = result.clone();
        let subjects = [
            result.rows.iter_mut().map(|row| &mut row.subject).collect::<Vec<_>>(),
            result.sessions.iter_mut().map(|row| &mut row.subject).collect(),
            result.parity.iter_mut().map(|row| &mut row.subject).collect(),
            result.skipped.iter_mut().map(|row| &mut row.subject).collect(),
            result.operators.iter_mut().map(|row| &mut row.subject).collect(),
        ];
        let subjects = subjects.into_iter().flatten().map(|Subject { model, .. }| model);
        for model in subjects.chain(result.experts.iter_mut().map(|load| &mut load.model)) {
            if let Some((short, _)) = names.iter().find(|(_, full)| full == model) {
                model.clone_from(short);
            }
        }
        Self { result, names }
    }

    /// Short names, and what they stand for.
    pub(super) fn names(&self) -> &[(String, String)] {
        &self.names
    }
}

/// Names that are too long, with short ones before them; what became equal is numbered.
fn short_names<'a>(models: impl Iterator<Item = &'a str>) -> Vec<(String, String)> {
    let mut names: Vec<(String, String)> = Vec::new();
    for full in models {
        let short = shortened(full, LIMIT);
        if short == full {
            continue;
        }
        let equal = names.iter().filter(|(known, _)| known.starts_with(&short)).count();
        let short = if equal == 0 { short } else { format!("{short} ({})", equal + 1) };
        names.push((short, full.to_owned()));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::sample;

    #[test]
    fn short_names_differ() {
        let long = |middle: &str| format!("a-model-with-a-long-name-{middle}-24-layers.onnx");
        let (first, second) = (long("8-experts"), long("9-experts"));
        let names = short_names(["m.onnx", &first, &second].into_iter());
        let expected = [("a-model-with-…24-layers.onnx", &first), ("a-model-with-…24-layers.onnx (2)", &second)];
        assert_eq!(names, expected.map(|(short, full)| (short.to_owned(), full.clone())));
    }

    #[test]
    fn names_are_short_everywhere_but_in_the_receipt() {
        let mut result = sample();
        let full = "m".repeat(60);
        for row in &mut result.rows {
            row.subject.model.clone_from(&full);
        }
        for session in &mut result.sessions {
            session.subject.model.clone_from(&full);
        }
        let short = Short::of(&result);
        assert_eq!(short.names().len(), 1);
        let text = format!("{:?}", short.result);
        assert!(!text.contains(&full) && text.contains(&short.names()[0].0), "{text}");
        assert_eq!(Short::of(&sample()).result, sample());
    }
}
