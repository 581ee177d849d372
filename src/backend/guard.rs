//! Keeping a runtime's panics out of this program.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moa_schema::panic_text;

use super::BackendError;

/// Calls into a runtime; a panic there becomes an error.
pub(super) fn guarded<T>(
    backend: &'static str,
    stage: &'static str,
    call: impl FnOnce() -> Result<T, BackendError>,
) -> Result<T, BackendError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = format!("it panicked: {}", panic_text(panic));
        Err(BackendError::Failed { backend, stage, text })
    })
}
