//! Programs that alerts start: their input, which programs are refused, and that none outlives its
//! run.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::test_dir::{TestDir, lora};

/// Upper bound for a run to raise an alert, or the system to end a process, on a busy machine.
const LONGEST: Duration = Duration::from_secs(120);

/// A run of `steps` steps that raises one alert, at step 3, because its gradient norm is 0.
fn with_alerts(dir: &TestDir, command: &Value, steps: &str) -> Command {
    let (command, steps) = (format!("alerts.command={command}"), format!("train.max_steps={steps}"));
    let sets = [
        "--set",
        "adapter.lora_alpha=1e-60",
        "--set",
        r#"alerts.rules=["no_progress"]"#,
        "--set",
        "train.gradient_accumulation_steps=1",
        "--set",
        &command,
        "--set",
        &steps,
    ];
    dir.command(&lora(&sets))
}

/// A program that waits forever, after it writes its pid and those of its child and two
/// grandchildren to the file `numbers`. One grandchild leaves its process group.
fn family(dir: &TestDir) -> Value {
    let file = dir.path("numbers");
    let (file, begun) = (file.display(), dir.path("numbers.begun").display().to_string());
    let script = format!(
        "sh -c 'sleep 4321 & first=$!; setsid sleep 4321 & echo $! $first $$ > {begun}; wait' & while [ ! -s {begun} ]; do sleep 0.05; done; \
         echo $$ $(cat {begun}) > {begun}.all; mv {begun}.all {file}; wait"
    );
    json!(["sh", "-c", script])
}

/// Waits until `is_so`; fails with `what` on timeout.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONGEST, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns true if the process exists and has not ended.
fn lives(pid: &str) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// The end of a run while its alert's program is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Finishes by itself.
    Done,
    /// SIGTERM, which asks it to save and stop.
    Term,
    /// SIGTERM repeatedly.
    TermTwice,
    /// SIGKILL.
    Kill,
}

#[test]
fn no_program_of_an_alert_outlives_its_run() {
    if !cfg!(target_os = "linux") {
        crate::skipped::skipped("programs of alerts", "processes are looked for in /proc");
        return;
    }
    for end in [End::Done, End::Term, End::TermTwice, End::Kill] {
        let dir = TestDir::new();
        let steps = if end == End::Done { "6" } else { "100000" };
        let mut run = with_alerts(&dir, &family(&dir), steps);
        // The run must not receive the signals of the terminal that runs this test.
        let mut run = run.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap();
        let mut code = None;
        let mut has_ended = |run: &mut Child| {
            code = run.try_wait().unwrap().map(|status| status.code());
            code.is_some()
        };
        until("the alert was not raised", || dir.path("numbers").exists() || has_ended(&mut run));
        let numbers = std::fs::read_to_string(dir.path("numbers")).unwrap_or_default();
        let numbers: Vec<&str> = numbers.split_whitespace().collect();
        if end != End::Done {
            assert_eq!(numbers.len(), 4, "{end:?}: {numbers:?}");
            assert!(numbers.iter().all(|pid| lives(pid)), "{end:?}: {numbers:?}");
        }
        let (sent, most, codes): (i32, usize, &[Option<i32>]) = match end {
            End::Done => (0, 0, &[Some(0)]),
            End::Term => (libc::SIGTERM, 1, &[Some(85)]),
            // A late second signal finds a run that has already saved.
            End::TermTwice => (libc::SIGTERM, 100, &[Some(130), Some(85)]),
            End::Kill => (libc::SIGKILL, 1, &[None]),
        };
        let (mut count, mut since) = (0, Instant::now());
        until(&format!("{end:?}: the run does not end"), || {
            // Wait until the run counts the signal as a second one.
            if count < most && (count == 0 || since.elapsed() > Duration::from_secs(1)) {
                // SAFETY: a system call that takes numbers; the process was not waited for.
                unsafe { libc::kill(run.id().cast_signed(), sent) };
                (count, since) = (count + 1, Instant::now());
            }
            has_ended(&mut run)
        });
        assert!(codes.contains(&code.unwrap()), "{end:?}: {code:?}");
        for pid in numbers {
            until(&format!("{end:?}: {pid} lives on"), || !lives(pid));
        }
    }
}

#[test]
fn what_a_program_leaves_behind_is_waited_for() {
    let dir = TestDir::new();
    let script = format!("(sleep 0.5; echo late > {}) &", dir.path("late").display());
    let done = with_alerts(&dir, &json!(["sh", "-c", script]), "4").output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(0), "{said}");
    assert_eq!(std::fs::read_to_string(dir.path("late")).unwrap(), "late\n", "{said}");
    assert!(!said.contains("did not reach") && !said.contains("not all alerts"), "{said}");
}

#[test]
fn a_program_gets_the_alert_on_its_input_and_in_its_environment() {
    let dir = TestDir::new();
    let folder = dir.path("");
    let folder = folder.display();
    let script = format!(
        "cat > {folder}/in; printf '%s\\n' \"$FINETUNE_ALERT_RULE\" \"$FINETUNE_ALERT_STEP\" \"$FINETUNE_ALERT_MESSAGE\" \"$1\" > {folder}/env"
    );
    let argument = "say \"no\"; $(rm)";
    let done = with_alerts(&dir, &json!(["sh", "-c", script, "sh", argument]), "4").output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", dir.told(&done.stderr));
    let told = std::fs::read_to_string(dir.path("env")).unwrap();
    let input: Value = serde_json::from_str(&std::fs::read_to_string(dir.path("in")).unwrap()).unwrap();
    let expected = format!("no_progress\n3\n{}\n{argument}\n", input["message"].as_str().unwrap());
    assert_eq!(told, expected);
    assert_eq!(
        (&input["rule"], &input["step"], &input["run"]),
        (&json!("no_progress"), &json!(3), &json!("out"))
    );
}

#[test]
fn a_program_that_cannot_be_started_is_refused_before_training() {
    let dir = TestDir::new();
    std::fs::create_dir(dir.path("bin")).unwrap();
    for (name, mode) in [("bin/mute", 0o644), ("bin/loud", 0o755)] {
        dir.write(name, "#!/bin/sh\n");
        std::fs::set_permissions(dir.path(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    for (name, why) in [
        ("./bin/mute", "[DIR]/bin/mute is not executable; `chmod +x` makes it so"),
        ("./bin/none", "[DIR]/bin/none does not exist"),
        ("./bin", "[DIR]/bin is not a file"),
        ("mute", "[DIR]/bin/mute is not executable; `chmod +x` makes it so"),
        ("none", "no folder of PATH has a program `none`"),
    ] {
        let mut run = with_alerts(&dir, &json!([name]), "4");
        let done = run.env("PATH", dir.path("bin")).output().unwrap();
        let said = dir.told(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains("`alerts.command`") && said.contains(why), "{name}: {said}");
        assert!(!dir.path("out").exists(), "{name}: {said}");
    }
    for name in ["./bin/loud", "loud"] {
        let mut run = with_alerts(&dir, &json!([name]), "4");
        let done = run.args(["--dry-run"]).env("PATH", dir.path("bin")).output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{}", dir.told(&done.stderr));
    }
}
