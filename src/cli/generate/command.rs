//! What `moa-export generate` does: a line after the other, or as many as a batch takes.

use std::{ops::ControlFlow, path::Path, process::ExitCode, sync::Arc, time::Duration};

use super::{
    args::{GenerateArguments, StopArgument, TranslationArguments},
    input::{Input, Inputs},
    text,
};
use crate::{
    backend::{OrtOperators, OrtOptions},
    cli::{
        Failure,
        backends::check_ort_options,
        failure::instead_of,
        interrupt::{self, Interruption},
        must_be_open, note,
        notes::note_of_unknown,
        print_aside, print_part, progress,
        table::{counted, table},
    },
    file_names::{NoGraph, graphs_in},
    files::folder_of,
    generate::{
        Finish, GenerateError, Hypothesis, NodeTime, Profile, SearchOptions, Stop, Translator, TranslatorOptions,
        holds_causal_lm,
    },
};

/// Batches whose lines are sorted by length together, and printed together.
const BATCHES_PER_PART: usize = 16;

pub(in crate::cli) fn run(arguments: &GenerateArguments) -> Result<ExitCode, Failure> {
    let interruption = Interruption::listen()?;
    must_be_open(&arguments.folder)?;
    if !arguments.folder.exists() {
        return Err(GenerateError::Missing { path: arguments.folder.clone() }.into());
    }
    if !arguments.folder.is_dir() {
        return Err(no_folder(&arguments.folder));
    }
    check_ort_options(&[arguments.backend.into()], arguments.library.as_deref(), arguments.threads)?;
    if holds_causal_lm(&arguments.folder) {
        return text::run(arguments, &interruption);
    }
    translate_all(arguments, &interruption)
}

fn no_folder(file: &Path) -> Failure {
    let folder = folder_of(file);
    let help = match graphs_in(folder) {
        Err(NoGraph::Any { .. }) if !holds_causal_lm(folder) => instead_of(folder),
        _ => format!("give the folder that holds it: {}", folder.display()),
    };
    Failure::usage(format!("{} is no folder", file.display()), &help)
}

fn translate_all(arguments: &GenerateArguments, interruption: &Interruption) -> Result<ExitCode, Failure> {
    if let Some(flag) = arguments.text.given() {
        graphs_in(&arguments.folder)?;
        let message = format!("{flag} is for causal language models, and {} holds another", arguments.folder.display());
        let help = match flag {
            "--max-new" => "leave it out: --max-len-a and --max-len-b say how long a translation may become",
            _ => "leave it out; see `moa-export generate --help`",
        };
        return Err(Failure::usage(message, help));
    }
    let search = search_options(&arguments.translation);
    let mut inputs = Inputs::open(arguments)?;
    graphs_in(&arguments.folder)?;
    let loading = progress::loading();
    let mut translator = Translator::open(&arguments.folder, options(arguments, interruption, false))?;
    drop(loading);
    translator.check::<&str>(&[], 1, &search)?;
    interruption.begin_work();
    let (mut translated, mut cut) = (Vec::new(), 0);
    while let Some(input) = inputs.next(interruption)? {
        let lines = lines_to_translate(&translator, &input, &search, arguments)?;
        if translate(&mut translator, &input, &lines, &search, arguments, &mut cut)?.is_break() {
            return Ok(ExitCode::SUCCESS);
        }
        if arguments.translation.profile {
            translated.extend(lines.into_iter().map(str::to_owned));
        }
    }
    note_of_cut(cut);
    if arguments.translation.profile {
        let timed = translator.profile()?;
        let open = || Translator::open(&arguments.folder, options(arguments, interruption, true));
        let mut recorder = interruption.at_once(interrupt::BEFORE, open)??;
        for lines in translated.chunks(part(arguments)) {
            recorder.translate_part(lines, 1, &search)?;
        }
        let recorded = recorder.profile()?;
        print_aside(&report(&timed, &recorded));
    }
    Ok(ExitCode::SUCCESS)
}

/// The lines of `input`, all of them checked; those that are too long are refused, or left out with a word.
fn lines_to_translate<'a>(
    translator: &Translator,
    input: &'a Input,
    search: &SearchOptions,
    arguments: &GenerateArguments,
) -> Result<Vec<&'a str>, Failure> {
    let mut lines = input.lines();
    let too_long = |number: usize, line: &str| match translator.check(&[line], number, search) {
        Err(error @ GenerateError::TooLong { .. }) => Some(input.failure(error).message),
        _ => None,
    };
    for (number, line) in (input.first..).zip(&mut lines).filter(|_| arguments.translation.skip_long) {
        if let Some(what) = too_long(number, line) {
            note(&format!("{what}: left out"));
            *line = "";
        }
    }
    translator.check(&lines, input.first, search).map_err(|error| input.failure(error))?;
    note_of_unknown(&translator.unknown_tokens(&lines), |index| input.place(index));
    Ok(lines)
}

fn part(arguments: &GenerateArguments) -> usize {
    arguments.batch().saturating_mul(BATCHES_PER_PART).max(1)
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
    (arguments.backend, OrtOptions::new(arguments.threads, arguments.library.as_deref()))
}

fn options(arguments: &GenerateArguments, interruption: &Interruption, profile: bool) -> TranslatorOptions {
    let (operators, runtime) = runtime(arguments);
    let interrupted = Arc::clone(&interruption.is_asked);
    TranslatorOptions { operators, runtime, batch: arguments.batch(), profile, interrupted }
}

/// Says how many lines have a best translation that was cut off.
fn note_of_cut(lines: usize) {
    let lines = match lines {
        0 => return,
        1 => "1 translation was".to_owned(),
        lines => format!("{lines} translations were"),
    };
    note(&format!(
        "{lines} ended at the most tokens that --max-len-a, --max-len-b and the positions of the model allow"
    ));
}

/// Translates and prints part by part, in the order of the lines, as long as somebody reads; counts translations that
/// were cut off.
fn translate(
    translator: &mut Translator,
    input: &Input,
    lines: &[&str],
    search: &SearchOptions,
    arguments: &GenerateArguments,
    cut: &mut usize,
) -> Result<ControlFlow<()>, Failure> {
    let progress = progress::lines(lines.len());
    let sources = input.lines();
    let mut done = 0;
    for part in lines.chunks(part(arguments)) {
        let first = input.first + done;
        let results = match translator.translate_part(part, first, search) {
            Ok(results) => results,
            Err(GenerateError::Interrupted) => {
                let of = if input.is_whole { format!(" of {}", lines.len()) } else { String::new() };
                return Err(Failure::interrupted(format!("interrupted after {}{of} lines", first - 1)));
            }
            Err(error) => return Err(input.failure(error)),
        };
        let is_cut = |found: &&Vec<Hypothesis>| found.first().is_some_and(|best| best.finish == Finish::Length);
        *cut += results.iter().filter(is_cut).count();
        let mut text = String::new();
        for ((number, line), hypotheses) in (first..).zip(&sources[done..]).zip(&results) {
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
            "finish": one.finish.name(),
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
        "{} in {:.3} s: {rate:.1} sentences/s; {}, {}\n",
        counted(timed.sentences, "sentence"),
        timed.total.as_secs_f64(),
        counted(timed.steps, "decoder step"),
        counted(timed.rows, "row")
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
    let ours = |node: &&NodeTime| moa_schema::OPERATORS.iter().any(|ours| ours.name == node.operator);
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
