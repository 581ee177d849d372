//! The threads of a session.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use moa_kernels::ThreadPool;
use ort_sys::OrtKernelContext;

use super::api::{Api, ort};
use crate::failure::{Failure, catch};

/// The threads of the session.
pub(crate) struct OrtPool<'a> {
    api: Api,
    raw: *const OrtKernelContext,
    failed: Failed,
    lifetime: PhantomData<&'a OrtKernelContext>,
}

// SAFETY: the context is only handed to `KernelContext_ParallelFor`, which any thread of the call may use.
unsafe impl Sync for OrtPool<'_> {}

/// The first failure of a task. Every task asks whether there is one, so that costs no lock.
#[derive(Default)]
struct Failed {
    any: AtomicBool,
    first: Mutex<Option<Failure>>,
}

impl Failed {
    fn record(&self, failure: Failure) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.any.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> Option<Failure> {
        self.any.store(false, Ordering::Relaxed);
        self.first.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// What a task on a thread of the runtime needs.
struct Job<'a> {
    task: &'a (dyn Fn(usize) + Sync),
    failed: &'a Failed,
}

impl OrtPool<'_> {
    /// # Safety
    ///
    /// `raw` must be the context of a running call, valid for the lifetime.
    pub(super) unsafe fn new(api: Api, raw: *const OrtKernelContext) -> Self {
        Self { api, raw, failed: Failed::default(), lifetime: PhantomData }
    }

    /// The result of the work done on this pool: the first failure of a task, else `result`.
    pub(crate) fn finish(&self, result: Result<(), Failure>) -> Result<(), Failure> {
        match self.failed.take() {
            Some(failure) => Err(failure),
            None => result,
        }
    }
}

impl ThreadPool for OrtPool<'_> {
    /// A task that panics is recorded for [`OrtPool::finish`]; tasks that start later are skipped.
    fn parallel_for(&self, total: usize, task: &(dyn Fn(usize) + Sync)) {
        let job = Job { task, failed: &self.failed };
        let data = (&raw const job).cast_mut().cast();
        // SAFETY: the context is valid during the call; `run_task` gets the `Job`, which outlives this blocking call.
        let status = unsafe { ort!(self.api, KernelContext_ParallelFor(self.raw, run_task, total, 0, data)) };
        if let Err(failure) = status.check() {
            self.failed.record(failure);
        }
    }
}

/// # Safety
///
/// `data` must point to a [`Job`].
unsafe extern "C" fn run_task(data: *mut c_void, index: usize) {
    // SAFETY: by the caller's promise; jobs are only read.
    let job = unsafe { &*data.cast::<Job<'_>>() };
    if job.failed.any.load(Ordering::Relaxed) {
        return;
    }
    let task = job.task;
    let outcome = catch(|| {
        task(index);
        Ok(())
    });
    if let Err(failure) = outcome {
        job.failed.record(failure);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

    use ort_sys::{OrtApi, OrtStatusPtr};

    use super::super::api::tests::fake;
    use super::*;
    use crate::failure::Fault;

    /// Runs every second task on another thread.
    unsafe extern "system" fn two_threads(
        _: *const OrtKernelContext,
        task: unsafe extern "C" fn(*mut c_void, usize),
        total: usize,
        _: usize,
        data: *mut c_void,
    ) -> OrtStatusPtr {
        let data = AtomicPtr::new(data);
        std::thread::scope(|scope| {
            for first in 0..2 {
                let data = &data;
                scope.spawn(move || {
                    for index in (first..total).step_by(2) {
                        // SAFETY: `data` is what came with `task`.
                        unsafe { task(data.load(Ordering::Relaxed), index) };
                    }
                });
            }
        });
        OrtStatusPtr(std::ptr::null_mut())
    }

    fn pool(table: OrtApi) -> OrtPool<'static> {
        // SAFETY: the fake runtimes never look at the context.
        unsafe { OrtPool::new(fake(table), std::ptr::null()) }
    }

    #[test]
    fn every_task_runs() {
        let pool = pool(OrtApi { KernelContext_ParallelFor: two_threads, ..ort_sys::stub::api() });
        let sum = AtomicUsize::new(0);
        pool.parallel_for(10, &|index| {
            sum.fetch_add(index + 1, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 55);
        assert_eq!(pool.finish(Ok(())), Ok(()));
    }

    #[test]
    fn panic_in_a_task_is_recorded() {
        let pool = pool(OrtApi { KernelContext_ParallelFor: two_threads, ..ort_sys::stub::api() });
        pool.parallel_for(10, &|index| assert!(index != 3, "task {index} broke"));
        let expected = Failure { fault: Fault::Bug, text: String::from("internal error: task 3 broke") };
        assert_eq!(pool.finish(Ok(())), Err(expected.clone()));
        pool.parallel_for(4, &|_| panic!("task 3 broke"));
        assert_eq!(pool.finish(Err(Failure::argument("follow-up"))), Err(expected));
    }

    #[test]
    fn tasks_after_a_failure_are_skipped() {
        let pool = pool(OrtApi { KernelContext_ParallelFor: two_threads, ..ort_sys::stub::api() });
        pool.parallel_for(2, &|_| panic!("broken"));
        let later = AtomicUsize::new(0);
        let count = |_| {
            later.fetch_add(1, Ordering::Relaxed);
        };
        pool.parallel_for(4, &count);
        assert_eq!(later.load(Ordering::Relaxed), 0);
        assert!(pool.finish(Ok(())).is_err());
        pool.parallel_for(4, &count);
        assert_eq!(later.into_inner(), 4);
    }

    #[test]
    fn refusal_of_the_runtime_is_recorded() {
        let pool = pool(ort_sys::stub::api());
        pool.parallel_for(2, &|_| {});
        assert_eq!(pool.finish(Ok(())), Err(Failure::runtime("Unimplemented")));
    }
}
