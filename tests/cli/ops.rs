//! `moa-export ops`.

use crate::scene::{Outcome, Scene, require_runtime};

#[test]
fn ops_shows_library_runtime_and_how_to_register() {
    require_runtime();
    let printed = Scene::new().accepts("ops");
    for part in [
        &std::env::var("MOA_ORT_LIBRARY").unwrap(),
        &std::env::var("ORT_DYLIB_PATH").unwrap(),
        "MoASelfAttention, MoACrossAttention, MoEFeedForward",
        "ai.moa",
        "register_custom_ops_library",
        "RegisterCustomOpsLibrary",
        "with_operator_library",
    ] {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
}

#[test]
fn ops_as_json_is_json() {
    require_runtime();
    let value: serde_json::Value = serde_json::from_str(&Scene::new().accepts("ops --json")).unwrap();
    assert_eq!(value["library"], std::env::var("MOA_ORT_LIBRARY").unwrap());
    assert_eq!(value["onnxruntime"], std::env::var("ORT_DYLIB_PATH").unwrap());
    assert_eq!((value["domain"].as_str(), value["version"].as_u64()), (Some("ai.moa"), Some(1)));
    let names = ["MoASelfAttention", "MoACrossAttention", "MoEFeedForward", "LMHead"];
    assert_eq!(value["operators"], serde_json::json!(names));
}

#[test]
fn what_is_not_found_is_said_and_no_error() {
    let scene = Scene::new();
    let nowhere = |line: &str| {
        let mut command = scene.command(line);
        command.env("MOA_ORT_LIBRARY", "/nowhere/a.so").env("ORT_DYLIB_PATH", "/nowhere/b.so");
        let outcome = Outcome::of(command);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{line}");
        outcome.stdout
    };
    let text = nowhere("ops");
    assert!(text.contains("MOA_ORT_LIBRARY=/nowhere/a.so") && text.contains("ORT_DYLIB_PATH=/nowhere/b.so"), "{text}");
    let value: serde_json::Value = serde_json::from_str(&nowhere("ops --json")).unwrap();
    assert!(value["library"].is_null() && value["onnxruntime"].is_null());
}
