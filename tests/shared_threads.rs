//! Sessions of one process share its threads. Alone in its process: every thread counts.
#![cfg(all(feature = "ort", target_os = "linux"))]
#![allow(clippy::unwrap_used)]

#[path = "common/mod.rs"]
mod common;

use common::data;
use moa_export::{
    backend::{OrtOptions, Runner, ort_function},
    checkpoint::Checkpoint,
    export::{ExportOptions, export},
    onnx::read_model,
};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn only_sessions_that_want_another_number_or_their_own_start_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    export(&Checkpoint::open(&data("mlm"), None).unwrap(), &path, &ExportOptions::default()).unwrap();
    let model = read_model(&path).unwrap();
    let mut kept: Vec<Box<dyn Runner>> = Vec::new();
    let mut started = |threads_of_session, own_threads| {
        let before = threads();
        let options = OrtOptions { threads: Some(threads_of_session), own_threads, ..OrtOptions::default() };
        kept.push(ort_function(options).unwrap().load(&model).unwrap());
        threads() - before
    };
    assert!(started(3, false) >= 2, "the caller's own thread is the third; the runtime may have one for itself");
    assert_eq!(started(3, false), 0);
    assert_eq!(started(2, false), 1);
    assert_eq!(started(3, true), 2);
    assert_eq!(started(3, false), 0);
}
