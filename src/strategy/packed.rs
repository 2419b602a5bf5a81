//! A flat buffer of quantized matrices: one run of bytes (codes, and the codes of double-quantized scales) and one of
//! f32 scales, so that a quantized block is loaded, moved and sharded as the two pieces of memory it is, never cast.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::bucket::{Making, Slot};
use super::offload::Filling;
use crate::error::{Error, Result};
use crate::model::Segment;
use crate::ops::home::Home;
use crate::ops::mapped::MappedFile;
use crate::ops::weight::{BlockScales, Quantized};
use crate::quant::{BlocksMut, Format};

/// Where the parts of a slot lie.
#[derive(Debug, Clone)]
struct Entry {
    slot: Slot,
    format: Format,
    codes: Range<usize>,
    /// Codes of the scales; empty without double quantization.
    nested: Range<usize>,
    scales: Range<usize>,
    /// The mean of the scales; known to the rank that filled the entry until [`Packed::offsets`] are shared.
    offset: f32,
}

/// Quantized slots of one segment.
#[derive(Debug)]
pub(super) struct Packed {
    /// The segment that uses it.
    pub(super) segment: Segment,
    /// All bytes, or this rank's shard of them.
    pub(super) bytes: Home,
    /// All scales, or this rank's shard of them.
    pub(super) floats: Home,
    /// Bytes and scales of the whole, padding included.
    pub(super) len: [usize; 2],
    /// Both are not on the device.
    pub(super) away: bool,
    entries: Vec<Entry>,
}

/// Starts of parts are multiples of this many elements.
const ALIGN: usize = 64;

impl Packed {
    /// Lays out `slots`, which all have a format, and fills, one at a time, those of which this rank keeps something.
    pub(super) fn new(
        slots: Vec<Slot>,
        making: Making<'_>,
        fill: &mut dyn FnMut(&Slot, BlocksMut<'_>) -> Result<()>,
    ) -> Result<Self> {
        let segment = slots[0].segment;
        let (mut entries, len) = layout(slots, making.place.1 * ALIGN)?;
        let [kept, floats_kept] = len.map(|len| making.part(making.keep.values, len));
        let mut bytes = Filling::<u8>::new(kept.clone(), making.values)?;
        let mut floats = Filling::<f32>::new(floats_kept.clone(), making.values)?;
        for entry in &mut entries {
            let parts = [(&entry.codes, &kept), (&entry.nested, &kept), (&entry.scales, &floats_kept)];
            if !parts.iter().any(|(range, kept)| making.wants(range, kept)) {
                continue;
            }
            let (format, offset) = (entry.format, &mut entry.offset);
            if let (Some([codes, nested]), Some([scales])) =
                (bytes.in_place([&entry.codes, &entry.nested]), floats.in_place([&entry.scales]))
            {
                fill(&entry.slot, BlocksMut { format, codes, nested, scales, offset })?;
                continue;
            }
            let (mut codes, mut nested) = (vec![0; entry.codes.len()], vec![0; entry.nested.len()]);
            let mut scales = vec![0.0; entry.scales.len()];
            let parts =
                BlocksMut { format, codes: &mut codes, nested: &mut nested, scales: &mut scales, offset };
            fill(&entry.slot, parts)?;
            for (range, values) in [(&entry.codes, &codes), (&entry.nested, &nested)] {
                bytes.fill(range.clone(), |to| copy(to, values))?;
            }
            floats.fill(entry.scales.clone(), |to| copy(to, &scales))?;
            if !kept.contains(&entry.codes.start) {
                // Another rank answers for it.
                entry.offset = 0.0;
            }
        }
        let [bytes, floats] =
            [making.values.settle(bytes.finish()?)?, making.values.settle(floats.finish()?)?];
        Ok(Packed { segment, bytes, floats, len, away: making.values.is_away(), entries })
    }

    /// Bytes that both runs of `slots` take up in a file.
    pub(super) fn room(slots: &[Slot], making: &Making<'_>) -> Result<usize> {
        let (_, len) = layout(slots.to_vec(), making.place.1 * ALIGN)?;
        let [bytes, floats] = len.map(|len| making.part(making.keep.values, len).len());
        Ok(MappedFile::room(bytes, DType::U8) + MappedFile::room(floats, DType::F32))
    }

    /// This rank keeps less than all.
    pub(super) fn sharded(&self) -> bool {
        self.bytes.elements() < self.len[0]
    }

    /// The mean of each entry's scales, 0 where another rank of the shard's group knows it.
    pub(super) fn offsets(&mut self) -> impl Iterator<Item = &mut f32> {
        self.entries.iter_mut().map(|entry| &mut entry.offset)
    }

    /// Names, in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.slot.name.as_str())
    }

    /// The view of an entry for use in a segment; `bytes` and `floats` are the whole.
    pub(super) fn quantized(&self, entry: usize, bytes: &Tensor, floats: &Tensor) -> Result<Quantized> {
        let entry = &self.entries[entry];
        let bytes = |range: &Range<usize>| bytes.narrow(0, range.start, range.len());
        let scales = floats.narrow(0, entry.scales.start, entry.scales.len())?;
        let shape = match entry.slot.shape[..] {
            [out, inputs] => (out, inputs),
            _ => return Err(Error::internal(format!("{} is not a matrix", entry.slot.name))),
        };
        Ok(Quantized {
            kind: entry.format.kind,
            block_size: entry.format.block_size,
            shape,
            codes: bytes(&entry.codes)?,
            scales: if entry.format.double_quant {
                BlockScales::Nested { codes: bytes(&entry.nested)?, absmax: scales, offset: entry.offset }
            } else {
                BlockScales::Plain(scales)
            },
        })
    }
}

fn copy<T: Copy>(to: &mut [T], values: &[T]) -> Result<()> {
    to.copy_from_slice(values);
    Ok(())
}

/// Places for `slots`, and the lengths of both runs, multiples of `unit`.
fn layout(slots: Vec<Slot>, unit: usize) -> Result<(Vec<Entry>, [usize; 2])> {
    let (mut n_bytes, mut n_floats) = (0, 0);
    let take = |at: &mut usize, len: usize| {
        let start = *at;
        *at += len.next_multiple_of(ALIGN);
        start..start + len
    };
    let mut entries = Vec::with_capacity(slots.len());
    for slot in slots {
        let format = slot.format.ok_or_else(|| Error::internal(format!("{} is not quantized", slot.name)))?;
        let n = slot.elements();
        let nested = if format.double_quant { format.blocks(n) } else { 0 };
        entries.push(Entry {
            codes: take(&mut n_bytes, format.code_bytes(n)),
            nested: take(&mut n_bytes, nested),
            scales: take(&mut n_floats, format.scales(n)),
            offset: 0.0,
            format,
            slot,
        });
    }
    Ok((entries, [n_bytes.next_multiple_of(unit), n_floats.next_multiple_of(unit)]))
}
