//! A flat buffer of parameters: tensors are aligned views into it, so that a gather, a load or an update handles one
//! contiguous piece of memory.
//!
//! A rank keeps all of a bucket or its shard, one of N equal runs: for the values that are computed with, for the
//! gradients, for what the optimizer updates ([`super::placement`]).

use std::ops::Range;

use candle_core::{DType, Device, Tensor, WithDType};
use half::bf16;

use super::placement::{Extent, Keep};
use crate::error::Result;
use crate::model::Segment;
use crate::ops::reduce::copy_into;
use crate::quant::{BlocksMut, Format};

/// One parameter before it has a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Name: the checkpoint's; for adapters PEFT's without its prefix, such as `<module>.lora_A.weight`.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// The segment that uses it.
    pub segment: Segment,
    /// Weight decay applies.
    pub decay: bool,
    /// It trains.
    pub trainable: bool,
    /// It is an adapter matrix: f32 whatever the model's dtype is.
    pub adapter: bool,
    /// It is kept quantized, in this format.
    pub format: Option<Format>,
    /// It is kept in this dtype instead of the one that is computed with.
    pub kept_as: Option<DType>,
}

impl Slot {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Memory that a slot's value goes to.
#[derive(Debug)]
pub enum Fill<'a> {
    /// As f32.
    F32(&'a mut [f32]),
    /// As bf16.
    Bf16(&'a mut [bf16]),
    /// As codes and scales.
    Blocks(BlocksMut<'a>),
}

/// Where a slot lies in its bucket.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What lies there.
    pub slot: Slot,
    /// First element.
    pub start: usize,
}

impl Entry {
    /// Its elements in the bucket.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.slot.elements()
    }
}

/// Starts of entries and shards are multiples of this many elements: the blocks of 8-bit moments, counted within a
/// tensor, never straddle two ranks.
pub(super) const ALIGN: usize = 256;

/// Slots of one segment that are all frozen or all trainable, in one buffer.
#[derive(Debug)]
pub struct Bucket {
    /// The segment that uses it.
    pub segment: Segment,
    /// The layout, ascending.
    pub entries: Vec<Entry>,
    /// Elements of the whole, padding included.
    pub(super) len: usize,
    pub(super) keep: Keep,
    /// What is computed with: all of it or this rank's shard.
    pub(super) value: Tensor,
    /// The f32 values that the optimizer updates, when `value` is not f32; of `own`.
    master: Option<Tensor>,
    /// Gradients, f32; none for frozen buckets. All of them or the shard's.
    pub(super) grad: Option<Tensor>,
    /// The run that this rank updates: all, or its shard.
    pub(super) own: Range<usize>,
}

/// How buckets are made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Making<'a> {
    pub(super) keep: Keep,
    /// This rank and their number, among those that share one copy.
    pub(super) place: (usize, usize),
    pub(super) dtype: DType,
    pub(super) device: &'a Device,
    /// Fill every entry, although the rank keeps only a part.
    pub(super) fill_all: bool,
}

impl Making<'_> {
    /// The run of `len` elements that this rank keeps.
    pub(super) fn part(&self, extent: Extent, len: usize) -> Range<usize> {
        let (rank, size) = self.place;
        match extent {
            Extent::Whole => 0..len,
            Extent::Shard => rank * (len / size)..(rank + 1) * (len / size),
        }
    }

    /// Whether an entry has to be filled by this rank, which keeps `part`.
    pub(super) fn wants(&self, entry: &Range<usize>, part: &Range<usize>) -> bool {
        self.fill_all || (entry.start < part.end && part.start < entry.end)
    }
}

impl Bucket {
    /// Lays out `slots` and fills, one at a time, those of which this rank keeps something.
    pub(super) fn new(
        slots: Vec<Slot>,
        making: Making<'_>,
        fill: &mut dyn FnMut(&Slot, Fill<'_>) -> Result<()>,
    ) -> Result<Self> {
        let Making { keep, device, dtype, .. } = making;
        let (segment, trainable) = (slots[0].segment, slots.iter().any(|slot| slot.trainable));
        let (entries, len) = layout(slots, making.place.1 * ALIGN);
        let (kept, own) = (making.part(keep.values, len), making.part(keep.update, len));
        let load = Loading { entries: &entries, len, kept: &kept, making };
        // Trainable values are read in f32 whatever they are computed in: that is the master.
        let loaded = if trainable { DType::F32 } else { dtype };
        let value = match loaded {
            DType::BF16 => load.filled(fill, |values: &mut [bf16]| Fill::Bf16(values))?,
            _ => load.filled(fill, |values: &mut [f32]| Fill::F32(values))?,
        };
        let value = if device.is_cpu() { value } else { value.to_device(device)? };
        let (value, master) = if loaded == dtype {
            (value, None)
        } else {
            let master = value.narrow(0, own.start - kept.start, own.len())?.force_contiguous()?;
            (value.to_dtype(dtype)?, Some(master))
        };
        let part = making.part(keep.gradients, len).len();
        let grad = trainable.then(|| Tensor::zeros(part, DType::F32, device)).transpose()?;
        Ok(Bucket { segment, entries, len, keep, value, master, grad, own })
    }

    /// What the optimizer updates, f32: [`Bucket::own`]'s part of the master, or of the value when that is f32.
    pub fn updated(&self) -> Result<Tensor> {
        match &self.master {
            Some(master) => Ok(master.clone()),
            None => self.own_value(),
        }
    }

    /// The gradient of what the optimizer updates; none in a frozen bucket.
    pub fn gradient(&self) -> Result<Option<Tensor>> {
        let own = |grad: &Tensor| match self.keep.gradients {
            Extent::Whole => grad.narrow(0, self.own.start, self.own.len()),
            Extent::Shard => Ok(grad.clone()),
        };
        Ok(self.grad.as_ref().map(own).transpose()?)
    }

    /// This rank's part of the values that are computed with.
    pub(super) fn own_value(&self) -> Result<Tensor> {
        match self.keep.values {
            Extent::Whole => Ok(self.value.narrow(0, self.own.start, self.own.len())?),
            Extent::Shard => Ok(self.value.clone()),
        }
    }

    /// Elements of the whole, padding included.
    pub fn elements(&self) -> usize {
        self.len
    }

    /// The run of the bucket that this rank updates.
    pub fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// Brings this rank's part of `value` in line with the master after an update.
    pub(super) fn refresh(&self) -> Result<()> {
        match &self.master {
            Some(master) => copy_into(&self.own_value()?, master),
            None => Ok(()),
        }
    }
}

/// An entry's view of a flat tensor of the whole bucket.
pub(super) fn view(flat: &Tensor, entry: &Entry) -> Result<Tensor> {
    let part = flat.narrow(0, entry.start, entry.slot.elements())?;
    Ok(part.reshape(entry.slot.shape.as_slice())?)
}

/// Places for `slots`, and the length of the whole, a multiple of `unit`.
fn layout(slots: Vec<Slot>, unit: usize) -> (Vec<Entry>, usize) {
    let mut start = 0;
    let entries = slots
        .into_iter()
        .map(|slot| {
            let entry = Entry { start, slot };
            start += entry.slot.elements().next_multiple_of(ALIGN);
            entry
        })
        .collect();
    (entries, start.next_multiple_of(unit))
}

struct Loading<'a> {
    entries: &'a [Entry],
    len: usize,
    /// What this rank keeps.
    kept: &'a Range<usize>,
    making: Making<'a>,
}

impl Loading<'_> {
    fn filled<T: WithDType + Default>(
        &self,
        fill: &mut dyn FnMut(&Slot, Fill<'_>) -> Result<()>,
        wrap: fn(&mut [T]) -> Fill<'_>,
    ) -> Result<Tensor> {
        // Memory that is never touched costs none: of a whole that is mostly another rank's, little is.
        let mut values = vec![T::default(); self.len];
        for entry in self.entries.iter().filter(|entry| self.making.wants(&entry.range(), self.kept)) {
            fill(&entry.slot, wrap(&mut values[entry.range()]))?;
        }
        if self.kept.len() < self.len {
            values = values[self.kept.clone()].to_vec();
        }
        Ok(Tensor::from_vec(values, self.kept.len(), &Device::Cpu)?)
    }
}
