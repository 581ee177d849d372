//! `moa-export bench`. Nothing here asserts a time.

mod compare;
mod in_place;
mod inputs;
mod sizes;

use prost::Message;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

use crate::{
    common::data,
    model::Model,
    scene::{Scene, json, require_runtime},
};

/// Few calls of a small shape.
pub(crate) const QUICK: &str = "--samples 12 --warm-up 0.05 --seq 6";

/// The masked language model and its export `m.onnx`.
pub(crate) fn exported(options: &str) -> Scene {
    require_runtime();
    Scene::exported("mlm", options)
}

fn bench(scene: &Scene, options: &str) -> Value {
    json(&scene.accepts(&format!("bench m.onnx {QUICK} {options} --json -")))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("{key} is no list in {value}"))
}

/// Changes what the kernel computes and leaves the body as it is.
fn plant_fault(scene: &Scene) {
    let mut model = scene.model("m.onnx");
    let nodes = &mut model.graph.as_mut().unwrap().node;
    let node = nodes.iter_mut().find(|node| node.op_type == "MoASelfAttention").unwrap();
    let scale = node.attribute.iter_mut().find(|attribute| attribute.name == "scale").unwrap();
    scale.f = scale.f.map(|scale| 3.0 * scale);
    scene.write("m.onnx", model.encode_to_vec());
}

#[test]
fn times_come_with_a_receipt_and_everything_that_they_need_to_be_believed() {
    let scene = exported("");
    let result = bench(&scene, "--batch 1,2");
    let receipt = &result["receipt"];
    for (part, key) in [
        ("machine", "cpu"),
        ("machine", "affinity"),
        ("machine", "kernel"),
        ("machine", "virtual_machine"),
        ("before", "load_averages"),
        ("after", "load_averages"),
        ("after", "peak_memory_bytes"),
        ("options", "routing"),
    ] {
        assert!(!receipt[part][key].is_null(), "{part}.{key} is missing in {receipt}");
    }
    assert!(receipt["machine"].get("gpus").is_some() && receipt["machine"].get("governors").is_some());
    let names: Vec<_> = list(receipt, "runtimes").iter().map(|library| library["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["ONNX Runtime", "libmoa_ort"]);
    let file = &list(receipt, "files")[0];
    assert_eq!(
        (file["bytes"].as_u64(), file["sha256"].as_str().map(str::len)),
        (Some(scene.read("m.onnx").len() as u64), Some(64))
    );
    let rows = list(&result, "rows");
    assert_eq!(rows.len(), 4, "two shapes, with our library and without it");
    for (index, row) in rows.iter().enumerate() {
        let times = &row["times_ns"];
        assert_eq!((times["samples"].as_u64(), row["turns"].as_u64()), (Some(12), Some(12)));
        let mut turns: Vec<_> = list(row, "turn_medians_ns").iter().map(|turn| turn.as_u64().unwrap()).collect();
        turns.sort_unstable();
        let median = row["turn_median_ns"]["value"].as_f64().unwrap();
        assert!(turns.len() == 12 && turns[5] as f64 <= median && median <= turns[6] as f64, "{row}");
        assert!(times["p90"].is_null() && times["p99"].is_null() && times["p99_9"].is_null(), "{times}");
        assert_eq!(row["ratio"].is_null(), index % 2 == 0, "{row}");
        assert!(row["first_call_ns"].as_u64() > Some(0) && row["tokens_per_second"].as_f64() > Some(0.0), "{row}");
    }
    assert_eq!(list(&rows[1]["ratio"], "interval").len(), 2);
    assert_eq!(list(&result, "sessions").len(), 2);
    let verdicts: Vec<_> =
        list(&result, "parity").iter().map(|row| row["verdict"]["outcome"].as_str().unwrap()).collect();
    assert_eq!(verdicts, ["agrees", "yardstick", "agrees", "yardstick"]);
}

/// A runtime starts once in a process, which takes some 20 MB.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn the_first_contestant_does_not_pay_for_the_start_of_its_runtime() {
    let scene = exported("");
    for backends in ["ort", "ort-function", "ort,ort-function", "ort-function,ort"] {
        let line = format!("bench m.onnx m.onnx {QUICK} --no-operators --backends {backends} --json -");
        let result = json(&scene.accepts(&line));
        let memory = |session: &Value| session["added_memory_bytes"].as_u64().unwrap();
        let added: Vec<_> = list(&result, "sessions").iter().map(memory).collect();
        let (first, second) = added.split_at(added.len() / 2);
        let mut pairs = first.iter().zip(second);
        let is_close = |(a, b): (&u64, &u64)| *a > 0 && *b > 0 && a.abs_diff(*b) < 5_000_000;
        assert!(first.len() == second.len() && pairs.all(is_close), "{backends}: {added:?}");
    }
}

#[test]
fn time_is_told_by_layer_for_bodies_too() {
    let scene = exported("");
    let result = bench(&scene, "");
    let operators = list(&result, "operators");
    assert_eq!(operators.len(), 2);
    for (times, inside) in operators.iter().zip(["MoASelfAttention", "ScatterElements"]) {
        let nodes = list(times, "nodes");
        let ours = |node: &&Value| node["module"].as_str().unwrap().contains("self_attn");
        assert!(nodes.iter().any(|node| ours(&node) && node["operator"] == inside), "{inside} in {nodes:?}");
        assert!(nodes.iter().all(|node| node["routed"] == ours(&node)), "{nodes:?}");
        assert!(nodes.iter().any(|node| node["layer"].as_str().unwrap().ends_with("layers.1")), "{nodes:?}");
    }
    assert_eq!(list(&bench(&scene, "--no-operators"), "operators").len(), 0);
}

#[test]
fn the_load_of_every_expert_is_told() {
    let scene = exported("");
    let result = bench(&scene, "--batch 3 --no-operators");
    let loads = list(&result, "experts");
    assert!(loads.len() > 1);
    for load in loads {
        let counts: u64 = list(load, "counts").iter().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!((load["tokens"].as_u64(), counts % 18), (Some(18), 0), "{load}");
        assert!(counts > 18, "several experts a token: {load}");
    }
    let other = bench(&scene, "--batch 3 --no-operators --seed 5");
    assert_ne!(list(&other, "experts"), loads, "other tokens");
    assert_eq!(other["receipt"]["options"]["seed"], 5);
    let standard = exported("--form standard");
    let same = bench(&standard, "--batch 3 --no-operators --backends ort");
    assert_eq!(list(&same, "experts")[0]["counts"], loads[0]["counts"]);
}

/// Keys and values of the source are projected in the encoder's graph, under names of the decoder's layers.
#[test]
fn dense_nodes_of_a_routed_layer_are_not_routed() {
    require_runtime();
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out");
    let result = json(&scene.accepts(&format!("bench out {QUICK} --json - --report r.html")));
    for times in list(&result, "operators") {
        let routed = |node: &Value| node["module"].as_str().unwrap().ends_with("_attn.q_proj");
        let nodes = list(times, "nodes");
        assert!(nodes.iter().all(|node| node["routed"] == routed(node)), "{nodes:?}");
        assert!(nodes.iter().any(routed) && !nodes.iter().all(routed), "{nodes:?}");
    }
    let page = String::from_utf8(scene.read("r.html")).unwrap();
    assert!(page.contains("<title>out – Latency</title>"), "{page}");
    let dense: Vec<_> = page.lines().filter(|line| line.contains("<title>decoder.layers.0, MoA: ")).collect();
    assert!(dense.iter().any(|line| line.contains("MoA: 0 µs")) && dense.len() == 4, "{dense:?}");
}

/// Rounding to f16 explains more than rounding to f32, and steered states have the type of the graph.
#[test]
fn fp16_agrees_with_its_bodies_and_is_steered() {
    let scene = exported("--dtype fp16");
    for line in ["--batch 3", "--routing single --batch 2", "--routing uniform --batch 4"] {
        let result = bench(&scene, line);
        assert!(list(&result, "experts").len() > 1, "{line}");
    }
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out --dtype fp16");
    scene.accepts(&format!("bench out {QUICK} --no-operators"));
}

/// Operators with integers have activations of f32; factors of products may be of fewer bytes than in bodies.
#[test]
fn integers_and_rounded_products_agree_with_their_bodies() {
    for dtype in ["bf16-products", "int8", "int8-products", "int4", "int4-products"] {
        let result = bench(&exported(&format!("--dtype {dtype}")), "--batch 3");
        assert!(list(&result, "experts").len() > 1, "{result}");
        let scene = Scene::with_fixture("jetmoe/bf16");
        scene.accepts(&format!("ck -o out --dtype {dtype}"));
        scene.accepts(&format!("bench out {QUICK}"));
        scene.accepts(&format!("bench out {QUICK} --routing single"));
    }
}

#[test]
fn routers_do_what_is_asked() {
    let scene = exported("");
    let counts = |result: &Value, index: usize| -> Vec<u64> {
        list(&list(result, "experts")[index], "counts").iter().map(|count| count.as_u64().unwrap()).collect()
    };
    let single = bench(&scene, "--routing single --batch 2");
    assert_eq!(list(&single, "rows").len(), 2 * list(&single, "experts").len(), "operator by operator");
    for index in 0..list(&single, "experts").len() {
        let counts = counts(&single, index);
        let used = counts.iter().take_while(|count| **count == 12).count();
        assert!(used > 0 && counts[used..].iter().all(|count| *count == 0), "{counts:?}");
    }
    let skewed = counts(&bench(&scene, "--routing zipf:3 --batch 8"), 0);
    let even = counts(&bench(&scene, "--routing uniform --batch 8"), 0);
    let spread = |counts: &[u64]| counts.iter().max().unwrap() - counts.iter().min().unwrap();
    assert!(skewed[0] == 48 && spread(&skewed) > 2 * spread(&even), "{skewed:?} {even:?}");
}

#[test]
fn a_trace_of_a_real_run_is_replayed() {
    let scene = exported("--router-outputs");
    let bytes = |values: [i64; 6]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let (ids, mask) = (bytes([5, 9, 14, 22, 8, 31]), bytes([1; 6]));
    let view = |data| safetensors::tensor::TensorView::new(safetensors::Dtype::I64, vec![1, 6], data).unwrap();
    let inputs = [("input_ids", view(&ids)), ("attention_mask", view(&mask))];
    scene.write("i.safetensors", safetensors::serialize(inputs, None).unwrap());
    scene.accepts("run m.onnx --inputs i.safetensors --outputs o.safetensors");
    let recorded = scene.read("o.safetensors");
    let recorded = SafeTensors::deserialize(&recorded).unwrap();
    let result = bench(&scene, "--routing trace:o.safetensors");
    for load in list(&result, "experts") {
        let view = recorded.tensor(&format!("router.{}.indices", load["module"].as_str().unwrap())).unwrap();
        let (experts, _) = view.data().as_chunks::<8>();
        let mut counts = vec![0u64; list(load, "counts").len()];
        experts.iter().for_each(|expert| counts[usize::try_from(i64::from_le_bytes(*expert)).unwrap()] += 1);
        assert_eq!(load["counts"], Value::from(counts), "{load}");
    }
    let line = "bench m.onnx --samples 8 --warm-up 0.05 --no-operators --inputs i.safetensors --json -";
    let result = json(&scene.accepts(line));
    assert_eq!(list(&result, "rows")[0]["point"]["batch"], 1);
    assert_eq!(result["receipt"]["options"]["inputs_sha256"].as_str().map(str::len), Some(64));
    let line = line.replace("i.safetensors", "j.safetensors");
    let far = bytes([1 << 40; 6]);
    for (inputs, part) in [
        (vec![("input_ids", &far), ("attention_mask", &mask)], "input `input_ids`: expected"),
        (vec![("input_ids", &ids)], "the file of inputs has no \"attention_mask\", which m.onnx takes"),
        (
            vec![("input_ids", &ids), ("attention_masks", &mask)],
            "input `attention_masks`: expected one of input_ids, attention_mask, found",
        ),
        (
            vec![("input_ids", &ids), ("attention_mask", &mask), ("foo", &mask)],
            "input `foo`: expected one of input_ids",
        ),
    ] {
        let inputs = inputs.into_iter().map(|(name, data)| (name, view(data)));
        scene.write("j.safetensors", safetensors::serialize(inputs, None).unwrap());
        scene.refuses(&line, 3, &["MOA-E0316", "j.safetensors: ", part, "help: "]);
    }
}

#[test]
fn other_routings_need_operators_as_nodes() {
    let scene = exported("--form standard");
    scene.refuses("bench m.onnx --routing uniform", 4, &["m.onnx has no MoA operator", "--form function"]);
    scene.refuses("bench m.onnx --routing trace:nowhere", 5, &["nowhere"]);
}

#[test]
fn what_computes_something_else_is_not_timed() {
    let scene = exported("");
    plant_fault(&scene);
    let line = format!("bench m.onnx {QUICK}");
    scene.refuses(&line, 1, &["parity: m.onnx on ort", "went to experts", "--allow-failed-parity"]);
    let parts = ["parity: m.onnx on ort", "self_attn", "values are further apart"];
    scene.refuses(&format!("{line} --routing uniform"), 1, &parts);
    let allowed = format!("{line} --allow-failed-parity --no-operators");
    let text = scene.accepts(&allowed);
    assert!(text.contains("PARITY FAILED") && text.contains("FAILED, "), "{text}");
    let result = json(&scene.accepts(&format!("{allowed} --json -")));
    assert_eq!(result["receipt"]["options"]["allow_failed_parity"], true);
    assert!(list(&result, "parity").iter().any(|row| row["verdict"]["outcome"] == "failed"), "{result}");
    let csv = scene.accepts(&format!("{allowed} --csv -"));
    assert!(csv.lines().next().unwrap().contains(",parity,") && csv.contains(",failed,"), "{csv}");
    scene.accepts(&format!("{allowed} --report r.html"));
    assert!(String::from_utf8(scene.read("r.html")).unwrap().contains("PARITY FAILED"));
    scene.accepts(&format!("{line} --no-operators --backends ort-function"));
}

#[test]
fn a_checkpoint_makes_it_a_verification() {
    let scene = exported("");
    let text = scene.accepts(&format!("bench m.onnx {QUICK} --no-operators --checkpoint ck"));
    assert!(text.contains("m.onnx on ort: verified") && text.contains("ort-function: verified"), "{text}");
    plant_fault(&scene);
    let line = format!("bench m.onnx {QUICK} --no-operators --checkpoint ck");
    scene.refuses(&line, 1, &["parity: m.onnx on ort", "moa-export verify"]);
}

#[test]
fn what_cannot_be_compared_is_said() {
    let scene = exported("--form standard");
    let line = format!("bench m.onnx {QUICK} --no-operators");
    let text = scene.accepts(&format!("{line} --backends ort --threads 1 --report page.html"));
    let page = String::from_utf8(scene.read("page.html")).unwrap();
    assert!(text.contains(", 1 thread of ONNX Runtime, ") && page.contains(": 1 thread on "), "{text}");
    assert!(text.contains("m.onnx on ort: not checked, standard operators only"), "{text}");
    let text = scene.accepts(&format!("{line} --backends ort,tract"));
    assert!(text.contains("m.onnx on tract: agrees with ort-function"), "{text}");
    let fused = exported("--form fused");
    let text = fused.accepts(&line);
    assert!(text.contains("m.onnx on ort: not checked") && text.contains("skipped: m.onnx on ort-function"), "{text}");
    fused.refuses("bench m.onnx --backends ort-function", 4, &["fused form"]);
}

/// What ONNX Runtime computes just so with the library is timed once, unless both are named.
#[test]
fn a_graph_of_standard_operators_is_timed_once_by_onnx_runtime() {
    let scene = exported("--form standard");
    let line = format!("bench m.onnx {QUICK} --no-operators");
    let result = json(&scene.accepts(&format!("{line} --checkpoint ck --json -")));
    let backends = |key: &str| {
        let subjects = list(&result, key).iter().map(|one| one["subject"]["backend"].as_str().unwrap());
        subjects.collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(backends("rows").into_iter().collect::<Vec<_>>(), ["ort"]);
    assert_eq!(backends("skipped").into_iter().collect::<Vec<_>>(), ["ort-function"]);
    assert_eq!(list(&result, "skipped")[0]["why"], "the same as ort: the model has none of our operators");
}

#[test]
fn several_models_take_turns() {
    let scene = exported("");
    scene.accepts("ck -o standard.onnx --form standard");
    let line = format!("bench m.onnx standard.onnx {QUICK} --no-operators --backends ort,ort-function --csv -");
    let csv = scene.accepts(&line);
    let lines: Vec<_> = csv.lines().map(|line| line.split(',').take(3).collect::<Vec<_>>().join(" ")).collect();
    let expected = [
        "m.onnx ort model",
        "m.onnx ort-function model",
        "standard.onnx ort model",
        "standard.onnx ort-function model",
    ];
    assert_eq!(lines[1..], expected);
    let twice = json(&scene.accepts(&format!("bench m.onnx m.onnx {QUICK} --no-operators --backends ort --json -")));
    let models: Vec<_> = list(&twice, "rows").iter().map(|row| row["subject"]["model"].as_str().unwrap()).collect();
    assert_eq!(models, ["m.onnx", "m.onnx (2)"]);
    Model::layer().write(&scene.path("layer"));
    Model::translator().write(&scene.path("translator"));
    scene.accepts("translator -o out");
    scene.refuses("bench m.onnx out", 2, &["no part in common", "out holds encoder_model and decoder_model"]);
    std::fs::copy(scene.path("out/encoder_model.onnx"), scene.path("mine.onnx")).unwrap();
    scene.refuses("bench m.onnx mine.onnx", 2, &["no part in common", "mine.onnx holds encoder_model"]);
}

#[test]
fn the_parts_of_a_folder_have_the_axes_that_they_have() {
    require_runtime();
    let scene = Scene::with(&Model::translator());
    scene.accepts("ck -o out");
    let line = "bench out --samples 8 --warm-up 0.05 --no-operators --seq 1,3 --past 0,2 --backends ort --json -";
    let result = json(&scene.accepts(line));
    let points: Vec<_> = list(&result, "rows").iter().map(|row| row["point"].to_string()).collect();
    let expected = [
        r#"{"batch":1,"source":1}"#,
        r#"{"batch":1,"source":3}"#,
        r#"{"batch":1,"past_sequence":0,"sequence":1,"source":1}"#,
        r#"{"batch":1,"past_sequence":0,"sequence":3,"source":3}"#,
        r#"{"batch":1,"past_sequence":2,"sequence":1,"source":3}"#,
        r#"{"batch":1,"past_sequence":2,"sequence":3,"source":5}"#,
    ];
    assert_eq!(points, expected);
    let operators = json(&scene.accepts(&line.replace("--seq", "--routing single --seq")));
    assert!(
        list(&operators, "rows").iter().any(|row| row["subject"]["module"].as_str().unwrap().contains("encoder_attn"))
    );
}

#[test]
fn bad_shapes_and_empty_grids_are_refused() {
    let scene = exported("");
    let cases: [(&str, &[&str]); 25] = [
        ("bench", &["MODEL"]),
        ("bench m.onnx --batch 0", &["--batch", "at least 1"]),
        ("bench m.onnx --batch -3", &["--batch", "-3"]),
        ("bench m.onnx --batch ,", &["--batch", "missing"]),
        ("bench m.onnx --batch 1,,2", &["--batch", "missing"]),
        ("bench m.onnx --seq 1.5", &["--seq", "1.5"]),
        ("bench m.onnx --seq 9999999", &["--seq", "1048576"]),
        ("bench m.onnx --batch 1000000 --seq 1000000", &["tokens is more than"]),
        ("bench m.onnx --seq 257", &["257 positions", "256"]),
        ("bench m.onnx --past 4", &["past_sequence", "leave out"]),
        ("bench m.onnx --source 4", &["source"]),
        ("bench m.onnx --dim heads=4", &["heads"]),
        ("bench m.onnx --dim heads", &["AXIS=N"]),
        ("bench m.onnx --seq 8 --dim sequence=3", &["--seq gives the sizes of the axis sequence"]),
        ("bench m.onnx --dim past_sequence=3", &["--past gives the sizes of the axis past_sequence"]),
        ("bench m.onnx --threshold 3", &["--compare"]),
        ("bench m.onnx --no-cache", &["--no-cache is for the backend tensorrt"]),
        ("bench m.onnx --backends tensorrt --trust-plan", &["--trust-plan is for a plan"]),
        ("bench m.onnx --samples 0", &["--samples", "at least 1"]),
        ("bench m.onnx --seconds 0", &["--seconds", "more than 0"]),
        ("bench m.onnx --threads 0", &["--threads", "at least 1"]),
        ("bench m.onnx --routing often", &["zipf:S"]),
        ("bench m.onnx --backends ort,ort", &["ort is named twice"]),
        ("bench m.onnx --json - --csv -", &["stdout"]),
        ("bench m.onnx --inputs i --seq 3", &["--inputs", "--seq"]),
    ];
    for (line, parts) in cases {
        scene.refuses(line, 2, parts);
    }
    scene.refuses("bench ck", 5, &["ck holds no model.onnx"]);
    scene.refuses("bench nowhere.onnx", 5, &["nowhere.onnx"]);
    scene.refuses("bench ck/config.json", 3, &["ck/config.json"]);
}

/// `--force` replaces earlier results, never what the command reads, nor one result with another.
#[test]
fn results_never_replace_what_is_read() {
    let scene = exported("");
    scene.accepts("ck -o out");
    for name in ["r.json", "l.so", "t.safetensors", "ck/added_tokens.json", "ck/bpecodes"] {
        scene.write(name, "{}");
    }
    let before = scene.snapshot();
    for (line, part) in [
        ("bench m.onnx --json m.onnx --force", "is read by this command"),
        ("bench m.onnx --csv ./m.onnx --force", "is read by this command"),
        ("bench m.onnx --json r.json --csv ./r.json --force", "is named twice"),
        ("bench out --report out/model.onnx --force", "is read by this command"),
        ("verify m.onnx --checkpoint ck --json ck/model.safetensors --force", "is read by this command"),
        ("verify m.onnx --checkpoint ck --report ck/config.json --force", "is read by this command"),
        ("verify m.onnx --checkpoint ck --json ck/added_tokens.json --force", "is read by this command"),
        ("verify m.onnx --checkpoint ck --json ck/bpecodes --force", "is read by this command"),
        ("verify m.onnx --checkpoint ck --json new --report ./new", "is named twice"),
        ("run m.onnx --inputs r.json --outputs m.onnx --force", "is read by this command"),
        ("run m.onnx --inputs r.json --outputs r.json --force", "is read by this command"),
        ("run m.onnx --inputs r.json --outputs l.so --library l.so --force", "is read by this command"),
        ("run m.onnx --inputs r.json --backend tensorrt --plan p --outputs p --force", "is read by this command"),
        ("profile m.onnx --inputs r.json --report r.json --force", "is read by this command"),
        ("profile m.onnx --inputs r.json --library l.so --report l.so --force", "is read by this command"),
        ("bench m.onnx --library l.so --report l.so --force", "is read by this command"),
        ("bench m.onnx --compare r.json --json ./r.json --force", "is read by this command"),
        ("bench m.onnx --routing trace:t.safetensors --json t.safetensors --force", "is read by this command"),
    ] {
        scene.refuses(line, 2, &[part, "help: "]);
        scene.assert_unchanged(&before, line);
    }
}

/// Minutes of timing must not end with a file that cannot be written.
#[test]
fn existing_files_are_kept_and_known_before() {
    let scene = exported("");
    for (option, name) in [("--json", "r.json"), ("--csv", "r.csv"), ("--report", "r.html")] {
        scene.write(name, "mine");
        scene.refuses(&format!("bench m.onnx --seconds 3600 {option} {name}"), 2, &["exists already", "--force"]);
    }
    let line = format!("bench m.onnx {QUICK} --no-operators --force --json r.json --csv r.csv --report r.html");
    let text = scene.accepts(&line);
    assert!(text.contains("relative to the first"), "{text}");
    assert_eq!(json(&String::from_utf8(scene.read("r.json")).unwrap())["format"], 1);
    assert_eq!(String::from_utf8(scene.read("r.csv")).unwrap().lines().count(), 3);
    let html = String::from_utf8(scene.read("r.html")).unwrap();
    assert!(html.contains("<svg") && !html.contains("http://") && !html.contains("https://"), "it needs no network");
    assert!(html.contains(result_hash(&scene).as_str()), "the receipt is in the report");
    assert!(!html.contains("seconds since 1970"), "the time is a date");
}

fn result_hash(scene: &Scene) -> String {
    let result = json(&String::from_utf8(scene.read("r.json")).unwrap());
    list(&result["receipt"], "files")[0]["sha256"].as_str().unwrap().to_owned()
}

/// Moving a constant of the equations as if it were a weight would explain every difference.
#[test]
fn tolerances_stay_those_of_rounding() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o m.onnx");
    let result = bench(&scene, "--past 0,5 --no-operators");
    let agreements: Vec<_> =
        list(&result, "parity").iter().filter(|row| row["verdict"]["outcome"] == "agrees").collect();
    assert_eq!(agreements.len(), 2);
    for row in agreements {
        let agreement = &row["verdict"]["agreement"];
        assert!(agreement["tolerance"].as_f64().is_some_and(|tolerance| tolerance < 1e-3), "{row}");
        assert!(agreement["decisions"].as_u64() > Some(0) && agreement["values"].as_u64() > Some(0), "{row}");
    }
    let steered = bench(&scene, "--routing single --past 5");
    let layers: Vec<_> = list(&steered, "experts").iter().map(|load| load["module"].as_str().unwrap()).collect();
    assert!(layers.iter().any(|layer| layer.ends_with("mlp")) && layers.len() > 2, "{layers:?}");
}

#[test]
fn a_trace_without_routing_is_named() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    std::fs::copy(data("mlm/model.safetensors"), scene.path("t.safetensors")).unwrap();
    let line = "bench out --samples 5 --routing trace:t.safetensors";
    scene.refuses(line, 3, &["t.safetensors: ", "the file has no tensor router.{module}.indices"]);
    let of_another = TensorView::new(Dtype::I64, vec![1, 1, 2], &[0; 16]).unwrap();
    let bytes = safetensors::serialize([("router.other.indices", of_another)], None).unwrap();
    scene.write("t.safetensors", bytes);
    scene.refuses(line, 3, &["t.safetensors: ", "the trace of "]);
}
