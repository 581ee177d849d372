//! Exports of hundreds of megabytes: bounded memory, and nothing left where they do not finish.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use crate::{
    model::Model,
    scene::{Outcome, Scene},
    support_signals::hearing_signals,
    synthesize::{self, Request, Sizes, write},
};

/// 370 MB of weights as f32, 40 MB in the largest tensor as stored.
const SIZES: Sizes =
    Sizes { layers: 2, width: 640, experts: 8, top_k: 2, kv_heads: 8, head: 64, hidden: 1280, vocabulary: 32_000 };

const LINE: &str = "ck -o new/deeper/out --external-data always";

/// With a large checkpoint in the folder `ck`, which takes no room on the disk where it is `sparse`.
fn scene(sparse: bool) -> Scene {
    let scene = Scene::new();
    write(&Request { out: scene.path("ck"), model: synthesize::Model::JetMoe(SIZES), shards: 2, seed: 1, sparse })
        .unwrap();
    scene
}

/// Bytes of all files below a folder, whatever happens to it meanwhile.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |path: PathBuf| match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_dir() => bytes_below(&path),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.map(|entry| bytes(entry.path())).sum()
}

/// Waits until `child` has written `bytes` below `folder`.
fn wait_for(child: &mut Child, folder: &Path, bytes: u64) {
    while bytes_below(folder) < bytes {
        let has_ended = child.try_wait().unwrap().is_some();
        assert!(!has_ended || bytes_below(folder) >= bytes, "the export ended before it had written {bytes} bytes");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Exports that are told to end, until one is told in time.
const TRIES: usize = 20;

/// An export that is interrupted.
struct Interrupted<'a> {
    line: &'a str,
    signals: &'a [&'a str],
    /// Below this folder it has written so many bytes by then.
    written: (&'a str, u64),
    /// What lies where it writes to is made anew before every try.
    prepare: &'a dyn Fn(),
}

impl Interrupted<'_> {
    /// How it ended. A loaded machine may let an export finish before a signal reaches it, which says nothing about
    /// signals: where `is_whole` then finds its files, the next one is told.
    fn outcome(&self, scene: &Scene, is_whole: impl Fn() -> bool) -> Outcome {
        for _ in 0..TRIES {
            (self.prepare)();
            let mut command = hearing_signals(&scene.command(self.line));
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            wait_for(&mut child, &scene.path(self.written.0), self.written.1);
            for signal in self.signals {
                let mut kill = Command::new("kill");
                let sent = kill.args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
                assert!(sent.success() || self.signals.len() > 1);
            }
            let outcome = Outcome::from(child.wait_with_output().unwrap());
            if !is_whole() {
                return outcome;
            }
        }
        panic!("{TRIES} exports went on to their ends whatever they were told");
    }

    /// The same of an export to the new folder `new/deeper/out`.
    fn outcome_of_new(scene: &Scene, signals: &[&str], bytes: u64) -> Outcome {
        let prepare = || drop(fs::remove_dir_all(scene.path("new")));
        let export = Interrupted { line: LINE, signals, written: ("new", bytes), prepare: &prepare };
        export.outcome(scene, || scene.path("new/deeper/out/model.onnx.data").exists())
    }
}

#[test]
fn an_export_that_is_told_to_end_leaves_nothing() {
    let scene = scene(true);
    for (signal, bytes) in [("INT", 1), ("TERM", 40 << 20), ("HUP", 120 << 20)] {
        let outcome = Interrupted::outcome_of_new(&scene, &[signal], bytes);
        outcome.assert_refused(signal, 130, &["the export was interrupted"]);
        assert_eq!(scene.names("."), ["ck"], "{signal} after {bytes} bytes");
    }
}

#[test]
fn an_export_that_is_told_twice_leaves_nothing() {
    let scene = scene(true);
    let outcome = Interrupted::outcome_of_new(&scene, &["INT", "INT"], 40 << 20);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(130), ""), "{}", outcome.stderr);
    assert_eq!(scene.names("."), ["ck"]);
}

#[test]
fn an_export_that_is_told_to_end_keeps_what_it_would_replace() {
    let scene = scene(true);
    let names = ["model.onnx", "model.onnx.data"];
    let prepare = || {
        let _ = fs::remove_dir_all(scene.path("out"));
        fs::create_dir(scene.path("out")).unwrap();
        names.iter().for_each(|name| scene.write(&format!("out/{name}"), name));
    };
    let line = "ck -o out --external-data always --force";
    let export = Interrupted { line, signals: &["INT"], written: ("out", 40 << 20), prepare: &prepare };
    let is_whole = || scene.read("out/model.onnx") != b"model.onnx";
    export.outcome(&scene, is_whole).assert_refused(line, 130, &[]);
    assert_eq!(scene.names("out"), names);
    assert_eq!(names.map(|name| scene.read(&format!("out/{name}"))), names.map(|name| name.as_bytes().to_vec()));
}

/// A killed program removes nothing; the next one does, where it writes.
#[test]
fn what_a_killed_export_leaves_goes_with_the_next_one() {
    let scene = scene(true);
    Model::layer().write(&scene.path("small"));
    assert_eq!(Interrupted::outcome_of_new(&scene, &["KILL"], 1 << 20).code, None);
    let prepare = || {
        let _ = fs::remove_dir_all(scene.path("out"));
        fs::create_dir(scene.path("out")).unwrap();
    };
    let line = "ck -o out --external-data always";
    let export = Interrupted { line, signals: &["KILL"], written: ("out", 1 << 20), prepare: &prepare };
    assert_eq!(export.outcome(&scene, || scene.path("out/model.onnx.data").exists()).code, None);
    assert!(!scene.names("new/deeper").is_empty() && !scene.names("out").is_empty());
    scene.accepts("small -o new/deeper/out");
    scene.accepts("small -o out");
    assert_eq!(
        (scene.names("new/deeper"), scene.names("out")),
        (vec!["out".to_owned()], vec!["model.onnx".to_owned()])
    );
}

#[test]
fn a_full_disk_leaves_nothing() {
    let scene = scene(true);
    for blocks in [1, 100 << 10] {
        let before = format!("ulimit -f {blocks}");
        let outcome = Outcome::of(scene.command_after(&before, LINE));
        outcome.assert_refused(&before, 5, &["cannot be written", "help: "]);
        assert_eq!(scene.names("."), ["ck"], "{before}");
    }
}

#[test]
fn memory_is_bounded_and_the_bytes_are_the_same_twice() {
    let scene = scene(false);
    let mut peaks = Vec::new();
    for (out, external_data) in [("first", "always"), ("second", "always"), ("inline", "never")] {
        let line = format!("ck -o {out} --external-data {external_data}");
        let mut child = scene.command(&line).stdout(Stdio::null()).spawn().unwrap();
        let mut peak = 0;
        while child.try_wait().unwrap().is_none() {
            peak = peak.max(peak_kib(child.id()).unwrap_or(0));
            thread::sleep(Duration::from_millis(5));
        }
        assert!(child.wait().unwrap().success());
        peaks.push(peak);
    }
    let data = |out: &str| fs::read(scene.path(out).join("model.onnx.data")).unwrap();
    let written = data("first");
    assert!(written == data("second") && scene.read("first/model.onnx") == scene.read("second/model.onnx"));
    assert!(fs::metadata(scene.path("inline/model.onnx")).unwrap().len() > written.len() as u64 / 100 * 99);
    let largest_kib = SIZES.vocabulary * SIZES.width * 2 / 1024;
    assert!(written.len() / 1024 > 2 * largest_kib + (192 << 10), "the model is too small to tell");
    assert!(peaks.iter().all(|peak| (1..2 * largest_kib + (192 << 10)).contains(peak)), "{peaks:?} KiB");
}

/// Peak resident memory of a process that runs.
fn peak_kib(process: u32) -> Option<usize> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}
