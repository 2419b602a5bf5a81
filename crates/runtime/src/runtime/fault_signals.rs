//! Signals for faults of a mapped file: each becomes an error that names the file.
//!
//! If another program truncates a mapped file, or its disk fails, the next access ends the process
//! by SIGBUS. Reading such files instead of mapping them would copy every tensor. So code that maps
//! a file calls [`guard`], and the process ends with the file's error and the exit code of storage.
//! It cannot continue without the data.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, OnceLock};

use libc::{c_int, c_void, sigaction, siginfo_t};

use crate::error::ErrorCategory;
use crate::locks::locked;

/// Maximum number of guarded files; faults of further ones give only the system's message.
const MOST_FILES: usize = 1024;

/// A mapped file, in the form that the signal handler reads.
struct MappedRange {
    /// Its address; 0 for a free entry.
    start: AtomicUsize,
    bytes: AtomicUsize,
    /// Error text of the file, valid while the file is mapped.
    text: AtomicPtr<u8>,
    text_bytes: AtomicUsize,
}

impl MappedRange {
    const fn free() -> Self {
        MappedRange {
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            text: AtomicPtr::new(ptr::null_mut()),
            text_bytes: AtomicUsize::new(0),
        }
    }
}

static FILES: [MappedRange; MOST_FILES] = [const { MappedRange::free() }; MOST_FILES];

/// Held while an entry is claimed or freed.
static TURN: Mutex<()> = Mutex::new(());

/// Previous handler of SIGBUS.
static BEFORE: OnceLock<sigaction> = OnceLock::new();

/// Guard of a mapped file, which reports its faults as errors. Drop it before the file is unmapped.
#[derive(Debug)]
pub struct FaultGuard {
    /// Index in [`FILES`]; none if no entry was free.
    index: Option<usize>,
    /// Text that the handler writes.
    _text: Box<str>,
}

/// Makes a fault of the file mapped to `memory` end the process with an error. `what` names the
/// failed action, such as `cannot read weights model.safetensors`.
pub fn guard(memory: &Range<usize>, what: &str) -> FaultGuard {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(install);
    // The leading newline keeps a progress line readable.
    let text = format!(
        "\nerror: {what}\n  caused by: the file is shorter than it was when it was opened, or its disk fails (SIGBUS)\n\
         hint: put the whole file back, and let no other program change it meanwhile\n"
    );
    let text = text.into_boxed_str();
    let turn = locked(&TURN);
    let index = FILES.iter().position(|file| file.start.load(Ordering::Acquire) == 0);
    if let Some(file) = index.map(|index| &FILES[index]) {
        file.text.store(text.as_ptr().cast_mut(), Ordering::Release);
        file.text_bytes.store(text.len(), Ordering::Release);
        file.bytes.store(memory.len(), Ordering::Release);
        // Last, because the handler uses the entry from here on.
        file.start.store(memory.start, Ordering::SeqCst);
    }
    drop(turn);
    FaultGuard { index, _text: text }
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        let Some(index) = self.index else { return };
        let turn = locked(&TURN);
        FILES[index].start.store(0, Ordering::SeqCst);
        drop(turn);
    }
}

/// Makes a write beyond the file size limit (`ulimit -f`) an error, instead of ending the process.
pub fn make_large_files_errors() {
    // SAFETY: an ignored signal runs no code of this process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Function to call before a fault ends the process.
static LAST: OnceLock<fn()> = OnceLock::new();

/// Calls `last` before a fault ends the process. It runs in a signal handler, so it may only make
/// calls that are allowed there. Only the first registration counts.
pub fn before_exit(last: fn()) {
    LAST.get_or_init(|| last);
}

fn install() {
    // SAFETY: zeroes are a valid `sigaction`; the handler only makes calls allowed in one (see
    // there); the previous action is stored.
    unsafe {
        let (mut new, mut before): (sigaction, sigaction) = (std::mem::zeroed(), std::mem::zeroed());
        new.sa_sigaction = on_bus_error as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut new.sa_mask);
        if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) == 0 {
            BEFORE.get_or_init(|| before);
            libc::sigaction(libc::SIGBUS, &raw const new, ptr::null_mut());
        }
    }
}

/// Milliseconds that the handler waits for a blocked terminal, as after Ctrl-S.
const PATIENCE_MS: c_int = 2000;

/// Returns true if stderr is no terminal, or one that accepts output in time. It only makes calls
/// that handlers may make.
fn takes_output() -> bool {
    let mut poll = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: zeroes are a valid `termios`, which `tcgetattr` fills in for a terminal; the pointers
    // are to one valid value.
    unsafe {
        let mut settings: libc::termios = std::mem::zeroed();
        libc::tcgetattr(libc::STDERR_FILENO, &raw mut settings) != 0
            || libc::poll(&raw mut poll, 1, PATIENCE_MS) == 1
    }
}

/// Writes the text of the faulty file and ends the process; other faults go to the previous
/// handler. It only loads atomics and calls [`before_exit`]'s function, `tcgetattr`, `poll`,
/// `write`, `sigaction` and `_exit`, which signal handlers may.
extern "C" fn on_bus_error(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the system passes a valid `info` to a handler with SA_SIGINFO. A text is alive while
    // its file has a start, and the thread at fault is still reading that file.
    unsafe {
        let at = (*info).si_addr() as usize;
        for file in &FILES {
            let (start, bytes) = (file.start.load(Ordering::SeqCst), file.bytes.load(Ordering::Acquire));
            if start != 0 && at.checked_sub(start).is_some_and(|offset| offset < bytes) {
                let (text, len) =
                    (file.text.load(Ordering::Acquire), file.text_bytes.load(Ordering::Acquire));
                if let Some(last) = LAST.get() {
                    last();
                }
                if takes_output() {
                    libc::write(libc::STDERR_FILENO, text.cast(), len);
                }
                libc::_exit(i32::from(ErrorCategory::Storage.exit_code()));
            }
        }
        // The access is repeated and faults again.
        if let Some(before) = BEFORE.get() {
            libc::sigaction(libc::SIGBUS, before, ptr::null_mut());
        } else {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
        }
    }
}
