//! What `read_model` accepts, and everything that it must refuse.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod contract;
mod hostile;
mod part;
#[path = "../support_onnx/mod.rs"]
mod support_onnx;

use std::path::Path;

use moa_export::onnx::inline::inline_functions;
use moa_export::onnx::proto::attribute_proto::AttributeType;
use moa_export::onnx::proto::tensor_proto::{DataLocation, DataType, Segment};
use moa_export::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, StringStringEntryProto, TensorProto,
};
use moa_export::onnx::read::{Dim, ErrorKind, ReadError, read_model};
use proptest::prelude::*;
use prost::Message;
use support_onnx::{
    bytes, empty_weight, external_weight, function, graph, import, model, node, node_of, value, weight, write,
};

use ErrorKind::{Io, Limit, Malformed, Unsupported};

/// `y = f(x + w)`, where `f` negates.
fn valid() -> ModelProto {
    let nodes = vec![node("Add", &["x", "w"], &["t"]), node_of("local", "Negate", &["t"], &["y"])];
    let mut model = model(graph(
        nodes,
        vec![value("x", DataType::Float, &["n", "2"])],
        vec![value("y", DataType::Float, &["n", "2"])],
        vec![weight("w", &[2], &[1.0, 2.0])],
    ));
    model.opset_import.push(import("local", 1));
    model.functions.push(function("local", "Negate", &["a"], &["b"], vec![node("Neg", &["a"], &["b"])]));
    let entry = StringStringEntryProto { key: "family".into(), value: "layer".into() };
    model.metadata_props.push(entry);
    model
}

fn read_bytes(bytes: &[u8]) -> Result<ModelProto, ReadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, bytes).unwrap();
    read_model(&path).map(|file| file.model().clone())
}

fn read(model: &ModelProto) -> Result<ModelProto, ReadError> {
    read_bytes(&model.encode_to_vec())
}

/// A change to the valid model, and the start of the answer that it must get.
struct Case {
    kind: ErrorKind,
    text: &'static str,
    edit: fn(&mut ModelProto),
}

const fn case(kind: ErrorKind, text: &'static str, edit: fn(&mut ModelProto)) -> Case {
    Case { kind, text, edit }
}

fn check(cases: &[Case]) {
    for Case { kind, text, edit } in cases {
        let mut model = valid();
        edit(&mut model);
        let error = read(&model).expect_err(text);
        let message = error.to_string();
        let message = message.split_once("model.onnx: ").unwrap().1;
        assert!(message.contains(text), "expected `{text}`, found `{message}`");
        assert_eq!(error.kind(), *kind, "{message}");
    }
}

fn graph_of(model: &mut ModelProto) -> &mut GraphProto {
    model.graph.as_mut().unwrap()
}

fn weight_of(model: &mut ModelProto) -> &mut TensorProto {
    &mut graph_of(model).initializer[0]
}

fn attribute(kind: AttributeType) -> AttributeProto {
    AttributeProto { name: "a".into(), r#type: kind as i32, ..AttributeProto::default() }
}

fn permutation(axes: &[i64]) -> AttributeProto {
    AttributeProto { name: "perm".into(), ints: axes.to_vec(), ..attribute(AttributeType::Ints) }
}

fn with_attribute(model: &mut ModelProto, attribute: AttributeProto) {
    graph_of(model).node[0].attribute.push(attribute);
}

#[test]
fn lists_of_attributes_may_be_empty() {
    use AttributeType::{Floats, Graphs, Ints, Strings, Tensors};
    for kind in [Floats, Ints, Strings, Tensors, Graphs] {
        let mut model = valid();
        with_attribute(&mut model, attribute(kind));
        assert_eq!(read(&model).unwrap(), model, "{kind:?}");
    }
}

#[test]
fn a_valid_model_is_read_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = read_model(&write(folder.path(), &valid())).unwrap();
    assert_eq!(file.model(), &valid());
    assert_eq!(file.metadata("family"), Some("layer"));
    assert_eq!(file.metadata("absent"), None);
    assert_eq!(file.functions().len(), 1);
    let [input] = file.inputs().try_into().unwrap();
    assert_eq!(input.dims, Some(vec![Dim::Symbolic("n".into()), Dim::Fixed(2)]));
    assert_eq!((input.name.as_str(), input.data_type), ("x", DataType::Float));
    assert_eq!(file.outputs()[0].name, "y");
    assert_eq!(file.initializer_values("w").unwrap(), bytes(&[1.0, 2.0]));
    assert_eq!(file.initializer_values("absent").expect_err("no weight").kind(), Malformed);
    assert!(!file.is_modified() && !file.has_external_data());
    let of_version = |ir_version| ModelProto { ir_version, ..valid() };
    assert!(file.with_model(of_version(8)).unwrap().is_modified());
    assert!(file.with_model(of_version(0)).is_err());
}

#[test]
fn an_input_with_a_default_need_not_be_given() {
    let mut model = valid();
    graph_of(&mut model).input.push(value("w", DataType::Float, &["2"]));
    let (_folder, file) = support_onnx::file(&model);
    assert_eq!(file.inputs().len(), 1);
}

#[test]
fn values_are_little_endian_wherever_they_lie() {
    type Fill = fn(&mut TensorProto);
    let cases: [(DataType, Fill, Vec<u8>); 8] = [
        (DataType::Float, |t| t.float_data = vec![1.0, 2.0], bytes(&[1.0, 2.0])),
        (DataType::Double, |t| t.double_data = vec![1.0, 2.0], [1f64, 2.0].map(f64::to_le_bytes).concat()),
        (DataType::Int64, |t| t.int64_data = vec![-1, 2], [-1i64, 2].map(i64::to_le_bytes).concat()),
        (DataType::Int32, |t| t.int32_data = vec![-1, 2], [-1i32, 2].map(i32::to_le_bytes).concat()),
        (DataType::Bool, |t| t.int32_data = vec![1, 0], vec![1, 0]),
        (DataType::Float16, |t| t.int32_data = vec![0x3c00, 0x4000], vec![0, 0x3c, 0, 0x40]),
        (DataType::Uint32, |t| t.uint64_data = vec![7, 8], [7u32, 8].map(u32::to_le_bytes).concat()),
        (DataType::Int4, |t| t.int32_data = vec![0x21], vec![0x21]),
    ];
    for (data_type, fill, expected) in cases {
        let mut model = valid();
        let mut tensor = TensorProto { data_type: data_type as i32, ..empty_weight("v", &[2]) };
        fill(&mut tensor);
        graph_of(&mut model).initializer.push(tensor);
        let (_folder, file) = support_onnx::file(&model);
        assert_eq!(file.initializer_values("v").unwrap(), expected, "{data_type:?}");
    }
}

#[test]
fn versions_and_imports() {
    check(&[
        case(Malformed, "no IR version", |m| m.ir_version = 0),
        case(Malformed, "no IR version", |m| m.ir_version = -3),
        case(Unsupported, "IR version 2", |m| m.ir_version = 2),
        case(Unsupported, "IR version 15; versions up to 14", |m| m.ir_version = 15),
        case(Unsupported, "IR version 9223372036854775807", |m| m.ir_version = i64::MAX),
        case(Unsupported, "opset 29; opsets up to 28", |m| m.opset_import[0].version = 29),
        case(Unsupported, "opset 99", |m| m.opset_import[0] = import("ai.onnx", 99)),
        case(Unsupported, "opset 99", |m| m.functions[0].opset_import[0].version = 99),
        case(Unsupported, "version 2 of the operators ai.moa; this program and its library have version 1", |m| {
            m.opset_import.push(import("ai.moa", 2));
            graph_of(m).node[0].domain = "ai.moa".into();
        }),
        case(Malformed, "has the version 0", |m| m.opset_import[0].version = 0),
        case(Malformed, "imported twice, in two versions", |m| m.opset_import.push(import("ai.onnx", 17))),
        case(Malformed, "no operator set is imported", |m| m.opset_import.clear()),
        case(Malformed, "operator set `local` is not imported", |m| m.opset_import.truncate(1)),
        case(Malformed, "operator set `` is not imported", |m| m.functions[0].opset_import[0].domain = "other".into()),
        case(Malformed, "no graph", |m| m.graph = None),
        case(Malformed, "metadata key `family` is repeated", |m| m.metadata_props.push(m.metadata_props[0].clone())),
    ]);
}

/// ONNX Runtime writes the domains of all libraries that it has loaded into what it saves, whoever uses them.
#[test]
fn an_operator_set_that_no_node_uses_may_have_any_version() {
    let mut model = valid();
    model.opset_import.push(import("ai.moa", 1000));
    read(&model).unwrap();
}

/// `onnx.compose.merge_models` leaves the imports of both models.
#[test]
fn an_operator_set_may_be_imported_twice_in_one_version() {
    let mut model = valid();
    model.opset_import.extend_from_within(..);
    read(&model).unwrap();
}

#[test]
fn names_and_order() {
    check(&[
        case(Malformed, "weight `w` is defined twice", |m| {
            let again = weight_of(m).clone();
            graph_of(m).initializer.push(again);
        }),
        case(Malformed, "value `x` is defined twice", |m| {
            let again = graph_of(m).input[0].clone();
            graph_of(m).input.push(again);
        }),
        case(Malformed, "value `x` is defined twice", |m| graph_of(m).node[0].output[0] = "x".into()),
        case(Malformed, "value `t` is defined twice", |m| graph_of(m).node[1].output[0] = "t".into()),
        case(Malformed, "a value has no name", |m| graph_of(m).input[0].name.clear()),
        case(Malformed, "a value has no name", |m| weight_of(m).name.clear()),
        case(Malformed, "input `t` is computed by a later node: nodes are not sorted", |m| graph_of(m).node.swap(0, 1)),
        case(Malformed, "input `y` is computed by a later node", |m| graph_of(m).node[0].input[1] = "y".into()),
        case(Malformed, "input `q` is never defined", |m| graph_of(m).node[0].input[1] = "q".into()),
        case(
            Malformed,
            "node 0 `Add_t` (`Max`): input 1 has no name, and none of this operator's inputs may be",
            |m| {
                graph_of(m).node[0] = NodeProto { op_type: "Max".into(), ..graph_of(m).node[0].clone() };
                graph_of(m).node[0].input[1].clear();
            },
        ),
        case(Malformed, "no operator is named", |m| graph_of(m).node[0].op_type.clear()),
        case(Malformed, "output `q` is repeated or never computed", |m| graph_of(m).output[0].name = "q".into()),
        case(Malformed, "output `y` is repeated or never computed", |m| {
            let again = graph_of(m).output[0].clone();
            graph_of(m).output.push(again);
        }),
        case(Malformed, r"input `\u{1b}[31m` is never defined", |m| graph_of(m).node[0].input[1] = "\u{1b}[31m".into()),
    ]);
}

#[test]
fn types() {
    check(&[
        case(Unsupported, "`x` is no tensor, or has no type", |m| graph_of(m).input[0].r#type = None),
        case(Malformed, "`x`: has the unknown element type 999", |m| {
            graph_of(m).input[0] = value("x", DataType::Float, &["2"]);
            set_element_type(&mut graph_of(m).input[0], 999);
        }),
        case(Malformed, "the graph has no output", |m| graph_of(m).output.clear()),
        case(Malformed, "`y`: has no element type", |m| set_element_type(&mut graph_of(m).output[0], 0)),
        case(Malformed, "`x` has the dimension -1", |m| graph_of(m).input[0] = value("x", DataType::Float, &["-1"])),
        case(Malformed, "`t` has the dimension -5", |m| {
            graph_of(m).value_info.push(value("t", DataType::Float, &["-5"]));
        }),
        case(Unsupported, "sparse weights", |m| graph_of(m).sparse_initializer.push(SparseTensorProto::default())),
    ]);
}

fn set_element_type(value: &mut moa_export::onnx::proto::ValueInfoProto, number: i32) {
    use moa_export::onnx::proto::type_proto::Value;
    let Some(Value::TensorType(tensor)) = value.r#type.as_mut().unwrap().value.as_mut() else { panic!("no tensor") };
    tensor.elem_type = number;
}

#[test]
fn weights() {
    check(&[
        case(Malformed, "tensor `w`: has the unknown element type 999", |m| weight_of(m).data_type = 999),
        case(Malformed, "tensor `w`: has no element type", |m| weight_of(m).data_type = 0),
        case(Malformed, "tensor `w` has the dimension -2", |m| weight_of(m).dims = vec![-2]),
        case(Malformed, "size of tensor `w` overflows", |m| weight_of(m).dims = vec![i64::MAX, i64::MAX]),
        case(Malformed, "size of tensor `w` overflows", |m| weight_of(m).dims = vec![1 << 62]),
        case(Malformed, "holds 8 bytes, its shape needs 12", |m| weight_of(m).dims = vec![3]),
        case(Malformed, "holds 8 bytes, its shape needs 16", |m| weight_of(m).data_type = DataType::Int64 as i32),
        case(Malformed, "tensor `w` has no data", |m| weight_of(m).raw_data = None),
        case(Malformed, "ambiguous data: raw_data, float_data", |m| weight_of(m).float_data = vec![1.0, 2.0]),
        case(Malformed, "ambiguous data: raw_data, int64_data", |m| weight_of(m).int64_data = vec![1]),
        case(Malformed, "ambiguous data: raw_data, float_data", |m| {
            weight_of(m).raw_data = Some(vec![].into());
            weight_of(m).float_data = vec![1.0, 2.0];
        }),
        case(Malformed, "ambiguous data: external_data, raw_data", |m| {
            let external = external_weight("w", &[2], &[("location", "data")]);
            *weight_of(m) = TensorProto { raw_data: weight_of(m).raw_data.clone(), ..external };
        }),
        case(Malformed, "data location and external data disagree", |m| {
            weight_of(m).data_location = DataLocation::External as i32;
        }),
        case(Malformed, "data location and external data disagree", |m| {
            let entry = StringStringEntryProto { key: "location".into(), value: "data".into() };
            weight_of(m).external_data.push(entry);
        }),
        case(Malformed, "data location and external data disagree", |m| weight_of(m).data_location = 7),
        case(Malformed, "has its values in int64_data, not float_data", |m| {
            *weight_of(m) = TensorProto { int64_data: vec![1, 2], ..empty_weight("w", &[2]) };
        }),
        case(Malformed, "tensor `w` holds 1 entries, its shape needs 2", |m| {
            *weight_of(m) = TensorProto { float_data: vec![1.0], ..empty_weight("w", &[2]) };
        }),
        case(Malformed, "tensor `w` holds 2 entries, its shape needs 4", |m| {
            let two = empty_weight("w", &[2]);
            *weight_of(m) = TensorProto { float_data: vec![1.0, 2.0], data_type: DataType::Complex64 as i32, ..two };
        }),
        case(Malformed, "size of tensor `w` overflows", |m| {
            let most = empty_weight("w", &[i64::MAX, 2]);
            *weight_of(m) = TensorProto { float_data: vec![1.0], data_type: DataType::Complex64 as i32, ..most };
        }),
        case(Unsupported, "stored in segments", |m| weight_of(m).segment = Some(Segment::default())),
        case(Unsupported, "float6e2m3 as plain bytes", |m| weight_of(m).data_type = DataType::Float6e2m3 as i32),
    ]);
}

#[test]
fn attributes() {
    check(&[
        case(Malformed, "attribute `a` has no type", |m| with_attribute(m, attribute(AttributeType::Undefined))),
        case(Malformed, "attribute `a` has an unknown type", |m| {
            with_attribute(m, AttributeProto { r#type: 77, ..AttributeProto::default() });
            graph_of(m).node[0].attribute[0].name = "a".into();
        }),
        case(Malformed, "its value does not fit its type", |m| with_attribute(m, attribute(AttributeType::Int))),
        case(Malformed, "its value does not fit its type", |m| {
            with_attribute(m, AttributeProto { i: Some(1), f: Some(1.0), ..attribute(AttributeType::Int) });
        }),
        case(Malformed, "its value does not fit its type", |m| {
            with_attribute(m, AttributeProto { ints: vec![1], ..attribute(AttributeType::Floats) });
        }),
        case(Malformed, "node 0 `Add_t` (`Transpose`): perm [0, 1, 1] is no permutation", |m| {
            graph_of(m).node[0].op_type = "Transpose".into();
            graph_of(m).node[0].input.truncate(1);
            with_attribute(m, permutation(&[0, 1, 1]));
        }),
        case(Malformed, "perm [1, 2] is no permutation", |m| {
            m.functions[0].node[0].op_type = "Transpose".into();
            m.functions[0].node[0].attribute.push(permutation(&[1, 2]));
        }),
        case(Malformed, "attribute `a` is repeated or unnamed", |m| {
            with_attribute(m, AttributeProto { i: Some(1), ..attribute(AttributeType::Int) });
            with_attribute(m, AttributeProto { i: Some(2), ..attribute(AttributeType::Int) });
        }),
        case(Unsupported, "attribute `a` of type SparseTensor", |m| {
            with_attribute(m, attribute(AttributeType::SparseTensor));
        }),
        case(Malformed, "refers to `outer`, which is none here", |m| {
            with_attribute(m, AttributeProto { ref_attr_name: "outer".into(), ..attribute(AttributeType::Int) });
        }),
        case(Malformed, "ambiguous data", |m| {
            let tensor = TensorProto { float_data: vec![1.0], ..weight("", &[1], &[1.0]) };
            with_attribute(m, AttributeProto { t: Some(tensor), ..attribute(AttributeType::Tensor) });
        }),
        case(Unsupported, "has external data, but is no weight of the graph", |m| {
            let tensor = external_weight("e", &[1], &[("location", "data")]);
            with_attribute(m, AttributeProto { t: Some(tensor), ..attribute(AttributeType::Tensor) });
        }),
        case(Malformed, "value `x` is defined twice", |m| {
            let inner = graph(vec![node("Neg", &["w"], &["x"])], vec![], vec![], vec![]);
            with_attribute(m, AttributeProto { g: Some(inner), ..attribute(AttributeType::Graph) });
        }),
    ]);
}

#[test]
fn functions() {
    check(&[
        case(Malformed, "function `Negate` calls itself", |m| {
            m.functions[0].node = vec![node_of("local", "Negate", &["a"], &["b"])];
            m.functions[0].opset_import.push(import("local", 1));
        }),
        case(Malformed, "calls itself", |m| {
            let call = |name| vec![node_of("local", name, &["a"], &["b"])];
            m.functions = vec![
                function("local", "Negate", &["a"], &["b"], call("First")),
                function("local", "First", &["a"], &["b"], call("Second")),
                function("local", "Second", &["a"], &["b"], call("First")),
            ];
            m.functions.iter_mut().for_each(|function| function.opset_import.push(import("local", 1)));
        }),
        case(Malformed, "function `Negate` is defined twice", |m| m.functions.push(m.functions[0].clone())),
        case(Malformed, "a function has no name", |m| m.functions[0].name.clear()),
        case(Malformed, "function `Negate`: node 0 `Neg_b` (`Neg`): input `x` is never defined", |m| {
            m.functions[0].node[0].input[0] = "x".into();
        }),
        case(Malformed, "function `Negate`: node 0 `Neg_b` (`Sum`): input 0 has no name", |m| {
            m.functions[0].node[0].op_type = "Sum".into();
            m.functions[0].node[0].input[0].clear();
        }),
        case(Malformed, "output `c` is repeated or never computed", |m| m.functions[0].output[0] = "c".into()),
        case(Malformed, "value `a` is defined twice", |m| m.functions[0].input.push("a".into())),
        case(Malformed, "attribute `k` is repeated", |m| m.functions[0].attribute = vec!["k".into(), "k".into()]),
        case(Malformed, "ambiguous data", |m| {
            let tensor = TensorProto { float_data: vec![1.0], ..weight("", &[1], &[1.0]) };
            let attribute = AttributeProto { t: Some(tensor), ..attribute(AttributeType::Tensor) };
            m.functions[0].node[0].attribute.push(attribute);
        }),
    ]);
}

/// Writes a model with one weight of two f32 values in `entries`, beside a data file of 16 bytes.
fn external(folder: &Path, entries: &[(&str, &str)]) -> Result<Vec<u8>, ReadError> {
    let data = folder.join("data.bin");
    if !data.exists() {
        std::fs::write(data, bytes(&[1.0, 2.0, 3.0, 4.0])).unwrap();
    }
    let mut model = valid();
    *weight_of(&mut model) = external_weight("w", &[2], entries);
    let file = read_model(&write(folder, &model))?;
    Ok(file.initializer_values("w")?.to_vec())
}

#[test]
fn external_data_has_exact_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let location = ("location", "data.bin");
    let found = external(folder.path(), &[location, ("offset", "4"), ("length", "8")]).unwrap();
    assert_eq!(found, bytes(&[2.0, 3.0]));
    let marked = [location, ("offset", "8"), ("checksum", "0")];
    assert_eq!(external(folder.path(), &marked).unwrap(), bytes(&[3.0, 4.0]));
    let cases: [(&[(&str, &str)], &str); 13] = [
        (&[location], "16 bytes of external data, its shape needs 8"),
        (&[location, ("length", "4")], "4 bytes of external data, its shape needs 8"),
        (&[location, ("length", "16")], "16 bytes of external data"),
        (&[location, ("length", "9223372036854775807")], "bytes of external data, its shape needs 8"),
        (&[location, ("offset", "12"), ("length", "8")], "bytes 12 to 20 lie outside `data.bin`, which has 16"),
        (&[location, ("offset", "17"), ("length", "8")], "lie outside"),
        (&[location, ("offset", "18446744073709551615"), ("length", "8")], "lie outside"),
        (&[location, ("offset", "18446744073709551616")], "is no byte count"),
        (&[location, ("offset", "-1")], "`-1` is no byte count"),
        (&[location, ("offset", "+1")], "`+1` is no byte count"),
        (&[location, ("length", "")], "`` is no byte count"),
        (&[location, ("offset", "0"), ("offset", "4")], "external data key `offset` is repeated"),
        (&[location, ("basepath", "0")], "unknown external data key `basepath`"),
    ];
    for (entries, text) in cases {
        let error = external(folder.path(), entries).expect_err(text);
        assert!(error.to_string().contains(text), "expected `{text}`, found `{error}`");
        assert_eq!(error.kind(), Malformed, "{error}");
    }
}

#[test]
fn external_data_lies_beside_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inside");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(folder.path().join("outside.bin"), bytes(&[1.0, 2.0])).unwrap();
    let absolute = folder.path().join("outside.bin");
    let locations = [
        "",
        ".",
        "..",
        "../outside.bin",
        "a/../../outside.bin",
        "./data.bin",
        "sub/data.bin",
        "C:\\x",
        "\\\\srv\\x",
        "data.bin\0",
        "data.bin:stream",
        absolute.to_str().unwrap(),
        "*/_ORT_MEM_ADDR_/*",
    ];
    for location in locations {
        let error = external(&inside, &[("location", location)]).expect_err(location);
        assert_eq!(error.kind(), Malformed, "{error}");
        assert!(error.to_string().contains("is refused"), "{error}");
        assert!(error.help().is_some());
    }
    let error = external(&inside, &[("offset", "0")]).expect_err("no location");
    assert_eq!(error.kind(), Malformed, "{error}");
    let error = external(&inside, &[("location", "absent.bin")]).expect_err("absent");
    assert_eq!(error.kind(), Io, "{error}");
}

#[test]
#[cfg(unix)]
fn external_data_is_a_regular_file_of_its_own() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("real.bin"), bytes(&[1.0, 2.0])).unwrap();
    symlink("real.bin", path("link.bin")).unwrap();
    std::fs::create_dir(path("folder.bin")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(path("socket.bin")).unwrap());
    for (location, text) in
        [("link.bin", "a symbolic link"), ("folder.bin", "no regular file"), ("socket.bin", "no regular file")]
    {
        let error = external(folder.path(), &[("location", location)]).expect_err(location);
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(error.kind(), Malformed);
    }
    assert!(external(folder.path(), &[("location", "real.bin")]).is_ok());
    std::fs::hard_link(path("real.bin"), path("second.bin")).unwrap();
    let error = external(folder.path(), &[("location", "real.bin")]).expect_err("hard link");
    assert!(error.to_string().contains("a hard link"), "{error}");
}

#[test]
#[cfg(target_os = "linux")]
fn devices_are_no_models() {
    for path in ["/dev/zero", "/dev"] {
        assert_eq!(read_model(Path::new(path)).expect_err(path).kind(), Malformed);
    }
    assert_eq!(read_model(Path::new("/no/such/model.onnx")).expect_err("absent").kind(), Io);
}
