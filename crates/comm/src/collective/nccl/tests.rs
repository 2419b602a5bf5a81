//! The backend over the fake: no GPU, no library.

use std::any::Any;
use std::sync::atomic::Ordering;

use super::fake_nccl::{FakeEvent, Host, is_in_group, library, share_card, threads};
use super::message::grouped;
use super::*;
use crate::collective::{HangLimits, HangWatch, ProgressBoard, RankFailure, TimedCollective};
use crate::runtime::buffer::ElementType;

pub(super) const PATIENT: Duration = Duration::from_secs(60);
pub(super) const SHORT: Duration = Duration::from_millis(300);

pub(super) const fn call(what: &'static str, index: usize) -> Call {
    Call { what, index }
}

/// Memory over a vector, which is read back after collectives.
pub(super) struct Values<T>(Arc<Vec<T>>, pub(super) Buffer);

impl<T: Copy + Send + Sync + 'static> Values<T> {
    pub(super) fn new(element: ElementType, values: Vec<T>) -> Self {
        let values = Arc::new(values);
        let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&values) as _;
        // SAFETY: its owner keeps it, and does not read it while a collective runs; the fake's GPU
        // is in host memory.
        let memory = unsafe { Buffer::on_gpu(values.as_ptr() as usize, values.len(), element, owner) };
        Values(values, memory)
    }

    /// Allocates memory that the library cannot access.
    pub(super) fn on_host(element: ElementType, values: Vec<T>) -> Self {
        let Values(values, memory) = Values::new(element, values);
        let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&values) as _;
        // SAFETY: as above.
        let memory = unsafe { Buffer::new(memory.address(), memory.elements(), element, owner) };
        Values(values, memory)
    }

    pub(super) fn read(&self) -> Vec<T> {
        // SAFETY: in bounds; the compiler does not know of the writes.
        (0..self.0.len()).map(|i| unsafe { self.0.as_ptr().add(i).read_volatile() }).collect()
    }
}

/// Runs ranks as threads, each with its own flag as in separate processes, or all with one.
#[allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
pub(super) fn run<T: Send>(
    size: usize,
    deadline: Duration,
    one_process: bool,
    rank: impl Fn(&Nccl<Host>, &Host) -> T + Sync,
) -> Vec<T> {
    let library = library();
    let id = library.unique_id().unwrap();
    let shared = AbortFlag::new();
    std::thread::scope(|scope| {
        let start = |number: usize| {
            let (library, rank) = (&library, &rank);
            let abort_flag = if one_process { Arc::clone(&shared) } else { AbortFlag::new() };
            scope.spawn(move || {
                let rank_info = NcclRankInfo { id, rank: number, size, deadline };
                let device = Host::default();
                let other_end = device.other_end();
                rank(&Nccl::connect(library, &rank_info, device, &abort_flag).unwrap(), &other_end)
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(super) fn texts(results: Vec<Result<()>>) -> Vec<String> {
    results.into_iter().map(|result| result.unwrap_err().to_string()).collect()
}

#[test]
fn every_operation_moves_its_data_and_counts_it() {
    run(3, PATIENT, false, |nccl, _| {
        let rank = nccl.rank();
        let buffer = Values::new(ElementType::F32, vec![rank as f32 + 1.0; 5]);
        nccl.all_reduce(call("f32", 0), &buffer.1).unwrap();
        assert_eq!(buffer.read(), [6.0; 5]);
        let loss = Values::new(ElementType::F64, vec![0.25 * rank as f64]);
        nccl.all_reduce(call("loss", 0), &loss.1).unwrap();
        assert_eq!(loss.read(), [0.75]);

        let full = Values::new(ElementType::F32, (0..6).map(|i| i as f32).collect());
        let shard = Values::new(ElementType::F32, vec![0.0_f32; 2]);
        nccl.reduce_scatter(call("full", 0), &full.1, &shard.1).unwrap();
        assert_eq!(shard.read(), [6.0 * rank as f32, 6.0 * rank as f32 + 3.0]);

        let codes = Values::new(ElementType::U8, vec![rank as u8; 4]);
        let [one, two] = [(); 2].map(|()| Values::new(ElementType::U8, vec![9_u8; 12]));
        let first = nccl.start_all_gather(call("codes", 0), &codes.1, &one.1).unwrap();
        let second = nccl.start_all_gather(call("codes", 1), &codes.1, &two.1).unwrap();
        nccl.finish(first).unwrap();
        nccl.finish(second).unwrap();
        assert_eq!(one.read(), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
        assert_eq!(one.read(), two.read());

        nccl.broadcast(call("codes", 2), 2, &codes.1).unwrap();
        assert_eq!(codes.read(), [2; 4]);

        // Only from 2 to 0; the hash that all compare at the end does not contain it.
        for index in 0..3 {
            match rank {
                0 => nccl.recv(call("message", index), 2, &buffer.1).unwrap(),
                2 => {
                    let message = Values::new(ElementType::F32, vec![index as f32; 5]);
                    nccl.send(call("message", index), 0, &message.1).unwrap();
                }
                _ => {}
            }
            assert_eq!(buffer.read(), [if rank == 0 { index as f32 } else { 6.0 }; 5]);
        }
        assert!(nccl.send(call("message", 3), rank, &buffer.1).is_err(), "to itself");
        assert!(nccl.recv(call("message", 3), 3, &buffer.1).is_err(), "from nobody");
        nccl.barrier(call("end", 0)).unwrap();
        let traffic = nccl.traffic();
        assert_eq!(traffic.calls(Op::AllGather), 2);
        assert_eq!(traffic.bytes(Op::AllGather), 16);
        assert_eq!(traffic.bytes(Op::Send), if rank == 2 { 60 } else { 0 });
        assert_eq!(traffic.calls(Op::Recv), if rank == 0 { 3 } else { 0 });
        assert_eq!(traffic.bytes(Op::ReduceScatter), 16);
    });
}

/// Values for which f32 sums are exact.
pub(super) fn numbers(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 3) % 1000) as f32).collect()
}

#[test]
fn memory_of_the_host_goes_through_the_device_by_pieces() {
    // More than one piece for each rank, with a partial last one.
    let len = (4 << 20) / 4 + 1001;
    run(2, PATIENT, false, |nccl, _| {
        let rank = nccl.rank();
        let buffer = Values::on_host(ElementType::F32, numbers(rank, len));
        nccl.all_reduce(call("sums", 0), &buffer.1).unwrap();
        let (read, first, second) = (buffer.read(), numbers(0, len), numbers(1, len));
        assert!(read.iter().enumerate().all(|(i, x)| *x == first[i] + second[i]));

        let full = Values::on_host(ElementType::F32, numbers(rank, 2 * len));
        let shard = Values::on_host(ElementType::F32, vec![0.0_f32; len]);
        nccl.reduce_scatter(call("parts", 0), &full.1, &shard.1).unwrap();
        let (first, second) = (numbers(0, 2 * len), numbers(1, 2 * len));
        let own = rank * len;
        assert!(shard.read().iter().enumerate().all(|(i, x)| *x == first[own + i] + second[own + i]));

        let part = Values::on_host(ElementType::F32, numbers(rank, len));
        let all = Values::on_host(ElementType::F32, vec![0.0_f32; 2 * len]);
        let ticket = nccl.start_all_gather(call("whole", 0), &part.1, &all.1).unwrap();
        nccl.finish(ticket).unwrap();
        assert_eq!(all.read(), [numbers(0, len), numbers(1, len)].concat());

        let received = Values::on_host(ElementType::F32, numbers(rank, len));
        nccl.broadcast(call("first values", 0), 1, &received.1).unwrap();
        assert_eq!(received.read(), numbers(1, len));

        let message = Values::on_host(ElementType::F32, numbers(rank, len));
        if rank == 0 {
            nccl.send(call("message", 0), 1, &message.1).unwrap();
        } else {
            nccl.recv(call("message", 0), 0, &message.1).unwrap();
        }
        assert_eq!(message.read(), numbers(0, len));

        // Small ones after large ones, in the same scratch.
        let loss = Values::on_host(ElementType::F64, vec![0.25 * rank as f64, 1.0]);
        nccl.all_reduce(call("loss", 0), &loss.1).unwrap();
        assert_eq!(loss.read(), [0.25, 2.0]);
        let (on_device, here) = (
            Values::new(ElementType::F32, numbers(rank, 2)),
            Values::on_host(ElementType::F32, vec![0.0_f32; 1]),
        );
        let mixed = nccl.reduce_scatter(call("parts", 1), &on_device.1, &here.1);
        assert!(mixed.unwrap_err().to_string().contains("are in different memory"));
        nccl.barrier(call("end", 0)).unwrap();
    });
}

#[test]
fn groups_are_of_one_color_and_apart() {
    run(3, PATIENT, true, |nccl, _| {
        let rank = nccl.rank();
        let group = nccl.split(rank % 2).unwrap();
        assert_eq!((group.rank(), group.size()), if rank == 1 { (0, 1) } else { (rank / 2, 2) });
        let buffer = Values::new(ElementType::F32, vec![1.0_f32; 3]);
        // Groups may make different numbers of calls.
        for index in 0..=group.size() {
            group.all_reduce(call("group", index), &buffer.1).unwrap();
        }
        assert_eq!(buffer.read(), [if rank == 1 { 1.0 } else { 8.0 }; 3]);
        group.barrier(call("group", 0)).unwrap();
        nccl.barrier(call("world", 0)).unwrap();
    });
}

#[test]
fn a_call_that_differs_is_named_with_its_rank_at_the_next_comparison() {
    let results = run(3, PATIENT, false, |nccl, _| {
        nccl.enter(Phase::Backward).unwrap();
        let buffer = Values::new(ElementType::F32, vec![1.0_f32; 4]);
        let block = if nccl.rank() == 1 { 4 } else { 3 };
        nccl.all_reduce(call("gradients of block", block), &buffer.1).unwrap();
        nccl.all_reduce(call("gradients of block", 2), &buffer.1).unwrap();
        let result = nccl.barrier(call("end", 0));
        assert!(nccl.barrier(call("after", 0)).is_err(), "a failed group stays failed");
        result
    });
    let calls = [3, 4].map(|block| {
        format!("makes call 0: all-reduce of gradients of block {block} (4 x F32), in phase backward")
    });
    for (rank, text) in texts(results).into_iter().enumerate() {
        let (own, other) = (&calls[usize::from(rank == 1)], &calls[usize::from(rank != 1)]);
        let peer = usize::from(rank != 1);
        assert!(text.contains(&format!("rank {rank} {own}\n  caused by: rank {peer} {other}")), "{text}");
    }
}

#[test]
fn a_message_that_differs_is_named_on_both_sides_before_it_is_sent() {
    for one_process in [false, true] {
        let results = run(2, PATIENT, one_process, |nccl, _| {
            nccl.enter(Phase::Forward).unwrap();
            let buffer = Values::new(ElementType::F32, vec![1.0_f32; 4 + nccl.rank()]);
            let result = match nccl.rank() {
                0 => nccl.send(call("activations", 7), 1, &buffer.1),
                _ => nccl.recv(call("activations", 7), 0, &buffer.1),
            };
            assert!(nccl.barrier(call("after", 0)).is_err(), "a failed group stays failed");
            result
        });
        let calls = [
            "rank 0 makes call 0: send of activations 7 (4 x F32 to rank 1), in phase forward",
            "rank 1 makes call 0: recv of activations 7 (5 x F32 from rank 0), in phase forward",
        ];
        for text in texts(results) {
            assert!(text.starts_with("error: ranks do not make the same call\n"), "{text}");
            assert!(calls.iter().all(|call| text.contains(call)), "{text}");
        }
    }
}

/// A mark that is recorded then is behind the message.
#[test]
fn a_message_is_on_its_stream_when_its_call_returns() {
    run(2, PATIENT, false, |nccl, device| {
        let buffer = Values::new(ElementType::F32, vec![nccl.rank() as f32 + 1.0; 3]);
        device.events();
        // The records go both ways first, the sender's before the other.
        let expected = if nccl.rank() == 0 {
            nccl.send(call("message", 0), 1, &buffer.1).unwrap();
            ["send", "recv", "send"]
        } else {
            nccl.recv(call("message", 0), 0, &buffer.1).unwrap();
            ["recv", "send", "recv"]
        };
        let op = |event| match event {
            FakeEvent::Call { op, .. } => Some(op),
            _ => None,
        };
        let events: Vec<&str> = device.events().into_iter().filter_map(op).collect();
        assert_eq!(events, expected);
        assert_eq!(buffer.read(), [1.0; 3]);
    });
}

/// The real library creates a thread for each call outside of a group.
#[test]
fn gathers_of_one_call_are_one_group_and_one_count() {
    run(3, PATIENT, false, |nccl, device| {
        let rank = nccl.rank();
        let codes = Values::new(ElementType::U8, vec![rank as u8; 4]);
        let scales = Values::new(ElementType::F32, vec![rank as f32; 2]);
        let all_codes = Values::new(ElementType::U8, vec![9_u8; 12]);
        let all_scales = Values::new(ElementType::F32, vec![9_f32; 6]);
        let gathers = [
            Gather { shard: &codes.1, full: &all_codes.1 },
            Gather { shard: &scales.1, full: &all_scales.1 },
        ];
        let (before, traffic) = (threads(), nccl.traffic());
        device.events();
        let ticket = nccl.start_all_gathers(call("values of block", 3), &gathers).unwrap();
        assert_eq!(threads() - before, 1);
        nccl.finish(ticket).unwrap();
        let order = |event| match event {
            FakeEvent::Call { op, lane, .. } => format!("{op} on {lane:?}"),
            FakeEvent::Follow { lane, mark } => format!("{lane:?} after {} of {:?}", mark.calls, mark.lane),
            FakeEvent::Compute(what) => what,
        };
        let expected = [
            "Gather after 0 of Compute",
            "all-gather on Gather",
            "all-gather on Gather",
            "Compute after 2 of Gather",
        ];
        assert_eq!(device.events().into_iter().map(order).collect::<Vec<_>>(), expected);
        assert_eq!(all_codes.read(), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
        assert_eq!(all_scales.read(), [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
        let sent = nccl.traffic().since(&traffic);
        assert_eq!((sent.calls(Op::AllGather), sent.bytes(Op::AllGather)), (1, 24));

        let on_host = Values::on_host(ElementType::F32, vec![rank as f32; 2]);
        let on_device = Values::on_host(ElementType::F32, vec![9_f32; 6]);
        let mixed = [gathers[0], Gather { shard: &on_host.1, full: &on_device.1 }];
        let refused = nccl.start_all_gathers(call("mixed", 0), &mixed).unwrap_err();
        assert!(refused.to_string().contains("are in different memory"), "{refused}");
        assert!(nccl.start_all_gathers(call("nothing", 0), &[]).is_err());
        nccl.barrier(call("end", 0)).unwrap();
    });
}

/// All later calls of the thread would wait for the end of a group that stays open.
#[test]
fn a_refused_message_leaves_no_group_open() {
    let table = library().table;
    assert_eq!(grouped(&table, || NcclStatus::INVALID_USAGE), NcclStatus::INVALID_USAGE);
    assert!(!is_in_group());
    assert_eq!(grouped(&table, || NcclStatus(i32::from(!is_in_group()))), NcclStatus::SUCCESS);
    assert!(!is_in_group());
}

#[test]
fn ranks_on_one_card_get_an_error_that_names_mig() {
    let library = library();
    let id = library.unique_id().unwrap();
    share_card(&id);
    let rank_info = NcclRankInfo { id, rank: 0, size: 2, deadline: PATIENT };
    let error = Nccl::connect(&library, &rank_info, Host::default(), &AbortFlag::new()).unwrap_err();
    assert_eq!((error.what(), error.kind()), ("two ranks use the same GPU", ErrorCategory::User));
    let text = error.to_string();
    assert!(text.contains("rank 0 and rank 1 both on CUDA device 1b000"), "{text}");
    assert!(text.contains("MIG instances of one card cannot be ranks of one run"), "{text}");
}

#[test]
fn a_message_that_nobody_takes_ends_at_the_deadline() {
    let results = run(2, SHORT, false, |nccl, _| {
        let buffer = Values::new(ElementType::F32, vec![1.0_f32; 4]);
        nccl.send(call("activations", 7), 1 - nccl.rank(), &buffer.1)
    });
    let own = |text: &String| text.contains("call 0: send of activations 7 (4 x F32 to rank ");
    let late = |text: &String| own(text) && text.contains("did not begin on all ranks");
    let all = texts(results);
    assert!(all.iter().any(late), "{all:?}");
    assert!(all.iter().all(|text| late(text) || text.contains("another rank stopped")), "{all:?}");
}

#[test]
fn a_failure_ends_a_wait_for_a_message() {
    let results = run(2, PATIENT, true, |nccl, _| {
        let buffer = Values::new(ElementType::F32, vec![1.0_f32; 4]);
        if nccl.rank() == 0 {
            return nccl.recv(call("activations", 7), 1, &buffer.1);
        }
        nccl.enter(Phase::Save).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        nccl.abort("no space left");
        nccl.send(call("activations", 7), 0, &buffer.1)
    });
    for text in texts(results) {
        let wanted = "error: rank 1 failed in phase save\n  caused by: no space left\n  caused by: rank 1: it had made no call";
        assert_eq!(text, wanted);
    }
}

#[test]
fn calls_that_nccl_cannot_match_end_at_the_deadline() {
    let results = run(2, SHORT, false, |nccl, _| {
        let buffer = Values::new(ElementType::F32, vec![1.0_f32; 4 + nccl.rank()]);
        nccl.all_reduce(call("gradients", 7), &buffer.1)
    });
    // The first one ends the wait of the other, which then reports its peer.
    let own = "call 0: all-reduce of gradients 7 (";
    let late = |text: &String| text.contains(own) && text.contains("did not begin on all ranks");
    let all = texts(results);
    assert!(all.iter().any(late), "{all:?}");
    assert!(all.iter().all(|text| late(text) || text.contains("another rank stopped")), "{all:?}");
}

#[test]
fn a_failure_ends_waits_in_this_process_with_its_reason() {
    let results = run(3, PATIENT, true, |nccl, _| {
        if nccl.rank() == 1 {
            nccl.enter(Phase::Save).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            nccl.abort("no space left");
            nccl.abort("said twice");
        }
        nccl.barrier(call("end", 0))
    });
    for text in texts(results) {
        let wanted = "error: rank 1 failed in phase save\n  caused by: no space left\n  caused by: rank 1: it had made no call";
        assert_eq!(text, wanted);
    }
}

#[test]
fn a_failure_ends_waits_in_other_processes() {
    let results = run(2, PATIENT, false, |nccl, _| {
        nccl.barrier(call("start", 0))?;
        if nccl.rank() == 1 {
            nccl.abort("no space left");
        }
        nccl.barrier(call("end", 0))
    });
    let all = texts(results);
    assert!(all[0].contains("another rank stopped"), "{all:?}");
    assert!(all[1].contains("rank 1 failed"), "{all:?}");
}

#[test]
fn a_kernel_that_does_not_end_raises_the_alert() {
    let results = run(2, SHORT, false, |nccl, device| {
        nccl.enter(Phase::Forward).unwrap();
        device.stuck.store(true, Ordering::SeqCst);
        let [shard, full] = [1, 2].map(|n| Values::new(ElementType::F32, vec![1.0_f32; n]));
        let ticket = nccl.start_all_gather(call("weights of block", 5), &shard.1, &full.1)?;
        nccl.finish(ticket)?;
        nccl.barrier(call("end", 0))
    });
    let all = texts(results);
    let stuck = "call 0: all-gather of weights of block 5 (2 x F32), in phase forward did not end in 0 s";
    assert!(all.iter().any(|text| text.contains("waits for other ranks without end")), "{all:?}");
    assert!(all.iter().any(|text| text.contains(stuck)), "{all:?}");
}

#[test]
fn a_rank_that_does_not_come_is_missed_at_the_deadline() {
    let library = library();
    let rank_info = NcclRankInfo { id: library.unique_id().unwrap(), rank: 0, size: 2, deadline: SHORT };
    let error = Nccl::connect(&library, &rank_info, Host::default(), &AbortFlag::new()).unwrap_err();
    assert_eq!(error.what(), "the meeting of the ranks did not begin on all ranks");
}

#[test]
fn misuse_is_refused_before_anything_is_called() {
    run(1, PATIENT, false, |nccl, _| {
        let bytes = Values::new(ElementType::U8, vec![0_u8; 3]);
        let floats = Values::new(ElementType::F32, vec![0.0_f32; 2]);
        assert!(nccl.all_reduce(call("bytes", 0), &bytes.1).is_err());
        assert!(nccl.reduce_scatter(call("full", 0), &floats.1, &bytes.1).is_err());
        assert!(nccl.broadcast(call("bytes", 0), 1, &bytes.1).is_err());
        let first = nccl.start_all_gather(call("one", 0), &bytes.1, &bytes.1).unwrap();
        let second = nccl.start_all_gather(call("two", 0), &bytes.1, &bytes.1).unwrap();
        assert!(nccl.finish(second).is_err(), "out of turn");
        assert!(nccl.finish(first).is_err());
    });
}

/// One process with all ranks, which run `work`.
fn group_info(
    size: usize,
    abort_flag: &Arc<AbortFlag>,
    work: impl Fn(Arc<Nccl<Host>>) -> Result<usize> + Sync,
) -> Result<Vec<usize>, RankFailure> {
    let library = library();
    let group_info = GroupInfo { id: library.unique_id().unwrap(), first: 0, size, deadline: PATIENT };
    let devices = (0..size).map(|_| Host::default()).collect();
    run_ranks(&library, &group_info, devices, abort_flag, |local_rank, end| {
        assert_eq!(local_rank, end.rank());
        work(end)
    })
}

#[test]
fn the_ranks_of_a_process_run_to_their_end() {
    let done = group_info(3, &AbortFlag::new(), |end| {
        let group = end.split(0)?;
        group.barrier(call("group", 0))?;
        Ok(10 * end.rank())
    });
    assert_eq!(done.unwrap(), [0, 10, 20]);
}

#[test]
fn a_rank_that_fails_is_named_with_phase_and_last_call_and_ends_the_others() {
    for panics in [false, true] {
        let begin = std::time::Instant::now();
        let failed = group_info(3, &AbortFlag::new(), |end| {
            // A group that is dropped after a failure: its end must not wait for the others.
            let group = end.split(0)?;
            group.barrier(call("group", 4))?;
            if end.rank() == 1 {
                end.enter(Phase::Save)?;
                assert!(!panics, "a slip");
                return Err(Error::new(ErrorCategory::Storage, "cannot write w").because("no space left"));
            }
            end.barrier(call("end", 0)).map(|()| 0)
        })
        .unwrap_err();
        let text = failed.error.to_string();
        assert!(text.starts_with("error: rank 1 failed in phase save\n  caused by: "), "{text}");
        assert!(text.contains("rank 1: its last call was call 0: barrier of group 4"), "{text}");
        assert!(text.contains(if panics { "a slip" } else { "no space left" }), "{text}");
        assert_eq!(
            failed.error.kind(),
            if panics { ErrorCategory::Transient } else { ErrorCategory::Storage }
        );
        let (rank, why) = failed.own.unwrap();
        assert_eq!(rank, 1);
        assert!(why.starts_with("rank 1 failed in phase save: "), "{why}");
        // No communicator waited for the end of another rank's.
        assert!(begin.elapsed() < communicator::FAREWELL, "{:?}", begin.elapsed());
    }
}

#[test]
fn what_all_ranks_say_alike_is_said_once() {
    let both = std::sync::Barrier::new(2);
    let failed = group_info(2, &AbortFlag::new(), |end| {
        end.barrier(call("start", 0))?;
        // The failure of the first would end the other's call.
        both.wait();
        Err(Error::new(ErrorCategory::Diverged, "the numbers diverged"))
    });
    let failed = failed.unwrap_err();
    assert_eq!(failed.error.to_string(), "error: the numbers diverged");
    assert_eq!(failed.error.kind(), ErrorCategory::Diverged);
}

#[test]
fn a_failure_heard_from_another_process_ends_the_ranks_of_this_one() {
    let abort_flag = AbortFlag::new();
    let heard = Arc::clone(&abort_flag);
    let failed = group_info(2, &abort_flag, move |end| {
        if end.rank() == 0 {
            heard.raise(Error::new(ErrorCategory::Transient, "rank 7 on b failed"));
        }
        loop {
            end.barrier(call("step", 0))?;
        }
    });
    let failed = failed.unwrap_err();
    assert_eq!(failed.error.to_string(), "error: rank 7 on b failed");
    assert!(failed.own.is_none(), "{:?}", failed.own);
}

/// A hung rank ends its peers' calls over NCCL too, with its name.
#[test]
fn a_rank_that_hangs_is_named() {
    let board = Arc::new(ProgressBoard::default());
    let limits =
        HangLimits { floor: HangLimits::FLOOR, timeout: Some(SHORT), on_host: false, holds_all: true };
    let watch = HangWatch::start(&board, limits, |_| ()).unwrap();
    let failed = group_info(2, &AbortFlag::new(), |end| {
        let world = TimedCollective::watched(end, &board);
        let _works = world.work_guard();
        world.enter(Phase::Backward)?;
        if world.rank() == 1 {
            std::thread::sleep(4 * SHORT);
        }
        world.barrier(call("gradients of block", 3)).map(|()| 0)
    });
    let report = watch.stop().unwrap();
    assert_eq!(report.rank, 1);
    assert!(
        report.error.to_string().contains("rank 0 waits in phase backward: barrier of gradients of block 3")
    );
    let text = failed.unwrap_err().error.to_string();
    assert!(text.starts_with("error: rank 1 failed in phase backward"), "{text}");
}
