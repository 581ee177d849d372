//! AMX: the instructions of one inner step, and the frame of a block of steps.

/// The four products of two left and two right tiles.
macro_rules! products {
    (2) => {
        "tdpbf16ps tmm0, tmm4, tmm6\n tdpbf16ps tmm1, tmm4, tmm7\n tdpbf16ps tmm2, tmm5, tmm6\n tdpbf16ps tmm3, tmm5, tmm7\n"
    };
    (1) => {
        "tdpbf16ps tmm0, tmm4, tmm6\n tdpbf16ps tmm1, tmm4, tmm7\n"
    };
}

/// Loads the left tiles of one part: high 0, middle 2048, low 4096.
macro_rules! left {
    (2, $part:literal) => {
        concat!(
            "tileloadd tmm4, [{left} + {line} + ",
            $part,
            "]\n",
            "tileloadd tmm5, [{left} + {line} + ",
            $part,
            " + 1024]\n"
        )
    };
    (1, $part:literal) => {
        concat!("tileloadd tmm4, [{left} + {line} + ", $part, "]\n")
    };
}

/// Loads the right tiles of one part.
macro_rules! right {
    ($part:literal) => {
        concat!(
            "tileloadd tmm6, [{right} + {line} + ",
            $part,
            "]\n",
            "tileloadd tmm7, [{right} + {line} + ",
            $part,
            " + 1024]\n"
        )
    };
}

/// Loads the right tiles where they stand beside each other, in rows of 128 bytes.
macro_rules! pairs {
    () => {
        "tileloadd tmm6, [{right} + {row}]\n tileloadd tmm7, [{right} + {row} + 64]\n"
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

pub(super) use {accumulators, block, left, pairs, products, right};
