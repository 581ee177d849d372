//! Which backends there are.

/// Who computes the operators of the `ai.moa` domain in ONNX Runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OrtOperators {
    /// The operator library.
    #[default]
    Library,
    /// ONNX Runtime, by the functions that the model carries.
    Functions,
}

/// What a backend is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackendKind {
    /// ONNX Runtime with the operator library.
    Ort,
    /// ONNX Runtime alone.
    OrtFunction,
    /// tract.
    Tract,
    /// TensorRT.
    TensorRt,
}

impl BackendKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ort, Self::OrtFunction, Self::Tract, Self::TensorRt];

    /// Name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ort => "ort",
            Self::OrtFunction => "ort-function",
            Self::Tract => "tract",
            Self::TensorRt => "tensorrt",
        }
    }

    /// The one of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Who computes our operators, where that is ONNX Runtime.
    pub const fn ort_operators(self) -> Option<OrtOperators> {
        match self {
            Self::Ort => Some(OrtOperators::Library),
            Self::OrtFunction => Some(OrtOperators::Functions),
            Self::Tract | Self::TensorRt => None,
        }
    }
}

impl From<OrtOperators> for BackendKind {
    fn from(operators: OrtOperators) -> Self {
        match operators {
            OrtOperators::Library => Self::Ort,
            OrtOperators::Functions => Self::OrtFunction,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_backends() {
        for kind in BackendKind::ALL {
            assert_eq!(BackendKind::of_name(kind.name()), Some(kind));
            assert!(kind.ort_operators().is_none_or(|operators| BackendKind::from(operators) == kind));
        }
        assert_eq!(BackendKind::of_name("onnxruntime"), None);
    }
}
