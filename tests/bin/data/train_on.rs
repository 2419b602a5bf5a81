//! `data.train_on` through `finetune data`: the text of a row, with ⟦ and ⟧ around trained text.

use insta::assert_snapshot;

use crate::data::chats::texts;
use crate::test_dir::TestDir;

const CHAT: &str = r#"{"messages": [{"role": "system", "content": "Kind."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "No"}]}"#;
const PAIR: &str = r#"{"prompt": "2 + 2? ", "completion": "4"}"#;

/// Returns the row `row` with `value` as `data.train_on`, in one line.
fn trained(row: &str, value: &str) -> String {
    let dir = TestDir::new();
    dir.write("row.jsonl", row);
    let set = format!("data.train_on={value}");
    let args = ["data", "--tokens", "--model", "model", "--dataset", "row.jsonl", "--set", &set];
    let args = [&args[..], &["--set", "data.chat_template=chatml"]].concat();
    let output = dir.command(&args).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    texts(&output)
        .remove(0)
        .replace("<|im_start|>", "<")
        .replace("<|im_end|>\n", ">")
        .replace("<|im_end|>", ">")
}

#[test]
fn roles_turns_and_ends_of_a_chat() {
    assert_snapshot!(trained(CHAT, "assistant"), @"
    <<system
    Kind.><user
    Hi><assistant
    ⟦Yes>⟧
    <user
    Bye><assistant
    ⟦No>⟧
    ");
    assert_snapshot!(trained(CHAT, "last"), @"
    <<system
    Kind.><user
    Hi><assistant
    Yes><user
    Bye><assistant
    ⟦No>⟧
    ");
    assert_snapshot!(trained(CHAT, "all"), @"
    <⟦<system
    Kind.><user
    Hi><assistant
    Yes><user
    Bye><assistant
    No>⟧
    ");
    assert_snapshot!(trained(CHAT, r#"["user"]"#), @"
    <<system
    Kind.><user
    ⟦Hi>⟧
    <assistant
    Yes><user
    ⟦Bye>⟧
    <assistant
    No>
    ");
    assert_snapshot!(trained(CHAT, r#"["system", "assistant"]"#), @"
    <<system
    ⟦Kind.>⟧
    <user
    Hi><assistant
    ⟦Yes>⟧
    <user
    Bye><assistant
    ⟦No>⟧
    ");
    assert_snapshot!(trained(CHAT, r#"{ ends = "none" }"#), @"
    <<system
    Kind.><user
    Hi><assistant
    ⟦Yes⟧><user
    Bye><assistant
    ⟦No⟧>
    ");
    assert_snapshot!(trained(CHAT, r#"{ ends = "last" }"#), @"
    <<system
    Kind.><user
    Hi><assistant
    ⟦Yes⟧><user
    Bye><assistant
    ⟦No>⟧
    ");
    assert_snapshot!(trained(CHAT, r#"{ ends = "all" }"#), @"
    <<system
    Kind.⟦>⟧
    <user
    Hi⟦>⟧
    <assistant
    ⟦Yes>⟧
    <user
    Bye⟦>⟧
    <assistant
    ⟦No>⟧
    ");
    assert_snapshot!(trained(CHAT, r#"{ roles = ["assistant"], turns = "last", ends = "none" }"#), @"
    <<system
    Kind.><user
    Hi><assistant
    Yes><user
    Bye><assistant
    ⟦No⟧>
    ");
}

#[test]
fn a_prompt_is_the_user_s_and_a_completion_the_assistant_s() {
    assert_snapshot!(trained(PAIR, "assistant"), @"2 + 2? ⟦4>⟧");
    assert_snapshot!(trained(PAIR, r#"["user"]"#), @"2⟦ + 2? ⟧4");
    assert_snapshot!(trained(PAIR, r#"["user", "assistant"]"#), @"2⟦ + 2? 4>⟧");
    assert_snapshot!(trained(PAIR, r#"{ ends = "none" }"#), @"2 + 2? ⟦4⟧");
}

#[test]
fn other_values_are_refused() {
    let dir = TestDir::new();
    let args = ["data", "--tokens", "--model", "model", "--dataset", "rows.jsonl", "--set"];
    for (value, why) in [
        (r#"["bot"]"#, r#""bot" is not a role; accepted: system, developer, user, assistant, tool"#),
        (r#"{ ends = "eos" }"#, r#"its `ends` is "eos"; accepted: "turn", "all", "last", "none""#),
        ("completion", r#"accepted: "assistant", "all", "last", a list of roles"#),
    ] {
        let set = format!("data.train_on={value}");
        let output = dir.command(&[&args[..], &[&set]].concat()).output().unwrap();
        let told = dir.told(&output.stderr);
        assert!(output.status.code() == Some(1) && told.contains(why), "{told}");
    }
}
