//! Devices whose kernels the cases take.

use moa_cuda::Device;

use crate::support::Random;

/// One of the architectures, with few or many multiprocessors: their number decides tiles and parts.
pub(crate) fn device(random: &mut Random) -> Device {
    let (compute_capability, shared_bytes_per_block) =
        random.pick(&[((7, 0), 98_304), ((7, 5), 65_536), ((8, 0), 166_912), ((8, 6), 101_376), ((9, 0), 232_448)]);
    Device { compute_capability, shared_bytes_per_block, multiprocessors: random.pick(&[1, 4, 16, 132]) }
}
