//! Lines of text to lines of text.

use std::{
    f64::consts::LN_2,
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use moa_schema::interface::{ATTENTION_MASK, Cache, INPUT_IDS, LOGITS};

use super::{
    Finish, GenerateError, Profile, SearchOptions,
    caches::CacheLayout,
    decoder::{CacheNames, CachedDecoder, Memory, StepTimes},
    graphs::{Graphs, names_of},
    profile::by_operator,
    search::{Finished, SearchError, Symbols, search},
};
use crate::{
    backend::{OrtOperators, OrtOptions, OrtSession, OrtTrace},
    onnx::OnnxFile,
    text::{Dictionary, Tokenizer, TranslationConfig},
};

/// How a [`Translator`] computes.
#[derive(Debug, Clone)]
pub struct TranslatorOptions {
    /// Who computes the operators of the `ai.moa` domain.
    pub operators: OrtOperators,
    /// How ONNX Runtime computes.
    pub runtime: OrtOptions,
    /// Most sentences that are decoded together.
    pub batch: usize,
    /// Whether the runtime records every node for [`Translator::profile`]; costs time.
    pub profile: bool,
    /// Where this becomes true, a translation ends with [`GenerateError::Interrupted`].
    pub interrupted: Arc<AtomicBool>,
}

impl Default for TranslatorOptions {
    fn default() -> Self {
        Self {
            operators: OrtOperators::Library,
            runtime: OrtOptions::default(),
            batch: 32,
            profile: false,
            interrupted: Arc::default(),
        }
    }
}

/// One translation of a line.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// The text.
    pub text: String,
    /// Ids, the end included.
    pub tokens: Vec<i64>,
    /// Sum of the log-probabilities over the length penalty.
    pub score: f64,
    /// Log-probability of each token.
    pub log_probabilities: Vec<f64>,
    /// [`Finish::Length`] where it was ended at the most tokens that it might have, though all other tokens together
    /// were more likely than the end.
    pub finish: Finish,
}

/// A translation model that is ready to run.
#[derive(Debug)]
pub struct Translator {
    config: TranslationConfig,
    tokenizer: Tokenizer,
    encoder: OrtSession,
    decoder: OrtSession,
    names: CacheNames,
    batch: usize,
    interrupted: Arc<AtomicBool>,
    recording: Option<OrtTrace>,
    times: StepTimes,
    encode_time: Duration,
    total_time: Duration,
    sentences: usize,
}

/// A line as the model reads it.
struct Source {
    /// Place of the line in the input.
    place: usize,
    /// Ids, the end included.
    ids: Vec<i64>,
}

impl Translator {
    /// Loads the folder that `moa-export CHECKPOINT -o FOLDER` wrote.
    ///
    /// # Errors
    ///
    /// Where a file is missing or broken, the graphs are no encoder and decoder with caches, or the runtime is
    /// missing or does not take them.
    pub fn open(folder: &Path, options: TranslatorOptions) -> Result<Self, GenerateError> {
        if options.batch == 0 {
            return Err(GenerateError::Option("batch 0: it must be at least 1".into()));
        }
        let graphs = Graphs::read(folder)?;
        let mut config = TranslationConfig::read(folder)?;
        let fewer = |limit: Option<usize>, graph: &OnnxFile| limit.into_iter().chain(graph.most_positions()).min();
        config.max_source_positions = fewer(config.max_source_positions, &graphs.encoder);
        config.max_target_positions = fewer(config.max_target_positions, &graphs.decoder);
        let tokenizer = Tokenizer::read(folder, &config)?;
        check_vocabulary(folder, &graphs, &config, &tokenizer)?;
        let recording = options.profile.then(OrtTrace::begin).transpose()?;
        let load = |model: &OnnxFile, outputs, profile: Option<&Path>| {
            OrtSession::load(model, outputs, options.operators, options.runtime.clone(), profile)
        };
        let layers = graphs.layers;
        let encoder = load(&graphs.encoder, names_of((0..layers).map(Cache::of_encoder), Cache::present), None)?;
        let present = names_of((0..layers).map(Cache::of_decoder), Cache::present);
        let outputs = [vec![LOGITS.to_owned()], present.clone()].concat();
        let place = recording.as_ref().map(OrtTrace::place);
        let decoder = load(&graphs.decoder, outputs, place.as_deref())?;
        let past = names_of((0..layers).map(Cache::of_decoder), Cache::past);
        let names = CacheNames {
            own: CacheLayout::new(&graphs.decoder, options.operators, past, present, &graphs.caches),
            cross: names_of((0..layers).map(Cache::of_encoder), Cache::past),
        };
        Ok(Self {
            config,
            tokenizer,
            encoder,
            decoder,
            names,
            batch: options.batch,
            interrupted: options.interrupted,
            recording,
            times: StepTimes::default(),
            encode_time: Duration::ZERO,
            total_time: Duration::ZERO,
            sentences: 0,
        })
    }

    /// Whether the decoder writes its caches in place: the library computes it, and the graph lets it.
    pub const fn shares_caches(&self) -> bool {
        self.names.own.shared()
    }

    /// The `nbest` best translations of each line, best first; none for a line without a word.
    ///
    /// Lines of similar length are decoded together; the results are in the order of the lines.
    ///
    /// # Errors
    ///
    /// Where an option is out of its range, a line is longer than the model's positions, or the runtime fails.
    pub fn translate<L: AsRef<str>>(
        &mut self,
        lines: &[L],
        options: &SearchOptions,
    ) -> Result<Vec<Vec<Hypothesis>>, GenerateError> {
        self.check(lines, 1, options)?;
        self.translate_part(lines, 1, options)
    }

    /// How many tokens each line has, without an end, and how many of them the dictionary does not have.
    pub fn unknown_tokens<L: AsRef<str>>(&self, lines: &[L]) -> Vec<(usize, usize)> {
        let lines = self.tokenizer.encode_all(lines).into_iter();
        lines.map(|ids| (ids.len(), ids.iter().filter(|id| **id == Dictionary::UNK).count())).collect()
    }

    /// Checks options and lines without translating; `first` is the number of the first line.
    ///
    /// # Errors
    ///
    /// As [`Self::translate`], but for the runtime.
    pub fn check<L: AsRef<str>>(
        &self,
        lines: &[L],
        first: usize,
        options: &SearchOptions,
    ) -> Result<(), GenerateError> {
        if let Some(fault) = options.fault() {
            return Err(GenerateError::Option(fault));
        }
        let limit = self.config.max_source_positions.unwrap_or(usize::MAX);
        for (line, ids) in (first..).zip(self.tokenizer.encode_all(lines)) {
            let tokens = ids.len() + 1;
            if tokens > limit {
                return Err(GenerateError::TooLong { line, tokens, limit });
            }
            let most = options.max_len(tokens, self.config.max_target_positions);
            if tokens > 1 && options.min_len > most {
                let min_len = options.min_len;
                let fault = format!("min-len {min_len}: line {line} may have at most {most} tokens before the end");
                return Err(GenerateError::Option(fault));
            }
        }
        Ok(())
    }

    /// [`Self::translate`] for lines that [`Self::check`] has seen.
    ///
    /// # Errors
    ///
    /// Where the runtime fails or computes no numbers.
    pub fn translate_part<L: AsRef<str>>(
        &mut self,
        lines: &[L],
        first: usize,
        options: &SearchOptions,
    ) -> Result<Vec<Vec<Hypothesis>>, GenerateError> {
        let start = Instant::now();
        let encoded = self.tokenizer.encode_all(lines).into_iter().enumerate();
        let sources = encoded.map(|(place, ids)| Source { place, ids });
        let mut sources: Vec<_> = sources.filter(|source| !source.ids.is_empty()).collect();
        sources.iter_mut().for_each(|source| source.ids.push(Dictionary::EOS));
        sources.sort_by_key(|source| source.ids.len());
        let mut results: Vec<Vec<Hypothesis>> = lines.iter().map(|_| Vec::new()).collect();
        for batch in sources.chunks(self.batch) {
            let found = self.translate_batch(batch, options).map_err(|error| match error {
                SearchError::Decoder(error) => error,
                SearchError::NotFinite { sentence } => GenerateError::NotFinite { line: first + batch[sentence].place },
            })?;
            for (source, found) in batch.iter().zip(found) {
                let most = self.most_tokens(source, options);
                let found = found.into_iter().take(options.nbest);
                results[source.place] = found.map(|one| self.hypothesis(one, most)).collect();
            }
        }
        self.sentences += sources.len();
        self.total_time += start.elapsed();
        Ok(results)
    }

    fn translate_batch(
        &mut self,
        batch: &[Source],
        options: &SearchOptions,
    ) -> Result<Vec<Vec<Finished>>, SearchError<GenerateError>> {
        let max_lens: Vec<_> = batch.iter().map(|source| self.most_tokens(source, options)).collect();
        let start = Instant::now();
        let memory = self.encode(batch).map_err(SearchError::Decoder)?;
        self.encode_time += start.elapsed();
        let symbols = Symbols { start: self.config.decoder_start(), padding: Dictionary::PAD, end: Dictionary::EOS };
        let steps = max_lens.iter().max().map_or(0, |most| most + 1);
        let Self { decoder, names, interrupted, times, .. } = self;
        let decoder = CachedDecoder::new(decoder, names, steps, (memory, batch.len()), interrupted, times);
        let mut decoder = decoder.map_err(|error| SearchError::Decoder(error.into()))?;
        search(&mut decoder, &max_lens, symbols, options)
    }

    /// Keys and values of the sources for the decoder.
    fn encode(&mut self, batch: &[Source]) -> Result<Memory, GenerateError> {
        let length = batch.iter().map(|source| source.ids.len()).max().unwrap_or_default();
        let mut ids = Vec::with_capacity(batch.len() * length);
        let mut mask = Vec::with_capacity(batch.len() * length);
        for source in batch {
            let padding = std::iter::repeat_n(Dictionary::PAD, length - source.ids.len());
            let real = source.ids.iter().copied();
            match self.config.left_pad_source {
                true => ids.extend(padding.chain(real)),
                false => ids.extend(real.chain(padding)),
            }
        }
        mask.extend(ids.iter().map(|id| i64::from(*id != Dictionary::PAD)));
        let shape = [batch.len(), length];
        let ids = self.encoder.integers(&shape, ids)?;
        let mask = self.encoder.integers(&shape, mask)?;
        self.encoder.bind(INPUT_IDS, &ids)?;
        self.encoder.bind(ATTENTION_MASK, &mask)?;
        Ok(Memory { mask, caches: self.encoder.run()? })
    }

    /// Most tokens of a translation, without the end.
    fn most_tokens(&self, source: &Source, options: &SearchOptions) -> usize {
        options.max_len(source.ids.len(), self.config.max_target_positions)
    }

    fn hypothesis(&self, finished: Finished, most_tokens: usize) -> Hypothesis {
        let Finished { tokens, log_probabilities, score } = finished;
        let is_likely = log_probabilities.last().is_some_and(|end| *end >= -LN_2);
        let finish = if tokens.len() > most_tokens && !is_likely { Finish::Length } else { Finish::Eos };
        Hypothesis { text: self.tokenizer.decode(&tokens), tokens, score, log_probabilities, finish }
    }

    /// Where the time of all translations so far went; nodes only where
    /// [`profile`](TranslatorOptions::profile) was set.
    ///
    /// # Errors
    ///
    /// Where the runtime's records cannot be read.
    pub fn profile(&mut self) -> Result<Profile, GenerateError> {
        let mut profile = Profile {
            sentences: self.sentences,
            steps: self.times.steps,
            rows: self.times.rows,
            total: self.total_time,
            encoder: self.encode_time,
            decoder: self.times.run,
            reorder: self.times.reorder,
            nodes: Vec::new(),
        };
        if let Some(trace) = self.recording.take() {
            profile.nodes = by_operator(trace.nodes(&self.decoder.end_profiling()?)?);
        }
        Ok(profile)
    }
}

/// Dictionaries, start symbol and graph must agree.
fn check_vocabulary(
    folder: &Path,
    graphs: &Graphs,
    config: &TranslationConfig,
    tokenizer: &Tokenizer,
) -> Result<(), GenerateError> {
    let symbols = tokenizer.target().len();
    if let Some(outputs) = graphs.vocabulary.filter(|outputs| *outputs != symbols) {
        return Err(GenerateError::Vocabulary { path: folder.join(&config.target_dictionary), symbols, outputs });
    }
    let start = config.decoder_start();
    if !usize::try_from(start).is_ok_and(|start| start < symbols) {
        let what = format!("decoder_start_token_id {start} is none of its {symbols} symbols");
        return Err(GenerateError::Graph { path: graphs.decoder.path().to_owned(), what });
    }
    Ok(())
}
