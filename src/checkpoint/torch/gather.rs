//! Elements that lie anywhere in a storage, brought side by side.

use std::{
    fmt, io,
    ops::{ControlFlow, Range},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::layout::{Layout, Row};
use crate::checkpoint::input::{InputFile, Pieces, ReadError};

/// Bytes that are given at once out of memory; a multiple of every element width.
const BLOCK: usize = 1 << 16;
/// Elements that are looked for in a file at once.
const BATCH: usize = 1 << 20;
/// Most bytes between two elements that are read rather than skipped.
const GAP: u64 = 1 << 12;
/// Most bytes that are read of a file at once.
const READ: u64 = 1 << 20;

type Take<'t> = dyn FnMut(&[u8]) -> ControlFlow<()> + 't;

/// The bytes that a strided view was last read from: views are asked for row by row, and a row may lie all over them.
pub(super) struct Kept {
    /// Bytes that are kept at most.
    most: u64,
    last: Mutex<Option<Part>>,
}

/// Bytes of a file, and where they lie.
struct Part {
    file: Arc<InputFile>,
    place: Range<u64>,
    bytes: Arc<Vec<u8>>,
}

impl Kept {
    pub(super) const fn new(most: u64) -> Self {
        Self { most, last: Mutex::new(None) }
    }

    pub(super) const fn has_room(&self, bytes: u64) -> bool {
        bytes <= self.most
    }

    /// The bytes of `file` at this `place`, from `read` where others were kept; `None` where that gives none.
    pub(super) fn get(
        &self,
        file: &Arc<InputFile>,
        place: Range<u64>,
        read: impl FnOnce() -> Result<Option<Vec<u8>>, ReadError>,
    ) -> Result<Option<Arc<Vec<u8>>>, ReadError> {
        let mut last = self.last();
        match &*last {
            Some(part) if part.place == place && Arc::ptr_eq(&part.file, file) => {
                return Ok(Some(Arc::clone(&part.bytes)));
            }
            _ => *last = None,
        }
        drop(last);
        let bytes = read()?.map(Arc::new);
        *self.last() = bytes.as_ref().map(|bytes| Part { file: Arc::clone(file), place, bytes: Arc::clone(bytes) });
        Ok(bytes)
    }

    fn last(&self) -> MutexGuard<'_, Option<Part>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("most", &self.most).finish_non_exhaustive()
    }
}

/// Some of the elements of a view.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'l> {
    pub(super) layout: &'l Layout,
    /// Bytes of an element.
    pub(super) width: u64,
    /// Which elements, in bytes from the first one in row-major order.
    pub(super) pieces: Pieces,
}

impl Wanted<'_> {
    /// Gives the bytes of the elements to `take`, block by block, until it breaks; `span` is that of the layout.
    pub(super) fn gather(self, span: &[u8], take: &mut Take<'_>) {
        let (first, _) = self.layout.span();
        let position = |element: u64| place((element - first) * self.width);
        let mut block = Vec::with_capacity(BLOCK);
        let gathered = self.rows(|Row { first, step, count }| {
            if block.len() + place(count * self.width) > BLOCK {
                take(&block)?;
                block.clear();
            }
            if step == 1 {
                block.extend_from_slice(&span[position(first)..position(first + count)]);
                return ControlFlow::Continue(());
            }
            for element in (0..count).map(|index| first + index * step) {
                block.extend_from_slice(&span[position(element)..position(element + 1)]);
            }
            ControlFlow::Continue(())
        });
        if gathered.is_continue() && !block.is_empty() {
            let _last = take(&block);
        }
    }

    /// The same out of a file: `read` fills a buffer from a place that is counted from the start of the storage.
    pub(super) fn read(
        self,
        mut read: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
        take: &mut Take<'_>,
    ) -> io::Result<()> {
        let (mut batch, mut failure) = (Batch::default(), None);
        let mut give = |batch: &mut Batch| match batch.read(self.width, &mut read) {
            Ok(block) => take(&block),
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        };
        let all = self.rows(|row| {
            batch.add(row);
            if batch.elements < BATCH { ControlFlow::Continue(()) } else { give(&mut batch) }
        });
        if all.is_continue() && batch.elements > 0 {
            let _last = give(&mut batch);
        }
        failure.map_or(Ok(()), Err)
    }

    /// Gives the elements as rows of at most a block.
    fn rows(self, mut take: impl FnMut(Row) -> ControlFlow<()>) -> ControlFlow<()> {
        let most = BLOCK as u64 / self.width;
        for Range { start, end } in self.pieces.ranges() {
            self.layout.rows(start / self.width..end / self.width, |row| {
                (0..row.count).step_by(place(most)).try_for_each(|index| {
                    let count = most.min(row.count - index);
                    take(Row { first: row.first + index * row.step, count, ..row })
                })
            })?;
        }
        ControlFlow::Continue(())
    }
}

/// Elements that are read together, and where they belong.
#[derive(Default)]
struct Batch {
    runs: Vec<Run>,
    elements: usize,
}

/// Neighbouring elements of a storage.
struct Run {
    first: u64,
    count: u64,
    /// How many elements go before them in the batch.
    before: usize,
}

impl Batch {
    fn add(&mut self, Row { first, step, count }: Row) {
        let before = self.elements;
        if step == 1 {
            self.runs.push(Run { first, count, before });
        } else {
            let run = |index| Run { first: first + index * step, count: 1, before: before + place(index) };
            self.runs.extend((0..count).map(run));
        }
        self.elements += place(count);
    }

    /// The bytes of all elements, which are read in the order in which they lie in the file.
    fn read(&mut self, width: u64, read: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<u8>> {
        self.runs.sort_unstable_by_key(|run| run.first);
        let mut block = vec![0; self.elements * place(width)];
        let mut bytes = Vec::new();
        let mut runs = self.runs.as_slice();
        while let [Run { first, count, .. }, rest @ ..] = runs {
            let (first, mut end, mut joined) = (*first, first + count, 1);
            for run in rest {
                let longer = end.max(run.first + run.count);
                if run.first > end + GAP / width || longer - first > READ / width {
                    break;
                }
                (end, joined) = (longer, joined + 1);
            }
            bytes.resize(place((end - first) * width), 0);
            read(first * width, &mut bytes)?;
            let (read, rest) = runs.split_at(joined);
            for run in read {
                let (from, to) = (place((run.first - first) * width), run.before * place(width));
                let size = place(run.count * width);
                block[to..to + size].copy_from_slice(&bytes[from..from + size]);
            }
            runs = rest;
        }
        self.runs.clear();
        self.elements = 0;
        Ok(block)
    }
}

/// A size that was seen to fit into memory, or into a file.
fn place(size: u64) -> usize {
    usize::try_from(size).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(bytes: u64) -> Pieces {
        Pieces { offset: 0, bytes, count: 1, stride: bytes }
    }

    /// What is read of a storage, the places and sizes of what was read, and the sizes of the blocks.
    fn read(layout: &Layout, storage: &[u8], pieces: Pieces) -> (Vec<u8>, Vec<(u64, usize)>, Vec<usize>) {
        let (mut values, mut reads, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        let from = |at: u64, bytes: &mut [u8]| {
            reads.push((at, bytes.len()));
            bytes.copy_from_slice(&storage[at as usize..][..bytes.len()]);
            Ok(())
        };
        let mut take = |block: &[u8]| {
            blocks.push(block.len());
            values.extend_from_slice(block);
            ControlFlow::Continue(())
        };
        Wanted { layout, width: 2, pieces }.read(from, &mut take).unwrap();
        (values, reads, blocks)
    }

    #[test]
    fn near_elements_are_read_together_and_far_ones_alone() {
        let storage: Vec<u8> = (0..40_000u32).map(|byte| (byte % 251) as u8).collect();
        let near = Layout::new(5, &[3, 4], &[1, 100], 20_000).unwrap();
        let (values, reads, _) = read(&near, &storage, one(24));
        assert_eq!(reads, [(10, 606)]);
        let places = (0..3).flat_map(|row| (0..4).map(move |column| 2 * (5 + row + 100 * column)));
        assert_eq!(values, places.flat_map(|at: usize| storage[at..at + 2].to_vec()).collect::<Vec<_>>());
        let far = Layout::new(0, &[2, 3], &[1, 5000], 20_000).unwrap();
        let (values, reads, _) = read(&far, &storage, one(12));
        assert_eq!(reads, [(0, 4), (10_000, 4), (20_000, 4)]);
        assert_eq!(values[..6], [0, 1, storage[10_000], storage[10_001], storage[20_000], storage[20_001]]);
        let (_, reads, _) = read(&far, &storage, Pieces { offset: 2, bytes: 2, count: 2, stride: 6 });
        assert_eq!(reads, [(10_000, 4)]);
    }

    #[test]
    fn no_read_and_no_block_is_larger_than_bounds_say() {
        let storage = vec![7; 6 << 20];
        let wide = Layout::new(0, &[2, 3 << 20], &[0, 1], 3 << 20).unwrap();
        let (values, reads, blocks) = read(&wide, &storage, one(12 << 20));
        assert_eq!(values.len(), 12 << 20);
        assert!(reads.iter().all(|(_, size)| *size as u64 <= READ), "{reads:?}");
        assert!(blocks.iter().all(|size| *size <= 2 * BATCH + BLOCK), "{blocks:?}");
    }

    #[test]
    fn only_the_last_bytes_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, []).unwrap();
            Arc::new(InputFile::open(&path).map_err(|error| error.to_string()).unwrap().0)
        };
        let (file, other) = (file("a"), file("b"));
        let (kept, mut reads) = (Kept::new(8), 0);
        for (file, part) in [(&file, 0..4), (&file, 0..4), (&file, 4..8), (&file, 4..8), (&file, 0..4), (&other, 0..4)]
        {
            let read = || {
                reads += 1;
                Ok(Some(vec![part.start as u8]))
            };
            assert_eq!(*kept.get(file, part.clone(), read).unwrap().unwrap(), [part.start as u8]);
        }
        assert_eq!((reads, kept.has_room(8), kept.has_room(9)), (4, true, false));
        let failed = kept.get(&file, 4..8, || Err(ReadError::Changed));
        assert!(failed.is_err() && kept.get(&file, 4..8, || Ok(None)).unwrap().is_none());
        assert_eq!(*kept.get(&file, 4..8, || Ok(Some(vec![1]))).unwrap().unwrap(), [1]);
    }
}
