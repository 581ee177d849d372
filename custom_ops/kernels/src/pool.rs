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
///
/// The tasks of each stage are spread over all: threads begin at places far from each other and take what follows, so
/// that all have their share of long and short ones.
pub(crate) fn run(pool: &dyn ThreadPool, stages: &[&dyn Stage]) {
    let total: usize = stages.iter().map(|stage| stage.tasks()).sum();
    let task = |index: usize| {
        let (mut index, mut left) = (index, total);
        for stage in stages {
            match spread(index, stage.tasks(), left) {
                Ok(own) => return stage.run(own),
                Err(rest) => index = rest,
            }
            left -= stage.tasks();
        }
    };
    match total {
        0 => {}
        1 => task(0),
        _ => pool.parallel_for(total, &task),
    }
}

/// Place `index` of `total`, `own` of which are ours, as evenly spread as can be: its number among ours, or else among
/// the others.
fn spread(index: usize, own: usize, total: usize) -> Result<usize, usize> {
    let before = |index: usize| (index as u128 * own as u128).div_ceil(total.max(1) as u128) as usize;
    let ours = before(index);
    if before(index + 1) > ours { Ok(ours) } else { Err(index - ours) }
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
    fn places_are_spread_evenly() {
        for total in 1..20 {
            for own in 0..=total {
                let (mut ours, mut others) = (0, 0);
                for index in 0..total {
                    match spread(index, own, total) {
                        Ok(place) => ours += usize::from(place == ours),
                        Err(place) => others += usize::from(place == others),
                    }
                    let even = own as f64 * (index + 1) as f64 / total as f64;
                    assert!((ours as f64 - even).abs() < 1.0, "{ours} of {own} by {index} of {total}");
                }
                assert_eq!((ours, others), (own, total - own));
            }
        }
    }

    #[test]
    fn every_task_of_every_stage_runs_once() {
        for sizes in [[0, 0, 0], [0, 1, 0], [2, 0, 3], [5, 1, 2]] {
            let stages = sizes.map(|size| Counter(Mutex::new(vec![0; size])));
            run(&Sequential, &[&stages[0], &stages[1], &stages[2]]);
            for (stage, size) in stages.iter().zip(sizes) {
                assert_eq!(*stage.0.lock().unwrap(), vec![1; size]);
            }
        }
    }
}
