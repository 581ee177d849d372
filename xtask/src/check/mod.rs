//! `cargo xtask check`: everything that is checked without running the program.

mod crates;
mod doors;
mod layers;
mod paths;
mod size;

use std::{io, process::Command};

use crate::{
    foreign,
    process::{self, stage},
    project::{COMPILER_CRATES, OPERATOR_CRATES, Project},
    tally::Tally,
};

#[cfg(test)]
pub(crate) use planted::planted;

/// Runs every check and tells last what failed, where a long log is cut; true where all passed.
pub(crate) fn run(project: &Project) -> Result<bool, String> {
    let operators = with_packages(&OPERATOR_CRATES);
    let compiler: Vec<_> = with_packages(&COMPILER_CRATES).into_iter().chain(["-p", "xtask"]).collect();
    let clippy = |what: &[&'static str]| {
        let words = ["clippy", "--release"].iter().chain(what).chain(&["--", "-D", "warnings"]);
        process::run(&mut project.cargo(words.copied()))
    };
    let doc = |packages: &[&'static str]| {
        let words = ["doc", "--release", "--no-deps"].iter().chain(packages);
        process::run(project.cargo(words.copied()).env("RUSTDOCFLAGS", "-D warnings"))
    };
    let all_targets = |packages: &[&'static str]| clippy(&[&["--all-targets"], packages].concat());
    let (mut tally, mut failures) = (Tally::default(), Vec::new());
    let mut check = |title: &str, work: &dyn Fn() -> Result<(), String>| {
        let (result, _) = stage(title, || work().inspect_err(|message| eprintln!("error: {message}")));
        tally = tally + Tally { passed: usize::from(result.is_ok()), failed: usize::from(result.is_err()), skipped: 0 };
        failures.extend(result.err().map(|message| format!("{title}: {message}")));
    };
    check("formatting", &|| process::run(&mut project.cargo(["fmt", "--all", "--check"])));
    check("layers of modules", &|| report(layers::check(&project.root)));
    check("layers of crates", &|| report(crates::check(project)));
    check("doors of unsafe code", &|| report(doors::check(&project.root)));
    check("sizes", &|| report(size::check(&project.root)));
    check("clippy: operator library", &|| all_targets(&operators));
    check("clippy: compiler", &|| all_targets(&compiler));
    check("clippy: compile half alone", &|| clippy(&["-p", "moa-export", "--no-default-features"]));
    check("clippy: measurements", &|| clippy(&["-p", "moa-kernels", "--features", "measure", "--all-targets"]));
    check("clippy: fuzz targets", &|| process::run(&mut fuzz_targets(project)));
    check("documentation: operator library", &|| doc(&operators));
    check("documentation: compiler", &|| doc(&compiler));
    let (here, lacked): (Vec<_>, Vec<_>) = foreign::ALL
        .iter()
        .map(|system| (system, foreign::lacks_target(project, system.target)))
        .partition(|(_, why)| why.is_none());
    here.iter().for_each(|(system, _)| check(system.title, &|| process::run(&mut system.clippy(project))));
    for (system, why) in lacked {
        println!("skipped: {}: {}", system.title, why.unwrap_or_default());
        tally = tally + Tally::SKIPPED;
    }
    println!();
    failures.iter().for_each(|failure| println!("failed: {failure}"));
    println!("{tally}");
    Ok(tally.failed == 0)
}

/// Clippy on the fuzz targets, a workspace of their own. Coverage and sanitizers, which a run needs, are left out.
fn fuzz_targets(project: &Project) -> Command {
    let mut clippy = project.cargo(["clippy", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--target-dir"]);
    clippy.arg(project.target.join("fuzz")).args(["--", "-D", "warnings"]);
    clippy
}

fn with_packages(crates: &[&'static str]) -> Vec<&'static str> {
    crates.iter().flat_map(|name| ["-p", name]).collect()
}

/// What was found, as an error.
fn report(found: io::Result<Vec<String>>) -> Result<(), String> {
    let found = found.map_err(|error| format!("the sources cannot be read: {error}"))?;
    if found.is_empty() { Ok(()) } else { Err(found.join("\n")) }
}

#[cfg(test)]
mod planted {
    use std::{
        env, fs,
        path::{Path, PathBuf},
        process,
        sync::atomic::{AtomicUsize, Ordering},
    };

    /// A temporary tree, removed when dropped.
    pub(crate) struct Planted(PathBuf);

    impl Planted {
        /// Its root.
        pub(crate) fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Planted {
        fn drop(&mut self) {
            let _left_behind = fs::remove_dir_all(&self.0);
        }
    }

    /// A tree of these files with these texts.
    pub(crate) fn planted(files: &[(&str, &str)]) -> Planted {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = env::temp_dir().join(format!("moa-xtask-{}-{count}", process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Planted(root)
    }
}
