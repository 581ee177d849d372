//! The exported decoder with its caches, as a [`Decoder`].

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use moa_schema::interface::{ATTENTION_MASK, ENCODER_ATTENTION_MASK, INPUT_IDS};

use super::{
    GenerateError,
    caches::{CacheLayout, Caches},
    search::Decoder,
};
use crate::backend::{BackendError, OrtSession, OrtValue};

/// What the encoder computed for a batch of sources: one row a sentence.
pub(super) struct Memory {
    /// `[rows, source]`, 1 for a real token.
    pub(super) mask: OrtValue,
    /// Keys and values of each layer's cross-attention, in the order of the decoder's inputs.
    pub(super) caches: Vec<OrtValue>,
}

/// The decoder's caches.
#[derive(Debug, Clone)]
pub(super) struct CacheNames {
    pub(super) own: CacheLayout,
    /// Names of the inputs that the encoder computes.
    pub(super) cross: Vec<String>,
}

/// Where the time of a decoder went.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepTimes {
    pub(super) steps: usize,
    pub(super) rows: usize,
    pub(super) run: Duration,
    pub(super) reorder: Duration,
}

/// One batch on its way through the decoder.
pub(super) struct CachedDecoder<'a> {
    session: &'a mut OrtSession,
    names: &'a CacheNames,
    memory: Memory,
    /// Row of `memory` at first, for each row now.
    sentences: Vec<usize>,
    /// Keys and values of the tokens so far.
    own: Caches,
    length: usize,
    /// Rows of the last step.
    rows: usize,
    /// `[rows, 1]`, the newest tokens; stays bound while there are as many rows.
    ids: Option<OrtValue>,
    /// What the last step computed, `[rows, 1, vocabulary]`.
    logits: Option<OrtValue>,
    interrupted: &'a AtomicBool,
    times: &'a mut StepTimes,
}

impl<'a> CachedDecoder<'a> {
    /// `steps` are the most steps that there will be.
    pub(super) fn new(
        session: &'a mut OrtSession,
        names: &'a CacheNames,
        steps: usize,
        (memory, rows): (Memory, usize),
        interrupted: &'a AtomicBool,
        times: &'a mut StepTimes,
    ) -> Result<Self, BackendError> {
        let own = Caches::new(session, &names.own, rows, steps)?;
        let sentences: Vec<_> = (0..rows).collect();
        let (rows, ids, logits) = (sentences.len(), None, None);
        let mut decoder =
            Self { session, names, memory, sentences, own, length: 0, rows, ids, logits, interrupted, times };
        decoder.bind_memory()?;
        Ok(decoder)
    }

    fn bind_memory(&mut self) -> Result<(), BackendError> {
        self.session.bind(ENCODER_ATTENTION_MASK, &self.memory.mask)?;
        for (name, cache) in self.names.cross.iter().zip(&self.memory.caches) {
            self.session.bind(name, cache)?;
        }
        Ok(())
    }

    /// Moves what the rows carry to where `parents` says; keys and values of a source move only where a row's
    /// sentence is another one than before.
    fn reorder(&mut self, parents: &[usize]) -> Result<(), BackendError> {
        let sentences: Vec<_> = parents.iter().map(|row| self.sentences[*row]).collect();
        if sentences != self.sentences {
            for cache in &mut self.memory.caches {
                *cache = self.session.gather(cache, parents)?;
            }
            self.memory.mask = self.session.gather(&self.memory.mask, parents)?;
            self.sentences = sentences;
            self.bind_memory()?;
        }
        self.own.reorder(self.session, &self.names.own, parents)
    }

    fn compute(&mut self, tokens: &[i64]) -> Result<(), BackendError> {
        let rows = tokens.len();
        self.length += 1;
        let mask = self.session.integers(&[rows, self.length], vec![1; rows * self.length])?;
        self.session.bind(ATTENTION_MASK, &mask)?;
        self.own.bind(self.session, &self.names.own, 1)?;
        match (&mut self.ids, &mut self.logits) {
            (Some(ids), Some(logits)) if self.rows == rows => {
                ids.set_integers(tokens)?;
                if self.names.own.shared() {
                    return self.session.run_into(std::slice::from_mut(logits));
                }
            }
            _ => {
                let ids = self.ids.insert(self.session.integers(&[rows, 1], tokens.to_vec())?);
                self.session.bind(INPUT_IDS, ids)?;
                self.rows = rows;
            }
        }
        let mut outputs = self.session.run()?;
        self.own.take(&mut outputs, 1);
        self.logits = outputs.pop();
        Ok(())
    }
}

impl Decoder for CachedDecoder<'_> {
    type Error = GenerateError;

    fn step(&mut self, parents: &[usize], tokens: &[i64]) -> Result<&[f32], GenerateError> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(GenerateError::Interrupted);
        }
        let start = Instant::now();
        if !parents.iter().copied().eq(0..self.sentences.len()) {
            self.reorder(parents)?;
        }
        let reordered = Instant::now();
        self.compute(tokens)?;
        self.times.reorder += reordered - start;
        self.times.run += reordered.elapsed();
        self.times.steps += 1;
        self.times.rows += tokens.len();
        match &self.logits {
            Some(logits) => Ok(logits.floats()?.1),
            None => Ok(&[]),
        }
    }
}
