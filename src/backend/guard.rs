//! Keeping a runtime's panics out of this program.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::BackendError;

/// Calls into a runtime; a panic there becomes an error.
pub(super) fn guarded<T>(
    backend: &'static str,
    stage: &'static str,
    call: impl FnOnce() -> Result<T, BackendError>,
) -> Result<T, BackendError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = format!("it panicked: {}", panic_text(panic.as_ref()));
        Err(BackendError::Failed { backend, stage, text })
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason given")
}
