//! Caches with room for more tokens than they hold, given as past and present.

use half::f16;
use moa_kernels::{
    KernelError, Prepared, Scalar, SelfAttentionInputs, SelfAttentionOutputs, Sequential, ThreadPool, self_attention,
};
use moa_schema::SelfAttentionDims;

use crate::self_attention::{Case, only_token, random_dims};
use crate::support::{Random, Threads};

/// Bits of what stands in room that nobody has filled: a NaN.
const JUNK: f32 = f32::NAN;

/// Inputs of a case in `T`.
struct Stored<T> {
    hidden_states: Vec<T>,
    output_bias: Option<Vec<T>>,
    past: [Vec<T>; 2],
}

#[derive(Debug, PartialEq)]
struct Results<T> {
    output: Vec<T>,
    present: [Vec<T>; 2],
    topk_indices: Vec<i64>,
}

fn stored<T: Scalar>(values: &[f32]) -> Vec<T> {
    let mut stored = vec![T::default(); values.len()];
    T::round(values, &mut stored);
    stored
}

fn bits<T: Scalar>(values: &[T]) -> Vec<u32> {
    let mut wide = vec![0.0; values.len()];
    T::widen(values, &mut wide);
    crate::support::bits(&wide)
}

impl<T: Scalar> Stored<T> {
    fn of(case: &Case) -> Self {
        Self {
            hidden_states: stored(&case.hidden_states),
            output_bias: case.output_bias.as_ref().map(|bias| stored(bias)),
            past: [stored(&case.past_key), stored(&case.past_value)],
        }
    }

    fn inputs<'a>(&'a self, case: &'a Case) -> SelfAttentionInputs<'a, T> {
        let wide = case.inputs();
        SelfAttentionInputs {
            hidden_states: &self.hidden_states,
            attention_mask: wide.attention_mask,
            router_weight: wide.router_weight,
            query_weight: wide.query_weight,
            kv_weight: wide.kv_weight,
            output_weight: wide.output_weight,
            output_bias: self.output_bias.as_deref(),
            capacity: None,
            past_key: Some(&self.past[0]),
            past_value: Some(&self.past[1]),
            cos_cache: wide.cos_cache,
            sin_cache: wide.sin_cache,
            position_ids: wide.position_ids,
            router_input: wide.router_input,
        }
    }
}

/// Output and chosen experts.
fn call<T: Scalar>(
    case: &Case,
    inputs: &SelfAttentionInputs<'_, T>,
    [present_key, present_value]: [Option<&mut [T]>; 2],
    pool: &dyn ThreadPool,
) -> (Vec<T>, Vec<i64>) {
    let SelfAttentionDims { batch, tokens, width, top_k, .. } = case.dims;
    let mut output = vec![T::default(); batch * tokens * width];
    let mut topk_indices = vec![-1; batch * tokens * top_k];
    let mut outputs = SelfAttentionOutputs {
        output: &mut output,
        present_key,
        present_value,
        topk_indices: Some(&mut topk_indices),
        topk_weights: None,
    };
    Prepared::default().self_attention(&case.dims, &case.attributes, inputs, &mut outputs, pool).unwrap();
    (output, topk_indices)
}

fn compute<T: Scalar>(
    case: &Case,
    inputs: &SelfAttentionInputs<'_, T>,
    mut present: [Vec<T>; 2],
    pool: &dyn ThreadPool,
) -> Results<T> {
    let (output, topk_indices) = call(case, inputs, present.each_mut().map(|part| Some(part.as_mut_slice())), pool);
    Results { output, present, topk_indices }
}

/// Each head's `from` rows as the first of `to`, the others junk; or its first `to` rows where those are fewer.
fn resized<T: Scalar>(values: &[T], from: usize, to: usize, head: usize, heads: usize) -> Vec<T> {
    let junk: Vec<T> = stored(&vec![JUNK; head]);
    let row = |pair: usize, row: usize| match row < from {
        true => &values[(pair * from + row) * head..][..head],
        false => &junk,
    };
    (0..heads).flat_map(|pair| (0..to).flat_map(move |at| row(pair, at).iter().copied())).collect()
}

pub(crate) fn check<T: Scalar>(case: &Case, room: usize, in_place: [bool; 2], pool: &dyn ThreadPool) {
    let SelfAttentionDims { batch, tokens, past, kv_heads, head, .. } = case.dims;
    let (heads, keys) = (batch * kv_heads, past + tokens);
    let rows = keys + room;
    let given = Stored::<T>::of(case);
    let copied = given.inputs(case);
    let expected = compute(case, &copied, [(); 2].map(|()| vec![T::default(); heads * keys * head]), pool);

    let buffers = [0, 1].map(|part| resized(&given.past[part], past, rows, head, heads));
    let given = |part: usize| (!in_place[part]).then_some(buffers[part].as_slice());
    let shared = SelfAttentionInputs { capacity: Some(rows), past_key: given(0), past_value: given(1), ..copied };
    let present = [0, 1].map(|part| match in_place[part] {
        true => buffers[part].clone(),
        false => stored(&vec![JUNK; heads * rows * head]),
    });
    let found = compute(case, &shared, present, pool);

    assert_eq!(bits(&found.output), bits(&expected.output), "{:?}", case.dims);
    assert_eq!(found.topk_indices, expected.topk_indices);
    for part in 0..2 {
        let filled = resized(&found.present[part], rows, keys, head, heads);
        assert_eq!(bits(&filled), bits(&expected.present[part]), "{:?}, {in_place:?}", case.dims);
        let left: T = if in_place[part] { stored(&[JUNK])[0] } else { T::default() };
        let beyond = found.present[part].chunks(rows * head).flat_map(|pair| &pair[keys * head..]);
        assert!(beyond.into_iter().all(|value| bits(&[*value]) == bits(&[left])), "{:?}, {in_place:?}", case.dims);
    }
}

/// Many rows of few tokens, which one task fills together; single tokens; more tokens than one task fills.
fn case(seed: u64) -> Case {
    let mut random = Random(seed);
    let dims = random_dims(&mut random);
    let dims = match seed % 4 {
        0 => SelfAttentionDims { batch: 7, tokens: 1 + dims.tokens % 5, kv_heads: 1, ..dims },
        1 => SelfAttentionDims { tokens: 1, head: 16, past: 150, ..dims },
        2 => SelfAttentionDims { tokens: 70, ..dims },
        _ => dims,
    };
    Case::random(&mut random, dims)
}

#[test]
fn shared_caches_change_no_bit() {
    for seed in 0..80 {
        let case = case(seed);
        for room in [0, 1, 9] {
            for in_place in [[true, true], [false, false], [true, false], [false, true]] {
                check::<f32>(&case, room, in_place, &Sequential);
                check::<f16>(&case, room, in_place, &Threads(3));
            }
        }
    }
}

/// The only token reads its past where it was given, or in the buffer.
#[test]
fn shared_caches_change_no_bit_of_the_only_token() {
    for seed in 0..12 {
        let case = only_token(&mut Random(seed), 1, 4 + seed as usize % 3, 0);
        for in_place in [[true, true], [false, false], [true, false], [false, true]] {
            check::<f32>(&case, 3, in_place, &Sequential);
            check::<f16>(&case, 0, in_place, &Threads(3));
        }
    }
}

/// A step that keeps caches of f16 attends to these as they are stored, and one that keeps none to widened copies.
#[test]
fn halves_are_the_same_stored_and_widened() {
    for seed in 0..120 {
        let mut random = Random(seed);
        let (head, top_k) = (random.pick(&[16, 48, 64, 128]), random.between(1, 8));
        let few = matches!(head, 64 | 128);
        let dims = SelfAttentionDims {
            batch: random.between(1, 5),
            tokens: 1,
            past: random.pick(&[if few { 32 } else { 1 }, 40, 127, 128, 260]),
            width: random.between(1, 40),
            experts: top_k + random.between(0, 3),
            top_k,
            kv_heads: random.between(1, 3),
            head,
        };
        let mut case = match seed % 3 {
            0 => only_token(&mut random, 1, 4 + seed as usize % 9, 0),
            _ => Case::random(&mut random, dims),
        };
        let SelfAttentionDims { batch, past, kv_heads, head, .. } = case.dims;
        if matches!(head, 32 | 64 | 128) {
            // Fewer keys are attended to in another way where they are wide.
            case.attention_mask.fill(1);
        }
        let given = Stored::<f16>::of(&case);
        let inputs = given.inputs(&case);
        let cache = vec![f16::NAN; batch * kv_heads * (past + 1) * head];
        let stored = compute(&case, &inputs, [cache.clone(), cache.clone()], &Threads(3));
        let widened = call(&case, &inputs, [None, None], &Sequential);
        assert_eq!((bits(&stored.output), stored.topk_indices), (bits(&widened.0), widened.1), "{:?}", case.dims);
        let mut key = cache;
        let half = call(&case, &inputs, [Some(&mut key), None], &Sequential);
        assert_eq!((bits(&half.0), bits(&key)), (bits(&widened.0), bits(&stored.present[0])), "{:?}", case.dims);
    }
}

/// So many weights that the past is copied past the caches, and read from where it was.
#[test]
fn weights_that_no_cache_keeps_change_nothing() {
    for (seed, (batch, past)) in [(1, 1), (2, 150), (3, 40)].into_iter().enumerate() {
        let mut random = Random(seed as u64);
        let dims =
            SelfAttentionDims { batch, tokens: 1, past, width: 450, experts: 6, top_k: 4, kv_heads: 31, head: 64 };
        let mut case = Case::random(&mut random, dims);
        case.output_weight.iter_mut().for_each(|weight| *weight *= (31.0f32 * 64.0).powf(-0.5));
        case.check();
        check::<f32>(&case, 2, [false, false], &Threads(3));
        check::<f16>(&case, 2, [false, false], &Threads(3));
    }
}

/// Token by token into one buffer gives what one pass gives; the buffer is full at the end.
#[test]
fn steps_in_place_agree_with_one_pass() {
    let mut random = Random(21);
    let dims =
        SelfAttentionDims { batch: 2, tokens: 8, past: 0, width: 10, experts: 4, top_k: 2, kv_heads: 2, head: 16 };
    let mut case = Case::random(&mut random, dims);
    case.attributes.causal = true;
    case.attention_mask.fill(1);
    case.rotation = None;
    let whole = case.compute(&Sequential);
    let (hidden, width) = (case.hidden_states.clone(), dims.width);
    let mut buffers = [(); 2].map(|()| vec![JUNK; 2 * 2 * 8 * 16]);
    for token in 0..8 {
        case.dims = SelfAttentionDims { tokens: 1, past: token, ..dims };
        case.hidden_states = [0, 1].map(|row| &hidden[(row * 8 + token) * width..][..width]).concat();
        case.attention_mask = vec![1; 2 * (token + 1)];
        let inputs = SelfAttentionInputs { capacity: Some(8), past_key: None, past_value: None, ..case.inputs() };
        let found = compute(&case, &inputs, buffers, &Sequential);
        for (row, output) in found.output.chunks(width).enumerate() {
            let expected = crate::support::widen(&whole.output[(row * 8 + token) * width..][..width]);
            crate::support::assert_close("output", output, &expected, 1e-5);
        }
        buffers = found.present;
    }
    assert_eq!(buffers[0].len(), whole.present_key.len());
    crate::support::assert_close("cache", &buffers[0], &crate::support::widen(&whole.present_key), 1e-6);
}

#[test]
fn caches_without_room_or_memory_are_refused() {
    let case = case(1);
    let SelfAttentionDims { batch, tokens, past, width, kv_heads, head, .. } = case.dims;
    let refusal = |rows: usize, past_key: Option<&[f32]>, present_rows: Option<usize>| {
        let mut output = vec![0.0; batch * tokens * width];
        let mut present = present_rows.map(|rows| vec![0.0; batch * kv_heads * rows * head]);
        let mut other = vec![0.0; batch * kv_heads * rows * head];
        let inputs = SelfAttentionInputs { capacity: Some(rows), past_key, past_value: None, ..case.inputs() };
        let mut outputs = SelfAttentionOutputs {
            output: &mut output,
            present_key: present.as_deref_mut(),
            present_value: Some(&mut other),
            topk_indices: None,
            topk_weights: None,
        };
        self_attention(&case.dims, &case.attributes, &inputs, &mut outputs, &Sequential).err()
    };
    let keys = past + tokens;
    assert_eq!(refusal(keys, None, Some(keys)), None);
    let capacity = keys - 1;
    assert_eq!(refusal(capacity, None, Some(capacity)), Some(KernelError::Capacity { capacity, needed: keys }));
    let missing = KernelError::Missing { name: "present_key", because: "capacity" };
    assert_eq!(refusal(keys, None, None), Some(missing));
    let length =
        |name, rows: usize, found| Some(KernelError::Length { name, expected: batch * kv_heads * rows * head, found });
    assert_eq!(refusal(keys, Some(&[0.0]), None), length("past_key", keys, 1));
    assert_eq!(refusal(keys + 1, None, Some(keys)), length("present_key", keys + 1, batch * kv_heads * keys * head));
}
