//! Every file of the shared data, if present (`FINETUNE_SHARED`, or a folder `shared` beside the
//! project).

use finetune::recipe::enums::{DataFormat, ObjectiveKind};
use std::path::{Path, PathBuf};

use finetune::data::{ChatTemplate, DataOptions, Dataset, Tokenizer};

use super::{template, tokenizer};
use crate::skipped::skipped;

pub(crate) fn shared() -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let folder = std::env::var_os("FINETUNE_SHARED").map_or_else(beside, PathBuf::from);
    if folder.join("data").is_dir() {
        return Some(folder);
    }
    let why = format!("there is no {}; set FINETUNE_SHARED", folder.join("data").display());
    skipped("tests on shared data", &why);
    None
}

/// File, rows, format, and rows skipped because of their label.
const FILES: [(&str, usize, DataFormat, usize); 19] = [
    ("gsm8k_train.jsonl", 1200, DataFormat::QuestionAnswer, 0),
    ("gsm8k_test.jsonl", 200, DataFormat::QuestionAnswer, 0),
    ("alpaca_self_instruct.json", 300, DataFormat::Alpaca, 0),
    ("alpaca_identity.json", 91, DataFormat::Alpaca, 0),
    ("dolly_pairs.jsonl", 1800, DataFormat::Instruction, 0),
    ("sharegpt_identity.json", 300, DataFormat::Sharegpt, 0),
    ("sharegpt_toolcall.jsonl", 180, DataFormat::Sharegpt, 0),
    ("sharegpt_toolcall_zh.jsonl", 60, DataFormat::Sharegpt, 0),
    ("messages_sgd.jsonl", 450, DataFormat::Messages, 0),
    ("messages_parts_tools.jsonl", 25, DataFormat::Messages, 0),
    ("kto_messages.jsonl", 120, DataFormat::Messages, 65),
    ("dpo_hh_clean.jsonl", 277, DataFormat::PreferenceChosen, 0),
    ("dpo_sharegpt.jsonl", 110, DataFormat::PreferenceChosen, 0),
    ("humaneval.jsonl", 110, DataFormat::PromptCompletion, 0),
    ("prompt_completion.jsonl", 500, DataFormat::PromptCompletion, 0),
    ("text_wikisql_train.jsonl", 1000, DataFormat::Text, 0),
    ("text_wikisql_valid.jsonl", 100, DataFormat::Text, 0),
    ("tinystories.jsonl", 974, DataFormat::Text, 0),
    ("c4.jsonl", 150, DataFormat::Text, 0),
];

fn load(path: PathBuf, tokenizer: &Tokenizer, template: &ChatTemplate) -> Dataset {
    let is_pairs = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("dpo_"));
    let options = DataOptions {
        format: if is_pairs { DataFormat::PreferenceChosen } else { DataFormat::Auto },
        max_seq_len: 1 << 20,
        vocab_size: tokenizer.vocab_size(),
        ..DataOptions::default()
    };
    Dataset::load(&[path], &options, tokenizer, Some(template)).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_file_loads() {
    let Some(shared) = shared() else { return };
    let tokenizer = tokenizer("tiny-qwen3");
    let template = template(&tokenizer);
    for (file, rows, format, left_out) in FILES {
        let data = load(shared.join("data").join(file), &tokenizer, &template);
        let report = data.report();
        assert_eq!((report.rows, report.left_out), (rows, left_out), "{file}");
        assert!(report.why.starts_with(&format!("{format}: ")), "{file}: {}", report.why);
        assert_eq!(data.len(), rows - left_out, "{file}");
        assert_eq!(report.num_bad(), 0, "{file}");
    }
    let data = load(shared.join("data/tinyshakespeare.txt"), &tokenizer, &template);
    assert_eq!((data.report().rows, data.len()), (1, 1));
}

/// Every file with preferences, as pairs and as labelled answers.
#[test]
fn preferences_load_for_every_objective() {
    let Some(shared) = shared() else { return };
    let tokenizer = tokenizer("tiny-qwen3");
    let template = template(&tokenizer);
    let pairs = [ObjectiveKind::Dpo, ObjectiveKind::Orpo, ObjectiveKind::Kto];
    let files = [
        ("dpo_hh_clean.jsonl", 277, &pairs[..], 2),
        ("dpo_sharegpt.jsonl", 110, &pairs, 2),
        ("kto_messages.jsonl", 120, &pairs[2..], 1),
    ];
    for (file, rows, objectives, answers) in files {
        for objective in objectives {
            let options = DataOptions {
                max_seq_len: 1 << 20,
                vocab_size: tokenizer.vocab_size(),
                objective: *objective,
                ..DataOptions::default()
            };
            let path = shared.join("data").join(file);
            let data = Dataset::load(&[path], &options, &tokenizer, Some(&template)).unwrap();
            assert_eq!((data.report().rows, data.report().num_bad()), (rows, 0), "{file} {objective}");
            assert_eq!(data.len(), rows * answers, "{file} {objective}");
            assert_eq!(data.report().longest.as_ref().map(|(tokens, _)| *tokens > 100), Some(true));
        }
    }
}

/// Real models: chats without tags, by prefix difference; templates without BOS.
#[test]
fn real_tokenizers_take_real_chats() {
    let Some(shared) = shared() else { return };
    for model in ["stories260K", "stories3M"] {
        let tokenizer = Tokenizer::load(&shared.join("models").join(model)).unwrap();
        let template = template(&tokenizer);
        for file in
            ["gsm8k_test.jsonl", "sharegpt_identity.json", "messages_sgd.jsonl", "alpaca_identity.json"]
        {
            let data = load(shared.join("data").join(file), &tokenizer, &template);
            for example in data.examples() {
                let mut ids =
                    example.ids.iter().zip(&example.trained).filter(|(_, t)| **t).map(|(id, _)| *id);
                assert_eq!(ids.next_back(), tokenizer.eos().map(|eos| eos.id), "{model}: {}", example.origin);
            }
        }
    }
}

#[test]
fn placeholders_and_literals_stay() {
    let Some(shared) = shared() else { return };
    let tokenizer = tokenizer("tiny-llama");
    let data = load(shared.join("data/alpaca_identity.json"), &tokenizer, &template(&tokenizer));
    let text = tokenizer.decode(&data.examples()[0].ids, false).unwrap();
    assert!(text.contains("I am {{name}}, an AI assistant developed by {{author}}."), "{text}");
}
