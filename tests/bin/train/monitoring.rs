//! Monitoring of a run: the page for Prometheus, and the warning about a slow rank.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};

use finetune::report::endpoint::{FAMILIES, FamilyKind};
use insta::assert_snapshot;
use serde_json::Value;

use crate::test_dir::{TestDir, lora};

/// A started run, and the address of its page.
struct Following {
    child: Child,
    address: String,
    stderr: BufReader<std::process::ChildStderr>,
    said: String,
}

impl Following {
    fn start(dir: &TestDir, more: &[&str]) -> Self {
        let args = lora(&[&["--set", "log.metrics_address=127.0.0.1:0"], more].concat());
        let mut command = dir.command(&args);
        // Slow steps, so that a busy machine still observes each of them.
        command.env("FINETUNE_FAULT", "0:data:slow=100ms").stderr(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let mut run = Following { child, address: String::new(), stderr, said: String::new() };
        while run.address.is_empty() {
            let from = run.said.len();
            assert!(run.stderr.read_line(&mut run.said).unwrap() > 0, "{}", run.said);
            if let Some(rest) = run.said[from..].strip_prefix("metrics at http://") {
                run.address = rest.trim_end().strip_suffix("/metrics").unwrap().to_owned();
            }
        }
        run
    }

    /// Returns the page while the run serves it.
    fn page(&self) -> Option<String> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, page) = answer.split_once("\r\n\r\n")?;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        Some(page.to_owned())
    }

    fn finish(mut self) -> String {
        self.stderr.read_to_string(&mut self.said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{}", self.said);
        self.said
    }
}

/// Returns the value of a figure, by its name with labels.
fn figure(page: &str, name: &str) -> Option<f64> {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    Some(line.parse().unwrap())
}

/// Returns a field of a line, parsed like the page is: serde_json reads some numbers slightly
/// differently than written.
fn field(line: &str, name: &str) -> Option<f64> {
    let rest = line.split_once(&format!("\"{name}\":"))?.1;
    Some(rest[..rest.find([',', '}'])?].parse().unwrap())
}

/// Returns the seconds of each rank in a line.
fn rank_secs(line: &str) -> Vec<f64> {
    let rest = line.split_once("\"rank_secs\":[").unwrap().1;
    rest[..rest.find(']').unwrap()].split(',').map(|secs| secs.parse().unwrap()).collect()
}

fn lines(dir: &TestDir) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Figures with their fields in the line of a step, and in that of an evaluation.
const OF_STEP: [(&str, &str); 10] = [
    ("finetune_epochs", "epoch"),
    ("finetune_loss_nats", "loss"),
    ("finetune_learning_rate", "learning_rate"),
    ("finetune_gradient_norm", "grad_norm"),
    ("finetune_step_tokens", "tokens"),
    ("finetune_tokens_per_second", "tokens_per_sec"),
    ("finetune_step_seconds", "step_secs"),
    ("finetune_peak_memory_bytes", "peak_bytes"),
    ("finetune_mfu_ratio", "mfu"),
    ("finetune_hfu_ratio", "hfu"),
];
const OF_EVAL: [(&str, &str); 5] = [
    ("finetune_eval_loss_nats", "eval_loss"),
    ("finetune_eval_perplexity", "eval_perplexity"),
    ("finetune_eval_tokens", "eval_tokens"),
    ("finetune_eval_token_accuracy_ratio", "eval_token_accuracy"),
    ("finetune_eval_exact_match_ratio", "eval_exact_match"),
];
const PARTS: [&str; 7] = ["data", "forward", "backward", "exposed", "update", "save", "other"];

/// Checks that the figures of a page equal the line of its step.
fn compare_step(page: &str, line: &str) {
    for (name, of) in OF_STEP {
        assert_eq!(figure(page, name), field(line, of), "{name}\n{line}\n{page}");
    }
    for part in PARTS {
        let name = format!("finetune_step_part_seconds{{part=\"{part}\"}}");
        assert_eq!(figure(page, &name), field(line, &format!("{part}_secs")), "{name}");
    }
    for (rank, secs) in rank_secs(line).into_iter().enumerate() {
        let name = format!("finetune_rank_seconds{{rank=\"{rank}\"}}");
        assert_eq!(figure(page, &name), Some(secs), "{name}");
    }
    assert_eq!(rank_secs(line).len(), 2);
    let (mfu, hfu) = (field(line, "mfu"), field(line, "hfu"));
    assert!(mfu > Some(0.0) && hfu > mfu, "{line}");
}

#[test]
fn the_page_of_a_running_run_says_what_metrics_jsonl_says() {
    let dir = TestDir::new();
    let more = ["--ranks", "2", "--eval-dataset", "rows.jsonl", "--set", "train.max_steps=30"];
    let sets = ["--set", "eval.steps=10", "--set", "log.peak_tflops=0.05", "--set", "train.recompute=block"];
    let run = Following::start(&dir, &[&more[..], &sets].concat());
    let mut pages = Vec::new();
    while let Some(page) = run.page() {
        pages.push(page);
    }
    let address = run.address.clone();
    run.finish();
    assert!(TcpStream::connect(address).is_err(), "the page outlives the run");
    let text = std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let line_of = |step: f64, has: &str| -> &str {
        lines.iter().find(|line| field(line, "step") == Some(step) && field(line, has).is_some()).unwrap()
    };
    let mut seen = std::collections::BTreeSet::new();
    for page in &pages {
        let info = page.contains("finetune_run_info{model=\"model\",run=\"out\",version=");
        assert!(info, "{page}");
        if let Some(step) = figure(page, "finetune_step") {
            compare_step(page, line_of(step, "loss"));
            let tokens = lines.iter().filter(|line| field(line, "step") <= Some(step));
            let tokens: f64 = tokens.filter_map(|line| field(line, "tokens")).sum();
            assert_eq!(figure(page, "finetune_tokens_total"), Some(tokens));
            assert_eq!(figure(page, "finetune_steps_total"), Some(step));
            assert_eq!(figure(page, "finetune_planned_steps"), Some(30.0));
            assert_eq!(figure(page, "finetune_skipped_steps_total"), Some(0.0));
            assert_eq!(figure(page, "finetune_eta_seconds") > Some(0.0), step < 30.0, "{page}");
            seen.insert(step as u64);
        }
        if let Some(step) = figure(page, "finetune_eval_step") {
            let line = line_of(step, "eval_loss");
            for (name, of) in OF_EVAL {
                assert_eq!(figure(page, name), field(line, of), "{name} of step {step}");
            }
        }
    }
    assert!(seen.len() >= 3, "only the steps {seen:?} in {} pages", pages.len());
}

#[test]
fn a_client_that_is_slow_does_not_end_or_hold_up_a_run() {
    let dir = TestDir::new();
    let run = Following::start(&dir, &[]);
    // Idle connections, open until the run is over.
    let silent: Vec<_> = (0..40).filter_map(|_| TcpStream::connect(&run.address).ok()).collect();
    run.finish();
    assert_eq!(lines(&dir).len(), 4);
    drop(silent);
}

#[test]
fn a_run_does_not_begin_without_its_page() {
    let dir = TestDir::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let args = lora(&["--set", &format!("log.metrics_address={address}")])
        .iter()
        .map(|arg| (*arg).to_owned())
        .collect::<Vec<_>>();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = dir.command(&args).output().unwrap();
    let told = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{told}");
    let from = told.find("error:").unwrap();
    assert_snapshot!(told[from..].replace(&address, "[ADDRESS]"), @"
    error: cannot serve metrics (`log.metrics_address`)
      caused by: cannot listen at [ADDRESS]
      caused by: Address already in use (os error 98)
    hint: write another port, such as `--set log.metrics_address=127.0.0.1:9465`; port 0 takes a free one
    ");
    assert!(!dir.path("out/metrics.jsonl").exists() && !dir.path("out/run.json").exists());
}

/// Returns the error of a run with these keys.
fn refused(sets: &[&str]) -> String {
    let dir = TestDir::new();
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let done = dir.command(&lora(&sets)).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    dir.told(&done.stderr)
}

#[test]
fn addresses_that_are_none_are_refused() {
    assert_snapshot!(refused(&["log.metrics_address=:9464"]), @r#"
    error: cannot use these settings
      caused by: --set log.metrics_address=:9464: `log.metrics_address` is ":9464"; accepted: an IP address and a port, such as "127.0.0.1:9464", "[::1]:9464", or "0.0.0.0:9464" for every host that can reach this machine; port 0: any free port, which finetune prints
    hint: `finetune recipes show reference` documents every key
    "#);
    for bad in ["9464", "localhost", "localhost:9464", "127.0.0.1", "127.0.0.1:99999"] {
        let told = refused(&[&format!("log.metrics_address=\"{bad}\"")]);
        assert!(told.contains("accepted: an IP address and a port, such as"), "{bad}: {told}");
    }
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_slow_rank_is_named_within_20_steps() {
    let dir = TestDir::new();
    let args = lora(&["--ranks", "2", "--set", "train.max_steps=20"]);
    let mut run = dir.command(&args);
    run.env("FINETUNE_CLOCK", "planted").env("FINETUNE_FAULT", "1:backward:slow=150ms");
    let done = run.output().unwrap();
    let told = dir.told(&done.stderr);
    assert!(done.status.success(), "{told}");
    let named: Vec<&str> =
        told.lines().filter(|line| line.contains(" is the slowest, and the others wait for it")).collect();
    assert_eq!(named.len(), 1, "{told}");
    assert!(
        named[0].starts_with("warning: step 1") && named[0].contains(": rank 1 is the slowest"),
        "{told}"
    );
}

fn page_text(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// docs/monitoring.md lists every name with its help text, in the table's order.
#[test]
fn the_page_has_the_names() {
    let page = page_text("docs/monitoring.md");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| `finetune_")).collect();
    let expected = FAMILIES.map(|family| {
        let kind = match family.kind {
            FamilyKind::Gauge => "gauge",
            FamilyKind::Counter => "counter",
        };
        let labels = family.labels.join(", ");
        let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
        format!("| `{}{labels}` | {kind} | {} |", family.name, family.help)
    });
    assert_eq!(rows, expected);
}

/// The dashboard queries only names that exist, and all of the important ones.
#[test]
fn the_dashboard_asks_for_what_is_served() {
    let dashboard: Value = serde_json::from_str(&page_text("docs/grafana.json")).unwrap();
    let mut asked = std::collections::BTreeSet::new();
    let name = regex::Regex::new(r"\bfinetune_\w+").unwrap();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expr = target["expr"].as_str().unwrap();
            let names: Vec<&str> = name.find_iter(expr).map(|matched| matched.as_str()).collect();
            assert!(!names.is_empty(), "{expr}");
            asked.extend(names.into_iter().map(str::to_owned));
        }
    }
    for one in &asked {
        assert!(FAMILIES.iter().any(|family| family.name == one), "nobody serves {one}");
    }
    for wanted in [
        "loss_nats",
        "eval_loss_nats",
        "learning_rate",
        "gradient_norm",
        "tokens_per_second",
        "mfu_ratio",
        "step_part_seconds",
        "rank_seconds",
        "peak_memory_bytes",
        "eta_seconds",
    ] {
        assert!(asked.contains(&format!("finetune_{wanted}")), "no panel of {wanted}");
    }
}
