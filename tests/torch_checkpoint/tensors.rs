//! Tensors: element types, strides, shared storages.

use std::ops::ControlFlow;

use half::{bf16, f16};
use moa_export::checkpoint::{Dtype, ErrorKind};
use moa_graphs::{FloatType, Runs, TensorDirectory, Weight, WeightError};

use super::{
    NAME, assert_refused, f32s, file_of, keys, opened, root,
    writer::{Py, dict, global, ints, namespace, ordered_dict, storage, tensor, text, whole},
    zip,
};

/// A view of the storage "0" of `count` floats.
pub(super) fn single(offset: i64, shape: &[i64], strides: &[i64], count: i64) -> Py {
    tensor(storage(global("torch", "FloatStorage"), "0", count), offset, shape, strides)
}

fn bytes<const WIDTH: usize>(values: &[f64], convert: impl Fn(f64) -> [u8; WIDTH]) -> Vec<u8> {
    values.iter().flat_map(|value| convert(*value)).collect()
}

fn stored_bytes(weight: &Weight) -> Vec<u8> {
    let mut stored = Vec::new();
    let mut take = |block: &[u8]| {
        stored.extend_from_slice(block);
        ControlFlow::Continue(())
    };
    weight.read_bytes(&mut take).unwrap();
    stored
}

#[test]
fn every_weight_type_is_exact() {
    let values = [1.5, -2.0, 0.0, 0.25];
    let cases = [
        ("DoubleStorage", Dtype::F64, bytes(&values, f64::to_le_bytes)),
        ("FloatStorage", Dtype::F32, bytes(&values, |value| (value as f32).to_le_bytes())),
        ("HalfStorage", Dtype::F16, bytes(&values, |value| f16::from_f64(value).to_le_bytes())),
        ("BFloat16Storage", Dtype::BF16, bytes(&values, |value| bf16::from_f64(value).to_le_bytes())),
    ];
    for (class, dtype, data) in cases {
        let (checkpoint, _folder) = opened(&file_of([("x", whole(class, "0", 4))], &[("0", &data)]));
        let weight = checkpoint.tensor("x").unwrap();
        assert_eq!((checkpoint.dtype("x"), weight.stored_type()), (Some(dtype), dtype.name()));
        assert_eq!(weight.to_f64().unwrap(), values);
        let stored = stored_bytes(&weight);
        assert_eq!(stored, data);
    }
}

#[test]
fn other_types_are_known_and_no_weights() {
    let cases = [
        ("LongStorage", Dtype::I64, 8),
        ("IntStorage", Dtype::I32, 4),
        ("ShortStorage", Dtype::I16, 2),
        ("CharStorage", Dtype::I8, 1),
        ("ByteStorage", Dtype::U8, 1),
        ("BoolStorage", Dtype::Bool, 1),
        ("ComplexFloatStorage", Dtype::C64, 8),
    ];
    for (class, dtype, width) in cases {
        let (checkpoint, _folder) = opened(&file_of([("x", whole(class, "0", 1))], &[("0", &vec![0; width])]));
        assert_eq!(checkpoint.dtype("x"), Some(dtype));
        let error = checkpoint.tensor("x").unwrap().to_f32().unwrap_err();
        assert_eq!(ErrorKind::from(&error), ErrorKind::Unsupported, "{error}");
    }
    let file = file_of([("x", whole("QInt8Storage", "0", 1))], &[("0", &[0])]);
    assert_refused(&file, ErrorKind::Unsupported, &["tensor \"x\"", "element type"]);
    let file = file_of([("x", tensor(storage(global("my", "Storage"), "0", 1), 0, &[1], &[1]))], &[("0", &[0; 4])]);
    assert_refused(&file, ErrorKind::Malformed, &["refused global my.Storage in tensor \"x\""]);
}

#[test]
fn tensors_that_are_not_dense_are_not_supported() {
    for (function, kind) in [
        ("_rebuild_qtensor", "is quantized"),
        ("_rebuild_sparse_tensor", "is sparse"),
        ("_rebuild_sparse_csr_tensor", "is sparse"),
        ("_rebuild_nested_tensor", "is nested"),
        ("_rebuild_meta_tensor_no_storage", "is on the device `meta`, without values"),
        ("_rebuild_wrapper_subclass", "is of a subclass of torch.Tensor"),
        ("_rebuild_device_tensor_from_numpy", "is on an accelerator"),
        ("_rebuild_device_tensor_from_cpu_tensor", "is on an accelerator"),
    ] {
        let made = Py::Call(Box::new(global("torch._utils", function)), vec![whole("FloatStorage", "0", 1)]);
        let part = format!("tensor \"x\", which {kind}, is not supported");
        assert_refused(&file_of([("x", made)], &[("0", &[0; 4])]), ErrorKind::Unsupported, &[&part]);
    }
}

/// A tensor of a storage of bytes.
fn untyped(class: Py, dtype: &str, count: i64, shape: &[i64], strides: &[i64]) -> Py {
    let hooks = ordered_dict(Vec::new());
    let storage = storage(class, "0", count);
    let args = vec![storage, Py::Int(0), ints(shape), ints(strides), Py::Bool(false), hooks, global("torch", dtype)];
    Py::Call(Box::new(global("torch._utils", "_rebuild_tensor_v3")), args)
}

#[test]
fn storages_of_bytes_are_read() {
    for class in ["UntypedStorage", "TypedStorage"] {
        let class = global("torch.storage", class);
        let x = untyped(class.clone(), "float32", 16, &[2, 2], &[1, 2]);
        let (checkpoint, _folder) = opened(&file_of([("x", x)], &[("0", &f32s(&[1.0, 2.0, 3.0, 4.0]))]));
        assert_eq!(checkpoint.tensor("x").unwrap().to_f32().unwrap(), [1.0, 3.0, 2.0, 4.0]);
        let short = untyped(class.clone(), "float32", 15, &[2, 2], &[1, 2]);
        let part = ["needs 4 elements of its storage, which has 3"];
        assert_refused(&file_of([("x", short)], &[("0", &[0; 15])]), ErrorKind::Malformed, &part);
        let unknown = untyped(class.clone(), "quint4x2", 4, &[1], &[1]);
        let file = file_of([("x", unknown)], &[("0", &[0; 4])]);
        assert_refused(&file, ErrorKind::Malformed, &["refused global torch.quint4x2"]);
        let none = tensor(storage(class, "0", 4), 0, &[1], &[1]);
        assert_refused(&file_of([("x", none)], &[("0", &[0; 4])]), ErrorKind::Malformed, &["no element type"]);
    }
    let small = untyped(global("torch.storage", "UntypedStorage"), "float8_e4m3fn", 4, &[4], &[1]);
    assert_eq!(opened(&file_of([("x", small)], &[("0", &[0; 4])])).0.dtype("x"), Some(Dtype::F8_E4M3));
}

/// More elements of the stated type than the storage has bytes for.
#[test]
fn a_typed_storage_says_the_type_of_its_tensors() {
    let halves = |dtype| untyped(global("torch", "HalfStorage"), dtype, 8, &[8], &[1]);
    let (checkpoint, _folder) = opened(&file_of([("x", halves("float16"))], &[("0", &[0; 16])]));
    assert_eq!(checkpoint.dtype("x"), Some(Dtype::F16));
    for other in ["float32", "bfloat16", "int8"] {
        let parts = ["tensor \"x\" has another element type than its storage"];
        assert_refused(&file_of([("x", halves(other))], &[("0", &[0; 16])]), ErrorKind::Malformed, &parts);
    }
}

/// What PyTorch would do with these changes the values.
#[test]
fn a_tensor_is_what_made_it_and_nothing_later() {
    let made = |opcodes: &mut dyn FnMut(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        whole("FloatStorage", "0", 1).write(&mut bytes);
        opcodes(&mut bytes);
        file_of([("x", Py::Raw(bytes))], &[("0", &[0; 4])])
    };
    let built = made(&mut |bytes| {
        ints(&[1, 2]).write(bytes);
        bytes.push(b'b');
    });
    let filled = made(&mut |bytes| {
        bytes.push(b'(');
        [Py::Int(0), Py::Float(9.0)].iter().for_each(|part| part.write(bytes));
        bytes.push(b'u');
    });
    let appended = made(&mut |bytes| {
        bytes.push(b'(');
        Py::Int(0).write(bytes);
        bytes.push(b'e');
    });
    for file in [built, filled, appended] {
        let parts = ["tensor \"x\" whose values are set after it was made"];
        assert_refused(&file, ErrorKind::Unsupported, &parts);
    }
}

#[test]
fn strided_views_are_read_in_row_major_order() {
    let values: Vec<f32> = (0..12u8).map(f32::from).collect();
    type Case<'a> = (i64, &'a [i64], &'a [i64], &'a [f32]);
    let cases: [Case<'_>; 11] = [
        (0, &[3, 4], &[4, 1], &values),
        (7, &[3], &[0], &[7., 7., 7.]),
        (4, &[2, 3], &[0, 1], &[4., 5., 6., 4., 5., 6.]),
        (4, &[3, 2], &[1, 0], &[4., 4., 5., 5., 6., 6.]),
        (8, &[2, 3], &[1, 1], &[8., 9., 10., 9., 10., 11.]),
        (0, &[4, 3], &[1, 4], &[0., 4., 8., 1., 5., 9., 2., 6., 10., 3., 7., 11.]),
        (5, &[2, 2], &[4, 1], &[5., 6., 9., 10.]),
        (1, &[2, 2, 1], &[6, 2, 9], &[1., 3., 7., 9.]),
        (11, &[], &[], &[11.]),
        (0, &[0, 3], &[3, 1], &[]),
        (2, &[3], &[4], &[2., 6., 10.]),
    ];
    for (offset, shape, strides, expected) in cases {
        let (checkpoint, _folder) =
            opened(&file_of([("x", single(offset, shape, strides, 12))], &[("0", &f32s(&values))]));
        let weight = checkpoint.tensor("x").unwrap();
        assert_eq!(weight.shape(), shape.iter().map(|size| *size as usize).collect::<Vec<_>>());
        assert_eq!(weight.to_f32().unwrap(), expected);
        let stored = stored_bytes(&weight);
        assert_eq!(stored, f32s(expected));
        for start in 0..expected.len() {
            let runs = Runs { start, length: 1, count: (expected.len() - start).div_ceil(2), stride: 2 };
            let mut picked = Vec::new();
            weight.read_runs(runs, FloatType::F32, &mut picked).unwrap();
            assert_eq!(picked, f32s(&expected.iter().skip(start).step_by(2).copied().collect::<Vec<_>>()));
            let part: Vec<_> = expected[start..].iter().map(|value| f64::from(*value)).collect();
            assert_eq!(weight.part_to_f64(start..expected.len()).unwrap(), part);
        }
    }
}

/// All values are counted, whatever part was read.
#[test]
fn parts_with_values_that_are_not_finite_are_refused() {
    let values = bytes(&[1.0, f64::NAN, 1e300, f64::INFINITY], f64::to_le_bytes);
    let (checkpoint, _folder) = opened(&file_of([("x", whole("DoubleStorage", "0", 4))], &[("0", &values)]));
    let weight = checkpoint.tensor("x").unwrap();
    assert_eq!(weight.part_to_f64(2..3).unwrap(), [1e300]);
    let error = weight.part_to_f64(2..4).unwrap_err();
    let WeightError::NonFinite { count, first, .. } = error else { panic!("{error}") };
    assert_eq!((count, first), (2, 1));
}

#[test]
fn large_strided_views_are_read() {
    let (rows, columns) = (700usize, 500usize);
    let values: Vec<f32> = (0..rows * columns).map(|index| index as f32).collect();
    let turned = single(0, &[columns as i64, rows as i64], &[1, columns as i64], values.len() as i64);
    let (checkpoint, _folder) = opened(&file_of([("x", turned)], &[("0", &f32s(&values))]));
    let read = checkpoint.tensor("x").unwrap().to_f64().unwrap();
    let expected: Vec<f64> = (0..columns).flat_map(|c| (0..rows).map(move |r| (r * columns + c) as f64)).collect();
    assert_eq!(read, expected);
}

#[test]
fn impossible_views_are_refused() {
    let cases: [(Py, &str); 12] = [
        (single(0, &[13], &[1], 12), "needs 13 elements of its storage, which has 12"),
        (single(12, &[1], &[1], 12), "needs 13 elements"),
        (single(0, &[3, 4], &[5, 1], 12), "needs 14 elements"),
        (single(-1, &[3], &[1], 12), "starts at element -1"),
        (single(0, &[3], &[-1], 12), "stride -1; strides must not be negative"),
        (single(12, &[3], &[0], 12), "needs 13 elements"),
        (single(0, &[3, 3], &[5, 1], 12), "needs 13 elements"),
        (single(0, &[-3], &[1], 12), "has the shape [-3]"),
        (single(0, &[3], &[], 12), "1 dimensions, but 0 strides"),
        (single(0, &[1 << 62, 1 << 62], &[1, 1], 12), "more elements than any file holds"),
        (single(i64::MAX, &[2], &[i64::MAX], 12), "needs 18446744073709551615 elements"),
        (single(0, &[4], &[i64::MAX], 12), "strides beyond any file"),
    ];
    for (tensor, part) in cases {
        let file = file_of([("x", tensor)], &[("0", &[0; 48])]);
        assert_refused(&file, ErrorKind::Malformed, &["tensor \"x\"", part]);
    }
    for shape in [[1 << 20, (1 << 8) + 1], [1, 1 << 62]] {
        let file = file_of([("x", single(0, &shape, &[0, 0], 12))], &[("0", &[0; 48])]);
        assert_refused(&file, ErrorKind::Limit, &["tensor \"x\"", "elements", "268435456"]);
    }
    let file = file_of([("x", single(0, &[1; 9], &[1; 9], 12))], &[("0", &[0; 48])]);
    assert_refused(&file, ErrorKind::Limit, &["dimensions of a tensor", "8"]);
}

/// What the tensors of a file repeat is bounded for all of them together.
#[test]
fn repeated_elements_are_bounded_in_the_file() {
    let half = |shape: &[i64]| single(0, shape, &[0, 0], 12);
    let bytes = [0; 48];
    let two = || [("a", half(&[1 << 13, 1 << 14])), ("b", half(&[1 << 14, 1 << 13]))];
    opened(&file_of(two(), &[("0", &bytes)]));
    let [a, b] = two();
    opened(&file_of([a, b, ("again", half(&[1 << 14, 1 << 13]))], &[("0", &bytes)]));
    let [a, b] = two();
    let parts = ["tensor \"x\"", "beyond their storages", "268435456"];
    let file = file_of([a, b, ("x", single(1, &[13], &[0], 12))], &[("0", &bytes)]);
    assert_refused(&file, ErrorKind::Limit, &parts);
    let shifted = |first: i64| (text(&format!("x{first:04}")), single(first, &[1 << 17], &[1], 1 << 18));
    let file = |count| {
        let tensors = Py::Dict((0..count).map(shifted).collect());
        zip(&root(tensors, keys()).pickle(), &[("0", &vec![0; 4 << 18])])
    };
    opened(&file((1 << 11) + 2));
    assert_refused(&file((1 << 11) + 3), ErrorKind::Limit, &["tensor \"x2050\"", "268435456"]);
}

#[test]
fn storages_must_be_entries_of_their_size() {
    let tensor = || single(0, &[3], &[1], 3);
    assert_refused(&file_of([("x", tensor())], &[]), ErrorKind::Malformed, &["\"checkpoint/data/0\" is missing"]);
    for size in [0, 8, 11, 16] {
        let file = file_of([("x", tensor())], &[("0", &vec![0; size])]);
        assert_refused(&file, ErrorKind::Malformed, &["must have 12 bytes", &format!("found {size}")]);
    }
    let negative = file_of([("x", single(0, &[0], &[1], -1))], &[("0", &[])]);
    assert_refused(&negative, ErrorKind::Malformed, &["malformed storage"]);
    let huge = file_of([("x", single(0, &[0], &[1], i64::MAX))], &[("0", &[])]);
    assert_refused(&huge, ErrorKind::Malformed, &["must have 18446744073709551615 bytes"]);
    let path = tensor_of_key("../../etc/passwd");
    assert_refused(&file_of([("x", path)], &[]), ErrorKind::Malformed, &["../../etc/passwd\" is missing"]);
}

fn tensor_of_key(key: &str) -> Py {
    tensor(storage(global("torch", "FloatStorage"), key, 1), 0, &[1], &[1])
}

#[test]
fn tensors_of_one_storage_agree_about_it() {
    let other = [
        tensor(storage(global("torch", "IntStorage"), "0", 2), 0, &[2], &[1]),
        tensor(storage(global("torch", "FloatStorage"), "0", 1), 0, &[1], &[1]),
    ];
    for other in other {
        let file = file_of([("x", single(0, &[2], &[1], 2)), ("y", other)], &[("0", &[0; 8])]);
        assert_refused(&file, ErrorKind::Malformed, &["tensor \"y\"", "storage \"0\" otherwise"]);
    }
}

#[test]
fn tied_tensors_are_one_tensor() {
    let whole = || single(0, &[2, 2], &[2, 1], 4);
    let tensors =
        [("b", whole()), ("a", whole()), ("turned", single(0, &[2, 2], &[1, 2], 4)), ("row", single(2, &[2], &[1], 4))];
    let (checkpoint, _folder) = opened(&file_of(tensors, &[("0", &f32s(&[1.0, 2.0, 3.0, 4.0]))]));
    assert_eq!(checkpoint.names(), ["a", "row", "turned"]);
    assert_eq!(checkpoint.tensor("b").unwrap().name(), "a");
    assert_eq!(checkpoint.tensor("b").unwrap().to_f32().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(checkpoint.tensor("turned").unwrap().to_f32().unwrap(), [1.0, 3.0, 2.0, 4.0]);
    assert_eq!(checkpoint.tensor("row").unwrap().to_f32().unwrap(), [3.0, 4.0]);
}

#[test]
fn wrapped_tensors_are_read() {
    let x = || single(0, &[2], &[1], 2);
    let call = |name: &str, args| Py::Call(Box::new(global("torch._utils", name)), args);
    let parameter = call("_rebuild_parameter", vec![x(), Py::Bool(true), ordered_dict(Vec::new())]);
    let state = dict([("expert", Py::Bool(true))]);
    let args = vec![x(), Py::Bool(true), ordered_dict(Vec::new()), state.clone()];
    let stateful = call("_rebuild_parameter_with_state", args);
    let plain = call(
        "_rebuild_tensor",
        vec![storage(global("torch", "FloatStorage"), "0", 2), Py::Int(0), ints(&[2]), ints(&[1])],
    );
    let Py::Call(function, args) = x() else { panic!() };
    let of_type = |class: Py| {
        let args = vec![(*function).clone(), class, Py::Tuple(args.clone()), state.clone()];
        Py::Call(Box::new(global("torch._tensor", "_rebuild_from_type_v2")), args)
    };
    let typed = of_type(global("torch.nn.parameter", "Parameter"));
    for wrapped in [parameter.clone(), stateful, plain, typed] {
        let (checkpoint, _folder) = opened(&file_of([("x", wrapped)], &[("0", &f32s(&[1.0, 2.0]))]));
        assert_eq!(checkpoint.tensor("x").unwrap().to_f32().unwrap(), [1.0, 2.0]);
    }
    let file = file_of([("x", of_type(global("my", "Tensor")))], &[("0", &[0; 8])]);
    assert_refused(&file, ErrorKind::Malformed, &["refused global my.Tensor"]);
    let file = file_of([("x", of_type(global("torch", "float32")))], &[("0", &[0; 8])]);
    assert_refused(&file, ErrorKind::Malformed, &["must be a plain tensor"]);
    let often = (0..9).fold(parameter, |inner, _| call("_rebuild_parameter", vec![inner]));
    assert_refused(&file_of([("x", often)], &[("0", &[0; 8])]), ErrorKind::Malformed, &["wrapped too often"]);
}

#[test]
fn what_is_no_tensor_is_refused() {
    let function = || Box::new(global("torch._utils", "_rebuild_tensor_v2"));
    let cases: [(Py, &str); 6] = [
        (Py::List(vec![single(0, &[1], &[1], 1)]), "must be a tensor, found a list"),
        (storage(global("torch", "FloatStorage"), "0", 1), "found a storage"),
        (Py::Call(function(), vec![]), "too few arguments"),
        (Py::Call(function(), vec![Py::None; 6]), "has no storage"),
        (Py::Built(function(), Box::new(Py::None)), "must be a tensor"),
        (tensor(Py::Persistent(Box::new(ints(&[1, 2, 3, 4, 5]))), 0, &[1], &[1]), "malformed storage"),
    ];
    for (value, part) in cases {
        assert_refused(&file_of([("x", value)], &[("0", &[0; 4])]), ErrorKind::Malformed, &["tensor \"x\"", part]);
    }
    let inner = || single(0, &[1], &[1], 1);
    for value in [dict([("y", inner())]), ordered_dict(vec![(text("y"), inner())])] {
        let file = file_of([("x", value)], &[("0", &[0; 4])]);
        assert_refused(&file, ErrorKind::Unsupported, &["tensor \"x\" that is a dictionary of its own"]);
    }
    let Py::Call(function, mut args) = inner() else { panic!() };
    args.push(dict([("neg", Py::Bool(true))]));
    let file = file_of([("x", Py::Call(function, args))], &[("0", &[0; 4])]);
    assert_refused(&file, ErrorKind::Unsupported, &["tensor \"x\" with a pending negation"]);
    let file = zip(&root(Py::Dict(vec![(Py::Int(1), Py::None)]), keys()).pickle(), &[]);
    assert_refused(&file, ErrorKind::Malformed, &["a key that is an integer"]);
}

/// `num_updates`, `_extra_state` and their like; a tensor is missing where one of them stands in its place.
#[test]
fn values_that_are_no_weights_are_left_out_and_named() {
    let tensor = || ("x", single(0, &[1], &[1], 1));
    let long = Py::Raw(b"\x8a\x09\0\0\0\0\0\0\0\0\x01".to_vec());
    let plain = [Py::None, Py::Bool(true), Py::Int(7), Py::Float(0.5), text("v2"), long, dict([])];
    let nested = dict([("a", Py::List(vec![ints(&[1]), Py::None])), ("b", text("c"))]);
    let ordered = ordered_dict(vec![(text("a"), ordered_dict(Vec::new())), (text("b"), Py::Int(1))]);
    let others = [nested, ordered_dict(Vec::new()), dict([("a", ordered_dict(Vec::new()))]), ordered];
    for value in plain.into_iter().chain(others) {
        let (checkpoint, _folder) =
            opened(&file_of([tensor(), ("layers.0._extra_state", value.clone())], &[("0", &f32s(&[1.5]))]));
        assert_eq!(checkpoint.names(), ["x"], "{value:?}");
        let [warning] = checkpoint.warnings() else { panic!("{value:?}") };
        assert!(warning.contains(NAME) && warning.contains("\"layers.0._extra_state\""), "{warning}");
    }
    assert!(opened(&file_of([tensor()], &[("0", &[0; 4])])).0.warnings().is_empty());
    let keys = namespace(dict([
        ("arch", text("moa_transformer")),
        ("encoder_attention_heads", Py::Int(2)),
        ("decoder_attention_heads", Py::Int(2)),
    ]));
    let file = zip(&root(dict([("decoder.embed_tokens.weight", Py::None)]), keys).pickle(), &[]);
    let error = moa_export::source::import(&opened(&file).0, None).unwrap_err().to_string();
    assert!(error.contains("embed_tokens.weight\"") && error.contains("is missing"), "{error}");
    let twice = Py::Dict(vec![(text("x"), Py::None), (text("x"), single(0, &[1], &[1], 1))]);
    assert_refused(&zip(&root(twice, super::keys()).pickle(), &[("0", &[0; 4])]), ErrorKind::Malformed, &["repeated"]);
}

/// The values count together, and are not taken for a damaged tensor where they are too many.
#[test]
fn the_number_of_values_that_are_no_weights_is_bounded() {
    let append = |count: usize| [b"(".as_slice(), &b"N".repeat(count), b"e"].concat();
    let list =
        |count: usize| Py::Raw([b"]".to_vec(), append(1000).repeat(count / 1000), append(count % 1000)].concat());
    let tensor = || ("x", single(0, &[1], &[1], 1));
    let file = |first, second| file_of([("a", list(first)), tensor(), ("z", list(second))], &[("0", &[0; 4])]);
    assert_eq!(opened(&file(199_990, 10)).0.warnings().len(), 1);
    for (first, second) in [(199_990, 11), (0, 200_001)] {
        assert_refused(&file(first, second), ErrorKind::Limit, &["values among its tensors", "200000"]);
    }
}

#[test]
fn hostile_names_are_refused() {
    let tensor = || single(0, &[1], &[1], 1);
    let file = file_of([("a\u{1b}[31m", tensor())], &[("0", &[0; 4])]);
    assert_refused(&file, ErrorKind::Malformed, &["control character"]);
    let file = file_of([(&*"n".repeat(1025), tensor())], &[("0", &[0; 4])]);
    assert_refused(&file, ErrorKind::Limit, &["tensor name", "1024"]);
}
