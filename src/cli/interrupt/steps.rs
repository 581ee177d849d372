//! Work that asks at each step whether it shall end.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use super::{BEFORE, Failure, end_now, on_end, scratch};

/// Ctrl-C and termination of a generation.
#[derive(Debug)]
pub(in crate::cli) struct Interruption {
    /// Becomes true where the work shall end at its next step.
    pub(in crate::cli) is_asked: Arc<AtomicBool>,
    /// What is said where there is no next step, and the program ends at once.
    idle: Arc<Mutex<Option<&'static str>>>,
}

impl Interruption {
    /// The first one ends the work at its next step, the second one, or one that finds no work, the program. There is
    /// none until [`Self::begin_work`].
    pub(in crate::cli) fn listen() -> Result<Self, Failure> {
        let is_asked = Arc::new(AtomicBool::new(false));
        let idle = Arc::new(Mutex::new(Some(BEFORE)));
        let heard = Self { is_asked: Arc::clone(&is_asked), idle: Arc::clone(&idle) };
        on_end(move || {
            // Locked until the program is gone, so that no other end is told meanwhile.
            let idle = lock(&idle);
            if is_asked.swap(true, Ordering::SeqCst) || idle.is_some() {
                end_now(idle.unwrap_or(BEFORE), &[scratch()]);
            }
        })?;
        Ok(heard)
    }

    /// From here on there are steps.
    pub(in crate::cli) fn begin_work(&self) {
        *lock(&self.idle) = None;
    }

    /// What `wait` brings, which an interrupt does not wait for: it says `message`.
    pub(in crate::cli) fn at_once<T>(&self, message: &'static str, wait: impl FnOnce() -> T) -> Result<T, Failure> {
        {
            let mut idle = lock(&self.idle);
            if self.is_asked.load(Ordering::SeqCst) {
                return Err(Failure::interrupted(message.into()));
            }
            *idle = Some(message);
        }
        let brought = wait();
        self.begin_work();
        Ok(brought)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
