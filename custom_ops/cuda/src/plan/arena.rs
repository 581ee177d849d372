//! The workspace of one call.

use crate::{Buffer, WORKSPACE_ALIGNMENT};

/// Hands out aligned pieces that do not overlap.
#[derive(Debug, Default)]
pub(super) struct Arena {
    bytes: usize,
}

impl Arena {
    /// A piece of at least `bytes`.
    pub(super) fn take(&mut self, bytes: usize) -> Buffer {
        let start = self.bytes;
        self.bytes += bytes.next_multiple_of(WORKSPACE_ALIGNMENT);
        Buffer::Workspace(start)
    }

    /// Bytes of all pieces.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}
