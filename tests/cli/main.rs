//! The program as its users meet it: exit codes, what it says, and what it leaves behind.
//!
//! `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY` name the runtime and the operator library.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "../common/mod.rs"]
mod common;

mod accepted;
mod baseline;
mod bench;
mod bench_checkpoint;
mod documents;
mod faults;
mod generate;
mod inspect;
mod instructions;
mod interrupted;
mod interrupted_readers;
mod large;
mod model;
mod ops;
mod outputs;
mod plan;
mod prepare;
mod profile;
mod refused_configs;
mod refused_files;
mod refused_models;
mod refused_tensors;
mod run;
mod run_given;
mod run_random;
mod scene;
#[path = "../support_onnx/mod.rs"]
mod support_onnx;
#[path = "../support_signals/mod.rs"]
mod support_signals;
#[allow(dead_code)]
#[path = "../../xtask/src/synthesize/mod.rs"]
mod synthesize;
mod tensorrt;
mod tensorrt_cache;
mod tensorrt_engines;
mod tensorrt_profiles;
mod threads;
mod usage;
mod verify;
mod verify_page;
mod verify_receipt;
mod verify_table;
