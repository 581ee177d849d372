//! The command line: what was typed → what is meant → work. Nothing depends on this module.

mod apart;
mod args;
mod baseline;
mod bench;
mod build;
mod codes;
mod document;
mod export;
mod failure;
#[cfg(feature = "ort")]
mod generate;
mod generate_args;
#[cfg(feature = "ort")]
mod generate_input;
#[cfg(feature = "ort")]
mod generate_text;
mod inspect;
mod interrupt;
mod leave;
mod neighbours;
mod ops;
mod output_file;
mod plan;
mod prepare;
mod profile;
mod profile_args;
mod profile_inputs;
mod profile_report;
mod progress;
mod receipt;
mod run;
mod run_args;
mod shape_args;
mod signals;
mod size_args;
mod table;
mod tensorrt_args;
mod verify;
mod verify_receipt;
mod verify_report;

use std::{
    borrow::Cow,
    ffi::{OsStr, OsString},
    io::{ErrorKind, IsTerminal, Write},
    ops::ControlFlow,
    path::Path,
    process::ExitCode,
    sync::{Mutex, PoisonError},
};

use clap::{CommandFactory, FromArgMatches, error::ErrorKind as Misuse};

use crate::checkpoint::Checkpoint;
use args::{Arguments, Command};
use failure::Failure;
use moa_graphs::families::Config;

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
        let matches = with_negative_numbers(Arguments::command()).try_get_matches_from(typed());
        match matches.and_then(|matches| Arguments::from_arg_matches(&matches)) {
            Ok(arguments) => dispatch(arguments),
            Err(error) => usage(&error),
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

/// The words of the command line; `help --help` is `--help`, which clap's own command `help` does not know, and a
/// number below zero that it does not know as one, such as -1e-3, is joined to its option.
fn typed() -> Vec<OsString> {
    let mut words: Vec<_> = std::env::args_os().collect();
    if let [_, help, again] = &words[..]
        && help == "help"
        && (again == "--help" || again == "-h")
    {
        words.remove(1);
    }
    for index in (1..words.len()).rev() {
        if belongs_together(&words[index - 1], &words[index]) {
            let value = words.remove(index);
            words[index - 1].push("=");
            words[index - 1].push(value);
        }
    }
    words
}

/// Whether an option is followed by a number below zero.
fn belongs_together(option: &OsStr, value: &OsStr) -> bool {
    let option = option.to_str().and_then(|option| option.strip_prefix("--"));
    let number = value.to_str().filter(|value| value.starts_with('-')).and_then(|value| value.parse::<f64>().ok());
    option.is_some_and(|option| !option.is_empty() && !option.contains('=')) && number.is_some()
}

/// What follows the name of this program, where it is text.
fn first_word() -> Option<String> {
    typed().into_iter().nth(1)?.into_string().ok()
}

/// A number below zero is the value of an option, whose range is checked, and no option of its own.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let option = |argument: clap::Arg| match argument.get_action().takes_values() && !argument.is_positional() {
        true => argument.allow_negative_numbers(true),
        false => argument,
    };
    command.mut_args(option).mut_subcommands(with_negative_numbers)
}

/// What a mistyped command may have meant.
fn meant(typed: &str) -> Option<String> {
    let command = Arguments::command();
    let names: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
    nearest(typed, &names).map(ToOwned::to_owned)
}

/// The first of the `names` from which `typed` differs by one letter; none where it is one of them.
fn nearest<'a>(typed: &str, names: &[&'a str]) -> Option<&'a str> {
    let is_near = |name: &&&str| strsim::osa_distance(name, typed) == 1;
    if names.contains(&typed) { None } else { names.iter().find(is_near).copied() }
}

/// The command that was typed, after a space; nothing where it is the export that needs none.
fn named_command() -> String {
    let names = Arguments::command();
    let typed = first_word().filter(|typed| names.find_subcommand(typed).is_some());
    typed.map(|name| format!(" {name}")).unwrap_or_default()
}

/// What is wrong with the arguments; help and version go to stdout and are no error.
fn usage(error: &clap::Error) -> Result<ExitCode, Failure> {
    let typed = first_word().filter(|typed| !Path::new(typed).exists());
    if let (true, Some(command)) = (error.use_stderr(), typed.as_deref().and_then(meant)) {
        return Err(Failure::usage(
            format!("there is neither a command nor a checkpoint called {:?}", typed.unwrap_or_default()),
            Some(&format!("did you mean `moa-export {command}`?")),
        ));
    }
    let asked = !error.use_stderr();
    if asked || error.kind() == Misuse::DisplayHelpOnMissingArgumentOrSubcommand {
        let can_print = if asked { is_writable() } else { Ok(()) };
        let printed = can_print.and_then(|()| error.print()).and_then(|()| std::io::stdout().flush());
        return match self::printed(printed) {
            Err(failure) if asked => Err(failure),
            _ => Ok(ExitCode::from(if asked { 0 } else { codes::Code::Usage.exit() })),
        };
    }
    let text = error.to_string();
    let mut paragraphs = text.split("\n\n").map(str::trim);
    let said = paragraphs.next().unwrap_or_default().trim_start_matches("error: ");
    let tip = paragraphs.find_map(|paragraph| paragraph.strip_prefix("tip: "));
    let tip = tip.filter(|tip| !tip.starts_with("to pass "));
    let command = named_command();
    let help = format!("run `moa-export{command} --help`");
    Err(match typed {
        Some(typed) if said.starts_with("the subcommand '") && !typed.starts_with('-') => Failure::usage(
            format!("there is neither a command nor a checkpoint called {typed:?}"),
            Some("run `moa-export --help`, which lists the commands"),
        ),
        _ => {
            let of_json = help_of_json(said);
            let known = of_json.as_deref().or(tip).or_else(|| option_for(&command, said));
            Failure::usage(in_words(said), Some(known.unwrap_or(&help)))
        }
    })
}

/// What to do where `--json` takes a file and was given none, or prints and was given one.
fn help_of_json(said: &str) -> Option<String> {
    let lacks_file = |option: &&str| said.starts_with(&format!("a value is required for '{option} <FILE>'"));
    if let Some(option) = ["--json", "--csv"].into_iter().find(lacks_file) {
        return Some(format!("`{option} -` prints to stdout"));
    }
    let words: Vec<_> = typed().iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let joined = words.iter().filter_map(|word| word.strip_prefix("--json="));
    let apart = words.windows(2).filter(|pair| pair[0] == "--json").map(|pair| pair[1].as_str());
    let file = joined.chain(apart).find(|file| said.contains(&format!("'{file}'")))?;
    match file.starts_with('-') {
        true => (file == "-").then(|| "`--json` prints to stdout; leave out `-`".to_owned()),
        false => Some(format!("`--json` prints to stdout; redirect with `> {}`", crate::shell::word(file))),
    }
}

/// Which option takes what was typed without one.
fn option_for(command: &str, said: &str) -> Option<&'static str> {
    if command.trim_start() == "run" && said.ends_with("--inputs <FILE>") {
        return Some("give inputs with --inputs, or let --random make some");
    }
    let word = said.strip_prefix("unexpected argument '")?;
    let (option, help) = match command.trim_start() {
        _ if word.starts_with('-') => return None,
        "generate" => {
            return Some("the input is given with --input; a text with spaces takes quotes: --input 'two words'");
        }
        "verify" => ("--checkpoint", "the checkpoint is given with --checkpoint"),
        "run" => ("--inputs", "inputs are given with --inputs, outputs with --outputs"),
        "profile" => ("--inputs", "inputs are given with --inputs"),
        "plan" => ("--gpu", "the GPU is given with --gpu"),
        "baseline" | "build" | "prepare" => ("-o", "the output is given with -o"),
        _ => return None,
    };
    let is_given = typed().iter().any(|typed| typed.to_string_lossy().split('=').next() == Some(option));
    (!is_given).then_some(help)
}

/// The parser writes ranges and faults of numbers as Rust does, and takes what follows a checkpoint for a command.
fn in_words(message: &str) -> String {
    const NEGATIVE: &str = "it must not be negative";
    const NUMBERS: [(&str, &str); 6] = [
        ("invalid digit found in string", "it must be a whole number"),
        ("cannot parse integer from empty string", "it must be a whole number"),
        ("number too large to fit in target type", "it is too large"),
        ("number too small to fit in target type", "it is too small"),
        ("invalid float literal", "it must be a number"),
        ("cannot parse float from empty string", "it must be a number"),
    ];
    let second = message.strip_prefix("the subcommand '");
    if let Some((second, _)) = second.and_then(|rest| rest.split_once("' cannot be used with")) {
        return format!("'{second}' follows the checkpoint, where only options do; the output is given with -o");
    }
    if let Some((before, words)) = NUMBERS.iter().find_map(|(rust, words)| Some((message.strip_suffix(rust)?, words))) {
        let typed = before.split('\'').nth(1).and_then(|typed| typed.strip_prefix('-')).unwrap_or_default();
        let is_negative = !typed.is_empty() && typed.bytes().all(|byte| byte.is_ascii_digit());
        return format!("{before}{}", if is_negative && !words.contains("small") { NEGATIVE } else { words });
    }
    match message.rsplit_once(" is not in ") {
        Some((before, range)) => format!("{before} is not in {}", range.replacen("..=", " to ", 1)),
        None => message.to_owned(),
    }
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
            Err(Failure::usage("this build has no ONNX Runtime", Some("build with default features")))
        }
        (Some(Command::Inspect(arguments)), _) => inspect::run(&arguments),
        (Some(Command::Baseline(arguments)), _) => baseline::run(&arguments),
        (Some(Command::Plan(arguments)), _) => plan::run(&arguments),
        (Some(Command::Prepare(arguments)), _) => prepare::run(&arguments),
        (Some(Command::Build(arguments)), _) => build::run(&arguments),
        (Some(Command::Profile(arguments)), _) => profile::run(&arguments),
        (Some(Command::Ops(arguments)), _) => ops::run(&arguments),
        (None, None) => Err(Failure::usage("nothing to do", Some("run `moa-export --help`"))),
    }
}

/// Opens a checkpoint and says what is odd about it.
fn open_checkpoint(path: &Path, config: Option<&Path>) -> Result<Checkpoint, Failure> {
    let checkpoint = Checkpoint::open(path, config)?;
    checkpoint.warnings().iter().for_each(|warning| note(warning));
    Ok(checkpoint)
}

/// Names keys of a configuration that nothing reads where one is absent that is spelt almost so.
fn note_of_keys(config: &Config) {
    for (key, meant) in config.misspelt() {
        note(&format!("{}: nothing reads \"{key}\"; did you mean \"{meant}\"?", config.origin()));
    }
}

/// Names the first line with tokens that the dictionary does not have, and how many others there are; of each line, how
/// many tokens it has, and how many of them are unknown.
fn note_of_unknown(lines: &[(usize, usize)], place: impl Fn(usize) -> String) {
    let mut unknown_lines = lines.iter().enumerate().filter(|(_, (_, unknown))| *unknown > 0);
    let Some((index, (all, unknown))) = unknown_lines.next() else { return };
    let others = match unknown_lines.count() {
        0 => String::new(),
        1 => ", and 1 more line has such tokens".to_owned(),
        count => format!(", and {count} more lines have such tokens"),
    };
    note(&format!("{}: {unknown} of {all} tokens are not in the dictionary{others}", place(index)));
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

    #[test]
    fn typing_mistakes_are_understood() {
        for (typed, command) in [
            ("vrfy", None),
            ("verfy", Some("verify")),
            ("verifyy", Some("verify")),
            ("basline", Some("baseline")),
            ("rum", Some("run")),
            ("run", None),
        ] {
            assert_eq!(meant(typed).as_deref(), command, "{typed}");
        }
    }
}
