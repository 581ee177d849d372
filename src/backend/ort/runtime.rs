//! Loading ONNX Runtime, once per process. It is not linked: `libonnxruntime` comes with the Python package
//! `onnxruntime`.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ort::environment::{Environment, GlobalThreadPoolOptions};
use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::SessionBuilder;

use super::door::version_of;
use crate::backend::cut_off::cut_off;
use crate::backend::guard::guarded;
use crate::backend::libraries::find_onnxruntime;
use crate::backend::runtime_library::said_of;
use crate::backend::{BackendError, BackendKind, OrtOptions, RuntimeLibrary};

/// ONNX Runtime, loaded.
#[derive(Debug, Clone)]
pub struct OrtRuntime {
    path: PathBuf,
    version: String,
}

impl OrtRuntime {
    /// Library that was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version that the library says it is, such as `1.31.1`; else what it says of its build.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What builds a session with the threads that `options` say.
    ///
    /// Threads look for work for tens of milliseconds after a call, and those of a second session would take processors
    /// from the first for so long: sessions share the threads of their environment, of which there is one.
    pub(super) fn session_builder(&self, options: &OrtOptions) -> Result<SessionBuilder, ort::Error> {
        let OrtOptions { threads, own_threads, .. } = *options;
        static ENVIRONMENT: Mutex<Option<(Environment, Option<usize>)>> = Mutex::new(None);
        let mut environment = ENVIRONMENT.lock().unwrap_or_else(PoisonError::into_inner);
        let (environment, shared) = match environment.as_ref() {
            Some(found) => found,
            None => environment.insert((start(threads)?, threads)),
        };
        let builder = Session::builder(environment)?;
        Ok(match threads {
            _ if threads == *shared && !own_threads => builder,
            Some(threads) => builder.with_independent_thread_pool()?.with_intra_threads(threads)?,
            None => builder.with_independent_thread_pool()?,
        })
    }
}

fn start(threads: Option<usize>) -> Result<Environment, ort::Error> {
    // Nothing runs nodes beside each other.
    let pool = GlobalThreadPoolOptions::default().with_inter_threads(1)?.with_intra_threads(threads.unwrap_or(0))?;
    let environment =
        ort::init().with_name("moa-export").with_telemetry(false).with_global_thread_pool(pool).build()?;
    environment.set_log_level(LogLevel::Fatal);
    Ok(environment)
}

/// ONNX Runtime; found and loaded on the first call.
///
/// # Errors
///
/// Where it is missing, too old, or no ONNX Runtime.
pub fn load_onnxruntime() -> Result<OrtRuntime, BackendError> {
    static LOADED: Mutex<Option<OrtRuntime>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = loaded.as_ref() {
        return Ok(runtime.clone());
    }
    let path = find_onnxruntime()?;
    let runtime = guarded(BackendKind::Ort.name(), "load ONNX Runtime", || load(&path))?;
    *loaded = Some(runtime.clone());
    Ok(runtime)
}

fn load(path: &Path) -> Result<OrtRuntime, BackendError> {
    let needed = || format!("ONNX Runtime 1.{} or newer", ort::MINOR_VERSION);
    let unusable = |why| BackendError::RuntimeUnusable { library: RuntimeLibrary::OnnxRuntime, path: path.into(), why };
    if let Some(why) = cut_off(path) {
        return Err(unusable(why));
    }
    ort::init_from(path).map_err(|error| match error {
        ort::LoadDynamicError::BadVersion { version_str, .. } => {
            BackendError::RuntimeTooOld { found: version_str, needed: needed() }
        }
        ort::LoadDynamicError::MissingApi { path } => BackendError::RuntimeUnknown { path, needed: needed() },
        ort::LoadDynamicError::Dlopen { error, .. } => unusable(said_of(path, &error)),
        error => unusable(error.to_string()),
    })?;
    Ok(OrtRuntime { path: path.to_owned(), version: version_of(path).unwrap_or_else(|| ort::info().to_owned()) })
}
