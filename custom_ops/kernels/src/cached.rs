//! Keys and values as attention reads them.

use half::f16;

use crate::buffer::Buffer;
use crate::pool::Stage;
use crate::scalar::{Scalar, Stored};

/// Bytes of keys and values that a core's own caches keep from step to step.
const NEAR: usize = 1 << 20;

/// Keys and values `[B, G, rows, D]`, of which the first rows of each head count.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheRows<'a, T = f32> {
    pub(crate) key: &'a [T],
    pub(crate) value: &'a [T],
    /// `[B, G, P, D]` of keys and values: what both begin with, where it stands elsewhere too. Reading what another
    /// core has just copied, or what was copied past the caches, takes longer.
    pub(crate) past: Option<[&'a [T]; 2]>,
}

impl<T> CacheRows<'_, T> {
    /// The first `len` elements of head `pair` of `pairs`, and its whole past.
    pub(crate) fn of(self, pair: usize, pairs: usize, len: usize) -> Self {
        let of = |all: &'_ [T]| pair * (all.len() / pairs)..(pair + 1) * (all.len() / pairs);
        let [key, value] = [self.key, self.value].map(|rows| &rows[of(rows)][..len]);
        Self { key, value, past: self.past.map(|both| both.map(|rows| &rows[of(rows)])) }
    }

    /// Whether so many elements of keys, and as many of values, come from far away.
    pub(crate) fn is_far(elements: usize) -> bool {
        elements.saturating_mul(2 * size_of::<T>()) > NEAR
    }
}

/// Keys and values as f32, or as a cache of f16 holds them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cached<'a> {
    /// Of an f32 cache, or widened.
    F32(CacheRows<'a>),
    /// Widened by who reads them.
    F16(CacheRows<'a, f16>),
}

impl<'a> Cached<'a> {
    /// Keys and values as they are stored.
    pub(crate) fn of<T: Scalar>(CacheRows { key, value, past }: CacheRows<'a, T>) -> Self {
        let [past_key, past_value] = past.unwrap_or_default();
        match T::stored([key, value, past_key, past_value]) {
            Stored::F32([key, value, rest @ ..]) => Self::F32(CacheRows { key, value, past: past.map(|_| rest) }),
            Stored::F16([key, value, rest @ ..]) => Self::F16(CacheRows { key, value, past: past.map(|_| rest) }),
        }
    }

    /// Keys and values as f32: where they stand, or widened into this memory.
    pub(crate) fn widened(self, [key, value]: &'a mut [Buffer; 2]) -> CacheRows<'a> {
        match self {
            Self::F32(rows) => rows,
            Self::F16(rows) => CacheRows { key: key.widened(rows.key), value: value.widened(rows.value), past: None },
        }
    }
}

/// Keys and values that other tasks may still be filling.
pub(crate) trait KeysAndValues: Stage {
    /// Both, once the tasks of the stage have ended; `None` where one was left out.
    fn wait(&self) -> Option<Cached<'_>>;

    /// As [`Self::wait`], without waiting; `None` before, too.
    fn cached(&self) -> Option<Cached<'_>>;
}

/// Keys and values that are there.
pub(crate) struct Given<'a>(pub(crate) Cached<'a>);

impl Stage for Given<'_> {
    fn tasks(&self) -> usize {
        0
    }

    fn run(&self, _: usize) {}
}

impl KeysAndValues for Given<'_> {
    fn wait(&self) -> Option<Cached<'_>> {
        Some(self.0)
    }

    fn cached(&self) -> Option<Cached<'_>> {
        Some(self.0)
    }
}
