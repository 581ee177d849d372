//! What `generate --input` means: a text or a file that is read whole, or lines that are answered as they come.

use std::{
    fs::{self, File},
    io::{self, BufRead, IsTerminal, Read, StdinLock},
    path::Path,
    thread,
    time::Duration,
};

use super::args::GenerateArguments;
use crate::{
    cli::{
        Failure,
        failure::failure_in,
        interrupt::Interruption,
        note,
        text_input::{MAX_BYTES, text},
    },
    files::has_ending,
    generate::GenerateError,
};

/// What ends a program that writes lines ends this one too, a little later: how long the end of lines waits for that.
const END_TOGETHER: Duration = Duration::from_millis(50);

/// Name of lines that were typed.
const TYPED: &str = "--input";

/// What is said of an interrupt that finds nothing to read.
const WAITING: &str = "interrupted while it waited for input";

/// Lines that are read together.
pub(super) struct Input {
    /// Where errors say that they are.
    name: String,
    /// Without a byte order mark.
    pub(super) text: String,
    /// Number of the first line, from 1.
    pub(super) first: usize,
    /// Whether nothing stands before or behind them.
    pub(super) is_whole: bool,
}

impl Input {
    pub(super) fn lines(&self) -> Vec<&str> {
        self.text.lines().collect()
    }

    /// Whether they were typed, and stand in no file.
    pub(super) fn is_typed(&self) -> bool {
        self.name == TYPED
    }

    /// Where the line stands with this index among [`Self::lines`].
    pub(super) fn place(&self, index: usize) -> String {
        format!("{}, line {}", self.name, self.first + index)
    }

    /// An error of one line or prompt, with the name of what holds it.
    pub(super) fn failure(&self, error: GenerateError) -> Failure {
        failure_in(&self.name, error)
    }
}

/// Everything that `--input` names, part by part.
pub(super) enum Inputs {
    Whole(Option<Input>),
    Lines(Lines),
}

/// A pipe or a terminal.
pub(super) struct Lines {
    stdin: StdinLock<'static>,
    /// Lines that are read before they are answered.
    together: usize,
    /// Number of the next line.
    next: usize,
}

impl Inputs {
    /// Reads what is read whole.
    pub(super) fn open(arguments: &GenerateArguments) -> Result<Self, Failure> {
        let argument = arguments.input.as_str();
        if arguments.buffer.is_some() && argument != "-" {
            let message = "--buffer is for --input -: a text or a file is read whole";
            return Err(Failure::usage(message, "leave out --buffer"));
        }
        let is_whole = arguments.text.whole_input || arguments.buffer.is_none() && stdin_is_file();
        if argument == "-" && !is_whole {
            let together = arguments.buffer.or(arguments.batch).unwrap_or(1);
            return Ok(Self::Lines(Lines { stdin: io::stdin().lock(), together, next: 1 }));
        }
        let (name, bytes) = whole(argument)?;
        let text = text(&name, bytes, 1)?;
        Ok(Self::Whole(Some(Input { name, text, first: 1, is_whole: true })))
    }

    /// The next lines, as soon as they are there; `None` at the end.
    pub(super) fn next(&mut self, interruption: &Interruption) -> Result<Option<Input>, Failure> {
        let Lines { stdin, together, next } = match self {
            Self::Whole(input) => return Ok(input.take()),
            Self::Lines(lines) => lines,
        };
        if *next == 1 && io::stdin().is_terminal() {
            note("type a line and end it with return; Ctrl-D ends the input");
        }
        let name = "stdin".to_owned();
        let read = interruption.at_once(WAITING, || {
            let read = read_lines(stdin, *together);
            if read.as_ref().is_ok_and(|(_, is_end)| *is_end) {
                thread::sleep(END_TOGETHER);
            }
            read
        })?;
        let (bytes, _) = read.map_err(|error| Failure::io(&error, &name))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let text = text(&name, bytes, *next)?;
        let input = Input { name, text, first: *next, is_whole: false };
        *next += input.text.lines().count();
        Ok(Some(input))
    }
}

/// Up to `count` lines, and whether the source ended before or within the last of them.
fn read_lines(source: &mut impl BufRead, count: usize) -> io::Result<(Vec<u8>, bool)> {
    let mut bytes = Vec::new();
    for _ in 0..count {
        let room = (MAX_BYTES + 1).saturating_sub(bytes.len() as u64);
        if source.take(room).read_until(b'\n', &mut bytes)? == 0 || bytes.last() != Some(&b'\n') {
            return Ok((bytes, true));
        }
    }
    Ok((bytes, false))
}

/// Whether all of stdin is there already.
#[cfg(unix)]
fn stdin_is_file() -> bool {
    use std::os::fd::AsFd;
    let stdin = io::stdin().as_fd().try_clone_to_owned().map(File::from);
    stdin.and_then(|stdin| stdin.metadata()).is_ok_and(|found| found.is_file())
}

#[cfg(not(unix))]
fn stdin_is_file() -> bool {
    false
}

/// Name and bytes of what is read whole.
fn whole(argument: &str) -> Result<(String, Vec<u8>), Failure> {
    let read = |source: &mut dyn Read, name: &str| {
        let mut bytes = Vec::new();
        let read = source.take(MAX_BYTES + 1).read_to_end(&mut bytes);
        read.map(|_| bytes).map_err(|error| Failure::io(&error, name))
    };
    if argument == "-" {
        return Ok(("stdin".to_owned(), read(&mut io::stdin().lock(), "stdin")?));
    }
    let (path, name) = (Path::new(argument), argument.to_owned());
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            let help = "give a file of lines; a text that is the name of a folder goes to stdin: `… --input -`";
            Err(Failure::usage(format!("--input {argument}: it is a folder"), help))
        }
        Ok(_) => {
            let mut file = File::open(path).map_err(|error| Failure::io(&error, &name))?;
            Ok((name.clone(), read(&mut file, &name)?))
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied || path.is_symlink() => {
            Err(Failure::io(&error, &name))
        }
        Err(_) if looks_like_a_file(argument) => {
            let help = "give a file that is there; a text that looks like one goes to stdin: `… --input -`";
            Err(Failure::usage(format!("--input {argument}: there is no such file"), help))
        }
        Err(_) => {
            if may_be_a_file(argument) {
                note(&format!("there is no file {argument}; it is taken as the text"));
            }
            Ok((TYPED.to_owned(), argument.as_bytes().to_vec()))
        }
    }
}

/// Whether `text` is one word that begins as a path does or ends as a file of text does, or several that do both.
fn looks_like_a_file(text: &str) -> bool {
    const ENDINGS: [&str; 15] =
        ["bpe", "csv", "de", "en", "fr", "gz", "ids", "json", "jsonl", "md", "src", "tgt", "tok", "tsv", "txt"];
    let ends_like_one = has_ending(text, &ENDINGS);
    let begins_like_one = text.starts_with(['/', '.', '~']) && text.contains('/');
    match text.contains(char::is_whitespace) {
        true => begins_like_one && ends_like_one,
        false => begins_like_one || ends_like_one,
    }
}

/// Whether `text` is one word with a separator of folders, or with a dot that does not only end it.
fn may_be_a_file(text: &str) -> bool {
    !text.contains(char::is_whitespace) && text.trim_end_matches('.').contains(['/', '.'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_file_is_no_text() {
        for file in [
            "lines.txt",
            "data/Lines.TXT",
            "./lines",
            "/data/lines",
            "~/lines",
            "../x.tsv",
            "a.json",
            "test.de",
            "test.en.gz",
        ] {
            assert!(looks_like_a_file(file), "{file}");
        }
        for text in ["nine hundred", "nine", "e.g.", "Hello.World", "and/or", "see notes.txt", "...", "3/4", "."] {
            assert!(!looks_like_a_file(text), "{text}");
        }
    }

    #[test]
    fn a_word_that_may_be_a_file_is_told_from_a_sentence() {
        for file in ["test.nl", "and/or", "3/4", "Hello.World", "data/lines", ".hidden"] {
            assert!(may_be_a_file(file) && !looks_like_a_file(file), "{file}");
        }
        for text in ["nine", "Hello.", "...", "", "nine hundred", "see test.nl", "a / b"] {
            assert!(!may_be_a_file(text), "{text}");
        }
    }

    #[test]
    fn lines_are_read_together_up_to_the_last() {
        let mut source = b"a\r\n\nb\nc".as_slice();
        for (count, lines, is_end) in [(2, "a\r\n\n", false), (1, "b\n", false), (1, "c", true), (1, "", true)] {
            assert_eq!(read_lines(&mut source, count).unwrap(), (lines.as_bytes().to_vec(), is_end));
        }
        assert_eq!(read_lines(&mut b"a\nb\n".as_slice(), 3).unwrap(), (b"a\nb\n".to_vec(), true));
    }

    #[test]
    fn names_of_files_are_told_from_texts() {
        for name in ["lines.txt", "./lines", "../a b.tsv", "/my lines.txt", "~/x", ".hidden/x", "a/b.IDS"] {
            assert!(looks_like_a_file(name), "{name}");
        }
        for text in
            ["nine hundred", "and/or", "a b.txt", "5 6", ".", "..", "// a comment", "/* x */", "./ foo", "a/b", ""]
        {
            assert!(!looks_like_a_file(text), "{text}");
        }
    }

    #[test]
    fn faults_of_later_lines_have_their_numbers() {
        let fault = |bytes: &[u8]| text("stdin", bytes.to_vec(), 7).unwrap_err().message;
        assert!(fault(b"a\n\0").starts_with("stdin, line 8: a zero byte"));
        assert!(fault(b"\xff").starts_with("stdin, line 7: not UTF-8"));
        let marked = "\u{feff}a";
        assert_eq!(text("stdin", marked.into(), 1).unwrap(), "a");
        assert_eq!(text("stdin", marked.into(), 2).unwrap(), marked);
    }
}
