//! The limits of a child process (see [`super::sandbox`]), which it sets itself before it reads
//! anything.

use std::cell::Cell;
use std::io::{self, Write};
use std::time::Duration;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
use libc::__rlimit_resource_t as ResourceName;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
use libc::c_int as ResourceName;

use super::sandbox::{MEMORY_BYTES, NOT_GRANTED};

/// Maximum number of open files: the pipes, the input and its copies.
const FILES: u64 = 256;

/// Signals that a terminal or a scheduler sends to every process of a run. The child ignores them:
/// the parent decides, and its end closes the child's pipes.
const NOT_ITS_OWN: [libc::c_int; 5] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];

/// Base of a child's limits.
#[derive(Debug)]
pub(super) struct SandboxLimits {
    /// Address space of the process in bytes, before it reads anything; `None` if the system does
    /// not report it.
    own_bytes: Cell<Option<u64>>,
    /// True after the note to the parent that the machine grants less.
    has_warned: Cell<bool>,
}

/// Limits this process's signals, files and core dumps.
///
/// # Errors
/// Fails if the system refuses a limit; the child must then not work.
pub(super) fn confine() -> io::Result<SandboxLimits> {
    for signal in NOT_ITS_OWN {
        // SAFETY: ignoring a signal runs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: the same; a child inherits the choice of a parent that ignores this signal.
    unsafe { libc::signal(libc::SIGPROF, libc::SIG_DFL) };
    limit(libc::RLIMIT_CORE, 0)?;
    limit(libc::RLIMIT_FSIZE, 0)?;
    limit(libc::RLIMIT_NOFILE, FILES)?;
    Ok(SandboxLimits { own_bytes: Cell::new(address_space()), has_warned: Cell::new(false) })
}

/// Processor time that this process has used so far.
pub(super) fn time_taken() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call, which fills it in; if it fails, `now` stays zero.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut now) };
    Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec as u32)
}

impl SandboxLimits {
    /// Sets the limits of the next request: memory for its `bytes` bytes, and `time` of the
    /// processor from now on.
    ///
    /// # Errors
    /// Fails if the system refuses a limit.
    pub(super) fn begin(&self, bytes: u64, time: Duration) -> io::Result<()> {
        if let Some(own) = self.own_bytes.get() {
            let wanted = own.saturating_add(MEMORY_BYTES).saturating_add(bytes.saturating_mul(16));
            let granted = limit_now(libc::RLIMIT_AS, wanted)?;
            if granted < wanted || limits_of(libc::RLIMIT_DATA)?.rlim_cur < wanted - own {
                self.warn_once();
            }
        }
        // A timer of zero would never end.
        timer((time.as_millis() as u64).max(1))
    }

    /// Makes the memory that this process holds now the base of later limits.
    pub(super) fn keep_what_is_held(&self) {
        self.own_bytes.set(address_space());
    }

    fn warn_once(&self) {
        if !self.has_warned.replace(true) {
            drop(writeln!(io::stderr(), "{NOT_GRANTED}"));
        }
    }
}

/// Bytes of address space of this process; `None` if the system does not report it.
fn address_space() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split_whitespace().next()?.parse::<u64>().ok()? * page_bytes())
}

/// Ends this process after `millis` of processor time.
fn timer(millis: u64) -> io::Result<()> {
    let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let value = libc::timeval {
        tv_sec: (millis / 1000) as libc::time_t,
        tv_usec: (millis % 1000 * 1000) as libc::suseconds_t,
    };
    let timer = libc::itimerval { it_interval: zero, it_value: value };
    // SAFETY: the timer is valid, and the call keeps no pointer to it; null means that the old
    // timer is not returned.
    done(unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, std::ptr::null_mut()) })
}

/// Permanently limits a resource of this process to `most`, or less if its limit is lower already.
fn limit(resource: ResourceName, most: u64) -> io::Result<()> {
    let most = most.min(limits_of(resource)?.rlim_max);
    set_limit(resource, libc::rlimit { rlim_cur: most, rlim_max: most })
}

/// Limits a resource of this process until the next call; returns the limit that applies.
fn limit_now(resource: ResourceName, most: u64) -> io::Result<u64> {
    let now = limits_of(resource)?;
    let most = most.min(now.rlim_max);
    set_limit(resource, libc::rlimit { rlim_cur: most, ..now })?;
    Ok(most)
}

fn limits_of(resource: ResourceName) -> io::Result<libc::rlimit> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `now` outlives the call, which fills it in.
    done(unsafe { libc::getrlimit(resource, &raw mut now) })?;
    Ok(now)
}

fn set_limit(resource: ResourceName, limit: libc::rlimit) -> io::Result<()> {
    // SAFETY: only the call reads the limit.
    done(unsafe { libc::setrlimit(resource, &raw const limit) })
}

fn done(returned: libc::c_int) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn page_bytes() -> u64 {
    // SAFETY: the call takes a number and touches no memory of this program.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}
