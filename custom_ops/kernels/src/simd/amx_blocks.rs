//! AMX: the products of tiles.
//!
//! A tile register holds 16 rows of 64 bytes. The left factor stands in tiles of 16 rows by 32 inner steps, the right
//! one in tiles of 16 pairs of inner steps by 16 columns; `TDPBF16PS` adds the product of two tiles to a tile of 16 x
//! 16 f32.

use std::arch::asm;
use std::arch::x86_64::_mm512_set1_epi32;

use half::bf16;

use super::amx_softmax::{STAGES, Whole};
use super::amx_steps::{accumulators, block, left, pairs, product, products, rest, right};
use super::strip_softmax::StripSoftmax;
use super::tiles::{PARTS, STEP, SUM_STRIDE, TILE, parts_len};
use super::{amx_softmax, amx_split, element};

/// A block whose bounds are proved.
pub(super) struct Raw {
    pub(super) left: *const bf16,
    pub(super) right: *const bf16,
    pub(super) steps: usize,
    pub(super) sums: *mut f32,
    pub(super) add: bool,
    /// What is read later, fetched by blocks of one part: [`FETCHED`](super::tiles::FETCHED) bytes beside each step.
    pub(super) ahead: *const u8,
}

// Each load changes one side, so that an inner step of six products takes seven pairs of loads; the largest product
// comes last, and those with a part that is not there are left out without changing the order of the others.

/// A step of three parts on the left and two or three on the right.
macro_rules! step {
    (two parts, $tiles:tt) => {
        step!(@ $tiles)
    };
    (three parts, $tiles:tt) => {
        step!(@ $tiles, products!($tiles, then right "4096"))
    };
    (@ $tiles:tt $(, $of_low:expr)?) => {
        concat!(
            left!($tiles, "4096"), right!("0"), products!($tiles, then left "2048"), products!($tiles, then right "2048"),
            products!($tiles, then left "0"), $($of_low,)? products!($tiles, then right "0"), products!($tiles)
        )
    };
}

block!(three_parts, 2, ["6144", "6144"], |raw| [], step!(three parts, 2));
block!(three_parts_low, 1, ["6144", "6144"], |raw| [], step!(three parts, 1));
block!(two_parts, 2, ["6144", "4096"], |raw| [], step!(two parts, 2));
block!(two_parts_low, 1, ["6144", "4096"], |raw| [], step!(two parts, 1));

/// Runs instructions on a strip of two tiles of rows and a panel of three parts; tiles keep what they hold until the
/// next ones.
macro_rules! on_tiles {
    ($at:expr, $($instructions:expr),+) => {
        asm!(
            concat!($($instructions,)+ "/* {left} {right} {line} */"),
            left = in(reg) $at.left,
            right = in(reg) $at.right,
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags),
        )
    };
}

/// Four products with something behind each; what changes for the next ones is loaded as in [`products`].
macro_rules! turn {
    ($at:expr, left $part:literal, $a:expr, $b:expr, $c:expr, $d:expr) => {
        on_tiles!($at, product!(0));
        $a;
        on_tiles!($at, product!(1));
        $b;
        on_tiles!($at, left!(upper $part), product!(2));
        $c;
        on_tiles!($at, product!(3), left!(lower $part));
        $d;
    };
    ($at:expr, right $part:literal, $a:expr, $b:expr, $c:expr, $d:expr) => {
        on_tiles!($at, product!(0));
        $a;
        on_tiles!($at, product!(2));
        $b;
        on_tiles!($at, right!(first $part), product!(1));
        $c;
        on_tiles!($at, product!(3), right!(second $part));
        $d;
    };
    ($at:expr, none, $a:expr, $b:expr, $c:expr, $d:expr) => {
        on_tiles!($at, product!(0));
        $a;
        on_tiles!($at, product!(1));
        $b;
        on_tiles!($at, product!(2));
        $c;
        on_tiles!($at, product!(3));
        $d;
    };
}

/// Where the operands of a step stand.
#[derive(Clone, Copy)]
struct At {
    left: *const bf16,
    right: *const bf16,
}

/// Defines a step of a strip of two tiles of rows times a panel of three parts, with `$stages` behind each product:
/// `$each` stages of `$pieces` pieces of a softmax.
macro_rules! step_beside {
    ($name:ident, $pieces:literal, $each:literal, |$whole:ident, $product:ident| $stages:block) => {
        /// A step, and the stages of pieces.
        ///
        /// # Safety
        ///
        /// [`Tiles`] must be configured on this thread, and the step be readable; as for [`Whole::stage`].
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        #[inline]
        unsafe fn $name(at: At, mut $whole: Whole<$pieces>, softmax: &mut StripSoftmax) {
            macro_rules! behind {
                ($number:literal) => {{
                    const $product: usize = $number;
                    $stages
                }};
            }
            const { assert!($each * 24 == $pieces * STAGES, "all stages of all pieces") };
            // SAFETY: by the caller's promise.
            unsafe {
                on_tiles!(at, left!(2, "4096"), right!("0"));
                turn!(at, left "2048", behind!(0), behind!(1), behind!(2), behind!(3));
                turn!(at, right "2048", behind!(4), behind!(5), behind!(6), behind!(7));
                turn!(at, left "0", behind!(8), behind!(9), behind!(10), behind!(11));
                turn!(at, right "4096", behind!(12), behind!(13), behind!(14), behind!(15));
                turn!(at, right "0", behind!(16), behind!(17), behind!(18), behind!(19));
                turn!(at, none, behind!(20), behind!(21), behind!(22), behind!(23));
            }
            $whole.finish(softmax);
        }
    };
}

step_beside!(step_beside_two, 2, 1, |whole, PRODUCT| { whole.stage::<PRODUCT>() });
step_beside!(step_beside_four, 4, 2, |whole, PRODUCT| {
    whole.stage::<{ 2 * PRODUCT }>();
    whole.stage::<{ 2 * PRODUCT + 1 }>()
});

/// A strip of two tiles of rows times a panel of three parts, while `softmax` goes on.
///
/// # Safety
///
/// [`Tiles`] must be configured on this thread, `steps` positive, and `raw` describe a block that is in bounds and not
/// added to; as for [`amx_softmax::step`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn beside_softmax(raw: &Raw, softmax: &mut StripSoftmax, scores: *const f32, parts: *mut bf16) {
    let Raw { left, right, steps, sums, .. } = *raw;
    let order = amx_split::in_turn();
    // SAFETY: by the caller's promise. Compiled code has no use for tiles, so what one `asm!` leaves in them the next
    // one finds, although each tells the compiler no more than that it changes them.
    unsafe {
        asm!(
            "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, nomem, preserves_flags),
        );
        for step in 0..steps {
            let at = At { left: left.add(step * STEP_LEN), right: right.add(step * STEP_LEN) };
            softmax.count_step();
            if let Some(whole) = Whole::next(softmax, scores, parts, order) {
                step_beside_four(at, whole, softmax);
                continue;
            }
            if let Some(whole) = Whole::next(softmax, scores, parts, order) {
                step_beside_two(at, whole, softmax);
                continue;
            }
            on_tiles!(at, step!(three parts, 2));
            if !softmax.are_whole(2) {
                for _ in 0..softmax.take_due() {
                    amx_softmax::step(softmax, scores, parts, order);
                }
            }
        }
        let (stride, lower) = (SUM_STRIDE * size_of::<f32>(), sums.add(TILE * SUM_STRIDE));
        asm!(accumulators!(store 2), out = in(reg) sums, lower = in(reg) lower, stride = in(reg) stride, options(nostack));
    }
}

/// Elements of the parts of a step.
const STEP_LEN: usize = parts_len(PARTS, STEP);

/// Fetches lines at these places [`PAIRS_AHEAD`] later.
macro_rules! fetch {
    ($($place:literal),+) => {
        concat!($("prefetcht1 [{right} + {ahead} + ", $place, "]\n"),+)
    };
}

/// Bytes between what is multiplied of a panel of pairs and what is fetched for later.
const PAIRS_AHEAD: usize = 8192;

/// [`block`] with a panel of pairs, which is read where it stands.
macro_rules! block_of_pairs {
    ($name:ident, $tiles:tt) => {
        block!(
            $name,
            $tiles,
            ["6144", "2048"],
            |raw| [row = in(reg) 128usize, ahead = const PAIRS_AHEAD,],
            left!($tiles, "4096"),
            pairs!(),
            products!($tiles, then left "2048"),
            fetch!("0", "64", "128", "192", "256", "320", "384", "448"),
            fetch!("512", "576", "640", "704", "768", "832", "896", "960"),
            products!($tiles, then left "0"),
            fetch!("1024", "1088", "1152", "1216", "1280", "1344", "1408", "1472"),
            products!($tiles),
            fetch!("1536", "1600", "1664", "1728", "1792", "1856", "1920", "1984")
        );
    };
}

block_of_pairs!(pairs, 2);
block_of_pairs!(pairs_low, 1);

/// Splits half a pair of rows, as `amx_split` does, and fetches what stands [`amx_split::AHEAD`] later.
macro_rules! split {
    ($($pair:literal $half:ident),+) => {
        concat!($(split!(@from from!($pair $half), to!($pair $half))),+)
    };
    (@from $from:expr, $to:expr) => {
        concat!(
            "prefetcht1 [{from} + {ahead} + ", $from, "]\n prefetcht1 [{from} + {ahead} + ", $from, " + 128]\n",
            "vmovups zmm0, [{from} + ", $from, "]\n vmovups zmm1, [{from} + ", $from, " + 128]\n",
            "vpaddd zmm2, zmm0, {half}\n vpaddd zmm3, zmm1, {half}\n",
            "vpandd zmm4, zmm2, {upper}\n vpandd zmm5, zmm3, {upper}\n",
            "vsubps zmm0, zmm0, zmm4\n vsubps zmm1, zmm1, zmm5\n",
            "vpermt2w zmm2, {order}, zmm3\n vmovdqu64 [{to} + ", $to, "], zmm2\n",
            "vpandd zmm4, zmm0, {upper}\n vpandd zmm5, zmm1, {upper}\n",
            "vsubps zmm4, zmm0, zmm4\n vsubps zmm5, zmm1, zmm5\n",
            "vpermt2w zmm0, {order}, zmm1\n vmovdqu64 [{to} + ", $to, " + 2048], zmm0\n",
            "vpermt2w zmm4, {order}, zmm5\n vmovdqu64 [{to} + ", $to, " + 4096], zmm4\n"
        )
    };
}

/// Where half a pair of rows of a panel stands.
macro_rules! from {
    ($pair:literal first) => {
        concat!("256 * ", $pair)
    };
    ($pair:literal second) => {
        concat!("256 * ", $pair, " + 64")
    };
}

/// Where the first part of half a pair of rows goes.
macro_rules! to {
    ($pair:literal first) => {
        concat!("64 * ", $pair)
    };
    ($pair:literal second) => {
        concat!("64 * ", $pair, " + 1024")
    };
}

/// Where the next step is: of parts that are all in memory, of parts in two slots that change roles.
macro_rules! advance {
    (panel) => {
        "add {right}, 6144\n add {to}, 6144"
    };
    (slots) => {
        "xchg {right}, {to}"
    };
}

/// Defines the product of a strip of one or two tiles of rows and a panel of three parts, while pairs of rows of what
/// comes later are split.
macro_rules! block_and_split {
    ($name:ident, $tiles:tt, $next:tt,
     [$($a:expr),+], [$($b:expr),+], [$($c:expr),+], [$($d:expr),+], [$($e:expr),+], [$($f:expr),+]) => {
        /// A strip times a panel, and a job.
        ///
        /// # Safety
        ///
        /// [`Tiles`] must be configured on this thread, `steps` positive, and `raw` describe a block that is in bounds;
        /// the pairs of every step must be readable from `from` on and ours to write where they go: from `to` on, or
        /// from `to` and `raw.right` in turn.
        #[target_feature(enable = "avx512f,avx512bw")]
        pub(super) unsafe fn $name(raw: &Raw, from: *const f32, to: *mut bf16) {
            let Raw { left, right, steps, sums, add, .. } = *raw;
            // SAFETY: by the caller's promise.
            unsafe {
                asm!(
                    "test {add}, {add}",
                    "jnz 3f",
                    "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
                    "jmp 2f",
                    "3:",
                    accumulators!(load $tiles),
                    "2:",
                    left!($tiles, "4096"),
                    right!("0"),
                    products!($tiles, then left "2048", beside $($a),+),
                    products!($tiles, then right "2048", beside $($b),+),
                    products!($tiles, then left "0", beside $($c),+),
                    products!($tiles, then right "4096", beside $($d),+),
                    products!($tiles, then right "0", beside $($e),+),
                    products!($tiles, beside $($f),+),
                    advance!($next),
                    "add {left}, 6144\n add {from}, 4096\n dec {steps}\n jnz 2b",
                    accumulators!(store $tiles),
                    left = inout(reg) left => _,
                    right = inout(reg) right => _,
                    steps = inout(reg) steps => _,
                    out = in(reg) sums,
                    lower = in(reg) sums.wrapping_add(TILE * SUM_STRIDE),
                    stride = in(reg) SUM_STRIDE * size_of::<f32>(),
                    line = in(reg) 64usize,
                    add = in(reg) usize::from(add),
                    from = inout(reg) from => _,
                    to = inout(reg) to => _,
                    ahead = const amx_split::AHEAD,
                    order = in(zmm_reg) amx_split::pairs(),
                    half = in(zmm_reg) _mm512_set1_epi32(amx_split::HALF),
                    upper = in(zmm_reg) _mm512_set1_epi32(element::UPPER),
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

block_and_split!(
    split_quarter,
    2,
    panel,
    [split!(0 first), rest!(), rest!(), split!(0 second)],
    [rest!(), rest!(), split!(1 first), rest!()],
    [rest!(), split!(1 second), rest!(), rest!()],
    [split!(2 first), rest!(), rest!(), split!(2 second)],
    [rest!(), rest!(), split!(3 first), rest!()],
    [rest!(), split!(3 second), rest!(), rest!()]
);
block_and_split!(
    split_half,
    2,
    panel,
    [split!(0 first), split!(0 second), rest!(), split!(1 first)],
    [split!(1 second), rest!(), split!(2 first), split!(2 second)],
    [rest!(), split!(3 first), split!(3 second), rest!()],
    [split!(4 first), split!(4 second), rest!(), split!(5 first)],
    [split!(5 second), rest!(), split!(6 first), split!(6 second)],
    [rest!(), split!(7 first), split!(7 second), rest!()]
);
/// [`block_and_split`] of all pairs of a step.
macro_rules! block_and_split_step {
    ($name:ident, $next:tt) => {
        block_and_split!(
            $name,
            2,
            $next,
            [split!(0 first), split!(0 second), split!(1 first, 1 second), split!(2 first)],
            [split!(2 second), split!(3 first, 3 second), split!(4 first), split!(4 second)],
            [split!(5 first, 5 second), split!(6 first), split!(6 second), split!(7 first, 7 second)],
            [split!(8 first), split!(8 second), split!(9 first, 9 second), split!(10 first)],
            [split!(10 second), split!(11 first, 11 second), split!(12 first), split!(12 second)],
            [split!(13 first, 13 second), split!(14 first), split!(14 second), split!(15 first, 15 second)]
        );
    };
}

block_and_split_step!(split_all, panel);
block_and_split_step!(stream, slots);
block_and_split!(
    stream_low,
    1,
    slots,
    [split!(0 first, 0 second), split!(1 first, 1 second, 2 first)],
    [split!(2 second, 3 first, 3 second), split!(4 first, 4 second)],
    [split!(5 first, 5 second, 6 first), split!(6 second, 7 first, 7 second)],
    [split!(8 first, 8 second), split!(9 first, 9 second, 10 first)],
    [split!(10 second, 11 first, 11 second), split!(12 first, 12 second)],
    [split!(13 first, 13 second, 14 first), split!(14 second, 15 first, 15 second)]
);
