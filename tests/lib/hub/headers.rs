//! `inspect`, `plan` and `--dry-run` of a model on the hub read only the headers of its weights.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use finetune::export::hf;
use finetune::recipe::enums::Dtype;
use finetune::weights::ModelFiles;

use super::{SECRET, names};
use crate::hub_double::{Access, Fault, HubDouble, RepoDouble, Spoil};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

/// A hub with one model, the same model in a folder, and a cache folder.
struct Scene {
    hub: HubDouble,
    dir: tempfile::TempDir,
    commit: String,
}

impl Scene {
    /// Serves a copy of `folder` as `ada/model`.
    fn of(folder: &Path) -> Self {
        let repo = repo_of(folder);
        let commit = repo.commit();
        Scene { hub: HubDouble::start_with_cdn(vec![repo]), dir: tempfile::tempdir().unwrap(), commit }
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        for name in ["HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "RUST_BACKTRACE"] {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", self.hub.url()).env("HF_HOME", self.dir.path().join("hf"));
        command.output().unwrap()
    }

    /// Returns the stdout of a command that must succeed.
    fn done(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the error of a command that must be refused as the user's.
    fn refused(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        text
    }

    fn snapshot(&self) -> PathBuf {
        self.dir.path().join("hf/hub/models--ada--model/snapshots").join(&self.commit)
    }

    fn blobs(&self) -> Vec<u64> {
        let folder = self.dir.path().join("hf/hub/models--ada--model/blobs");
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).collect()
    }
}

fn repo_of(folder: &Path) -> RepoDouble {
    let mut repo = RepoDouble::model("ada/model");
    for name in names(folder) {
        let bytes = std::fs::read(folder.join(&name)).unwrap();
        repo = if name.ends_with(".safetensors") { repo.lfs(&name, bytes) } else { repo.file(&name, bytes) };
    }
    repo
}

/// tiny-llama in several shards, with its tokenizer.
fn sharded() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let files = ModelFiles::open(&golden("models/tiny-llama")).unwrap();
    hf::export(&files, &folder.path().join("model"), Dtype::Auto, 200_000).unwrap();
    folder
}

fn shards(folder: &Path) -> Vec<String> {
    let mut shards = names(folder);
    shards.retain(|name| name.ends_with(".safetensors"));
    shards
}

/// Returns the bytes of a file before its tensors.
fn header_bytes(path: &Path) -> usize {
    let bytes = std::fs::read(path).unwrap();
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

fn dry_run(model: &str) -> Vec<String> {
    let rows = golden("data/sft_messages.jsonl").display().to_string();
    let args = ["--model", model, "--recipe", "qlora", "--dataset", &rows, "--dry-run"];
    args.iter().map(ToString::to_string).collect()
}

#[test]
fn inspect_plan_and_dry_run_move_headers_and_small_files_only() {
    let folder = sharded();
    let model = folder.path().join("model");
    let shards = shards(&model);
    assert!(shards.len() > 1, "{shards:?}");
    let headers: usize = shards.iter().map(|shard| header_bytes(&model.join(shard))).sum();
    let local = dry_run(&model.display().to_string());
    let plan = |model: &str| {
        ["plan", "--model", model, "--recipe", "qlora", "--on", "8xA100-80GB"].map(ToOwned::to_owned).to_vec()
    };
    let local_plan = plan(&model.display().to_string());
    for of_hub in
        [vec!["inspect".to_owned(), "ada/model".to_owned()], plan("ada/model"), dry_run("ada/model")]
    {
        let scene = Scene::of(&model);
        let args: Vec<&str> = of_hub.iter().map(String::as_str).collect();
        let said = scene.done(&args);
        assert_eq!(scene.hub.bytes_sent("GET /cdn/"), headers);
        assert_eq!(scene.hub.bytes_sent(".safetensors HTTP"), 0);
        // The cache must hold nothing that looks like weights.
        let cached = names(&scene.snapshot());
        assert!(cached.contains(&"model.safetensors.index.json".to_owned()), "{cached:?}");
        assert!(!cached.iter().any(|name| name.ends_with(".safetensors")), "{cached:?}");
        let small: Vec<u64> =
            cached.iter().map(|f| scene.snapshot().join(f).metadata().unwrap().len()).collect();
        assert!(scene.blobs().iter().all(|blob| *blob == 0 || small.contains(blob)), "{:?}", scene.blobs());
        let here: Vec<&str> = match args[0] {
            "inspect" => vec!["inspect", model.to_str().unwrap()],
            "plan" => local_plan.iter().map(String::as_str).collect(),
            _ => local.iter().map(String::as_str).collect(),
        };
        let same = |text: &str| {
            let named = |line: &&str| !line.starts_with("id = ") && !line.starts_with("revision = ");
            // For a local model, a plan prints the folder's name.
            text.lines().filter(named).map(|line| line.replace("ada/model:", "model:")).collect::<Vec<_>>()
        };
        assert_eq!(same(&said), same(&scene.done(&here)));

        // Offline: the missing file is named, and no socket is opened.
        scene.hub.forget();
        let offline: Vec<&str> = args.iter().copied().chain(["--offline"]).collect();
        let text = scene.refused(&offline);
        assert!(shards.iter().all(|shard| text.contains(shard)), "{text}");
        assert_eq!(scene.hub.requests().len(), 0);
    }
}

#[test]
fn the_run_after_a_dry_run_downloads_and_the_next_inspect_does_not() {
    let folder = sharded();
    let model = folder.path().join("model");
    let shards = shards(&model);
    let scene = Scene::of(&model);
    let mut args = dry_run("ada/model");
    scene.done(&args.iter().map(String::as_str).collect::<Vec<_>>());
    args.retain(|arg| arg != "--dry-run");
    args.extend(["--set", "train.max_steps=1", "--set", "data.max_seq_len=96"].map(ToOwned::to_owned));
    scene.done(&args.iter().map(String::as_str).collect::<Vec<_>>());
    for shard in &shards {
        let (cached, given) = (scene.snapshot().join(shard), model.join(shard));
        assert_eq!(std::fs::read(cached).unwrap(), std::fs::read(given).unwrap(), "{shard}");
    }

    scene.hub.forget();
    let whole = scene.done(&["inspect", "ada/model"]);
    assert_eq!(scene.hub.requests().len(), 1, "{:?}", scene.hub.requests());
    assert_eq!(scene.done(&["inspect", "ada/model", "--offline"]), whole);

    // Of two shards one is missing: the other is read from the cache.
    std::fs::remove_file(scene.snapshot().join(&shards[0])).unwrap();
    scene.hub.forget();
    assert_eq!(scene.done(&["inspect", "ada/model"]), whole);
    assert_eq!(scene.hub.bytes_sent("GET /cdn/"), header_bytes(&model.join(&shards[0])));
    let text = scene.refused(&["inspect", "ada/model", "--offline"]);
    assert!(text.contains(&shards[0]) && !text.contains(&shards[1]), "{text}");
}

#[test]
fn a_quantized_model_is_described_from_its_labels() {
    let model = golden("quant/tiny-llama-bnb-nf4");
    let scene = Scene::of(&model);
    let said = scene.done(&["inspect", "ada/model"]);
    assert!(said.contains("nf4"), "{said}");
    assert_eq!(said, scene.done(&["inspect", model.to_str().unwrap()]));
    assert!(!scene.snapshot().join("model.safetensors").exists());
}

/// A safetensors file of zeros with one tensor.
fn zeros(bytes: usize) -> Vec<u8> {
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + bytes, 0);
    file
}

fn hub_of(weights: Vec<u8>) -> Scene {
    let repo = RepoDouble::model("ada/model").file("config.json", "{}").lfs("model.safetensors", weights);
    let commit = repo.commit();
    Scene { hub: HubDouble::start(vec![repo]), dir: tempfile::tempdir().unwrap(), commit }
}

#[test]
fn a_server_without_ranges_is_not_read_to_the_end() {
    let size = 48 << 20;
    let scene = hub_of(zeros(size));
    scene.hub.fault(Fault::new(&["GET", "model.safetensors"], 9, Spoil::IgnoreRange));
    let said = scene.done(&["inspect", "ada/model"]);
    assert!(said.contains("48.0 MiB"), "{said}");
    // Two requests, each of which leaves unread bytes in the socket buffers.
    let sent = scene.hub.bytes_sent("model.safetensors");
    assert!(sent < size, "{sent} of {size} bytes");
}

#[test]
fn headers_that_lie_are_refused() {
    let mut claims_all = zeros(100);
    claims_all[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut claims_more = zeros(100);
    claims_more[..8].copy_from_slice(&5000u64.to_le_bytes());
    let mut cut = zeros(100);
    cut.truncate(90);
    for (weights, told) in [
        (claims_all, "accepted: up to 100000000"),
        (claims_more, "the header should have 5000 bytes"),
        (cut, "its tensors need 100 bytes"),
        (b"abc".to_vec(), "it has 3 bytes; a safetensors file has at least 8"),
        (Vec::new(), "it has 0 bytes; a safetensors file has at least 8"),
    ] {
        let scene = hub_of(weights);
        let text = scene.refused(&["inspect", "ada/model"]);
        assert!(text.contains(told), "{text}");
    }
}

#[test]
fn a_broken_range_is_asked_for_again_and_a_refused_one_is_explained() {
    let scene = hub_of(zeros(100));
    let other = vec![("Content-Range", "bytes 50-57/160".to_owned())];
    scene.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::Headers(other)));
    scene.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::BreakAfter(3)));
    assert!(scene.done(&["inspect", "ada/model"]).contains("100 B"));
    let ranges: Vec<_> = scene.hub.requests().into_iter().filter_map(|request| request.range).collect();
    assert_eq!(ranges[..3], ["bytes=0-7", "bytes=0-7", "bytes=0-7"]);

    let repo = repo_of(&golden("models/tiny-llama")).access(Access::Gated { good: SECRET });
    let commit = repo.commit();
    let scene = Scene { hub: HubDouble::start(vec![repo]), dir: tempfile::tempdir().unwrap(), commit };
    let text = scene.refused(&["inspect", "ada/model"]);
    assert!(text.contains("is gated"), "{text}");
}
