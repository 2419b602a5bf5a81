//! The plan that a run prints before loading anything: whether it fits, which changes would make it
//! fit. Planning stays fast for large models.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::exhaustive::{each_third, is_exhaustive};
use crate::planned_run::{between, bytes, meminfo, resized, train, write_headers};
use crate::test_dir::TestDir;

/// Time limit that only a hanging program exceeds.
const HANG: Duration = Duration::from_secs(600);

/// Runs a command to its end; returns its output.
fn ends(command: &mut Command) -> Output {
    let started = Instant::now();
    let mut child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let reader = |mut from: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).unwrap();
            bytes
        })
    };
    let stdout = reader(Box::new(child.stdout.take().unwrap()));
    let stderr = reader(Box::new(child.stderr.take().unwrap()));
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > HANG {
            child.kill().unwrap();
            panic!("it hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

fn failed(dir: &TestDir, command: &mut Command) -> String {
    let done = ends(command);
    assert_eq!(done.status.code(), Some(1), "{}", dir.told(&done.stderr));
    dir.told(&done.stderr)
}

fn succeeded(dir: &TestDir, command: &mut Command) -> String {
    let done = ends(command);
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
    dir.told(&done.stderr)
}

/// The model has about a seventh as many parameters as the memory has bytes. Full training on two
/// ranks takes 16 bytes a parameter, with 8-bit moments 10, with LoRA 4.
#[test]
#[cfg(target_os = "linux")]
fn a_run_that_fits_nowhere_is_refused_with_what_would_fit() {
    let hidden = 512.0;
    let layers = 0.9 * meminfo("MemAvailable:") / 7.0 / (hidden * hidden * (4.0 + 3.0 * 4.0));
    let dir = resized(&[
        ("hidden_size", 512),
        ("num_key_value_heads", 4),
        ("intermediate_size", 2048),
        ("num_hidden_layers", layers as u64),
    ]);
    let keys = ["model.init=random"];
    let refused = failed(&dir, &mut train(&dir, "out", &keys, &["--ranks", "2", "--dry-run"]));
    assert!(
        refused.starts_with("error: cannot train on 2 ranks: no strategy fits their memory"),
        "{refused}"
    );
    let [need, have] =
        [between(&refused, "needs least, needs ", " a rank"), between(&refused, "; ", " available")];
    assert!(bytes(need) > bytes(have), "{refused}");
    let hints = between(&refused, "hint: one of these fits: ", "\n");
    assert!(!hints.contains("optimizer.state=int8") && !hints.contains("--ranks"), "{hints}");
    assert!(hints.contains("`--set adapter.kind=lora --set quantization.kind=nf4` ("), "{hints}");
    for hint in hints.split("), ") {
        let (typed, figure) = hint.trim_end_matches(')').split_once(" (").unwrap();
        let figure = figure.split_once(" a rank with ").unwrap();
        assert!(bytes(figure.0) <= bytes(have), "{hint}");
        let folder = dir.path("").display().to_string();
        let typed = typed.trim_matches('`').replace("FOLDER", &folder);
        let mut more: Vec<&str> = typed.split(' ').collect();
        more.extend(["--ranks", "2", "--dry-run"]);
        let planned = succeeded(&dir, &mut train(&dir, "out", &keys, &more));
        assert!(planned.contains(&format!("strategy {} ", figure.1)), "{hint}: {planned}");
        // As few blocks are recomputed as the free memory demands, which differs between the runs.
        let step = bytes(between(&planned, "memory of a step: ", " = "));
        assert!((step / bytes(figure.0) - 1.0).abs() < 0.03, "{hint}: {planned}");
    }
}

#[test]
fn a_resolved_recipe_says_the_ranks_of_a_group() {
    let dir = TestDir::new();
    let keys = ["parallel.strategy=hsdp"];
    let done = ends(&mut train(&dir, "out", &keys, &["--ranks", "4", "--dry-run"]));
    assert!(dir.told(&done.stdout).contains("shard_size = 4"), "{}", dir.told(&done.stderr));
    let mut several = train(&dir, "out", &keys, &["--dry-run", "--world-size", "4", "--rank", "0"]);
    let told = ends(several.args(["--master-addr", "localhost"]));
    if finetune::collective::CONNECTS_PROCESSES {
        assert_eq!(told.status.code(), Some(1));
        let told = dir.told(&told.stderr);
        assert!(told.contains("does not report how many ranks a host has"), "{told}");
    }
}

/// Planning once took time cubic in the number of layers: these took over five minutes.
#[test]
fn two_thousand_layers_are_planned_in_no_time() {
    let dir = resized(&[("num_hidden_layers", 2000)]);
    write_headers(&dir.path("model"));
    let runs = [
        &["adapter.r=4"][..],
        &["adapter.kind=dora", "adapter.exclude_modules=[\"layers.0.self_attn.q_proj\"]"],
        &["adapter.r=4", "quantization.kind=nf4", "quantization.skip_modules=[\"q_proj\"]"],
        &["adapter.r=4", "adapter.modules_to_save=[\"norm\"]"],
        &["optimizer.state=int8"],
    ];
    for keys in each_third(runs, 1) {
        let planned = succeeded(&dir, &mut train(&dir, "out", keys, &["--dry-run"]));
        assert!(planned.contains("memory of a step: "), "{planned}");
    }
}

#[test]
fn a_million_faults_are_counted() {
    let dir = TestDir::new();
    let faults = if is_exhaustive() { 1_000_000 } else { 100_000 };
    let numbered = |line: &dyn Fn(usize) -> String| (0..faults).map(line).collect::<String>();
    for (text, first) in [
        (format!("[train]\n{}", numbered(&|i| format!("epoch{i} = 1\n"))), "unknown key `train.epoch"),
        (numbered(&|i| format!("[trian{i}]\n")), "unknown section [trian"),
        (numbered(&|i| format!("epoch{i} = 1\n")), "is outside of any section"),
        (format!("[train]\n{}", "epochs = 1\n".repeat(faults + 1)), "`epochs` is set twice"),
    ] {
        dir.write("recipe.toml", &text);
        let refused = failed(&dir, &mut train(&dir, "out", &[], &["--recipe", "recipe.toml"]));
        assert!(refused.contains(first), "{refused:.1000}");
        assert!(refused.contains(&format!("caused by: and {} more\n", faults - 20)), "{refused:.4000}");
        assert_eq!(refused.matches("caused by: ").count(), 21, "{refused:.4000}");
    }
}
