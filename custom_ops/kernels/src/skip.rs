//! The word of tests that find out that they cannot run.

use std::cell::RefCell;
use std::io::{self, Write as _};

thread_local! {
    /// What the test of this thread has said.
    static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Says what is missing, once a test, past the test runner, which takes the test for passed and its output for
/// uninteresting.
pub(crate) fn skip(missing: &str) {
    let is_new = SAID.with_borrow_mut(|said| {
        let is_new = said.iter().all(|before| before != missing);
        said.extend(is_new.then(|| missing.to_owned()));
        is_new
    });
    if is_new {
        let _ = writeln!(io::stdout(), "skipped: {missing}");
    }
}
