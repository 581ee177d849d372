//! `moa-export prepare`.

use moa_export::onnx::{
    proto::{NodeProto, type_proto},
    read_model,
};
use moa_schema::{feed_forward as ffn, self_attention as own};
use prost::Message;
use serde_json::Value;

use crate::{
    model::Model,
    scene::{Scene, require_runtime},
};

const FORMS: [&str; 3] = ["function", "fused", "standard"];

/// Our nodes of a file.
fn nodes(scene: &Scene, name: &str) -> Vec<NodeProto> {
    let file = read_model(&scene.path(name)).unwrap();
    assert!(file.functions().is_empty(), "{name}");
    let nodes = file.graph().unwrap().node.iter().filter(|node| node.domain == "ai.moa");
    nodes.cloned().collect()
}

fn int(node: &NodeProto, name: &str) -> Option<i64> {
    node.attribute.iter().find(|attribute| attribute.name == name)?.i
}

fn text(node: &NodeProto, name: &str) -> Option<String> {
    let bytes = node.attribute.iter().find(|attribute| attribute.name == name)?.s.clone()?;
    String::from_utf8(bytes).ok()
}

#[test]
fn both_forms_with_our_operators_become_plugins() {
    let scene = Scene::with_fixture("mlm");
    for form in ["function", "fused"] {
        scene.accepts(&format!("ck -o {form}.onnx --form {form} --opset 18"));
        let printed = scene.accepts(&format!("prepare {form}.onnx -o {form}.trt.onnx"));
        let nodes = nodes(&scene, &format!("{form}.trt.onnx"));
        assert!(printed.starts_with(&format!("wrote {form}.trt.onnx: {} nodes for the plugin, fp32", nodes.len())));
        assert!(printed.contains("next: trtexec --onnx="), "{printed}");
        assert!(printed.contains("--dim batch=MIN:OPT:MAX --dim sequence=MIN:OPT:MAX"), "{printed}");
        for node in &nodes {
            assert_eq!(text(node, "plugin_namespace").as_deref(), Some("ai.moa"));
            assert_eq!(text(node, "plugin_version").as_deref(), Some("1"));
            // An encoder keeps no keys and values.
            assert_eq!((node.output.len(), int(node, "output_count")), (1, Some(1)));
        }
    }
    assert_eq!(nodes(&scene, "function.trt.onnx"), nodes(&scene, "fused.trt.onnx"));
}

#[test]
fn a_model_is_not_replaced_by_what_is_prepared_from_it() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx");
    for line in ["prepare m.onnx -o m.onnx --force", "prepare ./m.onnx -o ck/../m.onnx --force"] {
        scene.refuses(line, 2, &["m.onnx is the model that is prepared", "NAME.trt.onnx"]);
    }
    for name in ["m.plan", "m"] {
        scene.refuses(&format!("prepare m.onnx -o {name}"), 2, &["does not end in .onnx", "NAME.trt.onnx"]);
    }
}

#[test]
fn one_node_is_told_as_one() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o m.onnx");
    let printed = scene.accepts("prepare m.onnx -o m.trt.onnx");
    assert!(printed.starts_with("wrote m.trt.onnx: 1 node for the plugin, fp32\n"), "{printed}");
}

#[test]
fn an_engine_is_no_model() {
    let scene = Scene::with_fixture("mlm");
    scene.write("m.plan", b"ptrt\0\0\0");
    for line in ["bench m.plan", "verify m.plan --checkpoint ck"] {
        scene.refuses(line, 3, &["m.plan", "--plan"]);
    }
}

#[test]
fn absent_inputs_of_a_decoder_are_told_by_an_attribute() {
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out");
    scene.accepts("prepare out/decoder_model.onnx -o out/decoder.trt.onnx");
    let nodes = nodes(&scene, "out/decoder.trt.onnx");
    let own: Vec<_> = nodes.iter().filter(|node| node.op_type == "MoASelfAttention").collect();
    assert!(!own.is_empty());
    for node in own {
        assert!(node.input.len() == 8 && node.input.iter().all(|name| !name.is_empty()));
        assert_eq!((int(node, "present_inputs"), int(node, "output_count")), (Some(0x1BF), None));
    }
    scene.refuses("prepare out/decoder.trt.onnx -o again.onnx", 4, &["it is prepared already"]);
}

#[test]
fn the_same_file_gives_the_same_bytes_and_json() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o model.onnx");
    let printed = scene.accepts("prepare model.onnx -o one.onnx --json --gpu v100 --tensorrt 10.4");
    scene.accepts("prepare model.onnx -o two.onnx");
    assert_eq!(scene.read("one.onnx"), scene.read("two.onnx"));
    let value: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((value["path"].as_str(), value["dtype"].as_str()), (Some("one.onnx"), Some("fp32")));
    assert!(value["plugin_nodes"].as_u64().unwrap() > 0);
    let command = value["trtexec"].as_str().unwrap();
    assert!(command.ends_with("--saveEngine=one.plan --stronglyTyped"), "{command}");
    let printed = scene.accepts("prepare model.onnx -o slash.onnx/");
    assert!(printed.contains("--onnx=slash.onnx ") && !printed.contains("slash.onnx/"), "{printed}");
}

#[test]
fn sizes_of_open_dimensions_make_the_shapes_of_an_engine() {
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out");
    let line = "prepare out/decoder_model.onnx -o d.onnx --dim batch=1:4:8 --dim source=2:3:5 --dim sequence=1:1:6";
    scene.refuses(line, 2, &["no size is given to past_sequence", "add --dim past_sequence=0:OPT:MAX"]);
    for zero in ["batch=0", "batch=0:1:8"] {
        let line = format!("prepare out/encoder_model.onnx -o e.onnx --dim {zero} --dim source=1:1:6");
        scene.refuses(&line, 2, &["a size of 0 is given to the dimension `batch`", "--dim batch=1:OPT:MAX"]);
        scene.refuses(&line.replace("prepare", "build").replace("e.onnx", "e.plan"), 2, &["a size of 0", "`batch`"]);
    }
    scene.refuses(&format!("{line} --dim length=1:1:1"), 2, &["`length`, which no input has", "batch, sequence"]);
    scene.refuses(&format!("{line} --dim past_sequence=9:7:8"), 2, &["MIN may not exceed OPT"]);
    scene.refuses(&format!("{line} --dim past_sequence=9:9"), 2, &["expected NAME=MIN:OPT:MAX"]);
    let printed = scene.accepts(&format!("{line} --dim past_sequence=0:7:90"));
    for part in [
        "--minShapes=input_ids:1x1,attention_mask:1x1,encoder_attention_mask:1x2,past_key_values.0.decoder.key:1x1x0x32",
        "--optShapes=input_ids:4x1,attention_mask:4x8,encoder_attention_mask:4x3,past_key_values.0.decoder.key:4x1x7x32",
        "--maxShapes=input_ids:8x6,attention_mask:8x96,",
    ] {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
}

/// Sizes that no row can have, whatever the other sizes are; ends that exclude each other are two profiles in one.
#[test]
fn sizes_beyond_the_positions_of_a_model_are_refused() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o model.onnx");
    let table = "`encoder.sentence_encoder.embed_positions.weight` has 256 positions";
    for command in ["prepare model.onnx -o x.onnx", "build model.onnx -o x.plan"] {
        for (sizes, what) in [
            ("--dim batch=1 --dim sequence=1:8:257", "a largest `sequence` of 257 makes rows of 257 tokens"),
            ("--max input_ids:1x300,attention_mask:1x300", "a largest `sequence` of 300 makes rows of 300 tokens"),
        ] {
            scene.refuses(&format!("{command} {sizes}"), 2, &[what, table, "at most 256 tokens a row"]);
        }
    }
    scene.accepts("prepare model.onnx -o x.onnx --dim batch=1 --dim sequence=1:8:256");
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o model.onnx");
    let line = "prepare model.onnx -o x.onnx --dim batch=1";
    for (sizes, what) in [
        ("--dim sequence=1:1:64 --dim past_sequence=0:64:256", "a largest `past_sequence` of 256 makes rows of 257"),
        ("--dim sequence=1:57:64 --dim past_sequence=0:200:255", "the most frequent sizes make rows of 257 tokens"),
    ] {
        scene.refuses(&format!("{line} {sizes}"), 2, &[what, "has 256 positions"]);
    }
    scene.accepts(&format!("{line} --dim sequence=1:1:256 --dim past_sequence=0:64:255"));
}

#[test]
fn dimensions_without_a_name_take_no_sizes() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o model.onnx");
    let mut model = read_model(&scene.path("model.onnx")).unwrap().model().clone();
    let kind = model.graph.as_mut().unwrap().input[0].r#type.as_mut().unwrap();
    let Some(type_proto::Value::TensorType(tensor)) = &mut kind.value else { panic!("no tensor") };
    tensor.shape.as_mut().unwrap().dim[0].value = None;
    scene.write("unnamed.onnx", model.encode_to_vec());
    let line = "prepare unnamed.onnx -o x.onnx --dim batch=1:1:8 --dim sequence=1:1:6";
    scene.refuses(line, 2, &["input `input_ids` has a dimension without a name"]);
    scene.accepts("prepare unnamed.onnx -o x.onnx");
}

/// Layers without a projection of keys and values, whose routers read an input of their own.
#[test]
fn stick_breaking_is_told_with_the_inputs_that_are_there() {
    let scene = Scene::with_fixture("molm/mlp");
    scene.accepts("ck -o model.onnx");
    for options in ["", "--tensorrt 8.6"] {
        scene.accepts(&format!("prepare model.onnx -o x.onnx --force {options}"));
        let nodes = nodes(&scene, "x.onnx");
        let (attention, feed_forward): (Vec<_>, Vec<_>) =
            nodes.iter().partition(|node| node.op_type == "MoASelfAttention");
        assert!(!attention.is_empty() && attention.len() == feed_forward.len());
        for node in attention {
            assert_eq!(text(node, "attention_mode").as_deref(), Some("stick_breaking"));
            let mask = int(node, "present_inputs").unwrap();
            assert_eq!((mask >> own::KV_WEIGHT & 1, mask >> own::ROUTER_INPUT & 1), (0, 1), "{mask:#x}");
            assert_eq!(mask.count_ones() as usize, node.input.len());
        }
        for node in feed_forward {
            assert_eq!(int(node, "present_inputs").map(|mask| mask >> ffn::ROUTER_INPUT & 1), Some(1));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o model.onnx");
    scene.accepts("ck -o half.onnx --dtype bf16");
    scene.accepts("ck -o fp16.onnx --dtype fp16");
    scene.accepts("ck -o standard.onnx --form standard");
    for (line, code, parts) in [
        ("model.onnx -o x.onnx --gpu v100 --tensorrt 10.5", 4, "10.5 to 10.6 serves compute capability 7.5 and newer"),
        ("half.onnx -o x.onnx --gpu V100", 4, "the model is bf16, and v100 does not fit"),
        ("half.onnx -o x.onnx --tensorrt 8.6", 4, "TensorRT 8.6 has no bfloat16, and the model is bf16"),
        ("model.onnx -o x.onnx --tensorrt 8.5", 4, "TensorRT 8.5 is not served: 8.6, 10.0 to 10.4"),
        ("model.onnx -o x.onnx --tensorrt ten", 2, "expected a release such as 10.4"),
        ("model.onnx -o x.onnx --gpu k80", 2, "k80"),
        ("standard.onnx -o x.onnx", 4, "TensorRT takes it as it is"),
        ("model.onnx -o half.onnx", 2, "half.onnx exists already"),
        ("absent.onnx -o x.onnx", 5, "absent.onnx"),
        ("ck/config.json -o x.onnx", 3, "config.json"),
    ] {
        scene.refuses(&format!("prepare {line}"), code, &[parts]);
    }
    for (line, help) in [
        ("model.onnx --tensorrt 8.5", "which releases of TensorRT serve which GPU; choose one"),
        ("model.onnx --gpu v100 --tensorrt 10.5", "which releases of TensorRT serve which GPU; choose one"),
        ("half.onnx --tensorrt 8.6", "export with another --dtype"),
        ("half.onnx --gpu v100", "export with another --dtype"),
    ] {
        scene.refuses(&format!("prepare {line} -o x.onnx"), 4, &[help]);
    }
    let printed = scene.accepts("prepare fp16.onnx -o x.onnx --gpu v100 --tensorrt 8.6");
    assert!(printed.contains(", fp16\n") && printed.contains(" --fp16 --minShapes=… "), "{printed}");
}

/// In every form, before TensorRT is looked for.
#[test]
fn exports_in_integers_are_refused() {
    let scene = Scene::with_fixture("mlm");
    let exports = FORMS.into_iter().flat_map(|form| ["int8", "int4"].map(|integers| (form, integers)));
    let of_products = ["function", "fused"].map(|form| (form, "int8-products"));
    for (form, dtype) in exports.chain(of_products).chain([("function", "int4-products")]) {
        scene.accepts(&format!("ck -o m.onnx --dtype {dtype} --form {form} --force"));
        let integers = &dtype[..4];
        for line in ["prepare m.onnx -o x.onnx --gpu h200", "build m.onnx -o m.plan --dim batch=1 --dim sequence=1"] {
            let help = "help: export with --dtype fp16, --dtype bf16 or --dtype fp32";
            let why = format!("the model is {integers}, and engines are built of floats alone");
            scene.refuses(line, 4, &[&why, help]);
        }
    }
}

/// TensorRT 8.6 has no int64, and takes the plugin's indices as int32.
#[test]
fn routing_is_prepared_for_every_release_alike() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o routed.onnx --router-outputs");
    scene.accepts("prepare routed.onnx -o older.onnx --tensorrt 8.6");
    scene.accepts("prepare routed.onnx -o newer.onnx --tensorrt 10.0");
    assert_eq!(scene.read("older.onnx"), scene.read("newer.onnx"));
    for node in nodes(&scene, "older.onnx") {
        let outputs = node.output.len();
        let own = if node.op_type == "MoEFeedForward" { 1 } else { 3 };
        assert!(outputs > own && int(&node, "output_count") == Some(outputs as i64), "{node:?}");
    }
}

/// Activations of exports in bf16 are f32, and the plugin computes in one type.
#[test]
fn operators_of_a_bf16_export_compute_between_casts() {
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out --dtype bf16");
    let printed = scene.accepts("prepare out/decoder_model.onnx -o out/decoder.trt.onnx --gpu a100 --tensorrt 10.4");
    assert!(printed.contains(", bf16\n") && printed.contains("--stronglyTyped"), "{printed}");
    let file = read_model(&scene.path("out/decoder.trt.onnx")).unwrap();
    let graph = file.graph().unwrap();
    let reads_bf16 = |name: &String| {
        let made = graph.node.iter().find(|node| node.output.contains(name));
        made.is_some_and(|node| node.op_type == "Cast" && int(node, "to") == Some(16) || node.domain == "ai.moa")
    };
    let nodes = nodes(&scene, "out/decoder.trt.onnx");
    assert!(!nodes.is_empty());
    for node in &nodes {
        assert!(reads_bf16(&node.input[0]), "{}", node.name);
        let wide = graph.node.iter().filter(|cast| cast.op_type == "Cast" && cast.input[0] == node.output[0]);
        assert_eq!(wide.map(|cast| int(cast, "to")).collect::<Vec<_>>(), [Some(1)], "{}", node.name);
    }
    let names = |file: &moa_export::onnx::OnnxFile| (file.inputs(), file.outputs());
    assert_eq!(names(&file), names(&read_model(&scene.path("out/decoder_model.onnx")).unwrap()));
}

/// To the plugin, products are of the type that it is given.
#[test]
fn an_export_whose_products_may_be_rounded_is_prepared_as_one_in_bf16() {
    let scene = Scene::with_fixture("mlm");
    let prepared = ["bf16", "bf16-products"].map(|dtype| {
        ["function", "fused"].map(|form| {
            scene.accepts(&format!("ck -o m.onnx --dtype {dtype} --form {form} --force"));
            scene.accepts("prepare m.onnx -o m.trt.onnx --gpu a100 --tensorrt 10.4 --force");
            nodes(&scene, "m.trt.onnx")
        })
    });
    let levels = nodes(&scene, "m.onnx").iter().map(|node| int(node, "accuracy_level")).collect::<Vec<_>>();
    assert!(!levels.is_empty() && levels.iter().all(|level| *level == Some(3)), "{levels:?}");
    assert_eq!(prepared[0], prepared[1]);
}

#[test]
fn weights_in_a_file_of_their_own_stay_where_they_are() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o out/model.onnx --external-data always");
    scene.refuses("prepare out/model.onnx -o x.onnx", 2, &["-o names another folder", "choose a file in out"]);
    scene.accepts("prepare out/model.onnx -o out/model.trt.onnx");
    assert!(!nodes(&scene, "out/model.trt.onnx").is_empty());
}

/// Nodes that read bf16, and a MoLM's whose absent inputs are left out; in fp32 others run as they are.
#[test]
fn what_tensorrt_alone_takes_is_no_failure_of_onnx_runtime() {
    require_runtime();
    for (model, dtype) in [("jetmoe/bf16", "bf16"), ("molm/mlp", "fp32")] {
        let scene = Scene::with_fixture(model);
        scene.accepts(&format!("ck -o out --dtype {dtype}"));
        scene.accepts("prepare out -o out/p.onnx");
        let told = "the model was prepared for TensorRT";
        let outcome = scene.moa("verify out/p.onnx --checkpoint ck");
        assert_eq!(outcome.code, Some(4), "{model}: {}{}", outcome.stdout, outcome.stderr);
        assert!(outcome.stdout.contains(&format!("ort was skipped: {told}")), "{model}: {}", outcome.stdout);
        let help = "help: give the file that it was prepared from";
        scene.refuses("run out/p.onnx --random --seq 2", 4, &[told, help]);
    }
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    scene.accepts("prepare out -o out/p.onnx");
    scene.accepts("verify out/p.onnx --checkpoint ck --backends ort");
}
