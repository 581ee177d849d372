//! From the files of `profile --inputs` to batches.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use moa_schema::interface::{
    ATTENTION_MASK, DECODER_ATTENTION_MASK, DECODER_INPUT_IDS, ENCODER_ATTENTION_MASK, INPUT_IDS,
};

use super::{
    args::{InputFormat, ProfileArguments},
    vocabulary::Vocabulary,
};
#[cfg(feature = "tokenizers")]
use crate::cli::notes::note_of_contradiction;
use crate::cli::{
    Failure, note,
    notes::note_of_unknown,
    text_input::{MAX_BYTES, text},
};
#[cfg(feature = "tokenizers")]
use crate::text::HubTokenizer;
use crate::{
    files::folder_of,
    profile::{ProfileError, Profiler},
    tensor::{NamedTensors, Tensor, TensorData, TensorShapeError},
    tensor_file,
    text::{Dictionary, Tokenizer, TranslationConfig, read_bytes},
};

/// One sequence.
struct Line {
    /// In its file, from 1.
    number: usize,
    /// Ids of the only side, or of the source.
    ids: Vec<i64>,
    /// What the decoder reads.
    decoded: Vec<i64>,
}

/// Every batch that the arguments name, in order, with its file.
pub(super) fn batches<'a>(
    arguments: &'a ProfileArguments,
    profiler: &Profiler,
    vocabulary: Option<&Vocabulary>,
) -> Result<Vec<(&'a Path, NamedTensors)>, Failure> {
    let mut batches = Vec::new();
    for path in &arguments.inputs {
        let format = arguments.format_of(path);
        if format == InputFormat::Tensors {
            let tensors = tensor_file::read(path)?;
            let pad = vocabulary.filter(|_| profiler.is_encoder_decoder());
            batches.push((path.as_path(), with_masks(tensors, pad)?));
            continue;
        }
        if !profiler.inputs().iter().any(|input| input.name == INPUT_IDS) {
            let message = format!("{}: the model takes no token ids", arguments.model.display());
            return Err(Failure::usage(message, "give --inputs FILE.safetensors with its named inputs"));
        }
        let bytes = read_bytes(path, MAX_BYTES).map_err(Failure::of_lines)?;
        let text = text(&path.display().to_string(), bytes, 1)?;
        let lines = match format {
            InputFormat::Ids => id_lines(path, &text, profiler.is_encoder_decoder())?,
            _ => text_lines(arguments, profiler, (path, &text), vocabulary)?,
        };
        let lines = known_lines(lines, arguments, profiler, path)?;
        if lines.is_empty() {
            let message = format!("{}: there is no line to run", path.display());
            return Err(Failure::malformed(message, "give one sequence a line; blank lines are left out"));
        }
        let of_file = |error| Failure::from(ProfileError::Shape(error)).of_file(path);
        let of_lines = batched(lines, arguments.batch(), profiler.is_encoder_decoder()).map_err(of_file)?;
        batches.extend(of_lines.into_iter().map(|batch| (path.as_path(), batch)));
    }
    Ok(batches)
}

/// The lines of `path` without those that are too long and to be left out; one with a token that the model does not
/// have is an error.
fn known_lines(
    mut lines: Vec<Line>,
    arguments: &ProfileArguments,
    profiler: &Profiler,
    path: &Path,
) -> Result<Vec<Line>, Failure> {
    let mut left_out = BTreeSet::new();
    for Line { number, ids, decoded } in &lines {
        let sides = [("", ids), ("target ", decoded)];
        for ((side, ids), (symbols, positions)) in sides.into_iter().zip(profiler.limits()) {
            let symbols = symbols.unwrap_or(usize::MAX);
            if let Some(id) = ids.iter().find(|id| !usize::try_from(**id).is_ok_and(|id| id < symbols)) {
                let place = format!("{}, line {number}", path.display());
                let message = format!("{place}: {side}token {id} is none of the model's {symbols}");
                return Err(Failure::token_id(message));
            }
            if is_too_long(arguments, (path, *number), (side, ids.len()), positions)? {
                left_out.insert(*number);
                break;
            }
        }
    }
    lines.retain(|line| !left_out.contains(&line.number));
    Ok(lines)
}

/// Whether a line has more tokens of a side than `limit` and is left out for it, which a note says.
fn is_too_long(
    arguments: &ProfileArguments,
    (path, number): (&Path, usize),
    (side, tokens): (&str, usize),
    limit: Option<usize>,
) -> Result<bool, Failure> {
    let Some(limit) = limit.filter(|limit| tokens > *limit) else { return Ok(false) };
    let message = format!("{}, line {number}: {tokens} {side}tokens, and {limit} are possible", path.display());
    if !arguments.skip_long {
        return Err(Failure::too_long(message, "split the line, or add --skip-long"));
    }
    note(&format!("{message}: left out"));
    Ok(true)
}

/// Adds masks that a file leaves out where the vocabulary says what padding is.
fn with_masks(mut tensors: NamedTensors, vocabulary: Option<&Vocabulary>) -> Result<NamedTensors, Failure> {
    for (ids, mask) in [(INPUT_IDS, ATTENTION_MASK), (DECODER_INPUT_IDS, DECODER_ATTENTION_MASK)] {
        let Some((_, ids)) = vocabulary.zip(tensors.get(ids)) else { continue };
        if tensors.contains_key(mask) {
            continue;
        }
        let real = |id: &i64| i64::from(*id != Dictionary::PAD);
        let values = ids.as_i64().map(|ids| ids.iter().map(real).collect());
        if let Some(values) = values {
            let tensor = Tensor::new(ids.shape(), TensorData::I64(values));
            tensors.insert(mask.into(), tensor.map_err(|error| Failure::from(ProfileError::Shape(error)))?);
        }
    }
    Ok(tensors)
}

/// A line, or its two halves around a tab.
fn columns<'a>(path: &Path, number: usize, line: &'a str) -> Result<(&'a str, Option<&'a str>), Failure> {
    let Some((first, second)) = line.split_once('\t') else { return Ok((line, None)) };
    if second.contains('\t') {
        let found = line.split('\t').count();
        let message = format!("{}, line {number}: {found} columns, and at most two are read", path.display());
        return Err(Failure::malformed(message, "keep source and target: cut -f1,2 FILE, or other columns of it"));
    }
    Ok((first, Some(second)))
}

fn id_lines(path: &Path, text: &str, pairs: bool) -> Result<Vec<Line>, Failure> {
    let ids = |number: usize, text: &str| -> Result<Vec<i64>, Failure> {
        let parsed = text.split_whitespace().map(|word| word.parse().map_err(|_| word));
        parsed.collect::<Result<_, &str>>().map_err(|word| {
            let message = format!("{}, line {number}: {word:?} is no token id", path.display());
            Failure::malformed(message, "give integers with spaces between, or text with --format text")
        })
    };
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let (first, second) = columns(path, number, line)?;
        let line = Line { number, ids: ids(number, first)?, decoded: ids(number, second.unwrap_or_default())? };
        if line.ids.is_empty() || line.decoded.is_empty() == pairs {
            let expected = if pairs { "source ids, a tab and decoder ids" } else { "the ids of one sequence" };
            let message = format!("{}, line {number}: expected {expected}", path.display());
            return Err(Failure::malformed(message, "one graph reads ids, an encoder-decoder two lists of them"));
        }
        lines.push(line);
    }
    Ok(lines)
}

/// What makes token ids of the text in `path`.
fn of_text<'a>(
    arguments: &ProfileArguments,
    profiler: &Profiler,
    path: &Path,
    vocabulary: Option<&'a Vocabulary>,
) -> Result<&'a Vocabulary, Failure> {
    let refused = |what: &str, help: &str| {
        let message = format!("{} is text, and {} {what}", path.display(), arguments.model.display());
        Failure::usage(message, help)
    };
    if profiler.inputs().iter().any(|input| input.name == ENCODER_ATTENTION_MASK) {
        return Err(refused("is half a model", "profile the folder, whose encoder reads the text"));
    }
    let help = "give token ids with --format ids, or named tensors in a .safetensors file";
    let what = match arguments.dict {
        Some(_) => format!("{NO_VOCABULARY}; --dict names token ids, and splits no text"),
        None => NO_VOCABULARY.to_owned(),
    };
    vocabulary.ok_or_else(|| refused(&what, help))
}

const NO_VOCABULARY: &str = if cfg!(feature = "tokenizers") {
    "has neither a dictionary of fairseq nor a tokenizer.json beside it"
} else {
    "has no dictionary of fairseq, with which alone text is read here"
};

/// Lines of text as the model reads them.
fn text_lines(
    arguments: &ProfileArguments,
    profiler: &Profiler,
    file: (&Path, &str),
    vocabulary: Option<&Vocabulary>,
) -> Result<Vec<Line>, Failure> {
    match of_text(arguments, profiler, file.0, vocabulary)? {
        Vocabulary::Fairseq { config, tokenizer } => fairseq_lines(arguments, profiler, file, (config, tokenizer)),
        #[cfg(feature = "tokenizers")]
        Vocabulary::Hub(tokenizer) => hub_lines(file, tokenizer),
    }
}

/// Lines as a tokenizer splits them; without those that have no token.
#[cfg(feature = "tokenizers")]
fn hub_lines((path, text): (&Path, &str), tokenizer: &HubTokenizer) -> Result<Vec<Line>, Failure> {
    note_of_contradiction(tokenizer, "profile");
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let ids = tokenizer.encode(line).map_err(|error| {
            let place = format!("{}, line {number}", path.display());
            Failure::from(error).of_file(Path::new(&place))
        })?;
        lines.push(Line { number, ids, decoded: Vec::new() });
    }
    lines.retain(|line| !line.ids.is_empty());
    Ok(lines)
}

/// Lines as fairseq splits them; targets that are not given are translated greedily, where there is a decoder.
fn fairseq_lines(
    arguments: &ProfileArguments,
    profiler: &Profiler,
    (path, text): (&Path, &str),
    (config, tokenizer): (&TranslationConfig, &Tokenizer),
) -> Result<Vec<Line>, Failure> {
    let (mut lines, mut open, mut tokens) = (Vec::new(), Vec::new(), vec![(0, 0); text.lines().count()]);
    // Those without a target, each at its place in the file, as errors count them.
    let mut sources = vec![""; text.lines().count()];
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let (source, target) = columns(path, number, line)?;
        let mut ids = tokenizer.encode(source);
        let mut count = |ids: &[i64]| {
            let (all, unknown) = &mut tokens[number - 1];
            *all += ids.len();
            *unknown += ids.iter().filter(|id| **id == Dictionary::UNK).count();
        };
        count(&ids);
        ids.push(Dictionary::EOS);
        if is_too_long(arguments, (path, number), ("", ids.len()), config.max_source_positions)? {
            continue;
        }
        if !profiler.is_encoder_decoder() {
            if target.is_some() {
                let model = arguments.model.display();
                let message = format!("{}, line {number}: a target, and {model} reads sources alone", path.display());
                return Err(Failure::malformed(message, "keep the sources: cut -f1 FILE, or profile the folder"));
            }
            lines.push(Line { number, ids, decoded: Vec::new() });
            continue;
        }
        let mut decoded = vec![config.decoder_start()];
        match target {
            Some(target) => {
                let target = tokenizer.encode_target(target);
                count(&target);
                decoded.extend(target);
                if is_too_long(arguments, (path, number), ("target ", decoded.len()), config.max_target_positions)? {
                    continue;
                }
            }
            None => {
                open.push((lines.len(), number - 1));
                sources[number - 1] = source;
            }
        }
        lines.push(Line { number, ids, decoded });
    }
    note_of_unknown(&tokens, |index| format!("{}, line {}", path.display(), index + 1));
    if !open.is_empty() {
        let found = translated(arguments, path, &sources)?;
        for (place, source) in open {
            lines[place].decoded.extend_from_slice(&found[source]);
        }
    }
    Ok(lines)
}

/// What greedy search makes of each line, without the end.
#[cfg(feature = "ort")]
fn translated(arguments: &ProfileArguments, path: &Path, sources: &[&str]) -> Result<Vec<Vec<i64>>, Failure> {
    use crate::cli::failure::failure_in;
    use crate::{
        backend::OrtOptions,
        generate::{SearchOptions, Translator, TranslatorOptions},
    };
    let operators = arguments.backend.ort_operators().ok_or_else(no_target)?;
    let runtime = OrtOptions::new(arguments.threads, arguments.library.as_deref());
    let options = TranslatorOptions { operators, runtime, batch: arguments.batch(), ..TranslatorOptions::default() };
    let mut translator = Translator::open(&arguments.model, options)?;
    let search = SearchOptions { beam: 1, nbest: 1, ..SearchOptions::default() };
    let best = translator.translate(sources, &search);
    let best = best.map_err(|error| failure_in(&path.display().to_string(), error))?;
    let tokens = |found: Vec<crate::generate::Hypothesis>| {
        let mut tokens = found.into_iter().next().map_or_else(Vec::new, |best| best.tokens);
        tokens.pop_if(|last| *last == Dictionary::EOS);
        tokens
    };
    Ok(best.into_iter().map(tokens).collect())
}

#[cfg(not(feature = "ort"))]
fn translated(_: &ProfileArguments, _: &Path, _: &[&str]) -> Result<Vec<Vec<i64>>, Failure> {
    Err(no_target())
}

fn no_target() -> Failure {
    Failure::usage(
        "this backend translates nothing, and a line has no target",
        "give SOURCE, a tab and TARGET on each line, or --backend ort",
    )
}

/// Lines of the same lengths side by side, so that nothing is padded.
fn batched(lines: Vec<Line>, most: usize, pairs: bool) -> Result<Vec<NamedTensors>, TensorShapeError> {
    let mut by_length: BTreeMap<(usize, usize), Vec<Line>> = BTreeMap::new();
    for line in lines {
        by_length.entry((line.ids.len(), line.decoded.len())).or_default().push(line);
    }
    let mut batches = Vec::new();
    for ((first, second), lines) in by_length {
        for chunk in lines.chunks(most) {
            let mut batch = NamedTensors::new();
            let mut add = |names: [&str; 2], length: usize, ids: Vec<i64>| {
                let [ids_name, mask_name] = names;
                let ones = TensorData::I64(vec![1; ids.len()]);
                batch.insert(mask_name.into(), Tensor::new([chunk.len(), length], ones)?);
                batch.insert(ids_name.into(), Tensor::new([chunk.len(), length], TensorData::I64(ids))?);
                Ok::<_, TensorShapeError>(())
            };
            add([INPUT_IDS, ATTENTION_MASK], first, chunk.iter().flat_map(|line| &line.ids).copied().collect())?;
            if pairs {
                let ids = chunk.iter().flat_map(|line| &line.decoded).copied().collect();
                add([DECODER_INPUT_IDS, DECODER_ATTENTION_MASK], second, ids)?;
            }
            batches.push(batch);
        }
    }
    Ok(batches)
}

/// The folder of the model.
pub(super) fn folder(model: &Path) -> PathBuf {
    if model.is_dir() { model.into() } else { folder_of(model).into() }
}
