//! Sizes of `moa-export bench`.

use super::list;
use crate::{
    model::Model,
    scene::{Scene, json, require_runtime},
};

/// A source has one length, in whole graphs and in operators that are cut out.
#[test]
fn a_source_is_as_long_as_it_was_given() {
    require_runtime();
    let scene = Scene::with(&Model::translator());
    scene.accepts("ck -o out");
    let encoder = r#"{"batch":1,"source":4}"#;
    let decoder = r#"{"batch":1,"past_sequence":0,"sequence":1,"source":4}"#;
    let points = |line: &str| {
        let options = "--samples 2 --warm-up 0.01 --no-operators --backends ort --json -";
        let result = json(&scene.accepts(&format!("bench {line} {options}")));
        list(&result, "rows").iter().map(|row| row["point"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(points("out --seq 1 --source 4"), [encoder, decoder]);
    assert_eq!(points("out/encoder_model.onnx --source 4"), [encoder]);
    let cut = points("out/encoder_model.onnx --source 4 --routing single");
    assert!(!cut.is_empty() && cut.iter().all(|point| point == encoder), "{cut:?}");
}
