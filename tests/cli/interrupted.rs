//! Commands that are told to end, or killed, while they work.

use std::{
    fs,
    io::{PipeReader, Read, Write},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use crate::{
    scene::{Outcome, Scene, require_runtime},
    support_signals::hearing_signals,
};

/// Longer than any test.
const LINE: &str = "bench m.onnx --backends ort-function --samples 1000000 --seconds 86400 --warm-up 0.001";

/// A model with its weights beside it, and a folder for temporary files.
fn scene() -> Scene {
    require_runtime();
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx --external-data always");
    fs::create_dir(scene.path("tmp")).unwrap();
    scene
}

/// What a process that is gone has called what it began, as `src/scratch.rs` says.
fn of_a_killed_process() -> String {
    let digits = |text: &str| text.chars().filter(char::is_ascii_hexdigit).collect::<String>();
    let boot = digits(&fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap());
    let space = fs::read_link("/proc/self/ns/pid").unwrap();
    let space = digits(space.to_str().unwrap().strip_prefix("pid:").unwrap());
    format!(".moa-export-{}{space}-4999999-AbC123", &boot[..16])
}

/// A benchmark that has loaded its runtime; of its file of results nothing is there before the end.
fn started(scene: &Scene, json: &str) -> Child {
    spawn(scene, &scene.command(&format!("{LINE} --json {json}")))
}

fn spawn(scene: &Scene, command: &Command) -> Child {
    let mut command = hearing_signals(command);
    command.env("TMPDIR", scene.path("tmp")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let maps = format!("/proc/{}/maps", child.id());
    while !fs::read_to_string(&maps).unwrap_or_default().contains("libonnxruntime") {
        assert_eq!(child.try_wait().unwrap(), None, "the benchmark ended by itself");
        thread::sleep(Duration::from_millis(1));
    }
    child
}

fn ended_by(signal: &str, child: Child) -> Outcome {
    let kill = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    Outcome::from(child.wait_with_output().unwrap())
}

/// What holds something on disk while it works is in `large.rs`.
#[test]
fn a_benchmark_that_is_told_to_end_writes_no_result() {
    let scene = scene();
    fs::create_dir(scene.path("new")).unwrap();
    let before = scene.snapshot();
    for (signal, json) in
        [("INT", "new/result.json"), ("TERM", "new/result.json"), ("HUP", "result.json"), ("TERM", "ck/result.json")]
    {
        let outcome = ended_by(signal, started(&scene, json));
        outcome.assert_refused(signal, 130, &["interrupted"]);
        scene.assert_unchanged(&before, &format!("{signal}, {json}"));
    }
}

/// Whether `signal`, by its number, is ignored by a process.
fn is_ignored(child: &Child, signal: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal - 1) & 1 == 1
}

/// As `nohup` and the background jobs of a script have it.
#[test]
fn signals_that_were_ignored_stay_ignored() {
    let scene = scene();
    let (hang_up, interrupt) = (1, 2);
    for (ignored, expected) in [("trap '' HUP", [true, false]), ("trap '' INT", [false, true]), (":", [false, false])] {
        let child = spawn(&scene, &scene.command_after(ignored, &format!("{LINE} --json r.json")));
        let found = [hang_up, interrupt].map(|signal| is_ignored(&child, signal));
        ended_by("TERM", child).assert_refused(ignored, 130, &["interrupted"]);
        assert_eq!(found, expected, "{ignored}");
    }
}

/// A killed program removes nothing, as `large.rs` shows; here the next one that makes a temporary file does.
#[test]
fn what_lies_there_of_a_killed_process_goes_with_a_verification() {
    let scene = scene();
    let before = scene.snapshot();
    let left = of_a_killed_process();
    fs::create_dir(scene.path(&left)).unwrap();
    // To show the choice of experts, a changed model is written beside the data of the old one.
    let line = "verify m.onnx --checkpoint ck --backends ort-function";
    let mut verify = scene.command(line);
    verify.env("TMPDIR", scene.path("tmp"));
    let outcome = Outcome::of(verify);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{}", outcome.stdout);
    assert!(!scene.path(&left).exists(), "{left}");
    for (path, _) in scene.snapshot().iter().filter(|(path, _)| !before.contains_key(*path)) {
        assert!(path.starts_with("tmp"), "{}", path.display());
    }
}

/// A program whose stdout takes nothing until [`Blocked::drained`] is called.
struct Blocked {
    child: Child,
    reader: PipeReader,
}

impl Blocked {
    fn spawn(command: &Command) -> Self {
        let (reader, mut writer) = std::io::pipe().unwrap();
        // As much as a pipe of Linux holds, where nobody has changed that.
        writer.write_all(&[b'#'; 1 << 16]).unwrap();
        let mut command = hearing_signals(command);
        let child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        Self { child, reader }
    }

    fn until(&mut self, is_there: impl Fn() -> bool) {
        while !is_there() {
            assert_eq!(self.child.try_wait().unwrap(), None, "the command ended by itself");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn interrupt(&self) {
        assert!(Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap().success());
    }

    /// Where the program does not end within `wait`, its output is read to the end.
    fn drained(mut self, wait: Duration) -> Outcome {
        let begun = std::time::Instant::now();
        while begun.elapsed() < wait && self.child.try_wait().unwrap().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        let mut reader = self.reader;
        let read = thread::spawn(move || {
            let mut stdout = String::new();
            reader.read_to_string(&mut stdout).unwrap();
            stdout.trim_start_matches('#').to_owned()
        });
        let outcome = Outcome::from(self.child.wait_with_output().unwrap());
        Outcome { stdout: read.join().unwrap(), ..outcome }
    }
}

/// Longer than the program takes to hear a signal.
const HEARD: Duration = Duration::from_millis(300);

#[test]
fn an_interrupt_behind_the_last_file_comes_too_late() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx");
    for (line, file) in [
        ("prepare m.onnx -o x.onnx", "x.onnx"),
        ("ck -o y.onnx", "y.onnx"),
        ("ck -o new/deep", "new/deep/model.onnx"),
        ("baseline transformer-base --layers 1 --vocab 8 -o base", "base/decoder_model.onnx"),
    ] {
        let mut blocked = Blocked::spawn(&scene.command(line));
        blocked.until(|| scene.path(file).exists());
        blocked.interrupt();
        let outcome = blocked.drained(HEARD);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{line}");
        assert!(outcome.stdout.starts_with("wrote ") && outcome.stdout.contains(file), "{line}: {}", outcome.stdout);
    }
}

/// Nobody reads what it prints.
#[test]
fn a_second_interrupt_ends_a_command_that_cannot_print() {
    let scene = Scene::with_fixture("mlm");
    let mut blocked = Blocked::spawn(&scene.command("ck -o y.onnx"));
    blocked.until(|| scene.path("y.onnx").exists());
    blocked.interrupt();
    thread::sleep(HEARD);
    blocked.interrupt();
    let outcome = blocked.drained(Duration::from_secs(20));
    outcome.assert_refused("ck -o y.onnx", 130, &["interrupted after its files were written"]);
    assert!(scene.path("y.onnx").exists());
}

#[test]
fn an_export_that_is_interrupted_while_it_is_verified_says_so() {
    require_runtime();
    let scene = Scene::with_fixture("mlm");
    let mut blocked = Blocked::spawn(&scene.command("ck -o y.onnx --verify"));
    blocked.until(|| scene.path("y.onnx").exists());
    blocked.interrupt();
    let outcome = blocked.drained(Duration::from_secs(20));
    outcome.assert_refused("ck -o y.onnx --verify", 130, &["interrupted: y.onnx is written, and not verified"]);
    assert_eq!(scene.names("."), ["ck", "y.onnx"]);
}
