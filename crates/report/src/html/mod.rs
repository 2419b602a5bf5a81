//! `report.html`: a run at a glance, in one file that needs no network.
//!
//! What people ask first comes first: what was trained on what and what came of it, answers before and after, rows with
//! their masks; then curves, where the time went, data, memory by plan and by measurement, the recipe. No script runs in
//! it and it names nothing outside itself; colours follow the reader's light or dark setting. The caller hands over plain
//! figures and texts, all of which are shown as text whatever stands in them.
//!
//! - `curves`: sections made of metrics.jsonl. `sections`: what the run was given and planned.
//! - `comparison`: a page of its own, with the curves of several runs.
//! - `chart`: SVG. `markup`: text, numbers and tables. `style`: colours and layout. `policy`: nothing else may run.

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
    /// What was asked.
    pub question: String,
    /// The answer that the data set gives.
    pub expected: String,
    /// What the model answered before it was trained, where it was asked.
    pub before: Option<String>,
    /// What it answered afterwards, where it was asked.
    pub after: Option<String>,
}

/// A training row as the model sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskedRow {
    /// Where the row stood.
    pub origin: String,
    /// Its text in order, and whether predicting it is trained.
    pub pieces: Vec<(String, bool)>,
    /// Tokens of the whole row.
    pub tokens: usize,
    /// Those of them that are trained.
    pub trained_tokens: usize,
    /// Tokens before `pieces` that are not shown.
    pub omitted_before: usize,
    /// Tokens after `pieces` that are not shown.
    pub omitted_after: usize,
}

/// What the report shows.
#[derive(Debug, Clone, Default)]
pub struct HtmlReport<'a> {
    /// The heading: the name of the output folder.
    pub title: &'a str,
    /// What was trained on what, in a sentence.
    pub summary: &'a str,
    /// What a reader must know of how the run ended, where it did not end by itself.
    pub notice: Option<String>,
    /// Name and value of what a reader wants to know first, beside the losses.
    pub headline: &'a [(&'a str, String)],
    /// Name and value of what else tells the run.
    pub figures: &'a [(&'a str, String)],
    /// Held-out questions, answered before and after.
    pub questions: &'a [AnsweredQuestion],
    /// A few training rows.
    pub rows: &'a [MaskedRow],
    /// What was said of each data set, by its use.
    pub data: &'a [(&'a str, String)],
    /// Planned and measured memory.
    pub memory: MemoryComparison,
    /// The resolved recipe, as TOML.
    pub recipe: &'a str,
    /// The run's metrics.
    pub entries: &'a [MetricsEntry],
}

impl HtmlReport<'_> {
    /// Writes the report to `path`; nothing is left there if that fails.
    ///
    /// # Errors
    /// The disk refuses it.
    pub fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, self.render()).map_err(|e| {
            drop(fs::remove_file(path));
            Error::io("write", path, &e)
        })
    }

    /// The whole page.
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

    /// What was trained on what, and what came of it.
    fn opening(&self, curves: &Curves<'_>) -> String {
        let mut html = String::new();
        if let Some(notice) = &self.notice {
            html += &format!("<p class=\"notice\" role=\"note\">{}</p>\n", escape(notice));
        }
        if !self.summary.is_empty() {
            html += &format!("<p class=\"summary\">{}</p>\n", escape(self.summary));
        }
        let results = curves.results();
        let first: Vec<(&str, &String)> = results.iter().chain(self.headline).map(|(n, v)| (*n, v)).collect();
        let rest: Vec<(&str, &String)> = self.figures.iter().map(|(name, value)| (*name, value)).collect();
        html + &list("headline", &first) + &list("figures", &rest)
    }
}

/// The beginning of a page: `begin`, which may name its kind, then what every page has, up to the heading. The style sheet
/// is the common one with `more` behind it.
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

/// Names and values side by side.
fn list(class: &str, figures: &[(&str, &String)]) -> String {
    if figures.is_empty() {
        return String::new();
    }
    let one = |(name, value): &(&str, &String)| {
        format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value))
    };
    format!("<dl class=\"{class}\">\n{}</dl>\n", figures.iter().map(one).collect::<String>())
}
