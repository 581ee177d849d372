//! The `moa-export` program.

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    silence_onnxruntime();
    moa_export::cli::main()
}

/// Turns the telemetry of ONNX Runtime off where the user has not decided.
///
/// ONNX Runtime 1.31 reports the process that loads it before any call can turn that off.
#[allow(unsafe_code)]
fn silence_onnxruntime() {
    const VARIABLE: &str = "ORT_DISABLE_TELEMETRY";
    if env::var_os(VARIABLE).is_none() {
        // SAFETY: `main` has started no thread, so nothing else reads or writes the environment.
        unsafe { env::set_var(VARIABLE, "1") };
    }
}
