//! Alerts: detects trouble in a run, and notifies the user once per incident.
//!
//! [`rules`] check the reports of the run; a thread with a clock watches for steps that do not end.
//! An alert is a line in alerts.jsonl. It also goes to a program and to a server if the user named
//! them, and to the terminal unless the run prints the same itself. Alerts neither slow nor end a
//! run.

mod alert;
mod command;
mod delivery;
pub mod guard;
pub mod rules;
mod webhook;

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use alert::{Alert, OutgoingAlert};
use command::AlertCommand;
use delivery::DeliveryThread;
use rules::{Finding, LossSpikes, OutputSpace, ShortDisk, StallWatch, StillGradients, WaitingDevice};
use webhook::AlertWebhook;

use super::listener::{RunEnd, RunListener};
use super::metrics::{EvalReport, SkippedStep, StepReport};
use super::terminal::Terminal;
use crate::clock;
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::recipe::enums::AlertRule;
use crate::threads;

/// The shortest stall.
const LEAST_STALL: Duration = Duration::from_secs(60);
/// The interval of the thread with the clock.
const TICK: Duration = Duration::from_secs(1);
/// The pause between two checks of the disk.
const DISK_PAUSE: Duration = Duration::from_secs(1);
/// Time that an ended run waits for the delivery of alerts.
pub(crate) const LAST_WAIT: Duration = Duration::from_secs(10);
/// The same for a failed run, since other ranks may wait for its end.
const SHORT_WAIT: Duration = Duration::from_secs(2);

/// Checks the address of a server for alerts.
///
/// # Errors
/// `User` if `address` or the proxy of the environment is not a usable address.
pub fn check_webhook(address: &str) -> Result<()> {
    AlertWebhook::new(address).map(drop)
}

/// The rules of a run's alerts, and their receivers.
pub struct AlertOptions {
    /// The rules in use.
    pub rules: Vec<AlertRule>,
    /// The file that gets a line for each alert.
    pub file: PathBuf,
    /// The name of the run.
    pub run: String,
    /// The name of its host.
    pub host: String,
    /// A program and its arguments.
    pub command: Option<Vec<String>>,
    /// The address of a server.
    pub webhook: Option<String>,
    /// Bytes of the next checkpoint.
    pub next_bytes: u64,
    /// Returns the space of the output's file system; none if the system does not give it.
    pub disk_space: Box<dyn FnMut() -> Option<OutputSpace>>,
}

/// Updates in a row after which a skipped step is a new incident.
const SKIPS_APART: u64 = 20;

/// Raises alerts about a run.
pub struct Alerts {
    manager: Arc<Mutex<AlertManager>>,
    spikes: LossSpikes,
    still: StillGradients,
    waiting: WaitingDevice,
    disk: ShortDisk,
    disk_space: Box<dyn FnMut() -> Option<OutputSpace>>,
    looked: Option<Instant>,
    /// Updates since the last skipped step; none if no step was skipped recently.
    updates_since_skip: Option<u64>,
    stall: Arc<Mutex<StallWatch>>,
    /// Ends the thread that watches for stalls when it is dropped.
    clock: Option<SyncSender<()>>,
}

/// The receiver of alerts from the listener and from the thread with the clock.
struct AlertManager {
    rules: HashSet<AlertRule>,
    file: PathBuf,
    run: String,
    host: String,
    couriers: Vec<DeliveryThread>,
    terminal: Terminal,
    cannot_write: bool,
    /// The last step that ended.
    step: u64,
}

/// The manager of this process's run, for an alert after its listener is blocked.
static MANAGER: Mutex<Weak<Mutex<AlertManager>>> = Mutex::new(Weak::new());

/// Raises the alert for a hang, from the thread that is about to end the process, and waits shortly
/// for its delivery. Does nothing without a running manager, and waits for no lock, since the
/// hanging thread may hold it.
pub fn raise_hang(error: &Error) {
    let manager = MANAGER.try_lock().ok().and_then(|manager| manager.upgrade());
    let Some(mut manager) = manager.as_ref().and_then(|manager| manager.try_lock().ok()) else { return };
    let (step, message) = (manager.step, format!("the run has ended: {}", error.in_one_line()));
    manager.raise(AlertRule::Stall, step, Finding { value: None, message }, true);
    manager.finish(SHORT_WAIT, &|| ());
}

impl AlertManager {
    /// Raises the alert `finding` of `rule` if that rule is in use; prints it unless `is_printed`.
    fn raise(&mut self, rule: AlertRule, step: u64, finding: Finding, is_printed: bool) {
        if !self.rules.contains(&rule) {
            return;
        }
        if !is_printed {
            self.terminal.warn(&finding.message);
        }
        let Finding { value, message } = finding;
        let time = clock::now_as_text();
        let value = value.filter(|value| value.is_finite());
        let alert = Alert { rule: rule.as_str(), step, value, message, time };
        self.write(&alert);
        let outgoing = OutgoingAlert::new(alert, &self.run, &self.host);
        self.couriers.iter_mut().for_each(|courier| courier.hand_over(outgoing.clone()));
    }

    /// Ends the channels, and waits up to `wait` for alerts in delivery.
    fn finish(&mut self, wait: Duration, pulse: &dyn Fn()) {
        let until = Instant::now() + wait;
        std::mem::take(&mut self.couriers).into_iter().for_each(|courier| courier.finish(until, pulse));
    }

    /// Appends a line to the file, which the first line creates.
    fn write(&mut self, alert: &Alert) {
        let line = serde_json::to_string(alert).unwrap_or_default();
        // Opening a pipe for writing would wait for its reader, and a link may have appeared during
        // the run.
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
        let file = OpenOptions::new().append(true).create(true).custom_flags(flags).open(&self.file);
        let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        if let Err(error) = written
            && !std::mem::replace(&mut self.cannot_write, true)
        {
            self.terminal.warn(Error::io("write", &self.file, &error).in_one_line());
        }
    }
}

impl Alerts {
    /// Starts the alerts of `options`, which also print to `terminal`.
    ///
    /// # Errors
    /// The address of the server or the proxy is unusable.
    pub fn start(options: AlertOptions, terminal: &Terminal) -> Result<Self> {
        let AlertOptions { rules, file, run, host, command, webhook, next_bytes, disk_space } = options;
        let mut couriers = Vec::new();
        couriers.extend(command.and_then(|words| DeliveryThread::start(AlertCommand::new(words), terminal)));
        if let Some(address) = webhook {
            couriers.extend(DeliveryThread::start(AlertWebhook::new(&address)?, terminal));
        }
        let rules: HashSet<AlertRule> = rules.into_iter().collect();
        let manager = AlertManager {
            rules,
            file,
            run,
            host,
            couriers,
            terminal: terminal.clone(),
            cannot_write: false,
            step: 0,
        };
        Ok(Alerts {
            manager: Arc::new(Mutex::new(manager)),
            spikes: LossSpikes::default(),
            still: StillGradients::default(),
            waiting: WaitingDevice::default(),
            disk: ShortDisk::new(next_bytes),
            disk_space,
            looked: None,
            updates_since_skip: None,
            stall: Arc::new(Mutex::new(StallWatch::new(LEAST_STALL))),
            clock: None,
        })
    }

    /// Checks the disk, at most once per [`DISK_PAUSE`].
    fn look_at_disk(&mut self, step: u64) {
        if self.looked.is_some_and(|looked| looked.elapsed() < DISK_PAUSE) {
            return;
        }
        self.looked = Some(Instant::now());
        if let Some(finding) = (self.disk_space)().and_then(|disk_space| self.disk.look(step, disk_space)) {
            locked(&self.manager).raise(AlertRule::LowDisk, step, finding, false);
        }
    }

    /// Stops the clock and the channels, and waits up to `wait` for alerts in delivery.
    fn close(&mut self, wait: Duration, pulse: &dyn Fn()) {
        self.clock = None;
        locked(&self.manager).finish(wait, pulse);
    }
}

impl RunListener for Alerts {
    fn what(&self) -> &'static str {
        "alerts"
    }

    fn begin(&mut self, done: u64, _total: u64) -> Result<()> {
        locked(&self.stall).moved(done, None);
        locked(&self.manager).step = done;
        *locked(&MANAGER) = Arc::downgrade(&self.manager);
        let (stall, manager) = (Arc::clone(&self.stall), Arc::clone(&self.manager));
        self.clock = Some(watch_time(TICK, move |passed| {
            // The watch is released first: no thread may hold it together with the manager.
            let mut watch = locked(&stall);
            let (stalled, step) = (watch.tick(passed), watch.step());
            drop(watch);
            if let Some(finding) = stalled {
                locked(&manager).raise(AlertRule::Stall, step, finding, false);
            }
        })?);
        self.look_at_disk(done);
        Ok(())
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        locked(&self.stall).moved(report.step, Some(report.step_secs.max(report.all_parts())));
        self.updates_since_skip =
            self.updates_since_skip.map(|updates| updates + 1).filter(|updates| *updates < SKIPS_APART);
        locked(&self.manager).step = report.step;
        // The run itself warns about losses and norms.
        let findings = [
            (AlertRule::LossSpike, self.spikes.after(report), true),
            (AlertRule::NoProgress, self.still.after(report), true),
            (AlertRule::IdleDevice, self.waiting.after(report), false),
        ];
        for (rule, finding, is_printed) in findings {
            if let Some(finding) = finding {
                locked(&self.manager).raise(rule, report.step, finding, is_printed);
            }
        }
        self.look_at_disk(report.step);
        Ok(())
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        locked(&self.stall).moved(report.step, None);
        Ok(())
    }

    fn pause_step_timer(&mut self) {
        locked(&self.stall).pause();
    }

    fn skipped(&mut self, step: &SkippedStep) -> Result<()> {
        locked(&self.stall).moved(step.step, None);
        locked(&self.manager).step = step.step;
        // Steps in a row, or few steps apart, are one incident.
        if self.updates_since_skip.replace(0).is_none() {
            let message = format!("step {} diverged and updated nothing: {}", step.step, step.skipped);
            locked(&self.manager).raise(
                AlertRule::NonFinite,
                step.step,
                Finding { value: None, message },
                true,
            );
        }
        Ok(())
    }

    fn end(&mut self, end: RunEnd<'_>, pulse: &dyn Fn()) -> Result<()> {
        let RunEnd::Failed(error) = end else {
            self.close(LAST_WAIT, pulse);
            return Ok(());
        };
        // All ranks diverge at once, so no rank waits for this one.
        let has_diverged = error.kind() == ErrorCategory::Diverged;
        if has_diverged {
            let step = locked(&self.stall).step() + 1;
            let message = format!("the run has ended: {}", error.in_one_line());
            locked(&self.manager).raise(AlertRule::NonFinite, step, Finding { value: None, message }, true);
        }
        self.close(if has_diverged { LAST_WAIT } else { SHORT_WAIT }, pulse);
        Ok(())
    }
}

/// Calls `tick` once per `pause` with the passed time, in a thread that ends when the returned
/// sender is dropped. Of time in which the whole process was stopped, as after Ctrl-Z, it counts at
/// most two pauses.
fn watch_time(pause: Duration, mut tick: impl FnMut(Duration) + Send + 'static) -> Result<SyncSender<()>> {
    let (sender, ended) = sync_channel::<()>(0);
    let work = move || {
        let mut last = Instant::now();
        while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            let passed = std::mem::replace(&mut last, Instant::now()).elapsed();
            tick(passed.min(2 * pause));
        }
    };
    threads::start("stall watch", work).map(|_| sender)
}

#[cfg(test)]
mod tests;
