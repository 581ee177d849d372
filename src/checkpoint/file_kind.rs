//! Recognises other files by their first bytes, so that a message can name them.

use std::path::Path;

/// Bytes that [`recognise`] wants to see.
pub(super) const PREFIX: usize = 512;

/// An archive that torch.save did not write.
pub(super) const ZIP: &str = "a zip archive";
/// A model compiled by `torch.jit`.
pub(super) const PROGRAM: &str = "a TorchScript archive";
/// No safetensors file is one: the length of its header has bytes of zero.
pub(super) const TEXT: &str = "a text";
const TAR: &str = "a tar archive";
const LEGACY: &str = "a PyTorch checkpoint of the old format (a Python pickle, no zip archive)";
const PICKLE: &str = "a Python pickle";
const LFS_POINTER: &str = "a Git LFS pointer";
const HTML: &str = "an HTML page";
const JSON: &str = "a JSON text";

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
pub(super) fn recognise(prefix: &[u8]) -> Option<&'static str> {
    if is_zip(prefix) {
        return Some(ZIP);
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
        return Some(if prefix.get(2..14) == Some(LEGACY_MAGIC) { LEGACY } else { PICKLE });
    }
    if prefix.get(257..262) == Some(b"ustar") {
        return Some(TAR);
    }
    MAGICS.iter().find(|(magic, _)| prefix.starts_with(magic)).map(|(_, kind)| *kind)
}

/// Whether a file starts with text in UTF-8, whose last character may be cut.
pub(super) fn is_text(prefix: &[u8]) -> bool {
    let text = match std::str::from_utf8(prefix) {
        Ok(text) => text,
        Err(error) if error.error_len().is_some() => return false,
        Err(error) => std::str::from_utf8(prefix.get(..error.valid_up_to()).unwrap_or_default()).unwrap_or_default(),
    };
    !text.is_empty() && text.chars().all(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t'))
}

/// Whether a file is a zip archive.
pub(super) fn is_zip(prefix: &[u8]) -> bool {
    prefix.starts_with(b"PK\x03\x04")
}

/// Whether a file may be a safetensors file: an object of JSON after its length.
pub(super) fn is_safetensors(prefix: &[u8]) -> bool {
    prefix.get(8) == Some(&b'{')
}

/// Whether the start of a zip archive names the pickle of a PyTorch file.
pub(super) fn names_pickle(prefix: &[u8]) -> bool {
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

/// How to come from the file `file` of such a kind to a supported one.
pub(super) fn help(kind: &str, file: &str) -> Option<String> {
    let help = match kind {
        PICKLE => return Some(saved_again("sys, pickle", r#"pickle.load(open(sys.argv[1], "rb"))"#, file)),
        LEGACY => {
            let loaded = r#"torch.load(sys.argv[1], map_location="cpu", weights_only=False)"#;
            return Some(saved_again("sys", loaded, file));
        }
        PROGRAM => {
            let weights = r#"torch.jit.load(sys.argv[1], map_location="cpu").state_dict()"#;
            return Some(format!("save its state_dict(), {}", saved_again("sys", weights, file)));
        }
        TAR => "unpack it, and give the file or folder in it",
        LFS_POINTER => "fetch the file itself with \"git lfs pull\"",
        HTML => "the download failed; download the file again",
        JSON => "give the folder that holds it",
        _ => "give the .safetensors file that the model was trained into",
    };
    Some(help.into())
}

/// The command that loads `file` in Python, which executes what it says, and saves it as `torch.save` does today; a
/// shard keeps the name that its index knows.
fn saved_again(modules: &str, loaded: &str, file: &str) -> String {
    let (Some(old), Some(new)) = (shell_word(file), shell_word(&format!("{file}.new.pt"))) else {
        return format!(
            "where you trust the file, for this runs code in it: load it in Python and save it with torch.save; {NO_COMMAND}"
        );
    };
    let renamed = if super::is_shard(Path::new(file)) { format!(" && mv {new} {old}") } else { String::new() };
    format!(
        "where you trust the file, for this runs code in it: python3 -c 'import {modules}, torch; \
         torch.save({loaded}, sys.argv[2])' {old} {new}{renamed}"
    )
}

/// Said where [`shell_word`] gives none.
pub(super) const NO_COMMAND: &str = "no command is given, since its name holds characters that are shown otherwise";

/// A path as a shell takes it for one word and no option; `None` where what messages show of it may be another path.
pub(super) fn shell_word(shown: &str) -> Option<String> {
    if shown.contains(['\\', char::REPLACEMENT_CHARACTER]) {
        return None;
    }
    let path = if shown.starts_with('-') { format!("./{shown}") } else { shown.to_owned() };
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '/' | '+' | '=' | ',' | ':' | '@');
    Some(if path.chars().all(plain) { path } else { format!("'{}'", path.replace('\'', r"'\''")) })
}
