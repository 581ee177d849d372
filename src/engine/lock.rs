//! The lock of a plan: what it was built from, and what must be at hand to load it.
//!
//! A plan holds machine code for one GPU and one release of TensorRT, and names no version of our plugin. The lock is
//! the file beside it that does. It tells whether a plan is whole and fits; it does not tell who made it.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::ShapeProfile;
use crate::{
    digest::sha256,
    files::{LONGEST_JSON, read_at_most},
};

/// Version of the lock's format.
pub const LOCK_FORMAT: u32 = 3;

/// What NVIDIA's documentation says of plans, in substance.
pub const PLAN_WARNING: &str = "a plan is executable code: NVIDIA's documentation says that loading one from a source \
    that is not trusted is the same as running untrusted native code, on the GPU and on the host";

/// Everything that decides what a plan is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// The model that TensorRT was given.
    pub model: ModelHash,
    /// What computes our operators.
    pub plugin: PluginHash,
    /// What built it.
    pub machine: Machine,
    /// Type of weights and activations, as users type it.
    pub dtype: String,
    /// Shapes that it serves, one optimisation profile after the other.
    pub profiles: Vec<ShapeProfile>,
    /// How it was built.
    pub options: BuildOptions,
}

/// A model by its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelHash {
    /// SHA-256 of the model as TensorRT was given it, after `prepare`.
    pub sha256: String,
    /// Name and SHA-256 of every file of weights beside it.
    pub data: Vec<(String, String)>,
}

/// The libraries that compute our operators.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginHash {
    /// SHA-256 of `libmoa_tensorrt`.
    pub library_sha256: String,
    /// SHA-256 of `libmoa_cuda`, where it was found.
    pub kernels_sha256: Option<String>,
    /// SHA-256 of the archive that `MOA_CUDA_KERNELS` names, where it names one.
    pub archive_sha256: Option<String>,
    /// Variables of the environment that decide how the kernels plan, and so how much memory a plan grants them.
    pub switches: BTreeMap<String, String>,
}

/// What an engine is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Version of TensorRT, such as `10.4.0.26`.
    pub tensorrt: String,
    /// Name of the GPU.
    pub device: String,
    /// Its compute capability, such as `9.0`.
    pub compute_capability: String,
}

/// What the user may say about a build.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildOptions {
    /// Whether products of f32 may round their factors to TF32.
    pub tf32: bool,
    /// Most bytes that TensorRT's own layers may use while they run; as many as the device has where absent.
    pub workspace_bytes: Option<u64>,
    /// Effort of the search for the fastest kernels, 1 to 5; TensorRT's own choice where absent.
    pub optimization_level: Option<u32>,
}

impl Recipe {
    /// SHA-256 of all of it: the name of the engine in a cache.
    pub fn key(&self) -> String {
        // Structures of strings and numbers always have a JSON text, and it keeps the order of their fields.
        sha256(&serde_json::to_vec(self).unwrap_or_default())
    }
}

/// Follows the name of a plan in that of its lock.
pub const LOCK: &str = ".lock.json";

/// The content of `PLAN.lock.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanLock {
    /// [`LOCK_FORMAT`].
    pub format: u32,
    /// The program that wrote it.
    pub program: String,
    /// SHA-256 of the plan.
    pub plan_sha256: String,
    /// Bytes of the plan.
    pub plan_bytes: u64,
    /// [`Recipe::key`].
    pub key: String,
    /// What decides the plan.
    pub recipe: Recipe,
    /// SHA-256 of the file that the user named, before `prepare`.
    pub source_sha256: Option<String>,
    /// Version of the CUDA driver that was there.
    pub cuda_driver: Option<String>,
    /// What TensorRT tells of the engine's layers and tactics, where it does.
    pub layers: Option<serde_json::Value>,
}

/// Why a plan is not loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// There is no lock.
    #[error("{} is missing: nothing says what {} is and what it needs", lock.display(), plan.display())]
    Missing {
        /// The plan.
        plan: PathBuf,
        /// Where its lock should be.
        lock: PathBuf,
    },
    /// The lock is no lock.
    #[error("{} is no lock of a plan: {why}", lock.display())]
    Malformed {
        /// The lock.
        lock: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The plan is not the one that was locked.
    #[error("{}: {what} is {found}, and its lock says {expected}", plan.display())]
    OtherPlan {
        /// The plan.
        plan: PathBuf,
        /// What differs.
        what: &'static str,
        /// What is here.
        found: String,
        /// What the lock says.
        expected: String,
    },
    /// The plan was built with other libraries, or for another GPU.
    #[error("{}: {what} here is {found}, and the plan was built with {expected}", plan.display())]
    OtherMachine {
        /// The plan.
        plan: PathBuf,
        /// What differs.
        what: &'static str,
        /// What is here.
        found: String,
        /// What the lock says.
        expected: String,
    },
}

impl PlanLock {
    /// The lock of `plan`.
    pub fn new(recipe: Recipe, plan: &[u8]) -> Self {
        Self {
            format: LOCK_FORMAT,
            program: concat!("moa-export ", env!("CARGO_PKG_VERSION")).to_owned(),
            plan_sha256: sha256(plan),
            plan_bytes: plan.len() as u64,
            key: recipe.key(),
            recipe,
            source_sha256: None,
            cuda_driver: None,
            layers: None,
        }
    }

    /// Where the lock of the plan at `plan` lies.
    pub fn path_of(plan: &Path) -> PathBuf {
        let mut name = plan.as_os_str().to_owned();
        name.push(LOCK);
        name.into()
    }

    /// The lock file of the plan at `plan`, unread; `None` where there is none.
    ///
    /// # Errors
    ///
    /// Where it is there and cannot be read, or is larger than any lock.
    pub fn bytes_beside(plan: &Path) -> io::Result<Option<Vec<u8>>> {
        match read_at_most(&Self::path_of(plan), LONGEST_JSON) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    /// Its file.
    pub fn to_json(&self) -> String {
        // As above: it always has a text.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Reads the lock of the plan at `plan` from its bytes, absent where there is no file.
    ///
    /// # Errors
    ///
    /// Where it is absent, no lock, or its parts contradict each other.
    pub fn read(plan: &Path, bytes: Option<&[u8]>) -> Result<Self, LockError> {
        let lock = Self::path_of(plan);
        let bytes = bytes.ok_or_else(|| LockError::Missing { plan: plan.into(), lock: lock.clone() })?;
        let malformed = |why: String| LockError::Malformed { lock: lock.clone(), why };
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let of_serde = |error: serde_json::Error| malformed(error.to_string());
        let Format { format } = serde_json::from_slice(bytes).map_err(of_serde)?;
        if format != LOCK_FORMAT {
            return Err(malformed(format!("its format is {format}, and this program reads {LOCK_FORMAT}")));
        }
        let read: Self = serde_json::from_slice(bytes).map_err(of_serde)?;
        if read.key != read.recipe.key() {
            return Err(malformed("its key is not that of its recipe: it was edited".into()));
        }
        Ok(read)
    }

    /// Whether `plan` at `path` is the one that was locked.
    ///
    /// # Errors
    ///
    /// [`LockError::OtherPlan`].
    pub fn must_hold(&self, path: &Path, plan: &[u8]) -> Result<(), LockError> {
        let bytes = |count: u64| format!("{count} bytes long");
        let differing = first_difference([
            ("the plan", bytes(plan.len() as u64), bytes(self.plan_bytes)),
            ("the SHA-256 of the plan", sha256(plan), self.plan_sha256.clone()),
        ]);
        let plan = path.to_path_buf();
        differing.map_or(Ok(()), |(what, found, expected)| Err(LockError::OtherPlan { plan, what, found, expected }))
    }

    /// Whether the plan at `path` fits what is at hand.
    ///
    /// # Errors
    ///
    /// [`LockError::OtherMachine`] with the first thing that is different.
    pub fn must_fit(&self, path: &Path, machine: &Machine, plugin: &PluginHash) -> Result<(), LockError> {
        let facts = |machine: &Machine, plugin: &PluginHash| {
            let shown = |hash: &Option<String>| hash.clone().unwrap_or_else(|| "not there".into());
            [
                format!("{} ({})", machine.device, machine.compute_capability),
                machine.tensorrt.clone(),
                plugin.library_sha256.clone(),
                shown(&plugin.kernels_sha256),
                shown(&plugin.archive_sha256),
                shown_switches(&plugin.switches),
            ]
        };
        let names = [
            "the GPU",
            "TensorRT",
            "the SHA-256 of libmoa_tensorrt",
            "the SHA-256 of libmoa_cuda",
            "the SHA-256 of the kernel archive",
            "the environment of the kernels",
        ];
        let [found, built] = [facts(machine, plugin), facts(&self.recipe.machine, &self.recipe.plugin)];
        let pairs = names.into_iter().zip(found).zip(built).map(|((what, found), built)| (what, found, built));
        let plan = path.to_path_buf();
        first_difference(pairs)
            .map_or(Ok(()), |(what, found, expected)| Err(LockError::OtherMachine { plan, what, found, expected }))
    }
}

fn shown_switches(switches: &BTreeMap<String, String>) -> String {
    let pairs: Vec<_> = switches.iter().map(|(name, value)| format!("{name}={value}")).collect();
    if pairs.is_empty() { "no switch".to_owned() } else { pairs.join(" ") }
}

type Fact = (&'static str, String, String);

fn first_difference(facts: impl IntoIterator<Item = Fact>) -> Option<Fact> {
    facts.into_iter().find(|(_, found, expected)| found != expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::InputShapes;

    fn recipe() -> Recipe {
        Recipe {
            model: ModelHash { sha256: "m".into(), data: vec![("m.data".into(), "d".into())] },
            plugin: PluginHash {
                library_sha256: "p".into(),
                kernels_sha256: Some("k".into()),
                ..PluginHash::default()
            },
            machine: Machine {
                tensorrt: "10.4.0.26".into(),
                device: "NVIDIA H200".into(),
                compute_capability: "9.0".into(),
            },
            dtype: "fp16".into(),
            profiles: vec![vec![InputShapes { name: "x".into(), min: vec![1], opt: vec![2], max: vec![3] }]],
            options: BuildOptions::default(),
        }
    }

    fn plan() -> &'static Path {
        Path::new("m.plan")
    }

    #[test]
    fn a_lock_survives_its_file() {
        let lock = PlanLock::new(recipe(), b"plan");
        let read = PlanLock::read(plan(), Some(lock.to_json().as_bytes())).unwrap();
        assert_eq!(read, lock);
        assert_eq!(PlanLock::path_of(Path::new("a/m.plan")), Path::new("a/m.plan.lock.json"));
        read.must_hold(plan(), b"plan").unwrap();
        read.must_fit(plan(), &recipe().machine, &recipe().plugin).unwrap();
    }

    #[test]
    fn everything_that_decides_a_plan_is_in_its_key() {
        let edits: [Edit; 15] = [
            |recipe| recipe.model.sha256.push('x'),
            |recipe| recipe.model.data[0].1.push('x'),
            |recipe| recipe.plugin.library_sha256.push('x'),
            |recipe| recipe.plugin.kernels_sha256 = None,
            |recipe| recipe.plugin.archive_sha256 = Some("x".into()),
            |recipe| recipe.plugin.switches.extend([("MOA_CUDA_WGMMA".into(), "0".into())]),
            |recipe| recipe.machine.tensorrt.push('x'),
            |recipe| recipe.machine.device.push('x'),
            |recipe| recipe.machine.compute_capability.push('x'),
            |recipe| recipe.dtype.push('x'),
            |recipe| recipe.profiles[0][0].opt[0] = 3,
            |recipe| recipe.profiles.push(recipe.profiles[0].clone()),
            |recipe| recipe.options.tf32 = true,
            |recipe| recipe.options.workspace_bytes = Some(1),
            |recipe| recipe.options.optimization_level = Some(1),
        ];
        let keys = edits.map(|edit| {
            let mut edited = recipe();
            edit(&mut edited);
            edited.key()
        });
        let mut all = [&keys[..], &[recipe().key()]].concat();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), keys.len() + 1);
    }

    type Edit = fn(&mut Recipe);

    #[test]
    fn what_differs_is_named() {
        let lock = PlanLock::new(recipe(), b"plan");
        let text = |result: Result<(), LockError>| result.unwrap_err().to_string();
        let shorter = text(lock.must_hold(plan(), b"pla"));
        assert_eq!(shorter, "m.plan: the plan is 3 bytes long, and its lock says 4 bytes long");
        assert!(text(lock.must_hold(plan(), b"plam")).starts_with("m.plan: the SHA-256 of the plan is "));
        let edits: [(Edit, &str); 6] = [
            (
                |recipe| recipe.machine.device = "NVIDIA A100".into(),
                "the GPU here is NVIDIA A100 (9.0), and the plan was built with NVIDIA H200 (9.0)",
            ),
            (
                |recipe| recipe.machine.tensorrt = "10.5.0.1".into(),
                "TensorRT here is 10.5.0.1, and the plan was built with 10.4.0.26",
            ),
            (
                |recipe| recipe.plugin.library_sha256 = "q".into(),
                "libmoa_tensorrt here is q, and the plan was built with p",
            ),
            (
                |recipe| recipe.plugin.kernels_sha256 = None,
                "libmoa_cuda here is not there, and the plan was built with k",
            ),
            (
                |recipe| recipe.plugin.archive_sha256 = Some("a".into()),
                "archive here is a, and the plan was built with not there",
            ),
            (
                |recipe| recipe.plugin.switches.extend([("MOA_CUDA_WGMMA".into(), "0".into())]),
                "the kernels here is MOA_CUDA_WGMMA=0, and the plan was built with no switch",
            ),
        ];
        for (edit, expected) in edits {
            let mut here = recipe();
            edit(&mut here);
            let found = text(lock.must_fit(plan(), &here.machine, &here.plugin));
            assert!(found.contains(expected), "{expected}: {found}");
        }
    }

    #[test]
    fn locks_that_are_none_are_refused() {
        let error = |bytes: Option<&[u8]>| PlanLock::read(plan(), bytes).unwrap_err().to_string();
        let missing = error(None);
        assert!(missing.starts_with("m.plan.lock.json is missing: nothing says what m.plan is"), "{missing}");
        assert!(error(Some(b"{")).starts_with("m.plan.lock.json is no lock of a plan: EOF"));
        let lock = PlanLock::new(recipe(), b"plan");
        let newer = PlanLock { format: LOCK_FORMAT + 1, ..lock.clone() };
        assert!(error(Some(newer.to_json().as_bytes())).contains("its format is 4, and this program reads 3"));
        // The format is what a lock of another one is told by, whatever else is in it.
        assert!(error(Some(br#"{"format": 1}"#)).contains("its format is 1, and this program reads 3"));
        let edited = lock.to_json().replace("NVIDIA H200", "NVIDIA A100");
        assert!(error(Some(edited.as_bytes())).contains("it was edited"));
    }
}
