//! A program that gets the run as lines of JSON on its input (`log.command`), such as a script of
//! `integrations/`. docs/monitoring.md describes the lines.
//!
//! A thread writes the lines from a bounded queue, so that a program that reads slowly or not at
//! all never makes a step wait. Lines that do not fit are dropped and counted. After a killed run,
//! the program sees the end of its input.

use std::cell::RefCell;
use std::io::{Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::delivery::{DeliveryQueue, PAUSE};
use super::listener::{RunEnd, RunListener};
use super::metrics::{EvalReport, SkippedStep, StepReport};
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::threads;

/// Most lines that wait for the program.
const WAITING: usize = 4096;
/// Time that a run waits at its end for the program, which may still be loading its packages.
pub(crate) const LAST_WAIT: Duration = Duration::from_secs(30);
/// The same for a failed run, since other ranks may wait for its end.
const SHORT_WAIT: Duration = Duration::from_secs(2);
/// Time that a warning waits for the program's last messages. No step waits for them.
const MESSAGE_WAIT: Duration = Duration::from_secs(1);
/// Time that the system has to end a killed program.
pub(crate) const KILL_WAIT: Duration = Duration::from_secs(5);
/// Bytes of the program's last messages that are kept.
const KEPT_BYTES: usize = 1024;
/// Last lines of them that a warning repeats.
const SHOWN_LINES: usize = 3;

/// The facts of the first line.
#[derive(Debug, Serialize)]
pub struct RunStart {
    /// Name of the run, that of its output folder.
    pub run: String,
    /// The model that it trains.
    pub model: String,
    /// Absolute path of its output folder.
    pub output: String,
    /// Version of finetune.
    pub version: &'static str,
    /// Time of the start, in the format of RFC 3339.
    pub started: String,
    /// Number of ranks.
    pub world_size: usize,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// The step of the checkpoint that the run resumes from.
    pub resumed_step: Option<u64>,
    /// Every set key of the resolved recipe, as `section.key`.
    pub recipe: serde_json::Map<String, Value>,
}

/// A line: its kind, and the fields of `facts`.
#[derive(Serialize)]
struct LogLine<'a, T> {
    event: &'static str,
    #[serde(flatten)]
    facts: &'a T,
}

/// The facts of the last line.
#[derive(Serialize)]
struct EndFacts {
    status: &'static str,
    /// Lines that were dropped because the program did not keep up.
    dropped: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn line<T: Serialize>(event: &'static str, facts: &T) -> Result<String> {
    let text = serde_json::to_string(&LogLine { event, facts });
    text.map(|text| text + "\n").map_err(|e| {
        Error::internal(format!("cannot write the line `{event}` as JSON")).because(e.to_string())
    })
}

/// Returns the time that a run with this end waits for the program.
fn last_wait(end: RunEnd<'_>) -> Duration {
    match end {
        // All ranks diverge at once, so no rank waits for this one.
        RunEnd::Failed(error) if error.kind() != ErrorCategory::Diverged => SHORT_WAIT,
        _ => LAST_WAIT,
    }
}

/// The started program. As a listener it gets the lines of the run. [`LogCommand::end`] sends the
/// last line when the run is complete on disk.
pub struct LogCommand {
    name: String,
    child: Child,
    /// The status of a program that ended before the run, and the time at which a step saw it.
    ended: Option<(ExitStatus, Instant)>,
    /// None after the end, or after the warning about a program that ended before the run.
    queue: Option<DeliveryQueue<String>>,
    /// The line after all that wait.
    last: Arc<OnceLock<String>>,
    /// Lines that the thread has written.
    written: Arc<AtomicU64>,
    given: u64,
    dropped: u64,
    messages: MessageTail,
}

impl LogCommand {
    /// Starts the program `words`, which gets `facts` as its first line.
    ///
    /// # Errors
    /// The system starts no process or thread.
    pub fn start(words: &[String], facts: &RunStart) -> Result<Self> {
        let (name, arguments) =
            words.split_first().ok_or_else(|| Error::internal("a program has no name"))?;
        let first = line("run", facts)?;
        let mut command = Command::new(name);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        // A group of its own: Ctrl-C ends the run, and the program learns it from the last line.
        let child = command.process_group(0).spawn();
        let mut child = child.map_err(|e| Error::cannot_start(format!("the program `{name}`"), &e))?;
        match Pipes::of(&mut child) {
            Ok(Pipes { queue, last, written, messages }) => {
                let (given, dropped, queue) = (0, 0, Some(queue));
                let (name, ended) = (name.clone(), None);
                let mut own =
                    LogCommand { name, child, ended, queue, last, written, given, dropped, messages };
                own.tell(first);
                Ok(own)
            }
            Err(error) => {
                kill_group(&child);
                let _status = child.wait();
                Err(error)
            }
        }
    }

    fn tell(&mut self, line: String) {
        let is_queued = self.queue.as_ref().is_some_and(|queue| queue.hand_over(line).is_ok());
        self.given += 1;
        self.dropped += u64::from(!is_queued);
    }

    /// Queues a line of metrics.jsonl, and never waits.
    ///
    /// # Errors
    /// The program has ended. The error comes with the program's last messages, so that it may come
    /// some steps later: a child of the program may still hold its stderr.
    fn metrics(&mut self, entry: &impl Serialize) -> Result<()> {
        if self.ended.is_none() {
            match self.child.try_wait() {
                Ok(None) => {
                    self.tell(line("metrics", entry)?);
                    return Ok(());
                }
                Ok(Some(status)) => self.ended = Some((status, Instant::now())),
                Err(error) => {
                    self.queue = None;
                    return Err(self.fault(&format!("cannot be watched: {error}")));
                }
            }
        }
        match self.ended {
            Some((status, since)) if self.messages.is_complete() || since.elapsed() >= MESSAGE_WAIT => {
                self.queue = None;
                Err(self.ended_early(status))
            }
            _ => Ok(()),
        }
    }

    fn ended_early(&self, status: ExitStatus) -> Error {
        self.fault(&format!("ended before the run with {status}"))
    }

    /// Sends the last line and waits for the program to end: at most 30 s, after a failed run 2 s.
    /// Then kills it. Calls `pulse` while it waits. Does nothing after the first call, or if a
    /// warning has already named the program.
    ///
    /// # Errors
    /// The program failed, was killed, or did not read all lines.
    pub fn end(&mut self, end: RunEnd<'_>, pulse: &dyn Fn()) -> Result<()> {
        self.finish(end, last_wait(end), pulse)
    }

    /// The same with another longest time to wait.
    fn finish(&mut self, end: RunEnd<'_>, wait: Duration, pulse: &dyn Fn()) -> Result<()> {
        let Some(queue) = self.queue.take() else { return Ok(()) };
        if let Some((status, _)) = self.ended {
            self.messages.wait(pulse);
            return Err(self.ended_early(status));
        }
        let until = Instant::now() + wait;
        self.given += 1;
        let (status, error) = match end {
            RunEnd::Finished => ("finished", None),
            RunEnd::Stopped => ("stopped", None),
            RunEnd::Failed(error) => ("failed", Some(error.in_one_line())),
        };
        // Written after all waiting lines: a full queue would drop it.
        let _first = self.last.set(line("end", &EndFacts { status, dropped: self.dropped, error })?);
        queue.finish(until, pulse);
        let ended = self.wait(until, pulse);
        if ended.is_none() {
            kill_group(&self.child);
            // Else the system keeps the entry of the ended process as long as this one runs.
            self.wait(Instant::now() + KILL_WAIT, pulse);
        }
        let missing = self.given.saturating_sub(self.written.load(Ordering::Acquire));
        let mut faults: Vec<String> = match ended {
            Some(status) if status.success() => Vec::new(),
            Some(status) => vec![format!("ended with {status}")],
            None => vec![format!("still ran {} s after the run, and was killed", wait.as_secs_f64())],
        };
        if missing > 0 {
            faults.push(format!("did not read {missing} of {} lines", self.given));
        }
        if faults.is_empty() {
            return Ok(());
        }
        self.messages.wait(pulse);
        Err(self.fault(&faults.join(", and ")))
    }

    fn wait(&mut self, until: Instant, pulse: &dyn Fn()) -> Option<ExitStatus> {
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < until => {
                    pulse();
                    thread::sleep(PAUSE);
                }
                ended => return ended.ok().flatten(),
            }
        }
    }

    fn fault(&self, what: &str) -> Error {
        let error = Error::user(format!("`{}` {what}", self.name));
        let said = self.messages.last_lines();
        if said.is_empty() { error } else { error.because(said) }
    }
}

/// The threads at both pipes of the program.
struct Pipes {
    queue: DeliveryQueue<String>,
    last: Arc<OnceLock<String>>,
    written: Arc<AtomicU64>,
    messages: MessageTail,
}

impl Pipes {
    fn of(child: &mut Child) -> Result<Self> {
        let input = child.stdin.take().ok_or_else(|| Error::internal("a started program has no input"))?;
        let messages = MessageTail::read(child.stderr.take())?;
        let (last, written) = (Arc::<OnceLock<String>>::default(), Arc::<AtomicU64>::default());
        let (after_all, count) = (Arc::clone(&last), Arc::clone(&written));
        let queue = DeliveryQueue::start("log lines", WAITING, move |lines: Receiver<String>| {
            let mut input = input;
            let mut write = |line: &str| input.write_all(line.as_bytes()).is_ok();
            while let Ok(line) = lines.recv() {
                if !write(&line) {
                    return;
                }
                count.fetch_add(1, Ordering::Release);
            }
            if let Some(line) = after_all.get() {
                count.fetch_add(u64::from(write(line)), Ordering::Release);
            }
        })?;
        Ok(Pipes { queue, last, written, messages })
    }
}

/// Kills a program that was not waited for, and its process group.
fn kill_group(child: &Child) {
    if let Ok(group) = libc::pid_t::try_from(child.id()) {
        // SAFETY: a system call that takes numbers. The program was not waited for, so its number
        // is still its own.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}

/// The listener of a run shares the program with the code that ends the run.
impl RunListener for Rc<RefCell<LogCommand>> {
    fn what(&self) -> &'static str {
        "lines for `log.command`"
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        self.borrow_mut().metrics(report)
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        self.borrow_mut().metrics(report)
    }

    fn skipped(&mut self, step: &SkippedStep) -> Result<()> {
        self.borrow_mut().metrics(step)
    }
}

/// The end of what the program writes to its stderr, which a thread reads.
struct MessageTail {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl MessageTail {
    fn read(stderr: Option<ChildStderr>) -> Result<Self> {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let kept = Arc::clone(&bytes);
        let reader = threads::start("log messages", move || {
            let (mut stderr, mut part) = (stderr.into_iter(), [0; KEPT_BYTES]);
            let Some(mut stderr) = stderr.next() else { return };
            while let Ok(read @ 1..) = stderr.read(&mut part) {
                let mut kept = locked(&kept);
                kept.extend_from_slice(&part[..read]);
                let old = kept.len().saturating_sub(KEPT_BYTES);
                kept.drain(..old);
            }
        })?;
        Ok(MessageTail { bytes, reader })
    }

    /// Returns true if no process can write further messages.
    fn is_complete(&self) -> bool {
        self.reader.is_finished()
    }

    /// Waits shortly for the end of the messages.
    fn wait(&self, pulse: &dyn Fn()) {
        let until = Instant::now() + MESSAGE_WAIT;
        while !self.is_complete() && Instant::now() < until {
            pulse();
            thread::sleep(PAUSE);
        }
    }

    /// Returns the last lines that the thread has read.
    fn last_lines(&self) -> String {
        let text = String::from_utf8_lossy(&locked(&self.bytes)).into_owned();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        lines[lines.len().saturating_sub(SHOWN_LINES)..].join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str) -> LogCommand {
        let facts = RunStart {
            run: "out".into(),
            model: "a/b".into(),
            output: "/out".into(),
            version: "1",
            started: "now".into(),
            world_size: 1,
            total_steps: 9,
            resumed_step: None,
            recipe: serde_json::Map::new(),
        };
        LogCommand::start(&["sh", "-c", script].map(str::to_owned), &facts).unwrap()
    }

    fn step(step: u64) -> StepReport {
        StepReport { step, loss: 0.1 + 0.2, ..StepReport::default() }
    }

    /// 8,000 lines fill the pipe and the queue: all calls return, and the rest is counted.
    #[test]
    fn a_program_that_reads_nothing_takes_no_time_of_a_step() {
        let mut log = start("sleep 600 & wait");
        (1..=8000).for_each(|number| log.metrics(&step(number)).unwrap());
        let error = log.finish(RunEnd::Finished, Duration::from_millis(100), &|| ()).unwrap_err();
        let error = error.in_one_line();
        let missing = log.given - log.written.load(Ordering::Acquire);
        assert!(log.dropped > 0 && missing > log.dropped + WAITING as u64 / 2, "{missing} {}", log.dropped);
        let expected = format!(
            "`sh` still ran 0.1 s after the run, and was killed, and did not read {missing} of 8002 lines"
        );
        assert_eq!(error, expected);
        // A program that was waited for has no number, and a zombie has one.
        // SAFETY: a system call that takes numbers; the signal 0 sends nothing.
        assert_eq!(unsafe { libc::kill(log.child.id().cast_signed(), 0) }, -1);
        // A killed program has no status but the signal.
        let status = log.wait(Instant::now() + Duration::from_secs(240), &|| ()).unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    }

    #[test]
    fn a_program_that_ends_early_is_named_with_its_last_messages() {
        let mut log = start("for i in 1 2 3 4; do echo message $i >&2; done; exit 3");
        let mut told = Ok(());
        while told.is_ok() {
            told = log.metrics(&step(1));
        }
        assert_eq!(
            told.unwrap_err().in_one_line(),
            "`sh` ended before the run with exit status: 3: message 2; message 3; message 4"
        );
        log.end(RunEnd::Finished, &|| ()).unwrap();
    }

    /// The step that sees the end of the program leaves its messages to a later step or the end.
    #[test]
    fn no_step_waits_for_messages_that_a_child_of_the_program_holds_open() {
        let mut log = start("sleep 600 & echo gone >&2; exit 3");
        let group = log.child.id().cast_signed();
        assert!(log.wait(Instant::now() + Duration::from_secs(240), &|| ()).is_some());
        log.metrics(&step(1)).unwrap();
        let told = log.end(RunEnd::Finished, &|| ()).unwrap_err().in_one_line();
        assert_eq!(told, "`sh` ended before the run with exit status: 3: gone");
        // SAFETY: a system call that takes numbers. The sleeping child keeps the group.
        assert_eq!(unsafe { libc::kill(-group, libc::SIGKILL) }, 0);
    }

    /// Ranks that did not fail wait for the error of this one.
    #[test]
    fn a_failed_run_waits_shortly() {
        let (other, diverged) = (Error::user("x"), Error::new(ErrorCategory::Diverged, "x"));
        assert_eq!(last_wait(RunEnd::Failed(&diverged)), LAST_WAIT);
        let mut log = start("exec sleep 600");
        let told = log.end(RunEnd::Failed(&other), &|| ()).unwrap_err().in_one_line();
        assert!(told.starts_with("`sh` still ran 2 s after the run, and was killed"), "{told}");
    }

    #[test]
    fn a_program_that_fails_at_the_end_is_named() {
        let mut log = start("cat > /dev/null; yes x | head -c 100000 >&2; exit 4");
        log.metrics(&step(1)).unwrap();
        let told = log.end(RunEnd::Finished, &|| ()).unwrap_err().in_one_line();
        assert_eq!(told, "`sh` ended with exit status: 4: x; x; x");
        assert_eq!(log.messages.bytes.lock().unwrap().len(), KEPT_BYTES);
        log.end(RunEnd::Stopped, &|| ()).unwrap();
    }

    #[test]
    fn the_lines_are_those_of_docs_monitoring() {
        let page = include_str!("../../../docs/monitoring.md");
        let end = EndFacts { status: "finished", dropped: 0, error: None };
        let skipped = SkippedStep { step: 3, skipped: "loss NaN".into(), back_to: None };
        for text in [line("end", &end), line("metrics", &skipped)].map(Result::unwrap) {
            assert!(page.contains(&text), "{text}");
        }
    }
}
