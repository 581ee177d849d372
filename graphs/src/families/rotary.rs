//! Rotary embedding as Hugging Face configurations describe it.

use half::{bf16, f16};

use super::Config;
use crate::{ImportError, Weight, model::Rotary};

/// End of the names of frequencies that older versions of transformers stored.
pub(super) const BUFFER: &str = ".rotary_emb.inv_freq";

/// Base where no key names it.
const DEFAULT_BASE: f64 = 10_000.0;

/// Reads the base from `rope_theta` or, as transformers 5 writes it, from `rope_parameters`.
///
/// # Errors
///
/// Where the two contradict each other, or a base in `rope_scaling` does, which transformers 5 reads and older ones do
/// not; where `rope_scaling`, `rope_parameters` or `partial_rotary_factor` ask for other angles than
/// `position / base^(2 i / D)` on all of a head.
pub(super) fn rotary(config: &Config, positions: usize) -> Result<Rotary, ImportError> {
    let (scaling, parameters) = (config.object("rope_scaling")?, config.object("rope_parameters")?);
    for described in [scaling.as_ref(), parameters.as_ref()].into_iter().flatten() {
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
    if let Some(scaled) = scaling.as_ref().map(stated).transpose()?.flatten()
        && scaled.to_bits() != base.to_bits()
    {
        return Err(config.invalid("rope_theta", format!("{scaled:?}, as \"rope_scaling\" says")));
    }
    Ok(Rotary { base, positions })
}

/// Refuses the frequencies stored as `name` where they are not those of the configuration.
///
/// transformers computes them as f32, stores them no longer and reads no stored ones, and the export computes its own.
/// So values that were rounded to f16 or bf16, all in the same way, before they were stored in another type, as
/// `.half().float()` does, are those of the configuration.
pub(super) fn check_buffer(
    config: &Config,
    name: &str,
    stored: &Weight,
    rotary: Rotary,
    head_size: usize,
) -> Result<(), ImportError> {
    let values = stored.to_f64()?;
    let index = explained(&values, stored.stored_type(), rotary.base, head_size);
    let Some(found) = values.get(index) else { return Ok(()) };
    let (base, expected) = (rotary.base, frequency(rotary.base, index, head_size));
    Err(config.unsupported(format!(
        "tensor \"{name}\" has the frequency {found} at index {index}, and \"rope_theta\" {base} makes it {expected}"
    )))
}

fn frequency(base: f64, index: usize, head_size: usize) -> f64 {
    libm::pow(base, -((2 * index) as f64) / head_size as f64)
}

/// How many of the first frequencies are those of `base`.
fn explained(values: &[f64], stored_type: &str, base: f64, head_size: usize) -> usize {
    let [as_is, to_f16, to_bf16]: [fn(f64) -> f64; 3] =
        [|value| value, |value| f16::from_f64(value).to_f64(), |value| bf16::from_f64(value).to_f64()];
    let store = match stored_type {
        "F16" => to_f16,
        "BF16" => to_bf16,
        _ => as_is,
    };
    let error = f32_error(base);
    let fits = |round: fn(f64) -> f64, (index, value): (usize, &f64)| {
        let expected = frequency(base, index, head_size);
        let [low, high] = [1.0 - error, 1.0 + error].map(|factor| store(round(expected * factor)));
        (low..=high).contains(value)
    };
    let first = |round| values.iter().enumerate().position(|pair| !fits(round, pair)).unwrap_or(values.len());
    [as_is, to_f16, to_bf16].into_iter().map(first).max().unwrap_or_default()
}

/// Bound of the relative error of `1 / base^(2 i / D)` as f32: four units in the last place of the power, one each of
/// the base and the quotient, and the exponent, below 1, rounded once.
fn f32_error(base: f64) -> f64 {
    let unit = f64::from(f32::EPSILON);
    6.0 * unit + libm::log(base).abs() * unit / 2.0
}

/// Refuses scaled positions or frequencies; positions that are divided by 1 are not.
fn plain(described: &Config) -> Result<(), ImportError> {
    let key = if described.has("rope_type") { "rope_type" } else { "type" };
    match described.text_or(key, "default")? {
        "default" => full(described),
        "linear" if described.has("factor") && is_one(described.number_or("factor", 1.0)?) => full(described),
        other => Err(described.unsupported(format!("\"{key}\": \"{other}\" (supported: default)"))),
    }
}

/// Refuses rotating a part of each head.
fn full(config: &Config) -> Result<(), ImportError> {
    let share = config.number_or("partial_rotary_factor", 1.0)?;
    if is_one(share) {
        return Ok(());
    }
    Err(config.unsupported(format!("\"partial_rotary_factor\": {share} (supported: 1)")))
}

const fn is_one(number: f64) -> bool {
    number.to_bits() == 1.0f64.to_bits()
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
            (r#"{"rope_theta": 500, "rope_scaling": {"rope_theta": 500.0}}"#, 500.0),
            (r#"{"rope_scaling": {"type": "default"}, "partial_rotary_factor": 1}"#, 10_000.0),
            (r#"{"rope_scaling": {"rope_type": "default", "factor": 4.0}, "rope_theta": 7}"#, 7.0),
            (r#"{"rope_scaling": {"rope_type": "linear", "factor": 1.0}, "rope_theta": 7}"#, 7.0),
            (r#"{"rope_scaling": {"type": "linear", "factor": 1}}"#, 10_000.0),
        ] {
            assert_eq!(read(text), Ok(base), "{text}");
        }
    }

    #[test]
    fn other_angles_are_refused() {
        for (text, expected) in [
            (r#"{"rope_scaling": {"rope_type": "linear", "factor": 4.0}}"#, r#""rope_type": "linear""#),
            (r#"{"rope_scaling": {"rope_type": "linear"}}"#, r#""rope_type": "linear""#),
            (r#"{"rope_scaling": {"type": "dynamic", "factor": 4.0}}"#, r#""type": "dynamic""#),
            (r#"{"rope_scaling": {"type": "dynamic", "factor": 1.0}}"#, r#""type": "dynamic""#),
            (
                r#"{"rope_scaling": {"type": "linear", "factor": 1, "partial_rotary_factor": 0.5}}"#,
                r#""partial_rotary_factor": 0.5"#,
            ),
            (r#"{"rope_parameters": {"rope_type": "yarn", "rope_theta": 100}}"#, r#""rope_type": "yarn""#),
            (r#"{"partial_rotary_factor": 0.5}"#, r#""partial_rotary_factor": 0.5"#),
            (r#"{"rope_parameters": {"partial_rotary_factor": 0.5}}"#, r#""partial_rotary_factor": 0.5"#),
            (r#"{"rope_theta": 100, "rope_parameters": {"rope_theta": 10000}}"#, r#"key "rope_theta" must be 10000.0"#),
            (r#"{"rope_scaling": {"type": "default", "rope_theta": 500}}"#, r#"key "rope_theta" must be 500.0"#),
            (r#"{"rope_theta": 7, "rope_scaling": {"rope_theta": 500}}"#, r#"key "rope_theta" must be 500.0"#),
            (r#"{"rope_scaling": "linear"}"#, r#"key "rope_scaling" must be an object"#),
            (r#"{"rope_parameters": {"rope_theta": -1}}"#, r#"key "rope_theta" must be a positive number"#),
        ] {
            let error = read(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    /// As transformers computes them.
    fn computed(base: f64, head_size: usize) -> Vec<f32> {
        let exponent = |index: usize| (2 * index) as f32 / head_size as f32;
        let power = |exponent: f32| libm::powf(base as f32, exponent);
        (0..head_size / 2).map(|index| 1.0 / power(exponent(index))).collect()
    }

    /// All ways to store f32 values, with the name of the type that they end in.
    fn stored(values: &[f32]) -> [(&'static str, Vec<f64>); 7] {
        let all = |round: fn(f32) -> f64| values.iter().map(|value| round(*value)).collect();
        [
            ("F32", all(f64::from)),
            ("F64", all(f64::from)),
            ("F16", all(|value| f16::from_f32(value).to_f64())),
            ("BF16", all(|value| bf16::from_f32(value).to_f64())),
            ("F32", all(|value| f16::from_f32(value).to_f64())),
            ("F32", all(|value| bf16::from_f32(value).to_f64())),
            ("F16", all(|value| f16::from_f32(bf16::from_f32(value).to_f32()).to_f64())),
        ]
    }

    #[test]
    fn frequencies_are_those_of_their_base_in_every_type() {
        for base in [10.0, 8084.123, 1e4, 5e5, 1e8] {
            for head_size in [2, 16, 80, 128] {
                for (way, (stored_type, values)) in stored(&computed(base, head_size)).iter().enumerate() {
                    let what = format!("{base}, {head_size}, {stored_type}, {way}");
                    assert_eq!(explained(values, stored_type, base, head_size), head_size / 2, "{what}");
                }
            }
        }
    }

    #[test]
    fn frequencies_of_another_base_are_refused() {
        for (way, factor) in [1.00002, 1.00002, 1.01, 1.1, 1.01, 1.1, 1.1].into_iter().enumerate() {
            for base in [1e4, 5e5] {
                let (stored_type, values) = &stored(&computed(base * factor, 128))[way];
                let index = explained(values, stored_type, base, 128);
                assert!((1..=8).contains(&index), "{base}, {stored_type}, {way}: {index}");
            }
        }
        let [.., half, brain, _] = stored(&computed(1e4, 16)).map(|(_, values)| values);
        let mixed = [&half[..4], &brain[4..]].concat();
        assert!((4..8).contains(&explained(&mixed, "F32", 1e4, 16)));
    }
}
