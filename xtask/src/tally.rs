//! Counting what test runners report.

use std::{fmt, iter::Sum, ops::Add, process::Command};

use crate::process::{self, Stream};

/// What a test says that has found out that it cannot run.
const SAID_SKIPPED: &str = "skipped: ";

/// Numbers of tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Tally {
    /// That passed.
    pub(crate) passed: usize,
    /// That failed.
    pub(crate) failed: usize,
    /// That were not run, and said so.
    pub(crate) skipped: usize,
}

impl Tally {
    /// One failure.
    pub(crate) const FAILURE: Self = Self { passed: 0, failed: 1, skipped: 0 };

    /// One skipped check.
    pub(crate) const SKIPPED: Self = Self { passed: 0, failed: 0, skipped: 1 };

    /// This tally, with a failure where the runner failed without a failed test, or found no test at all.
    pub(crate) fn confirmed(self, runner_succeeded: bool) -> Self {
        let nothing = self.passed + self.skipped == 0;
        if self.failed == 0 && (nothing || !runner_succeeded) { self + Self::FAILURE } else { self }
    }

    /// Runs Rust's test runner, or a program that says what it says. A test that cannot run here writes a line with
    /// [`SAID_SKIPPED`] past the runner, which counts it as passed.
    pub(crate) fn of_cargo(command: &mut Command) -> Result<Self, String> {
        let (mut tally, mut said) = (Self::default(), 0);
        let status = process::watch(command, Stream::Stdout, |line| {
            tally = tally + Self::of_cargo_line(line);
            said += usize::from(line.contains(SAID_SKIPPED));
        })?;
        Ok(tally.with_skipped(said).confirmed(status.success()))
    }

    /// The same where `said` of those that passed were not run.
    fn with_skipped(self, said: usize) -> Self {
        let said = said.min(self.passed);
        Self { passed: self.passed - said, skipped: self.skipped + said, ..self }
    }

    /// What a `test result:` line of Rust's test runner says.
    pub(crate) fn of_cargo_line(line: &str) -> Self {
        let Some((_, counts)) = line.split_once("test result: ").and_then(|(_, rest)| rest.split_once(". ")) else {
            return Self::default();
        };
        let count = |what: &str| {
            let before = counts.split(';').find_map(|part| part.trim().strip_suffix(what));
            before.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
        };
        Self { passed: count("passed"), failed: count("failed"), skipped: count("ignored") }
    }
}

impl Add for Tally {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            skipped: self.skipped + other.skipped,
        }
    }
}

impl Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(tallies: I) -> Self {
        tallies.fold(Self::default(), Add::add)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// The closing lines of Python's `unittest`.
#[derive(Debug, Default)]
pub(crate) struct Unittest {
    ran: usize,
    failed: usize,
    skipped: usize,
}

impl Unittest {
    /// Takes one line of its output.
    pub(crate) fn see(&mut self, line: &str) {
        if let Some((number, _)) = line.strip_prefix("Ran ").and_then(|rest| rest.split_once(" test")) {
            self.ran += number.parse().unwrap_or(0);
        }
        let verdict = ["OK (", "FAILED ("].iter().find_map(|start| line.strip_prefix(start));
        for entry in verdict.and_then(|rest| rest.strip_suffix(')')).into_iter().flat_map(|rest| rest.split(", ")) {
            let (kind, number) = entry.split_once('=').unwrap_or((entry, ""));
            let number: usize = number.parse().unwrap_or(0);
            match kind {
                "failures" | "errors" | "unexpected successes" => self.failed += number,
                "skipped" => self.skipped += number,
                _ => {}
            }
        }
    }

    /// What was seen.
    pub(crate) fn tally(&self) -> Tally {
        let passed = self.ran.saturating_sub(self.failed + self.skipped);
        Tally { passed, failed: self.failed, skipped: self.skipped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(passed: usize, failed: usize, skipped: usize) -> Tally {
        Tally { passed, failed, skipped }
    }

    #[test]
    fn result_lines_of_cargo_are_read() {
        let passing = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s";
        let failing = "test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s";
        assert_eq!(Tally::of_cargo_line(passing), tally(12, 0, 1));
        assert_eq!(Tally::of_cargo_line(failing), tally(4, 2, 0));
        for other in ["test some::test ... ok", "running 3 tests", "", "test result: "] {
            assert_eq!(Tally::of_cargo_line(other), Tally::default(), "{other}");
        }
    }

    #[test]
    fn tests_that_say_that_they_were_skipped_did_not_pass() {
        assert_eq!(tally(5, 1, 1).with_skipped(2), tally(3, 1, 3));
        assert_eq!(tally(1, 0, 0).with_skipped(2), tally(0, 0, 1));
    }

    fn unittest(lines: &[&str]) -> Tally {
        let mut seen = Unittest::default();
        lines.iter().for_each(|line| seen.see(line));
        seen.tally()
    }

    #[test]
    fn closing_lines_of_unittest_are_read() {
        assert_eq!(unittest(&["Ran 25 tests in 3.2s", "", "OK"]), tally(25, 0, 0));
        assert_eq!(unittest(&["Ran 1 test in 0.1s", "", "OK (skipped=1)"]), tally(0, 0, 1));
        let mixed = "FAILED (failures=2, errors=1, skipped=3, expected failures=1, unexpected successes=1)";
        assert_eq!(unittest(&["Ran 20 tests in 9s", "", mixed]), tally(13, 4, 3));
        assert_eq!(unittest(&["Ran 1 test in 9s", "", "FAILED (failures=7)"]), tally(0, 7, 0));
    }

    #[test]
    fn a_runner_that_fails_or_finds_nothing_is_a_failure() {
        assert_eq!(tally(3, 0, 0).confirmed(true), tally(3, 0, 0));
        assert_eq!(tally(3, 0, 0).confirmed(false), tally(3, 1, 0));
        assert_eq!(tally(3, 2, 0).confirmed(false), tally(3, 2, 0));
        assert_eq!(tally(0, 0, 0).confirmed(true), tally(0, 1, 0));
        assert_eq!(tally(0, 0, 2).confirmed(true), tally(0, 0, 2));
    }

    #[test]
    fn tallies_add_up() {
        let all: Tally = [tally(1, 2, 3), tally(4, 5, 6)].into_iter().sum();
        assert_eq!(all.to_string(), "5 passed, 7 failed, 9 skipped");
    }
}
