//! The page of `finetune compare`: the table of runs, and the losses of all runs in one chart each.

use super::chart::{Chart, Series};
use super::markup::{escape, section, table};
use super::{beginning, curves};
use crate::metrics::MetricsEntry;

/// Classes of the curves, one a run: eight colours, first as lines, then dashed, then dotted.
const CLASSES: [&str; 24] = [
    "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s0 dash", "s1 dash", "s2 dash", "s3 dash", "s4 dash",
    "s5 dash", "s6 dash", "s7 dash", "s0 dots", "s1 dots", "s2 dots", "s3 dots", "s4 dots", "s5 dots",
    "s6 dots", "s7 dots",
];
/// The rules that this page adds to the style sheet.
const STYLE: &str = "polyline.dash{stroke-dasharray:6 3}polyline.dots{stroke-dasharray:1.5 3}
.key i.dash{background:repeating-linear-gradient(90deg,currentColor 0 4px,transparent 4px 6px)}.key i.dots{background:repeating-linear-gradient(90deg,currentColor 0 2px,transparent 2px 4px)}
.charts{grid-template-columns:1fr}svg{max-width:52rem}
";

/// The name of a run and the lines of its metrics.jsonl.
#[derive(Debug, Clone, Copy)]
pub struct RunCurves<'a> {
    /// The name in the legend.
    pub name: &'a str,
    /// The lines of metrics.jsonl.
    pub entries: &'a [MetricsEntry],
}

/// The contents of the page.
#[derive(Debug, Clone)]
pub struct ComparisonPage<'a> {
    /// Sentences that a reader must know before comparing.
    pub warnings: Vec<String>,
    /// Sentences below the table.
    pub notes: Vec<String>,
    /// The names of the columns.
    pub head: &'a [String],
    /// The cells of each run.
    pub rows: &'a [Vec<String>],
    /// The runs whose curves are drawn.
    pub runs: Vec<RunCurves<'a>>,
}

impl ComparisonPage<'_> {
    /// The beginning of every such page, which identifies a page that a new one may replace.
    pub const BEGINNING: &'static str = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
        <meta name=\"generator\" content=\"finetune compare\">";

    /// Returns the whole page.
    pub fn render(&self) -> String {
        let mut page = beginning(Self::BEGINNING, "Runs compared", STYLE);
        let warnings = self.warnings.iter();
        warnings
            .for_each(|text| page += &format!("<p class=\"notice\" role=\"note\">{}</p>\n", escape(text)));
        page += "</header>\n<main>\n";
        let head: Vec<&str> = self.head.iter().map(String::as_str).collect();
        let notes: String = self.notes.iter().map(|text| format!("<p>{}</p>\n", escape(text))).collect();
        page += &section("Runs", &(table("Figures of each run", &head, self.rows) + &notes));
        let charts = [
            self.chart("Training loss", curves::training_loss),
            self.chart("Held-out loss", curves::held_out_loss),
        ];
        page += &section("Losses by step", &curves::charts(&charts));
        page + "</main>\n</body></html>\n"
    }

    /// Returns a chart with a line for each run.
    fn chart(&self, title: &'static str, points: fn(&[MetricsEntry]) -> Vec<(f64, f64)>) -> String {
        let line = |(run, class): (&RunCurves<'_>, &'static str)| {
            Series::line(run.name.to_owned(), class, points(run.entries))
        };
        let series = self.runs.iter().zip(CLASSES.into_iter().cycle()).map(line).collect();
        Chart { title: title.into(), unit: "nats per token", from_zero: false, series }.figure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::EvalReport;

    /// Names are shown as text, and the page has one style sheet and no script.
    #[test]
    fn a_page_shows_its_texts_as_text() {
        let entries = [
            MetricsEntry::Eval(EvalReport::new(3, 1.5, 10)),
            MetricsEntry::Eval(EvalReport::new(4, 1.0, 10)),
        ];
        let name = "<script>alert('1')</script>";
        let rows = [vec![name.to_owned(), "\"&".to_owned()]];
        let run = RunCurves { name, entries: &entries };
        let page = ComparisonPage {
            warnings: vec![name.to_owned()],
            notes: vec![name.to_owned()],
            head: &["run".to_owned(), "<b>".to_owned()],
            rows: &rows,
            runs: vec![run, RunCurves { name: "other", ..run }],
        };
        let page = page.render();
        assert!(page.starts_with(ComparisonPage::BEGINNING), "{page}");
        assert!(
            !page.contains("<script") && !page.contains("<b>") && page.contains("script-src 'none'"),
            "{page}"
        );
        assert_eq!(page.matches("<polyline class=\"s0\"").count(), 1, "one chart: no run has a step");
        assert!(
            page.contains("<polyline class=\"s1\"") && page.contains("Held-out loss (nats per token)"),
            "{page}"
        );
    }
}
