//! `moa-export ops`.

use crate::scene::{Outcome, Scene, require_runtime};

/// What is said in place of how to register a library.
const BUILD: &str = "cargo build --release -p moa-ort";

/// What `ops` prints of ONNX Runtime before its path.
fn version(printed: &str) -> &str {
    let line = printed.lines().find_map(|line| line.strip_prefix("ONNX Runtime  ")).unwrap();
    line.split_once(", ").unwrap().0
}

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
        "RegisterCustomOpLibrary(",
        "with_operator_library",
    ] {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
    let version = version(&printed);
    assert!(!printed.contains(BUILD) && version.split('.').all(|part| part.parse::<u32>().is_ok()), "{printed}");
}

#[test]
fn ops_as_json_is_json() {
    require_runtime();
    let value: serde_json::Value = serde_json::from_str(&Scene::new().accepts("ops --json")).unwrap();
    let (library, runtime) = (&value["library"], &value["onnxruntime"]);
    assert_eq!(library["path"], std::env::var("MOA_ORT_LIBRARY").unwrap());
    assert_eq!(runtime["path"], std::env::var("ORT_DYLIB_PATH").unwrap());
    assert!(library["why_not"].is_null() && runtime["why_not"].is_null());
    assert_eq!(runtime["version"], version(&Scene::new().accepts("ops")));
    assert_eq!((value["domain"].as_str(), value["opset_version"].as_u64()), (Some("ai.moa"), Some(1)));
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
    assert!(value["library"]["path"].is_null() && value["onnxruntime"]["path"].is_null());
    assert!(text.contains(BUILD) && !text.contains("register_custom_ops_library"), "{text}");
    assert!(value["library"]["why_not"].as_str().unwrap().ends_with("looked in MOA_ORT_LIBRARY=/nowhere/a.so"));
}

/// Whoever has no ONNX Runtime is told too, as far as the file shows it.
#[test]
fn a_file_that_is_no_operator_library_is_not_shown_as_one() {
    require_runtime();
    let scene = Scene::new();
    scene.write("text.so", "no library");
    let runtime = std::env::var("ORT_DYLIB_PATH").unwrap();
    let text = scene.path("text.so").display().to_string();
    // The runtime itself is loaded and has other entries.
    for (library, ort) in [(&text, runtime.as_str()), (&text, "/nowhere/b.so"), (&runtime, &runtime)] {
        let ops = |line: &str| {
            let mut command = scene.command(line);
            command.env("MOA_ORT_LIBRARY", library).env("ORT_DYLIB_PATH", ort);
            let outcome = Outcome::of(command);
            assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{line}");
            outcome.stdout
        };
        let text = ops("ops");
        let told = format!("library       the operator library libmoa_ort at {library} cannot be loaded: ");
        assert!(text.contains(&told) && text.contains(BUILD), "{text}");
        assert!(!text.contains("register_custom_ops_library"), "{text}");
        let value: serde_json::Value = serde_json::from_str(&ops("ops --json")).unwrap();
        let told = &value["library"];
        assert!(told["path"].is_null() && told["why_not"].as_str().unwrap().contains(library));
    }
}
