//! The table of the most expensive operations of a trace: self time by operation and shape.

use std::collections::HashMap;

use serde::Serialize;

use crate::runtime::trace::{DIMS, SpanInfo, SpanKind, TraceEvents, TraceSpan};
use crate::units;

/// The name of the span of a forward that backward recomputes.
pub const RECOMPUTE: &str = "recompute";
/// Number of rows of the table on the terminal.
const SHOWN: usize = 12;

/// All spans with the same name, or with the same name and sizes.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OpRow {
    /// The operation; in tables by shape with its sizes.
    pub name: String,
    /// The category of its spans.
    pub kind: &'static str,
    /// Number of calls.
    pub calls: u64,
    /// Seconds in the spans without those of spans inside them.
    pub self_secs: f64,
    /// Bytes read and written, or sent.
    pub bytes: u64,
    /// Floating-point operations of the products.
    pub flops: u64,
}

impl OpRow {
    /// Returns bytes per second.
    pub fn bytes_per_sec(&self) -> f64 {
        self.bytes as f64 / self.self_secs.max(1e-9)
    }

    /// Returns floating-point operations per second.
    pub(crate) fn flops_per_sec(&self) -> f64 {
        self.flops as f64 / self.self_secs.max(1e-9)
    }
}

/// The totals of the traced steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OpTable {
    /// Number of steps.
    pub steps: u64,
    /// Seconds of all steps.
    pub secs: f64,
    /// Seconds of recomputed forwards, with all spans inside them.
    pub recompute_secs: f64,
    /// Rows by operation, over all sizes; the most expensive first.
    pub operations: Vec<OpRow>,
    /// Rows by operation and sizes.
    pub by_shape: Vec<OpRow>,
}

/// Sums spans with their self nanoseconds into one row for each result of `key`; the most expensive
/// first.
fn rows_by<'a>(
    spans: impl Iterator<Item = (&'a &'a TraceSpan, u64)>,
    key: impl Fn(SpanInfo) -> SpanInfo,
) -> Vec<OpRow> {
    let mut by_span: HashMap<SpanInfo, OpRow> = HashMap::new();
    for (span, own) in spans {
        let info = key(SpanInfo { index: None, bytes: 0, flops: 0, ..span.info });
        let new = || OpRow { name: info.title(), kind: info.kind.name(), ..OpRow::default() };
        let row = by_span.entry(info).or_insert_with(new);
        row.calls += 1;
        row.self_secs += own as f64 / 1e9;
        row.bytes += span.info.bytes;
        row.flops += span.info.flops;
    }
    let mut rows: Vec<OpRow> = by_span.into_values().collect();
    rows.sort_by(|a, b| b.self_secs.total_cmp(&a.self_secs).then_with(|| a.name.cmp(&b.name)));
    rows
}

impl OpTable {
    /// Builds the table of the rank's own thread in `events`.
    pub fn new(events: &TraceEvents) -> Self {
        // Of two equal spans, the one that ended last encloses the other.
        let own_thread = events.spans.iter().rev().filter(|span| span.thread == 0);
        let mut spans: Vec<&TraceSpan> = own_thread.collect();
        spans.sort_by_key(|span| (span.start, u64::MAX - span.nanos));
        let steps: Vec<&&TraceSpan> = spans.iter().filter(|span| span.info.kind == SpanKind::Step).collect();
        let (count, nanos) = (steps.len() as u64, steps.iter().map(|span| span.nanos).sum::<u64>());
        let own = self_nanos(&spans);
        let measured = || spans.iter().zip(own.iter().copied());
        let again =
            spans.iter().filter(|span| span.info.name == RECOMPUTE).map(|span| span.nanos).sum::<u64>();
        OpTable {
            steps: count,
            secs: nanos as f64 / 1e9,
            recompute_secs: again as f64 / 1e9,
            operations: rows_by(measured(), |info| info.dims(&[0; DIMS])),
            by_shape: rows_by(measured(), |info| info),
        }
    }

    /// Returns the seconds of the rows of a kind.
    pub(crate) fn secs_of(&self, kind: SpanKind) -> f64 {
        self.operations.iter().filter(|row| row.kind == kind.name()).map(|row| row.self_secs).sum()
    }

    /// Returns the most expensive rows as text.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{:<48} {:>7} {:>10} {:>7} {:>10} {:>9} {:>9}\n",
            "most expensive operations, self time", "calls", "ms a step", "share", "bytes", "GB/s", "GFLOP/s"
        );
        for row in self.operations.iter().take(SHOWN) {
            let rate = |count: u64, per_sec: f64| {
                if count == 0 { String::new() } else { format!("{:.1}", per_sec / 1e9) }
            };
            text += &format!(
                "{:<48} {:>7} {:>10.3} {:>5.1} % {:>10} {:>9} {:>9}\n",
                row.name,
                row.calls,
                1e3 * row.self_secs / self.steps.max(1) as f64,
                100.0 * row.self_secs / self.secs.max(1e-9),
                if row.bytes == 0 { String::new() } else { units::bytes(row.bytes) },
                rate(row.bytes, row.bytes_per_sec()),
                rate(row.flops, row.flops_per_sec()),
            );
        }
        text
    }
}

/// Returns the nanoseconds of each of `spans` without those of its children. The spans are sorted
/// by start, longer ones first.
fn self_nanos(spans: &[&TraceSpan]) -> Vec<u64> {
    let mut own: Vec<u64> = spans.iter().map(|span| span.nanos).collect();
    // Indices of the spans that are open at the start of the current one.
    let mut open: Vec<usize> = Vec::new();
    for (index, span) in spans.iter().enumerate() {
        while open.last().is_some_and(|last| spans[*last].start + spans[*last].nanos <= span.start) {
            open.pop();
        }
        if let Some(parent) = open.last() {
            own[*parent] = own[*parent].saturating_sub(span.nanos);
        }
        open.push(index);
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn self_time_leaves_out_what_is_inside() {
        let span = |info, start, nanos| TraceSpan { info, thread: 0, start, nanos };
        let product = |bytes| SpanInfo::op("matmul").dims(&[2, 3, 4]).bytes(bytes).flops(48);
        let block = |index| SpanInfo::new(SpanKind::Segment, "forward").detail("block").index(index);
        let events = TraceEvents {
            // In the order of their ends, as a recorder has them.
            spans: vec![
                span(product(5), 100, 300),
                span(SpanInfo::op("add"), 400, 100),
                span(block(0), 100, 500),
                span(product(7).dims(&[2, 3, 5]), 600, 200),
                span(SpanInfo { name: RECOMPUTE, ..block(1) }, 600, 200),
                span(SpanInfo::new(SpanKind::Phase, "forward"), 100, 800),
                span(SpanInfo::new(SpanKind::Step, "step").index(3), 0, 1000),
                TraceSpan { thread: 1, ..span(SpanInfo::new(SpanKind::Save, "write"), 0, 5000) },
            ],
            ..TraceEvents::default()
        };
        let table = OpTable::new(&events);
        let rows: Vec<(&str, u64, u64, u64)> = table
            .by_shape
            .iter()
            .map(|row| (row.name.as_str(), row.calls, (row.self_secs * 1e9).round() as u64, row.bytes))
            .collect();
        let expected = [
            ("matmul 2x3x4", 1, 300, 5),
            ("matmul 2x3x5", 1, 200, 7),
            ("step", 1, 200, 0),
            ("add", 1, 100, 0),
            ("forward", 1, 100, 0),
            ("forward block", 1, 100, 0),
            ("recompute block", 1, 0, 0),
        ];
        assert_eq!(rows, expected);
        let OpRow { name, calls, flops, .. } = &table.operations[0];
        assert_eq!((table.steps, name.as_str(), *calls, *flops), (1, "matmul", 2, 96));
        assert!((table.secs - 1e-6).abs() < 1e-15 && (table.recompute_secs - 2e-7).abs() < 1e-15);
        assert!((table.secs_of(SpanKind::Op) - 6e-7).abs() < 1e-15);
        let line =
            table.text().lines().nth(1).expect("a row").split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(line, "matmul 2 0.001 50.0 % 12 B 0.0 0.2");
    }
}
