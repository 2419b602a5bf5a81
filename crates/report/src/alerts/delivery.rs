//! Delivers alarms to a program or a server: a thread and a short queue each, so that neither slows
//! the run.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use super::alert::OutgoingAlert;
use crate::terminal::Terminal;
use crate::threads;

/// Most alarms that wait for delivery; an incident has one, so this is enough.
const WAITING: usize = 16;

/// A receiver of alarms.
pub(super) trait AlertChannel: Send + 'static {
    /// Returns its name for messages.
    fn name(&self) -> String;

    /// Delivers one alarm, which may take long; an error gives the reason of a failure.
    fn send(&self, alarm: &OutgoingAlert) -> Result<(), String>;
}

/// The thread of a channel.
pub(super) struct DeliveryThread {
    name: String,
    queue: SyncSender<OutgoingAlert>,
    /// Closed when the thread has ended.
    ended: Receiver<()>,
    terminal: Terminal,
    was_full: bool,
}

impl DeliveryThread {
    /// Starts the thread; prints a warning and returns none if the system starts no thread.
    pub(super) fn start(channel: impl AlertChannel, terminal: &Terminal) -> Option<Self> {
        let (queue, alarms) = sync_channel::<OutgoingAlert>(WAITING);
        let (alive, ended) = sync_channel::<()>(0);
        let (name, told) = (channel.name(), terminal.clone());
        let work = move || {
            let _alive = alive;
            let mut has_failed = false;
            for alarm in alarms {
                match channel.send(&alarm) {
                    Ok(()) => has_failed = false,
                    // One warning per series of failures: alerts.jsonl holds every alarm.
                    Err(why) => {
                        if !std::mem::replace(&mut has_failed, true) {
                            told.warn(format!("an alarm did not reach {}: {why}", channel.name()));
                        }
                    }
                }
            }
        };
        match threads::start("alarms", work) {
            Ok(_) => Some(DeliveryThread { name, queue, ended, terminal: terminal.clone(), was_full: false }),
            Err(error) => {
                terminal.warn(format!("cannot send alarms to {name}: {}", error.in_one_line()));
                None
            }
        }
    }

    /// Queues an alarm, and does not wait.
    pub(super) fn hand_over(&mut self, alarm: OutgoingAlert) {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(alarm)
            && !std::mem::replace(&mut self.was_full, true)
        {
            self.terminal.warn(format!("dropping alarms: {WAITING} already wait for {}", self.name));
        }
    }

    /// Waits for the delivery of queued alarms, at most until `until`.
    pub(super) fn finish(self, until: Instant) {
        let DeliveryThread { name, queue, ended, terminal, .. } = self;
        drop(queue);
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if ended.recv_timeout(left) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            terminal.warn(format!("not all alarms had reached {name} when the run was over"));
        }
    }
}
