//! Gathers sharded values, and loads offloaded ones to the device, for one use of their segment.
//!
//! Blocks alternate between two fixed buffers (even and odd), so at most two are whole at a time:
//! the one in use and the next. The next one is meanwhile gathered, or read ahead if it is in a
//! file. A GPU loads an offloaded block that is not sharded beside the kernels of the block before
//! it: the host starts the copy after it has launched these, and the copy waits for the last use
//! of its own buffer alone. Embedding and head are gathered into memory of a pool that they share:
//! one is released before the other is held.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device};

use super::buffer_pool::BufferPool;
use super::mesh::DeviceMesh;
use super::mesh_shape::MeshAxis;
use super::param::BufferKind;
use crate::collective::{Gather, Ticket};
use crate::error::{Error, Result};
use crate::locks::locked;
use crate::model::Segment;
use crate::quant::RunDtype;
use crate::runtime::TensorMut;
use crate::runtime::buffer::Buffer;
use crate::runtime::cpu_tensor::memory;
use crate::runtime::device_queue::QueueMark;
use crate::runtime::param_storage::ParamStorage;

/// Identifies a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BufferId {
    /// The values of a bucket, by its index.
    Values(usize),
    /// The runs of one type of a quantized bucket, by its index.
    Quantized(usize, RunDtype),
}

/// A run of values that is not whole on the device.
#[derive(Debug)]
pub(super) struct ShardRun {
    /// Identity of the run.
    pub(super) buffer_id: BufferId,
    /// The kind; blocks' runs of one kind share memory.
    pub(super) kind: BufferKind,
    /// This rank's part, or all of it.
    pub(super) part: ParamStorage,
    /// True if `part` is a shard, and other ranks have the rest.
    pub(super) sharded: bool,
    /// Number of elements of the whole.
    pub(super) len: usize,
    /// True if its memory is freed after each use, instead of kept for the next.
    pub(super) freed: bool,
}

/// Gathers in flight, and the number of segments that are whole.
#[derive(Debug)]
pub(super) struct GatherQueue {
    device: Device,
    /// The runs of each segment.
    runs: BTreeMap<Segment, Vec<ShardRun>>,
    /// The buffers of even and odd blocks for gathered runs, by kind.
    memory: [BTreeMap<BufferKind, TensorMut>; 2],
    /// End of the last use of each of `memory`; none if it is not known.
    free: Mutex<[Option<QueueMark>; 2]>,
    /// Buffers of embedding and head.
    pool: BufferPool,
    started: Mutex<Option<PendingGather>>,
    whole: AtomicUsize,
    most: AtomicUsize,
}

#[derive(Debug)]
struct PendingGather {
    segment: Segment,
    /// Ticket of the gathers of all sharded runs.
    ticket: Option<Ticket>,
    gathered: Gathered,
    /// The memory of `gathered`, if it is not the blocks' memory.
    memory: Vec<TensorMut>,
}

/// Whole runs by identity.
pub(super) type Gathered = BTreeMap<BufferId, TensorMut>;

/// The largest number of segments that may be whole at a time.
const MOST: usize = 2;

/// Releases a segment's whole values when dropped.
#[derive(Debug)]
pub(super) struct GatheredMemory<'a>(Option<(&'a GatherQueue, Segment, Vec<TensorMut>)>);

impl Drop for GatheredMemory<'_> {
    fn drop(&mut self) {
        if let Some((gathers, segment, memory)) = self.0.take() {
            if let Segment::Block(layer) = segment {
                // Without a mark the next load waits for all computation, which reports the error.
                locked(&gathers.free)[layer % 2] = QueueMark::new(&gathers.device).ok();
            }
            gathers.whole.fetch_sub(1, Ordering::Relaxed);
            memory.into_iter().for_each(|memory| gathers.pool.give(memory));
        }
    }
}

impl GatherQueue {
    /// Allocates memory for the blocks' runs. The runs of all blocks have the same types and order.
    pub(super) fn new(runs: BTreeMap<Segment, Vec<ShardRun>>, device: &Device) -> Result<Self> {
        let mut widest: BTreeMap<BufferKind, (usize, DType)> = BTreeMap::new();
        for (_, runs) in runs.iter().filter(|(segment, _)| matches!(segment, Segment::Block(_))) {
            for run in runs {
                let (len, _) = widest.entry(run.kind).or_insert((0, run.part.dtype()));
                *len = run.len.max(*len);
            }
        }
        let turn = || -> Result<BTreeMap<BufferKind, TensorMut>> {
            let buffer = |(&kind, &(len, dtype)): (&BufferKind, &(usize, DType))| {
                Ok((kind, TensorMut::zeros(len, dtype, device)?))
            };
            widest.iter().map(buffer).collect()
        };
        let memory = [turn()?, turn()?];
        let zeroed = QueueMark::new(device)?;
        Ok(GatherQueue {
            device: device.clone(),
            memory,
            free: Mutex::new([Some(zeroed.clone()), Some(zeroed)]),
            runs,
            pool: BufferPool::default(),
            started: Mutex::default(),
            whole: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        })
    }

    /// Returns the memory into which the runs of a block are gathered.
    pub(super) fn block(&self, layer: usize) -> Result<Gathered> {
        let runs = self.runs.get(&Segment::Block(layer)).map_or(&[][..], Vec::as_slice);
        let memory_of = |run: &ShardRun| {
            let memory = self.memory[layer % 2].get(&run.kind);
            let memory = memory.ok_or_else(|| Error::internal("no memory for a sharded run"))?;
            Ok((run.buffer_id, memory.narrow(0, 0, run.len)?))
        };
        runs.iter().map(memory_of).collect()
    }

    /// Returns the largest number of segments that were whole at a time.
    pub(super) fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    /// Returns the bytes of each segment's sharded runs when whole.
    pub(super) fn bytes(&self) -> impl Iterator<Item = (Segment, usize)> {
        let bytes = |run: &ShardRun| run.len * run.part.dtype().size_in_bytes();
        let of_all = move |runs: &Vec<ShardRun>| runs.iter().filter(|run| run.sharded).map(bytes).sum();
        self.runs.iter().map(move |(segment, runs)| (*segment, of_all(runs)))
    }

    /// Makes `segment` whole and starts to gather `next`, unless both use the same memory. Returns
    /// the whole runs.
    pub(super) fn hold(
        &self,
        mesh: &DeviceMesh,
        segment: Segment,
        next: Option<Segment>,
    ) -> Result<(Gathered, GatheredMemory<'_>)> {
        if !self.runs.contains_key(&segment) && next.is_none_or(|next| !self.runs.contains_key(&next)) {
            return Ok((Gathered::new(), GatheredMemory(None)));
        }
        let mut started = self.started.lock().map_err(|_| Error::internal("a gather panicked"))?;
        let mut now = started.take();
        if let Some(other) = now.take_if(|now| now.segment != segment) {
            // Gathered ahead for a pass that ended early.
            drop(self.finish(mesh, other)?);
        }
        let now = match now {
            Some(now) => Some(now),
            None => self.start(mesh, segment)?,
        };
        let held = now.map_or(Ok((Gathered::new(), GatheredMemory(None))), |now| self.finish(mesh, now))?;
        if let Some(next) = next.filter(|next| !shares_memory(segment, *next)) {
            *started = self.start(mesh, next)?;
        }
        Ok(held)
    }

    fn start(&self, mesh: &DeviceMesh, segment: Segment) -> Result<Option<PendingGather>> {
        let Some(runs) = self.runs.get(&segment) else { return Ok(None) };
        let whole = self.whole.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(whole, Ordering::Relaxed);
        if whole > MOST {
            return Err(Error::internal(format!(
                "{whole} segments are gathered at once; at most {MOST} are allowed"
            )));
        }
        let mut memory_of_end = Vec::new();
        let gathered = match segment {
            Segment::Block(layer) => self.block(layer)?,
            Segment::Embed | Segment::Head => {
                let mut buffer_of = |run: &ShardRun| -> Result<(BufferId, TensorMut)> {
                    if run.freed {
                        let whole = TensorMut::zeros(run.len, run.part.dtype(), &self.device)?;
                        return Ok((run.buffer_id, whole));
                    }
                    let memory = self.pool.take(run.len, run.part.dtype(), &self.device)?;
                    let whole = memory.narrow(0, 0, run.len)?;
                    memory_of_end.push(memory);
                    Ok((run.buffer_id, whole))
                };
                let mut longest_first: Vec<&ShardRun> = runs.iter().collect();
                longest_first.sort_by_key(|run| Reverse(run.len));
                longest_first.into_iter().map(&mut buffer_of).collect::<Result<_>>()?
            }
        };
        let call = call!("values of", segment);
        let mut sharded = Vec::new();
        for run in runs {
            run.part.prefetch();
            if run.sharded {
                let whole = &gathered[&run.buffer_id];
                sharded.push((self.with_device_buffer(mesh, run, whole)?, memory(whole)?));
            }
        }
        let gathers: Vec<Gather<'_>> = sharded.iter().map(|(shard, full)| Gather { shard, full }).collect();
        let ticket = if gathers.is_empty() {
            None
        } else {
            Some(mesh.group(MeshAxis::Shard).start_all_gathers(call, &gathers)?)
        };
        Ok(Some(PendingGather { segment, ticket, gathered, memory: memory_of_end }))
    }

    /// Returns this rank's part as a collective needs it: its own buffer on a CPU or on the device,
    /// otherwise a copy in the whole.
    fn with_device_buffer(&self, mesh: &DeviceMesh, run: &ShardRun, whole: &TensorMut) -> Result<Buffer> {
        match &run.part {
            ParamStorage::Memory(part) if part.device().same_device(&self.device) => memory(part),
            part if self.device.is_cpu() => part.memory(),
            part => {
                let own =
                    whole.narrow(0, mesh.coordinate(MeshAxis::Shard) * part.elements(), part.elements())?;
                part.load_to(&own)?;
                memory(&own)
            }
        }
    }

    fn finish(&self, mesh: &DeviceMesh, started: PendingGather) -> Result<(Gathered, GatheredMemory<'_>)> {
        if let Some(ticket) = started.ticket {
            mesh.group(MeshAxis::Shard).finish(ticket)?;
        }
        let free = match started.segment {
            Segment::Block(layer) => locked(&self.free)[layer % 2].clone(),
            Segment::Embed | Segment::Head => None,
        };
        for run in self.runs.get(&started.segment).into_iter().flatten() {
            if !run.sharded {
                run.part.load_after(&started.gathered[&run.buffer_id], free.as_ref())?;
            }
            run.part.evict();
        }
        Ok((started.gathered, GatheredMemory(Some((self, started.segment, started.memory)))))
    }
}

/// Returns true if two blocks are gathered into the same memory.
fn shares_memory(segment: Segment, other: Segment) -> bool {
    matches!((segment, other), (Segment::Block(a), Segment::Block(b)) if a % 2 == b % 2)
}

/// Names a call on a segment: `values of block 3`, `gradients of head`.
macro_rules! call {
    ($what:literal, $segment:expr) => {
        match $segment {
            $crate::model::Segment::Block(index) => {
                $crate::collective::Call { what: concat!($what, " block"), index }
            }
            $crate::model::Segment::Embed => $crate::collective::Call::single(concat!($what, " embedding")),
            $crate::model::Segment::Head => $crate::collective::Call::single(concat!($what, " head")),
        }
    };
}
pub(super) use call;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use std::sync::Arc;

    use candle_core::Tensor;

    use super::*;
    use crate::collective::in_process::{InProcess, InProcessWorld, run_ranks};
    use crate::collective::{Collective, Op};
    use crate::parallel::param::BucketKind;
    use crate::parallel::placement::ShardingStrategy;

    /// Blocks with two runs of 4 and 2 values on this rank: their layer, plus 10 for a rank.
    fn queue(blocks: usize, rank: usize, size: usize) -> GatherQueue {
        let runs = |layer: usize| {
            let run = |(kind, len): (BucketKind, usize)| {
                let value = (layer + 10 * rank) as f32;
                let part = Tensor::full(value, len, &Device::Cpu).unwrap().into();
                let index = if kind == BucketKind::Frozen { 0 } else { 1 };
                let (buffer_id, kind) = (BufferId::Values(2 * layer + index), BufferKind::Values(kind));
                ShardRun { buffer_id, kind, part, sharded: size > 1, len: size * len, freed: false }
            };
            [(BucketKind::Frozen, 4), (BucketKind::FrozenAs, 2)].map(run).into()
        };
        let runs = (0..blocks).map(|layer| (Segment::Block(layer), runs(layer))).collect();
        GatherQueue::new(runs, &Device::Cpu).unwrap()
    }

    fn values(whole: &Gathered, index: usize) -> Vec<f32> {
        whole[&BufferId::Values(index)].to_vec1().unwrap()
    }

    #[test]
    fn a_segment_is_gathered_in_one_call() {
        let work = |end: InProcess| {
            let world: Arc<dyn Collective> = Arc::new(end);
            let gathers = queue(2, world.rank(), 2);
            let mesh = DeviceMesh::new(ShardingStrategy::Fsdp, Arc::clone(&world))?;
            let group = mesh.group(MeshAxis::Shard);
            let before = group.traffic();
            let (whole, held) = gathers.hold(&mesh, Segment::Block(0), Some(Segment::Block(1)))?;
            assert_eq!(values(&whole, 0), [0.0, 0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 10.0]);
            assert_eq!(values(&whole, 1), [0.0, 0.0, 10.0, 10.0]);
            drop(held);
            let (whole, _held) = gathers.hold(&mesh, Segment::Block(1), None)?;
            assert_eq!(values(&whole, 3), [1.0, 1.0, 11.0, 11.0]);
            let sent = group.traffic().since(&before);
            assert_eq!((sent.calls(Op::AllGather), sent.bytes(Op::AllGather)), (2, 2 * 24));
            mesh.world().barrier(crate::collective::Call::single("end"))
        };
        run_ranks(InProcessWorld::new(2).communicators(), work).unwrap();
    }

    /// A later load into the same memory waits for this mark alone.
    #[test]
    fn the_end_of_a_use_is_marked_for_the_memory_of_its_parity() {
        let (gathers, mesh) = (queue(3, 0, 1), DeviceMesh::alone());
        let marked = || locked(&gathers.free).each_ref().map(Option::is_some);
        assert_eq!(marked(), [true, true], "the memory has zeros");
        for (layer, after) in [(0, [true, false]), (1, [false, true]), (2, [true, false])] {
            *locked(&gathers.free) = [None, None];
            let (whole, held) = gathers.hold(&mesh, Segment::Block(layer), None).unwrap();
            assert_eq!(values(&whole, 2 * layer), [layer as f32; 4]);
            assert_eq!(marked(), [false, false], "the memory is in use");
            drop(held);
            assert_eq!(marked(), after);
        }
    }
}
