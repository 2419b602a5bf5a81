//! Snapshots of a trainer for checkpoints and outputs: whole tensors by name, independent of the
//! sharding.
//!
//! The ranks gather one bucket at a time and save the buckets in turn, or rank 0 saves all
//! ([`SaveAssignment`]). Each rank holds, and later writes, its share of whole tensors. So a
//! checkpoint does not depend on the strategy or the number of ranks that made it.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, WithDType};

use super::{SaveAssignment, Trainer};
use crate::checkpoint::{SavedCheckpoint, SavedState, SavedValues, SnapshotTensor, WeightValues};
use crate::error::{Error, Result};
use crate::ops::adamw_int8::{Int8State, STATE_BLOCK};
use crate::optim::{StateTensor, StateValues};
use crate::parallel::{Bucket, BucketEntry, ParamDesc};
use crate::recipe::enums::StateDtype;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_host_vec;
use crate::runtime::param_storage::copy_across;
use crate::runtime::thread_pool::release_freed_memory;

/// One tensor of the optimizer's state for a whole bucket.
struct FlatValues {
    values: Vec<f32>,
    /// Codes of the entries stored in 8 bits; empty if no entry is.
    codes: Vec<u8>,
    absmax: Vec<f32>,
}

impl Trainer {
    /// Returns the saved tensors by the rank that saves them, each with its global shape; the
    /// result is the same on all ranks.
    pub fn shares(&self) -> Vec<Vec<ParamDesc>> {
        let mut shares = vec![Vec::new(); self.engine.store.mesh().world().size()];
        for (index, bucket) in self.engine.store.saved().enumerate() {
            let descs = bucket.entries.iter().map(|entry| entry.desc.clone());
            shares[self.saved_by(index)].extend(descs);
        }
        shares
    }

    /// Returns the rank that saves bucket `index`.
    fn saved_by(&self, index: usize) -> usize {
        match self.options.save_assignment {
            SaveAssignment::Rank0 => 0,
            SaveAssignment::RoundRobin => index % self.engine.store.mesh().world().size(),
        }
    }

    /// Returns this rank's share of the saved tensors as the optimizer updates them. With
    /// `with_state`, the optimizer's state is included. All ranks call it.
    ///
    /// # Errors
    /// An allocation, a copy from the device or a peer failed.
    pub fn snapshot(&self, with_state: bool) -> Result<Vec<SnapshotTensor>> {
        // Releases memory that the step freed, so that the copies can use it.
        release_freed_memory();
        let store = &self.engine.store;
        let world = store.mesh().world();
        let state_tensors = if with_state { self.optimizer.state_layout().tensors } else { &[] };
        let mut share = Vec::new();
        for (index, bucket) in store.saved().enumerate() {
            let values = store.collect(bucket, &bucket.updated()?.to_read()?)?;
            let mut flats = Vec::new();
            let of_bucket = if bucket.trains() { state_tensors } else { &[] };
            if bucket.own().len() < bucket.elements() {
                for position in 0..of_bucket.len() {
                    flats.push(self.gathered(index, bucket, position)?);
                }
            }
            if self.saved_by(index) != world.rank() {
                continue;
            }
            let state = |entry: &BucketEntry| {
                let one = |(position, tensor): (usize, &StateTensor)| {
                    let values = match flats.get(position) {
                        Some(flat) => flat.of(entry, self.dtype_of(position, entry)),
                        None => self.own_state(index, entry, position)?,
                    };
                    Ok(SavedState { name: tensor.name, values })
                };
                of_bucket.iter().enumerate().map(one).collect::<Result<Vec<_>>>()
            };
            for entry in &bucket.entries {
                share.push(SnapshotTensor {
                    name: entry.desc.name.clone(),
                    shape: entry.local.whole_shape()?.to_vec(),
                    // One copy of each tensor: the memory plan does not count a second one.
                    values: saved_values(&values.narrow(0, entry.start, entry.range().len())?)?,
                    state: state(entry)?,
                });
            }
        }
        Ok(share)
    }

    /// Returns the optimizer's state of each slice of a bucket, with the slice's range in the
    /// bucket.
    fn pieces_of(&self, bucket: usize) -> impl Iterator<Item = (&[StateValues], &Range<usize>)> {
        // Slices are in the order of buckets.
        let run = self.slices.partition_point(|slice| slice.bucket < bucket)
            ..self.slices.partition_point(|slice| slice.bucket <= bucket);
        let groups = self.optimizer.states()[run.clone()].iter().zip(&self.slices[run]);
        groups.map(|(state, slice)| (state.as_slice(), &slice.range))
    }

    /// Returns state tensor `position` of an entry, in a bucket that this rank updates as a whole.
    fn own_state(&self, index: usize, entry: &BucketEntry, position: usize) -> Result<SavedValues> {
        let mut groups = self.pieces_of(index);
        let group = groups.find(|(_, range)| range.start <= entry.start && entry.range().end <= range.end);
        let (state, range) =
            group.ok_or_else(|| Error::internal(format!("no optimizer state for {}", entry.desc.name)))?;
        Ok(match &state[position] {
            StateValues::F32(values) => {
                let part = values.narrow(0, entry.start - range.start, entry.range().len())?;
                SavedValues::F32(to_host_vec(&part)?)
            }
            StateValues::Int8(Int8State { codes, absmax }) => {
                SavedValues::Int8 { codes: to_host_vec(codes)?, absmax: to_host_vec(absmax)? }
            }
        })
    }

    /// Gathers state tensor `position` of a whole bucket, of which each rank updates a part. All
    /// ranks call it.
    fn gathered(&self, index: usize, bucket: &Bucket, position: usize) -> Result<FlatValues> {
        let own = bucket.own();
        let mut flat = FlatValues { values: vec![0.0; own.len()], codes: Vec::new(), absmax: Vec::new() };
        if bucket.entries.iter().any(|entry| self.dtype_of(position, entry) == StateDtype::Int8) {
            // Also if this rank has no such entry: all ranks run the same gathers.
            flat.codes.resize(own.len(), 0);
            flat.absmax.resize(own.len() / STATE_BLOCK, 0.0);
        }
        for (state, range) in self.pieces_of(index) {
            let start = range.start - own.start;
            match &state[position] {
                StateValues::F32(values) => {
                    let values = to_host_vec::<f32>(values)?;
                    flat.values[start..start + range.len()].copy_from_slice(&values);
                }
                StateValues::Int8(Int8State { codes, absmax }) => {
                    flat.codes[start..start + range.len()].copy_from_slice(&to_host_vec::<u8>(codes)?);
                    let absmax = to_host_vec::<f32>(absmax)?;
                    flat.absmax[start / STATE_BLOCK..][..absmax.len()].copy_from_slice(&absmax);
                }
            }
        }
        Ok(FlatValues {
            values: self.whole(bucket, &flat.values)?,
            codes: self.whole(bucket, &flat.codes)?,
            absmax: self.whole(bucket, &flat.absmax)?,
        })
    }

    /// Gathers the parts `own` of all ranks. Nothing is gathered of an empty part.
    fn whole<T: WithDType>(&self, bucket: &Bucket, own: &[T]) -> Result<Vec<T>> {
        if own.is_empty() {
            return Ok(Vec::new());
        }
        let own = Tensor::from_slice(own, own.len(), &Device::Cpu)?;
        Ok(self.engine.store.collect(bucket, &own)?.to_vec1()?)
    }

    /// Returns the dtype of state tensor `position` of an entry. The size of the whole parameter
    /// decides, so that checkpoints have the same tensors on every mesh.
    fn dtype_of(&self, position: usize, entry: &BucketEntry) -> StateDtype {
        let layout = self.optimizer.state_layout();
        layout.dtype_of(&layout.tensors[position], entry.desc.global_elements())
    }

    /// Restores the optimizer's state and its number of updates from a checkpoint whose weights the
    /// engine has loaded.
    ///
    /// # Errors
    /// A tensor of the state is missing in the checkpoint or has another size, or a file cannot be
    /// read.
    pub fn restore(&mut self, saved: &SavedCheckpoint) -> Result<()> {
        let state_tensors = self.optimizer.state_layout().tensors;
        for (index, bucket) in self.engine.store.trainable().enumerate() {
            for (state, range) in self.pieces_of(index) {
                let inside =
                    |entry: &&BucketEntry| entry.start < range.end && range.start < entry.range().end;
                for entry in bucket.entries.iter().filter(inside) {
                    for (values, tensor) in state.iter().zip(state_tensors) {
                        restore(values, range, entry, tensor.name, saved)?;
                    }
                }
            }
        }
        self.optimizer.resume(saved.state.step);
        Ok(())
    }
}

impl FlatValues {
    /// Returns the values of an entry, which is stored in `dtype`.
    fn of(&self, entry: &BucketEntry, dtype: StateDtype) -> SavedValues {
        let range = entry.range();
        if dtype == StateDtype::F32 {
            return SavedValues::F32(self.values[range].to_vec());
        }
        let blocks = range.start / STATE_BLOCK..range.end.div_ceil(STATE_BLOCK);
        SavedValues::Int8 { codes: self.codes[range].to_vec(), absmax: self.absmax[blocks].to_vec() }
    }
}

/// Copies the part of an entry's state tensor `name` within `range` from the checkpoint to
/// `values`, the state of that range.
fn restore(
    values: &StateValues,
    range: &Range<usize>,
    entry: &BucketEntry,
    name: &str,
    saved: &SavedCheckpoint,
) -> Result<()> {
    let param = &entry.desc.name;
    let (from, to) = (range.start.max(entry.start), range.end.min(entry.range().end));
    // Relative to the local part of the parameter, which the checkpoint has as a whole.
    let part = from - entry.start..to - entry.start;
    match values {
        StateValues::F32(values) => {
            let mut saved_values = vec![0f32; entry.desc.global_elements()];
            saved.optimizer_state(param, name, &mut saved_values)?;
            bring(
                entry.local.take(&saved_values, part.clone()),
                &values.narrow(0, from - range.start, part.len())?,
            )
        }
        StateValues::Int8(Int8State { codes, absmax }) => {
            // Blocks are counted within the whole parameter.
            entry.local.whole_shape()?;
            let mut scales = vec![0f32; entry.desc.global_elements().div_ceil(STATE_BLOCK)];
            let saved_codes = saved.optimizer_codes(param, name, &mut scales)?;
            bring(saved_codes[part.clone()].to_vec(), codes)?;
            bring(scales[part.start / STATE_BLOCK..part.end.div_ceil(STATE_BLOCK)].to_vec(), absmax)
        }
    }
}

/// Copies the values of a parameter, f32 or bf16, to the host.
fn saved_values(values: &Tensor) -> Result<WeightValues> {
    Ok(match values.dtype() {
        DType::BF16 => WeightValues::Bf16(to_host_vec(values)?),
        _ => WeightValues::F32(to_host_vec(values)?),
    })
}

/// Copies `from` to the flat tensor `to` of the same length, on any device.
fn bring<T: WithDType>(from: Vec<T>, to: &TensorMut) -> Result<()> {
    let len = from.len();
    copy_across(&Tensor::from_vec(from, len, &Device::Cpu)?, to)
}
