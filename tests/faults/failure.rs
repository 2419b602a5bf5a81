//! A rank that fails, in any phase, ends the run. The error names rank, phase and last call, and
//! everything saved before stays. The test kills a run, and fails, if it continues for minutes
//! after its fault struck.

use std::path::Path;
use std::process::Output;

use finetune::collective::Phase;

use crate::exhaustive::third;
use crate::faulty_run::{
    PATIENCE, TILDE, changed_model, command, names, set_column, tilde_alone_has_column_5, watched,
};

fn train(output: &Path, fault: Option<&str>, ranks: usize, more: &[&str]) -> Output {
    watched(command(output, fault, ranks, more).spawn().unwrap(), PATIENCE)
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_rank_that_fails_in_any_phase_ends_the_run() {
    let ranks = [(0, 2), (1, 2), (2, 3)];
    let failures =
        ranks.into_iter().flat_map(|(rank, ranks)| ["error", "panic"].map(|kind| (rank, ranks, kind)));
    let failures: Vec<_> = failures.collect();
    let cases =
        Phase::ALL.into_iter().flat_map(|phase| failures.iter().map(move |failure| (phase, *failure)));
    for (phase, (rank, ranks, kind)) in third(cases.collect(), failures.len()) {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("out");
        let fault = format!("{rank}:{}:{kind}", phase.name());
        let done = train(&output, Some(&fault), ranks, &[]);
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(75), "{fault} of {ranks}: {text}");
        let named = format!("rank {rank} failed in phase {}", phase.name());
        assert!(text.contains(&named), "{fault}: {text}");
        assert!(text.contains(&format!("caused by: planted fault {fault}")) || kind == "panic", "{text}");
        assert!(text.contains(&format!("planted fault {fault} strikes")), "{fault}: {text}");
        let last = match phase {
            Phase::Meet => format!("rank {rank}: it had made no call"),
            _ => format!("rank {rank}: its last call was no "),
        };
        assert!(text.contains(&last), "{fault}: {text}");
        let left = names(&output);
        assert!(left.iter().all(|name| !name.contains(".tmp-")), "{fault}: {left:?}");
        for checkpoint in left.iter().filter(|name| name.starts_with("checkpoint-")) {
            assert!(output.join(checkpoint).join("manifest.json").exists(), "{fault}: {checkpoint}");
        }
    }
}

/// After a rank failed, a run resumes from its checkpoints and ends like an unbroken run.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_run_goes_on_after_a_rank_was_lost() {
    let dir = tempfile::tempdir().unwrap();
    let [whole, broken] = ["whole", "broken"].map(|name| dir.path().join(name));
    assert!(train(&whole, None, 2, &[]).status.success());
    assert_eq!(train(&broken, Some("1:backward:4:panic"), 2, &[]).status.code(), Some(75));
    assert!(names(&broken).contains(&"checkpoint-2".to_owned()), "{:?}", names(&broken));
    let resumed = train(&broken, None, 2, &["--resume"]);
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
    let weights: Vec<String> =
        names(&whole).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert_eq!(weights.len(), 2, "{weights:?}");
    for file in weights {
        assert_eq!(std::fs::read(whole.join(&file)).unwrap(), std::fs::read(broken.join(&file)).unwrap());
    }
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_fault_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let done = train(&dir.path().join("out"), Some("1:sleep:panic"), 2, &[]);
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("FINETUNE_FAULT"));
}

/// Release builds ignore planted faults.
#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "this build plants faults; `cargo test --release` runs it; .ci/run tries the same"
)]
fn a_release_build_plants_no_fault() {
    let dir = tempfile::tempdir().unwrap();
    let done = train(&dir.path().join("out"), Some("1:backward:panic"), 2, &[]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Evaluates four rows, each its own batch, on two ranks under fsdp; the rows `bad` hold token `~`.
fn evaluated(dir: &Path, model: &Path, bad: &[usize]) -> Output {
    let row = |i| if bad.contains(&i) { "a ~ in a row of some length" } else { "a row of some other length" };
    let rows: String = (0..4).map(|i| format!("{{\"text\": \"{}\"}}\n", row(i))).collect();
    let data = dir.join("rows.jsonl");
    std::fs::write(&data, rows).unwrap();
    let data = format!("data.eval=[{:?}]", data.display());
    let model = format!("model.id={:?}", model.display().to_string());
    train(
        &dir.join("out"),
        None,
        2,
        &["--set", &data, "--set", &model, "--set", "data.max_seq_len=16", "--set", "data.train_on=all"],
    )
}

/// The ranks detect a non-finite loss of any one rank and batch together: exit code 4, and no rank
/// waits in a collective.
#[test]
fn an_evaluation_that_diverges_on_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let [weight, activation] = ["weight", "activation"].map(|name| dir.path().join(name));
    changed_model(&weight, |tensors| {
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        *table = set_column(table, TILDE..TILDE + 1, 5, f32::NAN);
    });
    // Only token `~` has a value in column 5, which overflows in the first layer; every weight is
    // finite.
    changed_model(&activation, |tensors| tilde_alone_has_column_5(tensors, 1e25, 1e25));
    for (model, location) in [
        (&weight, "the weight model.embed_tokens.weight on rank 0"),
        (&activation, "the output of model.layers.0 on micro-batch 1 on every rank"),
    ] {
        // The first round of batches and the last one, after which the ranks sum their losses.
        for (bad, rank) in [(0, 0), (1, 1), (2, 0), (3, 1)] {
            let dir = tempfile::tempdir().unwrap();
            let done = evaluated(dir.path(), model, &[bad]);
            let text = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(4), "row {bad}: {text}");
            let rows = format!("the loss of row {}, which rank {rank} evaluated", bad + 1);
            assert!(text.contains(&rows), "row {bad}: {text}");
            assert!(text.contains(&format!("the first bad value is in {location}\n")), "row {bad}: {text}");
        }
    }
    // Rows without the token do not diverge.
    let dir = tempfile::tempdir().unwrap();
    assert!(evaluated(dir.path(), &weight, &[]).status.success());
}
