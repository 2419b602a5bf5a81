//! Alarms: what in a run is trouble, said once an incident to whoever can do something about it.
//!
//! [`rules`] judge what the run reports; a thread with a clock of its own watches for steps that do not end. An alarm is
//! a line in alerts.jsonl, goes to a program and to a server where the user named them, and to the terminal where the run
//! does not say the same by itself. Nothing of this slows or ends a run.

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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use alert::{Alert, OutgoingAlert};
use command::AlertCommand;
use delivery::DeliveryThread;
use rules::{Finding, LossSpikes, OutputRoom, ShortDisk, StallWatch, StillGradients, WaitingDevice};
use webhook::AlertWebhook;

use super::listener::RunListener;
use super::metrics::{EvalReport, SkippedStep, StepReport};
use super::terminal::Terminal;
use crate::clock;
use crate::error::{Error, ErrorCategory, Result};
use crate::recipe::enums::AlertRule;
use crate::threads;

/// Nothing shorter is a stall.
const LEAST_STALL: Duration = Duration::from_secs(60);
/// How often the thread looks at the time.
const TICK: Duration = Duration::from_secs(1);
/// The pause between two looks at the disk.
const DISK_PAUSE: Duration = Duration::from_secs(1);
/// How long a run that is over waits for alarms under way.
const LAST_WAIT: Duration = Duration::from_secs(10);
/// The same where the run failed, and others may wait for it to end.
const SHORT_WAIT: Duration = Duration::from_secs(2);

/// Refuses a server that no alarm could be posted to.
///
/// # Errors
/// The user's: `address` is none; the proxy of the environment is none.
pub fn check_webhook(address: &str) -> Result<()> {
    AlertWebhook::new(address).map(drop)
}

/// What a run watches for, and whom it tells.
pub struct AlertOptions {
    /// What is watched for.
    pub rules: Vec<AlertRule>,
    /// The file that gets a line for each alarm.
    pub file: PathBuf,
    /// What the run is called.
    pub run: String,
    /// The host that it is on.
    pub host: String,
    /// A program and its arguments.
    pub command: Option<Vec<String>>,
    /// The address of a server.
    pub webhook: Option<String>,
    /// Bytes of the next checkpoint.
    pub next_bytes: u64,
    /// Looks at the room where the run writes; none when the system does not tell.
    pub room: Box<dyn FnMut() -> Option<OutputRoom>>,
}

/// Updates in a row after which a step that is skipped is a new incident.
const SKIPS_APART: u64 = 20;

/// Raises alarms about a run.
pub struct Alerts {
    desk: Arc<Mutex<AlertManager>>,
    spikes: LossSpikes,
    still: StillGradients,
    waiting: WaitingDevice,
    disk: ShortDisk,
    room: Box<dyn FnMut() -> Option<OutputRoom>>,
    looked: Option<Instant>,
    /// Updates since a step was skipped; none: none was, or long ago.
    updates_since_skip: Option<u64>,
    stall: Arc<Mutex<StallWatch>>,
    /// Ends the thread that watches for stalls when it is dropped.
    clock: Option<SyncSender<()>>,
}

/// Where the listener and the thread with the clock bring their alarms.
struct AlertManager {
    rules: HashSet<AlertRule>,
    file: PathBuf,
    run: String,
    host: String,
    couriers: Vec<DeliveryThread>,
    terminal: Terminal,
    cannot_write: bool,
    /// The step that ended last.
    step: u64,
}

/// The desk of the run of this process, for an alarm that no listener can raise any more.
static DESK: Mutex<Weak<Mutex<AlertManager>>> = Mutex::new(Weak::new());

/// Raises the alarm that the run hangs, from the thread that is about to end the process for it, and gives it a moment to
/// arrive. Nothing where nobody watches for it; it waits for no lock, which who hangs may hold.
pub fn raise_hang(error: &Error) {
    let desk = DESK.try_lock().ok().and_then(|desk| desk.upgrade());
    let Some(mut desk) = desk.as_ref().and_then(|desk| desk.try_lock().ok()) else { return };
    let (step, message) = (desk.step, format!("the run has ended: {}", error.in_one_line()));
    desk.raise(AlertRule::Stall, step, Finding { value: None, message }, true);
    desk.finish(SHORT_WAIT);
}

impl AlertManager {
    /// Raises the alarm `finding` of `rule`, where that is watched for; `is_said` already or not.
    fn raise(&mut self, rule: AlertRule, step: u64, finding: Finding, is_said: bool) {
        if !self.rules.contains(&rule) {
            return;
        }
        if !is_said {
            self.terminal.warn(&finding.message);
        }
        let Finding { value, message } = finding;
        let time = clock::now_as_text();
        let value = value.filter(|value| value.is_finite());
        let alarm = Alert { rule: rule.as_str(), step, value, message, time };
        self.write(&alarm);
        let outgoing = OutgoingAlert::new(alarm, &self.run, &self.host);
        self.couriers.iter_mut().for_each(|courier| courier.hand_over(outgoing.clone()));
    }

    /// Nothing is raised any more; what is under way has `wait` to arrive.
    fn finish(&mut self, wait: Duration) {
        let until = Instant::now() + wait;
        std::mem::take(&mut self.couriers).into_iter().for_each(|courier| courier.finish(until));
    }

    /// Adds a line to the file, which is made with the first.
    fn write(&mut self, alarm: &Alert) {
        let line = serde_json::to_string(alarm).unwrap_or_default();
        // Whoever opens a pipe for writing waits for its reader, and a link may have come while the run was at work.
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
    /// Watches for what `options` say and tells it to `terminal` too.
    ///
    /// # Errors
    /// The server cannot be asked at its address; the system has no thread for the clock.
    pub fn start(options: AlertOptions, terminal: &Terminal) -> Result<Self> {
        let AlertOptions { rules, file, run, host, command, webhook, next_bytes, room } = options;
        let mut couriers = Vec::new();
        couriers.extend(command.and_then(|words| DeliveryThread::start(AlertCommand::new(words), terminal)));
        if let Some(address) = webhook {
            couriers.extend(DeliveryThread::start(AlertWebhook::new(&address)?, terminal));
        }
        let rules: HashSet<AlertRule> = rules.into_iter().collect();
        let desk = AlertManager {
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
            desk: Arc::new(Mutex::new(desk)),
            spikes: LossSpikes::default(),
            still: StillGradients::default(),
            waiting: WaitingDevice::default(),
            disk: ShortDisk::new(next_bytes),
            room,
            looked: None,
            updates_since_skip: None,
            stall: Arc::new(Mutex::new(StallWatch::new(LEAST_STALL))),
            clock: None,
        })
    }

    /// Looks at the disk, but not at every step of a fast run.
    fn look_at_disk(&mut self, step: u64) {
        if self.looked.is_some_and(|looked| looked.elapsed() < DISK_PAUSE) {
            return;
        }
        self.looked = Some(Instant::now());
        if let Some(finding) = (self.room)().and_then(|room| self.disk.look(step, room)) {
            lock(&self.desk).raise(AlertRule::LowDisk, step, finding, false);
        }
    }

    /// Nothing is watched for any more; what is under way has a moment to arrive.
    fn close(&mut self, wait: Duration) {
        self.clock = None;
        lock(&self.desk).finish(wait);
    }
}

impl RunListener for Alerts {
    fn what(&self) -> &'static str {
        "alarms"
    }

    fn begin(&mut self, done: u64, _total: u64) -> Result<()> {
        lock(&self.stall).moved(done, None);
        lock(&self.desk).step = done;
        *lock(&DESK) = Arc::downgrade(&self.desk);
        let (stall, desk) = (Arc::clone(&self.stall), Arc::clone(&self.desk));
        self.clock = Some(watch_time(TICK, move |passed| {
            // Not while the desk is held: who raises an alarm holds the desk alone.
            let mut watch = lock(&stall);
            let (found, step) = (watch.tick(passed), watch.step());
            drop(watch);
            if let Some(finding) = found {
                lock(&desk).raise(AlertRule::Stall, step, finding, false);
            }
        })?);
        self.look_at_disk(done);
        Ok(())
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        lock(&self.stall).moved(report.step, Some(report.step_secs.max(report.all_parts())));
        self.updates_since_skip =
            self.updates_since_skip.map(|updates| updates + 1).filter(|updates| *updates < SKIPS_APART);
        lock(&self.desk).step = report.step;
        // The run says by itself what its losses and norms show.
        let found = [
            (AlertRule::LossSpike, self.spikes.after(report), true),
            (AlertRule::NoProgress, self.still.after(report), true),
            (AlertRule::IdleDevice, self.waiting.after(report), false),
        ];
        for (rule, finding, is_said) in found {
            if let Some(finding) = finding {
                lock(&self.desk).raise(rule, report.step, finding, is_said);
            }
        }
        self.look_at_disk(report.step);
        Ok(())
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        lock(&self.stall).moved(report.step, None);
        Ok(())
    }

    fn aside(&mut self) {
        lock(&self.stall).aside();
    }

    fn skipped(&mut self, step: &SkippedStep) -> Result<()> {
        lock(&self.stall).moved(step.step, None);
        lock(&self.desk).step = step.step;
        // Steps in a row, or few steps apart, are one incident.
        if self.updates_since_skip.replace(0).is_none() {
            let message = format!("step {} diverged and updated nothing: {}", step.step, step.skipped);
            lock(&self.desk).raise(AlertRule::NonFinite, step.step, Finding { value: None, message }, true);
        }
        Ok(())
    }

    fn failed(&mut self, error: &Error) -> Result<()> {
        // All ranks diverge at once: nobody waits for this one.
        let has_diverged = error.kind() == ErrorCategory::Diverged;
        if has_diverged {
            let step = lock(&self.stall).step() + 1;
            let message = format!("the run has ended: {}", error.in_one_line());
            lock(&self.desk).raise(AlertRule::NonFinite, step, Finding { value: None, message }, true);
        }
        self.close(if has_diverged { LAST_WAIT } else { SHORT_WAIT });
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.close(LAST_WAIT);
        Ok(())
    }
}

/// Calls `tick` once a `pause` with the time that went by, in a thread that ends when what is returned is dropped. Of time
/// in which the whole process stood still, as after Ctrl-Z, hardly anything is counted.
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

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
