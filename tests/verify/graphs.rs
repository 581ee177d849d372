//! Graphs that compute something else than the checkpoint says, for some inputs or under other names.

use moa_export::{
    backend::BackendKind,
    export::{ExportOptions, export},
    metadata,
    onnx::{
        inline::inline_functions,
        proto::{
            AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto,
            attribute_proto::AttributeType,
            tensor_shape_proto::dimension::Value::{DimParam, DimValue},
            type_proto::Value::TensorType,
        },
    },
    parity::{AuditOutcome, Finding, SkipKind, Verification, VerifyError, VerifyOptions, verify},
};
use moa_graphs::{Form, Options};
use prost::Message;

use crate::{backends, check, checkpoint, differing_constants, options, seen_in_numbers, with_fault};

const HALF: [u8; 4] = 0.5f32.to_le_bytes();

pub(crate) fn node(op_type: &str, inputs: &[&str], output: &str) -> NodeProto {
    let input = inputs.iter().map(|input| (*input).to_owned()).collect();
    NodeProto { op_type: op_type.into(), input, output: vec![output.into()], ..NodeProto::default() }
}

fn place_of(nodes: &[NodeProto], output: &str) -> usize {
    nodes.iter().position(|node| node.output.iter().any(|name| name == output)).unwrap()
}

/// A graph that serves whole rows and single tokens behind a cache, and nothing in between.
#[test]
fn several_tokens_behind_a_cache_are_checked() {
    let result = with_fault("jetmoe/bf16", Form::Standard, "model.onnx", |model| {
        let nodes = &mut model.graph.as_mut().unwrap().node;
        let compared = nodes.iter().find(|node| node.op_type == "LessOrEqual").unwrap().input[1].clone();
        let rows = nodes[place_of(nodes, &compared)].input[0].clone();
        let add = place_of(nodes, &rows);
        let [range, past] = [0, 1].map(|input| nodes[add].input[input].clone());
        let [tokens, one] = [1, 2].map(|input| nodes[place_of(nodes, &range)].input[input].clone());
        let to = AttributeProto { name: "to".into(), r#type: 2, i: Some(1), ..AttributeProto::default() };
        let cast = NodeProto { attribute: vec![to], ..node("Cast", &["is_one"], "is_one_as_float") };
        nodes[add].input[1] = "past_of_one".into();
        let more =
            [node("Equal", &[&tokens, &one], "is_one"), cast, node("Mul", &[&past, "is_one_as_float"], "past_of_one")];
        nodes.splice(add..add, more);
    });
    assert_eq!(differing_constants(&result), 0);
    for report in &result.backends {
        let first = report.graphs[0].outputs.first.as_ref().unwrap();
        assert!(first.place.starts_with("in pieces of three tokens"), "{}: {first:?}", report.backend);
    }
}

fn with_router_outputs(form: Form, edit: impl FnOnce(&mut ModelProto)) -> Verification {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let graph = Options { router_outputs: true, ..options(form).graph };
    export(&checkpoint("mlm"), &out, &ExportOptions { graph, ..options(form) }).unwrap();
    let path = out.join("model.onnx");
    let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
    edit(&mut model);
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    check(&out, "mlm")
}

#[test]
fn router_outputs_are_outputs() {
    for form in Form::ALL {
        let sound = with_router_outputs(form, |_| {});
        assert!(sound.passed() && sound.not_compared().len() == usize::from(form == Form::Fused) * 2, "{sound:?}");
        let doubled = with_router_outputs(form, |model| {
            let graph = model.graph.as_mut().unwrap();
            let weights = graph.output.iter().find(|output| output.name.ends_with(".weights")).unwrap().name.clone();
            let place = place_of(&graph.node, &weights);
            for name in graph.node.iter_mut().flat_map(|node| node.input.iter_mut().chain(&mut node.output)) {
                if *name == weights {
                    *name = "single".into();
                }
            }
            graph.node.insert(place + 1, node("Add", &["single", "single"], &weights));
        });
        assert_eq!(differing_constants(&doubled), 0);
        let first = doubled.backends[0].graphs[0].outputs.first.as_ref().unwrap();
        assert!(first.place.ends_with(".weights"), "{form:?}: {first:?}");
    }
}

/// Runs cannot show that a graph computes nothing else for other inputs.
#[test]
fn nodes_that_the_checkpoint_does_not_give_are_told() {
    type Fault = fn(&mut ModelProto);
    let identity: Fault = |model| {
        let nodes = &mut model.graph.as_mut().unwrap().node;
        let name = std::mem::replace(&mut nodes[2].input[0], "the same".into());
        nodes.insert(2, node("Identity", &[&name], "the same"));
    };
    let in_body: Fault = |model| {
        let body = &mut model.functions[0].node;
        let place = body.iter().position(|node| node.op_type == "MatMul").unwrap();
        let name = std::mem::replace(&mut body[place].input[0], "the same".into());
        body.insert(place, node("Identity", &[&name], "the same"));
    };
    let output: Fault = |model| {
        let graph = model.graph.as_mut().unwrap();
        let more = graph.output[0].clone();
        graph.node.push(node("Identity", &[&more.name], "once more"));
        graph.output.push(ValueInfoProto { name: "once more".into(), ..more });
    };
    for (fault, told) in [(identity, "node 2 \"Identity\""), (in_body, " in the body of MoA"), (output, "node ")] {
        let result = with_fault("variants/v_ffd_moe", Form::Function, "encoder_model.onnx", fault);
        let found = result.audits[0].nodes().unwrap().difference.clone().unwrap();
        assert!(found.contains(told), "{found}");
        let told = &result.not_compared()[0];
        assert!(result.passed() && told.contains(&found) && told.contains("; beyond the weights, "), "{result:?}");
        assert!(matches!(result.finding(&result.backends[0]), Finding::NotCompared(_)), "{result:?}");
        assert_eq!(result.audits[1].nodes().unwrap().difference, None);
    }
}

/// The nodes are the same in each, and need not mean the same.
#[test]
fn an_opset_that_no_export_has_is_told() {
    for (form, opset) in [(Form::Standard, 17), (Form::Function, 22)] {
        // The bodies of a file say their opset too, and so are others.
        for is_stated in [true, false].into_iter().filter(|is_stated| *is_stated || form == Form::Standard) {
            let result = with_fault("jetmoe/bf16", form, "model.onnx", |model| {
                model.opset_import.iter_mut().filter(|set| set.domain.is_empty()).for_each(|set| set.version = opset);
                model.metadata_props.retain(|entry| is_stated || entry.key != metadata::FORM);
            });
            let found = result.audits[0].nodes().unwrap().difference.clone();
            assert_eq!(found, Some(format!("opset {opset}")), "its nodes and weights are compared all the same");
        }
    }
}

#[test]
fn types_that_contradict_are_a_difference() {
    let result = with_fault("variants/v_ffd_moe", Form::Function, "encoder_model.onnx", |model| {
        let value = &mut model.graph.as_mut().unwrap().value_info[0];
        let Some(TensorType(tensor)) = value.r#type.as_mut().unwrap().value.as_mut() else { panic!("no tensor") };
        tensor.shape.as_mut().unwrap().dim[2].value = Some(DimValue(25));
    });
    let found = result.audits[0].nodes().unwrap().difference.clone();
    assert_eq!(found.as_deref(), Some("the type of \"encoder.layers.0/output\""));
}

/// Shape inference fills in what a file leaves open.
#[test]
fn types_that_say_more_are_no_difference() {
    let result = with_fault("variants/v_ffd_moe", Form::Function, "encoder_model.onnx", |model| {
        let values = &mut model.graph.as_mut().unwrap().value_info;
        let Some(TensorType(tensor)) = values[0].r#type.as_mut().unwrap().value.as_mut() else { panic!("no tensor") };
        let [batch, _, width] = &mut tensor.shape.as_mut().unwrap().dim[..] else { panic!("three dimensions") };
        assert!(batch.value.is_none() && width.value.is_some(), "{batch:?}, {width:?}");
        batch.value = Some(DimParam("unk__25".into()));
        width.value = None;
    });
    assert_eq!(result.audits[0].nodes().unwrap().difference, None);
}

/// A caller that takes the first output gets a cache, or gives a mask as tokens.
#[test]
fn another_order_of_inputs_or_outputs_is_a_difference() {
    for (is_stated, turn_outputs) in [(true, true), (true, false), (false, true)] {
        let result = with_fault("jetmoe/bf16", Form::Function, "model.onnx", |model| {
            let graph = model.graph.as_mut().unwrap();
            let values = if turn_outputs { &mut graph.output } else { &mut graph.input };
            values.swap(0, 1);
            if !is_stated {
                model.metadata_props.retain(|entry| entry.key != metadata::FORM);
            }
        });
        assert!(!seen_in_numbers(&result), "{result:?}");
        let expected = match (is_stated, turn_outputs) {
            (false, _) => None,
            (true, true) => Some("model.onnx: output \"present.0.key\" stands where \"logits\" belongs".to_owned()),
            (true, false) => Some("model.onnx: input \"attention_mask\" stands where \"input_ids\" belongs".to_owned()),
        };
        assert_eq!(result.passed(), expected.is_none());
        match (result.finding(&result.backends[0]), expected) {
            (Finding::Differs(found), Some(expected)) => assert_eq!(found, expected),
            (Finding::NotCompared(_), None) => {}
            (found, _) => panic!("{found:?}"),
        }
    }
}

/// A caller may take its buffers from what is declared; a size in place of a name contradicts nothing.
#[test]
fn dimensions_that_an_output_cannot_have_are_a_difference() {
    let declared = |place: usize, size: i64| {
        with_fault("mlm", Form::Function, "model.onnx", |model| {
            let output = &mut model.graph.as_mut().unwrap().output[0];
            let Some(TensorType(tensor)) = output.r#type.as_mut().unwrap().value.as_mut() else { panic!("no tensor") };
            tensor.shape.as_mut().unwrap().dim[place].value = Some(DimValue(size));
        })
    };
    let result = declared(2, 7);
    let Finding::Differs(found) = result.finding(&result.backends[0]) else { panic!("{result:?}") };
    let told = "model.onnx: output \"logits\" is declared as [batch, sequence, 7], and the checkpoint gives [batch, ";
    assert!(found.starts_with(told), "{found}");
    let result = declared(0, 2);
    assert!(result.graph_changed() && result.audits[0].nodes().unwrap().fault().is_none(), "{result:?}");
}

/// No run need show it: an epsilon stands beside larger values, and what is masked weighs nothing by either score.
#[test]
fn another_number_in_a_node_is_a_difference() {
    type Fault = fn(&mut ModelProto);
    let epsilon: Fault = |model| {
        let nodes = &mut model.graph.as_mut().unwrap().node;
        let norm = nodes.iter_mut().find(|node| node.op_type == "LayerNormalization").unwrap();
        let epsilon = norm.attribute.iter_mut().find(|attribute| attribute.name == "epsilon").unwrap();
        epsilon.f = epsilon.f.map(|value| value * 1.01);
    };
    let score: Fault = |model| {
        let nodes = model.functions.iter_mut().flat_map(|function| &mut function.node);
        let tensors = nodes.flat_map(|node| &mut node.attribute).filter_map(|attribute| attribute.t.as_mut());
        let lowest = f32::MIN.to_le_bytes();
        let masked = tensors.filter_map(|tensor| tensor.raw_data.as_mut()).find(|bytes| bytes[..] == lowest).unwrap();
        *masked = (-1e30f32).to_le_bytes().to_vec().into();
    };
    let level: Fault = |model| {
        let nodes = &mut model.graph.as_mut().unwrap().node;
        let ours = nodes.iter_mut().find(|node| node.domain == moa_schema::DOMAIN).unwrap();
        ours.attribute.push(AttributeProto::int("accuracy_level", 3));
    };
    for (fault, told) in [
        (epsilon, "`epsilon` is 0.0000101, and the checkpoint gives 0.00001 in node \""),
        (score, "`value` is -1e30, and the checkpoint gives -3.4028235e38 in node \"Constant_"),
        (level, "`accuracy_level` is 3, and the checkpoint gives none in node \""),
    ] {
        let result = with_fault("mlm", Form::Function, "model.onnx", fault);
        assert!(!seen_in_numbers(&result) && !result.passed() && result.graph_changed(), "{result:?}");
        let Finding::Differs(found) = result.finding(&result.backends[0]) else { panic!("{result:?}") };
        assert!(found.starts_with("model.onnx: ") && found.contains(told), "{found}");
    }
}

#[test]
fn metadata_that_no_export_has_are_refused() {
    for key in [metadata::FORM, metadata::DTYPE, metadata::GATE_MODE, metadata::ROUTER_OUTPUTS, metadata::PART] {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        let gate_mode = Some(moa_schema::GateMode::SoftmaxTopk);
        export(&checkpoint("mlm"), &out, &ExportOptions { gate_mode, ..options(Form::Function) }).unwrap();
        let path = out.join("model.onnx");
        let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
        model.metadata_props.iter_mut().find(|entry| entry.key == key).unwrap().value = "banana".into();
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let error = verify(&out, &checkpoint("mlm"), &backends(), &VerifyOptions::default()).unwrap_err().to_string();
        assert!(error.contains("model.onnx") && error.contains(key) && error.contains("banana"), "{error}");
    }
}

/// Each file of an export carries what it says of the whole; other commands refuse files of two exports.
#[test]
fn files_of_one_export_say_the_same() {
    for key in [metadata::DTYPE, metadata::SOURCE] {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        export(&checkpoint("nmt"), &out, &options(Form::Function)).unwrap();
        let path = out.join("decoder_model.onnx");
        let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
        model.metadata_props.iter_mut().find(|entry| entry.key == key).unwrap().value = "fp16".into();
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let error = verify(&out, &checkpoint("nmt"), &backends(), &VerifyOptions::default()).unwrap_err().to_string();
        let expected = format!("metadata \"{key}\" of encoder_model.onnx and decoder_model.onnx are different");
        assert!(error.starts_with(&expected), "{error}");
    }
}

/// An export without its constant 0.5, once `edit` has put something in place of that.
fn without_half(edit: impl FnOnce(&mut GraphProto, TensorProto)) -> Verification {
    with_fault("mlm", Form::Standard, "model.onnx", |model| {
        let graph = model.graph.as_mut().unwrap();
        let is_half = |tensor: &TensorProto| tensor.dims.is_empty() && tensor.raw_data.as_deref() == Some(&HALF);
        let place = graph.initializer.iter().position(is_half).unwrap();
        let half = graph.initializer.remove(place);
        edit(graph, half);
    })
}

fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    AttributeProto { name: name.into(), r#type: kind as i32, ..AttributeProto::default() }
}

/// A node that gives a constant out is compared as an initializer is.
#[test]
fn a_constant_may_be_given_out_by_a_node_as_it_is() {
    let given_out = |bytes: [u8; 4]| {
        without_half(|graph, half| {
            let tensor = TensorProto { name: String::new(), raw_data: Some(bytes.to_vec().into()), ..half.clone() };
            let value = AttributeProto { t: Some(tensor), ..attribute("value", AttributeType::Tensor) };
            graph.node.insert(0, NodeProto { attribute: vec![value], ..node("Constant", &[], &half.name) });
        })
    };
    let result = given_out(HALF);
    assert_eq!(differing_constants(&result), 0);
    assert!(result.passed() && result.graph_changed(), "{:?}", result.audits);
    let next = f32::from_bits(0.5f32.to_bits() + 1).to_le_bytes();
    assert_eq!(differing_constants(&given_out(next)), 1);
}

/// The checkpoint's weights are there, and what runs read in place of one is another, in rows that no case reaches.
#[test]
fn a_weight_that_nodes_read_in_place_of_the_checkpoints_is_a_difference() {
    let with = |values: fn(&mut [u8])| {
        with_fault("mlm", Form::Function, "model.onnx", |model| {
            let graph = model.graph.as_mut().unwrap();
            let weights = &mut graph.initializer.iter();
            let mut table = weights.find(|tensor| tensor.name.ends_with("embed_positions.weight")).unwrap().clone();
            for input in graph.node.iter_mut().flat_map(|node| &mut node.input).filter(|input| **input == table.name) {
                *input = "other".into();
            }
            let mut bytes = table.raw_data.take().unwrap().to_vec();
            values(&mut bytes);
            table.raw_data = Some(bytes.into());
            let value = AttributeProto { t: Some(table), ..attribute("value", AttributeType::Tensor) };
            graph.node.insert(0, NodeProto { attribute: vec![value], ..node("Constant", &[], "other") });
        })
    };
    let result = with(|bytes| bytes.iter_mut().rev().take(4).for_each(|byte| *byte = 0));
    assert!(!seen_in_numbers(&result) && !result.passed(), "{result:?}");
    let AuditOutcome::Compared { weights, .. } = &result.audits[0].outcome else { panic!("{result:?}") };
    let [unread, foreign] = &weights.faults[..] else { panic!("{weights:?}") };
    assert!(unread.ends_with("embed_positions.weight\" is read by no node"), "{unread}");
    assert_eq!(foreign, "constant \"other\" does not come from the checkpoint");
}

/// A fused epsilon goes with the nodes that read it; one that another node computes is not known.
#[test]
fn a_constant_that_is_not_trained_may_go_with_the_nodes_that_read_it() {
    let result = without_half(|graph, half| {
        let nodes = std::mem::take(&mut graph.node).into_iter().flat_map(|reader| {
            let Some(place) = reader.input.iter().position(|input| *input == half.name) else { return vec![reader] };
            assert_eq!(reader.op_type, "Mul");
            let (other, output) = (&reader.input[1 - place], &reader.output[0]);
            let zero = format!("{output}/zero");
            vec![node("Sub", &[other, other], &zero), node("Mean", &[other, &zero], output)]
        });
        graph.node = nodes.collect();
    });
    assert_eq!(differing_constants(&result), 0);
    assert!(result.passed() && result.graph_changed(), "{:?}", result.audits);
    let computed = without_half(|graph, half| {
        let value = AttributeProto { f: Some(0.5), ..attribute("value_float", AttributeType::Float) };
        graph.node.insert(0, NodeProto { attribute: vec![value], ..node("Constant", &[], &half.name) });
    });
    assert_eq!(differing_constants(&computed), 1);
}

/// The experts of such a graph cannot be seen, so that a near-tie would be taken for a fault, or hide one.
#[test]
fn a_graph_whose_operators_were_replaced_is_not_verified() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint("mlm"), &out, &options(Form::Function)).unwrap();
    let path = out.join("model.onnx");
    let model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
    std::fs::write(&path, inline_functions(&model).unwrap().encode_to_vec()).unwrap();
    let error = verify(&out, &checkpoint("mlm"), &backends(), &VerifyOptions::default()).unwrap_err();
    assert!(matches!(error, VerifyError::RoutingUnseen { is_of_other_weights: false, .. }), "{error}");
}

#[test]
fn an_encoder_in_place_of_the_decoder_is_called_one() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint("variants/v_ffd_moe"), &out, &options(Form::Function)).unwrap();
    std::fs::copy(out.join("encoder_model.onnx"), out.join("decoder_model.onnx")).unwrap();
    let error = verify(&out, &checkpoint("variants/v_ffd_moe"), &backends(), &VerifyOptions::default()).unwrap_err();
    let told = "decoder_model.onnx is the encoder_model of an export, and has the place of the decoder_model";
    assert_eq!(error.to_string(), told);
}

/// A graph of fewer layers shows no routing of those that it has not.
#[test]
fn an_export_of_a_smaller_model_is_said_to_be_of_another_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint("variants/v_ffd_moe"), &out, &options(Form::Function)).unwrap();
    let error = verify(&out, &checkpoint("nmt"), &backends(), &VerifyOptions::default()).unwrap_err();
    assert!(matches!(error, VerifyError::RoutingUnseen { is_of_other_weights: true, .. }), "{error}");
    assert!(error.to_string().ends_with("; it was made from another checkpoint"), "{error}");
}

/// tract does not come back from such a matrix.
#[test]
fn a_graph_that_fails_on_onnx_runtime_is_run_nowhere_else() {
    let result = with_fault("variants/v_ffd_moe", Form::Standard, "decoder_model.onnx", |model| {
        let name = "decoder.layers.0.encoder_attn.q_proj.output_experts.w/reshaped.48x24";
        crate::tensor(model, name).dims.reverse();
    });
    let [ort, _, tract] = &result.backends[..] else { panic!("{result:?}") };
    assert!(ort.graphs[0].failure.is_some() && result.differs(), "{result:?}");
    let skip = tract.skipped.as_ref().unwrap();
    assert_eq!(skip.kind, SkipKind::Failed);
    assert!(skip.why.starts_with("decoder_model.onnx failed on ort, "), "{skip:?}");
}

/// One module whose choices are hidden is named; outputs tell the modules whose nodes have other names.
#[test]
fn modules_are_known_by_the_names_of_their_nodes_or_of_their_routing() {
    let renamed = |router_outputs: bool| {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        let graph = Options { router_outputs, ..options(Form::Function).graph };
        export(&checkpoint("mlm"), &out, &ExportOptions { graph, ..options(Form::Function) }).unwrap();
        let path = out.join("model.onnx");
        let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
        let nodes = &mut model.graph.as_mut().unwrap().node;
        let last = nodes.iter_mut().rfind(|node| node.op_type == "MoASelfAttention").unwrap();
        let name = std::mem::replace(&mut last.name, "renamed".into());
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        (name, verify(&out, &checkpoint("mlm"), &backends(), &VerifyOptions::default()))
    };
    let (name, hidden) = renamed(false);
    let error = hidden.unwrap_err();
    assert!(matches!(&error, VerifyError::RoutingUnseen { module, .. } if name.starts_with(module)), "{name}: {error}");
    assert!(renamed(true).1.unwrap().passed());
}

#[test]
fn a_required_backend_must_be_given() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint("mlm"), &out, &options(Form::Function)).unwrap();
    let options = VerifyOptions { required: vec![BackendKind::TensorRt], ..VerifyOptions::default() };
    let error = verify(&out, &checkpoint("mlm"), &backends(), &options).unwrap_err();
    assert!(matches!(&error, VerifyError::NotGiven { name: "tensorrt" }), "{error}");
}
