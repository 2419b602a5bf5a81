//! `finetune doctor` through the binary: its report on the machine, that it hides the token, and
//! the self-test.

use std::process::{Command, Stdio};

use assert_cmd::cargo::cargo_bin;

use crate::exhaustive::is_exhaustive;

/// Returns the stdout of a successful run, with only these hub variables set.
fn doctor(args: &[&str], env: &[(&str, &str)]) -> String {
    let mut command = Command::new(cargo_bin!("finetune"));
    command.arg("doctor").args(args).stdin(Stdio::null());
    for name in [
        "HF_ENDPOINT",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_OFFLINE",
        "FINETUNE_CPU",
    ] {
        command.env_remove(name);
    }
    let output = command.env("HF_HOME", "no-such-home").envs(env.iter().copied()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, text(output.stderr));
    assert_eq!(text(output.stderr), "");
    text(output.stdout)
}

/// Returns the value of the line that begins with `name`.
fn value<'a>(text: &'a str, name: &str) -> &'a str {
    let line =
        text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
    line[name.len()..].trim()
}

#[test]
fn says_what_there_is() {
    let text = doctor(&[], &[]);
    assert_eq!(value(&text, "finetune"), env!("CARGO_PKG_VERSION"));
    assert!(value(&text, "build").contains(std::env::consts::ARCH), "{text}");
    assert!(value(&text, "processor").contains("cores"), "{text}");
    assert!(!value(&text, "memory").is_empty() && !value(&text, "GPU").is_empty(), "{text}");
    let libraries = value(&text, "GPU libraries");
    for name in ["libcuda.", "libcudart.", "libcublas.", "libcublasLt.", "libcurand.", "NCCL"] {
        assert!(libraries.contains(name), "{text}");
    }
    assert_eq!(value(&text, "hub  "), "https://huggingface.co");
    assert_eq!(std::path::Path::new(value(&text, "hub cache")), std::path::Path::new("no-such-home/hub"));
    assert!(value(&text, "hub token").starts_with("not set"), "{text}");
    assert!(!text.contains("self-test"));
}

/// The report is available as text and as JSON; disks are measured only on request.
#[test]
fn tells_the_machine_in_json_too() {
    let json = |args: &[&str]| -> serde_json::Value { serde_json::from_str(&doctor(args, &[])).unwrap() };
    let facts = json(&["--json"]);
    assert_eq!(facts["program"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(facts["program"]["hub"]["endpoint"], "https://huggingface.co");
    assert!(facts["program"]["memory"]["total"].as_u64() > Some(0), "{facts}");
    assert_eq!(facts["disks"], serde_json::json!([]));
    let text = doctor(&[], &[]);
    assert!(!value(&text, "NCCL network plugin").is_empty() && !value(&text, "network").is_empty(), "{text}");
    // Every limit is shown with a sufficient value.
    let limits = facts["host"]["limits"].as_array().unwrap();
    for limit in limits {
        let told = value(&text, &format!("limit {}  ", limit["name"].as_str().unwrap()));
        let word = if limit["enough"] == true { "enough" } else { "TOO LOW; enough: " };
        assert!(told.contains(word), "{limit}: {told}");
        assert_eq!(limit["enough"], limit["raise"].is_null(), "{limit}");
    }
    assert!(!cfg!(target_os = "linux") || limits.len() >= 2, "{facts}");
}

#[test]
fn measures_the_disks_that_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display().to_string();
    let facts: serde_json::Value = serde_json::from_str(&doctor(&["--json", "--disk", &path], &[])).unwrap();
    let disks = facts["disks"].as_array().unwrap();
    assert_eq!(
        disks.iter().map(|disk| disk["name"].as_str().unwrap()).collect::<Vec<_>>(),
        ["hub cache", "given folder"]
    );
    assert_eq!(disks[1]["folder"], path);
    let rates = &disks[1]["rates"];
    for rate in ["write_mb_per_sec", "read_mb_per_sec"] {
        assert!(rates[rate].as_f64() > Some(0.0), "{facts}");
    }
    assert!(disks[1]["free_bytes"].as_u64() <= disks[1]["total_bytes"].as_u64(), "{facts}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let text = doctor(&["--disk"], &[]);
    assert!(value(&text, "disk of the working folder").contains(" MB/s"), "{text}");
}

#[test]
fn threads_are_those_that_will_run() {
    let text = doctor(&[], &[("RAYON_NUM_THREADS", "3")]);
    assert!(value(&text, "threads").starts_with("3 "), "{text}");
}

/// The CPU instructions in use are the best ones of the processor or those that FINETUNE_CPU names;
/// other names are refused.
#[test]
fn instructions_can_be_chosen() {
    let text = doctor(&[], &[]);
    let line = value(&text, "instructions");
    let (_, names) = line.split_once("FINETUNE_CPU chooses among ").unwrap_or_else(|| panic!("{text}"));
    let names: Vec<&str> = names.trim_end_matches(')').split(", ").collect();
    assert!(line.starts_with(names.last().expect("one at least")), "{text}");
    for name in &names {
        let text = doctor(&[], &[("FINETUNE_CPU", name)]);
        assert!(value(&text, "instructions").starts_with(&format!("{name} (")), "{text}");
    }
    let mut refused = Command::new(cargo_bin!("finetune"));
    let output = refused.arg("doctor").env("FINETUNE_CPU", "sse9").output().expect("the binary starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("it is `sse9`; accepted on this processor: baseline"), "{said}");
}

#[test]
fn a_token_is_never_shown() {
    let text = doctor(&[], &[("HF_TOKEN", "hf_secretsecret"), ("HF_ENDPOINT", "http://localhost:1")]);
    assert_eq!(value(&text, "hub token"), "set");
    assert_eq!(value(&text, "hub  "), "http://localhost:1");
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn a_wrong_endpoint_is_said_and_does_no_harm() {
    let text = doctor(&[], &[("HF_ENDPOINT", "huggingface.co")]);
    assert!(value(&text, "hub").contains("HF_ENDPOINT"), "{text}");
}

/// Passes with more threads than cores; tests/lib runs the self-test with as many.
#[test]
fn the_self_test_passes_and_lists_the_ops() {
    let threads = if is_exhaustive() { "64" } else { "3" };
    let text = doctor(&["--selftest"], &[("RAYON_NUM_THREADS", threads)]);
    for op in ["matmul", "attention_backward", "linear_cross_entropy", "adamw"] {
        let row: Vec<&str> = value(&text, &format!("{op} ")).split_whitespace().collect();
        assert_eq!(row.len(), 3, "{text}");
        assert!(row[0].parse::<usize>().unwrap() >= 3 && row[1].ends_with('%'), "{text}");
    }
    assert!(text.lines().last().unwrap().contains("passed"), "{text}");
}

/// Runs `doctor net` with a planted fault; returns its JSON.
fn net(args: &[&str], fault: &str) -> serde_json::Value {
    let args = [&["net", "--sizes", "4K", "--json"], args].concat();
    let output = Command::new(cargo_bin!("finetune"))
        .arg("doctor")
        .args(args)
        .env("FINETUNE_FAULT", fault)
        .env("FINETUNE_CLOCK", "planted")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A slow link is named by its two ranks.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_slow_pair_is_named() {
    let report = net(&["--ranks", "4"], "1:meet:slow_to_3=60ms");
    let pairs = report["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 12);
    let slowest: std::collections::BTreeSet<[u64; 2]> =
        pairs[..2].iter().map(|pair| ["from", "to"].map(|end| pair[end].as_u64().unwrap())).collect();
    assert_eq!(slowest, [[1, 3], [3, 1]].into());
    assert!(pairs[..2].iter().all(|pair| pair["slow"] == true), "{report}");
    let warning = report["warnings"][0].as_str().unwrap();
    assert!(
        warning.starts_with("SLOW: rank ") && warning.contains("of the median pair's over memory"),
        "{warning}"
    );
    for rank in ["rank 1 (", "rank 3 ("] {
        assert!(warning.contains(rank), "{warning}");
    }
}

/// Collectives, pairs and clocks of threads, as text.
#[test]
fn the_network_of_threads() {
    let text = doctor(&["net", "--ranks", "3", "--sizes", "1K,8K"], &[]);
    assert!(text.starts_with("3 ranks over the memory of one process;"), "{text}");
    for name in ["all_reduce", "all_gather", "reduce_scatter"] {
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with(name)).collect();
        assert_eq!(rows.len(), 2, "{text}");
        assert!(rows.iter().all(|row| row.matches(" GB/s").count() == 2), "{text}");
    }
    assert_eq!(text.lines().filter(|line| line.starts_with("rank ")).count(), 3, "{text}");
    assert!(value(&text, "memory:").contains("as a copy there ("), "{text}");
    assert!(value(&text, "clocks:").contains(" ms apart at most"), "{text}");
    let report: serde_json::Value =
        serde_json::from_str(&doctor(&["net", "--ranks", "2", "--sizes", "4K", "--json"], &[])).unwrap();
    assert_eq!(report["collectives"]["ranks"], 2);
    assert_eq!(report["hosts"][0], report["hosts"][1]);
    assert_eq!(report["clocks"].as_array().map(Vec::len), Some(1));
    // Both threads read one clock, within a message's time.
    assert!(report["clocks"][0]["ahead_secs"].as_f64().unwrap().abs() < 1.0, "{report}");
}

/// A folder with this build as `finetune`, and a Python environment beside it.
#[cfg(all(unix, not(feature = "cuda")))]
struct Beside {
    folder: tempfile::TempDir,
    nvidia: std::path::PathBuf,
}

#[cfg(all(unix, not(feature = "cuda")))]
impl Beside {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("finetune");
        std::fs::hard_link(cargo_bin!("finetune"), &own)
            .or_else(|_| std::fs::copy(cargo_bin!("finetune"), &own).map(drop))
            .unwrap();
        let nvidia = folder.path().join("lib/python3.12/site-packages/nvidia");
        let beside = Beside { folder, nvidia };
        beside.add_library("cu13", "libcuda.so.1");
        beside
    }

    /// Installs a build with GPU support that prints its name and its folders of libraries and ends
    /// with code 7.
    fn install(&self, name: &str) {
        let build = self.folder.path().join(name);
        let script = format!("#!/bin/sh\necho \"{name}: $*\"\necho \"$LD_LIBRARY_PATH\" >&2\nexit 7\n");
        std::fs::write(&build, script).unwrap();
        self.set_mode(name, 0o755);
    }

    fn set_mode(&self, name: &str, mode: u32) {
        use std::os::unix::fs::PermissionsExt;
        let build = self.folder.path().join(name);
        std::fs::set_permissions(build, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Adds an empty library to the wheel `wheel`. Returns its folder.
    fn add_library(&self, wheel: &str, name: &str) -> std::path::PathBuf {
        let lib = self.nvidia.join(wheel).join("lib");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::write(lib.join(name), "").unwrap();
        lib
    }

    /// Adds empty libraries of a release of CUDA.
    fn add_libraries(&self, release: u32) {
        for name in ["cudart", "cublas", "cublasLt"] {
            self.add_library("cu13", &format!("lib{name}.so.{release}"));
        }
        self.add_library("cu13", "libcurand.so.10");
    }

    /// Compiles a driver that supports CUDA up to `version`, such as 12080.
    fn add_driver(&self, version: u32) {
        let source = self.folder.path().join("driver.c");
        std::fs::write(&source, format!("int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}\n"))
            .unwrap();
        // Rust links with the same compiler.
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&self.nvidia.join("cu13/lib/libcuda.so.1"), &source])
            .status();
        assert!(status.unwrap().success());
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path().join("finetune"));
        command.args(args).env("VIRTUAL_ENV", self.folder.path());
        command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("LD_LIBRARY_PATH");
        command
    }
}

/// Returns the exit code and both outputs.
#[cfg(all(unix, not(feature = "cuda")))]
fn end_of(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code(), out, err)
}

/// Beside the build for the CPU, `finetune-cuda` is the build with GPU support.
#[cfg(all(unix, not(feature = "cuda")))]
#[test]
fn becomes_the_gpu_build_if_its_libraries_are_there() {
    let beside = Beside::new();
    beside.install("finetune-cuda");
    let facts = doctor(&[], &[]);
    let missing = value(&facts, "GPU libraries").split("missing: ").nth(1).unwrap_or_default();
    let version = || beside.command(&["--version"]);
    if missing.contains("libcublas.so.13") {
        let (code, _, text) = end_of(&mut version());
        assert!(
            code == Some(0) && text.contains("finetune-cuda cannot start: the loader does not find"),
            "{text}"
        );
        assert!(text.contains("libcublas.so.13") && !text.contains("libcuda.so.1,"), "{text}");
    }
    beside.add_libraries(13);
    let nccl = beside.add_library("nccl", "libnccl.so.2");
    let (code, text, folders) = end_of(&mut version());
    assert_eq!((code, text.as_str()), (Some(7), "finetune-cuda: --version\n"));
    // The wheel of NCCL has a folder of its own.
    assert!(folders.contains(nccl.to_str().unwrap()) || !missing.contains("NCCL"), "{folders}");
    let on_cpu = |command: &mut Command| {
        let (code, text, warnings) = end_of(command);
        assert!(code == Some(0) && text.starts_with("finetune ") && warnings.is_empty(), "{text}{warnings}");
    };
    on_cpu(version().env("CUDA_VISIBLE_DEVICES", ""));
    for ranks in [&["--ranks", "2", "--version"][..], &["--ranks=2", "--version"]] {
        on_cpu(&mut beside.command(ranks));
    }
    // A reader that is gone does not kill the program that could not become the other.
    beside.set_mode("finetune-cuda", 0o644);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let (code, _, text) = end_of(beside.command(&["recipes"]).stdout(writer));
    assert!(code == Some(0) && text.contains("finetune-cuda cannot start"), "{code:?}: {text}");
}

/// A driver that supports only CUDA 12 gets `finetune-cuda12`, although CUDA 13 is installed.
#[cfg(all(unix, not(feature = "cuda")))]
#[test]
fn becomes_the_gpu_build_that_the_driver_supports() {
    if value(&doctor(&[], &[]), "GPU libraries")
        .split("missing: ")
        .next()
        .unwrap_or_default()
        .contains("libcuda")
    {
        eprintln!("SKIPPED: this machine has a driver, which the loader finds before the fake one");
        return;
    }
    let beside = Beside::new();
    let version = || beside.command(&["--version"]);
    let becomes = |name: &str| {
        let (code, text, _) = end_of(&mut version());
        assert_eq!((code, text), (Some(7), format!("{name}: --version\n")));
    };
    beside.add_driver(12080);
    beside.add_libraries(13);
    beside.install("finetune-cuda");
    let (code, _, text) = end_of(&mut version());
    let cause = "finetune-cuda cannot start: it needs CUDA 13, and the NVIDIA driver supports CUDA 12";
    assert!(code == Some(0) && text.contains(cause), "{text}");
    beside.install("finetune-cuda12");
    let (code, _, text) = end_of(&mut version());
    assert!(
        code == Some(0) && text.contains("finetune-cuda12 cannot start: the loader does not find"),
        "{text}"
    );
    beside.add_libraries(12);
    becomes("finetune-cuda12");
    beside.add_driver(13000);
    becomes("finetune-cuda");
}
