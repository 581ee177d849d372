//! Families: from tensor names and a configuration to typed models.
//!
//! A new family is one file here, with one line in `FAMILIES` and one in `model_types`; `lower` has a graph for each
//! kind of model that families give.

mod activation;
mod config;
mod fairseq;
mod fairseq_refused;
mod importer;
mod jetmoe;
mod masked_lm;
mod moa_layer;
pub mod model_types;
mod molm;
mod renamed;
mod rotary;
mod translation;
mod unread;

pub use config::Config;
pub use fairseq::DEFAULT_POSITIONS;

use moa_schema::GateMode;

use self::renamed::{Naming, Renamed};
use crate::{ImportError, TensorDirectory, model::Model};

/// Before every name of a model that `DistributedDataParallel` or `DataParallel` of PyTorch held.
const PARALLEL_PREFIX: &str = "module.";

/// Before every name of a model that `torch.compile` made.
const COMPILED_PREFIX: &str = "_orig_mod.";

/// What PyTorch puts before every name of a model that something holds, with the names without it.
const HOLDERS: [(&str, Naming); 2] = [
    (
        PARALLEL_PREFIX,
        Naming {
            rename: |stored| stored.strip_prefix(PARALLEL_PREFIX).unwrap_or(stored).into(),
            restore: |name| format!("{PARALLEL_PREFIX}{name}"),
        },
    ),
    (
        COMPILED_PREFIX,
        Naming {
            rename: |stored| stored.strip_prefix(COMPILED_PREFIX).unwrap_or(stored).into(),
            restore: |name| format!("{COMPILED_PREFIX}{name}"),
        },
    ),
];

/// Most holders, one in another, whose prefixes are taken off.
const MOST_HOLDERS: usize = 3;

/// The name of a tensor without what its holders put before it.
pub fn without_holders(name: &str) -> &str {
    (0..MOST_HOLDERS)
        .fold(name, |name, _| HOLDERS.iter().find_map(|(prefix, _)| name.strip_prefix(prefix)).unwrap_or(name))
}

/// What the user may say about a model beyond its checkpoint and configuration.
#[derive(Debug, Clone, Copy, Default)]
pub struct ImportOptions {
    /// Replaces the family's gate mode.
    pub gate_mode: Option<GateMode>,
}

/// One supported family.
struct Family {
    /// `model_type` of the configuration.
    model_type: &'static str,
    /// What it is, for messages.
    title: &'static str,
    import: fn(&Config, &dyn TensorDirectory, ImportOptions) -> Result<Model, ImportError>,
}

const FAMILIES: &[Family] = &[
    Family {
        model_type: model_types::MOA_TRANSFORMER,
        title: "fairseq MoA encoder-decoder",
        import: |config, tensors, options| translation::import(config, tensors, options).map(Model::EncoderDecoder),
    },
    Family {
        model_type: model_types::MOA_ROBERTA,
        title: "MoA masked language model",
        import: |config, tensors, options| masked_lm::import(config, tensors, options).map(Model::MaskedLm),
    },
    Family { model_type: model_types::JETMOE, title: "JetMoE", import: jetmoe::import },
    Family { model_type: model_types::MOLM, title: "MoLM", import: molm::import },
    Family { model_type: model_types::MOA_LAYER, title: "single MoA layer", import: moa_layer::import },
];

/// Standard Transformers, which are counted and built from random values beside the families, and never read from
/// a checkpoint.
const BASELINES: &[Family] = &[
    Family {
        model_type: model_types::TRANSFORMER,
        title: "Transformer encoder-decoder",
        import: |config, tensors, options| translation::import(config, tensors, options).map(Model::Transformer),
    },
    Family {
        model_type: model_types::ROBERTA,
        title: "Transformer masked language model",
        import: |config, tensors, options| masked_lm::import(config, tensors, options).map(Model::TransformerMaskedLm),
    },
];

/// The supported values of `model_type`, each with a title.
pub fn supported() -> impl Iterator<Item = (&'static str, &'static str)> {
    FAMILIES.iter().map(|family| (family.model_type, family.title))
}

/// Gives the tensors of a checkpoint their meaning.
///
/// # Errors
///
/// A configuration key that is missing or impossible, a tensor that is missing, left over or wrongly
/// shaped, shared parameters that differ, and families or options that this program cannot export.
pub fn import(config: &Config, tensors: &dyn TensorDirectory, options: ImportOptions) -> Result<Model, ImportError> {
    let model_type = config.text("model_type", "the family of the model")?;
    let baselines = if tensors.is_synthetic() { BASELINES } else { &[] };
    let Some(family) = FAMILIES.iter().chain(baselines).find(|family| family.model_type == model_type) else {
        let known: Vec<_> = FAMILIES.iter().map(|family| family.model_type).collect();
        return Err(config.other_family(model_type, &known.join(", ")));
    };
    if !tensors.is_synthetic() && config.flag_or("expert_bias", false)? {
        return Err(config.unsupported("\"expert_bias\": true".into()));
    }
    let import = |tensors: &dyn TensorDirectory| import_held(family, MOST_HOLDERS, config, tensors, options);
    import(tensors).map_err(|error| match error {
        ImportError::MissingTensor { origin, tensor, expected, instead: None } => {
            let instead = unread::instead_of(&tensor, tensors, |tensors| import(tensors).map(|_| ()));
            ImportError::MissingTensor { origin, tensor, expected, instead: instead.map(Box::new) }
        }
        error => error,
    })
}

/// A model with at most so many holders, each of which has its prefix before every name.
fn import_held(
    family: &Family,
    holders: usize,
    config: &Config,
    tensors: &dyn TensorDirectory,
    options: ImportOptions,
) -> Result<Model, ImportError> {
    let names = tensors.names();
    let holds = |prefix: &str| !names.is_empty() && names.iter().all(|name| name.starts_with(prefix));
    match HOLDERS.into_iter().find(|(prefix, _)| holders > 0 && holds(prefix)) {
        Some((_, naming)) => import_held(family, holders - 1, config, &Renamed::new(tensors, naming), options),
        None => (family.import)(config, tensors, options),
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod settings_tests;
