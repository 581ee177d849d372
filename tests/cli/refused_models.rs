//! Models whose files contradict themselves.

use moa_export::onnx::proto::{ModelProto, ValueInfoProto, tensor_shape_proto::dimension, type_proto};
use prost::Message;

use crate::scene::{Scene, require_runtime};

/// Writes a change of the model `from` in its place.
fn change(scene: &Scene, from: &str, edit: impl FnOnce(&mut ModelProto)) {
    let mut model = ModelProto::decode(scene.read(from).as_slice()).unwrap();
    edit(&mut model);
    scene.write(from, model.encode_to_vec());
}

fn fix(input: &mut ValueInfoProto, axis: usize, size: i64) {
    let Some(type_proto::Value::TensorType(tensor)) = &mut input.r#type.as_mut().unwrap().value else { panic!() };
    tensor.shape.as_mut().unwrap().dim[axis].value = Some(dimension::Value::DimValue(size));
}

/// As sizes that are typed are, before there is memory for them.
#[test]
fn sizes_that_a_model_fixes_have_bounds() {
    require_runtime();
    for (input, axis, size, says) in [
        ("input_ids", 1, 1 << 62, "more than 268435456 values"),
        ("input_ids", 0, 1 << 40, "more than 268435456 values"),
        ("attention_mask", 1, 1 << 40, "more than 268435456 values"),
        ("position_ids", 0, i64::MAX, "more than 268435456 values"),
        ("past_key_values.0.key", 3, 1 << 40, "more than 268435456 values"),
        ("input_ids", 1, 0, "it holds no value"),
        ("attention_mask", 0, 0, "it holds no value"),
    ] {
        let scene = Scene::with_fixture("jetmoe/bf16");
        scene.accepts("ck -o out");
        change(&scene, "out/model.onnx", |model| {
            let inputs = &mut model.graph.as_mut().unwrap().input;
            fix(inputs.iter_mut().find(|known| known.name == input).unwrap(), axis, size);
        });
        let input = format!("model.onnx: input \"{input}\" is [");
        let parts = ["error[MOA-E0303]", &input, &size.to_string(), says, "help: declare another size"];
        for line in ["run out/model.onnx --random", "run out/model.onnx --random --past 4", "bench out --past 4"] {
            scene.refuses(line, 3, &parts);
        }
    }
}

#[test]
fn inputs_of_sizes_beyond_the_memory_are_refused() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    change(&scene, "out/model.onnx", |model| {
        let inputs = &mut model.graph.as_mut().unwrap().input;
        fix(inputs.iter_mut().find(|known| known.name == "past_key_values.0.key").unwrap(), 3, 1 << 27);
    });
    let parts = ["input \"past_key_values.0.key\" of shape [9, 2, 200, 134217728]", "more than 68719476736 bytes"];
    scene.refuses("run out/model.onnx --random --batch 9 --past 200 --seq 1", 2, &parts);
}
