//! What the receipts of commands share: runtimes and libraries that compute, and facts as people read them.

use std::path::Path;

use jiff::Timestamp;

use crate::{
    backend::{self, Backend, BackendKind, Survey},
    engine::Device,
    provenance::{Library, ModelFile, hash_file},
};

const ONNX_RUNTIME: &str = "ONNX Runtime";

/// Those of `backends`, as far as they are there; `library` is the operator library where the user names one.
pub(super) fn libraries(backends: &[Box<dyn Backend>], library: Option<&Path>) -> Vec<Library> {
    let mut libraries = Vec::new();
    let named = |kind: BackendKind| backends.iter().any(|backend| backend.kind() == kind);
    #[cfg(feature = "ort")]
    if named(BackendKind::Ort) || named(BackendKind::OrtFunction) {
        libraries.extend(backend::load_onnxruntime().ok().map(|runtime| Library {
            name: ONNX_RUNTIME.into(),
            version: runtime.version().to_owned(),
            sha256: hash(runtime.path()),
        }));
    }
    if named(BackendKind::Ort) {
        let found = backend::find_operator_library(library).ok();
        libraries.extend(found.and_then(|path| hash(&path)).map(|sha256| Library {
            name: "libmoa_ort".into(),
            version: sha256.get(..12).unwrap_or_default().to_owned(),
            sha256: Some(sha256),
        }));
    }
    if named(BackendKind::TensorRt) {
        libraries.extend(tensorrt_libraries());
    }
    #[cfg(feature = "tract")]
    if named(BackendKind::Tract) {
        libraries.push(Library { name: "tract".into(), version: backend::TRACT_VERSION.into(), sha256: None });
    }
    libraries
}

/// How many threads ONNX Runtime takes, where it is one of `libraries`.
pub(super) fn threads(asked: Option<usize>, libraries: &[Library]) -> Option<(String, String)> {
    let count = || asked.map_or_else(|| "as many as ONNX Runtime chooses".into(), |count| count.to_string());
    libraries.iter().any(|library| library.name == ONNX_RUNTIME).then(|| ("Threads".to_owned(), count()))
}

/// The widest instructions that the environment lets the operator library use, where it is one of `backends`.
pub(super) fn instructions(backends: &[Box<dyn Backend>]) -> Option<String> {
    where_operators_run(backends, backend::most_instructions())
}

/// How the environment lets the operator library pack large matrices of bf16, where it is one of `backends`.
pub(super) fn packing(backends: &[Box<dyn Backend>]) -> Option<String> {
    where_operators_run(backends, backend::packing_of_weights())
}

/// A choice of the environment for the operator library, where that is one of `backends`.
fn where_operators_run(backends: &[Box<dyn Backend>], choice: Result<Option<&'static str>, String>) -> Option<String> {
    let is_used = backends.iter().any(|backend| backend.kind() == BackendKind::Ort);
    choice.ok().flatten().filter(|_| is_used).map(str::to_owned)
}

fn hash(path: &Path) -> Option<String> {
    hash_file(path).ok().map(|(sha256, _)| sha256)
}

/// TensorRT and our plugin.
fn tensorrt_libraries() -> Vec<Library> {
    let Survey { plugin, built_for, tensorrt, device } = Survey::make();
    let on = |device: Device| format!(" on {}, compute capability {}", device.name, device.capability);
    let place = device.map_or_else(|_| String::new(), on);
    let runtime = tensorrt.ok().map(|(version, path)| Library {
        name: "TensorRT".into(),
        version: version + &place,
        sha256: path.as_deref().and_then(hash),
    });
    let plugin = plugin.ok().zip(built_for.ok()).map(|(path, target)| Library {
        name: "libmoa_tensorrt".into(),
        version: format!("for {target}"),
        sha256: hash(&path),
    });
    runtime.into_iter().chain(plugin).collect()
}

/// A library as a line of facts: its name, and what is known of it.
pub(super) fn fact(library: &Library) -> (String, String) {
    let hash = library.sha256.as_ref().map(|hash| format!(", sha256 {hash}")).unwrap_or_default();
    (library.name.clone(), format!("{}{hash}", library.version))
}

/// What is known of a file beside its name.
pub(super) fn file_fact(file: &ModelFile) -> String {
    format!("{} bytes, sha256 {}", file.bytes, file.sha256)
}

/// Seconds since 1970 as date and time in UTC, by ISO 8601.
pub(super) fn utc(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    time.map_or_else(|| "unknown".into(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(u64::MAX), "unknown");
    }
}
