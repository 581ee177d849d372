//! `moa-export generate` with a causal language model.

use std::{
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    args::{GenerateArguments, TextArguments},
    command::runtime,
    input::{Input, Inputs},
};
use crate::{
    cli::{
        Failure,
        interrupt::Interruption,
        note,
        notes::{note_of_contradiction, note_of_size},
        print_part, progress,
        table::counted,
    },
    file_names::{CONFIG, GENAI_CONFIG, GENERATION_CONFIG},
    generate::{
        Continuation, Finish, GenerateError, GenerationSettings, NewToken, Prompt, SamplingOptions, TextGenerator,
        TextGeneratorOptions,
    },
};

impl TextArguments {
    fn options(&self) -> SamplingOptions {
        let default = SamplingOptions::default();
        let drawn = self.top_k.is_some() || self.top_p.is_some();
        SamplingOptions {
            max_new: self.max_new.unwrap_or(default.max_new),
            temperature: self.temperature.unwrap_or(if drawn { 1.0 } else { 0.0 }),
            top_k: self.top_k.unwrap_or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            seed: self.seed.unwrap_or(default.seed),
            ignore_eos: self.ignore_eos,
        }
    }
}

impl TextArguments {
    /// Refuses what is for tokens that are drawn, where none are.
    fn check(&self) -> Result<(), Failure> {
        if self.options().temperature != 0.0 {
            return Ok(());
        }
        let given =
            [("--seed", self.seed.is_some()), ("--top-k", self.top_k.is_some()), ("--top-p", self.top_p.is_some())];
        let Some((flag, _)) = given.into_iter().find(|(_, is_given)| *is_given) else { return Ok(()) };
        let message = format!("{flag} is for tokens that are drawn, and the most probable one is taken here");
        let help = match self.temperature {
            Some(_) => format!("give another --temperature, or leave out {flag}"),
            None => "add --temperature, --top-k or --top-p".to_owned(),
        };
        Err(Failure::usage(message, &help))
    }
}

pub(super) fn run(arguments: &GenerateArguments, interruption: &Interruption) -> Result<ExitCode, Failure> {
    if let Some(flag) = arguments.translation.given() {
        let message = format!("{flag} is for translation models, and {} holds another", arguments.folder.display());
        let help = match flag {
            "--max-len-a" | "--max-len-b" => "leave it out: --max-new says how many tokens follow a prompt",
            _ => "leave it out; see `moa-export generate --help`",
        };
        return Err(Failure::usage(message, help));
    }
    arguments.text.check()?;
    let mut inputs = Inputs::open(arguments)?;
    let (operators, runtime) = runtime(arguments);
    let interrupted = Arc::clone(&interruption.is_asked);
    let (batch, token_ids) = (arguments.batch(), arguments.text.token_ids);
    let options = TextGeneratorOptions { operators, runtime, batch, token_ids, interrupted };
    let loading = progress::loading();
    let mut generator = TextGenerator::open(&arguments.folder, options)?;
    drop(loading);
    generator.generate(&[], &arguments.text.options())?;
    if arguments.text.token_ids || generator.tokenizer().is_some() {
        note_settings(&generator, &arguments.text);
    }
    if let Some(tokenizer) = generator.tokenizer().filter(|_| !arguments.text.token_ids) {
        note_of_contradiction(tokenizer, "generate");
        note_of_size(tokenizer, generator.symbols());
    }
    interruption.begin_work();
    let mut tally = Tally { most: arguments.text.options().max_new, ..Tally::default() };
    let outcome = all(&mut generator, &mut inputs, interruption, arguments, &mut tally);
    if matches!(outcome, Err(Stopped::Unread)) {
        return Ok(ExitCode::SUCCESS);
    }
    tally.report(generator.context());
    match outcome {
        Err(Stopped::Failed(failure)) => Err(failure),
        Err(Stopped::Unread) | Ok(()) => Ok(ExitCode::SUCCESS),
    }
}

/// Settings for which there is an option.
const OPTIONS: [&str; 6] = ["do_sample", "temperature", "top_k", "top_p", MAX_LENGTH, MAX_NEW_TOKENS];

const MAX_LENGTH: &str = "max_length";
const MAX_NEW_TOKENS: &str = "max_new_tokens";

/// Says which settings of the folder others would heed.
fn note_settings(generator: &TextGenerator, arguments: &TextArguments) {
    let SamplingOptions { temperature, max_new, ignore_eos, .. } = arguments.options();
    let is_drawn = temperature > 0.0;
    if !generator.has_end() && !ignore_eos {
        note(&format!(
            "no token ends a text by `eos_token_id` of {GENAI_CONFIG}, else of {GENERATION_CONFIG} or {CONFIG}: every \
             text gets all {max_new} new tokens; exports to a folder have what the checkpoint says, but for tokens \
             that the model lacks"
        ));
    }
    let GenerationSettings { file, keys } = generator.settings();
    let (known, unknown): (Vec<_>, Vec<_>) = keys.iter().partition(|key| OPTIONS.contains(key));
    if !unknown.is_empty() {
        note(&format!("{file} sets {}, which nothing here heeds", unknown.join(", ")));
    }
    if known.contains(&"do_sample") && !is_drawn {
        note(&format!("{file} asks for tokens that are drawn, as --temperature, --top-k and --top-p do"));
    }
    let length = [MAX_NEW_TOKENS, MAX_LENGTH].into_iter().find(|key| known.contains(key));
    if let Some(key) = length.filter(|_| arguments.max_new.is_none()) {
        note(&format!("{file} sets {key}; here --max-new says how many tokens follow, {max_new} where it is absent"));
    }
}

/// Continues all prompts, those together that are read together.
fn all(
    generator: &mut TextGenerator,
    inputs: &mut Inputs,
    interruption: &Interruption,
    arguments: &GenerateArguments,
    tally: &mut Tally,
) -> Result<(), Stopped> {
    while let Some(input) = inputs.next(interruption).map_err(Stopped::Failed)? {
        let prompts = prompts(&input, &arguments.text).map_err(Stopped::Failed)?;
        let printer = Printer::new(&interruption.is_asked);
        match prompts.len() == 1 && !arguments.json {
            true => stream(generator, &prompts, &input, &arguments.text, tally, printer)?,
            false => collect(generator, &prompts, &input, arguments, tally, printer)?,
        }
    }
    Ok(())
}

/// Prompts that were continued by less than was asked for.
#[derive(Debug, Default)]
struct Tally {
    most: usize,
    blank: usize,
    cut: usize,
}

impl Tally {
    fn add(&mut self, found: &[Continuation]) {
        let count = |is: &dyn Fn(&Continuation) -> bool| found.iter().filter(|one| is(one)).count();
        self.blank += count(&|one| one.finish == Finish::Blank);
        self.cut += count(&|one| one.finish == Finish::Length && one.tokens.len() < self.most);
    }

    fn report(&self, context: Option<usize>) {
        if self.blank > 0 {
            note(&format!("{} without a token: nothing follows a blank line", counted(self.blank, "prompt")));
        }
        if let (1.., Some(context)) = (self.cut, context) {
            let (prompts, most) = (counted(self.cut, "prompt"), self.most);
            note(&format!("{prompts} ended at the last of the model's {context} positions, before {most} new tokens"));
        }
    }
}

enum Stopped {
    Failed(Failure),
    /// Nobody reads stdout any more.
    Unread,
}

/// stdout during a generation, which ends at the next step where nothing more can be printed.
struct Printer<'a> {
    end: &'a AtomicBool,
    stopped: Option<Stopped>,
}

impl<'a> Printer<'a> {
    const fn new(end: &'a AtomicBool) -> Self {
        Self { end, stopped: None }
    }

    fn print(&mut self, text: &str) {
        if self.stopped.is_some() {
            return;
        }
        self.stopped = match print_part(text) {
            Ok(read) => read.is_break().then_some(Stopped::Unread),
            Err(failure) => Some(Stopped::Failed(failure)),
        };
        if self.stopped.is_some() {
            self.end.store(true, Ordering::Relaxed);
        }
    }

    fn outcome<T>(self, generated: Result<T, GenerateError>, input: &Input) -> Result<T, Stopped> {
        match (self.stopped, generated) {
            (Some(stopped), _) => Err(stopped),
            (None, Ok(generated)) => Ok(generated),
            (None, Err(GenerateError::Interrupted)) => {
                let message = "interrupted before the last prompt was continued";
                Err(Stopped::Failed(Failure::interrupted(message.into())))
            }
            (None, Err(error)) => Err(Stopped::Failed(input.failure(error))),
        }
    }
}

fn prompts(input: &Input, arguments: &TextArguments) -> Result<Vec<Prompt>, Failure> {
    if arguments.whole_input {
        return Ok(vec![Prompt::from(input.text.as_str())]);
    }
    let prompt = |(index, line): (usize, &str)| match arguments.token_ids {
        true => token_ids(line).map(Prompt::Tokens).map_err(|word| {
            let message = format!("{}: {word:?} is no token id", input.place(index));
            let refused = if input.is_typed() { Failure::usage } else { Failure::malformed };
            refused(message, "give ids with spaces between")
        }),
        false => Ok(Prompt::from(line)),
    };
    input.text.lines().enumerate().map(prompt).collect()
}

/// Ids with spaces or commas between; the first word that is none.
fn token_ids(line: &str) -> Result<Vec<i64>, String> {
    let words = line.split(|letter: char| letter.is_whitespace() || letter == ',').filter(|word| !word.is_empty());
    words.map(|word| word.parse::<u32>().map(i64::from).map_err(|_| word.to_owned())).collect()
}

/// Prints the only continuation while it is computed.
fn stream(
    generator: &mut TextGenerator,
    prompts: &[Prompt],
    input: &Input,
    arguments: &TextArguments,
    tally: &mut Tally,
    mut printer: Printer<'_>,
) -> Result<(), Stopped> {
    let mut between = "";
    let mut print = |new: NewToken<'_>| {
        let piece = match arguments.token_ids {
            true => format!("{between}{}", new.token),
            false => new.text.to_owned(),
        };
        between = " ";
        if !piece.is_empty() {
            printer.print(&piece);
        }
    };
    let mut add = |found: Vec<Continuation>| tally.add(&found);
    let outcome = generator.generate_batches(prompts, input.first - 1, &arguments.options(), &mut print, &mut add);
    if outcome.is_ok() || !between.is_empty() {
        printer.print("\n");
    }
    printer.outcome(outcome, input)
}

/// Prints all continuations batch by batch, in the order of the prompts.
fn collect(
    generator: &mut TextGenerator,
    prompts: &[Prompt],
    input: &Input,
    arguments: &GenerateArguments,
    tally: &mut Tally,
    mut printer: Printer<'_>,
) -> Result<(), Stopped> {
    let progress = progress::tokens();
    let mut numbered = (input.first..).zip(prompts);
    let mut print = |found: Vec<Continuation>| {
        tally.add(&found);
        let text = found.iter().zip(numbered.by_ref()).map(|(continuation, (number, prompt))| match arguments.json {
            true => json(number, prompt, continuation),
            false => plain(continuation, arguments.text.token_ids),
        });
        let text: String = text.collect();
        progress.suspend(|| printer.print(&text));
    };
    let options = arguments.text.options();
    let first = input.first - 1;
    let outcome = generator.generate_batches(prompts, first, &options, &mut |_| progress.inc(1), &mut print);
    drop(progress);
    printer.outcome(outcome, input)
}

fn plain(continuation: &Continuation, token_ids: bool) -> String {
    let ids = || continuation.tokens.iter().map(i64::to_string).collect::<Vec<_>>().join(" ");
    match &continuation.text {
        Some(text) if !token_ids => format!("{text}\n"),
        _ => format!("{}\n", ids()),
    }
}

fn json(number: usize, prompt: &Prompt, continuation: &Continuation) -> String {
    let prompt = match prompt {
        Prompt::Text(text) => serde_json::Value::from(text.clone()),
        Prompt::Tokens(ids) => ids.clone().into(),
    };
    let value = serde_json::json!({
        "line": number,
        "prompt": prompt,
        "prompt_tokens": continuation.prompt_tokens,
        "text": continuation.text,
        "tokens": continuation.tokens,
        "finish": continuation.finish.name(),
    });
    format!("{value}\n")
}

#[cfg(test)]
mod tests {
    use super::token_ids;

    #[test]
    fn ids_have_spaces_or_commas_between() {
        assert_eq!(token_ids(" 1 2,3, 4\t5 "), Ok(vec![1, 2, 3, 4, 5]));
        assert_eq!(token_ids(""), Ok(vec![]));
        assert_eq!(token_ids("1 x 2"), Err("x".to_owned()));
        assert_eq!(token_ids("-1"), Err("-1".to_owned()));
    }
}
