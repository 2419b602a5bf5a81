//! Runs on a terminal that takes no output, as after Ctrl-S or over a stalled connection: the run
//! continues, and signals end it.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::pseudo_terminal::{PATIENCE, PseudoTerminal, StartedRun, rows_of};
use crate::test_dir::{TestDir, lora};

const MODES: [&[&str]; 2] = [&[], &["--ui"]];

fn long_run<'a>(mode: &[&'a str]) -> Vec<&'a str> {
    let steps = ["--set", "train.max_steps=100000", "--set", "log.tensorboard=false"];
    lora(&[&steps[..], mode].concat())
}

/// Waits until metrics.jsonl has `least` lines.
fn wait_for_steps(dir: &TestDir, child: &mut StartedRun, least: usize) {
    let started = Instant::now();
    while steps(dir) < least {
        assert!(child.0.try_wait().unwrap().is_none(), "the run has ended");
        assert!(started.elapsed() < PATIENCE, "{} steps of {least}", steps(dir));
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn steps(dir: &TestDir) -> usize {
    std::fs::read_to_string(dir.path("out/metrics.jsonl")).map_or(0, |text| text.lines().count())
}

fn has_checkpoint(dir: &TestDir) -> bool {
    let entries = std::fs::read_dir(dir.path("out")).unwrap();
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("checkpoint-"))
}

/// The terminal stops during the run.
#[test]
fn training_goes_on_and_a_signal_saves() {
    for mode in MODES {
        let (dir, mut terminal) = (TestDir::new(), PseudoTerminal::open());
        let mut child = terminal.start(dir.command(&long_run(mode)));
        wait_for_steps(&dir, &mut child, 3);
        terminal.stop();
        // If each step drew a frame, they would exceed the buffers to the terminal by far.
        let before = steps(&dir);
        wait_for_steps(&dir, &mut child, before + 200);
        child.signal(libc::SIGTERM);
        assert_eq!(terminal.end_of(&mut child).code(), Some(85), "{mode:?}");
        assert!(has_checkpoint(&dir), "{mode:?}");
        assert!(terminal.is_as_before(), "{mode:?}");
    }
}

/// The terminal takes no output from the start: it is stopped, or its buffers are full and nobody
/// reads them.
#[test]
fn a_terminal_that_takes_nothing_from_the_start() {
    let mut stopped = PseudoTerminal::open();
    stopped.stop();
    for terminal in [stopped, PseudoTerminal::full()] {
        for mode in MODES {
            let dir = TestDir::new();
            let mut child = terminal.start(dir.command(&long_run(mode)));
            wait_for_steps(&dir, &mut child, 20);
            child.signal(libc::SIGTERM);
            assert_eq!(terminal.end_of(&mut child).code(), Some(85), "{mode:?}");
            assert!(has_checkpoint(&dir), "{mode:?}");
        }
    }
}

/// A run that neither steps nor saves, on a terminal that takes no output. Release builds plant no
/// fault.
#[test]
fn a_second_signal_ends_the_run_at_once() {
    if !cfg!(debug_assertions) {
        return;
    }
    for mode in MODES {
        let (dir, mut terminal) = (TestDir::new(), PseudoTerminal::open());
        let mut command = dir.command(&long_run(mode));
        command.env("FINETUNE_FAULT", "0:backward:hang");
        let mut child = terminal.start(command);
        let started = Instant::now();
        while !dir.path("out/metrics.jsonl").exists() {
            assert!(started.elapsed() < PATIENCE, "{mode:?}: {}", terminal.shown());
            std::thread::sleep(Duration::from_millis(20));
        }
        if !mode.is_empty() {
            terminal.wait_for("forward");
        }
        terminal.stop();
        // Until the run counts the signal as a new request.
        while child.0.try_wait().unwrap().is_none() {
            assert!(started.elapsed() < PATIENCE, "{mode:?}: the run does not end");
            child.signal(libc::SIGTERM);
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(terminal.end_of(&mut child).code(), Some(130), "{mode:?}");
        assert!(terminal.is_as_before(), "{mode:?}");
    }
}

/// Printing an error waits for the terminal, but not forever.
#[test]
fn an_error_ends_a_command_though_nobody_reads_it() {
    let (dir, mut terminal) = (TestDir::new(), PseudoTerminal::open());
    terminal.stop();
    let mut child = terminal.start(dir.command(&lora(&["--set", "train.max_steps=no"])));
    assert_eq!(terminal.end_of(&mut child).code(), Some(1));
    let terminal = PseudoTerminal::open();
    let mut child = terminal.start(dir.command(&lora(&["--set", "train.max_steps=no"])));
    terminal.wait_for("train.max_steps");
    assert_eq!(terminal.end_of(&mut child).code(), Some(1));
}

/// Removes the escape sequences of colours and cursor moves.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\u{1b}') {
        plain.push_str(before);
        let end = after.find(|c: char| c.is_ascii_alphabetic()).map_or(after.len(), |at| at + 1);
        rest = &after[end..];
    }
    plain + rest
}

/// A bar wider than its terminal would leave a copy of itself behind.
#[test]
fn a_bar_is_cut_to_the_width_of_its_terminal() {
    let (dir, terminal) = (TestDir::new(), PseudoTerminal::of_size(45, 20));
    let mut child = terminal.start(dir.command(&lora(&[])));
    assert!(terminal.end_of(&mut child).success());
    terminal.wait_for("adapter saved in out");
    let shown = plain(&terminal.shown());
    // After a bar of the full width a terminal would wrap by itself.
    let lines = shown.split(['\r', '\n']).filter_map(|line| line.split("adapter").next());
    let bars: Vec<&str> =
        lines.filter(|line| line.contains("/4  ") && !line.trim_start().starts_with("step ")).collect();
    assert!(!bars.is_empty(), "{shown:?}");
    assert!(bars.iter().all(|line| line.chars().count() <= 45), "{bars:#?}");
}

/// Returns true if a bar of 24 columns precedes the step.
fn has_bar(text: &str) -> bool {
    regex::Regex::new("[=> ]{20,} [0-9]+/[0-9]+  ").unwrap().is_match(text)
}

/// Neither evaluations nor the end of a run leave a copy of the bar on the screen.
#[test]
fn no_bar_stays_on_the_screen() {
    for columns in [45, 140] {
        let (dir, terminal) = (TestDir::new(), PseudoTerminal::of_size(columns, 40));
        let args = lora(&["--eval-dataset", "rows.jsonl", "--set", "eval.steps=1"]);
        let mut child = terminal.start(dir.command(&args));
        assert!(terminal.end_of(&mut child).success(), "{}", terminal.shown());
        terminal.wait_for("adapter saved in out");
        let rows = rows_of(&terminal.shown(), columns.into());
        assert!(has_bar(&terminal.shown()) && !rows.iter().any(|row| has_bar(row)), "{rows:#?}");
        for said in ["eval at step 3: loss ", "step 4/4  loss "] {
            assert_eq!(rows.iter().filter(|row| row.starts_with(said)).count(), 1, "{said}: {rows:#?}");
        }
    }
}

/// The terminal echoes `^C` at the cursor. Steps are slow, so that the bar does not move when the
/// key arrives.
#[test]
fn a_run_stopped_by_ctrl_c_leaves_no_bar() {
    for columns in [45, 140] {
        let (dir, mut terminal) = (TestDir::new(), PseudoTerminal::of_size(columns, 40));
        let mut command =
            dir.command(&lora(&["--set", "train.max_steps=100000", "--set", "log.tensorboard=false"]));
        command.env("FINETUNE_FAULT", "0:data:slow=300ms");
        let mut child = terminal.start(command);
        terminal.wait_for(" 2/100000 ");
        terminal.ours.write_all(b"\x03").unwrap();
        assert_eq!(terminal.end_of(&mut child).code(), Some(85), "{}", terminal.shown());
        terminal.wait_for("stopped after step ");
        let rows = rows_of(&terminal.shown(), columns.into());
        assert!(has_bar(&terminal.shown()) && !rows.iter().any(|row| has_bar(row)), "{rows:#?}");
        assert!(rows.iter().any(|row| row.starts_with("stopped after step ")), "{rows:#?}");
    }
}

/// The word that begins an error is red if the terminal has colours.
#[test]
fn an_error_is_red_on_a_terminal() {
    let (dir, terminal) = (TestDir::new(), PseudoTerminal::open());
    let mut child = terminal.start(dir.command(&["inspect", "./nothing"]));
    assert_eq!(terminal.end_of(&mut child).code(), Some(1));
    terminal.wait_for("\u{1b}[31;1merror:\u{1b}[0m ");
}
