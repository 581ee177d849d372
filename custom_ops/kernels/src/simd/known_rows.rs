//! Which rows a thread has split last, so that they are not split again for other columns or for another expert.

use std::sync::atomic::{AtomicU64, Ordering};

use super::magnitudes::Magnitudes;
use super::product::Left;
use super::tiles::ROW_LIMIT;

/// A span of time in which the left factors of a stage do not change: equal places hold equal values within one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// One that never was before.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Rows whose parts stand in the memory of a thread, if any do.
#[derive(Debug, Default)]
pub(super) struct KnownRows {
    epoch: Option<Epoch>,
    data: usize,
    inner: usize,
    starts: Vec<usize>,
    magnitudes: Vec<Magnitudes>,
}

impl KnownRows {
    /// Bytes of the memory that it keeps.
    pub(super) const BYTES: usize = ROW_LIMIT * (size_of::<usize>() + size_of::<Magnitudes>());

    /// Takes that memory, where it was not taken before.
    pub(super) fn make_room(&mut self) {
        self.starts.reserve_exact(ROW_LIMIT.saturating_sub(self.starts.len()));
        self.magnitudes.reserve_exact(ROW_LIMIT.saturating_sub(self.magnitudes.len()));
    }

    /// Bytes held.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.starts.capacity() * size_of::<usize>() + self.magnitudes.capacity() * size_of::<Magnitudes>()
    }

    /// Magnitudes of the rows `left` where these are the rows that were split last.
    pub(super) fn find(&self, epoch: Option<Epoch>, left: Left<'_>) -> Option<&[Magnitudes]> {
        let same = epoch.is_some()
            && epoch == self.epoch
            && left.data.as_ptr().addr() == self.data
            && left.inner == self.inner
            && left.starts == self.starts;
        same.then_some(&self.magnitudes[..])
    }

    /// Remembers the rows `left`, all of whose parts were written, with their magnitudes; without an epoch, that
    /// something else was written.
    pub(super) fn remember(&mut self, epoch: Option<Epoch>, left: Left<'_>, magnitudes: &[Magnitudes]) {
        (self.epoch, self.data, self.inner) = (epoch, left.data.as_ptr().addr(), left.inner);
        if epoch.is_none() {
            return;
        }
        self.starts.clear();
        self.starts.extend_from_slice(left.starts);
        self.magnitudes.clear();
        self.magnitudes.extend_from_slice(&magnitudes[..left.starts.len()]);
    }
}
