//! Comparison of runs: a table, the same as JSON, and an HTML page with the curves of all runs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::compared_run::ComparedRun;
use crate::error::{Error, Result};
use crate::report::EvalReport;
use crate::report::html::{ComparisonPage, RunCurves};
use crate::units;
use crate::weights::OutputKind;

/// Recipe sections that change no figure in the table.
const HARMLESS: [&str; 4] = ["log", "profile", "alerts", "checkpoint"];
/// Keys of other sections that change no figure either.
const HARMLESS_KEYS: [&str; 2] = ["parallel.offload_folder", "parallel.timeout_secs"];
/// Key of a harmless section that changes the result of a run.
const OUTPUT_DTYPE: &str = "checkpoint.output_dtype";
/// Keys that decide the held-out rows; the last two only if `data.eval_split` draws them.
const HELD_OUT: [&str; 4] = ["data.eval", "data.eval_split", "data.train", "train.seed"];
/// Largest number of characters of a recipe's value in a table.
const VALUE_CHARS: usize = 40;
/// Cell of a missing figure.
const NONE: &str = "–";
/// Mark behind the lowest held-out loss.
const MARK: &str = " *";

/// Output file of `--html`.
const PAGE: OutputKind = OutputKind {
    what: "a page of `finetune compare`",
    option: "--html",
    example: "runs.html",
    replaces: Some(ComparisonPage::BEGINNING),
};

/// Runs and the recipe keys that differ between them.
pub(crate) struct ComparisonTable {
    runs: Vec<ComparedRun>,
    /// Differing keys as `section.key`, or `[section]` if a run has no such table.
    keys: Vec<String>,
}

impl ComparisonTable {
    /// Reads the runs in `folders`.
    ///
    /// # Errors
    /// The user's: a folder belongs to no run, or is listed twice. Storage: a file cannot be read.
    pub(crate) fn read(folders: &[PathBuf]) -> Result<Self> {
        let mut runs = folders.iter().map(|folder| ComparedRun::read(folder)).collect::<Result<Vec<_>>>()?;
        let mut seen = BTreeSet::new();
        for folder in folders {
            let real = folder.canonicalize().map_err(|e| Error::io("read", folder, &e))?;
            if !seen.insert(real) {
                return Err(Error::user(format!("cannot compare {} with itself", folder.display()))
                    .because("the command names the folder twice; accepted: different output folders")
                    .hint("name each run once"));
            }
        }
        let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
        for run in &mut runs {
            if names.iter().filter(|name| **name == run.name).count() > 1 {
                run.name = run.folder.display().to_string();
            }
        }
        let keys = differing_keys(&runs);
        Ok(ComparisonTable { runs, keys })
    }

    /// Reads those of `folders` in which a run has begun; returns none if no run has.
    ///
    /// # Errors
    /// Those of [`ComparisonTable::read`].
    pub(crate) fn of_begun(folders: &[PathBuf]) -> Result<Option<Self>> {
        let begun: Vec<PathBuf> =
            folders.iter().filter(|folder| ComparedRun::read(folder).is_ok()).cloned().collect();
        (!begun.is_empty()).then(|| Self::read(&begun)).transpose()
    }

    /// Returns a warning if the held-out losses of the runs are not comparable.
    pub(crate) fn warnings(&self) -> Option<String> {
        let evaluated: Vec<&ComparedRun> = self.runs.iter().filter(|run| run.last().is_some()).collect();
        let first = *evaluated.first()?;
        let is_drawn = evaluated.iter().any(|run| run.recipe.contains_key(HELD_OUT[1]));
        let deciding = if is_drawn { &HELD_OUT[..] } else { &HELD_OUT[..2] };
        let differs =
            |key: &&&str| evaluated.iter().any(|run| run.recipe.get(**key) != first.recipe.get(**key));
        let differing: Vec<&str> = deciding.iter().filter(differs).copied().collect();
        if !differing.is_empty() {
            let keys = differing.join(", ");
            return Some(format!("the held-out losses are not of the same rows: the runs differ in {keys}"));
        }
        let tokens = |run: &ComparedRun| run.last().map(|report| report.eval_tokens);
        let counts: BTreeSet<Option<u64>> = evaluated.iter().map(|run| tokens(run)).collect();
        (counts.len() > 1).then(|| {
            let counts: Vec<String> = counts.into_iter().flatten().map(|count| count.to_string()).collect();
            format!("the held-out losses are of different numbers of tokens: {}", counts.join(", "))
        })
    }

    /// Returns the index of the run with the lowest held-out loss after its first step; the first
    /// of equal ones.
    fn best(&self) -> Option<usize> {
        let losses = self.runs.iter().enumerate();
        let losses = losses.filter_map(|(index, run)| Some((index, run.best()?.eval_loss)));
        losses.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(index, _)| index)
    }

    /// Returns sentences that name the complete run with the best weights, its folder and the loss
    /// that decides; none if no run is complete.
    pub(crate) fn verdict(&self) -> Vec<String> {
        let complete = || self.runs.iter().filter(|run| run.is_complete);
        let evaluated = complete().filter_map(|run| Some((run, run.result_eval()?)));
        if let Some((run, eval)) =
            evaluated.min_by(|one, other| one.1.eval_loss.total_cmp(&other.1.eval_loss))
        {
            let (step, loss) = (eval.step, eval.eval_loss);
            let line = format!("best by held-out loss: {} ({loss:.4} at step {step})", run.folder.display());
            let lost = complete().filter_map(|run| Some((run, run.best()?)));
            let lost = lost.min_by(|one, other| one.1.eval_loss.total_cmp(&other.1.eval_loss));
            let lost = lost.filter(|(_, best)| best.eval_loss < loss).map(|(run, best)| {
                format!(
                    "{} had {:.4} at step {}, but its weights are those of its last step; \
                     `--set eval.keep_best=true` keeps the best",
                    run.folder.display(),
                    best.eval_loss,
                    best.step
                )
            });
            return std::iter::once(line).chain(lost).collect();
        }
        let losses = complete().filter_map(|run| Some((run, run.training_loss()?)));
        let best = losses.min_by(|one, other| one.1.total_cmp(&other.1));
        let line = |(run, loss): (&ComparedRun, f64)| {
            format!(
                "best by training loss, because no run has a held-out loss: {} ({loss:.4} at step {})",
                run.folder.display(),
                run.steps_done()
            )
        };
        best.map(line).into_iter().collect()
    }

    /// Formats the table for a terminal: the names of the columns, a line for each run, and the
    /// meaning of the mark.
    pub(crate) fn text(&self) -> String {
        let mut rows = self.rows();
        for column in 0..rows[0].len() {
            // The mark is behind its column, so that digits stay aligned.
            if rows.iter().any(|row| row[column].ends_with(MARK)) {
                let unmarked =
                    rows.iter_mut().map(|row| &mut row[column]).filter(|cell| !cell.ends_with(MARK));
                unmarked.for_each(|cell| *cell += &" ".repeat(MARK.len()));
            }
        }
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
        let mut text = String::new();
        for row in &rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                line += &if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
            }
            text += line.trim_end();
            text.push('\n');
        }
        self.notes().iter().for_each(|note| text += &format!("{note}\n"));
        text
    }

    /// Returns the names of the columns, then a row of cells for each run.
    fn rows(&self) -> Vec<Vec<String>> {
        let has = |figure: fn(&ComparedRun) -> bool| self.runs.iter().any(figure);
        let (is_evaluated, has_match) =
            (has(|run| run.before().or(run.last()).is_some()), has(|run| run.exact_match().is_some()));
        let held_out = ["held-out before", "held-out best", "held-out last"];
        let text = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let mut head = vec!["run".to_owned()];
        head.extend(self.keys.iter().cloned());
        head.extend(text(&["steps", "training loss"]));
        head.extend(text(&held_out).into_iter().filter(|_| is_evaluated));
        head.extend(has_match.then(|| "exact match".to_owned()));
        head.extend(text(&["time", "peak memory", "complete"]));
        let best = self.best();
        let row = |(index, run): (usize, &ComparedRun)| {
            let mut row = vec![run.name.clone()];
            row.extend(self.keys.iter().map(|key| shown(value_of(run, key).as_deref())));
            row.push(run.steps_done().to_string());
            row.push(run.training_loss().map_or_else(|| NONE.to_owned(), loss));
            if is_evaluated {
                let cell = |report: Option<&EvalReport>| {
                    report.map_or_else(|| NONE.to_owned(), |report| loss(report.eval_loss))
                };
                let at = run.best().map(|report| format!(" at step {}", report.step)).unwrap_or_default();
                let mark = if best == Some(index) { MARK } else { "" };
                row.extend([cell(run.before()), cell(run.best()) + &at + mark, cell(run.last())]);
            }
            let share =
                run.exact_match().map_or_else(|| NONE.to_owned(), |part| format!("{:.1} %", 100.0 * part));
            row.extend(has_match.then_some(share));
            row.push(units::duration(run.secs()));
            row.push(units::bytes(run.peak_bytes()));
            row.push(if run.is_complete { "yes" } else { "no" }.to_owned());
            row
        };
        std::iter::once(head).chain(self.runs.iter().enumerate().map(row)).collect()
    }

    /// Returns the sentences below the table.
    fn notes(&self) -> Vec<String> {
        let mark = self.best().map(|_| "* the lowest held-out loss after the first step".to_owned());
        let none =
            || "no run has a held-out loss: `--eval-dataset` or `data.eval_split` holds rows out".to_owned();
        vec![mark.unwrap_or_else(none)]
    }

    /// Returns the table as JSON: figures in nats, seconds and bytes.
    pub(crate) fn json(&self) -> Value {
        let best = self.best();
        let run = |(index, run): (usize, &ComparedRun)| {
            let recipe =
                self.keys.iter().map(|key| (key.clone(), value_of(run, key).map_or(Value::Null, as_json)));
            let loss = |report: Option<&EvalReport>| report.map(|report| report.eval_loss);
            json!({
                "name": run.name,
                "folder": run.folder,
                "recipe": recipe.collect::<serde_json::Map<_, _>>(),
                "steps": run.steps_done(),
                "training_loss": run.training_loss(),
                "held_out_loss_before": loss(run.before()),
                "held_out_loss_best": loss(run.best()),
                "held_out_loss_best_step": run.best().map(|report| report.step),
                "held_out_loss_last": loss(run.last()),
                "exact_match": run.exact_match(),
                "secs": run.secs(),
                "peak_bytes": run.peak_bytes(),
                "complete": run.is_complete,
                "best": best == Some(index),
            })
        };
        let runs: Vec<Value> = self.runs.iter().enumerate().map(run).collect();
        json!({ "runs": runs, "warnings": self.warnings().into_iter().collect::<Vec<_>>() })
    }

    /// Writes the HTML page to `path`.
    ///
    /// # Errors
    /// The user's: a file at `path` is no such page. Storage: the file cannot be written.
    pub(crate) fn write_page(&self, path: &Path) -> Result<()> {
        let rows = self.rows();
        let curves = self.runs.iter().map(|run| RunCurves { name: &run.name, entries: &run.entries });
        let page = ComparisonPage {
            warnings: self.warnings().into_iter().collect(),
            notes: self.notes(),
            head: &rows[0],
            rows: &rows[1..],
            runs: curves.collect(),
        };
        PAGE.write(path, &page.render())
    }
}

/// Returns the keys with different values between runs. If some runs have no table `[section]`,
/// that name is listed, and its keys are compared only among the runs that have it.
fn differing_keys(runs: &[ComparedRun]) -> Vec<String> {
    // A run without a recipe yet is not compared.
    let runs: Vec<&ComparedRun> = runs.iter().filter(|run| !run.recipe.is_empty()).collect();
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.recipe.keys()).collect();
    let mut differing: Vec<String> = Vec::new();
    for key in keys {
        let section = key.split_once('.').map_or(key.as_str(), |(section, _)| section);
        let is_harmless = HARMLESS.contains(&section) && key != OUTPUT_DTYPE;
        if is_harmless || HARMLESS_KEYS.contains(&key.as_str()) {
            continue;
        }
        let (having, lacking): (Vec<&ComparedRun>, Vec<_>) =
            runs.iter().copied().partition(|run| run.has_section(section));
        let table = format!("[{section}]");
        if !lacking.is_empty() && !differing.contains(&table) {
            differing.push(table);
        }
        let values: BTreeSet<Option<&String>> = having.iter().map(|run| run.recipe.get(key)).collect();
        if values.len() > 1 {
            differing.push(key.clone());
        }
    }
    differing
}

/// Returns the value of `key` in the recipe of `run` as TOML. For `[section]` it returns whether
/// the table exists.
fn value_of(run: &ComparedRun, key: &str) -> Option<String> {
    match key.strip_prefix('[').and_then(|key| key.strip_suffix(']')) {
        Some(section) if run.recipe.is_empty() || section.is_empty() => None,
        Some(section) => Some(run.has_section(section).to_string()),
        None => run.recipe.get(key).cloned(),
    }
}

/// Formats a value for the table: strings without quotes, long values by their end.
fn shown(value: Option<&str>) -> String {
    let Some(value) = value else { return NONE.to_owned() };
    let text = match parsed(value) {
        Some(toml::Value::String(text)) if !text.contains(char::is_control) => text,
        _ => value.to_owned(),
    };
    let skipped = text.chars().count().saturating_sub(VALUE_CHARS);
    if skipped == 0 { text } else { format!("…{}", text.chars().skip(skipped + 1).collect::<String>()) }
}

fn parsed(value: &str) -> Option<toml::Value> {
    format!("v = {value}").parse::<toml::Table>().ok()?.remove("v")
}

fn as_json(value: String) -> Value {
    parsed(&value).and_then(|value| serde_json::to_value(value).ok()).unwrap_or(Value::String(value))
}

fn loss(value: f64) -> String {
    format!("{value:.4}")
}
