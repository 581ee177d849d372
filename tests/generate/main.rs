//! Translating with exported folders. Needs `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(feature = "ort")]

mod command;
mod ends;
mod folders;
mod goldens;
mod input;
mod language_models;
mod notes;
#[path = "../support_signals/mod.rs"]
mod support_signals;
mod unmasked;
mod unseen;

use std::path::{Path, PathBuf};

use moa_export::{
    backend::{OrtOperators, OrtOptions},
    checkpoint::Checkpoint,
    export::{ExportOptions, SideFileOptions, export},
    generate::{Translator, TranslatorOptions},
};
use moa_graphs::{Form, Options, Precision};
use tempfile::TempDir;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// The trained translator, exported with its vocabulary; removed when dropped.
fn exported(form: Form) -> TempDir {
    exported_as(form, Precision::Fp32)
}

fn exported_as(form: Form, precision: Precision) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&data("nmt"), None).unwrap();
    let graph = Options { form, precision, ..Options::default() };
    let side_files = SideFileOptions { beside: Some(data("nmt")), ..SideFileOptions::default() };
    let options = ExportOptions { graph, side_files, ..ExportOptions::default() };
    export(&checkpoint, &folder.path().join("out"), &options).unwrap();
    folder
}

/// A translation model whose source and target have nothing in common.
const UNTIED: &str = "variants/v_untied";

/// Symbols of source and target, made of their ids.
type Symbols<'a> = [&'a dyn Fn(u32) -> String; 2];

/// Dictionaries of [`UNTIED`].
fn untied_dictionaries(symbols: Symbols<'_>) -> [String; 2] {
    let text = |rows: u32, symbol: &dyn Fn(u32) -> String| (4..rows).map(|id| format!("{} 1\n", symbol(id))).collect();
    [text(19, symbols[0]), text(26, symbols[1])]
}

fn out(folder: &TempDir) -> PathBuf {
    folder.path().join("out")
}

fn options(operators: OrtOperators, batch: usize) -> TranslatorOptions {
    let runtime = OrtOptions { threads: Some(1), ..OrtOptions::default() };
    TranslatorOptions { operators, runtime, batch, ..TranslatorOptions::default() }
}

fn translator(folder: &TempDir, operators: OrtOperators, batch: usize) -> Translator {
    Translator::open(&out(folder), options(operators, batch)).unwrap_or_else(|error| panic!("{error}"))
}
