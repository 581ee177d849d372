//! Loading, planning and launching on a fake driver.
#![allow(clippy::unwrap_used, clippy::panic)]

mod loading;
mod plans;
mod support;
