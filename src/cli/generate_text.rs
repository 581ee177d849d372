//! `moa-export generate` with a causal language model.

use std::{
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    Failure,
    generate::{Input, catch_interrupt, input, runtime},
    generate_args::{GenerateArguments, TextArguments},
    note, print_part, progress,
};
use crate::generate::{
    Continuation, Finish, GenerateError, Prompt, SamplingOptions, TextGenerator, TextGeneratorOptions,
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

pub(super) fn run(arguments: &GenerateArguments) -> Result<ExitCode, Failure> {
    if let Some(flag) = arguments.translation.given() {
        let message = format!("{flag} is for translation models, and {} holds another", arguments.folder.display());
        let help = match flag {
            "--max-len-a" | "--max-len-b" => "leave it out: --max-new says how many tokens follow a prompt",
            _ => "leave it out; see `moa-export generate --help`",
        };
        return Err(Failure::usage(message, Some(help)));
    }
    let input = input(&arguments.input)?;
    let prompts = prompts(&input, &arguments.text)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    let (operators, runtime) = runtime(arguments);
    let options =
        TextGeneratorOptions { operators, runtime, batch: arguments.batch, interrupted: Arc::clone(&interrupted) };
    let loading = progress::loading();
    let mut generator = TextGenerator::open(&arguments.folder, options)?;
    drop(loading);
    catch_interrupt(&interrupted)?;
    let streamed = !arguments.json && prompts.len() == 1;
    let mut tally = Tally { most: arguments.text.options().max_new, ..Tally::default() };
    let outcome = match streamed {
        true => stream(&mut generator, &prompts, &arguments.text, &mut tally, Printer::new(&interrupted)),
        false => collect(&mut generator, &prompts, arguments, &mut tally, Printer::new(&interrupted)),
    };
    if matches!(outcome, Err(Stopped::Unread)) {
        return Ok(ExitCode::SUCCESS);
    }
    tally.report(generator.context());
    match outcome {
        Err(Stopped::Generate(GenerateError::Interrupted)) => {
            Err(Failure::interrupted("interrupted before the last prompt was continued".into()))
        }
        Err(Stopped::Generate(error)) => Err(input.failure(error)),
        Err(Stopped::Print(failure)) => Err(failure),
        Err(Stopped::Unread) | Ok(()) => Ok(ExitCode::SUCCESS),
    }
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
        let prompts = |count: usize| if count == 1 { "1 prompt".to_owned() } else { format!("{count} prompts") };
        if self.blank > 0 {
            note(&format!("{} without a token: nothing follows a blank line", prompts(self.blank)));
        }
        if let (1.., Some(context)) = (self.cut, context) {
            let (prompts, most) = (prompts(self.cut), self.most);
            note(&format!("{prompts} ended at the last of the model's {context} positions, before {most} new tokens"));
        }
    }
}

enum Stopped {
    Generate(GenerateError),
    Print(Failure),
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
            Err(failure) => Some(Stopped::Print(failure)),
        };
        if self.stopped.is_some() {
            self.end.store(true, Ordering::Relaxed);
        }
    }

    fn outcome<T>(self, generated: Result<T, GenerateError>) -> Result<T, Stopped> {
        match self.stopped {
            Some(stopped) => Err(stopped),
            None => generated.map_err(Stopped::Generate),
        }
    }
}

fn prompts(input: &Input, arguments: &TextArguments) -> Result<Vec<Prompt>, Failure> {
    if arguments.whole_input {
        return Ok(vec![Prompt::from(input.text.as_str())]);
    }
    let prompt = |(index, line): (usize, &str)| match arguments.token_ids {
        true => token_ids(line).map(Prompt::Tokens).map_err(|word| {
            let message = format!("{}, line {}: {word:?} is no token id", input.name, index + 1);
            Failure::usage(message, Some("give ids with spaces between"))
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
    arguments: &TextArguments,
    tally: &mut Tally,
    mut printer: Printer<'_>,
) -> Result<(), Stopped> {
    let mut between = "";
    let outcome = generator.generate_streaming(prompts, &arguments.options(), &mut |new| {
        let piece = match arguments.token_ids {
            true => format!("{between}{}", new.token),
            false => new.text.to_owned(),
        };
        between = " ";
        if !piece.is_empty() {
            printer.print(&piece);
        }
    });
    if outcome.is_ok() || !between.is_empty() {
        printer.print("\n");
    }
    printer.outcome(outcome).map(|found| tally.add(&found))
}

/// Prints all continuations batch by batch, in the order of the prompts.
fn collect(
    generator: &mut TextGenerator,
    prompts: &[Prompt],
    arguments: &GenerateArguments,
    tally: &mut Tally,
    mut printer: Printer<'_>,
) -> Result<(), Stopped> {
    let progress = progress::tokens();
    let mut numbered = (1..).zip(prompts);
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
    let outcome = generator.generate_batches(prompts, &options, &mut |_| progress.inc(1), &mut print);
    drop(progress);
    printer.outcome(outcome)
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
        "prompt_number": number,
        "prompt": prompt,
        "prompt_tokens": continuation.prompt_tokens,
        "text": continuation.text,
        "tokens": continuation.tokens,
        "finish": match continuation.finish {
            Finish::Eos => "eos",
            Finish::Length => "length",
            Finish::Blank => "blank",
        },
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
