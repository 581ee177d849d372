//! Copies past the caches, for what is not read again before the caches have held much else.
//!
//! A store reads its line first, unless it is told to go to memory. Where that line comes from memory anyway, a third
//! of what a copy moves is saved, and so is what the copy would drive out of the caches.

use super::Element;

/// Copies values that nothing reads soon; both slices are equally long.
///
/// # Panics
///
/// If they are not.
pub(crate) fn copy_past_caches<T: Element>(from: &[T], to: &mut [T]) {
    assert!(from.len() == to.len(), "lengths of a copy");
    #[cfg(target_arch = "x86_64")]
    stream(from, to);
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
fn stream<T: Element>(from: &[T], to: &mut [T]) {
    use std::arch::x86_64::{__m128, _mm_loadu_ps, _mm_sfence, _mm_stream_ps};

    let lanes = const {
        assert!(size_of::<__m128>().is_multiple_of(size_of::<T>()), "whole elements in a vector");
        size_of::<__m128>() / size_of::<T>()
    };
    let before = to.as_ptr().align_offset(align_of::<__m128>()).min(to.len());
    let ((from_first, from), (to_first, to)) = (from.split_at(before), to.split_at_mut(before));
    to_first.copy_from_slice(from_first);
    let (from, mut to) = (from.chunks_exact(lanes), to.chunks_exact_mut(lanes));
    let from_last = from.remainder();
    for (from, to) in from.zip(&mut to) {
        // SAFETY: both hold a vector of plain numbers, `to` is aligned as the store asks for, and every x86-64 has the
        // instructions. Nobody else reads or writes `to`, which is borrowed until the fence.
        unsafe { _mm_stream_ps(to.as_mut_ptr().cast(), _mm_loadu_ps(from.as_ptr().cast())) };
    }
    to.into_remainder().copy_from_slice(from_last);
    // SAFETY: every x86-64 has the instruction.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied<T: Element + PartialEq>(number: impl Fn(f32) -> T) {
        let from: Vec<T> = (0..100).map(|value| number(value as f32)).collect();
        for first in 0..9 {
            for len in [0, 1, 2, 3, 4, 5, 7, 8, 31, 64, 67] {
                let mut to = [number(-1.0); 100];
                copy_past_caches(&from[3..3 + len], &mut to[first..first + len]);
                assert_eq!(to[first..first + len], from[3..3 + len], "{first} {len}");
                let mut others = to[..first].iter().chain(&to[first + len..]);
                assert!(others.all(|other| *other == number(-1.0)), "{first} {len}");
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no stores past the caches")]
    fn every_element_is_copied_and_no_other_written() {
        copied(|value| value);
        copied(half::f16::from_f32);
    }

    #[test]
    #[should_panic(expected = "lengths of a copy")]
    fn other_lengths_are_refused() {
        copy_past_caches(&[1.0f32; 8], &mut [0.0; 12]);
    }
}
