//! `moa-export verify`.

use std::{fs, process::Command};

use moa_export::onnx::proto::ModelProto;
use prost::{Message, bytes::Bytes};
use serde_json::Value;

use crate::{
    model::Model,
    scene::{Outcome, Scene, json, require_runtime},
};

/// A layer and its export `m.onnx`.
pub(crate) fn exported(options: &str) -> Scene {
    require_runtime();
    let scene = Scene::with(&Model::layer());
    scene.accepts(&format!("ck -o m.onnx {options}"));
    scene
}

/// Changes one trained value of `m.onnx`.
pub(crate) fn damage(scene: &Scene) {
    let mut model = scene.model("m.onnx");
    let weights = &mut model.graph.as_mut().unwrap().initializer;
    let weight = weights.iter_mut().find(|tensor| tensor.name.ends_with("v_proj.weight")).unwrap();
    let mut bytes = weight.raw_data.as_ref().unwrap().to_vec();
    bytes[..4].copy_from_slice(&2.5f32.to_le_bytes());
    weight.raw_data = Some(Bytes::from(bytes));
    scene.write("m.onnx", model.encode_to_vec());
}

#[test]
fn sound_exports_are_verified() {
    for form in ["function", "standard", "fused"] {
        let scene = exported(&format!("--form {form}"));
        let before = scene.snapshot();
        let printed = scene.accepts("verify m.onnx --checkpoint ck");
        assert!(printed.contains("\nverified on ") && printed.contains(&format!("{form} form")), "{printed}");
        assert!(printed.contains("bit for bit"), "{printed}");
        scene.assert_unchanged(&before, form);
    }
}

#[test]
fn exporting_with_verify_verifies() {
    require_runtime();
    let scene = Scene::with(&Model::translator());
    let printed = scene.accepts("ck -o out --verify --external-data always");
    assert!(printed.starts_with("wrote out/") && printed.contains("\nverified on "), "{printed}");
    let outputs = |seed: &str| {
        let line = format!("verify out --checkpoint ck --backends ort-function --seed {seed} --threads 2 --json -");
        let value = json(&scene.accepts(&line));
        let graphs = value["backends"][0]["graphs"].as_array().unwrap().clone();
        graphs.into_iter().map(|graph| graph["outputs"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(outputs("7"), outputs("7"));
    for (first, second) in outputs("0").iter().zip(outputs("7")) {
        assert_ne!(first["max_abs"], second["max_abs"], "another seed gives other inputs");
    }
}

#[test]
fn a_changed_weight_is_a_failure_of_verification() {
    let scene = exported("");
    damage(&scene);
    let outcome = scene.moa("verify m.onnx --checkpoint ck");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(1), ""));
    let text = outcome.stdout;
    assert!(
        text.contains("1 FAULT\n") && text.contains("v_proj.weight") && text.ends_with("\nNOT verified\n"),
        "{text}"
    );
}

#[test]
fn json_says_whether_it_passed() {
    let scene = exported("");
    let outcome = scene.moa("verify m.onnx --checkpoint ck --json -");
    assert!(outcome.stderr.starts_with("verified on ") && outcome.stderr.ends_with('\n'), "{}", outcome.stderr);
    assert_eq!((outcome.code, outcome.stderr.lines().count()), (Some(0), 1));
    let value = json(&outcome.stdout);
    assert_eq!((&value["passed"], &value["family"]), (&true.into(), &"moa_layer".into()));
    assert_eq!(value["graph_changed"], false);
    assert_eq!(value["backends"].as_array().unwrap().len(), 4);
    let printed = scene.accepts("verify m.onnx --checkpoint ck --json report.json");
    assert!(printed.contains("\nverified on "));
    let without_time = |mut value: Value| {
        assert!(value["receipt"].as_object_mut().unwrap().remove("unix_time").is_some());
        value
    };
    let read = json(&String::from_utf8(scene.read("report.json")).unwrap());
    assert_eq!(without_time(read), without_time(value));
    damage(&scene);
    let outcome = scene.moa("verify m.onnx --checkpoint ck --json -");
    let value = json(&outcome.stdout);
    assert_eq!((outcome.code, &value["passed"], &value["verdict"]), (Some(1), &false.into(), &"differs".into()));
    assert_eq!(outcome.stderr, "NOT verified\n");
    scene.refuses("verify m.onnx --checkpoint ck --json /proc/report.json", 5, &["/proc/report.json"]);
}

/// Each graph has a line of what int8 changes, from whatever backend ran it; where none did, a line says so.
#[test]
fn what_int8_changes_is_told_once_a_graph() {
    require_runtime();
    let scene = Scene::with(&Model::translator());
    scene.accepts("ck -o out --dtype int8");
    let command = "verify out --checkpoint ck --backends ort-function,tract";
    let printed = scene.accepts(&format!("{command} --report page.html"));
    let lines: Vec<_> = printed.lines().filter(|line| line.contains("beside the checkpoint's own weights")).collect();
    let page = String::from_utf8(scene.read("page.html")).unwrap();
    for (line, graph) in lines.iter().zip(["encoder_model.onnx", "decoder_model.onnx"]) {
        assert!(
            line.starts_with(&format!("{graph} in int8, ")) && page.contains(&format!("{graph} in int8, ")),
            "{line}"
        );
        assert_eq!(line.contains("the same best token at"), graph.starts_with("decoder"), "{line}");
    }
    assert_eq!(lines.len(), 2, "{printed}");
    let value = json(&scene.accepts(&format!("{command} --json -")));
    let costs = value["rounding_cost"].as_array().unwrap();
    for (cost, graph) in costs.iter().zip(["encoder_model.onnx", "decoder_model.onnx"]) {
        assert!(cost["graph"] == graph && cost["runs"].as_u64() > Some(0), "{cost}");
        assert!(cost["relative_difference"].as_f64().is_some_and(|found| found > 0.0 && found < 0.5), "{cost}");
    }
    assert_eq!(costs.len(), 2);
    scene.accepts("ck -o fused --dtype int8 --form fused");
    let mut nowhere = scene.command("verify fused --checkpoint ck");
    nowhere.env("MOA_ORT_LIBRARY", "nowhere.so");
    let unseen = Outcome::of(nowhere);
    assert!(unseen.stdout.contains("the rounding to int8 changes was not seen"), "{}", unseen.stdout);
    scene.accepts("ck -o fp32");
    let exact = json(&scene.accepts("verify fp32 --checkpoint ck --backends tract --json -"));
    assert_eq!(exact["rounding_cost"], Value::Array(Vec::new()));
}

/// A report must not replace the model that it is about.
#[test]
fn reports_replace_no_file() {
    let scene = exported("");
    for file in ["m.onnx", "ck/model.safetensors"] {
        for force in ["", " --force"] {
            let line = format!("verify m.onnx --checkpoint ck --json {file}{force}");
            scene.refuses(&line, 2, &[&format!("{file} is read by this command"), "write to another file"]);
        }
    }
}

/// Two JSON texts behind one another are none.
#[test]
fn exporting_with_verify_and_json_prints_one_text() {
    require_runtime();
    let scene = Scene::with(&Model::layer());
    let outcome = scene.moa("ck -o m.onnx --verify --json");
    assert!(outcome.stderr.starts_with("verified on "), "{}", outcome.stderr);
    let value = json(&outcome.stdout);
    assert!(value.to_string().contains("\"passed\":true"), "{value}");
}

#[test]
fn no_tolerance_is_too_little() {
    let scene = exported("");
    let outcome = scene.moa("verify m.onnx --checkpoint ck --atol 0");
    assert_eq!(outcome.code, Some(1), "{}", outcome.stdout);
    for says in ["out of tolerance", "\n  first: ", "\n  worst: ", " (tolerance 0.0e0)\n"] {
        assert!(outcome.stdout.contains(says), "{says}: {}", outcome.stdout);
    }
    let line = "verify m.onnx --checkpoint ck --backends ort-function";
    let printed = scene.accepts(&format!("{line} --atol 1e-9 --rtol 1e-2"));
    let value = json(&scene.accepts(&format!("{line} --atol 1e-9 --rtol 1e-2 --json -")));
    let worst = &value["backends"][0]["graphs"][0]["outputs"]["worst"];
    let [found, expected, tolerance] = ["found", "expected", "tolerance"].map(|key| worst[key].as_f64().unwrap());
    assert!((tolerance - 1e-9 - 1e-2 * expected.abs()).abs() < 1e-6 * tolerance, "{worst}");
    let [difference, tolerance] = [(found - expected).abs(), tolerance].map(|number| format!("{number:.1e}"));
    let ends = [difference.as_str(), &tolerance, "ok"];
    assert!(printed.lines().any(|line| line.split_whitespace().collect::<Vec<_>>().ends_with(&ends)), "{printed}");
    let value = json(&scene.accepts(&format!("{line} --rtol 1e-2 --json -")));
    let outputs = &value["backends"][0]["graphs"][0]["outputs"];
    assert!(outputs["rtol"] == 1e-2 && outputs["atol"].as_f64() > Some(1e-9), "the derived part stays: {outputs:#}");
    assert!(outputs["largest_share"].as_f64() < Some(1.0), "{outputs:#}");
}

#[test]
fn other_checkpoints_do_not_pass() {
    let scene = exported("");
    let mut other = Model::layer();
    other.tensor("k_proj.weight").set(0, 1.0);
    other.write(&scene.path("other"));
    assert_eq!(scene.moa("verify m.onnx --checkpoint other").code, Some(1));
    Model::layer_of(16, 4, 4).write(&scene.path("wider"));
    let outcome = scene.moa("verify m.onnx --checkpoint wider");
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(1), ""), "{}", outcome.stdout);
    Model::translator().write(&scene.path("translator"));
    scene.refuses("verify m.onnx --checkpoint translator", 2, &["m.onnx", "moa_layer", "moa_transformer"]);
    scene.accepts("translator -o out");
    scene.refuses("verify out/encoder_model.onnx --checkpoint translator", 2, &["encoder_model.onnx", "folder"]);
    fs::remove_file(scene.path("out/decoder_model.onnx")).unwrap();
    scene.refuses("verify out --checkpoint translator", 5, &["out/decoder_model.onnx is missing"]);
}

#[test]
fn models_that_cannot_be_read() {
    let scene = exported("");
    scene.write("noise.onnx", [0xff; 300]);
    scene.write("empty.onnx", "");
    fs::create_dir(scene.path("empty")).unwrap();
    let cases: [(&str, u8, &[&str]); 7] = [
        ("verify nowhere.onnx --checkpoint ck", 5, &["nowhere.onnx"]),
        ("verify empty --checkpoint ck", 5, &["MOA-E0518", "empty holds no model.onnx"]),
        ("verify ck --checkpoint ck", 5, &["MOA-E0518", "ck holds no model.onnx", "`moa-export ck -o OUT`"]),
        ("verify m.onnx --checkpoint nowhere", 5, &["nowhere: "]),
        ("verify noise.onnx --checkpoint ck", 3, &["noise.onnx"]),
        ("verify empty.onnx --checkpoint ck", 3, &["empty.onnx"]),
        ("verify ck/model.safetensors --checkpoint ck", 3, &["ck/model.safetensors"]),
    ];
    for (line, code, parts) in cases {
        scene.refuses(line, code, parts);
    }
}

#[test]
fn data_files_must_be_whole() {
    require_runtime();
    let scene = Scene::with(&Model::layer_of(64, 8, 32));
    scene.accepts("ck -o m.onnx --external-data always");
    let data = scene.read("m.onnx.data");
    scene.write("m.onnx.data", &data[..data.len() - 4]);
    scene.refuses("verify m.onnx --checkpoint ck", 3, &["m.onnx"]);
    fs::remove_file(scene.path("m.onnx.data")).unwrap();
    scene.refuses("verify m.onnx --checkpoint ck", 5, &["m.onnx.data"]);
}

/// Takes from `m.onnx` what says how it was exported.
fn forget_the_form(scene: &Scene, edit: impl Fn(&mut ModelProto)) {
    scene.edit("m.onnx", |model| {
        model.metadata_props.retain(|entry| entry.key != "moa.form");
        edit(model);
    });
}

/// A graph shows the form that its metadata lost.
#[test]
fn weights_are_compared_where_metadata_are_lost_and_nodes_are_not() {
    let scene = exported("");
    forget_the_form(&scene, |model| model.metadata_props.clear());
    let line = "verify m.onnx --checkpoint ck --backends ort";
    let printed = scene.accepts(line);
    assert!(printed.contains("weights of m.onnx: ") && !printed.contains("NOT compared"), "{printed}");
    forget_the_form(&scene, |model| {
        let weights = &mut model.graph.as_mut().unwrap().initializer;
        let weight = weights.iter_mut().find(|weight| weight.dims.len() > 1).unwrap();
        let mut bytes = weight.raw_data.take().unwrap().to_vec();
        bytes[0] ^= 1;
        weight.raw_data = Some(bytes.into());
    });
    let outcome = scene.moa(line);
    assert_eq!(outcome.code, Some(1), "{}", outcome.stdout);
    assert!(outcome.stdout.ends_with("\nNOT verified\n"), "{}", outcome.stdout);
}

/// An audit that was skipped is named wherever the verdict is.
#[test]
fn weights_that_were_not_compared_are_not_verified() {
    let scene = exported("");
    forget_the_form(&scene, |model| model.graph.as_mut().unwrap().node[0].name.push('x'));
    let line = "verify m.onnx --checkpoint ck --backends ort,ort-function";
    let printed = scene.accepts(&format!("{line} --report page.html"));
    let verdict = "verified on ort, ort-function; the weights of m.onnx were NOT compared";
    assert!(
        printed.contains("weights of m.onnx: skipped, ") && printed.ends_with(&format!("\n{verdict}\n")),
        "{printed}"
    );
    let page = String::from_utf8(scene.read("page.html")).unwrap();
    assert!(page.contains(verdict), "{page}");
    let value = json(&scene.accepts(&format!("{line} --json -")));
    let left_out = value["not_compared"].as_array().unwrap();
    assert!(left_out.len() == 1 && left_out[0].as_str().unwrap().starts_with("weights of m.onnx: "), "{value:#}");
    let audit = &value["audits"][0];
    assert!(audit["skipped"].is_string() && audit["weights"].is_null(), "{audit}");
    assert_eq!((&value["verdict"], &value["passed"]), (&"verified".into(), &true.into()));
    let outcome = scene.moa(&format!("{line} --strict"));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(1), ""));
    assert!(outcome.stdout.ends_with(&format!("\nINCOMPLETE: {verdict}\n")), "{}", outcome.stdout);
    let outcome = scene.moa(&format!("{line} --strict --json -"));
    let value = json(&outcome.stdout);
    assert_eq!((&value["verdict"], &value["passed"]), (&"incomplete".into(), &false.into()));
    exported("").accepts(&format!("{line} --strict"));
    let bench = "bench m.onnx --samples 8 --warm-up 0.05 --no-operators --backends ort-function --checkpoint ck";
    let printed = scene.accepts(bench);
    assert!(printed.contains("m.onnx on ort-function: not checked, weights of m.onnx: "), "{printed}");
}

/// A vocabulary that is too large to be swept.
#[test]
fn cases_that_are_left_out_are_told() {
    require_runtime();
    let mut model = Model::translator();
    for key in ["vocab_size", "src_vocab_size", "tgt_vocab_size"] {
        model.set(key, 4097);
    }
    let embeddings = model.tensors.values_mut().filter(|tensor| tensor.shape[0] == 20);
    embeddings.for_each(|tensor| {
        let row = tensor.bytes.len() / 20;
        tensor.shape[0] = 4097;
        tensor.bytes = tensor.bytes.iter().copied().cycle().take(4097 * row).collect();
    });
    let scene = Scene::with(&model);
    scene.accepts("ck -o out");
    let printed = scene.accepts("verify out --checkpoint ck --backends ort-function,ort --report page.html");
    let page = String::from_utf8(scene.read("page.html")).unwrap();
    for graph in ["encoder_model.onnx", "decoder_model.onnx"] {
        let line = format!("{graph}: no case reads every token of the vocabulary: it has 4097, more than 4096");
        assert!(printed.matches(&line).count() == 1 && page.contains(&line), "{printed}");
    }
    let small = exported("");
    let value = json(&small.accepts("verify m.onnx --checkpoint ck --json -"));
    assert!(value["backends"][0]["graphs"][0]["left_out"].is_null(), "{value:#}");
}

/// What was granted is told in the types of the export.
#[test]
fn tolerance_and_margin_are_those_that_were_granted() {
    require_runtime();
    let scene = Scene::with(&Model::translator());
    scene.accepts("ck -o out --dtype fp16");
    let line = "verify out --checkpoint ck --backends ort-function";
    let value = json(&scene.accepts(&format!("{line} --json - --report page.html")));
    let backend = &value["backends"][0];
    assert_eq!(backend["activations"], "float16");
    assert!(backend["graphs"][0]["routing"]["margin"].as_f64() > Some(1e-5), "{backend:#}");
    let page = String::from_utf8(scene.read("page.html")).unwrap();
    assert!(page.contains("float16") && !page.contains("rounding to f32"), "{page}");
    assert!(backend["products"].is_null() && !page.contains(" in products"), "{backend:#}");
}

/// Activations are f32, and products of the library are granted fewer bytes; bodies round none.
#[test]
fn rounded_products_are_told_beside_activations() {
    require_runtime();
    let scene = Scene::with(&Model::translator());
    for (dtype, told) in [("bf16-products", "bfloat16"), ("int8-products", "int8"), ("int4-products", "int8")] {
        scene.accepts(&format!("ck -o out --dtype {dtype} --force"));
        let line = "verify out --checkpoint ck --backends ort,ort-function";
        let value = json(&scene.accepts(&format!("{line} --json - --report page.html --force")));
        assert_eq!(value["dtype"], dtype);
        for (backend, products) in value["backends"].as_array().unwrap().iter().zip([told.into(), Value::Null]) {
            assert_eq!((&backend["activations"], &backend["products"]), (&"float32".into(), &products));
            let margin = backend["graphs"][0]["routing"]["margin"].as_f64();
            assert_eq!(margin > Some(1e-5), !products.is_null(), "{backend:#}");
        }
        assert_eq!(value["rounding_cost"].as_array().unwrap().is_empty(), told == "bfloat16", "{value:#}");
        let page = String::from_utf8(scene.read("page.html")).unwrap();
        assert!(page.contains(&format!("float32, {told} in products")), "{page}");
    }
}

#[test]
fn gates_that_replace_those_of_the_family_are_named() {
    let scene = exported("--gate-mode softmax_topk_renorm");
    let printed = scene.accepts("verify m.onnx --checkpoint ck --backends ort-function");
    assert!(printed.contains("\ngates: softmax_topk_renorm, in place of the family's\n"), "{printed}");
}

/// A backend that the user names must be used.
#[test]
fn named_backends_must_take_the_form() {
    let scene = exported("--form fused");
    for backend in ["tract", "ort-function"] {
        let outcome = scene.moa(&format!("verify m.onnx --checkpoint ck --backends {backend}"));
        outcome.assert_failed(backend, 4, &[backend, "fused form", "--form function"]);
    }
    scene.accepts("verify m.onnx --checkpoint ck --backends ort");
}

/// What is wrong with a runtime is said. Other backends go on where none was named; a variable names what it must find.
#[test]
fn runtimes_that_are_none() {
    let scene = exported("");
    scene.write("fake.so", "no library");
    let library = std::env::var("MOA_ORT_LIBRARY").unwrap();
    let cases = [
        ("ORT_DYLIB_PATH", "nowhere.so", "ORT_DYLIB_PATH=nowhere.so"),
        ("ORT_DYLIB_PATH", "fake.so", "fake.so"),
        ("ORT_DYLIB_PATH", library.as_str(), "no ONNX Runtime"),
        ("MOA_ORT_LIBRARY", "nowhere.so", "MOA_ORT_LIBRARY=nowhere.so"),
    ];
    for (variable, value, named) in cases {
        let with = |line: &str| -> Outcome {
            let mut command: Command = scene.command(line);
            command.env(variable, value);
            Outcome::of(command)
        };
        let what = format!("{variable}={value}");
        let outcome = with("verify m.onnx --checkpoint ck --backends ort");
        outcome.assert_failed(&what, 6, &["backend ort was not used", named]);
        let outcome = with("verify m.onnx --checkpoint ck");
        assert_eq!(outcome.code, Some(6), "{what}: {}", outcome.stdout);
        assert!(
            outcome.stderr.contains("backend ort was not used") && outcome.stderr.contains(named),
            "{}",
            outcome.stderr
        );
        assert!(
            outcome.stdout.contains("skipped: ") && outcome.stdout.contains("\nINCOMPLETE: verified on "),
            "{}",
            outcome.stdout
        );
    }
}

/// A difference that was found is the answer, whichever backend was missing that nobody named.
#[test]
fn a_difference_counts_more_than_a_backend_that_is_missing() {
    let scene = exported("");
    damage(&scene);
    let mut command = scene.command("verify m.onnx --checkpoint ck");
    command.env("MOA_ORT_LIBRARY", "nowhere.so");
    let outcome = Outcome::of(command);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(1), ""), "{}", outcome.stdout);
    assert!(outcome.stdout.ends_with("\nNOT verified\n"), "{}", outcome.stdout);
}

/// What is named and missing is told before weights are compared or anything is run.
#[test]
fn a_backend_that_is_named_and_missing_ends_a_verification_at_once() {
    let scene = exported("");
    damage(&scene);
    for (backends, variable) in [("tract,ort", "MOA_ORT_LIBRARY"), ("tract,tensorrt", "MOA_TENSORRT_LIBRARY")] {
        let mut command = scene.command(&format!("verify m.onnx --checkpoint ck --backends {backends}"));
        command.env(variable, "nowhere.so");
        let outcome = Outcome::of(command);
        outcome.assert_failed(backends, 6, &["was not used", &format!("{variable}=nowhere.so")]);
        assert_eq!(outcome.stdout, "");
    }
    let scene = exported("--form fused");
    let line = "verify m.onnx --checkpoint ck --backends ort,tract";
    let outcome = scene.moa(line);
    outcome.assert_failed(line, 4, &["backend tract was not used: the model is in fused form"]);
    assert_eq!(outcome.stdout, "");
}

/// Nothing was compared, which is neither a proof nor a fault of the export.
#[test]
fn a_verification_on_no_backend_is_none() {
    let scene = exported("--form fused");
    let line = "verify m.onnx --checkpoint ck";
    let mut command: Command = scene.command(line);
    command.env("MOA_ORT_LIBRARY", "nowhere.so").env("MOA_TENSORRT_LIBRARY", "nowhere.so");
    let outcome = Outcome::of(command);
    outcome.assert_failed(line, 6, &["backend ort was not used", "MOA_ORT_LIBRARY=nowhere.so"]);
    assert!(outcome.stdout.ends_with("\nNOT verified: no backend was used\n"), "{}", outcome.stdout);
}

/// A library that cannot be loaded was named by the user: that is no failed verification.
#[test]
fn operator_libraries_that_are_none() {
    let scene = exported("");
    scene.write("fake.so", "no library");
    let outcome = scene.moa("verify m.onnx --checkpoint ck --backends ort --library fake.so");
    outcome.assert_failed("--library fake.so", 6, &["fake.so"]);
    let whole = fs::read(std::env::var_os("MOA_ORT_LIBRARY").unwrap()).unwrap();
    scene.write("cut.so", &whole[..whole.len() / 4]);
    let outcome = scene.moa("verify m.onnx --checkpoint ck --backends ort --library cut.so");
    outcome.assert_failed("--library cut.so", 6, &["cut.so cannot be loaded: it was cut off"]);
    for line in ["verify m.onnx --checkpoint ck --backends ort", "verify m.onnx --checkpoint ck"] {
        let outcome = scene.moa(&format!("{line} --library nowhere.so"));
        outcome.assert_failed(line, 6, &["nowhere.so", "help: correct or leave out --library"]);
    }
}

/// A variable asks for its library, in commands that would else do without it; one that is right asks for no other.
#[test]
fn what_a_variable_names_is_not_left_out() {
    let scene = exported("");
    let (verify, bench) = ("verify m.onnx --checkpoint ck", "bench m.onnx --seq 4 --seconds 0.05");
    for (line, variable) in [
        (verify, "MOA_TENSORRT_LIBRARY"),
        (verify, "MOA_CUDA_LIBRARY"),
        (verify, "MOA_CUDA_KERNELS"),
        (verify, "TENSORRT_ROOT"),
        (bench, "MOA_ORT_LIBRARY"),
    ] {
        let mut command = scene.command(line);
        command.env(variable, "nowhere.so");
        Outcome::of(command).assert_failed(line, 6, &[&format!("{variable}=nowhere.so")]);
    }
}

/// One half of a translator is no model.
#[test]
fn half_an_export_is_none() {
    let scene = Scene::with(&Model::translator());
    scene.accepts("ck -o out");
    fs::remove_file(scene.path("out/decoder_model.onnx")).unwrap();
    for line in ["bench out", "profile out --inputs i.safetensors", "build out --gpu auto -o plans"] {
        scene.refuses(line, 5, &["MOA-E0518", "out holds encoder_model.onnx and no decoder_model.onnx"]);
    }
}
