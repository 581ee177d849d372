//! Tensors under other names than those that they are stored under.

use std::collections::BTreeMap;

use crate::{TensorDirectory, Weight};

/// Another directory, each of whose tensors has a name of its own.
pub(super) struct Renamed<'a> {
    stored: &'a dyn TensorDirectory,
    rename: fn(&str) -> String,
    /// The stored name of each.
    names: BTreeMap<String, &'a str>,
}

impl<'a> Renamed<'a> {
    /// Gives every tensor the name that `rename` makes of its stored one, another for each.
    pub(super) fn new(stored: &'a dyn TensorDirectory, rename: fn(&str) -> String) -> Self {
        let names = stored.names().into_iter().map(|name| (rename(name), name)).collect();
        Self { stored, rename, names }
    }
}

impl TensorDirectory for Renamed<'_> {
    fn names(&self) -> Vec<&str> {
        self.names.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<Weight> {
        let weight = self.stored.tensor(self.names.get(name)?)?;
        // A shared tensor has the name of the one that it is stored as.
        let name = (self.rename)(weight.name());
        Some(weight.renamed(name))
    }

    fn origin(&self) -> &str {
        self.stored.origin()
    }
}
