//! What a terminal shows of long work, and how an export ends before its time.

use std::{
    fmt,
    io::{self, IsTerminal},
    path::Path,
    sync::Arc,
    time::Duration,
};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressState, ProgressStyle};

use super::{Failure, interrupt::Ending};
use crate::{
    export, latency,
    parity::{self, Step},
};

const BYTES: &str = "{bar:30} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}{left}";
#[cfg(feature = "ort")]
const LINES: &str = "{bar:30} {pos}/{len} lines{left}";
#[cfg(feature = "ort")]
const TOKENS: &str = "{spinner} {pos} tokens, {per_sec}";
#[cfg(feature = "ort")]
const LOADING: &str = "{spinner} loading the model, {elapsed}";
const BATCHES: &str = "{bar:30} {pos}/{len} batches{left}";
const CHECKPOINT: &str = "{spinner} reading the checkpoint, {elapsed}";
const WEIGHTS: &str = "{bar:30} {decimal_bytes} of {decimal_total_bytes} of weights compared{left}";
const RUNS: &str = "{bar:30} {pos}/{len} runs on {msg}{left}";
const UNCOUNTED_RUNS: &str = "{spinner} {pos} runs on {msg}, {elapsed}";
const POINTS: &str = "{bar:30} {pos}/{len} points{left}: {msg}";

/// How often a bar moves that has nothing to count.
const TICK: Duration = Duration::from_millis(200);

/// A bar that is drawn on stderr where that is a terminal, and is gone when it is dropped.
fn bar(template: &str, length: u64) -> ProgressBar {
    let bar = ProgressBar::hidden().with_finish(ProgressFinish::AndClear);
    show(&bar, template, length);
    bar
}

fn show(bar: &ProgressBar, template: &str, length: u64) {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let left = |state: &ProgressState, out: &mut dyn fmt::Write| {
        let _a_bar_that_is_not_drawn_is_no_error = out.write_str(&left(state.pos(), state.len(), state.eta()));
    };
    bar.set_style(style.with_key("left", left));
    bar.set_length(length);
    if io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::stderr());
    }
}

/// The time that the rest will take, behind what was counted; nothing before a hundredth is done to judge by.
fn left(done: u64, all: Option<u64>, time: Duration) -> String {
    let is_early = done == 0 || done < all.unwrap_or_default() / 100;
    if is_early { String::new() } else { format!(", {:#} left", HumanDuration(time)) }
}

/// A bar of lines, where there are several.
#[cfg(feature = "ort")]
pub(super) fn lines(count: usize) -> ProgressBar {
    if count > 1 { bar(LINES, count as u64) } else { ProgressBar::hidden() }
}

/// A count of tokens, of which nobody knows how many there will be.
#[cfg(feature = "ort")]
pub(super) fn tokens() -> ProgressBar {
    bar(TOKENS, 0)
}

/// The time that a model takes to load; what cannot be counted moves by itself.
#[cfg(feature = "ort")]
pub(super) fn loading() -> ProgressBar {
    let bar = bar(LOADING, 0);
    tick(&bar);
    bar
}

/// A bar of batches.
pub(super) fn batches(count: usize) -> ProgressBar {
    bar(BATCHES, count as u64)
}

/// Moves a bar that is drawn.
fn tick(bar: &ProgressBar) {
    if !bar.is_hidden() {
        bar.enable_steady_tick(TICK);
    }
}

/// What a terminal shows of a verification.
pub(super) struct VerifyProgress(ProgressBar);

impl VerifyProgress {
    pub(super) fn new() -> Self {
        let bar = bar(CHECKPOINT, 0);
        tick(&bar);
        Self(bar)
    }
}

impl parity::Watch for VerifyProgress {
    fn begin(&self, step: Step<'_>) {
        self.0.reset();
        match step {
            Step::Checkpoint => show(&self.0, CHECKPOINT, 0),
            Step::Weights { bytes } => show(&self.0, WEIGHTS, bytes),
            Step::Runs { backend, count } => {
                self.0.set_message(backend.to_owned());
                show(&self.0, if count.is_some() { RUNS } else { UNCOUNTED_RUNS }, count.unwrap_or_default());
            }
        }
    }

    fn advance(&self, more: u64) {
        self.0.inc(more);
    }
}

/// What a terminal shows of a benchmark. It is drawn between points only, so that it costs no time that is measured.
pub(super) struct BenchProgress(ProgressBar);

impl BenchProgress {
    pub(super) fn new() -> Self {
        Self(bar(POINTS, 0))
    }
}

impl latency::Watch for BenchProgress {
    fn begin(&self, points: usize) {
        self.0.set_length(points as u64);
    }

    fn does(&self, what: &str) {
        self.0.set_message(what.to_owned());
        self.0.tick();
    }

    fn timed(&self) {
        self.0.inc(1);
    }
}

/// Exports that are written in an instant need no bar.
const SHOWN_FROM_BYTES: u64 = 64 << 20;

/// A bar on stderr where that is a terminal, and a way to end.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    ending: Arc<Ending>,
}

impl Progress {
    /// The first Ctrl-C or termination ends the export to `out` at its next block, the second one at once.
    pub(super) fn of_export(out: &Path) -> Result<Self, Failure> {
        let ending = Arc::new(Ending::before([out]));
        ending.waits_for_answers(true);
        ending.listen()?;
        Ok(Self { bar: ProgressBar::hidden(), ending })
    }

    /// The export has ended.
    pub(super) fn finish(self) -> Arc<Ending> {
        self.bar.finish_and_clear();
        self.ending
    }
}

impl export::Watch for Progress {
    fn begin(&self, bytes: u64) {
        if bytes >= SHOWN_FROM_BYTES {
            self.bar.reset();
            show(&self.bar, BYTES, bytes);
        }
    }

    fn wrote(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn is_cancelled(&self) -> bool {
        self.ending.is_asked_for()
    }

    fn may_place(&self) -> bool {
        self.ending.may_place()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_told_before_a_hundredth_is_done() {
        let half_a_minute = Duration::from_secs(30);
        for (done, all) in [(0, None), (0, Some(3)), (1, Some(200)), (9_999_999, Some(1_000_000_000))] {
            assert_eq!(left(done, all, half_a_minute), "", "{done} of {all:?}");
        }
        for (done, all) in [(1, None), (1, Some(3)), (2, Some(200)), (10_000_000, Some(1_000_000_000))] {
            assert_eq!(left(done, all, half_a_minute), ", 30s left", "{done} of {all:?}");
        }
        for template in [BYTES, BATCHES, WEIGHTS, RUNS, POINTS] {
            assert!(template.contains("{left}") && !template.contains("eta"), "{template}");
        }
    }

    #[test]
    fn bars_count_in_the_units_of_results() {
        for template in [BYTES, WEIGHTS] {
            assert_eq!(template.matches("bytes").count(), template.matches("{decimal_").count(), "{template}");
        }
    }
}
