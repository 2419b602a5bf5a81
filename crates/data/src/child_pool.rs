//! Child processes that answer requests of rows: what a row does to such a process, it does not do to the run.
//!
//! A child is set up once, then asked one thing after another; as many children work as threads ask at once. A child that
//! ends instead of answering because it ran out of memory, of stack or of time is the fault of its row, and a new one takes
//! its place; after a few such rows no more are answered. A child that something outside ends gets its request a second
//! time, without a penalty; when that happens again, the run ends with the code for errors that pass (75).
//!
//! Where the system starts no process, a request waits for a child that is at work for another row. Where none is at work
//! either, the whole run waits [`PATIENCE`], not each row, and then ends.
//!
//! All that one row asks shares one [`RowBudget`] of processor time.

use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::sandbox::{
    ChildEnd, REQUEST_TIME, SandboxedChild, SandboxedWork, TOO_LONG, UNREADABLE, read_frame, time_for_size,
    write_frame,
};
use super::sandbox_limits::{SandboxLimits, time_taken};
use super::wire;
use crate::error::{Error, ErrorCategory, Result};

/// The first byte of an answer, after the time that it took.
const REFUSED: u8 = 1;
const ANSWERED: u8 = 0;

/// Rows that may end their child or use up their time: each takes all of it first.
const MOST_ENDED: usize = 16;
/// The time that a run waits in all while it has no child and the system starts none.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries to have a child.
const POLL: Duration = Duration::from_millis(20);

/// The part of [`PATIENCE`] that this process has used, over all pools. One thread waits at a time, so that it counts time
/// and not threads.
static WAITED: Mutex<Duration> = Mutex::new(Duration::ZERO);

/// Processor time that children may still take for one row, whatever they are asked for it.
#[derive(Debug)]
pub(super) struct RowBudget {
    left: Cell<Duration>,
    /// The reason for which the row ended a child: nothing more is answered for it, so that no later request hides the reason.
    ended: RefCell<Option<String>>,
}

impl Default for RowBudget {
    fn default() -> Self {
        RowBudget { left: Cell::new(REQUEST_TIME), ended: RefCell::default() }
    }
}

impl RowBudget {
    /// Adds the time for `bytes` more, at `bytes_per_second`; the time that is left.
    fn with(&self, bytes: usize, bytes_per_second: u64) -> Duration {
        self.left.set(self.left.get().saturating_add(time_for_size(bytes as u64, bytes_per_second)));
        self.left.get()
    }

    fn spend(&self, taken: Duration) {
        self.left.set(self.left.get().saturating_sub(taken));
    }
}

/// Children that do one work, each set up alike.
#[derive(Debug)]
pub(super) struct ChildPool {
    work: SandboxedWork,
    setup: Vec<u8>,
    /// Bytes of a request for which its row has a second more.
    bytes_per_second: u64,
    children: Mutex<Children>,
    /// Rows that ended their child.
    ended: AtomicUsize,
    given_back: Condvar,
}

#[derive(Debug, Default)]
struct Children {
    idle: Vec<SandboxedChild>,
    busy: usize,
}

impl ChildPool {
    /// Children for `work`, which `setup` is sent to first; none is started yet.
    pub(super) fn new(work: SandboxedWork, setup: Vec<u8>, bytes_per_second: u64) -> Self {
        ChildPool {
            work,
            setup,
            bytes_per_second,
            children: Mutex::default(),
            ended: AtomicUsize::new(0),
            given_back: Condvar::new(),
        }
    }

    /// Starts a first child and sets it up.
    ///
    /// # Errors
    /// It cannot be set up, with the reason.
    pub(super) fn check(&self) -> Result<(), ChildEnd> {
        let first = match self.start() {
            Err(ChildEnd::ByMachine(_)) => self.start(),
            first => first,
        };
        self.lock().idle.push(first?);
        Ok(())
    }

    /// The answer to `request`, within what is left of `budget`.
    ///
    /// # Errors
    /// The child gave no answer, with the reason.
    pub(super) fn ask(&self, request: &[u8], budget: &RowBudget) -> Result<Vec<u8>, ChildEnd> {
        if self.has_given_up() {
            return Err(ChildEnd::ByInput(format!("{MOST_ENDED} rows before it ended its process")));
        }
        if let Some(why) = &*budget.ended.borrow() {
            return Err(ChildEnd::ByInput(why.clone()));
        }
        let left = budget.with(request.len(), self.bytes_per_second);
        if left.is_zero() {
            return Err(self.ended_by_row(budget, TOO_LONG.to_owned()));
        }
        let request = framed(left, request);
        let asked = match self.ask_one(&request) {
            // Something outside, for which the row may be innocent. It may have ended those too that have nothing to do.
            Err(ChildEnd::ByMachine(_)) => {
                self.end();
                self.ask_one(&request)
            }
            asked => asked,
        };
        match asked {
            Ok(answer) => {
                let (taken, answer) = taken_apart(&answer)?;
                budget.spend(taken);
                answer.map_err(ChildEnd::ByInput)
            }
            Err(ChildEnd::ByInput(why)) => Err(self.ended_by_row(budget, why)),
            Err(end) => Err(end),
        }
    }

    /// The answer of one child, which is given back, or is gone.
    fn ask_one(&self, request: &[u8]) -> Result<Vec<u8>, ChildEnd> {
        let mut child = self.take()?;
        let answer = child.ask(request);
        self.give_back(answer.is_ok().then_some(child));
        answer
    }

    fn ended_by_row(&self, budget: &RowBudget, why: String) -> ChildEnd {
        self.ended.fetch_add(1, Ordering::Relaxed);
        budget.ended.replace(Some(why.clone()));
        ChildEnd::ByInput(why)
    }

    /// Returns whether so many rows ended their child that no more are answered.
    pub(super) fn has_given_up(&self) -> bool {
        self.ended.load(Ordering::Relaxed) >= MOST_ENDED
    }

    /// Ends the children that have nothing to do; the next request starts one again.
    pub(super) fn end(&self) {
        self.lock().idle.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Children> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A child that has nothing to do, or a new one.
    fn take(&self) -> Result<SandboxedChild, ChildEnd> {
        loop {
            {
                let mut children = self.lock();
                if let Some(child) = children.idle.pop() {
                    children.busy += 1;
                    return Ok(child);
                }
            }
            match SandboxedChild::start(self.work, None) {
                Ok(child) => {
                    let child = self.set_up(child).map_err(not_set_up)?;
                    self.lock().busy += 1;
                    return Ok(child);
                }
                Err(error) => self.wait_for_one(error)?,
            }
        }
    }

    /// Puts back a child that was taken; none, if it has ended.
    fn give_back(&self, child: Option<SandboxedChild>) {
        let mut children = self.lock();
        children.busy -= 1;
        children.idle.extend(child);
        drop(children);
        self.given_back.notify_one();
    }

    /// Waits a moment after `error`: for a child at work, or where there is none for the system, as long as the patience of
    /// the run lasts.
    fn wait_for_one(&self, error: Error) -> Result<(), ChildEnd> {
        let children = self.lock();
        if children.busy > 0 || !children.idle.is_empty() {
            drop(self.given_back.wait_timeout(children, POLL));
            return Ok(());
        }
        drop(children);
        let mut waited = WAITED.lock().unwrap_or_else(PoisonError::into_inner);
        if *waited >= PATIENCE {
            return Err(ChildEnd::ByMachine(error));
        }
        std::thread::sleep(POLL);
        *waited += POLL;
        Ok(())
    }

    fn start(&self) -> Result<SandboxedChild, ChildEnd> {
        self.set_up(SandboxedChild::start(self.work, None).map_err(ChildEnd::ByMachine)?)
    }

    fn set_up(&self, mut child: SandboxedChild) -> Result<SandboxedChild, ChildEnd> {
        let time = RowBudget::default().with(self.setup.len(), self.bytes_per_second);
        let answer = child.ask(&framed(time, &self.setup))?;
        taken_apart(&answer)?.1.map(|_| child).map_err(ChildEnd::ByInput)
    }
}

/// The error of a child that cannot be set up: no row is at fault.
fn not_set_up(end: ChildEnd) -> ChildEnd {
    match end {
        ChildEnd::ByInput(why) => {
            let what = "cannot set up a process that encodes or renders rows";
            ChildEnd::ByMachine(Error::new(ErrorCategory::Transient, what).because(why))
        }
        end => end,
    }
}

/// A request with the time that it may take.
fn framed(time: Duration, request: &[u8]) -> Vec<u8> {
    [&(time.as_micros() as u64).to_le_bytes()[..], request].concat()
}

/// The time that an answer took, and the answer or the reason for none.
fn taken_apart(answer: &[u8]) -> Result<(Duration, Result<Vec<u8>, String>), ChildEnd> {
    let mut rest = answer;
    let head = wire::take_u64(&mut rest).zip(wire::take_byte(&mut rest));
    let (micros, kind) = head.ok_or_else(|| ChildEnd::ByInput(UNREADABLE.to_owned()))?;
    let body =
        if kind == ANSWERED { Ok(rest.to_vec()) } else { Err(String::from_utf8_lossy(rest).into_owned()) };
    Ok((Duration::from_micros(micros), body))
}

/// An answer of a child, or its reason for none; no request at all makes none.
pub(super) type ChildAnswer<T> = Option<Result<T, String>>;

/// The work of a child: is set up by the first request, then answers one after the other until nobody asks.
///
/// # Errors
/// Whoever asks has gone, or asks what cannot be read.
pub(super) fn serve<W>(
    limits: &SandboxLimits,
    set_up: impl FnOnce(&[u8]) -> ChildAnswer<W>,
    answer: impl Fn(&W, &[u8]) -> ChildAnswer<Vec<u8>>,
) -> io::Result<()> {
    let unreadable = || io::Error::from(io::ErrorKind::InvalidData);
    let mut requests = io::stdin().lock();
    let mut answers = io::BufWriter::new(io::stdout().lock());
    let mut reply = |begun: Duration, answer: Result<Vec<u8>, String>| {
        let (kind, body) = match answer {
            Ok(body) => (ANSWERED, body),
            Err(why) => (REFUSED, why.into_bytes()),
        };
        let taken = time_taken().saturating_sub(begun).as_micros() as u64;
        write_frame(&mut answers, &[&taken.to_le_bytes()[..], &[kind], &body].concat())?;
        answers.flush()
    };
    let mut begin = || -> Option<io::Result<(Duration, Vec<u8>)>> {
        // The end of the pipe is the end of the work.
        let mut frame = read_frame(&mut requests).ok()?;
        let bytes = frame.len() as u64;
        let Some((time, _)) = frame.split_first_chunk::<8>() else { return Some(Err(unreadable())) };
        let time = Duration::from_micros(u64::from_le_bytes(*time));
        let begun = time_taken();
        frame.drain(..8);
        Some(limits.begin(bytes, time).map(|()| (begun, frame)))
    };
    let Some((begun, request)) = begin().transpose()? else { return Ok(()) };
    let worker = match set_up(&request).ok_or_else(unreadable)? {
        Ok(worker) => worker,
        Err(why) => return reply(begun, Err(why)),
    };
    drop(request);
    limits.keep_what_is_held();
    reply(begun, Ok(Vec::new()))?;
    while let Some((begun, request)) = begin().transpose()? {
        reply(begun, answer(&worker, &request).ok_or_else(unreadable)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_one_budget_for_all_that_it_asks() {
        let budget = RowBudget::default();
        assert_eq!(budget.with(0, 1000), REQUEST_TIME);
        assert_eq!(budget.with(2000, 1000), REQUEST_TIME + Duration::from_secs(2));
        budget.spend(Duration::from_secs(2));
        assert_eq!(budget.with(0, 1000), REQUEST_TIME);
        budget.spend(Duration::from_secs(9));
        assert!(budget.with(0, 1000).is_zero());
        assert_eq!(budget.with(500, 1000), Duration::from_millis(500));
    }

    #[test]
    fn an_answer_has_its_time_and_its_kind() {
        let answer = |kind: u8| [&1500_u64.to_le_bytes()[..], &[kind], b"ab"].concat();
        let (taken, text) = taken_apart(&answer(ANSWERED)).unwrap();
        assert_eq!((taken, text), (Duration::from_micros(1500), Ok(b"ab".to_vec())));
        assert_eq!(taken_apart(&answer(REFUSED)).unwrap().1, Err("ab".to_owned()));
        assert!(taken_apart(&answer(ANSWERED)[..8]).is_err());
    }
}
