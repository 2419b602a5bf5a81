//! Delivers alarms to a program or a server: a thread and a short queue each, so that neither slows
//! the run.

use std::time::Instant;

use super::alert::OutgoingAlert;
use crate::delivery::{DeliveryQueue, HandOverRefusal};
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
    has_dropped: bool,
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
            Ok(queue) => Some(DeliveryThread { name, queue, terminal: terminal.clone(), has_dropped: false }),
            Err(error) => {
                terminal.warn(format!("cannot send alarms to {name}: {}", error.in_one_line()));
                None
            }
        }
    }

    /// Queues an alarm, and does not wait.
    pub(super) fn hand_over(&mut self, alarm: OutgoingAlert) {
        let Err(refusal) = self.queue.hand_over(alarm) else { return };
        if !std::mem::replace(&mut self.has_dropped, true) {
            let name = &self.name;
            let why = match refusal {
                HandOverRefusal::Full => format!("{WAITING} already wait for {name}"),
                HandOverRefusal::Ended => format!("the thread that sends them to {name} has ended"),
            };
            self.terminal.warn(format!("dropping alarms: {why}"));
        }
    }

    /// Waits for the delivery of queued alarms, at most until `until`.
    pub(super) fn finish(self, until: Instant, pulse: &dyn Fn()) {
        if !self.queue.finish(until, pulse) {
            self.terminal.warn(format!(
                "not all alarms had reached {} when the run was over; alerts.jsonl has all of them",
                self.name
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::alert::Alert;
    use super::*;
    use crate::Verbosity;

    /// A channel whose thread ends at the first alarm.
    struct Ending;

    impl AlertChannel for Ending {
        fn name(&self) -> String {
            "nobody".to_owned()
        }

        fn send(&self, _alarm: &OutgoingAlert) -> Result<(), String> {
            std::panic::resume_unwind(Box::new("ended"))
        }
    }

    #[test]
    fn a_thread_that_has_ended_is_not_a_full_queue() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let terminal = Terminal::plain(Verbosity::Quiet, file.reopen().unwrap());
        let mut thread = DeliveryThread::start(Ending, &terminal).unwrap();
        let begun = Instant::now();
        while !thread.has_dropped && begun.elapsed().as_secs() < 240 {
            let alarm =
                Alert { rule: "stall", step: 1, value: None, message: "m".into(), time: "now".into() };
            thread.hand_over(OutgoingAlert::new(alarm, "out", "host"));
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let told = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(told, "warning: dropping alarms: the thread that sends them to nobody has ended\n");
    }
}
