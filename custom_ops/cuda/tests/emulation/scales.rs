//! Factors on scores that are not above 0: no score is largest where its product is, and masked ones stay out.

use moa_cuda::{Element, Options};
use moa_schema::SelfAttentionDims;

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
