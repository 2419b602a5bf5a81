//! Each training method, stopped after a step and resumed: every file equals that of the unbroken
//! run, byte for byte.
//!
//! A run of five steps is resumed from one of them, alternately on one rank and on four. With
//! `FINETUNE_EVERY_STEP=1` runs of twenty steps are resumed from every step on both, which takes
//! minutes.

use std::collections::BTreeMap;
use std::path::Path;

use crate::test_dir::{TestDir, copy_folder};

/// A method: its name, its recipe, and keys.
const METHODS: [(&str, &str, &[&str]); 9] = [
    ("full", "full", &[]),
    ("bf16 without masters", "full", &["model.dtype=bf16", "optimizer.master=none"]),
    ("lora", "lora", &["adapter.lora_dropout=0.1", "train.neftune_alpha=5"]),
    ("qlora", "qlora", &[]),
    ("dora", "dora", &[]),
    ("8-bit states", "lora", &["optimizer.state=int8"]),
    ("pissa", "lora", &["adapter.init=pissa"]),
    ("loftq", "qlora", &["adapter.init=loftq"]),
    ("new tokens", "lora", &[r#"model.new_tokens=["<mark>"]"#]),
];

struct Method<'a> {
    dir: &'a TestDir,
    recipe: &'a str,
    keys: &'a [&'a str],
    ranks: usize,
    steps: u64,
}

impl Method<'_> {
    fn run(&self, output: &str, more: &[&str]) {
        let (ranks, steps) = (self.ranks.to_string(), format!("train.max_steps={}", self.steps));
        let mut args = vec!["--model", "model", "--dataset", "rows.jsonl", "--recipe", self.recipe];
        args.extend(["--output", output, "--quiet", "--ranks", &ranks]);
        for key in [
            &steps,
            "data.max_seq_len=96",
            "data.packing=false",
            "train.micro_batch_size=1",
            "train.gradient_accumulation_steps=1",
            "checkpoint.save_steps=1",
            "checkpoint.keep_last=99",
            "log.tensorboard=false",
        ]
        .into_iter()
        .chain(self.keys.iter().copied())
        {
            args.extend(["--set", key]);
        }
        args.extend(more);
        let done = self.dir.command(&args).env("RAYON_NUM_THREADS", "1").output().unwrap();
        assert!(done.status.success(), "{args:?}\n{}", self.dir.told(&done.stderr));
    }

    /// Compares an unbroken run with runs resumed `from` each of these steps.
    fn resumes(&self, name: &str, from: impl Iterator<Item = u64>) {
        let whole = format!("{name} {}", self.ranks);
        self.run(&whole, &[]);
        let wanted = files(&self.dir.path(&whole), 0);
        assert!(
            wanted.keys().any(|file| file.ends_with(&format!("checkpoint-{}/manifest.json", self.steps)))
        );
        for step in from {
            let again = format!("{whole} from {step}");
            let checkpoint = format!("checkpoint-{step}");
            std::fs::create_dir(self.dir.path(&again)).unwrap();
            copy_folder(&self.dir.path(&whole).join(&checkpoint), &self.dir.path(&again).join(&checkpoint));
            self.run(&again, &["--resume"]);
            let actual = files(&self.dir.path(&again), step);
            let due = wanted.iter().filter(|(file, _)| step_of(file).is_none_or(|saved| saved >= step));
            for (file, bytes) in due {
                assert!(actual.get(file) == Some(bytes), "{again}: {file}");
            }
        }
    }
}

/// Returns the step of the checkpoint that holds a file.
fn step_of(file: &str) -> Option<u64> {
    file.strip_prefix("checkpoint-")?.split('/').next()?.parse().ok()
}

/// Returns a run's files, except those with times, by name below its folder; checkpoints from step
/// `first` on.
fn files(folder: &Path, first: u64) -> BTreeMap<String, Vec<u8>> {
    let mut contents = BTreeMap::new();
    let folders = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_checkpoint = |path: &Path| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        step_of(&name).is_some_and(|step| step >= first)
    };
    for inner in folders.filter(|path| is_checkpoint(path)).chain([folder.to_owned()]) {
        for path in std::fs::read_dir(&inner).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
            if path.is_file() && !["README.md", "report.html", "metrics.jsonl"].contains(&name.as_str()) {
                contents.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    contents
}

#[test]
fn every_method_goes_on_to_the_byte() {
    let all = std::env::var_os("FINETUNE_EVERY_STEP").is_some();
    let dir = TestDir::new();
    for (at, (name, recipe, keys)) in METHODS.into_iter().enumerate() {
        for ranks in [1, 4] {
            let method = |steps| Method { dir: &dir, recipe, keys, ranks, steps };
            if all {
                method(20).resumes(name, 1..20);
            } else if ranks == [1, 4][at % 2] {
                method(5).resumes(name, std::iter::once(1 + at as u64 % 4));
            }
        }
    }
}
