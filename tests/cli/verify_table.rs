//! What `moa-export verify` prints of runs.

use moa_export::onnx::proto::{AttributeProto, ModelProto};

use crate::verify::exported;

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
