//! Errors on their way to an `OrtStatus`, and panics caught on the way.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moa_kernels::OutOfMemory;
use moa_schema::panic_text;

/// Whose fault it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The model or the values fed to it.
    Argument,
    /// The runtime, which is too old or refused a call.
    Runtime,
    /// This library.
    Bug,
}

/// Why a callback failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) fault: Fault,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self { fault: Fault::Argument, text: text.into() }
    }

    pub(crate) fn runtime(text: impl Into<String>) -> Self {
        Self { fault: Fault::Runtime, text: text.into() }
    }

    /// Says at which node it happened; a text that already starts with the operator does not repeat it.
    fn at_node(self, operator: &str, node: &str) -> Self {
        let text = self.text.strip_prefix(operator).and_then(|text| text.strip_prefix(": ")).unwrap_or(&self.text);
        Self { text: format!("{operator} node `{node}`: {text}"), ..self }
    }
}

/// Runs `body`; a panic becomes a [`Fault::Bug`], but for want of memory.
pub(crate) fn catch<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        Err(match payload.downcast::<OutOfMemory>() {
            Ok(error) => Failure::runtime(error.to_string()),
            Err(payload) => Failure { fault: Fault::Bug, text: format!("internal error: {}", panic_text(payload)) },
        })
    })
}

/// As [`catch`], for work that belongs to a node, which every failure names.
pub(crate) fn catch_at_node<T>(
    operator: &str,
    node: &str,
    body: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    catch(body).map_err(|failure| failure.at_node(operator, node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_failure() {
        let expected = Failure { fault: Fault::Bug, text: String::from("internal error: number 7") };
        assert_eq!(catch::<()>(|| panic!("number {}", 7)), Err(expected));
    }

    #[test]
    fn want_of_memory_is_no_bug() {
        let failure = catch::<()>(|| std::panic::resume_unwind(Box::new(OutOfMemory { bytes: 96 })));
        assert_eq!(failure, Err(Failure::runtime("no memory for 96 bytes")));
    }

    #[test]
    fn the_node_stands_in_front() {
        for text in ["Op: too long", "too long"] {
            assert_eq!(Failure::argument(text).at_node("Op", "n").text, "Op node `n`: too long");
        }
    }

    #[test]
    fn whatever_fails_names_the_node() {
        let text = |body: fn() -> Result<(), Failure>| catch_at_node("Op", "n", body).unwrap_err().text;
        assert_eq!(text(|| Err(Failure::argument("too long"))), "Op node `n`: too long");
        assert_eq!(text(|| panic!("number 7")), "Op node `n`: internal error: number 7");
        let no_memory = || std::panic::resume_unwind(Box::new(OutOfMemory { bytes: 96 }));
        assert_eq!(text(no_memory), "Op node `n`: no memory for 96 bytes");
    }

    #[test]
    fn results_pass_through() {
        assert_eq!(catch(|| Ok(3)), Ok(3));
        assert_eq!(catch_at_node("Op", "n", || Ok(3)), Ok(3));
        assert_eq!(catch::<()>(|| Err(Failure::argument("no"))), Err(Failure::argument("no")));
    }
}
