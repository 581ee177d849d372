//! The `moa-export` program.

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    silence_onnxruntime();
    moa_export::cli::main()
}

/// Runs before Rust's own start, which opens `/dev/null` in place of a stdout that was closed, so that results would be
/// lost without a word.
#[cfg(target_os = "linux")]
#[used]
#[allow(unsafe_code)]
// SAFETY: the loader calls what stands in this section, once and on one thread, as a function that returns.
#[unsafe(link_section = ".init_array")]
static REFUSE_CLOSED_STDOUT: extern "C" fn() = refuse_closed_stdout;

/// Puts a file that cannot be written in the place of a stdout that was closed.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
extern "C" fn refuse_closed_stdout() {
    // SAFETY: the calls keep nothing of the program, and no file of it is open yet whose number they could take.
    unsafe {
        if libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) == -1 {
            let unwritable = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
            if unwritable >= 0 && unwritable != libc::STDOUT_FILENO {
                libc::dup2(unwritable, libc::STDOUT_FILENO);
            }
        }
    }
}

/// Turns the telemetry of ONNX Runtime off where the user has not decided.
///
/// ONNX Runtime 1.31 and 1.32 report the process that loads them before any call can turn that off.
#[allow(unsafe_code)]
fn silence_onnxruntime() {
    const VARIABLE: &str = "ORT_DISABLE_TELEMETRY";
    if env::var_os(VARIABLE).is_none_or(|value| value.is_empty()) {
        // SAFETY: `main` has started no thread, so nothing else reads or writes the environment.
        unsafe { env::set_var(VARIABLE, "1") };
    }
}
