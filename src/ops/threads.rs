//! The threads that ops share, and the memory they share it with.
//!
//! Ops divide their work over the rayon pool of the thread that calls them. A thread of the pool divides its own work;
//! a thread outside hands it over and sleeps until it is done, which on two cores cost a training step 8 %
//! (43,000 switches of threads a step against 3,400). So steps run inside.

use crate::error::{Error, Result};

/// Runs `work` on a thread of the pool.
pub fn inside<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| work())
}

/// Runs `work` in a pool of its own of `threads` threads: a rank beside others.
///
/// # Errors
/// The threads cannot be started; what `work` returns.
pub fn in_own_pool<R: Send>(threads: usize, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let failed =
        |e: rayon::ThreadPoolBuildError| Error::internal("cannot start threads").because(e.to_string());
    pool.map_err(failed)?.install(work)
}

/// Threads of the pool that a caller is in.
pub fn count() -> usize {
    rayon::current_num_threads()
}

/// Lets all threads allocate from one heap: glibc gives each thread its own, and what one has freed the others cannot
/// use (1.2 GB instead of 0.85 for the benchmark's 135M model). Allocations are few and large here; those of a step keep
/// their memory for the next one instead of handing it back and faulting it in again. Nothing happens elsewhere.
pub fn share_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt sets numbers inside the allocator; it is called before other threads start.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // The most that glibc takes; without it the threshold depends on what was freed before.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 << 20);
    }
}
