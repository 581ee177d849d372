//! Files that appear whole or not at all.
//!
//! Every file is written beside its final place, flushed to the disk, and moved there by one rename. A new
//! folder is filled under another name and renamed as a whole. What a killed process has left of both where the next
//! one writes, that one removes.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile, TempDir, TempPath};

use crate::{
    files::{folder_of, in_folder},
    scratch,
};

mod into_place;

use into_place::{LONGEST_LOCK, SetAside, lock, persist, sync_folder};

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
        Self { out: out.into(), missing: missing_folders(folder_of(out)) }
    }

    /// Removes what this process has begun to write and not finished; for a program that is told to end at once.
    pub fn remove(&self) {
        // A new folder is filled beside its place, and it may be `out` or hold it.
        let folder = folder_of(&self.out);
        for folder in [self.out.as_path(), folder, folder_of(folder)] {
            scratch::remove_own(folder);
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
    /// A symbolic link stands in the place of an output.
    #[error("{} is a link to {}{}", .path.display(), .target.display(), if *.is_dangling { ", where nothing is" } else { "" })]
    Link {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
        /// Whether nothing is there.
        is_dangling: bool,
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
        move |source| Self::Io { path: path.into(), source: scratch::without_path(source) }
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

impl Drop for Staging {
    /// Removing a folder with what is in it takes files to be opened, and there may be too many open already.
    fn drop(&mut self) {
        self.staged.clear();
        if let Some(folder) = self.new_folder.take() {
            match fs::remove_dir(folder.path()) {
                Ok(()) => drop(folder.keep()),
                Err(_) => drop(folder),
            }
        }
    }
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
                scratch::remove(folder);
                scratch::remove(folder_of(folder));
                let last = names.last().map_or_else(|| folder.into(), |name| staging.target(name));
                drop(temporary_file(folder).map_err(WriteError::io(&last))?);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                missing_folders(folder).iter().try_for_each(|missing| check_no_link(missing))?;
                staging.parents = NewFolders::make(folder_of(folder)).map_err(WriteError::io(folder))?;
                scratch::remove(folder_of(folder));
                staging.new_folder = Some(temporary_folder(folder)?);
            }
            Err(error) => return Err(WriteError::io(folder)(error)),
        }
        Ok(staging)
    }

    /// Final place of the file `name`.
    fn target(&self, name: &str) -> PathBuf {
        in_folder(&self.folder, name)
    }

    fn check_target(&self, path: &Path) -> Result<(), WriteError> {
        check_no_link(path)?;
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

    /// [`Self::file`] with all of its bytes.
    ///
    /// # Errors
    ///
    /// What the operating system refuses.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        let target = self.target(name);
        self.file(name, |writer| writer.write_all(bytes).map_err(WriteError::io(&target)))
    }

    /// Moves every file to its final place, in the order in which they were written.
    ///
    /// # Errors
    ///
    /// Where a rename fails, and where a file exists that did not before and `force` is not set; files that were not
    /// moved by then are removed.
    pub fn commit(mut self) -> Result<Vec<PathBuf>, WriteError> {
        let files = std::mem::take(&mut self.staged).into_iter();
        let files: Vec<_> = files.map(|(file, target)| (file.into_temp_path(), target)).collect();
        let targets = files.iter().map(|(_, target)| target.clone()).collect();
        match self.new_folder.take() {
            Some(new_folder) => self.move_folder(new_folder, files)?,
            None => self.move_files(files)?,
        }
        self.parents.0.clear();
        sync_folder(folder_of(&self.folder)).map_err(WriteError::io(&self.folder))?;
        Ok(targets)
    }

    fn move_folder(&self, new_folder: TempDir, files: Vec<(TempPath, PathBuf)>) -> Result<(), WriteError> {
        let mut moved = Vec::new();
        for (file, target) in files {
            let place = new_folder.path().join(target.file_name().unwrap_or_default());
            // Nobody else knows the new folder.
            file.persist(&place).map_err(|error| WriteError::io(&target)(error.error))?;
            moved.push((place, target));
        }
        sync_folder(new_folder.path()).map_err(WriteError::io(&self.folder))?;
        match fs::rename(new_folder.path(), &self.folder) {
            Ok(()) => {
                drop(new_folder.keep());
                Ok(())
            }
            Err(_) if self.folder.is_dir() => {
                moved.iter().try_for_each(|(_, target)| self.check_target(target))?;
                let file = |(place, target): (PathBuf, PathBuf)| {
                    let file = TempPath::try_from_path(place).map_err(WriteError::io(&target))?;
                    Ok((file, target))
                };
                self.move_files(moved.into_iter().map(file).collect::<Result<_, WriteError>>()?)
            }
            Err(error) => Err(WriteError::io(&self.folder)(error)),
        }
    }

    fn move_files(&self, files: Vec<(TempPath, PathBuf)>) -> Result<(), WriteError> {
        let _lock = lock(&self.folder, LONGEST_LOCK);
        let old = if self.force { SetAside::begin(&files)? } else { SetAside::default() };
        for (file, target) in files {
            let place = self.folder.join(target.file_name().unwrap_or_default());
            persist(file, &place, &target, self.force)?;
        }
        old.forget();
        sync_folder(&self.folder).map_err(WriteError::io(&self.folder))
    }
}

/// Refuses a symbolic link, which a rename would replace and not follow.
fn check_no_link(path: &Path) -> Result<(), WriteError> {
    let Ok(target) = fs::read_link(path) else { return Ok(()) };
    let target = folder_of(path).join(target);
    let target = target.strip_prefix(".").map(Path::to_path_buf).unwrap_or(target);
    Err(WriteError::Link { path: path.into(), is_dangling: !path.exists(), target })
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
    let prefix = scratch::prefix();
    let mut builder = Builder::new();
    with_mode(builder.prefix(&prefix).rand_bytes(scratch::RANDOM), 0o666).tempfile_in(folder)
}

fn temporary_folder(folder: &Path) -> Result<TempDir, WriteError> {
    let parent = folder_of(folder);
    let prefix = scratch::prefix();
    let mut builder = Builder::new();
    let builder = with_mode(builder.prefix(&prefix).rand_bytes(scratch::RANDOM), 0o777);
    builder.tempdir_in(parent).map_err(WriteError::io(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staged(folder: &Path, name: &str, text: &str, force: bool) -> Staging {
        let mut staging = Staging::begin(folder, &[name.to_owned()], force).unwrap();
        let path = folder.join(name);
        let fill = |writer: &mut dyn io::Write| writer.write_all(text.as_bytes()).map_err(WriteError::io(&path));
        staging.file::<WriteError>(name, fill).unwrap();
        staging
    }

    /// Each of them begins where there is no folder yet.
    #[test]
    fn a_new_folder_is_shared_and_its_files_are_not() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("new/out");
        let begun = [("a", "1", false), ("a", "2", false), ("b", "3", false), ("a", "4", true)];
        let [first, same, other, forced] = begun.map(|(name, text, force)| staged(&folder, name, text, force));
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        assert_eq!(first.commit().unwrap(), [folder.join("a")]);
        assert!(matches!(same.commit(), Err(WriteError::Exists { path }) if path == folder.join("a")));
        assert_eq!(other.commit().unwrap(), [folder.join("b")]);
        assert_eq!([read("a"), read("b")], ["1", "3"]);
        assert_eq!(forced.commit().unwrap(), [folder.join("a")]);
        assert_eq!([read("a"), read("b")], ["4", "3"]);
        for folder in [folder.as_path(), folder_of(&folder)] {
            let left = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
            assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with('.')), "{}", folder.display());
        }
    }

    /// Another program holds a lock of the folder for longer than is waited.
    #[test]
    #[cfg(unix)]
    fn whoever_replaces_files_of_the_folder_is_waited_for_and_no_one_for_ever() {
        let root = tempfile::tempdir().unwrap();
        let other = fs::File::open(root.path()).unwrap();
        other.lock().unwrap();
        let replace = |text: &str| staged(root.path(), "m.onnx", text, true).commit();
        let begun = std::time::Instant::now();
        replace("1").unwrap();
        assert!(begun.elapsed() >= LONGEST_LOCK);
        assert_eq!(fs::read_to_string(root.path().join("m.onnx")).unwrap(), "1");
    }

    /// The second file can neither be replaced nor set aside: a folder of its name has come meanwhile.
    #[test]
    fn old_files_stay_where_new_ones_cannot_replace_all_of_them() {
        let root = tempfile::tempdir().unwrap();
        let names = ["a.data", "b.data", "c.onnx"];
        for name in names {
            fs::write(root.path().join(name), format!("old {name}")).unwrap();
        }
        let mut staging = Staging::begin(root.path(), &names.map(str::to_owned), true).unwrap();
        for name in names {
            staging
                .file::<WriteError>(name, |writer| writer.write_all(b"new").map_err(WriteError::io(name.as_ref())))
                .unwrap();
        }
        fs::remove_file(root.path().join("b.data")).unwrap();
        fs::create_dir(root.path().join("b.data")).unwrap();
        assert!(matches!(staging.commit(), Err(WriteError::Io { path, .. }) if path.ends_with("b.data")));
        for name in ["a.data", "c.onnx"] {
            assert_eq!(fs::read_to_string(root.path().join(name)).unwrap(), format!("old {name}"));
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 3);
    }
}
