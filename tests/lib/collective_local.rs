//! The in-process collectives: every operation against a plain sum in order, mismatched calls,
//! ranks that fail in every phase, counted bytes. Ranks are threads; `within` fails a test that
//! hangs.

use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use finetune::collective::in_process::{
    InProcess, InProcessWorld, InjectedFault, InjectedFaultKind, run_ranks,
};
use finetune::collective::{Call, Collective, Gather, Op, Operation, Phase, Reduction};
use finetune::error::{Error, ErrorCategory, Result};
use finetune::runtime::buffer::{Buffer, ElementType};
use half::bf16;
use proptest::prelude::*;

const HANG: Duration = Duration::from_secs(240);

/// Runs `test` and fails if it hangs.
fn within<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    let thread = std::thread::spawn(move || send.send(test()));
    match receive.recv_timeout(HANG) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the ranks hang"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().map(|_| ()).unwrap_err())
        }
    }
}

fn call(index: usize) -> Call {
    Call { what: "gradients of block", index }
}

/// Element types of the tests.
trait Value: Copy + Debug + PartialEq + Send + Sync + 'static {
    const ELEMENT: ElementType;
    /// Returns a small or large number of either sign, so that the order of a sum shows.
    fn random(bits: u64) -> Self;
    /// Returns the sum in this order.
    fn sum(values: &[Self]) -> Self;
}

/// Returns a number with random sign and digits, and magnitude from 2^-8 to 2^24.
fn spread(bits: u64) -> f64 {
    let exponent = 1023 - 8 + (bits >> 1 & 31);
    f64::from_bits(bits << 63 | exponent << 52 | bits >> 12)
}

impl Value for f32 {
    const ELEMENT: ElementType = ElementType::F32;
    fn random(bits: u64) -> Self {
        spread(bits) as f32
    }
    fn sum(values: &[Self]) -> Self {
        values.iter().copied().reduce(|sum, x| sum + x).unwrap()
    }
}

impl Value for f64 {
    const ELEMENT: ElementType = ElementType::F64;
    fn random(bits: u64) -> Self {
        spread(bits)
    }
    fn sum(values: &[Self]) -> Self {
        values.iter().copied().reduce(|sum, x| sum + x).unwrap()
    }
}

impl Value for bf16 {
    const ELEMENT: ElementType = ElementType::Bf16;
    fn random(bits: u64) -> Self {
        bf16::from_f64(spread(bits))
    }
    fn sum(values: &[Self]) -> Self {
        bf16::from_f32(values.iter().map(|x| x.to_f32()).reduce(|sum, x| sum + x).unwrap())
    }
}

impl Value for u8 {
    const ELEMENT: ElementType = ElementType::U8;
    fn random(bits: u64) -> Self {
        (bits >> 40) as u8
    }
    fn sum(values: &[Self]) -> Self {
        values.iter().fold(0, |sum, x| x.wrapping_add(sum))
    }
}

/// Returns the `i`th number of `rank`.
fn value<T: Value>(seed: u64, rank: usize, i: usize) -> T {
    let mut bits = seed ^ (rank as u64) << 48 ^ (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..2 {
        bits = (bits ^ bits >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    T::random(bits ^ bits >> 29)
}

fn values<T: Value>(seed: u64, rank: usize, elements: usize) -> Vec<T> {
    (0..elements).map(|i| value(seed, rank, i)).collect()
}

fn sums<T: Value>(seed: u64, ranks: usize, elements: usize) -> Vec<T> {
    let sum = |i| T::sum(&(0..ranks).map(|rank| value(seed, rank, i)).collect::<Vec<T>>());
    (0..elements).map(sum).collect()
}

/// Returns memory that holds `values`.
fn memory<T: Value>(mut values: Vec<T>) -> Buffer {
    let (address, elements) = (values.as_mut_ptr().expose_provenance(), values.len());
    // SAFETY: the vector keeps its address and is accessed through this memory alone.
    unsafe { Buffer::new(address, elements, T::ELEMENT, Arc::new(values)) }
}

/// Returns a part of another memory.
fn view<T: Value>(of: &Buffer, from: usize, elements: usize) -> Buffer {
    assert!(from + elements <= of.elements());
    let address = of.address() + from * T::ELEMENT.bytes();
    // SAFETY: inside `of`, which owns the memory.
    unsafe { Buffer::new(address, elements, T::ELEMENT, Arc::new(of.clone())) }
}

fn read<T: Value>(memory: &Buffer) -> Vec<T> {
    let begin = std::ptr::with_exposed_provenance::<T>(memory.address());
    // SAFETY: created by `memory` or `view` with this type; no collective uses it now.
    (0..memory.elements()).map(|i| unsafe { begin.add(i).read() }).collect()
}

fn zeros<T: Value>(elements: usize) -> Buffer {
    memory(vec![T::random(0); elements])
}

fn write<T: Value>(memory: &Buffer, x: T) {
    let begin = std::ptr::with_exposed_provenance_mut::<T>(memory.address());
    for i in 0..memory.elements() {
        // SAFETY: as in `read`.
        unsafe { begin.add(i).write(x) };
    }
}

fn sums_are_exact<T: Value>(size: usize, elements: usize, seed: u64) {
    let run = move |end: InProcess| {
        let rank = end.rank();
        let buffer = memory(values::<T>(seed, rank, elements));
        end.all_reduce(call(0), &buffer)?;
        assert_eq!(read::<T>(&buffer), sums::<T>(seed, size, elements), "all_reduce");

        let full = elements * size;
        let expected = sums::<T>(seed, size, full)[rank * elements..(rank + 1) * elements].to_vec();
        let data = memory(values::<T>(seed, rank, full));
        let shard = zeros::<T>(elements);
        end.reduce_scatter(call(1), &data, &shard)?;
        assert_eq!(read::<T>(&shard), expected, "reduce_scatter");
        assert_eq!(read::<T>(&data), values::<T>(seed, rank, full), "reduce_scatter writes its shard alone");
        end.reduce_scatter(call(2), &data, &view::<T>(&data, rank * elements, elements))?;
        assert_eq!(read::<T>(&data)[rank * elements..(rank + 1) * elements], expected, "in place");
        Ok(())
    };
    within(move || run_ranks(InProcessWorld::new(size).communicators(), run)).unwrap();
}

fn moves_are_exact<T: Value>(size: usize, elements: usize, seed: u64) {
    let run = move |end: InProcess| {
        let rank = end.rank();
        let all: Vec<T> = (0..size).flat_map(|rank| values::<T>(seed, rank, elements)).collect();
        let shard = memory(values::<T>(seed, rank, elements));
        let full = zeros::<T>(elements * size);
        let in_place = zeros::<T>(elements * size);
        let own_part = view::<T>(&in_place, rank * elements, elements);
        let ticket = end.start_all_gather(call(0), &shard, &full)?;
        end.finish(ticket)?;
        assert_eq!(read::<T>(&full), all, "all_gather");
        let bytes = elements * T::ELEMENT.bytes();
        let (from, to) = (shard.address(), own_part.address());
        // SAFETY: two memories of this size.
        unsafe {
            std::ptr::copy_nonoverlapping(
                std::ptr::with_exposed_provenance::<u8>(from),
                std::ptr::with_exposed_provenance_mut::<u8>(to),
                bytes,
            );
        }
        let ticket = end.start_all_gather(call(1), &own_part, &in_place)?;
        end.finish(ticket)?;
        assert_eq!(read::<T>(&in_place), all, "all_gather in place");
        for root in 0..size {
            let buffer = memory(values::<T>(seed, rank, elements));
            end.broadcast(call(root), root, &buffer)?;
            assert_eq!(read::<T>(&buffer), values::<T>(seed, root, elements), "broadcast from {root}");
        }
        for (from, to) in (0..size).flat_map(|from| (0..size).map(move |to| (from, to))) {
            let buffer = memory(values::<T>(seed, rank, elements));
            let mut holds = rank;
            if from != to && rank == from {
                end.send(call(from), to, &buffer)?;
            } else if from != to && rank == to {
                end.recv(call(from), from, &buffer)?;
                holds = from;
            }
            assert_eq!(read::<T>(&buffer), values::<T>(seed, holds, elements), "sent from {from} to {to}");
        }
        end.barrier(call(0))
    };
    within(move || run_ranks(InProcessWorld::new(size).communicators(), run)).unwrap();
}

/// Short lengths, and some beyond a page, beyond a tile, and with partial tiles.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0..70_usize, 1 => 1000..1100_usize, 1 => 4000..9000_usize]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn sums_equal_one_rank_adding_in_order(size in 1..=5_usize, elements in lengths(), seed: u64) {
        sums_are_exact::<f32>(size, elements, seed);
        sums_are_exact::<f64>(size, elements, seed);
        sums_are_exact::<bf16>(size, elements, seed);
    }

    #[test]
    fn gathers_and_broadcasts_copy(size in 1..=5_usize, elements in lengths(), seed: u64) {
        moves_are_exact::<u8>(size, elements, seed);
        moves_are_exact::<bf16>(size, elements, seed);
        moves_are_exact::<f32>(size, elements, seed);
        moves_are_exact::<f64>(size, elements, seed);
    }

    #[test]
    fn sums_across_groups_are_in_the_order_of_the_world(
        shards in 1..=3_usize, replicas in 1..=3_usize, elements in lengths(), apart: bool, in_place: bool, seed: u64,
    ) {
        across_is_exact::<f32>(shards, replicas, elements, (apart, in_place), seed);
        across_is_exact::<bf16>(shards, replicas, elements, (apart, in_place), seed);
    }
}

/// Sums `full` over `group`, and the shards over `replicas`.
fn across(
    group: &dyn Collective,
    call: Call,
    replicas: &dyn Collective,
    full: &Buffer,
    shard: &Buffer,
) -> Result<()> {
    let reduction = Reduction::ReduceScatter { full, shard, replicas: Some(replicas) };
    group.call(call, Operation::Reduce(reduction)).map(drop)
}

/// Checks the sum across groups; with `apart` a group's ranks are not neighbours.
fn across_is_exact<T: Value>(
    shards: usize,
    replicas: usize,
    elements: usize,
    (apart, in_place): (bool, bool),
    seed: u64,
) {
    let run = move |end: InProcess| {
        let rank = end.rank();
        let (group, member) =
            if apart { (rank % replicas, rank / replicas) } else { (rank / shards, rank % shards) };
        let inner = end.split(group)?;
        let outer = end.split(member)?;
        assert_eq!((inner.rank(), inner.size()), (member, shards));
        assert_eq!((outer.rank(), outer.size()), (group, replicas));
        let full = memory(values::<T>(seed, rank, elements * shards));
        let shard =
            if in_place { view::<T>(&full, member * elements, elements) } else { zeros::<T>(elements) };
        across(&*inner, call(7), &*outer, &full, &shard)?;
        let expected = sums::<T>(seed, shards * replicas, elements * shards);
        assert_eq!(read::<T>(&shard), expected[member * elements..(member + 1) * elements]);
        // Counts the bytes of the two calls that it replaces.
        let bytes = (elements * T::ELEMENT.bytes()) as u64;
        assert_eq!(inner.traffic().bytes(Op::ReduceScatter), bytes * (shards as u64 - 1));
        assert_eq!(inner.traffic().total_bytes(), inner.traffic().bytes(Op::ReduceScatter));
        assert_eq!(
            outer.traffic().bytes(Op::AllReduce),
            2 * (bytes / replicas as u64) * (replicas as u64 - 1)
        );
        assert_eq!((inner.traffic().calls(Op::ReduceScatter), outer.traffic().calls(Op::AllReduce)), (1, 1));
        assert_eq!(
            end.rank_traffic().total_bytes(),
            inner.traffic().total_bytes() + outer.traffic().total_bytes()
        );
        assert_eq!(end.traffic().total_bytes(), 0);
        Ok(())
    };
    within(move || run_ranks(InProcessWorld::new(shards * replicas).communicators(), run)).unwrap();
}

#[test]
fn the_order_of_a_sum_shows() {
    // In f32 ((1e8 + 1) - 1e8) is 0 and (1e8 - 1e8) + 1 is 1; -0.0 alone stays; bf16 is rounded
    // once.
    for elements in [1, 5000] {
        let run = move |end: InProcess| {
            let rank = end.rank();
            let large = memory(vec![[1e8_f32, 1.0, -1e8][rank]; elements]);
            let zero = memory(vec![-0.0_f32; elements]);
            let small = memory(vec![bf16::from_f32([256.0, 1.0, 1.0][rank]); elements]);
            end.all_reduce(call(0), &large)?;
            end.all_reduce(call(1), &zero)?;
            end.all_reduce(call(2), &small)?;
            assert_eq!(read::<f32>(&large), vec![0.0; elements]);
            assert!(read::<f32>(&zero).iter().all(|x| x.to_bits() == (-0.0_f32).to_bits()));
            assert_eq!(read::<bf16>(&small), vec![bf16::from_f32(258.0); elements]);
            Ok(())
        };
        within(move || run_ranks(InProcessWorld::new(3).communicators(), run)).unwrap();
    }
}

#[test]
fn gathers_stay_in_flight_while_others_are_summed() {
    const ELEMENTS: usize = 1500;
    let run = |end: InProcess| {
        let (rank, size) = (end.rank(), end.size());
        let shards: Vec<Buffer> = (0..6).map(|block| memory(values::<f32>(block, rank, ELEMENTS))).collect();
        let fulls: Vec<Buffer> = shards.iter().map(|_| zeros::<f32>(ELEMENTS * size)).collect();
        let expect = |block: usize| {
            let all = (0..size).flat_map(|rank| values::<f32>(block as u64, rank, ELEMENTS));
            assert_eq!(read::<f32>(&fulls[block]), all.collect::<Vec<_>>());
        };
        let mut tickets = std::collections::VecDeque::new();
        for block in 0..3 {
            tickets.push_back(end.start_all_gather(call(block), &shards[block], &fulls[block])?);
        }
        for block in 0..6 {
            end.finish(tickets.pop_front().unwrap())?;
            expect(block);
            if block < 3 {
                let next = block + 3;
                tickets.push_back(end.start_all_gather(call(next), &shards[next], &fulls[next])?);
            }
            let data = memory(values::<f32>(99, rank, ELEMENTS * size));
            let shard = zeros::<f32>(ELEMENTS);
            end.reduce_scatter(call(block), &data, &shard)?;
            let expected = sums::<f32>(99, size, ELEMENTS * size);
            assert_eq!(read::<f32>(&shard), expected[rank * ELEMENTS..(rank + 1) * ELEMENTS]);
            let sum = memory(vec![rank as f64]);
            end.all_reduce(call(block), &sum)?;
            assert_eq!(read::<f64>(&sum), [(size * (size - 1) / 2) as f64]);
        }
        Ok(())
    };
    for size in [1, 2, 3, 4] {
        within(move || run_ranks(InProcessWorld::new(size).communicators(), run)).unwrap();
    }
}

#[test]
fn a_shard_may_be_written_after_an_all_reduce_or_barrier_though_peers_have_not_finished() {
    let run = |end: InProcess| {
        for round in 0..50 {
            let shard = memory(vec![end.rank() as f32; 3000]);
            let full = zeros::<f32>(3000 * end.size());
            let ticket = end.start_all_gather(call(round), &shard, &full)?;
            if round % 2 == 0 {
                end.barrier(call(round))?;
            } else {
                end.all_reduce(call(round), &zeros::<f64>(1))?;
            }
            write(&shard, -1.0_f32);
            drop(shard);
            end.finish(ticket)?;
            let expected: Vec<f32> = (0..end.size()).flat_map(|rank| vec![rank as f32; 3000]).collect();
            assert_eq!(read::<f32>(&full), expected);
        }
        Ok(())
    };
    within(move || run_ranks(InProcessWorld::new(3).communicators(), run)).unwrap();
}

#[test]
fn gathers_finished_out_of_order_are_refused() {
    for size in [1, 2] {
        let run = |end: InProcess| {
            let (shard, full) = (zeros::<f32>(4), zeros::<f32>(4 * end.size()));
            let first = end.start_all_gather(call(0), &shard, &full)?;
            let second = end.start_all_gather(call(1), &shard, &full)?;
            let error = end.finish(second).unwrap_err();
            assert_eq!(error.what(), "gathers are finished in the order in which they were started");
            end.finish(first)
        };
        within(move || run_ranks(InProcessWorld::new(size).communicators(), run)).unwrap();
    }
}

/// Gathers of one call move the bits of gathers of their own, and count as one call.
#[test]
fn gathers_of_one_call_equal_single_ones() {
    for size in [1, 2, 3] {
        let run = move |end: InProcess| {
            let codes = memory(values::<u8>(5, end.rank(), 37));
            let scales = memory(values::<f32>(6, end.rank(), 9001));
            let single = (zeros::<u8>(37 * size), zeros::<f32>(9001 * size));
            let first = end.start_all_gather(call(0), &codes, &single.0)?;
            let second = end.start_all_gather(call(0), &scales, &single.1)?;
            end.finish(first)?;
            end.finish(second)?;
            let before = end.traffic();
            let together = (zeros::<u8>(37 * size), zeros::<f32>(9001 * size));
            let gathers =
                [Gather { shard: &codes, full: &together.0 }, Gather { shard: &scales, full: &together.1 }];
            let ticket = end.start_all_gathers(call(1), &gathers)?;
            let next = end.start_all_gather(call(2), &codes, &single.0)?;
            end.finish(ticket)?;
            end.finish(next)?;
            assert_eq!(read::<u8>(&together.0), read::<u8>(&single.0));
            assert_eq!(read::<f32>(&together.1), read::<f32>(&single.1));
            let sent = end.traffic().since(&before);
            assert_eq!(sent.calls(Op::AllGather), 2, "two starts");
            let others = size as u64 - 1;
            assert_eq!(sent.bytes(Op::AllGather), others * (37 + 4 * 9001 + 37));
            assert!(end.start_all_gathers(call(3), &[]).is_err(), "nothing to gather");
            end.barrier(call(4))
        };
        within(move || run_ranks(InProcessWorld::new(size).communicators(), run)).unwrap();
    }
}

/// performance.md 2.4: bytes sent per rank and optimizer step, for `P` parameters in `blocks`
/// buckets and `A` micro-batches.
#[test]
fn bytes_equal_the_formulas() {
    const BLOCKS: usize = 3;
    const A: u64 = 4;
    for n in [1_u64, 2, 3, 4] {
        let size = n as usize;
        let block = 60 * size;
        let p = (BLOCKS * block) as u64;
        let (b_p, b_g) = (2, 4);
        // r P b in whole bytes, for P is a multiple of N.
        let r = move |bytes: u64| bytes / n * (n - 1);
        let run = move |end: InProcess| {
            let grads = zeros::<f32>(block);
            let grad_shard = zeros::<f32>(block / size);
            let params = zeros::<bf16>(block);
            let param_shard = zeros::<bf16>(block / size);
            let gather = |index| {
                let ticket = end.start_all_gather(call(index), &param_shard, &params)?;
                end.finish(ticket)
            };
            let scatter = |index| end.reduce_scatter(call(index), &grads, &grad_shard);
            let sent = || end.traffic().total_bytes();

            for index in 0..BLOCKS {
                end.all_reduce(call(index), &grads)?;
            }
            let ddp = sent();
            assert_eq!(ddp, 2 * r(p * b_g));
            assert_eq!(end.traffic().calls(Op::AllReduce), BLOCKS as u64);

            (0..BLOCKS).try_for_each(scatter)?;
            (0..BLOCKS).try_for_each(gather)?;
            let zero1 = sent() - ddp;
            assert_eq!(zero1, r(p * (b_g + b_p)));

            for _ in 0..A {
                (0..BLOCKS).try_for_each(gather)?;
                (0..BLOCKS).rev().try_for_each(|index| gather(index).and_then(|()| scatter(index)))?;
            }
            assert_eq!(sent() - ddp - zero1, A * r(p * (2 * b_p + b_g)));
            assert_eq!(end.traffic().calls(Op::AllGather), BLOCKS as u64 * (1 + 2 * A));

            let before = sent();
            end.barrier(call(0))?;
            assert_eq!(sent(), before);
            end.broadcast(call(0), 0, &params)?;
            let root = if end.rank() == 0 { (n - 1) * block as u64 * b_p } else { 0 };
            assert_eq!(sent() - before, root);

            let before = end.traffic();
            if n > 1 && end.rank() == 0 {
                end.send(call(0), 1, &params)?;
            } else if end.rank() == 1 {
                end.recv(call(0), 0, &params)?;
            }
            let message = end.traffic().since(&before);
            let [sends, receives] = [0, 1].map(|rank| u64::from(n > 1 && end.rank() == rank));
            assert_eq!([message.calls(Op::Send), message.calls(Op::Recv)], [sends, receives]);
            assert_eq!(message.bytes(Op::Send), sends * block as u64 * b_p);
            assert_eq!(message.total_bytes(), message.bytes(Op::Send));
            assert_eq!(end.rank_traffic(), end.traffic());
            Ok(())
        };
        within(move || run_ranks(InProcessWorld::new(size).communicators(), run)).unwrap();
    }
}

#[test]
fn groups_within_groups() {
    let run = |end: InProcess| {
        let half = end.subgroup(usize::from(end.rank() >= 4))?;
        let pair = half.subgroup(10 + half.rank() % 2)?;
        assert_eq!((half.size(), pair.size(), pair.world_rank()), (4, 2, end.rank()));
        let sum = memory(vec![end.rank() as f64]);
        pair.all_reduce(call(0), &sum)?;
        // Pairs are 0 and 2, 1 and 3, 4 and 6, 5 and 7.
        let first = (end.rank() & !2) as f64;
        assert_eq!(read::<f64>(&sum), [2.0 * first + 2.0]);
        half.all_reduce(call(1), &sum)?;
        end.all_reduce(call(2), &sum)?;
        // Each half sums its pairs' sums, and all members of both add up: 4 (2 (0+1+2+3) + 2
        // (4+5+6+7)).
        assert_eq!(read::<f64>(&sum), [224.0]);
        assert_eq!(end.rank_traffic().calls(Op::AllReduce), 3);
        Ok(())
    };
    within(move || run_ranks(InProcessWorld::new(8).communicators(), run)).unwrap();
}

#[test]
fn messages_come_in_their_order_and_leave_the_groups_alone() {
    let run = |end: InProcess| {
        // Members 0 and 1 of one group are ranks 0 and 2.
        let sub = end.subgroup(end.rank() % 2)?;
        match end.rank() {
            0 => {
                for index in 0..100 {
                    end.send(call(index), 2, &memory(vec![index as f32; 1 + index]))?;
                    sub.send(call(index), 1, &memory(vec![2.0 * index as f32; 2000]))?;
                }
            }
            2 => {
                for index in 0..100 {
                    let [one, two] = [zeros::<f32>(1 + index), zeros::<f32>(2000)];
                    end.recv(call(index), 0, &one)?;
                    sub.recv(call(index), 0, &two)?;
                    assert_eq!(read::<f32>(&one), vec![index as f32; 1 + index]);
                    assert_eq!(read::<f32>(&two), vec![2.0 * index as f32; 2000]);
                }
            }
            _ => {}
        }
        // Rank 1 arrives at once; like for every rank, its call is the second of the world.
        end.barrier(call(0))?;
        assert_eq!(end.rank_traffic().calls(Op::Send), if end.rank() == 0 { 200 } else { 0 });
        Ok(())
    };
    within(move || run_ranks(InProcessWorld::new(3).communicators(), run)).unwrap();
}

#[test]
fn messages_that_do_not_match_name_both_sides() {
    let send = |end: &InProcess| end.send(call(3), 1, &zeros::<f32>(4096));
    let expect = |error: Error, two: &str| {
        assert_eq!(error.what().replace("1 and 0", "0 and 1"), "ranks 0 and 1 do not make the same call");
        let said = error.causes().join("; ");
        assert!(said.contains("rank 0 calls send of gradients of block 3 (4096 f32) to rank 1"), "{said}");
        assert!(said.contains(&format!("rank 1 calls recv of {two} from rank 0")), "{said}");
        assert!(said.contains("as its call no 1 from rank 0 to rank 1"), "{said}");
    };
    let recv = |index, buffer: fn() -> Buffer| move |end: &InProcess| end.recv(call(index), 0, &buffer());
    expect(mismatch(send, recv(3, || zeros::<f32>(10))), "gradients of block 3 (10 f32)");
    expect(mismatch(send, recv(3, || zeros::<bf16>(4096))), "gradients of block 3 (4096 bf16)");
    expect(mismatch(send, recv(4, || zeros::<f32>(4096))), "gradients of block 4 (4096 f32)");

    let apart = |error: Error, two: &str| {
        assert_eq!(error.what(), "the ranks wait for one another in different calls");
        let said = error.causes().join("; ");
        assert!(said.contains("its last call was no 1 from rank 0 to rank 1, send of"), "{said}");
        assert!(said.contains(two), "{said}");
    };
    let other = |end: &InProcess| end.send(call(3), 0, &zeros::<f32>(4096));
    apart(mismatch(send, other), "its last call was no 1 from rank 1 to rank 0, send of");
    apart(mismatch(send, |end| end.barrier(call(3))), "its last call was no 2, barrier of gradients");
}

#[test]
fn a_rank_that_waits_for_a_message_learns_of_failures() {
    for sends in [false, true] {
        let wait = move |end: &InProcess| {
            let buffer = zeros::<f32>(5000);
            if sends { end.send(call(7), 1, &buffer) } else { end.recv(call(7), 1, &buffer) }
        };
        let run = move |end: InProcess| {
            end.enter(Phase::Forward)?;
            match end.rank() {
                0 => wait(&end),
                1 => end.enter(Phase::Save),
                _ => end.barrier(call(8)),
            }
        };
        for (kind, what) in [
            (InjectedFaultKind::Error, "rank 1 failed in phase save"),
            (InjectedFaultKind::Panic, "rank 1 failed in phase save"),
            (InjectedFaultKind::Exit, "rank 1 left in phase save"),
        ] {
            let fault = InjectedFault { rank: 1, phase: Phase::Save, occurrence: 1, kind };
            let world = InProcessWorld::new(3).with_fault(fault);
            let error = within(move || run_ranks(world.communicators(), run)).unwrap_err();
            assert_eq!((error.what(), error.kind()), (what, ErrorCategory::Transient), "{error}");
        }
        // A rank that returns without sending the message is named as well.
        let error = within(move || run_ranks(InProcessWorld::new(2).communicators(), run)).unwrap_err();
        assert_eq!(error.what(), "rank 1 left in phase save", "{error}");
    }
}

/// Returns the error that both of two ranks get if they make different calls.
fn mismatch(
    rank_0: impl Fn(&InProcess) -> Result<()> + Send + Sync + 'static,
    rank_1: impl Fn(&InProcess) -> Result<()> + Send + Sync + 'static,
) -> Error {
    within(move || {
        let (send, receive) = mpsc::channel();
        let run = |end: InProcess| {
            end.enter(Phase::Backward)?;
            end.barrier(call(0))?;
            let result = if end.rank() == 0 { rank_0(&end) } else { rank_1(&end) };
            // A rank that was not waiting gets the error from its next call.
            let error = result.and_then(|()| end.barrier(call(9))).unwrap_err();
            let text = error.to_string();
            send.send(text).unwrap();
            assert_eq!(end.barrier(call(1)).unwrap_err().to_string(), error.to_string());
            Err::<(), Error>(error)
        };
        let error = run_ranks(InProcessWorld::new(2).communicators(), run).unwrap_err();
        let texts: Vec<String> = receive.try_iter().collect();
        assert_eq!(texts, [error.to_string(), error.to_string()]);
        assert_eq!(error.kind(), ErrorCategory::Internal);
        error
    })
}

#[test]
fn calls_that_do_not_match_name_both_ranks_and_both_calls() {
    let reduce = |end: &InProcess| end.all_reduce(call(3), &zeros::<f32>(4096));
    let named = "gradients of block 3 (4096 f32)";
    let expect = |error: Error, one: &str, two: &str| {
        assert_eq!(error.what().replace("1 and 0", "0 and 1"), "ranks 0 and 1 do not make the same call");
        let said = error.causes().join("; ");
        assert!(said.contains(&format!("rank 0 calls {one}")), "{said}");
        assert!(said.contains(&format!("rank 1 calls {two}")), "{said}");
        assert!(said.contains("as its call no 2"), "{said}");
    };
    let one = format!("all_reduce of {named}");
    expect(mismatch(reduce, |end| end.barrier(call(3))), &one, "barrier of gradients of block 3");
    expect(
        mismatch(reduce, |end| end.all_reduce(call(4), &zeros::<f32>(4096))),
        &one,
        "all_reduce of gradients of block 4 (4096 f32)",
    );
    expect(
        mismatch(reduce, |end| end.all_reduce(Call { what: "norm of", index: 3 }, &zeros::<f32>(4096))),
        &one,
        "all_reduce of norm of 3 (4096 f32)",
    );
    expect(
        mismatch(reduce, |end| end.all_reduce(call(3), &zeros::<bf16>(4096))),
        &one,
        "all_reduce of gradients of block 3 (4096 bf16)",
    );
    expect(
        mismatch(reduce, |end| end.all_reduce(call(3), &zeros::<f32>(10))),
        &one,
        "all_reduce of gradients of block 3 (10 f32)",
    );
    expect(
        mismatch(reduce, |end| end.reduce_scatter(call(3), &zeros::<f32>(4096), &zeros::<f32>(2048))),
        &one,
        &format!("reduce_scatter of {named}"),
    );
    expect(
        mismatch(reduce, |end| {
            let ticket = end.start_all_gather(call(3), &zeros::<f32>(2048), &zeros::<f32>(4096))?;
            end.finish(ticket)
        }),
        &one,
        &format!("all_gather of {named}"),
    );
    expect(mismatch(reduce, |end| end.subgroup(0).map(drop)), &one, "split of ranks 0");
    for elements in [3, 4096] {
        let broadcast =
            move |root| move |end: &InProcess| end.broadcast(call(0), root, &zeros::<u8>(elements));
        let said = |root| format!("broadcast of gradients of block 0 ({elements} u8) from rank {root}");
        expect(mismatch(broadcast(0), broadcast(1)), &said(0), &said(1));
    }
}

#[test]
fn calls_in_another_order_of_groups_are_told_and_not_waited_for() {
    let run = |end: InProcess| {
        let sub = end.subgroup(usize::from(end.rank() == 2))?;
        if end.rank() == 0 {
            end.barrier(call(5))?;
            sub.barrier(call(6))
        } else {
            sub.barrier(call(6))?;
            end.barrier(call(5))
        }
    };
    let error = within(move || run_ranks(InProcessWorld::new(3).communicators(), run)).unwrap_err();
    assert_eq!(error.what(), "the ranks wait for one another in different calls");
    assert_eq!(
        error.causes(),
        [
            "rank 0 waits, 0 B sent; its last call was no 2, barrier of gradients of block 5",
            "rank 1 waits, 0 B sent; its last call was no 1 of the group of ranks 0, 1, barrier of gradients of block 6",
            "rank 2 waits, 0 B sent; its last call was no 2, barrier of gradients of block 5",
        ]
    );
}

#[test]
fn groups_of_replicas_that_do_not_fit_are_refused() {
    let run = |end: InProcess| {
        let inner = end.subgroup(end.rank() / 2)?;
        // Replicas with different shards: 0 with 3, 1 with 2.
        let outer = end.subgroup(usize::from(end.rank() == 1 || end.rank() == 2))?;
        across(&inner, call(0), &outer, &zeros::<f32>(64), &zeros::<f32>(32))
    };
    let error = within(move || run_ranks(InProcessWorld::new(4).communicators(), run)).unwrap_err();
    assert!(error.what().ends_with("do not make the same call"), "{error}");
    assert!(error.to_string().contains("as place 0 across"), "{error}");

    let run = |end: InProcess| across(&end, call(0), &end, &zeros::<f32>(64), &zeros::<f32>(32));
    let error = within(move || run_ranks(InProcessWorld::new(2).communicators(), run)).unwrap_err();
    assert!(error.to_string().contains("as place 1 across"), "{error}");
}

#[test]
fn what_cannot_be_done_is_said_clearly() {
    let run = |end: InProcess| {
        let text = |result: Result<()>| result.unwrap_err().to_string();
        let uneven = end.reduce_scatter(call(1), &zeros::<f32>(7), &zeros::<f32>(3));
        let uneven = text(uneven);
        assert!(uneven.starts_with("error: cannot share out gradients of block 1\n"), "{uneven}");
        assert!(uneven.ends_with("2 ranks need 2 times the shard"), "{uneven}");
        let bytes = text(end.all_reduce(call(1), &zeros::<u8>(7)));
        assert!(bytes.ends_with("it is bytes, expected bf16, f32 or f64"), "{bytes}");
        let root = text(end.broadcast(call(1), 2, &zeros::<u8>(7)));
        assert!(root.ends_with("the group has 2 ranks"), "{root}");
        for peer in [end.rank(), 2] {
            let told = [end.send(call(1), peer, &zeros::<u8>(7)), end.recv(call(1), peer, &zeros::<u8>(7))];
            for text in told.map(text) {
                assert!(text.ends_with("a message is between two of the 2 ranks of the group"), "{text}");
            }
        }
        // None of these counts as a call.
        end.barrier(call(0))
    };
    within(move || run_ranks(InProcessWorld::new(2).communicators(), run)).unwrap();
}

/// A small step that enters every phase, with calls in most of them, like a run.
fn step(end: &InProcess, shard: &InProcess, replicas: &InProcess) -> Result<()> {
    let grads = zeros::<f32>(1536 * shard.size());
    let own = zeros::<f32>(1536);
    for phase in Phase::ALL {
        end.enter(phase)?;
        match phase {
            Phase::Meet | Phase::Data | Phase::Report | Phase::Save => end.barrier(call(0))?,
            Phase::Load => end.broadcast(call(1), 0, &grads)?,
            Phase::Forward | Phase::Evaluate | Phase::Output => {
                let ticket = shard.start_all_gather(call(2), &own, &grads)?;
                shard.finish(ticket)?;
            }
            Phase::Backward => across(shard, call(3), replicas, &grads, &own)?,
            Phase::Loss | Phase::Norm => end.all_reduce(call(4), &zeros::<f64>(1))?,
            Phase::Update => {
                let own = zeros::<f32>(1536);
                match end.rank() {
                    0 => end.send(call(7), 1, &own)?,
                    1 => end.recv(call(7), 0, &own)?,
                    _ => {}
                }
            }
            Phase::AllGatherParams => end.all_reduce(call(5), &grads)?,
        }
    }
    end.barrier(call(6))
}

/// Runs two steps with a fault; returns the survivors' errors and the run's. The timeout of
/// `within` bounds the time that survivors may continue.
fn struck(size: usize, fault: InjectedFault) -> (Vec<(usize, Error)>, Error) {
    within(move || {
        let (send, receive) = mpsc::channel();
        let run = |end: InProcess| {
            let shard = end.subgroup(end.rank() / 2)?;
            let replicas = end.subgroup(end.rank() % 2)?;
            let result = (0..2).try_for_each(|_| step(&end, &shard, &replicas));
            if let Err(error) = &result {
                send.send((end.rank(), error.clone())).unwrap();
            }
            result
        };
        let error = run_ranks(InProcessWorld::new(size).with_fault(fault).communicators(), run).unwrap_err();
        (receive.try_iter().filter(|(rank, _)| *rank != fault.rank).collect(), error)
    })
}

#[test]
fn a_rank_that_errors_panics_or_leaves_in_any_phase_stops_all_others() {
    let mut struck_so_far = 0;
    for size in [2, 4] {
        for phase in Phase::ALL {
            for (i, kind) in [InjectedFaultKind::Error, InjectedFaultKind::Panic, InjectedFaultKind::Exit]
                .into_iter()
                .enumerate()
            {
                let occurrence = 1 + (i as u64 + size as u64 / 2) % 2;
                for rank in 0..size {
                    let fault = InjectedFault { rank, phase, occurrence, kind };
                    let (survivors, error) = struck(size, fault);
                    let name = phase.name();
                    let said = match kind {
                        InjectedFaultKind::Exit => format!("rank {rank} left in phase {name}"),
                        _ => format!("rank {rank} failed in phase {name}"),
                    };
                    assert_eq!(survivors.len(), size - 1, "{fault}: {survivors:?}");
                    for (survivor, theirs) in survivors {
                        assert_eq!(theirs.what(), said, "{fault}, rank {survivor}");
                        assert_eq!(theirs.kind(), ErrorCategory::Transient);
                        let last = format!("rank {rank}: its last call was no ");
                        assert!(theirs.causes().iter().any(|cause| cause.starts_with(&last)), "{theirs}");
                    }
                    assert_eq!(error.what(), said, "{fault}");
                    match kind {
                        InjectedFaultKind::Exit => {
                            assert_eq!(error.kind(), ErrorCategory::Transient, "{error}")
                        }
                        _ => {
                            assert_eq!(error.kind(), ErrorCategory::Transient, "{error}");
                            assert!(error.to_string().contains(&format!("planted fault {fault}")), "{error}");
                        }
                    }
                    struck_so_far += 1;
                }
            }
        }
    }
    assert_eq!(struck_so_far, 13 * 3 * (2 + 4));
}

#[test]
fn a_delay_is_no_fault_and_strikes_once() {
    let delay = InjectedFault {
        rank: 1,
        phase: Phase::Norm,
        occurrence: 2,
        kind: InjectedFaultKind::Delay(Duration::from_millis(30)),
    };
    let other = InjectedFault { rank: 0, phase: Phase::Save, occurrence: 3, kind: InjectedFaultKind::Error };
    let run = |end: InProcess| {
        let alone = end.subgroup(end.rank())?;
        (0..2).try_for_each(|_| step(&end, &end, &alone))
    };
    within(move || {
        run_ranks(InProcessWorld::new(2).with_fault(delay).with_fault(other).communicators(), run)
    })
    .unwrap();
}

#[test]
fn the_error_of_a_run_is_that_of_the_rank_that_failed() {
    let run = |end: InProcess| {
        end.enter(Phase::Loss)?;
        if end.rank() == 1 {
            return Err(Error::new(ErrorCategory::Diverged, "the loss is NaN")
                .because("step 3")
                .hint("lower it"));
        }
        end.barrier(call(0))
    };
    let error = within(move || run_ranks(InProcessWorld::new(3).communicators(), run)).unwrap_err();
    assert_eq!(error.kind().exit_code(), 4);
    assert_eq!(
        error.to_string(),
        "error: rank 1 failed in phase loss\n  caused by: the loss is NaN\n  caused by: step 3\n  caused by: rank 1: it had made no call\nhint: lower it"
    );
}

#[test]
fn what_all_ranks_say_alike_is_said_once() {
    let run = |end: InProcess| {
        end.barrier(call(0))?;
        Err::<(), Error>(Error::new(ErrorCategory::Diverged, "the gradient norm is NaN"))
    };
    for size in [1, 4] {
        let error = within(move || run_ranks(InProcessWorld::new(size).communicators(), run)).unwrap_err();
        assert_eq!(error.to_string(), "error: the gradient norm is NaN");
        assert_eq!(error.kind(), ErrorCategory::Diverged);
    }
}

#[test]
fn a_rank_that_returns_too_early_is_named() {
    let run = |end: InProcess| {
        end.enter(Phase::Backward)?;
        let sub = end.subgroup(0)?;
        if end.rank() == 2 { Ok(()) } else { sub.all_reduce(call(0), &zeros::<f32>(3)) }
    };
    let error = within(move || run_ranks(InProcessWorld::new(3).communicators(), run)).unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient);
    assert_eq!(error.what(), "rank 2 left in phase backward");
    assert!(error.causes()[1].ends_with(
        "waits for it: its last call was no 1 of the group of ranks 0, 1, 2, all_reduce of gradients of block 0 (3 f32)"
    ));
}

#[test]
fn a_clean_end_is_one_even_if_peers_are_still_reading() {
    // Rank 0 posts its shard, needs only the others' shards, and leaves while they still copy.
    let run = |end: InProcess| {
        let full = zeros::<f32>(50_000 * end.size());
        let shard = memory(vec![end.rank() as f32; 50_000]);
        let ticket = end.start_all_gather(call(0), &shard, &full)?;
        drop(shard);
        end.finish(ticket)?;
        Ok((end.rank(), read::<f32>(&full)))
    };
    for (rank, (also, full)) in within(move || run_ranks(InProcessWorld::new(4).communicators(), run))
        .unwrap()
        .into_iter()
        .enumerate()
    {
        assert_eq!(rank, also);
        assert!(full.iter().enumerate().all(|(i, x)| *x == (i / 50_000) as f32));
    }
}

#[test]
fn threads_have_names_and_results_their_order() {
    let run = |end: InProcess| {
        let name = std::thread::current().name().map(str::to_owned);
        Ok((end.rank(), name.unwrap()))
    };
    let ran = within(move || run_ranks(InProcessWorld::new(3).communicators(), run)).unwrap();
    assert_eq!(ran, [(0, "rank-0".into()), (1, "rank-1".into()), (2, "rank-2".into())]);
    assert_eq!(run_ranks(InProcessWorld::new(1).communicators(), |end| Ok(end.size())).unwrap(), [1]);
    assert!(run_ranks(InProcessWorld::new(0).communicators(), |_| Ok(())).unwrap().is_empty());
}

#[test]
fn a_panic_is_told_without_run_ranks_too() {
    let text = within(|| {
        let mut ends = InProcessWorld::new(2).communicators();
        let (one, zero) = (ends.pop().unwrap(), ends.pop().unwrap());
        let thread = std::thread::spawn(move || {
            one.enter(Phase::Save).unwrap();
            let _sub = one.subgroup(0).unwrap();
            panic!("on purpose");
        });
        let sub = zero.subgroup(0).unwrap();
        let text = sub.barrier(call(0)).unwrap_err().to_string();
        assert!(thread.join().is_err());
        assert_eq!(zero.enter(Phase::Output).unwrap_err().to_string(), text);
        text
    });
    assert_eq!(
        text,
        "error: rank 1 failed in phase save\n  caused by: its thread panicked\n  \
         caused by: rank 1: its last call was no 1, split of ranks 0"
    );
}

#[test]
fn abort_wakes_all_and_the_first_reason_stays() {
    within(|| {
        let mut ends = InProcessWorld::new(4).communicators();
        let last = ends.pop().unwrap();
        let waiting = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let threads: Vec<_> = ends
                .iter()
                .map(|end| {
                    scope.spawn(|| {
                        waiting.fetch_add(1, Ordering::SeqCst);
                        end.barrier(call(1)).unwrap_err()
                    })
                })
                .collect();
            while waiting.load(Ordering::SeqCst) < 3 {
                std::thread::yield_now();
            }
            last.abort("the disk is full");
            last.abort("something else");
            ends[0].abort("a third reason");
            for thread in threads {
                let error = thread.join().unwrap();
                assert_eq!(error.kind().exit_code(), 75);
                assert_eq!(error.what(), "rank 3 failed");
                assert_eq!(error.causes(), ["the disk is full", "rank 3: it had made no call"]);
            }
        });
        type Try<'a> = &'a dyn Fn(&InProcess) -> Result<()>;
        let every_call: [Try<'_>; 7] = [
            &|end| end.barrier(call(2)),
            &|end| end.all_reduce(call(2), &zeros::<f32>(3)),
            &|end| end.reduce_scatter(call(2), &zeros::<f32>(4), &zeros::<f32>(1)),
            &|end| end.start_all_gather(call(2), &zeros::<f32>(1), &zeros::<f32>(4)).map(drop),
            &|end| end.broadcast(call(2), 0, &zeros::<f32>(3)),
            &|end| end.split(0).map(drop),
            &|end| end.enter(Phase::Data),
        ];
        for call in every_call {
            assert_eq!(call(&ends[2]).unwrap_err().what(), "rank 3 failed");
        }
    });
}

#[test]
fn a_rank_waited_for_too_long_ends_with_a_record() {
    let error = within(|| {
        let (send, receive) = mpsc::channel();
        let (send, receive) = (std::sync::Mutex::new(send), std::sync::Mutex::new(receive));
        let run = |end: InProcess| {
            end.enter(Phase::Forward)?;
            end.all_reduce(call(0), &zeros::<f32>(4096))?;
            if end.rank() == 1 {
                end.enter(Phase::Save)?;
                receive.lock().unwrap().recv().unwrap();
                return end.barrier(call(1));
            }
            let error = end.barrier(call(1)).unwrap_err();
            send.lock().unwrap().send(()).unwrap();
            Err(error)
        };
        let world = InProcessWorld::new(2).with_timeout(Duration::from_secs(5));
        run_ranks(world.communicators(), run).unwrap_err()
    });
    assert_eq!(error.kind(), ErrorCategory::Transient);
    assert_eq!(
        error.to_string(),
        "error: rank 0 waited 5.0 s for rank 1 in phase save\n  \
         caused by: rank 0 waits in phase forward, 16.0 KiB sent; its last call was no 2, barrier of gradients of block 1\n  \
         caused by: rank 1 computes in phase save, 16.0 KiB sent; its last call was no 1, all_reduce of gradients of block 0 (4096 f32)"
    );
}

#[test]
fn ten_thousand_small_calls_of_four_ranks() {
    let run = |end: InProcess| {
        let sub = end.subgroup(end.rank() % 2)?;
        let mut expected = [0.0_f64; 2];
        let sum = memory(vec![0.0_f64]);
        for i in 0..10_000 {
            match i % 5 {
                0 | 1 => {
                    write(&sum, (end.rank() * i) as f64);
                    end.all_reduce(call(i), &sum)?;
                    expected[0] += (6 * i) as f64;
                }
                2 => {
                    write(&sum, (end.rank() + i) as f64);
                    sub.all_reduce(call(i), &sum)?;
                    expected[0] += (2 * (end.rank() % 2) + 2 + 2 * i) as f64;
                }
                3 => {
                    write(&sum, (end.rank() * 1000 + i) as f64);
                    end.broadcast(call(i), i / 5 % 4, &sum)?;
                    expected[0] += (i / 5 % 4 * 1000 + i) as f64;
                }
                _ => {
                    let shard = memory(vec![(end.rank() + i) as f64]);
                    let full = zeros::<f64>(4);
                    let ticket = end.start_all_gather(call(i), &shard, &full)?;
                    end.finish(ticket)?;
                    write(&sum, read::<f64>(&full).iter().sum::<f64>());
                    expected[0] += (6 + 4 * i) as f64;
                }
            }
            expected[1] += read::<f64>(&sum)[0];
        }
        assert_eq!(expected[0], expected[1]);
        Ok(())
    };
    within(move || run_ranks(InProcessWorld::new(4).communicators(), run)).unwrap();
}

#[test]
fn stress_of_large_sums_with_checked_results() {
    let run = |end: InProcess| {
        let elements = 6000;
        let buffer = zeros::<f32>(elements);
        let shard = zeros::<f32>(elements / 4);
        for round in 0..300_usize {
            write(&buffer, (end.rank() + round) as f32);
            let expected = (6 + 4 * round) as f32;
            if round % 3 == 0 {
                end.reduce_scatter(call(round), &buffer, &shard)?;
                assert!(read::<f32>(&shard).iter().all(|x| *x == expected));
            } else {
                end.all_reduce(call(round), &buffer)?;
                assert!(read::<f32>(&buffer).iter().all(|x| *x == expected));
            }
        }
        Ok(())
    };
    within(move || run_ranks(InProcessWorld::new(4).communicators(), run)).unwrap();
}
