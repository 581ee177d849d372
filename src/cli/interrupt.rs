//! Ctrl-C and termination in commands that do not ask for them.

use std::{
    env, io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use super::{Failure, codes::INTERRUPTED, leave::leave, signals::on_end};
use crate::onnx::Unfinished;

/// From here on, Ctrl-C and termination end the program and leave nothing of what it has begun, in the folder for
/// temporary files, in or beside any of `places` (`-` is stdout).
pub(super) fn end_cleanly<'a>(places: impl IntoIterator<Item = &'a Path>) -> Result<(), Failure> {
    let begun: Vec<_> = places
        .into_iter()
        .filter(|place| place.as_os_str() != "-")
        .map(Unfinished::before)
        .chain([scratch()])
        .collect();
    let ends = AtomicBool::new(false);
    let set = on_end(move || {
        if ends.swap(true, Ordering::Relaxed) {
            return;
        }
        begun.iter().for_each(Unfinished::remove);
        Failure::interrupted("interrupted".into()).print();
        leave(INTERRUPTED);
    });
    set.map_err(|error| Failure::io(&io::Error::other(error), "Ctrl-C"))
}

/// What runtimes record of a run, wherever it is.
pub(super) fn scratch() -> Unfinished {
    Unfinished::before(&env::temp_dir())
}
