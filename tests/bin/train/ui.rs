//! `--ui` on a pseudo-terminal, and without a terminal.

use std::io::Write;
use std::time::Duration;

use crate::pseudo_terminal::{PATIENCE, PseudoTerminal, TAKEN};
use crate::test_dir::{TestDir, lora};

fn long_run(steps: &str) -> Vec<&str> {
    lora(&["--ui", "--set", "train.max_steps=99", "--set", steps, "--set", "log.tensorboard=false"])
}

#[test]
fn a_run_has_the_screen_until_it_is_over_and_says_then_what_it_said() {
    let (dir, terminal) = (TestDir::new(), PseudoTerminal::open());
    let args = lora(&["--ui", "--eval-dataset", "rows.jsonl", "--set", "adapter.lora_alpha=1e-60"]);
    let mut command = dir.command(&args);
    // Long enough for a frame, also on a busy machine.
    command.env("FINETUNE_FAULT", "0:data:slow=100ms");
    let child = terminal.start(command);
    let (status, after) = terminal.end(child);
    assert_eq!(status.code(), Some(0), "{}", terminal.shown());
    let shown = terminal.shown();
    assert!(shown.contains(TAKEN) && shown.contains("forward"), "{shown:?}");
    for said in
        ["eval at step 0: loss ", "the gradient norm has been 0", "step 4/4  loss ", "adapter saved in out"]
    {
        assert!(after.contains(said), "{said}: {after}");
    }
}

#[test]
fn the_key_q_saves_and_stops_and_so_does_ctrl_c() {
    for key in [b"q", b"\x03"] {
        let (dir, mut terminal) = (TestDir::new(), PseudoTerminal::open());
        let child = terminal.start(dir.command(&long_run("train.max_steps=100000")));
        terminal.wait_for("learning");
        assert!(!terminal.is_as_before(), "keys come one by one");
        terminal.ours.write_all(key).unwrap();
        let (status, after) = terminal.end(child);
        assert_eq!(status.code(), Some(85), "{after}");
        assert!(after.contains("stopped after step "), "{after}");
    }
}

/// After a panic of a rank, and after a second signal, which ends the run at once. Release builds
/// plant no fault.
#[test]
fn the_screen_is_given_back_however_the_run_ends() {
    if !cfg!(debug_assertions) {
        return;
    }
    let (dir, terminal) = (TestDir::new(), PseudoTerminal::open());
    let mut command = dir.command(&long_run("train.max_steps=9"));
    command.env("FINETUNE_FAULT", "0:backward:panic");
    let (status, after) = terminal.end(terminal.start(command));
    assert_eq!(status.code(), Some(3), "{after}");
    assert!(after.contains("planted fault"), "{after}");
    let (dir, terminal) = (TestDir::new(), PseudoTerminal::open());
    let mut command = dir.command(&long_run("train.max_steps=9"));
    command.env("FINETUNE_FAULT", "0:backward:spin");
    let mut child = terminal.start(command);
    terminal.wait_for("forward");
    // Until the run counts the signal as a new request.
    while child.0.try_wait().unwrap().is_none() {
        child.signal(libc::SIGTERM);
        std::thread::sleep(Duration::from_millis(100));
    }
    let (status, _) = terminal.end(child);
    assert_eq!(status.code(), Some(130));
}

/// The process that has the screen is killed, as when memory runs out: its parent gives the screen
/// back before it prints the error.
#[test]
#[cfg(target_os = "linux")]
fn the_parent_gives_back_the_screen_of_a_killed_run() {
    let (dir, terminal) = (TestDir::new(), PseudoTerminal::open());
    let mut args = long_run("train.max_steps=100000");
    args.extend(["--max-restarts", "0"]);
    let child = terminal.start(dir.command(&args));
    terminal.wait_for("learning");
    assert!(!terminal.is_as_before(), "keys come one by one");
    let run = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.0.id())).unwrap();
    // SAFETY: a signal to the child of a process that this test started; its parent has not waited
    // for it.
    unsafe { libc::kill(run.trim().parse().unwrap(), libc::SIGKILL) };
    let (status, after) = terminal.end(child);
    assert_eq!(status.code(), Some(75), "{after}");
    assert!(after.contains("the run was killed by signal 9"), "{after}");
}

#[test]
fn without_a_terminal_the_run_speaks_in_lines() {
    let dir = TestDir::new();
    let done = dir.command(&lora(&["--ui"])).output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(0), "{said}");
    assert_eq!(
        said.matches("`--ui` needs a terminal as stderr: printing lines instead\n").count(),
        1,
        "{said}"
    );
    assert!(said.contains("step 4/4  loss ") && !said.contains('\x1b'), "{said}");
}

/// Returns the largest row and column that the cursor was sent to.
fn farthest(shown: &str) -> (u32, u32) {
    let places = regex::Regex::new("\x1b\\[([0-9]+);([0-9]+)H").unwrap();
    let places = places.captures_iter(shown).map(|captures| captures.extract());
    let places = places.map(|(_, [row, column])| (row.parse().unwrap(), column.parse().unwrap()));
    places.fold((0, 0), |(rows, columns), (row, column): (u32, u32)| (rows.max(row), columns.max(column)))
}

/// A frame of 65535 by 65535 cells would take 160 GiB.
#[test]
fn a_screen_of_any_size_is_drawn_up_to_a_bound() {
    for is_resized in [false, true] {
        let dir = TestDir::new();
        let size = if is_resized { (80, 24) } else { (65535, 65535) };
        let mut terminal = PseudoTerminal::of_size(size.0, size.1);
        let child = terminal.start(dir.command(&long_run("train.max_steps=100000")));
        terminal.wait_for("learning");
        if is_resized {
            assert!(farthest(&terminal.shown()).0 <= 24);
            terminal.resize(65535, 65535);
        }
        let started = std::time::Instant::now();
        while farthest(&terminal.shown()).0 <= 24 {
            assert!(started.elapsed() < PATIENCE, "nothing was drawn on the larger screen");
            std::thread::sleep(Duration::from_millis(20));
        }
        terminal.ours.write_all(b"q").unwrap();
        let (status, after) = terminal.end(child);
        assert_eq!(status.code(), Some(85), "{after}");
        let (rows, columns) = farthest(&terminal.shown());
        assert!(rows <= 200 && columns <= 500, "{rows} rows, {columns} columns");
    }
}
