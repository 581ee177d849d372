//! Numbers that planner and kernels must agree on: [`c_constants`] makes the C++ constants of them
//! (`kernels/constants.cuh`, compared by a test).

use std::fmt::Write;

use moa_schema::{Activation, GateMode};

/// Activations in the order in which kernels number them.
pub const ACTIVATIONS: [Activation; 4] = [Activation::Relu, Activation::Gelu, Activation::Silu, Activation::GeluTanh];

/// Tokens that a group of the router takes.
pub(crate) const GROUP_TOKENS: usize = 4;

/// Largest number of parts of one sum, be it over an inner dimension or over keys.
pub const MAX_SPLITS: usize = 32;

/// Threads of the kernel that lists pairs.
pub(crate) const LIST_THREADS: usize = 1024;

/// Threads of the kernel that sums slots.
pub(crate) const SUM_THREADS: usize = 256;

/// Which rows a product computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowMode {
    /// Every expert takes every token: rows `[N, E, w]`.
    All,
    /// An expert takes the pairs of its list: rows `[N, k, w]`.
    Listed,
    /// An expert takes every token and keeps those that chose it: rows `[N, k, w]`.
    Chosen,
    /// As [`Self::All`], for the experts that some token chose; every block routes the tokens itself.
    Routed,
}

impl RowMode {
    const ALL: [(Self, &str); 4] = [
        (Self::All, "ALL_ROWS"),
        (Self::Listed, "LISTED_ROWS"),
        (Self::Chosen, "CHOSEN_ROWS"),
        (Self::Routed, "ROUTED_ROWS"),
    ];

    /// As kernels know it.
    pub const fn number(self) -> i32 {
        self as i32
    }
}

/// Place of a mode in the order in which kernels number them.
pub(crate) fn gate_number(mode: GateMode) -> i32 {
    place(&GateMode::ALL, mode)
}

/// Place of an activation in [`ACTIVATIONS`].
pub(crate) fn activation_number(activation: Activation) -> i32 {
    place(&ACTIVATIONS, activation)
}

/// Where `wanted` stands, -1 where it does not.
fn place<T: PartialEq>(all: &[T], wanted: T) -> i32 {
    all.iter().position(|one| *one == wanted).and_then(|place| i32::try_from(place).ok()).unwrap_or(-1)
}

/// The text of `kernels/constants.cuh`.
pub fn c_constants() -> String {
    let mut text = String::from("// Made from src/constants.rs; a test compares the two.\n#pragma once\n\n");
    enumeration(&mut text, "RowMode", RowMode::ALL.map(|(mode, name)| (name.to_owned(), mode.number())));
    enumeration(&mut text, "GateMode", GateMode::ALL.map(|mode| (mode.as_str().to_uppercase(), gate_number(mode))));
    let activations = ACTIVATIONS.map(|of| (of.as_str().to_uppercase(), activation_number(of)));
    enumeration(&mut text, "Activation", [("NO_ACTIVATION".to_owned(), -1)].into_iter().chain(activations));
    text.push('\n');
    for (name, value) in [
        ("GROUP_TOKENS", GROUP_TOKENS),
        ("MAX_SPLITS", MAX_SPLITS),
        ("LIST_THREADS", LIST_THREADS),
        ("SUM_THREADS", SUM_THREADS),
    ] {
        let _ = writeln!(text, "const int {name} = {value};");
    }
    text
}

fn enumeration(text: &mut String, name: &str, values: impl IntoIterator<Item = (String, i32)>) {
    let values: Vec<_> = values.into_iter().map(|(name, value)| format!("{name} = {value}")).collect();
    let _ = writeln!(text, "enum {name} {{ {} }};", values.join(", "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_activation_and_mode_has_a_number_of_its_own() {
        assert_eq!(ACTIVATIONS.map(activation_number), [0, 1, 2, 3]);
        assert!(Activation::ALL.into_iter().all(|activation| activation_number(activation) >= 0));
        assert_eq!(GateMode::ALL.map(gate_number), [0, 1, 2]);
        assert_eq!(RowMode::ALL.map(|(mode, _)| mode.number()), [0, 1, 2, 3]);
    }
}
