//! What the program takes for its input, what it says where files are missing, and which lines answer which.

use std::{fs, process::Command};

use moa_graphs::Form;
use tempfile::TempDir;

use crate::{exported, out};

/// Exit code, stdout and stderr of the program with the export in `folder`.
fn generate(folder: &TempDir, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moa-export"));
    command.arg("generate").arg(out(folder)).args(["--threads", "1"]).args(arguments);
    let output = command.output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), stdout, stderr)
}

#[test]
fn words_that_may_be_files_are_told() {
    let folder = exported(Form::Function);
    let (code, _, told) = generate(&folder, &["--input", "test.nl"]);
    assert_eq!(code, Some(0));
    assert!(told.starts_with("note: there is no file test.nl; it is taken as the text\n"), "{told}");
    let (code, _, told) = generate(&folder, &["--input", "zero."]);
    assert!(code == Some(0) && !told.contains("no file"), "{told}");
    let (code, stdout, _) = generate(&folder, &["--input", "test.de"]);
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
}

#[test]
fn missing_files_of_a_vocabulary_come_from_the_export() {
    let folder = exported(Form::Function);
    let help = "help: put it there from a copy of the export, or export again with --force\n";
    for name in ["bpe.codes", "dict.txt"] {
        let path = out(&folder).join(name);
        let content = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let (code, _, told) = generate(&folder, &["--input", "zero"]);
        assert!(code == Some(5) && told.contains(name) && told.ends_with(help), "{name}: {told}");
        fs::write(path, content).unwrap();
    }
}

#[test]
fn a_blank_line_of_n_best_lists_gives_one_line() {
    let folder = exported(Form::Function);
    let (_, lines, _) = generate(&folder, &["--input", "\nzero\n\n", "--nbest", "2"]);
    let lines: Vec<_> = lines.lines().map(|line| line.split('\t').count()).collect();
    assert_eq!(lines, [1, 2, 2, 1]);
}
