//! Full disks, closed pipes, missing rights.

use std::{
    cell::Cell,
    fs::{self, File, Permissions},
    io::{self, Write as _, pipe},
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

use crate::{
    model::Model,
    scene::{Outcome, Scene, require_runtime},
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
            let outcome = Outcome::of(scene.command_after(&format!("ulimit -f {blocks}"), line));
            outcome.assert_refused(line, 5, &["onnx"]);
            scene.assert_unchanged(&before, line);
        }
    }
}

/// With so few files the checkpoint cannot be opened beside the export, nor a folder to be emptied.
#[test]
fn few_open_files_leave_nothing() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    let before = scene.snapshot();
    let mut refused = 0;
    for files in 4..12 {
        let outcome = Outcome::of(scene.command_after(&format!("ulimit -n {files}"), "ck -o new/deep"));
        if outcome.code == Some(0) {
            fs::remove_dir_all(scene.path("new")).unwrap();
        } else {
            outcome.assert_refused(&format!("{files} files"), 5, &["oo many open files"]);
            refused += 1;
        }
        scene.assert_unchanged(&before, &format!("{files} files"));
    }
    assert!(refused > 0, "an export needs fewer than four files");
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
        let _ = writeln!(io::stdout(), "skipped: full disks, for mounting is not allowed");
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

/// Each prints something.
const PRINTING: [&str; 14] = [
    "ops",
    "ops --json",
    "plan",
    "plan --gpu h100 --json",
    "inspect ck",
    "inspect --table 3",
    "inspect --preset list",
    "ck -o a.onnx --force",
    "ck -o b.onnx --json --force",
    "prepare m.onnx -o x.onnx --force",
    "--help",
    "--version",
    "verify -h",
    "help",
];

#[test]
fn results_that_cannot_be_printed_are_an_error() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o m.onnx");
    for line in PRINTING {
        let mut command = scene.command(line);
        command.stdout(File::options().write(true).open("/dev/full").unwrap());
        Outcome::of(command).assert_refused(line, 5, &["stdout", "o space left"]);
        for closing in ["exec >&-", "exec <&- >&-"] {
            let outcome = Outcome::of(scene.command_after(closing, line));
            outcome.assert_refused(&format!("{line} after {closing}"), 5, &["stdout", "Bad file descriptor"]);
        }
        let unread = Outcome::of(scene.command_after("exec > /dev/null", line));
        assert_eq!((unread.code, unread.stderr.as_str()), (Some(0), ""), "{line} > /dev/null");
    }
    let help = Outcome::of(scene.command_after("exec >&-", ""));
    assert!(
        help.code == Some(2) && help.stderr.contains("Usage: moa-export"),
        "help that nobody asked for is no result"
    );
}

thread_local! {
    /// Whether the test of this thread has said that it cannot do all that it is for.
    static SAID: Cell<bool> = const { Cell::new(false) };
}

/// The program with `line`, held to the rights of files even where it is started by root: in a name space of its own,
/// root owns what it owned and may do no more with it. `None` where that cannot be had.
fn without_privileges(scene: &Scene, line: &str) -> Option<Outcome> {
    let locked = scene.path("locked");
    fs::create_dir_all(&locked).unwrap();
    fs::set_permissions(&locked, Permissions::from_mode(0o000)).unwrap();
    let bound = |command: &mut Command| command.output().is_ok_and(|output| !output.status.success());
    let plain = bound(Command::new("ls").arg(&locked));
    let unshared = bound(Command::new("unshare").args(["-U", "ls"]).arg(&locked))
        && Command::new("unshare").args(["-U", "true"]).status().is_ok_and(|status| status.success());
    fs::remove_dir(locked).unwrap();
    let mut command = if plain { Command::new("env") } else { Command::new("unshare") };
    command.args(if plain { [].as_slice() } else { &["-U"] }).arg(env!("CARGO_BIN_EXE_moa-export"));
    command.current_dir(scene.folder()).args(line.split_whitespace());
    if !(plain || unshared) {
        if !SAID.replace(true) {
            let _ = writeln!(io::stdout(), "skipped: rights of files, for root cannot be bound by them here");
        }
        return None;
    }
    Some(Outcome::of(command))
}

/// A changed graph is written beside its data file: where that cannot be, nothing is said of what the model computes.
#[test]
fn graphs_beside_data_in_a_folder_that_may_not_be_written_to_do_not_differ() {
    require_runtime();
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o out/m.onnx --external-data always");
    fs::set_permissions(scene.path("out"), Permissions::from_mode(0o555)).unwrap();
    let line = "verify out/m.onnx --checkpoint ck --backends ort";
    let outcome = without_privileges(&scene, line);
    fs::set_permissions(scene.path("out"), Permissions::from_mode(0o755)).unwrap();
    let Some(outcome) = outcome else { return };
    let parts = ["out: a changed copy of the graph cannot be written beside its data file", "help: let your user"];
    outcome.assert_refused(line, 5, &parts);
}

/// Folders of exports that must not be entered, listed or both are not said to be empty or missing.
#[test]
fn exports_that_cannot_be_entered_are_said_to_be_closed() {
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o closed/out");
    for (folder, rights) in [("closed/out", 0o000), ("closed/out", 0o400), ("closed", 0o000)] {
        let lines = [
            "generate closed/out --input text",
            "generate closed/out --input text --max-new 3",
            "verify closed/out --checkpoint ck",
            "bench closed/out",
            "profile closed/out --inputs lines.txt",
            "build closed/out -o plans",
            "inspect closed/out",
            "run closed/out/encoder_model.onnx --inputs i --outputs o",
            "verify closed/out/encoder_model.onnx --checkpoint ck",
            "bench closed/out/encoder_model.onnx",
        ];
        fs::set_permissions(scene.path(folder), Permissions::from_mode(rights)).unwrap();
        let outcomes = lines.map(|line| (line, without_privileges(&scene, line)));
        fs::set_permissions(scene.path(folder), Permissions::from_mode(0o755)).unwrap();
        for (line, outcome) in outcomes.iter().filter_map(|(line, outcome)| Some((line, outcome.as_ref()?))) {
            outcome.assert_refused(&format!("{line}, {rights:o}"), 5, &["closed/out", "Permission denied"]);
            assert!(!outcome.stderr.contains("no checkpoint"), "{line}: {}", outcome.stderr);
        }
    }
}

/// What cannot be looked at is not said to hold nothing; a path can be too long for what lies in a folder alone.
#[test]
fn folders_that_cannot_be_entered_are_said_to_be_closed() {
    let scene = Scene::with(&Model::layer());
    let long = format!("ck{}", "/.".repeat(2045));
    let parts = ["the folder cannot be read: ", "ame too long", "help: "];
    scene.refuses(&format!("{long} -o m.onnx"), 5, &parts);
    for rights in [0o000, 0o400] {
        fs::set_permissions(scene.path("ck"), Permissions::from_mode(rights)).unwrap();
        let outcomes = ["ck -o m.onnx", "inspect ck"].map(|line| (line, without_privileges(&scene, line)));
        fs::set_permissions(scene.path("ck"), Permissions::from_mode(0o755)).unwrap();
        for (line, outcome) in outcomes.iter().filter_map(|(line, outcome)| Some((line, outcome.as_ref()?))) {
            outcome.assert_refused(line, 5, &["ck: the folder cannot be read: Permission denied", "help: "]);
        }
    }
}

/// What a closed folder hides may be there.
#[test]
fn a_checkpoint_that_cannot_be_seen_is_not_said_to_be_missing() {
    let scene = Scene::with(&Model::layer());
    fs::create_dir(scene.path("closed")).unwrap();
    fs::set_permissions(scene.path("closed"), Permissions::from_mode(0o000)).unwrap();
    let outcome = without_privileges(&scene, "closed/ck");
    fs::set_permissions(scene.path("closed"), Permissions::from_mode(0o755)).unwrap();
    if let Some(outcome) = outcome {
        outcome.assert_refused("closed/ck", 2, &["--output <OUT>", "help: say where the result goes: -o OUT"]);
    }
}

/// Commands and options that name files of results.
const RESULTS: [(&str, &str); 6] = [
    ("bench m.onnx --seconds 3600", "--json"),
    ("bench m.onnx --seconds 3600", "--csv"),
    ("bench m.onnx --seconds 3600", "--report"),
    ("verify m.onnx --checkpoint ck", "--json"),
    ("verify m.onnx --checkpoint ck", "--report"),
    ("profile m.onnx --inputs lines.ids", "--report"),
];

/// An export `m.onnx` of `ck`, and ids for it in `lines.ids`.
fn measured() -> Scene {
    require_runtime();
    let scene = Scene::exported("mlm", "");
    scene.write("lines.ids", "4 5 6\n");
    scene
}

/// Hours of timing must not end with a file that cannot be written.
#[test]
fn folders_that_take_no_file_are_known_before() {
    let scene = measured();
    scene.write("file", "mine");
    for (line, option) in RESULTS {
        for (place, code, part) in [
            ("/proc/r", 5, "/proc/r cannot be written: "),
            ("file/r", 2, "file is not a folder"),
            ("file/new/r", 5, "file/new cannot be written: "),
        ] {
            scene.refuses(&format!("{line} {option} {place}"), code, &[part, "help: "]);
        }
    }
    fs::create_dir(scene.path("shut")).unwrap();
    fs::set_permissions(scene.path("shut"), Permissions::from_mode(0o555)).unwrap();
    let line = "bench m.onnx --seconds 3600 --json shut/r.json";
    if let Some(outcome) = without_privileges(&scene, line) {
        outcome.assert_refused(line, 5, &["shut/r.json cannot be written: Permission denied", "help: "]);
    }
}

#[test]
fn what_was_computed_is_printed_though_a_file_cannot_be_written() {
    let scene = measured();
    let bench = "bench m.onnx --samples 8 --warm-up 0.05 --seq 6 --no-operators";
    for (line, printed) in [
        (format!("{bench} --json r"), "relative to the first"),
        (format!("{bench} --json - --csv r"), "\"receipt\""),
        (format!("{bench} --report r"), "relative to the first"),
        ("verify m.onnx --checkpoint ck --backends ort-function --json r".into(), "\nverified on "),
        ("verify m.onnx --checkpoint ck --backends ort-function --json - --report r".into(), "\"passed\""),
        ("profile m.onnx --inputs lines.ids --report r".into(), "max/mean"),
    ] {
        let before = scene.snapshot();
        let outcome = Outcome::of(scene.command_after("ulimit -f 0", &line));
        assert!(outcome.stdout.contains(printed), "{line}\n{}", outcome.stdout);
        outcome.assert_failed(&line, 5, &["r cannot be written: ", "help: "]);
        scene.assert_unchanged(&before, &line);
    }
}

/// A folder that is not there may be mistyped, and nobody would look for the result there.
#[test]
fn the_folder_of_a_result_must_be_there() {
    let scene = measured();
    let tensors = ["--outputs", "--save-inputs"].map(|option| ("run m.onnx --random", option));
    for (line, option) in RESULTS.into_iter().chain(tensors) {
        let told =
            "new/deep/r cannot be written: there is no folder new/deep\nhelp: correct the path, or make the folder\n";
        scene.refuses(&format!("{line} {option} new/deep/r"), 5, &["MOA-E0511", told]);
    }
    fs::create_dir(scene.path("new")).unwrap();
    scene.accepts("verify m.onnx --checkpoint ck --json new/r.json --report new/r.html");
    assert_eq!(scene.names("new"), ["r.html", "r.json"]);
}

#[test]
fn the_size_of_a_model_that_must_not_leave_its_file_is_no_matter_below_two_gigabytes() {
    let scene = Scene::with(&large());
    scene.accepts("ck -o a.onnx");
    scene.accepts("ck -o b.onnx --external-data never");
    assert!(scene.read("a.onnx") == scene.read("b.onnx"));
}
