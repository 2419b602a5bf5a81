//! The control channel over loopback: meetings that succeed and that must not, hostile connections, failures.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use finetune::collective::control::{Control, Door, Identity, MAX_SHARE, Secret, Terms};
use finetune::collective::launch::{Launch, LaunchSource, Master};
use finetune::error::{Error, ErrorCategory, Result};

const SECRET: &str = "canary-secret-0123456789";
/// For everything that is to happen; no test waits so long unless it fails.
const WATCHDOG: Duration = Duration::from_secs(60);

fn launch(rank: usize, world_size: usize, port: u16) -> Launch {
    let master = Some(Master { address: "127.0.0.1".to_owned(), port, ports: 1 });
    let (ranks_here, local_rank, run) = (1, rank, "test run".to_owned());
    let (source, local_world_size, host) = (LaunchSource::Flags, None, None);
    Launch { source, rank, ranks_here, local_rank, local_world_size, world_size, host, master, run }
}

fn identity(rank: usize) -> Identity {
    let digests =
        [("binary", "00aa"), ("plan", "12ab34cd")].map(|(name, hex)| (name.to_owned(), hex.to_owned()));
    Identity { host: format!("host-{rank}"), digests: BTreeMap::from(digests) }
}

fn terms() -> Terms {
    let secret = Secret::shared(SECRET.as_bytes()).unwrap();
    Terms { deadline: WATCHDOG, grace: WATCHDOG, patience: WATCHDOG, ..Terms::new(secret) }
}

/// Terms that write down what they are told.
fn listening(terms: Terms) -> (Terms, Arc<Mutex<Vec<String>>>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let theirs = lines.clone();
    (Terms { notice: Arc::new(move |line| theirs.lock().unwrap().push(line.to_owned())), ..terms }, lines)
}

fn open(world_size: usize, terms: &Terms) -> (Door, u16) {
    let door = Door::open(&launch(0, world_size, 0), terms).unwrap();
    let port = door.address().port();
    (door, port)
}

fn host(door: Door, world_size: usize, terms: &Terms) -> JoinHandle<Result<Control>> {
    let (launch, terms) = (launch(0, world_size, door.address().port()), terms.clone());
    thread::spawn(move || Control::meet_at(door, &launch, &identity(0), &terms))
}

fn guest(launch: Launch, identity: Identity, terms: &Terms) -> JoinHandle<Result<Control>> {
    let terms = terms.clone();
    thread::spawn(move || Control::meet(&launch, &identity, &terms))
}

fn plain_guest(rank: usize, world_size: usize, port: u16) -> JoinHandle<Result<Control>> {
    guest(launch(rank, world_size, port), identity(rank), &terms())
}

/// All ranks of a good meeting, ascending.
fn met(world_size: usize) -> Vec<Control> {
    let (door, port) = open(world_size, &terms());
    let mut threads = vec![host(door, world_size, &terms())];
    threads.extend((1..world_size).map(|rank| plain_guest(rank, world_size, port)));
    threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
}

/// Runs `each` in every process at once.
fn all<T: Send>(controls: &[Control], each: impl Fn(usize, &Control) -> T + Sync) -> Vec<T> {
    let each = &each;
    thread::scope(|scope| {
        let spawn = |(rank, control)| scope.spawn(move || each(rank, control));
        let threads: Vec<_> = controls.iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn leave(controls: Vec<Control>) -> Vec<Result<()>> {
    let threads: Vec<_> =
        controls.into_iter().map(|control| thread::spawn(move || control.leave())).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// The first failure as each of `controls` learns of it through its hook.
fn failures(controls: &[Control]) -> Vec<String> {
    let hear = |control: &Control| {
        let (sender, receiver) = mpsc::channel();
        control.on_failure(move |failure| sender.send(failure.to_string()).unwrap());
        receiver
    };
    let receivers: Vec<_> = controls.iter().map(hear).collect();
    receivers.into_iter().map(|receiver| receiver.recv_timeout(WATCHDOG).unwrap()).collect()
}

fn refusal(thread: JoinHandle<Result<Control>>) -> Error {
    let error = thread.join().unwrap().unwrap_err();
    assert!(!error.to_string().contains("canary"), "{error}");
    error
}

#[test]
fn two_and_four_processes_meet_and_share() {
    for world_size in [2, 4] {
        let controls = met(world_size);
        let hosts: Vec<String> = (0..world_size).map(|rank| format!("host-{rank}")).collect();
        for (rank, control) in controls.iter().enumerate() {
            assert_eq!(control.process(), rank);
            assert_eq!(
                control.peers().iter().map(|peer| &peer.host).collect::<Vec<_>>(),
                hosts.iter().collect::<Vec<_>>()
            );
            assert!(control.is_first_of_host() && control.failure().is_none());
        }
        let rows: Vec<Vec<u8>> = (0..world_size).map(|rank| vec![rank as u8; rank * 1000]).collect();
        for round in 0..3_u8 {
            let ids =
                all(&controls, |_, control| control.broadcast("nccl id", || Ok(vec![round; 128])).unwrap());
            assert_eq!(ids, vec![vec![round; 128]; world_size]);
            let tables =
                all(&controls, |rank, control| control.exchange("rows", rows[rank].clone()).unwrap());
            assert_eq!(tables, vec![rows.clone(); world_size]);
            all(&controls, |_, control| control.barrier("loaded").unwrap());
        }
        let full = all(&controls, |_, control| control.exchange("most", vec![7; MAX_SHARE]).unwrap());
        assert!(full.iter().flatten().all(|bytes| *bytes == [7; MAX_SHARE]));
        assert!(leave(controls).iter().all(Result::is_ok));
    }
}

#[test]
fn one_process_needs_no_socket() {
    let alone = Launch { master: None, ranks_here: 4, world_size: 4, ..launch(0, 4, 0) };
    let control = Control::meet(&alone, &identity(0), &Terms::new(Secret::Absent)).unwrap();
    assert_eq!(control.exchange("x", vec![1]).unwrap(), [[1]]);
    assert_eq!(control.broadcast("x", || Ok(vec![2])).unwrap(), [2]);
    control.barrier("x").unwrap();
    control.fail(2, "no memory");
    assert_eq!(control.exchange("x", vec![]).unwrap_err().what(), "rank 2 on host-0 failed");
}

#[test]
fn processes_may_hold_several_ranks_and_share_a_host() {
    let (door, port) = open(4, &terms());
    let own = Launch { ranks_here: 2, ..launch(0, 4, port) };
    let first = thread::spawn(move || Control::meet_at(door, &own, &identity(0), &terms()));
    let second = guest(Launch { ranks_here: 2, ..launch(2, 4, port) }, identity(0), &terms());
    let controls = [first.join().unwrap().unwrap(), second.join().unwrap().unwrap()];
    let ranks: Vec<_> = controls[1].peers().iter().map(|peer| (peer.rank, peer.ranks_here)).collect();
    assert_eq!(ranks, [(0, 2), (2, 2)]);
    assert!(controls[0].is_first_of_host() && !controls[1].is_first_of_host());
}

#[test]
fn loopback_does_without_a_secret_on_both_sides_only() {
    let none = Terms { secret: Secret::Absent, ..terms() };
    let (door, port) = open(2, &none);
    let first = host(door, 2, &none);
    let error = refusal(plain_guest(1, 2, port));
    assert!(error.to_string().contains("rank 0 was started without a secret"), "{error}");
    let second = guest(launch(1, 2, port), identity(1), &none);
    assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());

    let away = Launch {
        master: Some(Master { address: "192.0.2.1".to_owned(), port: 29500, ports: 1 }),
        ..launch(1, 2, 1)
    };
    let error = refusal(guest(away, identity(1), &none));
    assert_eq!(error.kind(), ErrorCategory::User);
    assert!(error.to_string().contains("FINETUNE_RDZV_WITHOUT_SECRET=1"), "{error}");
}

#[test]
fn a_wrong_or_missing_secret_is_refused_and_the_meeting_goes_on() {
    let (hearing, lines) = listening(terms());
    let (door, port) = open(2, &hearing);
    let first = host(door, 2, &hearing);
    let wrong = Terms { secret: Secret::shared(b"canary-another-secret").unwrap(), ..terms() };
    for _ in 0..2 {
        let error = refusal(guest(launch(1, 2, port), identity(1), &wrong));
        assert_eq!(error.kind(), ErrorCategory::User);
        assert!(error.to_string().contains("its secret is not the one of rank 0"), "{error}");
        assert!(error.to_string().contains("FINETUNE_RDZV_SECRET"), "{error}");
    }
    let none = Terms { secret: Secret::Absent, ..terms() };
    let error = refusal(guest(launch(1, 2, port), identity(1), &none));
    assert!(
        error.to_string().contains("rank 0 was started with a secret, the other process without"),
        "{error}"
    );
    let second = plain_guest(1, 2, port);
    assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
    let lines = lines.lock().unwrap();
    assert_eq!(lines.iter().filter(|line| line.contains("its secret is not")).count(), 1, "{lines:?}");
    assert!(
        lines.last().unwrap().contains("3 connections") && !lines.concat().contains("canary"),
        "{lines:?}"
    );
}

#[test]
fn a_server_without_the_secret_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let second = plain_guest(1, 2, listener.local_addr().unwrap().port());
    let (mut stream, _) = listener.accept().unwrap();
    read_frame(&mut stream).unwrap();
    write_frame(&mut stream, &[&[1, 2], b"finetune".as_slice(), &[9; 32]].concat());
    read_frame(&mut stream).unwrap();
    write_frame(&mut stream, &[[1, 4].as_slice(), &[0; 32]].concat());
    let error = refusal(second);
    assert!(error.to_string().contains("its secret is not the one"), "{error}");
}

#[test]
fn a_mismatched_plan_is_refused_everywhere_with_both_sides_named() {
    let (door, port) = open(3, &terms());
    let first = host(door, 3, &terms());
    let mut other = identity(2);
    other.digests.insert("plan".to_owned(), "77fe0011".to_owned());
    let threads = [first, plain_guest(1, 3, port), guest(launch(2, 3, port), other, &terms())];
    for thread in threads {
        let error = refusal(thread);
        assert_eq!(error.kind(), ErrorCategory::User);
        assert_eq!(error.causes(), ["rank 0 on host-0: plan 12ab34cd, rank 2 on host-2: plan 77fe0011"]);
    }
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    let short = Terms { deadline: Duration::from_millis(1500), ..terms() };
    let (door, port) = open(4, &short);
    let threads = [host(door, 4, &short), plain_guest(2, 4, port)];
    for thread in threads {
        let error = refusal(thread);
        assert_eq!(error.kind(), ErrorCategory::Transient);
        assert_eq!(error.causes(), ["missing: ranks 1, 3", "came: rank 0 on host-0, rank 2 on host-2"]);
    }
}

#[test]
fn a_rank_that_comes_twice_is_named_everywhere() {
    let brief = Terms { grace: Duration::from_millis(500), ..terms() };
    let (door, port) = open(3, &brief);
    let first = host(door, 3, &brief);
    let twins =
        [guest(launch(1, 3, port), identity(1), &terms()), guest(launch(1, 3, port), identity(2), &terms())];
    for thread in [first].into_iter().chain(twins) {
        let error = refusal(thread);
        assert_eq!(error.kind(), ErrorCategory::User);
        let cause = &error.causes()[0];
        assert!(cause.starts_with("rank 1 came twice: rank 1 on host-"), "{cause}");
        assert!(cause.contains("host-1") && cause.contains("host-2"), "{cause}");
    }
}

#[test]
fn a_process_that_was_started_again_takes_its_place() {
    let (door, port) = open(3, &terms());
    let first = host(door, 3, &terms());
    // Comes, says what it is, and is gone before the meeting is complete.
    let proxy = Proxy::start(port, |_, frame| vec![frame]);
    let crashed = plain_guest(1, 3, proxy.port);
    proxy.wait_for(3);
    proxy.cut();
    assert_eq!(refusal(crashed).kind(), ErrorCategory::Transient);
    let second = plain_guest(1, 3, port);
    let third = plain_guest(2, 3, port);
    for thread in [first, second, third] {
        assert_eq!(thread.join().unwrap().unwrap().peers().len(), 3);
    }
}

#[test]
fn places_that_do_not_exist_are_refused() {
    let brief = Terms { grace: Duration::from_millis(500), ..terms() };
    for (rank, world_size, cause) in [
        (1, 4, "rank 0 on host-0 was started with world size 2, rank 1 on host-1 with 4"),
        (2, 2, "rank 2 on host-2 came; accepted: ranks 0 to 1"),
    ] {
        let (door, port) = open(2, &brief);
        for thread in [host(door, 2, &brief), plain_guest(rank, world_size, port)] {
            let error = refusal(thread);
            assert_eq!((error.kind(), error.causes()), (ErrorCategory::User, [cause.to_owned()].as_slice()));
        }
    }
}

#[test]
fn nobody_listening_is_transient() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let short = Terms { deadline: Duration::from_millis(700), ..terms() };
    // Something else listens there, and hangs up.
    let other = thread::spawn(move || {
        while listener.accept().is_ok_and(|(mut stream, _)| stream.write_all(b"SSH-2.0").is_ok()) {}
    });
    let error = refusal(guest(launch(1, 2, port), identity(1), &short));
    assert_eq!(error.kind(), ErrorCategory::Transient);
    assert!(error.what().contains("no answer from rank 0 at `127.0.0.1`"), "{error}");
    drop(other);
}

/// torchrun's agent holds MASTER_PORT, and other runs may hold ports behind it.
#[test]
fn rank_0_is_found_behind_ports_of_others() {
    let other = terms();
    let (elsewhere, taken) = open(2, &other);
    let mut other_run = launch(0, 2, taken);
    other_run.run = "another run".to_owned();
    let away = Terms { deadline: Duration::from_secs(3), ..terms() };
    let other_host = thread::spawn(move || Control::meet_at(elsewhere, &other_run, &identity(0), &away));
    let several = |rank| Launch {
        master: Some(Master { address: "127.0.0.1".to_owned(), port: taken, ports: 16 }),
        ..launch(rank, 2, 0)
    };
    let door = Door::open(&several(0), &terms()).unwrap();
    assert_ne!(door.address().port(), taken);
    let own = several(0);
    let first = thread::spawn(move || Control::meet_at(door, &own, &identity(0), &terms()));
    let second = guest(several(1), identity(1), &terms());
    assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
    let error = refusal(other_host);
    assert!(error.to_string().contains("it belongs to another run"), "{error}");
}

#[test]
fn rank_0_listens_on_its_own_address_only() {
    let wildcard = Launch {
        master: Some(Master { address: "0.0.0.0".to_owned(), port: 0, ports: 1 }),
        ..launch(0, 2, 0)
    };
    let error = Door::open(&wildcard, &terms()).unwrap_err();
    assert!(error.to_string().contains("stands for all addresses"), "{error}");
    let foreign = Launch {
        master: Some(Master { address: "192.0.2.1".to_owned(), port: 0, ports: 1 }),
        ..launch(0, 2, 0)
    };
    let error = Door::open(&foreign, &terms()).unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::User);
    assert!(error.to_string().contains("FINETUNE_RDZV_BIND"), "{error}");
    let bound = Door::open(&foreign, &Terms { bind: Some("127.0.0.1".to_owned()), ..terms() }).unwrap();
    assert_eq!(bound.address().ip().to_string(), "127.0.0.1");
    let error = Door::open(&launch(0, 2, bound.address().port()), &terms()).unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient);
}

#[test]
fn a_recorded_handshake_cannot_be_replayed() {
    let (hearing, lines) = listening(terms());
    let (door, port) = open(3, &hearing);
    let first = host(door, 3, &hearing);
    let proxy = Proxy::start(port, |_, frame| vec![frame]);
    let second = plain_guest(1, 3, proxy.port);
    proxy.wait_for(3);
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    for frame in proxy.recorded.lock().unwrap().iter() {
        write_frame(&mut stream, frame);
    }
    assert_eq!(read_frame(&mut stream).unwrap()[..2], [1, 2], "a challenge");
    assert_eq!(read_frame(&mut stream).unwrap(), [1, 5, 5], "a refusal of the proof");
    let third = plain_guest(2, 3, port);
    for thread in [first, second, third] {
        assert_eq!(thread.join().unwrap().unwrap().peers().len(), 3);
    }
    let lines = lines.lock().unwrap().concat();
    assert!(lines.contains("its secret is not the one"), "{lines}");
}

#[test]
fn a_changed_greeting_is_refused() {
    // Version; whether there is a secret; the nonce.
    for (at, code) in [(0, "version"), (58, "without"), (12, "its secret is not")] {
        let (hearing, lines) = listening(terms());
        let (door, port) = open(2, &hearing);
        let first = host(door, 2, &hearing);
        let proxy = Proxy::start(port, move |number, mut frame| {
            if number == 0 {
                frame[at] ^= 1;
            }
            vec![frame]
        });
        let error = refusal(plain_guest(1, 2, proxy.port));
        assert_eq!(error.kind(), ErrorCategory::User, "{error}");
        assert!(lines.lock().unwrap().concat().contains(code), "{code}: {lines:?}");
        let second = plain_guest(1, 2, port);
        assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
    }
}

#[test]
fn frames_that_are_changed_or_sent_again_end_the_run() {
    let change: fn(usize, Vec<u8>) -> Vec<Vec<u8>> = |number, mut frame| {
        if number == 4 {
            frame[20] ^= 1;
        }
        vec![frame]
    };
    let repeat: fn(usize, Vec<u8>) -> Vec<Vec<u8>> =
        |number, frame| if number == 3 { vec![frame.clone(), frame] } else { vec![frame] };
    for tamper in [change, repeat] {
        let (door, port) = open(2, &terms());
        let first = host(door, 2, &terms());
        let proxy = Proxy::start(port, tamper);
        let second = plain_guest(1, 2, proxy.port);
        let controls = [first.join().unwrap().unwrap(), second.join().unwrap().unwrap()];
        // Frames 0 to 2 made the meeting; the first call may still succeed.
        let outcomes = all(&controls, |_, control| {
            (control.exchange("one", vec![1; 8]), control.exchange("two", vec![2; 8])).1
        });
        assert!(outcomes[0].as_ref().unwrap_err().to_string().contains("wrong tag"), "{outcomes:?}");
        assert!(outcomes[1].as_ref().unwrap_err().to_string().contains("wrong tag"), "{outcomes:?}");
    }
}

#[test]
fn hostile_connections_do_not_disturb_a_meeting() {
    let (hearing, lines) = listening(terms());
    let (door, port) = open(2, &hearing);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let first = host(door, 2, &hearing);
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
        // Whoever is thrown out early cannot write any more.
        let _ = match number % 5 {
            0 => Ok(()),
            1 => stream.write_all(&[0]),
            2 => stream.write_all(&u32::MAX.to_be_bytes()),
            3 => stream.write_all(&garbage),
            _ => stream.write_all(&[&[0, 0, 0, 11, 1, 1], b"finetuneX".as_slice()].concat()),
        };
        slow.push(stream);
    }
    let second = plain_guest(1, 2, port);
    let controls = [first.join().unwrap().unwrap(), second.join().unwrap().unwrap()];
    all(&controls, |_, control| control.barrier("alive").unwrap());
    let lines = lines.lock().unwrap();
    assert!(lines.iter().any(|line| line.contains("a frame that is too long")), "{lines:?}");
    assert!(lines.len() < 20, "{lines:?}");
    // The port is closed after the meeting.
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn a_failure_reaches_all_others() {
    for failing in [0, 2] {
        let controls = met(4);
        controls[failing].fail(failing, "the disk is full\nby far");
        let told = failures(&controls);
        let expected = format!("rank {failing} on host-{failing} failed: the disk is full by far");
        assert_eq!(told, vec![expected; 4]);
        // Calls end with it, also for whoever fails next.
        controls[1].fail(1, "because of it");
        for control in &controls {
            let error = control.barrier("next").unwrap_err();
            assert_eq!(
                (error.kind(), error.what()),
                (ErrorCategory::Transient, &*format!("rank {failing} on host-{failing} failed"))
            );
        }
    }
}

#[test]
fn a_failure_wakes_those_who_wait() {
    let controls = met(3);
    let outcomes = all(&controls, |rank, control| match rank {
        2 => {
            control.fail(2, "out of memory");
            Ok(())
        }
        _ => control.barrier("loaded"),
    });
    for outcome in &outcomes[..2] {
        assert_eq!(outcome.as_ref().unwrap_err().what(), "rank 2 on host-2 failed");
    }
}

#[test]
fn a_lost_connection_is_a_failure_that_names_the_rank() {
    for lost in [0, 1] {
        let mut controls = met(3);
        drop(controls.remove(lost));
        for told in failures(&controls) {
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
fn different_calls_are_named() {
    let controls = met(2);
    let outcomes = all(&controls, |rank, control| match rank {
        0 => control.barrier("loaded").map(|()| Vec::new()),
        _ => control.exchange("rows", vec![1]),
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert_eq!(error.what(), "rank 1 on host-1 failed");
        assert_eq!(
            error.causes(),
            ["it came to exchange `rows` (call 0), rank 0 on host-0 to barrier `loaded` (call 0)"]
        );
    }
}

#[test]
fn whoever_does_not_come_to_a_call_is_named() {
    let impatient = Terms { patience: Duration::from_millis(500), ..terms() };
    let (door, port) = open(3, &terms());
    let threads = [host(door, 3, &impatient), plain_guest(1, 3, port), plain_guest(2, 3, port)];
    let controls: Vec<Control> = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
    let outcomes = all(&controls, |rank, control| if rank == 2 { Ok(()) } else { control.barrier("loaded") });
    for outcome in &outcomes[..2] {
        let error = outcome.as_ref().unwrap_err();
        assert_eq!(
            error.to_string(),
            "error: rank 2 on host-2 failed\n  caused by: it did not come to barrier `loaded`"
        );
    }
}

const CHILD_PORT: &str = "CONTROL_TEST_CHILD_PORT";

/// Not a test of its own: the other process of `a_killed_process_is_named`.
#[test]
fn child_process() {
    if let Ok(port) = std::env::var(CHILD_PORT) {
        let control = plain_guest(2, 3, port.parse().unwrap()).join().unwrap().unwrap();
        control.barrier("begun").unwrap();
        // Until it is killed; bounded, so that nothing is left behind.
        thread::sleep(WATCHDOG);
    }
}

#[test]
fn a_killed_process_is_named() {
    let (door, port) = open(3, &terms());
    let threads = [host(door, 3, &terms()), plain_guest(1, 3, port)];
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process"])
        .env(CHILD_PORT, port.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let controls: Vec<Control> = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
    all(&controls, |_, control| control.barrier("begun").unwrap());
    child.kill().unwrap();
    for told in failures(&controls) {
        assert!(told.starts_with("rank 2 on host-2 failed: the connection to it was lost"), "{told}");
    }
    child.wait().unwrap();
}

#[test]
fn nothing_shows_the_secret() {
    let controls = met(2);
    controls[1].fail(1, "x");
    let shown = format!("{controls:?} {:?} {:?}", terms(), failures(&controls));
    assert!(!shown.contains("canary") && !shown.contains("99, 97, 110"), "{shown}");
}

fn read_frame(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut body = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut body).map(|()| body)
}

fn write_frame(stream: &mut TcpStream, body: &[u8]) {
    let frame = [(body.len() as u32).to_be_bytes().as_slice(), body].concat();
    // The other end may have hung up: then the test sees it by what it reads.
    let _ = stream.write_all(&frame);
}

/// Sits between one process and rank 0, and records and changes what the process sends.
struct Proxy {
    port: u16,
    recorded: Arc<Mutex<Vec<Vec<u8>>>>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    fn start(to: u16, change: impl Fn(usize, Vec<u8>) -> Vec<Vec<u8>> + Send + Clone + 'static) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = Proxy { port, recorded: Arc::default(), streams: Arc::default() };
        let (recorded, streams) = (proxy.recorded.clone(), proxy.streams.clone());
        thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
            streams.lock().unwrap().extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
            let (mut from, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut back);
                let _ = back.shutdown(Shutdown::Both);
            });
            let (mut client, mut server) = (client, server);
            let mut number = 0;
            while let Ok(frame) = read_frame(&mut client) {
                for changed in change(number, frame.clone()) {
                    write_frame(&mut server, &changed);
                }
                recorded.lock().unwrap().push(frame);
                number += 1;
            }
            let _ = server.shutdown(Shutdown::Both);
        });
        proxy
    }

    /// Waits until the process has sent so many frames.
    fn wait_for(&self, frames: usize) {
        while self.recorded.lock().unwrap().len() < frames {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends both connections.
    fn cut(&self) {
        for stream in self.streams.lock().unwrap().iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
