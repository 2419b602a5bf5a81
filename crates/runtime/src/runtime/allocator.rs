//! Settings of the process's allocator.

/// Lets all threads allocate from one heap. By default glibc gives each thread a heap, whose freed
/// memory other threads cannot use (1.2 GB instead of 0.85 for the benchmark's 135M model). Freed
/// memory stays with the process, so that the next step does not fault it in again. No effect
/// without glibc.
pub fn use_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt sets numbers inside the allocator; it is called before other threads start.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // The maximum of glibc; otherwise the threshold depends on earlier frees.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
    }
}
