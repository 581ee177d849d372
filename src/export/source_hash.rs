//! What was trained, as one number.

use moa_graphs::{WeightError, model::Model};
use sha2::{Digest, Sha256};

use super::pace::Follower;
use crate::digest::hexadecimal;

/// SHA-256, in hexadecimal, of what was trained: for every weight of the model, in the order of its
/// structure, rank, dimensions (64 bits each, little-endian), name of the stored type and stored bytes.
///
/// The same weights give the same hash whatever file format, sharding or aliases they were stored with.
///
/// # Errors
///
/// Where a weight cannot be read.
pub fn weights_sha256(model: &Model) -> Result<String, WeightError> {
    Ok(hash(model, &mut Follower::alone())?.unwrap_or_default())
}

/// The hash; `None` where `follower` was told to end.
pub(super) fn hash(model: &Model, follower: &mut Follower<'_>) -> Result<Option<String>, WeightError> {
    let mut hash = Sha256::new();
    for weight in model.weights() {
        let shape = weight.shape();
        hash.update((shape.len() as u64).to_le_bytes());
        for dim in shape {
            hash.update((*dim as u64).to_le_bytes());
        }
        hash.update(weight.stored_type());
        weight.read_bytes(&mut |block| {
            if follower.may_read(block.len() as u64) {
                hash.update(block);
            }
        })?;
        if follower.is_ended() {
            return Ok(None);
        }
    }
    Ok(Some(hexadecimal(&hash.finalize())))
}

/// Bytes that [`hash`] reads.
pub(super) fn stored_bytes(model: &Model) -> u64 {
    model.weights().iter().map(|weight| weight.stored_bytes()).sum()
}
