//! Prints for people while the binary works, and writes requested data.
//!
//! Everything for people goes to stderr: lines, warnings and one progress bar at a time. In a log
//! file or a pipe, the bar becomes about thirty plain lines. Requested data go to stdout alone, and
//! a reader may close that pipe early.
//!
//! If stderr is a terminal, one thread writes to it, and callers do not wait (see
//! `printer`). A log file or a pipe gets each line at once, whole and in order.
//!
//! All methods take `&self`, so that threads can share a [`Terminal`]. It honours `NO_COLOR`, and
//! colour never replaces words. It escapes control characters in text (see
//! [`printable`](mod@super::printable)), on stdout only for a terminal.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::figures::{eval_figures, step_figures};
use super::metrics::{EvalReport, HeldOutAnswer, StepReport};
use super::printable::printable;
use super::printer::{JobKind, PATIENCE, Printer};
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::units;

/// Most characters of a held-out question that an evaluation shows, from its end.
const SHOWN_PROMPT: usize = 120;
/// Approximate number of plain lines of a run without a terminal.
const PLAIN_LINES: u64 = 30;

/// The amount of output for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Warnings and nothing else.
    Quiet,
    /// Actions and progress.
    Normal,
    /// Also reasons and settings.
    Verbose,
}

/// The output for progress.
enum Screen {
    /// Bars and, if wanted, colours.
    Terminal { colour: bool },
    /// Plain lines, for a log.
    Log(Box<dyn Write + Send>),
}

/// The current work, shown as a bar or as plain lines.
enum CurrentWork {
    Steps { first: u64, total: u64, started: Instant },
    Download { file: String, bytes: u64, printed_quarters: u64 },
}

/// The lines that a full-screen view shows in place of the screen.
pub(super) type ViewLines = Arc<Mutex<Vec<String>>>;

struct TerminalState {
    screen: Screen,
    /// The receiver of lines while a view has the screen.
    view: Option<ViewLines>,
    /// The last step while a view or a bar shows the steps, as a line.
    last_step: Option<String>,
    work: Option<CurrentWork>,
    bar: Option<ProgressBar>,
}

/// The writer of lines.
#[derive(Clone)]
enum Voice {
    /// The thread that writes to stderr.
    Printer(&'static Printer<TerminalState>),
    /// The calling thread.
    Caller(Arc<Mutex<TerminalState>>),
}

/// The only output of the binary; a clone shares it, for another thread.
#[derive(Clone)]
pub struct Terminal {
    verbosity: Verbosity,
    voice: Voice,
    is_terminal: bool,
    reader_gone: Arc<AtomicBool>,
    /// Bytes of the download that have arrived.
    arrived: Arc<AtomicU64>,
}

/// Writes the last message of a command or of a panicking thread to stderr, after all earlier
/// output, with control characters escaped.
pub fn print_last(text: &dyn Display) {
    Terminal::stderr(Verbosity::Quiet).print_last(&text.to_string());
}

/// Waits until the terminal has accepted all output, or none for two seconds.
pub(super) fn flush_all() {
    if let Some(Some(printer)) = PRINTER.get() {
        printer.flush(PATIENCE);
    }
}

/// The thread that writes to the terminal; none if it could not start.
static PRINTER: OnceLock<Option<Printer<TerminalState>>> = OnceLock::new();

impl Terminal {
    /// Writes to stderr: with bars if it is a terminal, else in plain lines.
    pub fn stderr(verbosity: Verbosity) -> Self {
        if !io::stderr().is_terminal() {
            return Self::plain(verbosity, io::stderr());
        }
        let voice = match PRINTER
            .get_or_init(|| Printer::start(TerminalState::on_screen, TerminalState::report_dropped))
        {
            Some(printer) => Voice::Printer(printer),
            None => Voice::Caller(Arc::new(Mutex::new(TerminalState::on_screen()))),
        };
        Self::by(voice, verbosity, true)
    }

    /// Writes plain lines to `log` instead of stderr.
    pub fn plain(verbosity: Verbosity, log: impl Write + Send + 'static) -> Self {
        let state = TerminalState::on(Screen::Log(Box::new(log)));
        let voice = Voice::Caller(Arc::new(Mutex::new(state)));
        Self::by(voice, verbosity, false)
    }

    fn by(voice: Voice, verbosity: Verbosity, is_terminal: bool) -> Self {
        let (reader_gone, arrived) = (Arc::default(), Arc::default());
        Terminal { verbosity, voice, is_terminal, reader_gone, arrived }
    }

    /// Passes `job` to the writer; waits for it only if that is this thread.
    fn hand_over(&self, kind: JobKind, job: impl FnOnce(&mut TerminalState) + Send + 'static) {
        match &self.voice {
            Voice::Printer(printer) => printer.hand_over(kind, job),
            // A panic elsewhere must not silence the report of it.
            Voice::Caller(state) => job(&mut locked(state)),
        }
    }

    /// Waits until the terminal has accepted all output (true), or none for two seconds (false).
    pub(super) fn flush(&self) -> bool {
        match &self.voice {
            Voice::Printer(printer) => printer.flush(PATIENCE),
            Voice::Caller(_) => true,
        }
    }

    /// Returns the amount of output.
    pub fn verbosity(&self) -> Verbosity {
        self.verbosity
    }

    /// Returns whether a view can use the terminal.
    pub(super) fn is_screen(&self) -> bool {
        self.is_terminal && obeys_escapes()
    }

    /// Gives the screen to a view: lines go to the returned buffer, and the view shows the steps.
    pub(super) fn open_view(&self) -> ViewLines {
        let lines = ViewLines::default();
        let theirs = Arc::clone(&lines);
        self.hand_over(JobKind::Kept, |state| {
            state.end();
            state.view = Some(theirs);
        });
        lines
    }

    /// Ends the view: prints the lines of the meantime, and the last step.
    pub(super) fn close_view(&self) {
        self.hand_over(JobKind::Kept, TerminalState::close_view);
    }

    /// Prints a heading; bold in colour.
    pub fn heading(&self, text: impl AsRef<str>) {
        if self.verbosity >= Verbosity::Normal {
            let text = printable(text.as_ref()).into_owned();
            self.hand_over(JobKind::Line, move |state| {
                let text = state.paint("1", &text).into_owned();
                state.emit(&text);
            });
        }
    }

    /// Prints a line unless quiet.
    pub fn line(&self, text: impl AsRef<str>) {
        if self.verbosity >= Verbosity::Normal {
            self.emit(text.as_ref());
        }
    }

    /// Prints a line if verbose.
    pub fn detail(&self, text: impl AsRef<str>) {
        if self.verbosity >= Verbosity::Verbose {
            self.emit(text.as_ref());
        }
    }

    /// Prints a warning, even if quiet.
    pub fn warn(&self, text: impl AsRef<str>) {
        let text = printable(text.as_ref()).into_owned();
        self.hand_over(JobKind::Line, move |state| state.warn(&text));
    }

    fn emit(&self, text: &str) {
        let text = printable(text).into_owned();
        self.hand_over(JobKind::Line, move |state| state.emit(&text));
    }

    fn print_last(&self, text: &str) {
        let text = printable(text).into_owned();
        self.hand_over(JobKind::Kept, move |state| {
            state.close_view();
            state.end();
            let text = match text.strip_prefix("error:") {
                Some(rest) => format!("{}{rest}", state.paint("31;1", "error:")),
                None => text,
            };
            state.emit(&text);
        });
    }

    /// Writes the error that ends the process, even if quiet. Waits until it is written, at most
    /// until the terminal has accepted no output for two seconds.
    pub fn last_words(&self, error: &Error) {
        self.print_last(&error.to_string());
        self.flush();
    }

    /// Writes requested data to stdout at once, unchanged unless that is a terminal. Writes nothing
    /// once the reader has closed the pipe ([`Terminal::reader_gone`]).
    ///
    /// # Errors
    /// stdout refuses the data for another reason, such as a full disk.
    pub fn data(&self, text: impl AsRef<str>) -> Result<()> {
        self.marked_data(&[(text.as_ref(), false)])
    }

    /// Writes data like [`Terminal::data`], in pieces. Marked pieces get ⟦ and ⟧ around them, green
    /// in colour.
    ///
    /// # Errors
    /// Those of [`Terminal::data`].
    pub fn marked_data(&self, pieces: &[(impl AsRef<str>, bool)]) -> Result<()> {
        if self.reader_gone() {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        let is_terminal = stdout.is_terminal();
        // Both may be the same terminal.
        if is_terminal {
            self.hand_over(JobKind::Kept, TerminalState::clear_bar);
        }
        self.flush();
        let mark =
            if is_terminal && has_colours() { ["\u{1b}[32m⟦", "⟧\u{1b}[0m"] } else { ["⟦", "⟧"] };
        let mut text = String::new();
        for (piece, is_marked) in pieces {
            let piece = piece.as_ref();
            let piece = if is_terminal { printable(piece) } else { piece.into() };
            let [begin, end] = if *is_marked { mark } else { [""; 2] };
            text.extend([begin, &*piece, end]);
        }
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {
                self.reader_gone.store(true, Ordering::Release);
                Ok(())
            }
            Err(e) => {
                Err(Error::new(ErrorCategory::Storage, "cannot write to stdout").because(e.to_string()))
            }
            Ok(()) => Ok(()),
        }
    }

    /// Returns whether the reader of stdout has closed the pipe.
    pub fn reader_gone(&self) -> bool {
        self.reader_gone.load(Ordering::Acquire)
    }

    /// Begins training after `done` steps of `total` (above 0 for a resumed run).
    pub fn train_start(&self, done: u64, total: u64) {
        if self.verbosity == Verbosity::Quiet {
            return;
        }
        // Clearing a bar wider than the terminal leaves rows behind, so its message is cut.
        let template = "{bar:24} {pos}/{len}  {wide_msg}";
        let work = CurrentWork::Steps { first: done, total, started: Instant::now() };
        self.hand_over(JobKind::Kept, move |state| state.begin(work, total, done, template));
    }

    /// Shows a step: moves the bar, or prints a plain line for the first step, the last, and some
    /// in between.
    pub fn train_step(&self, report: &StepReport) {
        let (step, figures, now) = (report.step, step_figures(report), Instant::now());
        self.hand_over(JobKind::Progress, move |state| state.step(step, &figures, now));
    }

    /// Prints an evaluation: its figures, and answers to held-out rows if available.
    pub fn eval(&self, report: &EvalReport) {
        self.line(eval_figures(report));
        for HeldOutAnswer { prompt, expected, answer } in &report.eval_samples {
            let [prompt, expected] =
                [prompt, expected].map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
            // The end of a long prompt is the question.
            let from = prompt.char_indices().rev().nth(SHOWN_PROMPT).map_or(0, |(at, _)| at);
            let cut = if from > 0 { "…" } else { "" };
            self.line(format!(
                "  {cut}{}\n    expected: {expected}\n    answer:   {answer}",
                &prompt[from..]
            ));
        }
    }

    /// Ends training, whether or not it reached the last step.
    pub fn train_finish(&self) {
        self.hand_over(JobKind::Kept, |state| drop(state.end()));
    }

    /// Begins a download of `bytes` bytes.
    pub fn download_start(&self, file: &str, bytes: u64) {
        if self.verbosity == Verbosity::Quiet {
            return;
        }
        let template =
            "{wide_msg}  {bar:12} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {eta} left";
        let file = printable(file).into_owned();
        self.arrived.store(0, Ordering::Relaxed);
        self.hand_over(JobKind::Kept, move |state| {
            let work = CurrentWork::Download { file: file.clone(), bytes, printed_quarters: 0 };
            state.begin(work, bytes, 0, template);
            match &state.bar {
                Some(bar) => bar.set_message(file),
                None => state.emit(&format!("downloading {file} ({})", units::bytes(bytes))),
            }
        });
    }

    /// Adds `bytes` to the download, new or from an earlier attempt.
    pub fn download_advance(&self, bytes: u64) {
        let done = self.arrived.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.hand_over(JobKind::Progress, move |state| state.download(done));
    }

    /// Ends the download; prints a line if all of it has arrived.
    pub fn download_finish(&self) {
        let done = self.arrived.load(Ordering::Relaxed);
        self.hand_over(JobKind::Kept, move |state| {
            if let Some(CurrentWork::Download { file, bytes, .. }) = state.end()
                && done >= bytes
            {
                state.emit(&format!("downloaded {file} ({})", units::bytes(bytes)));
            }
        });
    }
}

impl TerminalState {
    fn on(screen: Screen) -> Self {
        TerminalState { screen, view: None, last_step: None, work: None, bar: None }
    }

    /// Creates the state for a terminal as stderr.
    fn on_screen() -> Self {
        Self::on(Screen::Terminal { colour: has_colours() })
    }

    fn warn(&mut self, text: &str) {
        let line = format!("{} {text}", self.paint("33", "warning:"));
        self.emit(&line);
    }

    fn report_dropped(&mut self, lines: u64) {
        self.warn(&format!("the terminal took no output: finetune dropped {}", units::exact(lines, "line")));
    }

    fn close_view(&mut self) {
        let Some(lines) = self.view.take() else { return };
        let mut lines = std::mem::take(&mut *locked(&lines));
        lines.extend(self.last_step.take());
        for line in lines {
            let line = match line.strip_prefix("warning:") {
                Some(rest) => format!("{}{rest}", self.paint("33", "warning:")),
                None => line,
            };
            self.emit(&line);
        }
    }

    /// Shows step `step`, which was done at `now`.
    fn step(&mut self, step: u64, figures: &str, now: Instant) {
        let Some(CurrentWork::Steps { first, total, started }) = &self.work else { return };
        let (first, total) = (*first, *total);
        let passed = now.saturating_duration_since(*started).as_secs_f64();
        let mean_secs = passed / step.saturating_sub(first).max(1) as f64;
        let left = units::duration(mean_secs * total.saturating_sub(step) as f64);
        let width = total.to_string().len();
        let line = format!("step {step:>width$}/{total}  {figures}  {left} left");
        if self.view.is_some() {
            self.last_step = Some(line);
        } else if let Some(bar) = self.bar.as_ref().filter(|_| step < total) {
            bar.set_position(step);
            bar.set_message(format!("{figures}  {left} left"));
            self.park();
            self.last_step = Some(line);
        } else if is_printed(step, first, total) {
            self.clear_bar();
            self.emit(&line);
        }
    }

    /// Shows that `done` bytes of the download have arrived.
    fn download(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            self.park();
        }
        let Some(CurrentWork::Download { file, bytes: total, printed_quarters }) = &mut self.work else {
            return;
        };
        let quarters = (done * 4).checked_div(*total).unwrap_or(4).min(4);
        // `download_finish` prints the last quarter.
        if quarters > *printed_quarters && quarters < 4 {
            *printed_quarters = quarters;
            let text = format!("{file}: {} of {}", units::bytes(done), units::bytes(*total));
            if self.bar.is_none() {
                self.emit(&text);
            }
        }
    }

    /// Writes a whole line, above any bar.
    fn emit(&mut self, text: &str) {
        if let Some(lines) = &self.view {
            locked(lines).push(text.to_owned());
            return;
        }
        // No output is left if stderr itself fails.
        match &mut self.screen {
            Screen::Log(log) => drop(writeln!(log, "{text}").and_then(|()| log.flush())),
            Screen::Terminal { .. } => {
                // A killed process may have left its bar in this row.
                let clear = if obeys_escapes() { "\x1b[K" } else { "" };
                let write = || drop(writeln!(io::stderr(), "{clear}{text}"));
                match &self.bar {
                    Some(bar) => bar.suspend(write),
                    None => write(),
                }
                self.park();
            }
        }
    }

    /// Returns `text` in the ANSI style `code` if colours are on.
    fn paint<'a>(&self, code: &str, text: &'a str) -> Cow<'a, str> {
        match self.screen {
            Screen::Terminal { colour: true } if self.view.is_none() => {
                format!("\x1b[{code}m{text}\x1b[0m").into()
            }
            _ => text.into(),
        }
    }

    fn begin(&mut self, work: CurrentWork, length: u64, position: u64, template: &str) {
        self.end();
        if matches!(self.screen, Screen::Terminal { .. }) && self.view.is_none() {
            let style =
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
            bar.set_style(style.progress_chars("=> "));
            bar.set_position(position);
            self.bar = Some(bar);
            self.park();
        }
        self.work = Some(work);
    }

    /// Moves the cursor to the first column of the bar. indicatif leaves it after the last one,
    /// where an echoed `^C` moves to the next row and spoils the clearing of the bar.
    fn park(&self) {
        if self.bar.is_some() {
            let mut stderr = io::stderr();
            drop(stderr.write_all(b"\r").and_then(|()| stderr.flush()));
        }
    }

    /// Removes the bar; further progress becomes plain lines.
    fn clear_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            self.last_step = None;
        }
    }

    /// Ends the current work: a line of the last step replaces the bar of an unfinished run.
    fn end(&mut self) -> Option<CurrentWork> {
        if self.bar.is_some() {
            let last = self.last_step.take();
            self.clear_bar();
            last.iter().for_each(|line| self.emit(line));
        }
        self.work.take()
    }
}

/// Returns whether the terminal obeys escape sequences.
fn obeys_escapes() -> bool {
    std::env::var_os("TERM").is_none_or(|t| t != "dumb")
}

/// Returns whether the environment allows colours (<https://no-color.org>: set and not empty).
fn has_colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()) && obeys_escapes()
}

/// Returns whether a run from `first` to `total` prints a plain line for `step`.
fn is_printed(step: u64, first: u64, total: u64) -> bool {
    step == first + 1 || step >= total || step.is_multiple_of(stride(total.saturating_sub(first)))
}

/// Returns the smallest of 1, 2, 5, 10, ... that makes at most [`PLAIN_LINES`] lines of `steps`.
fn stride(steps: u64) -> u64 {
    let mut decade = 1_u64;
    loop {
        for digit in [1, 2, 5] {
            let stride = decade.saturating_mul(digit);
            if steps / stride <= PLAIN_LINES {
                return stride;
            }
        }
        decade = decade.saturating_mul(10);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_any_length_writes_a_readable_number_of_lines() {
        for (total, least, most) in [(1, 1, 1), (20, 20, 20), (47, 20, 50), (1000, 20, 50), (123_456, 20, 50)]
        {
            let lines = (1..=total).filter(|&step| is_printed(step, 0, total)).count();
            assert!((least..=most).contains(&lines), "{lines} lines for {total} steps");
        }
        assert_eq!(stride(31), 2);
        assert_eq!(stride(1000), 50);
    }

    #[test]
    fn escapes_of_a_text_reach_no_terminal() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let terminal = Terminal::plain(Verbosity::Verbose, path.reopen().unwrap());
        let evil = "\x1b]52;c;aGk=\x07 \u{9b}31m";
        terminal.line(evil);
        terminal.detail(evil);
        terminal.heading(evil);
        terminal.warn(evil);
        terminal.download_start(evil, 4);
        terminal.download_advance(1);
        terminal.download_advance(3);
        terminal.download_finish();
        let output = std::fs::read_to_string(path.path()).unwrap();
        assert_eq!(output.lines().count(), 7, "{output}");
        assert!(output.chars().all(|c| c == '\n' || !c.is_control()), "{output:?}");
    }

    #[test]
    fn resumed_runs_tell_their_first_step() {
        assert!(is_printed(901, 900, 1000));
        assert!(!is_printed(902, 900, 1000));
        assert!(is_printed(905, 900, 1000));
    }
}
