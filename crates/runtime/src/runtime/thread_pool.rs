//! Threads that ops share.
//!
//! Ops divide their work over the rayon pool of the calling thread. A pool thread divides its own
//! work; a thread outside hands it over and sleeps until the end, which on two cores cost a
//! training step 8 % (43,000 thread switches a step against 3,400). So steps run inside the pool,
//! and its other threads stay awake between two ops, about ten thousand times a step, where rayon
//! would let them sleep. A thread without work for a while, such as when its rank waits for others,
//! sleeps in naps and leaves the core to others.

use std::error::Error as _;
use std::ffi::OsString;
use std::hint::spin_loop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use candle_core::Device;

use crate::error::{Error, Result};

/// Maximum wait for busy threads before a step starts without them.
const PATIENCE: Duration = Duration::from_millis(1);
/// Time that a thread without work stays awake: longer than the gap between two ops.
const AWAKE: Duration = Duration::from_millis(1);
/// Maximum nap of a thread without work.
const LONGEST_NAP: Duration = Duration::from_millis(10);
/// Variables from which rayon reads the number of its pool's threads.
const THREAD_COUNTS: [&str; 2] = ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"];
/// Accepted number of threads on any machine, the maximum number of ranks; more only with enough
/// cores.
const MAX_THREADS: usize = 1024;
/// State of a thread's slot, and the thread that stays awake in it.
#[derive(Default)]
struct PoolSlot(AtomicU8, OnceLock<Thread>);

/// Nap of a thread without work for `idle`, at most a quarter of that time; none while it stays
/// awake.
fn nap_after(idle: Duration) -> Option<Duration> {
    (idle >= AWAKE).then(|| LONGEST_NAP.min(idle / 4))
}

impl PoolSlot {
    const FREE: u8 = 0;
    const TAKEN: u8 = 1;
    const CLOSED: u8 = 2;

    /// Looks for work until `done`, unless the slot is closed: a late thread could be the step's
    /// own, waiting for a part of the step.
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
                // Cheap on an idle core, and leaves a busy one to others.
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
        // A taken slot stays taken.
        let _ = self.0.compare_exchange(Self::FREE, Self::CLOSED, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Signals the end of the work to the threads of the slots when dropped, also by a panic.
struct DoneOnDrop<'a>(&'a AtomicBool, &'a [PoolSlot]);

impl Drop for DoneOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        self.1.iter().for_each(PoolSlot::wake);
    }
}

/// Runs `work`, which computes on `device`, on a pool thread. The other pool threads look for its
/// parts until it ends, and sleep only after a while without work. For a GPU no threads stay awake.
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

/// Runs `work`, a rank, in a separate pool of `threads` threads. Ranks in one pool would wait in
/// collectives for one another's jobs, and with one thread the memory of recent products is held
/// once.
///
/// # Errors
/// The threads cannot be started; the error of `work`.
pub fn in_own_pool<R: Send>(threads: usize, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    // Stack size of a main thread.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(8 << 20).build();
    pool.map_err(|error| refused(&error))?.install(work)
}

/// Starts the threads of the shared pool. Without this call rayon starts them at first use, and
/// panics if the system refuses one. A started pool stays.
///
/// # Errors
/// [`Error::cannot_start`].
pub fn start() -> Result<()> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        Err(error) if error.source().is_some() => Err(refused(&error)),
        // Only an existing pool gives an error without a source.
        _ => Ok(()),
    }
}

fn refused(error: &rayon::ThreadPoolBuildError) -> Error {
    match error.source().and_then(|source| source.downcast_ref()) {
        Some(source) => Error::cannot_start("the compute threads", source),
        None => Error::internal("cannot start the compute threads").because(error.to_string()),
    }
}

/// Refuses a thread count in the environment that would overload the machine, or that rayon would
/// ignore as no number.
///
/// # Errors
/// [`crate::error::ErrorCategory::User`] with the variable, its value and the accepted values.
pub fn check_environment(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = MAX_THREADS.max(4 * cores);
    for name in THREAD_COUNTS {
        let Some(value) = lookup(name).filter(|value| !value.is_empty()) else { continue };
        // rayon reads 0 as one thread per core.
        if value.to_str().and_then(|text| text.parse().ok()).is_some_and(|threads: usize| threads <= most) {
            continue;
        }
        let shown: String = value.to_string_lossy().chars().take(80).collect();
        return Err(Error::user(format!("cannot use {name}"))
            .because(format!("it is `{}`; accepted: 1 to {most} threads", shown.escape_debug()))
            .hint(format!("unset {name} to start one thread for each of the {cores} cores")));
    }
    Ok(())
}

/// Number of threads that the shared pool has once it is started: as many as the environment says,
/// else one for each core.
pub fn threads_of_process() -> usize {
    let set = |name: &&str| std::env::var(name).ok()?.parse::<usize>().ok().filter(|threads| *threads > 0);
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    THREAD_COUNTS.iter().find_map(set).unwrap_or_else(cores)
}

/// Number of threads of the caller's pool.
pub fn num_threads() -> usize {
    rayon::current_num_threads()
}

/// Returns freed memory to the system, before a large allocation that does not fit into the holes,
/// which would stay allocated beside it. No effect without glibc's allocator.
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

    /// Number of times that a thread went to sleep; yielding the core does not count.
    #[cfg(target_os = "linux")]
    fn sleeps(thread: i32) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse().unwrap()
    }

    /// While the step's own thread waits, such as for another rank, the pool's other thread does
    /// not occupy a core.
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
                // It still does its part of the work: this ends only with both threads in it.
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
