//! Continuing prompts with exported causal language models, beside upstream's tokens.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use moa_export::{
    backend::{OrtOperators, OrtOptions},
    checkpoint::Checkpoint,
    export::{ExportError, ExportOptions, SideFileOptions, export},
    generate::{
        Continuation, Finish, GenerateError, Prompt, SamplingOptions, TextGenerator, TextGeneratorOptions,
        holds_causal_lm,
    },
};
use moa_graphs::{Form, Options, Precision};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{data, out};

/// Models, each with how many of upstream's tokens there are at least.
const MODELS: [(&str, usize); 4] =
    [("jetmoe/bf16", 180), ("jetmoe/sharded", 180), ("molm/mlp", 40), ("molm/linear", 40)];

pub(crate) fn exported(model: &str, form: Form, last_logits: bool) -> TempDir {
    exported_as(model, Options { form, precision: Precision::Fp32, router_outputs: false, last_logits })
}

fn exported_as(model: &str, graph: Options) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let side_files = SideFileOptions { beside: Some(data(model)), ..SideFileOptions::default() };
    let checkpoint = Checkpoint::open(&data(model), None).unwrap();
    let options = ExportOptions { graph, side_files, ..ExportOptions::default() };
    export(&checkpoint, &out(&folder), &options).unwrap();
    folder
}

fn open(folder: &Path, operators: OrtOperators, batch: usize) -> Result<TextGenerator, GenerateError> {
    let runtime = OrtOptions { threads: Some(1), ..OrtOptions::default() };
    TextGenerator::open(folder, TextGeneratorOptions { operators, runtime, batch, ..TextGeneratorOptions::default() })
}

pub(crate) fn generator(folder: &TempDir, operators: OrtOperators, batch: usize) -> TextGenerator {
    open(&out(folder), operators, batch).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

/// Prompts with upstream's tokens; these end at the first padding token, after which every router is a tie.
pub(crate) fn goldens(model: &str) -> Vec<(Prompt, Vec<i64>)> {
    let goldens = read(&data(model).join("goldens.json"));
    let cut = |mut tokens: Vec<i64>| {
        let end = tokens.iter().position(|id| *id == 0).map_or(tokens.len(), |place| place + 1);
        tokens.truncate(end);
        tokens
    };
    let singles = goldens["generate"]["singles"].as_array().unwrap();
    let mut pairs: Vec<_> =
        singles.iter().map(|one| (Prompt::Tokens(ids(&one["prompt"])), cut(ids(&one["new_tokens"])))).collect();
    let batch = &goldens["generate"]["left_padded_batch"];
    for (row, tokens) in batch["input_ids"].as_array().unwrap().iter().zip(batch["new_tokens"].as_array().unwrap()) {
        let real = ids(row).into_iter().skip_while(|id| *id == 0).collect();
        pairs.push((Prompt::Tokens(real), cut(ids(tokens))));
    }
    pairs
}

pub(crate) const GREEDY: SamplingOptions =
    SamplingOptions { max_new: 32, temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0, ignore_eos: true };

#[test]
fn greedy_tokens_are_upstreams_alone_and_in_batches() {
    for (model, least) in MODELS {
        let (prompts, expected): (Vec<_>, Vec<_>) = goldens(model).into_iter().unzip();
        assert!(expected.iter().map(Vec::len).sum::<usize>() > least);
        for (form, operators, last_logits) in [
            (Form::Function, OrtOperators::Library, false),
            (Form::Function, OrtOperators::Functions, false),
            (Form::Fused, OrtOperators::Library, true),
            (Form::Standard, OrtOperators::Functions, true),
        ] {
            let folder = exported(model, form, last_logits);
            for batch in [1, 3, 32] {
                let mut generator = generator(&folder, operators, batch);
                assert_eq!(generator.shares_caches(), operators == OrtOperators::Library);
                let found = generator.generate(&prompts, &GREEDY).unwrap();
                for ((prompt, expected), found) in prompts.iter().zip(&expected).zip(&found) {
                    assert_eq!(found.tokens[..expected.len()], expected[..], "{model}, {form:?}, {batch}: {prompt:?}");
                    assert_eq!((found.finish, found.text.as_deref()), (Finish::Length, None));
                }
            }
        }
    }
}

#[test]
fn sampling_depends_on_the_seed_and_not_on_the_batch() {
    let folder = exported("jetmoe/sharded", Form::Function, false);
    let (prompts, _): (Vec<_>, Vec<_>) = goldens("jetmoe/sharded").into_iter().unzip();
    let sampled = |seed, batch| -> Vec<Continuation> {
        let options = SamplingOptions { temperature: 1.5, top_k: 40, top_p: 0.98, seed, ..GREEDY };
        generator(&folder, OrtOperators::Library, batch).generate(&prompts, &options).unwrap()
    };
    let first = sampled(3, 32);
    assert_eq!(first, sampled(3, 32));
    assert_eq!(first, sampled(3, 1));
    assert_ne!(first, sampled(4, 32));
}

/// A tokenizer of the words `t0` to `t127`.
fn write_tokenizer(folder: &Path) {
    let vocabulary: serde_json::Map<_, _> = (0..128).map(|id| (format!("t{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "t3" },
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

#[test]
fn text_goes_through_the_tokenizer_and_comes_in_pieces() {
    let folder = exported("jetmoe/sharded", Form::Function, false);
    write_tokenizer(&out(&folder));
    let mut generator = generator(&folder, OrtOperators::Library, 8);
    let prompts = [Prompt::from("t50"), Prompt::Tokens(vec![50])];
    let mut pieces = [String::new(), String::new()];
    let mut tokens = [Vec::new(), Vec::new()];
    let found = generator.generate_streaming(&prompts, &GREEDY, &mut |new| {
        pieces[new.prompt].push_str(new.text);
        tokens[new.prompt].push(new.token);
    });
    let found = found.unwrap();
    assert_eq!(found[0], found[1]);
    let expected: String = found[0].tokens.iter().map(|id| format!(" t{id}")).collect();
    assert_eq!(found[0].text.as_ref(), Some(&expected));
    assert_eq!(pieces, [expected.clone(), expected]);
    assert_eq!(tokens, [found[0].tokens.clone(), found[0].tokens.clone()]);
}

#[test]
fn folders_of_others_are_read_by_their_genai_config() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let place = out(&folder);
    fs::rename(place.join("model.onnx"), place.join("decoder.onnx")).unwrap();
    fs::remove_file(place.join("config.json")).unwrap();
    let path = place.join("genai_config.json");
    let mut config = read(&path);
    config["model"]["decoder"]["filename"] = "decoder.onnx".into();
    config["model"]["eos_token_id"] = json!([2, 5]);
    fs::write(&path, config.to_string()).unwrap();
    assert!(holds_causal_lm(&place));
    let found = generator(&folder, OrtOperators::Library, 1).generate(&[Prompt::Tokens(vec![9])], &GREEDY);
    let free = found.unwrap()[0].tokens.clone();
    assert_eq!(free.len(), 32);
    let options = SamplingOptions { ignore_eos: false, ..GREEDY };
    let ends = |first: i64, second: i64| {
        let mut config = config.clone();
        config["model"]["eos_token_id"] = json!([first, second]);
        fs::write(&path, config.to_string()).unwrap();
        let found = generator(&folder, OrtOperators::Library, 1).generate(&[Prompt::Tokens(vec![9])], &options);
        let found = found.unwrap().remove(0);
        (found.tokens, found.finish)
    };
    let none = (0..128).find(|id| !free.contains(id)).unwrap();
    let end = free[3];
    let expected = &free[..=free.iter().position(|token| *token == end).unwrap()];
    for (first, second) in [(none, end), (end, none)] {
        assert_eq!(ends(first, second), (expected.to_vec(), Finish::Eos), "{first}, {second}");
    }
    for (name, message) in [
        ("../decoder.onnx", "genai_config.json names it, and it is outside the folder"),
        ("none.onnx", "none.onnx is not there"),
    ] {
        config["model"]["decoder"]["filename"] = name.into();
        fs::write(&path, config.to_string()).unwrap();
        let error = open(&place, OrtOperators::Library, 1).unwrap_err().to_string();
        assert!(error.ends_with(message), "{error}");
    }
}

#[test]
fn prompts_and_options_are_checked_before_anything_runs() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let mut generator = generator(&folder, OrtOperators::Library, 2);
    for (prompt, message) in [
        (Prompt::Tokens(vec![5, 128]), "prompt 2: token 128 is none of the model's 128"),
        (Prompt::Tokens(vec![-1]), "prompt 2: token -1 is none of the model's 128"),
        (
            Prompt::Tokens(vec![7; 256]),
            "prompt 2: 256 tokens; the model has positions for 256, the new tokens included",
        ),
    ] {
        let error = generator.generate(&[Prompt::Tokens(vec![7]), prompt], &GREEDY).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let error = generator.generate(&[Prompt::from("text")], &GREEDY).unwrap_err();
    assert!(matches!(&error, GenerateError::Missing { path } if path.ends_with("tokenizer.json")), "{error}");
    let options = SamplingOptions { max_new: 500, ..GREEDY };
    let found = generator.generate(&[Prompt::Tokens(vec![7; 250])], &options).unwrap();
    assert_eq!((found[0].tokens.len(), found[0].finish), (6, Finish::Length));
}

#[test]
fn blank_prompts_are_continued_by_nothing() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let mut generator = generator(&folder, OrtOperators::Library, 2);
    let real = Prompt::Tokens(vec![7]);
    let alone = generator.generate(std::slice::from_ref(&real), &GREEDY).unwrap().remove(0);
    let blanks = [Prompt::Tokens(vec![]), Prompt::from(""), Prompt::from(" \t")];
    let blank = Continuation { text: None, tokens: vec![], finish: Finish::Blank, prompt_tokens: 0 };
    assert_eq!(generator.generate(&blanks, &GREEDY).unwrap(), vec![blank.clone(); 3]);
    for place in 0..4 {
        let mut prompts = blanks.to_vec();
        prompts.insert(place, real.clone());
        let mut expected = vec![blank.clone(); 3];
        expected.insert(place, alone.clone());
        assert_eq!(generator.generate(&prompts, &GREEDY).unwrap(), expected, "{place}");
    }
}

#[test]
fn batches_are_handed_over_when_they_are_done() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let mut generator = generator(&folder, OrtOperators::Library, 2);
    let prompts: Vec<_> = (5..10).map(|id| Prompt::Tokens(vec![id])).collect();
    let (mut sizes, mut all, mut seen) = (Vec::new(), Vec::new(), 0);
    let mut take = |batch: Vec<Continuation>| {
        sizes.push(batch.len());
        all.extend(batch);
    };
    generator.generate_batches(&prompts, 0, &GREEDY, &mut |_| seen += 1, &mut take).unwrap();
    assert_eq!((sizes, seen), (vec![2, 2, 1], 5 * GREEDY.max_new));
    assert_eq!(all, generator.generate(&prompts, &GREEDY).unwrap());
}

#[test]
fn the_folder_describes_the_model_to_other_tools() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    fs::create_dir(&checkpoint).unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(data("jetmoe/bf16").join(name), checkpoint.join(name)).unwrap();
    }
    write_tokenizer(&checkpoint);
    fs::write(checkpoint.join("chat_template.jinja"), "{{ messages }}").unwrap();
    let library = folder.path().join("library");
    fs::write(&library, "a library").unwrap();
    let files = SideFileOptions {
        beside: Some(checkpoint.clone()),
        operator_library: Some(library),
        ..SideFileOptions::default()
    };
    let export = |out: &Path, side_files: SideFileOptions| {
        let opened = Checkpoint::open(&checkpoint, None).unwrap();
        export(&opened, out, &ExportOptions { side_files, force: true, ..ExportOptions::default() })
    };
    export(&out(&folder), files.clone()).unwrap();
    let copied = ["generation_config.json", "tokenizer.json", "chat_template.jinja"];
    for name in copied {
        assert_eq!(fs::read(out(&folder).join(name)).unwrap(), fs::read(checkpoint.join(name)).unwrap());
    }
    let config = read(&out(&folder).join("config.json"));
    assert_eq!((&config["num_attention_heads"], &config["hidden_size"]), (&2.into(), &32.into()));
    assert_eq!(config["moa_export"]["replaced"], json!({ "hidden_size": 64, "num_attention_heads": 4 }));
    assert_eq!((&config["dtype"], &config["vocab_size"]), (&"float32".into(), &128.into()));
    let model = &read(&out(&folder).join("genai_config.json"))["model"];
    assert_eq!((&model["context_length"], &model["eos_token_id"]), (&256.into(), &2.into()));
    assert_eq!((&model["decoder"]["head_size"], &model["decoder"]["num_key_value_heads"]), (&16.into(), &2.into()));
    assert_eq!(read(&out(&folder).join("genai_config.json"))["search"]["past_present_share_buffer"], json!(true));
    let named = model["decoder"]["session_options"]["custom_ops_library"].as_str().unwrap();
    assert_eq!(fs::read(out(&folder).join(named)).unwrap(), b"a library");

    let error = export(&checkpoint, files.clone()).unwrap_err();
    assert!(matches!(error, ExportError::OwnFolder { .. }), "{error}");
    assert_eq!(read(&checkpoint.join("config.json")), read(&data("jetmoe/bf16/config.json")));
    let alone = folder.path().join("alone/model.onnx");
    let report = export(&alone, SideFileOptions { operator_library: None, ..files }).unwrap();
    assert_eq!(report.files.len(), 1, "one file was asked for");
}

pub(crate) fn command(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moa-export"));
    command.arg("generate").arg(folder).args(["--threads", "1"]).args(arguments).output().unwrap()
}

fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Exit code and stderr.
fn refused(folder: &Path, arguments: &[&str]) -> (i32, String) {
    let output = command(folder, arguments);
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn the_command_prints_text_ids_and_json() {
    let folder = exported("jetmoe/sharded", Form::Function, false);
    let place: PathBuf = out(&folder);
    let run = |input: &str, more: &[&str]| {
        let most = if more.contains(&"--max-new") { &[][..] } else { &["--max-new", "3"] };
        stdout(command(&place, &[&["--input", input, "--ignore-eos"], most, more].concat()))
    };
    let one = run("50", &["--token-ids"]);
    assert_eq!(one.split(' ').count(), 3);
    let two = run("50\n50", &["--token-ids"]);
    assert_eq!(two, format!("{one}{one}"));
    let value: Value = serde_json::from_str(&run("50", &["--token-ids", "--json"])).unwrap();
    let shown = ids(&value["tokens"]).iter().map(i64::to_string).collect::<Vec<_>>().join(" ");
    assert_eq!((format!("{shown}\n"), &value["finish"]), (one, &"length".into()));
    let greedy = run("50", &["--token-ids"]);
    let drawn = |more: &[&str]| {
        let options = ["--token-ids", "--max-new", "12"];
        let streamed = run("50", &[&options[..], more].concat());
        let collected: Value = serde_json::from_str(&run("50", &[&options[..], &["--json"], more].concat())).unwrap();
        let shown = ids(&collected["tokens"]).iter().map(i64::to_string).collect::<Vec<_>>().join(" ");
        assert_eq!(format!("{shown}\n"), streamed, "{more:?}");
        streamed
    };
    let seeds = ["1", "2"].map(|seed| drawn(&["--temperature", "2", "--seed", seed]));
    assert_ne!(seeds[0], seeds[1]);
    assert_eq!(seeds[0], drawn(&["--temperature", "2", "--seed", "1"]));
    for one in [&["--top-k", "1", "--seed", "1"][..], &["--top-p", "0.000001", "--seed", "1"], &["--temperature", "0"]]
    {
        assert!(drawn(one).starts_with(greedy.trim_end()), "{one:?}");
    }
    let [all, warm] = [&["--top-k", "0", "--seed", "1"][..], &["--temperature", "1", "--seed", "1"]].map(drawn);
    assert_eq!(all, warm, "--top-k 0 limits nothing, and draws as a temperature of 1 does");
    assert_ne!(all, drawn(&[]), "--top-k draws no token");
    write_tokenizer(&place);
    let text = run("t50", &[]);
    let expected: String = ids(&value["tokens"]).iter().map(|id| format!(" t{id}")).collect();
    assert_eq!(text, format!("{expected}\n"));
    assert_eq!(run("t50\nt50", &["--whole-input"]).lines().count(), 1);
}

/// Blank lines stay, and so does what stands before and after them.
#[test]
fn the_command_says_where_less_follows_than_was_asked_for() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let place = out(&folder);
    let run = |input: &str, most: &str, more: &[&str]| {
        let options = ["--input", input, "--token-ids", "--ignore-eos", "--max-new", most];
        let output = command(&place, &[&options[..], more].concat());
        let notes = String::from_utf8(output.stderr.clone()).unwrap();
        (stdout(output), notes)
    };
    let (one, notes) = run("5 6", "3", &[]);
    assert_eq!(notes, "");
    let blank = "note: 1 prompt without a token: nothing follows a blank line\n";
    for batch in ["1", "32"] {
        let found = run("5 6\n\n5 6\n", "3", &["--batch", batch]);
        assert_eq!(found, (format!("{one}\n{one}"), blank.to_owned()));
    }
    assert_eq!(run(" ", "3", &[]), ("\n".to_owned(), blank.to_owned()));
    assert_eq!(run("", "3", &[]), (String::new(), String::new()));
    let (json, _) = run("\n5 6", "3", &["--json"]);
    let value: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!((&value["finish"], &value["tokens"], json.lines().count()), (&"blank".into(), &json!([]), 2));
    let (json, _) = run("5\n6\n7", "3", &["--json", "--batch", "1"]);
    let prompts = json.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["prompt"].clone());
    assert_eq!(prompts.collect::<Vec<_>>(), [json!([5]), json!([6]), json!([7])]);
    let (tokens, notes) = run("5 6", "5000", &[]);
    assert_eq!(tokens.split(' ').count(), 254);
    let cut = "ended at the last of the model's 256 positions, before 5000 new tokens\n";
    assert_eq!(notes, format!("note: 1 prompt {cut}"));
    assert_eq!(run("5 6\n7", "5000", &["--json"]).1, format!("note: 2 prompts {cut}"));
}

#[test]
fn the_command_refuses_what_it_cannot_do() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let place = out(&folder);
    for (arguments, code, words) in [
        (&["--input", "5", "--token-ids", "--beam", "2"][..], 2, "--beam is for translation models"),
        (&["--input", "x", "--token-ids"], 2, "line 1: \"x\" is no token id"),
        (&["--input", "5", "--token-ids", "--top-p", "2"], 2, "top-p 2"),
        (&["--input", "5", "--token-ids", "--top-p", "-1"], 2, "MOA-E0225]: top-p -1: it must be more than 0"),
        (
            &["--input", "5", "--token-ids", "--temperature", "-1"],
            2,
            "MOA-E0225]: temperature -1: it must be a finite number of 0 or more",
        ),
        (&["--input", "5", "--token-ids", "--top-k", "-1"], 2, "invalid value '-1' for '--top-k <K>'"),
        (&["--input", "words"], 5, "tokenizer.json is not there"),
        (&["--input", "5 500", "--token-ids"], 3, "token 500 is none of the model's 128"),
        (&["--input", "", "--token-ids", "--batch", "0"], 2, "batch 0"),
    ] {
        let (found, message) = refused(&place, arguments);
        assert_eq!(found, code, "{arguments:?}: {message}");
        assert!(message.contains(words), "{arguments:?}: {message}");
    }
    let lines = folder.path().join("lines.ids");
    std::fs::write(&lines, "5\nx\n").unwrap();
    let (found, message) = refused(&place, &["--input", lines.to_str().unwrap(), "--token-ids"]);
    assert!(found == 3 && message.contains("lines.ids, line 2: \"x\" is no token id"), "{found}: {message}");
    let translator = crate::exported(Form::Function);
    let (code, message) = refused(&out(&translator), &["--input", "one", "--top-k", "3"]);
    assert_eq!((code, message.contains("--top-k is for causal language models")), (2, true), "{message}");
    for (folder, input, flag, instead) in [
        (out(&translator), "one", "--max-new", "--max-len-a and --max-len-b"),
        (place, "5", "--max-len-b", "--max-new"),
    ] {
        let (code, message) = refused(&folder, &["--input", input, flag, "9"]);
        assert_eq!((code, message.contains(instead)), (2, true), "{message}");
    }
}

/// A link that leads nowhere is a graph that cannot be read, and no sign of a translation model.
#[test]
#[cfg(unix)]
fn a_graph_that_is_a_link_to_itself_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("model.onnx", folder.path().join("model.onnx")).unwrap();
    let (code, message) = refused(folder.path(), &["--input", "5", "--token-ids"]);
    assert_eq!((code, message.contains("model.onnx: ")), (5, true), "{message}");
}

/// Tokens are drawn by the number of a prompt, whether prompts come one by one or in a file.
#[test]
fn prompts_of_a_pipe_are_continued_as_those_of_a_file() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    let options = ["--token-ids", "--ignore-eos", "--max-new", "4", "--temperature", "1", "--seed", "3"];
    let prompts = "5 6\n5 6\n\n7\n";
    for json in [&[][..], &["--json"]] {
        let arguments = [&options[..], json].concat();
        let expected =
            stdout(command(&out(&folder), &[&["--input", prompts, "--batch", "1"], &arguments[..]].concat()));
        let mut piped = Command::new(env!("CARGO_BIN_EXE_moa-export"));
        piped.arg("generate").arg(out(&folder)).args(["--threads", "1", "--input", "-"]).args(&arguments);
        let mut child = piped.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(prompts.as_bytes()).unwrap();
        assert_eq!(stdout(child.wait_with_output().unwrap()), expected);
        let lines: Vec<_> = expected.lines().collect();
        assert!(lines.len() == 4 && lines[0] != lines[1], "{expected}");
    }
}

/// One prompt is printed token by token, several batch by batch; neither comes to the model's last position, which is
/// told.
#[test]
fn a_generation_ends_where_nobody_reads_it() {
    let folder = exported("jetmoe/bf16", Form::Function, false);
    for prompts in [1, 8] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moa-export"));
        command.arg("generate").arg(out(&folder)).args(["--token-ids", "--ignore-eos", "--threads", "1"]);
        let mut child = command
            .args(["--max-new", "3000", "--batch", "1", "--input", "-", "--buffer", &prompts.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        child.stdin.take().unwrap().write_all("5 6\n".repeat(prompts).as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(
            (output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()),
            (Some(0), ""),
            "{prompts}"
        );
    }
}

#[test]
fn fewer_bits_continue_the_same() {
    let prompt = [Prompt::Tokens(vec![5, 17, 3, 9])];
    let tokens_on = |precision: Precision, operators: OrtOperators| -> Vec<i64> {
        let graph = Options { form: Form::Function, precision, router_outputs: false, last_logits: true };
        let folder = exported_as("jetmoe/bf16", graph);
        let options = SamplingOptions { max_new: 8, ..GREEDY };
        let found = generator(&folder, operators, 1).generate(&prompt, &options).unwrap();
        found[0].tokens.clone()
    };
    let tokens = |precision| tokens_on(precision, OrtOperators::Library);
    let exact = tokens(Precision::Fp32);
    assert_eq!(exact.len(), 8);
    assert_eq!(tokens(Precision::Bf16), exact, "the checkpoint is stored in bf16");
    assert_eq!(tokens(Precision::Fp16).len(), 8);
    for integers in [Precision::Int8, Precision::Int4] {
        assert_eq!(tokens(integers), tokens_on(integers, OrtOperators::Functions));
    }
}
