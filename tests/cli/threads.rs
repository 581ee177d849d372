//! `--threads` reaches the runtime: the threads that a process starts are counted.

use std::{fs, path::PathBuf, process::Command, sync::OnceLock};

use safetensors::{Dtype, tensor::TensorView};

use crate::{
    common::data,
    model::Model,
    scene::{Outcome, Scene, require_runtime},
};

/// A library that counts threads, built once.
fn counter() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cli/count_threads.c");
        let library = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("count-{}.so", std::process::id()));
        let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
        compiler.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]);
        assert!(compiler.arg(&source).arg("-o").arg(&library).args(["-ldl", "-lpthread"]).status().unwrap().success());
        library
    })
}

/// Threads that the program starts on its way.
fn started(scene: &Scene, line: &str) -> usize {
    let counts = scene.path("count");
    let mut command = scene.command(line);
    command.env("LD_PRELOAD", counter()).env("MOA_COUNT_THREADS", &counts);
    let child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let count = format!("{}.{}", counts.display(), child.id());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    fs::read_to_string(&count).unwrap_or_else(|error| panic!("{line}: {count}: {error}")).parse().unwrap()
}

/// All sessions of a command have as many threads as it was given, and share them; the caller's own is one of them.
fn assert_taken(scene: &Scene, line: &str) {
    let [one, again, three] = [1, 1, 3].map(|threads| started(scene, &format!("{line} --threads {threads}")));
    assert_eq!(one, again, "{line}: other threads than those of the runtime");
    assert_eq!(three, one + 2, "{line}: {one} threads with one");
}

#[test]
fn a_runtime_takes_the_threads_that_were_asked_for() {
    require_runtime();
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx");
    scene.write("lines.ids", "4 5 6\n");
    for line in [
        "bench m.onnx --backends ort --samples 2 --warm-up 0.01 --seq 4 --no-operators",
        "profile m.onnx --inputs lines.ids",
    ] {
        assert_taken(&scene, line);
    }
    let layer = Scene::with(&Model::layer());
    layer.accepts("ck -o m.onnx");
    assert_taken(&layer, "verify m.onnx --checkpoint ck --backends ort-function");
    let scene = Scene::with_fixture("nmt");
    for file in ["dict.txt", "bpe.codes"] {
        fs::copy(data("nmt").join(file), scene.path("ck").join(file)).unwrap();
    }
    scene.accepts("ck -o out");
    assert_taken(&scene, "generate out --input zero --beam 1");
}

/// A limit of the system, as `ulimit -u` and containers set it.
#[test]
fn the_evaluation_does_without_the_threads_that_are_refused() {
    let scene = Scene::with(&Model::layer_of(1024, 4, 512));
    scene.accepts("ck -o m.onnx");
    let line = "verify m.onnx --checkpoint ck --backends tract";
    let wanted = started(&scene, line);
    assert!(
        std::thread::available_parallelism().unwrap().get() < 2 || wanted > 1,
        "no thread computes beside the first"
    );
    let limited = |most: &str| {
        let mut command = scene.command(line);
        Outcome::of({
            command.env("LD_PRELOAD", counter()).env("MOA_COUNT_THREADS", scene.path("count"));
            command.env("MOA_MOST_THREADS", most);
            command
        })
    };
    let one = limited("1");
    assert_eq!((one.code, one.stderr.as_str()), (Some(0), ""), "{}", one.stdout);
    limited("0").assert_refused("no thread", 5, &["no thread that listens for Ctrl-C could be started: ", "help: "]);
    let mut command = scene.command("generate m.onnx --input x");
    command.env("LD_PRELOAD", counter()).env("MOA_COUNT_THREADS", scene.path("count")).env("MOA_MOST_THREADS", "0");
    Outcome::of(command).assert_refused("generate", 5, &["no thread that listens for Ctrl-C could be started: "]);
}

#[test]
fn a_run_and_a_continuation_take_them_too() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    assert_taken(&scene, "generate out --input 5 --token-ids --max-new 2");
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx");
    let [ids, mask] = [[4i64, 5, 6], [1; 3]].map(|values| values.map(i64::to_le_bytes).concat());
    let view = |bytes| TensorView::new(Dtype::I64, vec![1, 3], bytes).unwrap();
    let inputs = [("input_ids", view(&ids)), ("attention_mask", view(&mask))];
    scene.write("i.safetensors", safetensors::serialize(inputs, None).unwrap());
    assert_taken(&scene, "run m.onnx --inputs i.safetensors --outputs o.safetensors --force");
}
