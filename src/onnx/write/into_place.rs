//! Finished files take the places of others: all of them or none, and not while others do the same.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use tempfile::{Builder, NamedTempFile, PathPersistError, TempPath};

use super::WriteError;
use crate::{files::folder_of, scratch};

/// Files that several new ones replace, under other names until all of these are in place: no old model meets new
/// weights, and all are back where one cannot be replaced.
#[derive(Default)]
pub(super) struct SetAside(Vec<(TempPath, PathBuf)>);

impl SetAside {
    /// Takes the old models away first, as [`Staging::commit`] puts the new ones in place last.
    pub(super) fn begin(files: &[(TempPath, PathBuf)]) -> Result<Self, WriteError> {
        let mut aside = Self::default();
        for (_, target) in files.iter().rev().filter(|_| files.len() > 1) {
            if target.is_dir() {
                return Err(WriteError::io(target)(io::ErrorKind::IsADirectory.into()));
            }
            let place = kept_file(target).map_err(WriteError::io(target))?.into_temp_path();
            match fs::rename(target, &place) {
                Ok(()) => aside.0.push((place, target.clone())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(WriteError::io(target)(error)),
            }
        }
        Ok(aside)
    }

    /// Removes the old files.
    pub(super) fn forget(mut self) {
        self.0.clear();
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        for (file, target) in self.0.drain(..).rev() {
            if let Err(error) = file.persist(target) {
                // Under its other name until something is written there again: more than nothing.
                let _kept = error.path.keep();
            }
        }
    }
}

/// A place beside `target` for what it held, under a name that nothing removes: a process that is killed while it
/// replaces files leaves the old ones there.
fn kept_file(target: &Path) -> io::Result<NamedTempFile> {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    Builder::new().prefix(&format!(".{name}-old-")).rand_bytes(scratch::RANDOM).tempfile_in(folder_of(target))
}

/// Keeps others who replace files of this folder from doing so at the same time, or one of them would leave its model
/// beside the weights of the other. They are done after a few renames: whoever holds a lock for longer is another
/// program, and is not heeded after `longest`. No lock where the folder cannot be opened for reading or knows none, as
/// none does on Windows.
pub(super) fn lock(folder: &Path, longest: Duration) -> Option<fs::File> {
    let folder = fs::File::open(folder).ok()?;
    let begun = Instant::now();
    while begun.elapsed() < longest {
        match folder.try_lock() {
            Ok(()) => return Some(folder),
            Err(fs::TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(5)),
            Err(fs::TryLockError::Error(_)) => return None,
        }
    }
    None
}

/// How long others are waited for who replace files in the same folder.
pub(super) const LONGEST_LOCK: Duration = Duration::from_secs(2);

/// Gives a file, which will be known as `target`, the name `place`.
pub(super) fn persist(file: TempPath, place: &Path, target: &Path, force: bool) -> Result<(), WriteError> {
    let moved = match force {
        true => file.persist(place),
        false => file.persist_noclobber(place).or_else(|refused| persist_plainly(refused, place)),
    };
    moved.map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => WriteError::Exists { path: target.into() },
        _ => WriteError::io(target)(error.error),
    })
}

/// Gives a file a name that is free where the file system has no way to do so that also sees to this.
fn persist_plainly(refused: PathPersistError, place: &Path) -> Result<(), PathPersistError> {
    let is_free = || place.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    if is_missing(&refused.error) && is_free() { refused.path.persist(place) } else { Err(refused) }
}

/// Whether the operating system may have refused something because the file system does not have it.
fn is_missing(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// Makes names in a folder outlast a loss of power, where its file system can do that and the folder may be read.
#[cfg(unix)]
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    match fs::File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error) if is_missing(&error) => Ok(()),
        done => done,
    }
}

#[cfg(not(unix))]
pub(super) fn sync_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn a_lock_is_waited_for_and_held() {
        let root = tempfile::tempdir().unwrap();
        let other = fs::File::open(root.path()).unwrap();
        other.lock().unwrap();
        assert!(lock(root.path(), Duration::from_millis(20)).is_none());
        let held = thread::scope(|scope| {
            let waiting = scope.spawn(|| lock(root.path(), Duration::from_secs(60)));
            thread::sleep(Duration::from_millis(50));
            other.unlock().unwrap();
            waiting.join().unwrap()
        });
        assert!(matches!(other.try_lock(), Err(fs::TryLockError::WouldBlock)));
        drop(held.unwrap());
        other.try_lock().unwrap();
    }

    #[test]
    fn a_file_system_that_renames_plainly_serves_where_a_name_is_free() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("a");
        let refused = |kind: io::ErrorKind, text: &str| {
            let mut file = NamedTempFile::new_in(root.path()).unwrap();
            io::Write::write_all(&mut file, text.as_bytes()).unwrap();
            PathPersistError { error: kind.into(), path: file.into_temp_path() }
        };
        let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::AlreadyExists];
        assert!(kinds.into_iter().all(|kind| persist_plainly(refused(kind, "0"), &place).is_err() && !place.exists()));
        persist_plainly(refused(io::ErrorKind::Unsupported, "1"), &place).unwrap();
        assert!(persist_plainly(refused(io::ErrorKind::Unsupported, "2"), &place).is_err());
        assert_eq!(fs::read_to_string(&place).unwrap(), "1");
    }

    #[test]
    #[cfg(unix)]
    fn a_folder_that_is_gone_is_not_synced() {
        let root = tempfile::tempdir().unwrap();
        sync_folder(root.path()).unwrap();
        assert!(sync_folder(&root.path().join("gone")).is_err());
        assert!(is_missing(&io::ErrorKind::PermissionDenied.into()) && !is_missing(&io::ErrorKind::StorageFull.into()));
    }
}
