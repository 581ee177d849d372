//! Matrices of 8-bit integers.

use moa_export::{
    checkpoint::Checkpoint,
    export::export,
    metadata,
    onnx::proto::{ModelProto, tensor_proto::DataType},
    parity::{VerifyOptions, verify},
};
use moa_graphs::{Form, Precision};
use prost::Message;

use super::{backends, constant_layer, differing_constants, edit_values, seen_in_numbers, stored_as, tensor};

/// Weights of one layer that are no multiples of their scales, of self-attention and with a memory.
#[test]
fn layers_of_int8_pass_and_a_changed_scale_is_found() {
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
        for form in Form::ALL {
            let out = directory.path().join(format!("{cross}-{}", form.as_str()));
            export(&checkpoint, &out, &stored_as(form, Precision::Int8)).unwrap();
            let path = out.join("model.onnx");
            let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
            let stored = |kind: DataType| {
                let weights = &model.graph.as_ref().unwrap().initializer;
                weights.iter().filter(|weight| weight.data_type == kind as i32).count()
            };
            assert_eq!(stored(DataType::Int8), matrices, "{form:?}");
            let verified = || verify(&out, &checkpoint, &backends(), VerifyOptions::default()).unwrap();
            let sound = verified();
            assert!(sound.passed() && sound.dtype == "int8", "{form:?}: {sound:?}");
            let [cost] = sound.rounding_cost.as_slice() else { panic!("{:?}", sound.rounding_cost) };
            assert!(cost.runs > 0 && 10 * cost.same_experts > 9 * cost.decisions && cost.positions == 0, "{cost:?}");
            assert!((1e-5..0.1).contains(&cost.relative_difference), "{cost:?}");
            model.metadata_props.retain(|entry| entry.key != metadata::DTYPE);
            edit_values(tensor(&mut model, "experts.w/scale"), |values| values[3] *= 1.5);
            std::fs::write(&path, model.encode_to_vec()).unwrap();
            let faulty = verified();
            assert_eq!((faulty.dtype.as_str(), differing_constants(&faulty)), ("int8", 1), "{form:?}");
            assert!(seen_in_numbers(&faulty), "{form:?}");
        }
    }
}
