//! One run in several processes under mpirun, or started by one command, through the binary: the
//! same bytes as in one process; inconsistent settings are refused. Without mpirun it prints that
//! it is skipped.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../support/skipped.rs"]
mod skipped;
mod supervised;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use skipped::skipped;

const BINARY: &str = env!("CARGO_BIN_EXE_finetune");

const CACHE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/processes");

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The arguments of a run.
fn line(output: &Path, more: &[&str]) -> Vec<String> {
    let (model, data) = (golden().join("models/tiny-llama"), golden().join("data/sft_messages.jsonl"));
    let mut line = vec!["--recipe".to_owned(), "fsdp-full".into()];
    for (flag, path) in [("--model", &model), ("--dataset", &data), ("--output", &output.to_owned())] {
        line.extend([flag.to_owned(), path.display().to_string()]);
    }
    for key in [
        "data.max_seq_len=256",
        "train.max_steps=4",
        "train.gradient_accumulation_steps=2",
        "checkpoint.save_steps=2",
        "log.tensorboard=false",
    ] {
        line.extend(["--set".to_owned(), key.to_owned()]);
    }
    line.extend(more.iter().map(|word| (*word).to_owned()));
    line
}

fn mpirun() -> Option<Command> {
    if Command::new("mpirun").arg("--version").output().is_err() {
        skipped("runs in several processes", "there is no mpirun");
        return None;
    }
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--allow-run-as-root"]);
    command.env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "1").env("FINETUNE_RDZV_TIMEOUT", "20");
    // The folder where processes without a given secret keep their own.
    command.env("XDG_CACHE_HOME", CACHE);
    Some(command)
}

/// Runs one process for each of `apps`, which are environment settings and arguments.
fn run(mut mpirun: Command, apps: &[(&[&str], Vec<String>)]) -> Output {
    for (i, (environment, line)) in apps.iter().enumerate() {
        if i > 0 {
            mpirun.arg(":");
        }
        mpirun.args(["-n", "1"]);
        environment.iter().for_each(|pair| {
            mpirun.args(["-x", pair]);
        });
        mpirun.arg(BINARY).args(line);
    }
    output_of(mpirun)
}

fn output_of(mut mpirun: Command) -> Output {
    // Open MPI's runs share a folder for each user by default, and one that ends removes it while
    // another begins.
    let sessions = tempfile::tempdir().unwrap();
    mpirun.env("OMPI_MCA_orte_tmpdir_base", sessions.path()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Compares the files of `processes` with `here` ranks each with those of as many threads in one
/// process.
fn same_bytes(processes: usize, here: usize, more: &[&str]) {
    let Some(mpirun) = mpirun() else { return };
    let dir = tempfile::tempdir().unwrap();
    let [apart, together] = ["apart", "together"].map(|name| dir.path().join(name));
    let [each, all] = [here, processes * here].map(|ranks| ranks.to_string());
    let with_ranks = |output, ranks| line(output, &[more, &["--ranks", ranks]].concat());
    let one_each = if here == 1 { line(&apart, more) } else { with_ranks(&apart, &each) };
    let apps: Vec<(&[&str], Vec<String>)> = (0..processes).map(|_| (&[] as _, one_each.clone())).collect();
    let done = run(mpirun, &apps);
    assert!(done.status.success(), "{}", said(&done));
    let one = Command::new(BINARY).args(with_ranks(&together, &all)).output().unwrap();
    assert!(one.status.success(), "{}", said(&one));
    compare(&apart, &together, processes * here);
    let secret = Path::new(CACHE).join("finetune/rendezvous/secret").metadata().unwrap();
    assert_eq!(secret.permissions().mode() & 0o777, 0o600);
}

/// Compares the weights that two runs of `ranks` ranks have left.
fn compare(apart: &Path, together: &Path, ranks: usize) {
    let mut compared = 0;
    for folder in ["", "checkpoint-2"] {
        for entry in std::fs::read_dir(together.join(folder)).unwrap() {
            let name = entry.unwrap().file_name();
            if name.to_string_lossy().ends_with(".safetensors") {
                let read = |output: &Path| std::fs::read(output.join(folder).join(&name)).unwrap();
                assert!(read(apart) == read(together), "{folder}/{}", name.display());
                compared += 1;
            }
        }
    }
    // The tensors of the tiny model make at most four shards.
    assert_eq!(compared, 3 * ranks.min(4));
}

#[test]
fn processes_give_the_bytes_of_threads() {
    same_bytes(2, 1, &[]);
}

/// Several ranks in each process: groups of all ranks; groups inside processes, with sums across
/// them; three groups of two, one of them across processes.
#[test]
fn processes_of_threads_give_the_bytes_of_threads() {
    same_bytes(2, 2, &[]);
    let hsdp = ["parallel.strategy=hsdp", "parallel.shard_size=2", "train.gradient_accumulation_steps=1"];
    let sets: Vec<&str> = hsdp.iter().flat_map(|key| ["--set", key]).collect();
    same_bytes(2, 2, &sets);
    same_bytes(2, 3, &sets);
}

/// Ranks in several processes measure their links, and only the process of rank 0 prints them; a
/// slow link is named.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn processes_measure_what_is_between_them() {
    let Some(mpirun) = mpirun() else { return };
    let line = ["doctor", "net", "--sizes", "1K,64K", "--ranks", "2", "--json"].map(str::to_owned);
    let fault: &[&str] = &["FINETUNE_FAULT=3:meet:slow_to_0=300ms"];
    let done = run(mpirun, &[(fault, line.to_vec()), (fault, line.to_vec())]);
    assert!(done.status.success(), "{}", said(&done));
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(
        (&report["collectives"]["ranks"], &report["collectives"]["backend"]),
        (&4.into(), &"MPI".into())
    );
    assert_eq!(report["collectives"]["timings"].as_array().map(Vec::len), Some(6));
    assert_eq!(report["hosts"].as_array().map(Vec::len), Some(4));
    assert_eq!(report["clocks"].as_array().map(Vec::len), Some(3));
    let pairs = report["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 12);
    let ends = |pair: &serde_json::Value| ["from", "to"].map(|end| pair[end].as_u64().unwrap());
    let mut slowest = [ends(&pairs[0]), ends(&pairs[1])];
    slowest.sort_unstable();
    assert_eq!(slowest, [[0, 3], [3, 0]]);
    assert!(report["warnings"][0].as_str().unwrap().starts_with("SLOW: rank "), "{report}");
}

/// Sums over several groups follow the order of all ranks, in f32 and in bf16.
#[test]
fn groups_of_processes_give_the_bytes_of_threads() {
    for dtype in ["f32", "bf16"] {
        let reduce = format!("parallel.reduce_dtype={dtype}");
        let hsdp = ["parallel.strategy=hsdp", "parallel.shard_size=2", "train.gradient_accumulation_steps=1"];
        let sets: Vec<&str> = hsdp.iter().chain([&reduce.as_str()]).flat_map(|key| ["--set", key]).collect();
        same_bytes(4, 1, &sets);
    }
}

/// Starts two processes with a planted fault, and checks their final messages.
fn names_the_rank(fault: &str, more: &[&str], cause: &str) {
    let Some(mpirun) = mpirun() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let set = format!("FINETUNE_FAULT={fault}");
    let environment = [set.as_str()];
    let app = (&environment as &[&str], line(&output, more));
    let done = run(mpirun, &[app.clone(), app]);
    assert_eq!(done.status.code(), Some(75), "{fault}: {}", said(&done));
    let (rank, phase) = (&fault[..1], if fault.contains("save") { "save" } else { "backward" });
    let text = said(&done);
    assert!(text.contains(&format!("error: rank {rank} failed in phase {phase}")), "{fault}: {text}");
    assert!(text.contains(cause), "{fault}: {text}");
    assert!(text.contains(&format!("rank {rank}: its last call was call ")), "{fault}: {text}");
}

/// A failing process ends the others, and names its rank, its phase and its last call.
#[test]
fn a_process_that_fails_names_rank_phase_and_last_call() {
    names_the_rank("1:backward:2:error", &[], "planted fault");
    names_the_rank("0:save:panic", &[], "the thread panicked");
}

/// The same for a rank that shares its process with another one, which it ends, too.
#[test]
fn a_thread_that_fails_ends_its_process_and_the_others() {
    names_the_rank("2:backward:2:error", &["--ranks", "2"], "planted fault");
    names_the_rank("1:save:panic", &["--ranks", "2"], "the thread panicked");
}

#[test]
fn other_numbers_of_ranks_in_each_process_are_refused() {
    let Some(mpirun) = mpirun() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let apps = ["1", "2"].map(|ranks| (&[] as &[&str], line(&output, &["--ranks", ranks])));
    let done = run(mpirun, &apps);
    assert_eq!(done.status.code(), Some(1), "{}", said(&done));
    assert!(said(&done).contains("the processes were started with different world sizes"), "{}", said(&done));
    assert!(!output.exists(), "weights were loaded");
}

/// Flags whose process order differs from MPI's.
#[test]
fn another_order_than_that_of_mpi_is_refused() {
    let Some(mpirun) = mpirun() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let world = ["--world-size", "4", "--ranks", "2", "--master-addr", "127.0.0.1", "--master-port", &port];
    let apps =
        ["2", "0"].map(|rank| (&[] as &[&str], line(&output, &[&world[..], &["--rank", rank]].concat())));
    let done = run(mpirun, &apps);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(text.contains("error: cannot train over MPI"), "{text}");
    assert!(
        text.contains("MPI started it as process 0 of 2, which is ranks 0-1 of 4")
            || text.contains("MPI started it as process 1 of 2, which is ranks 2-3 of 4"),
        "{text}"
    );
}

#[test]
fn processes_about_to_run_different_things_are_refused() {
    let Some(mpirun) = mpirun() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let other = line(&output, &["--set", "optimizer.learning_rate=1e-3"]);
    let done = run(mpirun, &[(&[], line(&output, &[])), (&[], other)]);
    assert_eq!(done.status.code(), Some(1), "{}", said(&done));
    assert!(said(&done).contains("plan"), "{}", said(&done));
    assert!(!output.exists(), "weights were loaded");
}

/// A process with less memory than that of rank 0, which prints the memory that it planned with.
#[test]
#[cfg(target_os = "linux")]
fn processes_plan_with_the_least_free_memory() {
    let Some(mut mpirun) = mpirun() else { return };
    let dir = tempfile::tempdir().unwrap();
    let line = line(&dir.path().join("out"), &["--set", "parallel.strategy=auto"]);
    mpirun.args(["-n", "1", BINARY]).args(&line);
    let limited = "ulimit -d 2000000; exec \"$0\" \"$@\"";
    mpirun.args([":", "-n", "1", "sh", "-c", limited, BINARY]).args(&line);
    let done = output_of(mpirun);
    let text = said(&done);
    assert!(done.status.success(), "{text}");
    // Half of the limit on the data of a process, less what is in reserve.
    assert!(text.contains(" MiB are available"), "{text}");
}

#[test]
fn a_wrong_secret_is_refused() {
    let Some(mpirun) = mpirun() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let secrets =
        ["FINETUNE_RDZV_SECRET=correct horse battery", "FINETUNE_RDZV_SECRET=another secret of theirs"];
    let apps: Vec<(&[&str], Vec<String>)> =
        secrets.iter().map(|secret| (std::slice::from_ref(secret), line(&output, &[]))).collect();
    let done = run(mpirun, &apps);
    assert!(!done.status.success());
    assert!(said(&done).contains("secret"), "{}", said(&done));
    assert!(!said(&done).contains("battery") && !said(&done).contains("of theirs"), "{}", said(&done));
    assert!(!output.exists(), "a process that was refused took the folder");
}

/// A hanging rank in another process, and a stopped process: the waiting processes name both.
#[test]
fn a_rank_that_hangs_in_another_process_is_named() {
    // A stopped process is known by its last heartbeat, which may be older than the stop.
    for (fault, why, doing) in [
        (
            "1:backward:2:hang",
            "it has made no progress for ",
            "rank 1 is in phase backward; its last call was ",
        ),
        ("1:backward:2:stop", "it has sent no message for ", "rank 0 ended in phase "),
    ] {
        let Some(mpirun) = mpirun() else { return };
        let dir = tempfile::tempdir().unwrap();
        let set = format!("FINETUNE_FAULT={fault}");
        let environment = [set.as_str()];
        let line = line(&dir.path().join("out"), &["--set", "parallel.timeout_secs=10"]);
        let app = (&environment as &[&str], line);
        let done = run(mpirun, &[app.clone(), app]);
        let text = said(&done);
        assert_eq!(done.status.code(), Some(75), "{fault}: {text}");
        assert!(text.contains("error: rank 1 on "), "{fault}: {text}");
        assert!(text.contains(why), "{fault}: {text}");
        assert!(text.contains(doing), "{fault}: {text}");
        assert!(text.contains("caused by: rank 0 ended in phase "), "{fault}: {text}");
    }
}

/// MPI accepts no new process into a running job.
#[test]
fn restarts_of_one_process_of_a_job_are_refused() {
    let Some(mpirun) = mpirun() else { return };
    let dir = tempfile::tempdir().unwrap();
    let line = line(&dir.path().join("out"), &["--max-restarts", "1"]);
    let done = run(mpirun, &[(&[], line.clone()), (&[], line)]);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(text.contains("error: cannot restart one process of an MPI job"), "{text}");
}
