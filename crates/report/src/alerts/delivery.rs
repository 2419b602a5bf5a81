//! Delivers alarms to a program or a server: a thread and a short queue each, so that neither slows
//! the run.

use std::time::Instant;

use super::alert::OutgoingAlert;
use crate::delivery::DeliveryQueue;
use crate::terminal::Terminal;

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
    queue: DeliveryQueue<OutgoingAlert>,
    terminal: Terminal,
    was_full: bool,
}

impl DeliveryThread {
    /// Starts the thread; prints a warning and returns none if the system starts no thread.
    pub(super) fn start(channel: impl AlertChannel, terminal: &Terminal) -> Option<Self> {
        let (name, told) = (channel.name(), terminal.clone());
        let queue = DeliveryQueue::start("alarms", WAITING, move |alarms| {
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
        });
        match queue {
            Ok(queue) => Some(DeliveryThread { name, queue, terminal: terminal.clone(), was_full: false }),
            Err(error) => {
                terminal.warn(format!("cannot send alarms to {name}: {}", error.in_one_line()));
                None
            }
        }
    }

    /// Queues an alarm, and does not wait.
    pub(super) fn hand_over(&mut self, alarm: OutgoingAlert) {
        if !self.queue.hand_over(alarm) && !std::mem::replace(&mut self.was_full, true) {
            self.terminal.warn(format!("dropping alarms: {WAITING} already wait for {}", self.name));
        }
    }

    /// Waits for the delivery of queued alarms, at most until `until`.
    pub(super) fn finish(self, until: Instant, pulse: &dyn Fn()) {
        if !self.queue.finish(until, pulse) {
            self.terminal.warn(format!("not all alarms had reached {} when the run was over", self.name));
        }
    }
}
