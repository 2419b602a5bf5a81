//! Sections for inputs and plan of a run: answers before and after, rows with their masks, data,
//! memory by plan and by measurement, the recipe.

use super::markup::{escape, percent, section, table};
use super::{AnsweredQuestion, MaskedRow};
use crate::memory::{MemoryComparison, PhaseMemory};
use crate::metrics::{EvalReport, HeldOutAnswer, MetricsEntry};
use crate::units;

/// The bars of memory in SVG units: width, and height of one.
const BARS: (f64, f64) = (460.0, 16.0);

/// Returns the answers before and after training, beside the expected ones.
pub(super) fn answers(questions: &[AnsweredQuestion]) -> String {
    if questions.is_empty() {
        return String::new();
    }
    let mut html = String::from(
        "<table class=\"answers\"><caption>Held-out questions, answered with the likeliest tokens</caption>\n\
         <thead><tr><th scope=\"col\">expected</th><th scope=\"col\">before</th><th scope=\"col\">after</th></tr></thead>\n",
    );
    for one in questions {
        let cell = |answer: &Option<String>| match answer {
            None => "<td>–</td>".to_owned(),
            Some(text) if *text == one.expected => {
                format!("<td class=\"right\">{} <span>✓ as expected</span></td>", escape(text))
            }
            Some(text) => format!("<td>{}</td>", escape(text)),
        };
        html += &format!(
            "<tbody><tr><th colspan=\"3\" scope=\"rowgroup\">{}</th></tr>\n<tr><td>{}</td>{}{}</tr></tbody>\n",
            escape(&one.question),
            escape(&one.expected),
            cell(&one.before),
            cell(&one.after)
        );
    }
    section("Answers before and after", &(html + "</table>\n"))
}

/// Returns the answers of each evaluation to the held-out questions, if the metrics hold them.
pub(super) fn samples(entries: &[MetricsEntry]) -> String {
    let asked = entries.iter().filter_map(|entry| match entry {
        MetricsEntry::Eval(report) if !report.eval_samples.is_empty() => Some(report),
        _ => None,
    });
    let evaluations: Vec<&EvalReport> = asked.collect();
    let mut questions: Vec<&HeldOutAnswer> = Vec::new();
    for sample in evaluations.iter().flat_map(|report| &report.eval_samples) {
        if !questions.iter().any(|known| known.prompt == sample.prompt) {
            questions.push(sample);
        }
    }
    if questions.is_empty() {
        return String::new();
    }
    let mut html = String::from("<table class=\"answers\"><caption>Answers at each evaluation</caption>\n");
    for question in questions {
        html += &format!(
            "<tbody><tr><th colspan=\"2\" scope=\"rowgroup\">{}</th></tr>\n<tr><td>expected</td><td>{}</td></tr>\n",
            escape(&question.prompt),
            escape(&question.expected)
        );
        for report in &evaluations {
            let of_question = report.eval_samples.iter().find(|sample| sample.prompt == question.prompt);
            if let Some(HeldOutAnswer { answer, .. }) = of_question {
                html += &format!("<tr><td>step {}</td><td>{}</td></tr>\n", report.step, escape(answer));
            }
        }
        html += "</tbody>\n";
    }
    section("Answers at each evaluation", &(html + "</table>\n"))
}

/// Returns rows as the model sees them, with the trained text marked.
pub(super) fn rows(rows: &[MaskedRow]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut html = String::from(
        "<p>The model learns the <mark>marked and underlined</mark> text and only reads the rest. Tokens that the chat template \
         adds are shown too.</p>\n<ol class=\"rows\">\n",
    );
    let omitted = |count: usize| match count {
        0 => String::new(),
        count => format!("<em>[{count} tokens more]</em>"),
    };
    for row in rows {
        html += &format!(
            "<li><div>{}: {} of {} tokens learned</div>\n<p class=\"row\">{}",
            escape(&row.origin),
            row.trained_tokens,
            row.tokens,
            omitted(row.omitted_before)
        );
        for (text, is_trained) in &row.pieces {
            let text = escape(text);
            html += &if *is_trained { format!("<mark>{text}</mark>") } else { text };
        }
        html += &format!("{}</p></li>\n", omitted(row.omitted_after));
    }
    section("Training rows and their masks", &(html + "</ol>\n"))
}

/// Returns the summary of each data set.
pub(super) fn data(sets: &[(&str, String)]) -> String {
    let set = |(name, text): &(&str, String)| {
        format!("<h3>{}</h3>\n<pre class=\"wrap\">{}</pre>\n", escape(name), escape(text.trim_end()))
    };
    section("Data", &sets.iter().map(set).collect::<String>())
}

/// Returns planned memory by cause and in total, beside the measured peak.
pub(super) fn memory(memory: &MemoryComparison) -> String {
    if memory.causes.is_empty() {
        return String::new();
    }
    let several = memory.ranks > 1;
    let row = |name: String, planned: String, measured: &str| vec![name, planned, measured.to_owned()];
    let of_rank = if several { ", a rank" } else { "" };
    let mut rows: Vec<Vec<String>> = memory
        .causes
        .iter()
        .map(|(cause, bytes)| row(format!("{cause}{of_rank}"), units::bytes(*bytes), ""))
        .collect();
    if several {
        let a_rank: u64 = memory.causes.iter().map(|(_, bytes)| bytes).sum();
        let all = units::bytes(a_rank.saturating_mul(memory.ranks));
        rows.push(row(format!("all {} ranks of the process", memory.ranks), all, ""));
    }
    if memory.shared > 0 {
        rows.push(row("the process itself".into(), units::bytes(memory.shared), ""));
    }
    let peak = memory.peak.map_or_else(|| "not measured".to_owned(), units::bytes);
    rows.push(row("in all, at the peak".into(), units::bytes(memory.predicted()), &peak));
    if let Some(share) = memory.difference() {
        rows.push(row("difference".into(), String::new(), &format!("{:+.1} %", 100.0 * share)));
    }
    if memory.host > 0 {
        let host = units::bytes(memory.host);
        rows.push(row("in host memory, beside the device".into(), host, "not measured"));
    }
    let note = match memory.peak {
        Some(_) => "The measured memory is a total; only the plan splits it by cause.",
        None => "This machine cannot measure this memory; all figures are predictions.",
    };
    let body = format!(
        "<p>{note}</p>\n{}{}{}",
        bars(memory),
        table("Memory by plan and by measurement", &["cause", "planned", "measured"], &rows),
        phases(memory)
    );
    section("Plan and actual", &body)
}

/// Returns the planned and the measured peak of each phase.
fn phases(memory: &MemoryComparison) -> String {
    if memory.phases.is_empty() {
        return String::new();
    }
    let has_device = memory.phases.iter().any(|phase| phase.device > 0);
    let mut head = vec!["phase", "planned at most", "host"];
    head.extend(has_device.then_some("GPU"));
    let row = |phase: &PhaseMemory| {
        let mut cells = vec![phase.name.to_owned()];
        let measured = |bytes: u64| if bytes > 0 { units::bytes(bytes) } else { "no higher".to_owned() };
        cells.extend([units::bytes(phase.planned), measured(phase.host)]);
        cells.extend(has_device.then(|| measured(phase.device)));
        cells
    };
    let rows: Vec<Vec<String>> = memory.phases.iter().map(row).collect();
    table(
        "Most memory in each phase; a process keeps its host memory, so only a phase above all earlier ones has a figure",
        &head,
        &rows,
    )
}

/// Returns the plan by cause as one bar, and below it the peak on the same scale.
fn bars(memory: &MemoryComparison) -> String {
    let (width, height) = BARS;
    let predicted = memory.predicted();
    let scale = width / predicted.max(memory.peak.unwrap_or(0)).max(1) as f64;
    let text = format!("Memory: {memory}.");
    let mut svg = format!(
        "<figure><svg class=\"bars\" viewBox=\"0 0 {width} {}\" role=\"img\" aria-labelledby=\"bars-title bars-text\">\n\
         <title id=\"bars-title\">Memory planned and measured</title><desc id=\"bars-text\">{}</desc>\n",
        2.0 * height + 6.0,
        escape(&text)
    );
    let (mut at, mut keys) = (0.0, String::new());
    let all_ranks = memory.causes.iter().map(|(cause, bytes)| (*cause, bytes.saturating_mul(memory.ranks)));
    let shared = Some(("the process itself", memory.shared)).filter(|(_, bytes)| *bytes > 0);
    for (n, (cause, bytes)) in all_ranks.chain(shared).filter(|(_, bytes)| *bytes > 0).enumerate() {
        let (length, class) = (bytes as f64 * scale, format!("s{}", n % 8));
        svg += &format!(
            "<rect class=\"{class}\" x=\"{at:.1}\" y=\"0\" width=\"{length:.1}\" height=\"{height}\"><title>{cause}: {}</title></rect>\n",
            units::bytes(bytes)
        );
        let share = percent(bytes as f64 / predicted.max(1) as f64);
        keys += &format!(" <span class=\"key\"><i class=\"{class} area\"></i>{cause} {share}</span>");
        at += length;
    }
    if let Some(peak) = memory.peak {
        svg += &format!(
            "<rect class=\"peak\" x=\"0\" y=\"{}\" width=\"{:.1}\" height=\"{height}\"><title>peak: {}</title></rect>\n",
            height + 6.0,
            peak as f64 * scale,
            units::bytes(peak)
        );
        keys += " <span class=\"key\"><i class=\"peak area\"></i>measured peak</span>";
    }
    format!("{svg}</svg><figcaption>{keys}</figcaption></figure>\n")
}

/// Returns the resolved recipe, folded.
pub(super) fn recipe(toml: &str) -> String {
    let toml = toml.trim_end();
    if toml.is_empty() {
        return String::new();
    }
    let folded = format!(
        "<details><summary>All recipe keys of the run</summary>\n<pre>{}</pre></details>\n",
        escape(toml)
    );
    section("Recipe", &folded)
}
