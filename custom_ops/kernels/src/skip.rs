//! The word of tests that find out that they cannot run.

use std::io::{self, Write as _};

/// Says what is missing, past the test runner, which takes the test for passed and its output for uninteresting.
pub(crate) fn skip(missing: &str) {
    let _ = writeln!(io::stdout(), "skipped: {missing}");
}
