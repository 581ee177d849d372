//! `moa-export generate` with a causal language model.

use std::{
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool},
};

use super::{
    Failure,
    generate::{catch_interrupt, input, runtime},
    generate_args::{GenerateArguments, TextArguments},
    print_result, progress,
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
        return Err(Failure::usage(message, Some("leave it out; see `moa-export generate --help`")));
    }
    let text = input(&arguments.input)?;
    let prompts = prompts(&text, &arguments.text)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    let (operators, runtime) = runtime(arguments);
    let options =
        TextGeneratorOptions { operators, runtime, batch: arguments.batch, interrupted: Arc::clone(&interrupted) };
    let mut generator = TextGenerator::open(&arguments.folder, options)?;
    catch_interrupt(&interrupted)?;
    let streamed = !arguments.json && prompts.len() == 1;
    let outcome = match streamed {
        true => stream(&mut generator, &prompts, &arguments.text),
        false => collect(&mut generator, &prompts, arguments),
    };
    match outcome {
        Err(Stopped::Generate(GenerateError::Interrupted)) => {
            Err(Failure::interrupted("interrupted before the last prompt was continued".into()))
        }
        Err(Stopped::Generate(error)) => Err(error.into()),
        Err(Stopped::Print(failure)) => Err(failure),
        Ok(()) => Ok(ExitCode::SUCCESS),
    }
}

enum Stopped {
    Generate(GenerateError),
    Print(Failure),
}

fn prompts(text: &str, arguments: &TextArguments) -> Result<Vec<Prompt>, Failure> {
    if arguments.whole_input {
        return Ok(vec![Prompt::from(text)]);
    }
    let prompt = |(index, line): (usize, &str)| match arguments.token_ids {
        true => token_ids(line).map(Prompt::Tokens).map_err(|word| {
            let message = format!("line {}: {word:?} is no token id", index + 1);
            Failure::usage(message, Some("give ids with spaces between"))
        }),
        false => Ok(Prompt::from(line)),
    };
    text.lines().enumerate().map(prompt).collect()
}

/// Ids with spaces or commas between; the first word that is none.
fn token_ids(line: &str) -> Result<Vec<i64>, String> {
    let words = line.split(|letter: char| letter.is_whitespace() || letter == ',').filter(|word| !word.is_empty());
    words.map(|word| word.parse::<u32>().map(i64::from).map_err(|_| word.to_owned())).collect()
}

/// Prints the only continuation while it is computed.
fn stream(generator: &mut TextGenerator, prompts: &[Prompt], arguments: &TextArguments) -> Result<(), Stopped> {
    let mut printed = Ok(());
    let mut between = "";
    let outcome = generator.generate_streaming(prompts, &arguments.options(), &mut |new| {
        let piece = match arguments.token_ids {
            true => format!("{between}{}", new.token),
            false => new.text.to_owned(),
        };
        between = " ";
        if printed.is_ok() && !piece.is_empty() {
            printed = print_result(&piece);
        }
    });
    if outcome.is_ok() || !between.is_empty() {
        printed = printed.and_then(|()| print_result("\n"));
    }
    printed.map_err(Stopped::Print)?;
    outcome.map(drop).map_err(Stopped::Generate)
}

/// Prints all continuations in the order of the prompts.
fn collect(generator: &mut TextGenerator, prompts: &[Prompt], arguments: &GenerateArguments) -> Result<(), Stopped> {
    let progress = progress::tokens();
    let found = generator.generate_streaming(prompts, &arguments.text.options(), &mut |_| progress.inc(1));
    drop(progress);
    let found = found.map_err(Stopped::Generate)?;
    let mut text = String::new();
    for (index, (prompt, continuation)) in prompts.iter().zip(&found).enumerate() {
        match arguments.json {
            true => text.push_str(&json(index + 1, prompt, continuation)),
            false => text.push_str(&plain(continuation, arguments.text.token_ids)),
        }
    }
    print_result(&text).map_err(Stopped::Print)
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
