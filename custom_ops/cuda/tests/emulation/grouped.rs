//! Regimes that list the rows of each expert.

use moa_cuda::Element;
use moa_cuda::plan::Regime;
use moa_schema::SelfAttentionDims;

use crate::attention::Case;
use crate::support::Random;

/// More tokens than are computed densely, with every kind of routing.
#[test]
fn attention_in_groups() {
    let shapes = [
        (2, 140, 0, 4, 2, Regime::Grouped),
        (1, 261, 20, 33, 17, Regime::Grouped),
        (3, 90, 0, 7, 2, Regime::GroupedReduce),
        (1, 300, 0, 40, 1, Regime::GroupedReduce),
        (1, 257, 3, 6, 6, Regime::Dense),
    ];
    for (index, (batch, tokens, past, experts, top_k, regime)) in shapes.into_iter().enumerate() {
        for element in Element::ALL {
            for multiprocessors in [1, 132] {
                let mut random = Random(index as u64 + 10 * u64::from(multiprocessors == 1));
                let head = random.pick(&[8, 16, 24]);
                let dims = SelfAttentionDims { batch, tokens, past, width: 24, experts, top_k, kv_heads: 1, head };
                let mut case = Case::random(&mut random, dims, element, false);
                case.device.multiprocessors = multiprocessors;
                println!("{dims:?} {element:?} {:?} {:?}", case.device, case.attributes);
                assert_eq!(case.check(), regime);
            }
        }
    }
}
