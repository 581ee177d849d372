//! Ending the program while other threads work.
#![allow(unsafe_code)]

/// Ends the program at once, from any thread. What is registered for an ordinary end does not run: it takes down
/// runtimes whose threads still compute, and they would crash.
pub(super) fn leave(code: u8) -> ! {
    #[cfg(unix)]
    // SAFETY: the call reads no memory of the program and does not return.
    unsafe {
        libc::_exit(code.into())
    }
    #[cfg(not(unix))]
    std::process::exit(code.into())
}
