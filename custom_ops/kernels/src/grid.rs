//! A matrix cut into tiles that tasks write at the same time.
//!
//! A tile is handed out once, so no element is ever borrowed twice, whatever a thread pool does. The whole matrix may
//! be read once all tiles have come back.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::buffer::emptied;

/// One bit for each of some tiles: whether it was handed out, and whether it has come back.
#[derive(Debug, Default)]
struct Word {
    out: AtomicU64,
    back: AtomicU64,
}

/// The words of the tiles that a grid's own has no room for. Kept between calls so that nothing is allocated.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    words: Vec<Word>,
}

impl Claims {
    /// Bytes that all of `claims` hold between calls.
    pub(crate) fn bytes<'a>(claims: impl IntoIterator<Item = &'a Self>) -> usize {
        claims.into_iter().map(|claims| claims.words.capacity() * size_of::<Word>()).sum()
    }
}

/// How the rows of a matrix stand in memory, and how they are cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Elements between two rows.
    pub(crate) stride: usize,
    /// Elements of a row.
    pub(crate) columns: usize,
    /// Columns of a tile.
    pub(crate) tile_columns: usize,
}

impl Layout {
    /// Rows without gaps that are not cut.
    pub(crate) fn whole(columns: usize) -> Self {
        Self { stride: columns, columns, tile_columns: columns }
    }
}

/// Distinct row numbers: the only order in which a [`Grid`] scatters rows.
#[derive(Debug, Default)]
pub(crate) struct Distinct {
    numbers: Vec<usize>,
}

impl Distinct {
    /// Replaces the numbers: `place(number)` is the place of each of the rising `numbers`, all of them in `0 .. len`.
    ///
    /// # Panics
    ///
    /// If the numbers do not rise, or two of them go to one place.
    pub(crate) fn fill(
        &mut self,
        len: usize,
        numbers: impl Iterator<Item = usize>,
        mut place: impl FnMut(usize) -> usize,
    ) {
        const NONE: usize = usize::MAX;
        emptied(&mut self.numbers, len).resize(len, NONE);
        let mut last = None;
        for number in numbers {
            assert!(number != NONE && last.is_none_or(|last| number > last), "row numbers do not rise");
            last = Some(number);
            let place = &mut self.numbers[place(number)];
            assert!(*place == NONE, "two rows in one place");
            *place = number;
        }
    }

    /// The numbers by place.
    pub(crate) fn numbers(&self) -> &[usize] {
        &self.numbers
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        self.numbers.capacity() * size_of::<usize>()
    }
}

/// A matrix cut at some rows and every so many columns.
pub(crate) struct Grid<'a, T> {
    data: NonNull<T>,
    len: usize,
    layout: Layout,
    order: Option<&'a [usize]>,
    bounds: &'a [usize],
    /// That of the first tiles, beside what else a thread reads to get one: few tiles cost no other cache line.
    first: Word,
    claims: &'a Claims,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a grid gives each element to one tile at most, a tile to one thread, and all elements to every thread once no
// tile is left or out.
unsafe impl<T: Send + Sync> Sync for Grid<'_, T> {}
// SAFETY: a grid holds its elements as `&mut [T]` does, whichever thread it is on.
unsafe impl<T: Send + Sync> Send for Grid<'_, T> {}

/// The only door to a rectangle of a matrix.
pub(crate) struct Tile<'a, T> {
    data: NonNull<T>,
    len: usize,
    stride: usize,
    order: Option<&'a [usize]>,
    first_row: usize,
    rows: usize,
    first_column: usize,
    columns: usize,
    /// Where it is noted that the tile has come back.
    back: Option<(&'a AtomicU64, u64)>,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a tile is the only door to its elements, as `&mut [T]` is.
unsafe impl<T: Send> Send for Tile<'_, T> {}

impl<T> Drop for Tile<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if let Some((word, bit)) = self.back {
            word.fetch_or(bit, Ordering::Release);
        }
    }
}

impl<'a, T> Grid<'a, T> {
    /// Tile `i` of the rows is `bounds[i] .. bounds[i + 1]`; rows outside all bounds stay untouched.
    ///
    /// # Panics
    ///
    /// If the bounds fall, or a size is 0.
    pub(crate) fn new(data: &'a mut [T], layout: Layout, bounds: &'a [usize], claims: &'a mut Claims) -> Self {
        assert!(layout.columns > 0 && layout.tile_columns > 0 && layout.stride >= layout.columns, "layout of tiles");
        assert!(bounds.is_sorted(), "falling bounds");
        let count = bounds.len().saturating_sub(1) * layout.columns.div_ceil(layout.tile_columns);
        let more = count.div_ceil(64).saturating_sub(1);
        emptied(&mut claims.words, more).resize_with(more, Word::default);
        let (len, data) = (data.len(), NonNull::from(data).cast());
        Self { data, len, layout, order: None, bounds, first: Word::default(), claims, lifetime: PhantomData }
    }

    /// As [`Grid::new`]; row `i` of the tiles is row `order[i]` of the matrix.
    pub(crate) fn scattered(
        data: &'a mut [T],
        layout: Layout,
        order: &'a Distinct,
        bounds: &'a [usize],
        claims: &'a mut Claims,
    ) -> Self {
        Self { order: Some(&order.numbers), ..Self::new(data, layout, bounds, claims) }
    }

    /// Tiles beside each other.
    pub(crate) fn across(&self) -> usize {
        self.layout.columns.div_ceil(self.layout.tile_columns)
    }

    /// Number of tiles.
    pub(crate) fn len(&self) -> usize {
        self.bounds.len().saturating_sub(1) * self.across()
    }

    /// Tile `index`, counted along rows first; `None` where it was handed out before.
    ///
    /// # Panics
    ///
    /// If there is no such tile.
    #[inline]
    pub(crate) fn tile(&self, index: usize) -> Option<Tile<'_, T>> {
        assert!(index < self.len(), "tile index");
        let (word, bit) = (self.word(index), 1 << (index % 64));
        if word.out.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return None;
        }
        let (down, along) = (index / self.across(), index % self.across());
        let first_column = along * self.layout.tile_columns;
        Some(Tile {
            data: self.data,
            len: self.len,
            stride: self.layout.stride,
            order: self.order,
            first_row: self.bounds[down],
            rows: self.bounds[down + 1] - self.bounds[down],
            first_column,
            columns: self.layout.tile_columns.min(self.layout.columns - first_column),
            back: Some((&word.back, bit)),
            lifetime: PhantomData,
        })
    }

    /// The whole matrix, once every tile was handed out and dropped; `None` before.
    pub(crate) fn finished(&self) -> Option<&'a [T]> {
        if !self.are_back(0..self.len()) {
            return None;
        }
        // SAFETY: every tile is gone, so that nothing borrows an element any more, and none is handed out twice; what
        // was written through them happened before, since each was released as it came back. The grid holds the
        // matrix for its lifetime.
        Some(unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) })
    }

    /// The rows of some tiles of a matrix that has neither gaps nor an order, and is cut at rows alone, once these
    /// tiles were handed out and dropped; `None` before.
    ///
    /// # Panics
    ///
    /// If the matrix is not such a one, there are no such tiles, or they reach past it.
    pub(crate) fn finished_rows(&self, tiles: Range<usize>) -> Option<&'a [T]> {
        let Layout { stride, columns, .. } = self.layout;
        assert!(self.order.is_none() && stride == columns && self.across() == 1, "gaps between rows");
        assert!(tiles.start <= tiles.end && tiles.end <= self.len(), "tile index");
        if !self.are_back(tiles.clone()) {
            return None;
        }
        let rows = self.bounds[tiles.start]..self.bounds[tiles.end];
        assert!(rows.end.checked_mul(columns).is_some_and(|end| end <= self.len), "rows past the matrix");
        // SAFETY: the rows lie in the matrix. Their tiles are gone and none is handed out twice, other tiles do not
        // meet them since bounds rise, and what was written happened before, as above.
        Some(unsafe { std::slice::from_raw_parts(self.data.as_ptr().add(rows.start * columns), rows.len() * columns) })
    }

    /// Whether tiles have been dropped.
    fn are_back(&self, mut tiles: Range<usize>) -> bool {
        tiles.all(|tile| self.word(tile).back.load(Ordering::Acquire) >> (tile % 64) & 1 == 1)
    }

    fn word(&self, tile: usize) -> &Word {
        match (tile / 64).checked_sub(1) {
            None => &self.first,
            Some(more) => &self.claims.words[more],
        }
    }
}

impl<'a, T> Tile<'a, T> {
    /// A whole matrix as one tile.
    pub(crate) fn dense(data: &'a mut [T], row_len: usize) -> Self {
        let (rows, len) = (data.len().checked_div(row_len).unwrap_or(0), data.len());
        let (data, lifetime) = (NonNull::from(data).cast(), PhantomData);
        Self {
            data,
            len,
            stride: row_len,
            order: None,
            first_row: 0,
            rows,
            first_column: 0,
            columns: row_len,
            back: None,
            lifetime,
        }
    }

    /// Some columns of a whole matrix whose rows are `stride` elements apart.
    ///
    /// # Panics
    ///
    /// If a row does not hold them.
    pub(crate) fn columns_of(data: &'a mut [T], stride: usize, first_column: usize, columns: usize) -> Self {
        let end = first_column.checked_add(columns);
        assert!(end.is_some_and(|end| end <= stride), "columns of a row");
        Self { first_column, columns, ..Self::dense(data, stride) }
    }

    /// First row, counted in the matrix, or in the order of a scattered one.
    pub(crate) fn first_row(&self) -> usize {
        self.first_row
    }

    /// First column, counted in the matrix.
    pub(crate) fn first_column(&self) -> usize {
        self.first_column
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Sets `starts` to where column `column` of the rows `rows` stands, both counted in the tile; the row's other
    /// columns stand around it.
    ///
    /// # Panics
    ///
    /// If there is no such row or column, or no place for one of them.
    pub(crate) fn starts(&mut self, rows: &[usize], column: usize, starts: &mut [*mut T]) {
        assert!(rows.len() <= starts.len() && column <= self.columns, "column of a tile");
        let room = self.len.checked_sub(self.columns).and_then(|room| room.checked_sub(self.first_column));
        let (mut highest, mut furthest) = (0, 0);
        let order = self.order.map(|order| &order[self.first_row..self.first_row + self.rows]);
        for (start, &row) in starts.iter_mut().zip(rows) {
            highest = highest.max(row);
            let place = order.map_or(self.first_row + row, |order| order[row]);
            furthest = furthest.max(place);
            *start = self.data.as_ptr().wrapping_add(place * self.stride + self.first_column + column);
        }
        assert!(rows.is_empty() || highest < self.rows, "row of a tile");
        let last = room.map(|room| room / self.stride.max(1));
        assert!(rows.is_empty() || last.is_some_and(|last| furthest <= last), "row past the matrix");
    }

    /// The elements of some rows, counted in the tile, which stand one behind the other without gaps.
    ///
    /// # Panics
    ///
    /// If they do not, or there are no such rows.
    pub(crate) fn rows_in_line(&mut self, rows: Range<usize>) -> &mut [T] {
        assert!(self.order.is_none() && self.stride == self.columns, "gaps between rows");
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows of a tile");
        let [start, end] = [rows.start, rows.end].map(|row| (self.first_row + row).checked_mul(self.columns));
        assert!(end.is_some_and(|end| end <= self.len), "rows past the matrix");
        // SAFETY: the rows lie in the matrix, all columns of them are the tile's, and no other tile has them: bounds
        // rise. `self` is borrowed for as long as they are.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr().add(start.unwrap_or(0)), rows.len() * self.columns) }
    }

    /// The elements of one row, counted in the tile.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row of a tile");
        let place = self.first_row + row;
        let place = self.order.map_or(place, |order| order[place]);
        let start = place.checked_mul(self.stride).and_then(|start| start.checked_add(self.first_column));
        let end = start.and_then(|start| start.checked_add(self.columns));
        assert!(end.is_some_and(|end| end <= self.len), "row past the matrix");
        // SAFETY: the row lies in the matrix. No other tile has its elements: bounds rise, `Distinct` gives no row of
        // the matrix twice, and columns of neighbours do not meet since a stride holds all columns. `self` is borrowed
        // for as long as the row.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr().add(start.unwrap_or(0)), self.columns) }
    }
}

/// Replaces `bounds` by cuts of `total` rows every `step` rows.
pub(crate) fn cut(bounds: &mut Vec<usize>, total: usize, step: usize) {
    emptied(bounds, total.div_ceil(step) + 1).extend((0..total).step_by(step));
    bounds.push(total);
}

#[cfg(test)]
#[path = "grid_tests.rs"]
mod tests;
