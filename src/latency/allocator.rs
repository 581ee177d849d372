//! Memory that the allocator keeps for later.
#![allow(unsafe_code)]

/// Gives back to the system what was freed, where the C library can: what comes next then takes all its memory anew.
pub(super) fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call touches nothing but memory that is free, under the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}
