//! `moa-export bench --checkpoint`.

use moa_export::onnx::proto::NodeProto;
use prost::Message;

use crate::bench::{QUICK, exported};

/// With a checkpoint, backends agree on the timed inputs too: here the bodies, which nothing else runs, are wrong.
#[test]
fn a_checkpoint_does_not_replace_the_comparison_on_timed_inputs() {
    let scene = exported("");
    let line = format!("bench m.onnx {QUICK} --no-operators --backends ort --checkpoint ck");
    let text = scene.accepts(&line);
    assert!(
        text.contains("m.onnx on ort: verified against") && text.contains("on ort: agrees with ort-function"),
        "{text}"
    );
    let mut model = scene.model("m.onnx");
    let body = model.functions.iter_mut().find(|body| body.name == "MoASelfAttention").unwrap();
    let output = body.output[0].clone();
    let last = body.node.iter_mut().find(|node| node.output.contains(&output)).unwrap();
    let place = last.output.iter().position(|name| *name == output).unwrap();
    last.output[place] = "half".into();
    let double =
        NodeProto { input: vec!["half".into(); 2], output: vec![output], op_type: "Add".into(), ..Default::default() };
    body.node.push(double);
    scene.write("m.onnx", model.encode_to_vec());
    scene.refuses(&line, 1, &["parity: m.onnx on ort, ", "batch "]);
}
