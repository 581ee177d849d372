//! Bytes that a node keeps between calls; run with `--ignored --nocapture`.

use moa_kernels::{Instructions, Sequential};
use moa_schema::{GateMode, SelfAttentionDims};

use crate::prepared::pack;
use crate::self_attention::Case;
use crate::support::Random;

#[test]
#[ignore = "a measurement"]
fn bytes_of_the_measured_layers() {
    for (width, top_k, experts, kv_heads, head, batch, tokens, past) in [
        (512, 8, 8, 1, 128, 1, 128, 0),
        (512, 16, 32, 1, 256, 1, 128, 0),
        (512, 16, 32, 1, 256, 8, 128, 0),
        (512, 8, 8, 1, 128, 1, 2048, 0),
        (512, 8, 8, 1, 128, 1, 10, 0),
        (512, 8, 32, 1, 128, 1, 1, 128),
        (2048, 2, 8, 16, 128, 1, 1, 512),
    ] {
        let dims = SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head };
        let mut case = Case::random(&mut Random(1), dims);
        case.attributes.gate_mode = GateMode::SoftmaxTopk;
        let prepared = pack(&case, Instructions::default());
        case.compute_with(&prepared, &Sequential);
        let weights = width * (experts + 2 * kv_heads * head * (1 + experts));
        println!(
            "d {width} k {top_k} E {experts} G {kv_heads} D {head} {batch}x{tokens} past {past}: \
             weights {} bytes, packed {}, scratch {}",
            4 * weights,
            prepared.weight_bytes(),
            prepared.scratch_bytes()
        );
    }
}
