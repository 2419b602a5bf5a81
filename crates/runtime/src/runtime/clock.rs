//! The clock that steps, calls and spans of a trace are measured by. A test may plant it: then a thread's time passes by
//! [`TICK`] a reading and by what is planted with [`pass`], whatever else the machine does, and a rank that waits for
//! another goes on to that rank's time. A test may also ask for a thread's processor time, in which it has no time while
//! others have its core. Only builds with debug assertions can do either.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time between two readings of a planted clock: the work between them, however long it takes.
pub const TICK: Duration = Duration::from_micros(10);

static PLANTED: AtomicBool = AtomicBool::new(false);
/// A thread's time is its processor's.
static PROCESSOR_TIME: AtomicBool = AtomicBool::new(false);
/// A thread was held up for ever.
static HELD_UP: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// This thread's planted time.
    static PASSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The moment that [`now`] counts from, one for the process, and the same in nanoseconds since 1970.
fn start() -> (Instant, u64) {
    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    *START.get_or_init(|| {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), u64::try_from(unix.as_nanos()).unwrap_or_default())
    })
}

/// Nanoseconds from 1970 to the moment that [`now`] counts from.
pub fn start_nanos() -> u64 {
    start().1
}

/// Makes the clock of each thread of this process a planted one.
pub fn plant() {
    PLANTED.store(true, Ordering::Relaxed);
}

/// Returns whether the clock is planted.
pub fn is_planted() -> bool {
    cfg!(debug_assertions) && PLANTED.load(Ordering::Relaxed)
}

/// Makes the clock of each thread of this process the time that it has had a processor.
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

/// The time that this thread has had a processor; zero where the system does not tell.
fn processor_time() -> Duration {
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the call fills `time`, which is zero and so valid before, too.
    let time = unsafe {
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, time.as_mut_ptr());
        time.assume_init()
    };
    let secs = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or_default());
    secs + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or_default())
}

/// Returns the time since `then`, an earlier reading of this thread.
pub fn since(then: Duration) -> Duration {
    now().saturating_sub(then)
}

/// Lets `time` pass: sleeps, or moves a planted clock on.
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

/// Returns this thread's time on a planted clock, without a tick; zero on a real one.
pub fn planted_time() -> Duration {
    PASSED.get()
}

/// Moves a planted clock on to `moment`, which another thread has come to; a real one needs nothing.
pub fn wait_until(moment: Duration) {
    if is_planted() {
        PASSED.set(PASSED.get().max(moment));
    }
}

/// Notes that this thread is held up for ever.
pub fn hold_up() {
    HELD_UP.store(true, Ordering::Release);
}

/// Returns whether a thread of this process is held up for ever.
pub fn is_held_up() -> bool {
    HELD_UP.load(Ordering::Acquire)
}
