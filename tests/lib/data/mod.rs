//! Rows to tokens, masks and batches: against transformers' results (tests/golden) and for every
//! format.

mod bombs;
mod encoding;
mod golden_batches;
mod golden_chat;
mod jinja;
mod preference;
mod ranks;
mod sampling;
#[allow(clippy::print_stderr, reason = "a skipped check prints its reason")]
mod shared_data;
mod sources;

use std::path::{Path, PathBuf};

use finetune::data::{ChatTemplate, Tokenizer};

/// The tiny model families of tests/golden/models.
const MODELS: [&str; 8] = [
    "tiny-gemma2",
    "tiny-gemma3",
    "tiny-llama",
    "tiny-llama3",
    "tiny-mistral",
    "tiny-phi3",
    "tiny-qwen2",
    "tiny-qwen3",
];

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

fn tokenizer(model: &str) -> Tokenizer {
    Tokenizer::load(&golden("models").join(model)).unwrap()
}

fn template(tokenizer: &Tokenizer) -> ChatTemplate {
    ChatTemplate::load(tokenizer, None).unwrap().unwrap()
}

/// Creates a temporary folder with these files.
fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    folder
}
