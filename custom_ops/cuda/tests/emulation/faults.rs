//! What a call cannot refuse becomes NaN, in the rows that it concerns, and a bit of the status word.

use moa_cuda::{Element, Fault};
use moa_schema::SelfAttentionDims;

use crate::attention::{Case, Rotation};
use crate::emulator::run;
use crate::support::{Random, decode};

fn case(element: Element) -> Case {
    let mut random = Random(5);
    let dims =
        SelfAttentionDims { batch: 1, tokens: 5, past: 0, width: 16, experts: 4, top_k: 2, kv_heads: 1, head: 16 };
    let mut case = Case::random(&mut random, dims, element, false);
    case.key_mask.fill(1);
    case.attributes.causal = true;
    case.all_outputs = true;
    case.rotation = None;
    case
}

#[test]
fn a_logit_that_is_not_finite() {
    for element in Element::ALL {
        let mut case = case(element);
        for token in 0..5 {
            case.hidden_states[token * 16 + 3] = if token == 4 { 4.0 } else { 0.0 };
        }
        case.router_weight[3 * 4 + 2] = f32::MAX;
        let results = run(&case.plan(), &case.tensors());
        let output = decode(element, results.outputs[0].as_ref().unwrap());
        assert!(output[..4 * 16].iter().all(|value| value.is_finite()));
        assert!(output[4 * 16..].iter().all(|value| value.is_nan()));
        assert_eq!(results.status, Fault::RouterLogits as u32);
    }
}

#[test]
fn a_position_outside_the_caches() {
    for position in [-1, 7, i64::MAX] {
        let mut case = case(Element::F16);
        let position_ids = vec![0, 1, 2, 3, position];
        case.rotation = Some(Rotation { cos: vec![1.0; 7 * 8], sin: vec![0.0; 7 * 8], position_ids });
        let results = run(&case.plan(), &case.tensors());
        let output = decode(Element::F16, results.outputs[0].as_ref().unwrap());
        assert!(output[..4 * 16].iter().all(|value| value.is_finite()));
        assert!(output[4 * 16..].iter().all(|value| value.is_nan()));
        assert_eq!(results.status, Fault::Position as u32);
    }
}
