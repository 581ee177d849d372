//! Ctrl-C while TensorRT builds.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

use super::{Failure, codes::INTERRUPTED, leave::leave, signals::on_end};
use crate::onnx::Unfinished;

/// Nobody asked the build to end.
const RUNNING: u8 = 0;
/// Somebody did.
const ASKED: u8 = 1;
/// There is nothing left to clean up.
const FINISHED: u8 = 2;

/// Whether somebody wants the build to end.
pub(super) struct Interruption {
    shared: Arc<Shared>,
}

struct Shared {
    state: AtomicU8,
    /// Whether the build asks now and then; else the first signal ends the program.
    is_patient: AtomicBool,
    unfinished: Unfinished,
}

impl Interruption {
    /// The first Ctrl-C or termination ends the build where TensorRT next asks, the second one the program at once;
    /// neither leaves anything unfinished behind.
    pub(super) fn of_build(out: &Path) -> Result<Self, Failure> {
        let shared = Arc::new(Shared {
            state: AtomicU8::new(RUNNING),
            is_patient: AtomicBool::new(false),
            unfinished: Unfinished::before(out),
        });
        let caught = Arc::clone(&shared);
        let set = on_end(move || match caught.state.swap(ASKED, Ordering::Relaxed) {
            RUNNING if caught.is_patient.load(Ordering::Relaxed) => {}
            FINISHED => leave(INTERRUPTED),
            _ => {
                caught.unfinished.remove();
                interrupted().print();
                leave(INTERRUPTED);
            }
        });
        set.map_err(|error| Failure::io(&io::Error::other(error), "Ctrl-C"))?;
        Ok(Self { shared })
    }

    /// Says whether what follows asks [`Self::is_asked_for`] now and then.
    pub(super) fn waits_for_answers(&self, is_patient: bool) {
        self.shared.is_patient.store(is_patient, Ordering::Relaxed);
    }

    pub(super) fn is_asked_for(&self) -> bool {
        self.shared.state.load(Ordering::Relaxed) == ASKED
    }

    /// Ends what is under way, where that was asked for.
    pub(super) fn check(&self) -> Result<(), Failure> {
        if self.is_asked_for() { Err(interrupted()) } else { Ok(()) }
    }

    /// Everything is written.
    pub(super) fn finish(&self) {
        self.shared.state.store(FINISHED, Ordering::Relaxed);
    }
}

fn interrupted() -> Failure {
    Failure::interrupted("the build was interrupted, and nothing was written".into())
}
