//! Rotary embedding as Hugging Face configurations describe it.

use super::Config;
use crate::{ImportError, Weight, model::Rotary};

/// End of the names of frequencies that older versions of transformers stored.
pub(super) const BUFFER: &str = ".rotary_emb.inv_freq";

/// How far stored frequencies may be from those of the base, relatively: bf16 keeps eight bits.
const TOLERANCE: f64 = 1.0 / 128.0;

/// Base where no key names it.
const DEFAULT_BASE: f64 = 10_000.0;

/// Reads the base from `rope_theta` or, as transformers 5 writes it, from `rope_parameters`.
///
/// # Errors
///
/// Where the two contradict each other, or where `rope_scaling`, `rope_parameters` or `partial_rotary_factor` ask for
/// other angles than `position / base^(2 i / D)` on all of a head.
pub(super) fn rotary(config: &Config, positions: usize) -> Result<Rotary, ImportError> {
    let parameters = config.object("rope_parameters")?;
    for described in [config.object("rope_scaling")?.as_ref(), parameters.as_ref()].into_iter().flatten() {
        plain(described)?;
    }
    full(config)?;
    let stated = |config: &Config| -> Result<Option<f64>, ImportError> {
        config.has("rope_theta").then(|| config.number_or("rope_theta", DEFAULT_BASE)).transpose()
    };
    let nested = parameters.as_ref().map(stated).transpose()?.flatten();
    let base = match (stated(config)?, nested) {
        (Some(base), Some(nested)) if base.to_bits() != nested.to_bits() => {
            return Err(config.invalid("rope_theta", format!("{nested:?}, as \"rope_parameters\" says, or absent")));
        }
        (base, nested) => base.or(nested).unwrap_or(DEFAULT_BASE),
    };
    Ok(Rotary { base, positions })
}

/// Refuses stored frequencies that are not those of the configuration.
pub(super) fn check_buffer(
    config: &Config,
    stored: &Weight,
    rotary: Rotary,
    head_size: usize,
) -> Result<(), ImportError> {
    for (index, found) in stored.to_f64()?.into_iter().enumerate() {
        let expected = rotary.base.powf(-((2 * index) as f64) / head_size as f64);
        if (found - expected).abs() > TOLERANCE * expected {
            let name = stored.name();
            let base = rotary.base;
            return Err(config.unsupported(format!(
                "tensor \"{name}\" has the frequency {found} at index {index}, and \"rope_theta\" {base} \
                 makes it {expected}"
            )));
        }
    }
    Ok(())
}

/// Refuses scaled positions or frequencies.
fn plain(described: &Config) -> Result<(), ImportError> {
    let key = if described.has("rope_type") { "rope_type" } else { "type" };
    match described.text_or(key, "default")? {
        "default" => full(described),
        other => Err(described.unsupported(format!("\"{key}\": \"{other}\" (supported: default)"))),
    }
}

/// Refuses rotating a part of each head.
fn full(config: &Config) -> Result<(), ImportError> {
    let share = config.number_or("partial_rotary_factor", 1.0)?;
    if share.to_bits() == 1.0f64.to_bits() {
        return Ok(());
    }
    Err(config.unsupported(format!("\"partial_rotary_factor\": {share} (supported: 1)")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<f64, String> {
        let config = Config::new("config.json", serde_json::from_str(text).unwrap());
        rotary(&config, 16).map(|rotary| rotary.base).map_err(|error| error.to_string())
    }

    #[test]
    fn both_places_of_the_base_are_read() {
        for (text, base) in [
            ("{}", 10_000.0),
            (r#"{"rope_theta": 100, "rope_scaling": null, "rope_parameters": null}"#, 100.0),
            (r#"{"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}"#, 100.0),
            (r#"{"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.5}"#, 7.5),
            (r#"{"rope_theta": 100, "rope_parameters": {"rope_theta": 100.0}}"#, 100.0),
            (r#"{"rope_scaling": {"type": "default"}, "partial_rotary_factor": 1}"#, 10_000.0),
        ] {
            assert_eq!(read(text), Ok(base), "{text}");
        }
    }

    #[test]
    fn other_angles_are_refused() {
        for (text, expected) in [
            (r#"{"rope_scaling": {"rope_type": "linear", "factor": 4.0}}"#, r#""rope_type": "linear""#),
            (r#"{"rope_scaling": {"type": "dynamic", "factor": 4.0}}"#, r#""type": "dynamic""#),
            (r#"{"rope_parameters": {"rope_type": "yarn", "rope_theta": 100}}"#, r#""rope_type": "yarn""#),
            (r#"{"partial_rotary_factor": 0.5}"#, r#""partial_rotary_factor": 0.5"#),
            (r#"{"rope_parameters": {"partial_rotary_factor": 0.5}}"#, r#""partial_rotary_factor": 0.5"#),
            (r#"{"rope_theta": 100, "rope_parameters": {"rope_theta": 10000}}"#, r#"key "rope_theta" must be 10000.0"#),
            (r#"{"rope_scaling": "linear"}"#, r#"key "rope_scaling" must be an object"#),
            (r#"{"rope_parameters": {"rope_theta": -1}}"#, r#"key "rope_theta" must be a positive number"#),
        ] {
            let error = read(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
