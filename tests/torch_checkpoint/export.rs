//! The same weights make the same model, whatever file they come from.

use std::{fs, path::Path};

use moa_export::{
    checkpoint::Checkpoint,
    export::{ExportOptions, export},
};
use moa_graphs::TensorDirectory;

use super::data::data;

/// Names and bytes of the exported files.
fn exported(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(checkpoint, None).unwrap();
    let report = export(&checkpoint, folder.path(), &ExportOptions::default()).unwrap();
    let named = |path: &Path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).unwrap());
    report.files.iter().map(|file| named(&file.path)).collect()
}

#[track_caller]
fn assert_same_export(torch: &Path, safetensors: &Path) {
    let (left, right) = (exported(torch), exported(safetensors));
    assert!(!left.is_empty());
    assert_eq!(left.len(), right.len());
    for ((name, bytes), other) in left.iter().zip(&right) {
        assert!((name, bytes) == (&other.0, &other.1), "{name} of {}", torch.display());
    }
}

#[test]
fn fairseq_checkpoints_are_exported_like_their_safetensors() {
    for variant in ["v_ffd_moe", "v_postnorm"] {
        let folder = data("variants").join(variant);
        assert_same_export(&folder.join("checkpoint.pt"), &folder.join("model.safetensors"));
    }
}

#[test]
fn values_are_those_of_the_safetensors() {
    for variant in ["v_ffd_moe", "v_postnorm"] {
        let folder = data("variants").join(variant);
        let torch = Checkpoint::open(&folder.join("checkpoint.pt"), None).unwrap();
        let other = Checkpoint::open(&folder.join("model.safetensors"), None).unwrap();
        for name in other.names() {
            let (left, right) = (torch.tensor(name).unwrap(), other.tensor(name).unwrap());
            assert_eq!((left.shape(), left.stored_type()), (right.shape(), right.stored_type()), "{name}");
            assert_eq!(left.to_f32().unwrap(), right.to_f32().unwrap(), "{name}");
        }
        let tied = torch.tensor("encoder.embed_tokens.weight").unwrap();
        assert_eq!(tied.name(), "decoder.embed_tokens.weight");
    }
}
