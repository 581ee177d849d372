//! Codes and texts of what went wrong.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moa_cuda_driver::{DriverError, Error};
use moa_schema::panic_text;

/// The codes of `moa_cuda.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    Ok = 0,
    Argument = 1,
    Unsupported = 2,
    Missing = 3,
    Driver = 4,
    Internal = 5,
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self { code: Code::Argument, text: text.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error {
            Error::NoDriver { .. }
            | Error::OldDriver { .. }
            | Error::OldDriverForPtx { .. }
            | Error::NoArchive { .. }
            | Error::OtherSources { .. }
            | Error::ArchiveFile { .. }
            | Error::Archive(_)
            | Error::NoKernel { .. } => Code::Missing,
            Error::Driver(_) => Code::Driver,
            Error::NoImage { .. } | Error::Plan(_) => Code::Unsupported,
            Error::NoContext | Error::Shape(_) | Error::Argument(_) => Code::Argument,
        };
        Self { code, text: error.to_string() }
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Error::from(error).into()
    }
}

/// Runs `body`; a panic becomes an internal error.
pub(crate) fn catch<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = format!("internal error: {}", panic_text(payload));
        Err(Failure { code: Code::Internal, text })
    })
}
