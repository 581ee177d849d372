//! What the program does with signals.
#![allow(unsafe_code)]

use super::Failure;

/// Signals that end a program and that [`on_end`] hears.
#[cfg(unix)]
const ENDINGS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Calls `handler`, on a thread of its own, at Ctrl-C, at termination and where the terminal goes. What was ignored
/// when the program began stays ignored: `nohup` and shells of background jobs ask for that.
///
/// # Errors
///
/// Where there is a handler already, or the system takes none or refuses its thread.
pub(super) fn on_end(handler: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    #[cfg(unix)]
    let ignored: Vec<_> = ENDINGS.into_iter().filter(|signal| is_ignored(*signal)).collect();
    ctrlc::set_handler(handler).map_err(|error| {
        let why = match error {
            ctrlc::Error::System(error) => error.to_string(),
            error => error.to_string(),
        };
        Failure::not_heard(format!("no thread that listens for Ctrl-C could be started: {why}"))
    })?;
    #[cfg(unix)]
    ignored.into_iter().for_each(ignore);
    Ok(())
}

/// Lets a write beyond the limit of file sizes fail like one to a full disk, where the system would end the program.
pub(super) fn outlive_file_size_limits() {
    #[cfg(unix)]
    ignore(libc::SIGXFSZ);
}

#[cfg(unix)]
fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: nothing is set, and where the call succeeds it has filled `action`.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(unix)]
fn ignore(signal: libc::c_int) {
    // SAFETY: no code of ours runs at a signal that is ignored.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}
