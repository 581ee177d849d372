//! The words of tests that find out that they cannot run, or not all that they hold. Said past the test runner, which
//! takes such a test for passed and its output for uninteresting.

use std::cell::RefCell;
use std::io::{self, Write as _};

thread_local! {
    /// What the test of this thread has said.
    static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Says once what is missing for a test that holds nothing here. Runs count such a test as skipped.
pub(crate) fn skip(missing: &str) {
    say(format!("skipped: {missing}"));
}

/// Says once what is missing for a part of a test whose others run.
pub(crate) fn leave_out(missing: &str) {
    say(format!("left out: {missing}"));
}

fn say(line: String) {
    SAID.with_borrow_mut(|said| {
        if !said.contains(&line) {
            let _ = writeln!(io::stdout(), "{line}");
            said.push(line);
        }
    });
}
