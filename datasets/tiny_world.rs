//! Generates the tiny world, all data that the quickstart model reads, from one seed.
//!
//! `cargo run --example tiny_world -- OUT_DIR` writes
//! - `pretrain.jsonl`, `pretrain-heldout.jsonl`: short stories as `{"text"}` rows. Facts about
//!   people come first and recur later in other words, so a model that continues stories learns to
//!   look facts up. No story holds a question or a role marker.
//! - `questions-train.jsonl`, `questions-heldout.jsonl`: a story, a question about it and its short
//!   answer as `{"messages"}` rows. Answering is what the base cannot do.
//! - `tokenizer.json`: a word of the world is one token; any other text falls back to letters and
//!   bytes.
//!
//! A fact is a triple (who, what, value). One fact in ten is *held out*: the held-out rows are made
//! of these facts alone, and no other file mentions them. The model therefore cannot have memorized
//! their answers. The program checks this, and that the vocabulary covers every word, before it
//! reports success.

use std::collections::{BTreeSet, HashSet};
use std::error::Error;
use std::fs;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use serde_json::{Value, json};
use tokenizers::Tokenizer;

const SEED: u64 = 7;
const PRETRAIN_ROWS: usize = 120_000;
const PRETRAIN_HELDOUT_ROWS: usize = 300;
const TRAIN_ROWS: usize = 800;
const HELDOUT_ROWS: usize = 150;

const PEOPLE: [&str; 10] = ["Ana", "Ben", "Finn", "Ivo", "Lena", "Mara", "Nora", "Omar", "Ruth", "Tom"];

/// One kind of fact, with all its ways to state it, recall it and ask for it.
struct Topic {
    whats: &'static [&'static str],
    values: &'static [&'static str],
    facts: &'static [&'static str],
    recalls: &'static [&'static str],
    questions: &'static [(&'static str, &'static str)],
}

const TOPICS: [Topic; 5] = [
    Topic {
        whats: &["ball", "boat", "coat", "drum", "hat", "kite", "lamp", "ring"],
        values: &["black", "blue", "green", "grey", "pink", "red", "white", "yellow"],
        facts: &["{who} has a {value} {what}.", "{who} found a {value} {what}."],
        recalls: &[
            "The {what} was {value}.",
            "{who}'s {what} was {value}.",
            "What colour the {what} was is {value}.",
            "{who} liked the {value} {what}.",
            "The {what} belonged to {who}.",
        ],
        questions: &[
            ("What colour is {who}'s {what}?", "{value}"),
            ("What colour is the {what}?", "{value}"),
            ("{who} has a {what}. Which colour is it?", "{value}"),
        ],
    },
    Topic {
        whats: &["cat", "dog", "frog", "goat", "hen", "horse", "mouse", "pig"],
        values: &["brave", "happy", "hungry", "lazy", "sad", "shy", "tired", "wet"],
        facts: &["{who} has a {value} {what}.", "{who} found a {value} {what}."],
        recalls: &[
            "The {what} was {value}.",
            "{who}'s {what} was {value}.",
            "How the {what} was is {value}.",
            "{who} liked the {value} {what}.",
            "The {what} belonged to {who}.",
        ],
        questions: &[
            ("How is {who}'s {what}?", "{value}"),
            ("How is the {what}?", "{value}"),
            ("How does {who}'s {what} feel?", "{value}"),
        ],
    },
    Topic {
        whats: &["apples", "cakes", "coins", "eggs", "nuts", "pears", "plums", "shells"],
        values: &["two", "three", "four", "five", "six", "seven", "eight", "nine"],
        facts: &["{who} has {value} {what}.", "{who} found {value} {what}."],
        recalls: &[
            "The {what} were {value}.",
            "{who}'s {what} were {value}.",
            "How many the {what} were is {value}.",
            "{who} liked the {value} {what}.",
            "The {what} belonged to {who}.",
        ],
        questions: &[
            ("How many {what} does {who} have?", "{value}"),
            ("How many {what} are there?", "{value}"),
            ("Of {who}'s {what}, how many are there?", "{value}"),
        ],
    },
    Topic {
        whats: &["brother", "cousin", "friend", "neighbour", "nephew", "niece", "sister", "teacher"],
        values: &["Cairo", "Delhi", "Lima", "Lund", "Oslo", "Paris", "Quito", "Rome"],
        facts: &["{who} has a {what} in {value}.", "{who} met a {what} in {value}."],
        recalls: &[
            "The {what} was in {value}.",
            "{who}'s {what} was in {value}.",
            "Where the {what} was is {value}.",
            "{who} liked the {what} in {value}.",
            "The {what} was with {who}.",
        ],
        questions: &[
            ("Where is {who}'s {what}?", "in {value}"),
            ("Where is the {what}?", "in {value}"),
            ("Where does {who}'s {what} live?", "in {value}"),
        ],
    },
    Topic {
        whats: &["bowl", "box", "cup", "door", "key", "knife", "spoon", "table"],
        values: &["clay", "glass", "gold", "iron", "paper", "silver", "stone", "wood"],
        facts: &["{who} has a {what} of {value}.", "{who} made a {what} of {value}."],
        recalls: &[
            "The {what} was of {value}.",
            "{who}'s {what} was of {value}.",
            "What the {what} was of is {value}.",
            "{who} liked the {what} of {value}.",
            "The {what} belonged to {who}.",
        ],
        questions: &[
            ("What is {who}'s {what} made of?", "{value}"),
            ("What is the {what} made of?", "{value}"),
            ("Of what is {who}'s {what}?", "{value}"),
        ],
    },
];

const FILLERS: [&str; 8] = [
    "It was a sunny day.",
    "The wind was cold.",
    "Everyone was there.",
    "It was late.",
    "Nobody was away.",
    "They all went for a walk.",
    "It began to rain.",
    "Then it was time to go home.",
];

/// (topic, who, what, value), as indices into the tables.
type Fact = (usize, usize, usize, usize);

/// Returns true for one value in ten of every (who, what) pair: those of the held-out rows.
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

/// SplitMix64 (Steele, Lea, Flood 2014), which gives the same text on every machine.
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

/// Draws the facts of one story. No person and no thing occurs twice, so each question has one
/// answer. In four of five stories no two facts share a topic; in the others all do, and only the
/// person or the thing tells which value is asked for.
fn facts(random: &mut Random, held_out: bool) -> Vec<Fact> {
    let wanted = 2 + random.below(3);
    let only = (random.below(5) == 0).then(|| random.below(TOPICS.len()));
    let mut facts: Vec<Fact> = Vec::new();
    while facts.len() < wanted {
        let topic = only.unwrap_or_else(|| random.below(TOPICS.len()));
        let who = random.below(PEOPLE.len());
        let what = random.below(TOPICS[topic].whats.len());
        let fact = (topic, who, what, random.below(TOPICS[topic].values.len()));
        let taken = facts.iter().any(|f| f.1 == who || f.0 == topic && (f.2 == what || only.is_none()));
        if !taken && is_held_out(fact) == held_out {
            facts.push(fact);
        }
    }
    facts
}

/// The facts of a story in words, sometimes after a filler sentence.
fn opening(random: &mut Random, facts: &[Fact]) -> Vec<String> {
    let mut sentences = Vec::new();
    if random.below(8) == 0 {
        sentences.push(random.pick(&FILLERS).to_owned());
    }
    for &fact in facts {
        sentences.push(tell(fact, random.pick(TOPICS[fact.0].facts)));
    }
    sentences
}

/// Restates a fact, in its first wording or in another one.
fn again(random: &mut Random, fact: Fact) -> String {
    let topic = &TOPICS[fact.0];
    let templates = if random.below(6) == 0 { topic.facts } else { topic.recalls };
    tell(fact, random.pick(templates))
}

/// A story to continue: the facts, then each of them four times more.
fn story(random: &mut Random, held_out: bool) -> (Value, Vec<Fact>) {
    let facts = facts(random, held_out);
    let mut sentences = opening(random, &facts);
    for _ in 0..4 {
        let mut order = facts.clone();
        random.shuffle(&mut order);
        sentences.extend(order.iter().map(|&fact| again(random, fact)));
    }
    (json!({ "text": sentences.join(" ") }), facts)
}

/// A story, a question about one of its facts, and its answer.
fn question(random: &mut Random, held_out: bool) -> (Value, Vec<Fact>) {
    let facts = facts(random, held_out);
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

/// All words of the world as the tokenizer sees them: with `▁` for the space before, or bare after
/// an apostrophe. Punctuation stands alone.
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

/// A BPE model without merges: `ignore_merges` makes each word of the vocabulary one token, and
/// `byte_fallback` spells all other text.
fn tokenizer() -> Value {
    let special = ["<pad>", "<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"];
    let mut tokens: Vec<String> = special.map(str::to_owned).to_vec();
    tokens.extend((0..=255_u8).map(|byte| format!("<0x{byte:02X}>")));
    tokens.push("▁".to_owned());
    tokens.extend([".", ",", ":", "?", "!", "'s"].map(str::to_owned));
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
            { "type": "Split", "pattern": { "Regex": "'s|[.,:?!]" }, "behavior": "Isolated", "invert": false },
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

/// Checks that each text of a row uses the vocabulary alone and that its tokens decode to the same
/// text.
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

/// Facts that the training rows mention, which the held-out rows must not contain.
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
    let mut write = |name: &str,
                     rows,
                     make: fn(&mut Random, bool) -> (Value, Vec<Fact>),
                     is_held_out,
                     seen: &mut Seen| {
        write_rows(&out.join(name), rows, || make(&mut random, is_held_out), &tokenizer, seen)
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
