//! Weights of bf16 in 12 bits each, without loss.
//!
//! The exponents of a trained matrix are few. A panel has a table of sixteen, and a weight has the code of its own in
//! four bits, beside its sign and fraction as they are. The first of the table is that of zeros and subnormal numbers.
//! A weight whose exponent is not in the table is a patch, which stands behind the panel.
//!
//! A panel is a head with the table, then groups of eight inner steps in three rows of bytes: codes, those of the later
//! four steps in the upper halves, and signs with fractions of four steps each. A permutation of bytes looks codes up,
//! once for what exponents have in the upper byte of a bf16 and once for the lower. A row has 16 bytes for each four
//! columns: steps 0 and 1 of each of these, then steps 2 and 3. So upper and lower bytes, interleaved eight by eight,
//! are pairs of steps, column after column.

use std::cell::Cell;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::avx512_compact;
use super::{Instructions, Isa, Left, PANEL, Place, Right};
use crate::buffer::{Buffer, LINE, emptied};
use crate::grid::Tile;

/// Inner steps of a group.
pub(super) const GROUP_STEPS: usize = 8;

/// Rows of a group.
const GROUP_ROWS: usize = 3;

/// Steps of a row.
const STEPS_OF_ROW: usize = 4;

/// Words of a group, [`PANEL`] for each row.
pub(super) const GROUP: usize = GROUP_ROWS * PANEL;

/// Words before the groups.
pub(super) const HEAD: usize = PANEL;

/// Exponents in the table of a panel.
pub(super) const TABLE: usize = 16;

/// Words of one byte for each of them.
pub(super) const TABLE_WORDS: usize = TABLE / size_of::<u32>();

/// Bits of a code.
const BITS: u32 = 4;

/// The sign in a byte that has it and the fraction.
const SIGN: u32 = 0x80;

/// Most rows that are multiplied without unpacking.
pub(super) const MOST_ROWS: usize = 8;

/// The place of the patch behind the last one.
const END: u32 = u32::MAX;

/// Columns whose pairs of steps stand side by side.
const COLUMNS_OF_RUN: usize = 4;

/// Bytes of unpacked panels that a thread keeps, unless one alone has more.
const UNPACKED: usize = 262_144;

thread_local! {
    static PANELS: Cell<Buffer<[bf16; 2]>> = Cell::default();
}

/// Panels of a weight, one after the other.
#[derive(Debug)]
pub(crate) struct Compact {
    words: Buffer<u32>,
    inner: usize,
    /// Words of a panel.
    len: usize,
}

/// Panels from one of them on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CompactPanels<'a> {
    words: &'a [u32],
    inner: usize,
    len: usize,
}

/// What rows are multiplied with compact panels: every pointer that a microkernel reaches is in bounds.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct CompactRaw {
    pub(super) left: [*const f32; super::ROWS],
    pub(super) inner: usize,
    pub(super) panel: *const u32,
    /// Places and bits by turns, in rising order of places, up to [`END`].
    pub(super) patches: *const u32,
    pub(super) out: [*mut f32; super::ROWS],
    /// Columns of the panel that are written.
    pub(super) columns: usize,
    /// One factor a row for what is added; null where the destination is replaced.
    pub(super) factors: *const f32,
}

/// The exponent of a bf16 as it is stored.
fn exponent(value: bf16) -> usize {
    usize::from(value.to_bits() >> 7 & 0xff)
}

/// The bits that an exponent has in the upper byte of a bf16, and in the lower.
fn bytes_of_exponent(exponent: u8) -> [u8; 2] {
    [exponent >> 1, exponent << 7]
}

/// The word of a row that holds a step of a column, and how far up in it.
fn place_in_row(step: usize, column: usize) -> (usize, u32) {
    let run = column / COLUMNS_OF_RUN * 2 + step % STEPS_OF_ROW / 2;
    let byte = run * 2 * COLUMNS_OF_RUN + column % COLUMNS_OF_RUN * 2 + step % 2;
    (byte / size_of::<u32>(), u8::BITS * (byte % size_of::<u32>()) as u32)
}

/// Bytes that a thread keeps once it has unpacked panels of `inner` steps.
pub(crate) fn thread_bytes(inner: usize) -> usize {
    UNPACKED.max(pairs_of(inner) * size_of::<[bf16; 2]>()) + LINE
}

/// Pairs of bf16 in an unpacked panel.
fn pairs_of(inner: usize) -> usize {
    inner.div_ceil(2) * PANEL
}

/// Words of the head and the groups of a panel.
fn words_of(inner: usize) -> usize {
    HEAD + inner.div_ceil(GROUP_STEPS) * GROUP
}

/// Whether every place of a patch is below [`END`], and the end of every group not above it.
fn has_places(inner: usize) -> bool {
    let steps = inner.checked_next_multiple_of(GROUP_STEPS);
    steps.and_then(|steps| steps.checked_mul(PANEL)).is_some_and(|end| end <= END as usize)
}

/// The table of a panel, 0 and the most frequent other exponents, and how many weights have none of these.
fn table_of(source: &[bf16], place: &Place) -> ([u8; TABLE], usize) {
    let mut counts = [0usize; 256];
    for row in 0..place.rows {
        place.row(source, row).iter().for_each(|value| counts[exponent(*value)] += 1);
    }
    let mut all: [u8; 256] = std::array::from_fn(|exponent| exponent as u8);
    all[1..].sort_by_key(|exponent| std::cmp::Reverse(counts[usize::from(*exponent)]));
    let (table, others) = all.split_at(TABLE);
    let patches = others.iter().map(|exponent| counts[usize::from(*exponent)]).sum();
    (std::array::from_fn(|code| table[code]), patches)
}

/// Most patches of a panel: each takes a group another way, so that many would cost the time that is saved.
fn most_patches(inner: usize) -> usize {
    inner / GROUP_STEPS / 4 + 4
}

impl Compact {
    /// Packs matrices whose panel `panel` stands at `place(panel)`; `None` where one has more patches than
    /// [`most_patches`].
    ///
    /// # Panics
    ///
    /// With [`crate::OutOfMemory`].
    pub(crate) fn new(panels: usize, inner: usize, place: impl Fn(usize) -> Place, source: &[bf16]) -> Option<Self> {
        if !has_places(inner) {
            return None;
        }
        let mut tables = Vec::new();
        emptied(&mut tables, panels).extend((0..panels).map(|panel| table_of(source, &place(panel))));
        let most = tables.iter().map(|(_, patches)| *patches).max()?;
        if most > most_patches(inner) {
            return None;
        }
        let len = words_of(inner) + (2 * most + 1).next_multiple_of(PANEL);
        let mut words = Buffer::default();
        let all = words.take(panels.checked_mul(len)?);
        for (panel, (words, (table, _))) in all.chunks_exact_mut(len).zip(&tables).enumerate() {
            pack(source, &place(panel), table, words.split_at_mut(words_of(inner)));
        }
        Some(Self { words, inner, len })
    }

    /// The panels from `panel` on.
    pub(crate) fn panels_from(&self, panel: usize) -> CompactPanels<'_> {
        CompactPanels { words: self.words.filled(), inner: self.inner, len: self.len }.panels_from(panel)
    }

    /// Whether every panel holds what is at its place, bit by bit.
    pub(crate) fn holds(&self, place: impl Fn(usize) -> Place, source: &[bf16]) -> bool {
        (0..self.words.filled().len() / self.len).all(|panel| {
            let place = place(panel);
            let mut held = false;
            self.panels_from(panel).with_unpacked(Isa::at_most(Instructions::default()), 1, |right| {
                held = (0..place.rows).all(|step| {
                    let mut pairs = right.data[step / 2 * PANEL..].iter().zip(place.row(source, step));
                    pairs.all(|(pair, value)| pair[step % 2].to_bits() == value.to_bits())
                });
            });
            held
        })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.words.bytes()
    }

    /// Bytes of so many weights, without heads and patches.
    pub(crate) fn bytes_of(weights: usize) -> usize {
        weights.saturating_mul(GROUP_ROWS * size_of::<u32>()) / GROUP_STEPS
    }
}

/// Packs one panel.
fn pack(source: &[bf16], place: &Place, table: &[u8; TABLE], (panel, patches): (&mut [u32], &mut [u32])) {
    panel.fill(0);
    patches.fill(END);
    let (head, groups) = panel.split_at_mut(HEAD);
    let mut codes = [None; 256];
    for (code, exponent) in table.iter().enumerate() {
        codes[usize::from(*exponent)] = Some(code as u32);
        let (word, up) = (code / size_of::<u32>(), u8::BITS * (code % size_of::<u32>()) as u32);
        let [upper, lower] = bytes_of_exponent(*exponent).map(u32::from);
        head[word] |= upper << up;
        head[TABLE_WORDS + word] |= lower << up;
    }
    let mut filled = 0;
    for row in 0..place.rows {
        let (group, step) = (&mut groups[row / GROUP_STEPS * GROUP..][..GROUP], row % GROUP_STEPS);
        let (row_codes, rest) = group.split_at_mut(PANEL);
        let (half, rest) = (step / STEPS_OF_ROW, &mut rest[step / STEPS_OF_ROW * PANEL..]);
        for (column, value) in place.row(source, row).iter().enumerate() {
            let ((word, up), bits) = (place_in_row(step, column), u32::from(value.to_bits()));
            rest[word] |= (bits >> u8::BITS & SIGN | bits & (SIGN - 1)) << up;
            match codes[exponent(*value)] {
                Some(code) => row_codes[word] |= code << (up + BITS * half as u32),
                None => {
                    patches[filled..][..2].copy_from_slice(&[(row * PANEL + column) as u32, bits]);
                    filled += 2;
                }
            }
        }
    }
}

impl<'a> CompactPanels<'a> {
    /// From panel `panel` of these on.
    pub(crate) fn panels_from(self, panel: usize) -> Self {
        Self { words: &self.words[panel * self.len..], ..self }
    }

    /// Their words, to be fetched.
    pub(crate) fn words(self) -> &'a [u32] {
        self.words
    }

    /// Words of a panel.
    pub(crate) fn panel_words(self) -> usize {
        self.len
    }

    /// Panels that are unpacked at a time.
    pub(crate) fn at_a_time(self) -> usize {
        (UNPACKED / (pairs_of(self.inner) * size_of::<[bf16; 2]>()).max(1)).max(1)
    }

    /// Calls `multiply` with the first `panels` panels as pairs of inner steps, in memory of this thread.
    ///
    /// # Panics
    ///
    /// If they are more than [`Self::at_a_time`], or than there are.
    pub(crate) fn with_unpacked(self, isa: Isa, panels: usize, multiply: impl FnOnce(Right<'_, [bf16; 2]>)) {
        assert!(panels <= self.at_a_time(), "panels at a time");
        let len = pairs_of(self.inner);
        let mut buffer = PANELS.take();
        let pairs = &mut buffer.take(len.max(UNPACKED / size_of::<[bf16; 2]>()))[..panels * len];
        for (panel, pairs) in pairs.chunks_exact_mut(len.max(1)).enumerate() {
            self.panels_from(panel).unpack(isa, pairs);
        }
        multiply(Right { data: pairs, stride: PANEL, panel_stride: len });
        PANELS.set(buffer);
    }

    /// Groups, and the patches behind them.
    fn parts(self) -> (&'a [u32], &'a [u32]) {
        self.words[..self.len].split_at(words_of(self.inner))
    }

    /// Unpacks the first panel.
    fn unpack(self, isa: Isa, out: &mut [[bf16; 2]]) {
        assert_eq!(out.len(), pairs_of(self.inner), "size of a panel");
        let (words, patches) = self.parts();
        unpack_known(isa, words, out);
        let patches = patches.as_chunks::<2>().0.iter().take_while(|[place, _]| *place != END);
        for [place, bits] in patches {
            let (step, column) = (*place as usize / PANEL, *place as usize % PANEL);
            out[step / 2 * PANEL + column][step % 2] = bf16::from_bits(*bits as u16);
        }
    }

    /// Multiplies rows with the columns `0 .. columns` without unpacking; `false` where `isa` does not serve that, or
    /// there are more than [`MOST_ROWS`].
    ///
    /// # Panics
    ///
    /// If a row, a panel or the destination does not fit its slice.
    pub(crate) fn multiply(
        self,
        isa: Isa,
        left: Left<'_>,
        (rows, columns): (&[usize], usize),
        factors: Option<&[f32]>,
        out: &mut Tile<'_, f32>,
    ) -> bool {
        let count = left.starts.len();
        if !serves(isa) || !(1..=MOST_ROWS).contains(&count) || columns == 0 {
            return false;
        }
        assert!(left.inner == self.inner && left.blocks.is_none(), "rows of as many steps");
        assert!(columns.div_ceil(PANEL) <= self.words.len() / self.len, "panels");
        assert!(columns <= out.columns(), "destination columns");
        assert!(factors.is_none_or(|factors| factors.len() >= count), "one factor a row");
        let mut raw = CompactRaw {
            left: [std::ptr::null(); super::ROWS],
            inner: left.inner,
            panel: std::ptr::null(),
            patches: std::ptr::null(),
            out: [std::ptr::null_mut(); super::ROWS],
            columns: 0,
            factors: factors.map_or(std::ptr::null(), <[f32]>::as_ptr),
        };
        left.rows(&mut raw.left);
        for column in (0..columns).step_by(PANEL) {
            let (words, patches) = self.panels_from(column / PANEL).parts();
            (raw.panel, raw.patches, raw.columns) = (words.as_ptr(), patches.as_ptr(), PANEL.min(columns - column));
            out.starts(&rows[..count], column, &mut raw.out);
            // SAFETY: `Left::rows` and `Tile::starts` proved `count` rows on both sides, and a factor for each was
            // asserted; `serves` proves that the processor has AVX-512 F and BW. The panel and its patches are as
            // `pack` made them: groups for `inner` steps, and rising patches up to an `END`, which by `has_places` is
            // not before the end of the last group. The destination is borrowed mutably, so it meets nothing that is
            // read.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                avx512_compact::multiply(count, &raw);
            }
        }
        true
    }
}

/// Unpacks a panel but for its patches.
fn unpack_known(isa: Isa, words: &[u32], out: &mut [[bf16; 2]]) {
    let (head, groups) = words.split_at(HEAD);
    let groups = groups.as_chunks::<GROUP>().0;
    #[cfg(target_arch = "x86_64")]
    if serves(isa) {
        // SAFETY: the head has the table, and `out` whole rows of pairs; `serves` proves that the processor has AVX-512
        // F and BW.
        return unsafe { avx512_compact::unpack(head.as_ptr(), groups, out) };
    }
    let _ = isa;
    for (group, out) in groups.iter().zip(out.chunks_mut(GROUP_STEPS / 2 * PANEL)) {
        for (pair, out) in out.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            for (column, out) in out.iter_mut().enumerate() {
                *out = [2 * pair, 2 * pair + 1].map(|step| value(head, group, step, column));
            }
        }
    }
}

/// One weight of a group, unless it is a patch.
fn value(head: &[u32], group: &[u32; GROUP], step: usize, column: usize) -> bf16 {
    let ((word, up), half) = (place_in_row(step, column), step / STEPS_OF_ROW);
    let code = group[word] >> (up + BITS * half as u32) & (TABLE as u32 - 1);
    let (of_exponent, shift) = (code as usize / size_of::<u32>(), u8::BITS * (code % size_of::<u32>() as u32));
    let [upper, lower] = [0, TABLE_WORDS].map(|table| head[table + of_exponent] >> shift & 0xff);
    let rest = group[(1 + half) * PANEL + word] >> up & 0xff;
    bf16::from_bits(((upper | rest & SIGN) << u8::BITS | lower | rest & (SIGN - 1)) as u16)
}

/// Whether rows may be multiplied without unpacking.
pub(crate) fn serves(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa.has_wide_vectors() && is_x86_feature_detected!("avx512bw");
    #[cfg(not(target_arch = "x86_64"))]
    return {
        let _ = isa;
        false
    };
}

#[cfg(test)]
#[path = "compact_tests.rs"]
mod tests;
