//! Logs a run to MLflow: parameters, every figure of `metrics.jsonl` by its step, and the final
//! status.
//!
//! A separate thread sends requests to the server (`client`); the run puts its figures into a
//! queue of `ROOM` entries and goes on. If the server fails or is slower, the run prints one
//! warning and waits at most `FLUSH` at its end.
//!
//! Each start of `finetune` is a separate MLflow run, also if it resumes; a tag names the step it
//! resumes from. A killed process leaves its run as RUNNING.

mod client;
mod credentials;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use client::MlflowClient;
pub use client::agent;
pub use credentials::MlflowCredentials;
use ureq::Agent;

use super::listener::RunListener;
use super::metrics::{EvalReport, MetricsEntry, SkippedStep, StepReport};
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::threads;

/// Most entries that wait for the server.
const ROOM: usize = 4096;
/// Time that a run waits at its end for the server to accept the remaining figures.
const FLUSH: Duration = Duration::from_secs(5);
/// Most figures in one request, MLflow's own limit.
const MOST_METRICS: usize = 1000;
/// Most parameters in one request, MLflow's own limit.
const MOST_PARAMS: usize = 100;
/// Pauses between attempts while the server fails.
const PAUSES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(5), Duration::from_secs(20)];

/// The server and experiment that receive a run, and its constant values.
#[derive(Debug, Clone)]
pub struct MlflowTarget {
    /// The server's address, without a slash at its end.
    pub server: String,
    /// The name of the experiment.
    pub experiment: String,
    /// The name of the run.
    pub run: String,
    /// Tags of the run: name and value.
    pub tags: Vec<(String, String)>,
    /// The values of its recipe.
    pub params: Vec<(String, String)>,
    /// The credentials for the server.
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

/// The final status of a run, in MLflow's words.
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

/// An entry of the queue.
enum LogItem {
    Values(Vec<LoggedValue>),
    End(EndStatus),
}

/// The state that the run and its thread share.
#[derive(Default)]
struct LogState {
    /// The error that ended the thread.
    fault: Mutex<Option<Error>>,
    /// True once the run has ended: the thread makes no further attempt.
    ending: AtomicBool,
}

/// The run's end of the queue.
pub struct MlflowLog {
    server: String,
    queue: Option<SyncSender<LogItem>>,
    /// Closed when the thread has ended.
    done: Receiver<()>,
    state: Arc<LogState>,
    /// The last step and the number of all.
    steps: (u64, u64),
}

impl MlflowLog {
    /// Starts the thread, which creates the run on the server.
    ///
    /// # Errors
    /// The system has no thread left, or the address is unusable, as for [`agent`].
    pub fn start(target: MlflowTarget) -> Result<Self> {
        let server = target.server.clone();
        let agent = agent(&server)?;
        let (queue, items) = sync_channel(ROOM);
        let (closing, done) = sync_channel(0);
        let state = Arc::new(LogState::default());
        let shared = Arc::clone(&state);
        let log = move || {
            if let Err(error) = send_all(&target, agent, &items, &shared) {
                *locked(&shared.fault) = Some(error);
            }
            // In this order: after either end is closed, the error is available.
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
                // Waiting entries are not worth a delay at the end of a run.
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

    /// Sends the final status, and waits until the server has accepted the remaining figures.
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
            _ => locked(&self.state.fault).take().map_or(Ok(()), Err),
        }
    }

    fn fault(&self) -> Error {
        let fault = locked(&self.state.fault).take();
        fault.unwrap_or_else(|| Error::internal("the thread for MLflow ended without an error"))
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
        // A drop before the end means an earlier error, which matters more than this one.
        let _ = self.close(EndStatus::Failed);
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Returns the figures of an entry by the names of their fields; those of ranks are named
/// `field/rank`.
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

/// Runs in the thread: creates the run, sends entries, ends with the final status.
fn send_all(target: &MlflowTarget, agent: Agent, items: &Receiver<LogItem>, state: &LogState) -> Result<()> {
    let client = MlflowClient::new(target, agent);
    let experiment = client.experiment(&target.experiment)?;
    let run = client.create_run(&experiment, target, now())?;
    for params in target.params.chunks(MOST_PARAMS) {
        client.log(&run, &[], params)?;
    }
    // If the queue closes without a status, the run did not finish.
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

/// Repeats an attempt that fails with `Transient`, until the run ends.
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

/// Waits for `pause`; returns false if the run ends before.
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
