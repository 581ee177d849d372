//! Starting programs whose output stays visible.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// An output of a program.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// The command as one would type it.
fn typed(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args()).map(|word| word.to_string_lossy());
    let quoted = words.map(|word| if word.contains([' ', '*']) { format!("'{word}'") } else { word.into_owned() });
    quoted.collect::<Vec<_>>().join(" ")
}

fn announce(command: &Command) {
    println!("$ {}", typed(command));
}

fn cannot_start(command: &Command, error: &io::Error) -> String {
    format!("{} cannot be started: {error}", command.get_program().to_string_lossy())
}

/// Runs `command` and fails where it does.
pub(crate) fn run(command: &mut Command) -> Result<(), String> {
    announce(command);
    let status = command.status().map_err(|error| cannot_start(command, &error))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` failed ({status})", typed(command))) }
}

/// Runs `command` and returns what it writes to its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    announce(command);
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| cannot_start(command, &error))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("`{}` failed ({})", typed(command), output.status))
    }
}

/// What `command` prints, unannounced; else why it cannot: the first line that it complains with.
pub(crate) fn printed(command: &mut Command) -> Result<String, String> {
    let output = command
        .output()
        .map_err(|error| format!("{} cannot be started ({error})", command.get_program().to_string_lossy()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let first = complaint.lines().map(|line| line.trim().trim_start_matches("error: ")).find(|line| !line.is_empty());
    let program = command.get_program().to_string_lossy();
    Err(first.map_or_else(|| format!("{program} failed ({})", output.status), str::to_owned))
}

/// Runs `command`, lets all output through and hands each line of `stream` to `see` as well.
pub(crate) fn watch(command: &mut Command, stream: Stream, mut see: impl FnMut(&str)) -> Result<ExitStatus, String> {
    announce(command);
    match stream {
        Stream::Stdout => command.stdout(Stdio::piped()),
        Stream::Stderr => command.stderr(Stdio::piped()),
    };
    let mut child = command.spawn().map_err(|error| cannot_start(command, &error))?;
    let copied = match (stream, child.stdout.take(), child.stderr.take()) {
        (Stream::Stdout, Some(output), _) => copy(output, &mut io::stdout(), &mut see),
        (Stream::Stderr, _, Some(output)) => copy(output, &mut io::stderr(), &mut see),
        _ => Ok(()),
    };
    let status = child.wait().map_err(|error| format!("`{}`: {error}", typed(command)))?;
    copied.map_err(|error| format!("output of `{}`: {error}", typed(command)))?;
    Ok(status)
}

/// Passes on every line; lines that are no UTF-8 pass unchanged.
fn copy(from: impl Read, to: &mut impl Write, see: &mut impl FnMut(&str)) -> io::Result<()> {
    let mut reader = BufReader::new(from);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        to.flush()?;
        see(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
    Ok(())
}

/// Runs `work` between a headline and the time that it took.
pub(crate) fn stage<T>(title: &str, work: impl FnOnce() -> T) -> (T, Duration) {
    println!("\n== {title}");
    let start = Instant::now();
    let result = work();
    let elapsed = start.elapsed();
    println!("-- {title}: {:.1} s", elapsed.as_secs_f64());
    (result, elapsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_seen_and_passed_on_unchanged() {
        let mut passed = Vec::new();
        let mut seen = Vec::new();
        let text: &[u8] = b"one\ntw\xff\n\nlast without an end";
        copy(text, &mut passed, &mut |line: &str| seen.push(line.to_owned())).unwrap();
        assert_eq!(passed, text);
        assert_eq!(seen, ["one", "tw\u{fffd}", "", "last without an end"]);
    }

    #[test]
    fn a_program_that_is_missing_is_named() {
        let error = run(&mut Command::new("no-such-program-anywhere")).unwrap_err();
        assert!(error.starts_with("no-such-program-anywhere cannot be started"), "{error}");
    }

    #[test]
    fn what_cannot_be_printed_is_explained() {
        let error = printed(&mut Command::new("no-such-program-anywhere")).unwrap_err();
        assert!(error.starts_with("no-such-program-anywhere cannot be started ("), "{error}");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let error = printed(Command::new(&cargo).arg("--no-such-option")).unwrap_err();
        assert!(error.contains("--no-such-option") && !error.starts_with("error: "), "{error}");
        let error = printed(&mut Command::new("false")).unwrap_err();
        assert!(error.starts_with("false failed ("), "{error}");
        assert!(printed(Command::new(cargo).arg("--version")).unwrap().starts_with("cargo "));
    }
}
