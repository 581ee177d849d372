//! Matrices of integers.

use moa_export::{
    backend::Backend,
    checkpoint::Checkpoint,
    export::export,
    metadata,
    onnx::proto::{ModelProto, TensorProto, tensor_proto::DataType},
    parity::{VerifyOptions, verify},
};
use moa_graphs::{Form, Precision};
use prost::{Message, bytes::Bytes};

use super::{backends, constant_layer, differing_constants, seen_in_numbers, stored_as, tensor};

/// The types of integers and of their scales.
const KINDS: [(Precision, [DataType; 2]); 2] =
    [(Precision::Int8, [DataType::Int8, DataType::Float]), (Precision::Int4, [DataType::Int4, DataType::Bfloat16])];

/// Turns the sign of the scale `index`: its highest bit.
fn turn_scale(scales: &mut TensorProto, precision: Precision, index: usize) {
    let bytes = precision.integers().unwrap().scales().bytes();
    edit_byte(scales, bytes * index + bytes - 1, 0x80);
}

fn edit_byte(tensor: &mut TensorProto, index: usize, mask: u8) {
    let mut bytes = tensor.raw_data.as_ref().unwrap().to_vec();
    bytes[index] ^= mask;
    tensor.raw_data = Some(Bytes::from(bytes));
}

/// Weights of one layer that are no multiples of their scales, of self-attention and with a memory.
#[test]
fn layers_of_integers_pass_and_changed_integers_and_scales_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("checkpoint");
    constant_layer(&folder, 0.0, |name, values| {
        let seed = name.len();
        values
            .iter_mut()
            .enumerate()
            .for_each(|(index, value)| *value = ((index * 37 + seed) % 101) as f32 / 997.0 - 0.05);
    });
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    for (cross, matrices) in [(false, 3), (true, 2)] {
        let config = config.replace('{', &format!("{{\"cross_attention\": {cross}, "));
        std::fs::write(folder.join("config.json"), config).unwrap();
        let checkpoint = Checkpoint::open(&folder, None).unwrap();
        for ((precision, kinds), form) in KINDS.into_iter().flat_map(|kind| Form::ALL.map(|form| (kind, form))) {
            let (case, name) = (format!("{cross} {precision:?} {form:?}"), precision.as_str());
            let out = directory.path().join(&case);
            export(&checkpoint, &out, &stored_as(form, precision)).unwrap();
            let path = out.join("model.onnx");
            let sound = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
            let weights = &sound.graph.as_ref().unwrap().initializer;
            for (kind, ending) in kinds.into_iter().zip([name, "scale"]) {
                let named = || weights.iter().filter(|weight| weight.name.ends_with(&format!("/{ending}")));
                assert_eq!(named().count(), matrices, "{case}: {ending}");
                assert!(named().all(|weight| weight.data_type == kind as i32), "{case}: {ending}");
            }
            let verified = |on: &[Box<dyn Backend>]| verify(&out, &checkpoint, on, &VerifyOptions::default()).unwrap();
            let result = verified(&backends());
            assert!(result.passed() && result.dtype.as_str() == name, "{case}: {result:?}");
            let [cost] = result.rounding_cost.as_slice() else { panic!("{:?}", result.rounding_cost) };
            assert!(cost.runs > 0 && 10 * cost.same_experts > 9 * cost.decisions && cost.positions == 0, "{cost:?}");
            let usual = if precision == Precision::Int4 { 1e-2..0.5 } else { 1e-5..0.1 };
            assert!(usual.contains(&cost.relative_difference), "{cost:?}");
            let faulty = |on: &[Box<dyn Backend>], fault: &dyn Fn(&mut ModelProto)| {
                let mut model = sound.clone();
                model.metadata_props.retain(|entry| entry.key != metadata::DTYPE);
                fault(&mut model);
                std::fs::write(&path, model.encode_to_vec()).unwrap();
                let result = verified(on);
                assert_eq!((result.dtype.as_str(), differing_constants(&result)), (name, 1), "{case}");
                result
            };
            let result = faulty(&backends(), &|model| turn_scale(tensor(model, "experts.w/scale"), precision, 3));
            assert!(seen_in_numbers(&result), "{case}");
            // The lowest bit of a byte: in int4, that of the earlier integer in it.
            faulty(&[], &|model| edit_byte(tensor(model, &format!("experts.w/{name}")), 130, 0x01));
        }
    }
}
