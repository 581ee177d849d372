//! Programs that are told to end.

use std::process::Command;

/// `command` with the signals that end a program as a terminal has them: the background jobs of a script, which tests
/// may be, ignore some, and so do the programs that they start.
pub(crate) fn hearing_signals(command: &Command) -> Command {
    let mut hearing = Command::new(command.get_program());
    if cfg!(target_os = "linux") {
        hearing = Command::new("env");
        hearing.arg("--default-signal=HUP,INT,TERM").arg(command.get_program());
    }
    hearing.args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        hearing.current_dir(folder);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => hearing.env(name, value),
            None => hearing.env_remove(name),
        };
    }
    hearing
}
