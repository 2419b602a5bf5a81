//! `report.html`: a run at a glance, in one file that needs no network.
//!
//! The order is that of a reader's questions: model, data and results, answers before and after,
//! rows with their masks; then curves, time of a step, data, memory by plan and by measurement, the
//! recipe. The page runs no script and refers to nothing outside itself; its colours follow the
//! reader's light or dark setting. The caller gives plain figures and texts, and the page shows all
//! of them as text, never as HTML.
//!
//! - `curves`: sections made of metrics.jsonl. `sections`: inputs and plan of the run.
//! - `comparison`: a separate page with the curves of several runs.
//! - `chart`: SVG. `markup`: text, numbers and tables. `style`: colours and layout. `policy`: the
//!   content security policy.

mod chart;
mod comparison;
mod curves;
mod markup;
mod policy;
mod sections;
mod style;

use std::fs;
use std::path::Path;

pub use self::comparison::{ComparisonPage, RunCurves};
use self::curves::Curves;
use self::markup::escape;
pub use self::policy::content_policy;
use self::style::STYLE;
use super::memory::MemoryComparison;
use super::metrics::MetricsEntry;
use crate::error::{Error, Result};

/// The first characters of a run's report.
const BEGINNING: &str = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">";

/// A held-out question with its answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnsweredQuestion {
    /// The text of the question.
    pub question: String,
    /// The answer that the data set gives.
    pub expected: String,
    /// The model's answer before training, if available.
    pub before: Option<String>,
    /// The model's answer after training, if available.
    pub after: Option<String>,
}

/// A training row as the model sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskedRow {
    /// The source of the row, such as file and line.
    pub origin: String,
    /// Its text in order; true marks pieces that are trained.
    pub pieces: Vec<(String, bool)>,
    /// Tokens of the whole row.
    pub tokens: usize,
    /// Trained tokens of the row.
    pub trained_tokens: usize,
    /// Tokens before `pieces` that the report omits.
    pub omitted_before: usize,
    /// Tokens after `pieces` that the report omits.
    pub omitted_after: usize,
}

/// The contents of the report.
#[derive(Debug, Clone, Default)]
pub struct HtmlReport<'a> {
    /// The heading: the name of the output folder.
    pub title: &'a str,
    /// Model, method and data, in a sentence.
    pub summary: &'a str,
    /// A note for a run that did not end by itself.
    pub notice: Option<String>,
    /// Name and value of the most important figures, beside the losses.
    pub headline: &'a [(&'a str, String)],
    /// Name and value of further figures of the run.
    pub figures: &'a [(&'a str, String)],
    /// Held-out questions, answered before and after.
    pub questions: &'a [AnsweredQuestion],
    /// A few training rows.
    pub rows: &'a [MaskedRow],
    /// The summary of each data set, by its use.
    pub data: &'a [(&'a str, String)],
    /// Planned and measured memory.
    pub memory: MemoryComparison,
    /// The resolved recipe, as TOML.
    pub recipe: &'a str,
    /// The run's metrics.
    pub entries: &'a [MetricsEntry],
}

impl HtmlReport<'_> {
    /// Writes the report to `path`; after a failure no file is left.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, self.render()).map_err(|e| {
            drop(fs::remove_file(path));
            Error::io("write", path, &e)
        })
    }

    /// Returns the whole page.
    pub fn render(&self) -> String {
        let curves = Curves::of(self.entries);
        let mut page = beginning(BEGINNING, self.title, "");
        page += &self.opening(&curves);
        page += "</header>\n<main>\n";
        page += &[
            sections::answers(self.questions),
            sections::samples(self.entries),
            sections::rows(self.rows),
            curves.loss(),
            curves.throughput_and_memory(self.memory.predicted()),
            curves.breakdown(),
            curves.ranks(),
            sections::data(self.data),
            sections::memory(&self.memory),
            sections::recipe(self.recipe),
        ]
        .concat();
        page + "</main>\n</body></html>\n"
    }

    /// Returns the opening: notice, summary and results.
    fn opening(&self, curves: &Curves<'_>) -> String {
        let mut html = String::new();
        if let Some(notice) = &self.notice {
            html += &format!("<p class=\"notice\" role=\"note\">{}</p>\n", escape(notice));
        }
        if !self.summary.is_empty() {
            html += &format!("<p class=\"summary\">{}</p>\n", escape(self.summary));
        }
        let results = curves.results();
        html + &list("headline", results.iter().chain(self.headline)) + &list("figures", self.figures)
    }
}

/// Returns the beginning of a page up to the heading: `begin`, which may name its kind, then the
/// common head. `more` follows the common style sheet.
fn beginning(begin: &str, title: &str, more: &str) -> String {
    let title = escape(title);
    let style = format!("<style>{STYLE}{more}</style>");
    format!(
        "{begin}{}<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{title}</title>\n\
         {style}</head><body>\n<header>\n<h1>{title}</h1>\n",
        content_policy(&style)
    )
}

/// Returns names and values side by side.
fn list<'a>(class: &str, figures: impl IntoIterator<Item = &'a (&'a str, String)>) -> String {
    let one = |(name, value): &(&str, String)| {
        format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value))
    };
    let all: String = figures.into_iter().map(one).collect();
    if all.is_empty() { all } else { format!("<dl class=\"{class}\">\n{all}</dl>\n") }
}
