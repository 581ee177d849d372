//! `moa-export run --inputs`: what may be left out, and outputs that were expected.

use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};

use crate::{
    run::{BACKENDS, causal, exported, ids, line, mask, outputs, write_causal_inputs, write_inputs},
    scene::{Scene, json},
};

/// Caches of no token and positions of a mask without padding are what a file of all inputs holds.
#[test]
fn caches_and_positions_may_be_left_out() {
    let scene = causal("");
    for backend in BACKENDS {
        write_causal_inputs(&scene, &[0, 1, 2]);
        scene.accepts(&line(backend));
        let all_given = outputs(&scene, backend);
        write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
        scene.accepts(&format!("{} --force", line(backend)));
        assert_eq!(outputs(&scene, backend), all_given, "{backend}");
    }
    let halves = causal("--dtype fp16");
    write_inputs(&halves, &[ids(&[1, 3]), mask(&[1, 3])]);
    halves.accepts(&line("ort"));
}

#[test]
fn what_does_not_follow_must_be_given() {
    let scene = causal("");
    write_inputs(&scene, &[ids(&[1, 3])]);
    scene.refuses(&line("ort"), 3, &["inputs.safetensors", "`attention_mask`", "found nothing"]);
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 2])]);
    scene.refuses(&line("ort"), 3, &["`attention_mask`", "a value for each token", "[1, 2] beside input_ids [1, 3]"]);
}

/// A masked language model that was run once, with its outputs as `expected.safetensors`.
fn expected(change: impl Fn(&str, &mut Vec<f32>), options: &str) -> Scene {
    let scene = exported(options);
    write_inputs(&scene, &[ids(&[2, 3]), mask(&[2, 3])]);
    scene.accepts(&line("ort"));
    let outputs: Vec<_> = outputs(&scene, "ort")
        .into_iter()
        .map(|(name, shape, mut values)| {
            change(&name, &mut values);
            (name, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
        })
        .collect();
    let views = outputs
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    scene.write("expected.safetensors", serialize(views, None).unwrap());
    scene
}

const EXPECT: &str = "run m.onnx --inputs inputs.safetensors --expect expected.safetensors";

#[test]
fn outputs_are_held_against_a_file() {
    let scene = expected(|_, _| (), "");
    for backend in BACKENDS {
        let stdout = scene.accepts(&format!("{EXPECT} --backend {backend}"));
        assert!(stdout.contains("agrees") && !stdout.contains("differ"), "{stdout}");
    }
    let exact = scene.accepts(&format!("{EXPECT} --atol 0"));
    assert!(exact.contains("0.0e0"), "{exact}");
}

/// What an evaluation in f64 gives, as it is.
#[test]
fn outputs_may_be_expected_in_f64() {
    let scene = expected(|_, _| (), "");
    let bytes = std::fs::read(scene.path("expected.safetensors")).unwrap();
    let widened = |view: &TensorView<'_>| -> Vec<u8> {
        let (values, _) = view.data().as_chunks::<4>();
        values.iter().flat_map(|value| f64::from(f32::from_le_bytes(*value)).to_le_bytes()).collect()
    };
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<_> = file.iter().map(|(name, view)| (name, view.shape().to_vec(), widened(&view))).collect();
    let views =
        tensors.iter().map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F64, shape.clone(), bytes).unwrap()));
    scene.write("expected.safetensors", serialize(views, None).unwrap());
    let exact = scene.accepts(&format!("{EXPECT} --atol 0"));
    assert!(exact.contains("agrees") && !exact.contains("differ"), "{exact}");
}

#[test]
fn one_value_that_differs_is_found() {
    let scene = expected(|_, values| values[70] += 0.5, "");
    let outcome = scene.moa(&format!("{EXPECT} --outputs kept.safetensors"));
    assert_eq!(outcome.code, Some(1), "{}", outcome.stdout);
    assert!(outcome.stderr.is_empty(), "{}", outcome.stderr);
    for part in ["1 of ", " differ", "5.0e-1", "differs most at [0, 1, "] {
        assert!(outcome.stdout.contains(part), "{part}: {}", outcome.stdout);
    }
    assert!(scene.path("kept.safetensors").exists(), "what differs is kept to be looked at");
    scene.accepts(&format!("{EXPECT} --atol 0.51"));
    let outcome = scene.moa(&format!("{EXPECT} --json"));
    let found = &json(&outcome.stdout)["outputs"][0]["expected"];
    assert_eq!((outcome.code, &found["passed"], &found["mismatches"]), (Some(1), &false.into(), &1.into()), "{found}");
}

#[test]
fn nan_never_agrees() {
    let scene = expected(|_, values| values[0] = f32::NAN, "");
    let outcome = scene.moa(&format!("{EXPECT} --atol 1e30"));
    assert_eq!(outcome.code, Some(1), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("instead of NaN"), "{}", outcome.stdout);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let scene = expected(|_, _| (), "");
    for (flag, value) in [("--atol", "-1"), ("--rtol", "NaN"), ("--atol", "inf")] {
        scene.refuses(&format!("{EXPECT} {flag}={value}"), 2, &[flag, "must be a number from 0"]);
    }
    scene.refuses("run m.onnx --random --atol 1e-5", 2, &["--expect"]);
    write_inputs(&scene, &[ids(&[2, 4]), mask(&[2, 4])]);
    scene.refuses(EXPECT, 3, &["expected.safetensors", "has shape [2, 3, ", "and the output [2, 4, "]);
    write_inputs(&scene, &[ids(&[2, 3]), mask(&[2, 3])]);
    std::fs::copy(scene.path("inputs.safetensors"), scene.path("expected.safetensors")).unwrap();
    scene.refuses(EXPECT, 3, &["`attention_mask` is no output; outputs are "]);
    let none: [(&str, TensorView<'_>); 0] = [];
    scene.write("expected.safetensors", serialize(none, None).unwrap());
    scene.refuses(EXPECT, 3, &["expected.safetensors holds no tensor to compare with"]);
    scene.refuses(&format!("{EXPECT} --outputs expected.safetensors --force"), 2, &["expected.safetensors"]);
}
