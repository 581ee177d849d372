//! AMX: the instructions of one inner step, and the frame of a block of steps.

/// What stands behind a product or a load that nothing else stands behind; what is fetched is nothing in that sense.
///
/// Beside work on the other thread of its core, a product that another one follows at once takes up to four times as
/// long; with eight instructions of any kind between them it takes two and a half times as long, and in quiet minutes
/// no longer than without (benches/NOTES.md).
macro_rules! rest {
    () => {
        "nop\n nop\n nop\n nop\n nop\n nop\n nop\n nop\n"
    };
}

/// One of the four products of two left and two right tiles.
macro_rules! product {
    (0) => {
        "tdpbf16ps tmm0, tmm4, tmm6\n"
    };
    (1) => {
        "tdpbf16ps tmm1, tmm4, tmm7\n"
    };
    (2) => {
        "tdpbf16ps tmm2, tmm5, tmm6\n"
    };
    (3) => {
        "tdpbf16ps tmm3, tmm5, tmm7\n"
    };
}

/// The products of two left tiles, or of one, and two right tiles. What changes for the next ones is loaded as soon as
/// its register is free; behind each product stands a part of `$beside`, or [`rest`].
macro_rules! products {
    (2 $(, then $side:ident $part:literal)?) => {
        products!(2 $(, then $side $part)?, beside rest!(), rest!(), rest!(), rest!())
    };
    (1 $(, then $side:ident $part:literal)?) => {
        products!(1 $(, then $side $part)?, beside rest!(), rest!())
    };
    (2, beside $a:expr, $b:expr, $c:expr, $d:expr) => {
        concat!(
            product!(0), $a, product!(1), $b,
            product!(2), $c, product!(3), $d
        )
    };
    (2, then left $part:literal, beside $a:expr, $b:expr, $c:expr, $d:expr) => {
        concat!(
            product!(0), $a, product!(1), $b, left!(upper $part),
            product!(2), $c, product!(3), $d, left!(lower $part)
        )
    };
    (2, then right $part:literal, beside $a:expr, $b:expr, $c:expr, $d:expr) => {
        concat!(
            product!(0), $a, product!(2), $b, right!(first $part),
            product!(1), $c, product!(3), $d, right!(second $part)
        )
    };
    (1, beside $a:expr, $b:expr) => {
        concat!(product!(0), $a, product!(1), $b)
    };
    (1, then left $part:literal, beside $a:expr, $b:expr) => {
        concat!(product!(0), $a, product!(1), $b, left!(upper $part))
    };
    (1, then right $part:literal, beside $a:expr, $b:expr) => {
        concat!(
            product!(0), $a, right!(first $part),
            product!(1), $b, right!(second $part)
        )
    };
}

/// Loads the left tiles of one part: high 0, middle 2048, low 4096.
macro_rules! left {
    (2, $part:literal) => {
        concat!(left!(upper $part), left!(lower $part))
    };
    (1, $part:literal) => {
        left!(upper $part)
    };
    (upper $part:literal) => {
        concat!("tileloadd tmm4, [{left} + {line} + ", $part, "]\n", rest!())
    };
    (lower $part:literal) => {
        concat!("tileloadd tmm5, [{left} + {line} + ", $part, " + 1024]\n", rest!())
    };
}

/// Loads the right tiles of one part.
macro_rules! right {
    ($part:literal) => {
        concat!(right!(first $part), right!(second $part))
    };
    (first $part:literal) => {
        concat!("tileloadd tmm6, [{right} + {line} + ", $part, "]\n", rest!())
    };
    (second $part:literal) => {
        concat!("tileloadd tmm7, [{right} + {line} + ", $part, " + 1024]\n", rest!())
    };
}

/// Loads the right tiles where they stand beside each other, in rows of 128 bytes.
macro_rules! pairs {
    () => {
        concat!("tileloadd tmm6, [{right} + {row}]\n", rest!(), "tileloadd tmm7, [{right} + {row} + 64]\n", rest!())
    };
}

/// The accumulators, from or to memory.
macro_rules! accumulators {
    (load 2) => {
        "tileloadd tmm0, [{out} + {stride}]\n tileloadd tmm1, [{out} + {stride} + 64]\n\
         tileloadd tmm2, [{lower} + {stride}]\n tileloadd tmm3, [{lower} + {stride} + 64]\n"
    };
    (load 1) => {
        "tileloadd tmm0, [{out} + {stride}]\n tileloadd tmm1, [{out} + {stride} + 64]\n"
    };
    (store 2) => {
        "tilestored [{out} + {stride}], tmm0\n tilestored [{out} + {stride} + 64], tmm1\n\
         tilestored [{lower} + {stride}], tmm2\n tilestored [{lower} + {stride} + 64], tmm3\n"
    };
    (store 1) => {
        "tilestored [{out} + {stride}], tmm0\n tilestored [{out} + {stride} + 64], tmm1 /* not {lower} */\n"
    };
}

/// Defines the product of a strip of one or two tiles of rows with a panel; `$step` is one inner step, which may read
/// further operands.
macro_rules! block {
    ($name:ident, $tiles:tt, [$left_step:literal, $right_step:literal], |$raw:ident| [$($operands:tt)*], $($step:expr),+) => {
        /// A strip times a panel.
        ///
        /// # Safety
        ///
        /// [`Tiles`] must be configured on this thread, `steps` positive, and `raw` describe a block that is in bounds.
        pub(super) unsafe fn $name($raw: &Raw) {
            let Raw { left, right, steps, sums, add, .. } = *$raw;
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
                    $($step,)+
                    concat!("add {left}, ", $left_step, "\n add {right}, ", $right_step, "\n dec {steps}\n jnz 2b"),
                    accumulators!(store $tiles),
                    left = inout(reg) left => _,
                    right = inout(reg) right => _,
                    steps = inout(reg) steps => _,
                    out = in(reg) sums,
                    lower = in(reg) sums.wrapping_add(TILE * SUM_STRIDE),
                    stride = in(reg) SUM_STRIDE * size_of::<f32>(),
                    line = in(reg) 64usize,
                    add = in(reg) usize::from(add),
                    $($operands)*
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

pub(super) use {accumulators, block, left, pairs, product, products, rest, right};
