//! What to do with a file of another kind, and commands about it.

use std::path::Path;

use crate::{file_kind::FileKind, shell::path_word};

/// How to come from the file `file` of such a kind to a supported one.
pub(super) fn help(kind: FileKind, file: &str) -> Option<String> {
    let help = match kind {
        FileKind::Pickle => return Some(saved_again("sys, pickle", r#"pickle.load(open(sys.argv[1], "rb"))"#, file)),
        FileKind::LegacyTorch => {
            let loaded = r#"torch.load(sys.argv[1], map_location="cpu", weights_only=False)"#;
            return Some(saved_again("sys", loaded, file));
        }
        FileKind::TorchScript => {
            let weights = r#"torch.jit.load(sys.argv[1], map_location="cpu").state_dict()"#;
            return Some(format!("save its state_dict(), {}", saved_again("sys", weights, file)));
        }
        FileKind::Tar => "unpack it, and give the file or folder in it",
        FileKind::LfsPointer => "fetch the file itself with \"git lfs pull\"",
        FileKind::Html => "the download failed; download the file again",
        FileKind::Json => "give the folder that holds it",
        FileKind::Ort | FileKind::Onnx => {
            "an exported model is no checkpoint: give the folder or file that was trained"
        }
        _ => "give the .safetensors file that the model was trained into",
    };
    Some(help.into())
}

/// How to save the tensors that lie under the key `part` of a dictionary in the PyTorch file `file`.
pub(super) fn help_with_part(file: &str, part: &str) -> String {
    let is_plain = part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'));
    if !is_plain {
        return "save the dictionary of tensors in it alone, beside the model's config.json".into();
    }
    let loaded = format!(r#"torch.load(sys.argv[1], map_location="cpu", weights_only=False)["{part}"]"#);
    format!("save its {part:?} alone, beside the model's config.json, {}", saved_again("sys", &loaded, file))
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
    path_word(Path::new(shown))
}
