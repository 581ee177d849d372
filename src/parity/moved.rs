//! Copies of graphs whose weights are moved by what rounding may do to them.

use std::collections::BTreeSet;

use half::{bf16, f16};
use moa_schema::AccuracyLevel;
use prost::bytes::Bytes;

use crate::{
    onnx::{
        OnnxFile, ReadError,
        proto::{
            GraphProto, NodeProto, TensorProto,
            tensor_proto::{DataLocation, DataType},
        },
        read::{accuracy_of, for_each_node, operator_of},
    },
    random::Random,
};

/// Most bytes of weights that are moved; the small ones come first, so that every norm and router is.
const MOST_MOVED: i64 = 512 << 20;

/// Unit in the last place of 1, and the largest finite number, of f32.
const SINGLE: [f32; 2] = [f32::EPSILON, f32::MAX];
/// The same of f16.
const HALF: [f32; 2] = [f16::EPSILON.to_f32_const(), f16::MAX.to_f32_const()];
/// The same of bf16, whose unit is also about that of int8 at the largest of a block of factors.
const BRAIN: [f32; 2] = [bf16::EPSILON.to_f32_const(), bf16::MAX.to_f32_const()];

/// `value` moved up or down by the share `epsilon`, where that is at most `most`.
fn step(value: f32, [epsilon, most]: [f32; 2], random: &mut Random) -> f32 {
    let moved = value * (1.0 + random.unit().signum() * epsilon);
    if moved.abs() <= most { moved } else { value }
}

/// `file` with the weights of f32 and f16 moved by one unit in the last place, and [`beside_rounded_factors`] by one of
/// bf16.
pub(super) fn moved(file: &OnnxFile) -> Result<OnnxFile, ReadError> {
    let mut random = Random::new(1);
    let mut model = file.model().clone();
    let mut rounded = model.graph.as_ref().map(beside_rounded_factors).unwrap_or_default();
    if let Some(graph) = &mut model.graph {
        rounded.extend(with_own_matrices(graph, &rounded));
    }
    let mut weights: Vec<_> = model.graph.iter_mut().flat_map(|graph| &mut graph.initializer).collect();
    let size = |weight: &TensorProto| weight.dims.iter().product::<i64>();
    let bytes = |weight: &TensorProto| size(weight) * if weight.data_type == DataType::Float as i32 { 4 } else { 2 };
    // Single values are constants of the equations, such as an exponent or an epsilon.
    weights.retain(|weight| is_moved(weight, &rounded) && size(weight) > 1);
    weights.sort_by_key(|weight| size(weight));
    let mut total = 0;
    for weight in weights {
        total += bytes(weight);
        if total > MOST_MOVED {
            break;
        }
        let moved = moved_values(weight.data_type, &file.values(weight)?, rounded.contains(&weight.name), &mut random);
        weight.raw_data = Some(Bytes::from(moved));
        weight.float_data.clear();
        weight.int32_data.clear();
        weight.external_data.clear();
        weight.data_location = DataLocation::Default as i32;
    }
    file.with_model(model)
}

/// Gives each matrix of `rounded` that a node turns an initializer of its own, since its other readers round nothing of
/// it, and names these.
fn with_own_matrices(graph: &mut GraphProto, rounded: &BTreeSet<String>) -> Vec<String> {
    let mut own: Vec<String> = Vec::new();
    let turns = |node: &&mut NodeProto| node.op_type == "Transpose" && rounded.contains(&node.output[0]);
    for node in graph.node.iter_mut().filter(turns) {
        let Some(matrix) = graph.initializer.iter().find(|weight| weight.name == node.input[0]) else { continue };
        let copy = TensorProto { name: format!("{}/moved", matrix.name), ..matrix.clone() };
        node.input[0].clone_from(&copy.name);
        own.push(copy.name.clone());
        graph.initializer.push(copy);
    }
    own
}

fn is_moved(weight: &TensorProto, rounded: &BTreeSet<String>) -> bool {
    let kinds = [DataType::Float, DataType::Float16].map(|kind| kind as i32);
    kinds.contains(&weight.data_type) || weight.data_type == DataType::Bfloat16 as i32 && rounded.contains(&weight.name)
}

/// The values of a weight of f32, f16 or bf16, each moved.
fn moved_values(kind: i32, bytes: &[u8], is_rounded: bool, random: &mut Random) -> Vec<u8> {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    let share = |own: [f32; 2]| if is_rounded { [BRAIN[0], own[1]] } else { own };
    if kind == DataType::Float as i32 {
        let values = bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value));
        return values.flat_map(|value| step(value, share(SINGLE), random).to_le_bytes()).collect();
    }
    if kind == DataType::Bfloat16 as i32 {
        let values = pairs().map(|value| bf16::from_le_bytes(*value).to_f32());
        return values.flat_map(|value| bf16::from_f32(step(value, BRAIN, random)).to_le_bytes()).collect();
    }
    let values = pairs().map(|value| f16::from_le_bytes(*value).to_f32());
    values.flat_map(|value| f16::from_f32(step(value, share(HALF), random)).to_le_bytes()).collect()
}

/// Names of the matrices that a kernel may multiply with rounded factors; of their scales where they are of integers.
fn beside_rounded_factors(graph: &GraphProto) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for_each_node(&graph.node, &mut |node: &NodeProto| {
        let (Some(operator), level) = (operator_of(node), accuracy_of(node)) else { return };
        for places in operator.matrices() {
            let [matrix, scale] = places.map(|place| node.input.get(place).filter(|name| !name.is_empty()));
            match level {
                AccuracyLevel::Activations => {}
                AccuracyLevel::Bf16 if scale.is_some() => {}
                AccuracyLevel::Bf16 => names.extend(matrix.cloned()),
                AccuracyLevel::Int8 => names.extend(scale.cloned()),
            }
        }
    });
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::AttributeProto;

    #[test]
    fn a_weight_moves_by_its_last_place_and_stays_finite() {
        let random = &mut Random::new(3);
        let moved: Vec<f32> = (0..64).map(|_| step(2.0, SINGLE, random) - 2.0).collect();
        assert!(moved.iter().all(|change| change.abs() == 2.0 * f32::EPSILON), "{moved:?}");
        assert!(moved.iter().any(|change| *change > 0.0) && moved.iter().any(|change| *change < 0.0));
        let largest = f16::MAX.to_f32();
        assert!((0..64).all(|_| step(largest, HALF, random) <= largest && step(f32::MAX, HALF, random) == f32::MAX));
    }

    /// What else reads such a matrix, reads it as it was.
    #[test]
    fn a_matrix_that_is_turned_moves_alone() {
        let node = |domain: &str, kind: &str, input: &[&str], output: &str| NodeProto {
            domain: domain.into(),
            op_type: kind.into(),
            input: input.iter().map(|name| (*name).to_owned()).collect(),
            output: vec![output.into()],
            ..NodeProto::default()
        };
        let mut head = node(moa_schema::DOMAIN, "LMHead", &["x", "turned"], "logits");
        head.attribute.push(AttributeProto::int("accuracy_level", 3));
        let table = TensorProto { name: "table".into(), dims: vec![3, 2], ..TensorProto::default() };
        let mut graph = GraphProto {
            node: vec![
                node("", "Gather", &["table", "ids"], "x"),
                node("", "Transpose", &["table"], "turned"),
                node("", "Transpose", &["table"], "other"),
                head,
            ],
            initializer: vec![table.clone()],
            ..GraphProto::default()
        };
        let rounded = beside_rounded_factors(&graph);
        assert_eq!(with_own_matrices(&mut graph, &rounded), ["table/moved"]);
        let read = graph.node.iter().map(|node| node.input[0].as_str()).collect::<Vec<_>>();
        assert_eq!(read, ["table", "table/moved", "table", "x"]);
        assert_eq!(graph.initializer, [table.clone(), TensorProto { name: "table/moved".into(), ..table }]);
    }

    /// The scales where matrices are of integers; matrices of floats where both factors may be rounded.
    #[test]
    fn weights_beside_factors_that_a_kernel_may_round_move_by_a_unit_of_bf16() {
        let names_of = |operator: moa_schema::Operator, level: i64, is_of_integers: bool| {
            let named = operator.inputs.iter().map(|input| input.name.to_owned());
            let given = |name: String| if is_of_integers || !name.ends_with("_scale") { name } else { String::new() };
            let node = NodeProto {
                domain: moa_schema::DOMAIN.into(),
                op_type: operator.name.into(),
                input: named.map(given).collect(),
                attribute: vec![AttributeProto::int("accuracy_level", level)],
                ..NodeProto::default()
            };
            let names = beside_rounded_factors(&GraphProto { node: vec![node], ..GraphProto::default() });
            names.into_iter().collect::<Vec<_>>()
        };
        let names = |level, is_of_integers| names_of(moa_schema::FEED_FORWARD, level, is_of_integers);
        assert!([names(0, true), names(0, false), names(3, true), names(4, false)].iter().all(Vec::is_empty));
        assert_eq!(names(4, true), ["input_scale", "output_scale"]);
        assert_eq!(names(3, false), ["input_weight", "output_weight"]);
        let of_head = [0, 3, 4].map(|level| names_of(moa_schema::LM_HEAD, level, true));
        assert_eq!(of_head, [vec![], vec![], vec!["output_scale".to_owned()]]);
        assert_eq!(names_of(moa_schema::LM_HEAD, 3, false), ["output_weight"]);
        let random = &mut Random::new(3);
        let unit = bf16::EPSILON.to_f32();
        for (is_rounded, share) in [(true, unit), (false, f32::EPSILON)] {
            let moved = moved_values(DataType::Float as i32, &1f32.to_le_bytes(), is_rounded, random);
            assert_eq!((f32::from_le_bytes(*moved.first_chunk().unwrap()) - 1.0).abs(), share);
        }
        let moved = moved_values(DataType::Bfloat16 as i32, &bf16::ONE.to_le_bytes(), true, random);
        assert_eq!((bf16::from_le_bytes(*moved.first_chunk().unwrap()).to_f32() - 1.0).abs(), unit);
    }
}
