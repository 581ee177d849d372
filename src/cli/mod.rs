//! The command line: what was typed → what is meant → work. Nothing depends on this module.

mod args;
mod export;
mod failure;
mod ops;
mod run;
mod table;
mod verify;

use std::{io::Write, process::ExitCode};

use clap::Parser;

use args::{Arguments, Command};
use failure::Failure;

/// Parses the command line, does what it says, and returns the exit code.
///
/// stdout carries results, stderr one `error[…]` line and at most one `help:` line.
pub fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    let outcome = std::panic::catch_unwind(|| dispatch(arguments));
    let outcome = outcome.unwrap_or_else(|_| Err(Failure::bug()));
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            failure.print();
            failure.exit_code()
        }
    }
}

/// Prints clap's message; help and version go to stdout and are no error.
fn usage(error: &clap::Error) -> ExitCode {
    let printed = error.print();
    let code = if error.use_stderr() { failure::USAGE } else { 0 };
    if printed.is_err() { ExitCode::SUCCESS } else { ExitCode::from(code) }
}

fn dispatch(arguments: Arguments) -> Result<ExitCode, Failure> {
    match (arguments.command, arguments.export) {
        (Some(Command::Export(arguments)), _) | (None, Some(arguments)) => export::run(&arguments),
        (Some(Command::Verify(arguments)), _) => verify::run(&arguments),
        (Some(Command::Run(arguments)), _) => run::run(&arguments),
        (Some(Command::Ops(arguments)), _) => ops::run(&arguments),
        (None, None) => Err(Failure::usage("nothing to do", Some("run `moa-export --help`"))),
    }
}

/// Writes a result to stdout; a reader that left early is no error.
fn print_result(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::io(&error, "stdout")),
        _ => Ok(()),
    }
}
