//! The rendezvous of processes over loopback: successful and refused joins, hostile connections,
//! failures.

mod secret;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use finetune::error::{Error, ErrorCategory, Result};
use finetune::rendezvous::{
    JoinRequest, Listener, MAX_PAYLOAD, Master, Peer, RendezvousOptions, Secret, Session,
};

const SECRET: &str = "canary-secret-0123456789";
/// Time limit for everything; no test waits this long unless it fails.
const WATCHDOG: Duration = Duration::from_secs(240);

fn master(address: &str, port: u16, ports: u16) -> Option<Master> {
    Some(Master { address: address.to_owned(), port, ports })
}

fn request(rank: usize, world_size: usize) -> JoinRequest {
    let digests =
        [("binary", "00aa"), ("plan", "12ab34cd")].map(|(name, hex)| (name.to_owned(), hex.to_owned()));
    let peer = Peer { rank, ranks_here: 1, host: format!("host-{rank}"), free_bytes: None };
    JoinRequest { peer, world_size, digests: BTreeMap::from(digests) }
}

fn options(port: u16) -> RendezvousOptions {
    let secret = Secret::shared(SECRET.as_bytes()).unwrap();
    RendezvousOptions {
        run: "test run".to_owned(),
        join_timeout: WATCHDOG,
        rejection_timeout: WATCHDOG,
        call_timeout: WATCHDOG,
        ..RendezvousOptions::new(master("127.0.0.1", port, 1), secret)
    }
}

/// Returns options that record log lines, and the record.
fn logging(options: RendezvousOptions) -> (RendezvousOptions, Arc<Mutex<Vec<String>>>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let theirs = lines.clone();
    let log = Arc::new(move |line: &str| theirs.lock().unwrap().push(line.to_owned()));
    (RendezvousOptions { log, ..options }, lines)
}

/// Returns the process of rank 0 and its port.
fn host(world_size: usize, options: &RendezvousOptions) -> (JoinHandle<Result<Session>>, u16) {
    let listener = Listener::open(options).unwrap();
    let port = listener.address().port();
    let options = options.clone();
    (thread::spawn(move || Session::join_at(listener, request(0, world_size), &options)), port)
}

fn guest(request: JoinRequest, options: &RendezvousOptions) -> JoinHandle<Result<Session>> {
    let options = options.clone();
    thread::spawn(move || Session::join(request, &options))
}

fn plain_guest(rank: usize, world_size: usize, port: u16) -> JoinHandle<Result<Session>> {
    guest(request(rank, world_size), &options(port))
}

/// Returns the sessions of processes that must all join.
fn all_join(threads: Vec<JoinHandle<Result<Session>>>) -> Vec<Session> {
    threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
}

/// Returns all ranks of a successful rendezvous in ascending order.
fn joined(world_size: usize) -> Vec<Session> {
    let (first, port) = host(world_size, &options(0));
    let mut threads = vec![first];
    threads.extend((1..world_size).map(|rank| plain_guest(rank, world_size, port)));
    all_join(threads)
}

/// Runs `each` in every process at once.
fn all<T: Send>(sessions: &[Session], each: impl Fn(usize, &Session) -> T + Sync) -> Vec<T> {
    let each = &each;
    thread::scope(|scope| {
        let spawn = |(rank, session)| scope.spawn(move || each(rank, session));
        let threads: Vec<_> = sessions.iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn leave(sessions: Vec<Session>) -> Vec<Result<()>> {
    let threads: Vec<_> =
        sessions.into_iter().map(|session| thread::spawn(move || session.leave())).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Returns the first failure that each of `sessions` reports through its hook.
fn failures(sessions: &[Session]) -> Vec<String> {
    let hear = |session: &Session| {
        let (sender, receiver) = mpsc::channel();
        session.on_failure(move |failure| sender.send(failure.to_string()).unwrap());
        receiver
    };
    let receivers: Vec<_> = sessions.iter().map(hear).collect();
    receivers.into_iter().map(|receiver| receiver.recv_timeout(WATCHDOG).unwrap()).collect()
}

fn refusal(thread: JoinHandle<Result<Session>>) -> Error {
    let error = thread.join().unwrap().unwrap_err();
    assert!(!error.to_string().contains("canary"), "{error}");
    error
}

#[test]
fn two_and_four_processes_join_and_share() {
    for world_size in [2, 4] {
        let sessions = joined(world_size);
        let hosts: Vec<String> = (0..world_size).map(|rank| format!("host-{rank}")).collect();
        for (rank, session) in sessions.iter().enumerate() {
            assert_eq!(session.process_index(), rank);
            assert_eq!(
                session.peers().iter().map(|peer| &peer.host).collect::<Vec<_>>(),
                hosts.iter().collect::<Vec<_>>()
            );
            assert!(session.failure().is_none());
        }
        for round in 0..3_u8 {
            let ids = all(&sessions, |_, session| session.broadcast("id", || Ok(vec![round; 128])).unwrap());
            assert_eq!(ids, vec![vec![round; 128]; world_size]);
        }
        let most =
            all(&sessions, |_, session| session.broadcast("most", || Ok(vec![7; MAX_PAYLOAD])).unwrap());
        assert!(most.iter().all(|bytes| *bytes == [7; MAX_PAYLOAD]));
        assert!(leave(sessions).iter().all(Result::is_ok));
    }
}

#[test]
fn one_process_needs_no_socket() {
    let alone = Peer { ranks_here: 4, ..request(0, 4).peer };
    let options = RendezvousOptions::new(None, Secret::Absent);
    let session = Session::join(JoinRequest { peer: alone, ..request(0, 4) }, &options).unwrap();
    assert_eq!(session.broadcast("x", || Ok(vec![2])).unwrap(), [2]);
    session.fail(2, "no memory");
    assert_eq!(session.broadcast("x", || Ok(vec![])).unwrap_err().what(), "rank 2 on host-0 failed");
}

#[test]
fn processes_may_hold_several_ranks() {
    let two = |rank| {
        let peer = Peer { ranks_here: 2, ..request(rank, 4).peer };
        JoinRequest { peer, ..request(rank, 4) }
    };
    let listener = Listener::open(&options(0)).unwrap();
    let port = listener.address().port();
    let first = thread::spawn(move || Session::join_at(listener, two(0), &options(0)));
    let sessions = all_join(vec![first, guest(two(2), &options(port))]);
    let ranks: Vec<_> = sessions[1].peers().iter().map(|peer| (peer.rank, peer.ranks_here)).collect();
    assert_eq!(ranks, [(0, 2), (2, 2)]);
}

#[test]
fn a_wrong_or_missing_secret_is_refused_and_the_rendezvous_goes_on() {
    let (logged, lines) = logging(options(0));
    let (first, port) = host(2, &logged);
    let wrong =
        RendezvousOptions { secret: Secret::shared(b"canary-another-secret").unwrap(), ..options(port) };
    for _ in 0..2 {
        let error = refusal(guest(request(1, 2), &wrong));
        assert_eq!(error.kind(), ErrorCategory::User);
        assert!(
            error.to_string().contains("the secret of the joining process differs from that of rank 0"),
            "{error}"
        );
        assert!(error.to_string().contains("FINETUNE_RDZV_SECRET"), "{error}");
    }
    let none = RendezvousOptions { secret: Secret::Waived, ..options(port) };
    let error = refusal(guest(request(1, 2), &none));
    assert!(
        error.to_string().contains("rank 0 was started with a secret, the joining process without"),
        "{error}"
    );
    all_join(vec![first, plain_guest(1, 2, port)]);
    let lines = lines.lock().unwrap();
    assert_eq!(
        lines.iter().filter(|line| line.contains("the secret of the joining process differs")).count(),
        1,
        "{lines:?}"
    );
    assert!(
        lines.last().unwrap().contains("3 connections") && !lines.concat().contains("canary"),
        "{lines:?}"
    );
}

/// A server at rank 0's address without the secret.
#[test]
fn a_server_without_the_secret_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let second = plain_guest(1, 2, listener.local_addr().unwrap().port());
    let (mut stream, _) = listener.accept().unwrap();
    read_frame(&mut stream).unwrap();
    let first_of_noise = read_frame(&mut stream).unwrap();
    write_frame(&mut stream, b"\"accepted\"");
    write_frame(&mut stream, &first_of_noise);
    let error = refusal(second);
    assert!(error.to_string().contains("the secret of the joining process differs from that"), "{error}");
}

#[test]
fn a_mismatched_plan_is_refused_everywhere_with_both_sides_named() {
    let (first, port) = host(3, &options(0));
    let mut other = request(2, 3);
    other.digests.insert("plan".to_owned(), "77fe0011".to_owned());
    for thread in [first, plain_guest(1, 3, port), guest(other, &options(port))] {
        let error = refusal(thread);
        assert_eq!(error.kind(), ErrorCategory::User);
        assert_eq!(error.causes(), ["rank 0 on host-0: plan 12ab34cd, rank 2 on host-2: plan 77fe0011"]);
    }
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    // Rank 2 has this long to join on a busy machine.
    let short = RendezvousOptions { join_timeout: Duration::from_secs(10), ..options(0) };
    let (first, port) = host(4, &short);
    for thread in [first, plain_guest(2, 4, port)] {
        let error = refusal(thread);
        assert_eq!(error.kind(), ErrorCategory::Transient);
        assert_eq!(error.causes(), ["missing: ranks 1, 3", "joined: rank 0 on host-0, rank 2 on host-2"]);
    }
}

#[test]
fn a_rank_that_joins_twice_is_named_everywhere() {
    let brief = RendezvousOptions { rejection_timeout: Duration::from_millis(500), ..options(0) };
    let (first, port) = host(3, &brief);
    let on = |host: &str| {
        let peer = Peer { host: host.to_owned(), ..request(1, 3).peer };
        guest(JoinRequest { peer, ..request(1, 3) }, &options(port))
    };
    for thread in [first, on("host-1"), on("host-2")] {
        let error = refusal(thread);
        assert_eq!(error.kind(), ErrorCategory::User);
        let cause = &error.causes()[0];
        assert!(cause.starts_with("rank 1 joined twice: rank 1 on host-"), "{cause}");
        assert!(cause.contains("host-1") && cause.contains("host-2"), "{cause}");
    }
}

#[test]
fn a_process_that_was_started_again_takes_its_place() {
    let (first, port) = host(3, &options(0));
    // Joins, and leaves before all have joined.
    let proxy = Proxy::start(port, |_, frame| vec![frame]);
    let crashed = plain_guest(1, 3, proxy.port);
    proxy.wait_for(3);
    proxy.cut();
    assert_eq!(refusal(crashed).kind(), ErrorCategory::Transient);
    for session in all_join(vec![first, plain_guest(1, 3, port), plain_guest(2, 3, port)]) {
        assert_eq!(session.peers().len(), 3);
    }
}

#[test]
fn places_that_do_not_exist_are_refused() {
    let brief = RendezvousOptions { rejection_timeout: Duration::from_millis(500), ..options(0) };
    for (rank, world_size, cause) in [
        (1, 4, "rank 0 on host-0 was started with world size 2, rank 1 on host-1 with 4"),
        (2, 2, "rank 2 on host-2 joined; accepted: ranks 0 to 1"),
    ] {
        let (first, port) = host(2, &brief);
        for thread in [first, plain_guest(rank, world_size, port)] {
            let error = refusal(thread);
            assert_eq!((error.kind(), error.causes()), (ErrorCategory::User, [cause.to_owned()].as_slice()));
        }
    }
}

#[test]
fn nobody_listening_is_transient() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let short = RendezvousOptions { join_timeout: Duration::from_millis(700), ..options(port) };
    // Another program listens on the port and closes the connection.
    let other = thread::spawn(move || {
        while listener.accept().is_ok_and(|(mut stream, _)| stream.write_all(b"SSH-2.0").is_ok()) {}
    });
    let error = refusal(guest(request(1, 2), &short));
    assert_eq!(error.kind(), ErrorCategory::Transient);
    assert!(error.what().contains("no answer from rank 0 at `127.0.0.1`"), "{error}");
    drop(other);
}

/// torchrun's agent holds MASTER_PORT, and other runs may hold the ports after it.
#[test]
fn rank_0_is_found_behind_ports_of_others() {
    let other_run = RendezvousOptions {
        run: "another run".to_owned(),
        join_timeout: Duration::from_secs(10),
        ..options(0)
    };
    let (other_host, taken) = host(2, &other_run);
    let several = RendezvousOptions { master: master("127.0.0.1", taken, 16), ..options(0) };
    let (first, port) = host(2, &several);
    assert_ne!(port, taken);
    all_join(vec![first, guest(request(1, 2), &several)]);
    let error = refusal(other_host);
    assert!(error.to_string().contains("the joining process belongs to another run"), "{error}");
}

#[test]
fn rank_0_listens_on_its_own_address_only() {
    let at = |address| RendezvousOptions { master: master(address, 0, 1), ..options(0) };
    let error = Listener::open(&at("0.0.0.0")).unwrap_err();
    assert!(error.to_string().contains("means all addresses"), "{error}");
    let foreign = at("192.0.2.1");
    let error = Listener::open(&foreign).unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::User);
    assert!(error.to_string().contains("FINETUNE_RDZV_BIND"), "{error}");
    let bound = RendezvousOptions { bind: Some("127.0.0.1".to_owned()), ..foreign };
    let bound = Listener::open(&bound).unwrap();
    assert_eq!(bound.address().ip().to_string(), "127.0.0.1");
    let error = Listener::open(&options(bound.address().port())).unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient);
    let unreachable = RendezvousOptions {
        master: master("192.0.2.1", 0, 1),
        bind: Some("127.0.0.1".to_owned()),
        has_several_hosts: true,
        ..options(0)
    };
    let error = Listener::open(&unreachable).unwrap_err().to_string();
    assert!(error.contains("which no other host reaches"), "{error}");
}

#[test]
fn a_recorded_handshake_cannot_be_replayed() {
    let (logged, lines) = logging(options(0));
    let (first, port) = host(3, &logged);
    let proxy = Proxy::start(port, |_, frame| vec![frame]);
    let second = plain_guest(1, 3, proxy.port);
    proxy.wait_for(3);
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    for frame in proxy.recorded.lock().unwrap().iter() {
        write_frame(&mut stream, frame);
    }
    assert_eq!(read_frame(&mut stream).unwrap(), b"\"accepted\"");
    read_frame(&mut stream).unwrap();
    assert!(read_frame(&mut stream).is_err(), "a replayed join request was answered");
    for session in all_join(vec![first, second, plain_guest(2, 3, port)]) {
        assert_eq!(session.peers().len(), 3);
    }
    let lines = lines.lock().unwrap().concat();
    assert!(lines.contains("a message that does not authenticate"), "{lines}");
}

/// Changes frame `number` of a process that joins rank 0.
fn changed(
    number: usize,
    change: impl Fn(Vec<u8>) -> Vec<u8> + Send + Clone + 'static,
) -> (Error, Vec<String>) {
    let (logged, lines) = logging(options(0));
    let (first, port) = host(2, &logged);
    let proxy = Proxy::start(port, move |at, frame| vec![if at == number { change(frame) } else { frame }]);
    let error = refusal(plain_guest(1, 2, proxy.port));
    all_join(vec![first, plain_guest(1, 2, port)]);
    let lines = lines.lock().unwrap().clone();
    (error, lines)
}

#[test]
fn a_changed_greeting_is_refused() {
    for (from, to, why) in [
        (
            "\"version\":4",
            "\"version\":5",
            "rank 0 uses version 4 of the rendezvous protocol, the joining process version 5",
        ),
        ("true", "false", "rank 0 was started with a secret, the joining process without"),
        ("{", "{ ", "the secret of the joining process differs from that of rank 0"),
    ] {
        let (error, lines) = changed(0, move |frame| {
            let text = String::from_utf8(frame).unwrap();
            assert!(text.contains(from), "{text}");
            text.replacen(from, to, 1).into_bytes()
        });
        assert_eq!(error.kind(), ErrorCategory::User, "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert!(lines.concat().contains(why), "{why}: {lines:?}");
    }
}

#[test]
fn a_changed_handshake_is_refused() {
    let (error, lines) = changed(1, |mut frame| {
        frame[0] ^= 1;
        frame
    });
    assert!(
        error.to_string().contains("the secret of the joining process differs from that of rank 0"),
        "{error}"
    );
    assert!(
        lines.concat().contains("the secret of the joining process differs from that of rank 0"),
        "{lines:?}"
    );
}

/// A later version may send more; this one reads the version and refuses, and both errors name both
/// versions.
#[test]
fn another_version_is_refused_by_both_ends() {
    let (first, port) = host(2, &options(0));
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write_frame(&mut stream, br#"{"protocol":"finetune rendezvous","version":9,"zone":"b"}"#);
    let answer = read_frame(&mut stream).unwrap();
    assert_eq!(String::from_utf8(answer).unwrap(), r#"{"refused":{"version":{"rank_0":4,"other":9}}}"#);
    all_join(vec![first, plain_guest(1, 2, port)]);

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let second = plain_guest(1, 2, listener.local_addr().unwrap().port());
    let (mut stream, _) = listener.accept().unwrap();
    write_frame(&mut stream, br#"{"refused":{"version":{"rank_0":9,"other":4}}}"#);
    let error = refusal(second);
    assert_eq!(error.kind(), ErrorCategory::User);
    let text = error.to_string();
    assert!(text.contains("rank 0 uses version 9 of the rendezvous protocol, the joining process version 4"));
    assert!(text.contains("start all processes with the same binary"), "{text}");
}

#[test]
fn a_changed_join_request_is_refused() {
    let (error, lines) = changed(2, |mut frame| {
        frame[20] ^= 1;
        frame
    });
    assert!(error.to_string().contains("rank 0 disconnected"), "{error}");
    assert!(lines.concat().contains("a message that does not authenticate"), "{lines:?}");
}

#[test]
fn frames_that_are_changed_or_sent_again_end_the_run() {
    let change: fn(usize, Vec<u8>) -> Vec<Vec<u8>> = |number, mut frame| {
        if number == 6 {
            frame[20] ^= 1;
        }
        vec![frame]
    };
    let repeat: fn(usize, Vec<u8>) -> Vec<Vec<u8>> =
        |number, frame| if number == 5 { vec![frame.clone(), frame] } else { vec![frame] };
    let omit: fn(usize, Vec<u8>) -> Vec<Vec<u8>> =
        |number, frame| if number == 5 { Vec::new() } else { vec![frame] };
    for tamper in [change, repeat, omit] {
        let (first, port) = host(2, &options(0));
        let proxy = Proxy::between(port, |_, frame| vec![frame], tamper);
        let sessions = all_join(vec![first, plain_guest(1, 2, proxy.port)]);
        // Frames 0 to 4 of rank 0 were the handshake and the list of members; the first broadcast
        // may still succeed.
        for name in ["one", "two"] {
            // The second one may already find the failure.
            let _ = sessions[0].broadcast(name, || Ok(vec![1; 8]));
        }
        for told in failures(&sessions) {
            assert!(told.starts_with("rank 0 on host-0 failed"), "{told}");
            assert!(told.contains("a message that does not authenticate"), "{told}");
        }
    }
}

/// After the handshake all traffic is encrypted.
#[test]
fn what_is_said_is_encrypted() {
    let (first, port) = host(2, &options(0));
    let proxy = Proxy::start(port, |_, frame| vec![frame]);
    let sessions = all_join(vec![first, plain_guest(1, 2, proxy.port)]);
    sessions[1].fail(1, "canary failure");
    failures(&sessions);
    proxy.wait_for(4);
    let recorded = proxy.recorded.lock().unwrap().concat();
    let holds = |text: &[u8]| recorded.windows(text.len()).any(|window| window == text);
    assert!(holds(b"finetune rendezvous") && !holds(b"host-1") && !holds(b"canary"));
}

#[test]
fn hostile_connections_do_not_disturb_a_rendezvous() {
    let (logged, lines) = logging(options(0));
    let (first, port) = host(2, &logged);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut slow = Vec::new();
    let mut state = 0x9e37_79b9_u32;
    for number in 0..200_u32 {
        let mut stream = TcpStream::connect(address).unwrap();
        let garbage: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .take(64)
        .collect();
        // A process rejected early can no longer write.
        let _ = match number % 6 {
            0 => Ok(()),
            1 => stream.write_all(&[0]),
            2 => stream.write_all(&u16::MAX.to_be_bytes()),
            3 => stream.write_all(&garbage),
            4 => stream.write_all(&[&[0, 0, 0, 11, 1, 1], b"finetuneX".as_slice()].concat()),
            _ => {
                stream.write_all(&[&[0, 35], br#"{"protocol":"finetuneX","version":2}"#.as_slice()].concat())
            }
        };
        slow.push(stream);
    }
    let sessions = all_join(vec![first, plain_guest(1, 2, port)]);
    all(&sessions, |_, session| session.broadcast("alive", || Ok(vec![1])).unwrap());
    let lines = lines.lock().unwrap();
    assert!(lines.iter().any(|line| line.contains("a frame that is too long")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("something other than this protocol")), "{lines:?}");
    assert!(lines.len() < 20, "{lines:?}");
    // The rendezvous closes the port.
    assert!(TcpStream::connect(address).is_err());
}

/// A payload that exceeds a message is refused at the call.
#[test]
fn oversized_payloads_are_refused() {
    let sessions = joined(2);
    let error = sessions[0].broadcast("rows", || Ok(vec![0; MAX_PAYLOAD + 1])).unwrap_err().to_string();
    assert!(error.contains("8193 bytes of rows") && error.contains("up to 8192"), "{error}");
    all(&sessions, |_, session| session.broadcast("alive", || Ok(vec![1])).unwrap());
}

#[test]
fn a_failure_reaches_all_others() {
    for failing in [0, 2] {
        let sessions = joined(4);
        sessions[failing].fail(failing, "the disk is full\nby far");
        let told = failures(&sessions);
        let expected = format!("rank {failing} on host-{failing} failed: the disk is full by far");
        assert_eq!(told, vec![expected; 4]);
        // Calls end after the failure, also for ranks that fail later.
        sessions[1].fail(1, "because of it");
        for session in &sessions {
            let error = session.broadcast("next", || Ok(vec![])).unwrap_err();
            assert_eq!(
                (error.kind(), error.what()),
                (ErrorCategory::Transient, &*format!("rank {failing} on host-{failing} failed"))
            );
        }
    }
}

#[test]
fn a_failure_wakes_those_who_wait() {
    let mut sessions = joined(3);
    let failing = sessions.remove(2);
    let leaving = sessions.remove(0);
    let first = thread::spawn(move || leaving.leave());
    let waiting = sessions.remove(0);
    let second = thread::spawn(move || waiting.broadcast("id", || Ok(vec![])).map(drop));
    failing.fail(2, "out of memory");
    for thread in [first, second] {
        assert_eq!(thread.join().unwrap().unwrap_err().what(), "rank 2 on host-2 failed");
    }
}

#[test]
fn a_lost_connection_is_a_failure_that_names_the_rank() {
    for lost in [0, 1] {
        let mut sessions = joined(3);
        drop(sessions.remove(lost));
        for told in failures(&sessions) {
            assert!(
                told.starts_with(&format!(
                    "rank {lost} on host-{lost} failed: the connection to it was lost"
                )),
                "{told}"
            );
        }
    }
}

#[test]
fn different_broadcasts_are_named() {
    let sessions = joined(2);
    let outcomes =
        all(&sessions, |rank, session| session.broadcast(["the NCCL id", "the seed"][rank], || Ok(vec![1])));
    assert!(outcomes[0].is_ok());
    assert_eq!(
        outcomes[1].as_ref().unwrap_err().to_string(),
        "error: rank 0 on host-0 failed\n  caused by: it broadcast `the NCCL id`, rank 1 on host-1 waits for `the seed`"
    );
    failures(&sessions);
}

#[test]
fn whoever_does_not_come_is_named() {
    let patience = Duration::from_secs(5);
    let impatient = |port| RendezvousOptions { call_timeout: patience, ..options(port) };
    let (first, port) = host(2, &options(0));
    let sessions = all_join(vec![first, guest(request(1, 2), &impatient(port))]);
    assert_eq!(
        sessions[1].broadcast("the NCCL id", || Ok(vec![])).unwrap_err().to_string(),
        "error: rank 0 on host-0 failed\n  caused by: it did not broadcast `the NCCL id`"
    );
    // Rank 0 learns the failure attributed to it.
    assert_eq!(failures(&sessions)[0], "rank 0 on host-0 failed: it did not broadcast `the NCCL id`");

    let (first, port) = host(3, &impatient(0));
    let mut sessions = all_join(vec![first, plain_guest(1, 3, port), plain_guest(2, 3, port)]);
    let absent = sessions.remove(2);
    for outcome in leave(sessions) {
        let error = outcome.unwrap_err().to_string();
        assert_eq!(error, "error: rank 2 on host-2 failed\n  caused by: it did not finish in time");
    }
    drop(absent);
}

const CHILD_PORT: &str = "RENDEZVOUS_TEST_CHILD_PORT";

/// The other process of `a_killed_process_is_named`, not a test of its own.
#[test]
fn child_process() {
    if let Ok(port) = std::env::var(CHILD_PORT) {
        let session = plain_guest(2, 3, port.parse().unwrap()).join().unwrap().unwrap();
        session.broadcast("begun", || Ok(vec![])).unwrap();
        // Bounded, so that no process is left behind if it is not killed.
        thread::sleep(WATCHDOG);
    }
}

#[test]
fn a_killed_process_is_named() {
    let (first, port) = host(3, &options(0));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "rendezvous::child_process"])
        .env(CHILD_PORT, port.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let sessions = all_join(vec![first, plain_guest(1, 3, port)]);
    all(&sessions, |_, session| session.broadcast("begun", || Ok(vec![])).unwrap());
    child.kill().unwrap();
    for told in failures(&sessions) {
        assert!(told.starts_with("rank 2 on host-2 failed: the connection to it was lost"), "{told}");
    }
    child.wait().unwrap();
}

#[test]
fn nothing_shows_the_secret() {
    let sessions = joined(2);
    sessions[1].fail(1, "x");
    let shown = format!("{sessions:?} {:?} {:?}", options(0), failures(&sessions));
    assert!(!shown.contains("canary") && !shown.contains("99, 97, 110"), "{shown}");
}

fn read_frame(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut body = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut body).map(|()| body)
}

fn write_frame(stream: &mut TcpStream, body: &[u8]) {
    let frame = [(body.len() as u16).to_be_bytes().as_slice(), body].concat();
    // The other end may have closed: then the test sees it in the bytes it reads.
    let _ = stream.write_all(&frame);
}

/// Forwards frames between one process and rank 0, records those of the process, and changes those
/// of both.
struct Proxy {
    port: u16,
    recorded: Arc<Mutex<Vec<Vec<u8>>>>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

/// Replaces the frame of this number.
trait Change: Fn(usize, Vec<u8>) -> Vec<Vec<u8>> + Send + 'static {}
impl<F: Fn(usize, Vec<u8>) -> Vec<Vec<u8>> + Send + 'static> Change for F {}

impl Proxy {
    fn start(to: u16, change: impl Change) -> Proxy {
        Self::between(to, change, |_, frame| vec![frame])
    }

    fn between(to: u16, change: impl Change, change_back: impl Change) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = Proxy { port, recorded: Arc::default(), streams: Arc::default() };
        let (recorded, streams) = (proxy.recorded.clone(), proxy.streams.clone());
        thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
            let both = || [client.try_clone().unwrap(), server.try_clone().unwrap()];
            streams.lock().unwrap().extend(both());
            let [from, back] = both();
            thread::spawn(move || relay(back, from, &Mutex::default(), change_back));
            relay(client, server, &recorded, change);
        });
        proxy
    }

    /// Waits until the process has sent this many frames.
    fn wait_for(&self, frames: usize) {
        while self.recorded.lock().unwrap().len() < frames {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Closes both connections.
    fn cut(&self) {
        for stream in self.streams.lock().unwrap().iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn relay(mut from: TcpStream, mut to: TcpStream, recorded: &Mutex<Vec<Vec<u8>>>, change: impl Change) {
    let mut number = 0;
    while let Ok(frame) = read_frame(&mut from) {
        for changed in change(number, frame.clone()) {
            write_frame(&mut to, &changed);
        }
        recorded.lock().unwrap().push(frame);
        number += 1;
    }
    let _ = to.shutdown(Shutdown::Both);
}
