//! Tolerances that are typed.

use super::Failure;

/// Refuses a value of `flag` that is no tolerance.
pub(super) fn check_tolerance(flag: &str, value: Option<f64>) -> Result<(), Failure> {
    match value {
        Some(value) if !(value.is_finite() && value >= 0.0) => {
            let help = format!("give a number such as {flag} 1e-5, or leave it out");
            Err(Failure::usage(format!("{flag} must be a number from 0, found {value}"), &help))
        }
        _ => Ok(()),
    }
}
