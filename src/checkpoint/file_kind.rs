//! Recognises other files by their first bytes, so that a message can name them.

/// Bytes that [`recognise`] wants to see.
pub(super) const PREFIX: usize = 512;

const PYTORCH_ZIP: &str = "a PyTorch checkpoint (zip)";
const PICKLE: &str = "a Python pickle or PyTorch checkpoint";
const LFS_POINTER: &str = "a Git LFS pointer";
const HTML: &str = "an HTML page";
const JSON: &str = "a JSON text";

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
pub(super) fn recognise(prefix: &[u8]) -> Option<&'static str> {
    if prefix.starts_with(b"PK\x03\x04") {
        let torch = prefix.windows(8).any(|window| window == b"data.pkl");
        return Some(if torch { PYTORCH_ZIP } else { "a zip archive" });
    }
    match prefix.get(4..8) {
        Some(b"TFL3") => return Some("a TensorFlow Lite model"),
        Some(b"ORTM") => return Some("an ONNX Runtime model"),
        _ => {}
    }
    if is_onnx(prefix) {
        return Some("an ONNX model");
    }
    if is_pickle(prefix) {
        return Some(PICKLE);
    }
    MAGICS.iter().find(|(magic, _)| prefix.starts_with(magic)).map(|(_, kind)| *kind)
}

/// An ONNX model starts with its IR version (field 1) and goes on with another field of `ModelProto`.
fn is_onnx(prefix: &[u8]) -> bool {
    matches!(prefix, [0x08, 1..=63, 0x12 | 0x1a | 0x22 | 0x28 | 0x32 | 0x3a | 0x42, _, ..])
}

/// A pickle starts with its protocol and an opcode, of which none is zero.
fn is_pickle(prefix: &[u8]) -> bool {
    matches!(prefix, [0x80, 2..=5, 1..=255, ..])
}

/// How to come from such a file to a supported one.
pub(super) fn help(kind: &str) -> Option<String> {
    let help = match kind {
        PYTORCH_ZIP | PICKLE => {
            "load it where you trust it, and save its state dict with safetensors.torch.save_model or save_file"
        }
        LFS_POINTER => "fetch the file itself with \"git lfs pull\"",
        HTML => "the download failed; download the file again",
        JSON => "give the folder that holds it",
        _ => "give the .safetensors file that the model was trained into",
    };
    Some(help.into())
}
