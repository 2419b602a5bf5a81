//! A temporary folder with a copy of a golden model, and the binary run in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use assert_cmd::cargo::cargo_bin;

/// Returns the path of a golden file.
pub(crate) fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

/// Returns the names of the tiny golden models of a set, such as "models".
pub(crate) fn tiny_models(set: &str) -> Vec<String> {
    let names = std::fs::read_dir(golden(set)).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    names.filter(|name| name.starts_with("tiny-")).collect()
}

/// A test's own folder: `model/` is tiny-llama, `rows.jsonl` its chats.
pub(crate) struct TestDir(tempfile::TempDir);

impl TestDir {
    pub(crate) fn new() -> Self {
        Self::with_model("tiny-llama")
    }

    pub(crate) fn with_model(name: &str) -> Self {
        let dir = TestDir(tempfile::tempdir().unwrap());
        let sets = ["models", "families/models"].map(|set| golden(set).join(name));
        copy_folder(sets.iter().find(|model| model.exists()).unwrap(), &dir.path("model"));
        std::fs::copy(golden("data/sft_messages.jsonl"), dir.path("rows.jsonl")).unwrap();
        dir
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// The binary in this folder, offline and with its own hub cache.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(cargo_bin!("finetune"));
        command.args(args).current_dir(self.0.path()).stdin(Stdio::null());
        for name in ["RUST_BACKTRACE", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH"] {
            command.env_remove(name);
        }
        command.env("HF_HUB_OFFLINE", "1").env("HF_HOME", self.path("hf"));
        command
    }

    /// Returns the stdout and stderr texts of the command `args`, which must succeed.
    #[allow(dead_code, reason = "each test binary uses its part")]
    pub(crate) fn said(&self, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        let text = self.told(&[&output.stdout[..], &output.stderr].concat());
        assert!(output.status.success(), "{args:?}\n{text}");
        text
    }

    /// Returns the error of the command `args`, which must be refused.
    #[allow(dead_code, reason = "each test binary uses its part")]
    pub(crate) fn refused(&self, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        let text = self.told(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}\n{text}");
        text
    }

    /// Returns `text` with this folder's path replaced by `[DIR]`.
    pub(crate) fn told(&self, text: &[u8]) -> String {
        let real = self.0.path().canonicalize().unwrap();
        let text = String::from_utf8(text.to_vec()).unwrap();
        text.replace(&real.display().to_string(), "[DIR]")
            .replace(&self.0.path().display().to_string(), "[DIR]")
    }
}

pub(crate) fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// A short LoRA run: 96 tokens a row, no packing, file order, eight rows a step, no checkpoints;
/// `more` are further flags.
pub(crate) fn lora<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["--model", "model", "--dataset", "rows.jsonl", "--recipe", "lora", "--output", "out"];
    let rows = ["data.max_seq_len=96", "data.packing=false", "data.shuffle=false"];
    let steps = ["train.max_steps=4", "train.gradient_accumulation_steps=8", "scheduler.warmup_steps=1"];
    for pair in rows.iter().chain(&steps).chain(&["checkpoint.save_steps=never"]) {
        args.extend(["--set", pair]);
    }
    args.extend(more);
    args
}

/// Changes a bit of the last byte of a file.
pub(crate) fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// Returns a command line with another output folder.
pub(crate) fn into<'a>(output: &'a str, mut args: Vec<&'a str>) -> Vec<&'a str> {
    args.iter_mut().filter(|word| **word == "out").for_each(|word| *word = output);
    args
}
