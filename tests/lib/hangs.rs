//! Processes of a run: a stopped process is detected by its silence, and an elastic rendezvous
//! continues without missing ones.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use finetune::rendezvous::{JoinRequest, Listener, Master, Peer, RendezvousOptions, Secret, Session};

const PORT: &str = "FINETUNE_TEST_SILENT_PORT";
/// Far longer than a heartbeat takes on a busy machine.
const SILENCE: Duration = Duration::from_secs(8);

fn options(port: u16) -> RendezvousOptions {
    let master = Master { address: "127.0.0.1".to_owned(), port, ports: 1 };
    let secret = Secret::shared(b"canary-secret-0123456789").unwrap();
    RendezvousOptions { silence_limit: SILENCE, ..RendezvousOptions::new(Some(master), secret) }
}

fn request(rank: usize) -> JoinRequest {
    let peer = Peer { rank, ranks_here: 1, host: format!("host-{rank}"), free_bytes: None };
    JoinRequest { peer, world_size: 2, digests: BTreeMap::new() }
}

/// The other process of [`a_process_that_is_stopped_is_noticed`], which starts it: joins, and stops
/// itself.
#[test]
fn the_process_that_is_stopped() {
    let Ok(port) = std::env::var(PORT) else { return };
    let session = Session::join(request(1), &options(port.parse().unwrap())).unwrap();
    session.report_status(|| "rank 1 is in phase backward".to_owned());
    // Heartbeats keep both alive for longer than the allowed silence.
    std::thread::sleep(SILENCE + SILENCE / 2);
    assert!(session.failure().is_none());
    // SAFETY: stops this process, which belongs to the test.
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
    let failure = failed.recv_timeout(Duration::from_secs(300));
    other.kill().unwrap();
    other.wait().unwrap();
    let failure = failure.unwrap();
    assert_eq!((failure.rank, failure.host.as_str()), (1, "host-1"));
    assert!(failure.why.starts_with("it has sent no message for "), "{failure}");
    assert!(failure.why.ends_with("its last status: rank 1 is in phase backward"), "{failure}");
}

/// Returning processes continue without the missing one, under their old ranks; a conflict is still
/// an error.
#[test]
fn an_elastic_rendezvous_goes_on_without_the_missing() {
    let elastic = |port| {
        // Rank 3 has this long to join on a busy machine.
        let join_timeout = Duration::from_secs(10);
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
