//! The C++ sources that are made from tables in Rust.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use moa_cuda::{Element, c_constants, c_header, module_source};

/// Set to write the sources instead of comparing them.
const UPDATE: &str = "UPDATE_KERNEL_SOURCES";

fn check(name: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels").join(name);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let advice = format!("is not what the tables say; {UPDATE}=1 cargo test -p moa-cuda --test sources writes it");
    for (index, (found, expected)) in found.lines().zip(text.lines()).enumerate() {
        assert_eq!(found, expected, "line {} of {name} {advice}", index + 1);
    }
    assert_eq!(found.len(), text.len(), "the end of {name} {advice}");
}

#[test]
fn parameters_are_what_the_table_says() {
    check("parameters.cuh", &c_header());
}

#[test]
fn constants_are_those_of_the_planner() {
    check("constants.cuh", &c_constants());
}

#[test]
fn modules_hold_what_the_catalog_says() {
    for element in Element::ALL {
        check(&format!("{}.cu", element.module()), &module_source(element));
    }
}
