//! AMX: whether it may be used, and the door to it.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::ops::Range;
use std::sync::OnceLock;

use half::bf16;

use super::amx_blocks::{self, Raw};
use super::magnitudes::Magnitudes;
use super::product::{Left, Right};
use super::strip_softmax::Beside;
use super::tiles::{Block, Job, PARTS, QUARTER, STEP, STRIP, SUM_STRIDE, Stream, TILE, parts_len};
use super::{Element, PANEL, amx_rounded, amx_softmax, amx_split};

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
    if !is_x86_feature_detected!("avx512bw")
        || !is_x86_feature_detected!("avx512bf16")
        || __cpuid(0).eax < 0x1d
        || __cpuid(1).ecx & OSXSAVE == 0
    {
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

/// Rows that are split side by side.
const ROWS_TOGETHER: usize = 4;

/// Tiles of this thread, configured while it lives and released after it.
pub(super) struct Tiles(std::marker::PhantomData<*const ()>);

impl Tiles {
    /// Configures the tiles of this thread.
    ///
    /// # Safety
    ///
    /// [`available`] must be true, and no other `Tiles` of this thread alive.
    pub(super) unsafe fn configure() -> Option<Self> {
        // SAFETY: the configuration is valid for the palette that `available` checked.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly, preserves_flags))
        };
        Some(Self(std::marker::PhantomData))
    }

    /// Splits the first panel of `right`, of `inner` rows, into `out`: the pairs of rows `pairs` of every tile.
    ///
    /// # Panics
    ///
    /// If the panel does not fit its slice, or the parts do not fit `out`.
    pub(super) fn split_panel<W: Element>(
        &self,
        right: Right<'_, W>,
        inner: usize,
        out: &mut [bf16],
        pairs: Range<usize>,
    ) {
        let end = W::rows(inner).checked_sub(1).and_then(|rows| rows.checked_mul(right.stride));
        let end = end.and_then(|start| start.checked_add(PANEL));
        assert!(end.is_some_and(|end| end <= right.data.len()), "right out of bounds");
        assert!(W::ROWS == 1 || right.stride == PANEL, "rows of a group side by side");
        assert!(out.len() >= parts_len(W::PARTS, inner) && pairs.end <= TILE, "room for a panel");
        // SAFETY: the bounds are proved, and tiles come with the instructions.
        unsafe { amx_split::panel(right.data.as_ptr(), right.stride, inner, out.as_mut_ptr(), pairs) }
    }

    /// Splits `inner` elements of up to [`STRIP`] rows from element `first` on into `out`, and takes them into `found`
    /// where they are to be judged.
    ///
    /// # Panics
    ///
    /// If a row does not fit its slice, or the parts do not fit `out`.
    pub(super) fn split_strip<const JUDGE: bool>(
        &self,
        left: Left<'_>,
        first: usize,
        inner: usize,
        out: &mut [bf16],
        found: &mut [Magnitudes],
    ) {
        assert!(left.starts.len() <= STRIP && out.len() >= parts_len(PARTS, inner), "room for a strip");
        let from = |row: usize| left.data[left.starts[row] + first..][..inner].as_ptr();
        for (group, found) in found[..left.starts.len()].chunks_mut(ROWS_TOGETHER).enumerate() {
            let row = group * ROWS_TOGETHER;
            // SAFETY: the bounds are proved, and tiles come with the instructions.
            unsafe {
                if let [a, b, c, d] = found {
                    let from = [from(row), from(row + 1), from(row + 2), from(row + 3)];
                    let new = amx_split::rows::<ROWS_TOGETHER, JUDGE>(from, inner, out.as_mut_ptr(), row);
                    [a, b, c, d].into_iter().zip(new).for_each(|(found, new)| *found = found.join(new));
                    continue;
                }
                for (place, found) in found.iter_mut().enumerate() {
                    let [new] = amx_split::rows::<1, JUDGE>([from(row + place)], inner, out.as_mut_ptr(), row + place);
                    *found = found.join(new);
                }
            }
        }
    }

    /// Rounds `inner` elements of up to [`STRIP`] rows from element `first` on into `out`, a strip of one part.
    ///
    /// # Panics
    ///
    /// If a row does not fit its slice, or the parts do not fit `out`.
    pub(super) fn round_strip(&self, left: Left<'_>, first: usize, inner: usize, out: &mut [bf16]) {
        assert!(left.starts.len() <= STRIP && out.len() >= parts_len(1, inner), "room for a strip");
        let from = |row: usize| left.data[left.starts[row] + first..][..inner].as_ptr();
        let (whole, rest) = left.starts.as_chunks::<ROWS_TOGETHER>();
        // SAFETY: the bounds are proved, and tiles come with the instructions.
        unsafe {
            for row in (0..whole.len()).map(|group| group * ROWS_TOGETHER) {
                let from = [from(row), from(row + 1), from(row + 2), from(row + 3)];
                amx_split::round_rows(from, inner, out.as_mut_ptr(), row);
            }
            for row in left.starts.len() - rest.len()..left.starts.len() {
                amx_split::round_rows([from(row)], inner, out.as_mut_ptr(), row);
            }
        }
    }

    /// Rounds the rows of a panel into pairs of rows in bf16, zeros after them up to a whole [`STEP`].
    ///
    /// # Panics
    ///
    /// If a row is not whole, or the pairs do not fit `out`.
    pub(super) fn round_panel(&self, panel: &[f32], out: &mut [bf16]) {
        let inner = panel.len() / PANEL;
        assert!(panel.len().is_multiple_of(PANEL) && out.len() >= parts_len(1, inner), "room for pairs");
        // SAFETY: the bounds are proved, and tiles come with the instructions.
        unsafe { amx_split::round_panel(panel.as_ptr(), inner, out.as_mut_ptr()) }
    }

    /// Writes the rows of a panel of integers as pairs of rows in bf16, zeros after them; where `FETCH`, what stands
    /// two pages behind them is fetched.
    ///
    /// # Panics
    ///
    /// If a row is not whole, or the pairs do not fill `out`.
    pub(super) fn pair_integers<const FETCH: bool>(&self, integers: &[i8], out: &mut [bf16]) {
        let inner = integers.len() / PANEL;
        assert!(
            integers.len().is_multiple_of(PANEL) && out.len() == inner.next_multiple_of(2) * PANEL,
            "room for pairs"
        );
        // SAFETY: the bounds are proved, and tiles come with the instructions.
        unsafe { amx_split::pair_integers::<FETCH>(integers.as_ptr(), inner, out.as_mut_ptr()) }
    }

    /// Magnitudes of whole vectors of values.
    ///
    /// # Panics
    ///
    /// If a group of rows is not whole.
    pub(super) fn magnitudes<W: Element>(&self, values: &[W]) -> Magnitudes {
        assert!(values.len().is_multiple_of(W::ROWS * PANEL), "whole groups of rows");
        // SAFETY: the values are there, and tiles come with the instructions.
        unsafe { amx_split::magnitudes(values.as_ptr(), values.len()) }
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

impl Tiles {
    /// As [`Tiles::multiply`] for more than [`TILE`] rows and a panel of [`PARTS`] parts, while `job` is done.
    ///
    /// # Panics
    ///
    /// If something does not fit its slice.
    pub(super) fn multiply_and_split(&self, rows: usize, block: Block<'_>, job: Job<'_>) {
        let (inner, Job { from, to, first, pairs }) = (block.inner.next_multiple_of(STEP), job);
        let (parts, of) = (block.left_parts, block.parts);
        assert!(rows > TILE && parts == PARTS && of == PARTS && first + pairs <= TILE, "size of a block");
        assert!([QUARTER, 2 * QUARTER, TILE].contains(&pairs), "size of a job");
        assert!(from.len() >= inner * PANEL && to.len() >= parts_len(PARTS, inner), "panel to split");
        let raw = self.check(rows, block);
        // SAFETY: the bounds are proved, and `self` that the tiles of this thread are configured.
        unsafe {
            let (from, to) = (from.as_ptr().add(first * 2 * PANEL), to.as_mut_ptr().add(first * STEP));
            match pairs {
                QUARTER => amx_blocks::split_quarter(&raw, from, to),
                TILE => amx_blocks::split_all(&raw, from, to),
                _ => amx_blocks::split_half(&raw, from, to),
            }
        }
    }

    /// `rows` rows, at most a strip, times steps of a panel, each split while the one before it is multiplied; rows of
    /// sums up to a whole tile are written.
    ///
    /// # Panics
    ///
    /// If something does not fit its slice.
    pub(super) fn multiply_stream(&self, rows: usize, stream: Stream<'_>) {
        let Stream { left, slots, slot, from, steps, sums, add } = stream;
        let len = parts_len(PARTS, STEP);
        assert!(slots.len() >= 2 * len && slot < 2, "two slots");
        assert!(from.len() >= steps * STEP * PANEL, "steps to split");
        assert!(left.len() >= parts_len(PARTS, steps * STEP) && steps > 0, "parts of a stream");
        let block = Block { left, left_parts: PARTS, right: &slots[..len], parts: PARTS, inner: STEP, sums, add };
        let mut raw = self.check(rows, block);
        let start = slots.as_mut_ptr();
        (raw.right, raw.steps) = (start.wrapping_add(slot * len), steps);
        let to = start.wrapping_add((1 - slot) * len);
        // SAFETY: `check` proved the sums and one step of the right factor, whose slots alternate; the other bounds are
        // proved above. `self` proves that the tiles of this thread are configured.
        unsafe {
            match rows > TILE {
                true => amx_blocks::stream(&raw, from.as_ptr(), to),
                false => amx_blocks::stream_low(&raw, from.as_ptr(), to),
            }
        }
    }

    /// `rows` rows, at most a strip, times a panel; rows of sums up to a whole tile are written.
    ///
    /// # Panics
    ///
    /// If something does not fit its slice.
    pub(super) fn multiply(&self, rows: usize, block: Block<'_>) {
        let ahead = block.right.as_ptr().cast();
        self.multiply_fetching(rows, block, ahead);
    }

    /// As [`Tiles::multiply`]; blocks of one part fetch what stands at `ahead`, [`FETCHED`] bytes for each step.
    ///
    /// # Panics
    ///
    /// If something does not fit its slice.
    pub(super) fn multiply_fetching(&self, rows: usize, block: Block<'_>, ahead: *const u8) {
        let parts = (block.left_parts, block.parts);
        let raw = Raw { ahead, ..self.check(rows, block) };
        // SAFETY: the bounds are proved, and `self` that the tiles of this thread are configured.
        unsafe {
            match (parts, rows > TILE) {
                ((1, 1), true) => amx_rounded::pairs(&raw),
                ((1, 1), false) => amx_rounded::pairs_low(&raw),
                ((1, _), true) => amx_rounded::two_parts(&raw),
                ((1, _), false) => amx_rounded::two_parts_low(&raw),
                ((_, 1), true) => amx_blocks::pairs(&raw),
                ((_, 1), false) => amx_blocks::pairs_low(&raw),
                ((_, 2), true) => amx_blocks::two_parts(&raw),
                ((_, 2), false) => amx_blocks::two_parts_low(&raw),
                (_, true) => amx_blocks::three_parts(&raw),
                (_, false) => amx_blocks::three_parts_low(&raw),
            }
        }
    }

    /// As [`Tiles::multiply`] with as many parts on both sides, while pieces of a softmax are done; none are beside a
    /// strip of one tile of rows.
    ///
    /// # Panics
    ///
    /// If something does not fit its slice.
    pub(super) fn multiply_beside(&self, rows: usize, block: Block<'_>, beside: Option<&mut Beside<'_>>) {
        let parts = block.parts;
        assert!(parts == block.left_parts && !block.add, "block beside a softmax");
        let Some(beside) = beside.filter(|_| rows > TILE) else { return self.multiply(rows, block) };
        beside.check();
        let raw = self.check(rows, block);
        let (scores, out) = (beside.scores.as_ptr(), beside.parts.as_mut_ptr());
        // SAFETY: the bounds are proved, and `self` that the tiles of this thread are configured.
        unsafe {
            match parts {
                1 => amx_rounded::beside_softmax(&raw, beside.softmax, scores, out),
                _ => amx_blocks::beside_softmax(&raw, beside.softmax, scores, out),
            }
        }
    }

    /// Does all pieces of a softmax that are left, whose weights have so many parts.
    ///
    /// # Panics
    ///
    /// If something does not fit its slice.
    pub(super) fn finish(&self, beside: &mut Beside<'_>, parts: usize) {
        beside.check();
        // SAFETY: the bounds are proved, and tiles come with the instructions.
        unsafe { amx_softmax::finish(beside.softmax, beside.scores.as_ptr(), beside.parts.as_mut_ptr(), parts == 1) }
    }

    /// Proves the bounds.
    fn check(&self, rows: usize, block: Block<'_>) -> Raw {
        let Block { left, left_parts, right, parts, inner, sums, add } = block;
        let products = matches!((left_parts, parts), (PARTS, 1..=PARTS) | (1, 1..=2));
        assert!((1..=STRIP).contains(&rows) && products && inner > 0, "size of a block");
        let fits = left.len() >= parts_len(left_parts, inner) && right.len() >= parts_len(parts, inner);
        assert!(fits, "parts of a block");
        assert!(sums.len() >= (rows.next_multiple_of(TILE) - 1) * SUM_STRIDE + PANEL, "sums of a block");
        let (left, right, sums) = (left.as_ptr(), right.as_ptr(), sums.as_mut_ptr());
        Raw { left, right, steps: inner.div_ceil(STEP), sums, add, ahead: right.cast() }
    }
}
