//! Preference training through the binary: trajectories of TRL from its rows, on one rank and two,
//! resume to the bit, and refusals.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::golden_run::{metrics, number};
use crate::test_dir::{TestDir, golden};

/// A golden run of TRL, with its rows.
struct GoldenRun {
    folder: PathBuf,
    trajectory: Value,
}

impl GoldenRun {
    fn open(name: &str) -> Self {
        let folder = golden("preference").join(name);
        let text = std::fs::read_to_string(folder.join("trajectory.json")).unwrap();
        GoldenRun { folder, trajectory: serde_json::from_str(&text).unwrap() }
    }

    /// Returns the flags that repeat the run with `rows` rows in a micro-batch.
    fn flags(&self, output: &Path, rows: u64, more: &[&str]) -> Vec<String> {
        let run = &self.trajectory["run"];
        let model = golden("models").join(run["model"].as_str().unwrap());
        let data = golden("preference").join(self.trajectory["data"].as_str().unwrap());
        let text = |path: &Path| path.display().to_string();
        let mut flags: Vec<String> = vec![
            "--model".into(),
            text(&model),
            "--dataset".into(),
            text(&data),
            "--output".into(),
            text(output),
        ];
        let mut set = |key: &str, value: String| flags.extend(["--set".to_owned(), format!("{key}={value}")]);
        set("objective.kind", run["kind"].to_string());
        for (key, value) in run["args"].as_object().unwrap() {
            set(&format!("objective.{key}"), value.to_string());
        }
        for (key, value) in [
            ("data.shuffle", "false".to_owned()),
            ("data.packing", "false".into()),
            ("data.max_seq_len", "512".into()),
            ("train.max_steps", run["steps"].to_string()),
            ("train.micro_batch_size", rows.to_string()),
            ("train.max_grad_norm", run["clip"].to_string()),
            ("optimizer.learning_rate", run["lr"].to_string()),
            ("optimizer.weight_decay", run["weight_decay"].to_string()),
            ("optimizer.betas", run["betas"].to_string()),
            ("optimizer.eps", run["eps"].to_string()),
            ("scheduler.kind", run["schedule"].to_string()),
            ("scheduler.warmup_steps", run["warmup"].to_string()),
        ] {
            set(key, value);
        }
        if run["method"] == "lora" {
            set("adapter.path", format!("{:?}", text(&self.folder.join("adapter_step0"))));
        }
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        flags
    }

    /// Repeats the run on `ranks` ranks, and compares its steps.
    fn follows(&self, ranks: u64, more: &[&str]) {
        let run = &self.trajectory["run"];
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("out");
        let (rows, ranks_text) = (run["mb"].as_u64().unwrap() / ranks, ranks.to_string());
        let of_ranks = if ranks > 1 { vec!["--ranks", ranks_text.as_str()] } else { Vec::new() };
        let flags = self.flags(&output, rows, &[&of_ranks, more].concat());
        succeed(&flags);
        let steps = metrics(&output, "loss");
        let wanted = self.trajectory["steps"].as_array().unwrap();
        assert_eq!(steps.len(), wanted.len());
        for (ours, theirs) in steps.iter().zip(wanted) {
            let what = format!("{}, {ranks} ranks: {ours}, TRL {theirs}", self.folder.display());
            let near = |ours: f64, theirs: f64| (ours - theirs).abs() <= 5e-5 * theirs.abs().max(1.0);
            assert!(near(number(ours, "loss"), number(theirs, "loss")), "{what}");
            assert!((number(ours, "grad_norm") / number(theirs, "grad_norm") - 1.0).abs() < 2e-4, "{what}");
            for metric in ["rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"] {
                if let Some(theirs) = theirs["metrics"].get(metric) {
                    let ours = number(&ours["objective"], metric);
                    assert!(near(ours, theirs.as_f64().unwrap()), "{metric}, {what}");
                }
            }
        }
    }
}

fn finetune(flags: &[String]) -> Output {
    let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
    command.env("HF_HUB_OFFLINE", "1").args(flags).output().unwrap()
}

fn succeed(flags: &[String]) {
    let output = finetune(flags);
    assert!(output.status.success(), "{flags:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// The reference of a given adapter is computed before the first step.
const PRECOMPUTED: [&str; 2] = ["--set", "objective.precompute_ref_log_probs=true"];

#[test]
fn dpo_follows_trl_from_its_rows() {
    for name in ["dpo_sigmoid", "dpo_full", "dpo_sigmoid_qwen3"] {
        let run = GoldenRun::open(&format!("dpo/{name}"));
        run.follows(1, &PRECOMPUTED);
        run.follows(2, &PRECOMPUTED);
    }
    GoldenRun::open("dpo/dpo_plain").follows(1, &PRECOMPUTED);
}

#[test]
fn orpo_and_cpo_follow_trl_from_their_rows() {
    for name in ["orpo/orpo", "cpo/cpo"] {
        let run = GoldenRun::open(name);
        run.follows(1, &[]);
        run.follows(2, &[]);
    }
}

#[test]
fn kto_follows_trl_from_its_rows() {
    GoldenRun::open("kto/kto").follows(1, &PRECOMPUTED);
    GoldenRun::open("kto/kto_full").follows(1, &PRECOMPUTED);
}

/// Runs with held-out pairs, whose metrics are those of the objective: eight steps at once, and
/// five of them after a resume from a checkpoint, leave the same bytes.
#[test]
fn a_resumed_run_equals_the_unbroken_one() {
    let fresh = ["--set", "adapter.kind=lora", "--set", "adapter.r=4"];
    for (name, method, file) in [
        ("dpo/dpo_sigmoid", &fresh[..], "adapter_model.safetensors"),
        ("dpo/dpo_full", &PRECOMPUTED[..], "model.safetensors"),
        ("kto/kto_full", &PRECOMPUTED[..], "model.safetensors"),
        ("orpo/orpo_full", &[][..], "model.safetensors"),
    ] {
        let (run, dir) = (GoldenRun::open(name), tempfile::tempdir().unwrap());
        let output = |name: &str| dir.path().join(name);
        let more =
            ["--set", "checkpoint.save_steps=3", "--set", "data.eval_split=4", "--set", "eval.steps=4"];
        let flags = |to: &str, others: &[&str]| {
            let flags = run.flags(&output(to), 2, &[method, &more, others].concat());
            // A new adapter instead of the given one.
            let given = flags.iter().position(|flag| flag.starts_with("adapter.path="));
            let is_given = |at: usize| given.is_some_and(|given| at + 1 == given || at == given);
            let flags = flags.into_iter().enumerate().filter(|(at, _)| !is_given(*at));
            flags.map(|(_, flag)| flag).collect::<Vec<_>>()
        };
        succeed(&flags("whole", &[]));
        let checkpoint = output("whole/checkpoint-3").display().to_string();
        succeed(&flags("resumed", &["--resume", &checkpoint]));
        let bytes = |folder: &str| std::fs::read(output(folder).join(file)).unwrap();
        assert!(bytes("whole") == bytes("resumed"), "{name}");
        let evals = metrics(&output("whole"), "eval_loss");
        assert_eq!(evals.len(), 3, "{name}: before the first step, after the fourth and at the end");
        assert_eq!(evals[2], metrics(&output("resumed"), "eval_loss").pop().unwrap(), "{name}");
        let own: BTreeMap<String, Value> =
            serde_json::from_value(evals[2]["eval_objective"].clone()).unwrap();
        assert!(own.contains_key("rewards/chosen") && evals[2].get("eval_perplexity").is_none(), "{own:?}");
        if method == PRECOMPUTED {
            std::fs::remove_file(output("whole/reference_log_probs.json")).unwrap();
            let refused = finetune(&flags("other", &["--resume", &checkpoint]));
            let told = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && told.contains("reference_log_probs.json"), "{told}");
        }
    }
}

/// A run whose reference is not the model without its adapter says how to get one.
#[test]
fn a_reference_that_training_changes_is_refused() {
    let dir = TestDir::new();
    dir.write("pairs.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n");
    let refused = |more: &[&str]| {
        let flags = ["--model", "model", "--dataset", "pairs.jsonl", "--output", "out", "--lr", "1e-3"];
        let kind = ["--set", "objective.kind=dpo", "--set", "data.packing=false"];
        dir.refused(&[&flags[..], &kind, more].concat())
    };
    let told = refused(&[]);
    assert!(told.contains("all weights train, so no adapter can be switched off"), "{told}");
    assert!(told.contains("precompute_ref_log_probs = true"), "{told}");
    let told = refused(&["--set", "adapter.kind=lora", "--set", "adapter.modules_to_save=[\"lm_head\"]"]);
    assert!(told.contains("is trained in place"), "{told}");
}
