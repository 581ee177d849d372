//! Large memory in huge pages, where the system gives them on request only.
#![allow(unsafe_code)]

/// Size and alignment of a huge page; a multiple of every smaller page.
const HUGE: usize = 2 << 20;

/// Asks that the huge pages that lie in `memory` be mapped as such: code that streams it then waits for fewer
/// translations of addresses. Values stay as they are, and so do pages of a system that cannot.
pub(crate) fn prefer<T>(memory: &mut [T]) {
    let bytes = memory.as_mut_ptr_range();
    let start = bytes.start.addr().next_multiple_of(HUGE);
    let len = (bytes.end.addr() / HUGE * HUGE).saturating_sub(start);
    if len > 0 {
        advise(bytes.start.with_addr(start).cast(), len);
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
fn advise(start: *mut libc::c_void, len: usize) {
    // SAFETY: the pages belong to a slice that the caller holds alone, and the advice changes no value.
    let _ = unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise(_start: *mut std::ffi::c_void, _len: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no `madvise`")]
    fn values_stay_wherever_the_memory_lies() {
        for len in [0, 1, HUGE - 1, HUGE, 2 * HUGE - 1, 5 * HUGE + 3] {
            let mut memory: Vec<u8> = (0..len).map(|at| at.to_le_bytes()[0]).collect();
            for start in [0, 1, 4096].into_iter().filter(|start| *start <= len) {
                prefer(&mut memory[start..]);
            }
            assert!(memory.iter().enumerate().all(|(at, value)| *value == at.to_le_bytes()[0]), "{len}");
        }
    }
}
