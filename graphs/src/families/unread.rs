//! What a checkpoint has in place of a tensor that is missing.

use crate::{ImportError, SyntheticTensors, TensorDirectory, Weight, error::Instead};

/// A directory in which nothing is missing.
struct Completed<'a> {
    stored: &'a dyn TensorDirectory,
    made: SyntheticTensors,
}

impl TensorDirectory for Completed<'_> {
    fn names(&self) -> Vec<&str> {
        self.stored.names()
    }

    fn aliases(&self) -> Vec<&str> {
        self.stored.aliases()
    }

    fn tensor(&self, name: &str) -> Option<Weight> {
        self.stored.tensor(name).or_else(|| self.made.tensor(name))
    }

    fn stored_name(&self, name: &str) -> String {
        self.stored.stored_name(name)
    }

    fn origin(&self) -> &str {
        self.stored.origin()
    }

    fn make(&self, name: &str, shape: &[usize]) -> Option<Weight> {
        self.made.make(name, shape)
    }
}

/// How a shape is to the one that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    Same,
    Transposed,
    Reshaped,
}

impl Fit {
    /// None where `found` has another number of elements.
    fn of(found: &[usize], missing: &[usize]) -> Option<Self> {
        let elements = |shape: &[usize]| shape.iter().try_fold(1_usize, |all, size| all.checked_mul(*size));
        let mut turned = missing.to_vec();
        let last = turned.len().saturating_sub(2);
        turned[last..].reverse();
        match elements(found) {
            _ if found == missing => Some(Self::Same),
            _ if found == turned => Some(Self::Transposed),
            Some(count) if elements(missing) == Some(count) => Some(Self::Reshaped),
            _ => None,
        }
    }
}

/// Of the tensors that belong to no part of the model, the one that `missing` may be: by shape, then by name. One that
/// has to be reshaped only where the model reads most others, and none where another one of its module fits as well.
/// `import` imports from any directory.
pub(super) fn instead_of(
    missing: &str,
    stored: &dyn TensorDirectory,
    import: impl FnOnce(&dyn TensorDirectory) -> Result<(), ImportError>,
) -> Option<Instead> {
    let completed = Completed { stored, made: SyntheticTensors::shapes(stored.origin()) };
    let Err(ImportError::ExtraTensors { extra, .. }) = import(&completed) else { return None };
    let shape = completed.made.tensor(missing)?.shape().to_vec();
    let are_few = extra.len() * 2 <= stored.names().len();
    let candidate = |name| {
        let weight = stored.tensor(name)?;
        let fit = Fit::of(weight.shape(), &shape).filter(|fit| *fit != Fit::Reshaped || are_few)?;
        Some((fit, strsim::osa_distance(missing, name), name, weight))
    };
    let candidates: Vec<_> = extra.iter().map(String::as_str).filter_map(candidate).collect();
    let (fit, _, name, weight) = candidates.iter().min_by_key(|(fit, distance, ..)| (*fit, *distance))?;
    let module = |name: &str| name.rsplit_once('.').map(|(module, _)| module.to_owned());
    let is_sibling = |other: &str| other != *name && module(other) == module(name);
    if candidates.iter().any(|(other, _, sibling, _)| other == fit && is_sibling(sibling)) {
        return None;
    }
    Some(Instead::Unread {
        tensor: (*name).to_owned(),
        shape: format!("{:?}", weight.shape()),
        is_transposed: *fit == Fit::Transposed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_two_dimensions_are_turned() {
        assert_eq!(Fit::of(&[8, 8], &[8, 8]), Some(Fit::Same));
        assert_eq!(Fit::of(&[8, 32], &[32, 8]), Some(Fit::Transposed));
        assert_eq!(Fit::of(&[4, 8, 32], &[4, 32, 8]), Some(Fit::Transposed));
        assert_eq!(Fit::of(&[32, 8, 4], &[4, 8, 32]), Some(Fit::Reshaped));
        assert_eq!(Fit::of(&[8], &[32]), None);
        assert_eq!(Fit::of(&[usize::MAX, 2], &[2, 2, usize::MAX]), None);
        assert_eq!(Fit::of(&[], &[]), Some(Fit::Same));
    }
}
