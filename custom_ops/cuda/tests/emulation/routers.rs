//! Routers; that of many tokens is a launch of its own.

use moa_cuda::{Device, Element, Fault};
use moa_schema::{GateMode, SelfAttentionDims};

use crate::attention::Case;
use crate::emulator::run;
use crate::support::{Random, decode, round};

/// What a case varies.
#[derive(Debug, Clone, Copy)]
struct Shape {
    experts: usize,
    top_k: usize,
    tokens: usize,
    width: usize,
    multiprocessors: u32,
    /// Bytes behind an aligned address.
    offset: usize,
}

const fn shape([experts, top_k, tokens, width]: [usize; 4], multiprocessors: u32, offset: usize) -> Shape {
    Shape { experts, top_k, tokens, width, multiprocessors, offset }
}

/// Few keys, and heads so narrow that the router is most of the work.
fn case(shape: Shape, element: Element, mode: GateMode) -> Case {
    let Shape { experts, top_k, tokens, width, multiprocessors, offset } = shape;
    let mut random = Random(experts as u64);
    let dims = SelfAttentionDims { batch: 1, tokens, past: 5, width, experts, top_k, kv_heads: 1, head: 8 };
    let mut case = Case::random(&mut random, dims, element, true);
    case.device = Device { compute_capability: (8, 0), multiprocessors, shared_bytes_per_block: 166_912 };
    (case.offset, case.all_outputs) = (offset, true);
    case.attributes.gate_mode = mode;
    case.attributes.skip_padded_queries = top_k % 2 == 1;
    case.query_mask.iter_mut().enumerate().for_each(|(token, mask)| *mask = i32::from(token % 7 != 3));
    let first = &case.plan().launches[0];
    assert_eq!(first.kernel, "moa_route_tokens", "{shape:?}");
    assert_eq!(first.parameters.route_splits, if multiprocessors == 1 { 2 } else { 4 });
    case
}

/// Experts of one pass and of two, of each number of columns; widths of whole chunks and not, of several slices of the
/// weights and of less than a chunk; tokens that do not fill a block; addresses that allow no vectors.
#[test]
fn routers_of_many_tokens() {
    let shapes = [
        shape([5, 1, 1027, 72], 1, 0),
        shape([8, 7, 1040, 136], 40, 0),
        shape([8, 2, 1024, 2184], 40, 0),
        shape([8, 3, 1030, 72], 40, 8),
        shape([12, 3, 1031, 8], 1, 0),
        shape([16, 6, 1056, 64], 40, 0),
        shape([32, 16, 1152, 128], 1, 0),
        shape([32, 7, 1025, 584], 40, 0),
        shape([33, 2, 1024, 40], 40, 0),
        shape([40, 5, 1100, 136], 1, 0),
        shape([64, 4, 1033, 584], 40, 0),
        shape([64, 33, 1024, 24], 1, 8),
    ];
    for (index, shape) in shapes.into_iter().enumerate() {
        let element = [Element::F16, Element::Bf16][index % 2];
        case(shape, element, GateMode::ALL[index % 3]).check();
    }
}

/// Equal logits take the lower expert.
#[test]
fn ties_take_the_lower_expert() {
    for experts in [7, 24, 64] {
        let mut case = case(shape([experts, 4, 1024, 16], 40, 0), Element::Bf16, GateMode::SoftmaxTopk);
        case.router_weight.chunks_mut(experts).for_each(|row| {
            for expert in 0..experts {
                row[expert] = row[expert % 5];
            }
        });
        case.check();
        case.router_weight.fill(-0.25);
        let results = run(&case.plan(), &case.tensors());
        case.compare(&results);
        let indices: Vec<u8> = (0..1024).flat_map(|_| (0..4i64).flat_map(i64::to_le_bytes)).collect();
        assert_eq!(results.outputs[1].as_ref(), Some(&indices));
    }
}

/// Where the softmax is chosen from, logits so small that it is 0 are equal; else the larger one is chosen.
#[test]
fn what_the_softmax_cannot_tell_apart_is_equal() {
    for (experts, mode, expected) in [
        (6, GateMode::SoftmaxTopk, [0, 1]),
        (24, GateMode::SoftmaxTopkRenorm, [0, 1]),
        (6, GateMode::TopkSoftmax, [0, 2]),
        (24, GateMode::TopkSoftmax, [0, 2]),
    ] {
        let mut case = case(shape([experts, 2, 1024, 16], 40, 0), Element::Bf16, mode);
        case.hidden_states.fill(1.0);
        let logit = |expert: usize| [0.0, -400.0, -200.0].get(expert).copied().unwrap_or(-800.0);
        case.router_weight.iter_mut().enumerate().for_each(|(i, weight)| *weight = logit(i % experts) / 16.0);
        let results = run(&case.plan(), &case.tensors());
        let indices: Vec<u8> = (0..1024).flat_map(|_| expected.map(i64::to_le_bytes)).flatten().collect();
        assert_eq!(results.outputs[1].as_ref(), Some(&indices), "{experts} experts, {mode:?}");
    }
}

/// Tokens with a logit that is not finite become NaN; others, and masked ones, do not.
#[test]
fn logits_that_are_not_finite() {
    for (experts, top_k) in [(6, 3), (20, 2), (50, 5)] {
        let mut case = case(shape([experts, top_k, 1024, 16], 40, 0), Element::F16, GateMode::TopkSoftmax);
        for (token, row) in case.hidden_states.chunks_mut(16).enumerate() {
            row[3] = if token % 5 == 4 { 4.0 } else { 0.0 };
        }
        case.router_weight[3 * experts + experts - 1] = 3e38;
        let results = run(&case.plan(), &case.tensors());
        let output = decode(case.element, results.outputs[0].as_ref().unwrap());
        for (token, row) in output.chunks(16).enumerate() {
            let masked = case.attributes.skip_padded_queries && token % 7 == 3;
            let expected = token % 5 == 4 && !masked;
            assert!(row.iter().all(|value| value.is_nan() == expected), "token {token} of {experts} experts: {row:?}");
        }
        assert_eq!(results.status, Fault::RouterLogits as u32);
    }
}

/// Equal logits take the lower expert; up to 64 experts are ranked side by side, more are chosen one after the other.
#[test]
fn ties_of_few_tokens_take_the_lower_expert() {
    let mut random = Random(3);
    for (experts, top_k) in [(40, 35), (64, 5), (65, 5), (130, 3)] {
        let dims = SelfAttentionDims { batch: 1, tokens: 3, past: 0, width: 16, experts, top_k, kv_heads: 1, head: 16 };
        for mode in GateMode::ALL {
            let mut case = Case::random(&mut random, dims, Element::F16, false);
            case.attributes.gate_mode = mode;
            case.attributes.skip_padded_queries = false;
            case.all_outputs = true;
            case.compare(&run(&case.plan(), &case.tensors()));
            case.router_weight.fill(round(Element::F16, 0.25));
            let results = run(&case.plan(), &case.tensors());
            case.compare(&results);
            let indices: Vec<u8> = (0..3).flat_map(|_| (0..top_k as i64).flat_map(i64::to_le_bytes)).collect();
            assert_eq!(results.outputs[3].as_ref(), Some(&indices));
        }
    }
}
