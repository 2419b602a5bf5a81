//! Comparison of a run that is killed at a random instant and resumed with an uninterrupted run.
//! Both run as child processes of this program, and every byte of their folders is compared.
//!
//! The instant is drawn from the time in which the killed process trains, saves and writes its
//! result. A process that has not done a step yet would lose nothing.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

use super::run_comparison::RunComparison;
use crate::checkpoint::{RunFolder, RunRecord};
use crate::cli::VerifyResumeArgs;
use crate::error::{Error, Result};
use crate::launcher::child;
use crate::report::{MetricsEntry, Terminal, metrics};
use crate::training::output_folder::{CARD, METRICS, REPORT};
use crate::units;

/// Interval of polling a process.
const POLL: Duration = Duration::from_millis(1);
/// Largest number of tries for a run that ends before it is killed.
const ATTEMPTS: u32 = 5;
/// Number of last log lines to show of a failed process.
const REPEATED_LINES: usize = 12;
/// Largest number of differences in an error.
const NAMED: usize = 20;

/// Settings of a trial.
pub(crate) struct ResumeTrial<'a> {
    /// The command line.
    pub(crate) args: &'a VerifyResumeArgs,
    /// Recipe keys of both runs, as of `--set`.
    pub(crate) set: &'a [String],
    /// Terminal for progress.
    pub(crate) terminal: &'a Terminal,
}

/// Proof that both runs left the same bytes.
pub(crate) struct ResumeProof {
    steps: u64,
    kills: Vec<Kill>,
    files: usize,
    bytes: u64,
}

/// A kill of the second run.
#[derive(Clone, Copy)]
struct Kill {
    /// Last step in its log.
    step: u64,
    /// Time since its first step.
    after: Duration,
}

impl fmt::Display for ResumeProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |Kill { step, after }: &Kill| {
            format!("after step {step}, {:.3} s after its first", after.as_secs_f64())
        };
        let kills: Vec<String> = self.kills.iter().map(shown).collect();
        write!(
            f,
            "the same bytes: {} steps straight, and {} steps killed {} ({}) and resumed\ncompared: {}, {}; not compared: times in {METRICS}, and {CARD}, {REPORT} and TensorBoard's files, which hold times",
            self.steps,
            self.steps,
            if kills.len() == 1 { "once".to_owned() } else { format!("{} times", kills.len()) },
            kills.join("; "),
            units::exact(self.files, "file"),
            units::bytes(self.bytes),
        )
    }
}

impl ResumeTrial<'_> {
    /// Trains twice and compares the folders.
    ///
    /// # Errors
    /// A run fails, with the category of its failure; internal: the runs did not leave the same
    /// bytes.
    pub(crate) fn run(&self) -> Result<ResumeProof> {
        if !RunFolder::is_free(&self.args.output)? {
            return Err(Error::user(format!("cannot write to {}", self.args.output.display()))
                .because("the folder is not empty")
                .hint("give a new folder with `--output`"));
        }
        let made = !self.args.output.exists();
        std::fs::create_dir_all(&self.args.output).map_err(|e| Error::io("create", &self.args.output, &e))?;
        let straight = self.args.output.join("straight");
        let trained = self.straight(&straight)?;
        let (broken, kills) = self.broken(&straight, trained)?;
        let comparison = RunComparison::new(&straight, &broken)?;
        if !comparison.differences.is_empty() {
            return Err(self.differ(&comparison));
        }
        if !self.args.keep {
            let remove =
                |folder: &Path| std::fs::remove_dir_all(folder).map_err(|e| Error::io("remove", folder, &e));
            if made {
                remove(&self.args.output)?;
            } else {
                [&straight, &broken].into_iter().try_for_each(|folder| remove(folder))?;
                self.remove_logs();
            }
        }
        Ok(ResumeProof { steps: self.args.steps, kills, files: comparison.files, bytes: comparison.bytes })
    }

    /// Removes the logs of the runs. A log that cannot be removed is kept.
    fn remove_logs(&self) {
        for entry in std::fs::read_dir(&self.args.output).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let ours = ["straight.", "broken."].iter().any(|start| name.starts_with(start));
            if ours && name.ends_with(".log") {
                drop(std::fs::remove_file(entry.path()));
            }
        }
    }

    fn differ(&self, comparison: &RunComparison) -> Error {
        let error = Error::internal("a killed and resumed run did not leave the same bytes");
        let error = comparison.differences.iter().take(NAMED).cloned().fold(error, Error::because);
        let more = comparison.differences.len().saturating_sub(NAMED);
        let error = if more > 0 { error.because(format!("and {more} more files")) } else { error };
        error.hint(format!(
            "both runs are in {}; please report it with the recipe",
            self.args.output.display()
        ))
    }

    /// Trains uninterrupted; returns the time of training and writing the result.
    fn straight(&self, folder: &Path) -> Result<Duration> {
        let mut run = TrialProcess::start(&self.args.train_words(folder, self.set), folder, &[])?;
        let first = run.until_it_trains()?;
        run.until(|_| false)?;
        run.check("straight")?;
        let trained = first.map_or(Duration::ZERO, |first| first.elapsed());
        let took = units::duration(trained.as_secs_f64());
        self.terminal.line(format!("{} steps straight, {took} from the first to the end", self.args.steps));
        Ok(trained)
    }

    /// Trains with kills; returns the folder and the kills.
    fn broken(&self, straight: &Path, trained: Duration) -> Result<(PathBuf, Vec<Kill>)> {
        let folder = self.args.output.join("broken");
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                self.terminal
                    .line("the run ended before it could be killed: trying again with an earlier instant");
                std::fs::remove_dir_all(&folder).map_err(|e| Error::io("remove", &folder, &e))?;
            }
            self.copy_date(straight, &folder)?;
            let kills = self.kill_and_resume(&folder, trained / 2_u32.pow(attempt))?;
            if !kills.is_empty() {
                return Ok((folder, kills));
            }
        }
        Err(Error::user("cannot verify the resume")
            .because(format!("the run ended before it could be killed, {ATTEMPTS} times"))
            .hint("give more steps with `--steps`"))
    }

    /// Gives the chat templates of both runs the same date.
    fn copy_date(&self, straight: &Path, folder: &Path) -> Result<()> {
        // A run without a checkpoint yet starts again with the date in its record.
        let dated = RunRecord::read(straight)?.filter(|record| record.chat_template_date.is_some());
        dated.map_or(Ok(()), |record| record.begin_as(folder))
    }

    fn kill_and_resume(&self, folder: &Path, trained: Duration) -> Result<Vec<Kill>> {
        let mut kills: Vec<Kill> = Vec::new();
        let words = [self.args.train_words(folder, self.set), vec!["--resume".into()]].concat();
        loop {
            let mut run = TrialProcess::start(&words, folder, &kills)?;
            if kills.len() < self.args.kills as usize
                && let Some(first) = run.until_it_trains()?
            {
                let left = 1.0 - run.last_step() as f64 / self.args.steps as f64;
                let moment = first + trained.mul_f64(left.max(0.0) * share()?);
                run.until(|_| Instant::now() >= moment)?;
                if run.kill()? {
                    let kill = Kill { step: run.last_step(), after: first.elapsed() };
                    let after = kill.after.as_secs_f64();
                    self.terminal
                        .line(format!("killed after step {}, {after:.3} s after its first", kill.step));
                    kills.push(kill);
                    continue;
                }
            }
            run.until(|_| false)?;
            run.check("resumed")?;
            return Ok(kills);
        }
    }
}

/// Returns a random number from 0 to 1.
fn share() -> Result<f64> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::internal("cannot get random numbers").because(e.to_string()))?;
    Ok(f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX))
}

/// A run in a child process.
struct TrialProcess {
    child: Child,
    ended: Option<ExitStatus>,
    metrics: PathBuf,
    /// Size and time of metrics.jsonl at the start of the process.
    before: Option<(u64, SystemTime)>,
    log_path: PathBuf,
}

impl TrialProcess {
    /// Starts a run in `folder`, in which `killed` runs were killed before. Its messages go to a
    /// log beside the folder.
    fn start(words: &[OsString], folder: &Path, killed: &[Kill]) -> Result<Self> {
        let program = child::binary()?;
        let log_path = folder.with_extension(format!("{}.log", killed.len() + 1));
        let log = File::create(&log_path).map_err(|e| Error::io("write", &log_path, &e))?;
        let metrics = folder.join(METRICS);
        let before = look(&metrics);
        let mut command = Command::new(&program);
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        child::ends_with_parent(&mut command);
        let child = command.spawn().map_err(|e| Error::cannot_start(program.display(), &e))?;
        Ok(TrialProcess { child, ended: None, metrics, before, log_path })
    }

    fn is_over(&mut self) -> Result<bool> {
        if self.ended.is_none() {
            let ended = self.child.try_wait();
            self.ended =
                ended.map_err(|e| Error::internal("cannot wait for a run").because(e.to_string()))?;
        }
        Ok(self.ended.is_some())
    }

    /// Waits for the first step and returns its moment; none if the process ends before.
    fn until_it_trains(&mut self) -> Result<Option<Instant>> {
        // A resumed run, once loaded, removes the log lines of steps that it will repeat.
        let trains = self.until(|run| look(&run.metrics) != run.before && run.last_step() > 0)?;
        Ok(trains.then(Instant::now))
    }

    /// Waits until the process is as `wanted`; returns false if it ends before.
    fn until(&mut self, wanted: impl Fn(&Self) -> bool) -> Result<bool> {
        while !self.is_over()? {
            if wanted(self) {
                return Ok(true);
            }
            std::thread::sleep(POLL);
        }
        Ok(false)
    }

    /// Kills the process like a power cut; returns false if it had already ended.
    fn kill(&mut self) -> Result<bool> {
        if self.is_over()? {
            return Ok(false);
        }
        let killed = self.child.kill().and_then(|()| self.child.wait());
        let ended = killed.map_err(|e| Error::internal("cannot kill a run").because(e.to_string()))?;
        self.ended = Some(ended);
        Ok(ended.code().is_none())
    }

    /// Returns the last step in its metrics.jsonl.
    fn last_step(&self) -> u64 {
        let entries = metrics::read(&self.metrics).unwrap_or_default();
        entries.last().map_or(0, MetricsEntry::step)
    }

    /// Returns an error unless the process succeeded.
    fn check(&self, which: &str) -> Result<()> {
        if self.ended.is_some_and(|ended| ended.success()) {
            return Ok(());
        }
        let Some(ended) = self.ended else { return Err(Error::internal("a run has not ended")) };
        let end =
            ended.code().map_or_else(|| "by a signal".to_owned(), |code| format!("with exit code {code}"));
        let error =
            Error::new(child::category(ended), format!("the {which} run ended {end}: nothing is verified"));
        let text = std::fs::read_to_string(&self.log_path).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines.iter().skip(lines.len().saturating_sub(REPEATED_LINES));
        let error = last.fold(error, |error, line| error.because(line.trim()));
        Err(error.hint(format!("its whole output is in {}", self.log_path.display())))
    }
}

impl Drop for TrialProcess {
    fn drop(&mut self) {
        // After an error in this process the child would continue in vain.
        if self.ended.is_none() {
            drop(self.child.kill().and_then(|()| self.child.wait()));
        }
    }
}

/// Returns size and modification time of a file.
fn look(path: &Path) -> Option<(u64, SystemTime)> {
    let data = path.metadata().ok()?;
    Some((data.len(), data.modified().ok()?))
}
