//! What `moa-export verify` prints of runs.

use moa_export::onnx::proto::{AttributeProto, GraphProto, ModelProto, NodeProto};

use crate::{
    scene::{Scene, require_runtime},
    verify::exported,
};

/// What was not computed is no agreement, and what is no number has no distance.
#[test]
fn a_table_has_numbers_of_runs_alone() {
    let row = |edit: fn(&mut ModelProto)| {
        let scene = exported("--form standard");
        scene.edit("m.onnx", edit);
        let printed = scene.moa("verify m.onnx --checkpoint ck --backends ort").stdout;
        let row = printed.lines().find(|line| line.starts_with("ort ")).map(str::to_owned);
        row.unwrap_or(printed).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let refused = row(|model| model.graph.as_mut().unwrap().node[0].attribute.push(AttributeProto::int("none", 1)));
    assert_eq!(refused, ["ort", "m.onnx", "0", "-", "-", "-", "-", "FAILED"]);
    let no_number = row(|model| {
        let weights = &mut model.graph.as_mut().unwrap().initializer;
        let weight = weights.iter_mut().find(|tensor| tensor.name.contains("v_proj.weight")).unwrap();
        let bytes = weight.raw_data.as_ref().unwrap().len();
        weight.raw_data = Some(f32::NAN.to_le_bytes().repeat(bytes / 4).into());
    });
    assert!(no_number[5] == "NaN" && no_number[7] == "FAILED", "{no_number:?}");
}

/// A cache is an output of a layer in between, and where a run was stopped nobody knows what routers would have done.
#[test]
fn a_fault_arises_after_the_last_router_where_an_output_behind_it_shows_it() {
    require_runtime();
    let told = |edit: fn(&mut GraphProto)| {
        let scene = Scene::with_fixture("jetmoe/bf16");
        scene.accepts("ck -o m.onnx");
        scene.edit("m.onnx", |model| edit(model.graph.as_mut().unwrap()));
        let outcome = scene.moa("verify m.onnx --checkpoint ck --backends ort-function");
        assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
        outcome.stdout
    };
    let cache = told(|graph| twice(graph, "present.0.value"));
    assert!(cache.contains("  every router agrees: the first difference is in present.0.value\n"), "{cache}");
    let logits = told(|graph| twice(graph, "logits"));
    assert!(logits.contains("  every router agrees: arises after the last one\n"), "{logits}");
    let stopped = told(|graph| graph.output.retain(|output| output.name != "logits"));
    assert!(stopped.contains("  stopped: ") && !stopped.contains("every router agrees"), "{stopped}");
}

/// Doubles an output of a graph.
fn twice(graph: &mut GraphProto, output: &str) {
    for name in graph.node.iter_mut().flat_map(|node| node.input.iter_mut().chain(&mut node.output)) {
        if name == output {
            *name = "single".into();
        }
    }
    let input = vec!["single".into(); 2];
    graph.node.push(NodeProto { op_type: "Add".into(), input, output: vec![output.into()], ..NodeProto::default() });
}
