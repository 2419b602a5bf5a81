//! A flat buffer of quantized matrices: one run of bytes (codes, and the codes of double-quantized scales) and one of
//! f32 scales, so that a quantized block is loaded, moved and sharded as the two pieces of memory it is, never cast.

use std::ops::Range;

use candle_core::{Device, Tensor};

use super::bucket::{Making, Slot};
use crate::error::{Error, Result};
use crate::model::Segment;
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
    pub(super) bytes: Tensor,
    /// All scales, or this rank's shard of them.
    pub(super) floats: Tensor,
    /// Bytes and scales of the whole, padding included.
    pub(super) len: [usize; 2],
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
        let (mut bytes, mut floats) = (vec![0u8; len[0]], vec![0f32; len[1]]);
        for entry in &mut entries {
            let parts = [(&entry.codes, &kept), (&entry.nested, &kept), (&entry.scales, &floats_kept)];
            if !parts.iter().any(|(range, kept)| making.wants(range, kept)) {
                continue;
            }
            // Codes come before the codes of scales.
            let (before, after) = bytes.split_at_mut(entry.nested.start);
            let parts = BlocksMut {
                format: entry.format,
                codes: &mut before[entry.codes.clone()],
                nested: &mut after[..entry.nested.len()],
                scales: &mut floats[entry.scales.clone()],
                offset: &mut entry.offset,
            };
            fill(&entry.slot, parts)?;
            if !kept.contains(&entry.codes.start) {
                // Another rank answers for it.
                entry.offset = 0.0;
            }
        }
        if kept.len() < len[0] {
            (bytes, floats) = (bytes[kept].to_vec(), floats[floats_kept].to_vec());
        }
        let (n_bytes, n_floats) = (bytes.len(), floats.len());
        let bytes = Tensor::from_vec(bytes, n_bytes, &Device::Cpu)?.to_device(making.device)?;
        let floats = Tensor::from_vec(floats, n_floats, &Device::Cpu)?.to_device(making.device)?;
        Ok(Packed { segment, bytes, floats, len, entries })
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
            scales: match entry.format.double_quant {
                false => BlockScales::Plain(scales),
                true => {
                    BlockScales::Nested { codes: bytes(&entry.nested)?, absmax: scales, offset: entry.offset }
                }
            },
        })
    }
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
