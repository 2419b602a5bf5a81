//! Signals by which the system reports a fault of a file: each becomes an error that names the file.
//!
//! A file that is mapped and then cut short by another program, or whose disk fails, ends the process by SIGBUS at the
//! next look at it. Reading such files instead of mapping them would cost a copy of every tensor, so who maps a file says
//! so here ([`guard`]), and the process ends with the error that belongs to it and the exit code of storage. Nothing of the
//! process goes on after it: it would compute with what is not there.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use libc::{c_int, c_void, sigaction, siginfo_t};

use crate::error::ErrorCategory;

/// Mapped files that can be told apart; of further ones the system's own message is all there is.
const MOST_FILES: usize = 1024;

/// A mapped file, as the handler of the signal reads it.
struct MappedRange {
    /// Its address; 0 while the place is free.
    start: AtomicUsize,
    bytes: AtomicUsize,
    /// What is written for it, as long as the file is mapped.
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

/// Held by whoever takes or gives back a place.
static TURN: Mutex<()> = Mutex::new(());

/// What was done at SIGBUS before.
static BEFORE: OnceLock<sigaction> = OnceLock::new();

/// A mapped file whose faults are told as errors until this is dropped, which must be before it is unmapped.
#[derive(Debug)]
pub struct FaultGuard {
    /// Its place among [`FILES`]; none where there was no free one.
    place: Option<usize>,
    /// What the handler writes.
    _text: Box<str>,
}

/// Has a fault of the file mapped to `memory` end the process with an error: `what` says what it is read for, such as
/// `cannot read weights model.safetensors`.
pub fn guard(memory: &Range<usize>, what: &str) -> FaultGuard {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(install);
    // What was being drawn on the line stays readable.
    let text = format!(
        "\nerror: {what}\n  caused by: the file is shorter than it was when it was opened, or its disk fails (SIGBUS)\n\
         hint: put the whole file back, and let no other program change it meanwhile\n"
    );
    let text = text.into_boxed_str();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let place = FILES.iter().position(|file| file.start.load(Ordering::Acquire) == 0);
    if let Some(file) = place.map(|place| &FILES[place]) {
        file.text.store(text.as_ptr().cast_mut(), Ordering::Release);
        file.text_bytes.store(text.len(), Ordering::Release);
        file.bytes.store(memory.len(), Ordering::Release);
        // Last: from now on the handler looks at it.
        file.start.store(memory.start, Ordering::SeqCst);
    }
    drop(turn);
    FaultGuard { place, _text: text }
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        FILES[place].start.store(0, Ordering::SeqCst);
        drop(turn);
    }
}

/// Makes a write beyond the limit on the size of files (`ulimit -f`) an error of the write, instead of the end of the
/// process.
pub fn make_large_files_errors() {
    // SAFETY: to ignore a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// What is called before a fault ends the process.
static LAST: OnceLock<fn()> = OnceLock::new();

/// Has `last` called before a fault ends the process: in a signal handler, so that it may do no more than one of them may.
/// The first call counts.
pub fn before_exit(last: fn()) {
    LAST.get_or_init(|| last);
}

fn install() {
    // SAFETY: zeroes are a valid `sigaction`; the handler does nothing but what is allowed in one, see there; what was
    // done before is kept.
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

/// Milliseconds for which the handler waits for a terminal that takes nothing, as after Ctrl-S.
const PATIENCE_MS: c_int = 2000;

/// Returns whether stderr is no terminal, or one that takes output in time. It makes calls that handlers may make.
fn takes_output() -> bool {
    let mut poll = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: zeroes are a valid `termios`, which `tcgetattr` fills in for a terminal; the pointers are to one valid value.
    unsafe {
        let mut settings: libc::termios = std::mem::zeroed();
        libc::tcgetattr(libc::STDERR_FILENO, &raw mut settings) != 0
            || libc::poll(&raw mut poll, 1, PATIENCE_MS) == 1
    }
}

/// Writes the text of the file at fault and ends the process; what is no file's is left to what was done before. It only
/// loads atomics and calls [`before_exit`]'s function, `tcgetattr`, `poll`, `write`, `sigaction` and `_exit`, which signal handlers may.
extern "C" fn on_bus_error(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the system passes a valid `info` to a handler with SA_SIGINFO. A text is alive while its file has a start,
    // and the thread at fault is still reading that file.
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
        // The access is tried again, and faults again.
        if let Some(before) = BEFORE.get() {
            libc::sigaction(libc::SIGBUS, before, ptr::null_mut());
        } else {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
        }
    }
}
