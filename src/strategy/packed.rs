//! A flat buffer of quantized matrices: one run of bytes (codes, and the codes of double-quantized scales) and one of
//! f32 scales, so that a quantized block is loaded, moved and later sharded as the two pieces of memory it is.

use candle_core::{Device, Tensor};

use super::bucket::Slot;
use crate::error::{Error, Result};
use crate::ops::weight::{BlockScales, Quantized};
use crate::quant::{BlocksMut, Format};

/// Where the parts of a slot lie.
#[derive(Debug, Clone)]
struct Entry {
    slot: Slot,
    format: Format,
    codes: (usize, usize),
    /// Codes of the scales; empty without double quantization.
    nested: (usize, usize),
    scales: (usize, usize),
    offset: f32,
}

/// Quantized slots of one segment.
#[derive(Debug)]
pub struct Packed {
    bytes: Tensor,
    floats: Tensor,
    entries: Vec<Entry>,
}

/// Starts of parts are multiples of this many elements.
const ALIGN: usize = 64;

impl Packed {
    /// Lays out `slots`, which all have a format, and fills them one at a time.
    pub(super) fn new(
        slots: Vec<Slot>,
        device: &Device,
        fill: &mut dyn FnMut(&Slot, BlocksMut<'_>) -> Result<()>,
    ) -> Result<Self> {
        let (mut n_bytes, mut n_floats) = (0, 0);
        let take = |at: &mut usize, len: usize| {
            let start = *at;
            *at += len.next_multiple_of(ALIGN);
            (start, len)
        };
        let mut entries = Vec::with_capacity(slots.len());
        for slot in slots {
            let format =
                slot.format.ok_or_else(|| Error::internal(format!("{} is not quantized", slot.name)))?;
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
        let (mut bytes, mut floats) = (vec![0u8; n_bytes], vec![0f32; n_floats]);
        for entry in &mut entries {
            // Codes come before the codes of scales, see above.
            let (before, after) = bytes.split_at_mut(entry.nested.0);
            let parts = BlocksMut {
                format: entry.format,
                codes: &mut before[entry.codes.0..entry.codes.0 + entry.codes.1],
                nested: &mut after[..entry.nested.1],
                scales: &mut floats[entry.scales.0..entry.scales.0 + entry.scales.1],
                offset: &mut entry.offset,
            };
            fill(&entry.slot, parts)?;
        }
        let bytes = Tensor::from_vec(bytes, n_bytes, &Device::Cpu)?.to_device(device)?;
        let floats = Tensor::from_vec(floats, n_floats, &Device::Cpu)?.to_device(device)?;
        Ok(Packed { bytes, floats, entries })
    }

    /// Names, in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.slot.name.as_str())
    }

    /// The view of an entry for use in a segment.
    pub(super) fn quantized(&self, entry: usize) -> Result<Quantized> {
        let entry = &self.entries[entry];
        let bytes = |(start, len)| self.bytes.narrow(0, start, len);
        let scales = self.floats.narrow(0, entry.scales.0, entry.scales.1)?;
        let shape = match entry.slot.shape[..] {
            [out, inputs] => (out, inputs),
            _ => return Err(Error::internal(format!("{} is not a matrix", entry.slot.name))),
        };
        Ok(Quantized {
            kind: entry.format.kind,
            block_size: entry.format.block_size,
            shape,
            codes: bytes(entry.codes)?,
            scales: match entry.format.double_quant {
                false => BlockScales::Plain(scales),
                true => {
                    BlockScales::Nested { codes: bytes(entry.nested)?, absmax: scales, offset: entry.offset }
                }
            },
        })
    }
}
