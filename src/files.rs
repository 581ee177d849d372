//! Rules that hold for every file that is read or written: names that stay in a folder, names that can be shown, and
//! what a refusal means.

use std::{
    fs::{File, Metadata},
    io::{self, Read},
    path::{Path, PathBuf},
};

/// What a failure means for the caller, independent of its details.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The input breaks its format.
    Malformed,
    /// The input is well formed, but this program cannot use it.
    Unsupported,
    /// The input cannot be read, is not there, or changed.
    Io,
    /// The input is larger than a limit.
    Limit,
}

/// Bytes of the longest name that every file system takes.
const LONGEST_NAME: usize = 255;

/// Whether a name is that of a file in the folder where it is looked for, on every system.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let harmless = |c: char| !c.is_control() && !matches!(c, '/' | '\\' | ':');
    !matches!(name, "" | "." | "..") && name.len() <= LONGEST_NAME && name.chars().all(harmless)
}

/// Whether a path leads to where it starts or below, by its words; links are not looked at.
#[cfg(feature = "ort")]
pub(crate) fn stays_below(path: &Path) -> bool {
    path.components().all(|part| matches!(part, std::path::Component::Normal(_)))
}

/// The name of a file in its folder, as it can be shown.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The folder that a file lies in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether a path names a folder, whatever is there: it ends as only paths of folders do.
pub(crate) fn ends_as_folder(path: &Path) -> bool {
    path.as_os_str().to_str().is_some_and(|path| path.ends_with(std::path::is_separator))
}

/// Whether the name of a file ends in a dot and one of `endings`, in small letters or capitals.
pub(crate) fn has_ending(path: impl AsRef<Path>, endings: &[&str]) -> bool {
    let ending = path.as_ref().extension();
    ending.is_some_and(|ending| endings.iter().any(|known| ending.eq_ignore_ascii_case(known)))
}

/// A file of a folder, as users name it.
pub(crate) fn in_folder(folder: &Path, name: &str) -> PathBuf {
    if folder == Path::new(".") { name.into() } else { folder.join(name) }
}

/// Most bytes that are read from a pipe.
const LONGEST_PIPE: u64 = 1 << 30;

/// Most bytes that are read of a file of JSON that this program wrote.
pub(crate) const LONGEST_JSON: u64 = 64 << 20;

/// What some editors write before UTF-8, and what is no part of the text.
pub(crate) const BYTE_ORDER_MARK: &str = "\u{feff}";

/// The bytes of a file, or of a pipe that ends within [`LONGEST_PIPE`]: a device may never end.
pub(crate) fn read_whole(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(path, u64::MAX)
}

/// As [`read_whole`], of at most `limit` bytes, which are counted before memory is taken.
pub(crate) fn read_at_most(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let metadata = path.metadata()?;
    if is_device(&metadata) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "expected a file, found a device"));
    }
    let too_large = |text| Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    let is_file = metadata.is_file();
    let (size, limit) = if is_file { (metadata.len(), limit) } else { (0, limit.min(LONGEST_PIPE)) };
    if size > limit {
        return too_large(format!("expected at most {limit} bytes, found {size}"));
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(size).unwrap_or(usize::MAX))?;
    File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > limit {
        true if !is_file && limit == LONGEST_PIPE => too_large("a pipe of more than 1 GiB; give a file".to_owned()),
        true => too_large(format!("expected at most {limit} bytes, found more")),
        false => Ok(bytes),
    }
}

#[cfg(unix)]
fn is_device(metadata: &Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let kind = metadata.file_type();
    kind.is_char_device() || kind.is_block_device()
}

#[cfg(not(unix))]
const fn is_device(_metadata: &Metadata) -> bool {
    false
}

/// What may help where the operating system refused to give a file.
pub(crate) fn help_with(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::NotFound => Some("check the path"),
        io::ErrorKind::PermissionDenied => Some("let your user read it, or give a copy that it may read"),
        _ => None,
    }
}

/// Fills `bytes` with what stands in the file from byte `offset` on.
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

/// Fills `bytes` with what stands in the file from byte `offset` on.
#[cfg(not(unix))]
pub(crate) fn read_exact_at(mut file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(bytes)
}

/// A text from a file as messages show it: without control characters, cut behind `longest` of its characters.
pub(crate) fn escaped(text: &str, longest: usize) -> String {
    let (text, rest) = match text.char_indices().nth(longest) {
        Some((end, _)) => (&text[..end], "…"),
        None => (text, ""),
    };
    text.chars().flat_map(char::escape_debug).chain(rest.chars()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn endings_are_those_behind_the_last_dot() {
        for name in ["m.onnx", "out/M.ONNX", "a.b.Onnx", "größe.pt"] {
            assert!(has_ending(name, &["onnx", "pt"]), "{name}");
        }
        for name in ["onnx", ".onnx", "m.onnx.data", "m.onnx2", "monnx", "m."] {
            assert!(!has_ending(name, &["onnx", "pt"]), "{name}");
        }
    }

    #[test]
    fn plain_names_stay_in_their_folder_on_every_system() {
        let longest = "n".repeat(LONGEST_NAME);
        for name in ["model.onnx", "...", ".hidden", "a b", "größe", longest.as_str()] {
            assert!(is_plain_name(name), "{name}");
        }
        let too_long = format!("{longest}n");
        for name in ["", ".", "..", "/", "a/b", "a/", "../a", "/a", "a\\b", "c:a", "a\0", "a\nb", too_long.as_str()] {
            assert!(!is_plain_name(name), "{name:?}");
        }
    }

    #[test]
    #[cfg(feature = "ort")]
    fn paths_below_may_have_folders() {
        for path in ["", "a", "a/b", "a//b/"] {
            assert!(stays_below(Path::new(path)), "{path}");
        }
        for path in ["..", "a/../../b", "/a", "./a"] {
            assert!(!stays_below(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn a_file_without_a_folder_lies_in_the_current_one() {
        for (path, folder) in [("a/b", "a"), ("/a", "/"), ("a", "."), ("", "."), ("/", ".")] {
            assert_eq!(folder_of(Path::new(path)), Path::new(folder), "{path}");
        }
    }

    #[test]
    fn bytes_are_read_where_they_stand_or_not_at_all() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let mut bytes = [0; 3];
        read_exact_at(&file, &mut bytes, 6).unwrap();
        assert_eq!(&bytes, b"678");
        let error = read_exact_at(&file, &mut bytes, 8).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    #[cfg(unix)]
    fn files_and_pipes_are_read_and_devices_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"bytes").unwrap();
        assert_eq!(read_whole(&file).unwrap(), b"bytes");
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"more").unwrap();
        drop(writer);
        let pipe = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        if cfg!(target_os = "linux") {
            assert_eq!(read_whole(Path::new(&pipe)).unwrap(), b"more");
        }
        let error = read_whole(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(error.to_string(), "expected a file, found a device");
        assert_eq!(read_whole(folder.path()).unwrap_err().kind(), io::ErrorKind::IsADirectory);
    }

    #[test]
    #[cfg(unix)]
    fn files_that_are_known_to_be_small_have_a_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"bytes").unwrap();
        assert_eq!(read_at_most(&path, 5).unwrap(), b"bytes");
        let error = read_at_most(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(error.to_string(), "expected at most 4 bytes, found 5");
        if cfg!(target_os = "linux") {
            let (reader, mut writer) = io::pipe().unwrap();
            writer.write_all(b"bytes").unwrap();
            drop(writer);
            let pipe = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
            let error = read_at_most(Path::new(&pipe), 4).unwrap_err();
            assert_eq!(error.to_string(), "expected at most 4 bytes, found more");
        }
    }

    #[test]
    fn what_is_shown_is_one_line_of_bounded_length() {
        assert_eq!(escaped("größe\n\u{1b}[2J\"", 160), "größe\\n\\u{1b}[2J\\\"");
        assert_eq!(escaped("abc", 3), "abc");
        assert_eq!(escaped("ab\nd", 3), "ab\\n…");
    }
}
