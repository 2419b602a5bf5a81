//! A run as a run of MLflow: parameters, every figure of `metrics.jsonl` by its step, and how it ended.
//!
//! A thread of its own speaks to the server ([`client`]); the run leaves its figures in a queue of [`ROOM`] entries and
//! goes on. A server that is gone, or slower than that, costs the run one warning and at most [`FLUSH`] at its end.
//!
//! Each start of `finetune` is a run of its own there, also where it resumes; a tag names the step it goes on from. A
//! process that is killed leaves its run as RUNNING, for nobody is left to say otherwise.

mod client;
mod credentials;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use client::MlflowClient;
pub use client::agent;
pub use credentials::MlflowCredentials;
use ureq::Agent;

use super::listener::RunListener;
use super::metrics::{EvalReport, MetricsEntry, SkippedStep, StepReport};
use crate::error::{Error, ErrorCategory, Result};
use crate::threads;

/// Entries that may wait for the server.
const ROOM: usize = 4096;
/// How long a run waits at its end for what the server has not taken yet.
const FLUSH: Duration = Duration::from_secs(5);
/// Figures in one request, MLflow's own limit.
const MOST_METRICS: usize = 1000;
/// Parameters in one request, likewise.
const MOST_PARAMS: usize = 100;
/// Pauses between attempts while a server that answered before does not.
const PAUSES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(5), Duration::from_secs(20)];

/// Where a run is logged, and what is said of it once.
#[derive(Debug, Clone)]
pub struct MlflowTarget {
    /// The server's address, without a slash at its end.
    pub server: String,
    /// The name of the experiment.
    pub experiment: String,
    /// The name of the run.
    pub run: String,
    /// What it is known by besides.
    pub tags: Vec<(String, String)>,
    /// The values of its recipe.
    pub params: Vec<(String, String)>,
    /// Who asks the server.
    pub credentials: MlflowCredentials,
}

/// A figure of a step.
#[derive(Debug, Clone, PartialEq)]
struct LoggedValue {
    key: String,
    value: f64,
    step: u64,
    /// Milliseconds since 1970.
    timestamp: u64,
}

/// How a run ended, in MLflow's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndStatus {
    Finished,
    Failed,
    Killed,
}

impl EndStatus {
    fn as_str(self) -> &'static str {
        match self {
            EndStatus::Finished => "FINISHED",
            EndStatus::Failed => "FAILED",
            EndStatus::Killed => "KILLED",
        }
    }
}

/// What the thread is given.
enum LogItem {
    Values(Vec<LoggedValue>),
    End(EndStatus),
}

/// What the run and its thread have in common.
#[derive(Default)]
struct LogState {
    /// Why the thread gave up.
    fault: Mutex<Option<Error>>,
    /// The run has ended: nothing is tried again.
    ending: AtomicBool,
}

/// The run's end of the queue.
pub struct MlflowLog {
    server: String,
    queue: Option<SyncSender<LogItem>>,
    /// Says when the thread is done, by being closed.
    done: Receiver<()>,
    state: Arc<LogState>,
    /// The last step and the number of all.
    steps: (u64, u64),
}

impl MlflowLog {
    /// Starts the thread, which makes the run on the server.
    ///
    /// # Errors
    /// The system has no room for a thread; the server cannot be asked, as [`agent`] says.
    pub fn start(target: MlflowTarget) -> Result<Self> {
        let server = target.server.clone();
        let agent = agent(&server)?;
        let (queue, items) = sync_channel(ROOM);
        let (closing, done) = sync_channel(0);
        let state = Arc::new(LogState::default());
        let shared = Arc::clone(&state);
        let log = move || {
            if let Err(error) = send_all(&target, agent, &items, &shared) {
                *shared.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
            // In this order: who sees one of them closed finds the fault.
            drop((items, closing));
        };
        threads::start("mlflow", log)?;
        Ok(MlflowLog { server, queue: Some(queue), done, state, steps: (0, 0) })
    }

    fn say(&mut self, entry: &MetricsEntry) -> Result<()> {
        let Some(queue) = &self.queue else { return Ok(()) };
        match queue.try_send(LogItem::Values(values(entry, now())?)) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => {
                // Nothing of what waits is worth the end of a run.
                self.queue = None;
                self.state.ending.store(true, Ordering::Release);
                Err(Error::user(format!("{} does not keep up", self.server))
                    .because(format!("{ROOM} entries wait for it")))
            }
            Err(TrySendError::Disconnected(_)) => {
                self.queue = None;
                Err(self.fault())
            }
        }
    }

    /// Tells the server how the run ended, and waits for what it has not taken yet.
    fn close(&mut self, status: EndStatus) -> Result<()> {
        let Some(queue) = self.queue.take() else { return Ok(()) };
        self.state.ending.store(true, Ordering::Release);
        let late = || {
            Error::user(format!("{} does not keep up", self.server)).because(format!(
                "it did not take all figures within {} s after the last step",
                FLUSH.as_secs()
            ))
        };
        let deadline = Instant::now() + FLUSH;
        let mut item = LogItem::End(status);
        while let Err(error) = queue.try_send(item) {
            item = match error {
                TrySendError::Disconnected(_) => return Err(self.fault()),
                TrySendError::Full(_) if Instant::now() > deadline => return Err(late()),
                TrySendError::Full(item) => item,
            };
            std::thread::sleep(Duration::from_millis(10));
        }
        match self.done.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => Err(late()),
            _ => self.state.fault.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err),
        }
    }

    fn fault(&self) -> Error {
        let fault = self.state.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
        fault.unwrap_or_else(|| Error::internal("the thread for MLflow ended without a word"))
    }
}

impl RunListener for MlflowLog {
    fn what(&self) -> &'static str {
        "figures for MLflow"
    }

    fn begin(&mut self, done: u64, total: u64) -> Result<()> {
        self.steps = (done, total);
        Ok(())
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        self.steps.0 = report.step;
        self.say(&report.clone().into())
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        self.say(&report.clone().into())
    }

    fn skipped(&mut self, step: &SkippedStep) -> Result<()> {
        self.steps.0 = step.step;
        self.say(&step.clone().into())
    }

    fn end(&mut self) -> Result<()> {
        let (done, total) = self.steps;
        self.close(if done >= total { EndStatus::Finished } else { EndStatus::Killed })
    }
}

impl Drop for MlflowLog {
    fn drop(&mut self) {
        // Whoever drops it before the end has an error to tell, which says more than this one.
        let _ = self.close(EndStatus::Failed);
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// The figures of an entry by the names of their fields; those of ranks with the rank behind a slash.
fn values(entry: &MetricsEntry, timestamp: u64) -> Result<Vec<LoggedValue>> {
    let step = entry.step();
    let fields = serde_json::to_value(entry)
        .map_err(|e| Error::internal(format!("cannot write step {step} as JSON")).because(e.to_string()))?;
    let mut values = Vec::new();
    let mut add = |key: String, value: f64| values.push(LoggedValue { key, value, step, timestamp });
    for (key, value) in fields.as_object().into_iter().flatten() {
        match (key.as_str(), value) {
            ("step", _) => {}
            ("skipped", _) => add(key.clone(), 1.0),
            (_, serde_json::Value::Array(items)) => {
                let numbers = items.iter().enumerate();
                numbers.for_each(|(at, item)| add(format!("{key}/{at}"), item.as_f64().unwrap_or_default()));
            }
            _ => value.as_f64().into_iter().for_each(|number| add(key.clone(), number)),
        }
    }
    Ok(values)
}

/// What the thread does: makes the run, sends what comes, says how it ended.
fn send_all(target: &MlflowTarget, agent: Agent, items: &Receiver<LogItem>, state: &LogState) -> Result<()> {
    let client = MlflowClient::new(target, agent);
    let experiment = client.experiment(&target.experiment)?;
    let run = client.create_run(&experiment, target, now())?;
    for params in target.params.chunks(MOST_PARAMS) {
        client.log(&run, &[], params)?;
    }
    // Where the run is gone without a word, it did not finish.
    let mut end = None;
    while end.is_none() {
        let Ok(first) = items.recv() else { break };
        let mut waiting = Vec::new();
        let mut next = Some(first);
        while let Some(item) = next {
            match item {
                LogItem::Values(values) => waiting.extend(values),
                LogItem::End(status) => end = Some(status),
            }
            next = match items.try_recv() {
                Ok(item) if end.is_none() => Some(item),
                Ok(_) | Err(TryRecvError::Empty | TryRecvError::Disconnected) => None,
            };
        }
        for values in waiting.chunks(MOST_METRICS) {
            patiently(state, || client.log(&run, values, &[]))?;
        }
    }
    let status = end.unwrap_or(EndStatus::Failed);
    patiently(state, || client.end_run(&run, status.as_str(), now()))
}

/// Repeats what fails for now, until the run ends.
fn patiently(state: &LogState, attempt: impl Fn() -> Result<()>) -> Result<()> {
    let mut result = attempt();
    for pause in PAUSES {
        let passing = result.as_ref().is_err_and(|error| error.kind() == ErrorCategory::Transient);
        if !passing || !is_waited_for(state, pause) {
            break;
        }
        result = attempt();
    }
    result
}

/// Waits for `pause`; false where the run ends before.
fn is_waited_for(state: &LogState, pause: Duration) -> bool {
    let until = Instant::now() + pause;
    while Instant::now() < until {
        if state.ending.load(Ordering::Acquire) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_an_entry_is_logged() {
        let report = StepReport { step: 3, loss: 0.5, rank_secs: vec![1.0, 2.0], ..StepReport::default() };
        let logged = values(&report.into(), 9).unwrap();
        let of = |key: &str| logged.iter().find(|value| value.key == key).map(|value| value.value);
        assert_eq!(
            (of("loss"), of("rank_secs/1"), of("step"), of("mfu")),
            (Some(0.5), Some(2.0), None, None)
        );
        assert!(logged.iter().all(|value| value.step == 3 && value.timestamp == 9));
        let skipped = SkippedStep { step: 4, skipped: "loss".into(), back_to: Some(2) };
        let logged: Vec<_> =
            values(&skipped.into(), 0).unwrap().into_iter().map(|v| (v.key, v.value)).collect();
        assert_eq!(logged, [("skipped".to_owned(), 1.0), ("back_to".to_owned(), 2.0)]);
    }
}
