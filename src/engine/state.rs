//! What a trainer is at a moment, as checkpoints and outputs keep it: whole tensors by name, however they are sharded.
//!
//! Buckets are gathered one at a time and dealt out to the ranks in turn: each rank holds, and later writes, its share
//! of whole tensors. So a checkpoint does not depend on the strategy or the number of ranks that made it.

use std::ops::Range;

use candle_core::Tensor;

use super::{SaveAssignment, Trainer};
use crate::checkpoint::{MomentKind, SavedCheckpoint, SavedMoment, SnapshotTensor};
use crate::error::{Error, Result};
use crate::ops::adamw_int8::{Int8Moment, STATE_BLOCK};
use crate::optim::{INT8_MIN_ELEMENTS, Moments};
use crate::recipe::enums::StateDtype;
use crate::runtime::copy::copy_into;
use crate::runtime::thread_pool::release_freed_memory;
use crate::sharding::{Bucket, BucketEntry, ParamDesc};

/// One moment of a whole bucket.
struct FlatValues {
    values: Vec<f32>,
    /// 8-bit moments; empty when there are none.
    codes: Vec<u8>,
    absmax: Vec<f32>,
}

impl Trainer {
    /// The trainable tensors by the rank that saves them, alike on all ranks.
    pub fn shares(&self) -> Vec<Vec<ParamDesc>> {
        let mut shares = vec![Vec::new(); self.engine.store.mesh().world().size()];
        for (index, bucket) in self.engine.store.trainable().enumerate() {
            let descs = bucket.entries.iter().map(|entry| entry.desc.clone());
            shares[self.saved_by(index)].extend(descs);
        }
        shares
    }

    /// The rank that saves trainable bucket `index`.
    fn saved_by(&self, index: usize) -> usize {
        match self.options.save_assignment {
            SaveAssignment::Rank0 => 0,
            SaveAssignment::RoundRobin => index % self.engine.store.mesh().world().size(),
        }
    }

    /// This rank's share of the trainable tensors as they are now, in f32; their moments too unless only the weights
    /// are wanted. All ranks call it.
    pub fn snapshot(&self, with_moments: bool) -> Result<Vec<SnapshotTensor>> {
        // What a step has freed, the copies take instead.
        release_freed_memory();
        let store = &self.engine.store;
        let world = store.mesh().world();
        let mut share = Vec::new();
        for (index, bucket) in store.trainable().enumerate() {
            let values = store.collect(bucket, &bucket.updated()?.to_read()?)?;
            let flats = if with_moments && bucket.own().len() < bucket.elements() {
                Some([
                    self.gathered(index, bucket, MomentKind::First)?,
                    self.gathered(index, bucket, MomentKind::Second)?,
                ])
            } else {
                None
            };
            if self.saved_by(index) != world.rank() {
                continue;
            }
            let moment = |entry: &BucketEntry, moment: MomentKind| match &flats {
                Some(flats) => Ok(flats[moment as usize].of(entry)),
                None => self.own_moment(index, entry, moment),
            };
            for entry in &bucket.entries {
                let moments = || {
                    Ok::<_, Error>([moment(entry, MomentKind::First)?, moment(entry, MomentKind::Second)?])
                };
                share.push(SnapshotTensor {
                    name: entry.desc.name.clone(),
                    shape: entry.desc.shape.clone(),
                    // Of each tensor one copy: a second one of everything would not be in the plan.
                    values: values.narrow(0, entry.start, entry.desc.elements())?.to_vec1::<f32>()?,
                    moments: with_moments.then(moments).transpose()?,
                });
            }
        }
        Ok(share)
    }

    /// The pieces of a bucket, with their runs of it.
    fn pieces_of(&self, bucket: usize) -> impl Iterator<Item = (&Moments, &Range<usize>)> {
        // Places are in the order of buckets.
        let run = self.slices.partition_point(|place| place.bucket < bucket)
            ..self.slices.partition_point(|place| place.bucket <= bucket);
        let groups = self.optimizer.moments()[run.clone()].iter().zip(&self.slices[run]);
        groups.map(|(moments, place)| (moments, &place.range))
    }

    /// A moment of an entry of a bucket that this rank updates whole.
    fn own_moment(&self, index: usize, entry: &BucketEntry, moment: MomentKind) -> Result<SavedMoment> {
        let mut groups = self.pieces_of(index);
        let group = groups.find(|(_, range)| range.start <= entry.start && entry.range().end <= range.end);
        let (moments, range) =
            group.ok_or_else(|| Error::internal(format!("no moments for {}", entry.desc.name)))?;
        Ok(match moments {
            Moments::F32(both) => {
                let part =
                    both[moment as usize].narrow(0, entry.start - range.start, entry.desc.elements())?;
                SavedMoment::F32(part.to_vec1()?)
            }
            Moments::Int8(both) => {
                let Int8Moment { codes, absmax } = &both[moment as usize];
                SavedMoment::Int8 { codes: codes.to_vec1()?, absmax: absmax.to_vec1()? }
            }
        })
    }

    /// A moment of a whole bucket, of which each rank updates a part. All ranks call it.
    fn gathered(&self, index: usize, bucket: &Bucket, moment: MomentKind) -> Result<FlatValues> {
        let own = bucket.own();
        let mut flat = FlatValues { values: vec![0.0; own.len()], codes: Vec::new(), absmax: Vec::new() };
        for (moments, range) in self.pieces_of(index) {
            let start = range.start - own.start;
            match moments {
                Moments::F32(both) => {
                    let values = both[moment as usize].to_vec1::<f32>()?;
                    flat.values[start..start + range.len()].copy_from_slice(&values);
                }
                Moments::Int8(both) => {
                    let Int8Moment { codes, absmax } = &both[moment as usize];
                    flat.codes.resize(own.len(), 0);
                    flat.absmax.resize(own.len() / STATE_BLOCK, 0.0);
                    flat.codes[start..start + range.len()].copy_from_slice(&codes.to_vec1::<u8>()?);
                    let absmax = absmax.to_vec1::<f32>()?;
                    flat.absmax[start / STATE_BLOCK..][..absmax.len()].copy_from_slice(&absmax);
                }
            }
        }
        if bucket.entries.iter().any(|entry| self.is_int8(entry)) {
            // Also where this rank has none of them: all ranks gather alike.
            flat.codes.resize(own.len(), 0);
            flat.absmax.resize(own.len() / STATE_BLOCK, 0.0);
        }
        let store = &self.engine.store;
        let host = candle_core::Device::Cpu;
        let whole = |own: Tensor| store.collect(bucket, &own);
        let floats = |own: &[f32]| -> Result<Vec<f32>> {
            Ok(whole(Tensor::from_slice(own, own.len(), &host)?)?.to_vec1()?)
        };
        let mut all = FlatValues { values: floats(&flat.values)?, codes: Vec::new(), absmax: Vec::new() };
        if !flat.codes.is_empty() {
            all.codes = whole(Tensor::from_slice(&flat.codes, flat.codes.len(), &host)?)?.to_vec1()?;
            all.absmax = floats(&flat.absmax)?;
        }
        Ok(all)
    }

    fn is_int8(&self, entry: &BucketEntry) -> bool {
        self.options.optimizer.state == StateDtype::Int8 && entry.desc.elements() >= INT8_MIN_ELEMENTS
    }

    /// Goes on from a checkpoint whose weights the engine was loaded with: takes over moments and count of updates.
    pub fn restore(&mut self, saved: &SavedCheckpoint) -> Result<()> {
        for (index, bucket) in self.engine.store.trainable().enumerate() {
            for (moments, range) in self.pieces_of(index) {
                let inside =
                    |entry: &&BucketEntry| entry.start < range.end && range.start < entry.range().end;
                for entry in bucket.entries.iter().filter(inside) {
                    for moment in [MomentKind::First, MomentKind::Second] {
                        restore(moments, range, entry, moment, saved)?;
                    }
                }
            }
        }
        self.optimizer.resume(saved.state.step);
        Ok(())
    }
}

impl FlatValues {
    fn of(&self, entry: &BucketEntry) -> SavedMoment {
        let range = entry.range();
        if self.codes.is_empty() || entry.desc.elements() < INT8_MIN_ELEMENTS {
            return SavedMoment::F32(self.values[range].to_vec());
        }
        let blocks = range.start / STATE_BLOCK..range.end.div_ceil(STATE_BLOCK);
        SavedMoment::Int8 { codes: self.codes[range].to_vec(), absmax: self.absmax[blocks].to_vec() }
    }
}

/// Takes the part of an entry's moment that lies in the run `range`, whose moments these are.
fn restore(
    moments: &Moments,
    range: &Range<usize>,
    entry: &BucketEntry,
    moment: MomentKind,
    saved: &SavedCheckpoint,
) -> Result<()> {
    let name = &entry.desc.name;
    let (from, to) = (range.start.max(entry.start), range.end.min(entry.range().end));
    // Counted in the entry, which the checkpoint holds whole.
    let part = from - entry.start..to - entry.start;
    match moments {
        Moments::F32(both) => {
            let mut values = vec![0f32; entry.desc.elements()];
            saved.moment(name, moment, &mut values)?;
            let tensor = both[moment as usize].narrow(0, from - range.start, part.len())?;
            copy_into(&tensor, &Tensor::from_slice(&values[part], tensor.shape(), tensor.device())?)
        }
        Moments::Int8(both) => {
            let Int8Moment { codes, absmax } = &both[moment as usize];
            let mut scales = vec![0f32; entry.desc.elements().div_ceil(STATE_BLOCK)];
            let found = &saved.int8_moment(name, moment, &mut scales)?[part.clone()];
            codes.slice_set(&Tensor::from_slice(found, codes.shape(), codes.device())?, 0, 0)?;
            let scales = &scales[part.start / STATE_BLOCK..part.end.div_ceil(STATE_BLOCK)];
            copy_into(absmax, &Tensor::from_slice(scales, absmax.shape(), absmax.device())?)
        }
    }
}
