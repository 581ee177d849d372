//! AMX: whether it may be used, and products of tiles of bf16 parts.
//!
//! A tile register holds 16 rows of 64 bytes. The left factor stands in tiles of 16 rows by 32 inner steps, the right one
//! in tiles of 16 pairs of inner steps by 16 columns; `TDPBF16PS` adds the product of two tiles to a tile of 16 x 16 f32.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _mm512_set1_epi32, _xgetbv};
use std::sync::OnceLock;

use half::bf16;

use super::PANEL;
use super::amx_split;
use super::tiles::{PARTS, STEP, STRIP, SUM_STRIDE, TILE, parts_len};

/// Whether processor and system let this process use tiles; the system is asked once.
pub(super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| processor_has_tiles() && system_permits_tiles())
}

/// Tiles of the expected size, products of bf16, and state that the system saves.
fn processor_has_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const TILE_STATE: u64 = 1 << 17 | 1 << 18;
    /// `xgetbv` where CPUID says that the system has enabled it.
    #[target_feature(enable = "xsave")]
    fn enabled_state() -> u64 {
        // SAFETY: register 0 is always there.
        unsafe { _xgetbv(0) }
    }
    if !is_x86_feature_detected!("avx512bw") || __cpuid(0).eax < 0x1d || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    if __cpuid_count(7, 0).edx & AMX_BF16_AND_TILE != AMX_BF16_AND_TILE {
        return false;
    }
    // SAFETY: OSXSAVE says that `xgetbv` is there.
    let enabled = unsafe { enabled_state() } & TILE_STATE == TILE_STATE;
    let palette = __cpuid_count(0x1d, 1);
    let (row_bytes, names, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
    enabled && row_bytes >= 64 && names >= 8 && rows >= 16
}

/// Asks Linux to let the threads of this process have tile state.
#[cfg(target_os = "linux")]
fn system_permits_tiles() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: a system call without pointers; the kernel keeps every register but those named.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn system_permits_tiles() -> bool {
    false
}

/// The memory operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Eight tiles of 16 rows of 64 bytes.
static CONFIGURATION: Configuration = {
    let (mut row_bytes, mut rows, mut tile) = ([0; 16], [0; 16], 0);
    while tile < 8 {
        row_bytes[tile] = 64;
        rows[tile] = 16;
        tile += 1;
    }
    Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

/// Tiles of this thread, configured while it lives and released after it.
pub(super) struct Tiles(std::marker::PhantomData<*const ()>);

impl Tiles {
    /// Configures the tiles of this thread.
    ///
    /// # Safety
    ///
    /// [`available`] must be true, and no other `Tiles` of this thread alive.
    pub(super) unsafe fn configure() -> Self {
        // SAFETY: the configuration is valid for the palette that `available` checked.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly, preserves_flags)) };
        Self(std::marker::PhantomData)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: tiles are there, since `configure` was called; nobody else's state is in them.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}

/// One strip times one panel.
pub(super) struct Block<'a> {
    /// Parts of a strip.
    pub(super) left: &'a [bf16],
    /// Parts of a panel.
    pub(super) right: &'a [bf16],
    /// Parts of a value of the panel.
    pub(super) parts: usize,
    pub(super) inner: usize,
    /// Rows [`SUM_STRIDE`] apart.
    pub(super) sums: &'a mut [f32],
    /// Whether the product is added to the sums.
    pub(super) add: bool,
}

/// Some pairs of rows of every step of a panel of f32, split while a block is multiplied.
pub(super) struct Job<'a> {
    /// Rows of [`PANEL`] elements, whole steps of them.
    pub(super) from: &'a [f32],
    /// Parts of the panel.
    pub(super) to: &'a mut [bf16],
    /// The first pair.
    pub(super) first: usize,
    /// Number of pairs: [`QUARTER`], or twice as many.
    pub(super) pairs: usize,
}

/// Fewest pairs of rows of a job.
pub(super) const QUARTER: usize = TILE / 4;

impl Tiles {
    /// As [`Tiles::multiply`] for more than [`TILE`] rows and a panel of [`PARTS`] parts, while `job` is done.
    ///
    /// # Panics
    ///
    /// If something does not fit its slice.
    pub(super) fn multiply_and_split(&self, rows: usize, block: Block<'_>, job: Job<'_>) {
        let (inner, Job { from, to, first, pairs }) = (block.inner.next_multiple_of(STEP), job);
        assert!(rows > TILE && block.parts == PARTS && first + pairs <= TILE, "size of a block");
        assert!(pairs == QUARTER || pairs == 2 * QUARTER, "size of a job");
        assert!(from.len() >= inner * PANEL && to.len() >= parts_len(PARTS, inner), "panel to split");
        let raw = self.check(rows, block);
        // SAFETY: the bounds are proved, and `self` that the tiles of this thread are configured.
        unsafe {
            let (from, to) = (from.as_ptr().add(first * 2 * PANEL), to.as_mut_ptr().add(first * STEP));
            match pairs {
                QUARTER => split_quarter(&raw, from, to),
                _ => split_half(&raw, from, to),
            }
        }
    }

    /// `rows` rows, at most a strip, times a panel; rows of sums up to a whole tile are written.
    ///
    /// # Panics
    ///
    /// If something does not fit its slice.
    pub(super) fn multiply(&self, rows: usize, block: Block<'_>) {
        let parts = block.parts;
        let raw = self.check(rows, block);
        // SAFETY: the bounds are proved, and `self` that the tiles of this thread are configured.
        unsafe {
            match (parts, rows > TILE) {
                (1, true) => one_part(&raw),
                (1, false) => one_part_low(&raw),
                (2, true) => two_parts(&raw),
                (2, false) => two_parts_low(&raw),
                (_, true) => three_parts(&raw),
                (_, false) => three_parts_low(&raw),
            }
        }
    }

    /// Proves the bounds.
    fn check(&self, rows: usize, block: Block<'_>) -> Raw {
        let Block { left, right, parts, inner, sums, add } = block;
        assert!((1..=STRIP).contains(&rows) && (1..=PARTS).contains(&parts) && inner > 0, "size of a block");
        assert!(left.len() >= parts_len(PARTS, inner) && right.len() >= parts_len(parts, inner), "parts of a block");
        assert!(sums.len() >= (rows.next_multiple_of(TILE) - 1) * SUM_STRIDE + PANEL, "sums of a block");
        let (left, right, sums) = (left.as_ptr(), right.as_ptr(), sums.as_mut_ptr());
        Raw { left, right, steps: inner.div_ceil(STEP), sums, add }
    }
}

/// A block whose bounds are proved.
struct Raw {
    left: *const bf16,
    right: *const bf16,
    steps: usize,
    sums: *mut f32,
    add: bool,
}

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
            "tileloadd tmm4, [{left} + {line} + ", $part, "]\n",
            "tileloadd tmm5, [{left} + {line} + ", $part, " + 1024]\n"
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
            "tileloadd tmm6, [{right} + {line} + ", $part, "]\n",
            "tileloadd tmm7, [{right} + {line} + ", $part, " + 1024]\n"
        )
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

/// Defines the product of a strip of one or two tiles of rows with a panel; `$step` is one inner step.
macro_rules! block {
    ($name:ident, $tiles:tt, $right_step:literal, $($step:expr),+) => {
        /// A strip times a panel.
        ///
        /// # Safety
        ///
        /// [`Tiles`] must be configured on this thread, `steps` positive, and `raw` describe a block that is in bounds.
        unsafe fn $name(raw: &Raw) {
            let Raw { left, right, steps, sums, add } = *raw;
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
                    concat!("add {left}, 6144\n add {right}, ", $right_step, "\n dec {steps}\n jnz 2b"),
                    accumulators!(store $tiles),
                    left = inout(reg) left => _,
                    right = inout(reg) right => _,
                    steps = inout(reg) steps => _,
                    out = in(reg) sums,
                    lower = in(reg) sums.wrapping_add(TILE * SUM_STRIDE),
                    stride = in(reg) SUM_STRIDE * size_of::<f32>(),
                    line = in(reg) 64usize,
                    add = in(reg) usize::from(add),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

// Each load changes one side, so that an inner step of six products takes seven pairs of loads; the largest product comes
// last, and those with a part that is not there are left out without changing the order of the others.
block!(three_parts, 2, "6144", left!(2, "4096"), right!("0"), products!(2), left!(2, "2048"), products!(2),
    right!("2048"), products!(2), left!(2, "0"), products!(2), right!("4096"), products!(2), right!("0"), products!(2));
block!(three_parts_low, 1, "6144", left!(1, "4096"), right!("0"), products!(1), left!(1, "2048"), products!(1),
    right!("2048"), products!(1), left!(1, "0"), products!(1), right!("4096"), products!(1), right!("0"), products!(1));
block!(two_parts, 2, "4096", left!(2, "4096"), right!("0"), products!(2), left!(2, "2048"), products!(2),
    right!("2048"), products!(2), left!(2, "0"), products!(2), right!("0"), products!(2));
block!(two_parts_low, 1, "4096", left!(1, "4096"), right!("0"), products!(1), left!(1, "2048"), products!(1),
    right!("2048"), products!(1), left!(1, "0"), products!(1), right!("0"), products!(1));
block!(one_part, 2, "2048", left!(2, "4096"), right!("0"), products!(2), left!(2, "2048"), products!(2),
    left!(2, "0"), products!(2));
block!(one_part_low, 1, "2048", left!(1, "4096"), right!("0"), products!(1), left!(1, "2048"), products!(1),
    left!(1, "0"), products!(1));

/// Splits pairs of vectors, as `amx_split` does; `$to` is the place of the first part.
macro_rules! split {
    ($($from:literal to $to:literal),+) => {
        concat!($(
            "vmovups zmm0, [{from} + ", $from, "]\n vmovups zmm1, [{from} + ", $from, " + 128]\n",
            "vpaddd zmm2, zmm0, {half}\n vpaddd zmm3, zmm1, {half}\n",
            "vpandd zmm4, zmm2, {upper}\n vpandd zmm5, zmm3, {upper}\n",
            "vsubps zmm0, zmm0, zmm4\n vsubps zmm1, zmm1, zmm5\n",
            "vpermt2w zmm2, {order}, zmm3\n vmovdqu64 [{to} + ", $to, "], zmm2\n",
            "vpandd zmm4, zmm0, {upper}\n vpandd zmm5, zmm1, {upper}\n",
            "vsubps zmm4, zmm0, zmm4\n vsubps zmm5, zmm1, zmm5\n",
            "vpermt2w zmm0, {order}, zmm1\n vmovdqu64 [{to} + ", $to, " + 2048], zmm0\n",
            "vpermt2w zmm4, {order}, zmm5\n vmovdqu64 [{to} + ", $to, " + 4096], zmm4\n"
        ),+)
    };
}

/// Defines the product of a strip of two tiles of rows and a panel of three parts, while pairs of rows of another panel
/// are split: vectors have nothing else to do while tiles are multiplied.
macro_rules! block_and_split {
    ($name:ident, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr) => {
        /// A strip times a panel, and a job.
        ///
        /// # Safety
        ///
        /// [`Tiles`] must be configured on this thread, `steps` positive, and `raw` describe a block that is in bounds; the
        /// pairs of every step must be readable from `from` on and ours to write from `to` on.
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn $name(raw: &Raw, from: *const f32, to: *mut bf16) {
            let Raw { left, right, steps, sums, add } = *raw;
            // SAFETY: by the caller's promise.
            unsafe {
                asm!(
                    "test {add}, {add}",
                    "jnz 3f",
                    "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
                    "jmp 2f",
                    "3:",
                    accumulators!(load 2),
                    "2:",
                    left!(2, "4096"), right!("0"), products!(2), $a,
                    left!(2, "2048"), products!(2), $b,
                    right!("2048"), products!(2), $c,
                    left!(2, "0"), products!(2), $d,
                    right!("4096"), products!(2), $e,
                    right!("0"), products!(2), $f,
                    "add {left}, 6144\n add {right}, 6144\n add {from}, 4096\n add {to}, 6144\n dec {steps}\n jnz 2b",
                    accumulators!(store 2),
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
                    order = in(zmm_reg) amx_split::pairs(),
                    half = in(zmm_reg) _mm512_set1_epi32(amx_split::HALF),
                    upper = in(zmm_reg) _mm512_set1_epi32(amx_split::UPPER),
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

block_and_split!(split_quarter, split!("0" to "0"), split!("64" to "1024"), split!("256" to "64"),
    split!("320" to "1088", "512" to "128"), split!("576" to "1152"), split!("768" to "192", "832" to "1216"));
block_and_split!(split_half, split!("0" to "0", "64" to "1024", "256" to "64"),
    split!("320" to "1088", "512" to "128", "576" to "1152"), split!("768" to "192", "832" to "1216", "1024" to "256"),
    split!("1088" to "1280", "1280" to "320", "1344" to "1344"), split!("1536" to "384", "1600" to "1408"),
    split!("1792" to "448", "1856" to "1472"));
