//! What a terminal shows of an export, and how the export ends before its time.

use std::{
    io::{self, IsTerminal},
    path::Path,
    process::exit,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use indicatif::{ProgressBar, ProgressStyle};

use super::{Failure, failure::INTERRUPTED};
use crate::{export::Watch, onnx::Unfinished};

/// Nobody asked the export to end.
const RUNNING: u8 = 0;
/// Somebody did.
const CANCELLED: u8 = 1;
/// There is nothing left to clean up.
const FINISHED: u8 = 2;

/// Exports that are written in an instant need no bar.
const SHOWN_FROM_BYTES: u64 = 64 << 20;

/// A bar on stderr where that is a terminal, and a way to end.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    state: AtomicU8,
    unfinished: Unfinished,
}

impl Progress {
    pub(super) fn new(out: &Path) -> Self {
        let bar = ProgressBar::hidden();
        Self { bar, state: AtomicU8::new(RUNNING), unfinished: Unfinished::before(out) }
    }

    /// The first Ctrl-C or termination ends the export at its next block, the second one the program at once; neither
    /// leaves anything unfinished behind.
    pub(super) fn end_when_told_to(self: &Arc<Self>) -> Result<(), Failure> {
        let progress = Arc::clone(self);
        let caught = ctrlc::set_handler(move || match progress.state.swap(CANCELLED, Ordering::Relaxed) {
            RUNNING => {}
            FINISHED => exit(INTERRUPTED.into()),
            _ => {
                progress.unfinished.remove();
                exit(INTERRUPTED.into());
            }
        });
        caught.map_err(|error| Failure::io(&io::Error::other(error), "Ctrl-C"))
    }

    /// The export has ended.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
        self.state.store(FINISHED, Ordering::Relaxed);
    }
}

impl Watch for Progress {
    fn begin(&self, bytes: u64) {
        if bytes < SHOWN_FROM_BYTES || !io::stderr().is_terminal() {
            return;
        }
        let style = ProgressStyle::with_template("{bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left");
        self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        self.bar.set_length(bytes);
        self.bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
    }

    fn wrote(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn is_cancelled(&self) -> bool {
        self.state.load(Ordering::Relaxed) == CANCELLED
    }
}
