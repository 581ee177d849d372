//! Finding ONNX Runtime, TensorRT and the libraries of our operators. Nothing is downloaded.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use moa_schema::{
    ARCHIVE_VARIABLE, CUDA_LIBRARY, CUDA_VARIABLE, INSTRUCTIONS_VARIABLE, MULTIPROCESSORS_VARIABLE, ORT_LIBRARY,
    PACKING_VARIABLE, TENSORRT_LIBRARY, WGMMA_VARIABLE, instructions, is_wgmma_off, library_file, multiprocessors,
    packing,
};

use super::{BackendError, LibraryUse, NamedBy, RuntimeLibrary, cut_off::cut_off, runtime_library::named};
use crate::files::read_whole;

/// Environment variable that names the folder of an installation of TensorRT.
pub const TENSORRT_ROOT: &str = "TENSORRT_ROOT";

/// The Python package that the operator library is installed in by pip.
const OWN_PACKAGE: &str = "moa_export";

/// Prints the file of the Python package without importing it; the current folder is not searched.
const ASK_PYTHON: &str = "import sys; sys.path = [p for p in sys.path if p]; import importlib.util; \
    spec = importlib.util.find_spec(sys.argv[1]); print(spec.origin if spec else '')";

/// A file that was looked for, and every place where it was not.
struct Search {
    looked_in: Vec<String>,
    /// What names the only place.
    named_by: Option<NamedBy>,
}

impl Search {
    const fn new() -> Self {
        Self { looked_in: Vec::new(), named_by: None }
    }

    /// That `library` was found nowhere.
    fn missing(self, library: RuntimeLibrary) -> BackendError {
        BackendError::RuntimeMissing { library, looked_in: self.looked_in, named_by: self.named_by }
    }

    /// The library `path` where it is a file.
    fn file(&mut self, path: PathBuf) -> Option<PathBuf> {
        if path.is_file() {
            return std::path::absolute(&path).ok().or(Some(path));
        }
        let kind = if path.is_dir() { " (a folder)" } else { "" };
        self.looked_in.push(format!("{}{kind}", path.display()));
        None
    }

    /// The library `name`, without what the system puts before and behind it, where it lies in `folder`.
    fn library(&mut self, folder: &Path, name: &str) -> Option<PathBuf> {
        self.file(folder.join(library_file(name)))
    }

    /// The first library in `folder` whose name is that of ONNX Runtime, with or without a version.
    fn runtime_in(&mut self, folder: &Path) -> Option<PathBuf> {
        let mut found: Vec<PathBuf> = fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_str().is_some_and(is_runtime_name))
            .map(|entry| entry.path())
            .filter(|path| path.is_file())
            .collect();
        found.sort();
        if found.is_empty() {
            self.looked_in.push(folder.display().to_string());
        }
        found.into_iter().next()
    }

    /// What the variable of `library` names; an error where it names no file.
    fn variable(&mut self, library: RuntimeLibrary) -> Result<Option<PathBuf>, ()> {
        let name = library.variable();
        let Some(path) = library.named() else {
            self.looked_in.push(format!("{name} (not set)"));
            return Ok(None);
        };
        if let Some(path) = self.file(path) {
            return Ok(Some(path));
        }
        if let Some(place) = self.looked_in.last_mut() {
            *place = format!("{name}={place}");
        }
        self.named_by = Some(NamedBy::Variable);
        Err(())
    }
}

/// `libonnxruntime.so`, `libonnxruntime.so.1.31.1`, `libonnxruntime.1.31.1.dylib` or `onnxruntime.dll`.
fn is_runtime_name(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(env::consts::DLL_PREFIX).and_then(|rest| rest.strip_prefix("onnxruntime"))
    else {
        return false;
    };
    let version = |text: &str| text.chars().all(|c| c.is_ascii_digit() || c == '.');
    let before = rest.strip_suffix(env::consts::DLL_SUFFIX);
    let after = rest.strip_prefix(env::consts::DLL_SUFFIX);
    before.or(after).is_some_and(version)
}

/// Finds `libonnxruntime`: `ORT_DYLIB_PATH`, beside the executable, the active virtual environment, the environment of
/// Python that the program was installed in, `python3`, the system.
///
/// # Errors
///
/// [`BackendError::RuntimeMissing`] with every place that was looked at.
pub fn find_onnxruntime() -> Result<PathBuf, BackendError> {
    let mut search = Search::new();
    match search.variable(RuntimeLibrary::OnnxRuntime) {
        Ok(Some(path)) => return Ok(path),
        Ok(None) => {}
        Err(()) => return Err(search.missing(RuntimeLibrary::OnnxRuntime)),
    }
    let environments =
        virtual_environment_folders("onnxruntime/capi").into_iter().chain(own_folders("onnxruntime/capi"));
    let folders = executable_folder().into_iter().chain(environments);
    let mut found = None;
    for folder in folders {
        found = found.or_else(|| search.runtime_in(&folder));
    }
    found = found.or_else(|| match package_folder("onnxruntime") {
        Some(folder) => search.runtime_in(&folder.join("capi")),
        None => {
            search.looked_in.push(format!("the package onnxruntime of {PYTHON}"));
            None
        }
    });
    for folder in system_folders() {
        found = found.or_else(|| search.runtime_in(&folder));
    }
    found.ok_or_else(|| search.missing(RuntimeLibrary::OnnxRuntime))
}

/// Finds the operator library: `explicit`, `MOA_ORT_LIBRARY`, beside the executable, the Python package `moa_export` of
/// the environment that the program was installed in.
///
/// # Errors
///
/// [`BackendError::RuntimeMissing`] with every place that was looked at.
pub fn find_operator_library(explicit: Option<&Path>) -> Result<PathBuf, BackendError> {
    let mut search = Search::new();
    let found = match explicit {
        Some(path) => {
            search.named_by = Some(NamedBy::Option);
            search.file(path.to_owned())
        }
        None => match search.variable(RuntimeLibrary::Operators(LibraryUse::Run)) {
            Ok(Some(path)) => Some(path),
            Ok(None) => beside_executable(&mut search, ORT_LIBRARY, &["deps", "..", "../lib"]).or_else(|| {
                own_folders(OWN_PACKAGE).into_iter().find_map(|folder| search.library(&folder, ORT_LIBRARY))
            }),
            Err(()) => None,
        },
    };
    found.ok_or_else(|| search.missing(RuntimeLibrary::Operators(LibraryUse::Run)))
}

/// As [`find_operator_library`] without a path, for a library that is copied and not loaded.
///
/// # Errors
///
/// As there, and where the file cannot be read or lacks what ONNX Runtime calls.
pub fn operator_library_to_copy() -> Result<PathBuf, BackendError> {
    let library = RuntimeLibrary::Operators(LibraryUse::Copy);
    let path = find_operator_library(None).map_err(|error| error.with_use(LibraryUse::Copy))?;
    match lacks_entry(&path) {
        Some(why) => Err(BackendError::RuntimeUnusable { library, path, why }),
        None => Ok(path),
    }
}

/// As [`find_operator_library`] without a path, for a library that ONNX Runtime takes: where that is here, it loads the
/// library and has it register its operators, as for a session, which decides the number of threads that sessions of
/// this process share; else the file is looked at.
///
/// # Errors
///
/// As there, and where the file is no operator library.
pub fn operator_library() -> Result<PathBuf, BackendError> {
    let path = find_operator_library(None)?;
    #[cfg(feature = "ort")]
    if let Ok(runtime) = super::load_onnxruntime() {
        super::ort::register(&runtime, &path)?;
        return Ok(path);
    }
    let library = RuntimeLibrary::Operators(LibraryUse::Run);
    match lacks_entry(&path) {
        Some(why) => Err(BackendError::RuntimeUnusable { library, path, why }),
        None => Ok(path),
    }
}

/// Why the file `path` cannot be an operator library, as far as its bytes tell.
fn lacks_entry(path: &Path) -> Option<String> {
    const ENTRY: &[u8] = b"RegisterCustomOps";
    match (read_whole(path), cut_off(path)) {
        (Err(error), _) => Some(error.to_string()),
        (_, Some(why)) => Some(why),
        (Ok(bytes), None) if bytes.windows(ENTRY.len()).any(|name| name == ENTRY) => None,
        (Ok(_), None) => Some("it has no entry RegisterCustomOps".to_owned()),
    }
}

/// Finds the TensorRT plugin: `MOA_TENSORRT_LIBRARY`, beside the executable, where `cargo xtask tensorrt` puts it.
///
/// # Errors
///
/// [`BackendError::RuntimeMissing`] with every place that was looked at.
pub fn find_tensorrt_plugin() -> Result<PathBuf, BackendError> {
    let mut search = Search::new();
    let found = match search.variable(RuntimeLibrary::TensorRtPlugin) {
        Ok(Some(path)) => Some(path),
        Ok(None) => beside_executable(&mut search, TENSORRT_LIBRARY, &["..", "../lib", "../tensorrt"]),
        Err(()) => None,
    };
    found.ok_or_else(|| search.missing(RuntimeLibrary::TensorRtPlugin))
}

/// The library with the CUDA kernels, where the plugin at `plugin` finds it: `MOA_CUDA_LIBRARY`, else beside it.
pub(super) fn find_cuda_kernels(plugin: &Path) -> Option<PathBuf> {
    let beside = || plugin.with_file_name(library_file(CUDA_LIBRARY));
    named(CUDA_VARIABLE).or_else(|| Some(beside())).filter(|path| path.is_file())
}

/// The archive of CUDA kernels that the environment names.
pub(super) fn named_archive() -> Option<PathBuf> {
    named(ARCHIVE_VARIABLE)
}

/// The widest instructions that the environment lets the operator library use, where it says so.
///
/// # Errors
///
/// What is wrong with a value that names no level.
pub fn most_instructions() -> Result<Option<&'static str>, String> {
    instructions(env::var_os(INSTRUCTIONS_VARIABLE).as_deref())
}

/// How the environment lets the operator library pack large matrices of bf16, where it says so.
///
/// # Errors
///
/// What is wrong with a value that names no way.
pub fn packing_of_weights() -> Result<Option<&'static str>, String> {
    packing(env::var_os(PACKING_VARIABLE).as_deref())
}

/// What the environment tells the planner of the CUDA kernels.
pub(super) fn kernel_switches() -> BTreeMap<String, String> {
    acting_switches(|name| env::var_os(name))
}

/// The switches that change plans, each as the planner reads it; a number that it refuses stands as it is.
fn acting_switches(value_of: impl Fn(&str) -> Option<OsString>) -> BTreeMap<String, String> {
    let wgmma = is_wgmma_off(value_of(WGMMA_VARIABLE).as_deref()).then(|| "0".to_owned());
    let given = value_of(MULTIPROCESSORS_VARIABLE);
    let number = match multiprocessors(given.as_deref()) {
        Ok(number) => number.map(|number| number.to_string()),
        Err(_) => given.map(|value| value.to_string_lossy().into_owned()),
    };
    let switches = [(WGMMA_VARIABLE, wgmma), (MULTIPROCESSORS_VARIABLE, number)];
    switches.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// A variable of what TensorRT is run with, but for the plugin, that names what is not there, and what it names.
pub(super) fn misnamed() -> Option<(&'static str, PathBuf)> {
    let files = [CUDA_VARIABLE, ARCHIVE_VARIABLE].map(|name| (name, named(name).filter(|path| !path.is_file())));
    let folder = named(TENSORRT_ROOT).filter(|path| !path.is_dir());
    let mut all = files.into_iter().chain([(TENSORRT_ROOT, folder)]);
    all.find_map(|(name, path)| path.map(|path| (name, path)))
}

/// Whether `TENSORRT_ROOT` names a folder without TensorRT.
pub(super) fn root_lacks_tensorrt() -> bool {
    named(TENSORRT_ROOT).is_some() && !tensorrt_folder().is_some_and(|folder| holds_tensorrt(&folder))
}

/// Python packages that hold TensorRT's libraries; 8.6.0 keeps them in the second one.
const TENSORRT_PACKAGES: [&str; 2] = ["tensorrt_libs", "tensorrt"];

/// The folder of TensorRT's libraries: in `TENSORRT_ROOT`, else in a Python package; `None`: where the loader looks.
pub(super) fn tensorrt_folder() -> Option<PathBuf> {
    if let Some(root) = named(TENSORRT_ROOT) {
        return ["lib", "lib64"].iter().map(|name| root.join(name)).find(|folder| folder.is_dir()).or(Some(root));
    }
    let active = TENSORRT_PACKAGES.into_iter().flat_map(virtual_environment_folders);
    let active = active.chain(TENSORRT_PACKAGES.into_iter().flat_map(own_folders));
    let python = TENSORRT_PACKAGES.into_iter().filter_map(package_folder);
    active.chain(python).find(|folder| holds_tensorrt(folder))
}

/// Whether a library for inference lies in `folder`.
fn holds_tensorrt(folder: &Path) -> bool {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.into_string().ok()).any(|name| {
        let rest = name.strip_prefix(env::consts::DLL_PREFIX).and_then(|rest| rest.strip_prefix("nvinfer"));
        rest.is_some_and(|rest| rest.contains(env::consts::DLL_SUFFIX) && !rest.starts_with("_plugin"))
    })
}

/// The library `name` in the folder of the executable, or in one of `others` as seen from there.
fn beside_executable(search: &mut Search, name: &str, others: &[&str]) -> Option<PathBuf> {
    let folder = executable_folder()?;
    let parent = folder.parent().map(Path::to_owned).unwrap_or_default();
    let place = |other: &&str| match other.strip_prefix("..") {
        Some(inner) => parent.join(inner.trim_start_matches('/')),
        None => folder.join(other),
    };
    // Tests lie in a folder `deps` of the one with the libraries; the folder above any other program is not its own.
    let others = others.iter().filter(|other| **other != ".." || folder.ends_with("deps"));
    let mut folders = std::iter::once(folder.clone()).chain(others.map(place));
    folders.find_map(|folder| search.library(&folder, name))
}

fn executable_folder() -> Option<PathBuf> {
    env::current_exe().ok()?.parent().map(Path::to_owned)
}

/// The folders of a package in the active virtual environment.
fn virtual_environment_folders(package: &str) -> Vec<PathBuf> {
    named("VIRTUAL_ENV").map(|root| environment_folders(&root, package)).unwrap_or_default()
}

/// The folders of a package in the environment of Python that the program was installed in, if it was.
fn own_folders(package: &str) -> Vec<PathBuf> {
    let root = executable_folder().and_then(|folder| folder.parent().map(Path::to_owned));
    root.map(|root| environment_folders(&root, package)).unwrap_or_default()
}

/// The folders of a package below `root`, one for each version of Python; Debian's own Python has packages elsewhere.
fn environment_folders(root: &Path, package: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
    let versions = entries.filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with("py")));
    let mut libraries: Vec<PathBuf> = versions.map(|entry| entry.path()).chain([root.join("Lib")]).collect();
    libraries.sort();
    let places = libraries.iter().flat_map(|folder| ["site-packages", "dist-packages"].map(|name| folder.join(name)));
    places.map(|folder| folder.join(package)).filter(|folder| folder.is_dir()).collect()
}

/// The active Python; on Windows `python3` is a program that offers to install one.
const PYTHON: &str = if cfg!(windows) { "python" } else { "python3" };

/// Folder of a package of the active Python.
fn package_folder(package: &str) -> Option<PathBuf> {
    let output = Command::new(PYTHON)
        .args(["-c", ASK_PYTHON, package])
        .env("PYTHONSAFEPATH", "1")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let origin = String::from_utf8(output.stdout).ok()?;
    Path::new(origin.trim_end()).parent().filter(|folder| folder.is_absolute()).map(Path::to_owned)
}

fn system_folders() -> Vec<PathBuf> {
    let variable = match env::consts::OS {
        "windows" => "PATH",
        "macos" => "DYLD_LIBRARY_PATH",
        _ => "LD_LIBRARY_PATH",
    };
    let searched = env::var_os(variable).unwrap_or_default();
    let mut folders: Vec<PathBuf> = env::split_paths(&searched).filter(|folder| folder.is_absolute()).collect();
    if cfg!(unix) {
        let triple = format!("/usr/lib/{}-linux-gnu", env::consts::ARCH);
        folders.extend(["/usr/local/lib", &triple, "/usr/lib64", "/usr/lib", "/opt/homebrew/lib"].map(PathBuf::from));
        folders.retain(|folder| folder.is_dir());
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_are_recorded_as_they_act() {
        for (wgmma, multiprocessors, expected) in [
            (None, None, ""),
            (Some(""), Some(""), ""),
            (Some("1"), Some("7"), "MOA_CUDA_MULTIPROCESSORS=7"),
            (Some("0"), Some("007"), "MOA_CUDA_MULTIPROCESSORS=7 MOA_CUDA_WGMMA=0"),
            (Some("off"), Some("one"), "MOA_CUDA_MULTIPROCESSORS=one"),
        ] {
            let found = acting_switches(|name| {
                let value = if name == "MOA_CUDA_WGMMA" { wgmma } else { multiprocessors };
                value.map(OsString::from)
            });
            let found: Vec<_> = found.iter().map(|(name, value)| format!("{name}={value}")).collect();
            assert_eq!(found.join(" "), expected, "{wgmma:?} {multiprocessors:?}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn only_the_runtime_itself_is_taken() {
        for name in ["libonnxruntime.so", "libonnxruntime.so.1", "libonnxruntime.so.1.31.1"] {
            assert!(is_runtime_name(name), "{name}");
        }
        for name in
            ["libonnxruntime_providers_shared.so", "libonnxruntime.so.1.bak", "onnxruntime.dll", "libmoa_ort.so"]
        {
            assert!(!is_runtime_name(name), "{name}");
        }
    }
}
