//! Weights are written in the type that their initializer has, inline and in a file of their own, and once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/mod.rs"]
mod common;

use std::{collections::HashSet, fs};

use common::{data, weight};
use half::{bf16, f16};
use moa_export::{
    checkpoint::Checkpoint,
    export::{ExportOptions, export},
    onnx::{DataFile, OnnxFile, encode, proto::tensor_proto::DataType, read_model},
};
use moa_graphs::{
    FloatType, Form, Options, Precision,
    graph::{Buffers, Builder, DType, Dim, Graph},
};

const ROWS: usize = 96;
const COLUMNS: usize = 48;

fn value(row: usize, column: usize) -> f32 {
    (row * COLUMNS + column) as f32 * 0.37 - 800.0
}

/// `y = x · wᵀ + b` with `w` of the type `float`, whose nodes nobody runs.
fn graph(float: FloatType) -> Graph {
    let mut b = Builder::graph(Precision::Fp32);
    let x = b.input("x", DType::Float32, &[Dim::from("n"), Dim::from(COLUMNS)]);
    let values = (0..ROWS * COLUMNS).map(|index| value(index / COLUMNS, index % COLUMNS)).collect();
    let w = b.weight_as("w", &weight("w", &[ROWS, COLUMNS], values), float);
    let bias = b.weight("b", &weight("b", &[ROWS], vec![0.5; ROWS]));
    let turned = b.transpose(&w, &[1, 0]);
    let product = b.op("MatMul", &[&x, &turned], []);
    let sum = b.op("Add", &[&product, &bias], []);
    b.output(&sum, "y", DType::Float32, &[Dim::from("n"), Dim::from(ROWS)]);
    b.into_graph("g")
}

/// What the type makes of a value, by the crate that defines it.
fn rounded(float: FloatType, value: f32) -> Vec<u8> {
    match float {
        FloatType::F32 => value.to_le_bytes().to_vec(),
        FloatType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        FloatType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    }
}

#[test]
fn files_hold_the_rounded_and_transposed_values() {
    for (float, data_type) in
        [(FloatType::F32, DataType::Float), (FloatType::F16, DataType::Float16), (FloatType::Bf16, DataType::Bfloat16)]
    {
        let expected: Vec<u8> =
            (0..COLUMNS).flat_map(|column| (0..ROWS).flat_map(move |row| rounded(float, value(row, column)))).collect();
        for external in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("m.onnx");
            let mut file = std::fs::File::create(folder.path().join("m.data")).unwrap();
            let data =
                DataFile { location: "m.data".into(), writer: &mut file, position: 0, buffers: Buffers::default() };
            let graph = graph(float);
            let encoded = encode(&graph, 18, external.then_some(data)).unwrap();
            encoded.write(&[], &mut std::fs::File::create(&path).unwrap()).unwrap();
            let read = read_model(&path).unwrap();
            let tensor = read.initializer("w/transposed.10").unwrap();
            assert_eq!((tensor.data_type, tensor.dims.as_slice()), (data_type as i32, [48, 96].as_slice()));
            assert_eq!(tensor.external_data.is_empty(), !external);
            assert!(read.initializer_values("w/transposed.10").unwrap() == expected, "{float}, external {external}");
            let bias = read.initializer("b").unwrap();
            assert_eq!((bias.data_type, bias.external_data.len()), (DataType::Float as i32, 0));
        }
    }
}

/// Every file of exports of several models in every form.
fn for_each_file(check: impl Fn(&str, &OnnxFile)) {
    for model in ["mlm", "nmt", "jetmoe/sharded", "variants/v_shared_dec_only", "variants/v_untied"] {
        let checkpoint = Checkpoint::open(&data(model), None).unwrap();
        for form in [Form::Fused, Form::Function, Form::Standard] {
            let folder = tempfile::tempdir().unwrap();
            let graph = Options { form, ..ExportOptions::default().graph };
            let options = ExportOptions { graph, ..ExportOptions::default() };
            export(&checkpoint, folder.path(), &options).unwrap();
            for file in fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()) {
                if file.extension().is_none_or(|extension| extension != "onnx") {
                    continue;
                }
                check(&format!("{model} {form:?}"), &read_model(&file).unwrap());
            }
        }
    }
}

#[test]
fn tensors_of_a_checkpoint_stand_once_in_a_file() {
    for_each_file(|what, file| {
        let mut seen = HashSet::new();
        for tensor in &file.graph().unwrap().initializer {
            let stored = tensor.name.split('/').next().unwrap();
            assert!(tensor.name.starts_with("constant") || seen.insert(stored), "{what}: {stored}");
        }
    });
}

/// ONNX Runtime adds in a race where a node scatters with a sum.
#[test]
fn nothing_is_summed_by_scattering() {
    for_each_file(|what, file| {
        let bodies = file.functions().iter().flat_map(|function| &function.node);
        for node in file.graph().unwrap().node.iter().chain(bodies) {
            let sums = node.attribute.iter().any(|attribute| attribute.name == "reduction");
            assert!(!(node.op_type.starts_with("Scatter") && sums), "{what}: {}", node.name);
        }
    });
}
