//! What the program takes for its input.

use std::process::Command;

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
