//! Commands that write no file, told to end.

use std::{
    fs,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use crate::{
    scene::{Outcome, Scene, require_runtime},
    support_signals::hearing_signals,
};

/// Names and numbers.
const SIGNALS: [(&str, u32); 3] = [("HUP", 1), ("INT", 2), ("TERM", 15)];

/// Sends the signal as soon as the program catches it.
fn ended_by((name, number): (&str, u32), mut child: Child) -> Outcome {
    let catches = |child: &Child| {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() >> (number - 1) & 1 == 1
    };
    while !catches(&child) {
        assert_eq!(child.try_wait().unwrap(), None, "the command ended by itself");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap().success());
    Outcome::from(child.wait_with_output().unwrap())
}

/// Nobody reads what it prints, so that it cannot end by itself.
#[test]
fn an_inspection_ends_at_once() {
    let scene = Scene::with_fixture("nmt");
    for signal in SIGNALS {
        let (reader, mut writer) = std::io::pipe().unwrap();
        // As much as a pipe of Linux holds, where nobody has changed that.
        std::io::Write::write_all(&mut writer, &[b'#'; 1 << 16]).unwrap();
        let mut inspect = hearing_signals(&scene.command("inspect ck"));
        let child = inspect.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let outcome = ended_by(signal, child);
        drop(reader);
        outcome.assert_refused(signal.0, 130, &["error[MOA-E13001]: interrupted\n"]);
    }
}

/// Before the model is loaded, and while it is.
#[test]
fn a_generation_that_has_not_begun_ends_at_once() {
    require_runtime();
    for (model, more) in [("nmt", ""), ("jetmoe/bf16", "--token-ids")] {
        let scene = Scene::with_fixture(model);
        if model == "nmt" {
            let dictionary = crate::common::data("nmt/dict.txt");
            fs::copy(dictionary, scene.path("dict.txt")).unwrap();
            assert_eq!(scene.moa("ck -o out --dict dict.txt").code, Some(0));
        } else {
            scene.accepts("ck -o out");
        }
        assert!(Command::new("mkfifo").arg(scene.path("lines.txt")).status().unwrap().success());
        for (input, signal) in ["lines.txt", "-"].into_iter().flat_map(|input| SIGNALS.map(|signal| (input, signal))) {
            let line = format!("generate out --threads 1 --input {input} {more}");
            let mut generate = hearing_signals(&scene.command(&line));
            let (waits, _writer) = std::io::pipe().unwrap();
            let child = generate.stdin(waits).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let outcome = ended_by(signal, child);
            outcome.assert_refused(&line, 130, &["error[MOA-E13001]: interrupted"]);
        }
    }
}
