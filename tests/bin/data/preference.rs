//! `finetune data` of rows with two answers, or with a labelled one.

use serde_json::{Value, json};

use crate::test_dir::TestDir;

const DATA: [&str; 5] = ["data", "--model", "model", "--dataset", "rows.jsonl"];

fn test_dir(rows: &[Value]) -> TestDir {
    let dir = TestDir::with_model("tiny-llama3");
    dir.write("rows.jsonl", &rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    dir
}

fn pairs() -> [Value; 2] {
    [
        json!({"prompt": "2 + 2?\n", "chosen": "4", "rejected": "five"}),
        json!({"prompt": "3 + 3?\n", "chosen": "6", "rejected": "five"}),
    ]
}

#[test]
fn both_answers_are_shown_with_their_masks() {
    let dir = test_dir(&pairs());
    for kind in ["dpo", "orpo", "cpo", "simpo"] {
        let said =
            dir.said(&[&DATA[..], &["--rows", "1", "--set", &format!("objective.kind={kind}")]].concat());
        let chosen = "row 1, chosen, [DIR]/rows.jsonl:1: ";
        assert!(said.contains(chosen) && said.contains("2 + 2?\n⟦4<|eot_id|>⟧"), "{kind}: {said}");
        assert!(said.contains("row 1, rejected, [DIR]/rows.jsonl:1: "), "{kind}: {said}");
        assert!(said.contains("2 + 2?\n⟦five<|eot_id|>⟧") && !said.contains("row 2, "), "{kind}: {said}");
        assert!(
            said.contains("preference: every row has `chosen`, `rejected`") || said.contains("`prompt`"),
            "{said}"
        );
        assert!(said.contains("4 examples (2 chosen, 2 rejected), "), "{said}");
        assert!(said.contains(" in answers ("), "{said}");
    }
}

#[test]
fn a_step_counts_pairs_without_packing() {
    let set =
        ["--set", "objective.kind=dpo", "--set", "data.packing=false", "--set", "train.micro_batch_size=2"];
    let said = test_dir(&pairs()).said(&[&DATA[..], &set].concat());
    assert!(said.contains("an epoch is one step of 2 pairs"), "{said}");
}

#[test]
fn json_has_roles() {
    let dir = test_dir(&pairs());
    let said = dir.said(&[&DATA[..], &["--json", "--quiet", "--set", "objective.kind=dpo"]].concat());
    let shown: Value = serde_json::from_str(&said).unwrap();
    let of = |key: &str| -> Vec<Value> {
        shown["rows"].as_array().unwrap().iter().map(|row| row[key].clone()).collect()
    };
    assert_eq!(of("row"), [1, 1, 2, 2].map(|row| json!(row)));
    assert_eq!(of("role"), ["chosen", "rejected", "chosen", "rejected"].map(|role| json!(role)));
}

#[test]
fn labelled_answers_are_shown_with_a_mismatched_one() {
    let rows = [
        json!({"prompt": "2 + 2?\n", "completion": "4", "label": true}),
        json!({"prompt": "3 + 3?\n", "completion": "five", "label": false}),
    ];
    let said = test_dir(&rows).said(&[&DATA[..], &["--set", "objective.kind=kto"]].concat());
    for (head, text) in [
        ("row 1, desirable, ", "2 + 2?\n⟦4<|eot_id|>⟧"),
        ("row 1, mismatched, ", "2 + 2?\n⟦five<|eot_id|>⟧"),
        ("row 2, undesirable, ", "3 + 3?\n⟦five<|eot_id|>⟧"),
        ("row 2, mismatched, ", "3 + 3?\n⟦4<|eot_id|>⟧"),
    ] {
        assert!(said.contains(head) && said.contains(text), "{head}: {said}");
    }
    assert!(said.contains("each answer has a mismatched one beside it"), "{said}");
    assert!(said.contains("2 examples (1 desirable, 1 undesirable), "), "{said}");
}

#[test]
fn long_rows_are_counted() {
    let long = json!({"prompt": "word ".repeat(60), "chosen": "4", "rejected": "5"});
    let cut = json!({"prompt": "2 + 2?\n", "chosen": "4", "rejected": "five ".repeat(60)});
    let dir = test_dir(&[long, cut, pairs()[1].clone()]);
    let args = |kind: &str| {
        let set = format!("objective.kind={kind}");
        dir.said(&[&DATA[..], &["--set", &set, "--set", "data.max_seq_len=40"]].concat())
    };
    let dpo = args("dpo");
    assert!(
        dpo.contains("1 row left out: its answer begins after data.max_seq_len tokens")
            || dpo.contains("one row left out: its answer begins after data.max_seq_len tokens"),
        "{dpo}"
    );
    assert!(dpo.contains("row cut to data.max_seq_len, within the answer"), "{dpo}");
    assert!(dpo.contains("4 examples (2 chosen, 2 rejected)"), "{dpo}");
}

#[test]
fn rows_without_pairs_are_one_error() {
    let dir = test_dir(&[json!({"prompt": "a", "completion": "b"})]);
    let refused = dir.refused(&[&DATA[..], &["--set", "objective.kind=dpo"]].concat());
    for part in [
        "cannot train on the prompt_completion rows of ",
        "`objective.kind` is \"dpo\", which compares two answers a row, `chosen` and `rejected`",
        "has the keys prompt, completion",
        "hint: write `objective.kind = \"cross_entropy\"`",
    ] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
}

#[test]
fn bad_pairs_are_listed() {
    let bad = json!({"prompt": "a\n", "chosen": "b", "rejected": null});
    let said = test_dir(&[pairs()[0].clone(), bad, pairs()[1].clone()])
        .said(&[&DATA[..], &["--set", "objective.kind=dpo"]].concat());
    assert!(said.contains("bad row") && said.contains("[DIR]/rows.jsonl:2: `chosen` is a string"), "{said}");
}

/// The rows of the preference recipes, on the model that they name.
#[test]
fn rows_of_the_recipes_load() {
    for kind in ["dpo", "kto", "orpo", "cpo", "simpo"] {
        let rows = if kind == "kto" { "builtin:labelled-train.jsonl" } else { "builtin:pairs-train.jsonl" };
        let dir = TestDir::with_model("tiny-llama3");
        let said = dir.said(&["data", "--model", "builtin:quickstart", "--recipe", kind, "--dataset", rows]);
        let wanted = if kind == "kto" { "360 examples (" } else { "720 examples (360 chosen, 360 rejected)" };
        assert!(said.contains(wanted) && !said.contains("warning:"), "{kind}: {said}");
    }
}
