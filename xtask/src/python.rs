//! Python packages under the target folder, by `pip install --target`: no virtual environment, which some
//! systems cannot make, and nothing outside the target folder.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use crate::{process, project::Project};

/// Written into a folder when all of its packages are there.
const STAMP: &str = ".complete";

const OLDEST_PYTHON: (u32, u32) = (3, 10);

/// First Python without a wheel of the oldest runtime.
const FIRST_WITHOUT_OLDEST: (u32, u32) = (3, 13);

/// Prints version and platform, which the choice of wheels depends on.
const ASK: &str =
    "import sys, sysconfig; print(*sys.version_info[:2], sys.implementation.cache_tag, sysconfig.get_platform())";

const INSTALL_PIP: &str = "install it (Debian and Ubuntu: apt-get install python3-pip; else: python3 -m ensurepip)";

/// A set of packages: `tools/requirements-NAME.txt`, installed in `target/python/NAME`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packages {
    /// ONNX Runtime and NumPy.
    Runtime,
    /// What the tests need besides.
    Test,
    /// The oldest ONNX Runtime that is supported.
    Oldest,
    /// Hugging Face's Optimum, without PyTorch.
    Optimum,
    /// PyTorch, with what it depends on: on Linux several GB.
    Torch,
    /// The compiler of the CUDA kernels.
    Cuda,
    /// ONNX Runtime for Windows, of which this Python runs nothing.
    Windows,
}

impl Packages {
    fn name(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::Test => "test",
            Self::Oldest => "oldest",
            Self::Optimum => "optimum",
            Self::Torch => "torch",
            Self::Cuda => "cuda",
            Self::Windows => "windows",
        }
    }
}

/// A Python with pip, and the folder of its packages.
#[derive(Debug)]
pub(crate) struct Python {
    program: OsString,
    version: (u32, u32),
    /// Version and platform, for stamps.
    identity: String,
    folder: PathBuf,
    requirements: PathBuf,
}

impl Python {
    /// `python3`, or what the variable `PYTHON` names.
    pub(crate) fn find(project: &Project) -> Result<Self, String> {
        let program = env::var_os("PYTHON").filter(|name| !name.is_empty()).unwrap_or_else(|| "python3".into());
        let name = program.to_string_lossy().into_owned();
        let output = Command::new(&program).args(["-c", ASK]).output();
        let output = output.map_err(|error| format!("{name} cannot be started ({error}); install Python 3"))?;
        let identity = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let mut numbers = identity.split(' ').map_while(|word| word.parse().ok());
        let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
            return Err(format!("{name} does not say its version: {}", String::from_utf8_lossy(&output.stderr).trim()));
        };
        let version = (major, minor);
        if version < OLDEST_PYTHON {
            return Err(format!("{name} is Python {major}.{minor}, and 3.{} or newer is needed", OLDEST_PYTHON.1));
        }
        let pip = Command::new(&program).args(["-m", "pip", "--version"]).output();
        if !pip.is_ok_and(|output| output.status.success()) {
            return Err(format!("{name} has no pip; {INSTALL_PIP}"));
        }
        let folder = project.target.join("python");
        Ok(Self { program, version, identity, folder, requirements: project.root.join("tools") })
    }

    /// Why `packages` cannot be installed for this Python, if so.
    pub(crate) fn lacks(&self, packages: Packages) -> Option<String> {
        let (major, minor) = self.version;
        (packages == Packages::Oldest && self.version >= FIRST_WITHOUT_OLDEST)
            .then(|| format!("the oldest supported ONNX Runtime has no wheel for Python {major}.{minor}"))
    }

    /// Installs `packages` unless they are complete already.
    pub(crate) fn install(&self, packages: Packages) -> Result<(), String> {
        let name = packages.name();
        let list = self.requirements.join(format!("requirements-{name}.txt"));
        let text = fs::read_to_string(&list).map_err(|error| format!("{}: {error}", list.display()))?;
        let stamp = format!("{}\n{text}", self.identity);
        let folder = self.folder.join(name);
        if fs::read_to_string(folder.join(STAMP)).is_ok_and(|found| found == stamp) {
            println!("Python packages \"{name}\": there");
            return Ok(());
        }
        self.download(packages, &folder, &list).or_else(|_| {
            println!("once more in 5 seconds");
            thread::sleep(Duration::from_secs(5));
            self.download(packages, &folder, &list)
                .map_err(|error| format!("{error}; are PyPI's packages within reach?"))
        })?;
        fs::write(folder.join(STAMP), stamp).map_err(|error| format!("{}: {error}", folder.display()))
    }

    fn download(&self, packages: Packages, folder: &Path, list: &Path) -> Result<(), String> {
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        }
        let mut pip = Command::new(&self.program);
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--retries",
            "10",
            "--timeout",
            "60",
        ]);
        // What PyTorch depends on differs from system to system; all other lists are complete.
        if packages != Packages::Torch {
            pip.arg("--no-deps");
        }
        if packages == Packages::Windows {
            pip.args(["--platform", "win_amd64", "--python-version", "3.13"]);
        }
        pip.args(["--only-binary", ":all:", "--target"]).arg(folder).arg("-r").arg(list);
        pip.env("PIP_USER", "0").env("PIP_ROOT_USER_ACTION", "ignore").env_remove("PYTHONPATH");
        process::run(&mut pip)
    }

    /// `libonnxruntime` of installed packages.
    pub(crate) fn onnxruntime(&self, packages: Packages) -> Result<PathBuf, String> {
        let folder = self.folder.join(packages.name()).join("onnxruntime/capi");
        runtime_library(&folder).ok_or_else(|| format!("{} holds no ONNX Runtime", folder.display()))
    }

    /// `program` on these packages, the first of which win, in UTF-8 whatever the locale.
    pub(crate) fn command(&self, project: &Project, packages: &[Packages]) -> Result<Command, String> {
        let folders = packages.iter().map(|packages| self.packages(*packages));
        let path = env::join_paths(folders).map_err(|error| format!("{}: {error}", self.folder.display()))?;
        let mut command = project.command(&self.program);
        command.env("PYTHONPATH", path).env("PYTHONUTF8", "1").env("PYTHONDONTWRITEBYTECODE", "1");
        Ok(command)
    }

    /// Folder of `packages`.
    pub(crate) fn packages(&self, packages: Packages) -> PathBuf {
        match given_pytorch().filter(|_| packages == Packages::Torch) {
            Some(folder) => folder,
            None => self.folder.join(packages.name()),
        }
    }
}

/// The folder that the variable `MOA_PYTORCH` names.
pub(crate) fn given_pytorch() -> Option<PathBuf> {
    env::var_os("MOA_PYTORCH").filter(|name| !name.is_empty()).map(PathBuf::from)
}

/// The library in `folder` whose name is `libonnxruntime` and a version.
fn runtime_library(folder: &Path) -> Option<PathBuf> {
    let is_runtime = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let rest = name.strip_prefix(env::consts::DLL_PREFIX).and_then(|rest| rest.strip_prefix("onnxruntime"));
        rest.is_some_and(|rest| rest.starts_with('.') && rest.contains(env::consts::DLL_SUFFIX))
    };
    let mut found: Vec<_> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).filter(is_runtime).collect();
    found.sort();
    found.pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_runtime_is_told_from_its_neighbours() {
        let folder = crate::check::planted(&[
            ("libonnxruntime.so.1.31.1", ""),
            ("libonnxruntime_providers_shared.so", ""),
            ("onnxruntime_pybind11_state.so", ""),
            ("__init__.py", ""),
        ]);
        assert_eq!(runtime_library(folder.path()), Some(folder.path().join("libonnxruntime.so.1.31.1")));
    }

    #[test]
    fn only_the_oldest_runtime_depends_on_the_python() {
        let python = |minor| Python {
            program: "python3".into(),
            version: (3, minor),
            identity: String::new(),
            folder: PathBuf::new(),
            requirements: PathBuf::new(),
        };
        assert_eq!(python(12).lacks(Packages::Oldest), None);
        assert!(python(13).lacks(Packages::Oldest).is_some_and(|why| why.contains("3.13")));
        assert_eq!(python(14).lacks(Packages::Runtime), None);
    }
}
