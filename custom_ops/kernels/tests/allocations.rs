//! A call allocates nothing once its scratch memory has grown, and what that holds is counted.
#![allow(unsafe_code, clippy::expect_used, clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Debug;

use half::bf16;
use moa_kernels::{
    Int4, LmHeadInputs, Prepared, Scalar, SelfAttentionInputs, SelfAttentionOutputs, Sequential, Weight, WeightData,
};
use moa_schema::{
    AccuracyLevel, AttentionMode, BLOCK, GateMode, LmHeadDims, SelfAttentionAttributes, SelfAttentionDims,
};

struct Counting;

thread_local! {
    /// Those of this thread: the test harness has threads of its own.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    /// Bytes that are allocated.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        HELD.set(HELD.get().wrapping_add(layout.size()));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get().wrapping_sub(layout.size()));
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn repeated_calls_allocate_nothing() {
    allocate_nothing::<f32>();
    allocate_nothing::<half::f16>();
}

/// Batch, tokens, past, width, slots, key/value heads and head: one token, few, many, and rows that are moved apart,
/// among others.
const SHAPES: [[usize; 7]; 7] = [
    [2, 40, 0, 24, 2, 2, 16],
    [2, 1, 20, 24, 2, 2, 16],
    [1, 1, 50, 256, 4, 1, 128],
    [1, 9, 30, 64, 4, 1, 32],
    [2, 150, 30, 70, 2, 2, 64],
    [40, 35, 0, 16, 5, 1, 160],
    [1, 33, 0, 1024, 2, 2, 16],
];

/// Width of what the router reads.
const READ: usize = 1024;

fn ramp(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01).collect()
}

fn stored<T: Scalar>(values: Vec<f32>) -> Vec<T> {
    let mut stored = vec![T::default(); values.len()];
    T::round(&values, &mut stored);
    stored
}

fn allocate_nothing<T: Scalar>() {
    for mode in AttentionMode::ALL {
        allocate_nothing_in::<T>(mode);
    }
}

fn allocate_nothing_in<T: Scalar>(attention_mode: AttentionMode) {
    for shape in SHAPES {
        with_call::<T>(attention_mode, shape, |dims, query, call| {
            let &SelfAttentionDims { width, kv_heads, head, .. } = dims;
            let mut prepared = Prepared::default();
            prepared.pack(Weight::Query, [5, width, kv_heads * head], kv_heads, query).unwrap();
            assert_allocates_nothing(&mut || call(&prepared), dims);
        });
    }
}

/// Gives `test` a call of one of [`SHAPES`], and its weights of queries.
fn with_call<T: Scalar>(
    attention_mode: AttentionMode,
    [batch, tokens, past, width, top_k, kv_heads, head]: [usize; 7],
    test: impl FnOnce(&SelfAttentionDims, &[f32], &mut dyn FnMut(&Prepared)),
) {
    let columns = kv_heads * head;
    let dims = SelfAttentionDims { batch, tokens, past, width, experts: 5, top_k, kv_heads, head };
    let attributes = SelfAttentionAttributes {
        top_k,
        kv_num_heads: kv_heads,
        causal: true,
        scale: 0.25,
        gate_mode: GateMode::SoftmaxTopk,
        skip_padded_queries: true,
        attention_mode,
    };
    let (hidden_states, mask) = (stored(ramp(batch * tokens * width)), vec![1; batch * (past + tokens)]);
    let read = ramp(batch * tokens * READ);
    let (router, query, kv, output) =
        (ramp(READ * 5), ramp(5 * width * columns), ramp(width * 2 * columns), ramp(5 * columns * width));
    let cache = stored(ramp(batch * kv_heads * past * head));
    let mut present = [(); 2].map(|()| stored(vec![0.0; batch * kv_heads * (past + tokens) * head]));
    let inputs = SelfAttentionInputs {
        hidden_states: &hidden_states,
        attention_mask: &mask,
        router_weight: &router,
        query_weight: (&query).into(),
        kv_weight: Some((&kv).into()),
        output_weight: (&output).into(),
        output_bias: None,
        capacity: None,
        past_key: Some(&cache),
        past_value: Some(&cache),
        cos_cache: None,
        sin_cache: None,
        position_ids: None,
        router_input: Some(&read),
    };
    let mut result = vec![T::default(); batch * tokens * width];
    test(&dims, &query, &mut |prepared| {
        let [key, value] = &mut present;
        let mut outputs = SelfAttentionOutputs {
            output: &mut result,
            present_key: Some(key),
            present_value: Some(value),
            topk_indices: None,
            topk_weights: None,
        };
        prepared.self_attention(&dims, &attributes, &inputs, &mut outputs, &Sequential).unwrap();
    });
}

/// Beside what is counted a node holds as much behind every call.
#[test]
fn scratch_is_counted_to_the_byte() {
    for mode in AttentionMode::ALL {
        let uncounted = || {
            let prepared = Prepared::default();
            SHAPES.map(|shape| {
                with_call::<half::f16>(mode, shape, |_, _, call| call(&prepared));
                HELD.get() - prepared.scratch_bytes()
            })
        };
        uncounted();
        let found = uncounted();
        assert_eq!(found, [found[0]; SHAPES.len()], "{mode:?}");
    }
}

/// Where it has been called before.
fn assert_allocates_nothing(call: &mut dyn FnMut(), dims: &dyn Debug) {
    call();
    let before = ALLOCATIONS.get();
    (0..5).for_each(|_| call());
    assert_eq!(ALLOCATIONS.get(), before, "{dims:?}");
}

#[test]
fn repeated_heads_allocate_nothing() {
    heads_allocate_nothing::<f32>();
    heads_allocate_nothing::<half::f16>();
}

/// One token, several tiles of rows and of columns, and rows that are moved apart; packed before or by each call.
fn heads_allocate_nothing<T: Scalar>() {
    for [batch, tokens, width, vocabulary] in [[1, 1, 64, 300], [2, 70, 45, 300], [1, 33, 1024, 33]] {
        let dims = LmHeadDims { batch, tokens, width, vocabulary };
        let (hidden_states, values) = (stored::<T>(ramp(batch * tokens * width)), ramp(width * vocabulary));
        let integers: Vec<i8> = values.iter().map(|value| (value * 100.0) as i8).collect();
        let nibbles: Vec<u8> = (0..integers.len().div_ceil(2)).map(|i| (i % 251) as u8).collect();
        let (scales, blocks) = (ramp(vocabulary), vec![bf16::ONE; width.div_ceil(BLOCK) * vocabulary]);
        for weights in [
            WeightData::F32(&values),
            WeightData::I8 { values: &integers, scales: &scales },
            WeightData::I4(Int4 { values: &nibbles, scales: &blocks }),
        ] {
            let given = LmHeadInputs { hidden_states: &hidden_states, output_weight: weights };
            let mut logits = vec![T::default(); batch * tokens * vocabulary];
            for (level, is_packed) in AccuracyLevel::ALL.into_iter().flat_map(|level| [(level, true), (level, false)]) {
                let mut prepared = Prepared::default().with_accuracy(level);
                if is_packed {
                    prepared.pack(Weight::Output, [1, width, vocabulary], 1, weights).unwrap();
                }
                let mut call = || prepared.lm_head(&dims, &given, &mut logits, &Sequential).unwrap();
                assert_allocates_nothing(&mut call, &dims);
            }
        }
    }
}
