//! Ctrl-C and termination: what they end, and what they come too late for.

#[cfg(feature = "ort")]
mod steps;

#[cfg(feature = "ort")]
pub(super) use steps::Interruption;

use std::{
    env,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{Failure, codes::INTERRUPTED, leave::leave, output_file::is_stdout, signals::on_end};
use crate::onnx::Unfinished;

/// What is said where nothing was done yet.
pub(super) const BEFORE: &str = "interrupted";
const AFTER: &str = "interrupted after its files were written, before that was printed";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing is in its place yet.
    Working,
    /// Finished files are on their way to their places.
    Placing,
    /// Everything is in its place, and the command ends by itself.
    Done,
}

/// What an interrupt finds.
#[derive(Debug)]
struct State {
    stage: Stage,
    /// Whether the work asks now and then whether it shall end.
    is_patient: bool,
    is_asked: bool,
    message: String,
}

impl State {
    /// Hears an interrupt; whether the program must end at once.
    fn hear(&mut self) -> bool {
        let heard_before = std::mem::replace(&mut self.is_asked, true);
        match self.stage {
            Stage::Working => heard_before || !self.is_patient,
            Stage::Placing => false,
            Stage::Done => heard_before,
        }
    }
}

/// How a command ends before its time: with exit code 130 and nothing of what it has begun, or, once its files are on
/// their way to their places, as if nobody had asked.
#[derive(Debug)]
pub(super) struct Ending {
    state: Mutex<State>,
    begun: Vec<Unfinished>,
}

impl Ending {
    /// Of a command that writes in or beside `places` (`-` is stdout) and ends at once.
    pub(super) fn at_once<'a>(places: impl IntoIterator<Item = &'a Path>) -> Result<Arc<Self>, Failure> {
        let ending = Arc::new(Self::before(places));
        ending.listen()?;
        Ok(ending)
    }

    /// What the program says where it ends before its files are in their places.
    pub(super) fn says(&self, message: &str) {
        self.state().message = message.to_owned();
    }

    /// To be made before anything is written; it hears nothing until [`Self::listen`].
    pub(super) fn before<'a>(places: impl IntoIterator<Item = &'a Path>) -> Self {
        let places = places.into_iter().filter(|place| !is_stdout(place));
        let state = State { stage: Stage::Working, is_patient: false, is_asked: false, message: BEFORE.into() };
        Self { state: Mutex::new(state), begun: places.map(Unfinished::before).chain([scratch()]).collect() }
    }

    /// From here on, Ctrl-C and termination are heard.
    pub(super) fn listen(self: &Arc<Self>) -> Result<(), Failure> {
        let ending = Arc::clone(self);
        on_end(move || ending.hear())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state stays locked until the program is gone, so that no file takes its place meanwhile.
    fn hear(&self) {
        let mut state = self.state();
        if state.hear() {
            end_now(&state.message, &self.begun);
        }
    }

    /// Says whether what follows asks [`Self::is_asked_for`] now and then; a second interrupt ends it at once.
    pub(super) fn waits_for_answers(&self, is_patient: bool) {
        self.state().is_patient = is_patient;
    }

    /// Whether the work shall end.
    pub(super) fn is_asked_for(&self) -> bool {
        let state = self.state();
        state.stage == Stage::Working && state.is_asked
    }

    /// Whether finished files may take their places; interrupts come too late from then on.
    pub(super) fn may_place(&self) -> bool {
        let mut state = self.state();
        if state.stage == Stage::Working && !state.is_asked {
            state.stage = Stage::Placing;
        }
        state.stage == Stage::Placing
    }

    /// Puts finished files in their places. Where that fails, an interrupt ends the program at once.
    pub(super) fn place<T>(&self, put: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        if !self.may_place() {
            return Err(self.failure());
        }
        let placed = put();
        match placed {
            Ok(_) => self.done(),
            Err(_) => self.state().stage = Stage::Working,
        }
        placed
    }

    /// Nothing but what is printed is left to do.
    pub(super) fn done(&self) {
        let mut state = self.state();
        state.stage = Stage::Done;
        state.message = AFTER.into();
    }

    /// More work follows behind the files; an interrupt ends it at once and says `message`.
    pub(super) fn goes_on(&self, message: String) -> Result<(), Failure> {
        let mut state = self.state();
        let is_asked = std::mem::take(&mut state.is_asked);
        *state = State { stage: Stage::Working, is_patient: false, is_asked, message };
        if is_asked { Err(Failure::interrupted(state.message.clone())) } else { Ok(()) }
    }

    /// What the program says where it was told to end.
    pub(super) fn failure(&self) -> Failure {
        Failure::interrupted(self.state().message.clone())
    }
}

/// Ends the program at once, with nothing of what it has `begun`. Who calls holds the lock of what may still happen.
fn end_now(message: &str, begun: &[Unfinished]) -> ! {
    begun.iter().for_each(Unfinished::remove);
    Failure::interrupted(message.into()).print();
    leave(INTERRUPTED)
}

/// What runtimes record of a run, wherever it is.
fn scratch() -> Unfinished {
    Unfinished::before(&env::temp_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ending() -> Ending {
        Ending::before([])
    }

    fn heard(ending: &Ending) -> bool {
        ending.state().hear()
    }

    #[test]
    fn work_ends_at_once_or_where_it_next_asks() {
        let ending = ending();
        assert!(heard(&ending));
        let ending = self::ending();
        ending.waits_for_answers(true);
        assert!(!ending.is_asked_for());
        assert!(!heard(&ending));
        assert!(ending.is_asked_for() && !ending.may_place());
        assert!(ending.place(|| Ok(())).is_err_and(|failure| failure.message == BEFORE));
        assert!(heard(&ending), "the second one ends it at once");
    }

    #[test]
    fn files_in_their_places_are_no_failure() {
        for is_patient in [false, true] {
            let ending = ending();
            ending.waits_for_answers(is_patient);
            let placed = ending.place(|| {
                assert!(!heard(&ending) && !heard(&ending));
                Ok(7)
            });
            assert_eq!(placed.ok(), Some(7));
            assert!(!ending.is_asked_for());
            assert!(heard(&ending), "a second one ends what cannot print");
        }
        let ending = ending();
        let failed = ending.place(|| Err::<(), _>(Failure::usage("no place", "make some")));
        assert_eq!(failed.unwrap_err().message, "no place");
        assert_eq!((ending.failure().message.as_str(), heard(&ending)), (BEFORE, true));
        let ending = self::ending();
        ending.done();
        assert_eq!([heard(&ending), heard(&ending)], [false, true]);
        assert_eq!(ending.failure().message, AFTER);
    }

    #[test]
    fn what_follows_the_files_can_be_ended_too() {
        let ending = ending();
        assert!(ending.place(|| Ok(())).is_ok());
        assert!(ending.goes_on("not verified".into()).is_ok());
        assert_eq!(ending.failure().message, "not verified");
        assert!(heard(&ending));
        let ending = self::ending();
        assert!(ending.may_place() && !heard(&ending));
        assert!(ending.goes_on("not verified".into()).is_err());
    }
}
