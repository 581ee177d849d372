//! The page of `moa-export verify --report`.

use half::f16;
use moa_export::onnx::proto::{GraphProto, tensor_proto::DataType};

use crate::{
    model::Model,
    scene::{Scene, require_runtime},
    verify::{damage, exported},
};

/// The export of a translator, whose encoder `edit` has changed.
fn changed(edit: impl FnOnce(&mut GraphProto)) -> Scene {
    require_runtime();
    let scene = Scene::with(&Model::translator());
    scene.accepts("ck -o out");
    scene.edit("out/encoder_model.onnx", |model| edit(model.graph.as_mut().unwrap()));
    scene
}

/// Text and page of a verification that fails.
fn failed(scene: &Scene, export: &str) -> (String, String) {
    let outcome = scene.moa(&format!("verify {export} --checkpoint ck --backends ort --report page.html"));
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    (outcome.stdout, String::from_utf8(scene.read("page.html")).unwrap())
}

#[test]
fn a_failure_says_what_failed() {
    let scene = exported("");
    damage(&scene);
    let (_, page) = failed(&scene, "m.onnx");
    for says in ["NOT verified", "What failed", "v_proj.weight", "values out of tolerance"] {
        assert!(page.contains(says), "{says}");
    }
    let cells: Vec<_> = page.split("<td").filter_map(|cell| cell.split('<').next()).collect();
    assert!(
        cells.iter().any(|cell| cell.contains("e−")) && !cells.iter().any(|cell| cell.contains("e-0")),
        "{cells:?}"
    );
}

/// A table that only warned would contradict the verdict above it.
#[test]
fn another_number_in_a_node_is_bad_in_the_table_too() {
    let scene = changed(|graph| {
        let norm = graph.node.iter_mut().find(|node| node.op_type == "LayerNormalization").unwrap();
        let epsilon = norm.attribute.iter_mut().find(|attribute| attribute.name == "epsilon").unwrap();
        epsilon.f = Some(2e-5);
    });
    let (text, page) = failed(&scene, "out");
    let found = "`epsilon` is 0.00002, and the checkpoint gives 0.00001 in node ";
    assert!(text.contains(&format!("graph of encoder_model.onnx: FAULT, {found}")), "{text}");
    let cell = page.split("<td").find(|cell| cell.contains(found)).unwrap();
    assert!(cell.contains("\"status bad\""), "{cell}");
}

#[test]
fn element_types_have_the_names_of_onnx() {
    let scene = changed(|graph| {
        let bias = graph.initializer.iter_mut().find(|tensor| tensor.name.ends_with("layer_norm.bias")).unwrap();
        let zeros = vec![f16::ZERO.to_le_bytes(); usize::try_from(bias.dims[0]).unwrap()];
        (bias.data_type, bias.raw_data) = (DataType::Float16 as i32, Some(zeros.concat().into()));
    });
    let (text, _) = failed(&scene, "out");
    assert!(text.contains(" holds float16, the checkpoint gives float32\n"), "{text}");
}

/// Constants that were rounded equal the rounded checkpoint, and the text says so.
#[test]
fn constants_equal_the_checkpoint_in_the_type_of_the_export() {
    for (dtype, text, badge) in [
        ("fp32", "equal the checkpoint bit for bit\n", "bit for bit<"),
        ("fp16", "equal the checkpoint's in fp16 bit for bit\n", "bit for bit in fp16<"),
        ("int4-products", "equal the checkpoint's in int4-products bit for bit\n", "bit for bit in int4-products<"),
    ] {
        let scene = exported(&format!("--dtype {dtype}"));
        let printed = scene.accepts("verify m.onnx --checkpoint ck --backends ort-function --report page.html");
        let page = String::from_utf8(scene.read("page.html")).unwrap();
        assert!(printed.contains(text) && page.contains(badge), "{dtype}: {printed}");
    }
}
