//! A call allocates nothing once its scratch memory has grown.
#![allow(unsafe_code, clippy::expect_used, clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use moa_kernels::{Prepared, SelfAttentionInputs, SelfAttentionOutputs, Sequential, Weight};
use moa_schema::{GateMode, SelfAttentionAttributes, SelfAttentionDims};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn repeated_calls_allocate_nothing() {
    for (tokens, past) in [(40, 0), (1, 20)] {
        let dims = SelfAttentionDims { batch: 2, tokens, past, width: 24, experts: 5, top_k: 2, kv_heads: 2, head: 16 };
        let attributes = SelfAttentionAttributes {
            top_k: 2,
            kv_num_heads: 2,
            causal: true,
            scale: 0.25,
            gate_mode: GateMode::SoftmaxTopk,
            skip_padded_queries: true,
        };
        let ramp = |len: usize| (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect::<Vec<f32>>();
        let (hidden_states, mask) = (ramp(2 * tokens * 24), vec![1; 2 * (past + tokens)]);
        let (router, query, kv, output) = (ramp(24 * 5), ramp(5 * 24 * 32), ramp(24 * 64), ramp(5 * 32 * 24));
        let cache = ramp(2 * 2 * past * 16);
        let inputs = SelfAttentionInputs {
            hidden_states: &hidden_states,
            attention_mask: &mask,
            router_weight: &router,
            query_weight: (&query).into(),
            kv_weight: (&kv).into(),
            output_weight: (&output).into(),
            output_bias: None,
            capacity: None,
            past_key: Some(&cache),
            past_value: Some(&cache),
            cos_cache: None,
            sin_cache: None,
            position_ids: None,
        };
        let mut prepared = Prepared::default();
        prepared.pack(Weight::Query, [5, 24, 32], 2, &query).unwrap();
        let mut result = vec![0.0; 2 * tokens * 24];
        let mut call = || {
            let mut outputs = SelfAttentionOutputs {
                output: &mut result,
                present_key: None,
                present_value: None,
                topk_indices: None,
                topk_weights: None,
            };
            prepared.self_attention(&dims, &attributes, &inputs, &mut outputs, &Sequential).unwrap();
        };
        call();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..5).for_each(|_| call());
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "{tokens} tokens");
    }
}
