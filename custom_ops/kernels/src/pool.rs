//! Threads that a caller lends, and the one way in which the kernels use them.

use std::sync::{Mutex, PoisonError};

/// Threads lent by the caller for one kernel call.
pub trait ThreadPool: Sync {
    /// Calls `task(i)` once for every `i` in `0 .. total`, in any order and on any threads, and returns when the last
    /// call has returned.
    fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync));
}

/// The calling thread alone.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sequential;

impl ThreadPool for Sequential {
    fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        for index in 0..total {
            task(index);
        }
    }
}

/// Runs `task` on every item; an item owns the output slices that its task writes, so tasks cannot overlap.
pub(crate) fn for_each<T: Send>(pool: &dyn ThreadPool, items: Vec<T>, task: impl Fn(T) + Sync) {
    if items.len() < 2 {
        items.into_iter().for_each(task);
        return;
    }
    let items: Vec<_> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    pool.parallel_for(items.len(), &|index| {
        let item = items[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(item) = item {
            task(item);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs every index twice, in reverse.
    struct Stutter;

    impl ThreadPool for Stutter {
        fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
            for index in (0..total).rev() {
                task(index);
                task(index);
            }
        }
    }

    #[test]
    fn every_item_is_handed_out_once() {
        for pool in [&Sequential as &dyn ThreadPool, &Stutter] {
            for len in [0, 1, 7] {
                let mut counts = vec![0; len];
                for_each(pool, counts.iter_mut().collect(), |count| *count += 1);
                assert_eq!(counts, vec![1; len]);
            }
        }
    }
}
