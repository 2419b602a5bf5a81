//! Writes the tiny world: everything the quickstart model reads, from one seed.
//!
//! `cargo run --example tiny_world -- OUT_DIR` writes
//! - `pretrain.jsonl`, `pretrain-heldout.jsonl`: short stories as `{"text"}` rows. Facts about people come first and
//!   recur later in other words, so a model that continues stories learns to look facts up. No story holds a
//!   question or a role marker.
//! - `questions-train.jsonl`, `questions-heldout.jsonl`: a story, a question about it and its short answer as
//!   `{"messages"}` rows. Answering is what the base cannot do.
//! - `tokenizer.json`: a word of the world is one token; any other text falls back to letters and bytes.
//!
//! A fact is a triple (who, what, value). One in ten is *held out*: held-out rows are made of such facts alone,
//! and no other file mentions them, so their answers cannot have been learnt by heart. The program checks this,
//! and that every word it wrote is in the vocabulary, before it says that it is done.

use std::collections::{BTreeSet, HashSet};
use std::error::Error;
use std::fs;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use serde_json::{Value, json};
use tokenizers::Tokenizer;

const SEED: u64 = 7;
const PRETRAIN_ROWS: usize = 60_000;
const PRETRAIN_HELDOUT_ROWS: usize = 500;
const TRAIN_ROWS: usize = 1500;
const HELDOUT_ROWS: usize = 150;

const PEOPLE: [&str; 16] = [
    "Ana", "Ben", "Finn", "Ivo", "Lena", "Mara", "Nora", "Omar", "Ruth", "Sami", "Tess", "Tom", "Udo",
    "Vera", "Will", "Yara",
];

/// One kind of fact and all the ways to tell it, recall it and ask for it.
struct Topic {
    whats: &'static [&'static str],
    values: &'static [&'static str],
    facts: &'static [&'static str],
    recalls: &'static [&'static str],
    questions: &'static [(&'static str, &'static str)],
}

const TOPICS: [Topic; 3] = [
    Topic {
        whats: &[
            "ball", "bell", "boat", "book", "box", "chair", "coat", "cup", "drum", "flute", "hat", "kite",
            "lamp", "ring", "rope", "wheel",
        ],
        values: &["black", "blue", "brown", "green", "grey", "pink", "purple", "red", "white", "yellow"],
        facts: &["{who} has a {value} {what}.", "{who} got a {value} {what}.", "{who}'s {what} is {value}."],
        recalls: &[
            "In the evening {who} took the {value} {what} home.",
            "The colour of {who}'s {what} was {value}.",
            "What {who} liked most was the {value} {what}.",
            "The {what} was {who}'s.",
        ],
        questions: &[
            ("What colour is {who}'s {what}?", "{value}"),
            ("Who has the {what}?", "{who}"),
            ("What does {who} have?", "a {value} {what}"),
        ],
    },
    Topic {
        whats: &["cat", "dog", "duck", "frog", "goat", "hen", "horse", "mouse", "pig", "sheep"],
        values: &[
            "attic", "barn", "cave", "field", "forest", "garden", "kitchen", "market", "mill", "school",
            "shed", "tower",
        ],
        facts: &[
            "{who} has a {what} in the {value}.",
            "{who} keeps a {what} in the {value}.",
            "{who}'s {what} is in the {value}.",
        ],
        recalls: &[
            "At night {who} went to the {value} and called the {what}.",
            "Later {who}'s {what} was still in the {value}.",
            "What {who} liked most was the {what} in the {value}.",
            "The {what} was {who}'s.",
        ],
        questions: &[
            ("Where is {who}'s {what}?", "in the {value}"),
            ("Who has the {what}?", "{who}"),
            ("What does {who} have?", "a {what}"),
        ],
    },
    Topic {
        whats: &["apples", "buttons", "cakes", "coins", "eggs", "nuts", "pears", "plums", "shells", "stones"],
        values: &["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
        facts: &["{who} has {value} {what}.", "{who} got {value} {what}.", "{who} found {value} {what}."],
        recalls: &[
            "In the evening {who} took the {value} {what} home.",
            "How many {what} {who} had was known to all: it was {value}.",
            "What {who} liked most was to have {value} {what}.",
            "The {what} were {who}'s.",
        ],
        questions: &[
            ("How many {what} does {who} have?", "{value}"),
            ("Who has the {what}?", "{who}"),
            ("What does {who} have?", "{value} {what}"),
        ],
    },
];

const FILLERS: [&str; 8] = [
    "It was a sunny day.",
    "The wind was cold.",
    "Everyone was happy.",
    "It was quiet.",
    "Nobody was sad.",
    "They all went for a walk.",
    "It began to rain.",
    "Then it was time to go home.",
];

/// (topic, who, what, value), as places in the tables.
type Fact = (usize, usize, usize, usize);

/// One value in ten of every (who, what) pair is kept for the held-out rows.
fn is_held_out((topic, who, what, value): Fact) -> bool {
    (topic + 7 * who + 3 * what + value) % 10 == 0
}

fn tell((topic, who, what, value): Fact, template: &str) -> String {
    let topic = &TOPICS[topic];
    template
        .replace("{who}", PEOPLE[who])
        .replace("{what}", topic.whats[what])
        .replace("{value}", topic.values[value])
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same text on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(z ^ (z >> 31)) * n as u128) >> 64) as usize
    }

    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// The facts of one story, no person and no thing twice, so each question has one answer. Most stories keep to one
/// topic: then only the person tells which value is meant, and that is what the model shall learn to look at.
fn facts(random: &mut Random, wanted: usize, held_out: bool) -> Vec<Fact> {
    let only = (random.below(4) > 0).then(|| random.below(TOPICS.len()));
    let mut facts: Vec<Fact> = Vec::new();
    while facts.len() < wanted {
        let topic = only.unwrap_or_else(|| random.below(TOPICS.len()));
        let who = random.below(PEOPLE.len());
        let what = random.below(TOPICS[topic].whats.len());
        let fact = (topic, who, what, random.below(TOPICS[topic].values.len()));
        let taken = facts.iter().any(|f| f.1 == who || (f.0, f.2) == (topic, what));
        if !taken && is_held_out(fact) == held_out {
            facts.push(fact);
        }
    }
    facts
}

/// The facts of a story in words, sometimes after a sentence that says nothing.
fn opening(random: &mut Random, facts: &[Fact]) -> Vec<String> {
    let mut sentences = Vec::new();
    if random.below(4) == 0 {
        sentences.push(random.pick(&FILLERS).to_owned());
    }
    for &fact in facts {
        sentences.push(tell(fact, random.pick(TOPICS[fact.0].facts)));
    }
    sentences
}

/// A fact told once more: as at first, or in other words.
fn again(random: &mut Random, fact: Fact) -> String {
    let topic = &TOPICS[fact.0];
    let templates = if random.below(3) == 0 { topic.facts } else { topic.recalls };
    tell(fact, random.pick(templates))
}

/// A story to continue: the facts, then each of them three times more.
fn story(random: &mut Random, held_out: bool) -> (Value, Vec<Fact>) {
    let wanted = 3 + random.below(3);
    let facts = facts(random, wanted, held_out);
    let mut sentences = opening(random, &facts);
    for _ in 0..3 {
        let mut order = facts.clone();
        random.shuffle(&mut order);
        if random.below(3) == 0 {
            sentences.push(random.pick(&FILLERS).to_owned());
        }
        sentences.extend(order.iter().map(|&fact| again(random, fact)));
    }
    (json!({ "text": sentences.join(" ") }), facts)
}

/// A story, a question about one of its facts, and the answer.
fn question(random: &mut Random, held_out: bool) -> (Value, Vec<Fact>) {
    let wanted = 2 + random.below(3);
    let facts = facts(random, wanted, held_out);
    let mut sentences = opening(random, &facts);
    let asked = random.pick(&facts);
    let (question, answer) = random.pick(TOPICS[asked.0].questions);
    sentences.push(tell(asked, question));
    let row = json!({ "messages": [
        { "role": "user", "content": sentences.join(" ") },
        { "role": "assistant", "content": tell(asked, answer) },
    ]});
    (row, facts)
}

/// All words of the world, each as the tokenizer sees it: with the space before it as `▁`, or bare after an
/// apostrophe, and punctuation on its own.
fn words() -> BTreeSet<String> {
    let mut sentences: Vec<String> = FILLERS.iter().map(|&s| s.to_owned()).collect();
    for topic in &TOPICS {
        sentences.extend(topic.facts.iter().chain(topic.recalls).map(|&s| s.to_owned()));
        sentences.extend(topic.questions.iter().map(|(question, answer)| format!("{question} {answer}")));
        sentences.extend(topic.whats.iter().chain(topic.values).map(|&s| s.to_owned()));
    }
    sentences.extend(PEOPLE.map(str::to_owned));
    let mut words = BTreeSet::new();
    for word in sentences.iter().flat_map(|s| s.split_whitespace()).filter(|w| !w.starts_with("{who}")) {
        let bare: String = word.chars().filter(char::is_ascii_alphabetic).collect();
        if !word.contains(['{', '\'']) {
            words.insert(format!("▁{bare}"));
        }
    }
    words
}

/// A BPE without merges: `ignore_merges` makes each word of the vocabulary one token, `byte_fallback` spells the rest.
fn tokenizer() -> Value {
    let special = ["<pad>", "<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"];
    let mut tokens: Vec<String> = special.map(str::to_owned).to_vec();
    tokens.extend((0..=255_u8).map(|byte| format!("<0x{byte:02X}>")));
    tokens.push("▁".to_owned());
    tokens.extend([".", ",", ":", "?", "!", "'", "s"].map(str::to_owned));
    tokens.extend(words());
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true },
            { "type": "Punctuation", "behavior": "Isolated" },
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<bos>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "SpecialToken": { "id": "<bos>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                     { "Sequence": { "id": "B", "type_id": 0 } }],
            "special_tokens": { "<bos>": { "id": "<bos>", "ids": [1], "tokens": ["<bos>"] } },
        },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": true,
            "vocab": vocab, "merges": [],
        },
    })
}

/// Each text of a row must be words of the vocabulary alone, and come back from its tokens unchanged.
fn check_text(tokenizer: &Tokenizer, row: &Value) -> Result<usize, Box<dyn Error + Send + Sync>> {
    let messages = row["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let texts = row["text"].as_str().into_iter().chain(messages.iter().filter_map(|m| m["content"].as_str()));
    let mut tokens = 0;
    for text in texts {
        let encoding = tokenizer.encode(text, false)?;
        if let Some(token) = encoding.get_tokens().iter().find(|t| t.starts_with("<0x") || *t == "▁") {
            return Err(format!("`{text}` is not made of whole words: {token}").into());
        }
        let back = tokenizer.decode(encoding.get_ids(), true)?;
        if back != text {
            return Err(format!("`{text}` comes back as `{back}`").into());
        }
        tokens += encoding.len();
    }
    Ok(tokens)
}

/// What the training rows mentioned and the held-out rows must not.
#[derive(Default)]
struct Seen {
    facts: HashSet<Fact>,
    rows: HashSet<String>,
}

fn write_rows(
    path: &Path,
    rows: usize,
    mut make: impl FnMut() -> (Value, Vec<Fact>),
    tokenizer: &Tokenizer,
    seen: &mut Seen,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut file = BufWriter::new(fs::File::create(path)?);
    let mut tokens = 0;
    let mut written = 0;
    while written < rows {
        let (row, facts) = make();
        let line = row.to_string();
        if !seen.rows.insert(line.clone()) {
            continue;
        }
        tokens += check_text(tokenizer, &row)?;
        seen.facts.extend(facts);
        writeln!(file, "{line}")?;
        written += 1;
    }
    file.flush()?;
    writeln!(std::io::stderr(), "{}: {rows} rows, {tokens} tokens", path.display())?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let out = std::env::args_os().nth(1).ok_or("usage: cargo run --example tiny_world -- OUT_DIR")?;
    let out = Path::new(&out);
    fs::create_dir_all(out)?;
    let tokenizer_path = out.join("tokenizer.json");
    fs::write(&tokenizer_path, serde_json::to_string_pretty(&tokenizer())? + "\n")?;
    let tokenizer = Tokenizer::from_file(&tokenizer_path)?;

    let (mut trained, mut held_out) = (Seen::default(), Seen::default());
    let mut random = Random(SEED);
    let mut write =
        |name: &str, rows, make: fn(&mut Random, bool) -> (Value, Vec<Fact>), kept, seen: &mut Seen| {
            write_rows(&out.join(name), rows, || make(&mut random, kept), &tokenizer, seen)
        };
    write("questions-train.jsonl", TRAIN_ROWS, question, false, &mut trained)?;
    write("questions-heldout.jsonl", HELDOUT_ROWS, question, true, &mut held_out)?;
    write("pretrain-heldout.jsonl", PRETRAIN_HELDOUT_ROWS, story, true, &mut held_out)?;
    write("pretrain.jsonl", PRETRAIN_ROWS, story, false, &mut trained)?;

    if let Some(fact) = held_out.facts.intersection(&trained.facts).next() {
        return Err(format!("a held-out fact was trained on: {fact:?}").into());
    }
    if let Some(row) = held_out.rows.intersection(&trained.rows).next() {
        return Err(format!("a held-out row was trained on: {row}").into());
    }
    Ok(())
}
