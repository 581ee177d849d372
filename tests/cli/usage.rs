//! What was typed is not what can be done.

use moa_export::export::OPSETS;

use crate::{
    model::Model,
    scene::{Outcome, Scene},
};

#[test]
fn without_arguments_the_help_is_shown() {
    let outcome = Scene::new().moa("");
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""));
    assert!(outcome.stderr.contains("Usage: moa-export CHECKPOINT -o OUT"), "{}", outcome.stderr);
}

#[test]
fn help_and_version_are_no_errors() {
    for line in [
        "--help",
        "-h",
        "help",
        "help --help",
        "help -h",
        "help run",
        "--version",
        "verify --help",
        "run -h",
        "ops --help",
    ] {
        assert!(!Scene::new().accepts(line).is_empty(), "{line}");
    }
}

/// Each of these is refused before anything is read.
#[test]
fn wrong_arguments_name_themselves() {
    let scene = Scene::with(&Model::layer());
    let cases = [
        ("--bogus", "--bogus"),
        ("ck", "help: say where the result goes: -o OUT\n"),
        ("build m.onnx", "help: say where the result goes: -o PLAN\n"),
        ("generate ck", "--input 'two words'"),
        ("generate ck", "help: --input - reads the lines of stdin"),
        ("profile m.onnx", "--inputs FILE"),
        ("ck -o", "--output"),
        ("ck -o m.onnx --frm standard", "--frm"),
        ("ck -o m.onnx --form fuse", "fused"),
        ("ck -o m.onnx --dtype fp8", "fp32"),
        ("ck -o m.onnx --dtype FP16", "help: a similar value exists: 'fp16'\n"),
        ("plan --dtype Bf16", "help: a similar value exists: 'bf16'\n"),
        ("ck -o m.onnx --form Fused", "help: a similar value exists: 'fused'\n"),
        ("ck -o m.onnx --gate-mode softmax", "softmax_topk_renorm"),
        ("ck -o m.onnx --opset x", "'--opset <N>': it must be a whole number"),
        ("ck -o m.onnx --opset 18 --opset 19", "--opset"),
        ("ck out", "'out' follows the checkpoint, where only options do; the output is given with -o"),
        ("ck verify -o m.onnx", "'verify' follows the checkpoint"),
        ("ck -o m.onnx --external-data maybe", "always"),
        ("verify m.onnx", "help: name what it was exported from: --checkpoint CHECKPOINT\n"),
        ("verify m.onnx --checkpoint ck --backends cuda", "ort-function"),
        ("verify m.onnx --checkpoint ck --atol big", "'--atol <X>': it must be a number"),
        ("verify m.onnx --checkpoint ck --seed -1", "'-1' for '--seed <N>': it must not be negative"),
        ("verify m.onnx --checkpoint ck --seed x", "'x' for '--seed <N>': it must be a whole number"),
        ("verify m.onnx --checkpoint ck --seed 18446744073709551616", "'--seed <N>': it is too large"),
        ("verify m.onnx --checkpoint ck --gate-mode softmax_topk", "help: run `moa-export verify --help`"),
        ("run m.onnx", "--inputs"),
        ("run m.onnx --inputs i --outputs o --backend torch", "tract"),
        ("ops now", "now"),
    ];
    for (line, named) in cases {
        scene.refuses(line, 2, &[named]);
    }
}

#[test]
fn four_bit_integers_need_an_operator_set_that_has_them() {
    let scene = Scene::with(&Model::layer());
    for dtype in ["int4", "int4-products"] {
        for opset in [0, 18, 20] {
            let parts = [format!("opset {opset} has no int4, which begins with opset 21"), "leave it out".into()];
            let line = format!("ck -o m.onnx --dtype {dtype} --opset {opset}");
            scene.refuses(&line, 4, &parts.each_ref().map(String::as_str));
        }
        scene.accepts(&format!("ck -o m.onnx --dtype {dtype} --force"));
        scene.accepts(&format!("ck -o n.onnx --dtype {dtype} --opset 21 --force"));
        assert_eq!(scene.read("m.onnx"), scene.read("n.onnx"));
    }
    let help = scene.accepts("export --help");
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("[default: 18, or 21 with --dtype int4 or int4-products]"), "{help}");
    let names = ["fp32", "fp16", "bf16", "bf16-products", "int8", "int8-products", "int4", "int4-products"];
    let places = names.map(|name| help.find(&format!("- {name}: ")));
    assert!(places.is_sorted() && places[0].is_some(), "{help}");
}

#[test]
fn values_out_of_range_are_refused() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o m.onnx");
    let (oldest, newest) = (OPSETS.start(), OPSETS.end());
    for opset in [0, oldest - 1, newest + 1, i64::MAX] {
        let range = format!("{oldest} to {newest}");
        scene.refuses(&format!("ck -o n.onnx --opset {opset}"), 4, &[&format!("opset {opset}"), &range]);
    }
    let cases: [(&str, u8, &[&str]); 17] = [
        ("ck -o n.onnx --opset -99999999999999999999", 2, &["--opset", "it is too small"]),
        ("bench m.onnx --seq 99999999999999999999", 2, &["--seq", "99999999999999999999 is more than 1048576"]),
        ("bench m.onnx --seq -1", 2, &["--seq", "\"-1\" is no size: it must be a whole number"]),
        ("generate out --input x --batch 99999999999999999999", 2, &["--batch", "it is too large"]),
        ("verify m.onnx --checkpoint ck --atol -1e-3", 2, &["--atol must be a number from 0, found -0.001"]),
        ("generate out --input x --beam=", 2, &["--beam", "it must be a whole number"]),
        ("generate out --input x --lenpen --beam 3", 2, &["--lenpen", "a value is required"]),
        ("ck -o -", 2, &["--output <OUT>", "standard output", "./-"]),
        ("baseline mlm-8k8e128d -o -", 2, &["--output <OUT>", "standard output"]),
        ("run m.onnx --inputs ck/model.safetensors --outputs -", 2, &["--outputs <FILE>", "standard output"]),
        ("verify m.onnx --checkpoint ck --report -", 2, &["--report <FILE.html>", "standard output"]),
        ("verify m.onnx --checkpoint ck --backends tract,ort,tract", 2, &["backend tract is named twice", "help: "]),
        ("verify m.onnx --checkpoint ck --atol=-1", 2, &["--atol", "-1"]),
        ("verify m.onnx --checkpoint ck --atol NaN", 2, &["--atol", "NaN"]),
        ("verify m.onnx --checkpoint ck --rtol inf", 2, &["--rtol", "inf"]),
        ("verify m.onnx --checkpoint ck --threads 0", 2, &["--threads", "at least 1"]),
        ("run m.onnx --inputs ck/model.safetensors --outputs o --threads 0", 2, &["--threads", "at least 1"]),
    ];
    for (line, code, parts) in cases {
        scene.refuses(line, code, parts);
    }
}

/// Threads that wait by spinning, on a machine with far fewer processors, leave no time to anything else.
#[test]
fn more_threads_than_a_machine_can_serve_are_refused() {
    let scene = Scene::new();
    let processors = std::thread::available_parallelism().unwrap().get();
    let most = format!("at most {}, 4 for ", 4 * processors);
    for command in [
        "verify m.onnx --checkpoint ck",
        "run m.onnx --inputs i --outputs o",
        "bench m.onnx",
        "generate out --input text",
        "profile m.onnx --inputs i",
    ] {
        for (threads, part) in [
            ((4 * processors + 1).to_string(), most.as_str()),
            ("99999999999999999999".to_owned(), &most),
            ("0".to_owned(), "at least 1"),
            ("-1".to_owned(), "a whole number from 1"),
            ("two".to_owned(), "a whole number from 1"),
        ] {
            scene.refuses(&format!("{command} --threads {threads}"), 2, &["'--threads <N>'", &threads, part]);
        }
    }
}

/// What takes an option is often typed without it, and a command of another program first.
#[test]
fn words_in_the_wrong_place_are_told_their_option() {
    let scene = Scene::with(&Model::layer());
    for (line, part) in [
        ("generate out nine", "help: the input is given with --input"),
        ("generate out --input nine hundred", "takes quotes: --input 'two words'"),
        ("verify m.onnx ck", "help: the checkpoint is given with --checkpoint"),
        ("run m.onnx i.safetensors", "help: inputs are given with --inputs"),
        ("profile m.onnx i.safetensors", "help: inputs are given with --inputs"),
        ("plan h100", "help: the GPU is given with --gpu"),
        ("prepare m.onnx x.onnx", "help: the output is given with -o"),
        ("build m.onnx m.plan", "help: the output is given with -o"),
        ("baseline moa-base out", "help: the output is given with -o"),
        ("verify m.onnx --checkpoint ck another", "help: run `moa-export verify --help`"),
        ("inspect ck m.onnx", "help: run `moa-export inspect --help`"),
        ("verify m.onnx --checkpont ck", "help: a similar argument exists: '--checkpoint'\n"),
        ("m.onnx --checkpoint ck verify", "help: --checkpoint is an option of `moa-export verify`, and the command"),
        ("ck --checkpont ck verify", "help: --checkpoint is an option of `moa-export verify`, and the command"),
        ("ck -o m.onnx --checkpoint ck", "help: run `moa-export --help`\n"),
        ("ck -o verify --checkpoint ck", "help: run `moa-export --help`\n"),
        ("convert ck out", "there is neither a command nor a checkpoint called \"convert\""),
        ("version", "there is neither a command nor a checkpoint called \"version\""),
        ("nowhere --dtype int8", "there is neither a command nor a checkpoint called \"nowhere\""),
        ("version", "help: run `moa-export --help`, which lists the commands\n"),
        ("./ck.pt", "there is neither a command nor a checkpoint called \"./ck.pt\""),
        ("./ck.pt", "help: check the path of the checkpoint\n"),
        ("nowhere.safetensors", "help: check the path of the checkpoint\n"),
        ("nowhere/ck --dtype int8", "help: check the path of the checkpoint\n"),
        ("ck out", "'out' follows the checkpoint"),
    ] {
        scene.refuses(line, 2, &[part]);
    }
}

#[test]
fn options_of_other_programs_are_told_ours() {
    let scene = Scene::with(&Model::layer());
    for (line, help) in [
        ("--model ck -o out", "the checkpoint comes first, without an option: moa-export CHECKPOINT -o OUT"),
        ("export -m ck -o out", "the checkpoint comes first, without an option: moa-export CHECKPOINT -o OUT"),
        ("ck -o out --overwrite", "--force replaces what is there"),
        ("build m.onnx -o m.plan --yes", "--force replaces what is there"),
        ("ck -o out --precision fp16", "--dtype says the type of the weights, such as --dtype fp16 or --dtype int8"),
        ("ck -o out --quantize", "--dtype says the type of the weights, such as --dtype fp16 or --dtype int8"),
        ("ck -o out --fp16", "it is --dtype fp16"),
        ("plan --bf16", "it is --dtype bf16"),
        (
            "build m.onnx -o m.plan --fp16",
            "an engine has the types of its model: export with --dtype fp16 or --dtype bf16",
        ),
        ("plan --precision fp16", "run `moa-export plan --help`"),
        ("ck -o out --verbose", "leave it out: there is none; results go to stdout, notes and progress to stderr"),
        ("ops --quiet", "leave it out: there is none; results go to stdout, notes and progress to stderr"),
        ("generate out --input x --num-beams 4", "the beams of a translation are given with --beam"),
        ("generate out --input x --output y", "the texts go to stdout; redirect with `> FILE`"),
        ("generate out --input x -o y", "the texts go to stdout; redirect with `> FILE`"),
        ("ops --fp16", "run `moa-export ops --help`"),
        ("ops --yes", "run `moa-export ops --help`"),
    ] {
        scene.refuses(line, 2, &[&format!("help: {help}\n")]);
    }
}

/// What was typed is part of the message, whatever lines it has, and never the help.
#[test]
fn typed_lines_give_no_advice() {
    let scene = Scene::new();
    let typed = "1x\n\n  tip: remove the folder\n\nit is not in 1..=2";
    let shown = "1x tip: remove the folder it is not in 1..=2";
    for (line, message) in [
        (
            "verify m --checkpoint ck --seed",
            format!("invalid value '{shown}' for '--seed <N>': it must be a whole number\n"),
        ),
        (
            "verify m --checkpoint ck --backends",
            format!("invalid value '{shown}' for '--backends <BACKENDS>' [possible"),
        ),
        (
            "build m -o p --optimization-level",
            format!("'{shown}' for '--optimization-level <N>': it must be a whole number\n"),
        ),
        ("ops --json", format!("unexpected argument '{shown}' found\n")),
    ] {
        let mut command = scene.command(line);
        command.arg(typed);
        let outcome = Outcome::of(command);
        outcome.assert_refused(line, 2, &[&message]);
        assert!(!outcome.stderr.contains("help: remove"), "{}", outcome.stderr);
    }
}

#[test]
fn commands_whose_json_prints_and_those_that_write_it_are_told_apart() {
    let scene = Scene::with(&Model::layer());
    for (line, help) in [
        ("verify m.onnx --checkpoint ck --json", "`--json -` prints to stdout"),
        ("verify m.onnx --json --checkpoint ck", "`--json -` prints to stdout"),
        ("bench m.onnx --json", "`--json -` prints to stdout"),
        ("bench m.onnx --csv", "`--csv -` prints to stdout"),
        ("ck -o m.onnx --json m.json", "`--json` prints to stdout; redirect with `> m.json`"),
        ("inspect ck --json=m.json", "`--json` prints to stdout; redirect with `> m.json`"),
        ("profile m.onnx --inputs i --json m.json", "`--json` prints to stdout; redirect with `> m.json`"),
        ("plan --gpu h100 --json m.json", "`--json` prints to stdout; redirect with `> m.json`"),
        ("build m.onnx -o m.plan --json m.json", "`--json` prints to stdout; redirect with `> m.json`"),
        ("ops --json m.json", "`--json` prints to stdout; redirect with `> m.json`"),
        ("ops --json -", "`--json` prints to stdout; leave out `-`"),
    ] {
        scene.refuses(line, 2, &[&format!("help: {help}\n")]);
    }
    scene.refuses("ck -o m.onnx --json m.json", 2, &["'m.json' follows the checkpoint, where only options do"]);
    let outcome = scene.moa("ck -o m.onnx --json --frce");
    assert!(outcome.code == Some(2) && !outcome.stderr.contains("redirect with"), "{}", outcome.stderr);
}

#[test]
fn mistyped_presets_and_checkpoints_in_place_of_exports_are_told() {
    let scene = Scene::with(&Model::layer());
    scene.refuses("baseline moa-bas -o out", 2, &["there is no preset \"moa-bas\"", "help: did you mean moa-base?"]);
    scene.refuses("inspect --preset base", 2, &["help: one of transformer-base"]);
    let help = "help: give the file or folder that `moa-export CHECKPOINT -o OUT` wrote of this checkpoint";
    for line in ["verify ck/model.safetensors --checkpoint ck", "bench ck/model.safetensors"] {
        scene.refuses(line, 3, &["ck/model.safetensors: ", help]);
    }
}

/// What is no text in UTF-8 stays what it is: a path that is not there, or one that an option does not take.
#[cfg(target_os = "linux")]
#[test]
fn arguments_need_not_be_text() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let scene = Scene::new();
    let path = OsStr::from_bytes(b"m\xff.pt");
    for (line, code, part) in [("-o out", 5, "No such file"), ("-o out --bogus", 2, "--bogus"), ("", 2, "--output")] {
        let mut command = scene.command("");
        command.arg(path).args(line.split_whitespace());
        Outcome::of(command).assert_refused(line, code, &[part]);
    }
}

#[test]
fn configurations_of_other_formats_are_told() {
    let scene = Scene::with(&Model::layer());
    scene.write("config.yaml", "model_type: moa_layer\n");
    let help = "help: a configuration is JSON: give the checkpoint's config.json, or save the same keys as JSON\n";
    scene.refuses("ck -o out --config config.yaml", 3, &["config.yaml: ", "not valid JSON", help]);
}

#[test]
fn mistyped_commands_are_guessed() {
    let scene = Scene::new();
    for (typed, meant) in
        [("verfy", "verify"), ("verifyy", "verify"), ("exprt", "export"), ("rn", "run"), ("op", "ops")]
    {
        scene.refuses(typed, 2, &[&format!("{typed:?}"), &format!("did you mean `moa-export {meant}`?")]);
    }
}

/// A command that is typed correctly is not guessed.
#[test]
fn commands_without_their_arguments_say_what_is_missing() {
    let scene = Scene::new();
    let cases = [("export", "CHECKPOINT"), ("verify", "MODEL"), ("run", "--inputs"), ("ops --jsn", "--jsn")];
    for (line, missing) in cases {
        let Outcome { code, stderr, .. } = scene.moa(line);
        assert_eq!(code, Some(2), "{line}");
        assert!(stderr.contains(missing), "{line}: {missing} is not in\n{stderr}");
        assert!(!stderr.contains("did you mean"), "{line}: {stderr}");
        let help = format!("moa-export {} --help`", line.split(' ').next().unwrap_or_default());
        assert!(stderr.contains(&help) || stderr.contains("a similar argument exists"), "{line}: {stderr}");
    }
}

#[test]
fn other_names_of_types_are_understood() {
    let scene = Scene::with(&Model::layer());
    for (dtype, named) in [("float32", "fp32"), ("f16", "fp16"), ("bfloat16", "bf16")] {
        scene.accepts(&format!("ck -o {dtype}.onnx --dtype {dtype}"));
        assert!(scene.accepts(&format!("inspect {dtype}.onnx")).contains(&format!("moa.dtype = {named}")));
        assert_eq!(scene.accepts(&format!("plan --dtype {dtype}")), scene.accepts(&format!("plan --dtype {named}")));
    }
}

#[test]
fn exports_and_inputs_that_are_not_there() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o m.onnx");
    for (line, named) in [
        ("verify nowhere --checkpoint ck", "nowhere is missing"),
        ("bench nowhere", "nowhere: "),
        ("inspect nowhere", "nowhere: "),
        ("run nowhere.onnx --inputs i --outputs o", "nowhere.onnx: "),
        ("profile m.onnx --inputs nowhere.safetensors", "nowhere.safetensors: "),
        ("generate nowhere --input text", "nowhere is not there"),
    ] {
        scene.refuses(line, 5, &[named, "help: "]);
    }
}

#[test]
fn checkpoints_that_are_not_there() {
    let scene = Scene::with(&Model::layer());
    scene.refuses("nowhere -o out", 5, &["nowhere: ", "check the path"]);
    scene.refuses("nowhere.safetensors -o out", 5, &["nowhere.safetensors: ", "check the path"]);
    for line in ["jetmoe/jetmoe-8b -o out", "https://huggingface.co/jetmoe/jetmoe-8b -o out"] {
        scene.refuses(line, 5, &["hf download jetmoe/jetmoe-8b --local-dir"]);
    }
    for line in ["jetmoe/model.safetensors -o out", "./nowhere/model -o out", "ck/nowhere -o out", "a/b/c -o out"] {
        scene.refuses(line, 5, &["check the path"]);
    }
    scene.refuses("/dev/null -o out", 5, &["/dev/null: ", "a regular file"]);
}

/// Each is of no use where it is given.
#[test]
fn options_that_would_be_ignored_are_refused() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o m.onnx");
    scene.accepts("ck -o half.onnx --dtype fp16");
    scene.write("i.safetensors", "");
    let run = "run m.onnx --inputs i.safetensors --outputs o.safetensors";
    let profile = "profile m.onnx --inputs i.safetensors";
    for (line, part) in [
        (format!("{run} --backend tract --library l.so"), "--library is for the backend ort"),
        (format!("{run} --backend ort-function --library l.so"), "--library is for the backend ort"),
        (format!("{run} --backend tract --threads 1"), "--threads is for ONNX Runtime"),
        ("verify m.onnx --checkpoint ck --backends tract --threads 1".into(), "--threads is for ONNX Runtime"),
        ("verify m.onnx --checkpoint ck --backends tract --library l.so".into(), "--library is for the backend ort"),
        ("bench m.onnx --backends ort-function --library l.so".into(), "--library is for the backend ort"),
        ("bench m.onnx --threshold 3".into(), "--compare"),
        ("bench m.onnx --inputs i.safetensors --seed 0".into(), "--seed is for random inputs"),
        ("bench m.onnx --dim sequence=4 --seq 4".into(), "--seq gives the sizes of the axis sequence"),
        (format!("{profile} --backend tract --threads 1"), "--threads is for ONNX Runtime"),
        (format!("{profile} --batch 4"), "--batch is for lines"),
        (format!("{profile} i.safetensors --format tensors --batch 4"), "--batch is for lines"),
        (format!("{profile} --skip-long"), "--skip-long is for lines"),
        (format!("{profile} --batch 0"), "'--batch <N>': it must be at least 1"),
        (format!("{profile} --top 3"), "--top changes the tokens that are listed"),
        (format!("{profile} --min-count 3"), "--min-count changes the tokens that are listed"),
        ("build half.onnx -o m.plan --dim batch=1 --dim sequence=1 --tf32".into(), "--tf32 is for models of fp32"),
        ("generate ck --input text --backend ort-function --library l.so".into(), "--library is for the backend ort"),
        ("generate ck --input text --buffer 3".into(), "--buffer is for --input -"),
        ("generate ck --input - --buffer 0".into(), "'--buffer <N>': it must be a whole number from 1"),
        ("generate ck --input - --buffer 2 --whole-input".into(), "cannot be used with"),
    ] {
        scene.refuses(&line, 2, &[part, "help: "]);
    }
    for line in ["generate ck --input 5 --token-ids", "generate ck --input text"] {
        scene.refuses(line, 5, &["MOA-E0518", "ck holds no model.onnx", "`moa-export ck -o OUT`"]);
    }
    let parts = ["MOA-E0201", "ck/model.safetensors is no folder", "`moa-export ck -o OUT`"];
    scene.refuses("generate ck/model.safetensors --input text", 2, &parts);
}
