//! AMX: products whose left factor is one part, rounded to bf16.

use std::arch::asm;

use half::bf16;

use super::amx_blocks::Raw;
use super::amx_softmax;
use super::amx_steps::{accumulators, block, left, pairs, product, products, rest, right};
use super::strip_softmax::StripSoftmax;
use super::tiles::{FETCHED, STEP, SUM_STRIDE, TILE, parts_len};

/// Elements of a step of one part.
const STEP_LEN: usize = parts_len(1, STEP);

// Of one part each load is for one product or two: they take turns, so that none waits for all.
block!(
    pairs,
    2,
    ["2048", "2048"],
    |raw| [row = in(reg) 128usize, ahead = inout(reg) raw.ahead => _, fetched = const FETCHED,],
    "tileloadd tmm4, [{left} + {line}]",
    rest!(),
    "tileloadd tmm6, [{right} + {row}]",
    rest!(),
    "tdpbf16ps tmm0, tmm4, tmm6",
    rest!(),
    "tileloadd tmm7, [{right} + {row} + 64]",
    rest!(),
    "tdpbf16ps tmm1, tmm4, tmm7",
    rest!(),
    "tileloadd tmm5, [{left} + {line} + 1024]",
    rest!(),
    "tdpbf16ps tmm2, tmm5, tmm6",
    "prefetcht1 [{ahead}]\n prefetcht1 [{ahead} + 64]\n prefetcht1 [{ahead} + 128]\n prefetcht1 [{ahead} + 192]",
    rest!(),
    "tdpbf16ps tmm3, tmm5, tmm7",
    "prefetcht1 [{ahead} + 256]\n prefetcht1 [{ahead} + 320]\n prefetcht1 [{ahead} + 384]\n prefetcht1 [{ahead} + 448]",
    rest!(),
    "add {ahead}, {fetched}"
);
block!(
    pairs_low,
    1,
    ["2048", "2048"],
    |raw| [row = in(reg) 128usize,],
    left!(1, "0"),
    pairs!(),
    products!(1)
);

/// [`block`] with two parts on the right.
macro_rules! block_of_two_parts {
    ($name:ident, $tiles:tt) => {
        block!(
            $name,
            $tiles,
            ["2048", "4096"],
            |raw| [],
            left!($tiles, "0"),
            right!("2048"),
            products!($tiles, then right "0"),
            products!($tiles)
        );
    };
}

block_of_two_parts!(two_parts, 2);
block_of_two_parts!(two_parts_low, 1);

/// A strip of two tiles of rows times a panel of one part, while `softmax` goes on.
///
/// # Safety
///
/// [`Tiles`] must be configured on this thread, `steps` positive, and `raw` describe a block that is in bounds and not
/// added to; as for [`amx_softmax::rounded_step`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn beside_softmax(raw: &Raw, softmax: &mut StripSoftmax, scores: *const f32, parts: *mut bf16) {
    let Raw { left, right, steps, sums, .. } = *raw;
    // SAFETY: by the caller's promise. What one `asm!` leaves in tiles the next one finds, as in `amx_blocks`.
    unsafe {
        asm!(
            "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, nomem, preserves_flags),
        );
        for step in 0..steps {
            let (left, right) = (left.add(step * STEP_LEN), right.add(step * STEP_LEN));
            asm!(
                left!(2, "0"),
                pairs!(),
                products!(2),
                left = in(reg) left,
                right = in(reg) right,
                line = in(reg) 64usize,
                row = in(reg) 128usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags),
            );
            softmax.count_step();
            for _ in 0..softmax.take_due() {
                amx_softmax::rounded_step(softmax, scores, parts);
            }
        }
        let (stride, lower) = (SUM_STRIDE * size_of::<f32>(), sums.add(TILE * SUM_STRIDE));
        asm!(accumulators!(store 2), out = in(reg) sums, lower = in(reg) lower, stride = in(reg) stride, options(nostack));
    }
}
