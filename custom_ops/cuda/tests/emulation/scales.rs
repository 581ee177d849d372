//! Factors on scores that are not above 0: no score is largest where its product is, and masked ones stay out. Values
//! near either end of what binary16 holds.

use moa_cuda::{Element, Options};
use moa_schema::{GateMode, SelfAttentionDims};

use crate::attention::Case;
use crate::devices::device_of;
use crate::support::Random;

#[test]
fn scales_of_every_sign() {
    let kinds = [(Element::F32, (8, 0)), (Element::F16, (7, 0)), (Element::F16, (8, 0)), (Element::Bf16, (9, 0))];
    for (index, (element, compute_capability)) in kinds.into_iter().enumerate() {
        for (scale, tokens) in [(-0.3, 45), (0.0, 45), (-0.3, 3)] {
            let mut random = Random(index as u64);
            let dims = SelfAttentionDims {
                batch: 2,
                tokens,
                past: 40,
                width: 16,
                experts: 3,
                top_k: 2,
                kv_heads: 1,
                head: 24,
            };
            let mut case = Case::random(&mut random, dims, element, false);
            case.device = device_of(compute_capability, 1);
            case.options = Options { tf32: false, wgmma: compute_capability == (9, 0) };
            case.attributes.causal = true;
            case.attributes.scale = scale;
            case.check();
        }
    }
}

/// Values near either end of the range of binary16, among many experts: gates of 1 leave large ones finite, and small
/// gates leave small ones as precise as others.
#[test]
fn large_and_small_values() {
    let mut random = Random(5);
    let ends = [(GateMode::TopkSoftmax, 1, 8192.0), (GateMode::SoftmaxTopk, 2, f32::powi(2.0, -7))];
    for (gate_mode, top_k, size) in ends {
        for tokens in [3, 9] {
            let dims =
                SelfAttentionDims { batch: 1, tokens, past: 7, width: 32, experts: 40, top_k, kv_heads: 1, head: 32 };
            let mut case = Case::random(&mut random, dims, Element::F16, true);
            case.attributes.gate_mode = gate_mode;
            case.past_value = random.values(Element::F16, 7 * 32, size);
            case.output_weight = random.values(Element::F16, 40 * 32 * 32, 0.5 / size);
            case.output_bias = None;
            case.check();
        }
    }
}
