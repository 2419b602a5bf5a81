//! `finetune verify-resume` on a recipe: runs killed at random instants leave the same bytes.

use crate::test_dir::TestDir;

fn verify(dir: &TestDir, more: &[&str]) -> (Option<i32>, String, String) {
    let mut args = vec!["verify-resume", "--model", "model", "--dataset", "rows.jsonl", "--recipe", "lora"];
    for pair in ["data.max_seq_len=96", "data.packing=false", "adapter.lora_dropout=0.1"] {
        args.extend(["--set", pair]);
    }
    args.extend(["--ranks", "1"]);
    args.extend(more);
    // Slow enough to be killed on the way, also on a busy machine.
    let done = dir.command(&args).env("FINETUNE_FAULT", "0:data:slow=100ms").output().unwrap();
    (done.status.code(), dir.told(&done.stdout), dir.told(&done.stderr))
}

#[test]
fn a_killed_run_leaves_the_same_bytes() {
    let dir = TestDir::new();
    // The programs of both runs would log to one remote run.
    let command = format!("log.command=[\"touch\", \"{}\"]", dir.path("started").display());
    let more = ["--steps", "8", "--kills", "2", "--output", "both", "--keep", "--set", &command];
    let (code, verdict, said) = verify(&dir, &more);
    assert_eq!(code, Some(0), "{said}");
    assert!(!dir.path("started").exists());
    assert!(verdict.starts_with("the same bytes: 8 steps straight, and 8 steps killed "), "{verdict}");
    assert!(verdict.contains("compared: ") && said.contains("killed after step "), "{verdict}{said}");
    // The report is true: each named file exists twice, and both are equal.
    for name in
        ["adapter_model.safetensors", "checkpoint-8/optimizer.safetensors", "checkpoint-8/manifest.json"]
    {
        let read = |run: &str| std::fs::read(dir.path("both").join(run).join(name)).unwrap();
        assert!(read("straight") == read("broken"), "{name}");
    }
    // The folder is in use now, and its files stay.
    let (code, _, said) = verify(&dir, &["--output", "both"]);
    assert!(code == Some(1) && said.contains("the folder is not empty"), "{said}");
}

/// Both runs give their chat template the same time.
#[test]
fn a_template_that_asks_for_the_date() {
    let dir = TestDir::new();
    let dated = "{{ strftime_now('%H:%M:%S.%f') }}{% for message in messages %}\n{{ message.role }}: {{ message.content }}{% endfor %}";
    dir.write("dated.jinja", dated);
    let keys = ["--set", "data.chat_template=dated.jinja", "--set", "data.train_on=all"];
    let (code, verdict, said) = verify(&dir, &[&keys[..], &["--steps", "4"]].concat());
    assert_eq!(code, Some(0), "{said}");
    assert!(verdict.starts_with("the same bytes: "), "{verdict}");
}

/// A failing run is reported as the recipe's fault, not the resume's; equal files are removed.
#[test]
fn a_run_that_fails_is_said_so() {
    let dir = TestDir::new();
    let (code, verdict, said) =
        verify(&dir, &["--set", "optimizer.learning_rate=1e38", "--set", "train.max_grad_norm=0"]);
    assert_eq!((code, verdict.as_str()), (Some(4), ""), "{said}");
    assert!(said.contains("the straight run ended with exit code 4: nothing is verified"), "{said}");
    std::fs::remove_dir_all(dir.path("verify-resume")).unwrap();
    let (code, verdict, said) = verify(&dir, &["--steps", "4", "--quiet"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(verdict.contains("killed once (after step "), "{verdict}");
    assert!(!dir.path("verify-resume").exists() && said.is_empty(), "{said}");
}
