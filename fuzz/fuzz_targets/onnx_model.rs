//! An ONNX file: every byte string is either refused or answers every question about it.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use moa_export::onnx::{inline::inline_functions, read_model};

fuzz_target!(|bytes: &[u8]| {
    let Ok(folder) = tempfile::tempdir() else { return };
    let path = folder.path().join("model.onnx");
    if fs::write(&path, bytes).is_err() {
        return;
    }
    let Ok(file) = read_model(&path) else { return };
    let _ = (file.inputs(), file.outputs(), file.masks(), file.looked_up_rows(), file.position_tables());
    let _ = (file.counted_positions(), file.given_positions(), file.longest_row());
    for weight in file.graph().into_iter().flat_map(|graph| &graph.initializer) {
        let _ = file.initializer_values(&weight.name);
    }
    let _ = inline_functions(file.model());
});
