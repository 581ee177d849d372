//! Errors of engines and their plans as failures.

use moa_schema::interface::axis::may_be_empty;

use super::{Code, Failure};
use crate::{
    backend::{BackendErrorKind, EngineError},
    engine::{ChoiceError, LockError, PrepareError, ShapeProfileError},
};

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let code = match &error {
            EngineError::Io { .. } | EngineError::Cache(_) | EngineError::Lock(LockError::Missing { .. }) => {
                Code::EngineIo
            }
            EngineError::Profile(_) => Code::ProfileSizes,
            EngineError::Cancelled => Code::Interrupted,
            error => match error.kind() {
                BackendErrorKind::Unsupported => Code::EngineUnsupported,
                BackendErrorKind::Input => Code::Inputs,
                BackendErrorKind::Model => Code::Plan,
                BackendErrorKind::Failed => Code::EngineFailed,
                _ => Code::RuntimeMissing,
            },
        };
        match error {
            EngineError::Read(error) => error.into(),
            error => Self::new(code, error.to_string(), error.help()),
        }
    }
}

impl From<ChoiceError> for Failure {
    fn from(error: ChoiceError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<PrepareError> for Failure {
    fn from(error: PrepareError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<ShapeProfileError> for Failure {
    fn from(error: ShapeProfileError) -> Self {
        let help = match &error {
            ShapeProfileError::Unknown { open, .. } => Some(format!("the model leaves open: {}", open.join(", "))),
            ShapeProfileError::Shapes { inputs, .. } => Some(format!("the model's inputs: {inputs}")),
            ShapeProfileError::Missing { names } => Some(format!("add{}", sizes_of(names))),
            ShapeProfileError::Empty { name } => {
                Some(format!("give at least 1, such as --dim {name}=1:OPT:MAX; only what begins with `past` may be 0"))
            }
            ShapeProfileError::Positions { positions, .. } => {
                Some(format!("give sizes for at most {positions} tokens a row"))
            }
            _ => None,
        };
        let failure = Self::from(EngineError::from(error));
        Self { help: help.or(failure.help), ..failure }
    }
}

/// An option for each dimension; only keys and values of the past may be of none.
fn sizes_of(names: &[String]) -> String {
    let least = |name: &str| if may_be_empty(name) { "0" } else { "MIN" };
    names.iter().map(|name| format!(" --dim {name}={}:OPT:MAX", least(name))).collect()
}
