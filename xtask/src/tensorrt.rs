//! `cargo xtask tensorrt`: the TensorRT plugin and the engine shim, built by the system's C++ compiler against
//! TensorRT's headers.

mod contract;
mod engine;
mod headers;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{process, project::Project, tally::Tally};
use headers::Headers;

/// Warnings are errors in our own code.
const WARNINGS: [&str; 5] = ["-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations", "-Wno-overloaded-virtual"];

/// Sources of the plugin and of the engine shim.
const FOLDERS: [&str; 2] = ["src", "engine"];

/// What undefined behaviour and bad addresses are found with.
const SANITIZERS: [&str; 3] = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"];

/// Programs with [`SANITIZERS`] lie at a fixed place: where Linux moves them by 32 bits (`vm.mmap_rnd_bits`), a movable
/// one may begin where the sanitizer of GCC 13 and older keeps its heap, and ends at once.
const FIXED: &str = "-no-pie";

/// Major and minor version of the headers in `TENSORRT_ROOT`, where it is set.
pub(crate) fn named_release() -> Result<Option<(u32, u32)>, String> {
    Ok(Headers::named()?.map(|headers| (headers.major, headers.minor)))
}

/// Builds the library.
pub(crate) fn run(project: &Project) -> Result<(), String> {
    let headers = Headers::named()?.map_or_else(|| Headers::fetched(project), Ok)?;
    let build = Build::new(project, headers)?;
    let library = build.library("libmoa_tensorrt.so", &FOLDERS, &["-O2", "-static-libstdc++", "-static-libgcc"])?;
    process::run(&mut project.cargo(["build", "--release", "-p", "moa-cuda-c"]))?;
    let kernels = build.out.join("libmoa_cuda.so");
    engine::copy(&project.target.join("release/libmoa_cuda.so"), &kernels)?;
    println!("\n{}, and beside it libmoa_cuda.so", project.shown(&library));
    Ok(())
}

/// `cargo xtask tensorrt test`: the tests of the plugin alone; true where none failed.
pub(crate) fn run_tests(project: &Project) -> Result<bool, String> {
    match test(project)? {
        Ok((tally, _)) => {
            println!("\n{tally}");
            Ok(tally.failed == 0)
        }
        Err(why) => {
            println!("skipped: {why}");
            Ok(true)
        }
    }
}

/// Runs the program that plays TensorRT with the headers of `TENSORRT_ROOT` and with those that Cargo fetches, once for
/// each plugin interface that they know, and the tests of the engine shim. Gives a folder of libraries that play
/// TensorRT too; the inner error says why nothing was run.
pub(crate) fn test(project: &Project) -> Result<Result<(Tally, PathBuf), String>, String> {
    let named = Headers::named()?;
    let fetched = Headers::fetched(project);
    if let (None, Err(why)) = (&named, &fetched) {
        return Ok(Err(why.clone()));
    }
    let (mut tally, mut fakes) = (Tally::default(), PathBuf::new());
    if let (Some(_), Err(why)) = (&named, &fetched) {
        println!("skipped: the headers of other releases: {why}");
        tally = tally + Tally::SKIPPED;
    }
    let mut builds = Vec::new();
    for headers in named.into_iter().chain(fetched) {
        // The old interface is declared by every release; only that of 8.6 may be shipped.
        let interfaces: &[&str] = if headers.major >= 10 { &["0", "1"] } else { &["1"] };
        let build = Build::new(project, headers)?;
        for interface in interfaces {
            tally = tally + build.test(interface)?;
        }
        tally = tally + engine::test(&build)?;
        fakes = engine::plain(&build)?;
        builds.push(build);
    }
    // A build serves every release from 10.0 on: plugins of one, in hosts of the others.
    builds.retain(|build| build.interface() == "0");
    for build in &builds {
        for other in builds.iter().filter(|other| other.headers.version() != build.headers.version()) {
            tally = tally + build.host("0", &other.test_folder("0").join("libmoa_tensorrt.so"), true)?;
        }
    }
    Ok(Ok((tally, fakes)))
}

/// A build folder and what to compile against.
struct Build<'a> {
    project: &'a Project,
    headers: Headers,
    out: PathBuf,
    compiler: String,
}

impl<'a> Build<'a> {
    fn new(project: &'a Project, headers: Headers) -> Result<Self, String> {
        println!("headers: TensorRT {} in {}", headers.version(), headers.folder.display());
        let out = project.target.join("tensorrt");
        let at = |error| format!("{}: {error}", out.display());
        fs::create_dir_all(&out).map_err(at)?;
        let contract = out.join("contract.h");
        fs::write(&contract, contract::header()).map_err(at)?;
        let compiler = env::var("CXX").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "c++".into());
        Ok(Self { project, headers, out, compiler })
    }

    fn sources(&self, folder: &str) -> Result<Vec<PathBuf>, String> {
        let folder = self.project.root.join("custom_ops/tensorrt").join(folder);
        let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let mut sources: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        sources.retain(|path| path.extension().is_some_and(|ending| ending == "cpp"));
        sources.sort();
        Ok(sources)
    }

    /// The compiler with everything that all of our C++ needs.
    fn compile(&self, options: &[&str]) -> Command {
        let ours = self.project.root.join("custom_ops");
        let mut command = self.project.command(&self.compiler);
        command.args(["-std=c++17", "-fPIC", "-fvisibility=hidden"]).args(WARNINGS).args(options);
        for folder in
            ["tensorrt/src", "tensorrt/engine", "cuda/include"].map(|name| ours.join(name)).iter().chain([&self.out])
        {
            command.arg("-I").arg(folder);
        }
        for folder in [&self.headers.folder, &self.headers.parser, &ours.join("tensorrt/include")] {
            command.arg("-isystem").arg(folder);
        }
        command
    }

    /// Compiles the plugin and the engine shim, or what is in `folders` of them, into one library.
    fn library(&self, name: &str, folders: &[&str], options: &[&str]) -> Result<PathBuf, String> {
        let library = self.out.join(name);
        let mut command = self.compile(options);
        let map = self.project.root.join("custom_ops/tensorrt/src/exports.map");
        for folder in folders {
            command.args(self.sources(folder)?);
        }
        command.arg("-shared").arg("-o").arg(&library);
        command.arg(format!("-Wl,--version-script={}", map.display())).args(["-Wl,--no-undefined", "-ldl"]);
        process::run(&mut command)?;
        Ok(library)
    }

    /// Whether these headers' plugins are IPluginV2DynamicExt, as the compiler takes it.
    fn interface(&self) -> &'static str {
        if self.headers.major >= 10 { "0" } else { "1" }
    }

    fn test_folder(&self, interface: &str) -> PathBuf {
        self.out.join(format!("test-{}-v{}", self.headers.version(), if interface == "1" { 2 } else { 3 }))
    }

    /// Builds the plugin with sanitizers, what it stands on as fakes, and the program; runs it.
    fn test(&self, interface: &str) -> Result<Tally, String> {
        let define = format!("-DMOA_PLUGIN_V2={interface}");
        let options = [&SANITIZERS[..], &["-O1", &define]].concat();
        let folder = self.test_folder(interface);
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let inside = |name: &str| folder.join(name);
        let shared = [&options[..], &["-shared", "-fvisibility=default"]].concat();
        for (source, library) in [("fakes/kernels.cpp", "libmoa_cuda.so"), ("fakes/driver.cpp", "libcuda.so.1")] {
            let source = self.project.root.join("custom_ops/tensorrt/tests").join(source);
            process::run(self.compile(&shared).arg(source).arg("-o").arg(inside(library)))?;
        }
        // The engine shim goes with the interface of its release; its tests take this library.
        let folders = if interface == self.interface() { &FOLDERS[..] } else { &FOLDERS[..1] };
        let built = self.library("libmoa_tensorrt_tested.so", folders, &options)?;
        fs::rename(&built, inside("libmoa_tensorrt.so")).map_err(|error| format!("{}: {error}", built.display()))?;
        let program = inside("host");
        let mut host = self.compile(&options);
        host.args(self.sources("tests")?).args([FIXED, "-rdynamic", "-ldl"]).arg("-o").arg(&program);
        process::run(&mut host)?;
        self.host(interface, &inside("libmoa_tensorrt.so"), false)
    }

    /// Runs the program that plays TensorRT on a plugin, which may be that of another release.
    fn host(&self, interface: &str, plugin: &Path, is_of_another: bool) -> Result<Tally, String> {
        let folder = self.test_folder(interface);
        println!("host of TensorRT {}, plugin {}", self.headers.version(), self.project.shown(plugin));
        let mut run = self.project.command(folder.join("host"));
        run.arg(plugin).env("LD_LIBRARY_PATH", &folder).env_remove("MOA_CUDA_LIBRARY");
        if is_of_another {
            run.env("MOA_TEST_OTHER_RELEASE", "1");
        }
        Tally::of_cargo(&mut run)
    }
}

/// `path` where it is a file.
fn file(path: &Path) -> Option<&Path> {
    path.is_file().then_some(path)
}
