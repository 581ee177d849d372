//! Loading, planning and launching on a fake driver.
#![allow(clippy::unwrap_used)]

mod loading;
mod plans;
mod support;
