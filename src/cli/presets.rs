//! Configurations that `inspect` and `baseline` know by name, with as many symbols as the user says.

use moa_graphs::families::{Config, model_types};
use serde_json::json;

use super::{Failure, usage::nearest};
use crate::inspect::preset::{PRESETS, Preset};

/// The preset of this name.
pub(super) fn preset(name: &str) -> Result<&'static Preset, Failure> {
    Preset::find(name).ok_or_else(|| {
        let names: Vec<_> = PRESETS.iter().map(|preset| preset.name).collect();
        let help = match nearest(name, &names) {
            Some(meant) => format!("did you mean {meant}?"),
            None => format!("one of {}", names.join(", ")),
        };
        Failure::usage(format!("there is no preset {name:?}"), &help)
    })
}

/// Fewest rows of an embedding: that of padding, and one more.
pub(super) const FEWEST_SYMBOLS: u64 = 2;

/// `config` with embeddings of so many rows; an error where it has none.
pub(super) fn with_vocabulary(config: Config, vocabulary: Option<u64>) -> Result<Config, Failure> {
    let Some(rows) = vocabulary else { return Ok(config) };
    if config.model_type() == model_types::MOA_LAYER {
        let message = "--vocab changes nothing here: a moa_layer is one layer without embeddings";
        return Err(Failure::usage(message, "leave it out"));
    }
    let sided = ["src_vocab_size", "tgt_vocab_size"];
    let config = sided.into_iter().fold(config, |config, key| config.with(key, json!(null)));
    Ok(config.with("vocab_size", json!(rows)))
}
