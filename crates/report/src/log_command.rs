//! A program that gets the run as lines of JSON on its input (`log.command`), such as a script of
//! `integrations/`. docs/monitoring.md describes the lines.
//!
//! A thread writes the lines from a bounded queue, so that a program that reads slowly or not at
//! all never makes a step wait. Lines that do not fit are dropped and counted. After a killed run,
//! the program sees the end of its input.

use std::io::{Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
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
use crate::error::{Error, Result};
use crate::locks::locked;
use crate::threads;

/// Most lines that wait for the program.
const WAITING: usize = 4096;
/// Time that a run waits at its end for the program, which may still be loading its packages.
const LAST_WAIT: Duration = Duration::from_secs(30);
/// Time that a warning waits for the program's last messages.
const MESSAGE_WAIT: Duration = Duration::from_secs(1);
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

/// The started program.
pub struct LogCommand {
    name: String,
    child: Child,
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
        let mut command = Command::new(name);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        // A group of its own: Ctrl-C ends the run, and the program learns it from the last line.
        let child = command.process_group(0).spawn();
        let mut child = child.map_err(|e| Error::cannot_start(format!("the program `{name}`"), &e))?;
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
        let (given, dropped, queue) = (0, 0, Some(queue));
        let mut own =
            LogCommand { name: name.clone(), child, queue, last, written, given, dropped, messages };
        own.tell(line("run", facts)?);
        Ok(own)
    }

    fn tell(&mut self, line: String) {
        let is_queued = self.queue.as_ref().is_some_and(|queue| queue.hand_over(line));
        self.given += 1;
        self.dropped += u64::from(!is_queued);
    }

    /// Queues a line of metrics.jsonl.
    ///
    /// # Errors
    /// The program has ended.
    fn metrics(&mut self, entry: &impl Serialize) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => self.tell(line("metrics", entry)?),
            Ok(Some(status)) => return Err(self.fault(&format!("ended before the run with {status}"))),
            Err(error) => return Err(self.fault(&format!("cannot be watched: {error}"))),
        }
        Ok(())
    }

    /// Sends the last line and waits for the program to end, at most for `wait`; then kills it.
    ///
    /// # Errors
    /// The program failed, was killed, or did not read all lines.
    fn finish(&mut self, end: RunEnd<'_>, wait: Duration, pulse: &dyn Fn()) -> Result<()> {
        let Some(queue) = self.queue.take() else { return Ok(()) };
        let until = Instant::now() + wait;
        self.given += 1;
        let (status, error) = match end {
            RunEnd::Finished => ("finished", None),
            RunEnd::Stopped => ("stopped", None),
            RunEnd::Failed(error) => ("failed", Some(error.in_one_line())),
        };
        // Written after all waiting lines: a full queue has no room for it.
        let _first = self.last.set(line("end", &EndFacts { status, dropped: self.dropped, error })?);
        queue.finish(until, pulse);
        let ended = self.wait(until, pulse);
        if ended.is_none() {
            self.kill();
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
        if faults.is_empty() { Ok(()) } else { Err(self.fault(&faults.join(", and "))) }
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

    /// Kills the program and its process group.
    fn kill(&self) {
        if let Ok(group) = libc::pid_t::try_from(self.child.id()) {
            // SAFETY: a system call that takes numbers. The program was not waited for, so its
            // number is still its own.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
    }

    fn fault(&self, what: &str) -> Error {
        let error = Error::user(format!("`{}` {what}", self.name));
        let said = self.messages.last_lines();
        if said.is_empty() { error } else { error.because(said) }
    }
}

impl RunListener for LogCommand {
    fn what(&self) -> &'static str {
        "lines for `log.command`"
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        self.metrics(report)
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        self.metrics(report)
    }

    fn skipped(&mut self, step: &SkippedStep) -> Result<()> {
        self.metrics(step)
    }

    fn end(&mut self, end: RunEnd<'_>, pulse: &dyn Fn()) -> Result<()> {
        self.finish(end, LAST_WAIT, pulse)
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

    /// Returns the last lines, after a short wait for the end of all.
    fn last_lines(&self) -> String {
        let until = Instant::now() + MESSAGE_WAIT;
        while !self.reader.is_finished() && Instant::now() < until {
            thread::sleep(PAUSE);
        }
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
        (1..=8000).for_each(|number| log.step(&step(number)).unwrap());
        let error = log.finish(RunEnd::Finished, Duration::from_millis(100), &|| ()).unwrap_err();
        let error = error.in_one_line();
        let missing = log.given - log.written.load(Ordering::Acquire);
        assert!(log.dropped > 0 && missing > log.dropped + WAITING as u64 / 2, "{missing} {}", log.dropped);
        let expected = format!(
            "`sh` still ran 0.1 s after the run, and was killed, and did not read {missing} of 8002 lines"
        );
        assert_eq!(error, expected);
        // A killed program has no status but the signal.
        let status = log.wait(Instant::now() + Duration::from_secs(240), &|| ()).unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    }

    #[test]
    fn a_program_that_ends_early_is_named_with_its_last_messages() {
        let mut log = start("for i in 1 2 3 4; do echo message $i >&2; done; exit 3");
        let mut told = Ok(());
        while told.is_ok() {
            told = log.step(&step(1));
        }
        assert_eq!(
            told.unwrap_err().in_one_line(),
            "`sh` ended before the run with exit status: 3: message 2; message 3; message 4"
        );
    }

    #[test]
    fn a_program_that_fails_at_the_end_is_named() {
        let mut log = start("cat > /dev/null; yes x | head -c 100000 >&2; exit 4");
        log.step(&step(1)).unwrap();
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
