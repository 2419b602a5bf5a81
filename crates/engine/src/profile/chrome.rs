//! Writes a trace as JSON in Chrome's trace event format, which Perfetto and chrome://tracing open.
//! It has a process for each rank, complete events ("X") for spans, counters ("C") for memory, and
//! metadata ("M") for names. Times are in microseconds.

use std::path::Path;

use serde_json::json;

use crate::error::{Error, Result};
use crate::runtime::trace::{SpanInfo, SpanKind, TraceEvents, base_nanos};
use crate::weights::write_text;

/// Names of a rank's threads, by their indices.
const THREADS: [&str; 2] = ["rank", "checkpoint writer"];

/// The data of a trace about its rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct TracedRank {
    /// Its index among all ranks.
    pub(super) rank: usize,
    /// Number of all ranks.
    pub(super) ranks: usize,
    /// Bytes that the rank sent in the traced steps, as counted by its groups.
    pub(super) sent_bytes: u64,
}

/// Writes the trace of a rank to `path`.
///
/// # Errors
/// The disk is full or fails.
pub(super) fn write(path: &Path, of: TracedRank, events: &TraceEvents) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| Error::io("make", folder, &e))?;
    }
    write_text(path, &text(of, events)).map(drop)
}

/// Returns the text of the whole file, one event per line.
fn text(of: TracedRank, events: &TraceEvents) -> String {
    let rank = of.rank;
    let head = json!({
        "rank": rank,
        "ranks": of.ranks,
        "sent_bytes": of.sent_bytes,
        "dropped_events": events.dropped,
        "program": concat!("finetune ", env!("CARGO_PKG_VERSION")),
    });
    let base = base_nanos();
    let mut out = format!(
        "{{\"displayTimeUnit\":\"ms\",\"baseTimeNanoseconds\":{base},\"otherData\":{head},\"traceEvents\":[\n"
    );
    let name = |of: &str, thread: usize, name: &str| json!({"ph": "M", "name": of, "pid": rank, "tid": thread, "args": {"name": name}});
    let mut lines = vec![name("process_name", 0, &format!("rank {rank}"))];
    lines.push(json!({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}));
    lines.extend(THREADS.iter().enumerate().map(|(thread, text)| name("thread_name", thread, text)));
    let mut all: Vec<String> = lines.iter().map(ToString::to_string).collect();
    // Sorted by start, longer spans first: an enclosing span comes before those inside it.
    let mut spans: Vec<_> = events.spans.iter().rev().collect();
    spans.sort_by_key(|span| (span.thread, span.start, u64::MAX - span.nanos));
    for span in spans {
        let (title, kind) = (json!(span.info.title()), span.info.kind.name());
        let (start, took) = (micros(span.start), micros(span.nanos));
        all.push(format!(
            "{{\"ph\":\"X\",\"name\":{title},\"cat\":\"{kind}\",\"pid\":{rank},\"tid\":{},\"ts\":{start},\"dur\":{took},\"args\":{{{}}}}}",
            span.thread,
            arguments(&span.info)
        ));
    }
    for value in &events.values {
        let (name, at) = (json!(value.name), micros(value.at));
        all.push(format!(
            "{{\"ph\":\"C\",\"name\":{name},\"pid\":{rank},\"tid\":0,\"ts\":{at},\"args\":{{\"bytes\":{}}}}}",
            value.value
        ));
    }
    out += &all.join(",\n");
    out += "\n]}\n";
    out
}

/// Formats nanoseconds as microseconds with all digits.
fn micros(nanos: u64) -> String {
    format!("{}.{:03}", nanos / 1000, nanos % 1000)
}

/// Returns the other data of a span, as members of a JSON object.
fn arguments(info: &SpanInfo) -> String {
    let mut text = String::new();
    let mut add = |name: &str, value: u64| {
        let comma = if text.is_empty() { "" } else { "," };
        text += &format!("{comma}\"{name}\":{value}");
    };
    if info.bytes > 0 || info.kind == SpanKind::Collective {
        add("bytes", info.bytes);
    }
    if info.flops > 0 {
        add("flops", info.flops);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::trace::{TraceSpan, TraceValue};

    #[test]
    fn events_are_those_of_the_format() {
        let span = |info, start, nanos| TraceSpan { info, thread: 0, start, nanos };
        let events = TraceEvents {
            spans: vec![
                span(SpanInfo::op("matmul").dims(&[2, 3, 4]).detail("nt").bytes(9).flops(48), 1500, 1250),
                span(SpanInfo::new(SpanKind::Step, "step").index(7), 1500, 2000),
                span(SpanInfo::new(SpanKind::Collective, "barrier \"x\""), 2800, 1),
            ],
            values: vec![TraceValue { name: "memory", at: 1500, value: 4096 }],
            dropped: 0,
        };
        let text = text(TracedRank { rank: 3, ranks: 4, sent_bytes: 5 }, &events);
        let parsed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(parsed["otherData"]["sent_bytes"], 5);
        let lines: Vec<&str> = text.lines().skip(5).collect();
        assert_eq!(
            lines,
            [
                r#"{"ph":"X","name":"step 7","cat":"step","pid":3,"tid":0,"ts":1.500,"dur":2.000,"args":{}},"#,
                r#"{"ph":"X","name":"matmul 2x3x4 nt","cat":"op","pid":3,"tid":0,"ts":1.500,"dur":1.250,"args":{"bytes":9,"flops":48}},"#,
                r#"{"ph":"X","name":"barrier \"x\"","cat":"collective","pid":3,"tid":0,"ts":2.800,"dur":0.001,"args":{"bytes":0}},"#,
                r#"{"ph":"C","name":"memory","pid":3,"tid":0,"ts":1.500,"args":{"bytes":4096}}"#,
                "]}",
            ]
        );
    }
}
