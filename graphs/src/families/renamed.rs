//! Tensors under other names than those that they are stored under.

use crate::{TensorDirectory, Weight};

/// A way to name tensors, and the way back.
#[derive(Clone, Copy)]
pub(super) struct Naming {
    /// The name that a stored one becomes, another for each.
    pub(super) rename: fn(&str) -> String,
    /// The stored name of what `rename` made.
    pub(super) restore: fn(&str) -> String,
}

/// Another directory, each of whose tensors has a name of its own.
pub(super) struct Renamed<'a> {
    stored: &'a dyn TensorDirectory,
    naming: Naming,
    names: Vec<String>,
    aliases: Vec<String>,
}

impl<'a> Renamed<'a> {
    pub(super) fn new(stored: &'a dyn TensorDirectory, naming: Naming) -> Self {
        let renamed = |names: Vec<&str>| {
            let mut names: Vec<_> = names.into_iter().map(naming.rename).collect();
            names.sort_unstable();
            names
        };
        Self { stored, naming, names: renamed(stored.names()), aliases: renamed(stored.aliases()) }
    }
}

impl TensorDirectory for Renamed<'_> {
    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    fn aliases(&self) -> Vec<&str> {
        self.aliases.iter().map(String::as_str).collect()
    }

    /// Asks for the stored name, which may be an alias that no list of names holds.
    fn tensor(&self, name: &str) -> Option<Weight> {
        let Naming { rename, restore } = self.naming;
        let stored = restore(name);
        let weight = self.stored.tensor(&stored).filter(|_| rename(&stored) == name)?;
        // A shared tensor has the name of the one that it is stored as.
        let name = rename(weight.name());
        Some(weight.renamed(name))
    }

    fn stored_name(&self, name: &str) -> String {
        self.stored.stored_name(&(self.naming.restore)(name))
    }

    fn origin(&self) -> &str {
        self.stored.origin()
    }

    fn make(&self, name: &str, shape: &[usize]) -> Option<Weight> {
        Some(self.stored.make(&(self.naming.restore)(name), shape)?.renamed(name.into()))
    }
}
