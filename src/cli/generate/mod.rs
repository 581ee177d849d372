//! `moa-export generate`.

mod args;
#[cfg(feature = "ort")]
mod command;
#[cfg(feature = "ort")]
mod input;
#[cfg(feature = "ort")]
mod text;

pub(super) use args::GenerateArguments;
#[cfg(feature = "ort")]
pub(super) use command::run;
