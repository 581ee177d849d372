//! Regular files that are read piece by piece and must not change meanwhile.

#[cfg(unix)]
use std::os::unix::fs::MetadataExt;
use std::{
    fs::{self, File, Metadata},
    io::{self, Read},
    ops::{ControlFlow, Range},
    path::{Path, PathBuf},
    time::SystemTime,
};

use moa_graphs::WeightError;

use super::error::{CheckpointError, shown};
use crate::files::read_exact_at;

/// Bytes read at once; a multiple of every element width.
const BLOCK: usize = 1 << 20;

/// Why bytes of a file cannot be had.
#[derive(Debug)]
pub(super) enum ReadError {
    Io(io::Error),
    NotAFile(&'static str),
    Changed,
    /// What shows that the bytes are not those that were written.
    Damaged(String),
}

impl ReadError {
    /// The error for the file `file`.
    pub(super) fn of(self, file: &str) -> CheckpointError {
        let file = file.into();
        match self {
            Self::Io(source) => CheckpointError::Io { file, source },
            Self::NotAFile(found) => CheckpointError::NotAFile { file, found },
            Self::Changed => CheckpointError::Changed { file },
            Self::Damaged(problem) => CheckpointError::Archive { file, problem },
        }
    }

    /// The error for the tensor `tensor` of the file `origin`, which was a file when it was opened.
    pub(super) fn of_tensor(self, origin: String, tensor: String) -> WeightError {
        match self {
            Self::Io(source) => WeightError::Io { origin, tensor, source },
            Self::NotAFile(_) | Self::Changed => WeightError::Changed { origin, tensor },
            Self::Damaged(what) => WeightError::Damaged { origin, tensor, what },
        }
    }
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Changed,
            _ => Self::Io(error),
        }
    }
}

/// What tells one state of a file from another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    size: u64,
    modified: Option<SystemTime>,
    /// Device and number of the file there, where the system tells them.
    place: Option<[u64; 2]>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        #[cfg(unix)]
        let place = Some([metadata.dev(), metadata.ino()]);
        #[cfg(not(unix))]
        let place = None;
        Self { size: metadata.len(), modified: metadata.modified().ok(), place }
    }
}

/// A file as it was when it was first opened.
#[derive(Debug)]
pub(super) struct InputFile {
    path: PathBuf,
    shown: String,
    stamp: Stamp,
}

impl InputFile {
    /// Opens a regular file; symbolic links are followed.
    pub(super) fn open(path: &Path) -> Result<(Self, File), CheckpointError> {
        let shown = shown(path);
        let (file, stamp) = open_regular(path).map_err(|error| error.of(&shown))?;
        Ok((Self { path: path.into(), shown, stamp }, file))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Path as messages show it.
    pub(super) fn shown(&self) -> &str {
        &self.shown
    }

    /// Bytes of the file.
    pub(super) fn size(&self) -> u64 {
        self.stamp.size
    }

    /// Fails where the file is not in its first state.
    pub(super) fn check_unchanged(&self, file: &File) -> Result<(), ReadError> {
        if Stamp::of(&file.metadata()?) == self.stamp { Ok(()) } else { Err(ReadError::Changed) }
    }

    /// Opens the file, which must be in its first state.
    pub(super) fn reopen(&self) -> Result<File, ReadError> {
        let (file, stamp) = open_regular(&self.path)?;
        if stamp == self.stamp { Ok(file) } else { Err(ReadError::Changed) }
    }

    /// Gives `bytes` bytes from `offset` on to `take`, block by block, until it breaks.
    pub(super) fn read_blocks(
        &self,
        offset: u64,
        bytes: u64,
        take: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        self.read_pieces(Pieces { offset, bytes, count: 1, stride: bytes }, take)
    }

    /// Gives the bytes of all `pieces` to `take`, block by block, until it breaks; a block may hold several pieces, or
    /// a part of one.
    pub(super) fn read_pieces(
        &self,
        pieces: Pieces,
        mut take: impl FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let file = self.reopen()?;
        let all = pieces.bytes.saturating_mul(pieces.count);
        let mut block = vec![0; usize::try_from(all).unwrap_or(BLOCK).min(BLOCK)];
        let mut filled = 0;
        for Range { start: mut at, end } in pieces.ranges() {
            while at < end {
                if filled == block.len() {
                    if take(&block).is_break() {
                        return Ok(());
                    }
                    filled = 0;
                }
                let size = usize::try_from(end - at).unwrap_or(BLOCK).min(block.len() - filled);
                read_exact_at(&file, &mut block[filled..filled + size], at)?;
                filled += size;
                at += size as u64;
            }
        }
        if filled > 0 && take(&block[..filled]).is_break() {
            return Ok(());
        }
        self.check_unchanged(&file)
    }
}

/// Pieces of a file, equally long and equally far apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pieces {
    /// First byte of the first piece.
    pub(super) offset: u64,
    /// Bytes of one piece, a multiple of every element width in it.
    pub(super) bytes: u64,
    /// Number of pieces.
    pub(super) count: u64,
    /// Bytes from the start of one piece to the start of the next.
    pub(super) stride: u64,
}

impl Pieces {
    /// The bytes of each piece.
    pub(super) fn ranges(self) -> impl Iterator<Item = Range<u64>> {
        (0..self.count).map(move |piece| {
            let start = self.offset + piece * self.stride;
            start..start + self.bytes
        })
    }
}

/// Reads a whole text of at most `limit` bytes.
pub(super) fn read_text(path: &Path, what: &'static str, limit: u64) -> Result<(InputFile, Vec<u8>), CheckpointError> {
    let (input, file) = InputFile::open(path)?;
    if input.size() > limit {
        return Err(CheckpointError::Limit { file: input.shown, what, limit });
    }
    let mut text = Vec::new();
    let read = (&file).take(limit + 1).read_to_end(&mut text).map_err(ReadError::from);
    read.and_then(|_| input.check_unchanged(&file)).map_err(|error| error.of(&input.shown))?;
    if text.len() as u64 != input.size() {
        return Err(CheckpointError::Changed { file: input.shown });
    }
    Ok((input, text))
}

/// Looks before it opens: opening a pipe would wait for its other end.
fn open_regular(path: &Path) -> Result<(File, Stamp), ReadError> {
    check_regular(&fs::metadata(path)?)?;
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    check_regular(&metadata)?;
    let stamp = Stamp::of(&metadata);
    Ok((file, stamp))
}

fn check_regular(metadata: &Metadata) -> Result<(), ReadError> {
    if metadata.is_file() {
        Ok(())
    } else if metadata.is_dir() {
        Err(ReadError::NotAFile("a folder"))
    } else {
        Err(ReadError::NotAFile("a pipe, socket or device"))
    }
}
