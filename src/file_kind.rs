//! Recognises other files by their first bytes, so that a message can name them.

/// Bytes that [`recognise`] wants to see.
pub(crate) const PREFIX: usize = 512;

/// An archive that torch.save did not write.
pub(crate) const ZIP: &str = "a zip archive";
/// A model compiled by `torch.jit`.
pub(crate) const PROGRAM: &str = "a TorchScript archive";
/// No safetensors file is one: the length of its header has bytes of zero.
pub(crate) const TEXT: &str = "a text";
/// See [`recognise`].
pub(crate) const TAR: &str = "a tar archive";
/// See [`recognise`].
pub(crate) const LEGACY: &str = "a PyTorch checkpoint of the old format (a Python pickle, no zip archive)";
/// See [`recognise`].
pub(crate) const PICKLE: &str = "a Python pickle";
/// See [`recognise`].
pub(crate) const LFS_POINTER: &str = "a Git LFS pointer";
/// See [`recognise`].
pub(crate) const HTML: &str = "an HTML page";
/// See [`recognise`].
pub(crate) const JSON: &str = "a JSON text";

/// See [`recognise`].
pub(crate) const ORT: &str = "an ONNX Runtime model (.ort)";
/// See [`recognise`].
pub(crate) const ONNX: &str = "an ONNX model";

/// The number 0x1950a86a20f9469cfc6c, as a pickle writes it.
const LEGACY_MAGIC: &[u8] = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19";

/// First bytes, and what they stand for.
const MAGICS: [(&[u8], &str); 9] = [
    (b"GGUF", "a GGUF model"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"version https://git-lfs", LFS_POINTER),
    (b"<!DOCTYPE", HTML),
    (b"<!doctype", HTML),
    (b"<html", HTML),
    (b"{", JSON),
];

/// What a file that starts with `prefix` is, where that is known and not safetensors.
pub(crate) fn recognise(prefix: &[u8]) -> Option<&'static str> {
    if is_zip(prefix) {
        return Some(ZIP);
    }
    match prefix.get(4..8) {
        Some(b"TFL3") => return Some("a TensorFlow Lite model"),
        Some(b"ORTM") => return Some(ORT),
        _ => {}
    }
    if is_onnx(prefix) {
        return Some(ONNX);
    }
    if is_pickle(prefix) {
        return Some(if prefix.get(2..14) == Some(LEGACY_MAGIC) { LEGACY } else { PICKLE });
    }
    if prefix.get(257..262) == Some(b"ustar") {
        return Some(TAR);
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
