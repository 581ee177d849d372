//! `moa-export generate` and the vocabulary flags of the export.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Output, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::Duration,
};

use moa_graphs::{Form, Precision};
use serde_json::Value;
use tempfile::TempDir;

use crate::{data, exported, exported_as, out, support_signals::hearing_signals};

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_moa-export"))
}

fn generate(folder: &Path, arguments: &[&str]) -> Output {
    program().arg("generate").arg(folder).args(["--threads", "1"]).args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Exit code and stderr.
fn failure(output: &Output) -> (i32, String) {
    assert!(output.stdout.is_empty());
    (output.status.code().unwrap(), String::from_utf8(output.stderr.clone()).unwrap())
}

#[test]
fn text_files_and_stdin_are_translated_in_order() {
    let folder = exported(Form::Function);
    let out = out(&folder);
    assert_eq!(text(&generate(&out, &["--input", "nine hundred"])), "neunhundert\n");
    let file = folder.path().join("lines.txt");
    fs::write(&file, "two hundred sixty-eight thousand five hundred three\n\ntwelve\r\nzero").unwrap();
    let expected = "zweihundertachtundsechzigtausendfünfhundertdrei\n\nzwölf\nnull\n";
    for backend in ["ort", "ort-function"] {
        let output = generate(&out, &["--input", file.to_str().unwrap(), "--backend", backend, "--batch", "2"]);
        assert_eq!(text(&output), expected);
    }
    let marked = folder.path().join("marked.txt");
    fs::write(&marked, "\u{feff}twelve\n").unwrap();
    let json = text(&generate(&out, &["--input", marked.to_str().unwrap(), "--json"]));
    let line: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&line["source"], &line["translations"][0]["text"]), (&"twelve".into(), &"zwölf".into()));
    let mut child = program()
        .arg("generate")
        .arg(&out)
        .args(["--input", "-", "--beam", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(text(&child.wait_with_output().unwrap()), expected);
}

#[test]
fn n_best_lists_and_json_carry_scores() {
    let folder = exported(Form::Function);
    let arguments = ["--input", "zero", "--beam", "4", "--nbest", "2", "--stop", "fairseq", "--lenpen", "0.6"];
    let lines = text(&generate(&out(&folder), &arguments));
    assert_eq!(lines, "-0.1755\tnull\n-2.2206\tnuull\n");
    let json = text(&generate(&out(&folder), &[arguments.as_slice(), &["--json"]].concat()));
    let value: Value = serde_json::from_str(json.trim_end()).unwrap();
    assert_eq!((&value["line"], &value["source"]), (&1.into(), &"zero".into()));
    let first = &value["translations"][0];
    assert_eq!(first["tokens"], serde_json::json!([62, 88, 60, 86, 2]));
    assert_eq!(first["log_probabilities"].as_array().unwrap().len(), 5);
}

#[test]
fn a_translation_is_as_long_as_was_allowed() {
    let folder = exported(Form::Function);
    let length = |options: &[&str]| {
        // Three tokens with the end.
        let input = ["--input", "nine hundred", "--beam", "1", "--json"];
        let json = text(&generate(&out(&folder), &[&input[..], options].concat()));
        let value: Value = serde_json::from_str(&json).unwrap();
        value["translations"][0]["tokens"].as_array().unwrap().len() - 1
    };
    assert_eq!(length(&[]), 4);
    assert_eq!(length(&["--max-len-b", "1"]), 1);
    assert_eq!(length(&["--max-len-a", "1", "--max-len-b", "0"]), 3);
    assert_eq!(length(&["--max-len-a", "0.7", "--max-len-b", "0"]), 2);
    assert_eq!(length(&["--max-len-a", "0.4", "--max-len-b", "1"]), 2);
    assert_eq!(length(&["--min-len", "40"]), 40);
}

/// Parts are printed one after the other, and lines of a part are translated by length.
#[test]
fn lines_carry_their_numbers() {
    let folder = exported(Form::Function);
    let lines = "nine hundred\nzero\n\n".repeat(12);
    let json = text(&generate(&out(&folder), &["--input", &lines, "--json", "--batch", "1", "--beam", "1"]));
    let found: Vec<_> = json.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect();
    assert_eq!(found.len(), 36);
    for ((number, line), found) in (1..).zip(lines.lines()).zip(&found) {
        let translated = match line {
            "zero" => serde_json::json!("null"),
            "" => Value::Null,
            _ => serde_json::json!("neunhundert"),
        };
        assert_eq!((&found["line"], &found["source"]), (&number.into(), &line.into()));
        assert_eq!(found["translations"][0]["text"], translated);
    }
}

/// Names of the rows of a table with their microseconds a step.
fn microseconds(table: &str) -> Vec<(String, f64)> {
    let cells = |row: &str| row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect();
    let rows = table.lines().map(cells).filter(|row: &Vec<String>| row.len() == 4);
    rows.map(|row| (row[0].clone(), row[2].parse().unwrap())).collect()
}

/// A whole is the sum of its parts, each rounded to one digit behind the point; the head is an operator of ours.
#[test]
fn the_profile_accounts_for_the_whole_time() {
    let folder = exported_as(Form::Function, Precision::Bf16);
    let output = generate(&out(&folder), &["--input", "nine hundred", "--profile"]);
    assert_eq!(text(&output), "neunhundert\n");
    let report = String::from_utf8(output.stderr).unwrap();
    assert!(report.starts_with("1 sentence in "), "{report}");
    let [_, timed, recorded] = report.split("where ").collect::<Vec<_>>()[..] else { panic!("{report}") };
    let [timed, recorded] = [timed, recorded].map(|table| microseconds(table.split_once('\n').unwrap().1));
    let assert_sum = |(name, whole): &(String, f64), parts: &[f64]| {
        let (sum, rounding) = (parts.iter().sum::<f64>(), 0.05 * (parts.len() + 1) as f64 + 1e-9);
        assert!((whole - sum).abs() <= rounding, "{name}: {whole} and {sum}\n{report}");
    };
    let times = |rows: &[(String, f64)]| rows.iter().map(|(_, time)| *time).collect::<Vec<_>>();
    let names: Vec<_> = timed.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["all", "encoder", "decoder", "host: cache reordering", "host: search and text"]);
    assert_sum(&timed[0], &times(&timed[1..]));
    let (wholes, nodes) = recorded.split_at(4);
    let is_ours = |name: &str| moa_schema::OPERATORS.iter().any(|ours| name.starts_with(&format!("{} x", ours.name)));
    let (ours, others): (Vec<_>, Vec<_>) = nodes.iter().cloned().partition(|(name, _)| is_ours(name));
    assert!(ours.iter().any(|(name, _)| name == "LMHead x1") && others.len() > 3, "{report}");
    assert_eq!((wholes[1].0.as_str(), wholes[2].0.as_str()), ("MoA operators", "other nodes"));
    assert_sum(&wholes[0], &times(&wholes[1..]));
    assert_sum(&wholes[1], &times(&ours));
    assert_sum(&wholes[2], &times(&others));
}

#[test]
fn bad_input_is_refused_with_its_line() {
    let folder = exported(Form::Function);
    let out = out(&folder);
    let file = folder.path().join("input");
    let refuse = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        failure(&generate(&out, &["--input", file.to_str().unwrap()]))
    };
    let (code, message) = refuse(b"one\ntwo\n\xff\xfe\n");
    assert_eq!(code, 3);
    assert!(message.contains(", line 3: not UTF-8"), "{message}");
    let (code, message) = refuse(b"one\n\0\n");
    assert_eq!(code, 3);
    assert!(message.contains(", line 2: a zero byte"), "{message}");
    let (code, message) = refuse(["one\n", &"two ".repeat(2000)].concat().as_bytes());
    assert_eq!(code, 3);
    let wanted = format!("{}, line 2: 2001 tokens with the end; the model has positions for 1024", file.display());
    assert!(message.contains(&wanted), "{message}");
    assert_eq!(failure(&generate(&out, &["--input", "one", "--nbest", "9"])).0, 2);
    assert_eq!(failure(&generate(&out, &["--input", "one", "--threads", "0"])).0, 2);
    assert_eq!(failure(&generate(folder.path(), &["--input", "one"])).0, 5);
    let (code, message) = failure(&generate(&out, &["--input", out.to_str().unwrap()]));
    assert!(code == 2 && message.contains("out: it is a folder"), "{message}");
    assert!(message.contains("a text that is the name of a folder goes to stdin: `… --input -`"), "{message}");
    let (code, message) = failure(&generate(&out, &["--input", "one", "--library", "no-such-library.so"]));
    assert_eq!(code, 6, "{message}");
    let (code, message) = failure(&generate(&out.join("decoder_model.onnx"), &["--input", "one"]));
    let help = format!("help: give the folder that holds it: {}\n", out.display());
    assert!(code == 2 && message.contains("decoder_model.onnx is no folder") && message.ends_with(&help), "{message}");
    let (code, message) = failure(&generate(&out, &["--input", "one", "--min-len", "10", "--max-len-b", "5"]));
    assert!(code == 2 && message.contains("min-len 10: more than max-len-b, 5"), "{message}");
    fs::copy(data("mlm/dict.txt"), out.join("dict.txt")).unwrap();
    let (code, message) = failure(&generate(&out, &["--input", "one"]));
    assert!(code == 3 && message.contains("export again with --dict FILE"), "{message}");
}

#[test]
fn nothing_gives_nothing() {
    let folder = exported(Form::Function);
    assert_eq!(text(&generate(&out(&folder), &["--input", ""])), "");
    assert_eq!(text(&generate(&out(&folder), &["--input", " "])), "\n");
}

/// A checkpoint of these files of the translator alone.
fn some_of_nmt(folder: &TempDir, names: &[&str]) -> PathBuf {
    let alone = folder.path().join("alone");
    fs::create_dir(&alone).unwrap();
    for name in names {
        fs::copy(data("nmt").join(name), alone.join(name)).unwrap();
    }
    alone
}

#[test]
fn an_export_takes_the_vocabulary_beside_it_or_named() {
    let folder = tempfile::tempdir().unwrap();
    let alone = some_of_nmt(&folder, &["model.safetensors", "config.json"]);
    let export =
        |arguments: &[&str]| program().arg(&alone).arg("-o").arg(out(&folder)).args(arguments).output().unwrap();
    let listed = text(&export(&[]));
    assert!(!listed.contains("generation.json"), "{listed}");
    let (dictionary, codes) = (data("nmt/dict.txt"), data("nmt/bpe.codes"));
    let named = ["--force", "--dict", dictionary.to_str().unwrap(), "--bpe-codes", codes.to_str().unwrap()];
    let listed = text(&export(&named));
    assert!(listed.contains("generation.json") && listed.contains("bpe.codes"), "{listed}");
    assert_eq!(text(&generate(&out(&folder), &["--input", "twelve"])), "zwölf\n");
    let listed = text(&export(&["--force", "--dict", dictionary.to_str().unwrap()]));
    assert!(listed.contains("bpe.codes"), "{listed}");
    let turned = folder.path().join("turned.txt");
    let symbols = fs::read_to_string(&dictionary).unwrap();
    fs::write(&turned, symbols.lines().rev().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let sides = |target: &Path| {
        let names = ["--force", "--source-dict", dictionary.to_str().unwrap(), "--target-dict"];
        export(&[&names[..], &[target.to_str().unwrap()]].concat())
    };
    let (code, message) = failure(&sides(&turned));
    assert!(
        code == 3 && message.starts_with("error[MOA-E0322]: ") && message.contains("turned.txt: id 4"),
        "{message}"
    );
    assert!(!out(&folder).join("dict.source.txt").exists());
    fs::write(&turned, &symbols).unwrap();
    text(&sides(&turned));
    for name in ["dict.source.txt", "dict.target.txt"] {
        assert!(fs::read_to_string(out(&folder).join(name)).unwrap() == symbols, "{name}");
    }
    assert_eq!(failure(&export(&["--force", "--bpe-codes", codes.to_str().unwrap()])).0, 2);
    assert_eq!(failure(&export(&["--force", "--source-dict", dictionary.to_str().unwrap()])).0, 2);
}

#[test]
fn pieces_without_codes_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let alone = some_of_nmt(&folder, &["model.safetensors", "config.json", "dict.txt"]);
    let export = || program().arg(&alone).arg("-o").arg(out(&folder)).arg("--force").output().unwrap();
    let told = "note: the dictionary has pieces of words (`@@`) and no codes lie beside it";
    assert!(String::from_utf8(export().stderr).unwrap().starts_with(told));
    fs::copy(data("nmt/bpe.codes"), alone.join("bpe.codes")).unwrap();
    let output = export();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// Without the account of time that comes behind all translations.
#[test]
fn a_translation_ends_where_nobody_reads_it() {
    let folder = exported(Form::Function);
    let mut child = program()
        .arg("generate")
        .arg(out(&folder))
        .args(["--input", "-", "--batch", "1", "--threads", "1", "--profile"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let lines = "nine hundred ninety-nine\n".repeat(40);
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

/// A program whose lines are answered while it waits for more.
struct Conversation {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Conversation {
    fn with(folder: &Path, arguments: &[&str]) -> Self {
        let mut command = program();
        command.arg("generate").arg(folder).args(["--input", "-", "--threads", "1"]).args(arguments);
        let mut command = hearing_signals(&command);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { stdin: child.stdin.take(), child, lines }
    }

    fn say(&mut self, text: &str) {
        self.stdin.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// The next line, which does not come where the program waits for the end of its input.
    fn answer(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(120)).expect("no answer")
    }

    fn end(mut self) -> (i32, String) {
        drop(self.stdin.take());
        let output = self.child.wait_with_output().unwrap();
        assert_eq!(self.lines.iter().next(), None);
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }
}

#[test]
fn lines_of_a_pipe_are_answered_as_they_come() {
    let folder = exported(Form::Function);
    let mut conversation = Conversation::with(&out(&folder), &["--json"]);
    for (number, line, expected) in [(1, "nine hundred", "neunhundert"), (2, "twelve", "zwölf")] {
        conversation.say(&format!("{line}\n"));
        let value: Value = serde_json::from_str(&conversation.answer()).unwrap();
        assert_eq!((&value["line"], &value["source"]), (&number.into(), &line.into()));
        assert_eq!(value["translations"][0]["text"], expected);
    }
    conversation.say("\nzero");
    drop(conversation.stdin.take());
    let blank: Value = serde_json::from_str(&conversation.answer()).unwrap();
    assert_eq!((&blank["line"], &blank["translations"]), (&3.into(), &serde_json::json!([])));
    let last: Value = serde_json::from_str(&conversation.answer()).unwrap();
    assert_eq!((&last["line"], &last["source"]), (&4.into(), &"zero".into()));
    assert_eq!(conversation.end(), (0, String::new()));
    for together in ["--buffer", "--batch"] {
        let mut conversation = Conversation::with(&out(&folder), &[together, "2"]);
        conversation.say("twelve\nzero\n");
        assert_eq!([conversation.answer(), conversation.answer()], ["zwölf", "null"], "{together}");
        conversation.say("nine hundred");
        drop(conversation.stdin.take());
        assert_eq!(conversation.answer(), "neunhundert", "{together}");
        assert_eq!(conversation.end(), (0, String::new()), "{together}");
    }
}

#[test]
fn a_bad_line_of_a_pipe_is_told_with_its_number() {
    let folder = exported(Form::Function);
    let long = "two ".repeat(2000);
    for (bad, part) in [("a\0b", "stdin, line 2: a zero byte"), (long.as_str(), "stdin, line 2: 2001 tokens")] {
        let mut conversation = Conversation::with(&out(&folder), &[]);
        conversation.say("twelve\n");
        assert_eq!(conversation.answer(), "zwölf");
        conversation.say(&format!("{bad}\n"));
        let (code, message) = conversation.end();
        assert!(code == 3 && message.contains(part), "{message}");
    }
    let output = generate(&out(&folder), &["--input", "-", "--nbest", "9"]);
    assert_eq!(failure(&output).0, 2, "options are refused before anything is read");
}

#[test]
fn tokens_that_no_dictionary_has_are_told_once() {
    let folder = exported(Form::Function);
    let out = out(&folder);
    let notes = |text: &str| {
        let file = folder.path().join("lines.txt");
        fs::write(&file, text).unwrap();
        let output = generate(&out, &["--input", file.to_str().unwrap()]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(notes("one\ntwelve\n"), "");
    let one = notes("one\ntwelve 日\n");
    assert!(
        one.starts_with("note: ") && one.ends_with("lines.txt, line 2: 1 of 5 tokens are not in the dictionary\n"),
        "{one}"
    );
    let several = notes("日\n\none 日\ntwo\n本 日\n");
    assert!(
        several.ends_with("line 1: 1 of 1 tokens are not in the dictionary, and 2 more lines have such tokens\n"),
        "{several}"
    );
}

/// A text that names a place in the file system is none, even where the place cannot be reached.
#[test]
#[cfg(unix)]
fn links_that_lead_nowhere_are_no_text() {
    let folder = exported(Form::Function);
    let out = out(&folder);
    for (link, target) in [("dangling", "nothing"), ("loop", "loop")] {
        std::os::unix::fs::symlink(target, folder.path().join(link)).unwrap();
        let output =
            program().current_dir(folder.path()).arg("generate").arg(&out).args(["--input", link]).output().unwrap();
        let (code, message) = failure(&output);
        assert!(code == 5 && message.contains(link), "{code} {message}");
    }
}

#[test]
fn lines_that_are_too_long_are_refused_or_left_out() {
    let folder = exported(Form::Function);
    let file = folder.path().join("lines.txt");
    let long = "two ".repeat(2000);
    fs::write(&file, format!("twelve\n{long}\nzero\n{long}\n")).unwrap();
    let input = ["--input", file.to_str().unwrap()];
    let (code, message) = failure(&generate(&out(&folder), &input));
    assert!(code == 3 && message.contains(", line 2: 2001 tokens") && message.contains("--skip-long"), "{message}");
    let output = generate(&out(&folder), &[&input[..], &["--skip-long"]].concat());
    let notes = String::from_utf8(output.stderr.clone()).unwrap();
    let note = |line| {
        let place = file.display();
        format!("note: {place}, line {line}: 2001 tokens with the end; the model has positions for 1024: left out\n")
    };
    assert_eq!(notes, note(2) + &note(4));
    assert_eq!(text(&output), "zwölf\n\nnull\n\n");
    let json = text(&generate(&out(&folder), &[&input[..], &["--skip-long", "--json"]].concat()));
    let second: Value = serde_json::from_str(json.lines().nth(1).unwrap()).unwrap();
    assert_eq!((&second["source"], &second["translations"]), (&long.as_str().into(), &serde_json::json!([])));
}

#[cfg(unix)]
#[test]
fn a_stdout_that_was_closed_is_an_error() {
    let folder = exported(Form::Function);
    let place = out(&folder);
    for redirection in [">&-", "> /dev/full"] {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec \"$0\" \"$@\" {redirection}"), env!("CARGO_BIN_EXE_moa-export")]);
        let output = shell.arg("generate").arg(&place).args(["--threads", "1", "--input", "twelve"]).output().unwrap();
        let (code, message) = failure(&output);
        assert!(code == 5 && message.starts_with("error[MOA-E0501]: stdout: "), "{redirection}: {message}");
    }
}

#[cfg(unix)]
fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_cleanly() {
    let folder = exported(Form::Function);
    let file = folder.path().join("lines.txt");
    let lines = "nine hundred ninety-nine thousand nine hundred ninety-nine\n".repeat(200_000);
    fs::write(&file, lines).unwrap();
    let mut generate = program();
    generate.arg("generate").arg(out(&folder)).args(["--batch", "1", "--threads", "1", "--input"]).arg(&file);
    let mut generate = hearing_signals(&generate);
    let mut child = generate.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 1];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("interrupted after ") && message.contains(" of 200000 lines"), "{message}");
    assert_eq!(output.stdout.last(), Some(&b'\n'), "only whole lines were printed");
}

#[cfg(unix)]
#[test]
fn an_interrupt_does_not_wait_for_a_line() {
    let folder = exported(Form::Function);
    let mut conversation = Conversation::with(&out(&folder), &[]);
    conversation.say("twelve\n");
    assert_eq!(conversation.answer(), "zwölf");
    interrupt(&conversation.child);
    let output = conversation.child.wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(130) && message.contains(": interrupted"), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    drop(conversation.stdin);
}

/// Ctrl-C at a terminal ends what stands before the pipe too, and with it the lines.
#[cfg(unix)]
#[test]
fn lines_that_an_interrupt_ended_are_not_all() {
    const PRODUCER: &str = r#"echo twelve; read answered; printf %s "$1"; exec >&-; kill -INT "$0""#;
    let folder = exported(Form::Function);
    for cut in ["", "nine hund"] {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut generate = program();
        generate.arg("generate").arg(out(&folder)).args(["--input", "-", "--threads", "1"]);
        let mut generate = hearing_signals(&generate);
        let mut child = generate.stdin(reader).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let producer = Command::new("sh")
            .args(["-c", PRODUCER, &child.id().to_string(), cut])
            .stdin(Stdio::piped())
            .stdout(writer)
            .spawn();
        let mut producer = producer.unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(answers.next().unwrap().unwrap(), "zwölf");
        drop(producer.stdin.take());
        assert!(producer.wait().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(130) && message.contains(": interrupted while it waited"), "{message}");
        assert_eq!((message.lines().count(), answers.count()), (1, 0), "{message}");
    }
}
