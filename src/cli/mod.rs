//! The command line: what was typed → what is meant → work. Nothing depends on this module.

mod apart;
mod args;
mod backends;
mod baseline;
mod bench;
mod build;
mod codes;
mod document;
mod export;
mod exported;
mod failure;
mod generate;
mod inspect;
mod interrupt;
mod leave;
mod module_labels;
mod neighbours;
mod notes;
mod ops;
mod output_file;
mod plan;
mod prepare;
mod presets;
mod profile;
mod progress;
mod receipt;
mod rival_options;
mod run;
mod shape_args;
mod signals;
mod size_args;
mod table;
mod tensorrt_args;
mod text_input;
mod tolerance;
mod usage;
mod verify;

use std::{
    borrow::Cow,
    io::{ErrorKind, IsTerminal, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Mutex, PoisonError},
};

use clap::{CommandFactory, FromArgMatches};

use crate::{checkpoint::Checkpoint, file_names::graphs_in, files::name_of};
use args::{Arguments, Command};
use failure::Failure;

/// Where and why code panicked last; a panic of a runtime is reported by its backend, one of ours by [`main`].
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Parses the command line, does what it says, and returns the exit code.
///
/// stdout carries results, stderr `note:` lines, one `error[…]` line and at most one `help:` line.
pub fn main() -> ExitCode {
    signals::outlive_file_size_limits();
    std::panic::set_hook(Box::new(|panic| {
        *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = panic.to_string();
    }));
    let outcome = caught(|| {
        let matches = usage::with_negative_numbers(Arguments::command()).try_get_matches_from(usage::typed());
        match matches.and_then(|matches| Arguments::from_arg_matches(&matches)) {
            Ok(arguments) => dispatch(arguments),
            Err(error) => usage::answer(error),
        }
    });
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.code().exit())
        }
    }
}

/// What `run` returns; where it panics, that this is a bug of ours.
fn caught<T>(run: impl FnOnce() -> Result<T, Failure> + std::panic::UnwindSafe) -> Result<T, Failure> {
    let outcome = std::panic::catch_unwind(run);
    outcome.unwrap_or_else(|_| Err(Failure::bug(&LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner))))
}

fn dispatch(arguments: Arguments) -> Result<ExitCode, Failure> {
    match (arguments.command, arguments.export) {
        (Some(Command::Export(arguments)), _) | (None, Some(arguments)) => export::run(&arguments),
        (Some(Command::Verify(arguments)), _) => verify::run(&arguments),
        (Some(Command::Run(arguments)), _) => run::run(&arguments),
        (Some(Command::Bench(arguments)), _) => bench::run(&arguments),
        #[cfg(feature = "ort")]
        (Some(Command::Generate(arguments)), _) => generate::run(&arguments),
        #[cfg(not(feature = "ort"))]
        (Some(Command::Generate(_)), _) => {
            Err(Failure::usage("this build has no ONNX Runtime", "build with default features"))
        }
        (Some(Command::Inspect(arguments)), _) => inspect::run(&arguments),
        (Some(Command::Baseline(arguments)), _) => baseline::run(&arguments),
        (Some(Command::Plan(arguments)), _) => plan::run(&arguments),
        (Some(Command::Prepare(arguments)), _) => prepare::run(&arguments),
        (Some(Command::Build(arguments)), _) => build::run(&arguments),
        (Some(Command::Profile(arguments)), _) => profile::run(&arguments),
        (Some(Command::Ops(arguments)), _) => ops::run(&arguments),
        (None, None) => Err(Failure::usage("nothing to do", "run `moa-export --help`")),
    }
}

/// Opens a checkpoint and says what is odd about it.
fn open_checkpoint(path: &Path, config: Option<&Path>) -> Result<Checkpoint, Failure> {
    let checkpoint = Checkpoint::open(path, config)?;
    checkpoint.warnings().iter().for_each(|warning| note(warning));
    Ok(checkpoint)
}

/// The file of one graph: the only one of a folder, or `model` itself.
fn only_graph(model: &Path) -> Result<PathBuf, Failure> {
    if !model.is_dir() {
        return Ok(model.to_owned());
    }
    let graphs = graphs_in(model)?;
    let names: Vec<_> = graphs.iter().map(|(_, graph)| name_of(graph)).collect();
    if let [first, .., last] = names.as_slice() {
        let held = names[..names.len() - 1].join(", ");
        let message = format!("{} holds {held} and {last}, and one graph is taken", model.display());
        return Err(Failure::usage(message, &format!("give {}", model.join(first).display())));
    }
    Ok(graphs.into_iter().next().map_or_else(|| model.to_owned(), |(_, graph)| graph))
}

/// Refuses a model that cannot be looked at, and a folder that cannot be entered, whose files would seem to be missing.
fn must_be_open(model: &Path) -> Result<(), Failure> {
    match std::fs::metadata(model.join(".")) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(Failure::closed(&error, model)),
        _ => Ok(()),
    }
}

/// Says on stderr what is no error.
fn note(text: &str) {
    print_aside(&format!("note: {}\n", one_line(text)));
}

/// The text without ends of lines, which names of files may have.
fn one_line(text: &str) -> String {
    const ENDS: [char; 7] = ['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}'];
    text.split(ENDS).map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Writes to stderr.
fn print_aside(text: &str) {
    let _closed_stderr_is_no_error = std::io::stderr().write_all(visible(text).as_bytes());
}

/// The text with control characters, but ends of lines and tabs, as escapes: names in files give a terminal no orders.
fn visible(text: &str) -> Cow<'_, str> {
    escaped_where(text, |c| c.is_control() && !matches!(c, '\n' | '\t'))
}

/// The text on one line, its control characters as escapes.
fn on_one_line(text: &str) -> Cow<'_, str> {
    escaped_where(text, char::is_control)
}

fn escaped_where(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return text.into();
    }
    text.chars().map(|c| if is_escaped(c) { c.escape_debug().to_string() } else { c.into() }).collect()
}

/// Writes a result to stdout.
fn print_result(text: &str) -> Result<(), Failure> {
    print_part(text).map(|_whoever_reads| ())
}

/// Writes a part of a result to stdout; `Break` where nobody reads it any more.
fn print_part(text: &str) -> Result<ControlFlow<()>, Failure> {
    let mut stdout = std::io::stdout().lock();
    let shown = if stdout.is_terminal() { visible(text) } else { text.into() };
    let written = is_writable().and_then(|()| stdout.write_all(shown.as_bytes()));
    printed(written.and_then(|()| stdout.flush()))
}

/// Asks the system whether stdout can be written at all, which the standard library takes for granted.
#[cfg(unix)]
fn is_writable() -> std::io::Result<()> {
    use std::os::fd::AsFd;
    match std::io::stdout().as_fd().try_clone_to_owned() {
        Ok(copy) => std::fs::File::from(copy).write(&[]).map(|_nothing| ()),
        Err(_too_many_files) => Ok(()),
    }
}

#[cfg(not(unix))]
#[allow(clippy::unnecessary_wraps)]
fn is_writable() -> std::io::Result<()> {
    Ok(())
}

/// A reader of stdout that left early is no error.
fn printed(outcome: std::io::Result<()>) -> Result<ControlFlow<()>, Failure> {
    match outcome {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(error) => Err(Failure::io(&error, "stdout")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_give_a_terminal_no_orders() {
        assert_eq!(visible("größe\tone\n"), "größe\tone\n");
        assert_eq!(visible("a\u{1b}]0;b\u{7}\u{9b}31m\r\n"), "a\\u{1b}]0;b\\u{7}\\u{9b}31m\\r\n");
    }

    #[test]
    fn what_breaks_is_a_bug_that_is_to_be_reported() {
        let failure = caught(|| -> Result<(), _> { panic!("an invariant does not hold") }).unwrap_err();
        assert_eq!(failure.code().exit(), 70);
        assert!(failure.message.starts_with("moa-export broke, which is a bug of ours"), "{}", failure.message);
        assert_eq!(caught(|| Ok(3)).ok(), Some(3));
    }
}
