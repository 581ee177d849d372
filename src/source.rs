//! Checkpoints as what is exported and proved: the typed model, and what was trained as one number.

use std::{convert::Infallible, ops::ControlFlow};

use moa_graphs::{
    ImportError, WeightError,
    families::{self, ImportOptions},
    model::Model,
};
use moa_schema::GateMode;
use sha2::{Digest, Sha256};

use crate::{checkpoint::Checkpoint, digest::hexadecimal};

/// The typed model of a checkpoint.
///
/// # Errors
///
/// Where configuration and tensors do not make a model of a supported family.
pub fn import(checkpoint: &Checkpoint, gate_mode: Option<GateMode>) -> Result<Model, ImportError> {
    families::import(checkpoint.config(), checkpoint, ImportOptions { gate_mode })
}

/// SHA-256 of what was trained, as an export of `checkpoint` has it in its metadata `moa.source.sha256`.
///
/// # Errors
///
/// Where it makes no model of a supported family, and where a weight cannot be read.
pub fn source_sha256(checkpoint: &Checkpoint) -> Result<String, ImportError> {
    let model = import(checkpoint, None)?;
    let ControlFlow::Continue(hash) = hash::<Infallible>(&model, &mut |_| ControlFlow::Continue(()))?;
    Ok(hash)
}

/// SHA-256, in hexadecimal, of what was trained: for every weight of the model, in the order of its
/// structure, rank, dimensions (64 bits each, little-endian), name of the stored type and stored bytes. Ends with
/// what `see`, which is told of every block that comes, breaks with.
///
/// The same weights give the same hash whatever file format, sharding or aliases they were stored with.
pub(crate) fn hash<B>(
    model: &Model,
    see: &mut dyn FnMut(u64) -> ControlFlow<B>,
) -> Result<ControlFlow<B, String>, WeightError> {
    let (mut hash, mut ended) = (Sha256::new(), None);
    for weight in model.weights() {
        let shape = weight.shape();
        hash.update((shape.len() as u64).to_le_bytes());
        for dim in shape {
            hash.update((*dim as u64).to_le_bytes());
        }
        hash.update(weight.stored_type());
        weight.read_bytes(&mut |block| {
            if let ControlFlow::Break(why) = see(block.len() as u64) {
                ended = Some(why);
                return ControlFlow::Break(());
            }
            hash.update(block);
            ControlFlow::Continue(())
        })?;
        if let Some(why) = ended {
            return Ok(ControlFlow::Break(why));
        }
    }
    Ok(ControlFlow::Continue(hexadecimal(&hash.finalize())))
}

/// Bytes that [`hash`] reads.
pub(crate) fn stored_bytes(model: &Model) -> u64 {
    model.weights().iter().map(|weight| weight.stored_bytes()).sum()
}
