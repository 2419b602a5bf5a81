//! `finetune generate`: chats and prompt files, sampling options, stop conditions, and JSON.

use std::io::Write as _;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::test_dir::TestDir;

const SHORT: [&str; 5] = ["generate", "--model", "model", "--max-new-tokens", "12"];
const PROMPT: [&str; 2] = ["--prompt", "Count to 4"];

/// Returns the stdout of a successful command as JSON lines.
fn lines(dir: &TestDir, args: &[&str]) -> Vec<Value> {
    let output = dir.command(&[&SHORT[..], args].concat()).output().unwrap();
    assert!(output.status.success(), "{args:?}\n{}", dir.told(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the one object that `--json` prints for the prompt.
fn object(dir: &TestDir, more: &[&str]) -> Value {
    let objects = lines(dir, &[&PROMPT[..], more, &["--json"]].concat());
    assert_eq!(objects.len(), 1, "{more:?}");
    objects[0].clone()
}

fn answer(dir: &TestDir, more: &[&str]) -> String {
    object(dir, more)["answer"].as_str().unwrap().to_owned()
}

fn refused(dir: &TestDir, args: &[&str]) -> String {
    dir.refused(&[&["generate", "--model", "model"], args].concat())
}

/// Returns the message for arguments that clap refuses.
fn misused(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(&[&["generate", "--model", "model"], args].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// Returns the answers of a dialogue on stdin.
fn dialogue(dir: &TestDir, turns: &str, more: &[&str]) -> String {
    let mut command = dir.command(&[&SHORT[..], &["--chat"], more].concat());
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(turns.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_chat_turn_as_a_value_is_the_first_turn_of_a_dialogue() {
    let dir = TestDir::new();
    let one = |more: &[&str]| {
        let args = [&SHORT[..], &["--chat", "Count to 4"], more].concat();
        String::from_utf8(dir.command(&args).output().unwrap().stdout).unwrap()
    };
    let (plain, pirate) = (one(&[]), one(&["--system", "You are a pirate."]));
    assert_eq!(dialogue(&dir, "Count to 4\n", &[]), plain);
    assert_eq!(dialogue(&dir, "Count to 4\n\nnot read\n", &["--system", "You are a pirate."]), pirate);
    assert_ne!(plain, pirate, "the system message is not used");
    let turns = dialogue(&dir, "Count to 4\nAgain\n", &["--json"]);
    let turns: Vec<Value> = turns.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(turns.len(), 2);
    assert_eq!(format!("{}\n", turns[0]["answer"].as_str().unwrap()), plain);
    assert_eq!(turns[1]["prompt"], "Again");
}

#[test]
fn a_system_message_that_no_template_prints_is_refused() {
    let dir = TestDir::new();
    let with = |template: &str| {
        dir.write("r.toml", &format!("[data]\nchat_template = '''{template}'''\n"));
        refused(&dir, &["--recipe", "r.toml", "--chat", "a", "--system", "You are a pirate."])
    };
    let without = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}";
    let raises = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}";
    for said in [with(without), with(raises)] {
        assert!(said.contains("error: cannot use `--system`"), "{said}");
        assert!(said.contains("caused by: the chat template prints no system messages"), "{said}");
        assert!(said.contains("hint: write the text into the user's turn"), "{said}");
    }
    let rarely = "{% for m in messages %}{% if m.role != 'system' or 'pirate' not in m.content %}{{ m.content }}{% endif %}{% endfor %}";
    let said = with(rarely);
    assert!(said.contains("caused by: the chat template leaves out this system message"), "{said}");
    // Rows of a data file are used, with a warning.
    let row = json!({"messages": [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "a"}]});
    dir.write("r.toml", &format!("[data]\nchat_template = '''{without}'''\n"));
    dir.write("prompts.jsonl", &format!("{row}\n"));
    let args = [&SHORT[..], &["--recipe", "r.toml", "--input", "prompts.jsonl", "--json"]].concat();
    let said = dir.said(&args);
    assert!(said.contains("warning: the chat template prints no system messages (1 in 1 row)"), "{said}");
}

#[test]
fn the_rows_of_a_file_are_answered_as_alone() {
    let dir = TestDir::new();
    let chat = json!([{"role": "user", "content": "Count to 4"}]);
    let rows = [
        json!({"id": 7, "prompt": "Count to 4", "score": 1.50}),
        json!({"messages": chat, "of": {"any": [null, "kind"]}}),
        json!({"prompt": "the island"}),
    ];
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    dir.write("prompts.jsonl", &text);
    let sampled = ["--temperature", "1.2", "--seed", "9"];
    let file = ["--input", "prompts.jsonl", "--output", "answers.jsonl"];
    let said = dir.said(&[&SHORT[..], &file, &sampled].concat());
    assert!(said.contains("answered 3 prompts with ") && said.contains(" in answers.jsonl"), "{said}");
    let written = std::fs::read_to_string(dir.path("answers.jsonl")).unwrap();
    let written: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let alone = |prompt: &[&str]| {
        lines(&dir, &[prompt, &sampled, &["--json"]].concat())[0]["answer"].as_str().unwrap().to_owned()
    };
    let alone = [alone(&PROMPT), alone(&["--chat", "Count to 4"]), alone(&["--prompt", "the island"])];
    assert_eq!(written.len(), 3);
    for ((mut row, answer), written) in rows.into_iter().zip(alone).zip(written) {
        row["answer"] = Value::from(answer);
        assert_eq!(written, row);
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&written), keys(&row), "the order of the keys");
    }
    // Existing files are not replaced, and a refused command leaves no file.
    let before = std::fs::read(dir.path("answers.jsonl")).unwrap();
    let said = refused(&dir, &file);
    assert!(
        said.contains("cannot write answers.jsonl") && said.contains("a file of that name exists"),
        "{said}"
    );
    assert_eq!(std::fs::read(dir.path("answers.jsonl")).unwrap(), before);
    let said = refused(&dir, &["--input", "prompts.jsonl", "--output", "prompts.jsonl"]);
    assert!(said.contains("a file of that name exists"), "{said}");
    // Of many prompts that are too long, only the first is named.
    let long = ["generate", "--model", "model", "--max-new-tokens", "300", "--json"];
    let said = dir.said(&[&long[..], &file[..2]].concat());
    assert_eq!(said.matches("its answer have more tokens than the 256 positions").count(), 1, "{said}");
    assert!(said.contains("warning: prompts.jsonl:1: the prompt and its answer"), "{said}");
    assert!(said.contains("3 of 3 prompts exceed the positions that the model was made for"), "{said}");
    // JSON goes to stdout, with or without an output file.
    let printed = lines(&dir, &[&file[..2], &sampled, &["--json"]].concat());
    assert_eq!(printed.len(), 3);
    assert_eq!(printed[1]["messages"], chat);
    let keys: Vec<&String> = printed[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["prompt", "answer", "tokens", "finish_reason"]);
}

#[test]
fn samples_depend_on_no_other_sample_or_prompt() {
    let dir = TestDir::new();
    let sampled = ["--temperature", "1.5", "--seed", "3"];
    let samples = |count: &str| object(&dir, &[&sampled[..], &["-n", count]].concat())["answers"].clone();
    let three = samples("3");
    assert_eq!(three, samples("3"), "the same command");
    assert_eq!(three.as_array().unwrap()[..2], samples("2").as_array().unwrap()[..]);
    assert_eq!(three[0].as_str().unwrap(), answer(&dir, &sampled));
    assert!(three[0] != three[1] && three[1] != three[2] && three[0] != three[2], "{three}");
    assert_ne!(answer(&dir, &["--temperature", "1.5", "--seed", "4"]), three[0].as_str().unwrap());
    let all = object(&dir, &[&sampled[..], &["--samples", "3"]].concat());
    assert_eq!(
        (all["tokens"].as_array().unwrap().len(), all["finish_reason"][2].as_str()),
        (3, Some("length"))
    );
    dir.write("prompts.jsonl", "{\"prompt\":\"the island\"}\n{\"prompt\":\"Count to 4\"}\n");
    let file = ["--input", "prompts.jsonl", "--output", "answers.jsonl", "-n", "3"];
    dir.said(&[&SHORT[..], &file, &sampled].concat());
    let written = std::fs::read_to_string(dir.path("answers.jsonl")).unwrap();
    let last: Value = serde_json::from_str(written.lines().last().unwrap()).unwrap();
    assert_eq!(last["answers"], three);
    // Without JSON each answer follows its prompt.
    let args = [&SHORT[..], &PROMPT, &sampled, &["-n", "2"]].concat();
    let stdout = String::from_utf8(dir.command(&args).output().unwrap().stdout).unwrap();
    let whole = |at: usize| format!("Count to 4{}\n", three[at].as_str().unwrap());
    assert_eq!(stdout, whole(0) + &whole(1));
}

#[test]
fn an_answer_ends_before_a_stop_text() {
    let dir = TestDir::new();
    let whole = object(&dir, &[]);
    assert_eq!((whole["tokens"].as_u64(), whole["finish_reason"].as_str()), (Some(12), Some("length")));
    let text = whole["answer"].as_str().unwrap();
    let characters: Vec<(usize, char)> = text.char_indices().collect();
    assert!(characters.len() > 12, "{text:?} has more characters than tokens");
    // Every fifth pair of neighbouring characters, within one token or across two.
    for window in characters.windows(2).step_by(5) {
        let stop: String = window.iter().map(|(_, character)| character).collect();
        let answer = object(&dir, &["--stop", "never in it", "--stop", &stop]);
        let at = text.find(&stop).unwrap();
        assert_eq!(answer["answer"].as_str().unwrap(), &text[..at], "{stop:?} in {text:?}");
        assert_eq!(answer["finish_reason"], "stop");
        let printed =
            dir.command(&[&SHORT[..], &PROMPT, &["--stop", &stop]].concat()).output().unwrap().stdout;
        assert_eq!(String::from_utf8(printed).unwrap(), format!("Count to 4{}\n", &text[..at]));
    }
    // Text that could begin a stop text but does not is printed.
    let longer = format!("{}#", text.chars().last().unwrap());
    assert_eq!(object(&dir, &["--stop", &longer]), whole);
    let said = refused(&dir, &["--prompt", "a", "--stop", "<|im_end|>\n"]);
    assert!(said.contains("cannot stop at \"<|im_end|>\\n\""), "{said}");
    assert!(said.contains("hint: write `--stop \"<|im_end|>\"`, the token alone"), "{said}");
    assert!(misused(&dir, &["--prompt", "a", "--stop", ""]).contains("accepted: a text, not empty"));
}

/// A special token ends an answer like a stop text; EOS has its own reason.
#[test]
fn special_tokens_end_answers() {
    let dir = TestDir::new();
    let sampled = |seed: usize, more: &[&str]| {
        let seed = seed.to_string();
        let hot = ["--temperature", "100", "--max-new-tokens", "400", "--seed", &seed];
        let args = [&["generate", "--model", "model", "--json"], &PROMPT[..], &hot, more].concat();
        let output = dir.command(&args).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let ended =
        (0..20).map(|seed| (seed, sampled(seed, &[]))).find(|(_, answer)| answer["finish_reason"] == "eos");
    let (_, answer) = ended.expect("a token in 400 is EOS");
    assert!(answer["tokens"].as_u64().unwrap() < 400, "{answer}");
    // `<|endoftext|>` is special, but not an EOS of this model.
    let stop = ["--stop", "<|endoftext|>"];
    let stopped = (0..20)
        .map(|seed| (seed, sampled(seed, &stop)))
        .find(|(_, answer)| answer["finish_reason"] == "stop");
    let (seed, answer) = stopped.expect("a token in 400 is the stop token");
    let whole = sampled(seed, &[]);
    assert!(whole["tokens"].as_u64() > answer["tokens"].as_u64(), "{answer}");
    assert!(whole["answer"].as_str().unwrap().starts_with(answer["answer"].as_str().unwrap()));
}

#[test]
fn each_option_of_the_choice_changes_it() {
    let dir = TestDir::new();
    let greedy = answer(&dir, &[]);
    let hot = ["--temperature", "3", "--seed", "2"];
    let sampled = answer(&dir, &hot);
    assert_ne!(sampled, greedy);
    let with = |more: &[&str]| answer(&dir, &[&hot[..], more].concat());
    // Only the likeliest token remains.
    assert_eq!(with(&["--top-k", "1"]), greedy);
    assert_eq!(with(&["--min-p", "1"]), greedy);
    assert_eq!(with(&["--top-p", "0.000001"]), greedy);
    for one in [["--top-k", "5"], ["--min-p", "0.9"], ["--repetition-penalty", "5"]] {
        assert_ne!(with(&one), sampled, "{one:?}");
    }
    // All tokens remain.
    for one in [["--top-k", "100000"], ["--min-p", "0"], ["--repetition-penalty", "1"]] {
        assert_eq!(with(&one), sampled, "{one:?}");
    }
    // The last word of the greedy answer repeats.
    let penalized = answer(&dir, &["--repetition-penalty", "20"]);
    assert_ne!(penalized, greedy);
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let dir = TestDir::new();
    for (args, what, hint) in [
        (&["--prompt", "a", "-n", "3"][..], "cannot give 3 different answers", "remove `--samples`"),
        (
            &["--chat", "-n", "2", "--temperature", "1"],
            "cannot give 2 answers in a dialogue",
            "`--chat \"TEXT\"`",
        ),
        (
            &["--prompt", "a", "--top-k", "3"],
            "cannot use `--top-k 3` with temperature 0",
            "add a temperature",
        ),
        (
            &["--prompt", "a", "--top-p", "0.9"],
            "cannot use `--top-p 0.9` with temperature 0",
            "add a temperature",
        ),
        (
            &["--prompt", "a", "--min-p", "0.1"],
            "cannot use `--min-p 0.1` with temperature 0",
            "add a temperature",
        ),
        (&["--chat", " "], "cannot answer an empty turn", "write `--chat \"TEXT\"`"),
    ] {
        let said = refused(&dir, args);
        assert!(said.contains(&format!("error: {what}")) && said.contains(hint), "{said}");
        assert_eq!(said.matches("error: ").count(), 1, "{said}");
    }
    for (args, why) in [
        (&["--prompt", "a", "--output", "o"][..], "'--prompt <TEXT>' cannot be used with '--output <FILE>'"),
        (&["--output", "o"], "<--prompt <TEXT>|--chat [<TEXT>]|--input <FILE>>"),
        (&["--input", "p"], "--output <FILE>|--json"),
        (&["--prompt", "a", "--system", "s"], "'--prompt <TEXT>' cannot be used with '--system <TEXT>'"),
        (
            &["--input", "p", "--json", "--system", "s"],
            "'--input <FILE>' cannot be used with '--system <TEXT>'",
        ),
        (&["--prompt", "a", "--chat", "b"], "cannot be used with"),
        (&["--prompt", "a", "--top-k", "0"], "accepted: a whole number, at least 1"),
        (&["--prompt", "a", "--min-p", "1.1"], "accepted: a number from 0 to 1"),
        (&["--prompt", "a", "--min-p", "nan"], "accepted: a number from 0 to 1"),
        (&["--prompt", "a", "--repetition-penalty", "0"], "accepted: a number above 0"),
        (&["--prompt", "a", "--repetition-penalty", "1e-60"], "accepted: a number above 0"),
        (&["--prompt", "a", "--samples", "0"], "accepted: a whole number, at least 1"),
    ] {
        let said = misused(&dir, args);
        assert!(said.contains(why), "{args:?}: {said}");
    }
}

#[test]
fn a_line_that_is_no_prompt_is_named() {
    let dir = TestDir::new();
    let user = json!({"role": "user", "content": "a"});
    let assistant = json!({"role": "assistant", "content": "Well"});
    for (line, why) in [
        ("{\"prompt\": ".to_owned(), "prompts.jsonl:2"),
        ("[1]".to_owned(), "prompts.jsonl:2"),
        (json!({"text": "a"}).to_string(), "it has neither `prompt` nor `messages`; its keys: `text`"),
        (json!({"prompt": "a", "messages": [user]}).to_string(), "it has both `prompt` and `messages`"),
        (json!({"prompt": 3}).to_string(), "its `prompt` is a number; text is needed"),
        (json!({"prompt": ""}).to_string(), "its `prompt` is empty"),
        (json!({"messages": []}).to_string(), "`messages` is empty"),
        (json!({"messages": [{"role": "user"}]}).to_string(), "`messages[0]` has no `content`"),
        (
            json!({"messages": [user, assistant]}).to_string(),
            "its last message is the assistant's (\"Well\"), which finetune would write; remove that message",
        ),
        (json!({"prompt": "a", "answer": "b"}).to_string(), "it has the key `answer`"),
    ] {
        dir.write("prompts.jsonl", &format!("{{\"prompt\": \"a\"}}\n{line}\n{{\"no\": 1}}\n"));
        let said = refused(&dir, &["--input", "prompts.jsonl", "--output", "answers.jsonl"]);
        assert!(said.contains("error: cannot use the prompt in prompts.jsonl:2\n"), "{line}: {said}");
        assert!(
            said.contains(why) && said.contains("hint: write a row a line: {\"prompt\""),
            "{line}: {said}"
        );
        assert_eq!(said.matches("error: ").count(), 1, "{said}");
        assert!(!dir.path("answers.jsonl").exists());
    }
    dir.write("prompts.jsonl", "\n\n");
    let said = refused(&dir, &["--input", "prompts.jsonl", "--json"]);
    assert!(said.contains("cannot read the prompts prompts.jsonl"), "{said}");
    let said = refused(&dir, &["--input", "none.jsonl", "--json"]);
    assert!(said.contains("cannot read the prompts none.jsonl"), "{said}");
    let said = refused(&dir, &["--input", ".", "--json"]);
    assert!(said.contains("it is a folder; accepted: a file"), "{said}");
}
