//! Loops of one kind of work each, whose rates bound what any loop of it can reach.

use std::hint::black_box;

use half::bf16;

use super::tiles::Unit;
use super::{Instructions, Isa};

mod amx;
mod avx2;
mod avx512;

/// A loop and how much of its work it does.
#[derive(Clone, Copy)]
pub(crate) enum Loop<'a> {
    /// So many multiply-adds of 16 lanes, a multiple of 48, on registers alone.
    MultiplyAdds(usize),
    /// An exponential of each element; whole steps of the softmax.
    Exponentials(&'a [f32]),
    /// A read of each element, in whole steps of 128.
    Read(&'a [f32]),
}

impl Loop<'_> {
    /// Whether the instructions of `isa` serve.
    pub(crate) fn serves(isa: Isa) -> bool {
        isa.0 >= Instructions::Avx2
    }

    /// Runs it.
    ///
    /// # Panics
    ///
    /// If the instructions do not serve.
    pub(crate) fn run(self, isa: Isa) {
        assert!(Self::serves(isa), "AVX2");
        // SAFETY: `Isa` proves that the processor has the instructions.
        black_box(unsafe {
            match (self, isa.0 >= Instructions::Avx512) {
                (Self::MultiplyAdds(count), true) => avx512::multiply_adds(count),
                (Self::MultiplyAdds(count), false) => avx2::multiply_adds(count),
                (Self::Exponentials(values), true) => avx512::exponentials(values),
                (Self::Exponentials(values), false) => avx2::exponentials(values),
                (Self::Read(values), true) => avx512::read(values, isa.reads_one_stream()),
                (Self::Read(values), false) => avx2::read(values),
            }
        });
    }
}

impl Unit {
    /// Elements that [`Unit::multiply_on_registers`] reads.
    pub(crate) const ON_REGISTERS: usize = amx::READ;

    /// `steps` times four products of tiles that stay in registers.
    ///
    /// # Panics
    ///
    /// If there are fewer values than [`Unit::ON_REGISTERS`], or no steps.
    pub(crate) fn multiply_on_registers(&self, values: &[bf16], steps: usize) {
        amx::products(&self.tiles, values, steps);
    }
}
