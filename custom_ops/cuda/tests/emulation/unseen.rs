//! What a token does not see never changes its result, whatever it holds.

use moa_cuda::plan::Launch;
use moa_cuda::{Element, Options};
use moa_schema::SelfAttentionDims;

use crate::attention::Case;
use crate::devices::device_of;
use crate::emulator::run;
use crate::support::{Random, decode};

/// What the changed token holds that is not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Poison {
    /// Everything: queries, keys and values.
    Token(f32),
    /// Its values alone, because they overflow.
    Values,
}

/// A feature that is 0 but in the changed token, and that only values take up.
const FEATURE: usize = 3;

struct Shape {
    tokens: usize,
    past: usize,
    head: usize,
    top_k: usize,
    multiprocessors: u32,
}

/// Tall and short tiles, warps and blocks that cut keys, rows of one token and of several in a tile.
const SHAPES: [Shape; 7] = [
    Shape { tokens: 9, past: 0, head: 16, top_k: 2, multiprocessors: 1 },
    Shape { tokens: 5, past: 150, head: 64, top_k: 3, multiprocessors: 132 },
    Shape { tokens: 18, past: 3, head: 96, top_k: 4, multiprocessors: 1 },
    Shape { tokens: 35, past: 0, head: 128, top_k: 2, multiprocessors: 1 },
    Shape { tokens: 9, past: 11, head: 200, top_k: 4, multiprocessors: 1 },
    Shape { tokens: 18, past: 40, head: 13, top_k: 1, multiprocessors: 16 },
    Shape { tokens: 33, past: 50, head: 200, top_k: 2, multiprocessors: 1 },
];

fn case(shape: &Shape, element: Element, tf32: bool, compute_capability: (u32, u32)) -> Case {
    let &Shape { tokens, past, head, top_k, multiprocessors } = shape;
    let mut random = Random(head as u64);
    let dims = SelfAttentionDims { batch: 2, tokens, past, width: 16, experts: 4, top_k, kv_heads: 1, head };
    let mut case = Case::random(&mut random, dims, element, false);
    case.device = device_of(compute_capability, multiprocessors);
    case.options = Options { tf32, wgmma: compute_capability == (9, 0) };
    case.attributes.causal = true;
    case.attributes.skip_padded_queries = true;
    case.all_outputs = false;
    case.key_mask.fill(1);
    case.hidden_states.iter_mut().skip(FEATURE).step_by(16).for_each(|x| *x = 0.0);
    case.kv_weight.as_mut().unwrap()[FEATURE * 2 * head..][..2 * head].fill(0.0);
    case.router_weight[FEATURE * 4..][..4].fill(0.0);
    case.query_weight.chunks_mut(head).skip(FEATURE).step_by(16).for_each(|row| row.fill(0.0));
    case
}

/// Puts `poison` into token `token` of the first batch row.
fn spoil(case: &mut Case, token: usize, poison: Poison) {
    let columns = case.dims.head;
    let large = if case.element == Element::F16 { 6e4 } else { 2e38 };
    match poison {
        Poison::Token(value) => case.hidden_states[token * 16..][..16].fill(value),
        Poison::Values => {
            case.hidden_states[token * 16 + FEATURE] = large;
            // Every second column of the values.
            case.kv_weight.as_mut().unwrap()[FEATURE * 2 * columns + columns..][..columns]
                .iter_mut()
                .step_by(2)
                .for_each(|w| *w = large);
        }
    }
}

fn outputs(case: &Case) -> Vec<f32> {
    decode(case.element, run(&case.plan(), &case.tensors()).outputs[0].as_ref().unwrap())
}

fn check(shape: &Shape, element: Element, tf32: bool, compute_capability: (u32, u32), poison: Poison) {
    check_token(shape, case(shape, element, tf32, compute_capability), shape.tokens / 2, poison);
}

fn check_token(shape: &Shape, mut case: Case, token: usize, poison: Poison) {
    let clean = outputs(&case);
    let runs: &[bool] = if poison == Poison::Values { &[false] } else { &[false, true] };
    for &masked in runs {
        spoil(&mut case, token, poison);
        case.key_mask[shape.past + token] = i32::from(!masked);
        let found = outputs(&case);
        for (index, (found, clean)) in found.chunks(16).zip(clean.chunks(16)).enumerate() {
            let (element, device) = (case.element, case.device.compute_capability);
            let place = format!("{element:?} {device:?} {poison:?}, masked {masked}, token {index} of {token}");
            let sees = index < shape.tokens && index >= token;
            if !sees {
                assert_eq!(found, clean, "{place}");
            } else if !masked {
                assert!(found.iter().any(|x| !x.is_finite()), "{place}: {found:?}");
            } else {
                assert!(found.iter().all(|x| x.is_finite()), "{place}: {found:?}");
            }
        }
    }
}

#[test]
fn a_later_token_or_a_masked_key_may_hold_anything() {
    let kinds = [
        (Element::F32, false, (8, 0)),
        (Element::F32, true, (8, 0)),
        (Element::F16, false, (7, 0)),
        (Element::F16, false, (7, 5)),
        (Element::F16, false, (8, 0)),
        (Element::Bf16, false, (7, 0)),
        (Element::Bf16, false, (8, 0)),
        (Element::F16, false, (9, 0)),
        (Element::Bf16, false, (9, 0)),
    ];
    for (element, tf32, compute_capability) in kinds {
        for (index, shape) in SHAPES.iter().enumerate() {
            check(shape, element, tf32, compute_capability, Poison::Values);
            // The last of these takes every expert.
            if index < 3 {
                let value = [f32::NAN, f32::INFINITY][index % 2];
                check(shape, element, tf32, compute_capability, Poison::Token(value));
            }
        }
    }
}

/// The same in large tiles of rows: the changed token is one of either warpgroup's rows, and its value in the first
/// tile of keys or in a later one; addresses allow vectors or do not.
#[test]
fn a_later_token_of_a_large_tile_may_hold_anything() {
    for (shape, token) in [
        (Shape { tokens: 70, past: 100, head: 64, top_k: 2, multiprocessors: 1 }, 20),
        (Shape { tokens: 70, past: 100, head: 64, top_k: 2, multiprocessors: 1 }, 40),
        (Shape { tokens: 40, past: 0, head: 128, top_k: 4, multiprocessors: 1 }, 5),
        (Shape { tokens: 40, past: 110, head: 128, top_k: 4, multiprocessors: 1 }, 25),
        (Shape { tokens: 40, past: 110, head: 75, top_k: 4, multiprocessors: 1 }, 20),
        (Shape { tokens: 40, past: 50, head: 200, top_k: 4, multiprocessors: 1 }, 5),
        (Shape { tokens: 40, past: 50, head: 201, top_k: 4, multiprocessors: 1 }, 20),
    ] {
        for element in [Element::F16, Element::Bf16] {
            let case = case(&shape, element, false, (9, 0));
            let is_large = |launch: &Launch| launch.kernel.contains("_attend_wgmma_");
            assert!(case.plan().launches.iter().any(is_large), "head {}", shape.head);
            check_token(&shape, case, token, Poison::Values);
            let case = self::case(&shape, element, false, (9, 0));
            check_token(&shape, case, token, Poison::Token(f32::NAN));
        }
    }
}
