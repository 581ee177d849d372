//! The softmax of a strip of scores in pieces that stand between products of tiles.

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_maskz_loadu_ps, _mm512_maskz_mov_ps,
    _mm512_reduce_add_ps, _mm512_set1_ps, _mm512_setzero_si512, _mm512_storeu_ps, _mm512_sub_ps,
};

use half::bf16;

use super::avx512_softmax::{Exps, STEP as PIECE, VECTORS, exp, exps, first_lanes, largest};
use super::strip_softmax::{PIECE_LEN, StripSoftmax};
use super::tiles::{PARTS, STEP, STRIP, SUM_STRIDE, TILE, TILE_LEN};
use super::{LANES, amx_split};

const _: () = assert!(PIECE_LEN == PIECE && PIECE == 2 * STEP);

/// How weights stand as the left factor of the next product.
trait Weights {
    /// Parts of a weight.
    const PARTS: usize;

    /// Writes one row of a step of a strip.
    ///
    /// # Safety
    ///
    /// Lines of all parts must be ours to write from `out` on; the processor must have AVX-512 F and BW, and
    /// AVX512_BF16.
    unsafe fn store(&self, values: [__m512; 2], out: *mut bf16);
}

/// Split into three parts, in this order of [`amx_split::in_turn`].
struct Split(__m512i);

impl Weights for Split {
    const PARTS: usize = PARTS;

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    unsafe fn store(&self, values: [__m512; 2], out: *mut bf16) {
        // SAFETY: by the caller's promise.
        unsafe { amx_split::store_step(values, self.0, out) }
    }
}

/// Rounded to bf16.
struct Rounded;

impl Weights for Rounded {
    const PARTS: usize = 1;

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    unsafe fn store(&self, values: [__m512; 2], out: *mut bf16) {
        // SAFETY: by the caller's promise.
        unsafe { amx_split::store_rounded(values, out) }
    }
}

/// Does the next piece; none where all are done.
///
/// # Safety
///
/// `scores` must be readable in as many rows as `softmax` has, [`SUM_STRIDE`] apart, of as many elements as the tile
/// has keys, up to a whole piece; the parts of a strip of as many inner steps must be ours to write at `out`; the
/// processor must have AVX-512 F and BW, and AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
pub(super) unsafe fn step(softmax: &mut StripSoftmax, scores: *const f32, out: *mut bf16, order: __m512i) {
    // SAFETY: by the caller's promise.
    unsafe { step_of(softmax, scores, out, &Split(order)) }
}

/// As [`step`] of a strip of one part.
///
/// # Safety
///
/// As for [`step`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
pub(super) unsafe fn rounded_step(softmax: &mut StripSoftmax, scores: *const f32, out: *mut bf16) {
    // SAFETY: by the caller's promise.
    unsafe { step_of(softmax, scores, out, &Rounded) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
unsafe fn step_of<W: Weights>(softmax: &mut StripSoftmax, scores: *const f32, out: *mut bf16, form: &W) {
    let row = softmax.row;
    if row >= softmax.rows() {
        return finish_rows(softmax);
    }
    // SAFETY: by the caller's promise.
    unsafe {
        begin_row(softmax, scores);
        let first = softmax.first;
        let (scores, out) = (scores.add(row * SUM_STRIDE), out.add(place_of::<W>(row, first)));
        let seen = softmax.seen(row).saturating_sub(first);
        match seen >= PIECE {
            true => weights::<true, W>(softmax, scores.add(first), out, PIECE, form),
            false => weights::<false, W>(softmax, scores.add(first), out, seen, form),
        }
    }
    go_on(softmax, PIECE);
}

/// Finds the maximum of a row whose first piece is next.
///
/// # Safety
///
/// As for [`step`].
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn begin_row(softmax: &mut StripSoftmax, scores: *const f32) {
    let row = softmax.row;
    if softmax.first == 0 {
        // SAFETY: by the caller's promise.
        softmax.new[row] = unsafe { largest(scores.add(row * SUM_STRIDE), softmax.seen(row), softmax.max[row]) };
        softmax.lanes = [0.0; LANES];
    }
}

/// Where the piece of a row from score `first` on goes.
fn place_of<W: Weights>(row: usize, first: usize) -> usize {
    row / TILE * TILE_LEN + row % TILE * STEP + first / STEP * W::PARTS * 2 * TILE_LEN
}

/// Goes on to what stands `scores` scores behind, or to the next row.
#[target_feature(enable = "avx512f")]
#[inline]
fn go_on(softmax: &mut StripSoftmax, scores: usize) {
    softmax.first += scores;
    if softmax.first >= softmax.keys() {
        // SAFETY: the array has the size of a vector.
        softmax.added[softmax.row] = unsafe { _mm512_reduce_add_ps(_mm512_loadu_ps(softmax.lanes.as_ptr())) };
        (softmax.row, softmax.first) = (softmax.row + 1, 0);
    }
}

/// Stages of a piece of [`Whole`].
pub(super) const STAGES: usize = 12;

/// `PIECES` pieces of one row, of whose keys all are seen, in stages that stand behind products.
pub(super) struct Whole<const PIECES: usize> {
    scores: *const f32,
    out: *mut bf16,
    order: __m512i,
    shift: __m512,
    lanes: __m512,
    exps: Exps<VECTORS>,
    weights: [__m512; VECTORS],
    parts: [[__m512i; PARTS]; VECTORS],
}

impl<const PIECES: usize> Whole<PIECES> {
    /// The next pieces, if as many are due and the row that they are of sees all of their keys.
    ///
    /// # Safety
    ///
    /// As for [`step`].
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    pub(super) unsafe fn next(
        softmax: &mut StripSoftmax,
        scores: *const f32,
        out: *mut bf16,
        order: __m512i,
    ) -> Option<Self> {
        if !softmax.take_whole(PIECES) {
            return None;
        }
        let (row, first) = (softmax.row, softmax.first);
        // SAFETY: by the caller's promise.
        unsafe {
            begin_row(softmax, scores);
            let lanes = _mm512_loadu_ps(softmax.lanes.as_ptr());
            Some(Self {
                scores: scores.add(row * SUM_STRIDE + first),
                out: out.add(place_of::<Split>(row, first)),
                order,
                shift: _mm512_set1_ps(softmax.new[row]),
                lanes,
                exps: Exps::new([lanes; VECTORS]),
                weights: [lanes; VECTORS],
                parts: [[_mm512_setzero_si512(); PARTS]; VECTORS],
            })
        }
    }

    /// A stage, [`STAGES`] of each piece, in their order.
    ///
    /// # Safety
    ///
    /// As for [`step`], of the softmax that [`Whole::next`] had.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    pub(super) unsafe fn stage<const STAGE: usize>(&mut self) {
        const { assert!(STAGE < PIECES * STAGES, "a stage of these pieces") };
        let piece = STAGE / STAGES;
        let [a, b, c, d] = self.weights;
        // SAFETY: by the caller's promise.
        unsafe {
            let out = self.out.add(piece * 2 * PARTS * 2 * TILE_LEN);
            match STAGE % STAGES {
                0 => {
                    let scores = self.scores.add(piece * PIECE);
                    self.exps = Exps::new(std::array::from_fn(|vector| {
                        _mm512_sub_ps(_mm512_loadu_ps(scores.add(vector * LANES)), self.shift)
                    }));
                }
                1 => self.exps.powers(),
                2 => self.exps.rests(),
                3 => self.exps.first_terms(),
                4 => self.exps.last_terms(),
                5 => self.exps.square(),
                6 => self.weights = self.exps.finish(),
                7 => self.lanes = self.weights.into_iter().fold(self.lanes, |lanes, part| _mm512_add_ps(lanes, part)),
                8 => [self.parts[0], self.parts[1]] = [amx_split::parts(a), amx_split::parts(b)],
                9 => [self.parts[2], self.parts[3]] = [amx_split::parts(c), amx_split::parts(d)],
                10 => amx_split::store_parts([self.parts[0], self.parts[1]], self.order, out),
                _ => {
                    let out = out.add(PARTS * 2 * TILE_LEN);
                    amx_split::store_parts([self.parts[2], self.parts[3]], self.order, out);
                }
            }
        }
    }

    /// Takes the pieces, all of whose stages are done, into `softmax`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn finish(self, softmax: &mut StripSoftmax) {
        // SAFETY: the array has the size of a vector.
        unsafe { _mm512_storeu_ps(softmax.lanes.as_mut_ptr(), self.lanes) };
        go_on(softmax, PIECES * PIECE);
    }
}

/// Does all pieces that are left, of a strip of one part where `rounded`.
///
/// # Safety
///
/// As for [`step`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn finish(softmax: &mut StripSoftmax, scores: *const f32, out: *mut bf16, rounded: bool) {
    let order = amx_split::in_turn();
    while !softmax.done() {
        // SAFETY: by the caller's promise.
        unsafe {
            match rounded {
                true => rounded_step(softmax, scores, out),
                false => step(softmax, scores, out, order),
            }
        }
    }
}

/// The weights of a piece, of whose keys the row sees `seen`, as two steps of the strip.
///
/// # Safety
///
/// `seen` scores must be readable, all of the piece if `WHOLE`; two steps must be ours to write at `out`; the processor
/// must have AVX-512 F and BW, and AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
unsafe fn weights<const WHOLE: bool, W: Weights>(
    softmax: &mut StripSoftmax,
    scores: *const f32,
    out: *mut bf16,
    seen: usize,
    form: &W,
) {
    let masks: [_; VECTORS] = std::array::from_fn(|vector| first_lanes(seen.saturating_sub(vector * LANES)));
    let shift = _mm512_set1_ps(softmax.new[softmax.row]);
    // SAFETY: by the caller's promise; masks keep loads inside the scores.
    unsafe {
        let shifted: [__m512; VECTORS] = std::array::from_fn(|vector| {
            let place = scores.wrapping_add(vector * LANES);
            let scores = if WHOLE { _mm512_loadu_ps(place) } else { _mm512_maskz_loadu_ps(masks[vector], place) };
            _mm512_sub_ps(scores, shift)
        });
        let mut weights = exps(shifted);
        let mut lanes = _mm512_loadu_ps(softmax.lanes.as_ptr());
        for (weights, mask) in weights.iter_mut().zip(masks) {
            if !WHOLE {
                *weights = _mm512_maskz_mov_ps(mask, *weights);
            }
            lanes = _mm512_add_ps(lanes, *weights);
        }
        _mm512_storeu_ps(softmax.lanes.as_mut_ptr(), lanes);
        let [a, b, c, d] = weights;
        form.store([a, b], out);
        form.store([c, d], out.add(W::PARTS * 2 * TILE_LEN));
    }
}

/// The last piece: what all rows have so far.
#[target_feature(enable = "avx512f")]
#[inline]
fn finish_rows(softmax: &mut StripSoftmax) {
    if softmax.done() {
        return;
    }
    for first in (0..STRIP).step_by(LANES) {
        // SAFETY: the arrays have `STRIP` elements, whole vectors of them.
        unsafe {
            let at = |values: &[f32; STRIP]| _mm512_loadu_ps(values.as_ptr().add(first));
            let factors = exp(_mm512_sub_ps(at(&softmax.max), at(&softmax.new)));
            let sum = _mm512_fmadd_ps(at(&softmax.sum), factors, at(&softmax.added));
            _mm512_storeu_ps(softmax.factors.as_mut_ptr().add(first), factors);
            _mm512_storeu_ps(softmax.sum.as_mut_ptr().add(first), sum);
        }
    }
    softmax.max = softmax.new;
    softmax.row += 1;
}
