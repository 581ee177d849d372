//! What stands for `amx` where the architecture has no tiles: a type without values.

use std::ops::Range;

use half::bf16;

use super::Element;
use super::magnitudes::Magnitudes;
use super::product::{Left, Right};
use super::strip_softmax::Beside;
use super::tiles::{Block, Job, Stream};

/// Tiles that cannot be.
pub(super) enum Tiles {}

impl Tiles {
    /// None.
    ///
    /// # Safety
    ///
    /// None is needed.
    pub(super) unsafe fn configure() -> Option<Self> {
        None
    }

    pub(super) fn split_panel<W: Element>(&self, _: Right<'_, W>, _: usize, _: &mut [bf16], _: Range<usize>) {
        match *self {}
    }

    pub(super) fn split_strip<const JUDGE: bool>(
        &self,
        _: Left<'_>,
        _: usize,
        _: usize,
        _: &mut [bf16],
        _: &mut [Magnitudes],
    ) {
        match *self {}
    }

    pub(super) fn round_strip(&self, _: Left<'_>, _: usize, _: usize, _: &mut [bf16]) {
        match *self {}
    }

    pub(super) fn round_panel(&self, _: &[f32], _: &mut [bf16]) {
        match *self {}
    }

    pub(super) fn pair_integers<const FETCH: bool>(&self, _: &[i8], _: &mut [bf16]) {
        match *self {}
    }

    pub(super) fn magnitudes<W: Element>(&self, _: &[W]) -> Magnitudes {
        match *self {}
    }

    pub(super) fn multiply_and_split(&self, _: usize, _: Block<'_>, _: Job<'_>) {
        match *self {}
    }

    pub(super) fn multiply_stream(&self, _: usize, _: Stream<'_>) {
        match *self {}
    }

    pub(super) fn multiply_beside(&self, _: usize, _: Block<'_>, _: Option<&mut Beside<'_>>) {
        match *self {}
    }

    pub(super) fn finish(&self, _: &mut Beside<'_>, _: usize) {
        match *self {}
    }

    pub(super) fn multiply_fetching(&self, _: usize, _: Block<'_>, _: *const u8) {
        match *self {}
    }

    pub(super) fn multiply(&self, _: usize, _: Block<'_>) {
        match *self {}
    }
}
