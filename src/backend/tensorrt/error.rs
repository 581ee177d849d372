//! Why an engine could not be built, loaded or run.

use std::{fmt, io, path::PathBuf};

use super::door::{Code, DoorError};
use crate::{
    backend::{BackendErrorKind, RuntimeLibrary, libraries::root_lacks_tensorrt},
    engine::{CacheError, ChoiceError, LockError, PrepareError, ShapeProfileError},
    onnx::ReadError,
};

/// Most errors of TensorRT or its parser that one message quotes.
const QUOTED: usize = 3;

/// What the plugin was to do when it refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineStage {
    /// Be loaded.
    LoadPlugin,
    /// Open TensorRT.
    Open,
    /// Find the GPU.
    FindDevice,
    /// Build an engine.
    Build,
    /// Load a plan.
    LoadPlan,
    /// Run an engine.
    Run,
}

impl EngineStage {
    /// For the words after "failed to".
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::LoadPlugin => "load the plugin",
            Self::Open => "open TensorRT",
            Self::FindDevice => "find the GPU",
            Self::Build => "build the engine",
            Self::LoadPlan => "load the plan",
            Self::Run => "run the engine",
        }
    }
}

impl fmt::Display for EngineStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An engine could not be built, loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A library is missing.
    #[error("{text}")]
    Missing {
        /// What is missing, and where it was looked for.
        text: String,
    },
    /// A variable names what is not there.
    #[error("{variable}={} is not there", path.display())]
    Misnamed {
        /// The variable.
        variable: &'static str,
        /// What it names.
        path: PathBuf,
    },
    /// What was found as the plugin is none, or one of another version of this program.
    #[error("{text}")]
    Plugin {
        /// What is wrong with it.
        text: String,
    },
    /// There is no CUDA driver, or it has no device.
    #[error("{text}")]
    NoDevice {
        /// What the driver said, or where it was looked for.
        text: String,
    },
    /// The TensorRT that was found is of another major version than the plugin.
    #[error("{text}")]
    OtherRelease {
        /// Both versions.
        text: String,
    },
    /// Model, GPU, release and device do not go together.
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    /// The model cannot be prepared for TensorRT.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// Sizes and model do not fit.
    #[error(transparent)]
    Profile(#[from] ShapeProfileError),
    /// TensorRT's parser does not take the model.
    #[error("{text}")]
    Model {
        /// Its errors.
        text: String,
    },
    /// A shape that the engine does not serve.
    #[error("{text}")]
    Shape {
        /// Which.
        text: String,
    },
    /// The lock of a plan is missing, or contradicts it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The plan was built from another model.
    #[error("{} was built from another model than {}", plan.display(), model.display())]
    OtherModel {
        /// The plan.
        plan: PathBuf,
        /// The model.
        model: PathBuf,
    },
    /// The bytes are no plan, or not all of one.
    #[error("{text}")]
    Plan {
        /// What TensorRT said.
        text: String,
    },
    /// The plan is of another release of TensorRT or of another GPU.
    #[error("{text}")]
    OtherMachine {
        /// What TensorRT said.
        text: String,
    },
    /// TensorRT, or this program, does not do that.
    #[error("{text}")]
    Unsupported {
        /// What.
        text: String,
    },
    /// Host or device have too little memory.
    #[error("{text}")]
    Memory {
        /// What TensorRT said.
        text: String,
    },
    /// The build was told to end.
    #[error("the build was interrupted")]
    Cancelled,
    /// The cache of engines is not used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A model file could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// TensorRT failed otherwise.
    #[error("TensorRT failed to {stage}: {text}")]
    Failed {
        /// What it was to do.
        stage: EngineStage,
        /// What it said.
        text: String,
    },
}

impl EngineError {
    /// What the library refused while it was to do `stage`.
    pub(super) fn of(stage: EngineStage, error: DoorError) -> Self {
        let text = one_line(&error.text);
        match error.code {
            Code::Missing if stage == EngineStage::LoadPlugin => Self::Plugin { text },
            Code::Missing if stage == EngineStage::FindDevice => Self::NoDevice { text },
            Code::Missing => Self::Missing { text },
            Code::Incompatible if stage == EngineStage::Open => Self::OtherRelease { text },
            Code::Incompatible => Self::OtherMachine { text },
            Code::Model => Self::Model { text },
            Code::Profile => Self::Shape { text },
            Code::Plan => Self::Plan { text },
            Code::Unsupported => Self::Unsupported { text },
            Code::Memory => Self::Memory { text },
            Code::Cancelled => Self::Cancelled,
            Code::Argument | Code::Runtime | Code::Driver | Code::Internal => Self::Failed { stage, text },
        }
    }

    /// Class of the error.
    pub const fn kind(&self) -> BackendErrorKind {
        match self {
            Self::Missing { .. }
            | Self::Misnamed { .. }
            | Self::Plugin { .. }
            | Self::NoDevice { .. }
            | Self::OtherRelease { .. } => BackendErrorKind::Runtime,
            Self::Choice(_)
            | Self::Prepare(_)
            | Self::Model { .. }
            | Self::OtherMachine { .. }
            | Self::Unsupported { .. }
            | Self::Lock(LockError::OtherMachine { .. }) => BackendErrorKind::Unsupported,
            Self::Profile(_) | Self::Shape { .. } => BackendErrorKind::Input,
            Self::Lock(_) | Self::OtherModel { .. } | Self::Plan { .. } | Self::Io { .. } | Self::Read(_) => {
                BackendErrorKind::Model
            }
            Self::Memory { .. } | Self::Cancelled | Self::Cache(_) | Self::Failed { .. } => BackendErrorKind::Failed,
        }
    }

    /// Whether TensorRT is not there, or cannot take such a model here; anything else is a failure.
    pub const fn is_skip(&self) -> bool {
        let is_missing = matches!(self.kind(), BackendErrorKind::Runtime);
        is_missing || matches!(self, Self::Choice(_) | Self::Prepare(_))
    }

    /// Whether the environment names what is not there, or cannot be used.
    pub fn is_asked_for(&self) -> bool {
        match self {
            Self::Misnamed { .. } => true,
            Self::Plugin { .. } => RuntimeLibrary::TensorRtPlugin.named().is_some(),
            Self::Missing { .. } => root_lacks_tensorrt(),
            _ => false,
        }
    }

    /// Whether a plan is at fault: it cannot be read, is another model's, or does not fit what is here.
    pub const fn is_of_plan(&self) -> bool {
        matches!(
            self,
            Self::Lock(_) | Self::OtherModel { .. } | Self::Plan { .. } | Self::OtherMachine { .. } | Self::Io { .. }
        )
    }

    /// What the user can do, where that is known.
    pub fn help(&self) -> Option<&'static str> {
        Some(match self {
            Self::Missing { .. } => {
                "`moa-export ops` shows what was found; set TENSORRT_ROOT to a TensorRT of the plugin's major version, or \
                 install that of the Python package tensorrt"
            }
            Self::Misnamed { .. } => "set it to what it is to name, or unset it; `moa-export ops` shows what is found",
            Self::Plugin { .. } => RuntimeLibrary::TensorRtPlugin.help_if_missing(),
            Self::NoDevice { .. } => {
                "engines are built and run on an NVIDIA GPU, with NVIDIA's driver; `moa-export plan` needs neither"
            }
            Self::OtherRelease { .. } => {
                "set TENSORRT_ROOT to a TensorRT of that major version, or build the plugin for this one: \
                 TENSORRT_ROOT=… cargo xtask tensorrt"
            }
            Self::Choice(ChoiceError::OtherDevice { .. }) => "build on a machine with that GPU, or give --gpu auto",
            Self::Choice(ChoiceError::NoBf16 { .. }) => BFLOAT16,
            Self::Choice(ChoiceError::Integers { .. }) => "export with --dtype fp16, --dtype bf16 or --dtype fp32",
            Self::Choice(ChoiceError::Misfit { why, .. }) if why.is_of_dtype() => BFLOAT16,
            Self::Choice(_) => "`moa-export plan` shows which releases of TensorRT serve which GPU; choose one of them",
            Self::Prepare(error) => error.help(),
            Self::Profile(ShapeProfileError::Unnamed { .. }) => "give the model's dimensions names",
            Self::Profile(_) => "give --dim NAME=MIN:OPT:MAX for every dimension that the model leaves open",
            Self::Model { .. } => "models that `moa-export` exports are taken in every form; try --form standard",
            Self::Shape { .. } => "build the engine with --dim NAME=MIN:OPT:MAX that holds these sizes",
            Self::Lock(LockError::OtherMachine { .. }) | Self::OtherMachine { .. } => {
                "build the plan again here, with `moa-export build`"
            }
            Self::Lock(_) => "build the plan again, or give --trust-plan where you know that it is yours",
            Self::OtherModel { .. } => "give the plan that was built from this model, or leave out --plan",
            Self::Plan { .. } => "the file was cut off or is no plan: build it again with `moa-export build`",
            Self::Memory { .. } => {
                "free the GPU, or build a smaller engine with `moa-export build` (--dim, --workspace), and give it with --plan"
            }
            Self::Unsupported { .. } | Self::Cancelled | Self::Io { .. } | Self::Failed { .. } => return None,
            Self::Cache(error) => return error.help(),
            Self::Read(error) => return error.help(),
        })
    }
}

const BFLOAT16: &str = "`moa-export plan` shows what fits; export with another --dtype";

/// The first line, and the next ones behind it, as far as a message is read.
fn one_line(text: &str) -> String {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or("it does not say why").to_owned();
    let more: Vec<&str> = lines.filter(|line| !first.ends_with(*line)).collect();
    if more.is_empty() {
        return first;
    }
    let quoted = more.iter().take(QUOTED).copied().collect::<Vec<_>>().join("; ");
    match more.len().saturating_sub(QUOTED) {
        0 => format!("{first} ({quoted})"),
        left => format!("{first} ({quoted}; and {left} more)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_lines_become_one() {
        assert_eq!(one_line("refused"), "refused");
        assert_eq!(one_line("refused\n"), "refused");
        assert_eq!(one_line("refused: a\na\n"), "refused: a");
        assert_eq!(one_line("refused\na\n b \nc\nx\ny"), "refused (a; b; c; and 2 more)");
        assert_eq!(one_line(""), "it does not say why");
    }

    #[test]
    fn another_release_is_told_from_a_plan_of_another_release() {
        let error = |stage| EngineError::of(stage, DoorError { code: Code::Incompatible, text: "x".into() });
        assert_eq!(error(EngineStage::Open).kind(), BackendErrorKind::Runtime);
        assert_eq!(error(EngineStage::LoadPlan).kind(), BackendErrorKind::Unsupported);
        assert!(error(EngineStage::Open).is_skip() && !error(EngineStage::LoadPlan).is_skip());
    }

    #[test]
    fn help_is_for_what_is_missing() {
        for (stage, expected) in [
            (EngineStage::LoadPlugin, "MOA_TENSORRT_LIBRARY"),
            (EngineStage::Open, "TENSORRT_ROOT"),
            (EngineStage::FindDevice, "NVIDIA's driver"),
            (EngineStage::LoadPlan, "`moa-export ops`"),
        ] {
            let error = EngineError::of(stage, DoorError { code: Code::Missing, text: "x".into() });
            assert!(error.help().is_some_and(|help| help.contains(expected)), "{stage}: {:?}", error.help());
            assert!(error.is_skip() && error.kind() == BackendErrorKind::Runtime, "{stage}");
        }
    }
}
