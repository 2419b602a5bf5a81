//! Rows, and the processes that render them: a bad row is counted as one row; a fault of the
//! machine ends the run.
#![cfg(target_os = "linux")]

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::skipped::skipped;
use crate::test_dir::{TestDir, golden, lora};

const DATA: [&str; 7] = ["data", "--model", "model", "--dataset", "rows.jsonl", "--rows", "0"];

/// A user and group id without files.
const NOBODY: &str = "54321";

/// Returns the processes that render for `run` and have used a tenth of a second of CPU at least.
fn renderers(run: &Child, ticks: u64) -> Vec<i32> {
    let own = run.id().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok());
    let children = processes.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        // Fields after the name in brackets: state, parent, and as 12th and 13th the CPU time.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let time = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
        (fields.get(1)? == &own && fields.first()? != &"Z" && time >= ticks).then_some(pid)
    });
    children.collect()
}

fn kill(pid: i32) {
    // A process that ended meanwhile is no error.
    drop(Command::new("kill").args(["-KILL", &pid.to_string()]).stderr(Stdio::null()).status());
}

/// Writes enough rows to keep their processes busy for a while.
fn many_rows(dir: &TestDir, times: usize) {
    let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    dir.write("rows.jsonl", &rows.repeat(times));
}

/// Waits for the end of `run`, calling `meanwhile` repeatedly.
fn watched(mut run: Child, mut meanwhile: impl FnMut(&Child)) -> Output {
    let begun = Instant::now();
    while run.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(300), "it does not end");
        meanwhile(&run);
    }
    run.wait_with_output().unwrap()
}

fn spawn(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Kills every rendering process repeatedly, as the system does when memory is short.
#[test]
fn template_processes_that_are_killed_end_the_run_and_leave_no_row_out() {
    let dir = TestDir::new();
    many_rows(&dir, 1000);
    let mut at_work = false;
    // `data` counts each bad row and continues, as `data.on_bad_row = "skip"` does.
    let done = watched(spawn(dir.command(&DATA)), |run| {
        at_work |= !renderers(run, 10).is_empty();
        if at_work {
            renderers(run, 0).into_iter().for_each(kill);
        }
    });
    let said = dir.told(&done.stderr);
    assert!(at_work, "no process rendered: {said}");
    assert_eq!(done.status.code(), Some(75), "{said}");
    assert!(said.contains("it was killed (signal 9), as the system does when memory is short"), "{said}");
    assert!(said.contains("hint: raise the memory of the job"), "{said}");
    assert!(!said.contains("bad row") && !dir.told(&done.stdout).contains("bad row"), "{said}");
}

/// A row whose process was killed once is retried.
#[test]
fn a_template_process_that_is_killed_once_costs_no_row() {
    let dir = TestDir::new();
    many_rows(&dir, 60);
    let alone = dir.command(&DATA).output().unwrap();
    assert!(alone.status.success(), "{}", dir.told(&alone.stderr));
    let mut killed = 0;
    let done = watched(spawn(dir.command(&DATA)), |run| {
        if killed == 0 {
            killed = renderers(run, 10).into_iter().take(1).map(kill).count();
        }
    });
    let said = dir.told(&done.stderr);
    assert_eq!(killed, 1, "no process rendered: {said}");
    assert!(done.status.success(), "{said}");
    assert_eq!(dir.told(&done.stdout), dir.told(&alone.stdout));
}

/// Runs the binary as another user with a limit on processes and threads; None if this machine
/// cannot do that.
fn limited(dir: &TestDir, processes: u32, args: &[&str]) -> Option<Command> {
    let mut command = Command::new("setpriv");
    let ids = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()];
    command.args(ids).args(["prlimit", &format!("--nproc={processes}:{processes}")]);
    let plain = dir.command(args);
    command.arg(plain.get_program()).args(args).stdin(Stdio::null());
    command.current_dir(dir.path("")).env("RAYON_NUM_THREADS", "2").env("HF_HUB_OFFLINE", "1");
    command.env("HF_HOME", dir.path("hf"));
    open_to_all(&dir.path(""));
    Some(command)
}

fn open_to_all(path: &Path) {
    let about = std::fs::metadata(path).unwrap();
    std::fs::set_permissions(
        path,
        std::fs::Permissions::from_mode(if about.is_dir() { 0o755 } else { 0o644 }),
    )
    .unwrap();
    if about.is_dir() {
        std::fs::read_dir(path).unwrap().for_each(|entry| open_to_all(&entry.unwrap().path()));
    }
}

#[test]
fn a_limit_of_processes_ends_the_run_and_leaves_no_row_out() {
    let dir = TestDir::new();
    let begin = |processes: u32, args: &[&str]| limited(&dir, processes, args)?.output().ok();
    let Some(version) = begin(64, &["--version"]).filter(|done| done.status.success()) else {
        skipped("a limit of processes", "it needs setpriv, prlimit, root, and a binary that others can run");
        return;
    };
    assert!(version.stdout.starts_with(b"finetune"));
    // One main and two encoding threads leave no process for rendering.
    let done = begin(3, &lora(&["--dry-run", "--set", "data.on_bad_row=skip"])).unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(75), "{said}");
    assert!(said.contains("Resource temporarily unavailable"), "{said}");
    assert!(said.contains("`ulimit -u`") && said.contains("pids.max"), "{said}");
    // One process renders for two threads, so each waits for the other's rows.
    let done = begin(4, &DATA).unwrap();
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
    let all = begin(64, &DATA).unwrap();
    assert_eq!(dir.told(&done.stdout), dir.told(&all.stdout));
}

/// A file with an I/O error is neither a bad row nor the user's error.
#[test]
fn a_table_that_the_disk_does_not_give_is_an_error_of_storage() {
    let dir = TestDir::new();
    symlink("/proc/self/mem", dir.path("rows.csv")).unwrap();
    let done = dir.command(&["data", "--model", "model", "--dataset", "rows.csv"]).output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(74), "{said}");
    assert!(said.contains("cannot read the data file") && said.contains("Input/output error"), "{said}");
}

/// Returns the output of `data`, which must succeed.
fn report(dir: &TestDir, more: &[&str]) -> String {
    let done = dir.command(&[&DATA[..], more].concat()).output().unwrap();
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
    dir.told(&done.stdout)
}

#[test]
fn a_template_that_prints_far_more_than_its_chat_is_a_fault_of_its_rows() {
    let dir = TestDir::new();
    // One chat of many is a bomb.
    let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    let bomb =
        json!({"messages": [{"role": "user", "content": "bomb"}, {"role": "assistant", "content": "x"}]});
    dir.write("rows.jsonl", &format!("{rows}{bomb}\n"));
    let template = "{% if messages[0].content == 'bomb' %}{{ 'x y ' * 15000000 }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}";
    dir.write("chat.jinja", template);
    let sets = ["--set", "data.chat_template=\"chat.jinja\"", "--set", "data.train_on=all"];
    let told = report(&dir, &sets);
    assert!(told.contains("1 bad row: refused by the chat template"), "{told}");
    assert!(told.contains("accepted: 1 MiB, and 64 for each byte"), "{told}");
}

#[test]
fn a_tokenizer_that_takes_quadratic_time_is_a_fault_of_its_rows() {
    let dir = TestDir::new();
    let path = dir.path("model/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    tokenizer["pre_tokenizer"] =
        json!({"type": "Split", "pattern": {"Regex": "(?>a+)+$"}, "behavior": "Isolated", "invert": false});
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let bomb = json!({"text": format!("{}b", "a".repeat(300_000))});
    dir.write("rows.jsonl", &format!("{}\n{bomb}\n{}\n", json!({"text": "ab ba"}), json!({"text": "ba ab"})));
    let told = report(&dir, &[]);
    assert!(told.starts_with("3 rows in 1 file") && told.contains("2 examples"), "{told}");
    assert!(told.contains("1 bad row: unreadable") && told.contains("rows.jsonl:2: "), "{told}");
    assert!(told.contains("it takes more processor time than a row or file may use"), "{told}");
}

/// A length in tokenizer.json for which the crate would allocate memory.
#[test]
fn a_table_of_replacements_that_claims_gigabytes_is_refused_in_little_memory() {
    for claim in ["/////w==", "/P///wAAAAA=", "AAAAgAAAAAA="] {
        let dir = TestDir::new();
        let path = dir.path("model/tokenizer.json");
        let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        tokenizer["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": claim});
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        let plain = dir.command(&DATA);
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -v 4000000; exec \"$0\" \"$@\""]).arg(plain.get_program()).args(DATA);
        let done = shell.current_dir(dir.path("")).env("HF_HUB_OFFLINE", "1").output().unwrap();
        let said = dir.told(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{claim}: {said}");
        assert!(said.contains("has a `Precompiled` that claims a trie of"), "{claim}: {said}");
    }
}

/// Parquet codecs that pyarrow writes, each read in its own process.
#[test]
fn parquet_in_other_codecs_is_read() {
    let dir = TestDir::new();
    for codec in ["gzip", "brotli", "lz4"] {
        let file = golden(&format!("data/packed_{codec}.parquet"));
        let args = ["data", "--model", "model", "--rows", "0", "--dataset", file.to_str().unwrap()];
        let done = dir.command(&args).output().unwrap();
        let (told, said) = (dir.told(&done.stdout), dir.told(&done.stderr));
        assert!(done.status.success(), "{codec}: {said}");
        assert!(told.starts_with("3 rows in 1 file") && told.contains("3 examples"), "{codec}: {told}");
    }
}
