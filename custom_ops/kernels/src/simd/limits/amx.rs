//! Loops of tiles.

use std::arch::asm;

use half::bf16;

use super::super::amx::Tiles;
use super::super::tiles::TILE_LEN;

/// Elements that [`products`] reads: two tiles of rows and two of columns.
pub(super) const READ: usize = 4 * TILE_LEN;

/// `steps` times four products of tiles that stay in registers, each of which is added to a sum of its own.
///
/// # Panics
///
/// If there are fewer than [`READ`] values, or no steps.
pub(super) fn products(_: &Tiles, values: &[bf16], steps: usize) {
    assert!(values.len() >= READ && steps > 0, "tiles to multiply");
    // SAFETY: the bounds are proved, and the first argument that the tiles of this thread are configured.
    unsafe {
        asm!(
            "tileloadd tmm4, [{values} + {line}]\n tileloadd tmm5, [{values} + {line} + 1024]",
            "tileloadd tmm6, [{values} + {line} + 2048]\n tileloadd tmm7, [{values} + {line} + 3072]",
            "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6\n tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6\n tdpbf16ps tmm3, tmm5, tmm7",
            "dec {steps}\n jnz 2b",
            values = in(reg) values.as_ptr(),
            line = in(reg) 64usize,
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
    }
}
