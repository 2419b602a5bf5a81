//! Keys that may change when a run resumes from a checkpoint: harmless or allowed changes are
//! printed, others are refused with both values.

use crate::golden_run::{metrics, number};
use crate::test_dir::{TestDir, copy_folder, lora};

/// A learning rate that is independent of the number of steps.
const CONSTANT: [&str; 4] =
    ["--set", "scheduler.kind=constant_with_warmup", "--set", "scheduler.warmup_steps=0"];

/// Runs `steps` steps in `output` with a checkpoint every second step; returns exit code and
/// stderr.
fn run(dir: &TestDir, output: &str, steps: u64, more: &[&str]) -> (Option<i32>, String) {
    let steps = format!("train.max_steps={steps}");
    let keys = ["--set", "checkpoint.save_steps=2", "--set", &steps];
    let args = lora(&[&keys[..], more].concat());
    let args: Vec<_> = args.into_iter().map(|arg| if arg == "out" { output } else { arg }).collect();
    let done = dir.command(&args).output().unwrap();
    (done.status.code(), dir.told(&done.stderr))
}

fn succeed(dir: &TestDir, output: &str, steps: u64, more: &[&str]) -> String {
    let (code, said) = run(dir, output, steps, more);
    assert_eq!(code, Some(0), "{said}");
    said
}

fn losses(dir: &TestDir, output: &str) -> Vec<f64> {
    metrics(&dir.path(output), "loss").iter().map(|step| number(step, "loss")).collect()
}

#[test]
fn more_steps_are_those_of_a_longer_run() {
    let dir = TestDir::new();
    succeed(&dir, "long", 8, &CONSTANT);
    succeed(&dir, "grown", 4, &CONSTANT);
    let said = succeed(&dir, "grown", 8, &[&CONSTANT[..], &["--resume"]].concat());
    assert!(said.contains("resuming with a change: steps: 4 in the checkpoint, 8 now"), "{said}");
    assert!(said.contains("resuming with a change: train.max_steps: 4 in the checkpoint, 8 now"), "{said}");
    let adapter = |output: &str| std::fs::read(dir.path(output).join("adapter_model.safetensors")).unwrap();
    assert!(adapter("grown") == adapter("long"), "other bytes than those of a run of 8 steps");
    assert_eq!(losses(&dir, "grown"), losses(&dir, "long"));
    // Checkpoints of the shorter run count, too, and are removed when they are the oldest.
    let checkpoints = |step: u64| dir.path(&format!("grown/checkpoint-{step}")).exists();
    assert_eq!([2, 4, 6, 8].map(checkpoints), [false, false, true, true]);
    let (code, said) = run(&dir, "grown", 6, &[&CONSTANT[..], &["--resume"]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("caused by: steps: 8 in the checkpoint, 6 now"), "{said}");
}

#[test]
fn the_learning_rate_changes_where_that_is_allowed() {
    let dir = TestDir::new();
    succeed(&dir, "out", 4, &[]);
    let from = ["--resume", "out/checkpoint-2"];
    let changed = ["--set", "optimizer.learning_rate=1e-3", "--set", "scheduler.min_lr_ratio=0.5"];
    let changed = [&from[..], &changed].concat();
    let (code, said) = run(&dir, "refused", 4, &changed);
    assert_eq!(code, Some(1), "{said}");
    let error = "error: cannot resume out/checkpoint-2
  caused by: optimizer.learning_rate: 0.0002 in the checkpoint, 0.001 now
  caused by: scheduler.min_lr_ratio: 0.0 in the checkpoint, 0.5 now
hint: add `--allow-change optimizer.learning_rate` `--allow-change scheduler.min_lr_ratio` to accept the change; otherwise resume with the recipe, model and data of the first run, or start anew with another --output
";
    assert!(said.ends_with(error), "{said}");
    assert!(!dir.path("refused").exists());
    let one = ["--allow-change", "optimizer.learning_rate"];
    let (code, said) = run(&dir, "refused", 4, &[&changed[..], &one].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(
        !said.contains("caused by: optimizer") && said.contains("caused by: scheduler.min_lr_ratio"),
        "{said}"
    );

    let both = [&changed[..], &one, &["--allow-change", "scheduler.min_lr_ratio"]].concat();
    let said = succeed(&dir, "forked", 4, &both);
    assert!(
        said.contains("resuming with a change: optimizer.learning_rate: 0.0002 in the checkpoint, 0.001 now"),
        "{said}"
    );
    let rates: Vec<f64> =
        metrics(&dir.path("forked"), "loss").iter().map(|step| number(step, "learning_rate")).collect();
    let wanted = [0.875e-3, 0.625e-3];
    assert!(rates.iter().zip(wanted).all(|(rate, wanted)| (rate - wanted).abs() < 1e-9), "{rates:?}");

    // `--allow-change` accepts no other key and requires `--resume`.
    for more in [&["--resume", "--allow-change", "adapter.r"][..], &one] {
        let (code, said) = run(&dir, "new", 4, more);
        assert_eq!(code, Some(2), "{said}");
    }
}

#[test]
fn a_step_is_split_otherwise() {
    let dir = TestDir::new();
    succeed(&dir, "out", 4, &[]);
    for output in ["split", "ranks", "torn"] {
        std::fs::create_dir(dir.path(output)).unwrap();
        copy_folder(&dir.path("out/checkpoint-2"), &dir.path(&format!("{output}/checkpoint-2")));
    }
    let wanted = losses(&dir, "out");
    let near = |output: &str| {
        let actual = losses(&dir, output);
        let fits = |(actual, wanted): (&f64, &f64)| (actual - wanted).abs() < 1e-4;
        assert!(actual.len() == 2 && actual.iter().zip(&wanted[2..]).all(fits), "{actual:?} {wanted:?}");
    };
    let by = |rows: u32, times: u32| {
        [format!("train.micro_batch_size={rows}"), format!("train.gradient_accumulation_steps={times}")]
    };
    let [rows, times] = by(2, 4);
    let said = succeed(&dir, "split", 4, &["--resume", "--set", &rows, "--set", &times]);
    assert!(
        said.contains("resuming with a change: train.micro_batch_size: 1 in the checkpoint, 2 now"),
        "{said}"
    );
    near("split");
    // With other ranks, accumulation adapts.
    let said = succeed(&dir, "ranks", 4, &["--resume", "--ranks", "2", "--set", &rows]);
    assert!(said.contains("train.gradient_accumulation_steps: 8 in the checkpoint, 4 now"), "{said}");
    near("ranks");
    let (code, said) = run(&dir, "torn", 4, &["--resume", "--set", &rows]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("train.micro_batch_size: 1 in the checkpoint, 2 now"), "{said}");
    assert!(said.contains("a step has 8 rows"), "{said}");
}

#[test]
fn harmless_changes_are_listed() {
    let dir = TestDir::new();
    succeed(&dir, "out", 4, &[]);
    std::fs::remove_dir_all(dir.path("out/checkpoint-4")).unwrap();
    std::fs::remove_file(dir.path("out/adapter_config.json")).unwrap();
    let more = ["--resume", "--ranks", "2", "--set", "log.every_steps=2", "--set", "checkpoint.keep_last=1"];
    let said = succeed(&dir, "out", 4, &more);
    let listed: Vec<&str> =
        said.lines().filter_map(|line| line.strip_prefix("resuming with a change: ")).collect();
    assert_eq!(
        listed,
        [
            "checkpoint.keep_last: 2 before, 1 now",
            "log.every_steps: 1 before, 2 now",
            "ranks: 1 before, 2 now",
        ]
    );
}
