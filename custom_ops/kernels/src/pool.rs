//! Threads that a caller lends, and the one way in which the kernels use them.

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

/// Work in independent tasks.
pub(crate) trait Stage: Sync {
    /// Number of tasks.
    fn tasks(&self) -> usize;

    /// Does one task; a task that was done before does nothing.
    fn run(&self, index: usize);
}

/// Runs every task of some stages that do not depend on each other.
pub(crate) fn run(pool: &dyn ThreadPool, stages: &[&dyn Stage]) {
    let total: usize = stages.iter().map(|stage| stage.tasks()).sum();
    let task = |mut index: usize| {
        for stage in stages {
            match index.checked_sub(stage.tasks()) {
                Some(rest) => index = rest,
                None => return stage.run(index),
            }
        }
    };
    match total {
        0 => {}
        1 => task(0),
        _ => pool.parallel_for(total, &task),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    struct Counter(Mutex<Vec<usize>>);

    impl Stage for Counter {
        fn tasks(&self) -> usize {
            self.0.lock().unwrap().len()
        }

        fn run(&self, index: usize) {
            self.0.lock().unwrap()[index] += 1;
        }
    }

    #[test]
    fn every_task_of_every_stage_runs_once() {
        for sizes in [[0, 0, 0], [0, 1, 0], [2, 0, 3]] {
            let stages = sizes.map(|size| Counter(Mutex::new(vec![0; size])));
            run(&Sequential, &[&stages[0], &stages[1], &stages[2]]);
            for (stage, size) in stages.iter().zip(sizes) {
                assert_eq!(*stage.0.lock().unwrap(), vec![1; size]);
            }
        }
    }
}
