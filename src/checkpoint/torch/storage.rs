//! Storages: entries of the archive whose values are read on demand and whose checksums are verified.

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    crc32::Crc32,
    gather::{Kept, Wanted},
    layout::Layout,
    zip_entry::Entry,
};
use crate::checkpoint::{
    dtype::Dtype,
    error::quoted,
    input::{InputFile, Pieces, ReadError},
};
use crate::files::read_exact_at;

/// The data of one entry.
#[derive(Debug)]
pub(in crate::checkpoint) struct Storage {
    file: Arc<InputFile>,
    name: String,
    entry: Entry,
    kept: Arc<Kept>,
    /// Whether the checksum was seen to be right.
    verified: AtomicBool,
}

impl Storage {
    /// The entry `name`; the storages of a checkpoint share what is `kept`.
    pub(super) fn new(file: Arc<InputFile>, name: String, entry: Entry, kept: Arc<Kept>) -> Self {
        Self { file, name, entry, kept, verified: AtomicBool::new(false) }
    }

    /// Gives the bytes of `pieces`, counted from the start of the storage, to `take`, block by block, until it breaks.
    ///
    /// While the checksum is verified, `take` is given empty blocks.
    fn read(&self, pieces: Pieces, take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<(), ReadError> {
        if (pieces.offset, pieces.bytes, pieces.count) == (0, self.entry.bytes, 1) {
            return self.read_whole(take).map(drop);
        }
        if self.verify(take)?.is_break() {
            return Ok(());
        }
        let pieces = Pieces { offset: self.entry.offset + pieces.offset, ..pieces };
        self.file.read_pieces(pieces, take)
    }

    /// The `bytes` bytes from `offset` on, kept for the next one who asks for them; `None` where `take` broke, which is
    /// given empty blocks meanwhile.
    fn kept(
        &self,
        offset: u64,
        bytes: u64,
        take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<Option<Arc<Vec<u8>>>, ReadError> {
        let start = self.entry.offset + offset;
        self.kept.get(&self.file, start..start + bytes, || {
            let (mut read, mut went_on) = (Vec::new(), ControlFlow::Continue(()));
            read.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX))
                .map_err(|error| ReadError::Io(error.into()))?;
            self.read(Pieces { offset, bytes, count: 1, stride: bytes }, &mut |block| {
                read.extend_from_slice(block);
                went_on = take(&[]);
                went_on
            })?;
            Ok(went_on.is_continue().then_some(read))
        })
    }

    /// Gives elements that lie anywhere to `take`, block by block, until it breaks.
    fn read_scattered(
        &self,
        wanted: Wanted<'_>,
        take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        if self.verify(take)?.is_break() {
            return Ok(());
        }
        let file = self.file.reopen()?;
        wanted.read(|at, bytes| read_exact_at(&file, bytes, self.entry.offset + at), take)?;
        self.file.check_unchanged(&file)
    }

    /// Verifies the checksum, unless `take` breaks, which is given empty blocks.
    fn verify(&self, take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<ControlFlow<()>, ReadError> {
        if self.verified.load(Ordering::Relaxed) {
            return Ok(ControlFlow::Continue(()));
        }
        self.read_whole(&mut |_| take(&[]))
    }

    /// Gives all bytes to `take`, and says whether it broke.
    fn read_whole(&self, take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> Result<ControlFlow<()>, ReadError> {
        let (mut crc, mut went_on) = (Crc32::new(), ControlFlow::Continue(()));
        let read = self.file.read_blocks(self.entry.offset, self.entry.bytes, |block| {
            crc.update(block);
            went_on = take(block);
            went_on
        });
        read?;
        if went_on.is_continue() {
            if crc.value() != self.entry.crc {
                return Err(ReadError::Damaged(wrong_checksum(&self.name)));
            }
            self.verified.store(true, Ordering::Relaxed);
        }
        Ok(went_on)
    }
}

/// What is said about an entry whose checksum is wrong.
pub(super) fn wrong_checksum(name: &str) -> String {
    format!("zip entry {} has another checksum than the zip directory says", quoted(name))
}

/// A tensor as a part of a storage.
#[derive(Debug)]
pub(in crate::checkpoint) struct View {
    storage: Arc<Storage>,
    layout: Layout,
    dtype: Dtype,
}

impl View {
    pub(super) fn new(storage: Arc<Storage>, layout: Layout, dtype: Dtype) -> Self {
        Self { storage, layout, dtype }
    }

    pub(in crate::checkpoint) fn file(&self) -> &InputFile {
        &self.storage.file
    }

    pub(in crate::checkpoint) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(in crate::checkpoint) fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Bytes of the values.
    pub(in crate::checkpoint) fn bytes(&self) -> u64 {
        self.layout.elements() * self.dtype.bits() / 8
    }

    /// Gives the bytes of `pieces`, counted from the first value in row-major order, to `take`, block by block, until
    /// it breaks.
    pub(in crate::checkpoint) fn read_pieces(
        &self,
        pieces: Pieces,
        take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let width = self.dtype.bits() / 8;
        let (first, count) = self.layout.span();
        let (offset, bytes) = (first * width, count * width);
        if self.layout.is_contiguous() {
            return self.storage.read(Pieces { offset: offset + pieces.offset, ..pieces }, take);
        }
        let wanted = Wanted { layout: &self.layout, width, pieces };
        if !self.storage.kept.has_room(bytes) {
            return self.storage.read_scattered(wanted, take);
        }
        if let Some(span) = self.storage.kept(offset, bytes, take)? {
            wanted.gather(&span, take);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A view of floats in a file of its own, of whose bytes at most `most` are kept.
    fn view(folder: &tempfile::TempDir, most: u64, shape: &[i64], strides: &[i64], storage: &[u8]) -> View {
        let path = folder.path().join("storage");
        fs::write(&path, [b"before".as_slice(), storage].concat()).unwrap();
        let mut crc = Crc32::new();
        crc.update(storage);
        let entry = Entry { offset: 6, bytes: storage.len() as u64, crc: crc.value() };
        let (file, _) = InputFile::open(&path).map_err(|error| error.to_string()).unwrap();
        let storage = Storage::new(Arc::new(file), "data/0".into(), entry, Arc::new(Kept::new(most)));
        let layout = Layout::new(1, shape, strides, storage.entry.bytes / 4).unwrap();
        View::new(Arc::new(storage), layout, Dtype::F32)
    }

    fn read(view: &View, pieces: Pieces) -> Result<Vec<u8>, ReadError> {
        let mut bytes = Vec::new();
        view.read_pieces(pieces, &mut |block| {
            bytes.extend_from_slice(block);
            ControlFlow::Continue(())
        })?;
        Ok(bytes)
    }

    #[test]
    fn rows_of_a_strided_view_are_read_from_the_file_once() {
        let folder = tempfile::tempdir().unwrap();
        let storage: Vec<u8> = (0..28).collect();
        let view = view(&folder, 64, &[3, 2], &[1, 3], &storage);
        let row = |row: u64| read(&view, Pieces { offset: 8 * row, bytes: 8, count: 1, stride: 8 });
        assert_eq!(row(0).unwrap(), [4, 5, 6, 7, 16, 17, 18, 19]);
        fs::remove_file(folder.path().join("storage")).unwrap();
        assert_eq!(row(2).unwrap(), [12, 13, 14, 15, 24, 25, 26, 27]);
    }

    #[test]
    fn views_without_room_are_read_alike() {
        let storage: Vec<u8> = (0..240).collect();
        let cases: [(&[i64], &[i64]); 5] =
            [(&[3, 4], &[1, 7]), (&[4, 5], &[0, 2]), (&[3, 3, 3], &[9, 1, 3]), (&[4, 4], &[1, 1]), (&[59], &[0])];
        for (shape, strides) in cases {
            let elements = shape.iter().product::<i64>() as u64;
            let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
            let large = view(&folders[0], 1 << 10, shape, strides, &storage);
            let small = view(&folders[1], 0, shape, strides, &storage);
            for start in 0..elements {
                let (count, stride) = ((elements - start).div_ceil(3), 12);
                let pieces = Pieces { offset: 4 * start, bytes: 4, count, stride };
                assert_eq!(read(&small, pieces).unwrap(), read(&large, pieces).unwrap(), "{shape:?} {strides:?}");
            }
            let all = Pieces { offset: 0, bytes: 4 * elements, count: 1, stride: 4 * elements };
            assert_eq!(read(&small, all).unwrap(), read(&large, all).unwrap());
        }
    }

    /// A reader that breaks at once is asked before the bytes that it waits for are there, and nothing is read then.
    #[test]
    fn breaking_off_is_followed_while_bytes_are_verified() {
        let storage = vec![1; 3 << 20];
        let cases: [(&[i64], &[i64], u64); 3] =
            [(&[1 << 18], &[1], 0), (&[1 << 9, 1 << 9], &[1, 1 << 9], 4 << 20), (&[1 << 9, 1 << 9], &[1, 1 << 9], 0)];
        for (shape, strides, most) in cases {
            let folder = tempfile::tempdir().unwrap();
            let view = view(&folder, most, shape, strides, &storage);
            let pieces = Pieces { offset: 0, bytes: 1 << 20, count: 1, stride: 1 << 20 };
            for allowed in [1, 2] {
                let mut blocks = Vec::new();
                view.read_pieces(pieces, &mut |block| {
                    blocks.push(block.len());
                    if blocks.len() < allowed { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
                })
                .unwrap();
                assert_eq!(blocks, vec![0; allowed], "{shape:?}");
            }
            assert!(!view.storage.verified.load(Ordering::Relaxed));
            assert_eq!(read(&view, pieces).unwrap(), vec![1; 1 << 20]);
        }
    }
}
