//! The threads that ops share.
//!
//! Ops divide their work over the rayon pool of the thread that calls them. A thread of the pool divides its own work;
//! a thread outside hands it over and sleeps until it is done, which on two cores cost a training step 8 %
//! (43,000 switches of threads a step against 3,400). So steps run inside, and the pool's other threads stay awake
//! between two ops, some ten thousand times a step, where rayon would put them to sleep and wake them again. One that
//! finds nothing to do for a while, as while its rank waits for others, sleeps in naps: the core is for whoever computes.

use std::error::Error as _;
use std::ffi::OsString;
use std::hint::spin_loop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use candle_core::Device;

use crate::error::{Error, Result};

/// How long threads that are at other work are waited for before a step goes on without them.
const PATIENCE: Duration = Duration::from_millis(1);
/// The time that a thread without work stays awake: longer than what is between two ops.
const AWAKE: Duration = Duration::from_millis(1);
/// The longest nap of a thread without work.
const LONGEST_NAP: Duration = Duration::from_millis(10);
/// Where rayon looks for the number of threads of its pool.
const THREAD_COUNTS: [&str; 2] = ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"];
/// As many threads as ranks may be, on a machine of any size; more only where there are cores for them.
const MAX_THREADS: usize = 1024;
/// The state of a thread's stay, and the thread that came to stay awake.
#[derive(Default)]
struct PoolSlot(AtomicU8, OnceLock<Thread>);

/// The nap of a thread that has been without work for `idle`, short enough to lose a quarter of that time at most; none
/// while it stays awake.
fn nap_after(idle: Duration) -> Option<Duration> {
    (idle >= AWAKE).then(|| LONGEST_NAP.min(idle / 4))
}

impl PoolSlot {
    const FREE: u8 = 0;
    const TAKEN: u8 = 1;
    const CLOSED: u8 = 2;

    /// Looks for work until `done`, unless it came too late: then it could be the step's own thread that came,
    /// waiting for a part of the step.
    fn take(&self, done: &AtomicBool) {
        if self.0.compare_exchange(Self::FREE, Self::TAKEN, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        self.1.get_or_init(std::thread::current);
        let mut idle_since = None;
        while !done.load(Ordering::Acquire) {
            if rayon::yield_now() == Some(rayon::Yield::Executed) {
                idle_since = None;
                continue;
            }
            match nap_after(idle_since.get_or_insert_with(Instant::now).elapsed()) {
                // Costs little where nobody waits for the core, and leaves it to whoever does.
                None => std::thread::yield_now(),
                Some(nap) => std::thread::park_timeout(nap),
            }
        }
    }

    fn wake(&self) {
        if let Some(thread) = self.1.get() {
            thread.unpark();
        }
    }

    fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::FREE
    }

    fn close(&self) {
        // Where it is taken, it stays so.
        let _ = self.0.compare_exchange(Self::FREE, Self::CLOSED, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Tells the threads of the slots that the work is done when dropped, also by a panic.
struct DoneOnDrop<'a>(&'a AtomicBool, &'a [PoolSlot]);

impl Drop for DoneOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        self.1.iter().for_each(PoolSlot::wake);
    }
}

/// Runs `work`, which computes on `device`, on a thread of the pool, whose other threads look for its parts until it is
/// done, and sleep only where there are none for a while. What a GPU does keeps no threads awake.
pub fn run_in_pool<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    if !device.is_cpu() {
        return work();
    }
    let seats: Vec<PoolSlot> = (1..num_threads()).map(|_| PoolSlot::default()).collect();
    let done = AtomicBool::new(false);
    rayon::scope(|scope| {
        let _done = DoneOnDrop(&done, &seats);
        for seat in &seats {
            scope.spawn(|_| seat.take(&done));
        }
        let until = Instant::now() + PATIENCE;
        while seats.iter().any(PoolSlot::is_free) && Instant::now() < until {
            spin_loop();
        }
        seats.iter().for_each(PoolSlot::close);
        work()
    })
}

/// Runs `work` in a pool of its own of `threads` threads: a rank. Ranks that share a pool would wait in collectives for
/// one another's jobs; and on one thread throughout, the memory of last products is kept once.
///
/// # Errors
/// The threads cannot be started; what `work` returns.
pub fn in_own_pool<R: Send>(threads: usize, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    // The stack of a main thread.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(8 << 20).build();
    pool.map_err(|error| refused(&error))?.install(work)
}

/// Starts the threads of the pool that all share. Without this call rayon starts them at their first use, and panics where
/// the system refuses one. A pool that has been started stays.
///
/// # Errors
/// [`Error::cannot_start`].
pub fn start() -> Result<()> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        Err(error) if error.source().is_some() => Err(refused(&error)),
        // Only a pool that is there already is an error without a source.
        _ => Ok(()),
    }
}

fn refused(error: &rayon::ThreadPoolBuildError) -> Error {
    match error.source().and_then(|source| source.downcast_ref()) {
        Some(source) => Error::cannot_start("the threads that compute", source),
        None => Error::internal("cannot start the threads that compute").because(error.to_string()),
    }
}

/// Refuses what the environment says of the number of threads where rayon would start so many that the machine breaks
/// down, or would pass over what is no number.
///
/// # Errors
/// [`crate::error::ErrorCategory::User`] with the variable, its value and what is accepted.
pub fn check_environment(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = MAX_THREADS.max(4 * cores);
    for name in THREAD_COUNTS {
        let Some(value) = lookup(name).filter(|value| !value.is_empty()) else { continue };
        // 0 is rayon's word for one a core.
        if value.to_str().and_then(|text| text.parse().ok()).is_some_and(|threads: usize| threads <= most) {
            continue;
        }
        let shown: String = value.to_string_lossy().chars().take(80).collect();
        return Err(Error::user(format!("cannot use {name}"))
            .because(format!("it is `{}`; accepted: 1 to {most} threads", shown.escape_debug()))
            .hint(format!("unset {name}: then there is a thread for each of the {cores} cores")));
    }
    Ok(())
}

/// Threads of the pool that a caller is in.
pub fn num_threads() -> usize {
    rayon::current_num_threads()
}

/// Hands memory that was allocated and freed back to the system: before something large is allocated that does not fit
/// the holes, which would then be held beside it. Nothing happens where the allocator is not glibc's.
pub fn release_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim may be called at any time; it takes the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCategory;

    #[test]
    fn a_thread_without_work_naps_for_a_part_of_its_idle_time() {
        assert_eq!(nap_after(Duration::ZERO), None);
        assert_eq!(nap_after(AWAKE / 2), None);
        assert_eq!(nap_after(4 * AWAKE), Some(AWAKE));
        assert_eq!(nap_after(1000 * AWAKE), Some(LONGEST_NAP));
    }

    /// Switches of a thread that went to sleep by itself; giving the core away is none.
    #[cfg(target_os = "linux")]
    fn sleeps(thread: i32) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse().unwrap()
    }

    /// While the step's own thread waits, as for another rank, the pool's other thread does not keep a core busy.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_thread_without_work_sleeps_and_comes_back() {
        let step = || {
            // SAFETY: a system call without arguments.
            let threads = rayon::broadcast(|_| unsafe { libc::gettid() });
            // SAFETY: as above.
            let own = unsafe { libc::gettid() };
            let other = threads.into_iter().find(|thread| *thread != own).unwrap();
            let (slot, done) = (PoolSlot::default(), AtomicBool::new(false));
            rayon::scope(|scope| {
                let _done = DoneOnDrop(&done, std::slice::from_ref(&slot));
                scope.spawn(|_| slot.take(&done));
                while slot.is_free() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let before = sleeps(other);
                let mut looks = (0..60_000).map(|_| std::thread::sleep(Duration::from_millis(1)));
                assert!(looks.any(|()| sleeps(other) >= before + 5), "it never naps");
                // It still takes its part of the work: this ends only with both threads in it.
                let both = std::sync::Barrier::new(2);
                rayon::join(|| both.wait(), || both.wait());
            });
            Ok(())
        };
        in_own_pool(2, step).unwrap();
    }

    #[test]
    fn a_number_of_threads_has_bounds() {
        let check = |variable: &str, value: &str| {
            check_environment(&|name| (name == variable).then(|| OsString::from(value)))
        };
        for value in ["", "0", "1", "1024"] {
            assert!(check("RAYON_NUM_THREADS", value).is_ok(), "{value}");
        }
        for value in ["1000000", "18446744073709551616", "-1", "two", "1 ", "\u{1b}[2J"] {
            for variable in THREAD_COUNTS {
                let error = check(variable, value).unwrap_err();
                assert_eq!(error.kind(), ErrorCategory::User);
                let text = error.to_string();
                assert!(text.contains(variable) && text.contains("accepted: 1 to"), "{text}");
                assert!(!text.contains('\u{1b}'), "{text:?}");
            }
        }
        assert!(check("OMP_NUM_THREADS", "1000000").is_ok());
    }
}
