use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGKILL, SIGTERM};

use super::*;
use crate::collective::launch::{Flags, LaunchSource};
use crate::threads;

/// Time limit of a wait, in which a busy machine starts a shell.
const PATIENCE: Duration = Duration::from_secs(60);

/// Limits that no test waits for.
const PATIENT: EndLimits = EndLimits { joining: PATIENCE, all: PATIENCE };

/// Processes of `rank 0`, `rank 1`, … that run `scripts` in a shell.
fn shells(scripts: &[&str]) -> Vec<RankProcess> {
    let shell = |(rank, script): (usize, &&str)| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        RankProcess::new(format!("rank {rank}"), command)
    };
    scripts.iter().enumerate().map(shell).collect()
}

/// The end of processes of which no signal asks to stop.
fn end_of(scripts: &[&str], limits: EndLimits) -> RunEnd {
    until_end_within(limits, shells(scripts), &[]).unwrap()
}

/// A rank that fails after its peers have heard of it is the cause all the same, with its exit code
/// and its output. Rank 0 has printed the error, so that of the parent is not needed.
#[test]
fn the_rank_that_failed_explains_the_end_and_not_those_that_heard() {
    let heard = format!("exit {}", child::HEARD);
    let end = end_of(&[&heard, &heard, "sleep 0.3; echo canary; echo why >&2; exit 4"], PATIENT);
    assert_eq!((end.name.as_str(), end.status.code()), ("rank 2", Some(4)));
    assert_eq!(end.output, ["canary", "why"]);
    assert!(end.is_reported && !end.asked_to_stop);
    assert_eq!(end.in_words(), "rank 2 ended with exit code 4");
}

/// All ranks refuse the same setting: rank 0 has printed it, and nothing is printed again.
#[test]
fn an_error_of_all_ranks_is_that_of_rank_0() {
    let end = end_of(&["sleep 0.3; exit 1", "echo refused; exit 1", "exit 1"], PATIENT);
    assert_eq!((end.name.as_str(), end.status.code()), ("rank 0", Some(1)));
    assert!(end.is_reported && end.output.is_empty());
}

/// A failure on another host, of which all ranks here have heard, has the exit code of a lost peer.
#[test]
fn a_failure_elsewhere_is_that_of_a_peer() {
    let heard = format!("exit {}", child::HEARD);
    let end = end_of(&[&heard, &heard], PATIENT);
    assert_eq!((end.name.as_str(), end.status.code()), ("rank 0", Some(75)));
}

/// A killed rank ends the others, which do not end by themselves, and the error names it.
#[test]
fn a_killed_rank_ends_the_others() {
    let killed = "echo its last words; kill -9 $$";
    let limits = EndLimits { all: Duration::from_millis(100), ..PATIENT };
    let end = end_of(&["exec sleep 600", killed, "exec sleep 600"], limits);
    assert_eq!((end.name.as_str(), end.output.as_slice()), ("rank 1", &["its last words".to_owned()][..]));
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&end.status), Some(SIGKILL));
    assert!(!end.is_reported);
    let error = end.conclude().unwrap_err();
    assert_eq!((error.what(), error.kind()), ("rank 1 was killed by signal 9", ErrorCategory::Transient));
}

/// A rank that refuses its part does not keep those that wait for it: a signal ends them, and it is
/// the cause. A rank that runs handles the signal.
#[test]
fn a_rank_that_waits_for_a_failed_one_ends() {
    let limits = EndLimits { joining: Duration::ZERO, ..PATIENT };
    let heard = format!("exit {}", child::HEARD);
    let end = end_of(&["exec sleep 600", &heard], limits);
    assert_eq!((end.name.as_str(), end.status.code()), ("rank 1", Some(75)));
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready").display().to_string();
    let failed = format!("while [ ! -e {ready} ]; do sleep 0.05; done; {heard}");
    let runs = format!("trap 'echo signalled; exit 4' USR1; touch {ready}; while :; do sleep 0.05; done");
    let end = end_of(&[&failed, &runs], limits);
    assert_eq!((end.name.as_str(), end.status.code()), ("rank 1", Some(4)));
    assert_eq!(end.output, ["signalled"]);
}

/// The documentation names these times, in which the first process sends its alerts and ends the
/// program of `log.command`.
#[test]
fn ranks_have_a_minute_to_end_after_a_failure() {
    assert_eq!([LIMITS.joining, LIMITS.all].map(|limit| limit.as_secs()), [5, 60]);
    assert!(LIMITS.joining < LONGEST_END && LONGEST_END < LIMITS.all);
}

/// Only an error of the user names the output that says what to change.
#[test]
fn hints_follow_the_kind_of_end() {
    let hints = [1, 3, 4, 75].map(|code| {
        let error = end_of(&["exit 0", &format!("exit {code}")], PATIENT).conclude().unwrap_err();
        error.to_string().contains("hint: its last output")
    });
    assert_eq!(hints, [true, false, true, false]);
}

/// A rank that ends well, or saved as asked, does not end the others, which still write the result.
#[test]
fn a_rank_that_is_done_leaves_the_others_at_work() {
    for (code, other) in [(0, 0), (85, 85)] {
        let slow = format!("sleep 0.5; exit {code}");
        let limits = EndLimits { joining: Duration::ZERO, all: Duration::ZERO };
        let end = end_of(&[&slow, &format!("exit {other}")], limits);
        assert_eq!((end.name.as_str(), end.status.code()), ("rank 0", Some(code)));
        assert!(end.is_reported && end.output.is_empty());
    }
}

/// Only the end of a long output is kept, which does not stop a rank that writes much.
#[test]
fn the_end_of_a_long_output_is_kept() {
    let end = end_of(&["exit 76", "seq 1 100000; exit 1"], PATIENT);
    assert_eq!((end.output.len(), end.output.last().unwrap().as_str()), (20, "100000"));
}

/// A signal reaches every rank once.
#[test]
fn signals_reach_every_rank_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = |rank: usize, name: &str| folder.path().join(format!("{name}-{rank}"));
    let script = |rank: usize| {
        let [ready, got] = ["ready", "got"].map(|name| file(rank, name).display().to_string());
        format!("trap 'echo x >> {got}; exit 85' TERM; touch {ready}; while :; do sleep 0.05; done")
    };
    let scripts = [script(0), script(1)];
    let flag = Arc::new(AtomicBool::new(false));
    let signals = [SeenSignal { signal: SIGTERM, flag: Arc::clone(&flag) }];
    let ready: Vec<PathBuf> = (0..2).map(|rank| file(rank, "ready")).collect();
    let sender = threads::start("sender", move || {
        let begin = Instant::now();
        while !ready.iter().all(|path| path.exists()) && begin.elapsed() < PATIENCE {
            std::thread::sleep(POLL);
        }
        flag.store(true, Ordering::SeqCst);
    });
    let end = until_end_within(PATIENT, shells(&[&scripts[0], &scripts[1]]), &signals).unwrap();
    sender.unwrap().join().unwrap();
    assert_eq!((end.status.code(), end.asked_to_stop), (Some(85), true));
    for rank in 0..2 {
        assert_eq!(std::fs::read_to_string(file(rank, "got")).unwrap(), "x\n");
    }
}

/// A rank's process gets the flags of a launch by hand instead of those of all ranks.
#[test]
fn each_rank_gets_its_own_flags() {
    let here = Flags { ranks_here: Some(2), ..Flags::default() };
    let alone = Launch::detect(&here, &|_| None).unwrap();
    assert_eq!(alone.source, LaunchSource::Alone);
    let master = loopback().unwrap();
    assert!(master.is_loopback() && master.port >= FIRST_PORT);
    let flags = Flags { world_size: Some(4), rank: Some(2), master_addr: Some("node-0".to_owned()), ..here };
    let second = Launch::detect(&flags, &|_| None).unwrap();
    let words: Vec<OsString> = "train --gpus 4,6 --rank=2 --world-size 4 --master-addr node-0 --ui"
        .split(' ')
        .map(OsString::from)
        .collect();
    let rank = |gpu: &str| SplitRank { device: ["--gpus".to_owned(), gpu.to_owned()], variables: Vec::new() };
    let position = ProcessPosition::of(&second, second.master.clone().unwrap());
    let own = position.of_one(1, 2);
    let joined: Vec<String> =
        words_of(&words, &rank("6"), &own).into_iter().map(|word| word.into_string().unwrap()).collect();
    assert_eq!(
        joined.join(" "),
        "train --ui --world-size 4 --rank 3 --master-addr node-0 --master-port 29500 --gpus 6"
    );
    assert_eq!(
        own.environment()[..2],
        [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")].map(|(name, value)| (name, value.to_owned()))
    );
    assert_eq!(rank("6").name(own.rank), "rank 3 on GPU 6");
    assert_eq!(ProcessPosition::of(&alone, master).of_one(1, 2).in_words(&[]).len(), 8);
}

/// Ranks on several GPUs load CUDA's code at their start, unless the user has set the variable.
#[test]
fn ranks_on_several_gpus_load_code_at_their_start() {
    let launch = Launch::detect(&Flags { ranks_here: Some(2), ..Flags::default() }, &|_| None).unwrap();
    let set = |given: Option<&str>| {
        let ranks = [4, 6].map(|gpu| SplitRank::on_gpu(gpu, given.map(OsStr::new)));
        let started = RankProcess::of_ranks(&[], &ranks, &launch, None).unwrap();
        let of = |process: &RankProcess| {
            let mut variables = process.command.get_envs();
            variables
                .find(|(name, _)| *name == "CUDA_MODULE_LOADING")
                .map(|(_, value)| value.map(OsString::from))
        };
        started.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(set(None), vec![Some(Some(OsString::from("EAGER"))); 2]);
    assert_eq!(set(Some("LAZY")), [None, None]);
}

/// Each process has a share of the threads, and the processes of one host a secret of their own,
/// which is not on a command line.
#[test]
fn processes_of_one_host_share_threads_and_a_secret() {
    let launch = Launch::detect(&Flags { ranks_here: Some(2), ..Flags::default() }, &|_| None).unwrap();
    let rank =
        |rank: &str| SplitRank { device: ["--gpus".to_owned(), rank.to_owned()], variables: Vec::new() };
    let started = RankProcess::of_ranks(&["--ui".into()], &[rank("0"), rank("1")], &launch, None).unwrap();
    let variable = |process: &RankProcess, name: &str| {
        let entry = process.command.get_envs().find(|(known, _)| *known == name);
        entry.map(|(_, value)| value.map(|value| value.to_str().unwrap().to_owned()))
    };
    let secrets: Vec<String> =
        started.iter().map(|process| variable(process, "FINETUNE_RDZV_SECRET").unwrap().unwrap()).collect();
    assert!(secrets[0] == secrets[1] && secrets[0].len() == 64);
    for (process, local_rank) in started.iter().zip(["0", "1"]) {
        assert_eq!(variable(process, "FINETUNE_RDZV_SECRET_FILE"), Some(None));
        assert_eq!(variable(process, "LOCAL_RANK").unwrap().unwrap(), local_rank);
        let threads: usize = variable(process, THREADS).unwrap().unwrap().parse().unwrap();
        assert_eq!(threads, (thread_pool::threads_of_process() / 2).max(1));
        assert!(process.command.get_args().all(|word| word.to_str() != Some(secrets[0].as_str())));
    }
}
