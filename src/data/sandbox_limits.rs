//! The limits of a child process (see [`super::sandbox`]), which it sets itself before it reads anything.

use std::io;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
use libc::__rlimit_resource_t as ResourceName;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
use libc::c_int as ResourceName;

use super::sandbox::{BYTES_PER_SECOND, MEMORY_BYTES, REQUEST_TIME};

/// Files that may be open: the pipes, the input and its copies.
const FILES: u64 = 256;

/// Signals that a terminal or a scheduler sends to every process of a run: what they mean the parent decides, whose end
/// is the end of the child's work.
const NOT_ITS_OWN: [libc::c_int; 5] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];

/// What a child's limits are counted from.
#[derive(Debug, Clone, Copy)]
pub(super) struct SandboxLimits {
    /// Address space of the binary itself; none where the system does not say.
    own_bytes: Option<u64>,
}

/// Takes from this process what it does not need.
///
/// # Errors
/// The system refuses a limit: then no work is done.
pub(super) fn confine() -> io::Result<SandboxLimits> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let pages = pages.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    for signal in NOT_ITS_OWN {
        // SAFETY: to ignore a signal runs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: as above; a parent that ignores this one has handed that down.
    unsafe { libc::signal(libc::SIGPROF, libc::SIG_DFL) };
    limit(libc::RLIMIT_CORE, 0)?;
    limit(libc::RLIMIT_FSIZE, 0)?;
    limit(libc::RLIMIT_NOFILE, FILES)?;
    Ok(SandboxLimits { own_bytes: pages.map(|pages| pages * page_bytes()) })
}

impl SandboxLimits {
    /// Gives the next request of `bytes` bytes its memory and its processor time, counted from now.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn begin(&self, bytes: u64) -> io::Result<()> {
        if let Some(own) = self.own_bytes {
            limit_now(libc::RLIMIT_AS, own + MEMORY_BYTES + 16 * bytes)?;
        }
        timer(REQUEST_TIME.as_millis() as u64 + 1000 * bytes / BYTES_PER_SECOND)
    }
}

/// Ends this process after `millis` of processor time.
fn timer(millis: u64) -> io::Result<()> {
    let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let value = libc::timeval {
        tv_sec: (millis / 1000) as libc::time_t,
        tv_usec: (millis % 1000 * 1000) as libc::suseconds_t,
    };
    let timer = libc::itimerval { it_interval: zero, it_value: value };
    // SAFETY: the timer is a valid value for the call, which keeps no pointer to it; the old one is not asked for.
    done(unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, std::ptr::null_mut()) })
}

/// Limits what this process may have, for good.
fn limit(resource: ResourceName, most: u64) -> io::Result<()> {
    set_limit(resource, libc::rlimit { rlim_cur: most, rlim_max: most })
}

/// Limits what this process may have until the next call.
fn limit_now(resource: ResourceName, most: u64) -> io::Result<()> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `now` outlives the call, which fills it in.
    done(unsafe { libc::getrlimit(resource, &raw mut now) })?;
    set_limit(resource, libc::rlimit { rlim_cur: most.min(now.rlim_max), ..now })
}

fn set_limit(resource: ResourceName, limit: libc::rlimit) -> io::Result<()> {
    // SAFETY: the limit is read by the call alone.
    done(unsafe { libc::setrlimit(resource, &raw const limit) })
}

fn done(returned: libc::c_int) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn page_bytes() -> u64 {
    // SAFETY: the call takes a number and touches no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}
