//! Tensors under longer names than those that they are stored under.

use std::collections::BTreeMap;

use crate::{TensorDirectory, Weight};

/// Another directory, whose names get one more part in front.
pub(super) struct Prefixed<'a> {
    stored: &'a dyn TensorDirectory,
    prefix: &'static str,
    /// The name that stays as it is.
    kept: &'static str,
    /// The stored name of each.
    names: BTreeMap<String, &'a str>,
}

impl<'a> Prefixed<'a> {
    /// Puts `prefix` in front of every name but `kept`.
    pub(super) fn new(stored: &'a dyn TensorDirectory, prefix: &'static str, kept: &'static str) -> Self {
        let names = stored.names().into_iter().map(|name| (long(prefix, kept, name), name)).collect();
        Self { stored, prefix, kept, names }
    }
}

impl TensorDirectory for Prefixed<'_> {
    fn names(&self) -> Vec<&str> {
        self.names.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<Weight> {
        let weight = self.stored.tensor(name.strip_prefix(self.prefix).unwrap_or(name))?;
        let name = long(self.prefix, self.kept, weight.name());
        Some(weight.renamed(name))
    }

    fn origin(&self) -> &str {
        self.stored.origin()
    }
}

fn long(prefix: &str, kept: &str, name: &str) -> String {
    if name == kept { name.into() } else { format!("{prefix}{name}") }
}
