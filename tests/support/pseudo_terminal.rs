//! A pseudo-terminal, and the binary running on it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) const TAKEN: &str = "\x1b[?1049h";
pub(crate) const GIVEN_BACK: &str = "\x1b[?1049l";
/// Text that the test writes after the end of a run.
const END: &str = "[the end]";
/// Time limit of a run, which takes seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// A run that is killed when its test fails.
pub(crate) struct StartedRun(pub(crate) Child);

impl StartedRun {
    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a system call that takes numbers; the child is this test's and not waited for.
        unsafe { libc::kill(self.0.id() as i32, signal) };
    }
}

impl Drop for StartedRun {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A pseudo-terminal.
pub(crate) struct PseudoTerminal {
    pub(crate) ours: File,
    theirs: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl PseudoTerminal {
    /// Opens one of 80 by 24.
    pub(crate) fn open() -> Self {
        Self::of_size(80, 24)
    }

    pub(crate) fn of_size(columns: u16, rows: u16) -> Self {
        let terminal = Self::unread(columns, rows);
        let (mut reader, heard) = (terminal.ours.try_clone().unwrap(), Arc::clone(&terminal.shown));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                heard.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        terminal
    }

    /// Opens one that nobody reads and whose buffers are full.
    pub(crate) fn full() -> Self {
        let terminal = Self::unread(80, 24);
        let own = format!("/proc/self/fd/{}", terminal.theirs.as_raw_fd());
        let mut options = File::options();
        let options = options.write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        let mut filled = options.open(own).unwrap();
        // One byte a call: a longer write may be partial.
        let full = std::iter::repeat_with(|| filled.write_all(b"f")).find_map(Result::err).unwrap();
        assert_eq!(full.kind(), std::io::ErrorKind::WouldBlock);
        terminal
    }

    fn unread(columns: u16, rows: u16) -> Self {
        let (mut ours, mut theirs) = (-1, -1);
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
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
        PseudoTerminal { ours, theirs, shown: Arc::default() }
    }

    /// Starts `command` with this as the controlling terminal of its session, and stderr on it.
    pub(crate) fn start(&self, mut command: Command) -> StartedRun {
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

    /// Returns this terminal as a stdout.
    pub(crate) fn stdout(&self) -> std::process::Stdio {
        self.theirs.try_clone().unwrap().into()
    }

    /// Changes the size of the terminal.
    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the call reads the size, which outlives it.
        let status = unsafe { libc::ioctl(self.ours.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    }

    /// Stops the output of the terminal, as after Ctrl-S.
    pub(crate) fn stop(&mut self) {
        self.ours.write_all(b"\x13").unwrap();
    }

    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    /// Waits until `text` has been shown. It must be a single word, for blanks between words need
    /// not be drawn.
    pub(crate) fn wait_for(&self, text: &str) {
        let started = Instant::now();
        while !self.shown().contains(text) {
            assert!(started.elapsed() < PATIENCE, "{text:?} was not shown: {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns true if the terminal edits and echoes lines, as in a shell.
    pub(crate) fn is_as_before(&self) -> bool {
        // SAFETY: tcgetattr fills in the settings of an open descriptor; zeroes are valid ones.
        let settings = unsafe {
            let mut settings: libc::termios = std::mem::zeroed();
            assert_eq!(libc::tcgetattr(self.theirs.as_raw_fd(), &raw mut settings), 0);
            settings
        };
        settings.c_lflag & (libc::ICANON | libc::ECHO) == (libc::ICANON | libc::ECHO)
    }

    /// Waits for the end of `child`, whether or not the terminal takes output.
    pub(crate) fn end_of(&self, child: &mut StartedRun) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = child.0.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < PATIENCE, "the run does not end: {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for the end of `child`, and checks that the screen is restored.
    pub(crate) fn end(&self, mut child: StartedRun) -> (ExitStatus, String) {
        let status = child.0.wait().unwrap();
        // Everything the child wrote appears before this text.
        File::from(self.theirs.try_clone().unwrap()).write_all(END.as_bytes()).unwrap();
        self.wait_for(END);
        assert!(self.is_as_before());
        let shown = self.shown();
        let after = shown.rsplit_once(GIVEN_BACK).unwrap().1.to_owned();
        (status, after)
    }
}

/// Returns the rows that a terminal of `columns` columns shows after it received `text`, without
/// scrolling; trailing blanks are omitted.
pub(crate) fn rows_of(text: &str, columns: usize) -> Vec<String> {
    let mut rows: Vec<Vec<char>> = vec![Vec::new()];
    let (mut row, mut column) = (0_usize, 0_usize);
    let mut chars = text.chars();
    while let Some(next) = chars.next() {
        match next {
            '\r' => column = 0,
            '\n' => row += 1,
            // Escape sequences, which all begin with a bracket here, end in a letter.
            '\x1b' => {
                let mut sequence = String::new();
                while !sequence.ends_with(|end: char| end.is_ascii_alphabetic()) {
                    let Some(more) = chars.next() else { break };
                    sequence.push(more);
                }
                let end = sequence.pop().unwrap_or_default();
                let number = sequence.trim_start_matches('[').parse::<usize>().ok();
                match end {
                    'A' => row = row.saturating_sub(number.unwrap_or(1)),
                    'B' => row += number.unwrap_or(1),
                    'K' if number == Some(2) => rows[row].clear(),
                    'K' => rows[row].truncate(column),
                    'J' => {
                        rows[row].truncate(column);
                        rows.truncate(row + 1);
                    }
                    // Colours.
                    _ => {}
                }
            }
            next if next.is_control() => {}
            next => {
                // After the last column the cursor moves to the next row only with the next
                // character.
                if column == columns {
                    (row, column) = (row + 1, 0);
                }
                rows.resize(rows.len().max(row + 1), Vec::new());
                if rows[row].len() <= column {
                    rows[row].resize(column + 1, ' ');
                }
                rows[row][column] = next;
                column += 1;
            }
        }
        rows.resize(rows.len().max(row + 1), Vec::new());
    }
    rows.into_iter().map(|row| row.into_iter().collect::<String>().trim_end().to_owned()).collect()
}
