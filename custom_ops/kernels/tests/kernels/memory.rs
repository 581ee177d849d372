//! Bytes that a node keeps between calls.

use moa_kernels::{Instructions, Prepared, Sequential};
use moa_schema::{GateMode, SelfAttentionDims};

use crate::prepared::pack;
use crate::self_attention::Case;
use crate::support::Random;

/// Largest share by which packing may exceed the weights themselves, and what is granted to small ones.
const PADDING_SHARE: usize = 50;
const PADDING_BYTES: usize = 64 << 10;

#[test]
fn packed_weights_and_scratch_stay_within_their_bounds() {
    for (width, top_k, experts, kv_heads, head, tokens, past, scratch) in [
        (512, 8, 8, 1, 128, 128, 0, 2 << 20),
        (512, 8, 8, 1, 128, 10, 0, 256 << 10),
        (512, 8, 32, 1, 128, 1, 128, 64 << 10),
        (512, 4, 8, 4, 64, 1, 128, 64 << 10),
    ] {
        let dims = SelfAttentionDims { batch: 1, tokens, past, width, experts, top_k, kv_heads, head };
        let mut case = Case::random(&mut Random(1), dims);
        case.attributes.gate_mode = GateMode::SoftmaxTopk;
        let prepared = pack(&case, Instructions::default());
        case.compute_with(&prepared, &Sequential);
        let weights = 4 * width * (experts + 2 * kv_heads * head * (1 + experts));
        let packed = prepared.weight_bytes();
        assert!(packed <= weights + weights / PADDING_SHARE + PADDING_BYTES, "{dims:?}: {packed} beside {weights}");
        let kept = prepared.scratch_bytes();
        assert!(kept <= scratch, "{dims:?}: {kept} bytes of scratch");
    }
}

/// A small call behind a large one frees nothing.
#[test]
fn scratch_is_counted_as_it_is_held() {
    let call = |tokens: usize, prepared: &Prepared| {
        let dims =
            SelfAttentionDims { batch: 1, tokens, past: 0, width: 64, experts: 8, top_k: 4, kv_heads: 1, head: 32 };
        Case::random(&mut Random(1), dims).compute_with(prepared, &Sequential);
        prepared.scratch_bytes()
    };
    let prepared = Prepared::new(Instructions::default());
    let large = call(400, &prepared);
    for tokens in [399, 128, 10, 1] {
        let held = call(tokens, &prepared);
        assert!(held >= large, "{held} bytes after {tokens} tokens, {large} before");
    }
    assert_eq!(call(400, &prepared), call(400, &prepared));
}
