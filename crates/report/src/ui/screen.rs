//! Takes over the whole screen of a terminal, and gives it back on every exit.
//!
//! On exit time may be short: a second signal or a storage fault ends the process within a handler.
//! [`restore_screen`] makes only calls allowed in a handler, and does not wait for a terminal that
//! accepts no output. The view reads keys one by one without echo; Ctrl-C stays a signal, so that a
//! run has one way to stop.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use libc::c_int;
use ratatui::backend::{Backend, ClearType, WindowSize};
use ratatui::buffer::Cell;
use ratatui::layout::{Position, Size};
use ratatui::style::{Color, Modifier};
use ratatui::text::Span;

/// Switches to the alternate buffer of the terminal, empty, without a cursor.
const TAKE: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[2J";
/// Switches back to the first buffer, with a cursor, in plain style.
const GIVE_BACK: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";
/// Settings of a terminal that edits lines and shows them, as a shell uses it.
const EDITED_LINES: libc::tcflag_t = libc::ICANON | libc::ECHO;
/// The largest screen that the view draws, whatever size the terminal reports.
const MOST_COLUMNS: u16 = 500;
const MOST_ROWS: u16 = 200;

/// True while this process has the screen.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);
/// The terminal settings before the view read keys one by one.
static BEFORE: OnceLock<libc::termios> = OnceLock::new();
/// The descriptor with changed settings; -1 for none.
static KEYS: AtomicI32 = AtomicI32::new(-1);

/// The keys of a terminal before another process takes its screen. If that process is killed before
/// it gives the screen back, dropping this value does.
pub struct ScreenOfChild {
    tty: File,
    before: libc::termios,
}

impl ScreenOfChild {
    /// Reads the settings of the controlling terminal; none without one.
    pub fn save() -> Option<Self> {
        let tty = OpenOptions::new().read(true).write(true).open("/dev/tty").ok()?;
        let before = settings_of(&tty)?;
        Some(ScreenOfChild { tty, before })
    }
}

impl Drop for ScreenOfChild {
    fn drop(&mut self) {
        let reads_keys = |settings: &libc::termios| settings.c_lflag & EDITED_LINES == 0;
        let is_taken = settings_of(&self.tty).as_ref().is_some_and(reads_keys) && !reads_keys(&self.before);
        if is_taken {
            // SAFETY: the descriptor is open, and the settings are those of this terminal.
            unsafe { libc::tcsetattr(self.tty.as_raw_fd(), libc::TCSANOW, &raw const self.before) };
            write_if_ready(GIVE_BACK);
        }
    }
}

/// Gives the screen back if this process has it. Signal handlers may call it.
pub fn restore_screen() {
    if !IS_TAKEN.swap(false, Ordering::SeqCst) {
        return;
    }
    let keys = KEYS.swap(-1, Ordering::SeqCst);
    // The keys first: the write may wait for the terminal, and a further signal ends the process
    // meanwhile.
    unsafe {
        if let (0.., Some(before)) = (keys, BEFORE.get()) {
            libc::tcsetattr(keys, libc::TCSANOW, before);
        }
    }
    write_if_ready(GIVE_BACK);
}

/// Milliseconds to wait for a terminal that still shows earlier output, or that accepts none, as
/// after Ctrl-S.
const READY_WITHIN: c_int = 1000;

/// Writes a few bytes to stderr if it accepts output within [`READY_WITHIN`] milliseconds; returns
/// whether it did. Signal handlers may call it.
fn write_if_ready(bytes: &[u8]) -> bool {
    let mut poll = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `poll` and `write` may be called in handlers; the pointers are to one valid `pollfd`
    // and to the bytes.
    unsafe {
        libc::poll(&raw mut poll, 1, READY_WITHIN) == 1
            && poll.revents & libc::POLLOUT != 0
            && libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) >= 0
    }
}

/// Returns whether the process still has the screen.
pub(super) fn is_taken() -> bool {
    IS_TAKEN.load(Ordering::SeqCst)
}

/// The screen, and the keys if they are readable.
pub(super) struct TakenScreen {
    keys: Option<File>,
}

impl TakenScreen {
    /// Takes over the screen of stderr.
    ///
    /// # Errors
    /// stderr accepts no output.
    pub(super) fn take() -> io::Result<Self> {
        let keys = OpenOptions::new().read(true).write(true).open("/dev/tty").ok().filter(read_each_key);
        IS_TAKEN.store(true, Ordering::SeqCst);
        let screen = TakenScreen { keys };
        if !write_if_ready(TAKE) {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "the terminal accepts no output"));
        }
        Ok(screen)
    }

    /// Waits for keys, at most for `pause`, and returns those that came.
    pub(super) fn keys(&mut self, pause: Duration) -> Vec<u8> {
        let Some(file) = &mut self.keys else {
            thread::sleep(pause);
            return Vec::new();
        };
        let mut poll = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the pointer is to one valid `pollfd`.
        let ready = unsafe { libc::poll(&raw mut poll, 1, pause.as_millis() as c_int) };
        if ready <= 0 {
            return Vec::new();
        }
        let mut bytes = [0; 64];
        match file.read(&mut bytes) {
            Ok(count) if count > 0 => bytes[..count].to_vec(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Vec::new(),
            // The terminal is gone.
            _ => {
                self.keys = None;
                Vec::new()
            }
        }
    }
}

impl Drop for TakenScreen {
    fn drop(&mut self) {
        restore_screen();
    }
}

/// Returns the settings of a terminal; none if another program is in the foreground, because a
/// change would stop this process.
fn settings_of(tty: &File) -> Option<libc::termios> {
    let fd = tty.as_raw_fd();
    let mut settings = MaybeUninit::<libc::termios>::zeroed();
    // SAFETY: the descriptor is open, and the pointer is to a whole `termios`, for which zeroes are
    // a valid value.
    unsafe {
        let is_known =
            libc::tcgetpgrp(fd) == libc::getpgrp() && libc::tcgetattr(fd, settings.as_mut_ptr()) == 0;
        is_known.then(|| settings.assume_init())
    }
}

/// Sets the terminal to deliver each key at once without echo; returns false if another program is
/// in the foreground or the settings cannot change.
fn read_each_key(tty: &File) -> bool {
    let Some(mut settings) = settings_of(tty) else { return false };
    BEFORE.get_or_init(|| settings);
    settings.c_lflag &= !EDITED_LINES;
    // Ctrl-Z and Ctrl-\ would stop or end the process without restoring the screen.
    settings.c_cc[libc::VSUSP] = 0;
    settings.c_cc[libc::VQUIT] = 0;
    // SAFETY: the descriptor is open, and the pointer is to the terminal's settings.
    if unsafe { libc::tcsetattr(tty.as_raw_fd(), libc::TCSANOW, &raw const settings) } != 0 {
        return false;
    }
    KEYS.store(tty.as_raw_fd(), Ordering::SeqCst);
    true
}

/// The drawing as escape sequences that every terminal knows (ECMA-48), in one write per frame.
#[derive(Default)]
pub(super) struct AnsiScreen {
    frame: String,
}

impl AnsiScreen {
    fn style(&mut self, colour: Color, modifier: Modifier) {
        self.frame.push_str("\x1b[0");
        let code = match colour {
            Color::Red => Some("31"),
            Color::Green => Some("32"),
            Color::Yellow => Some("33"),
            Color::Blue => Some("34"),
            Color::Magenta => Some("35"),
            Color::Cyan => Some("36"),
            _ => None,
        };
        let bold = modifier.contains(Modifier::BOLD).then_some("1");
        let dim = modifier.contains(Modifier::DIM).then_some("2");
        for code in [code, bold, dim].into_iter().flatten() {
            self.frame.push(';');
            self.frame.push_str(code);
        }
        self.frame.push('m');
    }

    fn go_to(&mut self, x: u16, y: u16) {
        self.frame.push_str(&format!("\x1b[{};{}H", y + 1, x + 1));
    }
}

impl Backend for AnsiScreen {
    type Error = io::Error;

    fn draw<'a, I>(&mut self, content: I) -> io::Result<()>
    where
        I: Iterator<Item = (u16, u16, &'a Cell)>,
    {
        let (mut next, mut style) = (None, None);
        for (x, y, cell) in content {
            if next != Some((x, y)) {
                self.go_to(x, y);
            }
            if style.replace((cell.fg, cell.modifier)) != Some((cell.fg, cell.modifier)) {
                self.style(cell.fg, cell.modifier);
            }
            self.frame.push_str(cell.symbol());
            // Only the terminal knows the width of other symbols.
            next = (Span::raw(cell.symbol()).width() == 1).then_some((x + 1, y));
        }
        Ok(())
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(Position::ORIGIN)
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> io::Result<()> {
        let Position { x, y } = position.into();
        self.go_to(x, y);
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.frame.push_str("\x1b[0m\x1b[2J");
        Ok(())
    }

    fn clear_region(&mut self, _: ClearType) -> io::Result<()> {
        self.clear()
    }

    fn size(&self) -> io::Result<Size> {
        let mut winsize = MaybeUninit::<libc::winsize>::zeroed();
        // SAFETY: the pointer is to a whole `winsize`, for which zeroes are a valid value.
        let (status, size) = unsafe {
            let status = libc::ioctl(libc::STDERR_FILENO, libc::TIOCGWINSZ, winsize.as_mut_ptr());
            (status, winsize.assume_init())
        };
        // Without a reported size, that of an old terminal.
        let known = status == 0 && size.ws_col > 0 && size.ws_row > 0;
        let drawn = || Size::new(size.ws_col.min(MOST_COLUMNS), size.ws_row.min(MOST_ROWS));
        Ok(if known { drawn() } else { Size::new(80, 24) })
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize { columns_rows: self.size()?, pixels: Size::ZERO })
    }

    fn flush(&mut self) -> io::Result<()> {
        let frame = std::mem::take(&mut self.frame);
        // A signal handler may have given the screen back meanwhile.
        if frame.is_empty() || !is_taken() {
            return Ok(());
        }
        let mut stderr = io::stderr().lock();
        stderr.write_all(frame.as_bytes()).and_then(|()| stderr.flush())
    }
}
