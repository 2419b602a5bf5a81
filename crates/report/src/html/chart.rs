//! Charts over the steps of a run, as inline SVG: lines, single points, rings, levels and stacked
//! areas.
//!
//! Charts of long runs show means over equal stretches, so the page stays small. Every chart
//! describes itself in words, for readers who do not see it; a point shows its values under the
//! pointer.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::markup::{escape, short};

/// Most points of one line.
const MAX_POINTS: usize = 400;
/// Most points of a line that marks each of them.
const FEW_POINTS: usize = 40;
/// Size of the plot in SVG units, without labels: small, so that a phone shows readable labels.
const PLOT: (f64, f64) = (396.0, 170.0);
/// Margins left of the plot and above it, for labels.
const MARGIN: (f64, f64) = (54.0, 10.0);
/// Space above the largest value, as a share of the plot, so that no point touches the edge.
const HEADROOM: f64 = 0.04;

/// The form of a series' points.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Mark {
    /// Joined by a line.
    Line,
    /// Separate points, with nothing known between them.
    Points,
    /// A ring around each, which marks points of another series.
    Ring,
    /// A dashed line.
    Level,
    /// Filled down to these values, one a point.
    Area(Vec<f64>),
}

/// One series of a chart.
#[derive(Debug, Clone)]
pub(super) struct Series {
    /// The name in the legend.
    pub(super) name: Cow<'static, str>,
    /// The class that gives it its colour.
    pub(super) class: &'static str,
    /// The form of its points.
    pub(super) mark: Mark,
    /// Step and value.
    pub(super) points: Vec<(f64, f64)>,
}

/// A chart over steps.
#[derive(Debug, Clone)]
pub(super) struct Chart {
    /// The heading and name, of letters and spaces.
    pub(super) title: Cow<'static, str>,
    /// The unit of its values; may be empty.
    pub(super) unit: &'static str,
    /// True if the axis of values begins at 0.
    pub(super) from_zero: bool,
    /// The series; the chart omits those without points.
    pub(super) series: Vec<Series>,
}

/// The ranges of both axes.
struct Axes {
    steps: (f64, f64),
    values: (f64, f64),
}

impl Chart {
    /// Returns the figure; empty if no series has a point.
    pub(super) fn figure(&self) -> String {
        let all: Vec<&Series> = self.series.iter().filter(|series| !series.points.is_empty()).collect();
        let Some(axes) = self.axes(&all) else { return String::new() };
        let id = self.title.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let (width, height) = (MARGIN.0 + PLOT.0 + 10.0, MARGIN.1 + PLOT.1 + 38.0);
        let heading = self.heading();
        let texts: Vec<String> = all.iter().map(|series| series.in_words(self.unit)).collect();
        let mut svg = format!(
            "<figure><figcaption>{}{}</figcaption>\n<svg viewBox=\"0 0 {width} {height}\" role=\"img\" \
             aria-labelledby=\"{id}-title {id}-text\">\n<title id=\"{id}-title\">{}</title><desc id=\"{id}-text\">{}</desc>\n",
            escape(&heading),
            legend(&all),
            escape(&heading),
            escape(&texts.join(" ")),
        );
        svg += &axes.frame();
        all.iter().for_each(|series| svg += &series.drawn(&axes, all.len() > 1));
        svg + "</svg></figure>\n"
    }

    fn heading(&self) -> String {
        if self.unit.is_empty() { self.title.to_string() } else { format!("{} ({})", self.title, self.unit) }
    }

    fn axes(&self, all: &[&Series]) -> Option<Axes> {
        let points = || all.iter().flat_map(|series| &series.points);
        let zero = self.from_zero.then_some(0.0);
        let (low, high) = bounds(points().map(|point| point.1).chain(zero))?;
        let steps = bounds(points().map(|point| point.0))?;
        Some(Axes { steps, values: (low, high + HEADROOM * (high - low)) })
    }
}

impl Axes {
    fn x(&self, step: f64) -> f64 {
        MARGIN.0 + (step - self.steps.0) / (self.steps.1 - self.steps.0) * PLOT.0
    }

    fn y(&self, value: f64) -> f64 {
        MARGIN.1 + (self.values.1 - value) / (self.values.1 - self.values.0) * PLOT.1
    }

    fn svg_point(&self, (step, value): (f64, f64)) -> String {
        format!("{:.1},{:.1}", self.x(step), self.y(value))
    }

    /// Returns the grid lines of the plot and the numbers beside them.
    fn frame(&self) -> String {
        let mut svg = String::new();
        for value in ticks(self.values.0, self.values.1) {
            let (y, left) = (self.y(value), MARGIN.0);
            let _ = writeln!(
                svg,
                "<path class=\"grid\" d=\"M{left:.1} {y:.1}h{:.1}\"/><text class=\"y\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                PLOT.0,
                left - 6.0,
                y + 4.0,
                short(value),
            );
        }
        for step in ticks(self.steps.0, self.steps.1).into_iter().filter(|step| step.fract() == 0.0) {
            let (x, y) = (self.x(step), MARGIN.1 + PLOT.1 + 18.0);
            let _ = writeln!(svg, "<text class=\"x\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", short(step));
        }
        let (x, y) = (MARGIN.0 + PLOT.0, MARGIN.1 + PLOT.1 + 32.0);
        let _ = writeln!(svg, "<text class=\"y\" x=\"{x:.1}\" y=\"{y:.1}\">step</text>");
        svg
    }
}

impl Series {
    /// Returns a line of `points`, thinned to at most [`MAX_POINTS`].
    pub(super) fn line(
        name: impl Into<Cow<'static, str>>,
        class: &'static str,
        points: Vec<(f64, f64)>,
    ) -> Self {
        Series { name: name.into(), class, mark: Mark::Line, points: thin(points) }
    }

    /// Describes the first and last value, or the mean or level, as a sentence.
    fn in_words(&self, unit: &str) -> String {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            return String::new();
        };
        let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
        let point = |(step, value): &(f64, f64)| format!("{}{unit} at step {}", short(*value), short(*step));
        match &self.mark {
            Mark::Level => format!("{}: {}{unit}.", self.name, short(last.1)),
            // Areas are stacked, so the value is the difference of the edges.
            Mark::Area(lower) => {
                let own = |at: usize| self.points[at].1 - lower.get(at).copied().unwrap_or(0.0);
                let mean = (0..self.points.len()).map(own).sum::<f64>() / self.points.len() as f64;
                format!("{}: {}{unit} on average.", self.name, short(mean))
            }
            _ if self.points.len() == 1 => format!("{}: {}.", self.name, point(first)),
            _ => format!("{}: {}, {}.", self.name, point(first), point(last)),
        }
    }

    fn drawn(&self, axes: &Axes, named: bool) -> String {
        let svg_points: Vec<String> = self.points.iter().map(|point| axes.svg_point(*point)).collect();
        let class = self.class;
        let shape = match &self.mark {
            Mark::Points | Mark::Ring => String::new(),
            Mark::Area(lower) => {
                let edge = self.points.iter().zip(lower).rev();
                let back: Vec<String> =
                    edge.map(|(point, value)| axes.svg_point((point.0, *value))).collect();
                format!(
                    "<polygon class=\"{class}\" points=\"{} {}\"/>\n",
                    svg_points.join(" "),
                    back.join(" ")
                )
            }
            Mark::Line | Mark::Level => {
                format!("<polyline class=\"{class}\" points=\"{}\"/>\n", svg_points.join(" "))
            }
        };
        let shows_points = match self.mark {
            Mark::Points | Mark::Ring => true,
            Mark::Line => self.points.len() <= FEW_POINTS,
            Mark::Level | Mark::Area(_) => false,
        };
        let name = if named { format!("{}, ", escape(&self.name)) } else { String::new() };
        let (ring, radius) = if self.mark == Mark::Ring { (" ring", 6.5) } else { ("", 3.5) };
        let dot = |(step, value): &(f64, f64)| {
            format!(
                "<circle class=\"{class}{ring}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\"><title>{name}step {}: {}</title></circle>\n",
                axes.x(*step),
                axes.y(*value),
                short(*step),
                short(*value)
            )
        };
        let dots = self.points.iter().filter(|_| shows_points).map(dot);
        dots.fold(shape, |svg, dot| svg + &dot)
    }
}

/// Stacks areas, the first at the bottom; `layers` have a value for each of `steps`.
pub(super) fn stacked(steps: &[f64], layers: Vec<(&'static str, &'static str, Vec<f64>)>) -> Vec<Series> {
    let mut lower: Vec<(f64, f64)> = thin(steps.iter().map(|step| (*step, 0.0)).collect());
    let mut series = Vec::new();
    for (name, class, values) in layers {
        let own = thin(steps.iter().copied().zip(values).collect());
        let points: Vec<(f64, f64)> =
            own.iter().zip(&lower).map(|((step, value), (_, below))| (*step, below + value)).collect();
        let below = lower.iter().map(|point| point.1).collect();
        series.push(Series { name: name.into(), class, mark: Mark::Area(below), points: points.clone() });
        lower = points;
    }
    series
}

/// Returns at most [`MAX_POINTS`] points: means over equal stretches of the given ones.
fn thin(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let stretch = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let n = part.len() as f64;
        (part.iter().map(|p| p.0).sum::<f64>() / n, part.iter().map(|p| p.1).sum::<f64>() / n)
    };
    points.chunks(stretch).map(mean).collect()
}

fn legend(all: &[&Series]) -> String {
    if all.len() < 2 {
        return String::new();
    }
    let entry = |series: &&Series| {
        let kind = match series.mark {
            Mark::Line => "line",
            Mark::Points => "point",
            Mark::Ring => "ring",
            Mark::Level => "level",
            Mark::Area(_) => "area",
        };
        let (class, name) = (series.class, escape(&series.name));
        format!(" <span class=\"key\"><i class=\"{class} {kind}\"></i>{name}</span>")
    };
    all.iter().map(entry).collect()
}

/// Returns the smallest and largest finite value, moved apart if they are equal; none without a
/// finite value.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|v| v.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return None;
    }
    if low < high {
        return Some((low, high));
    }
    let margin = if low == 0.0 { 1.0 } else { low.abs() * 0.1 };
    Some((low - margin, high + margin))
}

/// Returns three to seven round numbers between `low` and `high`.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let decade = 10_f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|digit| digit * decade).into_iter().find(|s| *s >= rough).unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|n| n as f64 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.83, 2.31), [1.0, 1.5, 2.0]);
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

    #[test]
    fn areas_stand_on_one_another() {
        let layers = vec![("a", "s0", vec![1.0, 2.0]), ("b", "s1", vec![3.0, 5.0])];
        let series = stacked(&[1.0, 2.0], layers);
        assert_eq!(series[0].points, [(1.0, 1.0), (2.0, 2.0)]);
        assert_eq!(series[1].points, [(1.0, 4.0), (2.0, 7.0)]);
        assert_eq!(series[1].mark, Mark::Area(vec![1.0, 2.0]));
        assert_eq!(series[1].in_words("ms"), "b: 4 ms on average.");
    }
}
