//! Recognises other files by their first bytes, so that a message can name them.

use std::fmt;

/// Bytes that [`recognise`] wants to see.
pub(crate) const PREFIX: usize = 512;

/// What a file is by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A zip archive that torch.save did not write.
    Zip,
    /// A zip archive of torch.save.
    Torch,
    /// A model compiled by `torch.jit`.
    TorchScript,
    /// What torch.save wrote before it wrote zip archives.
    LegacyTorch,
    /// A pickle of another program.
    Pickle,
    /// A safetensors file.
    Safetensors,
    /// A tar archive.
    Tar,
    /// A gzip archive.
    Gzip,
    /// What stands in a repository for a file that Git LFS holds.
    LfsPointer,
    /// An HTML page.
    Html,
    /// A text that begins as an object of JSON does.
    Json,
    /// A text in UTF-8 that is none of these.
    Text,
    /// A model that ONNX Runtime saved in its own format.
    Ort,
    /// An ONNX model.
    Onnx,
    /// A TensorFlow Lite model.
    TfLite,
    /// A GGUF model.
    Gguf,
    /// An HDF5 file.
    Hdf5,
    /// A NumPy array.
    Npy,
}

impl FileKind {
    /// With its article, as sentences of messages begin.
    const fn name(self) -> &'static str {
        match self {
            Self::Zip => "a zip archive",
            Self::Torch => "a PyTorch file",
            Self::TorchScript => "a TorchScript archive",
            Self::LegacyTorch => "a PyTorch checkpoint of the old format (a Python pickle, no zip archive)",
            Self::Pickle => "a Python pickle",
            Self::Safetensors => "a safetensors file",
            Self::Tar => "a tar archive",
            Self::Gzip => "a gzip archive",
            Self::LfsPointer => "a Git LFS pointer",
            Self::Html => "an HTML page",
            Self::Json => "a JSON text",
            Self::Text => "a text",
            Self::Ort => "an ONNX Runtime model (.ort)",
            Self::Onnx => "an ONNX model",
            Self::TfLite => "a TensorFlow Lite model",
            Self::Gguf => "a GGUF model",
            Self::Hdf5 => "an HDF5 file",
            Self::Npy => "a NumPy array",
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The number 0x1950a86a20f9469cfc6c, as a pickle writes it.
const LEGACY_MAGIC: &[u8] = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19";

/// First bytes, and what they stand for.
const MAGICS: [(&[u8], FileKind); 9] = [
    (b"GGUF", FileKind::Gguf),
    (b"\x89HDF\r\n\x1a\n", FileKind::Hdf5),
    (b"\x93NUMPY", FileKind::Npy),
    (b"\x1f\x8b", FileKind::Gzip),
    (b"version https://git-lfs", FileKind::LfsPointer),
    (b"<!DOCTYPE", FileKind::Html),
    (b"<!doctype", FileKind::Html),
    (b"<html", FileKind::Html),
    (b"{", FileKind::Json),
];

/// What a file that starts with `prefix` is, where that is known: no safetensors file and no [`FileKind::Text`], which
/// [`is_safetensors`] and [`is_text`] find, and [`FileKind::Zip`] for every zip archive.
pub(crate) fn recognise(prefix: &[u8]) -> Option<FileKind> {
    if is_zip(prefix) {
        return Some(FileKind::Zip);
    }
    match prefix.get(4..8) {
        Some(b"TFL3") => return Some(FileKind::TfLite),
        Some(b"ORTM") => return Some(FileKind::Ort),
        _ => {}
    }
    if is_onnx(prefix) {
        return Some(FileKind::Onnx);
    }
    if is_pickle(prefix) {
        let is_legacy = prefix.get(2..14) == Some(LEGACY_MAGIC);
        return Some(if is_legacy { FileKind::LegacyTorch } else { FileKind::Pickle });
    }
    if prefix.get(257..262) == Some(b"ustar") {
        return Some(FileKind::Tar);
    }
    MAGICS.iter().find(|(magic, _)| prefix.starts_with(magic)).map(|(_, kind)| *kind)
}

/// Whether a file starts with text in UTF-8, whose last character may be cut.
pub(crate) fn is_text(prefix: &[u8]) -> bool {
    let text = match std::str::from_utf8(prefix) {
        Ok(text) => text,
        Err(error) if error.error_len().is_some() => return false,
        Err(error) => std::str::from_utf8(prefix.get(..error.valid_up_to()).unwrap_or_default()).unwrap_or_default(),
    };
    !text.is_empty() && text.chars().all(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t'))
}

/// Whether a file is a zip archive.
pub(crate) fn is_zip(prefix: &[u8]) -> bool {
    prefix.starts_with(b"PK\x03\x04")
}

/// Whether a file may be a safetensors file: an object of JSON after its length.
pub(crate) fn is_safetensors(prefix: &[u8]) -> bool {
    prefix.get(8) == Some(&b'{')
}

/// Whether the start of a zip archive names the pickle of a PyTorch file.
pub(crate) fn names_pickle(prefix: &[u8]) -> bool {
    prefix.windows(8).any(|window| window == b"data.pkl")
}

/// An ONNX model starts with its IR version (field 1) and goes on with another field of `ModelProto`.
fn is_onnx(prefix: &[u8]) -> bool {
    matches!(prefix, [0x08, 1..=63, 0x12 | 0x1a | 0x22 | 0x28 | 0x32 | 0x3a | 0x42, _, ..])
}

/// A pickle starts with its protocol and an opcode, of which none is zero.
fn is_pickle(prefix: &[u8]) -> bool {
    matches!(prefix, [0x80, 2..=5, 1..=255, ..])
}
