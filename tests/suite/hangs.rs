//! The watch over ranks, over threads of this process: a rank that gives no sign of life is named with those that wait for
//! it, and its peers' waits end; one that gives signs may take as long as it likes. Processes: one that is stopped is
//! noticed by its silence.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use finetune::collective::in_process::{InProcessWorld, run_ranks};
use finetune::collective::{
    Call, Collective, HangLimits, HangReport, HangWatch, Phase, ProgressBoard, TimedCollective,
};
use finetune::error::{Error, Result};
use finetune::rendezvous::{JoinRequest, Listener, Master, Peer, RendezvousOptions, Secret, Session};

const LIMIT: Duration = Duration::from_millis(600);

/// Runs two ranks under a watch that allows [`LIMIT`]; their result, what the watch found, and whether it wanted to end the
/// process.
fn watched(
    rank: impl Fn(&TimedCollective) -> Result<()> + Sync,
) -> (Result<Vec<()>>, Option<HangReport>, bool) {
    let limits =
        HangLimits { floor: HangLimits::FLOOR, timeout: Some(LIMIT), on_host: true, holds_all: true };
    watched_within(limits, rank)
}

/// As [`watched`], under `limits`.
fn watched_within(
    limits: HangLimits,
    rank: impl Fn(&TimedCollective) -> Result<()> + Sync,
) -> (Result<Vec<()>>, Option<HangReport>, bool) {
    let board = Arc::new(ProgressBoard::default());
    let ended = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&ended);
    let watch = HangWatch::start(&board, limits, move |_: &Error| theirs.store(true, Ordering::SeqCst));
    let watch = watch.unwrap();
    let done = run_ranks(InProcessWorld::new(2).communicators(), |end| {
        let world = TimedCollective::watched(Arc::new(end), &board);
        let _works = world.work_guard();
        rank(&world)
    });
    (done, watch.stop(), ended.load(Ordering::SeqCst))
}

#[test]
fn a_silent_rank_is_named_and_its_peers_go_free() {
    let (done, hang, ended) = watched(|world| {
        world.enter(Phase::Backward)?;
        if world.rank() == 1 {
            std::thread::sleep(4 * LIMIT);
        }
        world.barrier(Call { what: "gradients of block", index: 3 })
    });
    let hang = hang.expect("a hang");
    assert_eq!(hang.rank, 1);
    let text = hang.error.to_string();
    assert!(text.starts_with("error: rank 1 hangs: no progress in phase backward\n"), "{text}");
    assert!(text.contains("rank 1 is in phase backward; it has made no call\n"), "{text}");
    assert!(text.contains("rank 0 waits in phase backward: barrier of gradients of block 3\n"), "{text}");
    assert!(!ended, "the ranks have ended by themselves");
    let error = done.unwrap_err();
    assert_eq!(error.what(), "rank 1 failed in phase backward", "{error}");
}

/// Signs of life are phases, calls and heartbeats; a wait for a peer that gives them is none's fault.
#[test]
fn a_rank_that_gives_signs_of_life_does_not_hang() {
    let (done, hang, _) = watched(|world| {
        world.enter(Phase::Forward)?;
        for _ in 0..world.rank() * 40 {
            std::thread::sleep(LIMIT / 10);
            world.heartbeat();
        }
        world.barrier(Call::single("the end"))
    });
    assert!(hang.is_none(), "{hang:?}");
    done.unwrap();
}

/// A rank is compared with itself: passes of which each is longer than the floor are its way, one of over three times
/// their length is a hang.
#[test]
fn what_a_slow_rank_may_take_is_learned() {
    let floor = Duration::from_millis(400);
    // Not on this host's cores: what is idle there may be computing elsewhere.
    let limits = HangLimits { floor, timeout: None, on_host: false, holds_all: true };
    let passes = |last: u32| {
        watched_within(limits, move |world| {
            for times in [1, 1, last] {
                world.enter(Phase::Forward)?;
                if world.rank() == 1 {
                    std::thread::sleep(2 * floor * times);
                }
                world.barrier(Call::single("the pass"))?;
                world.enter(Phase::Data)?;
            }
            Ok(())
        })
    };
    let (done, hang, _) = passes(2);
    assert!(hang.is_none(), "{hang:?}");
    done.unwrap();
    let (_, hang, _) = passes(8);
    assert_eq!(hang.expect("a hang").rank, 1);
}

const PORT: &str = "FINETUNE_TEST_SILENT_PORT";
const SILENCE: Duration = Duration::from_secs(2);

fn options(port: u16) -> RendezvousOptions {
    let master = Master { address: "127.0.0.1".to_owned(), port, ports: 1 };
    let secret = Secret::shared(b"canary-secret-0123456789").unwrap();
    RendezvousOptions { silence_limit: SILENCE, ..RendezvousOptions::new(Some(master), secret) }
}

fn request(rank: usize) -> JoinRequest {
    let peer = Peer { rank, ranks_here: 1, host: format!("host-{rank}") };
    JoinRequest { peer, world_size: 2, digests: BTreeMap::new() }
}

/// The other process of [`a_process_that_is_stopped_is_noticed`], where that has started it: joins, and is stopped.
#[test]
fn the_process_that_is_stopped() {
    let Ok(port) = std::env::var(PORT) else { return };
    let session = Session::join(request(1), &options(port.parse().unwrap())).unwrap();
    session.report_status(|| "rank 1 is in phase backward".to_owned());
    // Heartbeats keep both alive for longer than a silence may be.
    std::thread::sleep(SILENCE + SILENCE / 2);
    assert!(session.failure().is_none());
    // SAFETY: stops this process, which is the test's own.
    unsafe { libc::raise(libc::SIGSTOP) };
}

#[test]
fn a_process_that_is_stopped_is_noticed() {
    let listener = Listener::open(&options(0)).unwrap();
    let port = listener.address().port().to_string();
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", "hangs::the_process_that_is_stopped", "--test-threads=1"]).env(PORT, port);
    let mut other = other.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let session = Session::join_at(listener, request(0), &options(0)).unwrap();
    let (tell, failed) = mpsc::channel();
    session.on_failure(move |failure| tell.send(failure.clone()).unwrap());
    let failure = failed.recv_timeout(Duration::from_secs(60));
    other.kill().unwrap();
    other.wait().unwrap();
    let failure = failure.unwrap();
    assert_eq!((failure.rank, failure.host.as_str()), (1, "host-1"));
    assert!(failure.why.starts_with("nothing was heard of it for "), "{failure}");
    assert!(failure.why.ends_with("it said last: rank 1 is in phase backward"), "{failure}");
}

/// Those that come again go on without one that does not, under their old ranks; a conflict is one all the same.
#[test]
fn an_elastic_rendezvous_goes_on_without_the_missing() {
    let elastic = |port| {
        let join_timeout = Duration::from_secs(3);
        RendezvousOptions { elastic: true, join_timeout, ..options(port) }
    };
    let of_four = |rank| JoinRequest { world_size: 4, ..request(rank) };
    let listener = Listener::open(&elastic(0)).unwrap();
    let port = listener.address().port();
    let other = std::thread::spawn(move || Session::join(of_four(3), &elastic(port)).unwrap());
    let first = Session::join_at(listener, of_four(0), &elastic(0)).unwrap();
    let other = other.join().unwrap();
    for (session, own) in [(&first, 0), (&other, 1)] {
        let ranks: Vec<usize> = session.peers().iter().map(|peer| peer.rank).collect();
        assert_eq!((ranks, session.process_index()), (vec![0, 3], own));
    }
    let leaving = std::thread::spawn(move || other.leave());
    first.leave().unwrap();
    leaving.join().unwrap().unwrap();
}
