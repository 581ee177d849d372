//! `moa-export plan`.

use serde_json::Value;

use crate::scene::Scene;

#[test]
fn every_gpu_has_a_row() {
    let printed = Scene::new().accepts("plan");
    let row = |gpu: &str| printed.lines().find(|line| line.starts_with(gpu)).map(str::to_owned).unwrap();
    assert_eq!(row("v100").matches("fp16").count(), 2, "{printed}");
    assert_eq!(row("h200").matches("bf16").count(), 6, "{printed}");
    assert_eq!(row("b200").matches('–').count(), 4, "{printed}");
}

#[test]
fn one_gpu_is_explained() {
    let printed = Scene::new().accepts("plan --gpu v100");
    assert_eq!(Scene::new().accepts("plan --gpu V100"), printed);
    for part in [
        "compute capability 7.0",
        "TensorRT 10.5 to 10.6 serves compute capability 7.5 and newer",
        "fp16  TensorRT 10.0 to 10.4 with CUDA 11.8 to 12.9",
        "bf16  nothing fits",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
}

#[test]
fn json_gives_every_combination() {
    let printed = Scene::new().accepts("plan --gpu a100 --dtype bf16 --json");
    let value: Value = serde_json::from_str(&printed).unwrap();
    let all = value["rows"].as_array().unwrap();
    assert_eq!(all.len(), 7);
    assert_eq!(all[0]["fits"], false);
    assert_eq!(all[0]["why_not"], "TensorRT 8.6 has no bfloat16; it begins with 10.0");
    assert_eq!(all[0]["tensorrt"], serde_json::json!(["8.6", "8.6"]));
    assert_eq!(all[1]["tensorrt"], serde_json::json!(["10.0", "10.4"]));
    assert_eq!(all[1]["cuda"], serde_json::json!(["11.8", "12.9"]));
    assert!(all[1..].iter().all(|one| one["fits"] == true && one["why_not"].is_null()));
}

#[test]
fn what_does_not_fit_is_refused() {
    let scene = Scene::new();
    scene.refuses("plan --gpu v100 --dtype bf16", 4, &["no TensorRT builds bf16 engines for v100", "no bfloat16"]);
    scene.refuses("plan --gpu v10", 2, &["'v10'", "v100"]);
}
