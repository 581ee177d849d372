//! Temporary files, and names by which those of a process that was killed are told from all others.
//!
//! A name says which boot of which machine, which name space of process ids and which process made it. Where the first
//! two are ours, the system knows whether the process is still there; of all others nobody here can tell, so they stay.

#[cfg(target_os = "linux")]
use std::os::unix::fs::MetadataExt;
use std::{fs, io, path::Path};

use tempfile::{Builder, NamedTempFile, TempDir};

const PREFIX: &str = ".moa-export-";

/// Letters and digits behind the number of the process.
pub(crate) const RANDOM: usize = 6;

/// A file in `folder` that goes when it is dropped, and with it what killed processes have left there.
///
/// # Errors
///
/// Where nothing can be written to `folder`.
pub fn scratch_file(folder: &Path) -> io::Result<NamedTempFile> {
    remove(folder);
    Builder::new().prefix(&prefix()).rand_bytes(RANDOM).tempfile_in(folder)
}

/// A folder in `folder` that goes when it is dropped, and with it what killed processes have left there.
///
/// # Errors
///
/// Where nothing can be written to `folder`.
pub fn scratch_folder(folder: &Path) -> io::Result<TempDir> {
    remove(folder);
    Builder::new().prefix(&prefix()).rand_bytes(RANDOM).tempdir_in(folder)
}

/// What the operating system said, without the name of a temporary file behind it.
pub(crate) fn without_path(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.split_once(" at path ") {
        Some((said, _)) => io::Error::new(error.kind(), said.to_owned()),
        None => error,
    }
}

/// Removes what this process has begun to write in `folder`; does what it can.
pub(crate) fn remove_own(folder: &Path) {
    let prefix = prefix();
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)) {
        let path = entry.path();
        let _gone_already_or_not_ours = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
}

/// What the names of this process's temporary files and folders start with.
pub(crate) fn prefix() -> String {
    let place = place().map_or_else(String::new, |place| format!("{place}-"));
    format!("{PREFIX}{place}{}-", std::process::id())
}

/// Removes what killed processes of this user have begun to write in `folder`; does what it can.
#[cfg(target_os = "linux")]
pub(crate) fn remove(folder: &Path) {
    let (Some(place), Ok(own)) = (place(), fs::metadata("/proc/self")) else { return };
    let start = format!("{PREFIX}{place}-");
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| process_of(name.strip_prefix(&start)?));
        let (Some(process), Ok(found)) = (process, entry.metadata()) else { continue };
        let is_gone = matches!(Path::new("/proc").join(process.to_string()).try_exists(), Ok(false));
        if !is_gone || found.uid() != own.uid() {
            continue;
        }
        let _stays_where_it_cannot_go = match found.file_type() {
            kind if kind.is_dir() => fs::remove_dir_all(entry.path()),
            kind if kind.is_file() => fs::remove_file(entry.path()),
            _ => Ok(()),
        };
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn remove(_folder: &Path) {}

/// The process in the rest of a name, which is a number and random letters.
#[cfg(target_os = "linux")]
fn process_of(rest: &str) -> Option<u32> {
    let (process, random) = rest.split_once('-')?;
    let number: u32 = process.parse().ok()?;
    let is_random = random.len() == RANDOM && random.bytes().all(|letter| letter.is_ascii_alphanumeric());
    (is_random && number.to_string() == process).then_some(number)
}

/// Where the number of a process means what it means here: a boot and a name space; `None` where `/proc` does not tell.
#[cfg(target_os = "linux")]
fn place() -> Option<String> {
    let own = fs::read_link("/proc/self").ok()?;
    if own.to_str()? != std::process::id().to_string() {
        return None;
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let space = fs::read_link("/proc/self/ns/pid").ok()?;
    let digits = |text: &str| text.chars().filter(char::is_ascii_hexdigit).collect::<String>();
    let space = digits(space.to_str()?.strip_prefix("pid:")?);
    let boot: String = digits(&boot).chars().take(16).collect();
    (boot.len() == 16 && !space.is_empty()).then(|| format!("{boot}{space}"))
}

#[cfg(not(target_os = "linux"))]
fn place() -> Option<String> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// More than any process has: Linux ends at 2^22.
    const GONE: u32 = 4_999_999;

    #[test]
    fn scratch_clears_what_a_dead_process_left_and_is_cleared_itself() {
        let folder = tempfile::tempdir().unwrap();
        let names = || fs::read_dir(folder.path()).unwrap().count();
        let dead = folder.path().join(format!("{PREFIX}{}-{GONE}-AbC123", place().unwrap()));
        fs::write(&dead, "begun").unwrap();
        let file = scratch_file(folder.path()).unwrap();
        assert!(!dead.exists() && names() == 1);
        fs::write(&dead, "begun").unwrap();
        let held = scratch_folder(folder.path()).unwrap();
        fs::write(held.path().join("nodes"), "record").unwrap();
        assert!(!dead.exists() && names() == 2);
        fs::write(folder.path().join("model.onnx"), "kept").unwrap();
        remove_own(folder.path());
        assert!(names() == 1 && !file.path().exists() && !held.path().exists());
    }

    #[test]
    fn only_what_a_dead_process_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let place = place().unwrap();
        let ours = |process: u32, random: &str| format!("{PREFIX}{place}-{process}-{random}");
        let other_boot = format!("{PREFIX}0{}-{GONE}-AbC123", place[1..].replace('0', "1"));
        let gone = [ours(GONE, "AbC123"), ours(GONE, "000000")];
        let kept = [
            format!("{}AbC123", prefix()),
            ours(1, "AbC123"),
            other_boot,
            format!("{PREFIX}{GONE}-AbC123"),
            ours(GONE, "AbC12"),
            ours(GONE, "AbC1234"),
            ours(GONE, "AbC.23"),
            ours(GONE, "notes-"),
            format!("{PREFIX}{place}-+{GONE}-AbC123"),
            format!("x{}", ours(GONE, "AbC123")),
            format!("{PREFIX}profile-AbC123"),
            "model.onnx".to_owned(),
        ];
        for name in gone.iter().chain(&kept) {
            fs::write(folder.path().join(name), name).unwrap();
        }
        let (begun, link) = (ours(GONE, "folder"), ours(GONE, "link00"));
        fs::create_dir(folder.path().join(&begun)).unwrap();
        fs::write(folder.path().join(&begun).join("model.onnx"), "begun").unwrap();
        std::os::unix::fs::symlink("model.onnx", folder.path().join(&link)).unwrap();
        remove(folder.path());
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        let mut expected: Vec<_> = kept.into_iter().chain([link]).collect();
        expected.sort();
        assert_eq!(names, expected);
    }
}
