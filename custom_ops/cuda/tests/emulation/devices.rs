//! Devices whose kernels the cases take.

use moa_cuda::Device;

use crate::support::Random;

/// Architectures, and the shared memory of one block.
const ARCHITECTURES: [((u32, u32), u32); 5] =
    [((7, 0), 98_304), ((7, 5), 65_536), ((8, 0), 166_912), ((8, 6), 101_376), ((9, 0), 232_448)];

/// A device of one of the architectures.
pub(crate) fn device_of(compute_capability: (u32, u32), multiprocessors: u32) -> Device {
    let found = ARCHITECTURES.into_iter().find(|(capability, _)| *capability == compute_capability);
    Device { compute_capability, multiprocessors, shared_bytes_per_block: found.unwrap().1 }
}

/// One of the architectures, with few or many multiprocessors: their number decides tiles and parts.
pub(crate) fn device(random: &mut Random) -> Device {
    let (compute_capability, _) = random.pick(&ARCHITECTURES);
    device_of(compute_capability, random.pick(&[1, 4, 16, 132]))
}
