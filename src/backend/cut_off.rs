//! Whether a library is all there. A loader maps a file that was cut off, and the process dies at its first read of
//! what is missing.

use std::{fs::File, path::Path};

use crate::files::read_exact_at;

/// How a library of 64 bits begins on Linux, in this machine's order of bytes.
const ELF: &[u8] = if cfg!(target_endian = "little") { b"\x7fELF\x02\x01" } else { b"\x7fELF\x02\x02" };

/// Bytes of its header, and of the head of a segment.
const HEADER: usize = 64;
const SEGMENT: usize = 56;

/// Kind of the segments that a loader maps.
const LOAD: u32 = 1;

/// What is wrong with the library at `path` where it ends before its last segment; any other fault is the loader's to
/// tell.
pub(super) fn cut_off(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    let found = file.metadata().ok()?.len();
    let mut header = [0; HEADER];
    read_exact_at(&file, &mut header, 0).ok()?;
    if !header.starts_with(ELF) || usize::from(short(&header, 54)) != SEGMENT {
        return None;
    }
    let (start, count) = (long(&header, 32), usize::from(short(&header, 56)));
    let mut segments = vec![0; count * SEGMENT];
    let heads_end = start.saturating_add(segments.len() as u64);
    let needed = match read_exact_at(&file, &mut segments, start) {
        Ok(()) => {
            let loaded = segments.as_chunks::<SEGMENT>().0.iter().filter(|head| word(*head, 0) == LOAD);
            loaded.map(|head| long(head, 8).saturating_add(long(head, 32))).fold(heads_end, u64::max)
        }
        Err(_) => heads_end,
    };
    (found < needed).then(|| format!("it was cut off: {found} of at least {needed} bytes are there"))
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    from.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

fn short(from: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(bytes(from, at))
}

fn word(from: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes(from, at))
}

fn long(from: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes(from, at))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_whole_and_its_beginning_is_not() {
        let program = std::env::current_exe().unwrap();
        assert_eq!(cut_off(&program), None);
        let mut first = vec![0; 100_000];
        read_exact_at(&File::open(&program).unwrap(), &mut first, 0).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cut.so");
        for len in [HEADER, HEADER + SEGMENT, 4096, first.len()] {
            std::fs::write(&path, &first[..len]).unwrap();
            let told = cut_off(&path).unwrap_or_default();
            assert!(told.starts_with(&format!("it was cut off: {len} of at least ")), "{len}: {told}");
        }
        for other in [&b"no library"[..], &first[..HEADER - 1], &[0; 4096]] {
            std::fs::write(&path, other).unwrap();
            assert_eq!(cut_off(&path), None);
        }
        assert_eq!(cut_off(folder.path()), None);
    }
}
