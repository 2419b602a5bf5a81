//! Child processes that answer requests for rows: a row that crashes a child does not crash the
//! run.
//!
//! A child is set up once and then answers one request after another; as many children run as
//! threads ask at once. If a child runs out of memory, stack or time, its row is at fault, and a
//! new child replaces it. After [`MOST_ENDED`] such rows the pool refuses all requests. If
//! something outside ends a child, the pool repeats the request once. If that happens again, the
//! run ends with the exit code for transient errors (75).
//!
//! If the system starts no process, a request waits for a child that is busy with another row. If
//! no child is busy either, the whole run, not each row, waits [`PATIENCE`] and then ends.
//!
//! All requests of one row share one [`RowBudget`] of processor time.

use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::sandbox::{
    ChildEnd, REQUEST_TIME, SandboxedChild, SandboxedWork, TOO_LONG, UNREADABLE, read_frame, time_for_size,
    write_frame,
};
use super::sandbox_limits::{SandboxLimits, time_taken};
use super::wire;
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;

/// The byte between an answer's processor time and a body that is the reason for a refusal.
const REFUSED: u8 = 1;
const ANSWERED: u8 = 0;

/// Number of rows that may end their child or use up their time before the pool gives up.
pub(super) const MOST_ENDED: usize = 16;
/// Total time that a run waits while it has no child and the system starts none.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval between two attempts to get a child.
const POLL: Duration = Duration::from_millis(20);

/// The part of [`PATIENCE`] that this process has used, over all pools. One thread waits at a time,
/// so it counts time and not threads.
static WAITED: Mutex<Duration> = Mutex::new(Duration::ZERO);

/// Processor time that children may still use for all requests of one row.
#[derive(Debug)]
pub(super) struct RowBudget {
    left: Cell<Duration>,
    /// The reason why the row ended a child. The pool refuses its later requests, so that none
    /// hides the reason.
    ended: RefCell<Option<String>>,
}

impl Default for RowBudget {
    fn default() -> Self {
        RowBudget { left: Cell::new(REQUEST_TIME), ended: RefCell::default() }
    }
}

impl RowBudget {
    /// Adds the time for `bytes` more bytes at `bytes_per_second`; returns the time left.
    fn with(&self, bytes: usize, bytes_per_second: u64) -> Duration {
        self.left.set(self.left.get().saturating_add(time_for_size(bytes as u64, bytes_per_second)));
        self.left.get()
    }

    fn spend(&self, taken: Duration) {
        self.left.set(self.left.get().saturating_sub(taken));
    }
}

/// Children for one kind of work, all with the same setup.
#[derive(Debug)]
pub(super) struct ChildPool {
    work: SandboxedWork,
    setup: Vec<u8>,
    /// Request bytes that add one second to the row's budget.
    bytes_per_second: u64,
    children: Mutex<Children>,
    /// Number of rows that ended their child.
    ended: AtomicUsize,
    given_back: Condvar,
}

#[derive(Debug, Default)]
struct Children {
    idle: Vec<SandboxedChild>,
    busy: usize,
}

impl ChildPool {
    /// Makes a pool for `work` that sends `setup` to each child first; starts no child yet.
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
    /// Fails with the reason if the child cannot be set up.
    pub(super) fn check(&self) -> Result<(), ChildEnd> {
        let first = match self.start() {
            Err(ChildEnd::ByMachine(_)) => self.start(),
            first => first,
        };
        self.lock().idle.push(first?);
        Ok(())
    }

    /// Returns the answer to `request`, within the time left in `budget`.
    ///
    /// # Errors
    /// Fails with the reason if the child gives no answer.
    pub(super) fn ask(&self, request: &[u8], budget: &RowBudget) -> Result<Vec<u8>, ChildEnd> {
        if self.has_given_up() {
            return Err(ChildEnd::ByInput(format!("{MOST_ENDED} earlier rows ended their process")));
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
            // Something outside ended the child, and perhaps the idle ones too.
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

    /// Asks one child, and returns it to the pool if it still runs.
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

    /// Returns true if so many rows ended their child that the pool refuses all requests.
    pub(super) fn has_given_up(&self) -> bool {
        self.ended.load(Ordering::Relaxed) >= MOST_ENDED
    }

    /// Ends the idle children; the next request starts a new one.
    pub(super) fn end(&self) {
        self.lock().idle.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Children> {
        locked(&self.children)
    }

    /// Takes an idle child, or starts a new one.
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

    /// Returns a child to the pool; `None` if it has ended.
    fn give_back(&self, child: Option<SandboxedChild>) {
        let mut children = self.lock();
        children.busy -= 1;
        children.idle.extend(child);
        drop(children);
        self.given_back.notify_one();
    }

    /// Waits up to [`POLL`] for a busy child. Without one, waits for the system, and returns
    /// `error` after [`PATIENCE`] in all.
    fn wait_for_one(&self, error: Error) -> Result<(), ChildEnd> {
        let children = self.lock();
        if children.busy > 0 || !children.idle.is_empty() {
            drop(self.given_back.wait_timeout(children, POLL));
            return Ok(());
        }
        drop(children);
        let mut waited = locked(&WAITED);
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

/// Makes a failed setup a transient error, because no row is at fault.
fn not_set_up(end: ChildEnd) -> ChildEnd {
    match end {
        ChildEnd::ByInput(why) => {
            let what = "cannot set up a process that encodes or renders rows";
            ChildEnd::ByMachine(Error::new(ErrorCategory::Transient, what).because(why))
        }
        end => end,
    }
}

/// Prefixes a request with its time limit, in microseconds.
fn framed(time: Duration, request: &[u8]) -> Vec<u8> {
    [&(time.as_micros() as u64).to_le_bytes()[..], request].concat()
}

/// Splits an answer into its processor time and its body, or the reason for a refusal.
fn taken_apart(answer: &[u8]) -> Result<(Duration, Result<Vec<u8>, String>), ChildEnd> {
    let mut rest = answer;
    let head = wire::take_u64(&mut rest).zip(wire::take_byte(&mut rest));
    let (micros, kind) = head.ok_or_else(|| ChildEnd::ByInput(UNREADABLE.to_owned()))?;
    let body =
        if kind == ANSWERED { Ok(rest.to_vec()) } else { Err(String::from_utf8_lossy(rest).into_owned()) };
    Ok((Duration::from_micros(micros), body))
}

/// A child's answer, or its reason for a refusal; `None` for a malformed request.
pub(super) type ChildAnswer<T> = Option<Result<T, String>>;

/// Runs a child: the first request sets it up; it then answers requests until the pipe closes.
///
/// # Errors
/// Fails if a request is malformed, a limit cannot be set or an answer cannot be written.
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
        // A closed pipe ends the child normally.
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
