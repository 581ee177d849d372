//! Prompts to their continuations.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    Finish, GenerateError, SamplingOptions,
    caches::{CacheLayout, Caches},
    causal_folder::{CausalFolder, GenerationSettings, Names},
    sampling::choose,
};
use crate::{
    backend::{OrtOperators, OrtOptions, OrtSession, OrtValue},
    random::Random,
    text::{HubTokenizer, Pieces, TOKENIZER_FILE},
};

/// How a [`TextGenerator`] computes.
#[derive(Debug, Clone)]
pub struct TextGeneratorOptions {
    /// Who computes the operators of the `ai.moa` domain.
    pub operators: OrtOperators,
    /// How ONNX Runtime computes.
    pub runtime: OrtOptions,
    /// Most prompts that are continued together; of these only those of one length where the graph has no mask.
    pub batch: usize,
    /// Whether prompts are token ids, so that a tokenizer that cannot be read is left out.
    pub token_ids: bool,
    /// Where this becomes true, a generation ends with [`GenerateError::Interrupted`].
    pub interrupted: Arc<AtomicBool>,
}

impl Default for TextGeneratorOptions {
    fn default() -> Self {
        let (operators, runtime) = (OrtOperators::Library, OrtOptions::default());
        Self { operators, runtime, batch: 32, token_ids: false, interrupted: Arc::default() }
    }
}

/// What is to be continued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text for the tokenizer of the folder; it is continued as it is, without a template for chats.
    Text(String),
    /// Token ids.
    Tokens(Vec<i64>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// What follows a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Continuation {
    /// The text, without special tokens, as the tokenizer decodes all of it; absent where the folder has no tokenizer.
    pub text: Option<String>,
    /// New token ids.
    pub tokens: Vec<i64>,
    /// Why there are no more.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

/// One new token, as soon as it is chosen.
#[derive(Debug, Clone, Copy)]
pub struct NewToken<'a> {
    /// Number of the prompt, from 0.
    pub prompt: usize,
    /// Its id.
    pub token: i64,
    /// The text that is certain now, maybe none; the rest comes with the last token.
    pub text: &'a str,
}

/// A causal language model that is ready to run.
#[derive(Debug)]
pub struct TextGenerator {
    folder: PathBuf,
    tokenizer: Option<HubTokenizer>,
    session: OrtSession,
    names: Names,
    caches: CacheLayout,
    vocabulary: Option<usize>,
    context: Option<usize>,
    eos: Vec<i64>,
    pad: i64,
    settings: GenerationSettings,
    batch: usize,
    interrupted: Arc<AtomicBool>,
}

/// A prompt on its way.
struct Row {
    prompt: usize,
    prompt_tokens: usize,
    /// The tokens to compute next: all of the prompt, later the newest.
    next: Vec<i64>,
    /// 1 for each real column so far, 0 for padding.
    mask: Vec<i64>,
    /// Most new tokens.
    most: usize,
    tokens: Vec<i64>,
    random: Random,
    text: String,
    pieces: Pieces,
    finish: Option<Finish>,
}

impl Row {
    /// Pads on the left to `length` columns.
    fn pad(&mut self, length: usize, pad: i64) {
        let missing = length - self.next.len();
        self.mask = [vec![0; missing], vec![1; self.next.len()]].concat();
        self.next.splice(..0, std::iter::repeat_n(pad, missing));
    }

    /// Real tokens before each of the columns of `next`.
    #[allow(clippy::cast_possible_wrap)]
    fn positions(&self) -> Vec<i64> {
        let before = self.mask.len() - self.next.len();
        let mut count: i64 = self.mask[..before].iter().sum();
        let position = |real: &i64| {
            count += real;
            (count - 1).max(0)
        };
        self.mask[before..].iter().map(position).collect()
    }
}

impl TextGenerator {
    /// Loads a folder: what `moa-export CHECKPOINT -o FOLDER` wrote for a causal language model, or another decoder
    /// with `past_key_values.{i}.key|value` and `present.{i}.key|value`, or with the names in `genai_config.json`.
    ///
    /// # Errors
    ///
    /// Where a file is missing or broken, the graph is no decoder with caches of floats of 32 or 16 bits, or the
    /// runtime is missing or does not take it.
    pub fn open(folder: &Path, options: TextGeneratorOptions) -> Result<Self, GenerateError> {
        if options.batch == 0 {
            return Err(GenerateError::Option("batch 0: it must be at least 1".into()));
        }
        let CausalFolder { graph, names, caches, vocabulary, context, eos, pad, settings } =
            CausalFolder::read(folder)?;
        let tokenizer = match HubTokenizer::read(folder) {
            Err(_) if options.token_ids => None,
            read => read?,
        };
        let outputs = [&names.logits].into_iter().chain(&names.present).cloned().collect();
        let caches = CacheLayout::new(&graph, options.operators, names.past.clone(), names.present.clone(), &caches);
        let session = OrtSession::load(&graph, outputs, options.operators, options.runtime, None)?;
        let (batch, interrupted) = (options.batch, options.interrupted);
        let folder = folder.to_path_buf();
        Ok(Self {
            folder,
            tokenizer,
            session,
            names,
            caches,
            vocabulary,
            context,
            eos,
            pad,
            settings,
            batch,
            interrupted,
        })
    }

    /// The folder's tokenizer, where it has one; without it prompts are token ids.
    pub const fn tokenizer(&self) -> Option<&HubTokenizer> {
        self.tokenizer.as_ref()
    }

    /// Whether the model writes its caches in place: the library computes it, and the graph lets it.
    pub const fn shares_caches(&self) -> bool {
        self.caches.shared()
    }

    /// Whether the folder says which tokens of the model end a text.
    pub const fn has_end(&self) -> bool {
        !self.eos.is_empty()
    }

    /// Most tokens of a prompt and its continuation, where the folder says so.
    pub const fn context(&self) -> Option<usize> {
        self.context
    }

    /// Tokens that it chooses from, where the graph says so.
    pub const fn symbols(&self) -> Option<usize> {
        self.vocabulary
    }

    /// Settings of generation in the folder's files that are not the default, and of which nothing is read.
    pub const fn settings(&self) -> &GenerationSettings {
        &self.settings
    }

    /// Continues every prompt; the results are in their order. A blank text, or one without tokens, is continued by
    /// nothing.
    ///
    /// # Errors
    ///
    /// Where an option is out of its range, a prompt has an unknown token or too many, or the runtime fails.
    pub fn generate(
        &mut self,
        prompts: &[Prompt],
        options: &SamplingOptions,
    ) -> Result<Vec<Continuation>, GenerateError> {
        self.generate_streaming(prompts, options, &mut |_| {})
    }

    /// [`Self::generate`], which tells `sink` of every token when it is chosen.
    ///
    /// # Errors
    ///
    /// As [`Self::generate`].
    pub fn generate_streaming(
        &mut self,
        prompts: &[Prompt],
        options: &SamplingOptions,
        sink: &mut dyn FnMut(NewToken<'_>),
    ) -> Result<Vec<Continuation>, GenerateError> {
        let mut results = Vec::with_capacity(prompts.len());
        self.generate_batches(prompts, 0, options, sink, &mut |batch| results.extend(batch))?;
        Ok(results)
    }

    /// [`Self::generate_streaming`], which hands over the results batch by batch, so that those before an error are
    /// there. `first` is the number of the first prompt, from 0: tokens are drawn by it.
    ///
    /// # Errors
    ///
    /// As [`Self::generate`].
    pub fn generate_batches(
        &mut self,
        prompts: &[Prompt],
        first: usize,
        options: &SamplingOptions,
        sink: &mut dyn FnMut(NewToken<'_>),
        finished: &mut dyn FnMut(Vec<Continuation>),
    ) -> Result<(), GenerateError> {
        if let Some(fault) = options.fault() {
            return Err(GenerateError::Option(fault));
        }
        let rows = (first..).zip(prompts).map(|(index, prompt)| self.row(index, prompt, options));
        let mut rows = rows.collect::<Result<Vec<_>, _>>()?.into_iter();
        while rows.len() > 0 {
            self.heed_interrupt()?;
            let batch = rows.by_ref().take(self.batch).collect();
            finished(self.run_batch(batch, options, sink)?);
        }
        Ok(())
    }

    fn heed_interrupt(&self) -> Result<(), GenerateError> {
        if self.interrupted.load(Ordering::Relaxed) { Err(GenerateError::Interrupted) } else { Ok(()) }
    }

    fn row(&self, index: usize, prompt: &Prompt, options: &SamplingOptions) -> Result<Row, GenerateError> {
        let ids = match (prompt, &self.tokenizer) {
            (Prompt::Text(text), _) if text.trim().is_empty() => Vec::new(),
            (Prompt::Tokens(ids), _) => ids.clone(),
            (Prompt::Text(text), Some(tokenizer)) => tokenizer.encode(text)?,
            (Prompt::Text(_), None) => {
                return Err(GenerateError::Missing { path: self.folder.join(TOKENIZER_FILE) });
            }
        };
        let prompt = index + 1;
        let is_known = |id: usize| self.vocabulary.is_none_or(|vocabulary| id < vocabulary);
        if let Some(id) = ids.iter().find(|id| !usize::try_from(**id).is_ok_and(is_known)) {
            return Err(GenerateError::TokenId { prompt, id: *id, vocabulary: self.vocabulary });
        }
        let limit = self.context.unwrap_or(usize::MAX);
        if ids.len() >= limit {
            return Err(GenerateError::LongPrompt { prompt, tokens: ids.len(), limit });
        }
        let finish = ids.is_empty().then_some(Finish::Blank);
        Ok(Row {
            prompt: index,
            prompt_tokens: ids.len(),
            most: options.max_new.min(limit - ids.len()),
            pieces: self.tokenizer.as_ref().map(|tokenizer| Pieces::after(&ids, tokenizer)).unwrap_or_default(),
            next: ids,
            mask: Vec::new(),
            tokens: Vec::new(),
            random: Random::stream(options.seed, index),
            text: String::new(),
            finish,
        })
    }

    /// Continues rows together, only those of one length where the graph has no mask: nothing else keeps padding out.
    fn run_batch(
        &mut self,
        mut rows: Vec<Row>,
        options: &SamplingOptions,
        sink: &mut dyn FnMut(NewToken<'_>),
    ) -> Result<Vec<Continuation>, GenerateError> {
        let mut done: Vec<_> = rows.extract_if(.., |row| row.finish.is_some()).collect();
        let is_masked = self.names.mask.is_some();
        while let Some(length) = rows.first().map(|row| row.next.len()) {
            let together = rows.extract_if(.., |row| is_masked || row.next.len() == length).collect();
            self.run_together(together, &mut done, options, sink)?;
        }
        Ok(self.continuations(done))
    }

    /// Continues rows, at least one, in one batch.
    fn run_together(
        &mut self,
        mut rows: Vec<Row>,
        done: &mut Vec<Row>,
        options: &SamplingOptions,
        sink: &mut dyn FnMut(NewToken<'_>),
    ) -> Result<(), GenerateError> {
        let length = rows.iter().map(|row| row.next.len()).max().unwrap_or_default();
        rows.iter_mut().for_each(|row| row.pad(length, self.pad));
        let most = length.saturating_add(rows.iter().map(|row| row.most).max().unwrap_or_default());
        let mut caches = Caches::new(&self.session, &self.caches, rows.len(), most)?;
        while !rows.is_empty() {
            self.heed_interrupt()?;
            let mut outputs = self.compute(&rows, &mut caches)?;
            caches.take(&mut outputs, 1);
            self.extend(&mut rows, &outputs, options, sink)?;
            let live: Vec<_> = (0..rows.len()).filter(|row| rows[*row].finish.is_none()).collect();
            if live.len() < rows.len() {
                done.extend(rows.extract_if(.., |row| row.finish.is_some()));
                if !rows.is_empty() {
                    caches.reorder(&mut self.session, &self.caches, &live)?;
                }
            }
        }
        Ok(())
    }

    /// In the order of the prompts.
    fn continuations(&self, mut done: Vec<Row>) -> Vec<Continuation> {
        done.sort_by_key(|row| row.prompt);
        let with_text = self.tokenizer.is_some();
        let continuation = |row: Row| Continuation {
            text: with_text.then_some(row.text),
            tokens: row.tokens,
            finish: row.finish.unwrap_or(Finish::Length),
            prompt_tokens: row.prompt_tokens,
        };
        done.into_iter().map(continuation).collect()
    }

    /// Logits, then keys and values that are no shared buffers.
    fn compute(&mut self, rows: &[Row], caches: &mut Caches) -> Result<Vec<OrtValue>, GenerateError> {
        let Self { session, names, .. } = self;
        let matrix = |values: Vec<Vec<i64>>| {
            let shape = [values.len(), values.first().map_or(0, Vec::len)];
            session.integers(&shape, values.concat())
        };
        let ids = matrix(rows.iter().map(|row| row.next.clone()).collect())?;
        let mask = matrix(rows.iter().map(|row| row.mask.clone()).collect())?;
        let positions = matrix(rows.iter().map(Row::positions).collect())?;
        session.bind(&names.ids, &ids)?;
        for (name, value) in [(&names.mask, &mask), (&names.positions, &positions)] {
            if let Some(name) = name {
                session.bind(name, value)?;
            }
        }
        caches.bind(session, &self.caches, rows.first().map_or(0, |row| row.next.len()))?;
        Ok(session.run()?)
    }

    /// Chooses the next token of every row.
    fn extend(
        &self,
        rows: &mut [Row],
        outputs: &[OrtValue],
        options: &SamplingOptions,
        sink: &mut dyn FnMut(NewToken<'_>),
    ) -> Result<(), GenerateError> {
        let Some(logits) = outputs.first() else { return Ok(()) };
        let (shape, values) = logits.floats()?;
        let width = shape.last().and_then(|width| usize::try_from(*width).ok()).unwrap_or_default();
        let per_row = values.len() / rows.len();
        for (row, values) in rows.iter_mut().zip(values.chunks_exact(per_row.max(1))) {
            let last = &values[values.len().saturating_sub(width)..];
            let not_finite = GenerateError::NotFiniteBehind { prompt: row.prompt + 1 };
            let token = choose(last, options, &mut row.random).ok_or(not_finite)?;
            row.tokens.push(token);
            row.next = vec![token];
            row.mask.push(1);
            let ended = !options.ignore_eos && self.eos.contains(&token);
            row.finish = match ended {
                true => Some(Finish::Eos),
                false => (row.tokens.len() >= row.most).then_some(Finish::Length),
            };
            let mut text = String::new();
            if let Some(tokenizer) = &self.tokenizer {
                if !ended {
                    text = row.pieces.push(token, tokenizer)?;
                }
                if row.finish.is_some() {
                    text.push_str(&row.pieces.finish(tokenizer)?);
                    row.text = row.pieces.whole(tokenizer)?;
                }
            }
            sink(NewToken { prompt: row.prompt, token, text: &text });
        }
        Ok(())
    }
}
