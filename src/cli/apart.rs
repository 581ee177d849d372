//! Files to write that are neither read by the same command nor written twice.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{Failure, output_file::is_stdout};
use crate::{
    checkpoint,
    engine::LOCK,
    file_names::{CHECKPOINT_ENDINGS, CONFIG, DATA, MODEL_ENDINGS, PLAN_ENDINGS},
    files::{folder_of, has_ending},
    onnx::read_model,
    side_files,
};

/// Endings of the files that a model, a checkpoint or an exported folder consists of, where their names are free.
const PARTS: [&[&str]; 4] = [MODEL_ENDINGS, PLAN_ENDINGS, CHECKPOINT_ENDINGS, &["data", "txt"]];

/// Refuses an output that is an input, or one of the files of a folder that is read, or another output; `-` is none of
/// them.
///
/// # Errors
///
/// Which output that is.
pub(super) fn keep_apart<'a>(outputs: &[Option<&Path>], inputs: impl Iterator<Item = &'a Path>) -> Result<(), Failure> {
    let inputs: Vec<_> = inputs.collect();
    let outputs: Vec<_> = outputs.iter().flatten().filter(|path| !is_stdout(path)).collect();
    for (index, output) in outputs.iter().enumerate() {
        if outputs[..index].iter().any(|other| place(other) == place(output)) {
            let message = format!("{} is named twice", output.display());
            return Err(Failure::usage(message, "give every result a file of its own"));
        }
        if inputs.iter().any(|input| is_of(output, input)) {
            let message = format!("{} is read by this command and would be overwritten", output.display());
            let help = "write to another file; it may take that place when the command has ended";
            return Err(Failure::usage(message, help));
        }
    }
    Ok(())
}

/// Where a file is or will be, however its path is spelled.
pub(super) fn place(path: &Path) -> PathBuf {
    let new = || Some(folder_of(path).canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(new).unwrap_or_else(|| path.to_path_buf())
}

/// Whether `output` is the file `input`, lies beside that and is read with it, or is part of what lies in the folder
/// `input`.
fn is_of(output: &Path, input: &Path) -> bool {
    let (output, input) = (place(output), place(input));
    let name = output.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if !input.is_dir() {
        let lies_beside = || output.parent() == input.parent() && output.exists();
        return output == input || lies_beside() && (is_read_with(name, &input) || is_data_of(&output, &input));
    }
    let is_part = || PARTS.iter().any(|endings| has_ending(name, endings)) || is_known(name);
    let is_data = || files_of(&input).iter().any(|file| is_data_of(&output, file));
    output.parent() == Some(&input) && output.exists() && (is_part() || is_data())
}

pub(super) fn files_of(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Whether the model in the file `input` keeps weights in the file `output`, whatever that is called.
pub(super) fn is_data_of(output: &Path, input: &Path) -> bool {
    let reads_data =
        || read_model(input).is_ok_and(|model| model.data_files().iter().any(|data| place(data) == output));
    has_ending(input, MODEL_ENDINGS) && reads_data()
}

/// Names that files beside graphs or checkpoints have wherever they lie.
fn is_known(name: &str) -> bool {
    side_files::names().chain(checkpoint::names()).any(|known| known == name)
}

/// Whether a file called `name` may be read where the file `input` beside it is: data, vocabulary and configuration of
/// a model, the configuration of a checkpoint, or the lock of a plan.
fn is_read_with(name: &str, input: &Path) -> bool {
    let rest = input.file_name().and_then(|input| name.strip_prefix(input.to_str()?));
    let is_dictionary = name.starts_with("dict.") && name.ends_with(".txt");
    match rest {
        Some(DATA | LOCK | "_data") => true,
        _ if has_ending(input, MODEL_ENDINGS) => is_dictionary || side_files::names().any(|known| known == name),
        _ => name == CONFIG,
    }
}
