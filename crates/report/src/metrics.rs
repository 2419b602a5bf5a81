//! `metrics.jsonl`: one JSON object a line for each optimizer step and each evaluation. A step that
//! diverged and was skipped has a line with the reason.
//!
//! The names of the fields are a contract (DESIGN, files a run leaves). The log passes every line
//! to the system at once, so a killed run keeps its record. Numbers have as many digits as an exact
//! round trip needs. JSON has no form for NaN and infinity: the line omits such a figure, as the
//! speed of a step that took no time by the clock. A loss or a gradient norm is always finite here,
//! because a step without one diverged.
//!
//! A resumed run continues its own file: it drops entries after the resumed step, which it is about
//! to repeat, and a truncated last line. A log never stops a run: if a file has unreadable lines,
//! as after a power cut, the log copies the others to a new file and keeps the original beside it.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorCategory, Result};

/// The figures of one optimizer step, after the update.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepReport {
    /// The step, counted from 1.
    pub step: u64,
    /// Epochs done so far, a fraction inside an epoch.
    #[serde(default = "absent", skip_serializing_if = "is_absent")]
    pub epoch: f64,
    /// Mean loss of the step: cross-entropy, in nats, over its trained labels, or the mean of
    /// another objective.
    pub loss: f64,
    /// The learning rate used in this update.
    #[serde(default = "absent", skip_serializing_if = "is_absent")]
    pub learning_rate: f64,
    /// L2 norm of all gradients before clipping.
    pub grad_norm: f64,
    /// Tokens that went through the model in this step, padding not counted.
    pub tokens: u64,
    /// Wall time of the step, in seconds.
    #[serde(default = "absent", skip_serializing_if = "is_absent")]
    pub step_secs: f64,
    /// `tokens` over `step_secs`.
    #[serde(default = "absent", skip_serializing_if = "is_absent")]
    pub tokens_per_sec: f64,
    /// Most memory the run has held so far, in bytes: of the device, or of the process on a CPU.
    pub peak_bytes: u64,
    /// Seconds that rank 0 spent on getting the rows of this step.
    #[serde(default, skip_serializing_if = "is_absent")]
    pub data_secs: f64,
    /// Seconds of the forward pass on rank 0, the loss and the head's gradient included.
    #[serde(default, skip_serializing_if = "is_absent")]
    pub forward_secs: f64,
    /// Seconds of the backward pass on rank 0, recomputed forwards included.
    #[serde(default, skip_serializing_if = "is_absent")]
    pub backward_secs: f64,
    /// Seconds of rank 0 inside collectives in these parts and the update: communication not hidden
    /// by computing.
    #[serde(default, skip_serializing_if = "is_absent")]
    pub exposed_secs: f64,
    /// Seconds of rank 0 for clearing and clipping gradients, the optimizer, and all-gathering
    /// updated parameters.
    #[serde(default, skip_serializing_if = "is_absent")]
    pub update_secs: f64,
    /// Seconds that training waited for checkpoints since the step before.
    #[serde(default, skip_serializing_if = "is_absent")]
    pub save_secs: f64,
    /// All other seconds since the step before, but for evaluation.
    #[serde(default, skip_serializing_if = "is_absent")]
    pub other_secs: f64,
    /// Seconds that each rank computed in this step, without its waits for others; empty for a
    /// single rank.
    #[serde(default, skip_serializing_if = "are_absent")]
    pub rank_secs: Vec<f64>,
    /// Model FLOP utilisation, 0 to 1: the operations of the model over those of the devices at
    /// their peak in the time of the step; none if the peak is not known.
    #[serde(default, skip_serializing_if = "is_none_or_absent")]
    pub mfu: Option<f64>,
    /// The same including recomputed operations.
    #[serde(default, skip_serializing_if = "is_none_or_absent")]
    pub hfu: Option<f64>,
    /// Mean metrics of the objective by name, and of experts; cross-entropy without experts has
    /// none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub objective: BTreeMap<String, f64>,
    /// The load of each expert relative to the mean, over all layers of the step: 1 is balanced;
    /// empty for a model without experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_load: Vec<f64>,
}

/// The value of a figure that its line omits.
fn absent() -> f64 {
    f64::NAN
}

fn is_absent(figure: &f64) -> bool {
    !figure.is_finite()
}

fn are_absent(figures: &[f64]) -> bool {
    figures.is_empty() || figures.iter().any(is_absent)
}

fn is_none_or_absent(figure: &Option<f64>) -> bool {
    figure.is_none_or(|figure| is_absent(&figure))
}

impl StepReport {
    /// Returns tokens per second; none for a step that took no time by the clock.
    pub fn speed(&self) -> Option<f64> {
        Some(self.tokens_per_sec).filter(|speed| speed.is_finite())
    }

    /// Returns the seconds of all parts together: the time since the step before, without
    /// evaluation.
    pub fn all_parts(&self) -> f64 {
        let computing = self.forward_secs + self.backward_secs + self.update_secs;
        self.data_secs + computing + self.exposed_secs + self.save_secs + self.other_secs
    }

    /// Returns the report without figures that depend on a clock or the system: equal in two
    /// identical runs.
    #[must_use]
    pub fn without_times(self) -> Self {
        StepReport {
            step: self.step,
            epoch: self.epoch,
            loss: self.loss,
            learning_rate: self.learning_rate,
            grad_norm: self.grad_norm,
            tokens: self.tokens,
            ..StepReport::default()
        }
    }
}

/// The figures of one evaluation on held-out rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalReport {
    /// Optimizer steps done before the evaluation; 0 is the model before training.
    pub step: u64,
    /// Mean cross-entropy, in nats, over the trained labels, or the mean of another objective.
    pub eval_loss: f64,
    /// Perplexity of the held-out rows: `exp(eval_loss)`; absent for an objective with metrics of
    /// its own.
    #[serde(default = "absent", skip_serializing_if = "is_absent")]
    pub eval_perplexity: f64,
    /// Number of trained labels.
    pub eval_tokens: u64,
    /// Share of these labels that the model ranked first, 0 to 1.
    #[serde(default, skip_serializing_if = "is_none_or_absent")]
    pub eval_token_accuracy: Option<f64>,
    /// Share of rows whose greedy answer equals the expected one, 0 to 1.
    #[serde(default, skip_serializing_if = "is_none_or_absent")]
    pub eval_exact_match: Option<f64>,
    /// Mean metrics of the objective by name; cross-entropy has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub eval_objective: BTreeMap<String, f64>,
    /// The model's answers to held-out rows, if the recipe sets `eval.samples`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eval_samples: Vec<HeldOutAnswer>,
}

/// The answer of a model to a held-out row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldOutAnswer {
    /// The text before the row's first trained token.
    pub prompt: String,
    /// The answer of the row itself.
    pub expected: String,
    /// The model's answer: always the likeliest token.
    pub answer: String,
}

impl EvalReport {
    /// Creates a report of the mean loss `eval_loss` (nats) over `eval_tokens` labels. The
    /// perplexity of a loss past 709, which no `f64` holds, is the largest `f64`.
    pub fn new(step: u64, eval_loss: f64, eval_tokens: u64) -> Self {
        EvalReport {
            step,
            eval_loss,
            eval_perplexity: eval_loss.exp().min(f64::MAX),
            eval_tokens,
            eval_token_accuracy: None,
            eval_exact_match: None,
            eval_objective: BTreeMap::new(),
            eval_samples: Vec::new(),
        }
    }
}

/// An optimizer step that diverged, and so updated nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SkippedStep {
    /// The skipped step, counted from 1.
    pub step: u64,
    /// The values that were NaN or infinite.
    pub skipped: String,
    /// The step of the checkpoint that the run went back to, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_to: Option<u64>,
}

/// One line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MetricsEntry {
    /// An optimizer step.
    Step(StepReport),
    /// An evaluation on held-out rows.
    Eval(EvalReport),
    /// An optimizer step that updated nothing.
    Skipped(SkippedStep),
}

impl From<StepReport> for MetricsEntry {
    fn from(report: StepReport) -> Self {
        MetricsEntry::Step(report)
    }
}

impl From<EvalReport> for MetricsEntry {
    fn from(report: EvalReport) -> Self {
        MetricsEntry::Eval(report)
    }
}

impl From<SkippedStep> for MetricsEntry {
    fn from(step: SkippedStep) -> Self {
        MetricsEntry::Skipped(step)
    }
}

impl MetricsEntry {
    /// Returns the optimizer step of the entry.
    pub fn step(&self) -> u64 {
        match self {
            MetricsEntry::Step(report) => report.step,
            MetricsEntry::Eval(report) => report.step,
            MetricsEntry::Skipped(skipped) => skipped.step,
        }
    }

    /// Returns the first required number that is not finite, with its field.
    fn non_finite(&self) -> Option<(&'static str, f64)> {
        let fields = match self {
            MetricsEntry::Step(r) => vec![("loss", r.loss), ("grad_norm", r.grad_norm)],
            MetricsEntry::Eval(r) => vec![("eval_loss", r.eval_loss)],
            MetricsEntry::Skipped(_) => Vec::new(),
        };
        fields.into_iter().find(|(_, value)| !value.is_finite())
    }
}

/// The open `metrics.jsonl` of a run.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    note: Option<String>,
}

impl MetricsLog {
    /// Creates an empty log at `path`, in place of an older file.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(|e| Error::io("write", path, &e))?;
        Ok(MetricsLog { path: path.to_owned(), file, note: None })
    }

    /// Returns the reason for which an older log was kept aside, and its new name.
    pub fn moved_aside(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Continues the log at `path` after optimizer step `step`: drops later entries and a truncated
    /// last line, and keeps the rest as it is. Creates an empty log if the file does not exist.
    /// Moves an unreadable file aside ([`MetricsLog::moved_aside`]).
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn resume(path: &Path, step: u64) -> Result<Self> {
        let metadata = match path.metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Self::create(path),
            // Opening a pipe would wait.
            Ok(metadata) if !metadata.is_file() => Err("it is not a regular file".to_owned()),
            _ => fs::read(path).map_err(|error| error.to_string()),
        };
        let text = match metadata {
            Ok(text) => text,
            Err(why) => {
                let aside = set_aside(path)?;
                let note =
                    format!("cannot continue {}: {why}; the old file is kept as {aside}", path.display());
                return Ok(MetricsLog { note: Some(note), ..Self::create(path)? });
            }
        };
        let (entries, bad) = parse(&text);
        let mut remaining = Vec::new();
        for (line, _) in entries.iter().filter(|(_, entry)| entry.step() <= step) {
            remaining.extend_from_slice(line);
            remaining.push(b'\n');
        }
        let mut note = None;
        if remaining != text {
            // Into another file first: a crash in between must not cost the record.
            let beside = path.with_extension(format!("jsonl.tmp-{}", std::process::id()));
            let write = |file: &mut File| file.write_all(&remaining).and_then(|()| file.sync_all());
            let written = File::create(&beside).and_then(|mut file| write(&mut file));
            written.map_err(|e| Error::io("write", &beside, &e))?;
            if let Some(first) = bad.first() {
                let (count, aside) = (bad.len(), set_aside(path)?);
                note = Some(format!(
                    "{}:{first} is neither a step nor an evaluation: dropped {count} such lines; the original file is kept as {aside}",
                    path.display()
                ));
            }
            fs::rename(&beside, path).map_err(|e| Error::io("write", path, &e))?;
        }
        let file = OpenOptions::new().append(true).open(path).map_err(|e| Error::io("write", path, &e))?;
        Ok(MetricsLog { path: path.to_owned(), file, note })
    }

    /// Appends `entry`.
    ///
    /// # Errors
    /// The line cannot be written, or its loss or gradient norm is not finite.
    pub fn append(&mut self, entry: &MetricsEntry) -> Result<()> {
        if let Some((field, value)) = entry.non_finite() {
            return Err(Error::internal(format!(
                "cannot log step {} to {}",
                entry.step(),
                self.path.display()
            ))
            .because(format!("`{field}` is {value}, and JSON holds finite numbers only")));
        }
        let mut line = serde_json::to_string(entry).map_err(|e| {
            Error::internal(format!("cannot write step {} as JSON", entry.step())).because(e.to_string())
        })?;
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|e| Error::io("write", &self.path, &e))
    }
}

/// Returns all entries of the log at `path`, in file order. Skips lines that are not entries, such
/// as a truncated last one.
///
/// # Errors
/// The file cannot be read.
pub fn read(path: &Path) -> Result<Vec<MetricsEntry>> {
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err(
            Error::user(format!("cannot read {}", path.display())).because("it is not a regular file")
        );
    }
    let text = fs::read(path).map_err(|e| Error::io("read", path, &e))?;
    Ok(parse(&text).0.into_iter().map(|(_, entry)| entry).collect())
}

/// Returns the lines of `text` with their entries, and the numbers of the other lines. A line
/// without its line end was truncated, and is in neither.
fn parse(text: &[u8]) -> (Vec<(&[u8], MetricsEntry)>, Vec<usize>) {
    let (mut entries, mut bad) = (Vec::new(), Vec::new());
    for (index, line) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let Some(line) = line.strip_suffix(b"\n") else { break };
        match serde_json::from_slice(line) {
            Ok(entry) => entries.push((line, entry)),
            Err(_) => bad.push(index + 1),
        }
    }
    (entries, bad)
}

/// Moves the file at `path` to a free name beside it; returns that name.
fn set_aside(path: &Path) -> Result<String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut free = (1_u32..).map(|n| format!("{name}.aside-{n}"));
    let aside = free.find(|aside| path.with_file_name(aside).symlink_metadata().is_err());
    let aside = aside.ok_or_else(|| {
        Error::new(ErrorCategory::Storage, format!("cannot move {}", path.display()))
            .because("no name is free")
    })?;
    fs::rename(path, path.with_file_name(&aside)).map_err(|e| Error::io("move", path, &e))?;
    Ok(aside)
}
