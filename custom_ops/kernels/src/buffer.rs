//! Memory that grows and is kept, aligned to cache lines.

/// Bytes of a cache line, and of the widest vector.
const LINE: usize = 64;

/// Elements of a cache line.
const PER_LINE: usize = LINE / size_of::<f32>();

/// A buffer of f32 that begins at a cache line.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    data: Vec<f32>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// `len` elements with unspecified values; allocates only where no earlier call needed as many.
    pub(crate) fn take(&mut self, len: usize) -> &mut [f32] {
        if self.data.len() < self.start + len {
            self.data = vec![0.0; len + PER_LINE];
            self.start = self.data.as_ptr().align_offset(LINE).min(PER_LINE);
        }
        self.len = len;
        &mut self.data[self.start..self.start + len]
    }

    /// What [`Buffer::take`] gave last.
    pub(crate) fn filled(&self) -> &[f32] {
        &self.data[self.start..self.start + self.len]
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.data.capacity() * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_and_aligned() {
        let mut buffer = Buffer::default();
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
}
