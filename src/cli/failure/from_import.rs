//! What the user sees of checkpoints that make no model.

use moa_graphs::{ImportError, Instead};

use super::{Code, Failure};

const OTHER_CONFIG: &str =
    "configuration and checkpoint must come from the same model; give another configuration with --config FILE";

const CORRECT: &str = "correct the configuration, or give another one with --config FILE";

/// Keys that say how scores become weights, which an option says here.
const GATE_KEYS: [&str; 2] = ["gate_mode", "norm_topk_prob"];

impl From<ImportError> for Failure {
    fn from(error: ImportError) -> Self {
        if let ImportError::Weight(error) = error {
            return error.into();
        }
        let code = match error {
            ImportError::Family { .. } | ImportError::Unsupported { .. } => Code::ModelUnsupported,
            ImportError::MissingKey { .. } | ImportError::UnknownKey { .. } | ImportError::InvalidKey { .. } => {
                Code::ConfigKey
            }
            ImportError::ExtraTensors { .. } => Code::ExtraTensors,
            _ => Code::OtherConfig,
        };
        Self::new(code, error.to_string(), Some(&help(&error)))
    }
}

fn help(error: &ImportError) -> String {
    let text = match error {
        ImportError::MissingTensor { tensor, expected, instead: Some(instead), .. } => {
            return help_for_name([tensor, expected], instead);
        }
        ImportError::UnknownKey { key, .. } if GATE_KEYS.contains(&key.as_str()) => {
            "leave it out; --gate-mode says how scores become weights, and softmax_topk_renorm divides them by their sum"
        }
        ImportError::Family { .. } => {
            "models with Mixture-of-Attention layers alone are exported here; Optimum exports others"
        }
        ImportError::Unsupported { .. } => {
            "where the weights need no such setting, correct the configuration or give another with --config FILE"
        }
        ImportError::MissingKey { .. } | ImportError::UnknownKey { .. } | ImportError::InvalidKey { .. } => CORRECT,
        ImportError::AliasConflict { .. } => {
            "where they are two, say so in the configuration, or in another one with --config FILE: \"tie_word_embeddings\": false \
             (JetMoE, MoLM), \"share_all_embeddings\": false (translation) or \"untie_weights_roberta\": true (masked LM)"
        }
        ImportError::ExtraTensors { .. } => {
            "the configuration may name another family or fewer layers than the checkpoint has; where they are no weights of it, save the checkpoint without them"
        }
        _ => OTHER_CONFIG,
    };
    text.into()
}

/// How what the checkpoint has becomes the missing tensor, by name and shape.
fn help_for_name([missing, expected]: [&str; 2], instead: &Instead) -> String {
    match instead {
        Instead::Longer(longer) => format!(
            "the checkpoint has \"{longer}\"; save the state_dict() of the model itself, or rename its tensors, so that it is \
             \"{missing}\""
        ),
        Instead::Unread { tensor, shape, is_transposed } => {
            let how = match shape == expected {
                true => "",
                false if *is_transposed => " with its last two dimensions exchanged",
                false => " in that shape",
            };
            format!(
                "the checkpoint has \"{tensor}\" of shape {shape}, which belongs to no part of the model; where it is meant, save it{how} under \
                 that name, else give another configuration with --config FILE"
            )
        }
    }
}
