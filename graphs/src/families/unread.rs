//! What a checkpoint has in place of a tensor that is missing.

use std::{cell::RefCell, collections::BTreeSet};

use crate::{ImportError, SyntheticTensors, TensorDirectory, Weight, error::Instead};

/// A directory in which nothing is missing, and which knows what it was asked for.
struct Completed<'a> {
    stored: &'a dyn TensorDirectory,
    made: SyntheticTensors,
    asked: RefCell<BTreeSet<String>>,
}

impl TensorDirectory for Completed<'_> {
    fn names(&self) -> Vec<&str> {
        self.stored.names()
    }

    fn aliases(&self) -> Vec<&str> {
        self.stored.aliases()
    }

    fn tensor(&self, name: &str) -> Option<Weight> {
        self.asked.borrow_mut().insert(name.into());
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
    Other,
}

impl Fit {
    fn of(found: &[usize], missing: &[usize]) -> Self {
        let mut turned = missing.to_vec();
        let last = turned.len().saturating_sub(2);
        turned[last..].reverse();
        match found {
            _ if found == missing => Self::Same,
            _ if found == turned => Self::Transposed,
            _ => Self::Other,
        }
    }
}

/// Of the tensors that no part of the model reads, the one that `missing` may be: by shape, then by name; one of
/// another shape only where the model reads most others. `import` imports from any directory.
pub(super) fn instead_of(
    missing: &str,
    stored: &dyn TensorDirectory,
    import: impl FnOnce(&dyn TensorDirectory) -> Result<(), ImportError>,
) -> Option<Instead> {
    let made = SyntheticTensors::shapes(stored.origin());
    let completed = Completed { stored, made, asked: RefCell::default() };
    // Of what is left over, the first tensor is asked for its shape.
    let left_over = match import(&completed) {
        Ok(()) => None,
        Err(ImportError::ExtraTensors { tensor, .. }) => Some(tensor),
        Err(_) => return None,
    };
    let shape = completed.made.tensor(missing)?.shape().to_vec();
    let asked = completed.asked.into_inner();
    let names = stored.names();
    let is_read = |name: &str| asked.contains(name) && left_over.as_deref() != Some(name);
    let unread: Vec<_> = names.iter().filter(|name| !is_read(name)).filter_map(|name| stored.tensor(name)).collect();
    let are_few = unread.len() * 2 <= names.len();
    let rank = |weight: &&Weight| (Fit::of(weight.shape(), &shape), strsim::osa_distance(missing, weight.name()));
    let weight = unread.iter().min_by_key(rank)?;
    let fit = Fit::of(weight.shape(), &shape);
    (fit != Fit::Other || are_few).then(|| Instead::Unread {
        tensor: stored.stored_name(weight.name()),
        shape: format!("{:?}", weight.shape()),
        is_transposed: fit == Fit::Transposed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_two_dimensions_are_turned() {
        assert_eq!(Fit::of(&[8, 8], &[8, 8]), Fit::Same);
        assert_eq!(Fit::of(&[8, 32], &[32, 8]), Fit::Transposed);
        assert_eq!(Fit::of(&[4, 8, 32], &[4, 32, 8]), Fit::Transposed);
        assert_eq!(Fit::of(&[32, 8, 4], &[4, 8, 32]), Fit::Other);
        assert_eq!(Fit::of(&[8], &[32]), Fit::Other);
        assert_eq!(Fit::of(&[], &[]), Fit::Same);
    }
}
