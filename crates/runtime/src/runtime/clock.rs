//! The clock for steps, calls and trace spans. A test may plant it: then a thread's time advances
//! by 10 µs per reading and by [`pass`], whatever else the machine does, and a rank that waits
//! for another advances to that rank's time. A test may also select a thread's processor time,
//! which stops while others use its core; a thread that starts after another has ended has a later
//! time. Both need debug assertions.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time between two readings of a planted clock, for the work between them.
const TICK: Duration = Duration::from_micros(10);

static PLANTED: AtomicBool = AtomicBool::new(false);
/// True if a thread's time is its processor time.
static PROCESSOR_TIME: AtomicBool = AtomicBool::new(false);
/// True if a thread is held up forever.
static HELD_UP: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Planted time of this thread.
    static PASSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Processor time of the process before this thread first read its own.
    static PASSED_BEFORE: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Zero of [`now`], one for the process, and the same in nanoseconds since 1970.
fn start() -> (Instant, u64) {
    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    *START.get_or_init(|| {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), u64::try_from(unix.as_nanos()).unwrap_or_default())
    })
}

/// Nanoseconds from 1970 to the zero of [`now`].
pub(crate) fn start_nanos() -> u64 {
    start().1
}

/// Plants the clock of each thread of this process.
pub fn plant() {
    PLANTED.store(true, Ordering::Relaxed);
}

/// Returns true if the clock is planted.
pub fn is_planted() -> bool {
    cfg!(debug_assertions) && PLANTED.load(Ordering::Relaxed)
}

/// Makes each thread's clock count its processor time.
pub fn count_processor_time() {
    PROCESSOR_TIME.store(true, Ordering::Relaxed);
}

/// Reads the clock of this thread.
pub fn now() -> Duration {
    if is_planted() {
        advance(TICK)
    } else if cfg!(debug_assertions) && PROCESSOR_TIME.load(Ordering::Relaxed) {
        processor_time()
    } else {
        start().0.elapsed()
    }
}

/// Processor time of this thread, after that of the process before this thread's first reading:
/// times of threads that run one after another do not overlap.
fn processor_time() -> Duration {
    let own = processor_time_of(libc::CLOCK_THREAD_CPUTIME_ID);
    let before = PASSED_BEFORE.get().unwrap_or_else(|| {
        let all = processor_time_of(libc::CLOCK_PROCESS_CPUTIME_ID);
        all.saturating_sub(own)
    });
    PASSED_BEFORE.set(Some(before));
    before + own
}

/// Reads a clock of the system; zero if the system does not report it.
fn processor_time_of(clock: libc::clockid_t) -> Duration {
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the call fills `time`, which is zeroed and so valid in any case.
    let time = unsafe {
        libc::clock_gettime(clock, time.as_mut_ptr());
        time.assume_init()
    };
    let secs = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or_default());
    secs + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or_default())
}

/// Returns the time since `then`, an earlier reading of this thread.
pub fn since(then: Duration) -> Duration {
    now().saturating_sub(then)
}

/// Lets `time` pass: sleeps, or advances a planted clock.
pub fn pass(time: Duration) {
    if is_planted() {
        advance(time);
    } else {
        std::thread::sleep(time);
    }
}

fn advance(time: Duration) -> Duration {
    PASSED.set(PASSED.get() + time);
    PASSED.get()
}

/// Returns this thread's planted time, without a tick; zero on a real clock.
pub fn planted_time() -> Duration {
    PASSED.get()
}

/// Advances a planted clock to `moment`, the time of another thread; no effect on a real one.
pub fn wait_until(moment: Duration) {
    if is_planted() {
        PASSED.set(PASSED.get().max(moment));
    }
}

/// Records that this thread is held up forever.
pub fn hold_up() {
    HELD_UP.store(true, Ordering::Release);
}

/// Returns true if a thread of this process is held up forever.
pub fn is_held_up() -> bool {
    HELD_UP.load(Ordering::Acquire)
}

#[cfg(test)]
mod tests {
    use finetune_core::threads;

    use super::*;

    #[test]
    fn processor_times_of_threads_in_turn_do_not_overlap() {
        let read = || {
            let begin = processor_time();
            std::hint::black_box((0..100_000_u64).map(|x| x ^ (x >> 3)).sum::<u64>());
            [begin, processor_time()]
        };
        let spans = [(); 3].map(|()| threads::start("reader", read).unwrap().join().unwrap());
        assert!(spans.concat().is_sorted(), "{spans:?}");
    }
}
