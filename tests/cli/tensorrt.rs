//! TensorRT as its users meet it, on a library that plays it: `fake_tensorrt.c` says how.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

use moa_export::onnx::{
    proto::tensor_proto::DataType::{Float, Int64},
    read_model,
};
use prost::Message;
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::Value;

use crate::{
    scene::{Outcome, Scene},
    support_onnx::{graph, model, node, value},
    support_signals::hearing_signals,
};

/// The library, built once.
fn library() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-tensorrt-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let library = folder.join("libmoa_tensorrt.so");
        let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
        compiler.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-I"]);
        compiler.arg(root.join("custom_ops/tensorrt/include")).arg(root.join("tests/cli/fake_tensorrt.c"));
        assert!(compiler.arg("-o").arg(&library).status().unwrap().success(), "{} is not built", library.display());
        // Nobody opens it: a folder of TensorRT is told by its name.
        fs::write(folder.join("libnvinfer.so.10"), "").unwrap();
        library
    })
}

/// A scene with `m.onnx`, the network of the library, and inputs for it.
pub(crate) struct Stage(pub(crate) Scene);

impl Stage {
    pub(crate) fn new() -> Self {
        let scene = Scene::new();
        let nodes = vec![node("Add", &["x", "x"], &["y"]), node("Add", &["ids", "ids"], &["twice"])];
        let inputs = vec![value("x", Float, &["rows", "2"]), value("ids", Int64, &["rows"])];
        let outputs = vec![value("y", Float, &["rows", "2"]), value("twice", Int64, &["rows"])];
        scene.write("m.onnx", model(graph(nodes, inputs, outputs, vec![])).encode_to_vec());
        let stage = Self(scene);
        stage.give(3);
        stage
    }

    /// Inputs of `rows` rows.
    pub(crate) fn give(&self, rows: usize) {
        let x: Vec<u8> = (0..2 * rows).flat_map(|value| (value as f32 / 4.0).to_le_bytes()).collect();
        let ids: Vec<u8> = (0..rows as i64).flat_map(|value| (value - 1).to_le_bytes()).collect();
        let tensor = |kind, shape: &[usize], bytes| TensorView::new(kind, shape.to_vec(), bytes).unwrap();
        let tensors = [("x", tensor(Dtype::F32, &[rows, 2], &x)), ("ids", tensor(Dtype::I64, &[rows], &ids))];
        self.0.write("in.safetensors", serialize(tensors, None).unwrap());
    }

    pub(crate) fn command(&self, words: &str, line: &str) -> Command {
        let mut command = self.0.command(line);
        command.env("MOA_TENSORRT_LIBRARY", library()).env("MOA_FAKE", words);
        command.env("TENSORRT_ROOT", library().parent().unwrap());
        command.env("XDG_CACHE_HOME", self.0.path("cache")).env_remove("MOA_CUDA_LIBRARY");
        command.env_remove("MOA_CUDA_KERNELS");
        command
    }

    pub(crate) fn moa(&self, words: &str, line: &str) -> Outcome {
        Outcome::of(self.command(words, line))
    }

    #[track_caller]
    pub(crate) fn accepts(&self, words: &str, line: &str) -> String {
        self.0.accepts_in(self.command(words, line), line)
    }

    /// Ends with `code` and one line of error, and leaves everything as it was.
    #[track_caller]
    pub(crate) fn refuses(&self, words: &str, line: &str, code: u8, parts: &[&str]) {
        self.0.refuses_in(self.command(words, line), &format!("{words}: {line}"), code, parts);
    }

    pub(crate) fn lock(&self, name: &str) -> Value {
        serde_json::from_slice(&self.0.read(name)).unwrap()
    }

    pub(crate) fn engines(&self) -> usize {
        fs::read_dir(self.0.path("cache/moa-export/engines")).map_or(0, Iterator::count)
    }
}

pub(crate) const BUILD: &str = "build m.onnx -o m.plan --dim rows=1:2:8";
pub(crate) const RUN: &str = "run m.plan --inputs in.safetensors --outputs out.safetensors";

/// Outputs of a run, floats and integers alike.
pub(crate) fn outputs(stage: &Stage) -> (Vec<f32>, Vec<i64>) {
    let bytes = stage.0.read("out.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (y, twice) = (file.tensor("y").unwrap(), file.tensor("twice").unwrap());
    assert_eq!((y.dtype(), twice.shape()), (Dtype::F32, &[y.shape()[0]][..]));
    let ints = match twice.dtype() {
        Dtype::I32 => twice.data().as_chunks().0.iter().map(|chunk| i32::from_le_bytes(*chunk).into()).collect(),
        _ => twice.data().as_chunks().0.iter().map(|chunk| i64::from_le_bytes(*chunk)).collect(),
    };
    (y.data().as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect(), ints)
}

#[test]
fn a_build_writes_a_plan_and_its_lock() {
    let stage = Stage::new();
    let printed = stage.accepts("", &format!("{BUILD} --json --workspace 1G --optimization-level 4 --tf32"));
    let printed: Value = serde_json::from_str(&printed).unwrap();
    let (first, lock) = (&printed["plans"][0], stage.lock("m.plan.lock.json"));
    let plan = String::from_utf8(stage.0.read("m.plan")).unwrap();
    let expected = "plan of 10.4.0.26\non NVIDIA H200\nflags 1 level 4 workspace 1073741824 timings 0\n\
                    x 2 1 2 2 2 2 2 8 2\nids 1 1 1 2 1 8\nend\n";
    assert_eq!(plan, expected);
    assert_eq!((&first["from_cache"], &first["sha256"]), (&false.into(), &lock["plan_sha256"]));
    assert_eq!(lock["plan_sha256"], moa_export::digest::sha256(plan.as_bytes()));
    assert_eq!(lock["source_sha256"], moa_export::digest::sha256(&stage.0.read("m.onnx")));
    assert_eq!(lock["recipe"]["machine"]["tensorrt"], "10.4.0.26");
    assert_eq!((&lock["cuda_driver"], &lock["recipe"]["dtype"]), (&"12.9".into(), &"fp32".into()));
    assert_eq!(lock["recipe"]["options"]["tf32"], true);
    assert_eq!(lock["layers"]["Layers"][0]["TacticValue"], "0x1");
    let library = moa_export::digest::sha256_of_file(library()).unwrap().0;
    assert_eq!(lock["recipe"]["plugin"]["library_sha256"], library);
}

#[test]
fn plans_and_models_run() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    let expected = (vec![0.0, 0.5, 1.0, 1.5, 2.0, 2.5], vec![-2, 0, 2]);
    let model = "run m.onnx --inputs in.safetensors --outputs out.safetensors --force --backend";
    for (words, line) in [
        ("", RUN.to_owned()),
        ("", format!("{RUN} --force --backend tensorrt")),
        ("narrow", format!("{RUN} --force")),
        ("", format!("{model} tensorrt")),
        ("", format!("{model} tensorrt --plan m.plan")),
        ("narrow", format!("{model} tensorrt --no-cache")),
        ("", format!("{model} tract")),
    ] {
        stage.accepts(words, &line);
        assert_eq!(outputs(&stage), expected, "{words}: {line}");
    }
    // TensorRT without int64 gives the model's types all the same.
    stage.accepts("narrow", &format!("{model} tensorrt --no-cache"));
    let bytes = stage.0.read("out.safetensors");
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().tensor("twice").unwrap().dtype(), Dtype::I64);
}

#[test]
fn shapes_outside_the_profile_are_named() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    stage.give(9);
    stage.refuses("", RUN, 3, &["input `", "from [1", "to [8", "that the engine was built for", "found", "[9"]);
    // An engine for a model is built for what it is given.
    stage.accepts("", "run m.onnx --backend tensorrt --inputs in.safetensors --outputs out.safetensors");
    assert_eq!(outputs(&stage).1.len(), 9);
    // No rows are no size to build for.
    stage.give(0);
    let empty = "run m.onnx --backend tensorrt --inputs in.safetensors --outputs out.safetensors --force";
    stage.refuses("", empty, 3, &["input `", "of at least 1 each", "found"]);
}

#[test]
fn types_that_cannot_be_given_or_taken_are_told_before_anything_runs() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    stage.refuses("bool", RUN, 4, &["`twice` holds bool in the engine, and this program gives and takes"]);
}

#[test]
fn what_is_missing_or_does_not_fit_is_said_before_anything_is_built() {
    let stage = Stage::new();
    stage.0.write("file", "");
    let h100 = "build m.onnx -o m.plan --dim rows=1:2:8 --gpu h100";
    for (words, line, code, parts) in [
        (
            "no-nvinfer",
            BUILD,
            6,
            &["libnvinfer.so.10 cannot be opened (it is not where the loader looks)", "TENSORRT_ROOT"][..],
        ),
        (
            "wrong-major",
            BUILD,
            6,
            &["libnvinfer is TensorRT 8.6.1, and the plugin was built for 10", "cargo xtask tensorrt"],
        ),
        ("ancient", BUILD, 4, &["TensorRT 8.4.0 is not served: 8.6, 10.0"]),
        ("no-device", BUILD, 6, &["there is no CUDA driver", "NVIDIA's driver"]),
        ("abi", BUILD, 6, &["its engine interface has version 99, and version 2 is needed", "cargo xtask tensorrt"]),
        ("", h100, 4, &["the engine is for h100 (compute capability 9.0), and the device here is NVIDIA H200 (9.0)"]),
        ("a100", h100, 4, &["the device here is NVIDIA A100-SXM4-80GB (8.0)", "--gpu auto"]),
        ("volta newer", BUILD, 4, &["Tesla V100-SXM2-16GB does not fit: TensorRT 10.5 to 10.6 serves"]),
        ("parser", BUILD, 4, &["the parser refuses the model (node 3 (Wonder): no importer; node 4 (Add): no input)"]),
        ("memory", BUILD, 6, &["not enough memory", "--workspace"]),
        ("broken", BUILD, 6, &["TensorRT failed to build the engine: could not find any implementation"]),
        ("", "build m.onnx -o m.plan", 2, &["no size is given to rows"]),
        ("", "build m.onnx -o m.plan --dim row=1", 2, &["`row`, which no input has", "the model leaves open: rows"]),
        ("", "build m.onnx -o m.plan --dim rows=8:1:2", 2, &["MIN may not exceed OPT"]),
        ("", "build m.onnx -o m.plan --dim rows=1 --dtype fp16", 4, &["m.onnx is fp32", "export with --dtype fp16"]),
        ("", "build m.onnx -o m.plan --dim rows=1 --gpu k80", 2, &["'k80'", "auto"]),
        ("", "build m.onnx -o x.onnx --dim rows=1", 2, &["x.onnx is the name of a model"]),
        ("", "build m.onnx -o X.ONNX --dim rows=1", 2, &["X.ONNX is the name of a model"]),
        ("", "build m.onnx -o file --dim rows=1", 2, &["file exists already"]),
        ("", "build m.onnx -o file/m.plan --dim rows=1", 2, &["file is not a folder"]),
        ("", "build m.onnx -o /proc/m.plan --dim rows=1", 5, &["/proc/m.plan"]),
        ("", "build absent.onnx -o m.plan", 5, &["absent.onnx"]),
        ("a100", "build m.onnx -o m.plan --dim rows=1 --gpu H200", 4, &["the engine is for h200"]),
        ("", "build m.onnx -o m.plan --dim rows=1 --workspace much", 2, &["such as 512M or 4G"]),
    ] {
        stage.refuses(words, &format!("{line} --no-cache"), code, parts);
    }
}

#[test]
fn a_gpu_and_a_dtype_that_never_fit_need_no_tensorrt() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o half.onnx --dtype bf16");
    let line = "build half.onnx -o half.plan --dim batch=1 --dim sequence=1";
    scene.refuses(&format!("{line} --gpu v100"), 4, &["the model is bf16, and v100 does not fit", "no bfloat16"]);
    let mut command = scene.command(line);
    command.env("MOA_TENSORRT_LIBRARY", "/nowhere/libmoa_tensorrt.so");
    let expected =
        ["the TensorRT plugin libmoa_tensorrt not found", "MOA_TENSORRT_LIBRARY=/nowhere", "cargo xtask tensorrt"];
    Outcome::of(command).assert_refused("without the plugin", 6, &expected);
    let mut command = scene.command(line);
    scene.write("text.so", "no library");
    command.env("MOA_TENSORRT_LIBRARY", "text.so");
    Outcome::of(command).assert_refused("a file that is no library", 6, &["text.so"]);
}

#[test]
fn a_plan_is_loaded_only_where_its_lock_fits() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    let (plan, lock) = (stage.0.read("m.plan"), String::from_utf8(stage.0.read("m.plan.lock.json")).unwrap());
    // The library ends with another error as soon as TensorRT sees a plan.
    let refused = |words: &str, code: u8, parts: &[&str]| {
        stage.refuses(&format!("deserialised {words}"), RUN, code, parts);
        stage.0.write("m.plan", &plan);
        stage.0.write("m.plan.lock.json", &lock);
    };
    refused(
        "a100",
        4,
        &["m.plan: the GPU here is NVIDIA A100-SXM4-80GB (8.0), and the plan was built with NVIDIA H200"],
    );
    refused("newer", 4, &["m.plan: TensorRT here is 10.5.0.18, and the plan was built with 10.4.0.26"]);
    stage.0.write("m.plan", &plan[..plan.len() - 4]);
    refused("", 3, &["m.plan: the plan is", "bytes long, and its lock says", "--trust-plan"]);
    stage.0.write("m.plan", [&plan[..plan.len() - 1], b"\r"].concat());
    refused("", 3, &["m.plan: the SHA-256 of the plan is"]);
    fs::remove_file(stage.0.path("m.plan.lock.json")).unwrap();
    refused("", 5, &["m.plan.lock.json is missing"]);
    stage.0.write("m.plan.lock.json", lock.replace("NVIDIA H200", "NVIDIA H100"));
    refused("", 3, &["m.plan.lock.json is no lock of a plan: its key is not that of its recipe"]);
    stage.0.write("m.plan.lock.json", "{}");
    refused("", 3, &["m.plan.lock.json is no lock of a plan: missing field"]);
    fs::File::create(stage.0.path("m.plan.lock.json")).unwrap().set_len((64 << 20) + 1).unwrap();
    let too_large = "m.plan.lock.json is no lock of a plan: expected at most 67108864 bytes, found 67108865";
    refused("", 3, &[too_large, "--trust-plan"]);
    stage.refuses("", "run x.plan --inputs in.safetensors --outputs out.safetensors", 5, &["x.plan"]);
    let other = "run m.plan --backend ort --inputs in.safetensors --outputs out.safetensors";
    stage.refuses("", other, 2, &["m.plan is a plan, which TensorRT alone runs"]);
}

#[test]
fn a_trusted_plan_is_loaded_with_a_warning() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    fs::remove_file(stage.0.path("m.plan.lock.json")).unwrap();
    let outcome = stage.moa("", &format!("{RUN} --trust-plan"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("a plan is executable code: NVIDIA's documentation"), "{}", outcome.stderr);
    // What TensorRT itself refuses is refused all the same.
    let trusted = |words: &str, code: u8, part: &str| {
        let outcome = stage.moa(words, &format!("{RUN} --trust-plan --force"));
        assert_eq!(outcome.code, Some(code.into()), "{}", outcome.stderr);
        let errors: Vec<_> = outcome.stderr.lines().filter(|line| line.starts_with("error[")).collect();
        assert!(errors.len() == 1 && errors[0].contains(part), "{}", outcome.stderr);
    };
    trusted("newer", 4, "the plan was built by another release");
    trusted("crash", 6, "TensorRT failed to run the engine: the driver refused a launch");
    let plan = stage.0.read("m.plan");
    stage.0.write("m.plan", &plan[..plan.len() - 4]);
    trusted("", 3, "the bytes are no whole plan");
}

#[test]
fn a_plan_of_another_model_is_refused() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    let mut other = read_model(&stage.0.path("m.onnx")).unwrap().model().clone();
    other.graph.as_mut().unwrap().name = "another".into();
    stage.0.write("other.onnx", other.encode_to_vec());
    let line = "run other.onnx --backend tensorrt --plan m.plan --inputs in.safetensors --outputs out.safetensors";
    stage.refuses("", line, 3, &["m.plan was built from another model than other.onnx"]);
}

#[test]
fn models_are_prepared_for_the_parser() {
    let stage = Stage(Scene::with_fixture("mlm"));
    let built = |form: &str| {
        stage.accepts("", &format!("ck -o {form}.onnx --form {form}"));
        let line = format!("build {form}.onnx -o {form}.plan --dim batch=1:1:4 --dim sequence=1:8:16 --no-cache");
        let mut command = stage.command("", &line);
        command.env("MOA_FAKE_MODEL", stage.0.path("given.onnx"));
        assert_eq!(Outcome::of(command).code, Some(0));
        read_model(&stage.0.path("given.onnx")).unwrap()
    };
    let ours = |file: &moa_export::onnx::OnnxFile| {
        file.graph().unwrap().node.iter().filter(|node| node.domain == "ai.moa").count()
    };
    let (function, fused, standard) = (built("function"), built("fused"), built("standard"));
    assert!(function.functions().is_empty() && ours(&function) > 0);
    assert_eq!(function.graph(), fused.graph());
    assert_eq!(ours(&standard), 0);
}

#[test]
fn a_folder_becomes_a_folder_of_plans() {
    let stage = Stage(Scene::with_fixture("nmt"));
    stage.accepts("", "ck -o out");
    let dims = "--dim batch=1:1:4 --dim source=1:8:16 --dim sequence=1:1:8";
    let line = format!("build out -o plans {dims}");
    stage.refuses("", &line, 2, &["no size is given to past_sequence"]);
    stage.refuses("", &format!("{line} --dim length=1"), 2, &["`length`, which no input has"]);
    for plan in ["out.plan", "out.engine", "OUT.PLAN"] {
        stage.refuses("", &format!("build out -o {plan}"), 2, &["out is a folder, and -o names one plan"]);
    }
    stage.refuses("", "build ck -o plans", 5, &["ck holds no model.onnx"]);
    stage.accepts("", &format!("{line} --dim past_sequence=0:8:16 --timing-cache timings"));
    let expected =
        ["decoder_model", "encoder_model"].map(|part| [format!("{part}.plan"), format!("{part}.plan.lock.json")]);
    assert_eq!(stage.0.names("plans"), expected.concat());
    assert_eq!(stage.0.read("timings"), b"timings");
    // The second graph is built with the timings of the first.
    let decoder = String::from_utf8(stage.0.read("plans/decoder_model.plan")).unwrap();
    assert!(decoder.contains(" timings 7\n"), "{decoder}");
    assert!(decoder.contains("\nattention_mask 2 1 1 2 1 9 2 4 24\n"), "{decoder}");
}

#[test]
fn an_interrupted_build_leaves_nothing() {
    let stage = Stage::new();
    let before = stage.0.snapshot();
    let command = stage.command("slow", "build m.onnx -o new/m.plan --dim rows=1 --no-cache");
    let mut command = hearing_signals(&command);
    // The library writes the model down when the build has begun.
    let begun = tempfile::tempdir().unwrap();
    command.env("MOA_FAKE_MODEL", begun.path().join("model.onnx"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !begun.path().join("model.onnx").exists() {
        assert!(child.try_wait().unwrap().is_none(), "the build ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("the build was interrupted, and nothing was written"), "{stderr}");
    stage.0.assert_unchanged(&before, "an interrupted build");
}

#[test]
fn a_full_disk_leaves_nothing() {
    let stage = Stage::new();
    let mut command = stage.0.command_after("ulimit -f 0", &format!("{BUILD} --no-cache"));
    let before = stage.0.snapshot();
    command.env("MOA_TENSORRT_LIBRARY", library());
    Outcome::of(command).assert_refused("a full disk", 5, &["m.plan", "File too large"]);
    stage.0.assert_unchanged(&before, "a full disk");
}

#[test]
fn ops_says_what_there_is() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    let printed = stage.accepts("", "ops");
    for part in [
        "TensorRT      10.4.0.26, /opt/tensorrt/lib/libnvinfer.so.10\n",
        &format!("plugin        {}, for TensorRT 10.0.0, IPluginV3\n", library().display()),
        "GPU           NVIDIA H200, compute capability 9.0\n",
        "engines       1 in ",
    ] {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
    let value: Value = serde_json::from_str(&stage.accepts("no-nvinfer no-device", "ops --json")).unwrap();
    let (tensorrt, gpu) = (&value["tensorrt"], &value["gpu"]);
    assert_eq!((&tensorrt["version"], &gpu["name"]), (&Value::Null, &Value::Null));
    assert!(tensorrt["why_not"].as_str().unwrap().contains("libnvinfer.so.10 cannot be opened"), "{tensorrt}");
    assert_eq!(
        (&value["plugin"]["built_for"], &value["engine_cache"]["engines"]),
        (&"TensorRT 10.0.0, IPluginV3".into(), &1.into())
    );
}

#[test]
fn without_tensorrt_verify_and_bench_skip_it_or_say_why() {
    let stage = Stage(Scene::with_fixture("mlm"));
    stage.accepts("", "ck -o m.onnx");
    let verify = "verify m.onnx --checkpoint ck";
    let printed = stage.accepts("no-nvinfer", &format!("{verify} --backends tract --json -"));
    let value: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((value["backends"].as_array().unwrap().len(), &value["not_compared"]), (1, &Value::Array(vec![])));
    let line = format!("{verify} --backends tract,tensorrt");
    let outcome = stage.moa("no-nvinfer", &line);
    outcome.assert_failed(&line, 6, &["backend tensorrt was not used: libnvinfer.so.10 cannot be opened"]);
    assert_eq!(outcome.stdout, "", "nothing is run where a backend is missing that was named");
    let printed = stage.accepts("no-nvinfer", verify);
    assert!(
        printed.contains("skipped: libnvinfer.so.10 cannot be opened") && printed.contains("\nverified on "),
        "{printed}"
    );
    let line = format!("{verify} --backends tensorrt");
    let outcome = stage.moa("no-nvinfer", &line);
    outcome.assert_failed(&line, 6, &["backend tensorrt was not used: libnvinfer.so.10 cannot be opened"]);
    let line = "bench m.onnx --backends tensorrt --samples 1";
    stage.moa("no-device", line).assert_failed(line, 6, &["there is no CUDA driver"]);
    // A parser that refuses is a failure, and no reason to skip.
    let outcome = stage.moa("parser", verify);
    assert_eq!(outcome.code, Some(1), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("stopped: the parser refuses the model"), "{}", outcome.stdout);
}
