//! Non-finite numbers on one rank alone are attributed to that rank, and a frozen weight that
//! causes them is not answered with advice on the learning rate.

use std::path::Path;

use crate::faulty_run::{TILDE, changed_model, command, set_column, tilde_alone_has_column_5, watched};

/// Runs one LoRA step on two ranks, each with its own row; the row of rank `bad` holds the token
/// `~`.
fn trained(dir: &Path, model: &Path, bad: Option<usize>, more: &[&str]) -> (Option<i32>, String) {
    let row = |i| if bad == Some(i) { "a ~ in a row of some length" } else { "a row of some other length" };
    let line = |text| format!("{{\"text\": \"{text}\"}}\n");
    let [data, held_out] = ["rows.jsonl", "held-out.jsonl"].map(|name| dir.join(name));
    std::fs::write(&data, line(row(0)) + &line(row(1))).unwrap();
    std::fs::write(&held_out, line("a row of some length")).unwrap();
    let sets = [
        format!("data.train=[{:?}]", data.display()),
        format!("model.id={:?}", model.display().to_string()),
        format!("data.eval=[{:?}]", held_out.display()),
        "data.max_seq_len=32".into(),
        "data.packing=false".into(),
        "data.shuffle=false".into(),
        "data.train_on=all".into(),
        "train.max_steps=1".into(),
        "adapter.r=4".into(),
    ];
    let sets = sets.iter().map(String::as_str).chain(more.iter().copied());
    let sets: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
    let run = command(&dir.join("out"), None, 2, &sets).spawn().unwrap();
    let done = watched(run, std::time::Duration::from_secs(300));
    (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
}

#[test]
fn a_rank_that_meets_a_frozen_nan_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    changed_model(&model, |tensors| {
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        *table = set_column(table, TILDE..TILDE + 1, 5, f32::NAN);
    });
    for rank in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let (code, text) = trained(dir.path(), &model, Some(rank), &["parallel.strategy=ddp"]);
        assert_eq!(code, Some(4), "{text}");
        assert!(text.contains("the weight model.embed_tokens.weight on every rank\n"), "{text}");
        let whose = format!("the loss of rank {rank} is not finite, that of every other rank is\n");
        assert!(text.contains(&whose), "{text}");
        assert!(text.contains("hint: the model's files contain this value"), "{text}");
        assert!(!text.contains("learning_rate"), "{text}");
    }
    // Rows without the token never meet the NaN.
    let dir = tempfile::tempdir().unwrap();
    let (code, text) = trained(dir.path(), &model, None, &["parallel.strategy=ddp"]);
    assert_eq!(code, Some(0), "{text}");
}

/// Every weight is finite; only token `~` has a value that overflows in the first layer.
#[test]
fn a_rank_whose_rows_overflow_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    changed_model(&model, |tensors| tilde_alone_has_column_5(tensors, 1e25, 1e25));
    let (code, text) = trained(dir.path(), &model, Some(1), &["parallel.strategy=ddp"]);
    assert_eq!(code, Some(4), "{text}");
    let location = "the output of model.layers.0 on micro-batch 2 on every rank, which rank 1 trained on\n";
    assert!(text.contains(location), "{text}");
    assert!(text.contains("the loss of rank 1 is not finite, that of every other rank is\n"), "{text}");
    assert!(text.contains("hint: lower `optimizer.learning_rate`"), "{text}");
}

/// All losses are finite; the gradient of B overflows for one rank's rows, under every strategy.
#[test]
fn a_rank_whose_gradients_overflow_is_named() {
    // The gradient through the gate's weights overflows everywhere.
    const UP: &str = "adapter.target_modules=[\"up_proj\"]";
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    changed_model(&model, |tensors| {
        tilde_alone_has_column_5(tensors, 1e22, 1e-22);
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        for column in (0..table.dims()[1]).filter(|column| *column != 5) {
            *table = set_column(table, TILDE..TILDE + 1, column, 0.0);
        }
    });
    for strategy in ["parallel.strategy=ddp", "parallel.strategy=fsdp"] {
        let dir = tempfile::tempdir().unwrap();
        let (code, text) = trained(dir.path(), &model, Some(1), &["adapter.lora_alpha=1e22", UP, strategy]);
        assert_eq!(code, Some(4), "{text}");
        assert!(text.contains("the loss of every rank is finite\n"), "{text}");
        let whose = "before they are summed, the gradients of rank 1 alone are not finite\n";
        assert!(text.contains(whose), "{text}");
    }
}
