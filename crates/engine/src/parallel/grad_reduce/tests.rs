//! Reductions that overlap with backward, over a group that performs them as late as possible.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use super::*;
use crate::collective::Call;
use crate::collective::in_process::{InProcessWorld, run_ranks};
use crate::collective::late_reductions::{LateCall, LateReductions};
use crate::parallel::bucket::BucketOptions;
use crate::parallel::offload::{OffloadTarget, StorageTarget};
use crate::parallel::param::{LrGroup, ParamDesc, ParamKind, UpdateRule};
use crate::parallel::placement::{ParamRole, ShardingStrategy};
use crate::recipe::enums::{MasterWeights, Offload};
use crate::runtime::copy::to_host_vec;

const RANKS: usize = 4;
const ALL_SEGMENTS: [Segment; 5] =
    [Segment::Embed, Segment::Block(0), Segment::Block(1), Segment::Block(2), Segment::Head];

#[derive(Debug, Clone)]
struct Case {
    strategy: ShardingStrategy,
    reducing: GradReduceOptions,
    /// `None`: the weights train in bf16.
    master: MasterWeights,
    offload: Offload,
    /// The segments with trainable parameters, ascending.
    segments: Vec<Segment>,
}

impl Case {
    fn of(strategy: ShardingStrategy, segments: &[Segment]) -> Self {
        let reducing = GradReduceOptions { accumulates: false, dtype: DType::F32, block_dtype: DType::F32 };
        let (master, offload) = (MasterWeights::F32, Offload::None);
        Case { strategy, reducing, master, offload, segments: segments.to_vec() }
    }

    fn kept_in_bf16(self) -> Self {
        let reducing = GradReduceOptions { block_dtype: DType::BF16, ..self.reducing };
        Case { reducing, master: MasterWeights::None, ..self }
    }

    fn buckets(&self, mesh: &DeviceMesh) -> Result<Vec<Bucket>> {
        let offload = OffloadTarget::from(self.offload);
        let away = offload.has_values(ParamRole::Trainable);
        let bucket_options = BucketOptions {
            spec: self.strategy.sharding_spec(ParamRole::Trainable),
            mesh,
            dtype: if self.master == MasterWeights::None { DType::BF16 } else { DType::F32 },
            device: &Device::Cpu,
            values: if away { StorageTarget::Host } else { StorageTarget::Device(&Device::Cpu) },
            offload: &offload,
            fill_all: false,
            master: self.master,
            kept_gradients: self.reducing.block_dtype,
        };
        let bucket = |(i, segment): (usize, &Segment)| {
            let kind = ParamKind::Trainable(UpdateRule { decay: false, lr_group: LrGroup::Base });
            // Blocks need not have equal lengths.
            let shape = vec![300 + 700 * i];
            let name = format!("{segment:?}");
            let desc = ParamDesc::new(name, shape, Placements::REPLICATED, *segment, kind);
            Bucket::new(vec![desc], bucket_options, &mut |_, _, _| Ok(()))
        };
        self.segments.iter().enumerate().map(bucket).collect()
    }

    /// Returns the bits of the gradients that a rank keeps after a step with synthetic backwards.
    fn step(&self, world: Arc<dyn Collective>, micro_batches: usize) -> Result<Vec<Vec<u32>>> {
        let rank = world.rank();
        let mesh = DeviceMesh::new(self.strategy, world)?;
        let buckets = self.buckets(&mesh)?;
        let grads = GradBuffers::new(&buckets, self.reducing, &Device::Cpu, &mesh)?;
        for micro_batch in 0..micro_batches {
            for (index, bucket) in buckets.iter().enumerate().rev() {
                grads.wait_for_reductions(&mesh, &buckets, Some(bucket.segment))?;
                // The sums of these depend on their order.
                let one = |i: usize| ((i * 37 + rank * 11 + micro_batch * 5 + index) % 101) as f32 * 0.1;
                let gradient =
                    Tensor::from_vec((0..bucket.len).map(one).collect(), bucket.len, &Device::Cpu)?;
                let target = grads.target(index, bucket)?;
                add_into(&target.ok_or_else(|| Error::internal("frozen"))?, &gradient)?;
                grads.reduce(&mesh, &buckets, index, micro_batch + 1 == micro_batches)?;
            }
        }
        grads.wait_for_reductions(&mesh, &buckets, None)?;
        let bits = |bucket: &Bucket| -> Result<Vec<u32>> {
            let own = bucket.gradient()?.ok_or_else(|| Error::internal("frozen"))?;
            Ok(to_host_vec::<f32>(&own.to_dtype(DType::F32)?)?.into_iter().map(f32::to_bits).collect())
        };
        buckets.iter().map(bits).collect()
    }
}

#[test]
fn late_reductions_give_the_bits_of_those_that_are_done_on_return() {
    use ShardingStrategy::{Ddp, Fsdp, Hsdp, Zero1, Zero2};
    // All segments; adapters alone; a frozen block in the middle.
    let trainable = [&ALL_SEGMENTS[..], &ALL_SEGMENTS[1..4], &[Segment::Block(0), Segment::Block(2)]];
    let mut cases = Vec::new();
    for strategy in [Ddp, Zero1, Zero2, Fsdp, Hsdp(2), Hsdp(1)] {
        for dtype in [DType::F32, DType::BF16] {
            for offload in [Offload::None, Offload::Params] {
                for (segments, micro_batches) in trainable.into_iter().flat_map(|some| [(some, 1), (some, 3)])
                {
                    let reducing =
                        GradReduceOptions { accumulates: micro_batches > 1, dtype, block_dtype: DType::F32 };
                    let case = Case { reducing, offload, ..Case::of(strategy, segments) };
                    cases.push((case.clone(), micro_batches));
                    let without = case.kept_in_bf16();
                    let gradient_dtype = if micro_batches == 1 { DType::BF16 } else { DType::F32 };
                    let reducing = GradReduceOptions { block_dtype: gradient_dtype, ..without.reducing };
                    cases.push((Case { reducing, ..without }, micro_batches));
                }
            }
        }
    }
    for (case, micro_batches) in cases {
        let ends = || InProcessWorld::new(RANKS).communicators();
        let plain = run_ranks(ends(), |end| case.step(Arc::new(end), micro_batches)).unwrap();
        let late = run_ranks(ends(), |end| {
            let late = LateReductions::new(Arc::new(end));
            let calls = late.calls();
            let bits = case.step(Arc::new(late), micro_batches)?;
            let calls = locked(&calls);
            let started = calls.iter().filter(|call| matches!(call, LateCall::Started(..))).count();
            assert!(started > 0 && calls.len() == 2 * started, "{calls:?}");
            Ok(bits)
        });
        assert!(late.unwrap() == plain, "{case:?}, {micro_batches} micro-batches");
    }
}

#[test]
fn gradients_that_are_kept_in_bf16_are_the_f32_sums_once_rounded() {
    use ShardingStrategy::{Ddp, Fsdp, Hsdp, Single, Zero1, Zero2};
    for strategy in [Single, Ddp, Zero1, Zero2, Fsdp, Hsdp(2)] {
        for offload in [Offload::None, Offload::Params] {
            let ranks = if strategy == Single { 1 } else { RANKS };
            let bits = |case: &Case, micro_batches: usize| {
                let ends = InProcessWorld::new(ranks).communicators();
                run_ranks(ends, |end| case.step(Arc::new(end), micro_batches)).unwrap()
            };
            let in_bf16 = Case { offload, ..Case::of(strategy, &ALL_SEGMENTS) }.kept_in_bf16();
            let in_f32 =
                |accumulates| GradReduceOptions { accumulates, block_dtype: DType::F32, ..in_bf16.reducing };
            let rounded = Case { reducing: in_f32(false), ..in_bf16.clone() };
            let with_masters = Case { master: MasterWeights::F32, ..rounded.clone() };
            assert_eq!(bits(&in_bf16, 1), bits(&rounded, 1), "{in_bf16:?}");
            assert_ne!(bits(&rounded, 1), bits(&with_masters, 1));
            // Accumulated gradients are rounded once, after the last micro-batch.
            let added_up = Case { reducing: in_f32(true), ..in_bf16 };
            let with_masters = Case { master: MasterWeights::F32, ..added_up.clone() };
            let rounded = |bits: &u32| f32::to_bits(half::bf16::from_f32(f32::from_bits(*bits)).to_f32());
            for (actual, wanted) in bits(&added_up, 3).iter().zip(bits(&with_masters, 3)) {
                let wanted = wanted[1..4].iter().map(|block| block.iter().map(rounded).collect::<Vec<_>>());
                assert!(actual[1..4].iter().cloned().eq(wanted), "{added_up:?}");
            }
        }
    }
}

/// Returns the calls that rank 0 started and finished in a step, with the memory of each block.
fn calls_of(case: &Case, micro_batches: usize) -> Vec<LateCall> {
    let calls = run_ranks(InProcessWorld::new(RANKS).communicators(), |end| {
        let late = LateReductions::new(Arc::new(end));
        let calls = late.calls();
        case.step(Arc::new(late), micro_batches)?;
        Ok(locked(&calls).clone())
    });
    calls.unwrap().swap_remove(0)
}

/// Returns for each call whether it is a start, and its name.
fn named(calls: &[LateCall]) -> Vec<(bool, Call)> {
    let name = |call: &LateCall| match call {
        LateCall::Started(call, _) => (true, *call),
        LateCall::Finished(call, _) => (false, *call),
    };
    calls.iter().map(name).collect()
}

#[test]
fn blocks_take_two_buffers_in_turn_and_are_taken_in_before_one_is_written_again() {
    let calls = calls_of(&Case::of(ShardingStrategy::Fsdp, &ALL_SEGMENTS), 1);
    let block = |index| Call { what: "gradients of block", index };
    let [head, embed] = ["gradients of head", "gradients of embedding"].map(Call::single);
    let expected = [
        (true, head),
        (true, block(2)),
        // Before the backward of block 1, which overlaps with the reduction of block 2.
        (false, head),
        (true, block(1)),
        (false, block(2)),
        (true, block(0)),
        (false, block(1)),
        (true, embed),
        (false, block(0)),
        (false, embed),
    ];
    assert_eq!(named(&calls), expected);
    let address = |wanted: Call| {
        let started = calls.iter().find_map(|call| match call {
            LateCall::Started(call, address) if *call == wanted => Some(*address),
            _ => None,
        });
        started.unwrap()
    };
    assert_eq!(address(block(2)), address(block(0)));
    assert_ne!(address(block(2)), address(block(1)));
}

#[test]
fn the_last_block_is_reduced_until_its_buffer_is_written_in_the_next_micro_batch() {
    let calls = calls_of(&Case::of(ShardingStrategy::Zero2, &ALL_SEGMENTS[1..4]), 2);
    let named = named(&calls).into_iter().map(|(started, call)| (started, call.index));
    let each = [(true, 2), (true, 1), (false, 2), (true, 0), (false, 1), (false, 0)];
    assert_eq!(named.collect::<Vec<_>>(), [each, each].concat());
}

#[test]
fn buffers_are_two_only_where_what_they_hold_is_under_way() {
    let addresses = |case: &Case, micro_batches: usize, late: bool| {
        let ends = InProcessWorld::new(RANKS).communicators();
        let addresses_by_rank = run_ranks(ends, |end| {
            let end: Arc<dyn Collective> = Arc::new(end);
            let world = if late { Arc::new(LateReductions::new(end)) } else { end };
            let mesh = DeviceMesh::new(case.strategy, world)?;
            let buckets = case.buckets(&mesh)?;
            let reducing = GradReduceOptions { accumulates: micro_batches > 1, ..case.reducing };
            let grads = GradBuffers::new(&buckets, reducing, &Device::Cpu, &mesh)?;
            let address = |index: usize| -> Result<Option<usize>> {
                let target = grads.target(index, &buckets[index])?;
                target.map(|target| Ok(memory(&target)?.address())).transpose()
            };
            Ok((address(0)? == address(1)?, address(0)? == address(2)?))
        });
        addresses_by_rank.unwrap().swap_remove(0)
    };
    let case = |strategy, dtype, offload| {
        let reducing = GradReduceOptions { accumulates: false, dtype, block_dtype: DType::F32 };
        Case { reducing, offload, ..Case::of(strategy, &ALL_SEGMENTS[1..4]) }
    };
    use ShardingStrategy::{Ddp, Fsdp};
    let (one, two) = ((true, true), (false, true));
    for (strategy, dtype, offload, late, expected) in [
        (Fsdp, DType::F32, Offload::None, true, two),
        (Fsdp, DType::F32, Offload::None, false, one),
        // The sent gradients are a copy.
        (Fsdp, DType::BF16, Offload::None, true, one),
        // The kept gradients themselves are sent.
        (Ddp, DType::F32, Offload::None, true, one),
        (Ddp, DType::F32, Offload::Params, true, two),
        (Ddp, DType::F32, Offload::Params, false, one),
    ] {
        let actual = addresses(&case(strategy, dtype, offload), 2, late);
        assert_eq!(actual, expected, "{strategy:?} {dtype:?} {offload:?} {late}");
    }
}
