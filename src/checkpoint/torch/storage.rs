//! Storages: entries of the archive whose values are read on demand and whose checksums are verified.

use std::{
    io,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{crc32::Crc32, layout::Layout, zip_entry::Entry};
use crate::checkpoint::{
    dtype::Dtype,
    error::quoted,
    input::{InputFile, Pieces},
};

/// Bytes of a view that are given at once; a multiple of every element width.
const BLOCK: usize = 1 << 16;

/// The data of one entry.
#[derive(Debug)]
pub(in crate::checkpoint) struct Storage {
    file: Arc<InputFile>,
    name: String,
    entry: Entry,
    /// Whether the checksum was seen to be right.
    verified: AtomicBool,
}

impl Storage {
    pub(super) fn new(file: Arc<InputFile>, name: String, entry: Entry) -> Self {
        Self { file, name, entry, verified: AtomicBool::new(false) }
    }

    /// Gives the bytes of `pieces`, counted from the start of the storage, to `take`, block by block, until it breaks.
    fn read(&self, pieces: Pieces, take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> io::Result<()> {
        if (pieces.offset, pieces.bytes, pieces.count) == (0, self.entry.bytes, 1) {
            return self.read_whole(take);
        }
        if !self.verified.load(Ordering::Relaxed) {
            self.read_whole(&mut |_| ControlFlow::Continue(()))?;
        }
        let pieces = Pieces { offset: self.entry.offset + pieces.offset, ..pieces };
        self.file.read_pieces(pieces, take).map_err(|error| error.into_io())
    }

    fn read_whole(&self, take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>) -> io::Result<()> {
        let (mut crc, mut went_on) = (Crc32::new(), ControlFlow::Continue(()));
        let read = self.file.read_blocks(self.entry.offset, self.entry.bytes, |block| {
            crc.update(block);
            went_on = take(block);
            went_on
        });
        read.map_err(|error| error.into_io())?;
        if went_on.is_break() {
            return Ok(());
        }
        if crc.value() != self.entry.crc {
            return Err(io::Error::new(io::ErrorKind::InvalidData, wrong_checksum(&self.name)));
        }
        self.verified.store(true, Ordering::Relaxed);
        Ok(())
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
    ///
    /// Of a view that is not contiguous, everything is read.
    pub(in crate::checkpoint) fn read_pieces(
        &self,
        pieces: Pieces,
        take: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
    ) -> io::Result<()> {
        let width = self.dtype.bits() / 8;
        let (first, count) = self.layout.span();
        let (offset, bytes) = (first * width, count * width);
        if self.layout.is_contiguous() {
            return self.storage.read(Pieces { offset: offset + pieces.offset, ..pieces }, take);
        }
        let mut span = Vec::new();
        span.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(io::Error::from)?;
        self.storage.read(Pieces { offset, bytes, count: 1, stride: bytes }, &mut |block| {
            span.extend(block);
            ControlFlow::Continue(())
        })?;
        let mut block = Vec::with_capacity(BLOCK);
        let (mut at, mut went_on) = (0, ControlFlow::Continue(()));
        self.layout.gather(&span, self.dtype, |element| {
            if went_on.is_continue() && pieces.holds(at) {
                block.extend(element);
                if block.len() >= BLOCK {
                    went_on = take(&block);
                    block.clear();
                }
            }
            at += width;
        });
        if went_on.is_continue() && !block.is_empty() {
            let _last = take(&block);
        }
        Ok(())
    }
}
