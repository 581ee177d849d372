//! Two readers of one checkpoint side by side, so that the second finds in memory what the first one has read.

use std::{
    ops::ControlFlow,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use super::Watch;

/// Bytes by which the follower may be ahead of the leader.
const LEAD: u64 = 1 << 30;

/// How far the readers are.
pub(super) struct Pace {
    /// Bytes that the follower reads in all.
    read: u64,
    /// Bytes that the leader writes in all.
    written: u64,
    limit: Mutex<Limit>,
    changed: Condvar,
}

/// What the follower may do.
enum Limit {
    /// Read so many bytes.
    Bytes(u64),
    /// Read everything.
    None,
    /// Read nothing more.
    Ended,
}

impl Pace {
    /// Of a follower that reads `read` bytes while the leader writes `written`.
    pub(super) fn new(read: u64, written: u64) -> Self {
        Self { read, written, limit: Mutex::new(Limit::Bytes(LEAD)), changed: Condvar::new() }
    }

    fn limit(&self) -> MutexGuard<'_, Limit> {
        self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, limit: Limit) {
        *self.limit() = limit;
        self.changed.notify_all();
    }
}

/// The reader that sets the pace; its end is the end of the follower unless it finishes.
pub(super) struct Leader<'a> {
    pace: &'a Pace,
    written: u64,
    finished: bool,
}

impl<'a> Leader<'a> {
    pub(super) fn of(pace: &'a Pace) -> Self {
        Self { pace, written: 0, finished: false }
    }

    /// `bytes` more bytes were written.
    pub(super) fn wrote(&mut self, bytes: u64) {
        self.written += bytes;
        let part = u128::from(self.written) * u128::from(self.pace.read) / u128::from(self.pace.written.max(1));
        self.pace.set(Limit::Bytes(u64::try_from(part).unwrap_or(u64::MAX).saturating_add(LEAD)));
    }

    /// Everything is written; the follower goes on at its own pace.
    pub(super) fn finish(mut self) {
        self.finished = true;
        self.pace.set(Limit::None);
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.pace.set(Limit::Ended);
        }
    }
}

/// The other reader.
pub(super) struct Follower<'a> {
    pace: &'a Pace,
    watch: &'a dyn Watch,
    read: u64,
}

impl<'a> Follower<'a> {
    pub(super) const fn of(pace: &'a Pace, watch: &'a dyn Watch) -> Self {
        Self { pace, watch, read: 0 }
    }

    /// Waits until `bytes` more bytes may be read; breaks where there is no need to read anything more.
    pub(super) fn wait_for(&mut self, bytes: u64) -> ControlFlow<()> {
        let mut limit = self.pace.limit();
        self.read += bytes;
        loop {
            match *limit {
                _ if self.watch.is_cancelled() => return ControlFlow::Break(()),
                Limit::Ended => return ControlFlow::Break(()),
                Limit::Bytes(most) if self.read > most => {
                    limit = self.pace.changed.wait(limit).unwrap_or_else(PoisonError::into_inner);
                }
                Limit::Bytes(_) | Limit::None => return ControlFlow::Continue(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
        thread,
        time::Duration,
    };

    use moa_graphs::{SyntheticTensors, families};

    use super::*;
    use crate::{
        checkpoint::read_config,
        source::{hash, stored_bytes},
    };

    struct Cancelled;

    impl Watch for Cancelled {
        fn is_cancelled(&self) -> bool {
            true
        }
    }

    #[test]
    fn the_follower_waits_for_the_leader() {
        let pace = Pace::new(8 * LEAD, 4 * LEAD);
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let mut leader = Leader::of(&pace);
            scope.spawn(|| {
                let (mut follower, sender) = (Follower::of(&pace, &()), sender);
                for _ in 0..8 {
                    assert!(follower.wait_for(LEAD).is_continue());
                    sender.send(follower.read / LEAD).unwrap();
                }
            });
            let next = || receiver.recv().unwrap();
            assert_eq!(next(), 1);
            assert!(receiver.recv_timeout(Duration::from_millis(20)).is_err());
            leader.wrote(LEAD);
            assert_eq!([next(), next()], [2, 3]);
            assert!(receiver.recv_timeout(Duration::from_millis(20)).is_err());
            leader.finish();
            assert_eq!([next(), next(), next(), next(), next()], [4, 5, 6, 7, 8]);
        });
    }

    #[test]
    fn the_follower_ends_with_a_leader_that_fails_and_when_nobody_wants_it() {
        let pace = Pace::new(1, 1);
        let mut follower = Follower::of(&pace, &());
        assert!(follower.wait_for(1).is_continue());
        drop(Leader::of(&pace));
        assert!(follower.wait_for(1).is_break());
        let pace = Pace::new(1, 1);
        assert!(Follower::of(&pace, &Cancelled).wait_for(1).is_break());
    }

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
            let hashed = hash(&model, &mut |bytes| follower.wait_for(bytes)).unwrap();
            assert_eq!(hashed, ControlFlow::Break(()));
            assert_eq!(watch.asked.into_inner(), most + 1, "nothing is read behind that");
        }
    }
}
