//! Rows with answers: tokens and masks against TRL 1.16 (tests/golden/preference), every form of
//! rows, groups, and the reports of rows that do not fit.

use serde_json::{Value, json};

use finetune::data::{ChatTemplate, DataOptions, Dataset, Example, ExampleSource as _, Role};
use finetune::error::Result;
use finetune::recipe::enums::{ObjectiveKind, OnBadRow, OnLongRow};

use super::{folder, golden, template, tokenizer};

/// Cases in which finetune differs from TRL, each for a reason that docs/data.md names.
const OTHERWISE: [&str; 4] = [
    // An answer without messages has nothing to compare.
    "dpo_empty_completion_list",
    // The template refuses system messages; finetune puts them into the user's turn.
    "dpo_conv_system_gemma2",
    // A row whose prompt alone is too long is dropped, not kept without an answer.
    "cpo_truncated",
    "orpo_truncated",
];

fn options(objective: ObjectiveKind) -> DataOptions {
    let mismatched_block = (objective == ObjectiveKind::Kto).then_some(8);
    DataOptions { objective, mismatched_block, max_seq_len: 1024, ..DataOptions::default() }
}

fn load(model: &str, rows: &[Value], options: &DataOptions) -> Result<Dataset> {
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let files = folder(&[("rows.jsonl", lines.as_bytes())]);
    let tokenizer = tokenizer(model);
    let template: ChatTemplate = template(&tokenizer);
    Dataset::load(&[files.path().join("rows.jsonl")], options, &tokenizer, Some(&template))
}

fn role(example: &Example) -> String {
    example.role.to_string()
}

/// The examples that TRL makes of a case: role, ids, the number of ids before the answer.
fn expected(case: &Value) -> Vec<(String, Vec<u32>, usize)> {
    let ids = |example: &Value| {
        let ids = example["ids"].as_array().unwrap();
        ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect::<Vec<_>>()
    };
    let examples = case["examples"].as_array().unwrap().iter();
    let examples = examples.map(|example| {
        let prompt = example["prompt"].as_u64().unwrap() as usize;
        (example["role"].as_str().unwrap().to_owned(), ids(example), prompt)
    });
    examples.collect()
}

#[test]
fn tokens_and_masks_are_those_of_trl() {
    let text = std::fs::read_to_string(golden("preference/tokenize.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    let mut compared = 0;
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let keeps_end = case["args"]["truncation_mode"] == "keep_end";
        if keeps_end || OTHERWISE.contains(&name) {
            continue;
        }
        let mut options = options(case["trainer"].as_str().unwrap().parse().unwrap());
        options.max_seq_len = match &case["args"]["max_length"] {
            Value::Null => 1024,
            length => length.as_u64().unwrap() as usize,
        };
        let rows = case["rows"].as_array().unwrap();
        // The batch of each case has all its rows.
        options.mismatched_block = options.mismatched_block.map(|_| rows.len());
        let loaded = load(case["model"].as_str().unwrap(), rows, &options);
        let expected = expected(case);
        if case.get("error").is_some() || expected.is_empty() {
            assert!(loaded.is_err(), "{name}");
            continue;
        }
        let data = loaded.unwrap_or_else(|error| panic!("{name}: {error}"));
        let examples = data.examples().iter().map(|example| {
            let prompt = example.trained.iter().take_while(|trained| !**trained).count();
            assert!(example.trained[prompt..].iter().all(|trained| *trained), "{name}");
            (role(example), example.ids.clone(), prompt)
        });
        assert_eq!(examples.collect::<Vec<_>>(), expected, "{name}");
        compared += 1;
    }
    assert!(compared >= 60, "{compared}");
}

/// In ORPO's and CPO's own cut, a row whose prompt fills the length has no answer: its loss would
/// be NaN. finetune drops the row.
#[test]
fn rows_whose_prompt_fills_the_length_are_dropped_and_counted() {
    let text = std::fs::read_to_string(golden("preference/tokenize.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    let case = cases.iter().find(|case| case["name"] == "cpo_truncated").unwrap();
    let rows = case["rows"].as_array().unwrap();
    for objective in [ObjectiveKind::Cpo, ObjectiveKind::Simpo, ObjectiveKind::Orpo, ObjectiveKind::Dpo] {
        let options = DataOptions { max_seq_len: 24, ..options(objective) };
        let data = load("tiny-llama", rows, &options).unwrap();
        let report = data.report();
        assert_eq!((report.cut_away, report.truncated, data.len()), (1, 2, 6), "{objective}");
        let text = report.to_string();
        assert!(text.contains("one row left out") || text.contains("1 row left out"), "{text}");
        if objective != ObjectiveKind::Dpo {
            let all = expected(case);
            let expected = all.iter().filter(|(_, ids, _)| ids.len() <= 24);
            let ids: Vec<_> = data.examples().iter().map(|example| &example.ids).collect();
            assert_eq!(ids, expected.map(|(_, ids, _)| ids).collect::<Vec<_>>());
        }
        let stop = DataOptions { on_long_row: OnLongRow::Stop, ..options.clone() };
        assert!(load("tiny-llama", rows, &stop).unwrap_err().to_string().contains("data.max_seq_len"));
        let drop = DataOptions { on_long_row: OnLongRow::Drop, ..options };
        let data = load("tiny-llama", rows, &drop).unwrap();
        assert_eq!((data.report().dropped, data.len()), (3, 2));
    }
}

fn answers(data: &Dataset, model: &str) -> Vec<(String, String, String)> {
    let tokenizer = tokenizer(model);
    let text = |ids: &[u32]| tokenizer.decode(ids, false).unwrap();
    let examples = data.examples().iter().map(|example| {
        let prompt = example.trained.iter().take_while(|trained| !**trained).count();
        (role(example), text(&example.ids[..prompt]), text(&example.ids[prompt..]))
    });
    examples.collect()
}

#[test]
fn rows_of_every_form_become_pairs() {
    let (user, good, bad) =
        (json!({"role": "user", "content": "Hi"}), json!({"role": "assistant", "content": "yes"}), "no");
    let bad_message = json!({"role": "assistant", "content": bad});
    let prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    let rows = [
        json!({"prompt": [user], "chosen": [good], "rejected": [bad_message]}),
        json!({"prompt": "Hi", "chosen": [good], "rejected": [bad_message]}),
        json!({"prompt": "Hi", "chosen": [user, good], "rejected": [user, bad_message]}),
        json!({"messages": [user], "chosen": good, "rejected": bad_message}),
        json!({"chosen": [user, good], "rejected": [user, bad_message]}),
        json!({"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"}}),
        json!({"instruction": "Hi", "input": "", "chosen": "yes", "rejected": "no"}),
    ];
    let model = "tiny-qwen2";
    for row in rows {
        let data = load(model, std::slice::from_ref(&row), &options(ObjectiveKind::Dpo)).unwrap();
        let actual = answers(&data, model);
        let texts: Vec<_> = actual.iter().map(|(role, _, answer)| (role.as_str(), answer.as_str())).collect();
        assert_eq!(texts, [("chosen", "yes<|im_end|>\n"), ("rejected", "no<|im_end|>\n")], "{row}");
        assert!(actual.iter().all(|(_, text, _)| text.ends_with(prompt)), "{row}: {actual:?}");
        assert_eq!(actual[0].1, actual[1].1, "{row}");
        let groups: Vec<_> = (0..data.len()).map(|index| data.group(index)).collect();
        assert_eq!(groups, [Some(0), Some(0)]);
        assert_eq!(data.report().to_string().matches("not used").count(), 0, "{row}: {}", data.report());
    }
}

#[test]
fn a_system_message_and_history_come_before_both_answers() {
    let model = "tiny-qwen2";
    let row = json!({"system": "Be brief.", "instruction": "And now?", "input": "", "history": [["Hi", "yo"]],
        "chosen": "yes", "rejected": "no"});
    let data = load(model, &[row], &options(ObjectiveKind::Orpo)).unwrap();
    for (_, prompt, _) in answers(&data, model) {
        let [system, user, again] = ["Be brief.", "Hi", "And now?"].map(|text| prompt.find(text).unwrap());
        assert!(system < user && user < again, "{prompt}");
    }
}

#[test]
fn labelled_rows_of_every_form_have_a_role() {
    let (user, good) =
        (json!({"role": "user", "content": "Hi"}), json!({"role": "assistant", "content": "yes"}));
    let rows = [
        json!({"prompt": "Hi\n", "completion": "yes", "label": true}),
        json!({"prompt": [user], "completion": [good], "label": "true"}),
        json!({"messages": [user, good], "label": 1}),
        json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yes"}], "kto_tag": true}),
        json!({"instruction": "Hi", "input": "", "output": "yes", "kto_tag": true}),
    ];
    for mut row in rows {
        let key = if row.get("label").is_some() { "label" } else { "kto_tag" };
        for (label, role) in [(row[key].clone(), "desirable"), (json!(false), "undesirable")] {
            row[key] = label;
            let data = load("tiny-qwen2", &[row.clone()], &options(ObjectiveKind::Kto)).unwrap();
            let actual = answers(&data, "tiny-qwen2");
            let roles: Vec<_> = actual.iter().map(|(role, ..)| role.as_str()).collect();
            assert_eq!(roles, [role, "mismatched"], "{row}");
            assert!(actual[0].2.starts_with("yes<|im_end|>"), "{actual:?}");
        }
    }
}

#[test]
fn mismatched_answers_go_round_in_blocks_of_a_micro_batch() {
    let rows: Vec<Value> = (0..5)
        .map(|n| json!({"prompt": format!("p{n}\n"), "completion": format!("c{n}"), "label": true}))
        .collect();
    let of = |block| {
        let options = DataOptions { mismatched_block: block, ..options(ObjectiveKind::Kto) };
        let data = load("tiny-llama3", &rows, &options).unwrap();
        let groups: Vec<_> = (0..data.len()).map(|index| data.group(index)).collect();
        let answers = answers(&data, "tiny-llama3").into_iter();
        let texts: Vec<String> = answers.map(|(_, _, answer)| answer.replace("<|eot_id|>", "")).collect();
        (texts, groups)
    };
    let (texts, groups) = of(Some(2));
    assert_eq!(texts, ["c0", "c1", "c1", "c0", "c2", "c3", "c3", "c2", "c4", "c4"]);
    assert_eq!(groups, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4].map(Some));
    let (texts, _) = of(Some(usize::MAX));
    assert_eq!(texts, ["c0", "c4", "c1", "c0", "c2", "c1", "c3", "c2", "c4", "c3"]);
    let (texts, groups) = of(None);
    assert_eq!((texts.len(), groups), (5, vec![None; 5]));
}

#[test]
fn rows_of_another_kind_are_one_error() {
    let pair = json!({"prompt": "a\n", "chosen": "b", "rejected": "c"});
    let single = json!({"prompt": "a\n", "completion": "b"});
    let labelled = json!({"prompt": "a\n", "completion": "b", "label": true});
    let error = |row: &Value, objective| {
        load("tiny-llama", &[row.clone(), row.clone()], &options(objective)).unwrap_err().to_string()
    };
    let dpo = error(&single, ObjectiveKind::Dpo);
    assert!(dpo.contains("cannot train on the prompt_completion rows of"), "{dpo}");
    assert!(dpo.contains("`objective.kind` is \"dpo\", which compares two answers a row"), "{dpo}");
    assert!(dpo.contains("rows.jsonl:1 has the keys prompt, completion"), "{dpo}");
    assert!(dpo.contains("`objective.kind = \"cross_entropy\"`"), "{dpo}");
    let dpo = error(&labelled, ObjectiveKind::Cpo);
    assert!(dpo.contains("`objective.kind = \"kto\"`"), "{dpo}");
    let kto = error(&single, ObjectiveKind::Kto);
    assert!(kto.contains("which learns from answers with a `label`"), "{kto}");
    let plain = error(&pair, ObjectiveKind::CrossEntropy);
    assert!(plain.contains("`objective.kind = \"dpo\"` to learn from both answers"), "{plain}");
    assert!(plain.contains("`data.format = \"preference_chosen\"`"), "{plain}");
}

#[test]
fn a_bad_row_is_named_with_its_answer() {
    let good = json!({"prompt": "a\n", "chosen": "b", "rejected": "c"});
    for (bad, why) in [
        (json!({"prompt": "a\n", "chosen": "b", "rejected": 3}), "`rejected` is a number"),
        (
            json!({"prompt": "a\n", "chosen": ["b"], "rejected": "c"}),
            "`chosen` is an array and `rejected` is a string",
        ),
        (
            json!({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}),
            "begin with different messages",
        ),
        (
            json!({"prompt": [{"role": "user", "content": "a"}], "chosen": [], "rejected": []}),
            "`chosen` is empty",
        ),
    ] {
        let rows = [good.clone(), bad, good.clone()];
        let error = load("tiny-llama", &rows, &options(ObjectiveKind::Dpo)).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:2: ") && error.contains(why), "{error}");
        let skip = DataOptions { on_bad_row: OnBadRow::Skip, ..options(ObjectiveKind::Dpo) };
        assert_eq!(load("tiny-llama", &rows, &skip).unwrap().len(), 4);
    }
}

#[test]
fn the_digest_knows_roles() {
    let row = |label: bool| json!({"prompt": "a\n", "completion": "b", "label": label});
    let digest = |row: Value| load("tiny-llama", &[row], &options(ObjectiveKind::Kto)).unwrap().digest();
    assert_eq!(digest(row(true)), digest(row(true)));
    assert_ne!(digest(row(true)), digest(row(false)));
    let plain = load("tiny-llama", &[row(true)], &DataOptions::default()).unwrap();
    assert_eq!(plain.examples()[0].role, Role::Plain);
}
