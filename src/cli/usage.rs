//! What was typed, and what is wrong with it.

use std::{
    error::Error,
    ffi::{OsStr, OsString},
    io::{self, IsTerminal, Write},
    num::{IntErrorKind, ParseFloatError, ParseIntError},
    path::{self, Path},
    process::ExitCode,
};

use clap::{
    CommandFactory,
    error::{ContextKind as Part, ContextValue, ErrorKind as Misuse},
};

use super::{Failure, args::Arguments, codes::Code, is_writable, printed, rival_options};

/// The words of the command line; `help --help` is `--help`, which clap's own command `help` does not know, and a
/// number below zero that it does not know as one, such as -1e-3, is joined to its option.
pub(super) fn typed() -> Vec<OsString> {
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
pub(super) fn with_negative_numbers(command: clap::Command) -> clap::Command {
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
pub(super) fn nearest<'a>(typed: &str, names: &[&'a str]) -> Option<&'a str> {
    let is_near = |name: &&&str| strsim::osa_distance(name, typed) == 1;
    if names.contains(&typed) { None } else { names.iter().find(is_near).copied() }
}

fn is_command(word: &str) -> bool {
    Arguments::command().find_subcommand(word).is_some()
}

/// The command that was typed, after a space; nothing where it is the export that needs none.
fn named_command() -> String {
    let typed = first_word().filter(|typed| is_command(typed));
    typed.map(|name| format!(" {name}")).unwrap_or_default()
}

/// Whether nothing is there; what a closed folder hides may be.
fn is_missing(path: &Path) -> bool {
    match path.try_exists() {
        Ok(exists) => !exists,
        Err(error) => error.kind() != io::ErrorKind::PermissionDenied,
    }
}

/// Whether a word has a separator of folders or an extension, as no command has.
fn is_like_a_path(word: &str) -> bool {
    word.contains(path::is_separator) || Path::new(word).extension().is_some()
}

/// What is wrong with the arguments; help and version go to stdout and are no error.
pub(super) fn answer(error: clap::Error) -> Result<ExitCode, Failure> {
    let typed = first_word().filter(|typed| is_missing(Path::new(typed)));
    if let (true, Some(command)) = (error.use_stderr(), typed.as_deref().and_then(meant)) {
        return Err(Failure::usage(
            format!("there is neither a command nor a checkpoint called {:?}", typed.unwrap_or_default()),
            &format!("did you mean `moa-export {command}`?"),
        ));
    }
    let asked = !error.use_stderr();
    if asked || error.kind() == Misuse::DisplayHelpOnMissingArgumentOrSubcommand {
        let can_print = if asked { is_writable() } else { Ok(()) };
        let written = can_print.and_then(|()| error.print()).and_then(|()| std::io::stdout().flush());
        return match printed(written) {
            Err(failure) if asked => Err(failure),
            _ => Ok(ExitCode::from(if asked { 0 } else { Code::Usage.exit() })),
        };
    }
    let was_taken_for_checkpoint =
        |typed: &str| second_command(&error).is_some() || lacks_output(&error) && !is_command(typed);
    if let Some(typed) = typed.filter(|typed| !typed.starts_with('-') && was_taken_for_checkpoint(typed)) {
        let help = match is_like_a_path(&typed) {
            true => "check the path of the checkpoint",
            false => "run `moa-export --help`, which lists the commands",
        };
        return Err(Failure::usage(format!("there is neither a command nor a checkpoint called {typed:?}"), help));
    }
    let command = named_command();
    let help = help_of_json(&error)
        .or_else(|| of_rival(command.trim_start(), &error))
        .or_else(|| similar(&error))
        .or_else(|| option_for(command.trim_start(), &error))
        .or_else(|| missing(&error))
        .unwrap_or_else(|| format!("run `moa-export{command} --help`"));
    Err(Failure::usage(in_words(error), &help))
}

/// What the parser says that an error is about.
fn part(error: &clap::Error, part: Part) -> Option<&str> {
    match error.get(part) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    }
}

/// The same where it may be several.
fn parts(error: &clap::Error, part: Part) -> &[String] {
    match error.get(part) {
        Some(ContextValue::Strings(texts)) => texts,
        _ => &[],
    }
}

/// What follows a checkpoint and is no option, which the parser takes for a command.
fn second_command(error: &clap::Error) -> Option<&str> {
    part(error, Part::InvalidSubcommand).filter(|_| error.kind() == Misuse::ArgumentConflict)
}

/// Whether nothing says where the result goes.
fn lacks_output(error: &clap::Error) -> bool {
    error.kind() == Misuse::MissingRequiredArgument
        && parts(error, Part::InvalidArg).iter().any(|option| option.starts_with("--output "))
}

/// What to do where `--json` takes a file and was given none, or prints and was given one.
fn help_of_json(error: &clap::Error) -> Option<String> {
    let named = match error.kind() {
        Misuse::InvalidValue if part(error, Part::InvalidValue) == Some("") => {
            let option = part(error, Part::InvalidArg)?.strip_suffix(" <FILE>")?;
            return ["--json", "--csv"].contains(&option).then(|| format!("`{option} -` prints to stdout"));
        }
        Misuse::TooManyValues => part(error, Part::InvalidValue)?,
        Misuse::UnknownArgument => part(error, Part::InvalidArg)?,
        _ => second_command(error)?,
    };
    let words: Vec<_> = typed().iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let joined = words.iter().filter_map(|word| word.strip_prefix("--json="));
    let apart = words.windows(2).filter(|pair| pair[0] == "--json").map(|pair| pair[1].as_str());
    let file = joined.chain(apart).find(|file| *file == named)?;
    match file.starts_with('-') {
        true => (file == "-").then(|| "`--json` prints to stdout; leave out `-`".to_owned()),
        false => Some(format!("`--json` prints to stdout; redirect with `> {}`", crate::shell::word(file))),
    }
}

/// What does here what an option of another program does there.
fn of_rival(command: &str, error: &clap::Error) -> Option<String> {
    let option = part(error, Part::InvalidArg).filter(|_| error.kind() == Misuse::UnknownArgument)?;
    rival_options::help_for(command, option).map(ToOwned::to_owned)
}

/// What is spelt almost as what was typed.
fn similar(error: &clap::Error) -> Option<String> {
    let (what, found) = match error.kind() {
        Misuse::InvalidValue => {
            let typed = part(error, Part::InvalidValue)?;
            let same = parts(error, Part::ValidValue).iter().find(|valid| valid.eq_ignore_ascii_case(typed));
            ("value", same.map(String::as_str).or_else(|| part(error, Part::SuggestedValue))?)
        }
        Misuse::UnknownArgument => ("argument", part(error, Part::SuggestedArg)?),
        _ => return None,
    };
    Some(format!("a similar {what} exists: '{found}'"))
}

/// Which option takes what was typed without one, or which command a misplaced option.
fn option_for(command: &str, error: &clap::Error) -> Option<String> {
    let word = part(error, Part::InvalidArg).filter(|_| error.kind() == Misuse::UnknownArgument)?;
    let (option, help) = match command {
        "" if word.starts_with('-') => return of_later_command(word),
        _ if word.starts_with('-') => return None,
        "generate" => {
            return Some(
                "the input is given with --input; a text with spaces takes quotes: --input 'two words'".into(),
            );
        }
        "verify" => ("--checkpoint", "the checkpoint is given with --checkpoint"),
        "run" => ("--inputs", "inputs are given with --inputs, outputs with --outputs"),
        "profile" => ("--inputs", "inputs are given with --inputs"),
        "plan" => ("--gpu", "the GPU is given with --gpu"),
        "baseline" | "build" | "prepare" => ("-o", "the output is given with -o"),
        _ => return None,
    };
    let is_given = typed().iter().any(|typed| typed.to_string_lossy().split('=').next() == Some(option));
    (!is_given).then(|| help.into())
}

/// What an option that is needed would say, where it is all that is missing.
fn missing(error: &clap::Error) -> Option<String> {
    let [option] = parts(error, Part::InvalidArg) else { return None };
    let help = match option.split_once(' ').filter(|_| error.kind() == Misuse::MissingRequiredArgument)? {
        ("--output", value) => format!("say where the result goes: -o {}", value.trim_matches(['<', '>'])),
        ("--checkpoint", _) => "name what it was exported from: --checkpoint CHECKPOINT".into(),
        ("--input", _) if !io::stdin().is_terminal() => {
            "--input - reads the lines of stdin; a text, or a file with a text a line, is given as --input 'two words'"
                .into()
        }
        ("--input", _) => "give the text, or a file with a text a line: --input 'two words'".into(),
        ("--inputs", "<FILE>") => "give inputs with --inputs, or let --random make some".into(),
        ("--inputs", _) => "give texts, token ids or tensors by name: --inputs FILE".into(),
        _ => return None,
    };
    Some(help)
}

/// What to do with an option of a command that was typed after it.
fn of_later_command(option: &str) -> Option<String> {
    let (all, long) = (Arguments::command(), option.strip_prefix("--")?);
    let known = |command: &clap::Command| -> Option<String> {
        let names: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
        let same = names.iter().copied().find(|name| *name == long);
        same.or_else(|| nearest(long, &names)).map(ToOwned::to_owned)
    };
    let typed = typed();
    let is_output = |option: &OsString| option == "-o" || option == "--output";
    let words = typed.windows(2).skip(1).filter(|pair| !is_output(&pair[0])).map(|pair| &pair[1]);
    let mut commands = words.filter_map(|word| all.find_subcommand(word));
    let (name, command) = commands.find_map(|command| Some((known(command)?, command.get_name())))?;
    Some(format!("--{name} is an option of `moa-export {command}`, and the command comes first"))
}

/// The message of the parser, but for numbers, of which it speaks as Rust does, and for what follows a checkpoint.
fn in_words(mut error: clap::Error) -> String {
    if let Some(second) = second_command(&error) {
        return format!("'{second}' follows the checkpoint, where only options do; the output is given with -o");
    }
    if let (Some(option), Some(value), Some(source)) =
        (part(&error, Part::InvalidArg), part(&error, Part::InvalidValue), error.source())
    {
        return format!("invalid value '{value}' for '{option}': {}", fault(value, source));
    }
    for aside in [Part::SuggestedArg, Part::SuggestedSubcommand, Part::SuggestedValue, Part::Suggested, Part::Usage] {
        error.remove(aside);
    }
    // What is left behind the message is a paragraph about `--help`.
    let text = error.to_string();
    let message = text.rsplit_once("\n\n").map_or(text.as_str(), |(message, _)| message);
    message.strip_prefix("error: ").unwrap_or(message).to_owned()
}

/// Why an option does not take `value`.
fn fault(value: &str, source: &(dyn Error + 'static)) -> String {
    let digits = value.strip_prefix('-').unwrap_or_default();
    let is_negative = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let words = match source.downcast_ref().map(ParseIntError::kind) {
        Some(IntErrorKind::PosOverflow) => "it is too large",
        Some(IntErrorKind::NegOverflow) => "it is too small",
        Some(_) if is_negative => "it must not be negative",
        Some(_) => "it must be a whole number",
        None if source.is::<ParseFloatError>() => "it must be a number",
        None => return source.to_string(),
    };
    words.into()
}

#[cfg(test)]
mod tests {
    use super::*;

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
