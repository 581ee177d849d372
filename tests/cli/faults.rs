//! Full disks, closed pipes, missing rights.

use std::{
    fs::File,
    io::pipe,
    process::{Command, Stdio},
};

use crate::{
    model::Model,
    scene::{Outcome, Scene},
};

/// A layer whose weights take 4.2 MB.
fn large() -> Model {
    Model::layer_of(256, 16, 128)
}

/// Files may not grow beyond a limit: a write fails somewhere in the middle.
#[test]
fn files_that_cannot_grow_leave_nothing() {
    let scene = Scene::with(&large());
    scene.accepts("ck -o old/m.onnx --external-data always");
    for line in [
        "ck -o m.onnx",
        "ck -o new/newer/out",
        "ck -o new/m.onnx --external-data always",
        "ck -o old/m.onnx --external-data always --force",
        "ck -o old/m.onnx --force --form standard",
    ] {
        for blocks in [0, 8, 4096] {
            let before = scene.snapshot();
            let outcome = Outcome::of(scene.command_after(&format!("trap '' XFSZ; ulimit -f {blocks}"), line));
            outcome.assert_refused(line, 5, &["onnx"]);
            scene.assert_unchanged(&before, line);
        }
    }
}

/// A file system of 2 MB of our own, which nobody else sees.
const SMALL_DISK: &str = "mount -t tmpfs -o size=2m none disk";

/// Root in a name space of its own may mount; where that is forbidden, the limit above must do.
#[test]
fn full_disks_leave_nothing() {
    let scene = Scene::with(&large());
    std::fs::create_dir(scene.path("disk")).unwrap();
    let unshared = |script: &str| {
        let mut command = Command::new("unshare");
        command.current_dir(scene.folder()).args(["-Urm", "sh", "-c", script, env!("CARGO_BIN_EXE_moa-export")]);
        command
    };
    let may_mount = unshared(SMALL_DISK).output().is_ok_and(|output| output.status.success());
    if !may_mount {
        return;
    }
    for line in ["ck -o disk/m.onnx", "ck -o disk/new/out", "ck -o disk/m.onnx --external-data always"] {
        let script = format!("{SMALL_DISK} && \"$0\" {line}; code=$?; find disk -mindepth 1; exit $code");
        Outcome::of(unshared(&script)).assert_refused(line, 5, &["disk", "o space left"]);
    }
    let replaced = format!(
        "{SMALL_DISK} && echo mine > disk/m.onnx && \"$0\" ck -o disk/m.onnx --force; code=$?; \
         test \"$(cat disk/m.onnx)\" = mine && test \"$(ls -A disk)\" = m.onnx && exit $code"
    );
    Outcome::of(unshared(&replaced)).assert_refused("replaced", 5, &["disk/m.onnx"]);
}

/// Each prints something that nobody reads.
#[test]
fn readers_may_leave() {
    let scene = Scene::with(&Model::layer());
    for line in ["ops", "ops --json", "--help", "--version", "ck -o a.onnx", "ck -o b.onnx --json"] {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let output = scene.command(line).stdout(writer).output().unwrap();
        assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""), "{line}");
    }
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let status = scene.command("nowhere -o out").stderr(writer).stdout(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(5), "stderr closed");
}

#[test]
fn results_that_cannot_be_printed_are_an_error() {
    let scene = Scene::with(&Model::layer());
    for line in ["ops", "ops --json", "ck -o a.onnx", "ck -o b.onnx --json"] {
        let mut command = scene.command(line);
        command.stdout(File::options().write(true).open("/dev/full").unwrap());
        Outcome::of(command).assert_refused(line, 5, &["stdout", "o space left"]);
    }
}

#[test]
fn the_size_of_a_model_that_must_not_leave_its_file_is_no_matter_below_two_gigabytes() {
    let scene = Scene::with(&large());
    scene.accepts("ck -o a.onnx");
    scene.accepts("ck -o b.onnx --external-data never");
    assert!(scene.read("a.onnx") == scene.read("b.onnx"));
}
