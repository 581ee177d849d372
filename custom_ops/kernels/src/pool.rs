//! Threads that a caller lends, and the ways in which the kernels use them.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Looks at work of another thread before the processor is offered to others: some 20 us.
const LOOKS: usize = 1 << 10;

/// Threads lent by the caller for one kernel call.
pub trait ThreadPool: Sync {
    /// Calls `task(i)` once for every `i` in `0 .. total`, in any order and on any threads, and returns when the last
    /// call has returned. A call may wait for another one that has begun, so what has begun must not wait for its end.
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

/// Most threads that are told apart.
const MOST_THREADS: usize = 64;

/// The threads of one call, counted as they take tasks.
pub(crate) struct Counted<'a> {
    pool: &'a dyn ThreadPool,
    /// Names of the threads seen, in the order in which they came; 0 where there is none yet.
    seen: [AtomicUsize; MOST_THREADS],
    most: &'a AtomicUsize,
}

impl<'a> Counted<'a> {
    /// `most` is the largest number of threads that any call had, and is kept so.
    pub(crate) fn new(pool: &'a dyn ThreadPool, most: &'a AtomicUsize) -> Self {
        Self { pool, seen: [const { AtomicUsize::new(0) }; MOST_THREADS], most }
    }

    /// Threads that may be expected to take part; at least 2, since where one has been seen another may have been late.
    pub(crate) fn threads(&self) -> usize {
        let seen = self.seen.iter().take_while(|name| name.load(Ordering::Relaxed) != 0).count();
        self.most.fetch_max(seen, Ordering::Relaxed).max(seen).max(2)
    }

    /// Counts this thread where it is new.
    fn count(&self) {
        let name = name_of_thread();
        for place in &self.seen {
            let found = match place.load(Ordering::Relaxed) {
                0 => {
                    place.compare_exchange(0, name, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_else(|found| found)
                }
                found => found,
            };
            if found == 0 || found == name {
                return;
            }
        }
    }
}

impl ThreadPool for Counted<'_> {
    fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        self.pool.parallel_for(total, &|index| {
            self.count();
            task(index);
        });
    }
}

/// What no other thread has while this one lives: where one of its own variables stands.
fn name_of_thread() -> usize {
    thread_local!(static OWN: u8 = const { 0 });
    OWN.with(|own| std::ptr::from_ref(own).addr())
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

/// Runs every task of some stages in their order: a thread takes the first task that nobody has begun, again and again.
/// So a task may wait for earlier ones, and for what another one that has begun ends without waiting for it.
pub(crate) fn run_in_order(pool: &dyn ThreadPool, stages: &[&dyn Stage]) {
    let total = stages.iter().map(|stage| stage.tasks()).sum();
    let begun = AtomicUsize::new(0);
    let run = |mut index: usize| {
        for stage in stages {
            match index.checked_sub(stage.tasks()) {
                None => return stage.run(index),
                Some(rest) => index = rest,
            }
        }
    };
    let next = || Some(begun.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < total);
    pool.parallel_for(total, &|_| {
        while let Some(index) = next() {
            run(index);
        }
    });
}

/// What `ready` yields once it yields something; for results of tasks that have begun.
pub(crate) fn wait_for<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    let mut looks = 0;
    loop {
        if let Some(result) = ready() {
            return result;
        }
        looks += 1;
        if looks < LOOKS { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}

/// A stage that tasks of later ones wait for, see [`run_in_order`].
pub(crate) struct Awaited<S> {
    stage: S,
    ended: AtomicUsize,
}

impl<S: Stage> Awaited<S> {
    /// Before any of its tasks.
    pub(crate) fn new(stage: S) -> Self {
        Self { stage, ended: AtomicUsize::new(0) }
    }

    /// The stage, once all its tasks have ended, be it in a panic.
    pub(crate) fn wait(&self) -> &S {
        wait_for(|| (self.ended.load(Ordering::Acquire) >= self.stage.tasks()).then_some(&self.stage))
    }

    /// The stage.
    pub(crate) fn stage(&self) -> &S {
        &self.stage
    }
}

impl<S: Stage> Stage for Awaited<S> {
    fn tasks(&self) -> usize {
        self.stage.tasks()
    }

    fn run(&self, index: usize) {
        let _end = End(&self.ended);
        self.stage.run(index);
    }
}

/// Counts a task as it ends.
struct End<'a>(&'a AtomicUsize);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
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
    use std::panic::{AssertUnwindSafe, catch_unwind};
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

    /// Threads that begin with the last task.
    struct Backwards(usize);

    impl ThreadPool for Backwards {
        fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
            let begun = AtomicUsize::new(0);
            let next = || total.checked_sub(1 + begun.fetch_add(1, Ordering::Relaxed));
            std::thread::scope(|scope| {
                for _ in 0..self.0 {
                    scope.spawn(|| {
                        while let Some(last) = next() {
                            let _ = catch_unwind(AssertUnwindSafe(|| task(last)));
                        }
                    });
                }
            });
        }
    }

    /// A thread for each task, all at once.
    struct Crowd;

    impl ThreadPool for Crowd {
        fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
            let all = std::sync::Barrier::new(total);
            std::thread::scope(|scope| {
                for index in 0..total {
                    let all = &all;
                    scope.spawn(move || {
                        all.wait();
                        task(index);
                        all.wait();
                    });
                }
            });
        }
    }

    #[test]
    fn threads_are_counted_once_each_and_the_most_of_any_call_is_kept() {
        let most = AtomicUsize::new(0);
        let after = |pool: &dyn ThreadPool, total: usize| {
            let counted = Counted::new(pool, &most);
            let stage = Counter(Mutex::new(vec![0; total]));
            run(&counted, &[&stage, &stage]);
            assert_eq!(*stage.0.lock().unwrap(), vec![2; total]);
            counted.threads()
        };
        assert_eq!(after(&Sequential, 0), 2);
        assert_eq!(after(&Sequential, 9), 2);
        assert_eq!(after(&Crowd, 2), 4);
        assert_eq!(after(&Sequential, 5), 4);
        assert_eq!(after(&Crowd, 4), 8);
        if !cfg!(miri) {
            assert_eq!(after(&Crowd, MOST_THREADS), MOST_THREADS);
        }
    }

    /// Waits for an earlier stage and adds what its tasks have done.
    struct Adder<'a>(&'a Awaited<Counter>, Counter);

    impl Stage for Adder<'_> {
        fn tasks(&self) -> usize {
            self.1.tasks()
        }

        fn run(&self, index: usize) {
            let earlier: usize = self.0.wait().0.lock().unwrap().iter().sum();
            self.1.0.lock().unwrap()[index] += earlier;
        }
    }

    fn counter(tasks: usize) -> Counter {
        Counter(Mutex::new(vec![0; tasks]))
    }

    #[test]
    fn tasks_wait_for_earlier_stages_on_any_pool() {
        let pools: [&dyn ThreadPool; 4] = [&Sequential, &Backwards(1), &Backwards(2), &Backwards(5)];
        for pool in pools {
            for (first, then) in [(1, 4), (5, 3), (0, 2), (3, 0)] {
                let stage = Awaited::new(counter(first));
                let adder = Adder(&stage, counter(then));
                run_in_order(pool, &[&stage, &adder]);
                assert_eq!(*adder.1.0.lock().unwrap(), vec![first; then]);
                assert_eq!(*stage.stage().0.lock().unwrap(), vec![1; first]);
            }
        }
    }

    /// Breaks in every task.
    struct Broken(usize);

    impl Stage for Broken {
        fn tasks(&self) -> usize {
            self.0
        }

        fn run(&self, index: usize) {
            panic!("task {index} broke");
        }
    }

    struct Waiter<'a>(&'a Awaited<Broken>, AtomicUsize);

    impl Stage for Waiter<'_> {
        fn tasks(&self) -> usize {
            2
        }

        fn run(&self, _: usize) {
            self.0.wait();
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn nobody_waits_for_ever_behind_a_panic() {
        let stage = Awaited::new(Broken(3));
        let waiter = Waiter(&stage, AtomicUsize::new(0));
        run_in_order(&Backwards(2), &[&stage, &waiter]);
        assert_eq!(waiter.1.into_inner(), 2);
    }
}
