//! Memory that grows and is kept, aligned to cache lines.

use std::fmt;
use std::panic::resume_unwind;

use crate::huge_pages;
use crate::scalar::Scalar;

/// Bytes of a cache line, and of the widest vector.
pub(crate) const LINE: usize = 64;

/// There is no memory for what a call needs: the payload of the panic that ends it, which no hook sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Size of the allocation that failed.
    pub bytes: usize,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no memory for {} bytes", self.bytes)
    }
}

impl std::error::Error for OutOfMemory {}

/// Ends the call for want of memory for `len` elements.
fn out_of_memory<T>(len: usize) -> ! {
    resume_unwind(Box::new(OutOfMemory { bytes: len.saturating_mul(size_of::<T>()) }))
}

/// The vector without its elements and with room for `len` others, so that adding these allocates nothing. One that
/// grows doubles where there is memory for that.
///
/// # Panics
///
/// With [`OutOfMemory`].
pub(crate) fn emptied<T>(vector: &mut Vec<T>, len: usize) -> &mut Vec<T> {
    vector.clear();
    if vector.try_reserve(len).is_err() && vector.try_reserve_exact(len).is_err() {
        out_of_memory::<T>(len);
    }
    vector
}

/// A buffer that begins at a cache line.
#[derive(Debug, Default)]
pub(crate) struct Buffer<T = f32> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Buffer<T> {
    /// Elements of a cache line.
    const PER_LINE: usize = LINE / size_of::<T>();

    /// `len` elements with unspecified values; allocates only where no earlier call needed as many.
    ///
    /// # Panics
    ///
    /// With [`OutOfMemory`].
    pub(crate) fn take(&mut self, len: usize) -> &mut [T] {
        if self.data.len().saturating_sub(self.start) < len {
            *self = Self::default();
            let needed = len.saturating_add(Self::PER_LINE);
            if self.data.try_reserve_exact(needed).is_err() {
                out_of_memory::<T>(needed);
            }
            // A page that holds a value stays as small as it is, so huge ones are asked for before.
            huge_pages::prefer(self.data.spare_capacity_mut());
            self.data.resize(needed, T::default());
            self.start = self.data.as_ptr().align_offset(LINE).min(Self::PER_LINE);
        }
        self.len = len;
        &mut self.data[self.start..self.start + len]
    }

    /// What [`Buffer::take`] gave last.
    pub(crate) fn filled(&self) -> &[T] {
        &self.data[self.start..self.start + self.len]
    }

    /// As [`Buffer::filled`], to be changed.
    pub(crate) fn filled_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..self.start + self.len]
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.data.capacity() * size_of::<T>()
    }
}

impl Buffer {
    /// The values as f32: where they stand, or widened into this memory.
    pub(crate) fn widened<'a, T: Scalar>(&'a mut self, values: &'a [T]) -> &'a [f32] {
        if let Some(values) = T::direct(values) {
            return values;
        }
        let out = self.take(values.len());
        T::widen(values, out);
        out
    }

    /// Runs `fill` on the destination, or on this memory, which is then rounded into the destination.
    pub(crate) fn rounded_into<T: Scalar, R>(&mut self, out: &mut [T], fill: impl FnOnce(&mut [f32]) -> R) -> R {
        match T::direct_mut(out) {
            Ok(out) => fill(out),
            Err(out) => {
                let values = self.take(out.len());
                let result = fill(values);
                T::round(values, out);
                result
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_and_aligned() {
        let mut buffer = Buffer::<f32>::default();
        assert_eq!(buffer.filled(), []);
        let first = buffer.take(1000).as_ptr();
        let held = buffer.bytes();
        assert_eq!(first.align_offset(LINE), 0);
        assert_eq!(buffer.take(10).as_ptr(), first);
        assert_eq!(buffer.filled().len(), 10);
        assert_eq!(buffer.take(1000).as_ptr(), first);
        assert_eq!(buffer.bytes(), held);
        assert_eq!(buffer.take(1001).len(), 1001);
    }

    #[test]
    fn memory_that_there_is_not_ends_the_call_and_not_the_process() {
        let mut buffer = Buffer::<f32>::default();
        buffer.take(7);
        for len in [isize::MAX as usize / 2, usize::MAX] {
            let payload =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| buffer.take(len).len())).unwrap_err();
            assert!(payload.downcast::<OutOfMemory>().unwrap().bytes > isize::MAX as usize);
            assert_eq!((buffer.bytes(), buffer.filled()), (0, &[][..]));
        }
        assert_eq!(buffer.take(7).len(), 7);
    }

    #[test]
    fn vectors_keep_their_memory_and_end_the_call_where_there_is_none() {
        let mut vector = vec![1u32; 10];
        let (place, capacity) = (vector.as_ptr(), vector.capacity());
        assert!(emptied(&mut vector, 10).is_empty());
        assert_eq!((vector.as_ptr(), vector.capacity()), (place, capacity));
        assert!(emptied(&mut vector, 11).capacity() >= 11);
        let payload = std::panic::catch_unwind(move || emptied(&mut vector, usize::MAX / 8).len()).unwrap_err();
        assert_eq!(*payload.downcast::<OutOfMemory>().unwrap(), OutOfMemory { bytes: usize::MAX / 8 * 4 });
    }
}
