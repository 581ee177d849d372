//! The same small models on every backend. Needs `ORT_DYLIB_PATH`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(all(feature = "ort", feature = "tract"))]

mod support_onnx;

use moa_export::backend::{
    Backend, BackendErrorKind, OrtOptions, RuntimeLibrary, find_operator_library, load_onnxruntime, ort, ort_function,
    tract,
};
use moa_export::onnx::proto::ModelProto;
use moa_export::onnx::proto::attribute_proto::AttributeType;
use moa_export::onnx::proto::tensor_proto::DataType::{Double, Float, Int32, Int64};
use moa_export::onnx::proto::{AttributeProto, TensorProto};
use moa_export::onnx::read::{OnnxFile, read_model};
use moa_export::tensor::{NamedTensors, Tensor, TensorData};
use support_onnx::{
    external_weight, feed_forward_model, file, function, graph, import, model, node, node_of, value, weight, write,
};

fn backends() -> Vec<Box<dyn Backend>> {
    let runtime = RuntimeLibrary::OnnxRuntime;
    assert!(runtime.named().is_some(), "set {} to libonnxruntime for this test", runtime.variable());
    let options = OrtOptions { threads: Some(1), ..OrtOptions::default() };
    [ort(options.clone()), ort_function(options), tract()].map(|backend| backend.expect("default features")).into()
}

fn f32s(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::new(shape, TensorData::F32(values.to_vec())).unwrap()
}

fn i64s(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::new(shape, TensorData::I64(values.to_vec())).unwrap()
}

fn named(tensors: &[(&str, &Tensor)]) -> NamedTensors {
    tensors.iter().map(|(name, tensor)| ((*name).to_owned(), (*tensor).clone())).collect()
}

/// Runs all calls on one runner of every backend.
fn check(file: &OnnxFile, calls: &[(NamedTensors, NamedTensors)]) {
    for backend in backends() {
        let mut runner = backend.load(file).unwrap_or_else(|error| panic!("{}: {error}", backend.name()));
        for (inputs, expected) in calls {
            let found = runner.run(inputs).unwrap_or_else(|error| panic!("{}: {error}", backend.name()));
            assert_eq!(&found, expected, "{}", backend.name());
        }
    }
}

/// `y = concat(past, x) @ w`, `chosen = where(mask, x, 0)`, `count = shape(x)`, with symbolic batch and lengths.
fn sequence_model() -> ModelProto {
    let mut concat = node("Concat", &["past", "x"], &["all"]);
    concat.attribute = vec![AttributeProto {
        name: "axis".into(),
        i: Some(1),
        r#type: AttributeType::Int as i32,
        ..AttributeProto::default()
    }];
    let mut one = weight("one", &[], &[]);
    one = TensorProto { data_type: Int32 as i32, raw_data: None, int32_data: vec![1], ..one };
    let nodes = vec![
        concat,
        node("MatMul", &["all", "w"], &["y"]),
        node("Equal", &["mask", "one"], &["chosen_mask"]),
        node("Where", &["chosen_mask", "x", "zero"], &["chosen"]),
        node("Shape", &["x"], &["count"]),
    ];
    model(graph(
        nodes,
        vec![
            value("past", Float, &["batch", "past_length", "2"]),
            value("x", Float, &["batch", "length", "2"]),
            value("mask", Int32, &["batch", "length", "1"]),
        ],
        vec![
            value("y", Float, &["batch", "total", "2"]),
            value("chosen", Float, &["batch", "length", "2"]),
            value("count", Int64, &["3"]),
        ],
        vec![weight("w", &[2, 2], &[1.0, 2.0, 3.0, 4.0]), weight("zero", &[], &[0.0]), one],
    ))
}

fn sequence_call(past: &Tensor, mask: i32, x: &Tensor, y: &Tensor, chosen: &Tensor) -> (NamedTensors, NamedTensors) {
    let [batch, length, _] = *x.shape() else { panic!("rank") };
    let mask = Tensor::new([batch, length, 1], TensorData::I32(vec![mask; batch * length])).unwrap();
    let count = i64s(&[3], &[batch as i64, length as i64, 2]);
    (named(&[("past", past), ("x", x), ("mask", &mask)]), named(&[("y", y), ("chosen", chosen), ("count", &count)]))
}

#[test]
fn symbolic_and_empty_dimensions() {
    let (_folder, file) = file(&sequence_model());
    let x = f32s(&[1, 1, 2], &[1.0, 1.0]);
    let first = sequence_call(&f32s(&[1, 0, 2], &[]), 1, &x, &f32s(&[1, 1, 2], &[4.0, 6.0]), &x);
    let past = f32s(&[1, 2, 2], &[1.0, 0.0, 0.0, 1.0]);
    let y = f32s(&[1, 3, 2], &[1.0, 2.0, 3.0, 4.0, 4.0, 6.0]);
    let second = sequence_call(&past, 0, &x, &y, &f32s(&[1, 1, 2], &[0.0, 0.0]));
    let x = f32s(&[2, 2, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 0.0]);
    let y = f32s(&[2, 2, 2], &[1.0, 2.0, 3.0, 4.0, 4.0, 6.0, 2.0, 4.0]);
    let third = sequence_call(&f32s(&[2, 0, 2], &[]), 1, &x, &y, &x);
    check(&file, &[first.clone(), second, third, first]);
}

#[test]
fn every_element_type_passes_through() {
    let kinds = [("f", Float), ("d", Double), ("i", Int32), ("l", Int64)];
    let nodes = kinds.iter().map(|(name, _)| node("Add", &[name, name], &[&format!("{name}2")])).collect();
    let inputs = kinds.iter().map(|(name, kind)| value(name, *kind, &["n"])).collect();
    let outputs = kinds.iter().map(|(name, kind)| value(&format!("{name}2"), *kind, &["n"])).collect();
    let (_folder, file) = file(&model(graph(nodes, inputs, outputs, vec![])));
    let tensors = |factor: i32| {
        let values = [1, 2, 3].map(|value| value * factor);
        [
            TensorData::F32(values.map(|v| v as f32).to_vec()),
            TensorData::F64(values.map(f64::from).to_vec()),
            TensorData::I32(values.to_vec()),
            TensorData::I64(values.map(i64::from).to_vec()),
        ]
        .map(|data| Tensor::new([3], data).unwrap())
    };
    let names = |suffix: &str| kinds.map(|(name, _)| format!("{name}{suffix}"));
    let inputs = names("").into_iter().zip(tensors(1)).collect();
    let expected = names("2").into_iter().zip(tensors(2)).collect();
    check(&file, &[(inputs, expected)]);
}

/// ONNX Runtime reads the bias of a `LayerNormalization` that has an empty name as if it were there.
#[test]
fn absent_inputs_may_be_named_by_nothing() {
    let normalise = || vec![node("LayerNormalization", &["x", "s", ""], &["y"])];
    let io = || [value("x", Float, &["n", "2"]), value("y", Float, &["n", "2"])].map(|value| vec![value]);
    let call = (named(&[("x", &f32s(&[1, 2], &[3.0, 3.0]))]), named(&[("y", &f32s(&[1, 2], &[0.0, 0.0]))]));
    let [inputs, outputs] = io();
    let plain = model(graph(normalise(), inputs, outputs, vec![weight("s", &[2], &[1.0, 2.0])]));
    let [inputs, outputs] = io();
    let entries = [("location", "s.data"), ("offset", "0"), ("length", "8")];
    let beside = model(graph(normalise(), inputs, outputs, vec![external_weight("s", &[2], &entries)]));
    let [inputs, outputs] = io();
    let calls = vec![node_of("local", "Normalise", &["x", "s"], &["y"])];
    let mut in_body = model(graph(calls, inputs, outputs, vec![weight("s", &[2], &[1.0, 2.0])]));
    in_body.opset_import.push(import("local", 1));
    in_body.functions.push(function("local", "Normalise", &["x", "s"], &["y"], normalise()));
    for model in [plain, beside, in_body] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("s.data"), support_onnx::bytes(&[1.0, 2.0])).unwrap();
        let file = read_model(&write(folder.path(), &model)).unwrap();
        assert!(!file.is_modified());
        check(&file, std::slice::from_ref(&call));
    }
}

fn function_model() -> ModelProto {
    let calls =
        vec![node_of("ai.moa", "Twice", &["x", ""], &["", "m"]), node_of("ai.moa", "Twice", &["m"], &["kept", "y"])];
    let body = vec![node("Identity", &["a"], &["copy"]), node("Add", &["a", "a"], &["sum"])];
    let mut model = model(graph(
        calls,
        vec![value("x", Float, &["n"])],
        vec![value("y", Float, &["n"]), value("kept", Float, &["n"])],
        vec![],
    ));
    model.opset_import.push(import("ai.moa", 1));
    model.functions.push(function("ai.moa", "Twice", &["a", "absent"], &["copy", "sum"], body));
    model
}

#[test]
fn functions_run_where_there_is_no_operator_library() {
    let (_folder, file) = file(&function_model());
    let inputs = named(&[("x", &f32s(&[2], &[1.0, 2.0]))]);
    let expected = named(&[("y", &f32s(&[2], &[4.0, 8.0])), ("kept", &f32s(&[2], &[2.0, 4.0]))]);
    for backend in backends().into_iter().skip(1) {
        let found = backend.load(&file).unwrap().run(&inputs).unwrap();
        assert_eq!(found, expected, "{}", backend.name());
    }
}

#[test]
fn an_operator_without_body_needs_the_library() {
    let (_folder, file) = file(&feed_forward_model());
    let [library, bodies, tract] = backends().try_into().unwrap_or_else(|_| panic!("three backends"));
    for backend in [bodies, tract] {
        let error = backend.load(&file).err().expect("a fused model loaded");
        assert_eq!(error.kind(), BackendErrorKind::Unsupported, "{}: {error}", backend.name());
        assert!(error.to_string().contains("MoEFeedForward has no body"), "{error}");
        assert!(error.help().is_some());
    }
    if find_operator_library(None).is_err() {
        let error = library.load(&file).err().expect("a fused model loaded");
        assert_eq!(error.kind(), BackendErrorKind::Runtime, "{error}");
    }
}

#[test]
fn a_missing_operator_library_names_the_places() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("libmoa_ort.so");
    let error = find_operator_library(Some(&absent)).expect_err("found an absent file");
    assert!(error.to_string().contains(absent.to_str().unwrap()), "{error}");
}

#[test]
fn external_data_is_read_from_the_folder_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let mut data = vec![0xff; 16];
    data.extend(support_onnx::bytes(&[1.0, 2.0, 3.0]));
    std::fs::write(folder.path().join("model.onnx.data"), data).unwrap();
    let weights = external_weight("w", &[3], &[("location", "model.onnx.data"), ("offset", "16"), ("length", "12")]);
    let model = model(graph(
        vec![node("Add", &["x", "w"], &["t"]), node("Neg", &["t"], &["y"])],
        vec![value("x", Float, &["n", "3"])],
        vec![value("y", Float, &["n", "3"])],
        vec![weights],
    ));
    let file = moa_export::onnx::read::read_model(&write(folder.path(), &model)).unwrap();
    let x = f32s(&[1, 3], &[1.0, 1.0, 1.0]);
    let y = f32s(&[1, 3], &[-2.0, -3.0, -4.0]);
    let inputs = named(&[("x", &x)]);
    check(&file, &[(inputs.clone(), named(&[("y", &y)]))]);

    let mut changed = file.model().clone();
    changed.graph.as_mut().unwrap().output.push(value("t", Float, &["n", "3"]));
    let edited = file.with_model(changed).unwrap();
    let t = f32s(&[1, 3], &[2.0, 3.0, 4.0]);
    check(&edited, &[(inputs, named(&[("y", &y), ("t", &t)]))]);
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn an_edited_model_without_external_data_runs_from_memory() {
    let (_folder, file) = file(&sequence_model());
    let mut changed = sequence_model();
    changed.graph.as_mut().unwrap().output = vec![value("all", Float, &["batch", "total", "2"])];
    let edited = file.with_model(changed).unwrap();
    let past = f32s(&[1, 1, 2], &[7.0, 8.0]);
    let x = f32s(&[1, 1, 2], &[1.0, 1.0]);
    let (inputs, _) = sequence_call(&past, 1, &x, &x, &x);
    check(&edited, &[(inputs, named(&[("all", &f32s(&[1, 2, 2], &[7.0, 8.0, 1.0, 1.0]))]))]);
}

#[test]
fn wrong_inputs_are_named() {
    let (_folder, file) = file(&sequence_model());
    let x = f32s(&[1, 1, 2], &[1.0, 1.0]);
    let (good, _) = sequence_call(&f32s(&[1, 0, 2], &[]), 1, &x, &x, &x);
    let change = |edit: &dyn Fn(&mut NamedTensors)| {
        let mut inputs = good.clone();
        edit(&mut inputs);
        inputs
    };
    let cases = [
        (
            change(&|inputs| drop(inputs.remove("mask"))),
            "input `mask`: expected int32 [batch, length, 1], found nothing",
        ),
        (
            change(&|inputs| drop(inputs.insert("z".into(), x.clone()))),
            "input `z`: expected one of past, x, mask, found an unknown name",
        ),
        (
            change(&|inputs| drop(inputs.insert("x".into(), i64s(&[1, 1, 2], &[1, 1])))),
            "input `x`: expected float32 [batch, length, 2] with batch = 1, found int64 [1, 1, 2]",
        ),
        (
            change(&|inputs| drop(inputs.insert("x".into(), f32s(&[2], &[1.0, 1.0])))),
            "input `x`: expected float32 [batch, length, 2] with batch = 1, found float32 [2]",
        ),
        (
            change(&|inputs| drop(inputs.insert("past".into(), f32s(&[1, 1, 3], &[0.0; 3])))),
            "input `past`: expected float32 [batch, past_length, 2] with batch = 1, past_length = 1, found float32 [1, 1, 3]",
        ),
        (
            change(&|inputs| drop(inputs.insert("past".into(), f32s(&[2, 0, 2], &[])))),
            "input `x`: expected float32 [batch, length, 2] with batch = 2, found float32 [1, 1, 2]",
        ),
    ];
    for backend in backends() {
        let mut runner = backend.load(&file).unwrap();
        for (inputs, expected) in &cases {
            let error = runner.run(inputs).expect_err("wrong inputs passed");
            assert_eq!(&error.to_string(), expected, "{}", backend.name());
            assert_eq!(error.kind(), BackendErrorKind::Input);
        }
    }
}

#[test]
fn a_dimension_may_be_the_sum_of_others() {
    let inputs =
        vec![value("mask", Float, &["past + new"]), value("past", Float, &["past"]), value("new", Float, &["new"])];
    let nodes = vec![node("Neg", &["mask"], &["y"])];
    let (_folder, file) = file(&model(graph(nodes, inputs, vec![value("y", Float, &["past + new"])], vec![])));
    let tensors = |sizes: [usize; 3]| {
        let tensor = |(name, size): (&str, usize)| (name.to_owned(), f32s(&[size], &vec![1.0; size]));
        ["mask", "past", "new"].into_iter().zip(sizes).map(tensor).collect::<NamedTensors>()
    };
    for backend in backends() {
        let mut runner = backend.load(&file).unwrap();
        assert!(runner.run(&tensors([3, 1, 2])).is_ok(), "{}", backend.name());
        let error = runner.run(&tensors([4, 1, 2])).expect_err("wrong sum");
        let expected = "input `mask`: expected float32 [past + new] with past + new = 3, found float32 [4]";
        assert_eq!(error.to_string(), expected, "{}", backend.name());
    }
}

#[test]
fn what_a_runtime_refuses_is_an_error() {
    let nodes = vec![node("NoSuchOperator", &["x"], &["y"])];
    let unknown = model(graph(nodes, vec![value("x", Float, &["n"])], vec![value("y", Float, &["n"])], vec![]));
    let (_folder, file) = file(&unknown);
    for backend in backends() {
        let inputs = named(&[("x", &f32s(&[1], &[1.0]))]);
        let error = backend.load(&file).and_then(|mut runner| runner.run(&inputs)).expect_err("ran");
        assert_eq!(error.kind(), BackendErrorKind::Failed, "{}: {error}", backend.name());
    }
}

#[test]
fn the_runtime_tells_its_version() {
    drop(backends());
    let runtime = load_onnxruntime().unwrap();
    assert!(runtime.version().starts_with("1."), "{}", runtime.version());
    assert!(runtime.path().is_file());
}

const PROBE: &str = "MOA_TEST_PROBE";

/// Loads whatever the environment names, in a process of its own: a process loads one ONNX Runtime only.
#[test]
#[ignore = "a_library_that_is_no_onnx_runtime_is_an_error runs it"]
fn probe() {
    assert!(std::env::var_os(PROBE).is_some(), "{PROBE} is not set");
    let text = load_onnxruntime().map_or_else(|error| format!("{:?}: {error}", error.kind()), |_| "loaded".into());
    println!("probed {text}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_library_that_is_no_onnx_runtime_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.so");
    std::fs::write(&text, "no library").unwrap();
    let absent = folder.path().join("absent.so");
    let other = std::fs::read_to_string("/proc/self/maps").unwrap();
    let other = other.lines().filter_map(|line| line.split(' ').next_back()).find(|path| path.contains("libc.so"));
    let cases = [
        (text.to_str().unwrap(), "text.so cannot be loaded: "),
        (absent.to_str().unwrap(), "Runtime: ONNX Runtime not found; looked in ORT_DYLIB_PATH=/"),
        (other.unwrap(), "is no ONNX Runtime"),
    ];
    for (library, expected) in cases {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "probe", "--nocapture"])
            .env(PROBE, "1")
            .env(RuntimeLibrary::OnnxRuntime.variable(), library)
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.contains("probed ") && output.contains(expected), "{library}: {output}");
    }
}
