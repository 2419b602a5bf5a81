//! A flat buffer of parameters: tensors are aligned views into it, so that a gather, a load or an update handles one
//! contiguous piece of memory.

use candle_core::{DType, Device, Tensor};
use half::bf16;

use crate::error::Result;
use crate::model::{Param, Segment};
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

/// Elements between the starts of two entries are padded to a multiple of this: 256 bytes of f32.
const ALIGN: usize = 64;

/// Slots of one segment that are all frozen or all trainable, in one buffer.
#[derive(Debug)]
pub struct Bucket {
    /// The values in the dtype that is computed with.
    pub value: Tensor,
    /// The f32 values that the optimizer updates, when `value` is not f32.
    pub master: Option<Tensor>,
    /// Gradients, f32; none for frozen buckets.
    pub grad: Option<Tensor>,
    /// The layout, ascending.
    pub entries: Vec<Entry>,
}

impl Bucket {
    /// Lays out `slots` and fills them one at a time.
    pub fn new(
        slots: Vec<Slot>,
        dtype: DType,
        device: &Device,
        fill: &mut dyn FnMut(&Slot, Fill<'_>) -> Result<()>,
    ) -> Result<Self> {
        let trainable = slots.iter().any(|slot| slot.trainable);
        let (entries, len) = layout(slots);
        // Trainable values are read in f32 whatever they are computed in: that is the master.
        let loaded = if trainable { DType::F32 } else { dtype };
        let full = match loaded {
            DType::BF16 => filled(&entries, len, fill, |values: &mut [bf16]| Fill::Bf16(values))?,
            _ => filled(&entries, len, fill, |values: &mut [f32]| Fill::F32(values))?,
        };
        let full = if device.is_cpu() { full } else { full.to_device(device)? };
        let (value, master) =
            if loaded == dtype { (full, None) } else { (full.to_dtype(dtype)?, Some(full)) };
        let grad = trainable.then(|| Tensor::zeros(len, DType::F32, device)).transpose()?;
        Ok(Bucket { value, master, grad, entries })
    }

    /// The view of an entry for use in a segment.
    pub fn param(&self, entry: &Entry) -> Result<Param> {
        Ok(Param {
            value: view(&self.value, entry)?,
            grad: self.grad.as_ref().map(|grad| view(grad, entry)).transpose()?,
        })
    }

    /// What the optimizer updates: the master, or the value itself when that is f32.
    pub fn updated(&self) -> &Tensor {
        self.master.as_ref().unwrap_or(&self.value)
    }

    /// An entry of [`Bucket::updated`], in f32.
    pub fn updated_entry(&self, entry: &Entry) -> Result<Tensor> {
        view(self.updated(), entry)
    }

    /// Brings `value` in line with the master after an update.
    pub fn refresh(&self) -> Result<()> {
        match &self.master {
            Some(master) => copy_into(&self.value, master),
            None => Ok(()),
        }
    }
}

/// An entry's view of a flat tensor of the bucket.
pub(super) fn view(flat: &Tensor, entry: &Entry) -> Result<Tensor> {
    let part = flat.narrow(0, entry.start, entry.slot.elements())?;
    Ok(part.reshape(entry.slot.shape.as_slice())?)
}

fn layout(slots: Vec<Slot>) -> (Vec<Entry>, usize) {
    let mut start = 0;
    let entries = slots
        .into_iter()
        .map(|slot| {
            let entry = Entry { start, slot };
            start += entry.slot.elements().next_multiple_of(ALIGN);
            entry
        })
        .collect();
    (entries, start)
}

fn filled<T: candle_core::WithDType + Default>(
    entries: &[Entry],
    len: usize,
    fill: &mut dyn FnMut(&Slot, Fill<'_>) -> Result<()>,
    wrap: fn(&mut [T]) -> Fill<'_>,
) -> Result<Tensor> {
    let mut values = vec![T::default(); len];
    for entry in entries {
        fill(&entry.slot, wrap(&mut values[entry.start..entry.start + entry.slot.elements()]))?;
    }
    Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
}
