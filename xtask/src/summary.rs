//! Stages of tests, one after the other, and what they say together.

use std::time::{Duration, Instant};

use crate::{process::stage, tally::Tally};

/// One stage with what it counted.
struct Line {
    title: String,
    tally: Tally,
    elapsed: Duration,
    note: Option<String>,
}

/// Stages that are over.
#[derive(Default)]
pub(crate) struct Summary {
    lines: Vec<Line>,
}

impl Summary {
    /// Runs `stages`, prints a line for each of them and one for all; true where nothing failed. An error stops them,
    /// is printed and counts as a failure.
    pub(crate) fn of(stages: impl FnOnce(&mut Self) -> Result<(), String>) -> bool {
        let (mut summary, start) = (Self::default(), Instant::now());
        if let Err(message) = stages(&mut summary) {
            eprintln!("error: {message}");
            summary.push("stopped", Tally::FAILURE, Duration::ZERO, Some(message));
        }
        println!("\n== summary");
        summary.lines.iter().for_each(|line| println!("{}", line.text()));
        let all = summary.tally();
        println!("{all}, {:.1} s", start.elapsed().as_secs_f64());
        all.failed == 0
    }

    /// Runs a stage.
    ///
    /// # Errors
    ///
    /// Those of `work`, after which the others cannot run.
    pub(crate) fn add(&mut self, title: &str, work: impl FnOnce() -> Result<Tally, String>) -> Result<(), String> {
        let (tally, elapsed) = stage(title, work);
        self.push(title, tally?, elapsed, None);
        Ok(())
    }

    /// Runs a stage with what it `needs`, or skips it where that is not here, with the reason.
    ///
    /// # Errors
    ///
    /// As [`Self::add`].
    pub(crate) fn add_or_skip<T>(
        &mut self,
        title: &str,
        needs: &Result<T, String>,
        work: impl FnOnce(&T) -> Result<Tally, String>,
    ) -> Result<(), String> {
        match needs {
            Ok(needed) => self.add(title, || work(needed)),
            Err(why) => {
                self.skip(title, why);
                Ok(())
            }
        }
    }

    /// Adds a stage that cannot be run here.
    pub(crate) fn skip(&mut self, title: &str, why: &str) {
        self.push(title, Tally::SKIPPED, Duration::ZERO, Some(format!("skipped: {why}")));
    }

    /// Adds a stage that was run elsewhere.
    pub(crate) fn push(&mut self, title: &str, tally: Tally, elapsed: Duration, note: Option<String>) {
        self.lines.push(Line { title: title.into(), tally, elapsed, note });
    }

    fn tally(&self) -> Tally {
        self.lines.iter().map(|line| line.tally).sum()
    }
}

impl Line {
    fn text(&self) -> String {
        let Self { title, tally, elapsed, note } = self;
        let note = note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
        format!("{title}: {tally}, {:.1} s{note}", elapsed.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skipped_stage_counts_and_says_why() {
        let mut summary = Summary::default();
        summary.add("first", || Ok(Tally { passed: 2, failed: 0, skipped: 0 })).unwrap();
        summary.skip("second", "there is none");
        assert_eq!(summary.lines[1].text(), "second: 0 passed, 0 failed, 1 skipped, 0.0 s (skipped: there is none)");
        assert_eq!(summary.tally(), Tally { passed: 2, failed: 0, skipped: 1 });
    }

    #[test]
    fn a_stage_without_what_it_needs_is_skipped() {
        let mut summary = Summary::default();
        let work = |passed: &usize| Ok(Tally { passed: *passed, failed: 0, skipped: 0 });
        summary.add_or_skip("first", &Ok(3), work).unwrap();
        summary.add_or_skip("second", &Err("there is none".into()), work).unwrap();
        assert_eq!(summary.tally(), Tally { passed: 3, failed: 0, skipped: 1 });
        assert_eq!(summary.lines[1].note.as_deref(), Some("skipped: there is none"));
        assert!(summary.add_or_skip("third", &Ok(()), |()| Err("no reason".into())).is_err());
    }

    #[test]
    fn failures_and_errors_fail() {
        let failing = |summary: &mut Summary| summary.add("stage", || Ok(Tally::FAILURE));
        assert!(!Summary::of(failing));
        assert!(!Summary::of(|_| Err("no reason".into())));
        assert!(Summary::of(|summary| summary.add("stage", || Ok(Tally::default()))));
    }
}
