//! What configurations call activation functions.

use moa_schema::Activation::{self, Gelu, GeluTanh, Relu, Silu};

use super::Config;
use crate::ImportError;

/// Names of Hugging Face's `ACT2FN`.
const OF_TRANSFORMERS: [(&str, Activation); 10] = [
    ("silu", Silu),
    ("swish", Silu),
    ("gelu", Gelu),
    ("gelu_python", Gelu),
    ("gelu_new", GeluTanh),
    ("gelu_pytorch_tanh", GeluTanh),
    ("gelu_fast", GeluTanh),
    ("gelu_accurate", GeluTanh),
    ("gelu_python_tanh", GeluTanh),
    ("relu", Relu),
];

/// Names of fairseq's `get_activation_fn`, and `gelu_erf`.
const OF_FAIRSEQ: [(&str, Activation); 6] = [
    ("relu", Relu),
    ("gelu", Gelu),
    ("gelu_erf", Gelu),
    ("gelu_accurate", GeluTanh),
    ("gelu_fast", GeluTanh),
    ("swish", Silu),
];

/// The activation of a configuration of transformers.
pub(super) fn of_transformers(config: &Config, default: &str) -> Result<Activation, ImportError> {
    named(config, "activation_function", default, &OF_TRANSFORMERS)
}

/// The activation of a configuration of fairseq.
pub(super) fn of_fairseq(config: &Config) -> Result<Activation, ImportError> {
    named(config, "activation_fn", "relu", &OF_FAIRSEQ)
}

fn named(config: &Config, key: &str, default: &str, known: &[(&str, Activation)]) -> Result<Activation, ImportError> {
    let name = config.text_or(key, default)?;
    known.iter().find(|(known, _)| *known == name).map(|(_, activation)| *activation).ok_or_else(|| {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        config.unsupported(format!("\"{key}\": \"{name}\" (supported: {})", names.join(", ")))
    })
}
