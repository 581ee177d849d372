//! `moa-export run`.

use std::{fs, os::unix::fs::symlink, process::Command};

use moa_export::onnx::{read::Dim, read_model};
use prost::Message;
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};

use crate::{
    scene::{Outcome, Scene, require_runtime},
    support_onnx::node,
};

pub(crate) type Input<'a> = (&'a str, Dtype, Vec<usize>, Vec<i64>);

/// Writes integers by name as `inputs.safetensors`.
pub(crate) fn write_inputs(scene: &Scene, inputs: &[Input<'_>]) {
    let bytes: Vec<Vec<u8>> = inputs
        .iter()
        .map(|(_, dtype, _, values)| match dtype {
            Dtype::I64 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Dtype::I32 => values.iter().flat_map(|value| (*value as i32).to_le_bytes()).collect(),
            Dtype::F32 => values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect(),
            other => vec![0; values.len() * other.bitsize() / 8],
        })
        .collect();
    let views = inputs
        .iter()
        .zip(&bytes)
        .map(|((name, dtype, shape, _), bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    scene.write("inputs.safetensors", serialize(views, None).unwrap());
}

pub(crate) fn ids(shape: &[usize]) -> Input<'static> {
    ("input_ids", Dtype::I64, shape.to_vec(), (0..shape.iter().product::<usize>() as i64).map(|i| 4 + i % 60).collect())
}

pub(crate) fn mask(shape: &[usize]) -> Input<'static> {
    ("attention_mask", Dtype::I64, shape.to_vec(), vec![1; shape.iter().product()])
}

/// The masked language model and its export `m.onnx`.
pub(crate) fn exported(options: &str) -> Scene {
    require_runtime();
    Scene::exported("mlm", options)
}

pub(crate) fn line(backend: &str) -> String {
    format!("run m.onnx --inputs inputs.safetensors --outputs {backend}.safetensors --backend {backend}")
}

pub(crate) const BACKENDS: [&str; 3] = ["ort", "ort-function", "tract"];

/// Names, shapes and values of a file of outputs.
pub(crate) fn outputs(scene: &Scene, backend: &str) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = scene.read(&format!("{backend}.safetensors"));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut outputs: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            assert_eq!(view.dtype(), Dtype::F32, "{name}");
            let (chunks, _) = view.data().as_chunks();
            (name, view.shape().to_vec(), chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
        })
        .collect();
    outputs.sort_by(|a, b| a.0.cmp(&b.0));
    outputs
}

#[test]
fn a_plan_is_for_tensorrt_alone() {
    let scene = exported("");
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
    let run = line("ort");
    for line in [
        run.as_str(),
        "run m.onnx --inputs inputs.safetensors --outputs out.safetensors",
        "verify m.onnx --checkpoint ck --backends ort,tract",
        "bench m.onnx --samples 1",
    ] {
        scene.refuses(
            &format!("{line} --plan m.plan"),
            2,
            &["--plan is for the backend tensorrt", "choose that backend"],
        );
    }
    for option in ["--no-cache", "--cache engines", "--trust-plan"] {
        let part = format!("{} is for the backend tensorrt", option.split(' ').next().unwrap());
        scene.refuses(&format!("{run} {option}"), 2, &[&part, "choose that backend"]);
    }
    let trusted = "verify m.onnx --checkpoint ck --trust-plan";
    scene.refuses(trusted, 2, &["--trust-plan is for a plan, and --plan names none", "help: "]);
    for line in ["run m.plan --inputs inputs.safetensors --outputs o", "verify m.onnx --checkpoint ck --plan m.plan"] {
        scene.refuses(&format!("{line} --no-cache"), 2, &["--no-cache is for engines that are built", "help: "]);
    }
    let outcome = Outcome::of({
        let mut command = scene.command("verify m.onnx --checkpoint ck --plan m.plan");
        command.env("MOA_TENSORRT_LIBRARY", "absent.so");
        command
    });
    assert_eq!(outcome.code, Some(6), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("backend tensorrt was not used"), "{}", outcome.stderr);
}

/// ONNX Runtime 1.31 and 1.32 keep a database of their own beside other caches where they report what runs.
#[test]
fn a_run_leaves_nothing_behind_but_its_outputs() {
    let scene = exported("");
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
    fs::create_dir(scene.path("home")).unwrap();
    let mut command = scene.command(&line("ort-function"));
    command.env("HOME", scene.path("home")).env("XDG_CACHE_HOME", scene.path("home"));
    command.env_remove("ORT_DISABLE_TELEMETRY");
    let outcome = Outcome::of(command);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(scene.names("home"), [""; 0]);
}

#[test]
fn every_backend_computes_the_same() {
    for options in ["", "--form standard --external-data always"] {
        let scene = exported(options);
        let mut masked = mask(&[2, 9]);
        masked.3[14..].fill(0);
        write_inputs(&scene, &[ids(&[2, 9]), masked]);
        for backend in BACKENDS {
            let printed = scene.accepts(&line(backend));
            assert!(printed.contains("logits  float32  [2, 9, 67]"), "{printed}");
        }
        let expected = outputs(&scene, "ort");
        for backend in BACKENDS {
            for ((name, shape, values), (other, found_shape, found)) in expected.iter().zip(&outputs(&scene, backend)) {
                assert_eq!((name, shape, values.len()), (other, found_shape, found.len()));
                let worst = values.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 1e-4, "{backend}, {name}: {worst}");
                assert!(values.iter().any(|value| value.abs() > 0.5), "{name} says something");
            }
        }
    }
}

#[test]
fn types_that_tract_does_not_have_are_named() {
    for (options, kind) in
        [("--dtype bf16", "bfloat16"), ("--dtype int4", "int4"), ("--dtype int4 --form standard", "int4")]
    {
        let scene = exported(options);
        write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
        let why = format!("the model holds {kind} tensors, and tract has no such type");
        scene.refuses(&line("tract"), 4, &[&why, "--dtype int8"]);
        scene.accepts(&line("ort-function"));
    }
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let scene = exported("");
    let (a, b) = ([2, 5].as_slice(), [2, 6].as_slice());
    let typed = |dtype, (name, _, shape, values): Input<'static>| (name, dtype, shape, values);
    let cases: [(&[Input<'_>], u8, &[&str]); 12] = [
        (&[ids(a)], 3, &["`attention_mask`", "int64 [", "found nothing"]),
        (&[], 3, &["found nothing"]),
        (&[ids(a), mask(a), ("extra", Dtype::I64, vec![1], vec![0])], 3, &["`extra`", "input_ids", "attention_mask"]),
        (&[typed(Dtype::I32, ids(a)), mask(a)], 3, &["`input_ids`", "int64", "int32 [2, 5]"]),
        (&[typed(Dtype::F32, ids(a)), mask(a)], 3, &["`input_ids`", "int64", "float32 [2, 5]"]),
        (&[typed(Dtype::F16, ids(a)), mask(a)], 3, &["`input_ids`", "int64", "float16 [2, 5]"]),
        (&[typed(Dtype::BF16, ids(a)), mask(a)], 4, &["input_ids", "BF16", "I64"]),
        (&[typed(Dtype::BOOL, ids(a)), mask(a)], 4, &["input_ids", "BOOL", "I64"]),
        (&[ids(&[10]), mask(&[10])], 3, &["int64 [", "found int64 [10]"]),
        (&[ids(a), mask(b)], 3, &["= 5", "[2, 6]"]),
        (&[ids(&[1, 5]), mask(a)], 3, &["= 1", "[2, 5]"]),
        (&[ids(&[2, 5, 1]), mask(a)], 3, &["[2, 5, 1]"]),
    ];
    for (inputs, code, parts) in cases {
        write_inputs(&scene, inputs);
        let parts = [parts, &["inputs.safetensors: ", "help: "]].concat();
        for backend in BACKENDS {
            scene.refuses(&line(backend), code, &parts);
        }
    }
}

#[test]
fn nothing_to_compute_is_said() {
    let scene = exported("");
    for shape in [[0, 5], [2, 0], [0, 0]] {
        write_inputs(&scene, &[ids(&shape), mask(&shape)]);
        for backend in BACKENDS {
            scene.refuses(&line(backend), 3, &["at least 1", &format!("{shape:?}")]);
        }
    }
}

/// Runtimes differ in what they do with a token that is none; one of them computes something.
#[test]
fn tokens_that_are_none_are_refused() {
    let scene = exported("");
    for bad in [67, -1, -68, 1 << 62, i64::MIN] {
        let mut tokens = ids(&[1, 3]);
        tokens.3[1] = bad;
        write_inputs(&scene, &[tokens, mask(&[1, 3])]);
        for backend in BACKENDS {
            scene.refuses(&line(backend), 3, &["`input_ids`", "0 to 66", &format!("found {bad} at [0, 1]")]);
        }
    }
}

/// Positions are sums over the mask, and attention asks only whether it is 0: what is between means nothing.
#[test]
fn masks_of_other_values_are_refused() {
    for (scene, extra) in [(exported(""), &[][..]), (exported("--form standard"), &[]), (causal(""), &[0, 1, 2])] {
        for bad in [5, 2, -1, i64::MIN] {
            match extra {
                [] => write_inputs(&scene, &[ids(&[2, 3]), masked_by(&[2, 3], 4, bad)]),
                positions => write_masked_causal_inputs(&scene, positions, masked_by(&[1, 3], 1, bad)),
            }
            let place = if extra.is_empty() { "[1, 1]" } else { "[0, 1]" };
            let found = format!("found {bad} at {place}");
            for backend in BACKENDS {
                let parts = ["MOA-E0316", "`attention_mask`", "1 for a real token and 0 for padding", &found, "help: "];
                scene.refuses(&line(backend), 3, &parts);
            }
        }
    }
}

/// A mask with another value at one place.
fn masked_by(shape: &[usize], index: usize, value: i64) -> Input<'static> {
    let mut mask = mask(shape);
    mask.3[index] = value;
    mask
}

/// Has the nodes of `m.onnx` read `input` by a detour, so that nobody can tell what is made of it.
fn detour(scene: &Scene, input: &str) {
    let mut model = read_model(&scene.path("m.onnx")).unwrap().model().clone();
    let graph = model.graph.as_mut().unwrap();
    let detoured = format!("{input}.detoured");
    for name in graph.node.iter_mut().flat_map(|node| &mut node.input).filter(|name| *name == input) {
        name.clone_from(&detoured);
    }
    graph.node.insert(0, node("Identity", &[input], &[&detoured]));
    scene.write("m.onnx", model.encode_to_vec());
}

/// More tokens than there are positions, which only the runtime can tell here.
#[test]
fn failures_of_a_runtime_are_one_line() {
    let scene = exported("");
    detour(&scene, "attention_mask");
    write_inputs(&scene, &[ids(&[1, 300]), mask(&[1, 300])]);
    for backend in BACKENDS {
        scene.refuses(&line(backend), 6, &[backend, "failed to run the model"]);
    }
}

#[test]
fn more_real_tokens_than_positions_are_refused() {
    for options in ["", "--form standard"] {
        let scene = exported(options);
        let table = "the positions of `encoder.sentence_encoder.embed_positions.weight`";
        write_inputs(&scene, &[ids(&[1, 257]), mask(&[1, 257])]);
        for backend in BACKENDS {
            let parts = ["`attention_mask`", "at most 256 real tokens in a row", table, "found 257 in row 0"];
            scene.refuses(&line(backend), 3, &parts);
        }
        let (mut long, mut fits) = (mask(&[2, 300]), mask(&[2, 300]));
        long.3[..44].fill(0);
        write_inputs(&scene, &[ids(&[2, 300]), long]);
        scene.refuses(&line("ort"), 3, &["found 300 in row 1"]);
        // Padding has no position of its own.
        fits.3[..44].fill(0);
        fits.3[556..].fill(0);
        write_inputs(&scene, &[ids(&[2, 300]), fits]);
        for backend in BACKENDS {
            scene.accepts(&line(backend));
        }
    }
}

/// A causal language model and inputs at `positions`, its export `m.onnx`.
pub(crate) fn causal(options: &str) -> Scene {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts(&format!("ck -o m.onnx {options}"));
    scene
}

pub(crate) fn write_causal_inputs(scene: &Scene, positions: &[i64]) {
    write_masked_causal_inputs(scene, positions, mask(&[1, positions.len()]));
}

fn write_masked_causal_inputs(scene: &Scene, positions: &[i64], mask: Input<'_>) {
    let file = read_model(&scene.path("m.onnx")).unwrap();
    let shape = [1, positions.len()];
    let names: Vec<String> = file.inputs().into_iter().map(|input| input.name).collect();
    let past = file.inputs().into_iter().filter(|input| input.name.starts_with("past_key_values."));
    let shapes: Vec<Vec<usize>> = past
        .map(|input| {
            let size = |dim: &Dim| match dim {
                Dim::Fixed(size) => *size,
                Dim::Symbolic(name) if name == "batch" => 1,
                _ => 0,
            };
            input.dims.iter().flatten().map(size).collect()
        })
        .collect();
    let past = names.iter().filter(|name| name.starts_with("past_key_values.")).zip(shapes);
    let mut inputs: Vec<Input<'_>> = past.map(|(name, shape)| (name.as_str(), Dtype::F32, shape, Vec::new())).collect();
    let given = ("position_ids", Dtype::I64, shape.to_vec(), positions.to_vec());
    inputs.extend([ids(&shape), mask, given]);
    write_inputs(scene, &inputs);
}

/// `Gather` takes a negative index for one from the end: without care, another row than anybody meant.
#[test]
fn positions_that_are_none_are_refused() {
    for options in ["", "--form standard"] {
        let scene = causal(options);
        write_causal_inputs(&scene, &[0, 255]);
        for backend in BACKENDS {
            scene.accepts(&line(backend));
            scene.accepts(&format!("{} --force", line(backend)));
        }
        for bad in [-1, -256, 256, i64::MIN, i64::MAX] {
            write_causal_inputs(&scene, &[0, bad]);
            for backend in BACKENDS {
                let line = format!("{} --force", line(backend));
                scene.refuses(&line, 3, &["`position_ids`", "0 to 255", &bad.to_string()]);
            }
        }
        detour(&scene, "position_ids");
        for bad in [-1, -256, 256, i64::MIN, i64::MAX] {
            write_causal_inputs(&scene, &[0, bad]);
            for backend in BACKENDS {
                scene.refuses(&format!("{} --force", line(backend)), 6, &[backend, "failed to run the model"]);
            }
        }
    }
}

#[test]
fn existing_outputs_are_kept() {
    let scene = exported("");
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
    scene.write("ort.safetensors", "mine");
    scene.refuses(&line("ort"), 2, &["ort.safetensors exists already", "--force"]);
    scene.accepts(&format!("{} --force", line("ort")));
    assert_eq!(outputs(&scene, "ort").len(), 1);
    symlink("ck", scene.path("link.safetensors")).unwrap();
    fs::create_dir(scene.path("folder.safetensors")).unwrap();
    for (name, is) in [("link", "is a link to ck"), ("folder", "is not a regular file")] {
        let line = format!("run m.onnx --inputs inputs.safetensors --outputs {name}.safetensors --force");
        scene.refuses(&line, 2, &[&format!("{name}.safetensors {is}")]);
    }
    fs::create_dir_all(scene.path("new/newer")).unwrap();
    scene.accepts("run m.onnx --inputs inputs.safetensors --outputs new/newer/o.safetensors");
    assert_eq!(scene.names("new/newer"), ["o.safetensors"]);
}

/// As verify, bench and profile take it; of two graphs nobody knows which.
#[test]
fn a_folder_with_one_graph_is_run() {
    let scene = exported("");
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
    scene.accepts("ck -o out");
    scene.accepts("run out --inputs inputs.safetensors --outputs a.safetensors --backend tract");
    scene.accepts("run m.onnx --inputs inputs.safetensors --outputs b.safetensors --backend tract");
    assert!(scene.read("a.safetensors") == scene.read("b.safetensors"));
    fs::rename(scene.path("out/model.onnx"), scene.path("out/encoder_model.onnx")).unwrap();
    fs::copy(scene.path("out/encoder_model.onnx"), scene.path("out/decoder_model.onnx")).unwrap();
    let line = "run out --inputs inputs.safetensors --outputs o";
    let says = "out holds encoder_model.onnx and decoder_model.onnx, and one graph is taken";
    scene.refuses(line, 2, &[says, "give out/encoder_model.onnx"]);
    fs::copy(scene.path("out/encoder_model.onnx"), scene.path("out/model.onnx")).unwrap();
    let says = "out holds model.onnx, encoder_model.onnx and decoder_model.onnx, and one graph is taken";
    scene.refuses("run out --random", 2, &[says, "give out/model.onnx"]);
}

#[test]
fn arrays_of_numpy_are_named() {
    let scene = exported("");
    scene.write(
        "in.npz",
        b"PK\x03\x04\x2d\0\0\0\0\0\0\0\x21\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\x0d\0\0\0input_ids.npy",
    );
    scene.write("in.npy", b"\x93NUMPY\x01\0v\0{'descr': '<i8'}");
    let [by_name, alone] = ["save_file(dict(numpy.load(\"in.npz\"))", "save_file({\"NAME\": numpy.load(\"in.npy\")}"];
    for (name, kind, help) in [("in.npz", "an archive (.npz)", by_name), ("in.npy", "an array (.npy)", alone)] {
        let told = format!("{name} is {kind} of NumPy, expected a safetensors file");
        let line = format!("run m.onnx --inputs {name} --outputs o");
        scene.refuses(&line, 3, &[&told, "help: ", "safetensors.numpy import save_file", help]);
    }
    scene.write("in.json", "{\"input_ids\": [[4, 5]]}");
    scene.write("in.pt", b"PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x0b\0\0\0in/data.pkl");
    for (name, kind) in [("in.json", "a JSON text"), ("in.pt", "a PyTorch file")] {
        let told = format!("{name} is {kind}, expected a safetensors file");
        scene.refuses(
            &format!("run m.onnx --inputs {name} --outputs o"),
            3,
            &["MOA-E0319", &told, "help: named tensors"],
        );
    }
}

#[test]
fn files_that_cannot_be_read() {
    let scene = exported("");
    scene.write("inputs.safetensors", "no tensors");
    scene.write("m.ort", b"\x1c\0\0\0ORTM\0\0\0\0\0\0\x12\0");
    let cases: [(&str, u8, &[&str]); 9] = [
        ("run m.onnx --inputs nowhere --outputs o", 5, &["nowhere: "]),
        ("run nowhere.plan --inputs inputs.safetensors --outputs o", 5, &["nowhere.plan: ", "check the path"]),
        ("run nowhere.onnx --inputs inputs.safetensors --outputs o", 5, &["nowhere.onnx"]),
        ("run m.onnx --inputs inputs.safetensors --outputs new/o", 3, &["inputs.safetensors"]),
        ("run m.onnx --inputs ck --outputs o", 5, &["ck: "]),
        ("run ck --inputs inputs.safetensors --outputs o", 5, &["ck holds no model.onnx", "`moa-export ck -o OUT`"]),
        (
            "run ck/config.json --inputs inputs.safetensors --outputs o",
            3,
            &["ck/config.json: a JSON text, expected an ONNX model (.onnx)"],
        ),
        (
            "run ck/model.safetensors --inputs inputs.safetensors --outputs o",
            3,
            &["ck/model.safetensors: a safetensors file, expected an ONNX model", "wrote of this checkpoint"],
        ),
        ("run m.ort --random", 3, &["m.ort: an ONNX Runtime model (.ort), expected", "give the .onnx file"]),
    ];
    for (line, code, parts) in cases {
        scene.refuses(line, code, parts);
    }
}

#[test]
fn failures_of_a_backend_leave_nothing() {
    let scene = exported("--form fused");
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
    fs::create_dir_all(scene.path("new/newer")).unwrap();
    for backend in ["ort-function", "tract"] {
        let line = format!("run m.onnx --inputs inputs.safetensors --outputs new/newer/o --backend {backend}");
        scene.refuses(&line, 4, &["fused form"]);
    }
    let line = "run m.onnx --inputs inputs.safetensors --outputs new/newer/o";
    for variable in ["ORT_DYLIB_PATH", "MOA_ORT_LIBRARY"] {
        let before = scene.snapshot();
        let mut command = scene.command(line);
        command.env(variable, "nowhere.so");
        Outcome::of(command).assert_refused(
            variable,
            6,
            &[&format!("{variable}=nowhere.so"), &format!("help: correct or unset {variable}")],
        );
        scene.assert_unchanged(&before, variable);
    }
}

/// What else would do depends on the command, and on the form of the graph.
#[test]
fn a_library_that_is_missing_is_told_as_the_command_goes() {
    let scene = exported("");
    scene.accepts("ck -o fused.onnx --form fused");
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
    // Nothing lies beside this copy.
    fs::copy(env!("CARGO_BIN_EXE_moa-export"), scene.path("program")).unwrap();
    let fused = "help: no backend but `tensorrt` runs a fused graph without it: build it with `cargo build --release \
                 -p moa-ort` and set MOA_ORT_LIBRARY to it, or export with --form function\n";
    let bodies = "help: build it with `cargo build --release -p moa-ort` and set MOA_ORT_LIBRARY to it; the backend \
                  `ort-function` needs none\n";
    let copied = "help: build it with `cargo build --release -p moa-ort` and set MOA_ORT_LIBRARY to it, or leave out \
                  --with-library\n";
    for (line, help) in [
        ("run m.onnx --inputs inputs.safetensors --outputs o", bodies),
        ("run fused.onnx --inputs inputs.safetensors --outputs o", fused),
        ("verify m.onnx --checkpoint ck --backends ort", bodies),
        ("bench fused.onnx --backends ort", fused),
        ("profile m.onnx --inputs inputs.safetensors", bodies),
        ("ck -o other.onnx --with-library", copied),
    ] {
        let mut command = Command::new(scene.path("program"));
        command.current_dir(scene.folder()).args(line.split_whitespace()).env_remove("MOA_ORT_LIBRARY");
        Outcome::of(command).assert_failed(line, 6, &["libmoa_ort not found", help]);
    }
}

#[test]
fn a_model_that_computes_nan_is_told_from_a_runtime_that_fails() {
    let scene = exported("");
    let mut model = scene.model("m.onnx");
    let weights = &mut model.graph.as_mut().unwrap().initializer;
    // The head shares it.
    let embedding = weights.iter_mut().find(|weight| weight.name == "encoder.lm_head.weight").unwrap();
    let nan = f32::NAN.to_le_bytes().repeat(embedding.raw_data.as_ref().unwrap().len() / 4);
    embedding.raw_data = Some(nan.into());
    scene.write("m.onnx", model.encode_to_vec());
    write_inputs(&scene, &[ids(&[1, 4]), mask(&[1, 4])]);
    scene.refuses(&line("ort"), 3, &["router logits of batch 0, token 0 are not finite", "moa-export verify"]);
}
