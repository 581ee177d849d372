//! Engines that were built before, by the hash of what decides them.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

use super::{LockError, PlanLock};
use crate::files::read_whole;
use crate::onnx::{Staging, WriteError};
use crate::scratch::scratch_folder;

const PLAN: &str = "engine.plan";

/// How often an engine is written, where other processes write and remove it at the same time.
const ATTEMPTS: usize = 3;

/// A folder of engines: one folder each, named by [`Recipe::key`](super::Recipe::key), with the plan and its lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    folder: PathBuf,
}

/// What a cache has.
#[derive(Debug)]
pub enum Cached {
    /// The engine.
    Plan(Vec<u8>, Box<PlanLock>),
    /// No such engine.
    Nothing,
    /// An engine that does not match its lock, and why.
    Damaged(String),
}

/// Why a cache is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// Others may write to it.
    #[error("others may write to the cache of engines {} (mode {mode:o}), and what lies there is loaded as code",
        folder.display())]
    Open {
        /// Where it lies.
        folder: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// It is somebody else's.
    #[error("the cache of engines {} belongs to user {owner}, this process to user {own}, and what lies there is \
        loaded as code", folder.display())]
    OtherOwner {
        /// Where it lies.
        folder: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who asks.
        own: u32,
    },
    /// Nobody can tell whose it is.
    #[error("{}: {source}", folder.display())]
    Io {
        /// Where it lies.
        folder: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// An engine cannot be kept.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl CacheError {
    /// What the user can do.
    pub const fn help(&self) -> Option<&'static str> {
        match self {
            Self::Open { .. } => Some(
                "`chmod 700` the folder if you know all that lies in it, else remove it; or give --cache DIR or --no-cache",
            ),
            Self::OtherOwner { .. } => Some("give a folder of your own with --cache, or --no-cache"),
            Self::Io { .. } | Self::Write(_) => None,
        }
    }
}

impl Cache {
    /// The cache in `folder`, which need not be there.
    pub const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The user's own: `moa-export/engines` in `XDG_CACHE_HOME`, else in `.cache` of the home folder; none where
    /// neither is known.
    pub fn of_user() -> Option<Self> {
        let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(Self::new(base.join("moa-export").join("engines")))
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn place(&self, key: &str) -> PathBuf {
        self.folder.join(key)
    }

    /// The engine of `key`.
    ///
    /// # Errors
    ///
    /// Where others may write to the folder.
    pub fn find(&self, key: &str) -> Result<Cached, CacheError> {
        match fs::metadata(&self.folder) {
            Ok(found) => must_be_private(&self.folder, &found)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Cached::Nothing),
            Err(error) => return Ok(Cached::Damaged(format!("{}: {error}", self.folder.display()))),
        }
        Ok(self.look_up(key))
    }

    fn look_up(&self, key: &str) -> Cached {
        let plan = self.place(key).join(PLAN);
        let bytes = match read_whole(&plan) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Cached::Nothing,
            Err(error) => return Cached::Damaged(format!("{}: {error}", plan.display())),
        };
        let found = match PlanLock::bytes_beside(&plan) {
            Ok(found) => found,
            Err(error) => return Cached::Damaged(format!("{}: {error}", PlanLock::path_of(&plan).display())),
        };
        let locked = PlanLock::read(&plan, found.as_deref()).and_then(|lock| {
            lock.must_hold(&plan, &bytes)?;
            Ok(lock)
        });
        match locked {
            Ok(lock) if lock.key == key => Cached::Plan(bytes, Box::new(lock)),
            Ok(_) => Cached::Damaged(format!("{} is the engine of another model", plan.display())),
            Err(error) => Cached::Damaged(LockError::to_string(&error)),
        }
    }

    /// Keeps an engine; one that is there and whole stays, one that is damaged goes.
    ///
    /// The folder of an engine comes and goes by one rename, so plan and lock are always of one build, however many
    /// processes keep the same engine: builds of one recipe differ in their bytes.
    ///
    /// # Errors
    ///
    /// Where it cannot be written, and where others may write to the folder.
    pub fn keep(&self, plan: &[u8], lock: &PlanLock) -> Result<(), CacheError> {
        let of_folder = |source| WriteError::Io { path: self.folder.clone(), source };
        self.make_folder().map_err(of_folder)?;
        must_be_private(&self.folder, &fs::metadata(&self.folder).map_err(of_folder)?)?;
        let mut outcome = Ok(());
        for _ in 0..ATTEMPTS {
            outcome = self.remove_damaged(&lock.key).and_then(|()| self.write(plan, lock));
            // Another process may have been faster, with the same engine.
            if outcome.is_ok() || matches!(self.look_up(&lock.key), Cached::Plan(..)) {
                return Ok(());
            }
        }
        Ok(outcome?)
    }

    fn write(&self, plan: &[u8], lock: &PlanLock) -> Result<(), WriteError> {
        let place = self.place(&lock.key);
        if place.exists() {
            return Ok(());
        }
        let names = [PLAN.to_owned(), PlanLock::path_of(Path::new(PLAN)).display().to_string()];
        let mut staging = Staging::begin(&place, &names, false)?;
        for (name, bytes) in names.iter().zip([plan, lock.to_json().as_bytes()]) {
            staging.write(name, bytes)?;
        }
        staging.commit().map(drop)
    }

    /// Removes what lies in the place of an engine and is none.
    fn remove_damaged(&self, key: &str) -> Result<(), WriteError> {
        let place = self.place(key);
        if !place.exists() || matches!(self.look_up(key), Cached::Plan(..)) {
            return Ok(());
        }
        let of_place = |source| WriteError::Io { path: place.clone(), source };
        let aside = scratch_folder(&self.folder).map_err(of_place)?;
        match fs::rename(&place, aside.path().join(PLAN)) {
            // Another process has removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            moved => moved.map_err(of_place),
        }
    }

    /// Makes the folder, for its owner alone: what lies in it is loaded as code.
    fn make_folder(&self) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&self.folder)
    }

    /// Number of engines and bytes of their files.
    pub fn size(&self) -> (usize, u64) {
        let children = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
        let engines: Vec<PathBuf> =
            children(&self.folder).map(|entry| entry.path()).filter(|path| path.join(PLAN).is_file()).collect();
        let files = engines.iter().flat_map(|engine| children(engine)).filter_map(|entry| entry.metadata().ok());
        (engines.len(), files.map(|file| file.len()).sum())
    }
}

/// Refuses a folder that is another user's, or that others may write to.
#[cfg(unix)]
fn must_be_private(folder: &Path, found: &fs::Metadata) -> Result<(), CacheError> {
    let own = own_user().map_err(|source| CacheError::Io { folder: folder.into(), source })?;
    must_be_private_to(own, folder, found)
}

#[cfg(unix)]
fn must_be_private_to(own: u32, folder: &Path, found: &fs::Metadata) -> Result<(), CacheError> {
    use std::os::unix::fs::MetadataExt;
    const WRITTEN_BY_OTHERS: u32 = 0o022;
    if found.uid() != own {
        return Err(CacheError::OtherOwner { folder: folder.into(), owner: found.uid(), own });
    }
    match found.mode() & 0o7777 {
        mode if mode & WRITTEN_BY_OTHERS != 0 => Err(CacheError::Open { folder: folder.into(), mode }),
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
const fn must_be_private(_folder: &Path, _found: &fs::Metadata) -> Result<(), CacheError> {
    Ok(())
}

/// The user that this process acts as: the owner of a pipe that it makes.
#[cfg(unix)]
fn own_user() -> io::Result<u32> {
    use std::os::{fd::OwnedFd, unix::fs::MetadataExt};
    let (reader, _writer) = io::pipe()?;
    Ok(fs::File::from(OwnedFd::from(reader)).metadata()?.uid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{BuildOptions, Machine, ModelHash, PluginHash, Recipe};

    fn lock(plan: &[u8]) -> PlanLock {
        let text = String::new;
        let recipe = Recipe {
            model: ModelHash { sha256: text(), data: Vec::new() },
            plugin: PluginHash { library_sha256: text(), ..PluginHash::default() },
            machine: Machine { tensorrt: text(), device: text(), compute_capability: text() },
            dtype: text(),
            profiles: Vec::new(),
            options: BuildOptions::default(),
        };
        PlanLock::new(recipe, plan)
    }

    #[test]
    fn what_was_kept_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().join("a").join("b"));
        let lock = lock(b"plan");
        assert!(matches!(cache.find(&lock.key), Ok(Cached::Nothing)));
        assert_eq!(cache.size(), (0, 0));
        for _ in 0..2 {
            cache.keep(b"plan", &lock).unwrap();
            let Ok(Cached::Plan(plan, found)) = cache.find(&lock.key) else { panic!("not found") };
            assert_eq!((plan.as_slice(), *found), (&b"plan"[..], lock.clone()));
        }
        assert_eq!(cache.size(), (1, 4 + lock.to_json().len() as u64));
        assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 1);
    }

    #[test]
    fn a_whole_engine_stays_and_a_damaged_one_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().to_owned());
        let found = |key: &str| match cache.look_up(key) {
            Cached::Plan(plan, lock) => (plan, *lock),
            other => panic!("{other:?}"),
        };
        let [first, second] = [lock(b"first"), lock(b"second build")];
        cache.keep(b"first", &first).unwrap();
        cache.keep(b"second build", &second).unwrap();
        assert_eq!(found(&first.key), (b"first".to_vec(), first.clone()));
        for edit in [
            &|place: &Path| fs::write(place.join(PLAN), b"f").unwrap(),
            &|place: &Path| fs::remove_file(place.join(PLAN)).unwrap(),
            &|place: &Path| fs::write(place.join("other"), b"").and(fs::remove_dir_all(place)).unwrap(),
        ] as [&dyn Fn(&Path); 3]
        {
            edit(&cache.place(&first.key));
            cache.keep(b"second build", &second).unwrap();
            assert_eq!(found(&first.key), (b"second build".to_vec(), second.clone()));
            assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 1, "what was damaged is still there");
            fs::remove_dir_all(cache.place(&first.key)).unwrap();
            cache.keep(b"first", &first).unwrap();
        }
    }

    #[test]
    fn builds_that_are_kept_at_once_are_never_mixed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().to_owned());
        let key = lock(b"").key;
        let start = std::sync::Barrier::new(4);
        for turn in 0..20 {
            fs::create_dir_all(cache.place(&key)).unwrap();
            fs::write(cache.place(&key).join(PLAN), [turn]).unwrap();
            std::thread::scope(|threads| {
                for build in 0..4_u8 {
                    let (cache, start) = (&cache, &start);
                    threads.spawn(move || {
                        let plan = vec![build; 1000 + usize::from(build)];
                        start.wait();
                        cache.keep(&plan, &lock(&plan)).unwrap();
                    });
                }
            });
            let Cached::Plan(plan, lock) = cache.look_up(&key) else {
                panic!("turn {turn}: {:?}", cache.look_up(&key))
            };
            assert_eq!(lock.plan_bytes, plan.len() as u64);
            fs::remove_dir_all(cache.place(&key)).unwrap();
        }
    }

    #[test]
    #[cfg(unix)]
    fn nobody_else_may_write_engines() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().join("engines"));
        cache.keep(b"plan", &lock(b"plan")).unwrap();
        let mode = fs::metadata(cache.folder()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    #[cfg(unix)]
    fn a_folder_that_others_may_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().join("engines"));
        let lock = lock(b"plan");
        let allow = |mode| fs::set_permissions(cache.folder(), fs::Permissions::from_mode(mode)).unwrap();
        fs::create_dir(cache.folder()).unwrap();
        allow(0o777);
        assert!(matches!(cache.keep(b"plan", &lock), Err(CacheError::Open { mode: 0o777, .. })));
        assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 0);
        allow(0o755);
        cache.keep(b"plan", &lock).unwrap();
        assert!(matches!(cache.find(&lock.key), Ok(Cached::Plan(..))));
        for mode in [0o777, 0o1777, 0o775, 0o702] {
            allow(mode);
            let error = cache.find(&lock.key).unwrap_err();
            let expected = format!(
                "others may write to the cache of engines {} (mode {mode:o}), and what lies there is loaded as code",
                cache.folder().display()
            );
            assert_eq!(error.to_string(), expected);
            assert!(error.help().is_some_and(|help| help.contains("`chmod 700`")));
        }
    }

    #[test]
    #[cfg(unix)]
    fn a_folder_of_another_user_is_refused() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let found = fs::metadata(folder.path()).unwrap();
        assert_eq!(own_user().unwrap(), found.uid());
        let refused = must_be_private_to(found.uid() + 1, folder.path(), &found);
        let Err(CacheError::OtherOwner { owner, own, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!((owner, own), (found.uid(), found.uid() + 1));
    }

    #[test]
    fn what_does_not_match_its_lock_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().to_owned());
        let lock = lock(b"plan");
        let place = cache.place(&lock.key);
        let damaged = |why: &str, edit: &dyn Fn()| {
            cache.keep(b"plan", &lock).unwrap();
            edit();
            let Cached::Damaged(found) = cache.look_up(&lock.key) else { panic!("{why}: used") };
            assert!(found.contains(why), "{why}: {found}");
        };
        damaged("SHA-256 of the plan", &|| fs::write(place.join(PLAN), b"plam").unwrap());
        damaged("3 bytes long", &|| fs::write(place.join(PLAN), b"pla").unwrap());
        damaged("is missing", &|| fs::remove_file(place.join("engine.plan.lock.json")).unwrap());
        damaged(if cfg!(windows) { "os error" } else { "directory" }, &|| {
            fs::remove_file(place.join("engine.plan.lock.json")).unwrap();
            fs::create_dir(place.join("engine.plan.lock.json")).unwrap();
        });
        damaged("no lock of a plan", &|| fs::write(place.join("engine.plan.lock.json"), b"{}").unwrap());
        let mut other = lock.clone();
        other.recipe.dtype.push('x');
        other.key = other.recipe.key();
        damaged("of another model", &|| fs::write(place.join("engine.plan.lock.json"), other.to_json()).unwrap());
    }

    #[test]
    fn a_cache_that_cannot_be_written_says_so() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), b"").unwrap();
        let cache = Cache::new(folder.path().join("file").join("engines"));
        assert!(matches!(cache.keep(b"plan", &lock(b"plan")), Err(CacheError::Write(_))));
        let long = PlanLock { key: "k".repeat(300), ..lock(b"plan") };
        let kept = Cache::new(folder.path().to_owned()).keep(b"plan", &long);
        assert!(matches!(kept, Err(CacheError::Write(_))), "no file system has such names: {kept:?}");
        match cache.find("key") {
            Ok(Cached::Damaged(why)) => assert!(why.starts_with(cache.folder().to_str().unwrap())),
            Ok(Cached::Nothing) if cfg!(windows) => {}
            other => panic!("{other:?}"),
        }
    }
}
