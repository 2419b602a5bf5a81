//! Records to examples: trained tokens, appended tokens, and refused rows.

use std::path::{Path, PathBuf};

use finetune::data::ExampleSource as _;
use finetune::data::{ChatTemplate, DataOptions, Dataset, Example, Tokenizer};
use finetune::recipe::enums::{DataFormat, OnBadRow, OnLongRow};
use finetune::recipe::{Template, TrainOn};

use super::{folder, golden, template, tokenizer};

fn load(tokenizer: &Tokenizer, name: &str, text: &str, options: &DataOptions) -> Result<Dataset, String> {
    load_with(tokenizer, Some(&template(tokenizer)), name, text, options)
}

fn load_with(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    name: &str,
    text: &str,
    options: &DataOptions,
) -> Result<Dataset, String> {
    let folder = folder(&[(name, text.as_bytes())]);
    let path = folder.path().join(name);
    Dataset::load(std::slice::from_ref(&path), options, tokenizer, template)
        .map_err(|error| error.to_string().replace(&path.display().to_string(), name))
}

/// Returns the text of the trained tokens.
fn trained(tokenizer: &Tokenizer, example: &Example) -> String {
    let ids: Vec<u32> =
        example.ids.iter().zip(&example.trained).filter(|(_, t)| **t).map(|(id, _)| *id).collect();
    tokenizer.decode(&ids, false).unwrap()
}

fn whole(tokenizer: &Tokenizer, example: &Example) -> String {
    tokenizer.decode(&example.ids, false).unwrap()
}

#[test]
fn pairs_are_joined_as_they_are_and_end_in_eos() {
    let row = r#"{"prompt": "Count to 4\n", "completion": "1 2 3 4"}"#;
    let llama3 = tokenizer("tiny-llama3");
    let data = load(&llama3, "a.jsonl", row, &DataOptions::default()).unwrap();
    let example = &data.examples()[0];
    assert_eq!(whole(&llama3, example), "<|begin_of_text|>Count to 4\n1 2 3 4<|eot_id|>");
    assert_eq!(trained(&llama3, example), "1 2 3 4<|eot_id|>");

    let all = DataOptions { train_on: TrainOn::All, ..DataOptions::default() };
    let data = load(&llama3, "a.jsonl", row, &all).unwrap();
    assert!(data.examples()[0].trained.iter().all(|t| *t));

    // Qwen has no BOS and its tokenizer adds none.
    let qwen = tokenizer("tiny-qwen2");
    let data = load(&qwen, "a.jsonl", row, &DataOptions::default()).unwrap();
    assert_eq!(whole(&qwen, &data.examples()[0]), "Count to 4\n1 2 3 4<|im_end|>");
}

#[test]
fn eos_is_not_doubled() {
    let llama3 = tokenizer("tiny-llama3");
    // 596 <|end_of_text|> also ends generation, by generation_config.json.
    for (text, last) in [("a <|eot_id|>", 599), ("a <|end_of_text|>\n\n", 198), ("a", 599)] {
        let row = serde_json::json!({"text": text}).to_string();
        let data = load(&llama3, "a.jsonl", &row, &DataOptions::default()).unwrap();
        let ids = &data.examples()[0].ids;
        assert_eq!(ids.iter().filter(|id| [596, 599].contains(*id)).count(), 1, "{text:?}");
        if last != 198 {
            assert_eq!(*ids.last().unwrap(), last, "{text:?}");
        }
    }
}

#[test]
fn text_is_trained_whole_and_two_bos_are_refused() {
    let llama3 = tokenizer("tiny-llama3");
    let data = load(&llama3, "a.jsonl", r#"{"text": "Hello world"}"#, &DataOptions::default()).unwrap();
    assert!(data.examples()[0].trained.iter().all(|t| *t));

    let why = load(&llama3, "a.jsonl", r#"{"text": "<|begin_of_text|>Hello"}"#, &DataOptions::default())
        .unwrap_err();
    assert_eq!(
        why,
        "error: cannot use 1 of 1 row of the data set\n  caused by: a.jsonl:1: it begins with \
         \"<|begin_of_text|>\", which the tokenizer adds itself\nhint: mend the rows"
    );
    // phi3's tokenizer adds none, so the text's own one stays.
    let phi3 = tokenizer("tiny-phi3");
    let data = load(&phi3, "a.jsonl", r#"{"text": "<s>Hello"}"#, &DataOptions::default()).unwrap();
    assert_eq!(data.examples()[0].ids.iter().filter(|id| **id == 1).count(), 1);
}

#[test]
fn tasks_become_chats_or_headings() {
    let llama = tokenizer("tiny-llama");
    let row = r#"{"instruction": "Add {{n}}", "input": "2, 3", "output": "5"}"#;
    let data = load(&llama, "a.jsonl", row, &DataOptions::default()).unwrap();
    assert_eq!(
        whole(&llama, &data.examples()[0]),
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nAdd {{n}}\n\n2, 3\
         <|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    );
    assert_eq!(trained(&llama, &data.examples()[0]), "5<|im_end|>");

    let data = load_with(&llama, None, "a.jsonl", row, &DataOptions::default()).unwrap();
    assert_eq!(
        whole(&llama, &data.examples()[0]),
        "### Instruction:\nAdd {{n}}\n\n### Input:\n2, 3\n\n### Response:\n5<|im_end|>"
    );
    assert_eq!(trained(&llama, &data.examples()[0]), "5<|im_end|>");
}

#[test]
fn long_rows_are_cut_dropped_or_refused() {
    let llama = tokenizer("tiny-llama");
    let rows = "{\"text\": \"one two three four five six seven eight nine ten\"}\n{\"text\": \"one\"}\n";
    let cut = DataOptions { max_seq_len: 8, ..DataOptions::default() };
    let data = load(&llama, "a.jsonl", rows, &cut).unwrap();
    assert_eq!((data.len(), data.examples()[0].ids.len(), data.report().truncated), (2, 8, 1));
    assert!(data.examples()[0].ids.iter().all(|id| *id != 479), "a cut row does not end");

    let drop = DataOptions { on_long_row: OnLongRow::Drop, ..cut.clone() };
    let data = load(&llama, "a.jsonl", rows, &drop).unwrap();
    assert_eq!((data.len(), data.report().dropped), (1, 1));

    let stop = DataOptions { on_long_row: OnLongRow::Stop, on_bad_row: OnBadRow::Skip, ..cut };
    let why = load(&llama, "a.jsonl", rows, &stop).unwrap_err();
    assert!(why.contains("a.jsonl:1: ") && why.contains("`data.max_seq_len` is 8"), "{why}");
}

#[test]
fn a_text_file_is_cut_into_chunks_that_lose_nothing() {
    let llama = tokenizer("tiny-llama");
    let text = "The amber teacher rings the kettle noon.\n".repeat(5);
    let mut expected = llama.encode(&text, true).unwrap();
    expected.push(479);
    for max_seq_len in [2, 3, 7, 8, 64, expected.len() - 1, expected.len()] {
        let options = DataOptions { max_seq_len, ..DataOptions::default() };
        let data = load(&llama, "a.txt", &text, &options).unwrap();
        let ids: Vec<u32> = data.examples().iter().flat_map(|e| e.ids.clone()).collect();
        assert!(data.examples().iter().all(|e| e.ids.len() <= max_seq_len), "{max_seq_len}");
        // With a length of 2, a last single token has no partner.
        if max_seq_len > 2 {
            assert_eq!(ids, expected, "{max_seq_len}");
            assert!(data.examples().iter().all(|e| e.num_trained() > 0), "{max_seq_len}");
        }
    }
}

#[test]
fn rows_with_nothing_to_train_are_faults() {
    let llama = tokenizer("tiny-llama");
    let user_only = r#"{"messages": [{"role": "user", "content": "hi"}]}"#;
    let why = load(&llama, "a.jsonl", user_only, &DataOptions::default()).unwrap_err();
    assert!(why.contains("a.jsonl:1: no token is trained"), "{why}");
    let long = r#"{"messages": [{"role": "user", "content": "a long question"}, {"role": "assistant", "content": "x"}]}"#;
    let cut = DataOptions { max_seq_len: 20, ..DataOptions::default() };
    let why = load(&llama, "a.jsonl", long, &cut).unwrap_err();
    assert!(why.contains("1 row left out: its answer begins after data.max_seq_len tokens"), "{why}");
    for row in [r#"{"text": ""}"#, r#"{"prompt": "a", "completion": ""}"#] {
        assert!(load(&llama, "a.jsonl", row, &DataOptions::default()).unwrap_err().contains("empty"));
    }
}

/// If many rows are bad, skipping them would lose much of the data set, so the hint does not
/// suggest it.
#[test]
fn the_way_out_of_bad_rows_depends_on_their_number_and_format() {
    let llama = tokenizer("tiny-llama");
    let pair = |count: usize| "{\"prompt\": \"a\", \"completion\": \"b\"}\n".repeat(count);
    let question = |count: usize| "{\"question\": \"a\", \"answer\": \"b\"}\n".repeat(count);
    let bad = "{\"prompt\": 3, \"completion\": \"b\"}\n";
    let hint = |rows: &str, format: DataFormat| {
        let options = DataOptions { format, ..DataOptions::default() };
        let why = load(&llama, "a.jsonl", rows, &options).unwrap_err();
        why.split_once("\nhint: ").unwrap().1.to_owned()
    };
    let seldom = hint(&(pair(99) + bad), DataFormat::Auto);
    assert_eq!(seldom, "mend the rows, or write `data.on_bad_row = \"skip\"` to leave them out");
    assert_eq!(hint(&(pair(98) + bad), DataFormat::Auto), "mend the rows");
    // Rows of another format: all rows of the file, or some.
    let other = "give a.jsonl its own format: `format = \"question_answer\"` in a `[[data.train]]` table of its `path`";
    assert_eq!(hint(&question(4), DataFormat::PromptCompletion), other);
    assert_eq!(hint(&(pair(2) + &question(4)), DataFormat::PromptCompletion), other);
    let mixed = "put the rows of a.jsonl that have the format question_answer into a file of their own";
    assert_eq!(hint(&(pair(50) + &question(30)), DataFormat::Auto), mixed);
    assert_eq!(hint(&(pair(50) + &question(30)), DataFormat::PromptCompletion), mixed);
}

#[test]
fn a_pair_without_its_half_says_which() {
    let llama = tokenizer("tiny-llama");
    let options = DataOptions { format: DataFormat::PromptCompletion, ..DataOptions::default() };
    for (row, wanted) in [
        ("{\"prompt\": \"x\"}", "a.jsonl:1: it has no `completion`; its keys are prompt\n"),
        ("{\"completion\": \"x\", \"n\": 1}", "a.jsonl:1: it has no `prompt`; its keys are completion, n\n"),
    ] {
        let why = load(&llama, "a.jsonl", row, &options).unwrap_err();
        assert!(why.contains(wanted), "{why}");
    }
}

#[test]
fn bad_rows_stop_together_or_are_skipped() {
    let llama = tokenizer("tiny-llama");
    let rows = "{\"text\": \"good\"}\n{\"text\": 3}\n\n{broken\n{\"text\": \"fine\"}\n";
    let why = load(&llama, "a.jsonl", rows, &DataOptions::default()).unwrap_err();
    assert!(why.starts_with("error: cannot use 2 of 4 rows of the data set\n"), "{why}");
    assert!(why.contains("a.jsonl:2: `text` is a number; a string is needed"), "{why}");
    assert!(why.contains("a.jsonl:4: not JSON: "), "{why}");
    let skip = DataOptions { on_bad_row: OnBadRow::Skip, ..DataOptions::default() };
    let data = load(&llama, "a.jsonl", rows, &skip).unwrap();
    assert_eq!((data.len(), data.report().num_bad(), data.report().rows), (2, 2, 4));
    let shown = data.report().to_string();
    assert!(shown.contains("1 bad row: unreadable"), "{shown}");
}

#[test]
fn tokens_outside_the_model_are_refused() {
    let llama = tokenizer("tiny-llama");
    let small = DataOptions { vocab_size: 479, ..DataOptions::default() };
    let why = load(&llama, "a.jsonl", r#"{"text": "a"}"#, &small).unwrap_err();
    assert!(why.contains("token 479 (\"<|im_end|>\"); the model has the ids below 479"), "{why}");
}

const FORGETFUL: &str = "{% for m in messages %}[{{ m.role }}]
{% if m.role == 'assistant' and not loop.last %}...\
     {% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}[assistant]
{% endif %}";

#[test]
fn a_turn_that_the_template_leaves_out_is_refused() {
    let llama = tokenizer("tiny-llama");
    let forgetful = ChatTemplate::from_text(FORGETFUL, &[]).unwrap();
    let one = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let two = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#
        .replace('\n', "");
    let options = DataOptions::default();
    let data = load_with(&llama, Some(&forgetful), "a.jsonl", one, &options).unwrap();
    assert_eq!(trained(&llama, &data.examples()[0]), "b<|im_end|>");
    let why = load_with(&llama, Some(&forgetful), "a.jsonl", &two, &options).unwrap_err();
    assert!(why.contains("message 1 (assistant) comes out empty: the chat template prints nothing"), "{why}");
    let all = DataOptions { train_on: TrainOn::All, ..DataOptions::default() };
    assert!(load_with(&llama, Some(&forgetful), "a.jsonl", &two, &all).is_ok());
}

/// Qwen3's template drops the reasoning of earlier turns: the trained text is that of the whole
/// chat, with and without tags.
#[test]
fn turns_are_trained_as_the_whole_chat_has_them() {
    let qwen = tokenizer("tiny-qwen3");
    let path = golden("models/tiny-qwen3/chat_template.jinja");
    let tagged = std::fs::read_to_string(path).unwrap();
    let plain = tagged.replace("{%- generation %}", "").replace("{%- endgeneration %}", "");
    let plain = ChatTemplate::from_text(&plain, &[]).unwrap();
    assert!(!plain.marks_generation());
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>x</think>b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#;
    let expected = "b<|im_end|><think>\n\n</think>\n\nd<|im_end|>";
    let without = load_with(&qwen, Some(&plain), "a.jsonl", row, &DataOptions::default()).unwrap();
    assert_eq!(trained(&qwen, &without.examples()[0]), expected);
    let with = load(&qwen, "a.jsonl", row, &DataOptions::default()).unwrap();
    assert_eq!(trained(&qwen, &with.examples()[0]), expected);
}

#[test]
fn only_the_turns_that_count_are_trained() {
    let rows = [
        // OpenAI's weight, and a prompt of messages.
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#,
        r#"{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]}"#,
        r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}], "chosen": {"from": "gpt", "value": "d"}, "rejected": {"from": "gpt", "value": "e"}}"#,
        r#"{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "e"}]}"#,
    ];
    // With generation tags and by prefix difference.
    for model in ["tiny-llama", "tiny-qwen2", "tiny-phi3", "tiny-gemma2"] {
        let tokenizer = tokenizer(model);
        let end = if model == "tiny-phi3" {
            "<|end|>"
        } else if model == "tiny-gemma2" {
            "<end_of_turn>"
        } else {
            "<|im_end|>"
        };
        for row in rows {
            let is_pair = row.contains("rejected");
            let format = if is_pair { DataFormat::PreferenceChosen } else { DataFormat::Auto };
            let options = DataOptions { format, ..DataOptions::default() };
            let data = load(&tokenizer, "a.jsonl", row, &options).unwrap();
            assert_eq!(trained(&tokenizer, &data.examples()[0]), format!("d{end}"), "{model}: {row}");
        }
    }
}

/// A template whose turns end in a token that is no stop token: EOS is appended, and the tokens up
/// to it are trained.
#[test]
fn eos_is_reached_from_the_end_of_the_turn() {
    let llama = tokenizer("tiny-llama");
    let text = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let template = ChatTemplate::from_text(text, &[]).unwrap();
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let data = load_with(&llama, Some(&template), "a.jsonl", row, &DataOptions::default()).unwrap();
    assert_eq!(whole(&llama, &data.examples()[0]), "user:a\nassistant:b\n<|im_end|>");
    assert_eq!(trained(&llama, &data.examples()[0]), "b\n<|im_end|>");
}

#[test]
fn chats_need_a_template() {
    let llama = tokenizer("tiny-llama");
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let why = load_with(&llama, None, "a.jsonl", row, &DataOptions::default()).unwrap_err();
    assert!(why.contains("it has no chat template") && why.contains("data.chat_template"), "{why}");
}

#[test]
fn templates_are_named_given_or_a_file() {
    let source = golden("models/tiny-llama");
    let copy = |config: &str, more: &[(&str, &[u8])]| {
        let json = std::fs::read(source.join("tokenizer.json")).unwrap();
        let mut files: Vec<(&str, &[u8])> =
            vec![("tokenizer.json", &json), ("tokenizer_config.json", config.as_bytes())];
        files.extend_from_slice(more);
        folder(&files)
    };
    let render = |path: &Path, given: Option<&str>, tools: bool| {
        let tokenizer = Tokenizer::load(path).unwrap();
        let tools = tools.then(|| serde_json::json!([{"type": "function"}]));
        let inputs = finetune::data::template::TemplateInputs { tools: tools.as_ref(), ..Default::default() };
        let messages = [serde_json::json!({"role": "user", "content": "a"})];
        let template =
            ChatTemplate::load(&tokenizer, given.map(Template::of_text).as_ref()).unwrap().unwrap();
        template.render(&messages, &inputs).unwrap().text
    };
    let named = copy(
        r#"{"eos_token": {"content": "<|im_end|>"}, "chat_template": [{"name": "default", "template": "D{{ eos_token }}"}, {"name": "tool_use", "template": "T"}]}"#,
        &[],
    );
    assert_eq!(render(named.path(), None, false), "D<|im_end|>");
    assert_eq!(render(named.path(), None, true), "T");
    assert_eq!(render(named.path(), Some("{{ 'given' }}"), true), "given");
    let object = copy(r#"{"chat_template": {"default": "D", "tool_use": "T"}}"#, &[]);
    assert_eq!(render(object.path(), None, false), "D");
    assert_eq!(render(object.path(), None, true), "T");
    let files = copy(
        r#"{"chat_template": "C"}"#,
        &[("chat_template.jinja", b"J"), ("additional_chat_templates/tool_use.jinja", b"A")],
    );
    assert_eq!(render(files.path(), None, false), "J");
    assert_eq!(render(files.path(), None, true), "A");
}

#[test]
fn a_missing_tokenizer_says_what_to_do() {
    let empty = folder(&[]);
    let why = Tokenizer::load(empty.path()).unwrap_err().to_string();
    assert!(why.contains("it holds no tokenizer.json"), "{why}");
    let sentencepiece = folder(&[("tokenizer.model", b"x")]);
    let why = Tokenizer::load(sentencepiece.path()).unwrap_err().to_string();
    assert!(why.contains("tokenizer.model") && why.contains("save_pretrained"), "{why}");
}

#[test]
fn equal_data_has_an_equal_digest() {
    let llama = tokenizer("tiny-llama");
    let digest = |row: &str, options: &DataOptions| load(&llama, "a.jsonl", row, options).unwrap().digest();
    let row = r#"{"prompt": "a", "completion": "b"}"#;
    let options = DataOptions::default();
    assert_eq!(digest(row, &options), digest(row, &options));
    let all = DataOptions { train_on: TrainOn::All, ..DataOptions::default() };
    assert_ne!(digest(row, &options), digest(row, &all));
    assert_ne!(digest(row, &options), digest(r#"{"prompt": "a", "completion": "c"}"#, &options));
}

#[test]
fn a_wrong_guess_can_be_overridden() {
    let llama = tokenizer("tiny-llama");
    let row = r#"{"messages": [{"role": "user", "content": "a"}], "text": "plain"}"#;
    let text = DataOptions { format: DataFormat::Text, ..DataOptions::default() };
    let data = load(&llama, "a.jsonl", row, &text).unwrap();
    assert_eq!(whole(&llama, &data.examples()[0]), "plain<|im_end|>");
    assert_eq!(data.report().why, "text: as `data.format` says");
}

#[test]
fn an_empty_data_set_is_an_error() {
    let llama = tokenizer("tiny-llama");
    for (name, text) in [("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "text\n"), ("a.txt", " \n")] {
        let why = load(&llama, name, text, &DataOptions::default()).unwrap_err();
        assert_eq!(why, format!("error: the data set is empty\n  caused by: no row in {name}"));
    }
    let missing = PathBuf::from("no/such/data.jsonl");
    let why = Dataset::load(&[missing], &DataOptions::default(), &llama, None).unwrap_err().to_string();
    assert!(why.contains("cannot read the data set no/such/data.jsonl"), "{why}");
}
