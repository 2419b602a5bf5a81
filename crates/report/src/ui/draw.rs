//! The layout of the view on a screen of any size: it omits boxes that do not fit, the last lines
//! last of all.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, Paragraph};

use super::figures::{RECENT, ScreenFigures};
use crate::metrics::StepReport;
use crate::units;

/// Columns and rows of the smallest screen with boxes beside each other; a smaller one has one
/// column.
const WIDE: (u16, u16) = (70, 22);
/// Columns of the figures beside the curve.
const SIDE_COLUMNS: u16 = 36;
/// Rows of the boxes below the curve: one for each part of the time, and the frame.
const PARTS_ROWS: u16 = 9;
/// The least height of a curve.
const CURVE_ROWS: u16 = 6;

/// Draws the run after `passed` seconds; `lines` are those that it has printed.
pub(super) fn draw(frame: &mut Frame<'_>, figures: &ScreenFigures, lines: &[String], passed: f64) {
    let area = frame.area();
    let [head, bar, body] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Min(0)]).areas(area);
    frame.render_widget(heading(figures, passed), head);
    frame.render_widget(progress(figures, bar.width), bar);
    if area.width >= WIDE.0 && area.height >= WIDE.1 {
        draw_wide(frame, body, figures, lines);
    } else {
        draw_narrow(frame, body, figures, lines);
    }
}

fn draw_wide(frame: &mut Frame<'_>, area: Rect, figures: &ScreenFigures, lines: &[String]) {
    // The curve gets two thirds of the rows that the boxes below it leave.
    let message_rows = (area.height.saturating_sub(PARTS_ROWS) / 3).clamp(3, 12);
    let rows =
        [Constraint::Min(CURVE_ROWS), Constraint::Length(PARTS_ROWS), Constraint::Length(message_rows)];
    let [top, middle, bottom] = Layout::vertical(rows).areas(area);
    let columns = [Constraint::Min(0), Constraint::Length(SIDE_COLUMNS)];
    let [curve, side] = Layout::horizontal(columns).areas(top);
    let [parts, ranks] = Layout::horizontal(columns).areas(middle);
    draw_curve(frame, curve, figures);
    frame.render_widget(Paragraph::new(figure_lines(figures)).block(Block::bordered()), side);
    let title = format!(" time of the last {RECENT} steps ");
    let inner = parts.width.saturating_sub(2);
    frame.render_widget(
        Paragraph::new(part_lines(figures, inner)).block(Block::bordered().title(title)),
        parts,
    );
    let inner = ranks.as_size();
    let text = rank_lines(figures, inner.width.saturating_sub(2), inner.height.saturating_sub(2));
    frame.render_widget(Paragraph::new(text).block(Block::bordered().title(" seconds of each rank ")), ranks);
    let rows = usize::from(bottom.height.saturating_sub(2));
    frame.render_widget(Paragraph::new(message_lines(lines, rows)).block(Block::bordered()), bottom);
}

fn draw_narrow(frame: &mut Frame<'_>, area: Rect, figures: &ScreenFigures, lines: &[String]) {
    let text = figure_lines(figures);
    let message_rows = lines.len().min(3) as u16;
    let curve = area.height.saturating_sub(text.len() as u16 + message_rows);
    let curve = if curve < CURVE_ROWS { 0 } else { curve };
    let rows = [Constraint::Length(curve), Constraint::Min(0), Constraint::Length(message_rows)];
    let [top, middle, bottom] = Layout::vertical(rows).areas(area);
    if curve > 0 {
        draw_curve(frame, top, figures);
    }
    frame.render_widget(Paragraph::new(text), middle);
    frame.render_widget(Paragraph::new(message_lines(lines, usize::from(bottom.height))), bottom);
}

fn heading(figures: &ScreenFigures, passed: f64) -> Line<'static> {
    let left = figures.secs_left(passed);
    let left = left.map_or_else(String::new, |secs| format!(", {} left", units::duration(secs)));
    let time = format!("{} passed{left}", units::duration(passed));
    let end = if figures.is_stopping { "stopping: the run saves".to_owned() } else { time };
    Line::from(vec![
        format!("{}  ", figures.title).bold(),
        format!("step {}/{}  ", figures.done(), figures.total).into(),
        end.into(),
        "  q saves and stops".dim(),
    ])
}

fn progress(figures: &ScreenFigures, width: u16) -> Line<'static> {
    let share = figures.done() as f64 / figures.total.max(1) as f64;
    let (full, rest) = cells(share, width);
    Line::from(vec![Span::styled("━".repeat(full), Color::Green), "─".repeat(rest).dim()])
}

/// Splits `width` cells at `share` of them.
fn cells(share: f64, width: u16) -> (usize, usize) {
    let full = (share.clamp(0.0, 1.0) * f64::from(width)).round() as usize;
    (full, usize::from(width) - full)
}

fn draw_curve(frame: &mut Frame<'_>, area: Rect, figures: &ScreenFigures) {
    let points = figures.curve.points();
    let all = || points.iter().chain(&figures.evals).map(|point| point.1).filter(|loss| loss.is_finite());
    let (low, high) =
        all().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), loss| (l.min(loss), h.max(loss)));
    let (low, high) =
        if low < high { (low, high) } else { (low.min(f64::MAX) - 0.5, low.min(f64::MAX) + 0.5) };
    let (low, high) = if all().next().is_some() { (low, high) } else { (0.0, 1.0) };
    let last = figures.done().max(figures.first + 1) as f64;
    let first = figures.first as f64;
    let train = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .style(Style::new().fg(Color::Cyan))
        .data(points);
    let evals = Dataset::default()
        .marker(Marker::Dot)
        .graph_type(GraphType::Scatter)
        .style(Style::new().fg(Color::Yellow))
        .data(&figures.evals);
    let title = if figures.evals.is_empty() { " loss " } else { " loss, and • of held-out rows " };
    let steps = Axis::default().bounds([first, last]).labels([format!("{first}"), format!("{last}")]);
    let losses = Axis::default().bounds([low, high]).labels([format!("{low:.3}"), format!("{high:.3}")]);
    let chart =
        Chart::new(vec![train, evals]).block(Block::bordered().title(title)).x_axis(steps).y_axis(losses);
    frame.render_widget(chart, area);
}

/// Returns the figures of the last step.
fn figure_lines(figures: &ScreenFigures) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    let mut add = |name: &str, value: String| lines.push(Line::from(format!("{name:<14}{value}")));
    if let Some(report) = &figures.last {
        let mean = |of: fn(&StepReport) -> f64| {
            let values: Vec<f64> = figures.recent.iter().map(of).filter(|value| value.is_finite()).collect();
            values.iter().sum::<f64>() / values.len().max(1) as f64
        };
        add("loss", format!("{:.4}, mean {:.4}", report.loss, mean(|step| step.loss)));
        if let Some((step, loss)) = figures.evals.last() {
            add("held-out loss", format!("{loss:.4} at step {step}"));
        }
        if let Some((step, loss)) = figures.best {
            add("held-out best", format!("{loss:.4} at step {step}"));
        }
        add("learning rate", format!("{:.2e}", report.learning_rate));
        add("gradient norm", format!("{:.3}", report.grad_norm));
        let (speed, secs) = (mean(|step| step.tokens_per_sec), mean(|step| step.step_secs));
        add("tokens/s", format!("{}, {} a step", units::count(speed as u64), step_time(secs)));
        add("peak memory", units::bytes(report.peak_bytes));
    } else {
        add("loss", "no step yet".into());
        if let Some((_, loss)) = figures.evals.last() {
            add("held-out loss", format!("{loss:.4}"));
        }
    }
    lines
}

/// Formats the seconds of a step, in milliseconds below one second.
fn step_time(secs: f64) -> String {
    if secs < 1.0 { format!("{:.0} ms", 1000.0 * secs) } else { units::duration(secs) }
}

/// Returns a bar for each part of the time of the last steps.
fn part_lines(figures: &ScreenFigures, width: u16) -> Vec<Line<'static>> {
    let sum = |of: fn(&StepReport) -> f64| figures.recent.iter().map(of).sum::<f64>();
    let all = sum(StepReport::all_parts);
    let parts = [
        ("data", sum(|step| step.data_secs)),
        ("forward", sum(|step| step.forward_secs)),
        ("backward", sum(|step| step.backward_secs)),
        ("waiting", sum(|step| step.exposed_secs)),
        ("update", sum(|step| step.update_secs)),
        ("save", sum(|step| step.save_secs)),
        ("other", sum(|step| step.other_secs)),
    ];
    let line = |(name, secs): (&str, f64)| {
        let share = if all > 0.0 { secs / all } else { 0.0 };
        bar_line(&format!("{name:<9}{:>3.0} % ", 100.0 * share), share, width)
    };
    parts.into_iter().map(line).collect()
}

/// Returns a bar for each rank, as long as its computing time in the last step.
fn rank_lines(figures: &ScreenFigures, width: u16, rows: u16) -> Vec<Line<'static>> {
    let ranks = figures.last.as_ref().map_or(&[][..], |report| &report.rank_secs);
    if ranks.is_empty() {
        let secs = figures.last.as_ref().map(|report| vec![report.step_secs]).unwrap_or_default();
        return secs.into_iter().map(|secs| bar_line(&rank_text(0, secs), 1.0, width)).collect();
    }
    let most = ranks.iter().copied().fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let rows = usize::from(rows);
    let shown = if ranks.len() > rows { rows.saturating_sub(1) } else { ranks.len() };
    let bars = ranks.iter().take(shown).enumerate();
    let mut lines: Vec<Line<'static>> =
        bars.map(|(rank, secs)| bar_line(&rank_text(rank, *secs), secs / most, width)).collect();
    if shown < ranks.len() {
        lines.push(Line::from(format!("and {} more, {most:.3} s at most", ranks.len() - shown)));
    }
    lines
}

fn rank_text(rank: usize, secs: f64) -> String {
    format!("{rank:>3} {secs:>7.3} s ")
}

fn bar_line(text: &str, share: f64, width: u16) -> Line<'static> {
    let (full, _) = cells(share, width.saturating_sub(text.chars().count() as u16));
    Line::from(vec![Span::from(text.to_owned()), Span::styled("█".repeat(full), Color::Blue)])
}

/// Returns the last lines that the run has printed.
fn message_lines(lines: &[String], rows: usize) -> Vec<Line<'static>> {
    let last = &lines[lines.len().saturating_sub(rows)..];
    let line = |text: &String| {
        let line = Line::from(text.replace(['\n', '\t'], " "));
        if text.starts_with("warning:") { line.fg(Color::Yellow) } else { line }
    };
    last.iter().map(line).collect()
}

#[cfg(test)]
mod tests;
