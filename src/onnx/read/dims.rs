//! Dimensions of inputs and outputs, and what their names say.

use std::fmt;

use moa_schema::interface::axis::may_be_empty;

/// One dimension of a [`ValueInfo`](super::ValueInfo); in JSON a number, a name or null.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(untagged)]
pub enum Dim {
    /// Always this size.
    Fixed(usize),
    /// Equal wherever the same name stands.
    Symbolic(String),
    /// Any size.
    Unknown,
}

/// Dimensions as messages have them, such as `[batch, 3, ?]`.
pub fn dims_text(dims: &[Dim]) -> String {
    format!("[{}]", dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

impl Dim {
    /// The dimension's name, where no run has `size` of it: of none but the past there may be none.
    pub(crate) fn wrongly_empty(&self, size: u64) -> Option<&str> {
        match self {
            Self::Symbolic(name) if size == 0 && !may_be_empty(name) => Some(name),
            _ => None,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(size) => size.fmt(f),
            Self::Symbolic(name) => f.write_str(name),
            Self::Unknown => f.write_str("?"),
        }
    }
}

/// The summands of a name such as `past_sequence + sequence`.
pub(crate) fn terms(name: &str) -> impl Iterator<Item = &str> {
    name.split('+').map(str::trim)
}

/// The size of a sum: numbers stand for themselves, and `None` where `size_of` does not know a name.
pub(crate) fn sum(name: &str, size_of: impl Fn(&str) -> Option<usize>) -> Option<usize> {
    terms(name).try_fold(0usize, |sum, term| sum.checked_add(term.parse().ok().or_else(|| size_of(term))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_past_may_be_empty() {
        let symbolic = |name: &str| Dim::Symbolic(name.into());
        assert_eq!(symbolic("batch").wrongly_empty(0), Some("batch"));
        assert_eq!(symbolic("batch").wrongly_empty(1), None);
        for dim in [symbolic("past_sequence"), symbolic("past + new"), Dim::Fixed(0), Dim::Unknown] {
            assert_eq!(dim.wrongly_empty(0), None, "{dim}");
        }
    }

    #[test]
    fn a_sum_takes_numbers_as_they_are() {
        let size_of =
            |name: &str| [("past", 3), ("new", 4)].into_iter().find(|(known, _)| *known == name).map(|(_, size)| size);
        for (name, expected) in [("new", Some(4)), ("past + new", Some(7)), ("new+1", Some(5)), ("new + more", None)] {
            assert_eq!(sum(name, size_of), expected, "{name}");
        }
        assert_eq!(sum("new + 18446744073709551615", size_of), None, "beyond what a size can be");
    }
}
