//! Exports that store or compute in other floats than f32, or store integers.

use moa_export::{
    backend::{self, OrtOptions},
    export::export,
    onnx::proto::ModelProto,
    parity::{VerifyOptions, verify},
};
use moa_graphs::{Form, Precision};
use prost::{Message, bytes::Bytes};

use super::{check, checkpoint, differing_constants, seen_in_numbers, stored_as, tensor};

#[test]
fn reduced_precision_passes_where_the_backend_has_the_types() {
    let all = [Precision::Int8, Precision::Int4, Precision::Fp16, Precision::Bf16].as_slice();
    for (folder, forms, precisions) in [
        ("variants/v_ffd_moe", &Form::ALL[..], all),
        ("jetmoe/sharded", &Form::ALL[..1], &all[..3]),
        ("jetmoe/sharded", &Form::ALL[1..], &all[..2]),
        ("molm/mlp", &Form::ALL[..], all),
        ("mlm", &Form::ALL[..1], &all[..2]),
    ] {
        for form in forms {
            for precision in precisions.iter().copied() {
                let directory = tempfile::tempdir().unwrap();
                let out = directory.path().join("out");
                export(&checkpoint(folder), &out, &stored_as(*form, precision)).unwrap();
                let result = check(&out, folder);
                assert!(result.passed(), "{folder} {form:?} {precision:?}: {result:?}");
                assert_eq!(result.dtype, precision.as_str());
                for report in &result.backends {
                    let unknown = match (report.backend.as_str(), precision) {
                        ("tract", Precision::Bf16) => Some("bfloat16"),
                        ("tract", Precision::Int4) => Some("int4"),
                        _ => None,
                    };
                    let no_operator = report.backend != "ort" && *form == Form::Fused;
                    let is_skipped = no_operator || unknown.is_some();
                    assert_eq!(report.skipped.is_some(), is_skipped, "{}: {report:?}", report.backend);
                    let why = report.skipped.as_ref().map_or("", |skip| skip.why.as_str());
                    assert!(no_operator || unknown.is_none_or(|kind| why.contains(kind)), "{why}");
                }
            }
        }
    }
}

/// Both 4-bit integers of a byte with the other sign; -8 has none, and stays.
fn negated_halves(byte: u8) -> u8 {
    (byte & 0xf).wrapping_neg() & 0xf | (byte & 0xf0).wrapping_neg()
}

/// The tolerances of fewer bytes a number still tell right from wrong.
#[test]
fn a_changed_expert_is_seen_in_numbers_of_reduced_precision() {
    for precision in [Precision::Fp16, Precision::Bf16, Precision::Int8, Precision::Int4] {
        let part = precision.integers().map_or(String::new(), |integers| format!("/{integers}"));
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        export(&checkpoint("jetmoe/bf16"), &out, &stored_as(Form::Function, precision)).unwrap();
        let path = out.join("model.onnx");
        let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
        let experts = tensor(&mut model, &format!("layers.0.mlp.output_linear.weight/transposed.021{part}"));
        let mut values = experts.raw_data.as_ref().unwrap().to_vec();
        // The sign of every weight of the first expert.
        let first = values.len() / usize::try_from(experts.dims[0]).unwrap();
        match precision {
            Precision::Int8 => values[..first].iter_mut().for_each(|byte| *byte = byte.wrapping_neg()),
            Precision::Int4 => values[..first].iter_mut().for_each(|byte| *byte = negated_halves(*byte)),
            _ => values[..first].iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80),
        }
        experts.raw_data = Some(Bytes::from(values));
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let result = check(&out, "jetmoe/bf16");
        assert_eq!(differing_constants(&result), 1);
        assert!(seen_in_numbers(&result), "{precision:?}");
    }
}

/// Cases in which routers meet near-ties, which the precision of the first layer decides.
#[test]
fn half_precision_is_the_same_with_and_without_routing() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint("mlm"), &out, &stored_as(Form::Function, Precision::Fp16)).unwrap();
    let backends = [backend::ort(OrtOptions::default()).unwrap()];
    let options = VerifyOptions { seed: 7, ..VerifyOptions::default() };
    let result = verify(&out, &checkpoint("mlm"), &backends, options).unwrap();
    assert!(result.passed(), "{:?}", result.backends);
    assert_eq!(result.backends[0].graphs[0].altered, None);
}
