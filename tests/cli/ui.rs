//! `--ui` on a terminal, which is a pseudo-terminal here, and where there is none.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::place::{Place, lora};

const TAKEN: &str = "\x1b[?1049h";
const GIVEN_BACK: &str = "\x1b[?1049l";
/// What the test writes after the end of a run.
const END: &str = "[the end]";
/// A run takes seconds.
const PATIENCE: Duration = Duration::from_secs(300);

/// A run that does not outlive a test that fails.
struct StartedRun(Child);

impl Drop for StartedRun {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A pseudo-terminal of 80 by 24.
struct PseudoTerminal {
    ours: File,
    theirs: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl PseudoTerminal {
    fn open() -> Self {
        let (mut ours, mut theirs) = (-1, -1);
        let size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: openpty writes two descriptors, which are this test's alone, and reads the size.
        let (ours, theirs) = unsafe {
            let status = libc::openpty(
                &raw mut ours,
                &raw mut theirs,
                std::ptr::null_mut(),
                std::ptr::null(),
                &raw const size,
            );
            assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
            (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
        };
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, heard) = (ours.try_clone().unwrap(), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                heard.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        PseudoTerminal { ours, theirs, shown }
    }

    /// Starts `command` with this as the terminal of its session, and stderr on it.
    fn start(&self, mut command: Command) -> StartedRun {
        command.stderr(self.theirs.try_clone().unwrap()).env("TERM", "xterm").env_remove("NO_COLOR");
        let fd = self.theirs.as_raw_fd();
        let take = move || {
            // SAFETY: system calls that take numbers, between fork and exec.
            let taken = unsafe { libc::setsid() >= 0 && libc::ioctl(fd, libc::TIOCSCTTY as _, 0) == 0 };
            if taken { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: it makes two system calls and touches no memory.
        unsafe { command.pre_exec(take) };
        StartedRun(command.spawn().unwrap())
    }

    fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    /// Waits until `text` has been shown: a word, for blanks between words need not be drawn.
    fn wait_for(&self, text: &str) {
        let started = Instant::now();
        while !self.shown().contains(text) {
            assert!(started.elapsed() < PATIENCE, "{text:?} was not shown: {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether lines are edited and echoed, as in a shell.
    fn is_as_before(&self) -> bool {
        // SAFETY: tcgetattr fills in the settings of an open descriptor; zeroes are valid ones.
        let settings = unsafe {
            let mut settings: libc::termios = std::mem::zeroed();
            assert_eq!(libc::tcgetattr(self.theirs.as_raw_fd(), &raw mut settings), 0);
            settings
        };
        settings.c_lflag & (libc::ICANON | libc::ECHO) == (libc::ICANON | libc::ECHO)
    }

    /// Waits for the end of `child`, and checks that the screen is as it was.
    fn end(&self, mut child: StartedRun) -> (ExitStatus, String) {
        let status = child.0.wait().unwrap();
        // What the child wrote before is shown before this.
        File::from(self.theirs.try_clone().unwrap()).write_all(END.as_bytes()).unwrap();
        self.wait_for(END);
        assert!(self.is_as_before());
        let shown = self.shown();
        let after = shown.rsplit_once(GIVEN_BACK).unwrap().1.to_owned();
        (status, after)
    }
}

fn long_run(steps: &str) -> Vec<&str> {
    lora(&["--ui", "--set", "train.max_steps=99", "--set", steps, "--set", "log.tensorboard=false"])
}

#[test]
fn a_run_has_the_screen_until_it_is_over_and_says_then_what_it_said() {
    let (place, terminal) = (Place::new(), PseudoTerminal::open());
    let args = lora(&["--ui", "--eval-dataset", "rows.jsonl", "--set", "adapter.lora_alpha=1e-60"]);
    let mut command = place.command(&args);
    // Long enough for a frame, also where the thread that draws seldom gets a core.
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
        let (place, mut terminal) = (Place::new(), PseudoTerminal::open());
        let child = terminal.start(place.command(&long_run("train.max_steps=100000")));
        terminal.wait_for("learning");
        assert!(!terminal.is_as_before(), "keys come one by one");
        terminal.ours.write_all(key).unwrap();
        let (status, after) = terminal.end(child);
        assert_eq!(status.code(), Some(85), "{after}");
        assert!(after.contains("stopped by a signal after step "), "{after}");
    }
}

/// A panic of a rank, and a second signal that waits for nothing. Builds for users plant no fault.
#[test]
fn the_screen_is_given_back_however_the_run_ends() {
    if !cfg!(debug_assertions) {
        return;
    }
    let (place, terminal) = (Place::new(), PseudoTerminal::open());
    let mut command = place.command(&long_run("train.max_steps=9"));
    command.env("FINETUNE_FAULT", "0:backward:panic");
    let (status, after) = terminal.end(terminal.start(command));
    assert_eq!(status.code(), Some(3), "{after}");
    assert!(after.contains("planted fault"), "{after}");
    let (place, terminal) = (Place::new(), PseudoTerminal::open());
    let mut command = place.command(&long_run("train.max_steps=9"));
    command.env("FINETUNE_FAULT", "0:backward:spin");
    let mut child = terminal.start(command);
    terminal.wait_for("forward");
    // Until so much time has passed since the first signal that the next is another request.
    while child.0.try_wait().unwrap().is_none() {
        // SAFETY: a system call that takes numbers; the child is this test's and not waited for.
        unsafe { libc::kill(child.0.id() as i32, libc::SIGTERM) };
        std::thread::sleep(Duration::from_millis(100));
    }
    let (status, _) = terminal.end(child);
    assert_eq!(status.code(), Some(130));
}

#[test]
fn without_a_terminal_the_run_speaks_in_lines() {
    let place = Place::new();
    let done = place.command(&lora(&["--ui"])).output().unwrap();
    let said = place.told(&done.stderr);
    assert_eq!(done.status.code(), Some(0), "{said}");
    assert_eq!(
        said.matches("`--ui` needs a terminal as stderr: the run speaks in lines instead\n").count(),
        1,
        "{said}"
    );
    assert!(said.contains("step 4/4  loss ") && !said.contains('\x1b'), "{said}");
}
