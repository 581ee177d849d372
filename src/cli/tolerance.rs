//! Tolerances that are typed, and differences beside them.

use super::Failure;
use crate::parity::{Comparison, Difference};

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

/// The difference that is the largest share of its tolerance.
pub(super) fn worst(outputs: &Comparison) -> String {
    match &outputs.worst {
        Some(worst) if worst.found.is_nan() => "NaN".into(),
        worst => format!("{:.1e}", worst.as_ref().map_or(0.0, Difference::distance)),
    }
}

/// The tolerance of [`worst`]; where nothing differs, the absolute part of the largest, and the relative one where that
/// is more than 0.
pub(super) fn tolerance(outputs: &Comparison) -> String {
    let relative = if outputs.rtol > 0.0 { format!(" + {:.1e} |expected|", outputs.rtol) } else { String::new() };
    let largest = || format!("{:.1e}{relative}", outputs.atol);
    outputs.worst.as_ref().map_or_else(largest, |worst| format!("{:.1e}", worst.tolerance))
}
