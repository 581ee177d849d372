//! What was trained, as one number.

use std::ops::ControlFlow;

use moa_graphs::{WeightError, model::Model};
use sha2::{Digest, Sha256};

use crate::digest::hexadecimal;

/// SHA-256, in hexadecimal, of what was trained: for every weight of the model, in the order of its
/// structure, rank, dimensions (64 bits each, little-endian), name of the stored type and stored bytes. `None` where
/// `may_read`, which is told of every block that comes, said no.
///
/// The same weights give the same hash whatever file format, sharding or aliases they were stored with.
pub(super) fn hash(model: &Model, may_read: &mut dyn FnMut(u64) -> bool) -> Result<Option<String>, WeightError> {
    let (mut hash, mut ended) = (Sha256::new(), false);
    for weight in model.weights() {
        let shape = weight.shape();
        hash.update((shape.len() as u64).to_le_bytes());
        for dim in shape {
            hash.update((*dim as u64).to_le_bytes());
        }
        hash.update(weight.stored_type());
        weight.read_bytes(&mut |block| {
            if !may_read(block.len() as u64) {
                ended = true;
                return ControlFlow::Break(());
            }
            hash.update(block);
            ControlFlow::Continue(())
        })?;
        if ended {
            return Ok(None);
        }
    }
    Ok(Some(hexadecimal(&hash.finalize())))
}

/// Bytes that [`hash`] reads.
pub(super) fn stored_bytes(model: &Model) -> u64 {
    model.weights().iter().map(|weight| weight.stored_bytes()).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use moa_graphs::{SyntheticTensors, families};

    use super::*;
    use crate::{
        checkpoint::read_config,
        export::{
            Watch,
            pace::{Follower, Leader, Pace},
        },
    };

    /// Wants to go on so many times.
    struct Patience {
        asked: AtomicUsize,
        most: usize,
    }

    impl Watch for Patience {
        fn is_cancelled(&self) -> bool {
            self.asked.fetch_add(1, Ordering::Relaxed) + 1 > self.most
        }
    }

    #[test]
    fn hashing_ends_within_a_weight() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mlm/config.json");
        let config = read_config(file.as_ref()).unwrap().with("vocab_size", 100_000.into());
        let tensors = SyntheticTensors::random(config.origin(), 0);
        let model = families::import(&config, &tensors, families::ImportOptions::default()).unwrap();
        let pace = Pace::new(stored_bytes(&model), 0);
        Leader::of(&pace).finish();
        for most in [0, 1, 2] {
            let watch = Patience { asked: AtomicUsize::new(0), most };
            let mut follower = Follower::of(&pace, &watch);
            assert!(hash(&model, &mut |bytes| follower.may_read(bytes)).unwrap().is_none());
            assert_eq!(watch.asked.into_inner(), most + 1, "nothing is read behind that");
        }
    }
}
