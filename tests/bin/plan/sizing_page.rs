//! Statements of docs/sizing.md beyond the command output that tests/runs/docs.rs compares:
//! sentences with figures, and the table of planned and actual runs.

use std::fs;
use std::path::Path;

use regex::Regex;
use serde_json::Value;

use crate::plan::sizing::{plan, shapes};
use crate::test_dir::TestDir;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the page with its words joined by single spaces.
fn page() -> String {
    let page = fs::read_to_string(root().join("docs/sizing.md")).unwrap();
    page.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the figures in the one sentence that matches a pattern.
fn figures(pattern: &str) -> Vec<f64> {
    let (page, pattern) = (page(), Regex::new(pattern).unwrap());
    let mut matches = pattern.captures_iter(&page);
    let sentence = matches.next().unwrap_or_else(|| panic!("docs/sizing.md does not say {pattern}"));
    assert!(matches.next().is_none(), "docs/sizing.md says {pattern} twice");
    sentence.iter().skip(1).map(|figure| figure.unwrap().as_str().parse().unwrap()).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

/// One of 7B's plans on eight cards.
fn seven_b(dir: &TestDir, sets: &[&str]) -> Value {
    let mut args = vec!["--on", "8xA100-80GB"];
    args.extend(sets.iter().flat_map(|set| ["--set", set]));
    plan(dir, "7B", &args)
}

#[test]
fn zero_saves_as_many_times_as_the_page_says() {
    let said = figures(r"with (\d+) bytes a parameter over (\d) ranks they save ([\d.]+) and ([\d.]+) times");
    let planned = seven_b(&shapes(), &[]);
    let rules = planned["conventions"].as_array().unwrap();
    let rule =
        &rules.iter().find(|rule| number(&rule["bytes_per_parameter"]) == said[0]).unwrap()["by_strategy"];
    assert_eq!(number(&planned["ranks"]), said[1]);
    let saves = |strategy: &str| (10.0 * number(&rule["ddp"]) / number(&rule[strategy])).round() / 10.0;
    assert_eq!([saves("zero1"), saves("zero2")], said[2..]);
}

#[test]
fn offload_moves_as_many_bytes_as_the_page_says() {
    let said = figures(
        r#"\(`parallel.offload = "optimizer"`\) moves (\d+) bytes a trained parameter a step over PCIe"#,
    );
    let planned = seven_b(&shapes(), &["parallel.strategy=fsdp", "parallel.offload=optimizer"]);
    let gbps = number(&planned["hardware"]["device"]["host_gbps"]);
    let moved = number(&planned["time"]["offload"]) * gbps * 1e9;
    let moved = moved / (number(&planned["parameters"]) / 8.0);
    assert!((moved - said[0]).abs() < 1e-6, "{moved}");
}

/// `T (6 w + …)` on one card: the counted operations follow from a plan's time and its share of the
/// peak.
#[test]
fn operations_are_those_that_the_page_says() {
    let said = figures(
        r"\((\d) operations a weight and token where it trains, (\d) where it is frozen under adapters, ([\d.]+) times attention's forward\)",
    );
    let dir = shapes();
    // Operations of a token: share of the peak times peak times step time, divided by the tokens.
    let operations = |method: &str, row: u64| {
        let row_set = format!("data.max_seq_len={row}");
        let sets = [
            "train.micro_batch_size=1",
            "train.gradient_accumulation_steps=1",
            "train.recompute=none",
            &row_set,
        ];
        let mut args = vec!["--on", "B200-180GB", "--recipe", method];
        args.extend(sets.iter().flat_map(|set| ["--set", set]));
        let planned = plan(&dir, "7B", &args);
        let time = &planned["time"];
        let peak = number(&planned["hardware"]["device"]["bf16_tflops"]) * 1e12;
        number(&time["mfu"]) * number(&time["total"]) * peak / row as f64
    };
    // Forward attention of 7B: 32 layers, 4 x 4096 operations a key, over half of the row.
    let attention = |row: f64| 32.0 * 4.0 * 4096.0 * row / 2.0;
    // 7B without its embedding.
    let weights = 6_738_415_616.0 - 32_000.0 * 4096.0 - 65.0 * 4096.0;
    let full = [1024, 4096].map(|row| operations("full", row));
    let of_attention = (full[1] - full[0]) / (attention(4096.0) - attention(1024.0));
    let of_weights = (full[0] - of_attention * attention(1024.0)) / weights;
    assert!(
        (of_weights - said[0]).abs() < 1e-3 && (of_attention - said[2]).abs() < 1e-3,
        "{of_weights} {of_attention}"
    );
    // Adapters add their own 6 operations to the 4 of each frozen weight.
    let lora = (operations("lora", 1024) - of_attention * attention(1024.0)) / weights;
    assert!((said[1]..said[1] + 0.1).contains(&lora), "{lora}");
}

#[test]
fn recomputing_costs_a_quarter_more() {
    assert!(page().contains("which costs a quarter more arithmetic in full training"));
    let dir = shapes();
    let of =
        |recompute: &str| number(&seven_b(&dir, &[recompute, "parallel.strategy=fsdp"])["time"]["compute"]);
    let more = of("train.recompute=block") / of("train.recompute=none");
    assert!((1.22..1.29).contains(&more), "{more}");
}

/// The table of runs equals the file that the page names.
#[test]
fn planned_and_actual_runs_are_those_of_the_file() {
    let page = fs::read_to_string(root().join("docs/sizing.md")).unwrap();
    let named = Regex::new(r"`(benchmarks/results/[\w-]+planned-and-run[\w-]*\.json)`").unwrap();
    let file = fs::read_to_string(root().join(&named.captures(&page).unwrap()[1])).unwrap();
    let runs: Vec<Value> = serde_json::from_str(&file).unwrap();
    let (_, table) = page.split_once("| model, tokens a row |").unwrap();
    let rows: Vec<&str> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    assert_eq!(rows.len(), runs.len());
    for (row, run) in rows.iter().zip(&runs) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let of = |key: &str| number(&run[key]);
        let megabytes = |key: &str| format!("{} MB", thousands((of(key) / 1e6).round() as u64));
        let off = |actual: &str, planned: &str| {
            let percent = 100.0 * (of(actual) / of(planned) - 1.0);
            if percent.abs() < 0.05 { "0.0 %".to_owned() } else { format!("{percent:+.1} %") }
        };
        let secs = |key: &str| format!("{:.2} s", of(key));
        let expected = [
            megabytes("planned_bytes"),
            megabytes("peak_bytes"),
            off("peak_bytes", "planned_bytes"),
            secs("planned_secs"),
            secs("step_secs"),
            off("step_secs", "planned_secs"),
        ];
        assert_eq!(cells[3..9], expected, "{row}");
        assert!(cells[1].to_uppercase().starts_with(&run["shape"].as_str().unwrap().to_uppercase()), "{row}");
        let is_in = |word: &str| cells[2].contains(word);
        assert!(is_in(run["dtype"].as_str().unwrap()), "{row}");
        assert_eq!(is_in("two ranks"), run["ranks"] == 2, "{row}");
        assert_eq!(is_in("QLoRA"), run["keys"]["quantization.kind"] == "nf4", "{row}");
        assert_eq!(is_in("recompute"), run["keys"]["train.recompute"] == "block", "{row}");
    }
}

/// Formats 1234 as `1,234`.
fn thousands(n: u64) -> String {
    if n < 1000 { n.to_string() } else { format!("{},{:03}", n / 1000, n % 1000) }
}
