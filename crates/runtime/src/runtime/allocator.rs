//! The process's allocator.

/// Lets all threads allocate from one heap: glibc gives each thread its own, and what one has freed the others cannot
/// use (1.2 GB instead of 0.85 for the benchmark's 135M model). Allocations are few and large here; those of a step keep
/// their memory for the next one instead of handing it back and faulting it in again. Nothing happens elsewhere.
pub fn use_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt sets numbers inside the allocator; it is called before other threads start.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // The most that glibc takes; without it the threshold depends on what was freed before.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
    }
}
