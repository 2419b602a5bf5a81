//! Ranks that one command starts as processes, as it does for several GPUs: the same bytes as
//! threads, and one end of the run, whatever ends a rank.
//!
//! MPI gives an identity to the processes that `mpirun` starts. Here these are shells, which write
//! their variables to files and wait. `FINETUNE_MPI_PROCESSES` hands the variables to the ranks.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{BINARY, compare, line, mpirun, said};

/// Time limit of each wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// Writes the variables of MPI's process and waits for the end of the test.
const SHELL: &str = "env -0 > $0/new-$OMPI_COMM_WORLD_RANK; \
    mv $0/new-$OMPI_COMM_WORLD_RANK $0/rank-$OMPI_COMM_WORLD_RANK; \
    while [ ! -e $0/done ]; do sleep 0.05; done";

/// Processes of MPI without work. Each identity serves one rank of one run.
struct IdleJob {
    folder: TempDir,
    mpirun: Child,
}

impl IdleJob {
    /// Starts a job of two processes; none without mpirun.
    fn start() -> Option<Self> {
        let mut command = mpirun()?;
        let folder = tempfile::tempdir().unwrap();
        command.args(["-n", "2", "sh", "-c", SHELL]).arg(folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let job = IdleJob { mpirun: command.spawn().unwrap(), folder };
        wait_for(|| (0..2).all(|rank| job.folder.path().join(format!("rank-{rank}")).exists()));
        Some(job)
    }

    /// The command that trains into `output` with a process for each of two ranks.
    fn command(&self, output: &Path, fault: Option<&str>, more: &[&str]) -> Command {
        let mut command = Command::new(BINARY);
        command.args(line(output, &[more, &["--ranks", "2"]].concat()));
        command.env("FINETUNE_MPI_PROCESSES", self.folder.path()).env_remove("RUST_BACKTRACE");
        command.envs(fault.map(|fault| ("FINETUNE_FAULT", fault)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

impl Drop for IdleJob {
    fn drop(&mut self) {
        drop(std::fs::write(self.folder.path().join("done"), ""));
        drop(self.mpirun.wait());
    }
}

fn wait_for(mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "waited in vain");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Lines of an error's first line.
fn errors(text: &str) -> usize {
    text.lines().filter(|line| line.starts_with("error: ")).count()
}

fn send(process: u32, signal: i32) {
    // SAFETY: a signal to a process that this test has started, or to a child of one, which has not
    // been waited for.
    unsafe { libc::kill(libc::pid_t::try_from(process).unwrap(), signal) };
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions read the variable")]
fn started_processes_give_the_bytes_of_threads() {
    let Some(job) = IdleJob::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let [apart, together] = ["apart", "together"].map(|name| dir.path().join(name));
    let done = job.command(&apart, None, &[]).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    assert!(said(&done).contains("done in "), "rank 0 prints: {}", said(&done));
    let one = Command::new(BINARY).args(line(&together, &["--ranks", "2"])).output().unwrap();
    assert!(one.status.success(), "{}", said(&one));
    compare(&apart, &together, 2);
    let losses = |output: &Path| -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(output.join("metrics.jsonl")).unwrap();
        let entries = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        entries.map(|entry| entry["loss"].clone()).collect()
    };
    assert_eq!(losses(&apart), losses(&together));
    assert_eq!(losses(&apart).len(), 4);
}

/// A signal to the parent stops all ranks, which save first.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions read the variable")]
fn a_signal_to_the_parent_stops_all_ranks_with_a_checkpoint() {
    let Some(job) = IdleJob::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let more = ["--set", "train.max_steps=400"];
    let run = job.command(&output, Some("0:data:slow=50ms"), &more).spawn().unwrap();
    wait_for(|| output.join("checkpoint-2").exists());
    send(run.id(), libc::SIGTERM);
    let done = run.wait_with_output().unwrap();
    let text = said(&done);
    assert_eq!(done.status.code(), Some(85), "{text}");
    assert_eq!(errors(&text), 0, "{text}");
    let last = text.lines().last().unwrap();
    let step = last.strip_prefix("stopped after step ").unwrap().split(' ').next().unwrap();
    assert!(last.ends_with("go on with the same command and `--resume`"), "{text}");
    assert!(output.join(format!("checkpoint-{step}/manifest.json")).exists(), "{text}");
}

/// Waits for the end of a run whose rank 1 was killed.
fn killed_rank(run: Child, output: &Path) -> Output {
    wait_for(|| output.join("checkpoint-2").exists());
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id())).unwrap();
    let children: Vec<u32> = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(children.len(), 2, "a process for each rank");
    let is_rank_1 = |pid: &&u32| {
        let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        words.contains("--rank\x001\x00")
    };
    send(*children.iter().find(is_rank_1).unwrap(), libc::SIGKILL);
    run.wait_with_output().unwrap()
}

/// The system kills a rank, as it does when memory runs out: the run ends with one error.
#[test]
#[cfg(target_os = "linux")]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions read the variable")]
fn a_killed_rank_ends_the_run_with_its_name_and_last_output() {
    let Some(job) = IdleJob::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let more = ["--set", "train.max_steps=400"];
    let run = job.command(&output, Some("1:data:slow=50ms"), &more).spawn().unwrap();
    let done = killed_rank(run, &output);
    let text = said(&done);
    assert_eq!((done.status.code(), done.status.signal()), (Some(75), None), "{text}");
    assert_eq!(errors(&text), 1, "{text}");
    assert!(text.contains("error: rank 1"), "{text}");
    let (_, own) = text.split_once("rank 1 was killed by signal 9; its last output:\n").expect(&text);
    assert!(own.starts_with("  | ") && own.contains("planted fault"), "{text}");
}

/// A rank that fails by itself: the error of rank 0 names it, and its own output follows.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions read the variable")]
fn a_rank_that_fails_shows_its_output() {
    let Some(job) = IdleJob::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let done = job.command(&dir.path().join("out"), Some("1:backward:2:error"), &[]).output().unwrap();
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert_eq!(errors(&text), 1, "{text}");
    let (first, own) = text.split_once("rank 1 ended with exit code 75; its last output:\n").expect(&text);
    assert!(first.contains("error: rank 1 on "), "{text}");
    assert!(first.contains("caused by: rank 1 failed in phase backward: planted fault"), "{text}");
    assert!(own.contains("  | error: rank 1 failed in phase backward"), "{text}");
}

/// The code of the command is that of the rank that failed, and not that of a rank which lost it.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions read the variable")]
fn the_run_ends_with_the_code_of_the_rank_that_failed() {
    let Some(job) = IdleJob::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let done = job.command(&dir.path().join("out"), Some("1:backward:2:exit"), &[]).output().unwrap();
    let text = said(&done);
    assert_eq!(done.status.code(), Some(3), "{text}");
    assert!(errors(&text) == 1 && text.contains("error: rank 1"), "{text}");
}

/// A failure of rank 0, and an error that every rank finds, appear once.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions read the variable")]
fn an_error_of_rank_0_or_of_all_ranks_appears_once() {
    let Some(job) = IdleJob::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let done = job.command(&output, None, &["--set", "train.nonsense=1"]).output().unwrap();
    let text = said(&done);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(errors(&text) == 1 && !text.contains("its last output"), "{text}");
    assert!(!output.exists(), "{text}");
    std::fs::create_dir(&output).unwrap();
    std::fs::write(output.join("notes.txt"), "").unwrap();
    let done = job.command(&output, None, &[]).output().unwrap();
    let text = said(&done);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(errors(&text) == 1 && text.contains("error: cannot write to "), "{text}");
    let output = dir.path().join("other");
    let done = job.command(&output, Some("0:backward:2:error"), &[]).output().unwrap();
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert!(errors(&text) == 1 && !text.contains("its last output"), "{text}");
    assert!(text.contains("error: rank 0 failed in phase backward"), "{text}");
}
