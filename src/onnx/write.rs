//! Files that appear whole or not at all.
//!
//! Every file is written beside its final place, flushed to the disk, and moved there by one rename. A new
//! folder is filled under another name and renamed as a whole. What a killed process has left of both where the next one
//! writes, that one removes.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile, TempDir};

use super::leftovers;

/// What work on one file or folder may leave behind where it is not let finish.
#[derive(Debug)]
pub struct Unfinished {
    out: PathBuf,
    /// Folders that were not there before, outermost first.
    missing: Vec<PathBuf>,
}

impl Unfinished {
    /// To be asked before anything is written to or beside `out`.
    pub fn before(out: &Path) -> Self {
        Self { out: out.into(), missing: missing_folders(parent_of(out)) }
    }

    /// Removes what this process has begun to write and not finished; for a program that is told to end at once.
    pub fn remove(&self) {
        // A new folder is filled beside its place, and it may be `out` or hold it.
        let folder = parent_of(&self.out);
        for folder in [self.out.as_path(), folder, parent_of(folder)] {
            leftovers::remove_own(folder);
        }
        remove_empty(&self.missing);
    }
}

/// `folder` and what is above it, as far as it is not there, outermost first.
fn missing_folders(folder: &Path) -> Vec<PathBuf> {
    let missing = folder.ancestors().take_while(|above| !above.as_os_str().is_empty() && !above.exists());
    let mut missing: Vec<_> = missing.map(Path::to_path_buf).collect();
    missing.reverse();
    missing
}

/// Removes `folders`, which are listed outermost first, where nothing is in them.
fn remove_empty(folders: &[PathBuf]) {
    for folder in folders.iter().rev() {
        let _kept_where_not_empty = fs::remove_dir(folder);
    }
}

/// Why outputs did not appear.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// An output is there already.
    #[error("{} exists already", .path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// The place of an output is no folder, or the output is no regular file.
    #[error("{} is not {expected}", .path.display())]
    WrongKind {
        /// What was found.
        path: PathBuf,
        /// What it should be.
        expected: &'static str,
    },
    /// The operating system refused.
    #[error("{} cannot be written: {source}", .path.display())]
    Io {
        /// The output.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

impl WriteError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.into(), source: without_temporary_path(source) }
    }
}

/// What the operating system said, without the name of a temporary file behind it.
fn without_temporary_path(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.split_once(" at path ") {
        Some((said, _)) => io::Error::new(error.kind(), said.to_owned()),
        None => error,
    }
}

/// Bytes that are given to the operating system at once. Linux keeps a larger write in larger pages, and those are
/// rarely at hand.
pub const WRITE_BLOCK: usize = 1 << 17;

/// Files on their way to one folder.
#[derive(Debug)]
pub struct Staging {
    folder: PathBuf,
    /// Holds the files until the folder itself is renamed, where it is new.
    new_folder: Option<TempDir>,
    /// Folders above `folder` that were not there, outermost first; removed unless the files are committed.
    parents: NewFolders,
    force: bool,
    staged: Vec<(NamedTempFile, PathBuf)>,
}

/// Folders to remove again, where they stay empty.
#[derive(Debug, Default)]
struct NewFolders(Vec<PathBuf>);

impl NewFolders {
    /// Makes `folder` and what is missing above it.
    fn make(folder: &Path) -> io::Result<Self> {
        let mut made = Self::default();
        for folder in missing_folders(folder) {
            match fs::create_dir(&folder) {
                Ok(()) => made.0.push(folder),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(made)
    }
}

impl Drop for NewFolders {
    fn drop(&mut self) {
        remove_empty(&self.0);
    }
}

impl Staging {
    /// Begins to write `names` into `folder`, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// Where one of the files exists and `force` is not set, where `folder` is no folder, and where nothing
    /// can be written there.
    pub fn begin(folder: &Path, names: &[String], force: bool) -> Result<Self, WriteError> {
        let parents = NewFolders::default();
        let mut staging = Self { folder: folder.into(), new_folder: None, parents, force, staged: Vec::new() };
        match fs::metadata(folder) {
            Ok(found) if !found.is_dir() => {
                return Err(WriteError::WrongKind { path: folder.into(), expected: "a folder" });
            }
            Ok(_) => {
                names.iter().try_for_each(|name| staging.check_target(&staging.target(name)))?;
                leftovers::remove(folder);
                leftovers::remove(parent_of(folder));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                staging.parents = NewFolders::make(parent_of(folder)).map_err(WriteError::io(folder))?;
                leftovers::remove(parent_of(folder));
                staging.new_folder = Some(temporary_folder(folder)?);
            }
            Err(error) => return Err(WriteError::io(folder)(error)),
        }
        Ok(staging)
    }

    /// Final place of the file `name`.
    fn target(&self, name: &str) -> PathBuf {
        if self.folder == Path::new(".") { name.into() } else { self.folder.join(name) }
    }

    fn check_target(&self, path: &Path) -> Result<(), WriteError> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.is_file() => {
                Err(WriteError::WrongKind { path: path.into(), expected: "a regular file" })
            }
            Ok(_) if !self.force => Err(WriteError::Exists { path: path.into() }),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(WriteError::io(path)(error)),
        }
    }

    /// Writes one file through `fill`; it has its final name only after [`Self::commit`].
    ///
    /// # Errors
    ///
    /// What `fill` returns, and what the operating system refuses.
    pub fn file<E: From<WriteError>>(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut dyn io::Write) -> Result<(), E>,
    ) -> Result<(), E> {
        let target = self.target(name);
        let place = self.new_folder.as_ref().map_or(self.folder.as_path(), TempDir::path);
        let mut file = temporary_file(place).map_err(WriteError::io(&target))?;
        {
            let mut writer = io::BufWriter::with_capacity(WRITE_BLOCK, file.as_file_mut());
            fill(&mut writer)?;
            io::Write::flush(&mut writer).map_err(WriteError::io(&target))?;
        }
        file.as_file().sync_all().map_err(WriteError::io(&target))?;
        self.staged.push((file, target));
        Ok(())
    }

    /// Moves every file to its final place, in the order in which they were written.
    ///
    /// # Errors
    ///
    /// Where a rename fails; files that were not moved by then are removed.
    pub fn commit(self) -> Result<Vec<PathBuf>, WriteError> {
        let Self { folder, new_folder, mut parents, force, staged } = self;
        let place = new_folder.as_ref().map_or(folder.as_path(), TempDir::path).to_path_buf();
        if force && new_folder.is_none() {
            remove_stale(&staged)?;
        }
        let mut paths = Vec::new();
        for (file, target) in staged {
            let name = target.file_name().unwrap_or_default();
            let place = place.join(name);
            let moved = if force { file.persist(place) } else { file.persist_noclobber(place) };
            moved.map_err(|error| match error.error.kind() {
                io::ErrorKind::AlreadyExists => WriteError::Exists { path: target.clone() },
                _ => WriteError::io(&target)(error.error),
            })?;
            paths.push(target);
        }
        sync_folder(&place).map_err(WriteError::io(&folder))?;
        if let Some(new_folder) = new_folder {
            fs::rename(new_folder.path(), &folder).map_err(WriteError::io(&folder))?;
            drop(new_folder.keep());
            parents.0.clear();
        }
        let parent = parent_of(&folder);
        sync_folder(parent).map_err(WriteError::io(&folder))?;
        Ok(paths)
    }
}

/// Where several files replace old ones, the old models go first, so that no old model meets new weights.
fn remove_stale(staged: &[(NamedTempFile, PathBuf)]) -> Result<(), WriteError> {
    if staged.len() < 2 {
        return Ok(());
    }
    for (_, target) in staged.iter().rev() {
        match fs::remove_file(target) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(WriteError::io(target)(error)),
            _ => {}
        }
    }
    Ok(())
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(unix)]
fn with_mode<'a>(builder: &'a mut Builder<'a, 'a>, mode: u32) -> &'a mut Builder<'a, 'a> {
    use std::os::unix::fs::PermissionsExt;
    builder.permissions(fs::Permissions::from_mode(mode))
}

#[cfg(not(unix))]
fn with_mode<'a>(builder: &'a mut Builder<'a, 'a>, _mode: u32) -> &'a mut Builder<'a, 'a> {
    builder
}

fn temporary_file(folder: &Path) -> io::Result<NamedTempFile> {
    let prefix = leftovers::prefix();
    let mut builder = Builder::new();
    with_mode(builder.prefix(&prefix).rand_bytes(leftovers::RANDOM), 0o666).tempfile_in(folder)
}

fn temporary_folder(folder: &Path) -> Result<TempDir, WriteError> {
    let parent = parent_of(folder);
    let prefix = leftovers::prefix();
    let mut builder = Builder::new();
    let builder = with_mode(builder.prefix(&prefix).rand_bytes(leftovers::RANDOM), 0o777);
    builder.tempdir_in(parent).map_err(WriteError::io(folder))
}

#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}
