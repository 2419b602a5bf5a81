//! Tests from the reports of a run to a line in the file and a message on the terminal.

use super::webhook::tests::{ServerDouble, status};
use super::*;
use crate::Verbosity;

struct TestRun {
    alerts: Alerts,
    folder: tempfile::TempDir,
    server: ServerDouble,
}

/// A run whose alerts go to a server.
fn run(rules: &[AlertRule], free: u64) -> TestRun {
    let folder = tempfile::tempdir().unwrap();
    let said = std::fs::File::create(folder.path().join("said")).unwrap();
    let server = ServerDouble::start(vec![status(200, "")]);
    let options = AlertOptions {
        rules: rules.to_vec(),
        file: folder.path().join("alerts.jsonl"),
        run: "out".into(),
        host: "host".into(),
        command: None,
        webhook: Some(server.address.clone()),
        next_bytes: 1 << 20,
        disk_space: Box::new(move || Some(OutputSpace { total: 1 << 30, free })),
    };
    let alerts = Alerts::start(options, &Terminal::plain(Verbosity::Quiet, said)).unwrap();
    TestRun { alerts, folder, server }
}

impl TestRun {
    fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn sent(&self) -> Vec<String> {
        self.server.posted.lock().unwrap().clone()
    }
}

fn skipped(step: u64) -> SkippedStep {
    SkippedStep { step, skipped: "loss NaN".into(), back_to: None }
}

#[test]
fn an_alert_is_a_line_in_the_file_and_goes_out() {
    let mut run = run(AlertRule::ALL, 1 << 29);
    run.alerts.begin(0, 100).unwrap();
    for step in 1..=3 {
        run.alerts.step(&StepReport { step, loss: 2.0, ..StepReport::default() }).unwrap();
    }
    run.alerts.skipped(&skipped(4)).unwrap();
    run.alerts.skipped(&skipped(5)).unwrap();
    run.alerts.end(RunEnd::Finished, &|| ()).unwrap();
    let (written, sent) = (run.lines("alerts.jsonl"), run.sent());
    assert_eq!((written.len(), sent.len()), (2, 2), "{written:?} {sent:?}");
    assert!(written[0].starts_with(r#"{"rule":"no_progress","step":3,"value":0.0,"message":"step 3: the "#));
    assert!(
        written[1].starts_with(r#"{"rule":"non_finite","step":4,"value":null,"message":"step 4 diverged"#)
    );
    assert!(sent[0].starts_with(r#"{"text":"out on host: no_progress: step 3: the gradient"#), "{sent:?}");
    assert_eq!(run.lines("said"), [""; 0], "the run says both by itself");
}

/// A run that diverges at each second step has one incident, and another one after twenty updates.
#[test]
fn steps_that_are_skipped_close_together_are_one_incident() {
    let mut run = run(&[AlertRule::NonFinite], 1 << 29);
    run.alerts.begin(0, 100).unwrap();
    for at in [1, 3, 5, 7, 9] {
        run.alerts.skipped(&skipped(at)).unwrap();
        run.alerts.step(&StepReport { step: at + 1, ..StepReport::default() }).unwrap();
    }
    assert_eq!(run.lines("alerts.jsonl").len(), 1);
    for at in 11..=30 {
        run.alerts.step(&StepReport { step: at, ..StepReport::default() }).unwrap();
    }
    run.alerts.skipped(&skipped(31)).unwrap();
    assert_eq!(run.lines("alerts.jsonl").len(), 2);
}

#[test]
fn what_only_alerts_see_is_on_the_terminal_too() {
    let mut run = run(&[AlertRule::LowDisk], 1 << 10);
    run.alerts.begin(0, 100).unwrap();
    run.alerts.skipped(&skipped(1)).unwrap();
    let error = Error::new(ErrorCategory::Diverged, "the numbers diverged at step 2");
    run.alerts.end(RunEnd::Failed(&error), &|| ()).unwrap();
    assert_eq!(run.lines("alerts.jsonl").len(), 1, "no other rule was asked for");
    let said = run.lines("said");
    assert!(said.len() == 1 && said[0].starts_with("warning: step 0: 1.00 KiB free"), "{said:?}");
}

#[test]
fn a_run_that_ends_diverged_says_so_before_it_ends() {
    let mut run = run(&[AlertRule::NonFinite], 1 << 29);
    run.alerts.begin(6, 100).unwrap();
    let error = Error::new(ErrorCategory::Diverged, "the numbers diverged at step 7");
    run.alerts.end(RunEnd::Failed(&error), &|| ()).unwrap();
    let sent = run.sent();
    assert!(sent.len() == 1 && sent[0].contains(r#""step":7"#), "{sent:?}");
}

#[test]
fn the_clock_tells_the_time_until_it_is_dropped() {
    let (sender, heard) = sync_channel::<Duration>(100);
    let clock = watch_time(Duration::from_millis(5), move |passed| {
        let _full = sender.try_send(passed);
    })
    .unwrap();
    let passed = heard.recv_timeout(Duration::from_secs(240)).unwrap();
    assert!(passed <= Duration::from_millis(10), "{passed:?}");
    drop(clock);
    // The thread ends, and its end of the channel with it.
    while heard.recv_timeout(Duration::from_secs(240)).is_ok() {}
}
