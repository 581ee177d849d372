//! `moa-export generate`.

use std::{
    fs,
    io::{self, Read},
    ops::ControlFlow,
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{
    Failure,
    codes::INTERRUPTED,
    generate_args::{GenerateArguments, RuntimeArgument, StopArgument, TranslationArguments},
    generate_text,
    interrupt::scratch,
    leave::leave,
    print_aside, print_part, progress,
    signals::on_end,
    table::table,
};
use crate::{
    backend::{OrtOperators, OrtOptions},
    generate::{
        GenerateError, Hypothesis, NodeTime, Profile, SearchOptions, Stop, Translator, TranslatorOptions,
        holds_causal_lm,
    },
    text::BYTE_ORDER_MARK,
};

/// Batches whose lines are sorted by length together, and printed together.
const BATCHES_PER_PART: usize = 16;

/// Most bytes of input; all of it is checked before the first line is translated.
const MAX_INPUT_BYTES: u64 = 1 << 30;

pub(super) fn run(arguments: &GenerateArguments) -> Result<ExitCode, Failure> {
    if !arguments.folder.exists() {
        return Err(GenerateError::Missing { path: arguments.folder.clone() }.into());
    }
    if !arguments.folder.is_dir() {
        let parent = arguments.folder.parent().filter(|parent| !parent.as_os_str().is_empty());
        let help = format!("give the folder that holds it: {}", parent.unwrap_or(Path::new(".")).display());
        return Err(Failure::usage(format!("{} is no folder", arguments.folder.display()), Some(&help)));
    }
    if holds_causal_lm(&arguments.folder) {
        return generate_text::run(arguments);
    }
    if let Some(flag) = arguments.text.given() {
        let message = format!("{flag} is for causal language models, and {} holds another", arguments.folder.display());
        let help = match flag {
            "--max-new" => "leave it out: --max-len-a and --max-len-b say how long a translation may become",
            _ => "leave it out; see `moa-export generate --help`",
        };
        return Err(Failure::usage(message, Some(help)));
    }
    let search = search_options(&arguments.translation);
    let input = input(&arguments.input)?;
    let lines = input.lines();
    let interrupted = Arc::new(AtomicBool::new(false));
    let loading = progress::loading();
    let mut translator = Translator::open(&arguments.folder, options(arguments, &interrupted, false))?;
    drop(loading);
    translator.check(&lines, 1, &search).map_err(|error| input.failure(error))?;
    catch_interrupt(&interrupted)?;
    let read = translate(&mut translator, &input, &search, arguments)?;
    if arguments.translation.profile && read.is_continue() {
        let timed = translator.profile()?;
        let mut recorder = Translator::open(&arguments.folder, options(arguments, &interrupted, true))?;
        for lines in lines.chunks(part(arguments)) {
            recorder.translate_part(lines, 1, &search)?;
        }
        let recorded = recorder.profile()?;
        print_aside(&report(&timed, &recorded));
    }
    Ok(ExitCode::SUCCESS)
}

fn part(arguments: &GenerateArguments) -> usize {
    arguments.batch.saturating_mul(BATCHES_PER_PART).max(1)
}

fn search_options(arguments: &TranslationArguments) -> SearchOptions {
    let default = SearchOptions::default();
    SearchOptions {
        beam: arguments.beam.unwrap_or(default.beam),
        nbest: arguments.nbest.unwrap_or(default.nbest),
        length_penalty: arguments.lenpen.unwrap_or(default.length_penalty),
        min_len: arguments.min_len.unwrap_or(default.min_len),
        max_len_a: arguments.max_len_a.unwrap_or(default.max_len_a),
        max_len_b: arguments.max_len_b.unwrap_or(default.max_len_b),
        stop: match arguments.stop {
            Some(StopArgument::Fairseq) => Stop::Fairseq,
            Some(StopArgument::Best) => Stop::Best,
            None => default.stop,
        },
    }
}

/// What runs the graphs, and how.
pub(super) fn runtime(arguments: &GenerateArguments) -> (OrtOperators, OrtOptions) {
    let operators = match arguments.backend {
        RuntimeArgument::Ort => OrtOperators::Library,
        RuntimeArgument::OrtFunction => OrtOperators::Functions,
    };
    (operators, OrtOptions { threads: arguments.threads, operator_library: arguments.library.clone() })
}

fn options(arguments: &GenerateArguments, interrupted: &Arc<AtomicBool>, profile: bool) -> TranslatorOptions {
    let (operators, runtime) = runtime(arguments);
    TranslatorOptions { operators, runtime, batch: arguments.batch, profile, interrupted: Arc::clone(interrupted) }
}

/// What `--input` means.
pub(super) struct Input {
    /// Where errors say that it is.
    pub(super) name: String,
    /// Without a byte order mark.
    pub(super) text: String,
}

impl Input {
    fn lines(&self) -> Vec<&str> {
        self.text.lines().collect()
    }

    /// An error of one line or prompt, with the name of what holds it.
    pub(super) fn failure(&self, error: GenerateError) -> Failure {
        let place = match error {
            GenerateError::TooLong { .. }
            | GenerateError::NotFinite { .. }
            | GenerateError::TokenId { .. }
            | GenerateError::LongPrompt { .. } => format!("{}, ", self.name),
            _ => String::new(),
        };
        let mut failure = Failure::from(error);
        failure.message.insert_str(0, &place);
        failure
    }
}

/// The text that `--input` means.
pub(super) fn input(argument: &str) -> Result<Input, Failure> {
    let path = Path::new(argument);
    let (name, bytes) = if argument == "-" {
        ("stdin".to_owned(), read(io::stdin().lock()).map_err(|error| Failure::io(&error, "stdin"))?)
    } else if path.is_dir() {
        return Err(Failure::usage(format!("{} is a folder", path.display()), Some("give a file of lines")));
    } else if path.exists() {
        let name = path.display().to_string();
        let bytes = fs::File::open(path).and_then(read).map_err(|error| Failure::io(&error, &name))?;
        (name, bytes)
    } else if looks_like_a_file(argument) {
        let help = "give a file that is there; a text that looks like one goes to stdin: `… --input -`";
        return Err(Failure::usage(format!("--input {argument}: there is no such file"), Some(help)));
    } else {
        ("--input".to_owned(), argument.as_bytes().to_vec())
    };
    if bytes.len() as u64 > MAX_INPUT_BYTES {
        return Err(Failure::too_much(format!("{name}: more than {MAX_INPUT_BYTES} bytes"), "split the file"));
    }
    let line_of = |place: usize| bytes[..place].iter().filter(|byte| **byte == b'\n').count() + 1;
    if let Some(place) = bytes.iter().position(|byte| *byte == 0) {
        return Err(Failure::no_text(format!("{name}, line {}: a zero byte: this is no text", line_of(place))));
    }
    match std::str::from_utf8(&bytes) {
        Ok(text) => Ok(Input { name, text: text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text).to_owned() }),
        Err(error) => {
            let line = line_of(error.valid_up_to());
            Err(Failure::no_text(format!("{name}, line {line}: not UTF-8: this is no text, or in another encoding")))
        }
    }
}

/// Whether `text` is one word with a folder before it, or with the ending of a file of text behind it.
fn looks_like_a_file(text: &str) -> bool {
    const ENDINGS: [&str; 8] = ["bpe", "csv", "ids", "json", "jsonl", "md", "tsv", "txt"];
    let ending = Path::new(text).extension().and_then(|ending| ending.to_str());
    let ends_like_one = ending.is_some_and(|ending| ENDINGS.contains(&ending.to_ascii_lowercase().as_str()));
    !text.contains(char::is_whitespace) && (ends_like_one || text.starts_with(['/', '.', '~']) && text.contains('/'))
}

fn read(source: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(MAX_INPUT_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The first Ctrl-C or termination ends the work at its next step, the second one the program.
pub(super) fn catch_interrupt(interrupted: &Arc<AtomicBool>) -> Result<(), Failure> {
    let interrupted = Arc::clone(interrupted);
    let caught = on_end(move || {
        if interrupted.swap(true, Ordering::Relaxed) {
            scratch().remove();
            leave(INTERRUPTED);
        }
    });
    caught.map_err(|error| Failure::io(&io::Error::other(error), "Ctrl-C"))
}

/// Translates and prints part by part, in the order of the lines, as long as somebody reads.
fn translate(
    translator: &mut Translator,
    input: &Input,
    search: &SearchOptions,
    arguments: &GenerateArguments,
) -> Result<ControlFlow<()>, Failure> {
    let lines = input.lines();
    let progress = progress::lines(lines.len());
    let mut done = 0;
    for part in lines.chunks(part(arguments)) {
        let results = match translator.translate_part(part, done + 1, search) {
            Ok(results) => results,
            Err(GenerateError::Interrupted) => {
                return Err(Failure::interrupted(format!("interrupted after {done} of {} lines", lines.len())));
            }
            Err(error) => return Err(input.failure(error)),
        };
        let mut text = String::new();
        for ((number, line), hypotheses) in (done + 1..).zip(part).zip(&results) {
            match arguments.json {
                true => text.push_str(&json(number, line, hypotheses)),
                false => text.push_str(&plain(hypotheses, search.nbest)),
            }
        }
        if progress.suspend(|| print_part(&text))?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        done += part.len();
        progress.inc(part.len() as u64);
    }
    Ok(ControlFlow::Continue(()))
}

fn plain(hypotheses: &[Hypothesis], nbest: usize) -> String {
    match hypotheses {
        [] => "\n".to_owned(),
        [one, ..] if nbest == 1 => format!("{}\n", one.text),
        several => several.iter().map(|one| format!("{:.4}\t{}\n", one.score, one.text)).collect(),
    }
}

fn json(number: usize, line: &str, hypotheses: &[Hypothesis]) -> String {
    let translation = |one: &Hypothesis| {
        serde_json::json!({
            "text": one.text,
            "score": one.score,
            "tokens": one.tokens,
            "log_probabilities": one.log_probabilities,
        })
    };
    let translations: Vec<_> = hypotheses.iter().map(translation).collect();
    let value = serde_json::json!({ "line": number, "source": line, "translations": translations });
    format!("{value}\n")
}

/// Whole times of a run without records, then the decoder's nodes in one with them, which is slower.
fn report(timed: &Profile, recorded: &Profile) -> String {
    let rate = share(timed.sentences, timed.total);
    let mut text = format!(
        "{} sentences in {:.3} s: {rate:.1} sentences/s; {} decoder steps, {} rows\n",
        timed.sentences,
        timed.total.as_secs_f64(),
        timed.steps,
        timed.rows
    );
    let host = timed.total.saturating_sub(timed.encoder + timed.decoder + timed.reorder);
    let places = [
        ("encoder", timed.encoder),
        ("decoder", timed.decoder),
        ("host: cache reordering", timed.reorder),
        ("host: search and text", host),
    ];
    let places = places.map(|(name, time)| (name.to_owned(), time));
    text.push_str(&shares("all", timed.total, timed.steps, &places));
    let ours = |node: &&NodeTime| node.operator.starts_with("MoA") || node.operator.starts_with("MoE");
    let nodes: Duration = recorded.nodes.iter().map(|node| node.time).sum();
    let operators: Duration = recorded.nodes.iter().filter(ours).map(|node| node.time).sum();
    let mut places = vec![
        ("MoA operators".to_owned(), operators),
        ("other nodes".to_owned(), nodes - operators),
        ("ONNX Runtime around the nodes".to_owned(), recorded.decoder.saturating_sub(nodes)),
    ];
    let per_step = |node: &NodeTime| node.runs / recorded.steps.max(1);
    places.extend(recorded.nodes.iter().map(|node| (format!("  {} x{}", node.operator, per_step(node)), node.time)));
    text.push_str(&shares("decoder, with every node recorded", recorded.decoder, recorded.steps, &places));
    text
}

#[allow(clippy::cast_precision_loss)]
fn share(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
}

/// A table of times: in all, per decoder step, and as a share of `whole`.
fn shares(name: &str, whole: Duration, steps: usize, places: &[(String, Duration)]) -> String {
    let row = |name: &str, time: Duration| {
        let percent = 100.0 * time.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE);
        let step = 1e6 / share(steps.max(1), time).max(f64::MIN_POSITIVE);
        vec![name.to_owned(), format!("{:.1}", 1e3 * time.as_secs_f64()), format!("{step:.1}"), format!("{percent:.1}")]
    };
    let mut rows = vec![row(name, whole)];
    rows.extend(places.iter().map(|(name, time)| row(name, *time)));
    table(&["where", "ms", "us/step", "%"], &rows)
}

#[cfg(test)]
mod tests {
    use super::looks_like_a_file;

    #[test]
    fn a_mistyped_file_is_no_text() {
        for file in ["lines.txt", "data/Lines.TXT", "./lines", "/data/lines", "~/lines", "../x.tsv", "a.json"] {
            assert!(looks_like_a_file(file), "{file}");
        }
        for text in ["nine hundred", "nine", "e.g.", "Hello.World", "and/or", "see notes.txt", "...", "3/4", "."] {
            assert!(!looks_like_a_file(text), "{text}");
        }
    }
}
