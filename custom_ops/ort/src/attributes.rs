//! What a node says beside the attributes of its operator, read once when its kernel is created.

use moa_schema::{
    AccuracyLevel, AttributeError, AttributeSource, Attributes, DOMAIN, OPSET_VERSION, Operator, PRESENT_INPUTS,
    accuracy_level, check_further_attributes, other_version,
};

use crate::failure::Failure;

/// The attributes of a node that this library may run, and how accurate its products must be.
pub(crate) fn read(operator: &Operator, source: &dyn AttributeSource) -> Result<(Attributes, AccuracyLevel), Failure> {
    check_further_attributes(source).map_err(refused)?;
    check_version(source)?;
    check_inputs(source)?;
    let read = || Ok((Attributes::read(operator, source)?, accuracy_level(source)?));
    read().map_err(refused)
}

fn refused(error: AttributeError) -> Failure {
    Failure::argument(error.to_string())
}

/// Refuses a node that is written for another version of the operators than this library's, where the node says so.
///
/// The runtime takes the newest operator that is not newer than what the model asks for, and does not tell which that
/// was.
fn check_version(source: &dyn AttributeSource) -> Result<(), Failure> {
    match other_version(source) {
        None => Ok(()),
        Some(written) => Err(Failure::argument(format!(
            "the model needs version {written} of the operators {DOMAIN}, and this libmoa_ort has version {OPSET_VERSION}: use the \
             libmoa_ort of the moa-export that wrote the model"
        ))),
    }
}

/// Refuses a node whose inputs were moved together for TensorRT, so that they do not stand where the schema has them.
fn check_inputs(source: &dyn AttributeSource) -> Result<(), Failure> {
    let present = source.int(PRESENT_INPUTS).unwrap_or_default();
    if present & present.wrapping_add(1) == 0 {
        return Ok(());
    }
    Err(Failure::argument(
        "the node was prepared for TensorRT, which moves its inputs: run the export that it was prepared from",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_of_the_operators_is_refused() {
        struct Written(Option<&'static str>);

        impl AttributeSource for Written {
            fn int(&self, _: &str) -> Option<i64> {
                None
            }

            fn float(&self, _: &str) -> Option<f32> {
                None
            }

            fn string(&self, name: &str) -> Option<String> {
                self.0.filter(|_| name == "plugin_version").map(str::to_owned)
            }

            fn has(&self, name: &str) -> bool {
                self.string(name).is_some()
            }
        }

        for same in [None, Some("1")] {
            check_version(&Written(same)).unwrap();
        }
        for other in ["2", "0", "1.1", ""] {
            let failure = check_version(&Written(Some(other))).expect_err(other);
            let expected =
                format!("the model needs version {other} of the operators ai.moa, and this libmoa_ort has version 1:");
            assert!(failure.text.starts_with(&expected), "{}", failure.text);
        }
    }
}
