//! A program that is started for each alarm.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::alarm::OutgoingAlarm;
use super::delivery::AlarmChannel;

/// How long a program may take.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How often is looked whether it has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// A program and its arguments. It gets the alarm as a line of JSON on its input and in its environment; what it prints
/// goes nowhere.
pub(super) struct AlarmCommand {
    words: Vec<String>,
    timeout: Duration,
}

impl AlarmCommand {
    /// `words` are the program and its arguments; there is one at least.
    pub(super) fn new(words: Vec<String>) -> Self {
        AlarmCommand { words, timeout: TIMEOUT }
    }

    fn start(&self, alarm: &OutgoingAlarm) -> std::io::Result<Child> {
        let mut command = Command::new(self.words.first().map_or("", String::as_str));
        command.args(self.words.iter().skip(1));
        command.env("FINETUNE_ALERT_RULE", alarm.alarm.rule);
        command.env("FINETUNE_ALERT_STEP", alarm.alarm.step.to_string());
        command.env("FINETUNE_ALERT_MESSAGE", &alarm.alarm.message);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // A group of its own: Ctrl-C ends the run and not the message about it, and all that it starts can be ended.
        command.process_group(0).spawn()
    }

    fn wait(&self, child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
        let started = Instant::now();
        loop {
            match child.try_wait()? {
                None if started.elapsed() >= self.timeout => return Ok(None),
                None => thread::sleep(PAUSE),
                ended => return Ok(ended),
            }
        }
    }
}

impl AlarmChannel for AlarmCommand {
    fn name(&self) -> String {
        format!("the program `{}`", self.words.first().map_or("", String::as_str))
    }

    fn send(&self, alarm: &OutgoingAlarm) -> Result<(), String> {
        let mut child = self.start(alarm).map_err(|error| error.to_string())?;
        if let Some(mut input) = child.stdin.take() {
            // A program need not read; what it is told fits into the pipe.
            drop(writeln!(input, "{}", alarm.to_json()));
        }
        match self.wait(&mut child).map_err(|error| error.to_string())? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("it ended with {status}")),
            None => {
                if let Ok(group) = i32::try_from(child.id()) {
                    // SAFETY: a system call that takes numbers; the group is that of a child that was not waited for.
                    unsafe { libc::kill(-group, libc::SIGKILL) };
                }
                drop(child.wait());
                Err(format!("it had not ended after {} s", self.timeout.as_secs_f64()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::alarm::Alarm;
    use super::*;

    fn alarm() -> OutgoingAlarm {
        let alarm = Alarm {
            rule: "stall",
            step: 7,
            value: Some(61.0),
            message: "say \"no\"; $(rm)".into(),
            time: "2026-01-31T12:00:00Z".into(),
        };
        OutgoingAlarm::new(alarm, "out", "host")
    }

    fn shell(script: &str, timeout: Duration) -> Result<(), String> {
        let words = ["sh", "-c", script].map(str::to_owned).into();
        AlarmCommand { words, timeout }.send(&alarm())
    }

    #[test]
    fn a_program_gets_the_alarm_on_its_input_and_in_its_environment() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display();
        let script = format!(
            "cat > {place}/in; echo \"$FINETUNE_ALERT_RULE/$FINETUNE_ALERT_STEP/$FINETUNE_ALERT_MESSAGE\" > {place}/env"
        );
        shell(&script, TIMEOUT).unwrap();
        let told = std::fs::read_to_string(folder.path().join("env")).unwrap();
        assert_eq!(told, "stall/7/say \"no\"; $(rm)\n");
        let input: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(folder.path().join("in")).unwrap()).unwrap();
        assert_eq!(input["text"], "out on host: stall: say \"no\"; $(rm)");
        assert_eq!(
            (&input["rule"], &input["step"], &input["value"]),
            (&"stall".into(), &7.into(), &61.0.into())
        );
        assert_eq!((&input["run"], &input["host"]), (&"out".into(), &"host".into()));
    }

    #[test]
    fn a_program_that_fails_hangs_or_is_not_there_is_named() {
        assert_eq!(shell("exit 3", TIMEOUT), Err("it ended with exit status: 3".into()));
        let hung = shell("sleep 600 & wait", Duration::from_millis(100));
        assert_eq!(hung, Err("it had not ended after 0.1 s".into()));
        let missing = AlarmCommand::new(vec!["no such program".into()]).send(&alarm());
        assert!(missing.is_err_and(|why| why.contains("No such file")));
    }
}
