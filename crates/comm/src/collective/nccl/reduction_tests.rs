//! Reductions in parallel with computation, over the fake: their streams and communicators, and the
//! end by failures.

use std::sync::atomic::Ordering;

use super::fake_nccl::{FakeEvent, FakeGroup, Host};
use super::tests::{PATIENT, SHORT, Values, call, run, texts};
use super::*;
use crate::collective::{Reduction, TimedCollective};
use crate::runtime::buffer::ElementType;

fn values(values: Vec<f32>) -> Values<f32> {
    Values::new(ElementType::F32, values)
}

fn name(lane: CommStream) -> &'static str {
    match lane {
        CommStream::Compute => "compute",
        CommStream::Gather => "gather",
        CommStream::Reduce => "reduce",
    }
}

/// Operations on the streams in words, with a letter per communicator in the order of appearance.
fn asked(device: &Host) -> Vec<String> {
    let mut groups: Vec<Arc<FakeGroup>> = Vec::new();
    let mut events = Vec::new();
    for event in device.events() {
        events.push(match event {
            FakeEvent::Compute(what) => format!("compute: {what}"),
            FakeEvent::Follow { lane, mark } => {
                format!("{} waits for {} {}", name(lane), name(mark.lane), mark.calls)
            }
            FakeEvent::Call { op, lane, group } => {
                let known = groups.iter().position(|known| Arc::ptr_eq(known, &group));
                let at = known.unwrap_or_else(|| {
                    groups.push(group);
                    groups.len() - 1
                });
                format!("{}: {op} on {}", name(lane), ["A", "B", "C", "D"][at])
            }
        });
    }
    events
}

fn scatter<'a>(full: &'a Values<f32>, shard: &'a Values<f32>) -> Reduction<'a> {
    Reduction::ReduceScatter { full: &full.1, shard: &shard.1, replicas: None }
}

#[test]
fn a_block_is_reduced_beside_the_next_one_on_a_stream_and_a_communicator_of_its_own() {
    run(2, PATIENT, true, |nccl, device| {
        assert!(nccl.open_reduction_stream().unwrap());
        assert!(nccl.open_reduction_stream().unwrap(), "again");
        device.events();
        let rank = nccl.rank();
        let mut before: Option<Ticket> = None;
        let mut sums = Vec::new();
        for block in [2, 1, 0] {
            let [part, whole] = [1, 2].map(|n| values(vec![rank as f32; n]));
            let gather = nccl.start_all_gather(call("values of block", block), &part.1, &whole.1).unwrap();
            device.compute(format!("backward of block {block}"));
            let full = values((0..4).map(|i| (10 * block + i + rank) as f32).collect());
            let shard = values(vec![0.0; 2]);
            let of_block = call("gradients of block", block);
            let started = nccl.start_reduction(of_block, scatter(&full, &shard)).unwrap();
            if let Some(before) = before.replace(started.expect("it goes on")) {
                nccl.finish(before).unwrap();
            }
            // In any order with reductions.
            nccl.finish(gather).unwrap();
            assert_eq!(whole.read(), [0.0, 1.0]);
            sums.push((block, shard));
        }
        nccl.finish(before.expect("the last")).unwrap();
        for (block, shard) in sums {
            let first = (20 * block + 4 * rank + 1) as f32;
            assert_eq!(shard.read(), [first, first + 2.0]);
        }
        let expected = [
            "gather waits for compute 0",
            "gather: all-gather on A",
            "compute: backward of block 2",
            "reduce waits for compute 1",
            "reduce: reduce-scatter on B",
            "compute waits for gather 1",
            "gather waits for compute 1",
            "gather: all-gather on A",
            "compute: backward of block 1",
            "reduce waits for compute 2",
            "reduce: reduce-scatter on B",
            // The first buffer is free for block 0, without a wait of the host.
            "compute waits for reduce 1",
            "compute waits for gather 2",
            "gather waits for compute 2",
            "gather: all-gather on A",
            "compute: backward of block 0",
            "reduce waits for compute 3",
            "reduce: reduce-scatter on B",
            "compute waits for reduce 2",
            "compute waits for gather 3",
            "compute waits for reduce 3",
        ];
        assert_eq!(asked(device), expected);
        assert_eq!(nccl.traffic().calls(Op::ReduceScatter), 3);
    });
}

#[test]
fn a_sum_for_what_is_computed_next_stays_on_the_compute_stream() {
    run(2, PATIENT, true, |nccl, device| {
        nccl.open_reduction_stream().unwrap();
        device.events();
        let sum = values(vec![1.0; 2]);
        nccl.all_reduce(call("sum", 0), &sum.1).unwrap();
        assert_eq!(sum.read(), [2.0; 2]);
        assert_eq!(asked(device), ["compute: all-reduce on A"]);
    });
}

#[test]
fn the_stages_of_hsdp_follow_each_other_on_the_communicators_of_two_groups() {
    run(4, PATIENT, true, |nccl, device| {
        let rank = nccl.rank();
        // As in a run, inside a clock.
        let split = |color| TimedCollective::new(Arc::from(nccl.split(color).unwrap()));
        let (replicas, shards) = (split(rank % 2), split(rank / 2));
        let full = values((0..4).map(|i| (i + rank) as f32).collect());
        let shard = values(vec![0.0; 2]);
        let reduction =
            Reduction::ReduceScatter { full: &full.1, shard: &shard.1, replicas: Some(&replicas) };
        let of_block = call("gradients of block", 1);
        // Until both are open, a reduction has finished on return.
        shards.open_reduction_stream().unwrap();
        device.events();
        assert!(shards.start_reduction(of_block, reduction).unwrap().is_none());
        let at = (8 * (rank % 2) + 6) as f32;
        assert_eq!(shard.read(), [at, at + 4.0]);
        assert_eq!(asked(device), ["compute: reduce-scatter on A", "compute: all-reduce on B"]);

        replicas.open_reduction_stream().unwrap();
        device.events();
        let ticket = shards.start_reduction(of_block, reduction).unwrap().expect("it goes on");
        shards.finish(ticket).unwrap();
        assert_eq!(shard.read(), [at, at + 4.0]);
        let expected = [
            "reduce waits for compute 0",
            "reduce: reduce-scatter on A",
            "reduce: all-reduce on B",
            "compute waits for reduce 2",
        ];
        assert_eq!(asked(device), expected);
        nccl.barrier(call("end", 0)).unwrap();
    });
}

#[test]
fn memory_of_the_host_is_summed_on_return() {
    run(2, PATIENT, false, |nccl, device| {
        nccl.open_reduction_stream().unwrap();
        device.events();
        let sum = Values::on_host(ElementType::F32, vec![nccl.rank() as f32 + 1.0; 3]);
        let started = nccl.start_reduction(call("sum", 0), Reduction::AllReduce(&sum.1)).unwrap();
        assert!(started.is_none());
        assert_eq!(sum.read(), [3.0; 3]);
        assert_eq!(asked(device), ["compute: all-reduce on A"]);
    });
}

#[test]
fn misuse_of_the_lane_is_refused() {
    run(1, PATIENT, false, |nccl, _| {
        let [one, two] = [1.0, 2.0].map(|x| values(vec![x; 2]));
        let started = nccl.start_reduction(call("sum", 0), Reduction::AllReduce(&one.1)).unwrap();
        assert!(started.is_none(), "the lane is not open");
        let gather = nccl.start_all_gather(call("values", 0), &one.1, &two.1).unwrap();
        assert!(nccl.open_reduction_stream().is_err(), "beside a gather");
        nccl.finish(gather).unwrap();
        nccl.open_reduction_stream().unwrap();
        let start = |sum: &Values<f32>, index| {
            nccl.start_reduction(call("sum", index), Reduction::AllReduce(&sum.1))
                .unwrap()
                .expect("it goes on")
        };
        let (first, second) = (start(&one, 1), start(&two, 2));
        let gather = nccl.start_all_gather(call("values", 3), &one.1, &two.1).unwrap();
        nccl.finish(gather).unwrap();
        assert!(nccl.finish(second).is_err(), "out of turn");
        assert!(nccl.finish(first).is_err());
    });
}

/// Communicators of these events.
fn groups(events: Vec<FakeEvent>) -> Vec<Arc<FakeGroup>> {
    let group = |event| match event {
        FakeEvent::Call { group, .. } => Some(group),
        _ => None,
    };
    events.into_iter().filter_map(group).collect()
}

#[test]
fn a_failure_on_one_communicator_aborts_the_others() {
    let results = run(2, SHORT, false, |nccl, device| {
        let group = nccl.split(0).unwrap();
        nccl.open_reduction_stream().unwrap();
        group.open_reduction_stream().unwrap();
        device.events();
        nccl.enter(Phase::Backward).unwrap();
        let [shard, full] = [1, 2].map(|n| values(vec![1.0; n]));
        let [sum, other] = [4, 4 + nccl.rank()].map(|n| values(vec![1.0; n]));
        // Each of the four is used once.
        let mut tickets = Vec::new();
        for end in [nccl as &dyn Collective, &*group] {
            tickets.push((end, end.start_all_gather(call("values of block", 1), &shard.1, &full.1).unwrap()));
            let started = end.start_reduction(call("gradients of block", 2), Reduction::AllReduce(&sum.1));
            tickets.push((end, started.unwrap().unwrap()));
        }
        let used = groups(device.events());
        assert_eq!(used.len(), 4);
        assert!(used.iter().enumerate().all(|(i, one)| !used[..i].iter().any(|two| Arc::ptr_eq(one, two))));
        assert!(used.iter().all(|group| !group.is_aborted()));
        let failed = nccl.start_reduction(call("gradients of block", 1), Reduction::AllReduce(&other.1));
        assert!(used.iter().all(|group| group.is_aborted()), "rank {}", nccl.rank());
        assert!(tickets.into_iter().all(|(end, ticket)| end.finish(ticket).is_err()));
        assert!(group.barrier(call("after", 0)).is_err() && nccl.barrier(call("after", 0)).is_err());
        failed.map(drop)
    });
    let own = "all-reduce of gradients of block 1 (";
    let late = |text: &String| text.contains(own) && text.contains("did not begin on all ranks");
    let all = texts(results);
    assert!(all.iter().any(late), "{all:?}");
    assert!(all.iter().all(|text| late(text) || text.contains("another rank stopped")), "{all:?}");
}

#[test]
fn a_reduction_that_does_not_end_raises_the_alert() {
    let results = run(2, SHORT, false, |nccl, device| {
        nccl.open_reduction_stream()?;
        nccl.enter(Phase::Backward)?;
        device.stuck.store(true, Ordering::SeqCst);
        let [shard, full] = [1, 2].map(|n| values(vec![1.0; n]));
        let ticket = nccl.start_reduction(call("gradients of block", 5), scatter(&full, &shard))?;
        nccl.finish(ticket.expect("it goes on"))?;
        nccl.barrier(call("end", 0))
    });
    let all = texts(results);
    let stuck = "reduce-scatter of gradients of block 5 (2 x F32), in phase backward did not end in 0 s";
    assert!(all.iter().any(|text| text.contains("waits for other ranks without end")), "{all:?}");
    assert!(all.iter().any(|text| text.contains(stuck)), "{all:?}");
}

#[test]
fn a_failure_elsewhere_ends_a_reduction_that_waits() {
    let results = run(2, PATIENT, true, |nccl, _| {
        nccl.open_reduction_stream()?;
        let sum = values(vec![1.0; 2]);
        if nccl.rank() == 1 {
            nccl.enter(Phase::Save)?;
            std::thread::sleep(Duration::from_millis(50));
            nccl.abort("no space left");
        }
        nccl.start_reduction(call("gradients of block", 0), Reduction::AllReduce(&sum.1)).map(drop)
    });
    for text in texts(results) {
        assert!(text.starts_with("error: rank 1 failed in phase save\n  caused by: no space left"), "{text}");
    }
}
