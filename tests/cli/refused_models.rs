//! Models whose files contradict themselves.

use moa_export::onnx::proto::{ModelProto, ValueInfoProto, tensor_shape_proto::dimension, type_proto};

use crate::{
    run::exported,
    scene::{Scene, require_runtime},
    support_onnx::int,
};

/// Gives the first operator of ours an attribute of type `INT`.
fn set(model: &mut ModelProto, name: &str, value: i64) {
    let nodes = &mut model.graph.as_mut().unwrap().node;
    let attributes = &mut nodes.iter_mut().find(|node| node.domain == "ai.moa").unwrap().attribute;
    attributes.retain(|attribute| attribute.name != name);
    attributes.push(int(name, value));
}

fn fix(input: &mut ValueInfoProto, axis: usize, size: i64) {
    let Some(type_proto::Value::TensorType(tensor)) = &mut input.r#type.as_mut().unwrap().value else { panic!() };
    tensor.shape.as_mut().unwrap().dim[axis].value = Some(dimension::Value::DimValue(size));
}

#[test]
fn operators_that_contradict_their_weights_are_refused_by_every_command() {
    require_runtime();
    for (name, value, says) in [
        ("top_k", 9, "top_k is 9, but the router has 4 experts"),
        ("kv_num_heads", 3, "query_weight has 32 columns, not a multiple of kv_num_heads = 3"),
        ("kv_num_heads", 1 << 40, "not a multiple of kv_num_heads = 1099511627776"),
        ("top_k", 4, "attribute `top_k` is 4, and the body of its function chooses 2"),
        ("window", 3, "its operator has no attribute `window`"),
    ] {
        let scene = Scene::with_fixture("jetmoe/bf16");
        scene.accepts("ck -o out");
        scene.write("lines.ids", "4 5 6\n");
        scene.edit("out/model.onnx", |model| set(model, name, value));
        for line in [
            "run out/model.onnx --random --backend ort",
            "run out/model.onnx --random --backend ort-function",
            "run out/model.onnx --random --backend tract",
            "bench out",
            "inspect out",
            "prepare out/model.onnx -o prepared.trt.onnx",
            "profile out --inputs lines.ids",
            "generate out --input 5 --token-ids",
            "verify out --checkpoint ck",
        ] {
            scene.refuses(line, 3, &["error[MOA-E0303]", "model.onnx", says, "help: give a file that moa-export"]);
        }
    }
}

#[test]
fn damaged_models_say_what_to_give() {
    type Edit = fn(&mut ModelProto);
    let cases: [(&str, Edit); 3] = [
        ("is defined twice", |model| model.functions.push(model.functions[0].clone())),
        ("attribute `top_k` is repeated or unnamed", |model| {
            let nodes = &mut model.graph.as_mut().unwrap().node;
            nodes.iter_mut().find(|node| node.domain == "ai.moa").unwrap().attribute.push(int("top_k", 2));
        }),
        (" bytes, its shape needs ", |model| {
            let weights = &mut model.graph.as_mut().unwrap().initializer;
            let largest = weights.iter_mut().max_by_key(|weight| weight.raw_data.as_ref().map_or(0, |raw| raw.len()));
            largest.unwrap().raw_data = Some(vec![0; 4].into());
        }),
    ];
    let help = "help: give a whole .onnx file";
    for (says, edit) in cases {
        let scene = Scene::with_fixture("mlm");
        scene.accepts("ck -o m.onnx");
        scene.edit("m.onnx", edit);
        scene.refuses("inspect m.onnx", 3, &["error[MOA-E0303]", says, help]);
    }
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx");
    let bytes = scene.read("m.onnx");
    scene.write("m.onnx", &bytes[..bytes.len() / 2]);
    scene.refuses("inspect m.onnx", 3, &["error[MOA-E0303]", "the file is cut off", help]);
}

#[test]
fn a_model_without_outputs_is_refused() {
    let scene = exported("");
    scene.edit("m.onnx", |model| model.graph.as_mut().unwrap().output.clear());
    for line in ["prepare m.onnx -o prepared.trt.onnx", "inspect m.onnx", "run m.onnx --random"] {
        scene.refuses(line, 3, &["error[MOA-E0303]", "m.onnx: the graph has no output", "help: "]);
    }
}

#[test]
fn sizes_of_zero_that_a_model_fixes_are_refused() {
    require_runtime();
    for (input, axis) in [("input_ids", 1), ("attention_mask", 0), ("past_key_values.0.key", 1)] {
        let scene = fixed(input, axis, 0);
        let input = format!("model.onnx: input \"{input}\" is [");
        let parts = ["error[MOA-E0229]", &input, "it holds no value", "help: give all inputs with --inputs FILE"];
        for line in ["run out/model.onnx --random", "run out/model.onnx --random --past 4", "bench out --past 4"] {
            scene.refuses(line, 2, &parts);
        }
    }
    fixed("past_key_values.0.key", 2, 0).accepts("run out/model.onnx --random");
}

/// An export one of whose inputs has a fixed size.
fn fixed(input: &str, axis: usize, size: i64) -> Scene {
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    scene.edit("out/model.onnx", |model| {
        let inputs = &mut model.graph.as_mut().unwrap().input;
        fix(inputs.iter_mut().find(|known| known.name == input).unwrap(), axis, size);
    });
    scene
}

/// As sizes that are typed are, before there is memory for them.
#[test]
fn sizes_that_a_model_fixes_have_bounds() {
    require_runtime();
    for (input, axis, size) in [
        ("input_ids", 1, 1 << 62),
        ("input_ids", 0, 1 << 40),
        ("attention_mask", 1, 1 << 40),
        ("position_ids", 0, i64::MAX),
        ("past_key_values.0.key", 3, 1 << 40),
    ] {
        let scene = fixed(input, axis, size);
        let input = format!("input \"{input}\" of shape [");
        let parts = ["error[MOA-E0229]", &input, &size.to_string(), "the inputs take more than 68719476736 bytes"];
        for line in ["run out/model.onnx --random --past 4", "bench out --past 4 --samples 1"] {
            scene.refuses(line, 2, &parts);
        }
    }
}

#[test]
fn inputs_of_sizes_beyond_the_memory_are_refused() {
    require_runtime();
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    scene.edit("out/model.onnx", |model| {
        let inputs = &mut model.graph.as_mut().unwrap().input;
        fix(inputs.iter_mut().find(|known| known.name == "past_key_values.0.key").unwrap(), 3, 1 << 27);
    });
    let parts = ["input \"past_key_values.0.key\" of shape [9, 2, 200, 134217728]", "more than 68719476736 bytes"];
    scene.refuses("run out/model.onnx --random --batch 9 --past 200 --seq 1", 2, &parts);
}
