//! Shapes, profiles and clocks of engines, on the library that plays TensorRT.

use std::fs;

use serde_json::Value;

use crate::{
    documents::assert_described,
    scene::Scene,
    tensorrt::{BUILD, RUN, Stage, outputs},
};

#[test]
fn shapes_are_given_as_trtexec_takes_them() {
    let stage = Stage::new();
    stage.accepts("", BUILD);
    for (name, line) in [
        ("a", "--min x:1x2,ids:1 --opt x:2x2,ids:2 --max x:8x2,ids:8"),
        ("b", "--minShapes=ids:1,x:1x2 --optShapes=x:2x2,ids:2 --maxShapes=x:8x2,ids:8"),
        ("c", "--profile=0 --min x:[1,2],ids:[1] --opt x:[2,2],ids:[2] --max x:[8,2],ids:[8]"),
        ("d", "--profile=0 --dim rows=1:2:8"),
    ] {
        // What was built before is found, since the same is asked for.
        let printed = stage.accepts("parser", &format!("build m.onnx -o {name}.plan {line}"));
        assert!(printed.ends_with("from the cache\n"), "{line}: {printed}");
    }
}

const PROFILES: &str = "--profile=0 --dim rows=1 --profile=1 --opt x:3x2,ids:3 --profile=2 --dim rows=2:4:8";

#[test]
fn the_first_profile_that_holds_the_shapes_is_taken() {
    let stage = Stage::new();
    let printed = stage.accepts("", &format!("build m.onnx -o m.plan {PROFILES} --json"));
    let mut printed: Value = serde_json::from_str(&printed).unwrap();
    printed.as_object_mut().unwrap().retain(|key, _| key != "kind" && key != "format");
    assert_described("build", std::slice::from_ref(&printed));
    let profiles = &stage.lock("m.plan.lock.json")["recipe"]["profiles"];
    let rows = |profile: usize, which: &str| profiles[profile][1][which][0].as_u64().unwrap();
    let all: Vec<_> = (0..3).map(|profile| ["min", "opt", "max"].map(|which| rows(profile, which))).collect();
    assert_eq!((all, profiles), (vec![[1, 1, 1], [3, 3, 3], [2, 4, 8]], &printed["plans"][0]["profiles"]));
    // The library adds the number of the context's profile to the last value.
    for (given, profile) in [(1, 0.0), (2, 2.0), (3, 1.0), (8, 2.0)] {
        stage.give(given);
        stage.accepts("marked", &format!("{RUN} --force"));
        let expected = (2 * given - 1) as f32 / 2.0 + profile;
        assert_eq!(outputs(&stage).0.last(), Some(&expected), "{given} rows");
    }
    stage.give(9);
    let all = "no profile of the engine holds ids [9], x [9, 2]: profile 0 takes x [1, 2], ids [1]; \
               profile 1 takes x [3, 2], ids [3]; profile 2 takes x from [2, 2] to [8, 2], ids from [2] to [8]";
    stage.refuses("", &format!("{RUN} --force"), 3, &[all, "--dim"]);
    let twice = format!("build m.onnx -o m.plan --force --profile=0 {}", "--dim rows=2 --profile=1 --dim rows=2");
    stage.accepts("", &twice);
    assert_eq!(stage.lock("m.plan.lock.json")["recipe"]["profiles"].as_array().unwrap().len(), 1);
}

#[test]
fn a_benchmark_tells_both_clocks() {
    let stage = Stage::new();
    stage.accepts("", &format!("build m.onnx -o m.plan {PROFILES}"));
    let line =
        "bench m.onnx --backends tensorrt,tract --plan m.plan --inputs in.safetensors --samples 3 --no-operators";
    let bench = |more: &str| stage.moa("", &format!("{line} --warm-up 0.01 {more}"));
    let json: Value = serde_json::from_str(&bench("--json -").stdout).unwrap();
    let (device, rows) = (&json["rows"][0]["device"], json["rows"].as_array().unwrap());
    // Events of the second profile lie half a millisecond apart, whatever the host's clock says.
    assert_eq!((&device["times_ns"]["samples"], &device["times_ns"]["min"]), (&3.into(), &500_000.into()), "{json:#}");
    assert!(rows[0]["times_ns"]["samples"] == 3 && rows[1]["device"].is_null(), "{json:#}");
    let text = bench("").stdout;
    let of_device = text.lines().find(|line| line.contains("tensorrt, CUDA events")).expect("a row");
    assert!(of_device.contains("500.0 µs"), "{of_device}");
    assert!(bench("--csv -").stdout.lines().any(|line| line.starts_with("m.onnx,tensorrt,model,,device,")));
}

#[test]
fn shapes_that_are_not_the_models_are_refused() {
    let stage = Stage::new();
    for (line, parts) in [
        (
            "--minShapes=x:1x2 --optShapes=x:2x2 --maxShapes=x:8x2",
            &["--min lacks the input `ids`", "the model's inputs: x [rows, 2], ids [rows]"][..],
        ),
        (
            "--opt x:1x2,idz:1",
            &["--opt names the input `idz`, which the model does not have", "x [rows, 2], ids [rows]"],
        ),
        ("--opt x:1x2x3,ids:1", &["`x` the shape 1x2x3, and the model says [rows, 2]"]),
        ("--opt x:1x3,ids:1", &["`x` the shape 1x3, and the model says [rows, 2]"]),
        (
            "--min x:3x2,ids:3 --opt x:2x2,ids:2 --max x:8x2,ids:8",
            &["the shapes 3x2, 2x2 and 8x2 of the input `x` do not ascend"],
        ),
        (
            "--opt x:2x2,ids:3",
            &["--opt gives the dimension `rows` of the input `ids` the size 3, and other inputs say 2"],
        ),
        ("--dim rows=1 --opt x:1x2,ids:1", &["--dim and --opt both give sizes"]),
        ("--opt x:1y2", &["such as input_ids:1x128"]),
        ("--opt x:1x2,ids:1 --opt x:2x2,ids:2", &["--opt is given twice for one profile", "--profile=0"]),
        ("--profile=1 --dim rows=1", &["--profile=1 is not preceded by all lower"]),
    ] {
        stage.refuses("", &format!("build m.onnx -o m.plan {line} --no-cache"), 2, parts);
    }
}

#[test]
fn verify_and_bench_refuse_a_plan_as_run_does() {
    let stage = Stage(Scene::with_fixture("mlm"));
    stage.accepts("", "ck -o m.onnx");
    stage.accepts("", "build m.onnx -o m.plan --dim batch=1:1:4 --dim sequence=1:8:16");
    stage.accepts("", "ck -o other.onnx --form fused --router-outputs");
    let (plan, lock) = (stage.0.read("m.plan"), stage.0.read("m.plan.lock.json"));
    for command in ["verify {} --checkpoint ck", "bench {} --samples 1 --no-operators", "bench {} --checkpoint ck"] {
        let line = |model: &str| format!("{} --backends tensorrt --plan m.plan", command.replace("{}", model));
        stage.refuses("", &line("other.onnx"), 3, &["m.plan was built from another model than other.onnx"]);
        stage.refuses("a100", &line("m.onnx"), 4, &["m.plan: the GPU here is NVIDIA A100-SXM4-80GB (8.0)"]);
        stage.0.write("m.plan", &plan[..plan.len() / 2]);
        stage.refuses("", &line("m.onnx"), 3, &["m.plan: the plan is", "and its lock says"]);
        stage.0.write("m.plan", &plan);
        fs::remove_file(stage.0.path("m.plan.lock.json")).unwrap();
        stage.refuses("", &line("m.onnx"), 5, &["m.plan.lock.json is missing"]);
        stage.0.write("m.plan.lock.json", &lock);
        stage.refuses("", &line("m.onnx").replace("m.plan", "no.plan"), 5, &["no.plan"]);
    }
}
