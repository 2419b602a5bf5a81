//! `report.html`: a run at a glance, in one file that needs no network.
//!
//! The key figures, a chart each of loss, learning rate, gradient norm and speed as inline SVG, the evaluations as a
//! table, and the recipe. No script runs in it; colours follow the reader's light or dark setting. Charts of long
//! runs are drawn from means over equal stretches, so the file stays small.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::metrics::{EvalReport, MetricsEntry, StepReport};
use crate::error::{Error, Result};
use crate::units;

/// Points of one line at most.
const MAX_POINTS: usize = 400;
/// The plot's own size in SVG units, without the room for labels.
const PLOT: (f64, f64) = (560.0, 180.0);
/// Room left of the plot and above it, for labels.
const MARGIN: (f64, f64) = (64.0, 12.0);

/// What the report shows.
#[derive(Debug, Clone)]
pub struct HtmlReport<'a> {
    /// The heading: the name of the output folder.
    pub title: &'a str,
    /// Name and value of what a reader wants to know first, in this order.
    pub figures: &'a [(&'a str, String)],
    /// The resolved recipe, as TOML.
    pub recipe: &'a str,
    /// The run's metrics.
    pub entries: &'a [MetricsEntry],
}

/// One line of a chart.
struct ChartLine {
    name: &'static str,
    class: &'static str,
    points: Vec<(f64, f64)>,
}

impl HtmlReport<'_> {
    /// Writes the report to `path`.
    ///
    /// # Errors
    /// The disk refuses it.
    pub fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, self.render()).map_err(|e| Error::io("write", path, &e))
    }

    /// The whole page.
    pub fn render(&self) -> String {
        let (mut steps, mut evals) = (Vec::new(), Vec::new());
        for entry in self.entries {
            match entry {
                MetricsEntry::Step(report) => steps.push(report),
                MetricsEntry::Eval(report) => evals.push(report),
                // What is not there leaves a gap in the charts.
                MetricsEntry::Skipped(_) => {}
            }
        }
        let title = escape(self.title);
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\n\
             <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<dl>\n"
        );
        for (name, value) in self.figures {
            page += &format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value));
        }
        page += "</dl>\n";
        let of_steps =
            |value: fn(&StepReport) -> f64| thin(steps.iter().map(|r| (r.step as f64, value(r))).collect());
        let eval_loss = evals.iter().map(|r| (r.step as f64, r.eval_loss)).collect();
        let loss = [
            ChartLine { name: "training", class: "a", points: of_steps(|r| r.loss) },
            ChartLine { name: "held-out (dashed)", class: "b", points: eval_loss },
        ];
        let single = |name, value| [ChartLine { name, class: "a", points: of_steps(value) }];
        page += "<main>\n";
        page += &chart("Loss (nats per token)", &loss);
        page += &chart("Learning rate", &single("learning rate", |r| r.learning_rate));
        page += &chart("Gradient norm, before clipping", &single("gradient norm", |r| r.grad_norm));
        page += &chart("Tokens per second", &single("tokens per second", |r| r.tokens_per_sec));
        page += "</main>\n";
        page += &eval_table(&evals);
        page += &format!("<h2>Recipe</h2>\n<pre>{}</pre>\n</body></html>\n", escape(self.recipe.trim_end()));
        page
    }
}

/// At most [`MAX_POINTS`] points: means over equal stretches of the given ones.
fn thin(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let stretch = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let n = part.len() as f64;
        (part.iter().map(|p| p.0).sum::<f64>() / n, part.iter().map(|p| p.1).sum::<f64>() / n)
    };
    points.chunks(stretch).map(mean).collect()
}

/// A figure with the lines that have points, or nothing if none has.
fn chart(title: &str, lines: &[ChartLine]) -> String {
    let lines: Vec<&ChartLine> = lines.iter().filter(|line| !line.points.is_empty()).collect();
    let all = || lines.iter().flat_map(|line| &line.points);
    let Some((left, right)) = bounds(all().map(|p| p.0)) else { return String::new() };
    let Some((low, high)) = bounds(all().map(|p| p.1)) else { return String::new() };
    let x = |step: f64| MARGIN.0 + (step - left) / (right - left) * PLOT.0;
    let y = |value: f64| MARGIN.1 + (high - value) / (high - low) * PLOT.1;
    let (width, height) = (MARGIN.0 + PLOT.0 + 16.0, MARGIN.1 + PLOT.1 + 28.0);
    let mut svg = format!(
        "<figure><figcaption>{}</figcaption>\n<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n",
        legend(title, &lines),
        escape(title)
    );
    for value in ticks(low, high) {
        let _ = writeln!(
            svg,
            "<path class=\"grid\" d=\"M{:.1} {y:.1}h{:.1}\"/><text class=\"y\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            MARGIN.0,
            PLOT.0,
            MARGIN.0 - 6.0,
            y(value) + 4.0,
            short(value),
            y = y(value),
        );
    }
    for step in ticks(left, right) {
        let _ = writeln!(
            svg,
            "<text class=\"x\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            x(step),
            MARGIN.1 + PLOT.1 + 20.0,
            short(step)
        );
    }
    for line in lines {
        let place = |p: &(f64, f64)| format!("{:.1},{:.1}", x(p.0), y(p.1));
        let points: Vec<String> = line.points.iter().map(place).collect();
        let _ = writeln!(svg, "<polyline class=\"{}\" points=\"{}\"/>", line.class, points.join(" "));
        // A line of few points would not show where they are, and one of a single point not at all.
        if points.len() <= 40 {
            for p in &line.points {
                let _ = writeln!(
                    svg,
                    "<circle class=\"{}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"/>",
                    line.class,
                    x(p.0),
                    y(p.1)
                );
            }
        }
    }
    svg + "</svg></figure>\n"
}

fn legend(title: &str, lines: &[&ChartLine]) -> String {
    let mut text = escape(title);
    if lines.len() > 1 {
        for line in lines {
            text += &format!(" <span class=\"{}\">{}</span>", line.class, escape(line.name));
        }
    }
    text
}

/// Smallest and largest finite value, moved apart if they are the same.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|v| v.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return None;
    }
    if low < high {
        return Some((low, high));
    }
    let room = if low == 0.0 { 1.0 } else { low.abs() * 0.1 };
    Some((low - room, high + room))
}

/// Three to seven round numbers between `low` and `high`.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let decade = 10_f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|digit| digit * decade).into_iter().find(|s| *s >= rough).unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|n| n as f64 * step).collect()
}

/// A number as an axis shows it: `0.25`, `1200`, `2e-4`.
fn short(value: f64) -> String {
    let size = value.abs();
    if size != 0.0 && !(1e-3..1e5).contains(&size) {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn eval_table(evals: &[&EvalReport]) -> String {
    if evals.is_empty() {
        return String::new();
    }
    let mut table = String::from(
        "<h2>Evaluations</h2>\n<table><tr><th>step<th>loss<th>perplexity<th>tokens<th>token accuracy<th>exact match</tr>\n",
    );
    let percent = |share: Option<f64>| share.map_or("–".to_owned(), |v| format!("{:.1} %", 100.0 * v));
    for r in evals {
        let _ = writeln!(
            table,
            "<tr><td>{}<td>{:.4}<td>{}<td>{}<td>{}<td>{}</tr>",
            r.step,
            r.eval_loss,
            short(r.eval_perplexity),
            units::count(r.eval_tokens),
            percent(r.eval_token_accuracy),
            percent(r.eval_exact_match)
        );
    }
    table + "</table>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const STYLE: &str = "
:root{color-scheme:light dark;--a:light-dark(#1764ab,#6cb2f5);--b:light-dark(#b3471b,#f59d6c);--dim:light-dark(#666,#999)}
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
dl{display:flex;flex-wrap:wrap;gap:.5rem 2rem;margin:0}dt{color:var(--dim);font-size:.85rem}dd{margin:0;font-size:1.1rem}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem;margin-top:1.5rem}
figure{margin:0}figcaption{font-weight:600}figcaption span{font-weight:400;margin-left:.8rem}
svg{width:100%;height:auto}text{fill:var(--dim);font-size:12px}.x{text-anchor:middle}.y{text-anchor:end}
polyline{fill:none;stroke-width:1.6}.grid{stroke:var(--dim);stroke-opacity:.25}
.a{stroke:var(--a)}.b{stroke:var(--b);stroke-dasharray:6 3}circle.a{fill:var(--a)}circle.b{fill:var(--b);stroke-dasharray:none}
span.a{color:var(--a)}span.b{color:var(--b)}
table{border-collapse:collapse}td,th{text-align:right;padding:.2rem .9rem .2rem 0;font-variant-numeric:tabular-nums}
pre{overflow-x:auto;padding:1rem;border:1px solid var(--dim);border-radius:6px}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.83, 2.31), [1.0, 1.5, 2.0]);
        assert_eq!(short(0.0002), "2e-4");
        assert_eq!(short(1200.0), "1200");
        assert_eq!(short(1.5), "1.5");
        assert_eq!(short(0.0), "0");
    }

    #[test]
    fn long_runs_are_thinned_to_means() {
        let points: Vec<(f64, f64)> = (0..1000).map(|n| (f64::from(n), 2.0 * f64::from(n))).collect();
        let thinned = thin(points);
        assert_eq!(thinned.len(), 334);
        assert_eq!(thinned[0], (1.0, 2.0));
    }

    #[test]
    fn a_flat_line_has_room() {
        assert_eq!(bounds([2.0, 2.0].into_iter()), Some((1.8, 2.2)));
        assert_eq!(bounds([f64::NAN].into_iter()), None);
    }
}
