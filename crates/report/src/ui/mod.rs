//! Shows a run on the full screen: losses, speed, time of a step, and the printed lines.
//!
//! The run hands over each report and goes on. A separate thread draws changes, at most ten times a
//! second, and reads the keys. Lines of the run appear below the curves, and on the terminal after
//! the view ends. A terminal that accepts no output blocks only that thread.

mod draw;
mod figures;
mod screen;

pub use screen::{ScreenOfChild, restore_screen};

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use figures::ScreenFigures;
use screen::{AnsiScreen, TakenScreen, is_taken};

use super::listener::{RunEnd, RunListener};
use super::metrics::{EvalReport, SkippedStep, StepReport};
use super::printer::PATIENCE;
use super::terminal::{Terminal, ViewLines};
use crate::error::Result;
use crate::locks::locked;
use crate::threads;

/// Time between two frames, at least.
const FRAME: Duration = Duration::from_millis(100);
/// Time between two frames without news, for the clock on the screen.
const CLOCK: Duration = Duration::from_secs(1);

/// Most lines that a screen can show; it has no more rows.
const MOST_LINES: usize = 200;

/// The state that the run and the drawing thread share.
struct SharedView {
    figures: Mutex<ScreenFigures>,
    lines: ViewLines,
    has_changed: AtomicBool,
    is_over: AtomicBool,
}

/// The full-screen view of a run.
pub struct RunView {
    shared: Arc<SharedView>,
    /// Closed when the screen has been given back; none after `close` has waited for it.
    closed: Option<Receiver<()>>,
}

impl RunView {
    /// Takes over the screen of `terminal` for the run `title`. If that fails, prints a note and
    /// returns none: the run prints lines.
    pub fn open(terminal: &Terminal, title: &str) -> Option<Self> {
        if !terminal.is_screen() {
            terminal.line("`--ui` needs a terminal as stderr: printing lines instead");
            return None;
        }
        let lines = terminal.open_view();
        // Earlier lines appear before the view.
        terminal.flush();
        let failed = |why: &str| {
            terminal.warn(format!("cannot open the full-screen view, printing lines instead: {why}"));
        };
        let screen = TakenScreen::take().inspect_err(|error| {
            terminal.close_view();
            failed(&error.to_string());
        });
        let screen = Some(screen.ok()?);
        let (closing, closed) = sync_channel(0);
        let shared = Arc::new(SharedView {
            figures: Mutex::new(ScreenFigures::new(title)),
            lines,
            has_changed: AtomicBool::new(true),
            is_over: AtomicBool::new(false),
        });
        let drawn =
            DrawnView { screen, terminal: terminal.clone(), shared: Arc::clone(&shared), _closing: closing };
        // Without a thread the closure is dropped, which gives the screen back.
        let started = threads::start("screen", move || drawn.show());
        started.inspect_err(|error| failed(&error.in_one_line())).ok()?;
        Some(RunView { shared, closed: Some(closed) })
    }

    fn change(&self, change: impl FnOnce(&mut ScreenFigures)) {
        change(&mut self.shared.lock());
        self.shared.has_changed.store(true, Ordering::Release);
    }

    /// Gives the screen back, and prints the lines of the meantime. A terminal that accepts no
    /// output gets both once it accepts output again, if the process still runs.
    fn close(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        if let Some(closed) = self.closed.take() {
            let _closed = closed.recv_timeout(PATIENCE);
        }
    }
}

impl SharedView {
    fn lock(&self) -> MutexGuard<'_, ScreenFigures> {
        locked(&self.figures)
    }
}

impl RunListener for RunView {
    fn what(&self) -> &'static str {
        "full-screen view"
    }

    fn begin(&mut self, done: u64, total: u64) -> Result<()> {
        self.change(|figures| figures.begin(done, total));
        Ok(())
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        self.change(|figures| figures.step(report));
        Ok(())
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        self.change(|figures| figures.eval(report));
        Ok(())
    }

    fn skipped(&mut self, _step: &SkippedStep) -> Result<()> {
        self.change(|_| ());
        Ok(())
    }

    fn end(&mut self, _end: RunEnd<'_>, _pulse: &dyn Fn()) -> Result<()> {
        self.close();
        Ok(())
    }
}

impl Drop for RunView {
    fn drop(&mut self) {
        self.close();
    }
}

/// The state of the drawing thread.
struct DrawnView {
    screen: Option<TakenScreen>,
    terminal: Terminal,
    shared: Arc<SharedView>,
    /// Closes its channel last.
    _closing: SyncSender<()>,
}

impl DrawnView {
    /// Draws until the run is over, the screen was given back, or a write fails.
    fn show(mut self) {
        let Ok(mut terminal) = ratatui::Terminal::new(AnsiScreen::default()) else { return };
        let mut drawn: Option<Instant> = None;
        while !self.shared.is_over.load(Ordering::Acquire) && is_taken() {
            let size = terminal.size().ok();
            let is_stale = drawn.is_none_or(|drawn| drawn.elapsed() >= CLOCK);
            let is_resized = size.is_some_and(|size| size != terminal.get_frame().area().as_size());
            if self.shared.has_changed.swap(false, Ordering::AcqRel) || is_stale || is_resized {
                if self.draw(&mut terminal).is_err() {
                    return;
                }
                drawn = Some(Instant::now());
            }
            self.read_keys();
        }
    }

    fn draw(&self, terminal: &mut ratatui::Terminal<AnsiScreen>) -> std::io::Result<()> {
        let lines = {
            let lines = locked(&self.shared.lines);
            lines[lines.len().saturating_sub(MOST_LINES)..].to_vec()
        };
        // A copy, so that the run can change the figures during the write.
        let figures = self.shared.lock().clone();
        let passed = figures.started.elapsed().as_secs_f64();
        terminal.draw(|frame| draw::draw(frame, &figures, &lines, passed)).map(drop)
    }

    /// Handles keys until the next frame.
    fn read_keys(&mut self) {
        let until = Instant::now() + FRAME;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            let keys = self.screen.as_mut().map(|screen| screen.keys(left.max(Duration::from_millis(1))));
            let asks = keys.is_some_and(|keys| keys.iter().any(|key| b"qQ".contains(key)));
            if asks && !std::mem::replace(&mut self.shared.lock().is_stopping, true) {
                self.shared.has_changed.store(true, Ordering::Release);
                // SAFETY: a system call that takes numbers. The signal goes to the whole process
                // group, as that of Ctrl-C does: a parent that waits for this process gets it too.
                unsafe { libc::kill(0, libc::SIGINT) };
            }
        }
    }
}

impl Drop for DrawnView {
    fn drop(&mut self) {
        self.screen = None;
        self.terminal.close_view();
    }
}
