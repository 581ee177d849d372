//! What attention of one token reads.

use crate::grid::Tile;

/// The slots of one token, or of several that see the same keys, before these keys.
#[derive(Clone, Copy)]
pub(crate) struct OneToken<'a, T = f32> {
    /// Queries `[slots, D]`, `stride` elements apart.
    pub(crate) queries: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) slots: usize,
    pub(crate) head: usize,
    /// Rows of `D` elements.
    pub(crate) key: &'a [T],
    /// As `key`.
    pub(crate) value: &'a [T],
    /// Rows that the token sees.
    pub(crate) places: &'a [usize],
}

impl<T> OneToken<'_, T> {
    /// Proves that every place is a row of keys and values, and that rows of `out` hold a head.
    ///
    /// # Panics
    ///
    /// If not.
    pub(super) fn check(&self, out: &Tile<'_, f32>) {
        let keys = self.key.len().min(self.value.len()) / self.head;
        assert!(self.places.iter().all(|place| *place < keys), "key out of bounds");
        assert!(self.head <= out.columns(), "columns of one token");
    }

    /// Where a query of a whole head begins.
    ///
    /// # Panics
    ///
    /// If it is not there.
    pub(super) fn query(&self, slot: usize) -> *const f32 {
        self.queries[slot * self.stride..][..self.head].as_ptr()
    }
}
