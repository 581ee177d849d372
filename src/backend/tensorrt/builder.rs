//! From a model to a plan and its lock.

use std::{io, path::Path};

use prost::Message;

use super::{
    EngineError, Installation, Trust,
    door::{BuildRequest, Engine, OnProgress},
    error::EngineStage,
};
use crate::{
    digest::{sha256, sha256_of_file},
    engine::{
        BuildOptions, Cache, Cached, Dtype, LockError, ModelHash, PlanLock, PrepareError, Recipe, ShapeProfile,
        dtype_of, must_be, prepare,
    },
    files::{name_of, read_whole},
    onnx::OnnxFile,
};

/// A plan with its lock.
#[derive(Debug)]
pub struct Plan {
    /// The bytes that TensorRT loads.
    pub bytes: Vec<u8>,
    /// What they were built from.
    pub lock: PlanLock,
    /// Whether it was not built, but taken from a cache of engines.
    pub from_cache: bool,
    /// The timing cache as the build left it, where there was a build.
    pub timing_cache: Option<Vec<u8>>,
}

/// How a plan is made.
#[derive(Clone, Default)]
pub struct PlanRequest<'a> {
    /// Shapes that it serves, one optimisation profile after the other.
    pub profiles: Vec<ShapeProfile>,
    /// How TensorRT builds.
    pub options: BuildOptions,
    /// The timing cache of an earlier build.
    pub timing_cache: Option<&'a [u8]>,
    /// Where engines are kept.
    pub cache: Option<&'a Cache>,
    /// Is told the steps of the build (phase, step, steps), and says whether it is to end.
    pub progress: Option<OnProgress<'a>>,
    /// Is told what the user should know and what is no error.
    pub notice: Option<&'a dyn Fn(&str)>,
}

/// A model as TensorRT is given it.
pub(super) struct Given {
    bytes: Vec<u8>,
    pub(super) hash: ModelHash,
    pub(super) dtype: Dtype,
}

impl Installation {
    /// The model as this TensorRT is given it.
    pub(super) fn given(&self, file: &OnnxFile) -> Result<Given, EngineError> {
        let dtype = dtype_of(file)?;
        must_be(self.device(), None, self.release(), dtype)?;
        let bytes = match prepare(file.model()) {
            Ok(prepared) => file.with_model(prepared.model)?.model().encode_to_vec(),
            Err(PrepareError::NothingToDo | PrepareError::Done { .. }) => file.model().encode_to_vec(),
            Err(error) => return Err(error.into()),
        };
        let mut data = Vec::new();
        for path in file.data_files() {
            let name = name_of(&path);
            let hash = sha256_of_file(&path).map_err(|source| EngineError::Io { path: path.clone(), source })?;
            data.push((name, hash.0));
        }
        let hash = ModelHash { sha256: sha256(&bytes), data };
        Ok(Given { bytes, hash, dtype })
    }

    /// The plan of a model: out of the cache where it is there, else built, which takes minutes.
    ///
    /// # Errors
    ///
    /// Where the model does not fit this GPU or release, where others may write to the cache, where TensorRT refuses
    /// the model, and where the build fails.
    pub fn plan(&self, file: &OnnxFile, request: &PlanRequest<'_>) -> Result<Plan, EngineError> {
        let given = self.given(file)?;
        let recipe = Recipe {
            model: given.hash.clone(),
            plugin: self.plugin().clone(),
            machine: self.machine().clone(),
            dtype: given.dtype.name().to_owned(),
            profiles: request.profiles.clone(),
            options: request.options,
        };
        let say = |text: &str| request.notice.map_or((), |notice| notice(text));
        match request.cache.map(|cache| cache.find(&recipe.key())).transpose()? {
            Some(Cached::Plan(bytes, lock)) => {
                let lock = self.of_this_build(*lock, file);
                return Ok(Plan { bytes, lock, from_cache: true, timing_cache: None });
            }
            Some(Cached::Damaged(why)) => say(&format!("the cached engine is not used and is built anew: {why}")),
            Some(Cached::Nothing) | None => {}
        }
        let plan = self.build(file, &given, recipe, request)?;
        if let Some(Err(error)) = request.cache.map(|cache| cache.keep(&plan.bytes, &plan.lock)) {
            say(&format!("the engine is not kept in the cache: {error}"));
        }
        Ok(plan)
    }

    fn build(
        &self,
        file: &OnnxFile,
        given: &Given,
        recipe: Recipe,
        request: &PlanRequest<'_>,
    ) -> Result<Plan, EngineError> {
        let path = std::path::absolute(file.path()).unwrap_or_else(|_| file.path().to_path_buf());
        let built = self.tensorrt.build(&BuildRequest {
            model: &given.bytes,
            model_path: file.has_external_data().then_some(path.as_path()),
            profiles: &request.profiles,
            tf32: request.options.tf32,
            workspace_bytes: request.options.workspace_bytes,
            optimization_level: request.options.optimization_level,
            timing_cache: request.timing_cache,
            progress: request.progress.filter(|_| self.tells_progress()),
        });
        let built = built.map_err(|error| EngineError::of(EngineStage::Build, error))?;
        let mut lock = self.of_this_build(PlanLock::new(recipe, &built.plan), file);
        // A plan that does not load is no plan; its layers are told as far as TensorRT tells them.
        let engine = self.engine(&built.plan)?;
        lock.layers = engine.layers().ok().and_then(|text| serde_json::from_str(&text).ok());
        Ok(Plan { bytes: built.plan, lock, from_cache: false, timing_cache: Some(built.timing_cache) })
    }

    /// The lock with what a user's file and this machine are, which decide no plan.
    fn of_this_build(&self, lock: PlanLock, file: &OnnxFile) -> PlanLock {
        let hash = || sha256_of_file(file.path()).ok().map(|(hash, _)| hash);
        let source_sha256 = if file.is_modified() { None } else { hash() };
        PlanLock { source_sha256, cuda_driver: Some(self.driver()), ..lock }
    }

    /// Loads a plan whose lock was checked.
    pub(super) fn engine(&self, plan: &[u8]) -> Result<Engine, EngineError> {
        self.tensorrt.engine(plan).map_err(|error| EngineError::of(EngineStage::LoadPlan, error))
    }

    /// Reads the plan at `path`. Unless the user vouches for it, its lock must say that it is whole and fits what is
    /// here.
    ///
    /// # Errors
    ///
    /// Where it cannot be read, and where the lock is missing or says otherwise.
    pub fn read_plan(&self, path: &Path, trust: Trust) -> Result<(Vec<u8>, Option<PlanLock>), EngineError> {
        let bytes = read_whole(path).map_err(|source| EngineError::Io { path: path.to_path_buf(), source })?;
        let of_lock = |source: io::Error| match (source.kind(), PlanLock::path_of(path)) {
            (io::ErrorKind::FileTooLarge, lock) => LockError::Malformed { lock, why: source.to_string() }.into(),
            (_, path) => EngineError::Io { path, source },
        };
        let lock = match PlanLock::bytes_beside(path) {
            Err(_) if trust == Trust::UserVouches => None,
            read => read.map_err(of_lock)?,
        };
        let locked = PlanLock::read(path, lock.as_deref()).and_then(|lock| {
            lock.must_hold(path, &bytes)?;
            lock.must_fit(path, self.machine(), self.plugin())?;
            Ok(lock)
        });
        match locked {
            Ok(lock) => Ok((bytes, Some(lock))),
            Err(_) if trust == Trust::UserVouches => Ok((bytes, None)),
            Err(error) => Err(error.into()),
        }
    }
}
