//! The context that calls of the driver work in.

use crate::error::DriverError;
use crate::ffi::{Context, Driver};

/// A context that is current until this value is dropped.
pub(crate) struct Entered<'a> {
    driver: &'a Driver,
    pushed: bool,
}

impl<'a> Entered<'a> {
    /// Makes `context` current on this thread, unless it is already.
    pub(crate) fn new(driver: &'a Driver, context: Context) -> Result<Self, DriverError> {
        let pushed = driver.current_context()? != Some(context);
        if pushed {
            driver.push_context(context)?;
        }
        Ok(Self { driver, pushed })
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.pushed {
            // The context below is current again even where the driver is about to end.
            let _ = self.driver.pop_context();
        }
    }
}
