//! `report.html`: contents and order, well-formedness, no external resources, and text from a run
//! that stays text.

use finetune::report::html::{AnsweredQuestion, HtmlReport, MaskedRow};
use finetune::report::memory::MemoryComparison;
use finetune::report::metrics::{EvalReport, MetricsEntry, SkippedStep, StepReport};

/// Text that would become markup if it were not escaped.
const HOSTILE: &str = "</script><b>\"'&</pre></style><img src=x onerror=alert(1)>";

fn step(step: u64) -> StepReport {
    StepReport {
        step,
        loss: 2.0 / step as f64,
        learning_rate: 2e-4,
        grad_norm: 0.75,
        tokens: 512,
        step_secs: 0.25,
        tokens_per_sec: 2048.0,
        peak_bytes: 30 << 20,
        ..StepReport::default()
    }
}

/// A step with measured times, of a run on three ranks.
fn told(number: u64) -> StepReport {
    StepReport {
        forward_secs: 0.0625,
        backward_secs: 0.125,
        exposed_secs: 0.0625,
        rank_secs: vec![0.125, 0.25, 0.0],
        ..step(number)
    }
}

fn entries(of: fn(u64) -> StepReport) -> Vec<MetricsEntry> {
    let mut entries = vec![MetricsEntry::Eval(EvalReport::new(0, 3.0, 10))];
    entries.extend((1..=50).map(|n| MetricsEntry::Step(of(n))));
    entries
        .push(MetricsEntry::Eval(EvalReport { eval_exact_match: Some(0.5), ..EvalReport::new(50, 1.0, 10) }));
    entries
}

fn memory() -> MemoryComparison {
    let causes = vec![("weights", 30 << 20), ("activations", 10 << 20)];
    MemoryComparison { causes, ranks: 1, shared: 0, host: 0, peak: Some(30 << 20), phases: Vec::new() }
}

fn question(text: &str) -> AnsweredQuestion {
    let answer = |part: &str| Some(format!("{part}{text}"));
    AnsweredQuestion {
        question: format!("which {text}"),
        expected: format!("red{text}"),
        before: answer("blue"),
        after: answer("red"),
    }
}

fn row(text: &str) -> MaskedRow {
    MaskedRow {
        origin: format!("rows{text}.jsonl:3"),
        pieces: vec![(format!("asked{text}"), false), (format!("answered{text}"), true)],
        tokens: 500,
        trained_tokens: 4,
        omitted_before: 20,
        omitted_after: 0,
    }
}

/// Returns the page of a run with `text` in every text field.
fn page(text: &str, entries: &[MetricsEntry], memory: MemoryComparison) -> String {
    HtmlReport {
        title: &format!("out{text}"),
        summary: &format!("a model{text}"),
        notice: Some(format!("stopped{text}")),
        headline: &[("tokens", format!("25K{text}"))],
        figures: &[("method", format!("LoRA{text}"))],
        questions: &[question(text)],
        rows: &[row(text)],
        data: &[("Training", format!("80 rows{text}\n"))],
        memory,
        recipe: &format!("x = 1{text}"),
        entries,
    }
    .render()
}

/// Returns the tags of a page, and the text between them.
fn tags(page: &str) -> Vec<&str> {
    let inside = page.split('<').skip(1).map(|rest| rest.split_once('>').expect("a tag that never ends").0);
    inside.collect()
}

/// Checks that tags are closed in order, ids are unique, and referenced ids exist.
fn assert_well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut ids: Vec<&str> = Vec::new();
    for tag in tags(page) {
        let name = tag.split([' ', '\n']).next().unwrap();
        if let Some(closed) = name.strip_prefix('/') {
            assert_eq!(open.pop(), Some(closed), "in {tag}");
        } else if !tag.ends_with('/') && !["!doctype", "meta"].contains(&name) {
            open.push(name);
        }
        ids.extend(tag.split_once(" id=\"").map(|(_, rest)| rest.split('"').next().unwrap()));
    }
    assert_eq!(open, [""; 0]);
    let mut once = ids.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), ids.len(), "{ids:?}");
    for named in page.split("aria-labelledby=\"").skip(1) {
        assert!(named.split('"').next().unwrap().split(' ').all(|id| ids.contains(&id)), "{named:.60}");
    }
}

fn assert_stands_alone(page: &str) {
    for outside in ["src=", "href=", "url(", "@import", "<script", "<link", "<iframe", "http://", "https://"]
    {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn what_people_ask_first_comes_first() {
    let page = page("", &entries(told), memory());
    assert_well_formed(&page);
    assert_stands_alone(&page);
    let headings: Vec<&str> =
        page.split("<h2>").skip(1).map(|rest| rest.split("</h2>").next().unwrap()).collect();
    let wanted = [
        "Answers before and after",
        "Training rows and their masks",
        "Loss and learning rate",
        "Throughput and memory",
        "Where the time of a step went",
        "Ranks",
        "Data",
        "Plan and actual",
        "Recipe",
    ];
    assert_eq!(headings, wanted);
    let opening = page.split("</header>").next().unwrap();
    for wanted in [
        "<h1>out</h1>",
        "<p class=\"summary\">a model</p>",
        "<dt>held-out loss</dt><dd>3.0000 → 1.0000</dd>",
        "<dt>exact match, held out</dt><dd>50.0\u{a0}%</dd>",
        "<dt>training loss</dt><dd>2.0000 → 0.0400</dd>",
        "<dt>tokens</dt><dd>25K</dd>",
        "<dt>method</dt><dd>LoRA</dd>",
    ] {
        assert!(opening.contains(wanted), "no `{wanted}` in {opening}");
    }
    assert!(page.contains("<td>blue</td><td class=\"right\">red <span>✓ as expected</span></td>"), "{page}");
    assert!(page.contains("<em>[20 tokens more]</em>asked<mark>answered</mark></p>"), "{page}");
    assert!(page.contains("<details><summary>"), "the recipe is folded");
}

#[test]
fn whatever_stands_in_a_run_stays_text() {
    let page = page(HOSTILE, &entries(told), memory());
    assert_well_formed(&page);
    let shown = HOSTILE
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;");
    // Title, heading and each field: nothing is omitted.
    assert_eq!(page.matches(&shown).count(), 15);
    for gone in ["<b>", "<img", "</script>"] {
        assert!(!page.contains(gone), "{gone}");
    }
    assert_eq!(page.matches("</style>").count(), 1);
    let skipped = SkippedStep { step: 3, skipped: HOSTILE.into(), back_to: Some(2) };
    let page = HtmlReport { entries: &[MetricsEntry::Skipped(skipped)], ..HtmlReport::default() }.render();
    assert_well_formed(&page);
    assert!(page.contains(&format!("<td>{shown}</td><td>checkpoint-2</td>")), "{page}");
}

/// The held-out loss between two evaluations is unknown, so no line joins them.
#[test]
fn evaluations_are_points_that_no_line_joins() {
    let page = page("", &entries(step), memory());
    let loss = page.split("<title id=\"loss-title\">").nth(1).unwrap().split("</svg>").next().unwrap();
    let lines: Vec<&str> = loss.split("<polyline ").skip(1).collect();
    assert_eq!(lines.len(), 1, "{loss}");
    assert!(lines[0].starts_with("class=\"a\" points=\""), "{loss}");
    let points = lines[0].split('"').nth(3).unwrap();
    assert_eq!(points.split(' ').count(), 50);
    let dots: Vec<&str> = loss.split("<circle class=\"b\" ").skip(1).collect();
    assert_eq!(dots.len(), 2, "{loss}");
    // Step 0 is the left edge and step 50 the right one.
    assert!(dots[0].starts_with("cx=\"54.0\"") && dots[1].starts_with("cx=\"450.0\""), "{dots:?}");
    assert!(dots[0].contains("<title>held out, step 0: 3</title>"), "{dots:?}");
    assert!(loss.contains("held out: 3 nats per token at step 0, 1 nats per token at step 50."), "{loss}");
}

/// Marks the lowest loss after training began, the first of equal ones; the base's loss does not
/// count.
#[test]
fn the_best_evaluation_is_marked() {
    let mut all = vec![MetricsEntry::Eval(EvalReport::new(0, 0.5, 10))];
    all.extend((1..=300).map(|n| MetricsEntry::Step(step(n))));
    let loss = |step: u64| if step == 100 || step == 200 { 1.25 } else { 1.5 };
    all.extend((1..=60).map(|n| MetricsEntry::Eval(EvalReport::new(5 * n, loss(5 * n), 10))));
    let page = page("", &all, memory());
    assert_well_formed(&page);
    // The table has the newest 40 evaluations, from step 105 on, the first and the best.
    assert_eq!(page.matches("(best)").count(), 1, "{page}");
    assert!(page.contains("<th scope=\"row\">100</th><td>1.2500 (best)</td>"), "{page}");
    assert!(page.contains("<th scope=\"row\">200</th><td>1.2500</td>"), "{page}");
    let rings: Vec<&str> = page.split("<circle class=\"b ring\" ").skip(1).collect();
    assert_eq!(rings.len(), 1, "{page}");
    assert!(rings[0].contains("><title>best held out, step 100: 1.25</title>"), "{}", rings[0]);
    // Without an evaluation after the first step, nothing is marked.
    let page = HtmlReport { entries: &all[..10], ..HtmlReport::default() }.render();
    assert!(!page.contains("best") && !page.contains("<circle class=\"b ring\""), "{page}");
}

#[test]
fn light_and_dark_phone_and_paper_have_rules() {
    let page = HtmlReport::default().render();
    for rule in [
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">",
        "@media (prefers-color-scheme:dark){:root{",
        "@media (max-width:",
        "@media print{:root{color-scheme:light",
    ] {
        assert!(page.contains(rule), "no `{rule}`");
    }
    // Every colour of the light page has a dark one.
    let names = |from: &str| -> Vec<String> {
        let block = page.split(from).nth(1).unwrap().split('}').next().unwrap();
        let names = block.split("--").skip(1).map(|rest| rest.split(':').next().unwrap().to_owned());
        names.collect()
    };
    let light = names("{color-scheme:light dark;");
    assert!(light.contains(&"page".to_owned()) && light.contains(&"learned".to_owned()), "{light:?}");
    assert_eq!(names("(prefers-color-scheme:dark){:root{"), light);
    assert_eq!(names("@media print{:root{"), light);
}

#[test]
fn the_time_of_a_step_is_shown_where_metrics_tell_it() {
    let silent = page("", &entries(step), memory());
    assert!(!silent.contains("Where the time of a step went") && !silent.contains("<polygon"), "{silent}");
    assert!(!silent.contains("<h2>Ranks"), "a single rank waits for nobody");
    let page = page("", &entries(told), memory());
    assert_eq!(page.matches("<polygon ").count(), 3, "what took no time has no area");
    assert!(page.contains("<th scope=\"row\">backward</th><td>125.00 ms</td><td>50.0\u{a0}%</td>"), "{page}");
    // 50 steps of 0.25 s: the slowest rank computed all the time.
    let ranks = page.split("<h2>Ranks</h2>").nth(1).unwrap();
    let order: Vec<&str> = ranks.split("<th scope=\"row\">").skip(1).take(3).map(|rest| &rest[..1]).collect();
    assert_eq!(order, ["1", "0", "2"]);
    assert!(
        ranks.contains("<th scope=\"row\">0</th><td>6.2 s</td><td>6.2 s</td><td>50.0\u{a0}%</td>"),
        "{ranks}"
    );
}

#[test]
fn the_plan_stands_beside_what_was_measured() {
    let told = page("", &entries(step), memory());
    for wanted in [
        "<th scope=\"row\">weights</th><td>30.0 MiB</td><td></td>",
        "<th scope=\"row\">in all, at the peak</th><td>40.0 MiB</td><td>30.0 MiB</td>",
        "<th scope=\"row\">difference</th><td></td><td>-25.0 %</td>",
        "<rect class=\"peak\" x=\"0\" y=\"22\" width=\"345.0\"",
        "<polyline class=\"plan\"",
    ] {
        assert!(told.contains(wanted), "no `{wanted}` in {told}");
    }
    let unmeasured = page("", &entries(step), MemoryComparison { peak: None, host: 1 << 20, ..memory() });
    assert!(
        unmeasured.contains("all figures are predictions") && unmeasured.contains("<td>not measured</td>")
    );
    assert!(!unmeasured.contains("difference</th>") && !unmeasured.contains("class=\"peak\""));
    assert!(unmeasured.contains("in host memory, beside the device</th><td>1.00 MiB</td>"));
    let several = page("", &entries(step), MemoryComparison { ranks: 2, shared: 20 << 20, ..memory() });
    assert!(
        several.contains("weights, a rank</th>")
            && several.contains("all 2 ranks of the process</th><td>80.0 MiB")
    );
    assert!(several.contains("in all, at the peak</th><td>100 MiB</td>"), "{several}");
}

#[test]
fn a_page_of_nothing_is_still_a_page() {
    let page = HtmlReport { title: "t", ..HtmlReport::default() }.render();
    assert_well_formed(&page);
    assert!(!page.contains("<svg") && !page.contains("<h2>") && page.ends_with("</html>\n"));
    // One step is a point, and a hundred thousand are thinned out for the page.
    let one = HtmlReport { entries: &[MetricsEntry::Step(step(1))], ..HtmlReport::default() }.render();
    assert!(one.contains("<circle class=\"a\""), "{one}");
    assert_well_formed(&one);
    let mut many: Vec<MetricsEntry> = (1..=100_000).map(|n| MetricsEntry::Step(told(n))).collect();
    many.extend((1..=5_000).map(|n| MetricsEntry::Eval(EvalReport::new(20 * n, 1.0, 10))));
    let long = HtmlReport { entries: &many, ..HtmlReport::default() }.render();
    assert!(long.len() < 300_000, "{}", long.len());
}
